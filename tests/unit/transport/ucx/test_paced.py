"""Piece by piece, one in each stream: the same bytes, whatever the rows, in bounded pieces."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import BlockIds, Span, block_ids
from nixl_kv.transport.base import Indices, ListHandle, PeerName, ReadHandle
from nixl_kv.transport.ucx import paced
from nixl_kv.transport.ucx.paced import (
    MAX_STREAMS,
    MIN_STREAMS,
    PIECE_BYTES,
    PacedTransport,
    Window,
)
from support.stepped import Background

SIZE = 4096


class Watched(MemoryTransport):
    """Keeps how long each read is, and checks that a peer has one at a time."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self.lengths: list[int] = []
        self.reading: Counter[str] = Counter()
        self.doubt: TransportError | None = None
        self.peers: set[PeerName] = set()
        self.num_polls = 0

    def add_peer(self, metadata: bytes) -> PeerName:
        name = super().add_peer(metadata)
        self.peers.add(name)
        return name

    def drop_peer(self, peer: PeerName) -> None:
        self.peers.remove(peer)

    def read(self, local: Any, remote: Any, indices: tuple[Indices, Indices]) -> Any:
        started = super().read(local, remote, indices)
        self.reading[started.peer] += 1
        assert self.reading[started.peer] == 1
        assert len(started.pairs) == 1, "one read is one range"
        self.lengths += [length for _, (_, length) in started.pairs]
        return started

    def poll(self, read: Any) -> bool:
        self.num_polls += 1
        if self.doubt is not None:
            raise self.doubt
        try:
            ended = super().poll(read)
        except PeerLost:
            self.reading[read.peer] -= 1
            raise
        self.reading[read.peer] -= ended
        return ended

    @property
    def under_way(self) -> int:
        return self.reading.total()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIECE_BYTES", "SHORT_BYTES"):
        monkeypatch.setattr(paced, name, 16)


def ids(*numbers: int) -> BlockIds:
    return block_ids(numbers)


class World:
    def __init__(self, *, is_tcp: bool = True) -> None:
        self.fabric = Fabric(polls=1)
        self.owner = MemoryTransport(self.fabric)
        self.agents: list[Watched] = []
        self.now: Iterator[int] = itertools.count()
        self.background = Background()
        self.reader = PacedTransport(
            self.make_agent(),
            self.make_agent,
            lambda _: is_tcp,
            self.background,
            clock=lambda: next(self.now) * 1e-3,
        )
        rng = np.random.default_rng(1)
        self.remote_bytes = rng.integers(1, 256, SIZE, dtype=np.uint8)
        self.local_bytes = np.zeros(SIZE, dtype=np.uint8)
        self.owner.register(Span(self.remote_bytes.ctypes.data, SIZE), "DRAM", 0)
        self.reader.register(Span(self.local_bytes.ctypes.data, SIZE), "DRAM", 0)
        self.peer = self.reader.add_peer(self.owner.metadata())
        self.pieces: tuple[ListHandle, ListHandle] | None = None

    def make_agent(self) -> Watched:
        self.agents.append(Watched(self.fabric))
        return self.agents[-1]

    @property
    def lengths(self) -> list[int]:
        return [length for agent in self.agents for length in agent.lengths]

    def lists(self, table: list[tuple[int, int, int, int]]) -> tuple[ListHandle, ListHandle]:
        """(offset, length, stride, count) of each row, the same on both sides."""
        prepared = []
        for memory, peer in ((self.local_bytes, None), (self.remote_bytes, self.peer)):
            rows = [(memory.ctypes.data + o, length, 0, s, n) for o, length, s, n in table]
            prepared.append(self.reader.prepare(np.array(rows, dtype=np.uint64), "DRAM", peer))
        return prepared[0], prepared[1]

    def start(self, *numbers: int) -> ReadHandle:
        """Read these pieces, of 16 bytes each."""
        self.pieces = self.pieces or self.lists([(0, 16, 32, 128)])
        return self.reader.read(*self.pieces, (ids(*numbers), ids(*numbers)))

    def finish(self, read: ReadHandle) -> None:
        for _ in range(10_000):
            if self.reader.poll(read):
                return
        raise AssertionError("it does not end")


