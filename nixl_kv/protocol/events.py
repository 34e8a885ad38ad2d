"""What goes into the machines and what comes out of them, besides the wire's messages.

Commands come from the caller (vLLM's step), events from the data plane and the sockets; actions
are carried out by whoever runs the machines, results among them go back to the caller. All are
frozen records, so that tests compare whole lists of them.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.ranks import Route
from nixl_kv.geometry.slices import KVSlice
from nixl_kv.ids import Claim, Endpoint, EngineId, Generation, Incarnation, Nonce, Rank, RequestId
from nixl_kv.protocol import messages
from nixl_kv.protocol.ticket import Ticket


class Transition(NamedTuple):
    """A machine's state changed: of an offer, of a load, or of what it reads from one rank.

    `peer` is whom it concerns, empty for none; `cause` is the type of the event that led to it,
    with a detail where there is one; `num_bytes` is what was read.
    """

    request: str
    peer: str
    before: str
    after: str
    cause: str
    num_bytes: int = 0


Record: TypeAlias = Callable[[Transition], None]
"""Keeps a transition; `transfer.event_log` does."""

OVER = "OVER"
"""The state of what is forgotten."""


# --- commands of the caller on decode


@dataclass(frozen=True)
class PrepareLoad:
    """A request with a ticket arrived: ask for its blocks."""

    request: RequestId
    ticket: Ticket
    claim: Claim


@dataclass(frozen=True)
class StartLoad:
    """The request has blocks of its own now: read the tokens [begin, end) into them.

    For each cache group, `tables[g]` (little-endian int32) are the local block table's entries
    from the one that holds `begin` to the one that holds `end - 1`, ABSENT where there is no
    block. With `verify` the bytes are compared with prefill's, by a digest, before the load
    counts as good.
    """

    request: RequestId
    begin: int
    end: int
    tables: tuple[bytes, ...]
    verify: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens are to be read."""
        return self.end - self.begin


@dataclass(frozen=True)
class CancelLoad:
    """The request needs nothing (any more): release it on prefill.

    A load that was started is still reported.
    """

    request: RequestId


@dataclass(frozen=True)
class SetEngineLayouts:
    """The caches of all ranks of this engine, in rank order; comes before any request."""

    layouts: tuple[CacheLayout, ...]


# --- commands of the caller on prefill


@dataclass(frozen=True)
class PrepareOffer:
    """The step that completes the prompt is about to run; these blocks will hold its KV.

    Sent before the ticket exists: whoever asks with this nonce has the ticket, and the ticket left
    only after that step was complete and the blocks were pinned. `tables` has one block table for
    each cache group (little-endian int32, ABSENT where there is no block).
    """

    nonce: Nonce
    request: RequestId
    context: str
    num_tokens: int
    tables: tuple[bytes, ...]


@dataclass(frozen=True)
class PublishOffer:
    """The ticket is out and the blocks are pinned: the offer's time runs from now."""

    nonce: Nonce
    request: RequestId


@dataclass(frozen=True)
class WithdrawOffer:
    """No ticket went out: forget the preparation."""

    nonce: Nonce


@dataclass(frozen=True)
class RevokeOffer:
    """Blocks are scarce: end the offer, unless it is claimed by now."""

    nonce: Nonce


# --- events of the sockets


@dataclass(frozen=True)
class Asked:
    """A message came to this rank; `route` leads back to its sender."""

    route: bytes
    message: messages.ToRank


@dataclass(frozen=True)
class Answered:
    """An endpoint that this side talks to has sent a message."""

    endpoint: Endpoint
    message: messages.Answer


@dataclass(frozen=True)
class EndpointLost:
    """The connection to an endpoint is gone, or none came about."""

    endpoint: Endpoint
    reason: str


# --- events of the data plane


@dataclass(frozen=True)
class PeerKey:
    """One life of a remote engine, where a ticket says that it is.

    The endpoint is part of the key: a forged ticket that names a known engine at another address
    must not redirect those who have a true one.
    """

    engine: EngineId
    incarnation: Incarnation
    endpoint: Endpoint

    def __str__(self) -> str:
        return f"engine {self.engine!r} at {self.endpoint}"


@dataclass(frozen=True)
class PeerJoined:
    """The peer's description fits, and its memory can be read, by these routes."""

    peer: PeerKey
    description: messages.Description
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class PeerRefused:
    """The peer cannot be used."""

    peer: PeerKey
    reason: str


@dataclass(frozen=True)
class ReadStarted:
    """A read whose bytes are to be verified is under way: this is what it reads."""

    request: RequestId
    rank: Rank
    slices: tuple[KVSlice, ...]


@dataclass(frozen=True)
class ReadDone:
    """All bytes of a data read have landed: in `num_runs` contiguous runs, after `seconds`."""

    request: RequestId
    rank: Rank
    num_bytes: int = 0
    num_runs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ReadFailed:
    """A read of data or of a slot has ended, and nothing of it will land any more."""

    request: RequestId
    rank: Rank
    reason: str


@dataclass(frozen=True)
class SlotRead:
    """What was in the slot after all data had landed."""

    request: RequestId
    rank: Rank
    generation: Generation


@dataclass(frozen=True)
class DigestMade:
    """What a reader asked a digest of: sums as in `DigestReply`. `refusal`: why there are none."""

    route: bytes
    digest_request: messages.DigestRequest
    rows: bytes = b""
    columns: bytes = b""
    refusal: str | None = None


