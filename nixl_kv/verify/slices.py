"""Names the KV that a load reads, and finds it in this rank's cache.

A `KVSlice` names a layer, heads and tokens of the model, so it means the same on every rank. Decode
names the slices of a load (`SliceNamer`) and sends them to prefill. Both sides find them in their
own caches (`SliceFinder`) and digest them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry import match
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
    Table,
)
from nixl_kv.geometry.match import Route
from nixl_kv.geometry.plan import Heads, Ints
from nixl_kv.protocol.events import PeerKey, StartLoad
from nixl_kv.protocol.messages import KVSlice

PARTS: Final = {1: ("KV",), 2: ("K", "V")}
"""Names of a region's parts, by their number."""

MAX_KEPT: Final = 64
"""Results that a `SliceNamer` and a `SliceFinder` keep. Each takes 0.2 ms for a model of 36 layers,
and most loads from a peer have the same slices."""

Kept = TypeVar("Kept")
_Keep: TypeAlias = dict[Any, Kept]


@dataclass(frozen=True, eq=False)
class SlicePlace:
    """One part of some heads of a layer, in this rank's cache.

    It has the tokens that both this rank's stripe and the `other` rank's stripe hold.
    """

    region: Region
    group: Group
    table_number: int  # of the group within the layout
    part_number: int  # within the region
    heads: Heads  # numbered over the model
    other: Stripe = ALL_TOKENS

    @property
    def part(self) -> Part:
        return self.region.parts[self.part_number]

    @cached_property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @cached_property
    def base(self) -> int:
        """Address of the first head in block 0."""
        return self.region.base + self.part.offset + self.region.head_offset(self.heads[0])

    @property
    def head_bases(self) -> Ints:
        """Address of each head in block 0."""
        return self.base + np.arange(self.num_heads) * self.region.head_stride

    @property
    def token_stride(self) -> int:
        return self.region.token_stride_of(self.part)

    @property
    def names(self) -> list[str]:
        part = part_name(self.group, self.region, self.part_number)
        return [
            f"{part} of head {head} of layer {self.region.layer}" for head in range(*self.heads)
        ]


