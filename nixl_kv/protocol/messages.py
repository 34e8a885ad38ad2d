"""The wire between decode and prefill: tagged msgpack arrays, version first.

To the scheduler of a prefill engine:    Describe     -> Description | Refusal
To a worker of a prefill engine:         Ask          -> Grant | Deny
                                         Prove        -> Proof | Deny
                                         Renew        -> Renewed
                                         Done, Abort  (hints; a lost one costs a lease)

Every length is bounded. ZMQ's routing ids mean nothing: a message itself names the incarnation it
is meant for, the offer, the claim and the reader.

WIRE_VERSION history
1  first
2  groups have a window, and may have no layers on a rank; ranks need not pair one to one
3  Prove and Proof
"""

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from nixl_kv.errors import RemoteProtocolError
from nixl_kv.geometry.digest import MAX_COLUMNS
from nixl_kv.geometry.excerpts import Excerpt
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.ranks import Shape
from nixl_kv.protocol.ticket import Hex32, Name

WIRE_VERSION = 3

MAX_CLAIMS = 65536
MAX_RANKS = 1024
MAX_ROWS = 1 << 17
MAX_EXCERPTS = 1 << 12

Version = Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Endpoint = Annotated[
    str, Meta(pattern=r"^(tcp://(\[[0-9A-Fa-f:.]+\]|[0-9.]+):[0-9]{1,5})?\Z", max_length=128)
]
Table = Annotated[bytes, Meta(max_length=4 << 20)]


class Reader(msgspec.Struct, frozen=True, array_like=True):
    """One rank of one life of a decode engine."""

    engine: Name
    incarnation: Hex32
    rank: RankNumber


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Version and the incarnation that is spoken to (or that speaks) come first."""

    version: Version
    incarnation: Hex32


class Describe(_Message, frozen=True, array_like=True, tag=True):
    """Decode asks an engine who it is. Tools ask for the incarnation ANY, of whatever engine."""

    engine: Name


class Slots(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's generation slots stand: `count` slots of 16 bytes from `address`, in DRAM."""

    address: Annotated[int, Meta(ge=1, lt=2**62)]
    count: Annotated[int, Meta(ge=1, le=1 << 20)]


class RankDescription(msgspec.Struct, frozen=True, array_like=True):
    """What a reader must know of one rank. The endpoint of a rank that nobody reads is empty."""

    incarnation: Hex32
    endpoint: Endpoint
    agent: Annotated[bytes, Meta(max_length=1 << 20)]
    slots: Slots
    layout: CacheLayout


