"""Engines that are killed, clients that hang up: some of scripts/faults, which has all of them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from pd.client import Client
from pd.cluster import Cluster
from pd.faults_clients import hang_up, restart_prefill_under_load
from pd.faults_deck import LONG, SHORT, TALK, Deck, load_answers
from pd.faults_pair import Clients, Pair
from pd.faults_processes import three_moments
from pd.faults_scene import RELEASE_S, Fault, Scene, run_fault
from pd.faults_stages import Place, pair_at
from pd.faults_tickets import late_ticket
from pd.tiny_model import ensure_tiny_model

pytestmark = pytest.mark.e2e

FEW = (replace(SHORT, count=110), replace(LONG, count=24), replace(TALK, count=2))
FAULTS = (
    Fault("late-ticket", "local", late_ticket),
    Fault("hang-up", "local", partial(hang_up, times=10)),
    Fault("load-kill-prefill", "local", partial(restart_prefill_under_load, load=80)),
)


@pytest.fixture(scope="module")
def deck(cluster: Cluster) -> Deck:
    def single() -> Client:
        assert cluster.single is not None
        return Client(cluster.single.url)

    return Deck(load_answers(ensure_tiny_model().with_suffix(".answers.json"), FEW, single))


@pytest.fixture(scope="module")
def pair(deck: Deck, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    del deck  # its answers first: two cores start no more at a time
    with pair_at("local", Place(ensure_tiny_model(), tmp_path_factory.mktemp("faults"))) as started:
        yield started


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_requests_end_right_and_nothing_leaks(pair: Pair, deck: Deck, fault: Fault) -> None:
    report = run_fault(fault, pair, deck)
    assert not report.verdict


def test_prefill_has_its_blocks_back_when_decode_was_killed(pair: Pair, deck: Deck) -> None:
    """The last one: decode stays dead."""
    with Clients(pair, patience_s=20.0) as clients:
        scene = Scene(pair, deck, clients)
        three_moments(scene)
        pair.decode.kill()
        scene.expect_free(clients.source, RELEASE_S)
        scene.collect()
    assert not scene.found
    assert {ended.kind for ended in scene.ended} <= {"right", "error"}
