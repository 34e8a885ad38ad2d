"""Valid inputs to start from: conversations with a rank, layouts, and configurations.

A conversation is a list of [number, message]: the number says which endpoint an answer comes from.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import msgspec
import numpy as np

from fuzz.decoders.rank import (
    BLOCKS,
    CLAIM,
    CONTEXT,
    ENDPOINTS,
    FENCE_TOKEN,
    LIFE,
    MODEL,
    NONCE,
    OTHER_READER,
    OWN_LIFE,
    OWN_READER,
    PREFILL,
    PREFILL_MEMORY,
    PREFILL_SLOTS,
    RANK_LIFE,
    SLOT,
    SLOTS,
    TABLE,
    TOKENS,
)
from fuzz.decoders.samples import KINDS, CacheMemory, sample
from nixl_kv.config import Config
from nixl_kv.geometry.layout import CacheLayout, Part, Span, Table
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import Rank
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.verify.digest import Digest, Digester
from nixl_kv.verify.slices import find_slices

Conversation = Sequence[tuple[int, messages.Message]]

LARGE_CACHE: Final = CacheMemory(1 << 40, layers=36, blocks=8192, tokens=16, heads=8, content=512)
"""As of a model of 8 billion parameters."""

ROOM: Final = (Span(1, 2**62),)
SLICES: Final = tuple(KVSlice(f"layer.{number}", 0, 2, 0) for number in range(3))
"""All that is read of a rank that has all heads."""

LAYERS: Final = tuple(
    messages.LayerHeads(layer=each.layer, first=each.first_head, end=each.end_head)
    for each in SLICES
)
"""The same, as it is packed."""


def every_message() -> list[bytes]:
    """One of each kind, and a rank's description."""
    rank = messages.encode(sample(messages.RankDescription))
    return [*(messages.encode(sample(kind)) for kind in KINDS), rank]


def tickets() -> list[bytes]:
    """A ticket, as a client sends it back."""
    return [_to_json(sample(Ticket).params(key)) for key in (None, b"k" * 32)]


def ticket_payloads() -> list[bytes]:
    """What is packed into its string."""
    return [msgspec.msgpack.encode(list(msgspec.structs.astuple(sample(Ticket))))]


def configs() -> list[bytes]:
    """Nothing, everything as it is by default, and what an operator may write."""
    written: list[object] = [
        {},
        {field.name: field.default for field in fields(Config)},
        {"host": "127.0.0.1", "port": 5600, "backends": ["UCX"], "lease_s": 5, "layout": "BHLNC"},
    ]
    return list(map(_to_json, written))


def questions() -> list[bytes]:
    """Conversations of a reader with a prefill rank."""
    common: dict[str, Any] = {
        "incarnation": OWN_LIFE,
        "nonce": NONCE,
        "claim": CLAIM,
        "reader": OTHER_READER,
    }
    ask = messages.Ask(**common, context=CONTEXT, number=1, readers=(Rank(0),))
    digests = [
        messages.DigestRequest(**common, end=end, slices=slices)
        for end, slices in ((TOKENS, SLICES), (TOKENS + 1, SLICES[1:]))
    ]
    packs = [
        messages.PackRequest(
            **common, number=2, chunk=n, begin=0, end=TOKENS, layers=LAYERS[n:], holds=(n,)
        )
        for n in (0, 1)
    ]
    renew = messages.Heartbeat(
        incarnation=OWN_LIFE, reader=OTHER_READER, number=2, claims=(CLAIM,), num_reading=1
    )
    complete, incomplete = (
        messages.Release(**common, complete=complete) for complete in (True, False)
    )
    status = messages.StatusRequest(incarnation=OWN_LIFE, request="offered")
    conversations: list[list[messages.Message]] = [
        [ask, renew, complete],
        [ask, incomplete],
        [ask, digests[0], complete],
        [ask, digests[0], digests[0], digests[1], renew, incomplete],
        [ask, packs[0], packs[1], packs[0], renew, complete],
        [status, ask, status],
    ]
    return [_conversation([(1, message) for message in each]) for each in conversations]


