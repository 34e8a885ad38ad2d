"""The wire between decode and prefill: tagged msgpack arrays, version first.

To the scheduler of an engine:         Describe       -> Description | Refusal
                                       Find           -> Found  (with `conversations`)
                          from a tool: Drain          -> Draining
                                       SetWeights     -> WeightsSet
                                       StatusRequest  -> Status
                 from its own ranks:   Ready, Landed  (hints; a lost one costs a step or two)
To a rank of a prefill engine:         Ask            -> Grant | Deny | Pending, then one of them
                                       DigestRequest  -> DigestReply | Deny
                                       PackRequest    -> PackReply | Deny
                                       Heartbeat          -> HeartbeatReply
                                       Release        (a hint; a lost one costs a lease)
                                       Admit          -> Admitted
                                       Leave          (a hint; a lost one costs 15 minutes)
From a rank, unasked, to its reader:   Recall         -> Release | Heartbeat
To a rank of any engine, from a tool:  StatusRequest  -> Status

A message that needs another key than its sender's is answered with KeyRefusal. Each side answers
a message of another wire version with VersionRefusal, which all versions can read. Decoders skip
fields that a later version appends to a message. Every length is bounded, except for the texts of a
`Status`. ZMQ's routing ids carry no meaning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, TypedDict

import msgspec
from msgspec import Meta

from nixl_kv.config import MAX_LABEL
from nixl_kv.errors import ForeignVersion, RemoteProtocolError, printable
from nixl_kv.geometry.layout import CacheLayout, Stripe, Table, check_range, without_addresses
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import (
    ANY_INCARNATION,
    Claim,
    Endpoint,
    EngineId,
    FenceToken,
    HintKey,
    Incarnation,
    Nonce,
    Rank,
)
from nixl_kv.protocol.ticket import (
    HEX32,
    MAX_LENGTH,
    MAX_REASON,
    NAME,
    WIRE_VERSION,
    Context,
)

MAX_CLAIMS = 65536
MAX_ALLOCATIONS = 1 << 14
MAX_RANKS = 1024
MAX_ROWS = 1 << 17
MAX_COLUMNS = 1 << 12
MAX_SLICES = 1 << 12
MAX_CHUNKS = 1 << 20
MAX_RING_SLOTS = 1 << 10
PROOF_BYTES = 16
SHARE_TOKEN_BYTES = 32
MAX_LISTED = 1000  # entries of each kind in a `Status`
MAX_ADDRESSES = 64  # of one process
MAX_HASHES = 1 << 13  # blocks of one question; blocks of 16 tokens make 131,072 tokens
HASH_BYTES = 32  # SHA-256
MAX_RUN = 1 << 16  # bytes; MAX_HASHES block ids take half of it

_Version = Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
_Incarnation = Annotated[Incarnation, HEX32]
_Nonce = Annotated[Nonce, HEX32]
_Claim = Annotated[Claim, HEX32]
_Engine = Annotated[EngineId, NAME]
_Rank = Annotated[Rank, Meta(ge=0, lt=MAX_RANKS)]
_Ranks = Annotated[tuple[_Rank, ...], Meta(min_length=1, max_length=MAX_RANKS)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Head = Annotated[int, Meta(ge=0, lt=1 << 17)]
_EndHead = Annotated[int, Meta(ge=1, le=1 << 17)]
_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Text = Annotated[str, Meta(max_length=512)]
_Label = Annotated[str, Meta(max_length=MAX_LABEL)]
_Facts = Annotated[
    dict[Annotated[str, NAME], Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)
]
_LISTED = Meta(max_length=MAX_LISTED)
_Endpoint = Annotated[
    Endpoint, Meta(pattern=r"^tcp://(\[[0-9A-Fa-f:.]+\]|[0-9.]+):[0-9]{1,5}\Z", max_length=128)
]


_ShareToken = Annotated[bytes, Meta(max_length=SHARE_TOKEN_BYTES)]
_Addresses = Annotated[
    tuple[Annotated[str, Meta(pattern=r"^[0-9A-Fa-f:.]+\Z", max_length=45)], ...],
    Meta(max_length=MAX_ADDRESSES),
]
"""IP literals."""


class _Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    pass


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    version: _Version = WIRE_VERSION
    incarnation: _Incarnation  # of the addressee; in an answer, of the sender


class VersionRefusal(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The answer to a message of another wire version. Its form never changes."""

    version: Annotated[int, Meta(ge=0, le=0)] = 0
    speaks: Annotated[int, Meta(ge=1, le=999_999_999)] = WIRE_VERSION

    def __str__(self) -> str:
        return f"it speaks wire version {self.speaks}; this side speaks {WIRE_VERSION}"


