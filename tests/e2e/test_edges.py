"""Requests at the edges of the API, through the router: answered as by one engine.

A test checks each answer and its cost: how much decode read, how prefill's offers ended, and that
neither engine holds a block afterwards.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from harness.cluster.answers import LIKELY, questions_of
from harness.cluster.client import WANT_TICKET, Answer, Client, RefusedError
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.metrics import NBYTES, OFFERS, PREEMPTIONS, TICKETS_REFUSED, CountersSince
from harness.cluster.models.families import TinyModel
from harness.cluster.models.files import SPECIALS, words
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import Accounts, connected, expect, expect_free, started

pytestmark = pytest.mark.e2e

BLOCK = 128
BLOCK_BYTES = 4 * 4 * BLOCK * 2 * 64 * 4  # layers, heads, tokens, K and V, head size, float32
ANSWER = 16
LIMIT = TinyModel().max_positions
ROUNDING = 1e-4  # of a log probability; 4e-6 were seen
FEW_BLOCKS = 34  # one of them vLLM's own; vLLM wants 32 for a prompt at the model's limit
TALKERS = 10  # of 2 blocks each
TALK = 400  # tokens, which make 6 blocks of the 2: too many, also when all start far apart
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "seed": 7}
# vLLM gives one answer where temperature is 0.
GREEDY_IN_EFFECT: Mapping[str, Any] = {"temperature": 1, "top_k": 1}
IDS = {word: number for number, word in enumerate([*SPECIALS, *words()])}


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


def test_an_aborted_prefill_publishes_no_offer(pair: Pair) -> None:
    """Its client hangs up when it has seen the first of many tokens."""
    since = CountersSince(pair.to_prefill)
    pair.to_prefill.abandon(random_prompt(500, seed=107), 400, kv_transfer_params=WANT_TICKET)
    expect_free(pair.to_prefill)
    assert since.changed()[OFFERS] == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "asked"),
    [
        pytest.param(201, ANSWER, {}, id="plain"),
        pytest.param(202, 1, {}, id="one token"),
        pytest.param(203, ANSWER, {"logprobs": LIKELY}, id="log probabilities"),
        pytest.param(204, ANSWER, {"logprobs": None}, id="no log probabilities"),
        pytest.param(205, ANSWER, {"logprobs": None, "echo": True}, id="echo"),
        pytest.param(206, ANSWER, SAMPLED, id="sampled"),
        pytest.param(LIMIT - 1, 1, {}, id="as long as possible"),
    ],
)
def test_ways_to_ask(
    pair: Pair,
    single: Client,
    accounts: Accounts,
    length: int,
    max_tokens: int,
    asked: Mapping[str, Any],
) -> None:
    prompt = random_prompt(length, seed=300)
    got = pair.to_router.answers(prompt, max_tokens, **asked)
    expect_same(got, single.answers(prompt, max_tokens, **asked))
    accounts.expect_loaded(length - 1)
    accounts.expect_offers(1, read=1)


def test_a_chat_of_three_turns_reads_only_what_is_new(
    pair: Pair, single: Client, accounts: Accounts
) -> None:
    """Decode has each prompt and answer but its last token, in whole blocks."""
    messages: list[dict[str, str]] = []
    read, known = [], 0
    for turn, length in enumerate((200, 150, 300)):
        messages += [{"role": "user", "content": random_prompt(length, seed=303 + turn)}]
        expected, got = single.chat(messages, ANSWER), pair.to_router.chat(messages, ANSWER)
        expect_same([got], [expected])
        assert len(got.tokens) == ANSWER
        read.append(got.prompt_tokens - 1 - known)
        known = (got.prompt_tokens + ANSWER - 1) // BLOCK * BLOCK
        messages += [{"role": "assistant", "content": got.text}]
    accounts.expect_loaded(*read)
    accounts.expect_offers(3, read=3)


def test_two_answers_to_a_prompt(pair: Pair, single: Client, accounts: Accounts) -> None:
    """Both children carry the same ticket: one reads, the other computes or finds it cached.

    The router asks prefill for two answers as well. Each is an offer, of which it hands over one:
    the other one stays until it expires.
    """
    prompt, other = random_prompt(340, seed=307), random_prompt(345, seed=308)
    equal = pair.to_router.answers(prompt, n=2, **GREEDY_IN_EFFECT)
    assert [answer.tokens for answer in equal] == [single.complete(prompt).tokens] * 2
    different = pair.to_router.answers(other, n=2, **SAMPLED)
    expect_same(different, single.answers(other, n=2, **SAMPLED))
    assert different[0].tokens != different[1].tokens
    accounts.expect_loaded(339, 344)
    expect(accounts.decode, {TICKETS_REFUSED: 2})
    accounts.expect_offers(4, read=2, unclaimed=2)


@pytest.mark.usefixtures("accounts")
def test_beams_of_a_prompt(pair: Pair, single: Client) -> None:
    """One request becomes several, all with the same ticket."""
    prompt = random_prompt(150, seed=309)
    beams: Mapping[str, Any] = {"n": 3, "use_beam_search": True, "logprobs": None}
    ticket = pair.to_prefill.ticket(prompt)
    got = pair.to_decode.answers(prompt, kv_transfer_params=ticket, **beams)
    assert [one.text for one in got] == [one.text for one in single.answers(prompt, **beams)]


def test_a_list_of_prompts(pair: Pair, single: Client, accounts: Accounts) -> None:
    """The router hands over the first one's ticket for all: the others are computed on decode."""
    texts = [random_prompt(length, seed=310) for length in (360, 5, 130)]
    more = [random_prompt(length, seed=310) for length in (361, 131)]
    got = [
        *pair.to_router.answers(texts),
        *pair.to_router.answers([ids_of(prompt) for prompt in more]),
    ]
    expected = [single.complete(prompt).tokens for prompt in (*texts, *more)]
    assert [answer.tokens for answer in got] == expected
    accounts.expect_loaded(359, 360)
    expect(accounts.decode, {TICKETS_REFUSED: 3})
    accounts.expect_offers(5, read=2, unclaimed=3)


