"""The effect of a plan, byte by byte, with nothing but numpy's own reshape and transpose.

A `Store` knows where each byte of one cache group is on one rank, in a physical order: the letters
of one big array from the outermost axis to the innermost. L layers, B blocks, H heads, N tokens,
C content. With a "2", K and V are apart; without one, V follows K inside C. T is a block of one
head with K transposed: K as [C, N], then V as [N, C].

An `Engine` is a whole model's KV divided among the ranks of an engine. It is real memory, filled
from a dense array of shape [token, head, byte] for each layer and part.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from harness.local.model_layouts import ORDERS, heads_of_rank
from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Part, Region, Span, Stripe
from nixl_kv.geometry.plan import ADDRESS, COUNT, LENGTH, STRIDE, Pieces, Plan, Reads, Rows
from nixl_kv.reading.tiles import JOB_COLUMNS, Tiling

TRANSPOSED = ("LBHT", "BLHT", "BHLT", "LHBT")
ALL_ORDERS = ORDERS + TRANSPOSED
UNUSED = "unused."  # begins the name of a place in memory that no layer uses
GUARD = 16  # unused bytes between stores: no layer's end touches another store's start

Dense = Mapping[str, Sequence[np.ndarray]]


@dataclass(frozen=True)
class Layer:
    """One layer, of the model or as one rank has it. `value` 0: one part only."""

    name: str
    heads: int = 1
    key: int = 1
    value: int = 1
    window: int = 0
    first_head: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.key, self.value) if self.value else (self.key,)

    @property
    def kind(self) -> tuple[int, int, int]:
        return self.heads, self.key, self.value


@dataclass(frozen=True)
class Blocks:
    """How a group's memory is divided. After each content `pad` bytes, after each block `gap`
    bytes are unused. Of `stripes` ranks each has `width` tokens in turn. `whole` blocks are told to
    the planner without their tokens."""

    count: int = 1
    tokens: int = 1
    per_entry: int = 1
    pad: int = 0
    gap: int = 0
    stripes: int = 1
    width: int = 1
    whole: bool = False

    @property
    def entry_size(self) -> int:
        return self.tokens * self.per_entry * self.stripes


class Store:
    """Where each byte of one group is: `parts[name]` has the offsets of K, and of V.

    Their shape is [block, head, token, piece, byte]. Where the order begins with "BL", layers of
    different sizes are side by side in each block; in any other order they are apart.
    """

    def __init__(self, order: str, layers: Sequence[Layer], blocks: Blocks, start: int = 0) -> None:
        self.layers = tuple(layers)
        self.blocks = blocks
        self.start = self.end = start
        self.arrays: dict[str, np.ndarray] = {}  # in memory order, unused content included
        self.parts: dict[str, list[np.ndarray]] = {}
        if order.startswith("BL"):
            self._add_pages(order, layers)
        else:
            for kind in dict.fromkeys(layer.kind for layer in layers):
                self._add_array(order, [layer for layer in layers if layer.kind == kind])

    def _lengths(self, letters: str, layer: Layer) -> list[int]:
        content = max(layer.lengths) if "2" in letters else sum(layer.lengths)
        tokens = self.blocks.tokens
        sizes = {"B": self.blocks.count, "2": 2, "H": layer.heads, "N": tokens}
        sizes |= {"C": content + self.blocks.pad, "T": tokens * content}
        return [sizes[letter] for letter in letters]

    def _chunks(self, count: int, size: int) -> np.ndarray:
        """New offsets, shape (count, size); a gap follows each chunk."""
        padded = size + self.blocks.gap
        start, self.end = self.end, self.end + count * padded + GUARD
        return np.arange(start, start + count * padded).reshape(count, padded)[:, :size]

    def _add_array(self, order: str, layers: Sequence[Layer]) -> None:
        """One array for all of the layers. A layer of one part has no axis to separate K from V."""
        if not layers[0].value:
            order = order.replace("2", "").replace("T", "NC")
        place, split = order.index("L"), order.index("B") + 1
        lengths = self._lengths(order.replace("L", ""), layers[0])
        lengths.insert(place, len(layers))
        chunks = self._chunks(int(np.prod(lengths[:split])), int(np.prod(lengths[split:])))
        by_layer = np.moveaxis(chunks.reshape(lengths), place, 0)
        for layer, offsets in zip(layers, by_layer, strict=True):
            self._add_layer(layer, order.replace("L", ""), offsets)

    def _add_pages(self, order: str, layers: Sequence[Layer]) -> None:
        """One page for each block; in it the layers follow each other."""
        letters = [order[2:] if layer.value else order[2:].replace("T", "NC") for layer in layers]
        inner = list(map(self._lengths, letters, layers))
        edges = np.cumsum([0, *(int(np.prod(lengths)) for lengths in inner)]).tolist()
        pages = self._chunks(self.blocks.count, edges[-1])
        for number, layer in enumerate(layers):
            page = pages[:, edges[number] : edges[number + 1]]
            offsets = page.reshape(self.blocks.count, *inner[number])
            self._add_layer(layer, "B" + letters[number], offsets)

    def _add_layer(self, layer: Layer, letters: str, offsets: np.ndarray) -> None:
        self.arrays[layer.name] = offsets
        key, end = layer.key, layer.key + layer.value
        target = next(axes for axes in ("BHNC", "2BHNC", "BHT") if set(axes) == set(letters))
        offsets = offsets.transpose([letters.index(letter) for letter in target])
        if target == "2BHNC":
            parts = [offsets[0, ..., None, :key], offsets[1, ..., None, : layer.value]]
        elif target == "BHNC":
            parts = [offsets[..., None, :key], offsets[..., None, key:end]]
        else:
            parts = self._transposed(layer, offsets)
        self.parts[layer.name] = parts[: len(layer.lengths)]

    def _transposed(self, layer: Layer, offsets: np.ndarray) -> list[np.ndarray]:
        """K's pieces are elements of two bytes if K's length is even, else of one."""
        tokens, element = self.blocks.tokens, 1 if layer.key % 2 else 2
        keys, values = np.split(offsets, [layer.key * tokens], axis=-1)
        outer = offsets.shape[:2]
        pieces = keys.reshape(*outer, layer.key // element, tokens, element)
        return [pieces.swapaxes(2, 3), values.reshape(*outer, tokens, 1, layer.value)]

    def region(self, layer: Layer, base: int) -> Region:
        """The same for the planner, in strides."""
        parts = self.parts[layer.name]
        first = int(parts[0].flat[0])
        block, head, token = (step // parts[0].itemsize for step in parts[0].strides[:3])
        return Region(
            layer=layer.name,
            base=base + first,
            block_stride=block,
            head_stride=head,
            token_stride=token,
            first_head=layer.first_head,
            num_heads=layer.heads,
            parts=tuple(_part(part, int(part.flat[0]) - first) for part in parts),
        )


def _part(offsets: np.ndarray, offset: int) -> Part:
    count, length = offsets.shape[3:]
    token, step = (stride // offsets.itemsize for stride in offsets.strides[2:4])
    if count == 1 or step == length:
        return Part(offset, count * length, token_stride=token)
    return Part(offset, length, count, step, token)


def layout(stores: Sequence[Store], base: int, *, device: int = 0, tp_rank: int = 0) -> CacheLayout:
    """One rank; each store's memory is registered in one piece."""
    spans = {Span(base + store.start, store.end - store.start) for store in stores if store.parts}
    return CacheLayout(
        tuple(_group(store, base, tp_rank) for store in stores),
        "DRAM",
        device,
        tuple(sorted(spans, key=lambda span: span.address)),
    )


