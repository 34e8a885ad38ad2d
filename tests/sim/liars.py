"""Peers that have the key and lie. They are not engines: they only send these messages.

A `Liar` poses as a decode engine: it asks for an offer, and says from then on that it reads it. It
stops when prefill answers that it holds nothing. `forge` poses as a decode engine's ranks, with
all that prefill has ever been told.
"""

import re
from typing import Final

from harness.local.memory_control import MemoryControl
from nixl_kv.ids import (
    ANY_INCARNATION,
    Claim,
    Endpoint,
    EngineId,
    HintKey,
    Incarnation,
    Rank,
    new_claim,
)
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import RankDescription, Reader, encode
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import FromEndpoint, FromPeer
from sim.engine import Engine
from sim.rank import Environment

MOST_NAMES: Final = 200
"""The latest ones; a schedule has about 100 loads."""

_NAME: Final = re.compile(rb"[0-9a-f]{32}")


class Liar:
    def __init__(self, number: int, environment: Environment) -> None:
        name = f"liar{number}"
        self._clock = environment.clock
        self._control = MemoryControl(environment.network, name)
        self._control.clock = environment.clock
        self._every_s = environment.config.lease_s / 4
        self._reader = Reader(
            engine=EngineId(name), incarnation=Incarnation(f"{number:032x}"), rank=Rank(0)
        )
        self._claim: Claim = new_claim()
        self._number = 0
        self._granted: dict[Endpoint, RankDescription] = {}
        self._asked: dict[Endpoint, RankDescription] = {}
        self._next_at = 0.0

    def ask(self, engine: Engine, ticket: Ticket) -> None:
        for rank in engine.description.ranks:
            self._asked[rank.endpoint] = rank
            ask = messages.Ask(
                incarnation=rank.incarnation,
                nonce=ticket.nonce,
                claim=self._claim,
                context=ticket.hashes,
                reader=self._reader,
                number=self._next(),
                readers=(self._reader.rank,),
                is_early=ticket.is_early,
            )
            self._control.send(rank.endpoint, encode(ask))

    def act(self) -> None:
        """Take the answers; keep claiming to read the granted blocks."""
        for item in self._control.poll(0) if self._control.inbox else ():
            if isinstance(item, FromEndpoint):
                self._on_answer(item)
            else:  # its prefill engine is gone
                self._granted.pop(Endpoint(getattr(item, "endpoint", "")), None)
        if not self._granted or self._clock.now < self._next_at:
            return
        self._next_at = self._clock.now + self._every_s
        for endpoint, rank in self._granted.items():
            heartbeat = messages.Heartbeat(
                incarnation=rank.incarnation,
                reader=self._reader,
                number=self._next(),
                claims=(self._claim,),
                num_reading=1,
            )
            self._control.send(endpoint, encode(heartbeat))

    def _on_answer(self, item: FromEndpoint) -> None:
        answer = messages.decode_answer(item.payload)
        if isinstance(answer, messages.Grant):
            self._granted[item.endpoint] = self._asked[item.endpoint]
        if isinstance(answer, messages.HeartbeatReply) and self._claim in answer.lost:
            self._granted.pop(item.endpoint, None)

    def _next(self) -> int:
        self._number += 1
        return self._number


def names_in(payload: bytes) -> list[str]:
    """Whatever could be the key of a load: claims, nonces, hashes, incarnations."""
    return [each.decode() for each in _NAME.findall(payload)]


def forge(engine: Engine, names: list[str]) -> None:
    """Tell a decode engine, in the name of all its ranks, that loads are ready and have landed."""
    for name in names:
        for number in range(len(engine.ranks)):
            incarnation = Incarnation(f"{number + 1:032x}")
            reader = Reader(
                engine=EngineId(engine.name), incarnation=incarnation, rank=Rank(number)
            )
            for kind in (messages.Ready, messages.Landed):
                hint = kind(incarnation=ANY_INCARNATION, hint_key=HintKey(name), reader=reader)
                engine.directory_control.inbox.append(FromPeer(b"liar", encode(hint)))
