"""Peers that share a rank's endpoint: two incarnations of one engine, met one after the other."""

from types import SimpleNamespace
from typing import Any, Final

import pytest

from nixl_kv.ids import Endpoint, EngineId, Incarnation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.peers import KEPT_S, Peer, PeerBook
from support.records import hex32, reader

RANK: Final = Endpoint("tcp://10.0.0.1:5601")
DIRECTORY: Final = Endpoint("tcp://10.0.0.1:5600")
SOURCES: Final = ("10.0.0.9",)


class Decode:
    def __init__(self) -> None:
        self.book = PeerBook(lambda _: None, reader)
        self.sent: list[Any] = []

    def meet(self, life: int, now: float, endpoint: Endpoint = RANK) -> Peer:
        """Until NIXL has added the only rank of this incarnation."""
        key = events.PeerKey(EngineId("prefill"), Incarnation(hex32(life)), DIRECTORY)
        peer, _ = self.book.get_or_connect(key, now)
        rank = SimpleNamespace(endpoint=endpoint, incarnation=hex32(100 + life))
        described: Any = SimpleNamespace(ranks=[rank], incarnation=key.incarnation)
        introduction = events.Introduction(0, SOURCES, ("10.0.0.1",))  # type: ignore[arg-type]
        self.send(self.book.on_fits(events.PeerFits(key, described, (), (introduction,)), now))
        answer = messages.Admitted(
            incarnation=rank.incarnation, reader=reader(), sources=(), refused=()
        )
        self.send(self.book.on_admitted(answer, endpoint, now))
        self.send(self.book.on_handshake_done(events.HandshakeDone(key), now))
        return peer

    def send(self, actions: Any) -> None:
        self.sent += [each.message for each in actions if isinstance(each, events.Send)]

    def leaves(self) -> list[str]:
        return [each.incarnation for each in self.sent if isinstance(each, messages.Leave)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_forgotten_incarnation_does_not_end_what_another_was_admitted_for(
    *, is_shared: bool
) -> None:
    """The filter knows decode's address once: `Leave` would end the connections of both."""
    decode = Decode()
    decode.meet(1, 0.0)
    new = decode.meet(2, 10.0, RANK if is_shared else Endpoint("tcp://10.0.0.1:5602"))
    for now in (KEPT_S + 1, KEPT_S + 2):
        new.used_at = now
        decode.send(decode.book.on_tick(events.Tick(), lambda key: key == new.key, now))
    assert list(decode.book.known) == [new.key]
    assert decode.leaves() == ([] if is_shared else [hex32(101)])
    decode.send(decode.book.on_tick(events.Tick(), lambda _: False, 3 * KEPT_S))
    assert decode.leaves()[-1] == hex32(102), "the last one leaves"
