"""A fault in each load between real engines: detected, named, counted, recomputed."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.client import Client, RefusedError
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
def planted(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
    plan: Path,
) -> Iterator[Pair]:
    """Decode verifies all, and plants the faults that its file names."""
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


@pytest.mark.slow
def test_a_fault_fails_the_request_if_the_operator_says_so(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
    plan: Path,
    single: Client,
) -> None:
    spec = planted_spec(base_specs[1], plan)
    config = {**spec.connector_config, "on_load_failure": "fail"}
    spec = replace(spec, name="decode-strict", connector_config=config)
    broken, sound = (random_prompt(300, seed=next(SEEDS)) for _ in range(2))
    with started(cluster, spec) as (strict,), connected(base_engines[0], strict) as pair:
        since = CountersSince(pair.to_decode)
        plan.write_text("byte")
        with pytest.raises(RefusedError, match="500"):
            pair.complete(broken)
        expect(since, {CORRUPT: 1, LOADS: 0})
        plan.write_text("")
        assert pair.complete(sound).tokens == single.complete(sound).tokens
        expect(since, {CORRUPT: 1, LOADS: 1})
