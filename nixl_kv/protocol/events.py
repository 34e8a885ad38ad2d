"""What goes into the machines and what comes out of them, besides the wire's messages.

Commands come from the caller (vLLM's step), events from the data plane and the sockets; actions
are carried out by whoever runs the machines, results among them go back to the caller. All are
frozen records, so that tests compare whole lists of them.
"""

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.match import Route
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
"""Keeps a transition; `engine.event_log` does."""

OVER = "OVER"
"""The state of what is forgotten."""


# --- commands of the caller on decode


class PrepareLoad(msgspec.Struct, frozen=True):
    """A request with a ticket arrived: ask for its blocks."""

    request: RequestId
    ticket: Ticket
    claim: Claim


class StartLoad(msgspec.Struct, frozen=True):
    """The request has blocks of its own now: read the tokens [begin, end) into them.

    For each cache group, `tables[g]` has the local block table's entries from the one that holds
    `begin` to the one that holds `end - 1`. With `verify` the bytes are compared with prefill's, by
    a digest, before the load counts as good.
    """

    request: RequestId
    begin: int
    end: int
    tables: tuple[Table, ...]
    verify: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens are to be read."""
        return self.end - self.begin


class CancelLoad(msgspec.Struct, frozen=True):
    """The request needs nothing (any more): release it on prefill.

    A load that was started is still reported.
    """

    request: RequestId


class DeclineOffer(msgspec.Struct, frozen=True):
    """A ticket cannot be used here, since it is of another version: tell its engine's directory."""

    endpoint: Endpoint
    nonce: Nonce


class SetEngine(msgspec.Struct, frozen=True):
    """What all ranks of this engine must know alike; comes before any request.

    `engine` is its name: a rank on another node may have been started with another one. `layouts`
    are the caches of all ranks, in rank order.
    """

    engine: EngineId
    layouts: tuple[CacheLayout, ...]


# --- commands of the caller on prefill


class PrepareOffer(msgspec.Struct, frozen=True):
    """The step that completes the prompt is about to run; these blocks will hold its KV.

    Sent before the ticket exists: whoever asks with this nonce has the ticket, and the ticket left
    only after that step was complete and the blocks were pinned. `tables` has one block table for
    each cache group. Not `is_written`: the ticket may leave before all layers' KV is written; it is
    granted after `MarkWritten`.
    """

    nonce: Nonce
    request: RequestId
    context: str
    num_tokens: int
    tables: tuple[Table, ...]
    is_written: bool = True


class MarkWritten(msgspec.Struct, frozen=True):
    """All KV of this offer's blocks is in memory."""

    nonce: Nonce


class PublishOffer(msgspec.Struct, frozen=True):
    """The ticket is out and the blocks are pinned: the offer's time runs from now."""

    nonce: Nonce
    request: RequestId


class WithdrawOffer(msgspec.Struct, frozen=True):
    """No ticket went out: forget the preparation."""

    nonce: Nonce


class RevokeOffer(msgspec.Struct, frozen=True):
    """Nobody is to claim the offer any more: end it, unless it is claimed by now."""

    nonce: Nonce


class ReclaimBlocks(msgspec.Struct, frozen=True):
    """A request of the caller's own lacks so many blocks, and nothing moves.

    Unclaimed offers end. If that is not enough, granted ones that nobody reads yet are recalled.
    """

    num_blocks: int


# --- events of the sockets


class Asked(msgspec.Struct, frozen=True):
    """A message came to this rank; `route` leads back to its sender."""

    route: bytes
    message: messages.ToRank


class Answered(msgspec.Struct, frozen=True):
    """An endpoint that this side talks to has sent a message."""

    endpoint: Endpoint
    message: messages.Answer


class LinkBroken(msgspec.Struct, frozen=True):
    """A link that is used broke; what was sent over it may not have been heard."""

    endpoint: Endpoint


class EndpointLost(msgspec.Struct, frozen=True):
    """The connection to an endpoint is gone, or none came about."""

    endpoint: Endpoint
    reason: str


# --- events of the data plane


class PeerKey(msgspec.Struct, frozen=True):
    """One life of a remote engine, where a ticket says that it is.

    The endpoint is part of the key: a forged ticket that names a known engine at another address
    must not redirect those who have a true one.
    """

    engine: EngineId
    incarnation: Incarnation
    endpoint: Endpoint

    def __str__(self) -> str:
        return f"engine {self.engine!r} at {self.endpoint}"


class PeerFits(msgspec.Struct, frozen=True):
    """The peer's description fits: its ranks may be asked, by these routes.

    Its memory is being made readable; a read that is started before waits for that.
    """

    peer: PeerKey
    description: messages.Description
    routes: tuple[Route, ...]


class PeerJoined(msgspec.Struct, frozen=True):
    """The memory of a peer that fits can be read."""

    peer: PeerKey