@pytest.fixture
def world() -> World:
    return World()


def test_neighbours_are_read_together_as_far_as_they_fit_into_a_piece(world: World) -> None:
    local, remote = world.lists([(0, 4, 4, 100)])
    world.finish(world.reader.read(local, remote, (ids(*range(10)), ids(*range(20, 30)))))
    assert sorted(world.lengths) == [8, 16, 16]
    assert np.array_equal(world.local_bytes[:40], world.remote_bytes[80:120])
    of_two_rows = world.lists([(0, 4, 100, 1), (4, 8, 100, 1)])
    world.finish(world.reader.read(*of_two_rows, (ids(0, 1), ids(0, 1))))
    assert sorted(world.lengths) == [8, 12, 16, 16]


def test_a_link_that_waits_for_its_round_trip_gets_more_streams(world: World) -> None:
    """The read goes on while each of them connects."""
    world.fabric.polls = 20
    world.background.is_held = True
    read = world.start(*range(128))
    while len(world.lengths) < 20:
        assert not world.reader.poll(read)
    assert len(world.background) == len(world.agents) == 1
    world.background.is_held = False
    world.background.work()
    world.finish(read)
    assert 2 < len(world.agents) <= paced.MAX_STREAMS
    assert all(agent.lengths for agent in world.agents)
    for start in range(0, SIZE, 32):
        piece = slice(start, start + 16)
        assert np.array_equal(world.local_bytes[piece], world.remote_bytes[piece])


def pieces_of_another_peer(world: World) -> ListHandle:
    other = MemoryTransport(world.fabric)
    other.register(Span(world.remote_bytes.ctypes.data, SIZE), "DRAM", 0)
    name = world.reader.add_peer(other.metadata())
    rows = np.array([(world.remote_bytes.ctypes.data, 16, 0, 32, 100)], dtype=np.uint64)
    return world.reader.prepare(rows, "DRAM", name)


def test_an_agent_that_is_being_connected_to_another_peer_is_left_alone(world: World) -> None:
    """It begins no read, and its reads are not polled."""
    local, _ = world.lists([(0, 16, 32, 100)])
    world.finish(world.start(*range(50)))
    theirs = pieces_of_another_peer(world)
    world.background.is_held, world.fabric.polls = True, 5
    world.reader._peers[world.peer].max_streams = 2  # so that the other peer is connected next
    read = world.start(*range(60, 80))
    first, second, *_ = world.agents
    while not second.under_way:
        assert not world.reader.poll(read)
    their_read = world.reader.read(local, theirs, (ids(*range(60, 80)), ids(*range(60, 80))))
    while not world.background:
        assert not world.reader.poll(their_read)
    before = [(agent.num_polls, len(agent.lengths)) for agent in (first, second)]
    for _ in range(19):
        assert not world.reader.poll(read)
    assert first.num_polls > before[0][0]
    assert len(first.lengths) > before[0][1]
    assert (second.num_polls, len(second.lengths)) == before[1]
    world.background.work()
    world.finish(read)
    world.finish(their_read)
    assert len(second.lengths) > before[1][1]


def test_a_peer_that_is_dropped_meanwhile_is_dropped_there_too(world: World) -> None:
    world.background.is_held = True
    read = world.start(*range(9))
    world.finish(read)
    assert len(world.background) == 1
    world.reader.drop_peer(world.peer)
    world.background.work()
    assert world.peer in world.agents[1].peers
    world.reader.close()
    assert world.peer not in world.agents[1].peers
    assert not set(world.fabric.transports) & {agent.name for agent in world.agents}


