"""One piece at a time from each peer: the same bytes, whatever the rows, in bounded pieces."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry import blocks
from nixl_kv.geometry.layout import Span
from nixl_kv.transport import paced
from nixl_kv.transport.base import Indices, ListHandle, ReadHandle
from nixl_kv.transport.memory import Fabric, MemoryTransport
from nixl_kv.transport.paced import PacedTransport

SIZE = 4096


class Watched(MemoryTransport):
    """Keeps how long each read is, and checks that there is one at a time."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self.lengths: list[int] = []
        self.under_way = 0

    def read(self, local: Any, remote: Any, indices: tuple[Indices, Indices]) -> Any:
        started = super().read(local, remote, indices)
        self.under_way += 1
        assert self.under_way == 1
        pieces = [remote_piece for _, remote_piece in started.pairs]
        for (address, length), (following, _) in pairwise(pieces):
            assert address + length == following, "what is read at once is one range"
        self.lengths.append(sum(length for _, length in pieces))
        return started

    def poll(self, read: Any) -> bool:
        try:
            ended = super().poll(read)
        except PeerLost:
            self.under_way -= 1
            raise
        self.under_way -= ended
        return ended


class World:
    def __init__(self) -> None:
        self.fabric = Fabric(polls=1)
        self.owner = MemoryTransport(self.fabric)
        self.watched = Watched(self.fabric)
        self.reader = PacedTransport(self.watched)
        rng = np.random.default_rng(1)
        self.remote_bytes = rng.integers(1, 256, SIZE, dtype=np.uint8)
        self.local_bytes = np.zeros(SIZE, dtype=np.uint8)
        self.owner.register(Span(self.remote_bytes.ctypes.data, SIZE), "DRAM", 0)
        self.reader.register(Span(self.local_bytes.ctypes.data, SIZE), "DRAM", 0)
        self.peer = self.reader.add_peer(self.owner.metadata())

    def lists(self, table: list[tuple[int, int, int, int]]) -> tuple[ListHandle, ListHandle]:
        """(offset, length, stride, count) of each row, the same on both sides."""
        prepared = []
        for memory, peer in ((self.local_bytes, None), (self.remote_bytes, self.peer)):
            rows = [(memory.ctypes.data + o, length, 0, s, n) for o, length, s, n in table]
            prepared.append(self.reader.prepare(np.array(rows, dtype=np.uint64), "DRAM", peer))
        return prepared[0], prepared[1]

    def finish(self, read: ReadHandle) -> None:
        for _ in range(10_000):
            if self.reader.poll(read):
                return
        raise AssertionError("it does not end")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced, "PIECE_BYTES", 16)


def ids(*numbers: int) -> blocks.BlockIds:
    return blocks.block_ids(numbers)


def test_a_long_run_is_read_in_parts() -> None:
    world = World()
    local, remote = world.lists([(0, 40, 48, 3)])
    world.finish(world.reader.read(local, remote, (ids(1), ids(2))))
    assert world.watched.lengths == [16, 16, 8]
    assert np.array_equal(world.local_bytes[48:88], world.remote_bytes[96:136])
    assert world.local_bytes[:48].sum() + world.local_bytes[88:].sum() == 0


def test_neighbours_are_read_together_as_far_as_they_fit_into_a_piece() -> None:
    world = World()
    local, remote = world.lists([(0, 4, 4, 100)])
    world.finish(world.reader.read(local, remote, (ids(*range(10)), ids(*range(20, 30)))))
    assert world.watched.lengths == [16, 16, 8]
    assert np.array_equal(world.local_bytes[:40], world.remote_bytes[80:120])


def test_reads_from_one_peer_wait_for_each_other() -> None:
    world = World()
    local, remote = world.lists([(0, 8, 8, 100)])
    reads = [world.reader.read(local, remote, (ids(n), ids(n))) for n in range(3)]
    assert not world.reader.poll(reads[2])
    for read in reads:
        world.finish(read)
    assert np.array_equal(world.local_bytes[:24], world.remote_bytes[:24])


def test_a_read_that_fails_lets_the_next_one_go_on() -> None:
    world = World()
    local, remote = world.lists([(0, 8, 8, 100)])
    reads = [world.reader.read(local, remote, (ids(n), ids(n))) for n in range(2)]
    assert not world.reader.poll(reads[0])
    world.fabric.lost_peers.add(world.peer)
    for read in reads:
        with pytest.raises(PeerLost):
            world.finish(read)
    assert not world.reader.queues[world.peer]


@pytest.mark.parametrize("index", [-1, 100])
def test_an_index_without_a_piece_is_refused(index: int) -> None:
    world = World()
    local, remote = world.lists([(0, 8, 8, 100)])
    with pytest.raises(TransportError, match=f"index {index}"):
        world.finish(world.reader.read(local, remote, (ids(index), ids(0))))


def test_a_read_of_nothing_is_refused() -> None:
    world = World()
    local, remote = world.lists([(0, 8, 8, 100)])
    with pytest.raises(TransportError, match="0 local and 0 remote"):
        world.reader.read(local, remote, (ids(), ids()))


def test_the_rest_is_as_with_the_inner_transport() -> None:
    world = World()
    assert world.reader.metadata() == world.watched.metadata()
    world.reader.progress()
    local, remote = world.lists([(0, 8, 8, 100)])
    world.finish(world.reader.read(local, remote, (ids(0), ids(0))))
    world.reader.drop_peer(world.peer)
    assert world.reader.queues == {}
    world.reader.close()
    assert world.watched.name not in world.fabric.transports


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
    assert max(world.watched.lengths) <= 16
