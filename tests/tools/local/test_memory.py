"""The data plane inside one process: as strict as a real link, and its reads land when asked to."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Span, block_ids
from nixl_kv.transport.base import Indices, PeerName, ReadHandle, Rows


def rows(*table: tuple[int, int, int, int, int]) -> Rows:
    return np.array(table, dtype=np.uint64).reshape(-1, 5)


def ids(*numbers: int) -> Indices:
    return block_ids(numbers)


class Side:
    """64 registered bytes, and a list of 8 pieces of 4 bytes, 8 bytes apart."""

    def __init__(self, fabric: Fabric, first: int) -> None:
        self.transport = MemoryTransport(fabric)
        self.bytes = np.arange(first, first + 64, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.transport.register(Span(self.address, 64), "DRAM", 0)
        self.rows = rows((self.address, 4, 0, 8, 8))


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(polls=0)


@pytest.fixture
def local_side(fabric: Fabric) -> Side:
    return Side(fabric, 0)


@pytest.fixture
def remote_side(fabric: Fabric) -> Side:
    return Side(fabric, 100)


class Link:
    """One side reads the other."""

    def __init__(self, local_side: Side, remote_side: Side) -> None:
        self.transport = local_side.transport
        self.peer = local_side.transport.add_peer(remote_side.transport.metadata())
        self.local = local_side.transport.prepare(local_side.rows, "DRAM", None)
        self.remote = local_side.transport.prepare(remote_side.rows, "DRAM", self.peer)

    def read(self, local: Sequence[int], remote: Sequence[int]) -> ReadHandle:
        return self.transport.read(self.local, self.remote, (ids(*local), ids(*remote)))


@pytest.fixture
def link(local_side: Side, remote_side: Side) -> Link:
    return Link(local_side, remote_side)


def test_pieces_are_copied_pair_by_pair(
    fabric: Fabric, local_side: Side, remote_side: Side, link: Link
) -> None:
    expected, source = local_side.bytes.copy(), remote_side.bytes.copy()
    expected[0:4] = source[56:60]
    expected[24:28] = source[0:4]
    read = link.read([0, 3], [7, 0])
    assert local_side.bytes.tolist() == list(range(64)), "it lands at a poll"
    assert link.transport.poll(read)
    assert np.array_equal(local_side.bytes, expected)
    assert np.array_equal(remote_side.bytes, source)
    assert fabric.bytes_copied == 8


@pytest.mark.parametrize("polls", [0, 1, 3])
def test_a_read_lands_after_so_many_polls(
    fabric: Fabric, local_side: Side, remote_side: Side, link: Link, polls: int
) -> None:
    fabric.polls = polls
    read = link.read([1], [1])
    for _ in range(polls):
        assert not link.transport.poll(read)
        assert local_side.bytes[8] == 8
    remote_side.bytes[8] = 77  # what is there when it lands is what is copied
    assert link.transport.poll(read)
    assert local_side.bytes[8] == 77


def test_each_read_has_its_own_time(fabric: Fabric, local_side: Side, link: Link) -> None:
    fabric.polls = 1
    early, late = link.read([0], [0]), link.read([1], [1])
    assert not link.transport.poll(early)
    assert link.transport.poll(early)
    assert (local_side.bytes[0], local_side.bytes[8]) == (100, 8)
    assert not link.transport.poll(late)
    assert link.transport.poll(late)
    assert local_side.bytes[8] == 108


def test_a_read_lands_once(fabric: Fabric, local_side: Side, link: Link) -> None:
    read = link.read([0], [0])
    assert link.transport.poll(read)
    local_side.bytes[:] = 0
    assert link.transport.poll(read)
    assert local_side.bytes.tolist() == [0] * 64
    assert fabric.bytes_copied == 4


def test_a_hanging_read_lands_as_soon_as_it_does_not_hang_any_more(
    fabric: Fabric, local_side: Side, link: Link
) -> None:
    fabric.reads_hang = True
    read = link.read([0], [0])
    assert [link.transport.poll(read) for _ in range(5)] == [False] * 5
    assert local_side.bytes[0] == 0
    fabric.reads_hang = False
    assert link.transport.poll(read)
    assert local_side.bytes[0] == 100


def test_only_reads_of_a_hanging_peer_hang(
    fabric: Fabric, local_side: Side, remote_side: Side, link: Link
) -> None:
    third = Link(local_side, Side(fabric, 200))
    fabric.hanging_peers.add(remote_side.transport.name)
    hanging, healthy = link.read([0], [0]), third.read([1], [1])
    assert not link.transport.poll(hanging)
    assert third.transport.poll(healthy)
    assert (local_side.bytes[0], local_side.bytes[8]) == (0, 208)


def test_a_transport_that_does_not_end_can_be_closed_later(
    fabric: Fabric, local_side: Side
) -> None:
    fabric.closes_fail = True
    with pytest.raises(TransportError, match="does not end"):
        local_side.transport.close()
    assert local_side.transport.name in fabric.transports
    fabric.closes_fail = False
    local_side.transport.close()
    assert local_side.transport.name not in fabric.transports


def test_pieces_of_a_closed_peer_cannot_be_prepared(local_side: Side, remote_side: Side) -> None:
    name = PeerName(remote_side.transport.name)
    remote_side.transport.close()
    with pytest.raises(PeerLost, match=f"^peer {name!r} has left the fabric$"):
        local_side.transport.prepare(remote_side.rows, "DRAM", name)


def test_a_lost_peer_can_neither_be_read_nor_added(
    fabric: Fabric, local_side: Side, remote_side: Side, link: Link
) -> None:
    read = link.read([0], [0])
    fabric.lost_peers.add(remote_side.transport.name)
    with pytest.raises(PeerLost, match=f"^peer {remote_side.transport.name!r} is gone$"):
        link.transport.poll(read)
    assert local_side.bytes[0] == 0
    with pytest.raises(PeerLost, match=f"^no peer {remote_side.transport.name!r} on the fabric$"):
        link.transport.add_peer(remote_side.transport.metadata())


@pytest.mark.parametrize(
    "metadata", [pytest.param(b"nobody", id="unknown"), pytest.param(b"\xff\xfe", id="garbage")]
)
def test_an_unknown_peer_cannot_be_added(local_side: Side, metadata: bytes) -> None:
    with pytest.raises(PeerLost, match=r"^no peer "):
        local_side.transport.add_peer(metadata)


def test_a_closed_transport_cannot_be_added(local_side: Side, remote_side: Side) -> None:
    remote_side.transport.close()
    remote_side.transport.close()
    with pytest.raises(PeerLost):
        local_side.transport.add_peer(remote_side.transport.metadata())


def test_peers_can_be_added_again_and_dropped(
    local_side: Side, remote_side: Side, link: Link
) -> None:
    assert local_side.transport.add_peer(remote_side.transport.metadata()) == link.peer
    local_side.transport.drop_peer(link.peer)
    assert local_side.transport.add_peer(remote_side.transport.metadata()) == link.peer
    local_side.transport.progress()


def test_a_name_is_never_used_twice(fabric: Fabric) -> None:
    names = []
    for _ in range(3):
        transport = MemoryTransport(fabric)
        names.append(transport.name)
        transport.close()
    assert len(set(names)) == 3


# Of the 64 bytes of one side: (offset, length, stride, count).
@pytest.mark.parametrize(
    "row",
    [
        pytest.param((0, 64, 64, 1), id="all in one piece"),
        pytest.param((0, 1, 1, 64), id="all in single bytes"),
        pytest.param((60, 4, 4, 1), id="the end"),
        pytest.param((0, 4, 60, 2), id="first and last"),
    ],
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_pieces_inside_of_registered_memory_can_be_prepared(
    local_side: Side, remote_side: Side, row: tuple[int, int, int, int], side: str
) -> None:
    offset, length, stride, count = row
    owner = local_side if side == "local" else remote_side
    peer = None if side == "local" else PeerName(remote_side.transport.name)
    table = rows((owner.address + offset, length, 0, stride, count))
    assert local_side.transport.prepare(table, "DRAM", peer).rows is table


@pytest.mark.parametrize(
    "row",
    [
        pytest.param((0, 65, 65, 1), id="one byte long"),
        pytest.param((-1, 4, 4, 1), id="one byte early"),
        pytest.param((61, 4, 4, 1), id="one byte late"),
        pytest.param((0, 4, 8, 9), id="one piece too many"),
        pytest.param((0, 5, 60, 2), id="the last piece too long"),
    ],
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_pieces_outside_of_registered_memory_are_refused(
    local_side: Side, remote_side: Side, row: tuple[int, int, int, int], side: str
) -> None:
    offset, length, stride, count = row
    owner = local_side if side == "local" else remote_side
    peer = None if side == "local" else PeerName(remote_side.transport.name)
    first = owner.address + offset
    message = f"^{first:#x} to {first + (count - 1) * stride + length:#x} is not registered$"
    good = (owner.address, 4, 0, 4, 1)
    with pytest.raises(TransportError, match=message):
        local_side.transport.prepare(rows(good, (first, length, 0, stride, count)), "DRAM", peer)


def test_each_side_reads_its_own_registrations(local_side: Side, remote_side: Side) -> None:
    with pytest.raises(TransportError, match="not registered"):
        local_side.transport.prepare(remote_side.rows, "DRAM", None)
    with pytest.raises(TransportError, match="not registered"):
        local_side.transport.prepare(local_side.rows, "DRAM", PeerName(remote_side.transport.name))


def test_every_registered_span_counts(local_side: Side) -> None:
    more = np.zeros(8, dtype=np.uint8)
    table = rows((more.ctypes.data, 8, 0, 8, 1), (local_side.address, 4, 0, 4, 1))
    with pytest.raises(TransportError, match="not registered"):
        local_side.transport.prepare(table, "DRAM", None)
    local_side.transport.register(Span(more.ctypes.data, 8), "DRAM", 0)
    local_side.transport.prepare(table, "DRAM", None)


def test_pieces_are_numbered_over_all_rows(
    fabric: Fabric, local_side: Side, remote_side: Side
) -> None:
    """Three rows of 2, 1 and 3 pieces, at 0, 10, 20, 30, 32 and 34."""
    table = [(0, 2, 10, 2), (20, 2, 50, 1), (30, 2, 2, 3)]
    lists = [
        local_side.transport.prepare(
            rows(*((side.address + o, length, 0, s, n) for o, length, s, n in table)), "DRAM", peer
        )
        for side, peer in ((local_side, None), (remote_side, PeerName(remote_side.transport.name)))
    ]
    read = local_side.transport.read(
        lists[0], lists[1], (ids(0, 1, 2, 3, 4, 5), ids(5, 4, 3, 2, 1, 0))
    )
    assert local_side.transport.poll(read)
    expected = np.arange(64)
    for to, source in zip((0, 10, 20, 30, 32, 34), (34, 32, 30, 20, 10, 0), strict=True):
        expected[to : to + 2] = (100 + source, 101 + source)
    assert local_side.bytes.tolist() == expected.tolist()
    assert fabric.bytes_copied == 12


@pytest.mark.parametrize("index", [-1, 8, 2**31 - 1])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_an_index_without_a_piece_is_refused(link: Link, index: int, side: str) -> None:
    indices = ([index], [0]) if side == "local" else ([0], [index])
    with pytest.raises(TransportError, match=f"^index {index}; allowed: 0 to 7$"):
        link.read(*indices)


@pytest.mark.parametrize(("local", "remote"), [([0, 1], [0]), ([0], [0, 1])])
def test_each_piece_needs_a_counterpart(link: Link, local: list[int], remote: list[int]) -> None:
    with pytest.raises((TransportError, ValueError)):
        link.read(local, remote)


def test_pieces_of_different_lengths_are_refused(local_side: Side, link: Link) -> None:
    longer = local_side.transport.prepare(rows((local_side.address, 5, 0, 8, 8)), "DRAM", None)
    with pytest.raises(TransportError, match=r"^pieces of different lengths$"):
        local_side.transport.read(longer, link.remote, (ids(0), ids(0)))
