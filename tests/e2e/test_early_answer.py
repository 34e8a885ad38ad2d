"""Prefill answers before it has computed, so that a router starts both legs of a request together."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from harness.cluster.client import WANT_TICKET, Client, RefusedError
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, OFFERS, OFFERS_READ, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from nixl_kv.protocol.ticket import FIELD, SealedTicket
from support.engines import EVENT_S, connected, started

pytestmark = pytest.mark.e2e

EARLY = ("--middleware", "nixl_kv.connector.EarlyAnswer", "--api-key", "secret")


@pytest.fixture(scope="module")
def pair(cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]) -> Iterator[Pair]:
    """Two engines behind a router; prefill answers early."""
    prefill, decode = (
        replace(
            spec,
            name=f"early-{spec.role}",
            extra_args=extra,
            connector_config={**spec.connector_config, "insecure": False},
        )
        for spec, extra in zip(base_specs, (EARLY[:2], ()), strict=True)
    )
    with started(cluster, prefill, decode) as engines, connected(*engines):
        with Pair(*engines, cluster.route(engines[:1], engines[1:])) as pair:
            yield pair


def test_legs_start_together_and_the_answer_is_right(pair: Pair, single: Client) -> None:
    prompts = [random_prompt(100 + 30 * n, seed=7300 + n) for n in range(12)]
    expected = [single.complete(prompt, logprobs=None).text for prompt in prompts]
    offers, loads = CountersSince(pair.to_prefill), CountersSince(pair.to_decode)
    with ThreadPoolExecutor(4) as pool:
        ask = lambda prompt: pair.to_router.complete(prompt, logprobs=None)  # noqa: E731
        answers = list(pool.map(ask, prompts))
    assert [answer.text for answer in answers] == expected
    assert loads.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)[LOADS] == len(prompts)
    assert loads.changed()[FAILURES] == 0
    assert offers.wait_for(OFFERS_READ, len(prompts), timeout_s=EVENT_S)[OFFERS] == len(prompts)


def test_prefill_answers_with_a_pair_ticket(pair: Pair) -> None:
    ticket = pair.to_prefill.ticket(random_prompt(60, seed=7400))
    assert SealedTicket.parse({FIELD: ticket[FIELD]}).open().is_pair is False  # logprobs: 0
