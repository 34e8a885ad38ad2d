"""Names the KV that a load reads, and finds it in this rank's cache.

A `KVSlice` names a layer, heads and tokens of the model, so it means the same on every rank. Decode
names the slices of a load and sends them to prefill. Both sides find them in their own caches and
digest them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import (
    ABSENT,
    ALL_TOKENS,
    BlockIds,
    CacheLayout,
    Group,
    Part,
    Region,
    Stripe,
    Table,
)
from nixl_kv.geometry.match import Route
from nixl_kv.geometry.plan import Heads, Ints
from nixl_kv.protocol.events import StartLoad
from nixl_kv.protocol.messages import KVSlice

PARTS: Final = {1: ("KV",), 2: ("K", "V")}
"""Names of a region's parts, by their number."""


class LocalSlice(NamedTuple):
    """Tokens [begin, end) of a request: one part of some heads of a layer, in this rank's cache.

    It has the tokens that both this rank's stripe and the `other` rank's stripe hold. `ids` are the
    region's blocks, from the block with this rank's first of these tokens to the block with its
    last. In an opaque region `end` is the end of a block, because any byte of a block may belong to
    its last token. In a group of whole blocks a position is that of a block, which has the number
    of its first token.
    """

    region: Region
    group: Group
    table_number: int  # of the group within the layout
    part_number: int  # within the region
    heads: Heads  # numbered over the model
    other: Stripe
    begin: int
    end: int
    ids: BlockIds

    @property
    def part(self) -> Part:
        return self.region.parts[self.part_number]

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def base(self) -> int:
        return self.region.base + self.part.offset + self.region.head_offset(self.heads[0])

    @property
    def token_stride(self) -> int:
        return self.region.token_stride_of(self.part)

    @property
    def names(self) -> list[str]:
        part = part_name(self.group, self.region, self.part_number)
        return [
            f"{part} of head {head} of layer {self.region.layer}" for head in range(*self.heads)
        ]

    @property
    def positions(self) -> range:
        stripe, unit = self.group.stripe, self.group.unit
        return range(stripe.num_before(self.begin) // unit, -(-stripe.num_before(self.end) // unit))

    @property
    def first_position(self) -> int:
        """The position at which the first block begins."""
        size = self.group.units_per_block
        return self.positions.start // size * size

    def tokens(self, positions: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        tokens = self.group.stripe.token(positions * self.group.unit)
        return tokens, self.other.holds(tokens)


def part_name(group: Group, region: Region, number: int) -> str:
    count = len(region.parts)
    if group.keeps_states:
        return f"row {number}" if count > 1 else "content"
    return PARTS[count][number] if count in PARTS else "part"


def name_slices(
    layout: CacheLayout, route: Route, remote: CacheLayout, load: StartLoad
) -> tuple[KVSlice, ...]:
    """The slices that a load reads by a route; a ValueError if its block tables do not fit.

    A layer's slice begins after its last absent entry: its sliding window has passed that.
    """
    remote_stripes = {r.layer: group.stripe for group in remote.groups for r in group.regions}
    slices: list[KVSlice] = []
    for group, table in zip(layout.groups, load.tables, strict=True):
        absent = np.flatnonzero(table.block_ids == ABSENT)
        skipped = int(absent[-1]) + 1 if len(absent) else 0
        begin = (table.first + skipped) * group.entry_size
        for region in group.regions if skipped < table.num_ids else ():
            if region.layer in route.share:
                both = dict.fromkeys((group.stripe, remote_stripes[region.layer]))
                stripes = tuple(stripe for stripe in both if stripe != ALL_TOKENS)
                slices.append(KVSlice(region.layer, *route.share[region.layer], begin, stripes))
    return tuple(slices)


def find_slices(
    layout: CacheLayout, wanted: Sequence[KVSlice], tables: Sequence[Table], *, end: int
) -> list[LocalSlice]:
    """Find slices up to token `end`, or to the end of its block in an opaque region.

    Each part of a region becomes a local slice.

    Raises:
        ValueError: this rank, or the block table, does not have a slice.
    """
    if len({kv.layer for kv in wanted}) < len(wanted):
        raise ValueError("a layer occurs twice among the slices; allowed: once")
    if len(tables) != len(layout.groups):
        raise ValueError(f"{len(tables)} block tables; allowed: {len(layout.groups)}")
    regions = layout.regions
    blocks: dict[tuple[int, int], BlockIds] = {}  # by group and first token; layers share them
    found: list[LocalSlice] = []
    for kv in wanted:
        if kv.layer not in regions:
            raise ValueError(f"layer {kv.layer!r} is not on this rank")
        number, region = regions[kv.layer]
        group, heads = layout.groups[number], (kv.first_head, kv.end_head)
        first, last = region.heads
        if not first <= kv.first_head < kv.end_head <= last:
            raise ValueError(
                f"heads of {kv.layer!r} are {kv.first_head} to {kv.end_head}; "
                f"allowed: within {first} to {last}"
            )
        others = [stripe for stripe in kv.stripes if stripe != group.stripe]
        allowed = 0 if group.keeps_states else 1
        if len(others) > allowed:
            raise ValueError(
                f"{kv.layer!r} has {len(others)} stripes that are not this rank's; "
                f"allowed: {allowed}"
            )
        if kv.begin >= end:
            raise ValueError(f"begin of {kv.layer!r} is {kv.begin}; allowed: below {end}")
        other = others[0] if others else ALL_TOKENS
        if (number, kv.begin) not in blocks:
            blocks[number, kv.begin] = _block_numbers(tables[number], group, kv.begin, end)
        ids = blocks[number, kv.begin]
        stop = _end_of_block(group, end) if region.opaque else end
        found += [
            LocalSlice(region, group, number, part, heads, other, kv.begin, stop, ids)
            for part in range(len(region.parts))
        ]
    return found


def alike(local_slices: Sequence[LocalSlice]) -> list[list[tuple[int, LocalSlice]]]:
    """Slices, each behind the number of its first row, together with all that have the same tokens.

    These are in the same blocks, at the same strides, and have content of the same shape.
    """
    found: dict[tuple[object, ...], list[tuple[int, LocalSlice]]] = {}
    row = 0
    for one in local_slices:
        region, part = one.region, one.part
        strides = region.block_stride, region.token_stride_of(part)
        shape = part.length, part.count, part.stride
        key = one.table_number, one.begin, one.end, one.other, strides, shape
        found.setdefault(key, []).append((row, one))
        row += one.num_heads
    return list(found.values())


def _end_of_block(group: Group, end: int) -> int:
    """The first token after the block that has this rank's last token before `end`."""
    positions = -(-group.stripe.num_before(end) // group.block_size) * group.block_size
    return group.stripe.token(positions - 1) + 1 if positions else end


def _block_numbers(table: Table, group: Group, begin: int, end: int) -> BlockIds:
    """Numbers of the blocks that have this rank's tokens of [begin, end)."""
    first, stop = group.stripe.num_before(begin), group.stripe.num_before(end)
    if first == stop:
        return table.block_ids[:0]
    blocks = np.arange(first // group.block_size, -(-stop // group.block_size), dtype=np.int32)
    entries, within = np.divmod(blocks, np.int32(group.blocks_per_entry))
    size = group.entry_size
    tokens = range(int(entries[0]) * size, (int(entries[-1]) + 1) * size, size)
    numbers = table.piece_numbers(group, tokens, 1)
    if numbers.min() < 0:
        raise ValueError(f"the block of token {tokens[int(np.argmin(numbers))]} is absent")
    found: BlockIds = numbers[entries - entries[0]] + within
    return found
