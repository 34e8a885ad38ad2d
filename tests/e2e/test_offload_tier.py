"""Beside vLLM's OffloadingConnector, on prefill and on decode, with the files in configs/.

vLLM's own copies refuse to run on CPU: `harness.cluster.host_tier` stands for them. On decode it
stands also for SimpleCPUOffloadConnector, which is made of CUDA streams.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Answer, Client
from harness.cluster.cluster import Cluster
from harness.cluster.metrics import LOADS, TICKETS_REFUSED, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import Accounts, connected, expect, started
from support.tiered import BLOCK, multi_spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIGS: Final = Path(__file__).resolve().parents[2] / "configs"
EXTERNAL: Final = "vllm:external_prefix_cache_hits_total"  # tokens that any connector has given

NUM_TOKENS: Final = 400
IN_TIER: Final = NUM_TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def tiered(cluster: Cluster) -> Iterator[Pair]:
    with (
        started(cluster, multi_spec("prefill"), multi_spec("decode")) as engines,
        connected(*engines) as pair,
    ):
        yield pair
        Accounts(pair).expect_free()


def ask(complete: Callable[[str], Answer], question: Question) -> None:
    assert question.compare(complete(question.prompt)) != "other"


def test_decode_reads_blocks_that_prefill_has_from_its_tier(tiered: Pair, single: Client) -> None:
    question = Question.of(single, random_prompt(NUM_TOKENS, seed=50), 16)
    accounts = Accounts(tiered)
    ask(tiered.complete, question)
    accounts.expect_loaded(NUM_TOKENS - 1)
    accounts.expect_free()
    for client in (tiered.to_prefill, tiered.to_decode):
        client.reset_prefix_cache()  # what the tier has stays
    accounts = Accounts(tiered)
    ask(tiered.complete, question)
    expect(accounts.prefill, {EXTERNAL: IN_TIER})
    accounts.expect_loaded(NUM_TOKENS - 1)
    accounts.expect_offers(1, read=1)


def test_blocks_that_decode_has_read_come_back_from_its_tier(tiered: Pair, single: Client) -> None:
    question = Question.of(single, random_prompt(NUM_TOKENS, seed=51), 16)
    ask(tiered.complete, question)
    Accounts(tiered).expect_free()
    tiered.to_decode.reset_prefix_cache()
    accounts, since = Accounts(tiered), CountersSince(tiered.to_decode)
    ask(tiered.to_decode.complete, question)
    expect(since, {EXTERNAL: IN_TIER})
    accounts.expect_loaded()


def test_the_tier_serves_a_request_whose_ticket_is_of_no_use(tiered: Pair, single: Client) -> None:
    question = Question.of(single, random_prompt(NUM_TOKENS, seed=54), 16)
    with_ticket = partial(tiered.decode_with, tiered.to_prefill.ticket(question.prompt))
    ask(with_ticket, question)
    Accounts(tiered).expect_free()
    tiered.to_decode.reset_prefix_cache()
    accounts = Accounts(tiered)
    ask(with_ticket, question)
    expect(accounts.decode, {TICKETS_REFUSED: 1, EXTERNAL: IN_TIER, LOADS: 0})
