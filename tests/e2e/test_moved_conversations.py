"""A conversation that moves to another engine: that one reads from the engine that had it before.

Each engine forgets its own cache before its turn. So it computes all that it does not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import pytest

from harness.cluster.client import WANT_TICKET, Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import HOST, Engine, EngineSpec
from nixl_kv.connector.conversations.content import OWNER
from nixl_kv.protocol.ticket import FIELD
from platforms.conversing import kv_source
from support.chats import (
    Params,
    Said,
    Tokens,
    conversing,
    forget,
    patient,
    say,
    say_counted,
    words,
)
from support.engines import started, without_connector

pytestmark = pytest.mark.e2e

BLOCK: Final = 32
FIRST: Final = 300
NEW: Final = 60
"""Tokens of the client in the first turn, and in a later one."""
ANSWERED: Final = 60


@dataclass(frozen=True)
class Fleet:
    """Two engines that do both (`kv_both`), one that only decodes, and a single one."""

    engines: tuple[Engine, Engine, Engine]
    first: Client
    second: Client
    decode: Client
    single: Client

    def source(self, engine: Client) -> Params:
        """The fields in which llm-d's sidecar names an engine."""
        (named,) = [one for one in self.engines if one.url == engine.url]
        return kv_source(named.address, named.side_port)

    def expect_right(self, prompt: Tokens, said: Said) -> None:
        assert said.tokens == say(self.single, prompt, len(said.tokens)).tokens


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]) -> Iterator[Fleet]:
    local = {**base_specs[0].connector_config, "peers": [f"{HOST}/32"]}
    base = replace(base_specs[0], connector_config=local, block_size=BLOCK, cores=frozenset())
    first, second = (patient(conversing(base, f"moved-{n}", "both")) for n in ("a", "b"))
    decode = patient(conversing(base, "moved-decode", "decode"))
    single = without_connector(decode, "moved-single")
    with (
        started(cluster, first, second, decode, replace(single, extra_args=())) as engines,
        Client(engines[0].url) as to_first,
        Client(engines[1].url) as to_second,
        Client(engines[2].url) as to_decode,
        Client(engines[3].url) as to_single,
    ):
        one, two, third, _ = engines
        yield Fleet((one, two, third), to_first, to_second, to_decode, to_single)


def end_of(num_tokens: int) -> int:
    """Where the full blocks of a prompt end."""
    return num_tokens // BLOCK * BLOCK


def continued(prompt: Tokens, said: Said, turn: int, seed: int) -> Tokens:
    return [*prompt, *said.tokens, *words(turn, NEW, seed)]


def test_between_engines_that_serve_whole_requests(fleet: Fleet) -> None:
    """There and back, as when a router balances load: each reads the other's answers."""
    prompt = words(0, FIRST, seed=40)
    said = say(fleet.first, prompt, ANSWERED)
    fleet.expect_right(prompt, said)
    before, now = fleet.first, fleet.second
    for turn in range(1, 4):
        held = end_of(len(prompt) + ANSWERED - 1)
        prompt = continued(prompt, said, turn, seed=40)
        forget(now)
        said = say_counted(now, prompt, ANSWERED, fleet.source(before))
        print(f"turn {turn + 1}: {len(prompt)} tokens, computed {said.computed:.0f}")
        fleet.expect_right(prompt, said)
        assert said.computed == len(prompt) - held
        assert said.cached == held
        before, now = now, before


def test_between_engines_that_decode(fleet: Fleet) -> None:
    """The next turn goes to another decode engine, without prefill."""
    prompt = words(0, FIRST, seed=41)
    ticket = say(fleet.second, prompt, 1, WANT_TICKET).params
    said = say(fleet.first, prompt, ANSWERED, ticket)
    fleet.expect_right(prompt, said)
    held = end_of(len(prompt) + ANSWERED - 1)
    prompt = continued(prompt, said, 1, seed=41)
    forget(fleet.second)
    said = say_counted(fleet.second, prompt, ANSWERED, fleet.source(fleet.first))
    fleet.expect_right(prompt, said)
    assert said.computed == len(prompt) - held


@pytest.mark.parametrize("named_by", ["source", "its ticket"])
def test_between_engines_that_prefill(fleet: Fleet, named_by: str) -> None:
    """The next turn goes to another prefill engine, which reads the former one's part."""
    seed = 42 + len(named_by)
    prompt = words(0, FIRST, seed)
    ticket = say(fleet.first, prompt, 1, WANT_TICKET).params
    assert ticket is not None
    said = say(fleet.decode, prompt, ANSWERED, ticket)
    fleet.expect_right(prompt, said)
    named: Params = fleet.source(fleet.first)
    if named_by == "its ticket":
        named = {OWNER: ticket[FIELD]}
    held = end_of(len(prompt))
    prompt = continued(prompt, said, 1, seed)
    forget(fleet.second)
    first = say_counted(fleet.second, prompt, 1, {**named, **WANT_TICKET})
    said = say(fleet.decode, prompt, ANSWERED, first.params)
    fleet.expect_right(prompt, said)
    assert first.computed == len(prompt) - held


def test_an_engine_that_only_decodes_computes_the_whole_prompt(fleet: Fleet) -> None:
    prompt = words(0, FIRST, seed=45)
    said = say(fleet.first, prompt, ANSWERED)
    prompt = continued(prompt, said, 1, seed=45)
    said = say_counted(fleet.decode, prompt, ANSWERED, fleet.source(fleet.first))
    fleet.expect_right(prompt, said)
    assert said.computed == len(prompt)
