"""Real engines behind each platform, as it is replayed: KV moves, and answers are right."""

import itertools

import pytest

from harness.cluster.client import Client
from harness.cluster.metrics import LOADS, TICKETS_MISSING, TICKETS_REFUSED, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from platforms.play import Played
from platforms.replays import REPLAYS, Replay
from support.engines import EVENT_S, Accounts

pytestmark = pytest.mark.e2e

ANSWER = 4  # tokens

SEEDS = itertools.count(2600)  # no prompt is in decode's cache before


def client_of(replay: Replay, pair: Pair) -> Client:
    return Client(pair.decode.url, transport=Played(replay, pair.prefill, pair.decode))


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.name)
def test_kv_moves_and_answers_are_right(
    replay: Replay, pair: Pair, single: Client, accounts: Accounts
) -> None:
    prompt, streamed, said = (random_prompt(n, seed=next(SEEDS)) for n in (257, 129, 100))
    lengths = [257, 129]
    with client_of(replay, pair) as platform:
        assert platform.complete(prompt, ANSWER).tokens == single.complete(prompt, ANSWER).tokens
        answer = platform.stream(streamed, ANSWER, stream_options={"include_usage": True})
        assert answer.tokens == single.complete(streamed, ANSWER).tokens
        if replay.takes_chat:
            messages = [{"role": "user", "content": said}]
            answer = platform.chat(messages, ANSWER, max_completion_tokens=ANSWER)
            assert answer.tokens == single.chat(messages, ANSWER).tokens
            lengths.append(answer.prompt_tokens)
    if replay.moves_kv:
        accounts.expect_loaded(*(length - 1 for length in lengths))
        return
    counted = accounts.decode.wait_for(TICKETS_MISSING, len(lengths), EVENT_S)
    assert counted[TICKETS_MISSING] >= len(lengths)  # earlier requests may count late
    assert counted[LOADS] == 0


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