class LocalSlice(NamedTuple):
    """Tokens [begin, end) of a request at one place.

    `ids` are the region's blocks, from the block with this rank's first of these tokens to the
    block with its last. In an opaque region `end` is the end of a block, because any byte of a
    block may belong to its last token.
    """

    place: SlicePlace
    begin: int
    end: int
    ids: BlockIds

    @property
    def positions(self) -> range:
        """Where this rank keeps these tokens, among its own tokens of the prompt."""
        stripe = self.place.group.stripe
        return range(stripe.num_before(self.begin), stripe.num_before(self.end))

    @property
    def first_position(self) -> int:
        """The position at which the first block begins."""
        size = self.place.group.block_size
        return self.positions.start // size * size

    def tokens(self, positions: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The tokens at these positions, and which of them the other rank has too."""
        tokens = self.place.group.stripe.token(positions)
        return tokens, self.place.other.holds(tokens)


def part_name(group: Group, region: Region, number: int) -> str:
    count = len(region.parts)
    if group.keeps_states:
        return f"row {number}" if count > 1 else "content"
    return PARTS[count][number] if count in PARTS else "part"


class SliceNamer:
    """Names the slices that this rank's loads read from other ranks."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._kept: _Keep[tuple[KVSlice, ...]] = {}

    def __call__(
        self, peer: PeerKey, route: Route, remote: CacheLayout, load: StartLoad
    ) -> tuple[KVSlice, ...]:
        """The slices that a load reads by a route; a ValueError if its block tables do not fit.

        A layer's slice begins after its last absent entry: its sliding window has passed that.
        """
        begins = tuple(map(_first_token, block_tables(self._layout, load.tables)))
        return _kept(
            self._kept,
            (peer, route.remote_rank, begins),
            lambda: self._make(route, remote, begins),
        )

    def _make(
        self, route: Route, remote: CacheLayout, begins: Sequence[int | None]
    ) -> tuple[KVSlice, ...]:
        held = match.holdings(remote)
        slices: list[KVSlice] = []
        for group, begin in zip(self._layout.groups, begins, strict=True):
            for region in group.regions:
                if begin is not None and region.layer in route.share:
                    both = dict.fromkeys((group.stripe, held[region.layer].stripe))
                    stripes = tuple(stripe for stripe in both if stripe != ALL_TOKENS)
                    heads = route.share[region.layer]
                    slices.append(KVSlice(region.layer, *heads, begin, stripes))
        return tuple(slices)


class SliceFinder:
    """Finds slices in this rank's cache. Each part of a region becomes a local slice."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._regions = layout.regions
        self._kept: _Keep[list[list[SlicePlace]]] = {}

    def find(
        self, wanted: Sequence[KVSlice], tables: Sequence[BlockTable], *, end: int
    ) -> list[LocalSlice]:
        """Find slices up to token `end`, or to the end of its block in an opaque region.

        Raises:
            ValueError: this rank, or the block table, does not have a slice.
        """
        if len({kv.layer for kv in wanted}) < len(wanted):
            raise ValueError("a layer occurs twice among the slices; allowed: once")
        key = tuple((kv.layer, kv.first_head, kv.end_head, kv.stripes) for kv in wanted)
        places_of = _kept(self._kept, key, lambda: [self._places_of(kv) for kv in wanted])
        blocks: dict[tuple[int, int], BlockIds] = {}  # by group and first token; layers share them
        found: list[LocalSlice] = []
        for kv, places in zip(wanted, places_of, strict=True):
            if kv.begin >= end:
                raise ValueError(f"begin of {kv.layer!r} is {kv.begin}; allowed: below {end}")
            number = places[0].table_number
            if (number, kv.begin) not in blocks:
                blocks[number, kv.begin] = _block_numbers(tables[number], kv.begin, end)
            for place in places:
                stop = _end_of_block(place.group, end) if place.region.opaque else end
                found.append(LocalSlice(place, kv.begin, stop, blocks[number, kv.begin]))
        return found

    def _places_of(self, kv: KVSlice) -> list[SlicePlace]:
        if kv.layer not in self._regions:
            raise ValueError(f"layer {kv.layer!r} is not on this rank")
        number, region = self._regions[kv.layer]
        first, end = region.heads
        if not first <= kv.first_head < kv.end_head <= end:
            raise ValueError(
                f"heads of {kv.layer!r} are {kv.first_head} to {kv.end_head}; "
                f"allowed: within {first} to {end}"
            )
        group, heads = self._layout.groups[number], (kv.first_head, kv.end_head)
        others = [stripe for stripe in kv.stripes if stripe != group.stripe]
        allowed = 0 if group.keeps_states else 1
        if len(others) > allowed:
            raise ValueError(
                f"{kv.layer!r} has {len(others)} stripes that are not this rank's; "
                f"allowed: {allowed}"
            )
        other = others[0] if others else ALL_TOKENS
        return [
            SlicePlace(region, group, number, part, heads, other)
            for part in range(len(region.parts))
        ]


def block_tables(layout: CacheLayout, tables: Sequence[Table]) -> list[BlockTable]:
    pairs = zip(tables, layout.groups, strict=True)
    return [BlockTable.of(table, group) for table, group in pairs]


def count_bytes(local_slices: Sequence[LocalSlice]) -> int:
    num_tokens: dict[tuple[int, int, int, int], int] = {}  # counted once for all alike
    num_bytes = 0
    for local in local_slices:
        place = local.place
        key = place.table_number, local.begin, local.end, id(place.other)
        if key not in num_tokens:
            positions = local.positions
            num_tokens[key] = len(positions)
            if place.other.count > 1:
                _, is_kept = local.tokens(np.arange(positions.start, positions.stop))
                num_tokens[key] = int(np.count_nonzero(is_kept))
        num_bytes += num_tokens[key] * place.num_heads * place.part.content
    return num_bytes


def _kept(keep: _Keep[Kept], key: object, make: Callable[[], Kept]) -> Kept:
    """Get or make the value of a key, and drop the one that was used least recently."""
    value = keep.pop(key) if key in keep else make()
    keep[key] = value
    if len(keep) > MAX_KEPT:
        del keep[next(iter(keep))]
    return value


def _first_token(table: BlockTable) -> int | None:
    """The token after the last absent entry; None if all entries are absent."""
    absent = np.flatnonzero(table.ids == ABSENT)
    skipped = int(absent[-1]) + 1 if len(absent) else 0
    return (table.first + skipped) * table.group.entry_size if skipped < len(table.ids) else None


def _end_of_block(group: Group, end: int) -> int:
    """The first token after the block that has this rank's last token before `end`."""
    positions = -(-group.stripe.num_before(end) // group.block_size) * group.block_size
    return group.stripe.token(positions - 1) + 1 if positions else end


def _block_numbers(table: BlockTable, begin: int, end: int) -> BlockIds:
    """Numbers of the blocks that have this rank's tokens of [begin, end)."""
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
