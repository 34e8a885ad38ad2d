"""Peers that share a rank's endpoint, and the farewell of those that this rank cannot use."""

from types import SimpleNamespace
from typing import Any, Final

import pytest

from nixl_kv.ids import Endpoint, EngineId, Incarnation, Rank
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.peers import (
    CONNECT_TIMEOUT_S,
    KEPT_S,
    LOOK_AGAIN_S,
    MAX_PAUSE_S,
    PAUSE_S,
    Peer,
    PeerBook,
    PeerState,
    pause_after,
)
from support.records import hex32, prepare_load, reader

RANK: Final = Endpoint("tcp://10.0.0.1:5601")
DIRECTORY: Final = Endpoint("tcp://10.0.0.1:5600")
SOURCES: Final = ("10.0.0.9",)


def peer_life(life: int, rank: int) -> Incarnation:
    return Incarnation(hex32(100 * (rank + 1) + life))


class Decode:
    def __init__(self) -> None:
        self.book = PeerBook(lambda _: None, reader)
        self.sent: list[Any] = []

    def meet(
        self,
        life: int,
        now: float,
        *endpoints: Endpoint,
        silent: Endpoint | None = None,
        is_read: bool = True,
    ) -> Peer:
        """Until the ranks of this incarnation were read once, unless one is silent."""
        endpoints = endpoints or (RANK,)
        key = events.PeerKey(EngineId("prefill"), Incarnation(hex32(life)), DIRECTORY)
        peer, _ = self.book.want(key, prepare_load(), now, is_sealed=True)
        assert peer is not None
        ranks = [
            SimpleNamespace(endpoint=endpoint, incarnation=peer_life(life, number))
            for number, endpoint in enumerate(endpoints)
        ]
        described: Any = SimpleNamespace(ranks=ranks, incarnation=key.incarnation)
        introductions = tuple(
            events.Introduction(Rank(number), SOURCES, ("10.0.0.1",))
            for number in range(len(ranks))
        )
        self.send(self.book.on_fits(events.PeerFits(key, described, (), introductions), now))
        for rank in ranks:
            answer = messages.Admitted(incarnation=rank.incarnation, reader=reader(), sources=())
            if rank.endpoint != silent:
                self.send(self.book.on_admitted(answer, rank.endpoint, now))
        if is_read:
            self.send(self.book.on_handshake_done(events.HandshakeDone(key), now))
        return peer

    def send(self, actions: Any) -> None:
        self.sent += [each.message for each in actions if isinstance(each, events.Send)]

    def leaves(self) -> list[str]:
        return [each.incarnation for each in self.sent if isinstance(each, messages.Leave)]


def test_the_tokens_of_ranks_come_with_their_admission() -> None:
    """A rank on this host without an address has no port that admits hosts."""
    decode, other = Decode(), Endpoint("tcp://10.0.0.1:5602")
    key = events.PeerKey(EngineId("prefill"), Incarnation(hex32(1)), DIRECTORY)
    ranks = [
        SimpleNamespace(endpoint=endpoint, incarnation=peer_life(1, number))
        for number, endpoint in enumerate((RANK, other))
    ]
    described: Any = SimpleNamespace(ranks=ranks, incarnation=key.incarnation)
    wanted = tuple(events.Introduction(Rank(number), (), (), maps=True) for number in range(2))
    for attempt in (1, 2):
        now = 100.0 * attempt
        decode.book.want(key, prepare_load(), now, is_sealed=True)
        decode.send(decode.book.on_fits(events.PeerFits(key, described, (), wanted), now))
        asked = [each for each in decode.sent if isinstance(each, messages.Admit)][-2:]
        assert [each.maps for each in asked] == [True, True]
        connect: list[Any] = []
        for number, rank in enumerate(ranks):
            token = b"%d" % attempt if number else b""  # the first one shares nothing
            answer = messages.Admitted(
                incarnation=rank.incarnation, reader=reader(), sources=(), token=token
            )
            connect += decode.book.on_admitted(answer, rank.endpoint, now)
        assert connect == [events.Connect(key, (), {Rank(1): b"%d" % attempt})]
        lost = events.EndpointLost(RANK, "closed")
        decode.send(decode.book.on_endpoint_lost(lost, {key}, now))
        decode.send(decode.book.on_tick(events.Tick(), lambda _: False, now + 50))
    assert decode.leaves() == [], "it was let in nowhere"


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_forgotten_incarnation_does_not_end_the_admission_of_another(*, is_shared: bool) -> None:
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


