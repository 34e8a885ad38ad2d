"""Real engines of two releases, as while a fleet is upgraded: decode is a later one."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine
from harness.cluster.metrics import LOADS, OFFERS, OFFERS_UNCLAIMED, TICKETS_REFUSED, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from nixl_kv.protocol.ticket import WIRE_VERSION
from support.engines import PATIENT, expect, expect_free, started
from support.other_version import OTHER_VERSION, copy_package

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OFFER_TTL_S = 3.0


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    """Prefill, and a decode engine that finds another nixl_kv first."""
    package = copy_package(tmp_path)
    paths = filter(None, (str(package), os.environ.get("PYTHONPATH")))
    env = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    prefill, decode = pair_specs(
        ensure_tiny_model(),
        kv_cache_bytes=64 << 20,
        connector_config={**PATIENT, "offer_ttl_s": OFFER_TTL_S},
    )
    with (
        Cluster(tmp_path / "logs") as cluster,
        started(cluster, prefill, replace(decode, extra_env=env)) as engines,
    ):
        yield engines


def test_requests_are_computed_on_decode_and_prefills_blocks_come_free(
    engines: list[Engine],
) -> None:
    prefill, decode = engines
    prompts = [random_prompt(150 + number, seed=2600 + number) for number in range(3)]
    with Pair(prefill, decode) as pair, Client(prefill.url) as alone:
        on_prefill, on_decode = map(CountersSince, (pair.to_prefill, pair.to_decode))
        for prompt in prompts:
            answer = pair.complete(prompt)
            assert answer.tokens == alone.complete(prompt).tokens
        expect(on_decode, {TICKETS_REFUSED: len(prompts), LOADS: 0})
        expect(on_prefill, {OFFERS: len(prompts), OFFERS_UNCLAIMED: len(prompts)})
        expect_free(pair.to_prefill)
        expect_free(pair.to_decode)
    words = f"is of wire version {WIRE_VERSION}; this engine speaks {OTHER_VERSION}"
    assert decode.log_text().count(words) == len(prompts)
