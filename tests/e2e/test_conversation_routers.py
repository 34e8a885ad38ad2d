"""Routers that tell prefill which engine has a conversation: prefill reads, and answers are right.

Prefill forgets its own cache before each turn. So it computes all that it does not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import pytest

from harness.cluster.client import COMPLETIONS, WANT_TICKET, Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import HOST, MODEL_NAME, Engine, EngineSpec
from harness.cluster.metrics import COMPUTED_TOKENS, PROMPT_TOKENS, CountersSince
from harness.cluster.prompts import random_prompt
from nixl_kv.connector.conversations.content import OWNER
from platforms.conversing import MultiTurnProxy, kv_source
from support.chats import FOUND_TOKENS, conversing, forget, patient, say, say_counted, words
from support.engines import EVENT_S, started, without_connector

pytestmark = [pytest.mark.e2e, pytest.mark.platforms]

BLOCK: Final = 32  # of decode
FIRST: Final = 400
NEW: Final = 100
"""Tokens of the client in the first turn, and in a later one."""
ANSWERED: Final = 100
TURNS: Final = 4
STREAMS_PARAMS: Final = (0, 33)
"""The first vLLM whose streams end with `kv_transfer_params`."""


@dataclass(frozen=True)
class Engines:
    """Two prefill engines, a decode engine, and a single one."""

    prefill: tuple[Engine, Engine]
    decode: Engine
    to_prefill: tuple[Client, Client]
    to_decode: Client
    single: Client

    @property
    def streams_params(self) -> bool:
        major, minor = self.to_decode.vllm_version().split(".")[:2]
        return (int(major), int(minor)) >= STREAMS_PARAMS


@pytest.fixture(scope="module")
def engines(cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]) -> Iterator[Engines]:
    local = [
        replace(one, connector_config={**one.connector_config, "peers": [f"{HOST}/32"]})
        for one in base_specs
    ]
    readers = [
        patient(conversing(local[0], f"turns-prefill-{name}", "both", block_size=2 * BLOCK))
        for name in "ab"
    ]
    decode = conversing(local[1], "turns-decode", "decode", block_size=BLOCK)
    single = without_connector(decode, "turns-single")
    with (
        started(cluster, *readers, decode, single) as (one, two, third, alone),
        Client(one.url) as to_one,
        Client(two.url) as to_two,
        Client(third.url) as to_third,
        Client(alone.url) as to_single,
    ):
        yield Engines((one, two), third, (to_one, to_two), to_third, to_single)


def end_of(num_tokens: int) -> int:
    """Where the blocks end that decode has of a sequence; it has not computed the last token."""
    return (num_tokens - 1) // BLOCK * BLOCK


def test_vllms_multi_turn_proxy(engines: Engines) -> None:
    """Unchanged, with two prefill engines that it asks in turns.

    Where vLLM streams no `kv_transfer_params`, the proxy has nothing to send, and prefill asks the
    engine that it remembers. The second prefill engine does not know the chat before its own turn.
    """
    proxy = MultiTurnProxy(engines.prefill, [engines.decode])
    history = random_prompt(FIRST, seed=4900)
    carries = engines.streams_params
    for turn in range(TURNS):
        for client in engines.to_prefill:
            forget(client)
        to_prefill = engines.to_prefill[turn % 2]
        since = CountersSince(to_prefill)
        num_tokens = len(history.split())
        body = {"prompt": history, "model": MODEL_NAME, "max_tokens": ANSWERED, "temperature": 0}
        body |= {"ignore_eos": True, "skip_special_tokens": False}
        text = proxy.complete(COMPLETIONS, {**body, "conversation_id": "chat"})
        expected = engines.single.complete(history, ANSWERED, skip_special_tokens=False)
        assert text == expected.text
        assert len(text.split()) == ANSWERED
        asks = turn >= (1 if carries else 2)
        changed = since.wait_for(PROMPT_TOKENS, num_tokens, EVENT_S)
        most = num_tokens - end_of(num_tokens - NEW) if asks else num_tokens
        print(f"turn {turn + 1}: {num_tokens} tokens, computed {changed[COMPUTED_TOKENS]:.0f}")
        assert changed[COMPUTED_TOKENS] <= most + BLOCK
        assert (changed[COMPUTED_TOKENS] < num_tokens) == asks
        assert (OWNER in proxy.sent[-1]) == (carries and turn > 0)
        assert bool(proxy.kept) == carries
        history = " ".join((history, text, random_prompt(NEW, seed=4901 + turn)))


def test_a_router_may_name_the_engine_that_had_the_conversation(engines: Engines) -> None:
    """Prefill never had this prompt; decode's answer to another one names decode."""
    prefill, _ = engines.to_prefill
    other = words(0, 200, seed=20)
    first = say(prefill, other, 1, WANT_TICKET)
    hint = say(engines.to_decode, other, 1, first.params).params
    assert hint is not None
    prompt = words(0, FIRST, seed=21)
    answer = say(engines.to_decode, prompt, ANSWERED).tokens
    prompt = [*prompt, *answer, *words(1, NEW, seed=21)]
    forget(prefill)
    # vLLM's multi-turn proxy changes these fields, and no others.
    named = {**hint, "remote_host": engines.decode.address, "do_remote_prefill": False}
    first = say_counted(prefill, prompt, 1, {**WANT_TICKET, **named})
    assert first.computed <= len(prompt) - end_of(FIRST + ANSWERED) + BLOCK
    expected = say(engines.single, prompt, ANSWERED)
    assert say(engines.to_decode, prompt, ANSWERED, first.params).tokens == expected.tokens


def test_llm_ds_field_names_decode_to_prefill(engines: Engines) -> None:
    """Beside the fields of vLLM's own connector; prefill never had this prompt."""
    prefill, _ = engines.to_prefill
    prompt = words(0, FIRST, seed=30)
    answer = say(engines.to_decode, prompt, ANSWERED).tokens
    prompt = [*prompt, *answer, *words(1, NEW, seed=30)]
    forget(prefill)
    since = CountersSince(prefill)
    source = kv_source(HOST, engines.decode.side_port)
    first = say_counted(prefill, prompt, 1, {**WANT_TICKET, **source})
    assert first.computed <= len(prompt) - end_of(FIRST + ANSWERED) + BLOCK
    least = end_of(FIRST + ANSWERED) - BLOCK
    changed = since.wait(lambda now: now[FOUND_TOKENS] >= least, EVENT_S, step=True)
    assert changed[FOUND_TOKENS] >= least
    expected = say(engines.single, prompt, ANSWERED)
    assert say(engines.to_decode, prompt, ANSWERED, first.params).tokens == expected.tokens
