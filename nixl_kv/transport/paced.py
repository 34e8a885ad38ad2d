"""A data plane that has one piece at a time under way from each peer.

Over TCP UCX has no one-sided reads: the owner of the memory answers each with messages of its own.
If the reader dies while such answers wait for room in the connection, UCX 1.23 aborts the *owner's*
process (docs/protocol.md). With one answer at a time, that fits into one TCP segment of UCX's, none
ever waits. Where runs are large that costs nothing; small ones cost a round trip each.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.geometry.plan import COUNT, LENGTH, STRIDE
from nixl_kv.transport.base import Indices, ListHandle, PeerName, ReadHandle, Rows, Transport

PIECE_BYTES: Final = 1 << 20
SEGMENT_CONFIG: Final = "TCP_TX_SEG_SIZE=2m,TCP_RX_SEG_SIZE=2m"
"""UCX's settings by which a piece fits into a segment. Both sides need them: a longer segment than
the reader expects aborts the reader."""

_Step: TypeAlias = tuple[list[int], list[int]]
"""What is read at once: numbers of pieces of the inner lists, (local, remote)."""


@dataclass(frozen=True)
class _List:
    """Rows whose pieces are divided into parts of bounded length; row r has n pieces.

    The caller's number of piece i of row r is `first[r] + i`; its part j has the number
    `inner_first[r] + j * n + i` in the inner list.
    """

    handle: ListHandle
    peer: PeerName | None
    first: Indices  # shape (rows,): number of each row's first piece, in the caller's counting
    inner_first: Indices  # shape (rows,): the same in the inner list
    rows: Rows

    def parts(self, index: int) -> list[int]:
        """The inner numbers of one piece's parts, in the order of their addresses."""
        row = int(np.searchsorted(self.first, index, side="right")) - 1
        length, count = int(self.rows[row, LENGTH]), int(self.rows[row, COUNT])
        within = index - int(self.first[row])
        if index < 0 or within >= count:
            raise TransportError(f"index {index} is in no row")
        start = int(self.inner_first[row]) + within
        return [start + part * count for part in range(-(-length // PIECE_BYTES))]

    def length_if_followed(self, index: int) -> int:
        """The length of a piece whose successor's bytes follow its own; 0 for any other."""
        row = int(np.searchsorted(self.first, index, side="right")) - 1
        length, stride, count = (int(value) for value in self.rows[row, [LENGTH, STRIDE, COUNT]])
        last = index - int(self.first[row]) == count - 1
        return 0 if last or length != stride or length > PIECE_BYTES else length


@dataclass(eq=False)
class _Read:
    """A read, as steps of which one is under way at a time."""

    lists: tuple[_List, _List]
    steps: Iterator[_Step]
    peer: PeerName
    current: ReadHandle = None


@dataclass
class PacedTransport:
    """See `Transport`, and the module's head."""

    inner: Transport
    queues: dict[PeerName, deque[_Read]] = field(default_factory=dict)

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """As the inner transport."""
        self.inner.register(span, memory, device)

    def metadata(self) -> bytes:
        """As the inner transport."""
        return self.inner.metadata()

    def add_peer(self, metadata: bytes) -> PeerName:
        """As the inner transport."""
        return self.inner.add_peer(metadata)

    def drop_peer(self, peer: PeerName) -> None:
        """As the inner transport; its reads have ended."""
        self.queues.pop(peer, None)
        self.inner.drop_peer(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        """Cut what is longer than a piece."""
        cut = [_cut(row) for row in np.asarray(rows, dtype=np.uint64)]
        sizes = np.array([int(part[:, COUNT].sum()) for part in cut], dtype=np.int64)
        counts = rows[:, COUNT].astype(np.int64)
        handle = self.inner.prepare(np.concatenate(cut), memory, peer)
        return _List(handle, peer, _starts(counts), _starts(sizes), rows)

    def read(self, local: _List, remote: _List, indices: tuple[Indices, Indices]) -> _Read:
        """Queue it behind the peer's other reads."""
        if remote.peer is None or not len(indices[0]) or len(indices[0]) != len(indices[1]):
            raise TransportError(f"{len(indices[0])} local and {len(indices[1])} remote pieces")
        copied = (indices[0].copy(), indices[1].copy())  # the caller uses their memory again
        read = _Read((local, remote), _steps((local, remote), copied), remote.peer)
        self.queues.setdefault(remote.peer, deque()).append(read)
        return read

    def poll(self, read: _Read) -> bool:
        """Go on with it if it is its turn."""
        queue = self.queues[read.peer]
        if queue[0] is not read:
            return False
        try:
            ended = self._advance(read)
        except TransportError:
            queue.popleft()
            raise
        if ended:
            queue.popleft()
        return ended

    def progress(self) -> None:
        """As the inner transport."""
        self.inner.progress()

    def close(self) -> None:
        """As the inner transport."""
        for queue in self.queues.values():
            for read in queue:
                read.current = None
        self.inner.close()

    def _advance(self, read: _Read) -> bool:
        if read.current is not None and not self.inner.poll(read.current):
            return False
        read.current = None
        step = next(read.steps, None)
        if step is None:
            return True
        local, remote = read.lists
        pieces = (np.array(step[0], dtype=np.int32), np.array(step[1], dtype=np.int32))
        read.current = self.inner.read(local.handle, remote.handle, pieces)
        return False


def _cut(row: Rows) -> Rows:
    """One row as rows of pieces that are no longer than allowed."""
    address, length, device, stride, count = (int(value) for value in row)
    offsets = range(0, length, PIECE_BYTES)
    parts = [
        (address + offset, min(PIECE_BYTES, length - offset), device, stride, count)
        for offset in offsets
    ]
    return np.array(parts, dtype=np.uint64)


def _starts(counts: np.ndarray) -> Indices:
    """Where each begins if they follow each other."""
    starts: Indices = (np.cumsum(counts) - counts).astype(np.int32)
    return starts


def _steps(lists: tuple[_List, _List], indices: tuple[Indices, Indices]) -> Iterator[_Step]:
    """One step per part; neighbours on both sides share one, as far as they fit into a piece."""
    step: _Step = ([], [])
    room, follows = 0, (-1, -1)
    for mine, theirs in zip(indices[0].tolist(), indices[1].tolist(), strict=True):
        local, remote = lists[0].parts(mine), lists[1].parts(theirs)
        if (mine, theirs) != follows:
            if step[0]:
                yield step
            for part in zip(local[:-1], remote[:-1], strict=True):
                yield [part[0]], [part[1]]
            step, room = ([], []), PIECE_BYTES
        step[0].append(local[-1])
        step[1].append(remote[-1])
        lengths = {lists[0].length_if_followed(mine), lists[1].length_if_followed(theirs)}
        length = lengths.pop() or PIECE_BYTES if len(lengths) == 1 else PIECE_BYTES
        room -= length
        follows = (mine + 1, theirs + 1) if room >= length else (-1, -1)
    yield step
