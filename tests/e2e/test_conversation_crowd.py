"""Many conversations at once, with full caches: every answer is right, and nothing is held after.

More of them run than decode's cache can keep, so it reuses blocks all the time, also those that
prefill has just found. Prefill's own cache keeps none from turn to turn.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pytest

from harness.cluster.answers import AT_A_TIME, Question
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import PATIENT, Engine, EngineSpec
from harness.cluster.metrics import (
    COMPUTED_TOKENS,
    PREEMPTIONS,
    PREFIX,
    PROMPT_TOKENS,
    TOKENS,
    CountersSince,
)
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from nixl_kv.cli.client import describe, rank_statuses
from nixl_kv.errors import NixlKVError
from nixl_kv.ids import endpoint_at
from nixl_kv.keys import find_user_key
from support.asking import CLIENT_TIMEOUT_S, Ended, ask, kinds
from support.chats import FOUND_TOKENS, SOUGHT, conversing, patient
from support.engines import expect_free, started, without_connector

pytestmark = [pytest.mark.e2e, pytest.mark.crowd]

FIRST: Final = 320
NEW: Final = 40
"""Tokens of the client in the first turn, and in a later one."""
ANSWERED: Final = 24
TURNS: Final = 4
BLOCK: Final = 32
BLOCKS_OF_CHAT: Final = (FIRST + TURNS * ANSWERED + (TURNS - 1) * NEW) // BLOCK + 1
HELD: Final = tuple(f"{PREFIX}{name}" for name in ("open_offers", "open_loads", "offered_blocks"))


@dataclass(frozen=True)
class Crowd:
    """A number of conversations, and the blocks of the engines' caches."""

    num_chats: int
    running: int  # requests that decode runs at a time; the others wait
    prefill: int
    decode: int

    def specs(self) -> tuple[EngineSpec, EngineSpec, EngineSpec]:
        """Prefill, decode and a single engine, whose cache keeps all conversations."""
        name = f"crowd-of-{self.num_chats}"
        config = {**PATIENT, "request_timeout_s": CLIENT_TIMEOUT_S}
        lengths = ("--max-model-len", "1024")
        model = ensure_tiny_model()
        one, two = pair_specs(model, connector_config=config, extra_args=lengths, block_size=BLOCK)
        prefill = conversing(one, f"{name}-prefill", "both", num_blocks=self.prefill)
        decode = conversing(two, f"{name}-decode", "decode", num_blocks=self.decode)
        bounded = (*decode.extra_args, "--max-num-seqs", str(self.running))
        single = without_connector(decode, f"{name}-single")
        everything = 2 * self.num_chats * BLOCKS_OF_CHAT
        return (
            patient(prefill),
            replace(decode, extra_args=bounded),
            replace(single, num_blocks=everything, kv_cache_bytes=2 << 30),
        )


CROWDS: Final = (
    Crowd(24, running=4, prefill=100, decode=310),
    Crowd(200, running=32, prefill=600, decode=2600),
)


def talk(prefill: Engine, decode: Engine, number: int) -> list[tuple[str, Ended]]:
    """The prompts of one conversation, and how they ended; it ends with the first error."""
    history, said = random_prompt(FIRST, seed=880_000 + number), list[tuple[str, Ended]]()
    for turn in range(TURNS):
        # Each turn has its own connections: engines close those that are idle for 5 s.
        with Pair(prefill, decode, timeout_s=CLIENT_TIMEOUT_S) as pair:
            complete = partial(pair.complete, history, ANSWERED, skip_special_tokens=False)
            said.append((history, ask(complete)))
        answer = said[-1][1].answer
        if answer is None:
            break
        more = random_prompt(NEW, seed=890_000 + number * TURNS + turn)
        history = f"{history} {answer.text} {more}"
    return said


def question_of(single: Client, prompt: str) -> Question:
    return Question.of(single, prompt, ANSWERED)


@pytest.mark.parametrize(
    "crowd",
    [CROWDS[0], pytest.param(CROWDS[1], marks=pytest.mark.slow)],
    ids=lambda crowd: str(crowd.num_chats),
)
def test_conversations_with_full_caches(cluster: Cluster, crowd: Crowd) -> None:
    with (
        started(cluster, *crowd.specs()) as (prefill, decode, alone),
        Pair(prefill, decode) as pair,
        Client(alone.url, timeout_s=CLIENT_TIMEOUT_S) as single,
        ThreadPoolExecutor(crowd.num_chats) as pool,
    ):
        pair.complete(random_prompt(20, seed=0))  # engines load code at their first request
        at_prefill, at_decode = CountersSince(pair.to_prefill), CountersSince(pair.to_decode)
        begin = time.monotonic()
        chats = pool.map(partial(talk, prefill, decode), range(crowd.num_chats))
        said = [one for chat in chats for one in chat]
        seconds = sorted(ended.seconds for _, ended in said)
        print(
            f"\n{len(said)} requests in {time.monotonic() - begin:.0f} s, of which each took "
            f"{statistics.median(seconds):.1f} s, and {seconds[-1]:.1f} s at most"
        )
        expect_nothing_held(pair)
        on_prefill, on_decode = at_prefill.changed(), at_decode.changed()
        with ThreadPoolExecutor(AT_A_TIME) as few:
            questions = list(few.map(partial(question_of, single), [one for one, _ in said]))
    outcomes = {name: round(on_prefill.get(counter, 0)) for name, counter in SOUGHT.items()}
    asked, found = on_prefill[PROMPT_TOKENS], on_prefill.get(FOUND_TOKENS, 0)
    print(f"sought: {outcomes}; found {found:.0f} of {asked:.0f} prompt tokens")
    print(f"computed by prefill: {on_prefill[COMPUTED_TOKENS]:.0f} tokens")
    print(f"read by decode: {on_decode[TOKENS]:.0f} tokens into {crowd.decode * BLOCK}")
    print(f"preempted on decode: {on_decode.get(PREEMPTIONS, 0):.0f}")
    judged = zip(questions, [ended for _, ended in said], strict=True)
    assert kinds(judged) == {"right": crowd.num_chats * TURNS}
    assert on_decode[TOKENS] > crowd.decode * BLOCK, "all of it fits into the cache of decode"
    assert outcomes["read"] > 0
    assert found >= outcomes["read"] * BLOCK
    assert sum(outcomes.values()) <= crowd.num_chats * (TURNS - 1)


def expect_nothing_held(pair: Pair) -> None:
    """Neither engine has a block, an offer, or a load, also of merely cached blocks."""
    for engine, client in zip(pair.engines, (pair.to_prefill, pair.to_decode), strict=True):
        expect_free(client)
        counters = client.counters()
        assert {name: counters.get(name, 0) for name in HELD} == dict.fromkeys(HELD, 0)
        keys = find_user_key()
        description = describe(endpoint_at(engine.address, engine.side_port), keys)
        for _, status in rank_statuses(description, keys):
            assert not isinstance(status, NixlKVError)
            assert (status.totals["offers"], status.totals["loads"]) == (0, 0)