def _group(store: Store, base: int, tp_rank: int) -> Group:
    layers = [layer for layer in store.layers if not layer.name.startswith(UNUSED)]
    blocks, window = store.blocks, max((layer.window for layer in layers), default=0)
    regions = tuple(store.region(layer, base) for layer in layers)
    if blocks.whole:
        regions = tuple(_whole(region, blocks.tokens) for region in regions)
    stripe = Stripe(blocks.stripes, tp_rank % blocks.stripes, blocks.width)
    sizes = blocks.tokens, blocks.count, blocks.per_entry
    return Group(*sizes, regions, window, stripe, blocks.whole)


def _whole(region: Region, tokens: int) -> Region:
    """Each part has all tokens of a block."""
    steps = [region.token_stride_of(part) for part in region.parts]
    parts = tuple(
        Part(part.offset, part.length, tokens, step)
        if step > part.length
        else Part(part.offset, part.length * tokens)
        for part, step in zip(region.parts, steps, strict=True)
    )
    return replace(region, parts=parts, token_stride=1)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table; here the table of one request, from its first token on."""

    layers: tuple[str, ...]
    blocks: Blocks
    table: tuple[int, ...]

    @property
    def entry_size(self) -> int:
        return self.blocks.entry_size

    @cached_property
    def entries(self) -> np.ndarray:
        """The entry of each token of the table; ABSENT without one."""
        return np.repeat(np.array(self.table, dtype=np.int64), self.entry_size)

    @property
    def present(self) -> np.ndarray:
        """The tokens that have a block on some rank."""
        return np.flatnonzero(self.entries != ABSENT)

    def slots(self, place: int = 0) -> np.ndarray:
        """(block, slot) of each token of the table, shape (n, 2), on the rank of that stripe.

        Block ABSENT if the token has none, or is another rank's. The arithmetic is that of
        vLLM's kernel for slots.
        """
        count, width = self.blocks.stripes, self.blocks.width
        within = np.arange(len(self.entries)) % self.entry_size
        is_here = (within // width % count == place) & (self.entries != ABSENT)
        offset = within // (width * count) * width + within % width
        block = self.entries * self.blocks.per_entry + offset // self.blocks.tokens
        return np.stack([np.where(is_here, block, ABSENT), offset % self.blocks.tokens], axis=1)


@dataclass(frozen=True)
class Cut:
    """How an engine is divided: `stages` are the names of each pipeline stage's layers.

    Rank r has `orders[r % len(orders)]`. `stacked` groups all share the same memory, and use
    different blocks of it. `backwards`: the last layer is the first in memory.
    """

    tp: int
    stages: tuple[tuple[str, ...], ...]
    orders: tuple[str, ...]
    groups: tuple[CacheGroup, ...]
    stacked: bool = False
    backwards: bool = False

    def group_of(self, layer: str) -> CacheGroup:
        return next(group for group in self.groups if layer in group.layers)


class RankMemory:
    """One rank of an engine: its memory, and where everything is in it."""

    def __init__(self, cut: Cut, number: int, model: Sequence[Layer]) -> None:
        self.cut = cut
        self.tp_rank = number % cut.tp
        layers = [_shard(layer, self.tp_rank, cut.tp) for layer in model]
        layers = [layer for layer in layers if layer.name in cut.stages[number // cut.tp]]
        self.layers = layers[::-1] if cut.backwards else layers
        by_group = [
            [layer for layer in self.layers if layer.name in group.layers] for group in cut.groups
        ]
        if cut.stacked:
            most = max(map(len, by_group))
            by_group = [[*some, *_unused(self.layers[0], most - len(some))] for some in by_group]
        self.stores: list[Store] = []
        end = GUARD
        for group, members in zip(cut.groups, by_group, strict=True):
            start = GUARD if cut.stacked else end
            order = cut.orders[number % len(cut.orders)]
            self.stores.append(Store(order, members, group.blocks, start))
            end = max(end, self.stores[-1].end)
        self.memory = np.zeros(end, dtype=np.uint8)

    @property
    def base(self) -> int:
        return self.memory.ctypes.data

    @cached_property
    def layout(self) -> CacheLayout:
        return layout(self.stores, self.base, tp_rank=self.tp_rank)

    def slots(self, layer: str) -> np.ndarray:
        """(block, slot) of each token of the layer's table; block ABSENT if it is not here."""
        group = self.cut.group_of(layer)
        return group.slots(self.tp_rank % group.blocks.stripes)

    def present(self, layer: str) -> np.ndarray:
        """The tokens that this rank has a block for."""
        return np.flatnonzero(self.slots(layer)[:, 0] != ABSENT)

    def offsets(self, layer: str, tokens: np.ndarray) -> list[np.ndarray]:
        """Where these tokens' K and V are in memory, each of shape [token, head, byte]."""
        slots = self.slots(layer)[tokens]
        parts = next(store.parts[layer] for store in self.stores if layer in store.parts)
        by_token = [part[slots[:, 0], :, slots[:, 1]] for part in parts]
        return [part.reshape(*part.shape[:2], math.prod(part.shape[2:])) for part in by_token]

    def put(self, memory: np.ndarray, layer: Layer, tokens: np.ndarray, dense: Dense) -> None:
        """Write these tokens of a layer to their places in `memory`, a copy of this rank's."""
        heads = slice(layer.first_head, layer.first_head + layer.heads)
        for to, part in zip(self.offsets(layer.name, tokens), dense[layer.name], strict=True):
            memory[to] = part[tokens, heads]