def answers() -> list[bytes]:
    """Conversations of engines of several shapes with a decode rank."""
    at = PREFILL_MEMORY.address
    tables = TABLE, Table.of(BLOCKS[:1]), Table.of(BLOCKS * 2), Table.of(BLOCKS, first=1)
    grants = [_grant(table) for table in tables]
    halves = [CacheMemory(at, heads=1), CacheMemory(at + (1 << 16), heads=1)]
    common: dict[str, Any] = {
        "incarnation": RANK_LIFE,
        "nonce": NONCE,
        "claim": CLAIM,
        "reader": OWN_READER,
    }
    deny = messages.Deny(**common)
    renewed = messages.HeartbeatReply(
        incarnation=RANK_LIFE, reader=OWN_READER, number=2, lost=(CLAIM,)
    )
    refusal = sample(messages.Refusal, incarnation=LIFE, engine=PREFILL)
    right, wrong = (
        messages.DigestReply(**common, **_digest_of_zeros()),
        sample(messages.DigestReply, **common),
    )
    same = (0, _description(CacheMemory(at)))
    larger_blocks = (0, _description(CacheMemory(at, tokens=8)))
    conversations: list[Conversation] = [
        [same, (1, grants[0])],
        [larger_blocks, (1, grants[1])],
        [(0, _description(CacheMemory(at, tokens=2, blocks=40))), (1, grants[2])],
        [same, (1, grants[3])],
        [(0, _description(*halves)), (1, grants[0]), (2, grants[0])],
        [same, (1, grants[0]), (1, right)],
        [same, (1, grants[0]), (1, wrong)],
        [same, (1, grants[0]), (1, deny)],
        [larger_blocks, (1, grants[1]), (1, right)],
        [same, (1, deny)],
        [same, (1, renewed), (1, grants[0])],
        [(0, refusal)],
    ]
    return list(map(_conversation, conversations))


def layouts() -> list[bytes]:
    """Of caches of several shapes, in so much room that other numbers of theirs fit as well."""
    caches = [
        LARGE_CACHE,
        replace(LARGE_CACHE, blocks=1024, tokens=128),
        replace(LARGE_CACHE, blocks=1 << 15, tokens=4),
    ]
    plain = [cache.layout() for cache in caches]
    transposed = [_with_transposed_parts(layout) for layout in plain]
    scattered = _with_scattered_tokens(replace(LARGE_CACHE, blocks=2, tokens=2048).layout())
    return [
        msgspec.msgpack.encode(replace(layout, spans=ROOM))
        for layout in (*plain, *transposed, scattered)
    ]


def _to_json(value: object) -> bytes:
    return json.dumps(value, default=list).encode()


def _conversation(parts: Conversation) -> bytes:
    """Messages are written as trees, so that mutations reach their fields."""
    return msgspec.msgpack.encode(parts)


def _grant(table: Table) -> messages.Grant:
    return messages.Grant(
        incarnation=RANK_LIFE,
        nonce=NONCE,
        claim=CLAIM,
        reader=OWN_READER,
        lease_s=5.0,
        tables=(table, table),
        slot=SLOT,
        fence_token=FENCE_TOKEN,
    )


def _description(*ranks: CacheMemory) -> messages.Description:
    """Ranks that share the heads evenly."""
    described = tuple(
        messages.RankDescription(
            incarnation=RANK_LIFE,
            endpoint=endpoint,
            agent=b"memory-0",
            slots=messages.Slots(address=PREFILL_SLOTS, count=SLOTS),
            layout=cache.layout(first_head=rank),
        )
        for rank, (cache, endpoint) in enumerate(zip(ranks, ENDPOINTS[1:], strict=False))
    )
    return messages.Description(
        incarnation=LIFE,
        engine=PREFILL,
        model=MODEL,
        shape=ParallelShape(len(ranks), 1),
        ranks=described,
    )


def _digest_of_zeros() -> dict[str, Any]:
    """What a prefill rank replies whose memory is all zeros."""
    memory = np.zeros(CacheMemory().shape, np.uint8)
    layout = CacheMemory(memory.ctypes.data).layout()
    local_slices = find_slices(layout, SLICES, (TABLE,) * len(layout.groups), end=TOKENS)
    results: list[Digest] = []

    def steps() -> Iterator[None]:
        results.append((yield from Digester()(CLAIM, local_slices)))

    list(steps())
    return {"rows": results[0].rows.tobytes(), "columns": results[0].columns.tobytes()}


def _with_transposed_parts(layout: CacheLayout) -> CacheLayout:
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


def _with_scattered_tokens(layout: CacheLayout) -> CacheLayout:
    """No token's content follows another's; with it, large blocks are many pieces."""
    groups = (
        replace(
            group,
            regions=tuple(replace(r, head_stride=512, token_stride=8192) for r in group.regions),
        )
        for group in layout.groups
    )
    return replace(layout, groups=tuple(groups), spans=ROOM)