class Reader(_Record, frozen=True, kw_only=True):
    engine: _Engine
    incarnation: _Incarnation
    rank: _Rank


class Describe(_Message, frozen=True, kw_only=True):
    """Ask for an engine's description. Tools send ANY_INCARNATION and any name."""

    engine: _Engine


class Drain(_Message, frozen=True, kw_only=True):
    """A tool, with ANY_INCARNATION: this engine will stop, so offer no request that arrives now."""

    undo: bool = False  # end draining


class Draining(_Message, frozen=True, kw_only=True):
    num_awaited: _Count  # earlier requests that are not offered yet
    refusal: _Text = ""  # why the engine goes on offering


class SetWeights(_Message, frozen=True, kw_only=True):
    """A tool, with ANY_INCARNATION: this engine's weights have another label."""

    weights: _Label

    def __post_init__(self) -> None:
        if not self.weights.isprintable():
            raise ValueError("weights has characters that cannot be printed")


class WeightsSet(_Message, frozen=True, kw_only=True):
    former: _Label
    refusal: _Text = ""  # why the label stays


class Slots(_Record, frozen=True, kw_only=True):
    """A rank's fence slots: `count` slots of 16 bytes from `address` on, in DRAM."""

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    count: Annotated[int, Meta(ge=1, le=1 << 20)]


class Allocation(_Record, frozen=True, kw_only=True):
    """GPU memory, by its address in the owner's address space.

    Another process maps it by `handle`, the CUDA IPC handle of an allocation in which it begins at
    `offset`. If it is empty, `descriptor` is the owner's file descriptor of the allocation. With
    `Export.share` it has neither.
    """

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    length: Annotated[int, Meta(ge=1, lt=2**62)]
    offset: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    handle: Annotated[bytes, Meta(max_length=64)] = b""
    descriptor: Annotated[int, Meta(ge=-1, lt=2**31)] = -1


class Proof(_Record, frozen=True, kw_only=True):
    """Random bytes that the owner of exported memory wrote into it at `address`.

    Other bytes there mean that a process mapped the wrong memory, or that its GPU cannot read it.
    """

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    value: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Share(_Record, frozen=True, kw_only=True):
    """A UNIX socket in the directory `share_dir`, where the owner hands out descriptors of memory.

    A reader proves `token` there, which is good for one connection. It comes with `Admitted`, and
    is empty in a description.
    """

    socket: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    token: _ShareToken = b""


class Export(_Record, frozen=True, kw_only=True):
    """How processes on the same host map a rank's cache, in ascending order of addresses."""

    host: Annotated[str, Meta(max_length=256)]  # with the PID namespace
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    started: Annotated[int, Meta(ge=0, lt=2**62)]  # clock ticks
    allocations: Annotated[tuple[Allocation, ...], Meta(min_length=1, max_length=MAX_ALLOCATIONS)]
    proof: Proof
    share: Share | None = None  # None: only processes of the same PID namespace can map it


class StagingRing(_Record, frozen=True, kw_only=True):
    """Memory of the cache's kind, in equal slots, into which a rank packs runs."""

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    length: Annotated[int, Meta(ge=1, lt=2**62)]
    num_slots: Annotated[int, Meta(ge=1, le=MAX_RING_SLOTS)]


class PathFields(TypedDict, total=False):
    """The fields of `RankDescription` that optional read paths fill in."""

    export: Export
    ring: StagingRing