class PeerRefused(msgspec.Struct, frozen=True):
    """The peer does not fit, or its memory cannot be made readable."""

    peer: PeerKey
    reason: str


class Chunk(msgspec.Struct, frozen=True):
    """A part of a read that prefill is to pack: tokens [begin, end) of these layers' heads."""

    number: int
    begin: int
    end: int
    layers: tuple[messages.LayerHeads, ...]


class ChunksWanted(msgspec.Struct, frozen=True):
    """A read advances; prefill is to be asked for these chunks, if there are any.

    Every path reports its progress by this event, without chunks where it needs none.

    `holds` are the numbers of all chunks that the read waits for or still reads. A chunk that is
    not among them has been read: prefill may use its slot for others.
    """

    request: RequestId
    rank: Rank
    chunks: tuple[Chunk, ...]
    holds: tuple[int, ...]


class ReadDone(msgspec.Struct, frozen=True):
    """All bytes of a data read have landed: in `num_runs` contiguous runs, after `seconds`.

    `path` names the way that they took; of a staged read, `direct_bytes` were read directly.
    """

    request: RequestId
    rank: Rank
    num_bytes: int = 0
    num_runs: int = 0
    seconds: float = 0.0
    path: str = "direct"
    direct_bytes: int = 0


class PeerBroken(msgspec.Struct, frozen=True):
    """A connection to a peer broke, or could not be made; reads over it fail as well."""

    peer: PeerKey
    reason: str


class PeersMoved(msgspec.Struct, frozen=True):
    """Another agent connects to these peers, which have to take part in that."""

    peers: tuple[PeerKey, ...]


class ReadFailed(msgspec.Struct, frozen=True):
    """A read of data or of a slot has ended, and nothing of it will land any more."""

    request: RequestId
    rank: Rank
    reason: str


class SlotRead(msgspec.Struct, frozen=True):
    """What was in the slot after all data had landed."""

    request: RequestId
    rank: Rank
    generation: Generation


class DigestMade(msgspec.Struct, frozen=True):
    """What a reader asked a digest of: sums as in `DigestReply`. `refusal`: why there are none."""

    route: bytes
    digest_request: messages.DigestRequest
    rows: bytes = b""
    columns: bytes = b""
    refusal: str | None = None


class ChunkPacked(msgspec.Struct, frozen=True):
    """A slot of the ring is not written any more. `refusal`: the chunk is not in it, and why."""

    route: bytes
    pack_request: messages.PackRequest
    slot: int
    refusal: str | None = None


class DigestCompared(msgspec.Struct, frozen=True):
    """The bytes that landed were compared with prefill's; `difference` says where, in words.

    Nobody waits for a comparison to end: its claim tells one of an earlier attempt. `refusal`: they
    cannot be compared, and why.
    """

    request: RequestId
    rank: Rank
    claim: Claim
    difference: str | None = None
    refusal: str | None = None


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; leases, deadlines and timers are looked at."""


# --- actions


class Send(msgspec.Struct, frozen=True):
    """Send a message to an endpoint, connecting if need be."""

    endpoint: Endpoint
    message: messages.Message


class Reply(msgspec.Struct, frozen=True):
    """Answer whoever sent the message that came by this route."""

    route: bytes
    message: messages.Message


class Disconnect(msgspec.Struct, frozen=True):
    """Close the connection to an endpoint."""

    endpoint: Endpoint


class JoinPeer(msgspec.Struct, frozen=True):
    """Check a description, and make its memory readable.

    Answered by PeerFits and then PeerJoined, or by PeerRefused in place of either.
    """

    peer: PeerKey
    description: messages.Description


class DropPeer(msgspec.Struct, frozen=True):
    """Forget a peer's memory, or give up making it readable; no read of it is under way.

    `is_dead`: its ranks do not answer. Else it may be met again, over the same connections.
    """

    peer: PeerKey
    is_dead: bool = False


class StartRead(msgspec.Struct, frozen=True):
    """Read the data; answered by ReadDone or ReadFailed. `slices` are to be verified."""

    peer: PeerKey
    rank: Rank
    grant: messages.Grant
    load: StartLoad
    slices: tuple[KVSlice, ...] = ()


class ReadChunk(msgspec.Struct, frozen=True):
    """A chunk of a read is in this slot of prefill's ring, or in none: then it is read as it is."""

    request: RequestId
    rank: Rank
    chunk: int
    slot: int | None


class StopRead(msgspec.Struct, frozen=True):
    """A read of data is not wanted any more; answered by its end, as soon as can be."""

    request: RequestId
    rank: Rank


class AbandonRead(msgspec.Struct, frozen=True):
    """A read has not ended in its time: stop it by whatever stops it; answered by ReadFailed."""

    request: RequestId
    rank: Rank


