"""Decode gives the answers of a single engine, and reads only what it lacks."""

import time

import pytest

from harness.cluster.client import WANT_TICKET, Client
from harness.cluster.metrics import NBYTES, OFFERS, OFFERS_UNCLAIMED, USAGE, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import EVENT_S, OFFER_TTL_S, Accounts, expect_free

pytestmark = pytest.mark.e2e

BLOCK = 128
BLOCK_BYTES = 4 * 4 * BLOCK * 2 * 64 * 4  # layers, heads, tokens, K and V, head size, float32


@pytest.mark.parametrize(
    ("length", "blocks"),
    [
        pytest.param(5, 1, id="shorter than a block"),
        pytest.param(127, 1, id="one short of a block"),
        pytest.param(128, 1, id="exactly a block"),
        pytest.param(129, 1, id="a block and the last token"),
        pytest.param(130, 2, id="a block and two tokens"),
        pytest.param(256, 2, id="exactly two blocks"),
        pytest.param(1500, 12, id="twelve blocks"),
    ],
)
def test_prompts_of_any_length_are_read_in_whole_blocks(
    pair: Pair, single: Client, accounts: Accounts, length: int, blocks: int
) -> None:
    prompt = random_prompt(length, seed=100)
    answer = pair.to_router.complete(prompt)
    assert answer.tokens == single.complete(prompt).tokens
    assert accounts.expect_loaded(length - 1)[NBYTES] == blocks * BLOCK_BYTES


def test_a_full_hit_reads_nothing_and_releases_prefill_at_once(
    pair: Pair, single: Client, accounts: Accounts
) -> None:
    prompt = random_prompt(2 * BLOCK + 1, seed=103)
    pair.to_router.complete(prompt)
    assert pair.to_router.complete(prompt).tokens == single.complete(prompt).tokens
    accounts.expect_offers(2, read=1, aborted=1)
    accounts.expect_loaded(2 * BLOCK)


def test_prefill_holds_the_blocks_of_an_offer_for_its_time(pair: Pair) -> None:
    expect_free(pair.to_prefill)
    since, begin = CountersSince(pair.to_prefill), time.monotonic()
    assert pair.to_prefill.ticket(random_prompt(500, seed=106))
    assert since.wait(lambda now: now[USAGE] > 0, OFFER_TTL_S, step=True)[USAGE] > 0
    assert since.wait_for(OFFERS_UNCLAIMED, timeout_s=EVENT_S)[OFFERS_UNCLAIMED] == 1
    assert time.monotonic() - begin >= OFFER_TTL_S
    expect_free(pair.to_prefill)


def test_an_aborted_prefill_publishes_no_offer(pair: Pair) -> None:
    """Its client hangs up when it has seen the first of many tokens."""
    since = CountersSince(pair.to_prefill)
    pair.to_prefill.abandon(random_prompt(500, seed=107), 400, kv_transfer_params=WANT_TICKET)
    expect_free(pair.to_prefill)
    assert since.changed()[OFFERS] == 0