class RankDescription(_Record, frozen=True, kw_only=True):
    incarnation: _Incarnation
    endpoint: _Endpoint
    agent: Annotated[bytes, Meta(max_length=1 << 20)]  # NIXL's metadata, or empty
    slots: Slots
    layout: CacheLayout
    export: Export | None = None  # None: other processes cannot map its memory
    ring: StagingRing | None = None  # None: it does not pack
    listens: _Addresses = ()  # where other machines reach UCX's ports, once they are admitted


class ContentFacts(_Record, frozen=True, kw_only=True):
    """How an engine hashes the blocks of its prefix cache; see `Find`."""

    algorithm: Annotated[str, NAME]  # vLLM's name of it, such as sha256
    seed: _Text  # of the hash before the first block
    block_size: Annotated[int, Meta(ge=1, lt=1 << 31)]  # in tokens
    vllm: Annotated[str, NAME]  # its version: the hashed bytes may change with it
    # The engine may have stand-ins for images, audio and video (`media`): it has no KV of them.
    has_stand_ins: bool = False


class Description(_Message, frozen=True, kw_only=True):
    engine: _Engine
    model: _Facts
    shape: ParallelShape
    ranks: Annotated[tuple[RankDescription, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    # About other KV in the cache, such as a draft model's. A reader must find its own among them.
    extras: _Facts = {}
    content: ContentFacts | None = None  # None: the engine answers no `Find`

    def __post_init__(self) -> None:
        if self.incarnation == ANY_INCARNATION:
            raise ValueError("incarnation is all zeros; no engine's is")


class Refusal(_Message, frozen=True, kw_only=True):
    """Another engine or incarnation answers at this address. It echoes Describe's names."""

    engine: _Engine
    reason: _Text


class Find(_Message, frozen=True, kw_only=True):
    """Ask an engine for the blocks of a prompt that its prefix cache has.

    A hash commits to all tokens up to the end of its block, so the answer is about a beginning of
    the prompt. `incarnation` may be ANY_INCARNATION.
    """

    engine: _Engine
    nonce: _Nonce  # tells answers apart; the reader's choice
    weights: _Label  # of the reader; an engine with another label finds nothing
    # Of the blocks from `first_block` on, by the engine's own `ContentFacts`.
    first_block: Annotated[int, Meta(ge=0, lt=(1 << 31) - MAX_HASHES)]
    hashes: Annotated[
        tuple[Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)], ...],
        Meta(min_length=1, max_length=MAX_HASHES),
    ]


class Found(_Message, frozen=True, kw_only=True):
    """The first `num_blocks` of these blocks are cached, at the time of the answer.

    Nothing holds them. The reader asks each rank for the offer `offer`, with `run` in its `Ask`.
    A rank grants it unless a block was reused since.
    """

    nonce: _Nonce  # that of the `Find`
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_HASHES)]
    offer: _Nonce  # the engine's choice, so that no other offer has it
    run: Annotated[bytes, Meta(max_length=MAX_RUN)]  # sealed for the ranks; empty without blocks
    epoch: _Count  # see `Ticket`
    weights: _Label


class ClaimFields(TypedDict):
    """The fields that all messages about a claim have. Constructors take them as keywords."""

    incarnation: Incarnation
    nonce: Nonce
    claim: Claim
    reader: Reader


class _OfClaim(_Message, frozen=True, kw_only=True):
    nonce: _Nonce
    claim: _Claim
    reader: Reader


class Ask(_Message, frozen=True, kw_only=True):
    """A reader asks one rank for the blocks of an offer."""

    nonce: _Nonce
    claim: _Claim
    context: Context
    reader: Reader
    number: _Count  # counts this reader's asks, pack requests and heartbeats together
    readers: _Ranks  # all ranks of its engine that will read this rank under the claim
    is_early: bool = False  # by an early ticket: the rank may not know the offer yet
    found: Annotated[bytes, Meta(max_length=MAX_RUN)] = b""  # `Found.run`: the offer is of these
    # Where the reader's own engine answers `Find`; None: it does not.
    directory: _Endpoint | None = None


