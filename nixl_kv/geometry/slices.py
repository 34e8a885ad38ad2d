"""Which slices of a prompt's KV a reader reads, and where they are on one rank.

A `KVSlice` names layer, heads and tokens of the model: it means the same on any rank of any engine.
A `SliceFinder` finds slices in one rank's cache, as `LocalSlice`s. What of them does not depend on
the request, their `SlicePlace`s, it keeps: most requests are of the same few sets of slices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import (
    ABSENT,
    ALL_TOKENS,
    BlockIds,
    BlockTable,
    CacheLayout,
    Group,
    Part,
    Region,
    Stripe,
    check_range,
)
from nixl_kv.geometry.match import Holdings
from nixl_kv.geometry.plan import Heads, Ints, Share

PARTS: Final = {1: ("KV",), 2: ("K", "V")}
"""The names of a region's parts, by the number of parts."""

MAX_KEPT: Final = 64
"""Sets of slices whose places a finder keeps."""


_Held: TypeAlias = tuple[str, int, int, tuple[Stripe, ...]]
"""Of a slice all but its first token."""


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


@dataclass(frozen=True, eq=False)
class SlicePlace:
    """One part of some heads of one layer in one rank's cache, for whatever tokens.

    Of these it has those that the rank's own stripe and the `other` one keep. Heads are counted
    over the model. Each is equal to itself alone, so that to look one up costs little.
    """

    region: Region
    group: Group
    part_number: int  # within the region
    heads: Heads
    other: Stripe = ALL_TOKENS
    table_number: int = 0  # of the group, within the layout

    @property
    def part(self) -> Part:
        """The part of the region."""
        return self.region.parts[self.part_number]

    @cached_property
    def num_heads(self) -> int:
        """The number of heads; each has a row of the digest."""
        return self.heads[1] - self.heads[0]

    @cached_property
    def token_bytes(self) -> int:
        """Of all its heads."""
        return self.num_heads * self.part.content


class LocalSlice(NamedTuple):
    """What one request has at a place: tokens [begin, end).

    In an opaque region, `end` is the end of a block: any byte of that block may belong to the last
    token. `ids` are numbers of the region's blocks, from the block of the rank's first token on to
    the block of its last one.
    """

    place: SlicePlace
    begin: int
    end: int
    ids: BlockIds

    @property
    def region(self) -> Region:
        """See `SlicePlace`, here and below."""
        return self.place.region

    @property
    def group(self) -> Group:
        """Of the cache."""
        return self.place.group

    @property
    def part(self) -> Part:
        """The part of the region."""
        return self.place.part

    @property
    def heads(self) -> Heads:
        """Counted over the model."""
        return self.place.heads

    @property
    def num_heads(self) -> int:
        """The number of heads; each has a row of the digest."""
        return self.place.num_heads

    @property
    def other(self) -> Stripe:
        """That of the other side."""
        return self.place.other

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        positions = self.positions
        if self.other.count == 1:
            return len(positions)
        _, is_kept = self.tokens(np.arange(positions.start, positions.stop))
        return int(np.count_nonzero(is_kept))

    @property
    def num_bytes(self) -> int:
        """Bytes of all its heads and tokens."""
        return self.num_tokens * self.place.token_bytes

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
        part = part_name(self.group, self.region, self.place.part_number)
        return [
            f"{part} of head {head} of layer {self.region.layer}" for head in range(*self.heads)
        ]


def part_name(group: Group, region: Region, number: int) -> str:
    """A part of a region, for people to read: of KV, or of a state."""
    count = len(region.parts)
    if group.keeps_states:
        return f"row {number}" if count > 1 else "content"
    return PARTS[count][number] if count in PARTS else "part"


