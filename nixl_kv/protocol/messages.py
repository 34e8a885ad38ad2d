"""The wire between decode and prefill: tagged msgpack arrays, version first.

To the scheduler of an engine:         Describe       -> Description | Refusal
                                       Decline
                          from a tool: Drain          -> Draining
                                       SetWeights     -> WeightsSet
To a rank of a prefill engine:         Ask            -> Grant | Deny
                                       DigestRequest  -> DigestReply | Deny
                                       PackRequest    -> PackReply | Deny
                                       Renew          -> Renewed
                                       Release        (a hint; a lost one costs a lease)
From a rank, unasked, to its reader:   Recall         -> Release | Renew
To a rank of any engine, from a tool:  StatusRequest  -> Status

What is of another version than this side's is answered with VersionRefusal, wherever it came. That
message and Decline have the version 0 and stay as they are in every version, so that all of them
can read these two. More fields may come behind theirs; they are left out, as in all messages.

Every length is bounded, but for the texts of a `Status`, which only tools read. ZMQ's routing ids
mean nothing: a message itself names the incarnation it is meant for, the offer, the claim and the
reader. WIRE_VERSION has its history in `ticket`.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from nixl_kv.config import MAX_LABEL
from nixl_kv.errors import ForeignVersion, RemoteProtocolError
from nixl_kv.geometry.digest import MAX_COLUMNS
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.geometry.slices import KVSlice
from nixl_kv.ids import Claim, Endpoint, EngineId, Generation, Incarnation, Nonce, Rank
from nixl_kv.log_limit import printable
from nixl_kv.protocol.ticket import HEX32, NAME, WIRE_VERSION, Context

MAX_CLAIMS = 65536
MAX_ALLOCATIONS = 1 << 14
MAX_RANKS = 1024
MAX_ROWS = 1 << 17
MAX_SLICES = 1 << 12
MAX_CHUNKS = 1 << 20
MAX_RING_SLOTS = 1 << 10
PROOF_BYTES = 16
MAX_REASON = 300
"""Characters of an error about a message that cannot be decoded."""
MAX_LISTED = 1000
"""Of offers, loads and so on that one `Status` lists."""

_Version = Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
_Incarnation = Annotated[Incarnation, HEX32]
_Nonce = Annotated[Nonce, HEX32]
_Claim = Annotated[Claim, HEX32]
_Engine = Annotated[EngineId, NAME]
_Rank = Annotated[Rank, Meta(ge=0, lt=MAX_RANKS)]
_Ranks = Annotated[tuple[_Rank, ...], Meta(min_length=1, max_length=MAX_RANKS)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Text = Annotated[str, Meta(max_length=512)]
_Label = Annotated[str, Meta(max_length=MAX_LABEL)]
_Facts = Annotated[
    dict[Annotated[str, NAME], Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)
]
_LISTED = Meta(max_length=MAX_LISTED)
_Endpoint = Annotated[
    Endpoint, Meta(pattern=r"^tcp://(\[[0-9A-Fa-f:.]+\]|[0-9.]+):[0-9]{1,5}\Z", max_length=128)
]


class _Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A part of messages."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Version and the incarnation that is spoken to (or that speaks) come first."""

    version: _Version = WIRE_VERSION
    incarnation: _Incarnation