class Grant(_OfClaim, frozen=True, kw_only=True):
    """The rank holds the blocks for the claim while `fence_token` is in its fence `slot`."""

    lease_s: Annotated[float, Meta(gt=0, le=3600)]  # after the last Ask or Heartbeat
    # One block table per cache group, for the whole prompt.
    tables: Annotated[tuple[Table, ...], Meta(min_length=1, max_length=64)]
    slot: Annotated[int, Meta(ge=0, lt=1 << 20)]
    fence_token: Annotated[FenceToken, Meta(min_length=16, max_length=16)]
    # The first tokens of the prompt that are in memory; None: all. More come with other grants.
    num_tokens: _Token | None = None
    # Tokens of the prompt that prefill took from its own caches, as it tells its own clients.
    num_cached: _Token = 0


# Of a request whose offer cannot be granted yet: it has not arrived, waits, or is in a step; or its
# engine hangs (`early/stalls.py`).
PrefillState: TypeAlias = Literal["unknown", "queued", "computing", "stalled"]


class Pending(_OfClaim, frozen=True, kw_only=True):
    """The rank has remembered an early ask, and will grant or deny it when it can."""

    state: PrefillState


# What decode may know of a denial; '': only prefill's log has the reason.
# not_arrived: this rank waited for the request of an early ask, but never heard of it.
# unclaimed: no ask came within offer_ttl_s of the ticket.
DenyCause: TypeAlias = Literal["", "not_arrived", "unclaimed"]


class Deny(_OfClaim, frozen=True, kw_only=True):
    """No blocks, digest or chunk for this claim."""

    cause: DenyCause = ""


@dataclass(frozen=True)
class KVSlice:
    """Some heads of one layer, from token `begin` on, of the tokens that all `stripes` keep."""

    layer: _Text
    first_head: _Head  # counted over the model
    end_head: _EndHead
    begin: _Token
    stripes: Annotated[tuple[Stripe, ...], Meta(max_length=2)] = ()

    def __post_init__(self) -> None:
        check_range("end_head", self.end_head, low=self.first_head + 1, high=(1 << 17) + 1)


class DigestRequest(_OfClaim, frozen=True, kw_only=True):
    """Ask for the digest of these slices up to token `end`; the reader holds the claim."""

    end: Annotated[int, Meta(ge=1, lt=1 << 31)]
    slices: Annotated[tuple[KVSlice, ...], Meta(min_length=1, max_length=MAX_SLICES)]


class DigestReply(_OfClaim, frozen=True, kw_only=True):
    """Sums of rows and of columns, as little-endian uint64; the claim is their secret."""

    rows: Annotated[bytes, Meta(min_length=8, max_length=8 * MAX_ROWS)]
    columns: Annotated[bytes, Meta(min_length=8, max_length=8 * MAX_COLUMNS)]


_Chunk = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]


class LayerHeads(_Record, frozen=True, kw_only=True):
    layer: _Text
    first: _Head  # counted over the model
    end: _EndHead


class PackRequest(_OfClaim, frozen=True, kw_only=True):
    """Pack tokens [begin, end) of these layers, all of one cache group, as this chunk."""

    number: _Count  # that of `Ask`; prefill ignores an overtaken request
    chunk: _Chunk
    begin: _Token
    end: Annotated[int, Meta(ge=1, lt=1 << 31)]
    layers: Annotated[tuple[LayerHeads, ...], Meta(min_length=1, max_length=MAX_SLICES)]
    # All chunks that the reader waits for or still reads; ring slots with others are free.
    holds: Annotated[tuple[_Chunk, ...], Meta(max_length=MAX_RING_SLOTS)]


class PackReply(_OfClaim, frozen=True, kw_only=True):
    """The chunk stays in this ring slot (`reading.staged`) while the grant is valid."""

    chunk: _Chunk
    # None: prefill cannot pack it or has no free slot for it. The reader reads it directly.
    slot: Annotated[int, Meta(ge=0, lt=MAX_RING_SLOTS)] | None