class SliceNamer:
    """Names what requests read from one remote rank."""

    def __init__(self, layout: CacheLayout, share: Share, remote: Holdings) -> None:
        """Start with none.

        Args:
            layout: of this rank.
            share: the heads that it reads, by layer.
            remote: what that rank holds.
        """
        self._layout, self._share, self._remote = layout, share, remote
        self._slices: dict[tuple[int | None, ...], tuple[KVSlice, ...]] = {}

    def name(self, tables: Sequence[BlockTable]) -> tuple[KVSlice, ...]:
        """What a request reads: each layer, after its last absent entry.

        `tables` has, for each group, in the layout's order, the entries that are read. Entries are
        absent where a sliding window has passed.
        """
        begins = tuple(map(_first_token, tables))
        slices = self._slices.pop(begins, None) or self._make(begins)
        self._slices[begins] = slices
        if len(self._slices) > MAX_KEPT:
            del self._slices[next(iter(self._slices))]
        return slices

    def _make(self, begins: tuple[int | None, ...]) -> tuple[KVSlice, ...]:
        slices: list[KVSlice] = []
        for group, begin in zip(self._layout.groups, begins, strict=True):
            for region in group.regions:
                if begin is not None and region.layer in self._share:
                    heads = self._share[region.layer]
                    both = dict.fromkeys((group.stripe, self._remote[region.layer].stripe))
                    stripes = tuple(stripe for stripe in both if stripe != ALL_TOKENS)
                    slices.append(KVSlice(region.layer, *heads, begin, stripes))
        return tuple(slices)


def _first_token(table: BlockTable) -> int | None:
    """The first one after the last absent entry; None where all entries are absent."""
    absent = np.flatnonzero(table.ids == ABSENT)
    skipped = int(absent[-1]) + 1 if len(absent) else 0
    return (table.first + skipped) * table.group.entry_size if skipped < len(table.ids) else None


class SliceFinder:
    """Finds slices in one rank's cache: one local slice per part."""

    def __init__(self, layout: CacheLayout) -> None:
        """`layout` is of that cache."""
        self._groups = layout.groups
        self._regions = layout.regions
        self._places: dict[tuple[_Held, ...], list[list[SlicePlace]]] = {}

    def find(
        self, wanted: Sequence[KVSlice], tables: Sequence[BlockTable], *, end: int
    ) -> list[LocalSlice]:
        """Find slices up to token `end`.

        In an opaque region they go on to the end of the block. Layers of one group that begin with
        the same token have the same array of block numbers.

        Raises:
            ValueError: if this rank, or the block table, does not have a slice.
        """
        blocks: dict[tuple[int, int], BlockIds] = {}
        local_slices: list[LocalSlice] = []
        for kv, places in zip(wanted, self._find_places(wanted), strict=True):
            if kv.begin >= end:
                raise ValueError(f"begin of {kv.layer!r} is {kv.begin}; allowed: below {end}")
            key = places[0].table_number, kv.begin
            if key not in blocks:
                blocks[key] = _block_numbers(tables[key[0]], kv.begin, end)
            for place in places:
                stop = _end_of_block(place.group, end) if place.region.opaque else end
                local_slices.append(LocalSlice(place, kv.begin, stop, blocks[key]))
        return local_slices

    def _find_places(self, wanted: Sequence[KVSlice]) -> list[list[SlicePlace]]:
        """The places of each slice's parts. Those that were asked for last are kept."""
        held = tuple((kv.layer, kv.first_head, kv.end_head, kv.stripes) for kv in wanted)
        places = self._places.pop(held, None) or self._make_places(wanted)
        self._places[held] = places
        if len(self._places) > MAX_KEPT:
            del self._places[next(iter(self._places))]
        return places

    def _make_places(self, wanted: Sequence[KVSlice]) -> list[list[SlicePlace]]:
        if len({kv.layer for kv in wanted}) < len(wanted):
            raise ValueError("a layer occurs twice among the slices; allowed: once")
        return [self._places_of(kv) for kv in wanted]

    def _places_of(self, kv: KVSlice) -> list[SlicePlace]:
        number, region = _find_region(self._regions, kv)
        group, heads = self._groups[number], (kv.first_head, kv.end_head)
        other = _other_stripe(kv, group)
        return [
            SlicePlace(region, group, part, heads, other, number)
            for part in range(len(region.parts))
        ]


def count_bytes(local_slices: Iterable[LocalSlice]) -> int:
    """Bytes of all these slices of one request. Those of one group mostly have the same tokens."""
    num_tokens: dict[tuple[int, int, int, int], int] = {}
    num_bytes = 0
    for local in local_slices:
        place = local.place
        key = place.table_number, local.begin, local.end, id(place.other)
        if key not in num_tokens:
            num_tokens[key] = local.num_tokens
        num_bytes += num_tokens[key] * place.token_bytes
    return num_bytes


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