@pytest.mark.parametrize("error", [TransportError("no more files"), KeyError("a bug")], ids=repr)
def test_a_further_connection_that_fails_costs_only_itself(
    world: World,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if an agent was made by then: it is closed."""
    monkeypatch.setattr(Watched, "register", Mock(side_effect=error))
    world.finish(world.start(*range(9)))
    assert world.lengths == [16] * 9
    _, further = world.agents
    assert further.name not in world.fabric.transports
    assert caplog.text.count("keeps 1 connections, because another failed: ") == 1


def test_the_end_waits_for_a_connection_that_is_being_made_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced, "CONNECTED_S", 0.01)
    world.background.is_held = True
    world.finish(world.start(*range(9)))
    assert world.reader._job is not None
    connecting = world.reader._job.result
    assert connecting.set_running_or_notify_cancel()
    for _ in range(2):
        with pytest.raises(TransportError, match="still connects"):
            world.reader.close()
    connecting.set_result(world.make_agent())
    world.reader.close()
    assert not set(world.fabric.transports) & {agent.name for agent in world.agents}


def test_a_short_read_does_not_wait_for_a_long_one(world: World) -> None:
    long = world.start(*range(50))
    assert not world.reader.poll(long)
    short = world.start(70)
    world.finish(short)
    assert not world.reader.poll(long)
    world.finish(long)


def test_reads_are_not_polled_twice_in_no_time(world: World) -> None:
    world.finish(world.start(0))
    world.fabric.polls = 3
    read = world.start(1)
    world.now = itertools.repeat(next(world.now))
    assert not any(world.reader.poll(read) for _ in range(9))
    world.now = itertools.count(next(world.now) + 1)
    world.finish(read)


def test_of_a_read_that_is_stopped_nothing_more_is_asked_for(world: World) -> None:
    world.fabric.polls = 5
    read = world.start(*range(0, 80, 2))
    other = world.start(1, 3)
    assert not world.reader.poll(read)
    assert world.reader.stop(read)
    asked = sum(len(agent.lengths) for agent in world.agents)
    assert not world.reader.poll(read), "reads under way go on"
    assert not world.reader.stop(read), "it was stopped before"
    world.finish(other)
    world.finish(read)
    assert sum(len(agent.lengths) for agent in world.agents) == asked + 2
    assert not world.reader.stop(other), "all of it was read"
    direct = World(is_tcp=False)
    lists = direct.lists([(0, 16, 32, 100)])
    assert not direct.reader.stop(direct.reader.read(*lists, (ids(1), ids(1))))


def test_a_lost_peer_fails_all_its_reads(world: World) -> None:
    world.fabric.polls = 5
    reads = [world.start(*p) for p in ([1, 2, 3], [4, 5])]
    assert not world.reader.poll(reads[0])
    world.fabric.lost_peers.add(world.peer)
    for read in reads:
        with pytest.raises(PeerLost):
            world.finish(read)
    assert not any(agent.under_way for agent in world.agents)


def test_a_connection_that_breaks_fails_a_read_when_the_others_have_ended_theirs(
    world: World,
) -> None:
    world.fabric.polls = 5
    read = world.start(1, 3, 5)
    while [agent.under_way for agent in world.agents] != [1, 1]:
        assert not world.reader.poll(read)
    world.agents[0].doubt = PeerLost("it was reset")
    with pytest.raises(PeerLost, match="it was reset"):
        world.finish(read)
    assert world.agents[1].under_way == 0


def test_an_error_that_leaves_the_end_open_is_told_at_once(world: World) -> None:
    world.fabric.polls = 5
    read = world.start(1, 3)
    assert not world.reader.poll(read)
    world.agents[0].doubt = TransportError("the cause is unknown")
    with pytest.raises(TransportError, match="the cause is unknown"):
        world.finish(read)
    world.agents[0].doubt = None
    other = world.start(5)
    world.finish(other)  # in another stream: the reads of the first one stay alone there
    assert world.agents[0].under_way == 1


@pytest.mark.parametrize(
    ("local", "remote", "words"),
    [
        ([-1], [0], "index -1"),
        ([101], [0], "index 101"),
        ([0], [100], "differ in length"),
        ([], [], "0 local and 0 remote"),
    ],
)
def test_a_read_that_makes_no_sense_is_refused(
    world: World, local: list[int], remote: list[int], words: str
) -> None:
    lists = world.lists([(0, 8, 8, 100), (800, 9, 9, 1)])
    with pytest.raises(TransportError, match=words):
        world.reader.read(*lists, (ids(*local), ids(*remote)))


def test_reads_without_tcp_are_not_paced() -> None:
    world = World(is_tcp=False)
    local, remote = world.lists([(0, 40, 48, 3)])
    world.finish(world.reader.read(local, remote, (ids(1), ids(2))))
    assert world.lengths == [40]
    assert len(world.agents) == 1
    world.reader.drop_peer(world.peer)
    world.reader.close()


row = st.tuples(st.integers(1, 50), st.integers(0, 6), st.integers(1, 8))


@given(rows=st.lists(row, min_size=1, max_size=4), data=st.data())
def test_whatever_the_rows_the_bytes_are_those_of_the_pieces(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    world = World()
    table, offset, pieces = [], 0, []
    for length, gap, count in rows:
        table.append((offset, length, length + gap, count))
        pieces += [(offset + i * (length + gap), length) for i in range(count)]
        offset += count * (length + gap)
    chosen = data.draw(st.lists(st.sampled_from(range(len(pieces))), min_size=1, unique=True))
    local, remote = world.lists(table)
    if data.draw(st.booleans()):
        chosen.sort()
    world.finish(world.reader.read(local, remote, (ids(*chosen), ids(*chosen))))
    expected = np.zeros_like(world.local_bytes)
    for index in chosen:
        start, length = pieces[index]
        expected[start : start + length] = world.remote_bytes[start : start + length]
    assert np.array_equal(world.local_bytes, expected)
    assert max(world.lengths) <= 16


def test_facts_for_the_peers_stand_behind_the_metadata(world: World) -> None:
    agent, background = world.agents[0], world.background
    reader = PacedTransport(agent, world.make_agent, bool, background, facts=b"|facts")
    assert reader.metadata() == world.agents[0].metadata() + b"|facts"


# How much is under way: as much as the link holds, within bounds


class Link:
    """One after the other, pieces take their time on it; each has gone round before that."""

    def __init__(self, rate: float, round_trip_s: float) -> None:
        self.rate, self.round_trip_s = rate, round_trip_s
        self.window = Window()
        self.now = 0.0
        self.free_at = 0.0
        self.under_way: list[tuple[float, int, float, int]] = []

    def move(self, num_bytes: int, run: int | None = None) -> float:
        """Move bytes; return the seconds."""
        begin, left = self.now, num_bytes
        while left or self.under_way:
            while left and len(self.under_way) < self.window.streams:
                piece = min(left, PIECE_BYTES, run or left)
                left -= piece
                self.free_at = max(self.free_at, self.now + self.round_trip_s) + piece / self.rate
                self.under_way.append((self.free_at, piece, self.now, self.window.arrived))
            self.under_way.sort(key=lambda one: one[0])
            self.now, piece, at, before = self.under_way.pop(0)
            self.window.end(piece, self.now - at, before=before)
        return self.now - begin


@pytest.mark.parametrize("round_trip_s", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("rate", [1.25e7, 1.25e8, 1.25e9])
def test_a_link_is_filled_whatever_its_round_trip(rate: float, round_trip_s: float) -> None:
    link = Link(rate, round_trip_s)
    link.move(int(rate / 2))
    seconds = link.move(int(rate))
    assert seconds == pytest.approx(1.0, rel=0.1)
    assert link.window.rate == pytest.approx(rate, rel=0.1)


def test_small_runs_are_read_in_as_many_streams_as_there_may_be() -> None:
    link = Link(1.25e9, 1e-3)
    link.move(1 << 28, run=16 << 10)
    assert link.window.streams > MIN_STREAMS


def test_a_link_has_a_limited_number_of_streams() -> None:
    window = Window()
    assert window.streams == MIN_STREAMS
    window.end(1 << 30, 1.0, is_part=False)
    assert window.streams == MAX_STREAMS