@pytest.mark.parametrize("is_read", [False, True])
def test_a_lost_peer_lets_its_other_ranks_forget_this_one(*, is_read: bool) -> None:
    """Prefill would keep the addresses of this rank for 900 s. A dead rank would not hear it."""
    decode, other = Decode(), Endpoint("tcp://10.0.0.1:5602")
    peer = decode.meet(1, 0.0, RANK, other)
    lost = events.EndpointLost(other, "closed")
    decode.send(decode.book.on_endpoint_lost(lost, {peer.key}, 10.0))
    assert decode.leaves() == []
    decode.send(decode.book.on_tick(events.Tick(), lambda _: is_read, 10.0))
    assert len(decode.leaves()) == (0 if is_read else 1)
    decode.send(decode.book.on_tick(events.Tick(), lambda _: False, 10.0 + LOOK_AGAIN_S))
    assert decode.leaves() == [peer_life(1, 0)]
    assert [each.reader for each in decode.sent if isinstance(each, messages.Leave)] == [reader()]
    decode.send(decode.book.on_tick(events.Tick(), lambda _: False, 2 * KEPT_S))
    assert len(decode.leaves()) == 1, "it says farewell once"
    assert peer.key not in decode.book.known


def test_ranks_that_let_this_one_in_hear_of_it_if_another_does_not() -> None:
    decode, other = Decode(), Endpoint("tcp://10.0.0.1:5602")
    peer = decode.meet(1, 0.0, RANK, other, silent=other)
    decode.send(decode.book.on_tick(events.Tick(), lambda _: False, CONNECT_TIMEOUT_S))
    assert peer.state is PeerState.UNUSABLE
    decode.send(decode.book.on_tick(events.Tick(), lambda _: False, CONNECT_TIMEOUT_S))
    # An admission may still be under way, and this comes after it.
    assert decode.leaves() == [peer_life(1, 0), peer_life(1, 1)]


def described(life: int) -> Any:
    return SimpleNamespace(ranks=(), engine="prefill", incarnation=hex32(life))


def key_of(life: int) -> events.PeerKey:
    return events.PeerKey(EngineId("prefill"), Incarnation(hex32(life)), DIRECTORY)


@pytest.mark.parametrize("is_read", [False, True], ids=["unused", "still read"])
@pytest.mark.parametrize("has_failed", [False, True], ids=["READY", "UNUSABLE"])
def test_a_former_life_is_forgotten_when_another_is_described(
    *, has_failed: bool, is_read: bool
) -> None:
    """It would count as READY for ten minutes, although its engine is gone."""
    decode = Decode()
    former = decode.meet(1, 0.0)
    if has_failed:
        lost = events.EndpointLost(RANK, "closed")
        decode.send(decode.book.on_endpoint_lost(lost, {former.key}, 1.0))
    expected = PeerState.UNUSABLE if has_failed else PeerState.READY
    assert decode.book.num_in[expected] == 1
    decode.book.want(key_of(2), prepare_load(), 10.0, is_sealed=True)
    decode.book.on_tick(events.Tick(), lambda _: False, 10.0)
    assert former.key in decode.book.known, "the ticket may be forged"
    decode.book.on_description(described(2), DIRECTORY, 10.0)
    decode.book.on_tick(events.Tick(), lambda key: is_read and key == former.key, 10.0)
    assert (former.key in decode.book.known) is is_read
    decode.book.on_tick(events.Tick(), lambda _: False, 10.0 + LOOK_AGAIN_S)
    assert list(decode.book.known) == [key_of(2)]
    assert decode.book.num_in[expected] == 0


def test_a_description_from_elsewhere_ends_no_life() -> None:
    """An engine that listens at two addresses has one life, and two engines have two."""
    decode = Decode()
    peer = decode.meet(1, 0.0)
    elsewhere = Endpoint("tcp://10.0.0.2:5600")
    other = events.PeerKey(EngineId("prefill"), Incarnation(hex32(2)), elsewhere)
    decode.book.want(other, prepare_load(), 10.0, is_sealed=True)
    decode.book.on_description(described(2), elsewhere, 10.0)
    decode.book.on_tick(events.Tick(), lambda _: False, 10.0)
    assert set(decode.book.known) == {peer.key, other}


@pytest.mark.parametrize(
    ("failures", "pause_s"),
    [(0, PAUSE_S), (1, 2 * PAUSE_S), (5, 32 * PAUSE_S), (6, MAX_PAUSE_S), (5000, MAX_PAUSE_S)],
)
def test_a_pause_doubles_up_to_a_bound(failures: int, pause_s: float) -> None:
    """A peer that answers but cannot be read may fail for days."""
    assert pause_after(failures) == pause_s
