"""The inputs and outputs of the state machines, besides the messages on the wire.

Commands come from the caller, vLLM's step thread. Events come from the sockets and the data plane.
The machines answer with actions, which `engine.loop` carries out. Results go back to the caller.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.match import Route
from nixl_kv.ids import (
    Claim,
    Endpoint,
    EngineId,
    FenceToken,
    HintKey,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
)
from nixl_kv.protocol import messages
from nixl_kv.protocol.ticket import Ticket


class Transition(NamedTuple):
    """The subject of a state machine changed its state."""

    machine: str  # offer, load, read or peer
    subject: str  # a nonce or a claim, for a read with the rank; for a peer its name
    request: str  # empty if the transition is a peer's
    peer: str  # empty if the transition concerns no peer
    before: str
    after: str
    cause: str  # the event's type and details
    num_bytes: int = 0
    reason: str = ""  # why a load ended as FAILED: the value of a FailureKind
    is_last: bool = False  # no other transition of the subject follows


Record: TypeAlias = Callable[[Transition], None]
NO_TOKEN: Final = FenceToken(b"")
NO_HINTS: Final = HintKey("")
OVER = "OVER"  # the name of the state after the last transition


# --- commands of the caller on decode


class PrepareLoad(msgspec.Struct, frozen=True):
    request: RequestId
    ticket: Ticket
    claim: Claim
    hint_key: HintKey = NO_HINTS  # goes back with hints, and to no peer
    found: bytes = b""  # `messages.Found.run`, if the ticket was made of such an answer


class StartLoad(msgspec.Struct, frozen=True):
    """The request has local blocks: read the tokens [begin, end), and `verify` them by digest.

    `tables` has one block table per cache group, from the entry of token `begin` to that of token
    `end - 1`.
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
    """All ranks of an engine must agree on this; it comes before any request."""

    engine: EngineId  # a rank on another node may have started under another name
    layouts: tuple[CacheLayout, ...]  # in rank order
    # Where the scheduler hears of loads between its steps; None: it does not.
    directory: Endpoint | None = None
    finds_at: Endpoint | None = None  # where the scheduler answers `Find`; None: it does not


# --- commands of the caller on prefill


class ExpectOffer(msgspec.Struct, frozen=True):
    """A request with an early ticket has arrived: asks for its offer wait from now on."""

    nonce: Nonce
    request: RequestId
    context: str  # `Ticket.hashes`


class PrepareOffer(msgspec.Struct, frozen=True):
    """The step that completes the prompt is about to run; these blocks will hold its KV.

    The ticket leaves after that step, with the blocks pinned: an ask with this nonce proves both.

    An early offer comes with each step of its prompt, until all is `computed`. Its blocks are
    not pinned before `PublishOffer`. Until then only the fence token in its `slot` shows that vLLM
    has not reused them; without a slot the rank grants it after `PublishOffer`.
    """

    nonce: Nonce
    request: RequestId
    context: str  # `Ticket.hashes`
    num_tokens: int
    tables: tuple[Table, ...]  # one per cache group
    is_written: bool = True  # else the rank grants it after `MarkWritten`: KV is not in memory yet
    is_early: bool = False
    in_parts: bool = False  # an early one may have a slot, and be granted before `PublishOffer`
    attempt: int = 0  # counts the preemptions of the request
    computed: int | None = None  # tokens in memory after the step; None: all
    num_cached: int = 0  # tokens that prefill did not compute; see `messages.Grant`
    # Its blocks are merely cached: nothing ever pins them, and the caller hears nothing of it.
    is_cached: bool = False
    slot: int | None = None  # of a part on the caller's thread; see `feature.StepPart`
    fence_token: FenceToken = NO_TOKEN


class SetContentKey(msgspec.Struct, frozen=True):
    """The key of this life of the engine, which seals `messages.Found.run`; never on the wire."""

    key: bytes


class BlocksTaken(msgspec.Struct, frozen=True):
    """With `conversations`, in each step: the blocks that it may write, besides its requests' own.

    They are those that have left vLLM's queue of free blocks since the step before.
    """

    step: int  # counts the steps of this engine from 1, without gaps
    ids: bytes  # little-endian int32, as in a `Table`
    epoch: int = 0  # counts resets of vLLM's prefix cache and of the label of the weights


