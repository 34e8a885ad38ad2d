"""The two interfaces to the world: `Transport` moves bytes, `ControlPlane` carries messages.

NIXL implements `Transport` and ZMQ implements `ControlPlane`.

A list of a transport holds rows as `geometry.plan.Rows` describes them, shape (n, 5): address,
length, device, stride, count. A read names pieces of a local and of a remote list by number, in
int32.
"""

from dataclasses import dataclass
from typing import Any, NewType, Protocol, TypeAlias

from nixl_kv.geometry import plan
from nixl_kv.geometry.layout import BlockIds, Memory, Span
from nixl_kv.ids import Endpoint

Indices: TypeAlias = BlockIds
Rows: TypeAlias = plan.Rows

PeerName = NewType("PeerName", str)
"""How a transport names a peer that was added."""

ListHandle = Any
"""A prepared list, opaque, of use only to the transport that made it."""

ReadHandle = Any
"""A read under way, opaque, of use only to the transport that made it."""


class Transport(Protocol):
    """One-sided reads. Errors are TransportErrors.

    All methods are called on one thread, but for `add_peer`: that may run on another one, and no
    other call is made meanwhile.

    There is no abort: a read that was started may write into local memory until `poll` has said its
    end, whatever is released or dropped meanwhile, or until `close` has returned.
    """

    def spread(self, peer: PeerName) -> int:
        """How many pieces that are apart a read has to have to use all connections to a peer.

        0 where these are made when they are needed, so that there is only the first.
        """

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """Make memory usable, on this side and for peers that are given the metadata later."""

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        """Pay now for what only the first peer of a process costs; slow. What is there is lost.

        `span` is registered.
        """

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
        """Start to copy remote pieces into local ones, pair by pair: (local, remote) indices.

        If it raises, nothing is under way.
        """

    def poll(self, read: ReadHandle) -> bool:
        """Whether the read has ended well.

        It raises PeerLost if the read ended badly. Any other TransportError says nothing about its
        end: it may go on, and must not be polled again.
        """

    def stop(self, read: ReadHandle) -> bool:
        """Ask for no more of a read than is under way; whether it is cut short by that.

        `poll` goes on to say when it has ended.
        """

    def progress(self) -> None:
        """Let this side serve its peers: some paths need the owner of the memory to take part."""

    def tidy(self) -> bool:
        """Close connections, in the background, that reads have not used for long.

        Returns whether there are some left to close later.
        """

    def close(self) -> None:
        """End everything; may take seconds, and run on any thread while no other call is made.

        When it returns nothing writes into local memory any more. If that cannot be proven it
        raises a TransportError, and may be called again.
        """


@dataclass(frozen=True)
class Bounds:
    """What one stranger may cost at a listening port."""

    message_bytes: int = 4 << 20
    """Of the longest message; a longer one ends its connection."""

    requests: int = 1000
    """Of a connection that wait to be handled; more wait at their sender."""

    answers: int = 1000
    """Of a connection that wait to be taken; more are dropped."""


@dataclass(frozen=True)
class FromPeer:
    """A message to this side's port; `route` leads back to its sender while it is connected."""

    route: bytes
    payload: bytes
    stranger: str = ""
    """The IP address of a sender that has proved no key; empty if it has."""


@dataclass(frozen=True)
class FromEndpoint:
    """A message from an endpoint that this side talks to."""

    endpoint: Endpoint
    payload: bytes


@dataclass(frozen=True)
class Lost:
    """An endpoint's connection is gone; the next `send` to it makes a new one."""

    endpoint: Endpoint
    reason: str


Received: TypeAlias = FromPeer | FromEndpoint | Lost


@dataclass(frozen=True)
class Link:
    """A connection to an endpoint: messages in both directions, seconds since the last one."""

    endpoint: Endpoint
    sent: int
    received: int
    idle_s: float


class ControlPlane(Protocol):
    """Messages between processes: a port of this side, and links to endpoints of others.

    It carries opaque payloads; what they mean is the protocol's affair. All methods but `wake` are
    called by one thread at a time; errors are TransportErrors.
    """

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        """Listen on an IP literal and a port, 0 for any free one. Returns the port."""

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        """Queue a message for an endpoint, connecting if need be; never waits."""

    def reply(self, route: bytes, payload: bytes) -> None:
        """Answer a message; an answer to somebody who has left meanwhile is dropped."""

    def poll(self, timeout_s: float | None) -> list[Received]:
        """Wait for messages, losses or a wake-up; None waits for ever."""

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close the link to an endpoint, if there is one; what is queued for it is dropped."""

    def links(self) -> list[Link]:
        """The links that are open."""

    def wake(self) -> None:
        """End a wait of the owning thread; may be called from any thread."""

    def close(self) -> None:
        """Close everything."""