class ReadSlot(msgspec.Struct, frozen=True):
    """Read a generation slot; answered by SlotRead or ReadFailed."""

    peer: PeerKey
    rank: Rank
    request: RequestId
    slot: int


class MakeDigest(msgspec.Struct, frozen=True):
    """Digest what a reader reads from an offer's blocks; answered by DigestMade."""

    route: bytes
    digest_request: messages.DigestRequest
    tables: tuple[Table, ...]


class PackChunk(msgspec.Struct, frozen=True):
    """Pack a chunk of an offer's blocks into a slot of the ring; answered by ChunkPacked."""

    route: bytes
    pack_request: messages.PackRequest
    tables: tuple[Table, ...]
    slot: int


class DigestLanded(msgspec.Struct, frozen=True):
    """Digest what has landed, of the load's tokens: a comparison will follow, unless it fails."""

    rank: Rank
    slices: tuple[KVSlice, ...]
    load: StartLoad
    claim: Claim


class CompareDigest(msgspec.Struct, frozen=True):
    """Compare what landed, of the load's tokens, with prefill's; answered by DigestCompared."""

    rank: Rank
    slices: tuple[KVSlice, ...]
    load: StartLoad
    digest_reply: messages.DigestReply


class WriteSlot(msgspec.Struct, frozen=True):
    """Make a grant valid."""

    slot: int
    generation: Generation


class ClearSlot(msgspec.Struct, frozen=True):
    """Make a grant invalid, before its blocks can be used again."""

    slot: int


class NotWarm(msgspec.Struct, frozen=True):
    """An engine of `warm` is not known, or cannot be used: said once for each reason."""

    endpoint: Endpoint
    reason: str


class PeerUnreadable(msgspec.Struct, frozen=True):
    """A peer answers, but new connections to its memory break: said once, until it is read."""

    peer: PeerKey
    reason: str


class PeerReadable(msgspec.Struct, frozen=True):
    """A peer that was unreadable has been read."""

    peer: PeerKey


class AskDenied(msgspec.Struct, frozen=True):
    """An ask was denied; the reason stays on this side."""

    nonce: Nonce
    reason: str


# --- results: actions that go back to the caller


class FailureKind(enum.Enum):
    """Why a load failed; the values are the counters' names."""

    DENIED = "denied"
    LEASE_LOST = "lease_lost"
    RECALLED = "recalled"
    UNREACHABLE = "unreachable"
    INCOMPATIBLE = "incompatible"
    LATE = "late"
    BROKEN = "broken"
    FENCED = "fenced"
    CORRUPT = "corrupt"
    DROPPED = "dropped"
    INTERNAL = "internal"


class Failure(msgspec.Struct, frozen=True):
    """Why a load failed, to count and to read."""

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.detail} ({self.kind.value})"


class LoadEnded(msgspec.Struct, frozen=True):
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


class OfferEnded(msgspec.Struct, frozen=True):
    """The blocks of an offer that was published may be used again."""

    nonce: Nonce
    request: RequestId
    end: OfferEnd


class NewLife(msgspec.Struct, frozen=True):
    """This rank can be read under another description from now on; its former one is void."""

    description: messages.RankDescription


class Counts(msgspec.Struct, frozen=True):
    """How often things happened since the last such result, by counter; gauges as they are."""

    counts: Mapping[str, float]


DecodeCommand: TypeAlias = PrepareLoad | StartLoad | CancelLoad | DeclineOffer
PrefillCommand: TypeAlias = (
    PrepareOffer | MarkWritten | PublishOffer | WithdrawOffer | RevokeOffer | ReclaimBlocks
)
Command: TypeAlias = DecodeCommand | PrefillCommand | SetEngine
ReadEvent: TypeAlias = ChunksWanted | ReadDone | ReadFailed | SlotRead | DigestCompared
PeerEvent: TypeAlias = PeerFits | PeerJoined | PeerRefused | PeerBroken | PeersMoved
DataEvent: TypeAlias = PeerEvent | ReadEvent
DecodeEvent: TypeAlias = DecodeCommand | Answered | LinkBroken | EndpointLost | DataEvent | Tick
PrefillEvent: TypeAlias = PrefillCommand | Asked | DigestMade | ChunkPacked | Tick
DataAction: TypeAlias = (
    JoinPeer | DropPeer | StartRead | ReadChunk | StopRead | AbandonRead | ReadSlot
)
Notice: TypeAlias = NotWarm | PeerUnreadable | PeerReadable | AskDenied
DigestAction: TypeAlias = MakeDigest | DigestLanded | CompareDigest
Action: TypeAlias = (
    Send
    | Reply
    | Disconnect
    | DataAction
    | DigestAction
    | PackChunk
    | WriteSlot
    | ClearSlot
    | Notice
    | LoadEnded
    | OfferEnded
)
Result: TypeAlias = LoadEnded | OfferEnded | NewLife | Counts
