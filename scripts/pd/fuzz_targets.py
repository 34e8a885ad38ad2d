"""What is fuzzed: for each decoder valid inputs to start from, and what may come of others."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final
from unittest import mock

import msgspec
import numpy as np

from nixl_kv.config import Config
from nixl_kv.connector.publisher import Publisher
from nixl_kv.errors import ConfigError, IncompatiblePeer, RemoteProtocolError
from nixl_kv.geometry import compat, ranks
from nixl_kv.geometry.layout import CacheLayout, Part, Span
from nixl_kv.geometry.plan import Reads, plan
from nixl_kv.geometry.ranks import Shape
from nixl_kv.ids import Rank
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import Ask, Description, Grant, Message, RankDescription, Slots
from nixl_kv.protocol.ticket import Ticket
from pd.fuzz_mutate import Tree
from pd.fuzz_proofs import EXCERPTS, sums_of_zeros
from pd.fuzz_samples import KINDS, CacheMemory, sample
from pd.fuzz_world import (
    CLAIM,
    CONTEXT,
    ENDPOINTS,
    GENERATION,
    LIFE,
    MODEL,
    NONCE,
    PREFILL,
    PREFILL_MEMORY,
    PREFILL_SLOTS,
    RANK_LIFE,
    READER,
    SLOT,
    SLOTS,
    TABLE,
    TOKENS,
    MuteControl,
    Worker,
    from_endpoint,
    from_peer,
)

MOST_MESSAGES = 100
LARGE_CACHE: Final = CacheMemory(1 << 40, layers=36, blocks=8192, tokens=16, heads=8, content=512)
"""As of a model of 8 billion parameters."""
ROOM: Final = (Span(1, 2**62),)

Run = Callable[[bytes], object]


class NoInputError(Exception):
    """The mutated bytes are not even what the frontend before the decoder would let through."""


@dataclass(frozen=True)
class Target:
    """A decoder, or who is behind one.

    `form` is how inputs are written; `run` takes one and returns, or raises one of `allowed`.
    """

    name: str
    run: Run
    seeds: Sequence[bytes]
    form: str = "msgpack"
    allowed: tuple[type[Exception], ...] = (RemoteProtocolError,)

    def parse(self, data: bytes) -> Tree:
        """An input as a tree."""
        return json.loads(data) if self.form == "json" else msgspec.msgpack.decode(data)

    def write(self, tree: Tree) -> bytes:
        """A tree as an input.

        Raises:
            ValueError: if it cannot be written in this form.
        """
        try:
            if self.form == "json":
                return json.dumps(tree, default=repr).encode()
            return msgspec.msgpack.encode(tree)
        except (OverflowError, TypeError, RecursionError, UnicodeEncodeError) as error:
            raise ValueError(str(error)) from error


def targets() -> list[Target]:
    """All of them; new decoders of the wire are found by their names."""
    decoders: Mapping[str, Run] = {
        name: function
        for name, function in vars(messages).items()
        if name.startswith("decode") and callable(function)
    }
    kinds = [messages.encode(message) for message in map(sample, KINDS)]
    rank = messages.encode_rank(sample(RankDescription))
    return [
        *(
            Target(f"messages.{name}", run, [*kinds, rank], allowed=_may_raise(name))
            for name, run in decoders.items()
        ),
        Target("Ticket.parse", _ticket, [_json(sample(Ticket).params())], "json"),
        Target("Config.parse", _config, list(map(_json, _configs())), "json", (ConfigError,)),
        Target("publisher", _publisher, kinds),
        Target("prefill worker", _asked, _conversations(_questions())),
        Target("decode worker", _answered, _conversations(_answers())),
        Target(
            "geometry", _geometry, list(map(msgspec.msgpack.encode, _layouts())), allowed=REFUSED
        ),
    ]


REFUSED: Final = (IncompatiblePeer, msgspec.MsgspecError, ValueError, RecursionError)
"""What a peer's layout may end in; all of them are caught where peers are added."""