class Description(_Message, frozen=True, array_like=True, tag=True):
    """A prefill engine: its model's facts, its shape, its ranks in rank order."""

    engine: Name
    model: Annotated[dict[Name, Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)]
    shape: Shape
    ranks: Annotated[tuple[RankDescription, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class Refusal(_Message, frozen=True, array_like=True, tag=True):
    """The engine at this address is not the one that was asked for, whose names it echoes."""

    engine: Name
    reason: Annotated[str, Meta(max_length=512)]


class Ask(_Message, frozen=True, array_like=True, tag=True):
    """A reader asks one rank for the blocks of one offer.

    `number` counts this reader's asks and renews at this rank; `readers` are all ranks of the
    reader's engine that will read this rank under the claim.
    """

    nonce: Hex32
    claim: Hex32
    context: Hex32
    reader: Reader
    number: Count
    readers: Annotated[tuple[RankNumber, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class Grant(_Message, frozen=True, array_like=True, tag=True):
    """The blocks are held for the claim while `generation` stands in `slot`.

    `lease_s` is how long P holds on without a renew; `tables` has one block table per cache group,
    little-endian int32, from the prompt's first token on.
    """

    nonce: Hex32
    claim: Hex32
    reader: Reader
    num_tokens: Count
    lease_s: Annotated[float, Meta(gt=0, le=3600)]
    tables: Annotated[tuple[Table, ...], Meta(min_length=1, max_length=64)]
    slot: Annotated[int, Meta(ge=0, lt=1 << 20)]
    generation: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Deny(_Message, frozen=True, array_like=True, tag=True):
    """No blocks. `gone`: compute locally. `incarnation`: this rank began a new life since."""

    nonce: Hex32
    claim: Hex32
    reader: Reader
    reason: Literal["gone", "incarnation"]


class Prove(_Message, frozen=True, array_like=True, tag=True):
    """What the reader reads under its claim, up to token `end`: which digest does it have?"""

    nonce: Hex32
    claim: Hex32
    reader: Reader
    end: Annotated[int, Meta(ge=1, lt=1 << 31)]
    excerpts: Annotated[tuple[Excerpt, ...], Meta(min_length=1, max_length=MAX_EXCERPTS)]


class Proof(_Message, frozen=True, array_like=True, tag=True):
    """The digest (`geometry.digest`, its key is the claim) of just that, as little-endian uint64.

    The blocks were held while it was made.
    """

    nonce: Hex32
    claim: Hex32
    reader: Reader
    rows: Annotated[bytes, Meta(min_length=8, max_length=8 * MAX_ROWS)]
    columns: Annotated[bytes, Meta(min_length=8, max_length=8 * MAX_COLUMNS)]


class Renew(_Message, frozen=True, array_like=True, tag=True):
    """All claims that the reader holds at this rank. One that is missing is released."""

    reader: Reader
    number: Count
    claims: Annotated[tuple[Hex32, ...], Meta(max_length=MAX_CLAIMS)]


class Renewed(_Message, frozen=True, array_like=True, tag=True):
    """The answer to a renew: which of its claims this rank does not hold."""

    reader: Reader
    number: Count
    lost: Annotated[tuple[Hex32, ...], Meta(max_length=MAX_CLAIMS)]


class Done(_Message, frozen=True, array_like=True, tag=True):
    """The reader has read and checked all it wanted."""

    nonce: Hex32
    claim: Hex32
    reader: Reader


class Abort(_Message, frozen=True, array_like=True, tag=True):
    """The reader does not want the blocks any more, and no read of its is under way."""

    nonce: Hex32
    claim: Hex32
    reader: Reader


ToEngine: TypeAlias = Describe
FromEngine: TypeAlias = Description | Refusal
ToRank: TypeAlias = Ask | Prove | Renew | Done | Abort
FromRank: TypeAlias = Grant | Deny | Proof | Renewed
Answer: TypeAlias = FromEngine | FromRank
Message: TypeAlias = ToEngine | ToRank | Answer


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What all versions have in common; the rest of the array is skipped, not built."""

    kind: msgspec.Raw
    version: int


_head_decoder = msgspec.msgpack.Decoder(_Head)
_encoder = msgspec.msgpack.Encoder()
# One for each kind of socket: what nobody may send there is never built.
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

_Decoded = TypeVar("_Decoded")


def encode(message: Message) -> bytes:
    """The wire form."""
    return _encoder.encode(message)


def decode_to_engine(payload: bytes) -> ToEngine:
    """Parse and check a message that came to the scheduler of an engine.

    Raises:
        RemoteProtocolError: names the first field that is wrong, or the foreign version.
    """
    return _decode(_to_engine, payload)


def decode_to_rank(payload: bytes) -> ToRank:
    """Parse and check a message that came to a worker.

    Raises:
        RemoteProtocolError: names the first field that is wrong, or the foreign version.
    """
    return _decode(_to_rank, payload)


def decode_answer(payload: bytes) -> Answer:
    """Parse and check what an engine or a worker of it answers.

    Raises:
        RemoteProtocolError: names the first field that is wrong, or the foreign version.
    """
    return _decode(_answer, payload)


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], payload: bytes) -> _Decoded:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(_explain(payload, error)) from error


def encode_rank(description: RankDescription) -> bytes:
    """A rank's part, as it travels from a worker to its scheduler."""
    return _encoder.encode(description)


def decode_rank(payload: bytes) -> RankDescription:
    """The same, back."""
    return msgspec.msgpack.decode(payload, type=RankDescription)


def _explain(payload: bytes, error: Exception) -> str:
    """A foreign version explains everything else, so it is said first."""
    try:
        version = _head_decoder.decode(payload).version
    except msgspec.ValidationError:
        return str(error)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return f"not msgpack: {len(payload)} bytes"
    if version != WIRE_VERSION:
        return f"wire version {version}; this side speaks {WIRE_VERSION}"
    return str(error)
