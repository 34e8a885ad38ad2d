"""A model with recurrent state: decode reads the state before the token that it computes itself.

Three layers of a tiny Qwen3-Next keep a state, and one KV. vLLM computes them in bfloat16, so that
an answer may part from the single engine's where two tokens are as good as equally likely. What
answers are worth without the state is in test_state_recall.py.
"""

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine
from harness.cluster.metrics import (
    CACHED_TOKENS,
    CORRUPT,
    FAILURES,
    LOADS,
    PREEMPTIONS,
    VERIFIED,
    CountersSince,
)
from harness.cluster.models.families import Qwen3Next
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import (
    EVENT_S,
    PATIENT,
    Accounts,
    connected,
    expect,
    started,
    without_connector,
)
from support.planting import expect_named, planted_spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK = 384  # tokens of KV in a page as large as a state
ANSWER = 16
DTYPE = "bfloat16"
STATE_ARGS = ("--mamba-ssm-cache-dtype", "float32")
CHUNK = 512  # tokens that are computed in a step at most
LENGTHS = (2, 17, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 1)
TALKERS = 8
TALK = 120
"""So long that requests overlap: vLLM 0.33 preempts none of those that answer with 40 tokens."""
MAX_ROUNDS = 5
FEW_BLOCKS = 14  # of which a talker has 5, and 4 more for a while after a few words
SEEDS = itertools.count(140_000)  # no prompt is in a cache before


@pytest.fixture(scope="module")
def engines(cluster: Cluster, plan: Path) -> Iterator[Mapping[str, Engine]]:
    prefill, decode = pair_specs(
        ensure_tiny_model(model=Qwen3Next()),
        suffix="-hybrid",
        dtype=DTYPE,
        kv_cache_bytes=96 << 20,
        connector_config=PATIENT,
        extra_args=(*STATE_ARGS, "--max-num-batched-tokens", str(CHUNK)),
    )
    single = without_connector(decode, "single-hybrid")
    specs = {
        "prefill": prefill,
        "decode": decode,
        "crowded decode": replace(
            decode,
            name=f"{decode.name}-crowded",
            num_blocks=FEW_BLOCKS,
            extra_args=(*decode.extra_args, "--max-model-len", "1024"),
        ),
        "spoiled decode": planted_spec(decode, plan),
        "single": single,
    }
    with started(cluster, *specs.values()) as running:
        yield dict(zip(specs, running, strict=True))


@pytest.fixture(scope="module")
def alone(engines: Mapping[str, Engine]) -> Iterator[Client]:
    with Client(engines["single"].url) as client:
        yield client


@pytest.fixture(scope="module")
def hybrids(engines: Mapping[str, Engine]) -> Iterator[Pair]:
    """Engines of one rank each; other shapes are in the matrix."""
    with connected(engines["prefill"], engines["decode"]) as pair:
        yield pair
        Accounts(pair).expect_free()


def expect_answers(pair: Pair, alone: Client, *prompts: str) -> None:
    """Each as a single engine's, or where that could as well have said another token."""
    for prompt in prompts:
        question = Question.of(alone, prompt, ANSWER)
        assert question.compare(pair.complete(prompt, ANSWER), DTYPE) != "other"


def expect_loaded(accounts: Accounts, *tokens: int) -> None:
    """And each digest was right."""
    changed = accounts.expect_loaded(*tokens)
    assert changed[VERIFIED] == changed[LOADS]


def test_prompts_of_any_length_are_read_but_for_their_last_token(
    hybrids: Pair, alone: Client
) -> None:
    accounts = Accounts(hybrids)
    expect_answers(hybrids, alone, *(random_prompt(n, seed=next(SEEDS)) for n in LENGTHS))
    expect_loaded(accounts, *(n - 1 for n in LENGTHS))


def test_a_ticket_is_good_for_a_longer_prompt(hybrids: Pair, alone: Client) -> None:
    """Decode reads the state before prefill's last token, and computes the rest."""
    lengths, accounts = (BLOCK - 1, BLOCK, BLOCK + 1), Accounts(hybrids)
    for length, more in itertools.product(lengths, (1, 30)):
        prompt = random_prompt(length, seed=next(SEEDS))
        question = Question.of(alone, f"{prompt} {random_prompt(more, seed=next(SEEDS))}", ANSWER)
        ticket = hybrids.to_prefill.ticket(prompt)
        answer = hybrids.decode_with(ticket, question.prompt, ANSWER)
        assert question.compare(answer, DTYPE) != "other"
    expect_loaded(accounts, *(length - 1 for length in lengths for _ in range(2)))