class MarkWritten(msgspec.Struct, frozen=True):
    """The KV of the first `num_tokens` tokens of this offer is in memory; None: of all."""

    nonce: Nonce
    num_tokens: int | None = None
    attempt: int = 0  # see `PrepareOffer`


class AwaitWrites(msgspec.Struct, frozen=True):
    """These become true when `is_done` does: an event on the GPU's stream. Any thread asks it."""

    marks: tuple[MarkWritten, ...]
    is_done: Callable[[], bool]


class PublishOffer(msgspec.Struct, frozen=True):
    """The ticket is out and the blocks are pinned: the offer's time starts now."""

    nonce: Nonce
    request: RequestId


class WithdrawOffer(msgspec.Struct, frozen=True):
    """No ticket went out. An early offer may be prepared again, unless it `is_final`."""

    nonce: Nonce
    is_final: bool = True


class RevokeOffer(msgspec.Struct, frozen=True):
    """End the offer unless a reader has claimed it."""

    nonce: Nonce


class ReclaimBlocks(msgspec.Struct, frozen=True):
    """A local request waits for blocks: end unclaimed offers, and recall unread ones."""

    num_blocks: int


class RevokeAll(msgspec.Struct, frozen=True):
    """The cache was reset: end each offer whose ticket is out, even while it is being read."""


class Stepped(msgspec.Struct, frozen=True):
    """A step of this engine has begun or ended, and the first one has ended."""


class Paused(msgspec.Struct, frozen=True):
    """This engine begins no request, or goes on. The event with the highest number counts."""

    number: int
    is_paused: bool


# --- events of the sockets


class Asked(msgspec.Struct, frozen=True):
    route: bytes  # back to the sender
    message: messages.ToPrefill


