"""The data plane inside one process: as strict as a real link, and its reads land when asked to."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Span, block_ids
from nixl_kv.transport.base import PeerName, ReadHandle, Rows


def rows(*table: tuple[int, int, int, int, int]) -> Rows:
    return np.array(table, dtype=np.uint64).reshape(-1, 5)


class Side:
    """64 registered bytes, and a list of 8 pieces of 4 bytes, 8 bytes apart."""

    def __init__(self, fabric: Fabric, first: int) -> None:
        self.transport = MemoryTransport(fabric)
        self.bytes = np.arange(first, first + 64, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.transport.register(Span(self.address, 64), "DRAM", 0)
        self.rows = rows((self.address, 4, 0, 8, 8))


class Link:
    """One side reads the other."""

    def __init__(self) -> None:
        self.fabric = Fabric(polls=0)
        self.local, self.remote = Side(self.fabric, 0), Side(self.fabric, 100)
        self.transport = self.local.transport
        self.peer = self.transport.add_peer(self.remote.transport.metadata())
        self.ours = self.transport.prepare(self.local.rows, "DRAM", None)
        self.theirs = self.transport.prepare(self.remote.rows, "DRAM", self.peer)

    def read(self, local: Sequence[int], remote: Sequence[int]) -> ReadHandle:
        return self.transport.read(self.ours, self.theirs, (block_ids(local), block_ids(remote)))


@pytest.fixture
def link() -> Link:
    return Link()


def test_pieces_are_copied_pair_by_pair_and_once(link: Link) -> None:
    expected = link.local.bytes.copy()
    expected[0:4] = link.remote.bytes[56:60]
    expected[24:28] = link.remote.bytes[0:4]
    read = link.read([0, 3], [7, 0])
    assert link.local.bytes.tolist() == list(range(64)), "it lands at a poll"
    assert link.transport.poll(read)
    assert np.array_equal(link.local.bytes, expected)
    link.remote.bytes[:] = 0
    assert link.transport.poll(read)
    assert np.array_equal(link.local.bytes, expected)
    assert link.fabric.bytes_copied == 8


def test_a_read_copies_the_bytes_that_are_there_after_so_many_polls(link: Link) -> None:
    link.fabric.polls = 2
    early = link.read([1], [1])
    assert not link.transport.poll(early)
    late = link.read([2], [2])
    assert not link.transport.poll(early)
    link.fabric.hanging_peers.add(link.remote.transport.name)
    assert not link.transport.poll(early)
    link.fabric.hanging_peers.clear()
    link.remote.bytes[8] = 77
    assert link.transport.poll(early)
    assert link.local.bytes[8] == 77
    assert not link.transport.poll(late)


def test_a_lost_or_closed_peer_can_neither_be_read_nor_added(link: Link) -> None:
    read, name = link.read([0], [0]), link.remote.transport.name
    link.fabric.lost_peers.add(name)
    for _ in ("lost", "closed"):
        with pytest.raises(PeerLost, match=f"^peer {name!r} is gone$"):
            link.transport.poll(read)
        with pytest.raises(PeerLost, match=f"^no peer {name!r} on the fabric$"):
            link.transport.add_peer(link.remote.transport.metadata())
        link.remote.transport.close()
        link.fabric.lost_peers.clear()
    with pytest.raises(PeerLost, match=f"^peer {name!r} has left the fabric$"):
        link.transport.prepare(link.remote.rows, "DRAM", PeerName(name))


# Of the 64 bytes of one side: (offset, length, stride, count).
@pytest.mark.parametrize("row", [(0, 65, 65, 1), (-1, 4, 4, 1), (61, 4, 4, 1), (0, 5, 60, 2)])
def test_only_registered_memory_can_be_prepared(link: Link, row: tuple[int, int, int, int]) -> None:
    offset, length, stride, count = row
    for side, peer in ((link.local, None), (link.remote, link.peer)):
        table = rows((side.address + offset, length, 0, stride, count))
        with pytest.raises(TransportError, match=r" is not registered$"):
            link.transport.prepare(table, "DRAM", peer)


@pytest.mark.parametrize("index", [-1, 8])
def test_an_index_without_a_piece_is_refused(link: Link, index: int) -> None:
    for indices in (([index], [0]), ([0], [index])):
        with pytest.raises(TransportError, match=f"^index {index}; allowed: 0 to 7$"):
            link.read(*indices)