def _shard(layer: Layer, rank: int, tp: int) -> Layer:
    first, end = heads_of_rank(rank, tp, layer.heads)
    return replace(layer, first_head=first, heads=end - first)


def _unused(like: Layer, count: int) -> list[Layer]:
    """Places for layers that only another group has."""
    return [replace(like, name=f"{UNUSED}{number}") for number in range(count)]


class Engine:
    """All ranks. Their memory is noise, except where a test writes."""

    def __init__(
        self, cut: Cut, model: Sequence[Layer], rng: np.random.Generator, noise: tuple[int, int]
    ) -> None:
        count = cut.tp * len(cut.stages)
        self.cut = cut
        self.ranks = [RankMemory(cut, number, model) for number in range(count)]
        for rank in self.ranks:
            rank.memory[...] = rng.integers(*noise, len(rank.memory), dtype=np.uint8)

    def write(self, dense: Dense) -> None:
        """Every rank stores its share of all tokens that it has a block for."""
        for rank in self.ranks:
            for layer in rank.layers:
                rank.put(rank.memory, layer, rank.present(layer.name), dense)


def random_dense(
    model: Sequence[Layer], tokens: int, rng: np.random.Generator, below: int
) -> Dense:
    """The whole model's KV; every byte is less than `below`."""
    return {
        layer.name: [
            rng.integers(below, size=(tokens, layer.heads, length), dtype=np.uint8)
            for length in layer.lengths
        ]
        for layer in model
    }


