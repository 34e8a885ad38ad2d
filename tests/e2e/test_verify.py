"""One wrong byte in each load between real engines: seen, named, counted, recomputed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.metrics import CORRUPT, FAILURES, LOADS, PREFIX, VERIFIED, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from suites.damage import planted_spec
from support.engines import connect, expect, started
from support.planted import expect_named

pytestmark = pytest.mark.e2e

DIGESTS, DIGEST_BYTES = f"{PREFIX}digests_total", f"{PREFIX}digest_bytes_total"
LENGTHS = (5, 129, 300, 500)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what is planted into each load."""
    return tmp_path_factory.mktemp("planted") / "plan"


@pytest.fixture(scope="module")
def planted_engine(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
    plan: Path,
) -> Iterator[Engine]:
    """A decode engine that verifies all, and spoils what its file says."""
    plan.write_text("")
    spec = replace(planted_spec(base_specs[1], plan), name="decode-planted")
    with started(cluster, spec) as (engine,):
        connect(base_engines[0], engine)
        yield engine


@pytest.fixture
def planted(base_engines: tuple[Engine, Engine, Engine], planted_engine: Engine) -> Iterator[Pair]:
    with Pair(base_engines[0], planted_engine) as pair:
        yield pair


def test_a_wrong_byte_is_detected_named_counted_and_recomputed(
    planted: Pair, plan: Path, single: Client
) -> None:
    plan.write_text("byte")
    prompts = [random_prompt(length, seed=71) for length in LENGTHS]
    since = CountersSince(planted.to_decode)
    for prompt in prompts:
        assert planted.complete(prompt).tokens == single.complete(prompt).tokens
    count = len(prompts)
    expect(since, {CORRUPT: count, FAILURES: count, LOADS: 0, DIGESTS: count})
    assert len(expect_named(planted.decode)) == count


def test_loads_without_a_fault_are_verified(planted: Pair, plan: Path, single: Client) -> None:
    """The same engines, after all these failures."""
    plan.write_text("")
    prompt = random_prompt(300, seed=72)
    since = CountersSince(planted.to_decode)
    assert planted.complete(prompt).tokens == single.complete(prompt).tokens
    nbytes = 299 * 4 * 4 * 64 * 2 * 4  # tokens, layers, heads, head size, K and V, float32
    expect(since, {VERIFIED: 1, FAILURES: 0, DIGESTS: 1, DIGEST_BYTES: nbytes})