def _may_raise(decoder: str) -> tuple[type[Exception], ...]:
    """A rank's part comes from a worker of the same engine: msgspec's own errors will do."""
    own = (msgspec.MsgspecError, ValueError, RecursionError) if decoder == "decode_rank" else ()
    return (RemoteProtocolError, *own)


def _configs() -> list[dict[str, object]]:
    """Nothing, everything as it is by default, and what an operator may write."""
    return [
        {},
        {field.name: field.default for field in fields(Config)},
        {"host": "127.0.0.1", "port": 5600, "backends": ["UCX"], "lease_s": 5, "layout": "BHLNC"},
    ]


def _json(value: object) -> bytes:
    return json.dumps(value, default=list).encode()


def _from_json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NoInputError from error


def _ticket(data: bytes) -> Ticket:
    return Ticket.parse(_from_json(data))


def _config(data: bytes) -> Config:
    """No name is resolved: what is wrong would be the resolver's fault, and take its time."""
    given = _from_json(data)
    if not isinstance(given, dict):
        raise NoInputError
    literal = partial(socket.getaddrinfo, flags=socket.AI_NUMERICHOST)
    with mock.patch("socket.getaddrinfo", literal):
        return Config.parse(given, {})


class _Deaf(Publisher):
    """A publisher without a socket and a thread."""

    def __init__(self) -> None:
        """It has described itself."""
        self._control = MuteControl()  # type: ignore[assignment]
        self._description = _description(CacheMemory())


def _publisher(data: bytes) -> None:
    _Deaf()._answer(from_peer(data))  # noqa: SLF001 - what its thread does with a message


def _asked(data: bytes) -> None:
    """Messages to a prefill rank, in order."""
    Worker().receive([from_peer(payload) for _, payload in _payloads(data)])


def _answered(data: bytes) -> None:
    """Answers to a decode rank, in order."""
    Worker().receive([from_endpoint(payload, number) for number, payload in _payloads(data)])


def _geometry(data: bytes) -> Reads | None:
    """Could a cache be read that says this of itself? None if the two do not fit."""
    mine, theirs = LARGE_CACHE.layout(), msgspec.msgpack.decode(data, type=CacheLayout)
    if compat.mismatches([mine], [theirs]):
        return None
    (route, *_) = ranks.routes(Rank(0), [ranks.holding(mine)], [ranks.holding(theirs)])
    made = plan(mine, theirs, route.share)
    table = np.arange(1, 65, dtype=np.int32)
    return made.reads([table] * len(mine.groups), [table] * len(theirs.groups), range(64))


def _payloads(data: bytes) -> list[tuple[object, bytes]]:
    """Of a conversation: where each message comes from, and the message."""
    try:
        parts = [(number, message) for number, message in msgspec.msgpack.decode(data)]
        parts = parts[:MOST_MESSAGES]
        return [(number, msgspec.msgpack.encode(message)) for number, message in parts]
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise NoInputError from error


def _conversations(sequences: Sequence[Sequence[tuple[int, Message]]]) -> list[bytes]:
    """Messages are written as trees, so that mutations reach their fields."""
    return list(map(msgspec.msgpack.encode, sequences))


def _questions() -> list[list[tuple[int, Message]]]:
    common = {"incarnation": RANK_LIFE, "nonce": NONCE, "claim": CLAIM, "reader": READER}
    ask = sample(Ask, **common, context=CONTEXT, number=1, readers=(0,))
    proves = [
        sample(messages.Prove, **common, end=end, excerpts=excerpts)
        for end, excerpts in ((TOKENS, EXCERPTS), (TOKENS + 1, EXCERPTS[1:]))
    ]
    renew = sample(messages.Renew, incarnation=RANK_LIFE, reader=READER, number=2, claims=(CLAIM,))
    ends = [sample(kind, **common) for kind in (messages.Done, messages.Abort)]
    return [
        [(1, message) for message in found]
        for found in (
            [ask, renew, ends[0]],
            [ask, ends[1]],
            [ask, proves[0], ends[0]],
            [ask, proves[0], proves[0], proves[1], renew, ends[1]],
        )
    ]