def pieces(rows: Rows, indices: np.ndarray) -> np.ndarray:
    """(row, address, length) of the pieces with these numbers, shape (n, 3)."""
    table = rows.astype(np.int64)
    ends = np.cumsum(table[:, COUNT])
    row = np.searchsorted(ends, indices, side="right")
    within = indices - (ends - table[:, COUNT])[row]
    address = table[row, ADDRESS] + within * table[row, STRIDE]
    return np.stack([row, address, table[row, LENGTH]], axis=1)


def byte_pairs(plan: Plan, reads: Reads) -> np.ndarray:
    """The pairs (local byte, remote byte) that a request copies, shape (n, 2)."""
    local, remote = pieces(plan.local, reads.local), pieces(plan.remote, reads.remote)
    assert np.array_equal(local[:, 2], remote[:, 2]), "pieces of different lengths"
    lengths = local[:, 2]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    pairs = [np.repeat(side[:, 1], lengths) + within for side in (local, remote)]
    return np.stack(pairs, axis=1)


def tile_pairs(tiling: Tiling, pieces: Sequence[Pieces], tile_bytes: int) -> np.ndarray:
    """The same pairs as a kernel finds them, tile after tile, as `geometry.tiles` says."""
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for launch in tiling.launches(pieces, tile_bytes):
        jobs = launch.numbers[: launch.num_jobs * JOB_COLUMNS].reshape(-1, JOB_COLUMNS)
        for tile in range(launch.num_tiles):
            job = jobs[np.flatnonzero(jobs[:, 0] <= tile)[-1]].tolist()
            before, first_row, num_rows, width, *strides, pieces_at, num_pieces = job
            units = np.arange(tile_bytes // launch.unit) + (tile - before) * (
                tile_bytes // launch.unit
            )
            units = units[units < num_pieces * num_rows * width]
            piece, row = units // width // num_rows, units // width % num_rows
            ids = launch.numbers[pieces_at:].reshape(-1)[2 * piece[:, None] + [0, 1]]
            first = tiling.rows[first_row + row] + ids * strides
            first += (units % width * launch.unit)[:, None]
            assert (first % launch.unit == 0).all(), "not aligned"
            within = np.arange(launch.unit)
            pairs.append((first[:, None] + within[None, :, None]).reshape(-1, 2))
    return np.concatenate(pairs)


def copy_pieces(plan: Plan, reads: Reads) -> None:
    """Copy the bytes of a request from address to address, as a link does."""
    local, remote = pieces(plan.local, reads.local), pieces(plan.remote, reads.remote)
    for (_, target, length), (_, source, _) in zip(local.tolist(), remote.tolist(), strict=True):
        ctypes.memmove(target, source, length)


def check_rows(rows: Rows, layout: CacheLayout) -> None:
    """A link takes these rows: each is on the layout's device, and inside one of its spans."""
    assert rows.dtype == np.uint64
    for address, length, device, stride, count in rows.tolist():
        assert device == layout.device
        assert 1 <= length <= (stride if count > 1 else length)
        end = address + (count - 1) * stride + length
        assert any(s.address <= address and end <= s.address + s.length for s in layout.spans)


def runs_within_rows(plan: Plan, reads: Reads) -> int:
    """How many runs are left if pieces merge inside each row, in the order of the indices."""
    follows = np.ones(max(0, len(reads.local) - 1), dtype=bool)
    for side in (pieces(plan.local, reads.local), pieces(plan.remote, reads.remote)):
        row, address, length = side.T
        follows &= (np.diff(row) == 0) & (address[:-1] + length[:-1] == address[1:])
    return len(reads.local) - int(np.count_nonzero(follows))


def fewest_runs(pairs: np.ndarray) -> int:
    """The smallest number of runs that can copy these pairs of bytes."""
    order = np.argsort(pairs[:, 0])
    breaks = (np.diff(pairs[order], axis=0) != 1).any(axis=1)
    return min(1, len(pairs)) + int(np.count_nonzero(breaks))
