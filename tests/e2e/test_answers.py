"""Decode gives the answers of a single engine, and reads only what it lacks."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from counting import changed
from pd.client import Client, Counters
from pd.prompts import random_prompt

pytestmark = pytest.mark.e2e

WANT_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}
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
def test_prompts_of_any_length(
    router: Client, decode: Client, single: Client, length: int, blocks: int
) -> None:
    prompt = random_prompt(length, seed=100)
    before = decode.counters()
    answer = router.complete(prompt)
    moved = changed(decode, before, "vllm:nixl_kv_loads_total")
    assert answer.tokens == single.complete(prompt).tokens
    assert moved["vllm:nixl_kv_tokens_loaded_total"] == length - 1
    assert moved["vllm:nixl_kv_bytes_read_total"] == blocks * BLOCK_BYTES


def test_a_second_turn_reads_only_what_is_new(
    router: Client, decode: Client, single: Client
) -> None:
    first = random_prompt(400, seed=101)
    second = f"{first} {router.complete(first).text.strip()} {random_prompt(90, seed=102)}"
    before = decode.counters()
    answer = router.complete(second)
    moved = changed(decode, before, "vllm:nixl_kv_loads_total")
    assert answer.tokens == single.complete(second).tokens
    assert moved["vllm:nixl_kv_tokens_loaded_total"] == answer.prompt_tokens - 1 - 3 * BLOCK
    assert moved["vllm:nixl_kv_bytes_read_total"] == BLOCK_BYTES


def test_a_full_hit_reads_nothing_and_releases_prefill_at_once(
    router: Client, prefill: Client, decode: Client, single: Client
) -> None:
    prompt = random_prompt(2 * BLOCK + 1, seed=103)
    router.complete(prompt)
    before = decode.counters(), prefill.counters()
    answer = router.complete(prompt)
    released = changed(prefill, before[1], "vllm:nixl_kv_offers_aborted_total")
    assert answer.tokens == single.complete(prompt).tokens
    assert released["vllm:nixl_kv_offers_aborted_total"] == 1
    assert decode.counters()["vllm:nixl_kv_loads_total"] == before[0]["vllm:nixl_kv_loads_total"]


def test_many_at_once(router: Client, single: Client) -> None:
    prompts = [random_prompt(30 + 37 * number, seed=104) for number in range(16)]
    expected = [single.complete(prompt).tokens for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = [answer.tokens for answer in pool.map(router.complete, prompts)]
    assert answers == expected


def test_several_answers_to_one_prompt(prefill: Client, decode: Client, single: Client) -> None:
    """Both children carry the same ticket: one reads, the other computes or finds it cached.

    vLLM refuses several greedy answers; at this temperature they are greedy all the same.
    """
    prompt = random_prompt(300, seed=105)
    ticket = prefill.ticket(prompt, WANT_TICKET)
    texts = decode.texts(prompt, n=2, temperature=0.001, kv_transfer_params=ticket)
    assert texts == [single.complete(prompt).text] * 2


def test_prefill_keeps_an_offer_only_for_its_time(prefill: Client) -> None:
    before = prefill.counters()
    assert prefill.ticket(random_prompt(500, seed=106), WANT_TICKET)
    assert usage(prefill.counters()) > 0
    expired = changed(prefill, before, "vllm:nixl_kv_offers_unclaimed_total", timeout_s=15)
    assert expired["vllm:nixl_kv_offers_unclaimed_total"] == 1
    deadline = time.monotonic() + 10
    while usage(prefill.counters()) > 0:
        assert time.monotonic() < deadline, "the blocks of an expired offer are still in use"
        time.sleep(0.1)


def test_an_aborted_prefill_makes_no_offer(prefill: Client) -> None:
    before = prefill.counters()
    prefill.disconnect_early(random_prompt(2000, seed=107), kv_transfer_params=WANT_TICKET)
    time.sleep(1.0)
    after = prefill.counters()
    assert after["vllm:nixl_kv_offers_total"] == before["vllm:nixl_kv_offers_total"]


def usage(counters: Counters) -> float:
    return counters["vllm:kv_cache_usage_perc"]
