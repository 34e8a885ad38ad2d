"""The records that go into the state machines and come out of them, besides the wire's messages.

Commands come from the caller, which is vLLM's step thread. Events come from the sockets and the
data plane. The machines answer with actions, which `engine.loop` carries out; results are actions
that go back to the caller. All records are frozen, so that tests compare whole lists of them.
"""

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Claim, Endpoint, EngineId, Generation, Incarnation, Nonce, Rank, RequestId
from nixl_kv.protocol import messages
from nixl_kv.protocol.ticket import Ticket


class Transition(NamedTuple):
    """An offer, a load, a read from one rank, or a peer changed its state.

    `peer` is empty if it concerns no peer. `cause` is the type of the event, with a detail where
    there is one. `num_bytes` counts the bytes that were read.
    """

    request: str
    peer: str
    before: str
    after: str
    cause: str
    num_bytes: int = 0


Record: TypeAlias = Callable[[Transition], None]
"""Keeps a transition, as `engine.event_log` does."""

OVER = "OVER"
"""The name of the state after the last transition."""


# --- commands of the caller on decode


class PrepareLoad(msgspec.Struct, frozen=True):
    """A request arrived with a ticket: ask for the offer's blocks."""

    request: RequestId
    ticket: Ticket
    claim: Claim


class StartLoad(msgspec.Struct, frozen=True):
    """The request has local blocks now: read the tokens [begin, end) into them.

    For each cache group, `tables[g]` has the entries of the local block table from the one that
    holds `begin` to the one that holds `end - 1`. With `verify`, the load is good only if its
    digest equals prefill's.
    """

    request: RequestId
    begin: int
    end: int
    tables: tuple[Table, ...]
    verify: bool = False

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


class CancelLoad(msgspec.Struct, frozen=True):
    """The request needs no KV from prefill: release the offer. A started load is still reported."""

    request: RequestId


class SetEngine(msgspec.Struct, frozen=True):
    """What all ranks of this engine must agree on; comes before any request.

    `engine` is its name: a rank on another node may have started with another one. `layouts` are
    the caches of all ranks, in rank order.
    """

    engine: EngineId
    layouts: tuple[CacheLayout, ...]


# --- commands of the caller on prefill


class PrepareOffer(msgspec.Struct, frozen=True):
    """The step that completes the prompt is about to run; these blocks will hold its KV.

    The ticket leaves only after that step, with the blocks pinned. So an ask with this nonce proves
    both. `tables` has one block table for each cache group. If not `is_written`, the ticket may
    leave before all KV is in memory, and the offer is granted after `MarkWritten`.
    """

    nonce: Nonce
    request: RequestId
    context: str
    num_tokens: int
    tables: tuple[Table, ...]
    is_written: bool = True


class MarkWritten(msgspec.Struct, frozen=True):
    """All KV of this offer is in memory."""

    nonce: Nonce


class PublishOffer(msgspec.Struct, frozen=True):
    """The ticket is out and the blocks are pinned: the offer's time starts now."""

    nonce: Nonce
    request: RequestId


class WithdrawOffer(msgspec.Struct, frozen=True):
    """No ticket went out: forget the preparation."""

    nonce: Nonce


class RevokeOffer(msgspec.Struct, frozen=True):
    """End the offer unless a reader has claimed it by now."""

    nonce: Nonce


class ReclaimBlocks(msgspec.Struct, frozen=True):
    """A local request has waited for `num_blocks` blocks: take them from offers.

    Unclaimed offers end. If they are too few, granted offers that no reader reads yet are recalled.
    """

    num_blocks: int


# --- events of the sockets


class Asked(msgspec.Struct, frozen=True):
    """This rank received a message; `route` leads back to its sender."""

    route: bytes
    message: messages.ToRank


class Answered(msgspec.Struct, frozen=True):
    """A remote endpoint answered."""

    endpoint: Endpoint
    message: messages.Answer


class LinkBroken(msgspec.Struct, frozen=True):
    """A link in use broke; messages sent over it may be lost."""

    endpoint: Endpoint


class EndpointLost(msgspec.Struct, frozen=True):
    """The endpoint cannot be reached: its link broke twice, or could not be opened."""

    endpoint: Endpoint
    reason: str


# --- events of the data plane


class PeerKey(msgspec.Struct, frozen=True):
    """One incarnation of a remote engine, at the endpoint that a ticket names.

    The endpoint is part of the key, so that a forged ticket with another address cannot redirect
    the holders of genuine tickets.
    """

    engine: EngineId
    incarnation: Incarnation
    endpoint: Endpoint

    def __str__(self) -> str:
        return f"engine {self.engine!r} at {self.endpoint}"


