"""Which part of a prompt's KV is looked at, and where it stands on one rank.

An `Excerpt` speaks of the model (layer, heads, tokens) and means the same on any rank of any
engine. `strips` finds it in one rank's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.geometry.blocks import ABSENT, BlockIds, Table
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region
from nixl_kv.geometry.plan import Share
from nixl_kv.geometry.runs import Heads

PARTS: Final = {1: ("KV",), 2: ("K", "V")}
"""What the parts of a region are called, by their number."""


@dataclass(frozen=True)
class Excerpt:
    """Of one layer: some heads (half open, counted over the model), from token `begin` on."""

    layer: str
    first_head: int
    end_head: int
    begin: int

    def __post_init__(self) -> None:
        """Check the numbers: they come from peers too."""
        if not 0 <= self.first_head < self.end_head <= 1 << 17:
            raise ValueError(
                f"heads of {self.layer!r} are {self.first_head} to {self.end_head}; "
                "allowed: a half-open range"
            )
        if not 0 <= self.begin < 1 << 31:
            raise ValueError(f"begin of {self.layer!r} is {self.begin}; allowed: a token")


@dataclass(frozen=True)
class BlockTable:
    """One group's block table of a request: `ids[0]` is its entry number `first`."""

    ids: BlockIds
    first: int = 0


@dataclass(frozen=True)
class Strip:
    """One part of some heads of one layer, of tokens [begin, end), in one rank's cache.

    Of an opaque region it ends with a block: any byte of it may be one of the last token's. `ids`
    are the numbers of the region's blocks, from the one that holds `begin` to the one that holds
    `end - 1`; heads are counted over the model.
    """

    region: Region
    group: Group
    number: int  # of the part, within the region
    heads: Heads
    begin: int
    end: int
    ids: BlockIds

    @property
    def part(self) -> Part:
        """Which part."""
        return self.region.parts[self.number]

    @property
    def num_heads(self) -> int:
        """How many heads, each of which has a row of the digest."""
        return self.heads[1] - self.heads[0]

    @property
    def num_bytes(self) -> int:
        """Of all its heads and tokens."""
        return self.num_heads * (self.end - self.begin) * self.part.content

    @property
    def base(self) -> int:
        """Address of the first of these heads in block 0."""
        distance = (self.heads[0] - self.region.first_head) * self.region.head_stride
        return self.region.base + self.part.offset + distance

    @property
    def first_token(self) -> int:
        """Of the first block."""
        return self.begin // self.group.block_size * self.group.block_size

    @property
    def token_stride(self) -> int:
        """Bytes from one token to the next."""
        return self.part.token_stride or self.region.token_stride

    @property
    def names(self) -> list[str]:
        """What each of its rows is, for people."""
        parts = PARTS.get(len(self.region.parts), ("part",) * (self.number + 1))
        return [
            f"{parts[self.number]} of head {head} of layer {self.region.layer}"
            for head in range(*self.heads)
        ]


def excerpts(
    layout: CacheLayout, share: Share, tables: Sequence[BlockTable]
) -> tuple[Excerpt, ...]:
    """What a request reads from one peer rank: of each layer, behind the last absent entry.

    Args:
        layout: of this rank.
        share: what it reads, by layer.
        tables: for each group, from the first entry that is read; where a sliding window has
            passed, entries are absent.
    """
    found: list[Excerpt] = []
    for group, table in zip(layout.groups, tables, strict=True):
        absent = np.flatnonzero(table.ids == ABSENT)
        skipped = int(absent[-1]) + 1 if len(absent) else 0
        if skipped == len(table.ids):
            continue
        begin = (table.first + skipped) * group.entry_size
        found += [
            Excerpt(region.layer, *share[region.layer], begin)
            for region in group.regions
            if region.layer in share
        ]
    return tuple(found)


def strips(
    layout: CacheLayout, wanted: Sequence[Excerpt], tables: Sequence[BlockTable], *, end: int
) -> list[Strip]:
    """Find excerpts, up to token `end`, in a rank's cache: one strip per part.

    Of an opaque region strips go on to the end of the block.

    Raises:
        ValueError: if this rank, or the block table, does not have them.
    """
    places = {
        region.layer: (number, group, region)
        for number, group in enumerate(layout.groups)
        for region in group.regions
    }
    if len({excerpt.layer for excerpt in wanted}) < len(wanted):
        raise ValueError("a layer stands twice among the excerpts; allowed: once")
    blocks: dict[tuple[int, int], BlockIds] = {}
    found: list[Strip] = []
    for excerpt in wanted:
        number, group, region = _place(places, excerpt)
        if not excerpt.begin < end:
            raise ValueError(f"begin of {excerpt.layer!r} is {excerpt.begin}; allowed: below {end}")
        key = number, excerpt.begin
        if key not in blocks:
            blocks[key] = _block_numbers(group, tables[number], range(excerpt.begin, end))
        heads = excerpt.first_head, excerpt.end_head
        size = group.block_size if region.opaque else 1
        stop = -(-end // size) * size
        found += [
            Strip(region, group, part, heads, excerpt.begin, stop, blocks[key])
            for part in range(len(region.parts))
        ]
    return found


def _place(
    places: dict[str, tuple[int, Group, Region]], excerpt: Excerpt
) -> tuple[int, Group, Region]:
    if excerpt.layer not in places:
        raise ValueError(f"layer {excerpt.layer!r} is not on this rank")
    place = places[excerpt.layer]
    first, end = place[2].heads
    if not first <= excerpt.first_head < excerpt.end_head <= end:
        raise ValueError(
            f"heads of {excerpt.layer!r} are {excerpt.first_head} to {excerpt.end_head}; "
            f"allowed: within {first} to {end}"
        )
    return place


def _block_numbers(group: Group, table: BlockTable, tokens: range) -> BlockIds:
    first = tokens.start // group.block_size * group.block_size
    steps = range(first, tokens.stop, group.block_size)
    ids = Table(table.ids, group, table.first).pieces(steps, 1)
    if ids.size and ids.min() < 0:
        raise ValueError(f"the block of token {steps[int(np.argmin(ids))]} is absent")
    return ids
