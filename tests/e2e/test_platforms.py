"""Real engines behind each platform, as it is replayed: KV moves, and answers are right."""

import itertools
from collections.abc import Iterator

import pytest

from harness.cluster.client import Client, RefusedError
from harness.cluster.metrics import LOADS, TICKETS_MISSING, TICKETS_REFUSED, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from platforms.play import Played
from platforms.replays import REPLAYS, Replay
from support.engines import EVENT_S, Accounts

pytestmark = pytest.mark.e2e

PREFILL_NAME = "http://prefill-0.prefill.default.svc.cluster.local:8000"
"""What a platform may know prefill by, and write over the ticket's host."""
POD_IP = "10.244.3.9"

ANSWER = 4
"""Tokens."""

SEEDS = itertools.count(2600)
"""No prompt is in decode's cache before."""
each_replay = pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.name)


def client_of(replay: Replay, pair: Pair) -> Client:
    played = Played(replay, pair.prefill, pair.decode, prefill_name=PREFILL_NAME, pod_ip=POD_IP)
    return Client(pair.decode.url, transport=played)


@pytest.fixture
def platform(replay: Replay, pair: Pair) -> Iterator[Client]:
    with client_of(replay, pair) as client:
        yield client


@each_replay
def test_kv_moves_and_answers_are_right(
    replay: Replay, platform: Client, single: Client, accounts: Accounts
) -> None:
    prompt, streamed, said = (random_prompt(n, seed=next(SEEDS)) for n in (257, 129, 100))
    lengths = [257, 129]
    assert platform.complete(prompt, ANSWER).tokens == single.complete(prompt, ANSWER).tokens
    pieces = platform.stream(streamed, ANSWER, stream_options={"include_usage": True})
    assert pieces.tokens == single.complete(streamed, ANSWER).tokens
    if replay.takes_chat:
        messages = [{"role": "user", "content": said}]
        answer = platform.chat(messages, ANSWER, max_completion_tokens=ANSWER)
        assert answer.tokens == single.chat(messages, ANSWER).tokens
        lengths.append(answer.prompt_tokens)
    if replay.moves_kv:
        accounts.expect_loaded(*(length - 1 for length in lengths))
        return
    counted = accounts.decode.wait_for(TICKETS_MISSING, len(lengths), EVENT_S)
    assert counted[TICKETS_MISSING] >= len(lengths)  # what was asked before may count late
    assert counted[LOADS] == 0


@each_replay
def test_prefill_may_be_sent_a_minimum_above_its_limit(
    replay: Replay, platform: Client, single: Client
) -> None:
    """Some platforms lower `max_tokens` alone: vLLM then refuses it, with any connector."""
    prompt = random_prompt(20, seed=next(SEEDS))
    if replay.keeps_fewest:
        with pytest.raises(RefusedError, match="min_tokens") as raised:
            platform.complete(prompt, ANSWER, min_tokens=2)
        assert raised.value.status == 400
        return
    answer = platform.complete(prompt, ANSWER, min_tokens=2)
    assert answer.tokens == single.complete(prompt, ANSWER).tokens


def test_a_salt_that_prefill_never_saw_is_not_another_prompts_kv(
    pair: Pair, single: Client
) -> None:
    """llm-d's coordinator sends prefill nothing of a prompt but its tokens."""
    (coordinator,) = [replay for replay in REPLAYS if "coordinator" in replay.name]
    prompt, since = random_prompt(150, seed=next(SEEDS)), CountersSince(pair.to_decode)
    with client_of(coordinator, pair) as client:
        answer = client.complete(prompt, ANSWER, cache_salt="tenant-7")
    assert answer.tokens == single.complete(prompt, ANSWER).tokens
    counted = since.wait_for(TICKETS_REFUSED, timeout_s=EVENT_S)
    assert (counted[TICKETS_REFUSED], counted[LOADS]) == (1, 0)