def _answers() -> list[list[tuple[int, Message]]]:
    """Of engines of several shapes, with a grant; the last ones do not know the request."""
    grants = [_grant(TABLE), _grant(TABLE[:4])]
    at = PREFILL_MEMORY.address
    halves = [CacheMemory(at, heads=1), CacheMemory(at + (1 << 16), heads=1)]
    common = {"incarnation": RANK_LIFE, "nonce": NONCE, "claim": CLAIM, "reader": READER}
    deny = sample(messages.Deny, **common)
    renewed = sample(
        messages.Renewed, incarnation=RANK_LIFE, reader=READER, number=1, lost=(CLAIM,)
    )
    refusal = sample(messages.Refusal, incarnation=LIFE, engine=PREFILL)
    same = (0, _description(CacheMemory(at)))
    proof = sample(messages.Proof, **common, **sums_of_zeros())
    wrong = sample(messages.Proof, **common)
    return [
        [same, (1, grants[0])],
        [(0, _description(CacheMemory(at, tokens=8))), (1, grants[1])],
        [(0, _description(CacheMemory(at, tokens=2, blocks=40))), (1, _grant(TABLE * 2))],
        [(0, _description(*halves)), (1, grants[0]), (2, grants[0])],
        [same, (1, grants[0]), (1, proof)],
        [same, (1, grants[0]), (1, wrong)],
        [same, (1, grants[0]), (1, deny)],
        [(0, _description(CacheMemory(at, tokens=8))), (1, grants[1]), (1, proof)],
        [same, (1, deny)],
        [same, (1, renewed), (1, grants[0])],
        [(0, refusal)],
    ]


def _layouts() -> list[CacheLayout]:
    """Of caches of several shapes, in so much room that other numbers of theirs fit as well."""
    caches = [
        LARGE_CACHE,
        replace(LARGE_CACHE, blocks=1024, tokens=128),
        replace(LARGE_CACHE, blocks=1 << 15, tokens=4),
    ]
    found = [cache.layout() for cache in caches]
    found += [_scattered(layout) for layout in found]
    found.append(_apart(replace(LARGE_CACHE, blocks=2, tokens=2048).layout()))
    return [replace(layout, spans=ROOM) for layout in found]


def _apart(layout: CacheLayout) -> CacheLayout:
    """No token's content follows another's; with it, large blocks are many pieces."""
    groups = (
        replace(
            group,
            regions=tuple(replace(r, head_stride=512, token_stride=8192) for r in group.regions),
        )
        for group in layout.groups
    )
    return replace(layout, groups=tuple(groups), spans=ROOM)


def _scattered(layout: CacheLayout) -> CacheLayout:
    """Each token's content in pieces of two bytes, as where K is transposed within a block."""
    groups = []
    for group in layout.groups:
        size = group.block_size * 2
        parts = tuple(
            Part(p.offset * group.block_size, 2, p.length // 2, size, 2)
            for p in group.regions[0].parts
        )
        regions = tuple(replace(region, parts=parts) for region in group.regions)
        groups.append(replace(group, regions=regions))
    return replace(layout, groups=tuple(groups), spans=ROOM)


def _grant(table: bytes) -> Grant:
    return sample(
        Grant,
        incarnation=RANK_LIFE,
        nonce=NONCE,
        claim=CLAIM,
        reader=READER,
        num_tokens=TOKENS + 1,
        lease_s=5.0,
        tables=(table, table),
        slot=SLOT,
        generation=GENERATION,
    )


def _description(*ranks: CacheMemory) -> Description:
    """Ranks share the heads evenly."""
    described = tuple(
        RankDescription(
            RANK_LIFE, endpoint, b"memory-0", Slots(PREFILL_SLOTS, SLOTS), cache.layout(rank)
        )
        for rank, (cache, endpoint) in enumerate(zip(ranks, ENDPOINTS[1:], strict=False))
    )
    return sample(
        Description,
        incarnation=LIFE,
        engine=PREFILL,
        model=MODEL,
        shape=Shape(len(ranks), 1),
        ranks=described,
    )
