"""What the data plane must be able to do. NIXL is one way; memory inside one process another.

A list holds rows as `geometry.plan.Rows` describes them, shape (n, 5): address, length, device,
stride, count. A read names pieces of a local and of a remote list by number, in int32.
"""

from typing import Any, NewType, Protocol

from nixl_kv.geometry.blocks import BlockIds as Indices
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.geometry.plan import Rows

__all__ = ["Indices", "ListHandle", "PeerName", "ReadHandle", "Rows", "Transport"]

PeerName = NewType("PeerName", str)
"""How a transport names a peer that was added."""

ListHandle = Any
"""A prepared list, opaque, of use only to the transport that made it."""

ReadHandle = Any
"""A read under way, opaque, of use only to the transport that made it."""


class Transport(Protocol):
    """One-sided reads. All methods are called on one thread; errors are TransportErrors.

    There is no abort: a read that was begun may write into local memory until `poll` has told its
    end, whatever is released or dropped meanwhile, or until `close` has returned.
    """

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """Make memory usable, on this side and for peers that are given the metadata later."""

    def metadata(self) -> bytes:
        """What a peer needs to read everything that is registered by now."""

    def add_peer(self, metadata: bytes) -> PeerName:
        """Make a peer's memory readable; adding it again is harmless."""

    def drop_peer(self, peer: PeerName) -> None:
        """Forget a peer; its lists are of no use afterwards."""

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> ListHandle:
        """Describe pieces of a peer's memory, or of this side's (None)."""

    def read(
        self, local: ListHandle, remote: ListHandle, indices: tuple[Indices, Indices]
    ) -> ReadHandle:
        """Begin to copy remote pieces into local ones, pair by pair: (local, remote) indices."""

    def poll(self, read: ReadHandle) -> bool:
        """Whether the read has ended well; raises PeerLost or TransportError if it ended badly."""

    def progress(self) -> None:
        """Let this side serve its peers: some paths need the owner of the memory to take part."""

    def close(self) -> None:
        """End everything; may take seconds, and run on any thread while no other call is made.

        When it returns nothing writes into local memory any more. If that cannot be proven it
        raises a TransportError, and may be called again.
        """
