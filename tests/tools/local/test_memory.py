"""The data plane inside one process refuses the same reads as a real link."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span, block_ids
from nixl_kv.transport.base import ListHandle, PeerName, ReadHandle

Row = tuple[int, int, int, int]


class Side:
    """64 registered bytes."""

    def __init__(self, fabric: Fabric, first: int) -> None:
        self.transport = MemoryTransport(fabric)
        self.bytes = np.arange(first, first + 64, dtype=np.uint8)
        self.transport.register(Span(self.bytes.ctypes.data, 64), "DRAM", 0)

    def prepare(
        self, transport: MemoryTransport, peer: PeerName | None, row: Row = (0, 4, 8, 8)
    ) -> ListHandle:
        """A list of (offset, length, stride, count): by default 8 pieces, 8 bytes apart."""
        offset, length, stride, count = row
        rows = [[self.bytes.ctypes.data + offset, length, 0, stride, count]]
        return transport.prepare(np.array(rows, dtype=np.uint64), "DRAM", peer)


class Link:
    """One side reads the other."""

    def __init__(self) -> None:
        self.fabric = Fabric(polls=0)
        self.local, self.remote = Side(self.fabric, 0), Side(self.fabric, 100)
        self.transport = self.local.transport
        self.peer = self.transport.add_peer(self.remote.transport.metadata())
        self.ours = self.local.prepare(self.transport, None)
        self.theirs = self.remote.prepare(self.transport, self.peer)

    def read(self, local: Sequence[int], remote: Sequence[int]) -> ReadHandle:
        return self.transport.read(self.ours, self.theirs, (block_ids(local), block_ids(remote)))


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.mark.parametrize("row", [(0, 65, 65, 1), (-1, 4, 4, 1), (61, 4, 4, 1), (0, 5, 60, 2)])
def test_only_registered_memory_can_be_prepared(link: Link, row: Row) -> None:
    for side, peer in ((link.local, None), (link.remote, link.peer)):
        with pytest.raises(TransportError, match=r" is not registered$"):
            side.prepare(link.transport, peer, row)


@pytest.mark.parametrize("index", [-1, 8])
def test_an_index_without_a_piece_is_refused(link: Link, index: int) -> None:
    for indices in (([index], [0]), ([0], [index])):
        with pytest.raises(TransportError, match=f"^index {index}; allowed: 0 to 7$"):
            link.read(*indices)
