"""What goes into the machines and what comes out of them, besides the wire's messages.

Commands come from vLLM's step, events from the data plane and the sockets; actions are carried out
by whoever runs the machines. All are frozen records, so that tests compare whole lists of them.
"""

import enum
from dataclasses import dataclass
from typing import TypeAlias

from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.ranks import Route
from nixl_kv.ids import Claim, EngineId, Generation, Incarnation, Nonce, Rank, RequestId
from nixl_kv.protocol.messages import Description, Grant, Message
from nixl_kv.protocol.proofs import Digest, ReadBegun, Verified, Verify
from nixl_kv.protocol.ticket import Ticket

# --- commands of vLLM's step on decode


@dataclass(frozen=True)
class Fetch:
    """A request with a ticket arrived: ask for its blocks."""

    request: RequestId
    ticket: Ticket
    claim: Claim


@dataclass(frozen=True)
class Load:
    """The request has blocks of its own now: read the tokens [begin, end) into them.

    For each cache group, `tables[g]` (little-endian int32) are the local block table's entries
    from the one that holds `begin` to the one that holds `end - 1`. With `verify` the bytes are
    compared with prefill's, by a digest, before the load counts as good.
    """

    request: RequestId
    begin: int
    end: int
    tables: tuple[bytes, ...]
    verify: bool = False


@dataclass(frozen=True)
class Drop:
    """The request needs nothing (any more): release it on prefill. A load is still reported."""

    request: RequestId


@dataclass(frozen=True)
class Siblings:
    """The caches of all ranks of this engine, in rank order; comes before any request."""

    layouts: tuple[CacheLayout, ...]


# --- commands of vLLM's step on prefill


@dataclass(frozen=True)
class Prepare:
    """The step that completes the prompt is about to run; these blocks will hold its KV.

    Sent before the ticket exists: whoever asks with this nonce has the ticket, and the ticket left
    only after that step was complete and the blocks were pinned.
    """

    nonce: Nonce
    request: RequestId
    context: str
    num_tokens: int
    tables: tuple[bytes, ...]


@dataclass(frozen=True)
class Offer:
    """The ticket is out and the blocks are pinned: the offer's time runs from now."""

    nonce: Nonce
    request: RequestId


@dataclass(frozen=True)
class Withdraw:
    """No ticket went out: forget the preparation."""

    nonce: Nonce


@dataclass(frozen=True)
class Revoke:
    """Blocks are scarce: take the offer back, unless it is claimed by now."""

    nonce: Nonce


# --- events of the data plane and the sockets


@dataclass(frozen=True)
class PeerKey:
    """One life of a remote engine, where a ticket says that it is.

    The endpoint is part of the key: a forged ticket that names a known engine at another address
    must not redirect those who have a true one.
    """

    engine: EngineId
    incarnation: Incarnation
    endpoint: str


@dataclass(frozen=True)
class PeerJoined:
    """The peer's description fits, and its memory can be read, by these routes."""

    peer: PeerKey
    description: Description
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class PeerRefused:
    """The peer cannot be used."""

    peer: PeerKey
    reason: str


@dataclass(frozen=True)
class EndpointLost:
    """The connection to an endpoint is gone, or none came about."""

    endpoint: str
    reason: str


@dataclass(frozen=True)
class ReadDone:
    """All bytes of a data read have landed."""

    request: RequestId
    source: Rank


@dataclass(frozen=True)
class ReadFailed:
    """A read of data or of a slot has ended, and nothing of it will land any more."""

    request: RequestId
    source: Rank
    reason: str


@dataclass(frozen=True)
class SlotRead:
    """What stood in the slot after all data had landed."""

    request: RequestId
    source: Rank
    generation: Generation


@dataclass(frozen=True)
class Tick:
    """Time has passed; leases, deadlines and timers are looked at."""


# --- actions


@dataclass(frozen=True)
class Send:
    """Send a message to a prefill endpoint, connecting if need be."""

    endpoint: str
    message: Message


@dataclass(frozen=True)
class Reply:
    """Answer whoever sent the message that is being handled."""

    message: Message


@dataclass(frozen=True)
class Disconnect:
    """Close the connection to an endpoint."""

    endpoint: str


@dataclass(frozen=True)
class AddPeer:
    """Check a description and make its memory readable; answered by PeerJoined or PeerRefused."""

    peer: PeerKey
    description: Description


@dataclass(frozen=True)
class DropPeer:
    """Forget a peer's memory; no read of it is under way."""

    peer: PeerKey


@dataclass(frozen=True)
class StartRead:
    """Read the data; answered by ReadDone or ReadFailed, after ReadBegun if it is verified."""

    peer: PeerKey
    source: Rank
    grant: Grant
    load: Load


@dataclass(frozen=True)
class Abandon:
    """A read has not ended in its time: stop it by whatever stops it; answered by ReadFailed."""

    request: RequestId
    source: Rank


@dataclass(frozen=True)
class CheckSlot:
    """Read the slot; answered by SlotRead or ReadFailed."""

    peer: PeerKey
    source: Rank
    request: RequestId
    slot: int


@dataclass(frozen=True)
class WriteSlot:
    """Make a grant valid."""

    slot: int
    generation: Generation


@dataclass(frozen=True)
class ClearSlot:
    """Make a grant invalid, before its blocks can be used again."""

    slot: int


class Why(enum.Enum):
    """What a load failed of; the values are the counters' names."""

    DENIED = "denied"
    LEASE_LOST = "lease_lost"
    UNREACHABLE = "unreachable"
    INCOMPATIBLE = "incompatible"
    LATE = "late"
    BROKEN = "broken"
    FENCED = "fenced"
    CORRUPT = "corrupt"
    DROPPED = "dropped"
    INTERNAL = "internal"


@dataclass(frozen=True)
class Failure:
    """Why a load failed, to count and to read."""

    why: Why
    detail: str

    def __str__(self) -> str:
        """For people."""
        return self.detail


@dataclass(frozen=True)
class Loaded:
    """Report a load to vLLM: no read can write into its blocks any more.

    `failure` is None if every byte was read while P held it, and equals P's if `verified`; `peer`
    is whom it was read from, None if nobody was ever asked.
    """

    request: RequestId
    num_tokens: int
    failure: Failure | None
    peer: PeerKey | None = None
    verified: bool = False


class How(enum.Enum):
    """How an offer ended; the values are the counters' names."""

    READ = "read"
    ABORTED = "aborted"
    NOT_NEEDED = "not_needed"
    UNCLAIMED = "unclaimed"
    REVOKED = "revoked"
    EXPIRED = "expired"
    LOST = "lost"


@dataclass(frozen=True)
class Sent:
    """Report to vLLM that a finished request's blocks may be used again."""

    request: RequestId
    how: How


@dataclass(frozen=True)
class Denied:
    """An ask was denied; the detail stays on this side."""

    nonce: Nonce
    reason: str


DecodeCommand: TypeAlias = Fetch | Load | Drop
PrefillCommand: TypeAlias = Prepare | Offer | Withdraw | Revoke
Command: TypeAlias = DecodeCommand | PrefillCommand | Siblings
DataEvent: TypeAlias = (
    PeerJoined | PeerRefused | ReadBegun | ReadDone | ReadFailed | SlotRead | Verified
)
Action: TypeAlias = (
    Send
    | Reply
    | Disconnect
    | AddPeer
    | DropPeer
    | StartRead
    | Abandon
    | CheckSlot
    | Verify
    | Digest
    | WriteSlot
    | ClearSlot
    | Loaded
    | Sent
    | Denied
)
