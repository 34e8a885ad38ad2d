"""Which slices of a prompt's KV a reader reads, and where they are on one rank.

A `KVSlice` names layer, heads and tokens of the model: it means the same on any rank of any engine.
`find_slices` finds slices in one rank's cache, as `LocalSlice`s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.geometry.blocks import ABSENT, BlockIds, BlockTable
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region
from nixl_kv.geometry.plan import Share
from nixl_kv.geometry.runs import Heads

PARTS: Final = {1: ("KV",), 2: ("K", "V")}
"""The names of a region's parts, by the number of parts."""


@dataclass(frozen=True)
class KVSlice:
    """Some heads of one layer, from token `begin` on. Heads are counted over the model."""

    layer: str
    first_head: int
    end_head: int
    begin: int

    def __post_init__(self) -> None:
        """Check the numbers: they also come from peers."""
        if not 0 <= self.first_head < self.end_head <= 1 << 17:
            raise ValueError(
                f"heads of {self.layer!r} are {self.first_head} to {self.end_head}; "
                "allowed: a half-open range"
            )
        if not 0 <= self.begin < 1 << 31:
            raise ValueError(f"begin of {self.layer!r} is {self.begin}; allowed: a token")


@dataclass(frozen=True)
class LocalSlice:
    """One part of some heads of one layer, tokens [begin, end), in one rank's cache.

    In an opaque region, `end` is the end of a block: any byte of that block may belong to the last
    token. `ids` are numbers of the region's blocks, from the block of token `begin` to the block of
    token `end - 1`. Heads are counted over the model.
    """

    region: Region
    group: Group
    part_number: int  # within the region
    heads: Heads
    begin: int
    end: int
    ids: BlockIds

    @property
    def part(self) -> Part:
        """The part of the region."""
        return self.region.parts[self.part_number]

    @property
    def num_heads(self) -> int:
        """The number of heads; each has a row of the digest."""
        return self.heads[1] - self.heads[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its heads and tokens."""
        return self.num_heads * (self.end - self.begin) * self.part.content

    @property
    def base(self) -> int:
        """Address of the first of these heads in block 0."""
        return self.region.base + self.part.offset + self.region.head_offset(self.heads[0])

    @property
    def first_token(self) -> int:
        """The first token of the first block."""
        return self.begin // self.group.block_size * self.group.block_size

    @property
    def token_stride(self) -> int:
        """Bytes from one token to the next."""
        return self.region.token_stride_of(self.part)

    @property
    def names(self) -> list[str]:
        """For each of its heads a name, for people to read."""
        parts = PARTS.get(len(self.region.parts), ("part",) * (self.part_number + 1))
        return [
            f"{parts[self.part_number]} of head {head} of layer {self.region.layer}"
            for head in range(*self.heads)
        ]


def slices_read(
    layout: CacheLayout, share: Share, tables: Sequence[BlockTable]
) -> tuple[KVSlice, ...]:
    """What a request reads from one remote rank: each layer, after its last absent entry.

    Args:
        layout: of this rank.
        share: the heads that it reads, by layer.
        tables: for each group, in the layout's order, the entries that are read. Entries are absent
            where a sliding window has passed.
    """
    slices: list[KVSlice] = []
    for group, table in zip(layout.groups, tables, strict=True):
        absent = np.flatnonzero(table.ids == ABSENT)
        skipped = int(absent[-1]) + 1 if len(absent) else 0
        if skipped == len(table.ids):
            continue
        begin = (table.first + skipped) * group.entry_size
        slices += [
            KVSlice(region.layer, *share[region.layer], begin)
            for region in group.regions
            if region.layer in share
        ]
    return tuple(slices)


def find_slices(
    layout: CacheLayout, wanted: Sequence[KVSlice], tables: Sequence[BlockTable], *, end: int
) -> list[LocalSlice]:
    """Find slices, up to token `end`, in a rank's cache: one local slice per part.

    In an opaque region they go on to the end of the block. Layers of one group that begin with the
    same token have the same array of block numbers.

    Raises:
        ValueError: if this rank, or the block table, does not have a slice.
    """
    regions = {r.layer: (n, r) for n, group in enumerate(layout.groups) for r in group.regions}
    if len({kv.layer for kv in wanted}) < len(wanted):
        raise ValueError("a layer occurs twice among the slices; allowed: once")
    blocks: dict[tuple[int, int], BlockIds] = {}
    local_slices: list[LocalSlice] = []
    for kv in wanted:
        number, region = _find_region(regions, kv)
        table, begin = tables[number], kv.begin
        if begin >= end:
            raise ValueError(f"begin of {region.layer!r} is {begin}; allowed: below {end}")
        if (number, begin) not in blocks:
            blocks[number, begin] = _block_numbers(table, range(begin, end))
        size = table.group.block_size if region.opaque else 1
        stop = -(-end // size) * size
        heads, ids = (kv.first_head, kv.end_head), blocks[number, begin]
        local_slices += [
            LocalSlice(region, table.group, part, heads, begin, stop, ids)
            for part in range(len(region.parts))
        ]
    return local_slices


def _find_region(regions: dict[str, tuple[int, Region]], kv: KVSlice) -> tuple[int, Region]:
    """The number of the layer's group, and its region."""
    if kv.layer not in regions:
        raise ValueError(f"layer {kv.layer!r} is not on this rank")
    number, region = regions[kv.layer]
    first, end = region.heads
    if not first <= kv.first_head < kv.end_head <= end:
        raise ValueError(
            f"heads of {kv.layer!r} are {kv.first_head} to {kv.end_head}; "
            f"allowed: within {first} to {end}"
        )
    return number, region


def _block_numbers(table: BlockTable, tokens: range) -> BlockIds:
    size = table.group.block_size
    steps = range(tokens.start // size * size, tokens.stop, size)
    ids = table.piece_numbers(steps, 1)
    if ids.size and ids.min() < 0:
        raise ValueError(f"the block of token {steps[int(np.argmin(ids))]} is absent")
    return ids
