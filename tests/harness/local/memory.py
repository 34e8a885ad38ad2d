"""An in-memory `Transport`, for tests and the simulator: all engines run in one process.

A `Fabric` connects `MemoryTransport`s. A read copies memory after `Fabric.polls` polls, so a block
that is reused or a fence slot that is cleared meanwhile shows, as over a real link. Tests inject
faults through the fields of the fabric.
"""

import ctypes
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.geometry.plan import COUNT
from nixl_kv.transport.base import Indices, PeerName, Rows


@dataclass
class Fabric:
    """The link between transports of one process, and its faults."""

    polls: int = 1  # polls that find a read in progress; the poll right after posting counts
    reads_hang: bool = False  # no read completes
    hanging_peers: set[str] = field(default_factory=set)  # no read from these peers completes
    closes_fail: bool = False  # `close` raises
    lost_peers: set[str] = field(default_factory=set)
    transports: dict[str, "MemoryTransport"] = field(default_factory=dict)
    names: Iterable[int] = field(default_factory=itertools.count)
    bytes_copied: int = 0


@dataclass(frozen=True)
class _List:
    rows: Rows
    owner: str

    def piece(self, index: int) -> tuple[int, int]:
        """Address and length of one piece."""
        ends = np.cumsum(self.rows[:, COUNT].astype(np.int64))
        if not 0 <= index < ends[-1]:
            raise TransportError(f"index {index}; allowed: 0 to {ends[-1] - 1}")
        row = int(np.searchsorted(ends, index, side="right"))
        within = index - (int(ends[row - 1]) if row else 0)
        address, length, _, stride, _ = (int(value) for value in self.rows[row])
        return address + within * stride, length


@dataclass
class _Read:
    pairs: list[tuple[tuple[int, int], tuple[int, int]]]
    peer: str
    polls_left: int
    ended: bool = False


class MemoryTransport:
    """See `Transport`."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.name = f"memory-{next(iter(fabric.names))}"
        self._spans: list[Span] = []
        fabric.transports[self.name] = self

    def warm_up_pieces(self, peer: PeerName) -> int:
        del peer
        return 1

    def register(self, span: Span, memory: Memory, device: int) -> None:
        del memory, device
        self._spans.append(span)

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        """Nothing to warm up."""

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes) -> PeerName:
        name = metadata.decode(errors="replace")
        if name not in self._fabric.transports or name in self._fabric.lost_peers:
            raise PeerLost(f"no peer {name!r} on the fabric")
        return PeerName(name)

    def drop_peer(self, peer: PeerName) -> None:
        """Nothing to release."""

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        del memory
        prepared = _List(rows, peer or self.name)
        if prepared.owner not in self._fabric.transports:
            raise PeerLost(f"peer {prepared.owner!r} has left the fabric")
        spans = self._fabric.transports[prepared.owner]._spans
        for address, length, _, stride, count in rows.tolist():
            end = address + (count - 1) * stride + length
            if not any(s.address <= address and end <= s.address + s.length for s in spans):
                raise TransportError(f"{address:#x} to {end:#x} is not registered")
        return prepared

    def read(self, local: _List, remote: _List, indices: tuple[Indices, Indices]) -> _Read:
        local_pieces = [local.piece(int(index)) for index in indices[0]]
        remote_pieces = [remote.piece(int(index)) for index in indices[1]]
        pairs = list(zip(local_pieces, remote_pieces, strict=True))
        if not pairs:
            raise TransportError("a read of nothing")
        if any(local[1] != remote[1] for local, remote in pairs):
            raise TransportError("pieces of different lengths")
        return _Read(pairs, remote.owner, self._fabric.polls)

    def poll(self, read: _Read) -> bool:
        if read.peer in self._fabric.lost_peers or read.peer not in self._fabric.transports:
            raise PeerLost(f"peer {read.peer!r} is gone")
        is_hanging = self._fabric.reads_hang or read.peer in self._fabric.hanging_peers
        if is_hanging or read.polls_left > 0:
            read.polls_left -= 1
            return False
        if not read.ended:
            for (address, length), (source, _) in read.pairs:
                ctypes.memmove(address, source, length)
                self._fabric.bytes_copied += length
            read.ended = True
        return True

    def stop(self, read: _Read) -> bool:
        del read
        return False  # nothing of it is left to cancel

    def progress(self) -> None:
        """Nothing to do: a reader copies by itself."""

    def close(self) -> None:
        """Leave the fabric. Reads in progress never complete."""
        if self._fabric.closes_fail:
            raise TransportError("this transport does not end")
        self._fabric.transports.pop(self.name, None)
