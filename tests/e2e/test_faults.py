"""Engines that are killed, clients that hang up: some of scripts/faults, which has all of them."""

from collections.abc import Iterator
from functools import partial

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from suites.faults.faults import (
    hang_up,
    late_ticket,
    restart_decode_under_load,
    restart_prefill_under_load,
    three_moments,
)
from suites.faults.questions import Questions
from suites.faults.scene import Fault, Scene, Stage, run_fault
from suites.faults.stages import local_specs
from support.engines import EVENT_S, started

pytestmark = pytest.mark.e2e

LOAD = 80  # requests, which 30 more follow
PATIENT = {"offer_ttl_s": 15, "lease_s": 15, "request_timeout_s": 40, "peer_timeout_s": 10}
FAULTS = [
    pytest.param(partial(restart_prefill_under_load, load=LOAD), id="load-kill-prefill"),
    pytest.param(partial(hang_up, times=10), id="hang-up", marks=pytest.mark.slow),
    pytest.param(late_ticket, id="late-ticket", marks=pytest.mark.slow),
    pytest.param(
        partial(restart_decode_under_load, load=LOAD),
        id="load-kill-decode",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module")
def questions(base_engines: tuple[Engine, Engine, Engine]) -> Iterator[Questions]:
    with Client(base_engines[2].url) as single:
        yield Questions(single)


@pytest.fixture(scope="module")
def stage(cluster: Cluster, base_engines: tuple[Engine, Engine, Engine]) -> Iterator[Stage]:
    del base_engines  # which are started before
    with started(cluster, *local_specs(ensure_tiny_model(), **PATIENT)) as (prefill, decode):
        yield Stage(prefill, decode, cluster.route([prefill], [decode]))


@pytest.mark.parametrize("happens", FAULTS)
def test_requests_end_right_and_nothing_leaks(
    stage: Stage, questions: Questions, happens: partial[None]
) -> None:
    fault = Fault("", "local", happens, deadline_s=EVENT_S)
    assert run_fault(fault, stage, questions).verdict.words == "ok"


def test_prefill_has_its_blocks_back_when_decode_was_killed(
    stage: Stage, questions: Questions
) -> None:
    """The last one: decode stays dead."""
    with Pair(*(stage.prefill, stage.decode), timeout_s=EVENT_S) as pair:
        scene = Scene(stage, questions, pair)
        three_moments(scene)
        stage.decode.kill()
        scene.expect_free(pair.to_prefill, EVENT_S)
        scene.collect()
        scene.close()
    assert scene.troubles == []
    assert {ended.kind for ended in scene.ended} <= {"right", "error"}
