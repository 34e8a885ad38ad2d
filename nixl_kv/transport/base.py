"""The two interfaces to the network: `Transport` moves bytes, `ControlPlane` carries messages.

NIXL is the transport (`nixl.py`) and ZMQ the control plane (`zmq.py`). Everything above them knows
only these interfaces, so tests, the simulator and other engines can bring their own.
"""

import ctypes
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NewType, Protocol, TypeAlias

import numpy as np

from nixl_kv.geometry import plan
from nixl_kv.geometry.layout import BlockIds, Memory, Span
from nixl_kv.ids import FENCE_TOKEN_BYTES, Endpoint, FenceToken

Rows: TypeAlias = plan.Rows
Indices: TypeAlias = BlockIds
"""Numbers of pieces: the pieces of all rows of a list are numbered in row order."""

PeerName = NewType("PeerName", str)
ListHandle: TypeAlias = Any  # only the transport that made a handle can use it
ReadHandle: TypeAlias = Any

# UCX's TCP segment size. UCX aborts a reader whose own segments are shorter than the sender's, so
# this is one of the facts in which two engines must agree.
SEGMENT_FACT: Final = "2m"

PAGE_BYTES: Final = 4096

# A rank or directory closes an idle link. Each link costs a socket and heartbeats at both ends;
# opening it again costs one or two round trips.
LINK_KEPT_S: Final = 5.0
# A prefill rank no longer progresses NIXL for readers, because none has sent a message. A read may
# go on although its lease expired; readers send a heartbeat at least each second.
LINGER_S: Final = 2.0
# Between two polls of a read at most.
LONGEST_PAUSE_S: Final = 0.0005


class Transport(Protocol):
    """One-sided reads. Errors are TransportErrors.

    One thread calls all methods, except for `add_peer`, which may run on another thread while no
    other call is made.

    A read cannot be aborted: it may write into local memory until `poll` has reported its end or
    `close` has returned, whatever is released or dropped in between.
    """

    def warm_up_pieces(self, peer: PeerName) -> int:
        """How many pieces use all connections to a peer; 0 if these are made when needed."""

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """Make memory readable into, and readable by peers that get the metadata afterwards."""

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        """Do the work that only the first peer of a process costs; overwrites a registered span."""

    def metadata(self) -> bytes:
        """The bytes that a peer needs to read everything that is registered so far."""

    def add_peer(self, metadata: bytes) -> PeerName:
        """Make a peer's memory readable; adding a peer again is harmless."""

    def drop_peer(self, peer: PeerName) -> None:
        """Forget a peer, whose lists are invalid afterwards."""

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> ListHandle:
        """Describe pieces of a peer's memory, or of local memory (None)."""

    def read(
        self, local: ListHandle, remote: ListHandle, indices: tuple[Indices, Indices]
    ) -> ReadHandle:
        """Start to copy remote pieces into local ones, pair by pair: (local, remote) indices.

        If it raises, no read is in progress.
        """

    def poll(self, read: ReadHandle) -> bool:
        """Whether the read has completed.

        PeerLost: the read has ended, and failed. Any other TransportError says nothing about the
        end of the read, which may go on. Do not poll it again.
        """

    def stop(self, read: ReadHandle) -> bool:
        """Start no more pieces, and return whether that cuts the read short.

        `poll` still reports when the pieces in flight have ended.
        """

    def progress(self) -> None:
        """Serve peers: on some links a read needs the owner of the memory to take part."""

    def close(self) -> None:
        """End all reads and connections, which may take seconds.

        Any thread may call it, if no other call is made meanwhile. After a TransportError local
        memory may still be written to; call it again.
        """


class Ports(Protocol):
    """The ports of a rank's transports that ask for no key, and which machines may connect."""

    @property
    def listens(self) -> tuple[str, ...]:
        """The addresses at which other machines reach them."""

    def admit(self, hosts: Iterable[str]) -> bool:
        """Let these hosts connect, besides this machine, and no others; False if it fails."""

    def warn_of_other_users(self) -> None:
        """Log which other users of this machine can connect, whatever is admitted."""


class NoPorts:
    """For transports without ports."""

    listens: tuple[str, ...] = ()

    def admit(self, hosts: Iterable[str]) -> bool:
        del hosts
        return True

    def warn_of_other_users(self) -> None:
        """Other users reach nothing."""