def test_a_prompt_of_one_token_has_nothing_to_read(
    pair: Pair, single: Client, accounts: Accounts
) -> None:
    """Decode computes the last token itself, and lets go of the offer."""
    expect_same([pair.to_router.complete("zo")], [single.complete("zo")])
    accounts.expect_loaded()
    accounts.expect_offers(1, read=0, aborted=1)


def test_a_request_that_decode_alone_refuses_costs_prefill_no_block(
    pair: Pair, single: Client, accounts: Accounts
) -> None:
    """vLLM's frontend tells the connector of it only if the ticket has `do_remote_prefill`."""
    prompt = random_prompt(370, seed=323)
    ticket = {**pair.to_prefill.ticket(prompt), "do_remote_prefill": True}
    expected = refusal(single, prompt)
    assert expected[0] == 400
    assert refusal(pair.to_decode, prompt, kv_transfer_params=ticket) == expected
    accounts.expect_loaded()
    accounts.expect_released()


def test_log_probabilities_of_the_prompt_are_computed_on_decode(
    pair: Pair, single: Client, accounts: Accounts
) -> None:
    """vLLM uses no cached KV for these, so nothing is read.

    Decode gives them once, as a single engine does. vllm-router takes it that decode lacks them,
    and puts prefill's before decode's: the prompt stands there twice.
    """
    prompt = random_prompt(200, seed=314)
    expected = single.complete(prompt, echo=True)
    expect_same([pair.complete(prompt, echo=True)], [expected])
    routed = pair.to_router.complete(prompt, echo=True)
    assert routed.text == expected.text
    assert routed.tokens == expected.tokens[:200] + expected.tokens
    accounts.expect_loaded()
    accounts.expect_offers(2, read=0, aborted=2)


def test_what_preempted_requests_have_read_is_computed_again(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
    single: Client,
) -> None:
    """A preempted request loses its KV and its ticket: decode computes it."""
    prefill = base_engines[0]
    spec = replace(base_specs[1], name="crowded", num_blocks=FEW_BLOCKS)
    prompts = [random_prompt(250, seed=316 + number) for number in range(TALKERS)]
    with started(cluster, spec) as (decode,), connected(prefill, decode) as pair:
        accounts = Accounts(pair)
        accounts.expect_free()  # of what came before
        questions = questions_of(single, prompts, TALK)
        with ThreadPoolExecutor(TALKERS) as pool:
            answers = list(pool.map(lambda prompt: pair.complete(prompt, TALK), prompts))
        likenesses = [one.compare(got) for one, got in zip(questions, answers, strict=True)]
        assert "other" not in likenesses
        assert accounts.expect_loaded(*[249] * TALKERS)[PREEMPTIONS] > 0
        accounts.expect_offers(TALKERS, read=TALKERS)
        accounts.expect_free()


def refusal(client: Client, prompt: str, **asked: object) -> tuple[int, Mapping[str, object]]:
    """The status and the error of a request for no token."""
    with pytest.raises(RefusedError) as raised:
        client.complete(prompt, 0, **asked)
    return raised.value.status, raised.value.error


def expect_same(got: list[Answer], expected: list[Answer]) -> None:
    """Token for token; log probabilities up to rounding."""
    for one, wanted in zip(got, expected, strict=True):
        assert one.tokens == wanted.tokens
        assert one.text == wanted.text
        assert one.finish_reason == wanted.finish_reason
        assert one.prompt_tokens == wanted.prompt_tokens
        for likely, others in zip(one.likely, wanted.likely, strict=True):
            assert sorted(likely.values()) == pytest.approx(sorted(others.values()), abs=ROUNDING)


def ids_of(prompt: str) -> list[int]:
    return [IDS[word] for word in prompt.split()]