class _Versionless(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """What is the same in every version, for ever."""

    version: Annotated[int, Meta(ge=0, le=0)] = 0


class Decline(_Versionless, frozen=True, kw_only=True):
    """Nobody comes for this offer, since its ticket is of a version that its reader lacks.

    Whoever knows the nonce has the ticket. ["Decline", 0, nonce]
    """

    nonce: _Nonce


class VersionRefusal(_Versionless, frozen=True, kw_only=True):
    """What came is of another version than is spoken here, and was not read.

    ["VersionRefusal", 0, speaks]
    """

    speaks: Annotated[int, Meta(ge=1, le=999_999_999)] = WIRE_VERSION

    def __str__(self) -> str:
        return f"it speaks wire version {self.speaks}; this side speaks {WIRE_VERSION}"


class Reader(_Record, frozen=True, kw_only=True):
    """One rank of one life of a decode engine."""

    engine: _Engine
    incarnation: _Incarnation
    rank: _Rank


class Describe(_Message, frozen=True, kw_only=True):
    """Decode asks an engine who it is. Tools ask with ANY_INCARNATION, whatever the engine."""

    engine: _Engine


class Drain(_Message, frozen=True, kw_only=True):
    """A tool says, with ANY_INCARNATION: this engine is to stop, so offer nothing that is new.

    What has arrived before is offered, and read. Said again, it asks how far that is. With `undo`
    the engine offers again what arrives from now on.
    """

    undo: bool = False


class Draining(_Message, frozen=True, kw_only=True):
    """The answer to Drain: `num_awaited` requests have arrived and are not offered yet.

    `is_refused`: the engine has no key, and whoever asks is on another machine.
    """

    num_awaited: _Count
    is_refused: bool = False


class SetWeights(_Message, frozen=True, kw_only=True):
    """A tool gives, with ANY_INCARNATION, another label to this engine's weights."""

    weights: _Label

    def __post_init__(self) -> None:
        """Refuse a label that would break a log line."""
        if not self.weights.isprintable():
            raise ValueError("weights has characters that cannot be printed")


class WeightsSet(_Message, frozen=True, kw_only=True):
    """The label was `former`. It is what was asked for now, unless there is a `refusal`."""

    former: _Label
    refusal: _Text = ""


class Slots(_Record, frozen=True, kw_only=True):
    """Where a rank's generation slots are: `count` slots of 16 bytes from `address`, in DRAM."""

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    count: Annotated[int, Meta(ge=1, le=1 << 20)]


class Allocation(_Record, frozen=True, kw_only=True):
    """`length` bytes of GPU memory from `address` on, as their owner has them.

    A process on the same host maps them by CUDA's `handle` of an allocation in which they begin at
    `offset`, or, where `handle` is empty, by the owner's file `descriptor` of an allocation that
    they are.
    """

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    length: Annotated[int, Meta(ge=1, lt=2**62)]
    offset: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    handle: Annotated[bytes, Meta(max_length=64)] = b""
    descriptor: Annotated[int, Meta(ge=-1, lt=2**31)] = -1


class Proof(_Record, frozen=True, kw_only=True):
    """16 random bytes that the owner of exported memory has written at `address`, in that memory.

    A process that maps the memory reads them first. Other bytes show that it has mapped the memory
    of another process or another place, or that one GPU cannot read the other.
    """

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    value: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Export(_Record, frozen=True, kw_only=True):
    """How processes on the same host map a rank's cache, in ascending order of addresses.

    Its owner is process `pid`, which began at tick `started` of the host's clock, among the
    processes that `host` names: no other has all three.
    """

    host: Annotated[str, Meta(max_length=256)]
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    started: Annotated[int, Meta(ge=0, lt=2**62)]
    allocations: Annotated[tuple[Allocation, ...], Meta(min_length=1, max_length=MAX_ALLOCATIONS)]
    proof: Proof


class StagingRing(_Record, frozen=True, kw_only=True):
    """Memory of the same kind as the cache, in equal slots: there a rank packs what is read."""

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    length: Annotated[int, Meta(ge=1, lt=2**62)]
    num_slots: Annotated[int, Meta(ge=1, le=MAX_RING_SLOTS)]


class RankDescription(_Record, frozen=True, kw_only=True):
    """What a reader must know of one rank. `agent` is empty where the rank cannot be read.

    `export` is there where its memory may be mapped, `ring` where it packs what is read.
    """

    incarnation: _Incarnation
    endpoint: _Endpoint
    agent: Annotated[bytes, Meta(max_length=1 << 20)]
    slots: Slots
    layout: CacheLayout
    export: Export | None = None
    ring: StagingRing | None = None


class Description(_Message, frozen=True, kw_only=True):
    """An engine: its model's facts, its parallel shape, its ranks in rank order.

    `extras` are facts of what it keeps KV of besides the model: a reader needs those it has itself.
    """

    engine: _Engine
    model: _Facts
    shape: ParallelShape
    ranks: Annotated[tuple[RankDescription, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    extras: _Facts = {}


class Refusal(_Message, frozen=True, kw_only=True):
    """The engine at this address is not the one that was asked for, whose names it echoes."""

    engine: _Engine
    reason: _Text


class _OfClaim(_Message, frozen=True, kw_only=True):
    """What a reader, or a rank that answers it, says about an offer under a claim."""

    nonce: _Nonce
    claim: _Claim
    reader: Reader


class Ask(_Message, frozen=True, kw_only=True):
    """A reader asks one rank for the blocks of one offer.

    `number` counts this reader's asks and renews; `readers` are all ranks of the
    reader's engine that will read this rank under the claim.
    """

    nonce: _Nonce
    claim: _Claim
    context: Context
    reader: Reader
    number: _Count
    readers: _Ranks


class Grant(_OfClaim, frozen=True, kw_only=True):
    """The blocks are held for the claim while `generation` is in `slot`.

    `lease_s` is how long prefill holds on without a renew; `tables` has one block table per cache
    group, of the whole prompt.
    """

    lease_s: Annotated[float, Meta(gt=0, le=3600)]
    tables: Annotated[tuple[Table, ...], Meta(min_length=1, max_length=64)]
    slot: Annotated[int, Meta(ge=0, lt=1 << 20)]
    generation: Annotated[Generation, Meta(min_length=16, max_length=16)]


class Deny(_OfClaim, frozen=True, kw_only=True):
    """No blocks, no digest and no chunk for this claim. Why, only prefill's log says."""


class DigestRequest(_OfClaim, frozen=True, kw_only=True):
    """What the reader reads under its claim, up to token `end`: which digest does it have?"""

    end: Annotated[int, Meta(ge=1, lt=1 << 31)]
    slices: Annotated[tuple[KVSlice, ...], Meta(min_length=1, max_length=MAX_SLICES)]


class DigestReply(_OfClaim, frozen=True, kw_only=True):
    """The digest (`geometry.digest`, its key is the claim) of just that, as little-endian uint64.

    The blocks were held while it was made.
    """

    rows: Annotated[bytes, Meta(min_length=8, max_length=8 * MAX_ROWS)]
    columns: Annotated[bytes, Meta(min_length=8, max_length=8 * MAX_COLUMNS)]


_Chunk = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]


class LayerHeads(_Record, frozen=True, kw_only=True):
    """Some heads of a layer, counted over the model, from `first` up to `end`."""

    layer: _Text
    first: Annotated[int, Meta(ge=0, lt=1 << 17)]
    end: Annotated[int, Meta(ge=1, le=1 << 17)]


class PackRequest(_OfClaim, frozen=True, kw_only=True):
    """Pack tokens [begin, end) of what the reader reads under its claim, as its chunk of a number.

    The layers are of one cache group. `holds` are all chunks that the reader waits for or still
    reads, this one among them: slots with others are free. `number` counts this reader's messages,
    as in `Ask`; one that was overtaken means nothing any more.
    """

    number: _Count
    chunk: _Chunk
    begin: Annotated[int, Meta(ge=0, lt=1 << 31)]
    end: Annotated[int, Meta(ge=1, lt=1 << 31)]
    layers: Annotated[tuple[LayerHeads, ...], Meta(min_length=1, max_length=MAX_SLICES)]
    holds: Annotated[tuple[_Chunk, ...], Meta(max_length=MAX_RING_SLOTS)]


class PackReply(_OfClaim, frozen=True, kw_only=True):
    """The chunk is in this slot of the ring (`geometry.staging`) for as long as the grant is valid.

    None: it is in no slot, since none is free, or it cannot be packed. It can be read as it is.
    """

    chunk: _Chunk
    slot: Annotated[int, Meta(ge=0, lt=MAX_RING_SLOTS)] | None


class Recall(_OfClaim, frozen=True, kw_only=True):
    """The blocks are wanted back: the reader releases them, or renews since it reads them."""


class Renew(_Message, frozen=True, kw_only=True):
    """All claims that the reader holds at this rank. One that is missing is released.

    The first `num_reading` of them are being read, or wait for nothing but their turn.
    """

    reader: Reader
    number: _Count
    claims: Annotated[tuple[_Claim, ...], Meta(max_length=MAX_CLAIMS)]
    num_reading: _Count


class Renewed(_Message, frozen=True, kw_only=True):
    """The answer to the renew with this number: which of its claims this rank does not hold."""

    reader: Reader
    number: _Count
    lost: Annotated[tuple[_Claim, ...], Meta(max_length=MAX_CLAIMS)]


class Release(_OfClaim, frozen=True, kw_only=True):
    """The reader has ended, and no read of its is under way.

    `complete`: it has read and checked all that it wanted, which is nothing where the engine reads
    another rank's copy; else it does not want the blocks any more.
    """

    complete: bool


class StatusRequest(_Message, frozen=True, kw_only=True):
    """What is this rank doing? And what happened to `request`, if one is named?"""

    request: _Text = ""


class Status(_Message, frozen=True, kw_only=True):
    """The status of one rank, as open records: engine/status.py has the keys.

    `facts` are about the rank itself; `totals` counts everything; `lists` has at most MAX_LISTED
    records of each kind. Their texts are not bounded.
    """

    facts: dict[str, str | int | float | None]
    totals: dict[str, int]
    lists: dict[str, Annotated[list[dict[str, Any]], _LISTED]]


ToEngine: TypeAlias = Describe | Decline | Drain | SetWeights
ToRank: TypeAlias = Ask | DigestRequest | PackRequest | Renew | Release
ClaimAnswer: TypeAlias = Grant | Deny | DigestReply | PackReply | Recall
Answer: TypeAlias = Description | Refusal | ClaimAnswer | Renewed | VersionRefusal
ToTool: TypeAlias = Status | Draining | WeightsSet | VersionRefusal
Message: TypeAlias = ToEngine | ToRank | StatusRequest | Answer | ToTool


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What all versions have in common; the rest of the array is skipped, not built."""

    kind: msgspec.Raw
    version: int


_head_decoder = msgspec.msgpack.Decoder(_Head)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | RankDescription) -> bytes:
    """The wire form."""
    return _encoder.encode(message)


def decode_rank(payload: bytes) -> RankDescription:
    """A rank's part, as it travels from a worker to its scheduler."""
    return msgspec.msgpack.decode(payload, type=RankDescription)


def _decoder(kinds: Any) -> Callable[[bytes], Any]:
    """A function that parses and checks a message of these kinds.

    It raises RemoteProtocolError, which names the first field that is wrong, or ForeignVersion,
    which names both versions.
    """
    decoder = msgspec.msgpack.Decoder(kinds)

    def decode(payload: bytes) -> Any:
        try:
            return decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _explained(payload, error) from error

    return decode


# One for each kind of socket: what nobody may send there is never built. Errors: see `_decoder`.
decode_to_engine: Callable[[bytes], ToEngine] = _decoder(ToEngine)
"""Of a message that came to the scheduler of an engine."""
decode_to_rank: Callable[[bytes], ToRank | StatusRequest] = _decoder(ToRank | StatusRequest)
"""Of a message that came to a rank."""
decode_answer: Callable[[bytes], Answer] = _decoder(Answer)
"""Of what an engine or a rank of it answers."""
decode_to_tool: Callable[[bytes], ToTool] = _decoder(ToTool)
"""Of what a rank, or the scheduler of an engine, answers to a tool that does not ask who it is."""


def _explained(payload: bytes, error: Exception) -> RemoteProtocolError:
    """A foreign version explains everything else, so it is said first. That of no version is 0.

    msgspec quotes what a peer has sent, such as an unknown tag.
    """
    reason = printable(str(error), MAX_REASON)
    try:
        version = _head_decoder.decode(payload).version
    except msgspec.ValidationError:
        return RemoteProtocolError(reason)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return RemoteProtocolError(f"not msgpack: {len(payload)} bytes")
    if version in (0, WIRE_VERSION):
        return RemoteProtocolError(reason)
    return ForeignVersion(f"wire version {version}; this side speaks {WIRE_VERSION}")