@dataclass(frozen=True)
class Bounds:
    """Limits for one connection to a listening port."""

    message_bytes: int = 4 << 20  # a longer message ends its connection
    requests: int = 1000  # that wait to be handled; more wait at the sender
    answers: int = 1000  # that the other side has not received yet; more are dropped


class Proved(enum.Enum):
    """The key that the sender of a message holds."""

    ENGINE_KEY = "engine"
    TOOLS_KEY = "tools"  # allows questions, and nothing else
    NO_KEY = ""  # this side has none


NEEDS_ENGINE_KEY: Final = (
    "needs the key of the engines, and the sender has their tools' key: give it the engines' key "
    "with --key-file, or in NIXL_KV_KEY"
)


@dataclass(frozen=True)
class FromPeer:
    """A message to the local port; `route` leads back to its sender while it is connected."""

    route: bytes
    payload: bytes
    proved: Proved = Proved.ENGINE_KEY
    address: str = ""  # the sender's IP address, if it has proved no key


@dataclass(frozen=True)
class FromEndpoint:
    """A message from an endpoint that this side has sent to."""

    endpoint: Endpoint
    payload: bytes


@dataclass(frozen=True)
class Lost:
    """The connection to an endpoint broke; the next `send` makes a new one."""

    endpoint: Endpoint
    reason: str


Received: TypeAlias = FromPeer | FromEndpoint | Lost


@dataclass(frozen=True)
class Link:
    """A connection to an endpoint: messages each way, and seconds since the last one."""

    endpoint: Endpoint
    sent: int
    received: int
    idle_s: float


class ControlPlane(Protocol):
    """Messages between processes: a local port, and links to endpoints of others.

    Payloads are opaque. One thread at a time calls all methods but `wake`. Errors are
    TransportErrors.
    """

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        """Listen on an IP literal, without brackets, and a port (0: any free one). Returns it."""

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        """Queue a message for an endpoint, connecting if necessary; never waits.

        A TransportError says that the endpoint is not an address, or that its queue is full.
        """

    def reply(self, route: bytes, payload: bytes) -> None:
        """Answer a message; drops the answer if the sender has disconnected."""

    def poll(self, timeout_s: float | None) -> list[Received]:
        """Wait for messages, losses or `wake`; None waits without a timeout."""

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close the link to an endpoint, if there is one, and drop its queued messages."""

    def links(self) -> list[Link]: ...

    def wake(self) -> None:
        """End the current `poll`; any thread may call it."""

    def watch(self, descriptor: int) -> None:
        """Let `poll` return while a file descriptor is readable, from now on."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections; wait up to `linger_s` for messages that are being sent."""


class SlotPage:
    """`count` fence slots of 16 bytes, all clear at first. Peers may read them at any time.

    Prefill writes a random token into a slot while a grant is valid. Decode reads the slot after
    the data: if the token is still there, prefill held the blocks the whole time.
    """

    def __init__(self, count: int) -> None:
        size = count * FENCE_TOKEN_BYTES
        self._memory = np.zeros(size + PAGE_BYTES, dtype=np.uint8)
        self.address = -(-self._memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        self.count = count

    @property
    def span(self) -> Span:
        return Span(self.address, self.count * FENCE_TOKEN_BYTES)

    def rows(self) -> Rows:
        return slot_rows(self.address, self.count)

    def write(self, slot: int, fence_token: FenceToken) -> None:
        if len(fence_token) != FENCE_TOKEN_BYTES:
            raise ValueError(f"{len(fence_token)} bytes; allowed: {FENCE_TOKEN_BYTES}")
        ctypes.memmove(self._at(slot), fence_token, FENCE_TOKEN_BYTES)

    def clear(self, slot: int) -> None:
        """Make a grant invalid, before its blocks can be reused."""
        self.write(slot, FenceToken(bytes(FENCE_TOKEN_BYTES)))

    def clear_all(self) -> None:
        ctypes.memset(self.address, 0, self.count * FENCE_TOKEN_BYTES)

    def read(self, slot: int) -> FenceToken:
        return FenceToken(ctypes.string_at(self._at(slot), FENCE_TOKEN_BYTES))

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.count:
            raise IndexError(f"slot {slot}; allowed: 0 to {self.count - 1}")
        return self.address + slot * FENCE_TOKEN_BYTES


def slot_rows(address: int, count: int) -> Rows:
    """A list of one row, with one piece per slot."""
    return np.array([[address, FENCE_TOKEN_BYTES, 0, FENCE_TOKEN_BYTES, count]], dtype=np.uint64)