class PeerFits(msgspec.Struct, frozen=True):
    """The peer's description fits: loads may ask its ranks, by these routes.

    Its memory is still being made readable. A read that starts earlier waits for that.
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
    """A NIXL connection to a peer broke or could not be made. Reads over it fail as well."""

    peer: PeerKey
    reason: str


class PeersMoved(msgspec.Struct, frozen=True):
    """Another agent connects to these peers, so they must make progress meanwhile."""

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
    """A deadline has passed."""


# --- actions


class Send(msgspec.Struct, frozen=True):
    """Send a message to an endpoint; connect if necessary."""

    endpoint: Endpoint
    message: messages.Message


class Reply(msgspec.Struct, frozen=True):
    """Answer the sender of the message that came by this route."""

    route: bytes
    message: messages.Message


class Disconnect(msgspec.Struct, frozen=True):
    """Close the connection to an endpoint."""

    endpoint: Endpoint


class JoinPeer(msgspec.Struct, frozen=True):
    """Check a description and make the peer's memory readable.

    The answers are PeerFits and then PeerJoined; PeerRefused may come instead of either.
    """

    peer: PeerKey
    description: messages.Description


class DropPeer(msgspec.Struct, frozen=True):
    """Forget a peer's memory, or stop making it readable. No read of it is in flight.

    If not `is_dead`, this rank may meet it again over the same connections.
    """

    peer: PeerKey
    is_dead: bool = False


class StartRead(msgspec.Struct, frozen=True):
    """Read the data; answered by ReadDone or ReadFailed."""

    peer: PeerKey
    rank: Rank
    grant: messages.Grant
    load: StartLoad


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


class CompareDigest(msgspec.Struct, frozen=True):
    """Digest what a load has read from a rank, and compare it with prefill's digest.

    Sent when the data has landed, without prefill's sums, to start the digest. Sent again with
    them when the slot was valid too, and then answered by DigestCompared.
    """

    rank: Rank
    slices: tuple[messages.KVSlice, ...]
    load: StartLoad
    claim: Claim
    rows: bytes = b""
    columns: bytes = b""


class WriteSlot(msgspec.Struct, frozen=True):
    """Make a grant valid: write its generation into the fence slot."""

    slot: int
    generation: Generation


class ClearSlot(msgspec.Struct, frozen=True):
    """Make a grant invalid, before its blocks can be reused."""

    slot: int


class PeerUnreadable(msgspec.Struct, frozen=True):
    """A peer answers, but connections to its memory break. Comes once until a read succeeds."""

    peer: PeerKey
    reason: str


class PeerReadable(msgspec.Struct, frozen=True):
    """A read of an unreadable peer succeeded."""

    peer: PeerKey


class AskDenied(msgspec.Struct, frozen=True):
    """This rank denied a message about an offer; the reason stays on this side."""

    nonce: Nonce
    reason: str


# --- results: actions that go back to the caller


class FailureKind(enum.Enum):
    """Why a load failed; the values are names of counters."""

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
    """Why a load failed: for a counter, and for people."""

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.detail} ({self.kind.value})"


class LoadEnded(msgspec.Struct, frozen=True):
    """A started load has ended: no read can write into its blocks any longer.

    `failure` is None if every byte was read while prefill held the blocks. `verified`: its digest
    equals prefill's. `peer` is None if no engine was asked. `reads` are the successful data reads,
    one for each prefill rank.
    """

    request: RequestId
    num_tokens: int
    failure: Failure | None
    peer: PeerKey | None = None
    verified: bool = False
    reads: tuple[ReadDone, ...] = ()


class OfferEnd(enum.Enum):
    """How an offer ended; the values are names of counters."""

    READ = "read"
    ABORTED = "aborted"
    NOT_NEEDED = "not_needed"
    UNCLAIMED = "unclaimed"
    REVOKED = "revoked"
    EXPIRED = "expired"
    LOST = "lost"


class OfferEnded(msgspec.Struct, frozen=True):
    """The blocks of a published offer may be reused."""

    nonce: Nonce
    request: RequestId
    end: OfferEnd


class NewLife(msgspec.Struct, frozen=True):
    """This rank began another incarnation; its former description is void."""

    description: messages.RankDescription


class Counts(msgspec.Struct, frozen=True):
    """Counters' increments since the last such result, and gauges' values."""

    counts: Mapping[str, float]


DecodeCommand: TypeAlias = PrepareLoad | StartLoad | CancelLoad
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
Notice: TypeAlias = PeerUnreadable | PeerReadable | AskDenied
DigestAction: TypeAlias = MakeDigest | CompareDigest
DigestEvent: TypeAlias = DigestMade | DigestCompared
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
