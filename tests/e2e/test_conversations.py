"""The turns of a chat: prefill reads what decode has cached, and the answers stay the same.

Prefill forgets its own cache before each turn. So it computes all that it does not read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

import httpx
import pytest

from harness.cluster.client import COMPLETIONS, DIRECT, TIMEOUT_S, WANT_TICKET, Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec, Role
from harness.cluster.metrics import COMPUTED_TOKENS, PREFIX, CountersSince
from harness.cluster.pair import Pair
from nixl_kv.conversations.finding import MIN_TOKENS
from support.engines import EVENT_S, expect_free, started, without_connector

pytestmark = pytest.mark.e2e

TURNS: Final = 8
NEW: Final = 200
"""Tokens of the client in each turn."""
ANSWERED: Final = 100
BLOCK: Final = 32
"""Of decode. Prefill has larger ones, so that it has to make decode's hashes."""
VOCABULARY: Final = range(10, 4000)
FOUND: Final = f"{PREFIX}found_tokens_total"
DETAILS: Final = ("--enable-prompt-tokens-details",)

Tokens = list[int]
Remember = Callable[[list[Tokens]], Tokens]
"""What a client sends as the history: of its own words and the answers, by turns."""


def words(turn: int, count: int = NEW, seed: int = 0) -> Tokens:
    """Some tokens that no other turn has in this order."""
    step = 7919 * (seed + 1)
    return [VOCABULARY[(turn * 1009 + place * step) % len(VOCABULARY)] for place in range(count)]


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


@dataclass(frozen=True)
class Turn:
    tokens: Tokens
    cached: int
    params: dict[str, Any] | None


class Chat:
    """Prefill, decode and a single engine."""

    def __init__(self, pair: Pair, single: Client) -> None:
        self.pair = pair
        self.single = single

    def ask(self, engine: Client, prompt: Tokens, count: int, params: Any = None) -> Turn:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({} if params is None else {"kv_transfer_params": params}),
        }
        with httpx.Client(base_url=engine.url, timeout=TIMEOUT_S, **DIRECT) as client:
            reply = client.post(COMPLETIONS, json=body).raise_for_status().json()
        details = reply["usage"].get("prompt_tokens_details") or {}
        tokens = reply["choices"][0]["token_ids"]
        return Turn(tokens, details.get("cached_tokens") or 0, reply.get("kv_transfer_params"))

    def forget(self) -> None:
        """Empty prefill's own cache, which vLLM does only while nothing holds blocks."""
        expect_free(self.pair.to_prefill)
        url = f"{self.pair.prefill.url}/reset_prefix_cache"
        httpx.post(url, **DIRECT).raise_for_status()

    def prefill(self, prompt: Tokens, **params: Any) -> tuple[Turn, float]:
        """The ticket, and how many tokens prefill has computed for it."""
        since = CountersSince(self.pair.to_prefill)
        turn = self.ask(self.pair.to_prefill, prompt, 1, {**WANT_TICKET, **params})
        changed = since.wait_for(COMPUTED_TOKENS, timeout_s=EVENT_S)
        return turn, changed[COMPUTED_TOKENS]

    def turn(self, prompt: Tokens) -> tuple[Turn, Turn, float]:
        """Both legs of a turn, and how many tokens prefill has computed."""
        self.forget()
        first, computed = self.prefill(prompt)
        return first, self.ask(self.pair.to_decode, prompt, ANSWERED, first.params), computed


def spec_of(base: EngineSpec, role: Role, block_size: int) -> EngineSpec:
    return replace(
        base,
        name=f"conversations-{role}",
        role=role,
        block_size=block_size,
        extra_args=(*base.extra_args, *DETAILS),
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},
        connector_config={**base.connector_config, "conversations": "on", "insecure": False},
    )


@pytest.fixture(scope="module")
def chat(cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]) -> Iterator[Chat]:
    prefill = spec_of(base_specs[0], "both", 2 * BLOCK)
    decode = spec_of(base_specs[1], "decode", BLOCK)
    single = without_connector(decode, "conversations-single")
    patience = ("--scheduler-cls", "support.patient_reader.HookedScheduler")
    prefill = replace(
        prefill, module="support.patient_reader", extra_args=(*prefill.extra_args, *patience)
    )
    with (
        started(cluster, prefill, decode, single) as (first, second, alone),
        Pair(first, second) as pair,
        Client(alone.url) as client,
    ):
        yield Chat(pair, client)


@pytest.mark.parametrize(
    ("seed", "remember"),
    list(enumerate([whole, stripped, edited, truncated])),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_prefill_computes_what_decode_does_not_have(
    chat: Chat, seed: int, remember: Remember
) -> None:
    said: list[Tokens] = []
    cached = Cached()
    least = 0
    since = CountersSince(chat.pair.to_prefill)
    for number in range(TURNS):
        said.append(words(number, seed=seed))
        prompt = remember(said)
        expected = chat.ask(chat.single, prompt, ANSWERED)
        most = cached.computed(prompt)
        if number and remember is whole:
            assert most <= NEW + BLOCK
        first, second, computed = chat.turn(prompt)
        assert second.tokens == expected.tokens, f"turn {number + 1}"
        assert most <= computed <= most + BLOCK, f"turn {number + 1}"
        assert first.cached == len(prompt) - computed
        assert second.cached == first.cached
        least += max(0, len(prompt) - most - BLOCK)
        cached.add(prompt, second.tokens)
        said.append(second.tokens)
    changed = since.wait(lambda now: now[FOUND] >= least, EVENT_S, step=True)
    assert changed[FOUND] >= least, "its own cache was empty"


def test_a_router_may_name_the_engine_that_had_the_conversation(chat: Chat) -> None:
    """Prefill never had this prompt; decode's answer to another one names decode."""
    other = words(0, seed=20)
    first, _ = chat.prefill(other)
    hint = chat.ask(chat.pair.to_decode, other, 1, first.params).params
    assert hint is not None
    prompt = words(0, 400, seed=21)
    answer = chat.ask(chat.pair.to_decode, prompt, ANSWERED).tokens
    prompt = [*prompt, *answer, *words(1, seed=21)]
    # vLLM's multi-turn proxy changes these fields, and no others.
    named = {**hint, "remote_host": chat.pair.decode.address, "do_remote_prefill": False}
    expected = chat.ask(chat.single, prompt, ANSWERED)
    first, computed = chat.prefill(prompt, **named)
    end = (400 + ANSWERED - 1) // BLOCK * BLOCK
    assert computed <= len(prompt) - end + BLOCK
    assert chat.ask(chat.pair.to_decode, prompt, ANSWERED, first.params).tokens == expected.tokens
