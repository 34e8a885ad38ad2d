"""Which slices of a prompt's KV a reader reads, and where they are on one rank.

A `KVSlice` names layer, heads and tokens of the model: it means the same on any rank of any engine.
`find_slices` finds slices in one rank's cache, as `LocalSlice`s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.blocks import ABSENT, BlockIds, BlockTable
from nixl_kv.geometry.layout import (
    ALL_TOKENS,
    CacheLayout,
    Group,
    Part,
    Region,
    Stripe,
    check_range,
)
from nixl_kv.geometry.plan import Share
from nixl_kv.geometry.ranks import Holdings
from nixl_kv.geometry.runs import Heads, Ints

PARTS: Final = {1: ("KV",), 2: ("K", "V")}
"""The names of a region's parts, by the number of parts."""


@dataclass(frozen=True)
class KVSlice:
    """Some heads of one layer, from token `begin` on. Heads are counted over the model.

    Of these tokens it has those that all `stripes` keep.
    """

    layer: str
    first_head: int
    end_head: int
    begin: int
    stripes: tuple[Stripe, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers: they also come from peers."""
        if not 0 <= self.first_head < self.end_head <= 1 << 17:
            raise ValueError(
                f"heads of {self.layer!r} are {self.first_head} to {self.end_head}; "
                "allowed: a half-open range"
            )
        if not 0 <= self.begin < 1 << 31:
            raise ValueError(f"begin of {self.layer!r} is {self.begin}; allowed: a token")
        check_range(f"number of stripes of {self.layer!r}", len(self.stripes), low=0, high=3)


@dataclass(frozen=True)
class LocalSlice:
    """One part of some heads of one layer, tokens [begin, end), in one rank's cache.

    Of these tokens it has those that the rank's own stripe and the `other` one keep. In an opaque
    region, `end` is the end of a block: any byte of that block may belong to the last token. `ids`
    are numbers of the region's blocks, from the block of the rank's first token on to the block of
    its last one. Heads are counted over the model.
    """

    region: Region
    group: Group
    part_number: int  # within the region
    heads: Heads
    begin: int
    end: int
    ids: BlockIds
    other: Stripe = ALL_TOKENS

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
        positions = self.positions
        num_tokens = len(positions)
        if self.other.count > 1:
            _, is_kept = self.tokens(np.arange(positions.start, positions.stop))
            num_tokens = int(np.count_nonzero(is_kept))
        return self.num_heads * num_tokens * self.part.content

    @property
    def base(self) -> int:
        """Address of the first of these heads in block 0."""
        return self.region.base + self.part.offset + self.region.head_offset(self.heads[0])

    @property
    def positions(self) -> range:
        """Where this rank keeps tokens [begin, end), among its tokens of the prompt."""
        stripe = self.group.stripe
        return range(stripe.num_before(self.begin), stripe.num_before(self.end))

    @property
    def first_position(self) -> int:
        """The position that the first block begins with."""
        return self.positions.start // self.group.block_size * self.group.block_size

    def tokens(self, positions: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The tokens at these positions, and which of them the slice has."""
        tokens = self.group.stripe.token(positions)
        return tokens, self.other.holds(tokens)

    @property
    def token_stride(self) -> int:
        """Bytes from one token to the next."""
        return self.region.token_stride_of(self.part)

    @property
    def names(self) -> list[str]:
        """For each of its heads a name, for people to read."""
        part = part_name(self.group, self.region, self.part_number)
        return [
            f"{part} of head {head} of layer {self.region.layer}" for head in range(*self.heads)
        ]


def part_name(group: Group, region: Region, number: int) -> str:
    """A part of a region, for people to read: of KV, or of a state."""
    count = len(region.parts)
    if group.keeps_states:
        return f"row {number}" if count > 1 else "content"
    return PARTS[count][number] if count in PARTS else "part"


def slices_read(
    layout: CacheLayout,
    share: Share,
    tables: Sequence[BlockTable],
    remote: Holdings,
) -> tuple[KVSlice, ...]:
    """What a request reads from one remote rank: each layer, after its last absent entry.

    Args:
        layout: of this rank.
        share: the heads that it reads, by layer.
        tables: for each group, in the layout's order, the entries that are read. Entries are absent
            where a sliding window has passed.
        remote: what that rank holds.
    """
    slices: list[KVSlice] = []
    for group, table in zip(layout.groups, tables, strict=True):
        absent = np.flatnonzero(table.ids == ABSENT)
        skipped = int(absent[-1]) + 1 if len(absent) else 0
        if skipped == len(table.ids):
            continue
        begin = (table.first + skipped) * group.entry_size
        for region in group.regions:
            if region.layer in share:
                both = dict.fromkeys((group.stripe, remote[region.layer].stripe))
                stripes = tuple(stripe for stripe in both if stripe != ALL_TOKENS)
                slices.append(KVSlice(region.layer, *share[region.layer], begin, stripes))
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
        stop = _end_of_block(table.group, end) if region.opaque else end
        if (number, begin) not in blocks:
            blocks[number, begin] = _block_numbers(table, begin, end)
        heads, ids = (kv.first_head, kv.end_head), blocks[number, begin]
        other = _other_stripe(kv, table.group)
        local_slices += [
            LocalSlice(region, table.group, part, heads, begin, stop, ids, other)
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


def _other_stripe(kv: KVSlice, group: Group) -> Stripe:
    """That of the other side."""
    others = [stripe for stripe in kv.stripes if stripe != group.stripe]
    allowed = 0 if group.keeps_states else 1
    if len(others) > allowed:
        raise ValueError(
            f"{kv.layer!r} has {len(others)} stripes that are not this rank's; allowed: {allowed}"
        )
    return others[0] if others else ALL_TOKENS


def _end_of_block(group: Group, end: int) -> int:
    """The first token after the block that has the rank's last token before `end`."""
    positions = -(-group.stripe.num_before(end) // group.block_size) * group.block_size
    return group.stripe.token(positions - 1) + 1 if positions else end


def _block_numbers(table: BlockTable, begin: int, end: int) -> BlockIds:
    """Of the blocks that have a rank's tokens [begin, end)."""
    group = table.group
    first, stop = group.stripe.num_before(begin), group.stripe.num_before(end)
    if first == stop:
        return table.ids[:0]
    size, per_entry = group.entry_size, group.blocks_per_entry
    entries = range(first // group.slots_per_entry, -(-stop // group.slots_per_entry))
    tokens = range(entries.start * size, entries.stop * size, size)
    numbers = table.piece_numbers(tokens, 1)
    if numbers.min() < 0:
        raise ValueError(f"the block of token {tokens[int(np.argmin(numbers))]} is absent")
    within = np.arange(per_entry, dtype=np.int32)
    before = entries.start * per_entry
    blocks: BlockIds = (numbers[:, None] + within).ravel()
    return blocks[first // group.block_size - before : -(-stop // group.block_size) - before]