class Admit(_Message, frozen=True, kw_only=True):
    """The reader will connect to UCX's ports of this rank from `sources`: let these addresses in.

    Later connections from the rank to the reader lead to one of `listens`.
    """

    reader: Reader
    sources: _Addresses
    listens: _Addresses
    maps: bool = False  # it wants a token to map the rank's memory; see `Share`


class Admitted(_Message, frozen=True, kw_only=True):
    """The answer: the rank has let in those that `peers` allows, and may connect from `sources`."""

    reader: Reader
    sources: _Addresses
    refused: _Addresses = ()
    token: _ShareToken = b""  # if the reader wants one and the rank shares its memory


class Paused(_Message, frozen=True, kw_only=True):
    """The scheduler of this rank's engine: vLLM was told to begin no request, or to go on."""

    number: Annotated[int, Meta(ge=1, le=2**62)]  # the latest one counts
    is_paused: bool


# A rank no longer believes that its engine is paused. `DirectoryServer` repeats that more often.
PAUSED_S: Final = 20.0


class Leave(_Message, frozen=True, kw_only=True):
    """The reader has no connection to UCX's ports any longer, and begins none."""

    reader: Reader


class Recall(_OfClaim, frozen=True, kw_only=True):
    """The rank needs the blocks: a reader releases them, or sends a heartbeat if it reads them."""


class Heartbeat(_Message, frozen=True, kw_only=True):
    """The heartbeat: all claims that the reader holds at this rank. A missing one is released."""

    reader: Reader
    number: _Count
    claims: Annotated[tuple[_Claim, ...], Meta(max_length=MAX_CLAIMS)]
    num_reading: _Count  # the first of them are being read, or will be without another vLLM step


class HeartbeatReply(_Message, frozen=True, kw_only=True):
    reader: Reader
    number: _Count  # that of the Heartbeat
    lost: Annotated[tuple[_Claim, ...], Meta(max_length=MAX_CLAIMS)]  # claims not held here


class Release(_OfClaim, frozen=True, kw_only=True):
    """The reader has ended, and none of its reads is in flight."""

    # True if the reader needs nothing more from this rank. It may have read another rank's copy.
    complete: bool  # False: it gives up


class _Hint(_Message, frozen=True, kw_only=True):
    """From a decode rank to its own engine, about a load.

    The scheduler acts on it, so it has nothing that prefill knows but the name of the rank.
    """

    hint_key: Annotated[HintKey, HEX32]
    reader: Reader


class Ready(_Hint, frozen=True, kw_only=True):
    """Prefill computes the request of an early load."""


class Landed(_Hint, frozen=True, kw_only=True):
    """This rank's part of the load is here, and proven."""

    num_cached: _Token | None = None  # see `Grant`; None: this rank has read nothing


class StatusRequest(_Message, frozen=True, kw_only=True):
    request: _Text = ""  # a rank also tells the history of this request
    # The `probe_ticket` of another engine's status: a rank reads some bytes from there, and answers
    # with the result instead (`engine/probe.py`).
    probe: Annotated[str, Meta(max_length=MAX_LENGTH)] = ""


# A decode rank gives up the read that doctor asked for. This outlasts the description, the
# admission and UCX's timeouts of two reads over TCP together.
PROBE_S: Final = 25.0


class Status(_Message, frozen=True, kw_only=True):
    """Open records: engine/status.py has the keys of a rank's, engine/directory.py an engine's."""

    facts: dict[str, str | int | float | None]
    totals: dict[str, int]
    lists: dict[str, Annotated[list[dict[str, Any]], _LISTED]]


class KeyRefusal(_Message, frozen=True, kw_only=True):
    """The sender has the tools' key, which does not allow the message."""

    reason: _Text


