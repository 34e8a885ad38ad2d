"""The turns of a chat: prefill reads what decode has cached, and the answers stay the same.

Prefill forgets its own cache before each turn. So it computes all that it does not read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import pytest

from harness.cluster.client import WANT_TICKET, Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.metrics import CountersSince
from harness.cluster.pair import Pair
from nixl_kv.conversations.finding import MIN_TOKENS
from support.chats import (
    FOUND_TOKENS,
    VOCABULARY,
    Said,
    Tokens,
    conversing,
    forget,
    patient,
    say,
    say_counted,
    words,
)
from support.engines import EVENT_S, started, without_connector

pytestmark = pytest.mark.e2e

TURNS: Final = 8
NEW: Final = 200
"""Tokens of the client in each turn."""
ANSWERED: Final = 100
BLOCK: Final = 32
"""Decode's. Prefill has larger blocks, so that it has to make decode's hashes."""

Remember = Callable[[list[Tokens]], Tokens]
"""The history in a client's request: its own words and the answers, by turns."""


def whole(said: list[Tokens]) -> Tokens:
    return [token for each in said for token in each]


def stripped(said: list[Tokens]) -> Tokens:
    """Without the first half of each answer, as of a model that reasons."""
    kept = [each if turn % 2 == 0 else each[ANSWERED // 2 :] for turn, each in enumerate(said)]
    return whole(kept)


def edited(said: list[Tokens]) -> Tokens:
    """From the fifth turn on, with another word in the third one's question."""
    history = whole(said)
    if len(said) >= 8:
        place = len(whole(said[:4])) + 50
        history[place] = VOCABULARY[(history[place] + 1) % len(VOCABULARY)]
    return history


def truncated(said: list[Tokens]) -> Tokens:
    """Only the last two turns, as if the model's length were reached."""
    return whole(said[-4:])


@dataclass
class Cached:
    """The oracle: the sequences whose KV decode has computed or read."""

    seen: list[Tokens] = field(default_factory=list)

    def end(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt decode's blocks have."""
        common = [
            sum(
                1
                for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, one, strict=False))
            )
            for one in self.seen
        ]
        return min(max(common, default=0), len(prompt) - 1) // BLOCK * BLOCK

    def computed(self, prompt: Sequence[int]) -> int:
        """How many tokens a cold prefill engine has to compute."""
        end = self.end(prompt)
        return len(prompt) - (end if end >= MIN_TOKENS else 0)

    def add(self, prompt: Tokens, answer: Tokens) -> None:
        self.seen.append([*prompt, *answer[:-1]])  # the last token is never computed


class Chat:
    """Prefill, decode and a single engine."""

    def __init__(self, pair: Pair, single: Client) -> None:
        self.pair = pair
        self.single = single

    def turn(self, prompt: Tokens) -> tuple[Said, Said]:
        """The answers of prefill, which has forgotten all, and of decode."""
        forget(self.pair.to_prefill)
        first = say_counted(self.pair.to_prefill, prompt, 1, WANT_TICKET)
        return first, say(self.pair.to_decode, prompt, ANSWERED, first.params)


@pytest.fixture(scope="module")
def chat(cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]) -> Iterator[Chat]:
    prefill = conversing(base_specs[0], "conversations-both", "both", block_size=2 * BLOCK)
    decode = conversing(base_specs[1], "conversations-decode", "decode", block_size=BLOCK)
    single = without_connector(decode, "conversations-single")
    with (
        started(cluster, patient(prefill), decode, single) as (first, second, alone),
        Pair(first, second) as pair,
        Client(alone.url) as client,
    ):
        yield Chat(pair, client)


@pytest.mark.parametrize(
    ("seed", "remember"),
    list(enumerate([whole, stripped, edited, truncated])),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_prefill_computes_the_blocks_that_decode_lacks(
    chat: Chat, seed: int, remember: Remember
) -> None:
    said: list[Tokens] = []
    cached = Cached()
    least = 0
    since = CountersSince(chat.pair.to_prefill)
    for number in range(TURNS):
        said.append(words(number, NEW, seed))
        prompt = remember(said)
        expected = say(chat.single, prompt, ANSWERED)
        most = cached.computed(prompt)
        if number and remember is whole:
            assert most <= NEW + BLOCK
        first, second = chat.turn(prompt)
        assert second.tokens == expected.tokens, f"turn {number + 1}"
        assert most <= first.computed <= most + BLOCK, f"turn {number + 1}"
        assert first.cached == len(prompt) - first.computed
        assert second.cached == first.cached
        least += max(0, len(prompt) - most - BLOCK)
        cached.add(prompt, second.tokens)
        said.append(second.tokens)
    changed = since.wait(lambda now: now[FOUND_TOKENS] >= least, EVENT_S, step=True)
    assert changed[FOUND_TOKENS] >= least, "its own cache was empty"