def test_a_prompt_of_one_token_is_computed_on_decode(hybrids: Pair, alone: Client) -> None:
    prompt, accounts = random_prompt(1, seed=next(SEEDS)), Accounts(hybrids)
    got = hybrids.to_decode.complete(prompt, ANSWER, kv_transfer_params=None)
    assert Question.of(alone, prompt, ANSWER).compare(got, DTYPE) != "other"
    hybrids.to_prefill.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
    accounts.expect_offers(0, read=0)
    assert "its prompt has one token" in hybrids.prefill.log_text()


def test_blocks_cached_on_either_side_are_not_computed_or_read_again(
    hybrids: Pair, alone: Client
) -> None:
    """Decode has the KV of whole blocks, and reads the state all the same."""
    head = random_prompt(2 * BLOCK + 10, seed=next(SEEDS))
    tails = [random_prompt(100, seed=next(SEEDS)) for _ in range(2)]
    accounts, cached = Accounts(hybrids), CountersSince(hybrids.to_prefill)
    expect_answers(hybrids, alone, *(f"{head} {tail}" for tail in tails))
    all_tokens = 2 * BLOCK + 10 + 100 - 1
    expect_loaded(accounts, all_tokens, all_tokens - 2 * BLOCK)
    # Of the prompt alone, which vLLM has kept a state of before its last block.
    expect_answers(hybrids, alone, f"{head} {tails[0]}")
    assert cached.wait_for(CACHED_TOKENS, BLOCK, EVENT_S)


def test_two_answers_to_a_prompt(hybrids: Pair, alone: Client) -> None:
    prompt = random_prompt(BLOCK + 50, seed=next(SEEDS))
    ticket = hybrids.to_prefill.ticket(prompt)
    asked = {"n": 2, "temperature": 1, "top_k": 1, "kv_transfer_params": ticket}
    question = Question.of(alone, prompt, ANSWER)
    answers = hybrids.to_decode.answers(prompt, ANSWER, **asked)
    assert [question.compare(one, DTYPE) == "other" for one in answers] == [False, False]


def test_a_fault_in_a_state_is_found_and_named(
    engines: Mapping[str, Engine], alone: Client, plan: Path
) -> None:
    """Whatever part of it is wrong; decode then computes the prompt itself."""
    prefill, decode = engines["prefill"], engines["spoiled decode"]
    faults = [f"byte@{part}" for part in ("query", "key", "value", "state")]
    faults += ["layer@state", "parts@key"]  # it was not read; rows changed places
    with connected(prefill, decode) as pair:
        since = CountersSince(pair.to_decode)
        for fault in faults:
            plan.write_text(fault)
            expect_answers(pair, alone, random_prompt(BLOCK + 30, seed=next(SEEDS)))
        plan.write_text("")
        expect(since, {CORRUPT: len(faults), FAILURES: len(faults), LOADS: 0})
    named = expect_named(decode)
    assert [row.split()[-1] for row in named] == [fault.partition("@")[2] for fault in faults]
    assert all(".linear_attn " in row for row in named)


def test_many_at_once_with_few_blocks_and_hang_ups(
    engines: Mapping[str, Engine], alone: Client
) -> None:
    """All answers are right, also of those that are preempted; and nothing is held after it."""
    prefill, decode = engines["prefill"], engines["crowded decode"]
    with connected(prefill, decode) as pair:
        since = CountersSince(pair.to_decode)
        prompts = [random_prompt(2 * BLOCK - 20 + n, seed=next(SEEDS)) for n in range(TALKERS)]
        questions = [Question.of(alone, prompt, TALK) for prompt in prompts]

        def talk(number: int) -> str:
            with Pair(prefill, decode) as own:
                if number % 4 == 3:
                    ticket = own.to_prefill.ticket(prompts[number])
                    own.to_decode.abandon(prompts[number], TALK, kv_transfer_params=ticket)
                    return "hung up"
                return questions[number].compare(own.complete(prompts[number], TALK), DTYPE)

        # Whether vLLM preempts depends on how far the requests overlap.
        for _ in range(MAX_ROUNDS):
            with ThreadPoolExecutor(TALKERS) as pool:
                came = list(pool.map(talk, range(TALKERS)))
            assert "other" not in came
            if since.changed()[PREEMPTIONS]:
                break
        assert since.changed()[PREEMPTIONS] > 0
        Accounts(pair).expect_free()