@dataclass(frozen=True)
class DigestCompared:
    """The bytes that landed were compared with prefill's; `difference` says where, in words.

    Nobody waits for a comparison to end: its claim tells one of an earlier attempt. `refusal`: they
    cannot be compared, and why.
    """

    request: RequestId
    rank: Rank
    claim: Claim
    difference: str | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class Tick:
    """Time has passed; leases, deadlines and timers are looked at."""


# --- actions


@dataclass(frozen=True)
class Send:
    """Send a message to an endpoint, connecting if need be."""

    endpoint: Endpoint
    message: messages.Message


@dataclass(frozen=True)
class Reply:
    """Answer whoever sent the message that came by this route."""

    route: bytes
    message: messages.Message


@dataclass(frozen=True)
class Disconnect:
    """Close the connection to an endpoint."""

    endpoint: Endpoint


@dataclass(frozen=True)
class JoinPeer:
    """Check a description and make its memory readable; answered by PeerJoined or PeerRefused."""

    peer: PeerKey
    description: messages.Description


@dataclass(frozen=True)
class DropPeer:
    """Forget a peer's memory; no read of it is under way."""

    peer: PeerKey


@dataclass(frozen=True)
class StartRead:
    """Read the data; answered by ReadDone or ReadFailed, after ReadStarted if it is verified."""

    peer: PeerKey
    rank: Rank
    grant: messages.Grant
    load: StartLoad


@dataclass(frozen=True)
class AbandonRead:
    """A read has not ended in its time: stop it by whatever stops it; answered by ReadFailed."""

    request: RequestId
    rank: Rank


@dataclass(frozen=True)
class ReadSlot:
    """Read a generation slot; answered by SlotRead or ReadFailed."""

    peer: PeerKey
    rank: Rank
    request: RequestId
    slot: int


@dataclass(frozen=True)
class MakeDigest:
    """Digest what a reader reads from an offer's blocks; answered by DigestMade."""

    route: bytes
    digest_request: messages.DigestRequest
    tables: tuple[bytes, ...]


@dataclass(frozen=True)
class CompareDigest:
    """Compare what landed, of the load's tokens, with prefill's; answered by DigestCompared."""

    rank: Rank
    slices: tuple[KVSlice, ...]
    load: StartLoad
    digest_reply: messages.DigestReply


@dataclass(frozen=True)
class WriteSlot:
    """Make a grant valid."""

    slot: int
    generation: Generation


@dataclass(frozen=True)
class ClearSlot:
    """Make a grant invalid, before its blocks can be used again."""

    slot: int


@dataclass(frozen=True)
class AskDenied:
    """An ask was denied; the reason stays on this side."""

    nonce: Nonce
    reason: str


# --- results: actions that go back to the caller


class FailureKind(enum.Enum):
    """Why a load failed; the values are the counters' names."""

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

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.detail} ({self.kind.value})"


@dataclass(frozen=True)
class LoadEnded:
    """A load that was started is over: no read can write into its blocks any more.

    `failure` is None if every byte was read while prefill held it, and equals prefill's if
    `verified`; `peer` is whom it was read from, None if nobody was ever asked; `reads` are the data
    reads that ended well, one for each prefill rank.
    """

    request: RequestId
    num_tokens: int
    failure: Failure | None
    peer: PeerKey | None = None
    verified: bool = False
    reads: tuple[ReadDone, ...] = ()


class OfferEnd(enum.Enum):
    """How an offer ended; the values are the counters' names."""

    READ = "read"
    ABORTED = "aborted"
    NOT_NEEDED = "not_needed"
    UNCLAIMED = "unclaimed"
    REVOKED = "revoked"
    EXPIRED = "expired"
    LOST = "lost"


@dataclass(frozen=True)
class OfferEnded:
    """The blocks of an offer that was published may be used again."""

    nonce: Nonce
    request: RequestId
    end: OfferEnd


@dataclass(frozen=True)
class Counts:
    """How often things happened since the last such result, by counter."""

    counts: Mapping[str, float]


DecodeCommand: TypeAlias = PrepareLoad | StartLoad | CancelLoad
PrefillCommand: TypeAlias = PrepareOffer | PublishOffer | WithdrawOffer | RevokeOffer
Command: TypeAlias = DecodeCommand | PrefillCommand | SetEngineLayouts
DataEvent: TypeAlias = (
    PeerJoined | PeerRefused | ReadStarted | ReadDone | ReadFailed | SlotRead | DigestCompared
)
DecodeEvent: TypeAlias = DecodeCommand | Answered | EndpointLost | DataEvent | Tick
PrefillEvent: TypeAlias = PrefillCommand | Asked | DigestMade | Tick
DataAction: TypeAlias = JoinPeer | DropPeer | StartRead | AbandonRead | ReadSlot
DigestAction: TypeAlias = MakeDigest | CompareDigest
ControlAction: TypeAlias = Send | Reply | Disconnect
Action: TypeAlias = (
    ControlAction
    | DataAction
    | DigestAction
    | WriteSlot
    | ClearSlot
    | AskDenied
    | LoadEnded
    | OfferEnded
)
Result: TypeAlias = LoadEnded | OfferEnded | Counts