Hint: TypeAlias = Ready | Landed
ToEngine: TypeAlias = Describe | Find | Drain | SetWeights | StatusRequest | Hint
OfClaim: TypeAlias = Ask | DigestRequest | PackRequest
ToPrefill: TypeAlias = OfClaim | Heartbeat | Release
ToRank: TypeAlias = ToPrefill | Admit | Leave | Paused
ClaimAnswer: TypeAlias = Grant | Deny | Pending | DigestReply | PackReply | Recall
Answer: TypeAlias = (
    Description | Refusal | ClaimAnswer | HeartbeatReply | Admitted | KeyRefusal | VersionRefusal
)
ToTool: TypeAlias = Status | Draining | WeightsSet | KeyRefusal | VersionRefusal
ToFinder: TypeAlias = Description | Refusal | Found | KeyRefusal | VersionRefusal
Message: TypeAlias = ToEngine | ToRank | Answer | ToTool | ToFinder


class _AnyMessage(msgspec.Struct, frozen=True, array_like=True):
    """The fields that all versions have. msgspec skips the rest of the array."""

    kind: msgspec.Raw
    version: int


_head_decoder = msgspec.msgpack.Decoder(_AnyMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | RankDescription) -> bytes:
    return _encoder.encode(message)


def without_memory(description: Description) -> Description:
    """For tools: no address of memory, and nothing that lets another process reach it."""
    ranks = tuple(
        RankDescription(
            incarnation=rank.incarnation,
            endpoint=rank.endpoint,
            agent=b"",
            slots=Slots(address=1, count=rank.slots.count),
            layout=without_addresses(rank.layout),
        )
        for rank in description.ranks
    )
    return Description(
        incarnation=description.incarnation,
        engine=description.engine,
        model=description.model,
        shape=description.shape,
        ranks=ranks,
        extras=description.extras,
        content=description.content,
    )


def with_tokens(description: Description, tokens: Mapping[Rank, bytes]) -> Description:
    """The description with the token of each rank that gave this reader one."""
    ranks = list(description.ranks)
    for rank, token in tokens.items():
        export = ranks[rank].export
        if export is not None and export.share is not None:
            share = Share(socket=export.share.socket, token=token)
            export = msgspec.structs.replace(export, share=share)
            ranks[rank] = msgspec.structs.replace(ranks[rank], export=export)
    return msgspec.structs.replace(description, ranks=tuple(ranks))


def is_description(payload: bytes) -> bool:
    """Whether a message claims to be a Description; cheap, however long it is."""
    return payload[1:13] == b"\xabDescription"  # behind the one byte that begins a short array


def decode_rank(payload: bytes) -> RankDescription:
    return msgspec.msgpack.decode(payload, type=RankDescription)


def _decoder(kinds: Any) -> Callable[[bytes], Any]:
    decoder = msgspec.msgpack.Decoder(kinds)

    def decode(payload: bytes) -> Any:
        try:
            return decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _explained(payload, error) from error

    return decode


# Each kind of socket has its own decoder, so that no other message is ever built there.
decode_to_engine: Callable[[bytes], ToEngine] = _decoder(ToEngine)
decode_to_rank: Callable[[bytes], ToRank | StatusRequest] = _decoder(ToRank | StatusRequest)
decode_answer: Callable[[bytes], Answer] = _decoder(Answer)
decode_to_tool: Callable[[bytes], ToTool] = _decoder(ToTool)  # except for descriptions
decode_to_finder: Callable[[bytes], ToFinder] = _decoder(ToFinder)


def _explained(payload: bytes, error: Exception) -> RemoteProtocolError:
    reason = printable(str(error), MAX_REASON)  # msgspec quotes the peer, such as an unknown tag
    try:
        version = _head_decoder.decode(payload).version
    except msgspec.ValidationError:
        return RemoteProtocolError(reason)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return RemoteProtocolError(f"not msgpack: {len(payload)} bytes")
    # A foreign version explains all other errors. Version 0 is that of VersionRefusal.
    if version in (0, WIRE_VERSION):
        return RemoteProtocolError(reason)
    return ForeignVersion(f"wire version {version}; this side speaks {WIRE_VERSION}")
