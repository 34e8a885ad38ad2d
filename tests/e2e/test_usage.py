"""Clients get a single engine's number of cached tokens; vLLM's metrics stay."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import pytest

from harness.cluster.client import Answer, Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import OVERLAP, EngineSpec
from harness.cluster.metrics import LOADS, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from nixl_kv.protocol.ticket import FIELD, SealedTicket
from support.engines import EVENT_S, connected, started, without_connector

pytestmark = pytest.mark.e2e

DETAILS: Final = ("--enable-prompt-tokens-details",)
FIRST: Final = 402
MORE: Final = 200
BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total{{source={}}}"
EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits_total"
SEEDS: Final = itertools.count(8800)

Complete = Callable[[Pair, str], Answer]


def serial(pair: Pair, prompt: str) -> Answer:
    """Prefill does not answer a request for log probabilities early."""
    return pair.complete(prompt)


def early(pair: Pair, prompt: str) -> Answer:
    """Without vllm-router, whose answers lack the details of `usage`."""
    ticket, _ = pair.to_prefill.timed_ticket(prompt, logprobs=None)
    assert SealedTicket.parse({FIELD: ticket[FIELD]}).open().is_early
    return pair.decode_with(ticket, prompt, logprobs=None)


@pytest.fixture(scope="module")
def engines(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]
) -> Iterator[tuple[Pair, Client]]:
    """A pair that can answer early, and a single engine."""
    prefill, decode = (
        replace(
            spec,
            name=f"usage-{spec.role}",
            extra_args=(*DETAILS, *spec.extra_args),
            connector_config={**spec.connector_config, **OVERLAP, "insecure": False},
        )
        for spec in base_specs
    )
    single = without_connector(prefill, "usage-single")
    single = replace(single, extra_args=(*DETAILS, *base_specs[0].extra_args))
    with (
        started(cluster, prefill, decode, single) as (first, second, alone),
        connected(first, second),
        Pair(first, second) as pair,
        Client(alone.url) as client,
    ):
        yield pair, client


@pytest.mark.parametrize("complete", [serial, early])
@pytest.mark.parametrize("asked", ["never", "of both", "of prefill"])
def test_a_client_gets_the_same_usage_as_from_a_single_engine(
    engines: tuple[Pair, Client], complete: Complete, asked: str
) -> None:
    pair, single = engines
    first = prompt = random_prompt(FIRST, seed=next(SEEDS))
    if asked != "never":
        prompt = f"{first} {random_prompt(MORE, seed=next(SEEDS))}"
        single.complete(first)
        if asked == "of both":
            complete(pair, first)
        else:
            pair.to_prefill.complete(first)
    expected = single.complete(prompt)
    assert expected.cached_tokens is not None
    assert (expected.cached_tokens > 0) == (asked != "never")
    since = CountersSince(pair.to_decode)
    answer = complete(pair, prompt)
    assert (answer.prompt_tokens, answer.text) == (expected.prompt_tokens, expected.text)
    assert answer.cached_tokens == expected.cached_tokens

    local = expected.cached_tokens if asked == "of both" else 0
    external = expected.prompt_tokens - 1 - local
    changed = since.wait_for(LOADS, timeout_s=EVENT_S)
    counted = {
        BY_SOURCE.format("local_compute"): 1,
        BY_SOURCE.format("local_cache_hit"): local,
        BY_SOURCE.format("external_kv_transfer"): external,
        EXTERNAL_HITS: external,
    }
    assert {name: changed[name] for name in counted} == counted


def test_a_request_that_decode_computes_has_decodes_number(engines: tuple[Pair, Client]) -> None:
    pair, _ = engines
    first = random_prompt(FIRST, seed=next(SEEDS))
    ticket = pair.to_prefill.ticket(first)
    ticket[FIELD] = "0" + ticket[FIELD]
    assert pair.decode_with(ticket, first).cached_tokens == 0
