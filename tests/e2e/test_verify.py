"""A fault in each load between real engines: detected, named, counted, recomputed."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.metrics import CORRUPT, FAILURES, LOADS, PREFIX, VERIFIED, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import connected, expect, started
from support.planting import FAULTS, expect_named, planted_spec

pytestmark = pytest.mark.e2e

DIGESTS = f"{PREFIX}digest_seconds_count"
LENGTHS = (5, 129, 300, 500)
LONG = (300, 500)  # several blocks
SEEDS = itertools.count(71_000)  # no prompt is in decode's cache before


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that names the fault to plant into each load."""
    return tmp_path_factory.mktemp("planted") / "plan"


@pytest.fixture(scope="module")
def planted(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
    plan: Path,
) -> Iterator[Pair]:
    """Decode verifies all, and plants the faults that its file names."""
    plan.write_text("")
    with (
        started(cluster, planted_spec(base_specs[1], plan)) as (decode,),
        connected(base_engines[0], decode) as pair,
    ):
        yield pair


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected_named_counted_and_recomputed(
    planted: Pair, plan: Path, single: Client, fault: str
) -> None:
    lengths = LENGTHS if fault == "byte" else LONG
    plan.write_text(fault)
    prompts = [random_prompt(length, seed=next(SEEDS)) for length in lengths]
    since, log_before = CountersSince(planted.to_decode), planted.decode.log_size()
    for prompt in prompts:
        assert planted.complete(prompt).tokens == single.complete(prompt).tokens
    count = len(prompts)
    expect(since, {CORRUPT: count, FAILURES: count, LOADS: 0, DIGESTS: count})
    assert len(expect_named(planted.decode, log_before)) == count


def test_loads_without_a_fault_are_verified(planted: Pair, plan: Path, single: Client) -> None:
    """The same engines, after all these failures."""
    plan.write_text("")
    prompt = random_prompt(300, seed=next(SEEDS))
    since = CountersSince(planted.to_decode)
    assert planted.complete(prompt).tokens == single.complete(prompt).tokens
    expect(since, {VERIFIED: 1, FAILURES: 0, DIGESTS: 1})
