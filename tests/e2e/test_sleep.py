"""Engines that sleep and wake up: on vLLM 0.33, which tells connectors of it."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, OFFERS
from harness.cluster.prompts import random_prompt
from support.engines import Accounts, connected, expect, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def engines(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
) -> Iterator[tuple[Engine, Engine]]:
    with Client(base_engines[2].url) as client:
        if client.vllm_version().startswith(("0.31.", "0.32.")):
            pytest.skip("this vLLM tells connectors nothing of sleep")
    specs = [
        replace(
            spec,
            name=f"{spec.name}-sleepy",
            module="harness.cluster.sleeping_connector",
            extra_env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        for spec in base_specs
    ]
    with started(cluster, *specs) as (prefill, decode):
        yield prefill, decode


def call(engine: Engine, path: str) -> None:
    httpx.post(f"{engine.url}{path}", timeout=60, trust_env=False).raise_for_status()


def test_tickets_from_before_prefill_slept_are_void_and_later_ones_are_good(
    engines: tuple[Engine, Engine], single: Client
) -> None:
    prefill, decode = engines
    before, after = (random_prompt(300, seed=seed) for seed in (3300, 3301))
    with connected(prefill, decode) as pair:
        accounts = Accounts(pair)
        ticket = pair.to_prefill.ticket(before)
        call(prefill, "/sleep?level=1")
        call(prefill, "/wake_up")
        assert pair.decode_with(ticket, before).tokens == single.complete(before).tokens
        expect(accounts.decode, {LOADS: 0, FAILURES: 1})
    with connected(prefill, decode) as pair:
        accounts = Accounts(pair)
        assert pair.complete(after).tokens == single.complete(after).tokens
        accounts.expect_loaded(299)
        accounts.expect_free()


def test_decode_reads_an_earlier_offer_after_it_slept(
    engines: tuple[Engine, Engine], single: Client
) -> None:
    prefill, decode = engines
    prompt = random_prompt(300, seed=3310)
    with connected(prefill, decode) as pair:
        accounts = Accounts(pair)
        ticket = pair.to_prefill.ticket(prompt)
        call(decode, "/sleep?level=1")
        call(decode, "/wake_up")
        assert pair.decode_with(ticket, prompt).tokens == single.complete(prompt).tokens
        accounts.expect_loaded(299)
        expect(accounts.prefill, {OFFERS: 1})
        accounts.expect_free()