class Answered(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    message: messages.Answer


class LinkBroken(msgspec.Struct, frozen=True):
    """A link in use broke; messages sent over it may be lost."""

    endpoint: Endpoint


class EndpointLost(msgspec.Struct, frozen=True):
    """The link broke twice, or could not be opened."""

    endpoint: Endpoint
    reason: str


# --- events of the data plane


class PeerKey(msgspec.Struct, frozen=True):
    """One incarnation of a remote engine, at the endpoint that a ticket names."""

    engine: EngineId
    incarnation: Incarnation
    endpoint: Endpoint  # so a forged ticket cannot redirect the holders of genuine ones

    def __str__(self) -> str:
        return f"engine {self.engine!r} at {self.endpoint}"


class Introduction(msgspec.Struct, frozen=True):
    """Facts that one remote rank has to know before NIXL connects to it; see `messages.Admit`."""

    rank: Rank
    sources: tuple[str, ...]
    listens: tuple[str, ...]
    maps: bool = False  # this rank wants a token to map the remote rank's memory


Introduce: TypeAlias = Callable[[Rank, messages.RankDescription], Introduction | None]
"""How this rank introduces itself to a remote one; None: that has no port that admits hosts."""


def no_introduction(_rank: Rank, _description: messages.RankDescription) -> None:
    """On one machine, and where no transport has ports, any rank may connect."""


class PeerFits(msgspec.Struct, frozen=True):
    """The description fits: loads may ask the peer's ranks while its memory is made readable.

    First these ranks have to admit this one; then `Connect` goes on.
    """

    peer: PeerKey
    description: messages.Description
    routes: tuple[Route, ...]
    introductions: tuple[Introduction, ...] = ()


class MeetPeer(msgspec.Struct, frozen=True):
    """A tool asks whether this rank can read the peer. The peer's own seal proves its address."""

    peer: PeerKey


class HandshakeDone(msgspec.Struct, frozen=True):
    """The memory of all ranks that this one reads is readable, and each was read once."""

    peer: PeerKey


class PeerRefused(msgspec.Struct, frozen=True):
    """The peer does not fit, or its memory cannot be made readable."""

    peer: PeerKey
    reason: str


class Chunk(msgspec.Struct, frozen=True):
    """A part of a read for prefill to pack: tokens [begin, end) of these heads."""

    number: int
    begin: int
    end: int
    layers: tuple[messages.LayerHeads, ...]


class ReadMoved(msgspec.Struct, frozen=True):
    """Some bytes of a read have landed."""

    request: RequestId
    rank: Rank


class ChunksWanted(msgspec.Struct, frozen=True):
    """A staged read has moved, and wants prefill to pack these chunks, if any.

    `holds` are the numbers of all chunks that the read waits for or still reads.
    """

    request: RequestId
    rank: Rank
    chunks: tuple[Chunk, ...]
    holds: tuple[int, ...]


class ReadDone(msgspec.Struct, frozen=True):
    """All bytes of a read have landed, in `num_runs` contiguous runs; then its slot was read."""

    request: RequestId
    rank: Rank
    num_bytes: int = 0
    num_runs: int = 0
    seconds: float = 0.0
    path: str = "direct"
    direct_bytes: int = 0  # of them, those that a staged read has read directly
    post_seconds: float = 0.0  # until its first descriptors were posted, or its kernel launched
    fence_token: FenceToken | None = None  # None: stopped before the fence slot was read


class PeerBroken(msgspec.Struct, frozen=True):
    """A NIXL connection to a peer broke or failed to open. Reads over it fail as well."""

    peer: PeerKey
    reason: str


class PeersMoved(msgspec.Struct, frozen=True):
    """Another agent connects to these peers, so they must make progress meanwhile."""

    peers: tuple[PeerKey, ...]


class ReadFailed(msgspec.Struct, frozen=True):
    """A read of data or of its fence slot has ended; no byte of it will land later."""

    request: RequestId
    rank: Rank
    reason: str


class DigestMade(msgspec.Struct, frozen=True):
    """The digest for a reader, as in `DigestReply`, or the reason of a refusal."""

    route: bytes
    digest_request: messages.DigestRequest
    rows: bytes = b""
    columns: bytes = b""
    refusal: str | None = None


class ChunkPacked(msgspec.Struct, frozen=True):
    """The write to a ring slot has ended. `refusal` says why the chunk is not in it."""

    route: bytes
    pack_request: messages.PackRequest
    slot: int
    refusal: str | None = None


class DigestCompared(msgspec.Struct, frozen=True):
    """The landed bytes were compared with prefill's; `difference` says where they differ."""

    request: RequestId
    rank: Rank
    claim: Claim  # tells the attempts of a request apart: a comparison may outlive its load
    difference: str | None = None
    refusal: str | None = None  # why nothing was compared


class Tick(msgspec.Struct, frozen=True):
    """A deadline has passed."""


# --- actions; these are answered:
#
#     StartHandshake         by PeerFits, then HandshakeDone (with introductions: after Connect); or
#                            by PeerRefused instead
#     StartRead              by ReadDone or ReadFailed, after any number of ReadMoved, ChunksWanted
#     StopRead, AbandonRead  by the end of that read: at once, or once its agent is gone
#     MakeDigest             by DigestMade
#     PackChunk              by ChunkPacked
#     CompareDigest          by DigestCompared, if it has prefill's sums


class Send(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    message: messages.Message


class Reply(msgspec.Struct, frozen=True):
    route: bytes
    message: messages.Message


class Disconnect(msgspec.Struct, frozen=True):
    endpoint: Endpoint


class StartHandshake(msgspec.Struct, frozen=True):
    """Check a description and make the peer's memory readable."""

    peer: PeerKey
    description: messages.Description


class Connect(msgspec.Struct, frozen=True):
    """All ranks of the peer have admitted this one, or its connection broke: connect to it.

    Its ranks may connect from `sources`.
    """

    peer: PeerKey
    sources: tuple[str, ...]
    tokens: Mapping[Rank, bytes] = {}  # to map memory of its ranks; see `messages.Share`


class DropPeer(msgspec.Struct, frozen=True):
    """Forget a peer's memory, or stop making it readable. No read of it is in flight."""

    peer: PeerKey
    is_dead: bool = False  # else this rank may meet it again over the same connections


class StartRead(msgspec.Struct, frozen=True):
    peer: PeerKey
    rank: Rank
    grant: messages.Grant
    load: StartLoad


class TellRead(msgspec.Struct, frozen=True):
    """A feature's message to the operation of a read; see `ReadOp.on_message`."""

    request: RequestId
    rank: Rank
    message: Any


class StopRead(msgspec.Struct, frozen=True):
    request: RequestId
    rank: Rank


class AbandonRead(msgspec.Struct, frozen=True):
    request: RequestId
    rank: Rank


class MakeDigest(msgspec.Struct, frozen=True):
    route: bytes
    digest_request: messages.DigestRequest
    tables: tuple[Table, ...]


class PackChunk(msgspec.Struct, frozen=True):
    route: bytes
    pack_request: messages.PackRequest
    tables: tuple[Table, ...]
    slot: int


class CompareDigest(msgspec.Struct, frozen=True):
    """Digest the bytes of a read; with prefill's sums, also compare the digests.

    One comes when the read is posted, so that the digest is prepared while the bytes travel. One
    comes when they have landed; without prefill's sums it starts the digest meanwhile.
    """

    rank: Rank
    slices: tuple[messages.KVSlice, ...]
    load: StartLoad
    claim: Claim
    rows: bytes = b""
    columns: bytes = b""
    has_landed: bool = True


class WriteSlot(msgspec.Struct, frozen=True):
    slot: int
    fence_token: FenceToken


class ClearSlot(msgspec.Struct, frozen=True):
    slot: int


class PeerUnusable(msgspec.Struct, frozen=True):
    """A peer failed several times in a row: loads from it fail at once from now on."""

    peer: PeerKey
    reason: str


class PeerUsable(msgspec.Struct, frozen=True):
    """A read of an unusable peer succeeded."""

    peer: PeerKey


class AskDenied(msgspec.Struct, frozen=True):
    """This rank denied a message about an offer. The reason stays on this side."""

    nonce: Nonce
    reason: str
    is_usual: bool = False  # nothing held its blocks


# --- results: actions that go back to the caller


class FailureKind(enum.Enum):
    """Why a load failed; the values are the `reason` of metrics."""

    DENIED = "denied"
    LEASE_LOST = "lease_lost"
    RECALLED = "recalled"
    NOT_ARRIVED = "not_arrived"
    UNREACHABLE = "unreachable"
    INCOMPATIBLE = "incompatible"
    STALLED = "stalled"
    LATE = "late"
    BROKEN = "broken"
    FENCED = "fenced"
    CORRUPT = "corrupt"
    DROPPED = "dropped"
    INTERNAL = "internal"


class Failure(msgspec.Struct, frozen=True):
    kind: FailureKind
    detail: str
    is_known: bool = False  # the log told that this peer cannot be used

    def __str__(self) -> str:
        return f"{self.detail} ({self.kind.value})"


PHASES: Final = ("ask", "blocks", "queue", "read", "verify")
"""In which a load waits: for grants, for local blocks, for its turn, for its bytes, for digests."""


class LoadEnded(msgspec.Struct, frozen=True):
    """A started load has ended: no read can write into its blocks later."""

    request: RequestId
    num_tokens: int
    failure: Failure | None  # None: every byte was read while prefill held the blocks
    peer: PeerKey | None = None  # None: no engine was asked
    verified: bool = False  # its digest equals prefill's
    reads: tuple[ReadDone, ...] = ()  # one per prefill rank
    waits: tuple[float, ...] = ()  # seconds in each of PHASES; one that did not begin has 0
    ended_at: float = 0.0  # in monotonic seconds, if `waits` is known
    num_cached: int | None = None  # see `messages.Landed`
    is_cached: bool = False  # of blocks that its owner may reuse at any time


class OfferEnd(enum.Enum):
    """How an offer ended; the values are the `outcome` of metrics.

    If the ranks of an engine differ, the last one in this order describes the offer.
    """

    NOT_NEEDED = "not_needed"
    READ = "read"
    UNCLAIMED = "unclaimed"
    ABORTED = "aborted"
    REVOKED = "revoked"
    EXPIRED = "expired"
    OVERDUE = "overdue"
    LOST = "lost"


class OfferEnded(msgspec.Struct, frozen=True):
    """The blocks of a published offer may be reused."""

    nonce: Nonce
    request: RequestId
    end: OfferEnd
    reader: EngineId | None = None  # the engine whose ask was granted; None: none asked
    asked_at: float = 0.0  # when that was, in monotonic seconds
    directory: Endpoint | None = None  # where that engine answers `Find`; None: it does not


class OfferGranted(msgspec.Struct, frozen=True):
    """A reader has claimed a published offer, so its blocks come back soon. Comes at most once."""

    request: RequestId


class LoadReady(msgspec.Struct, frozen=True):
    """An early load can use local blocks: prefill computes its request, or it has failed."""

    request: RequestId


class EarlySlotFree(msgspec.Struct, frozen=True):
    """No grant names this slot of `EarlySlots`, with this token, any longer."""

    slot: int | None  # None: all slots that the transfer thread has cleared
    fence_token: FenceToken = NO_TOKEN


class EarlyReleased(msgspec.Struct, frozen=True):
    """No reader needs this early offer any longer, and its ticket has not left."""

    nonce: Nonce
    request: RequestId


class NewLife(msgspec.Struct, frozen=True):
    """This rank began another incarnation; its former description is void."""

    description: messages.RankDescription


_Series: TypeAlias = tuple[str, str]  # the name of a metric, and the value of its label or ''


class Counts(msgspec.Struct):
    """Increments of counters, values of gauges, and durations since the last such result."""

    amounts: dict[_Series, float] = msgspec.field(default_factory=dict)
    seconds: dict[_Series, list[float]] = msgspec.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.amounts or self.seconds)

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        self.amounts[name, label] = self.amounts.get((name, label), 0) + amount

    def measure(self, name: str, value: float, label: str = "") -> None:
        self.amounts[name, label] = value

    def observe(self, name: str, seconds: float, label: str = "") -> None:
        self.seconds.setdefault((name, label), []).append(seconds)

    def pop(self) -> "Counts":
        popped = Counts(self.amounts, self.seconds)
        self.amounts, self.seconds = {}, {}
        return popped


PrefillCommand: TypeAlias = (
    ExpectOffer
    | PrepareOffer
    | MarkWritten
    | PublishOffer
    | WithdrawOffer
    | RevokeOffer
    | RevokeAll
    | ReclaimBlocks
)
DecodeCommand: TypeAlias = PrepareLoad | StartLoad | CancelLoad
ContentCommand: TypeAlias = SetContentKey | BlocksTaken
Command: TypeAlias = DecodeCommand | PrefillCommand | ContentCommand | AwaitWrites | SetEngine
ReadEvent: TypeAlias = ReadMoved | ChunksWanted | ReadDone | ReadFailed | DigestCompared
PeerEvent: TypeAlias = PeerFits | HandshakeDone | PeerRefused | PeerBroken | PeersMoved
DataEvent: TypeAlias = PeerEvent | ReadEvent
DecodeEvent: TypeAlias = (
    DecodeCommand | Answered | LinkBroken | EndpointLost | MeetPeer | DataEvent | Tick
)
PrefillEvent: TypeAlias = (
    PrefillCommand | ContentCommand | Asked | DigestMade | ChunkPacked | Stepped | Paused | Tick
)
DataAction: TypeAlias = (
    StartHandshake | Connect | DropPeer | StartRead | TellRead | StopRead | AbandonRead
)
Notice: TypeAlias = PeerUnusable | PeerUsable | AskDenied
DigestAction: TypeAlias = MakeDigest | CompareDigest
DigestEvent: TypeAlias = DigestMade | DigestCompared
WorkAction: TypeAlias = DigestAction | PackChunk
WorkEvent: TypeAlias = DigestEvent | ChunkPacked
EarlyReport: TypeAlias = EarlySlotFree | EarlyReleased
LocalAction: TypeAlias = WriteSlot | ClearSlot | EarlyReport | LoadReady | LoadEnded | OfferEnded
Action: TypeAlias = Send | Reply | Disconnect | DataAction | WorkAction | LocalAction | Notice
Actions: TypeAlias = list[Action]
Result: TypeAlias = (
    LoadReady | LoadEnded | OfferGranted | OfferEnded | EarlyReport | NewLife | Counts
)
