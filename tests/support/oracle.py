"""What a plan has to do, byte by byte, from nothing but numpy's own reshape and transpose.

A `Store` says where each byte of one cache group stands on one rank, in a physical order: the
letters of one big array from the outermost axis to the innermost. L layers, B blocks, H heads, N
tokens, C content; with a "2" K and V stand apart, without one V follows K inside of C. T stands
for a block of one head with K transposed: K as [C, N], then V as [N, C].

An `Engine` is a whole model's KV cut for the ranks of an engine: real memory, filled from a dense
array for each layer and part, of shape [token, head, byte].
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.plan import Plan, Reads, Rows

APART = ("L2BHNC", "L2BNHC", "LB2HNC", "LB2NHC")
TRANSPOSED = ("LBHT", "BLHT", "BHLT", "LHBT")
ABSENT = -1
IDLE = "idle."  # begins the name of a place that no layer takes
GUARD = 5  # idle bytes between stores, so that no layer's end meets another store's start

Dense = Mapping[str, Sequence[np.ndarray]]


@dataclass(frozen=True)
class Layer:
    """One layer, of the model or as one rank holds it. `value` 0: one part only."""

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
    """How a group's memory is cut. Behind each content and each block some bytes may lie idle."""

    count: int = 1
    tokens: int = 1
    per_entry: int = 1
    pad: int = 0
    gap: int = 0


class Store:
    """Where each byte of one group stands: `parts[name]` has for K and for V the offsets.

    Their shape is [block, head, token, piece, byte]. Layers of different sizes stand side by side
    in each block where the order begins with "BL", and apart from each other in any other order.
    """

    def __init__(self, order: str, layers: Sequence[Layer], blocks: Blocks, start: int = 0) -> None:
        self.layers = tuple(layers)
        self.blocks = blocks
        self.start = self.end = start
        self.arrays: dict[str, np.ndarray] = {}  # as they lie in memory, idle content included
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
        """New offsets, shape (count, size), each chunk followed by the gap."""
        padded = size + self.blocks.gap
        start, self.end = self.end, self.end + count * padded + GUARD
        return np.arange(start, start + count * padded).reshape(count, padded)[:, :size]

    def _add_array(self, order: str, layers: Sequence[Layer]) -> None:
        """One array for all of the layers. A layer of one part has no axis to tell K from V."""
        if not layers[0].value:
            order = order.replace("2", "").replace("T", "NC")
        place, split = order.index("L"), order.index("B") + 1
        lengths = self._lengths(order.replace("L", ""), layers[0])
        lengths.insert(place, len(layers))
        chunks = self._chunks(int(np.prod(lengths[:split])), int(np.prod(lengths[split:])))
        by_layer = np.moveaxis(chunks.reshape(lengths), place, 0)
        for layer, numbers in zip(layers, by_layer, strict=True):
            self._add_layer(layer, order.replace("L", ""), numbers)

    def _add_pages(self, order: str, layers: Sequence[Layer]) -> None:
        """One page for each block, in which the layers follow each other."""
        letters = [order[2:] if layer.value else order[2:].replace("T", "NC") for layer in layers]
        inner = list(map(self._lengths, letters, layers))
        edges = np.cumsum([0, *(int(np.prod(lengths)) for lengths in inner)]).tolist()
        pages = self._chunks(self.blocks.count, edges[-1])
        for number, layer in enumerate(layers):
            page = pages[:, edges[number] : edges[number + 1]]
            numbers = page.reshape(self.blocks.count, *inner[number])
            self._add_layer(layer, "B" + letters[number], numbers)

    def _add_layer(self, layer: Layer, letters: str, numbers: np.ndarray) -> None:
        self.arrays[layer.name] = numbers
        key, end = layer.key, layer.key + layer.value
        wanted = next(axes for axes in ("BHNC", "2BHNC", "BHT") if set(axes) == set(letters))
        numbers = numbers.transpose([letters.index(letter) for letter in wanted])
        if wanted == "2BHNC":
            found = [numbers[0, ..., None, :key], numbers[1, ..., None, : layer.value]]
        elif wanted == "BHNC":
            found = [numbers[..., None, :key], numbers[..., None, key:end]]
        else:
            found = self._transposed(layer, numbers)
        self.parts[layer.name] = found[: len(layer.lengths)]

    def _transposed(self, layer: Layer, numbers: np.ndarray) -> list[np.ndarray]:
        """K's pieces are elements: of two bytes, where they are even."""
        tokens, element = self.blocks.tokens, 1 if layer.key % 2 else 2
        keys, values = np.split(numbers, [layer.key * tokens], axis=-1)
        outer = numbers.shape[:2]
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


def layout(stores: Sequence[Store], base: int, *, device: int = 0) -> CacheLayout:
    """One rank; each store's memory is registered in one piece."""
    spans = {Span(base + store.start, store.end - store.start) for store in stores if store.parts}
    return CacheLayout(
        tuple(_group(store, base) for store in stores),
        "uint8",
        "DRAM",
        device,
        tuple(sorted(spans, key=lambda span: span.address)),
    )


def _group(store: Store, base: int) -> Group:
    layers = [layer for layer in store.layers if not layer.name.startswith(IDLE)]
    blocks, window = store.blocks, max((layer.window for layer in layers), default=0)
    regions = tuple(store.region(layer, base) for layer in layers)
    return Group(blocks.tokens, blocks.count, blocks.per_entry, regions, window)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table: here one request's, from its first token on."""

    layers: tuple[str, ...]
    blocks: Blocks
    table: tuple[int, ...]

    @property
    def entry_size(self) -> int:
        return self.blocks.tokens * self.blocks.per_entry

    @cached_property
    def spots(self) -> np.ndarray:
        """(block, slot) of each token of the table, shape (n, 2); block -1 where it is absent."""
        found = [
            (ABSENT if entry == ABSENT else entry * self.blocks.per_entry + block, slot)
            for entry in self.table
            for block in range(self.blocks.per_entry)
            for slot in range(self.blocks.tokens)
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    @property
    def present(self) -> np.ndarray:
        """The tokens that have a block."""
        return np.flatnonzero(self.spots[:, 0] != ABSENT)


@dataclass(frozen=True)
class Cut:
    """How an engine is cut: `stages` are the names of each pipeline stage's layers.

    Rank r has `orders[r % len(orders)]`. Groups that are `stacked` all lie in the same memory, and
    use different blocks of it. `backwards`: layers stand in memory from the last one on.
    """

    tp: int
    stages: tuple[tuple[str, ...], ...]
    orders: tuple[str, ...]
    groups: tuple[CacheGroup, ...]
    stacked: bool = False
    backwards: bool = False

    def group_of(self, layer: str) -> CacheGroup:
        return next(group for group in self.groups if layer in group.layers)


def heads_of(rank: int, tp: int, heads: int) -> tuple[int, int]:
    """(first, number) of the heads of one of `tp` ranks: cut, or copied where they are too few."""
    if tp <= heads:
        return rank * (heads // tp), heads // tp
    return rank // (tp // heads), 1


class Rank:
    """One rank of an engine: its memory, and where everything stands in it."""

    def __init__(self, cut: Cut, number: int, model: Sequence[Layer]) -> None:
        self.cut = cut
        held = [_held(layer, number % cut.tp, cut.tp) for layer in model]
        held = [layer for layer in held if layer.name in cut.stages[number // cut.tp]]
        held = held[::-1] if cut.backwards else held
        by_group = [[layer for layer in held if layer.name in g.layers] for g in cut.groups]
        if cut.stacked:
            most = max(map(len, by_group))
            by_group = [[*found, *_idle(held[0], most - len(found))] for found in by_group]
        self.stores: list[Store] = []
        end = GUARD
        for group, layers in zip(cut.groups, by_group, strict=True):
            start = GUARD if cut.stacked else end
            order = cut.orders[number % len(cut.orders)]
            self.stores.append(Store(order, layers, group.blocks, start))
            end = max(end, self.stores[-1].end)
        self.memory = np.zeros(end, dtype=np.uint8)
        self.layers = held

    @property
    def base(self) -> int:
        return self.memory.ctypes.data

    @cached_property
    def layout(self) -> CacheLayout:
        return layout(self.stores, self.base)

    def offsets(self, layer: str, tokens: np.ndarray) -> list[np.ndarray]:
        """Where these tokens' K and V stand in memory, each of shape [token, head, byte]."""
        spots = self.cut.group_of(layer).spots[tokens]
        parts = next(store.parts[layer] for store in self.stores if layer in store.parts)
        found = [part[spots[:, 0], :, spots[:, 1]] for part in parts]
        return [part.reshape(*part.shape[:2], -1) for part in found]

    def put(self, memory: np.ndarray, layer: Layer, tokens: np.ndarray, dense: Dense) -> None:
        """Write these tokens of a layer where they stand in `memory`, a copy of this rank's."""
        heads = slice(layer.first_head, layer.first_head + layer.heads)
        for to, part in zip(self.offsets(layer.name, tokens), dense[layer.name], strict=True):
            memory[to] = part[tokens, heads]

    @cached_property
    def owners(self) -> np.ndarray:
        """The block that each byte of the memory is of."""
        found = np.full(len(self.memory), ABSENT)
        for store in self.stores:
            for part in itertools.chain.from_iterable(store.parts.values()):
                found[part] = np.arange(len(part)).reshape(-1, 1, 1, 1, 1)
        return found


def _held(layer: Layer, rank: int, tp: int) -> Layer:
    first, heads = heads_of(rank, tp, layer.heads)
    return replace(layer, first_head=first, heads=heads)


def _idle(like: Layer, count: int) -> list[Layer]:
    """Places for layers that only another group has."""
    return [replace(like, name=f"{IDLE}{number}") for number in range(count)]


class Engine:
    """All ranks. Their memory is noise, but for what is written."""

    def __init__(
        self, cut: Cut, model: Sequence[Layer], rng: np.random.Generator, noise: tuple[int, int]
    ) -> None:
        count = cut.tp * len(cut.stages)
        self.cut = cut
        self.ranks = [Rank(cut, number, model) for number in range(count)]
        for rank in self.ranks:
            rank.memory[...] = rng.integers(*noise, len(rank.memory), dtype=np.uint8)

    def write(self, dense: Dense) -> None:
        """Every rank keeps its part of all tokens that it has a block for."""
        for rank in self.ranks:
            for layer in rank.layers:
                rank.put(rank.memory, layer, self.cut.group_of(layer.name).present, dense)


def dense(model: Sequence[Layer], tokens: int, rng: np.random.Generator, below: int) -> Dense:
    """The whole model's KV; no byte is `below` or more."""
    return {
        layer.name: [
            rng.integers(below, size=(tokens, layer.heads, length), dtype=np.uint8)
            for length in layer.lengths
        ]
        for layer in model
    }


def named(rows: Rows, indices: np.ndarray) -> np.ndarray:
    """(row, address, length) of the pieces with these numbers, shape (n, 3)."""
    table = rows.astype(np.int64)
    ends = np.cumsum(table[:, 4])
    row = np.searchsorted(ends, indices, side="right")
    within = indices - (ends - table[:, 4])[row]
    return np.stack([row, table[row, 0] + within * table[row, 3], table[row, 1]], axis=1)


def moved(plan: Plan, reads: Reads) -> np.ndarray:
    """The pairs (local byte, remote byte) that a request copies, shape (n, 2)."""
    local, remote = named(plan.local, reads.local), named(plan.remote, reads.remote)
    assert np.array_equal(local[:, 2], remote[:, 2]), "pieces of different lengths"
    lengths = local[:, 2]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    pairs = [np.repeat(side[:, 1], lengths) + within for side in (local, remote)]
    return np.stack(pairs, axis=1)


def runs_within_rows(plan: Plan, reads: Reads) -> int:
    """What merging makes of the named pieces, in the order they are named, inside each row."""
    follows = np.ones(max(0, len(reads.local) - 1), dtype=bool)
    for side in (named(plan.local, reads.local), named(plan.remote, reads.remote)):
        row, address, length = side.T
        follows &= (np.diff(row) == 0) & (address[:-1] + length[:-1] == address[1:])
    return len(reads.local) - int(np.count_nonzero(follows))


def fewest_runs(pairs: np.ndarray, owners: np.ndarray | None = None) -> int:
    """In how few runs these pairs of bytes can be copied at all.

    With `owners`, the numbers of each pair's blocks, a run does not reach from one block to the
    next one: how few they are where no two blocks are neighbours.
    """
    order = np.argsort(pairs[:, 0])
    breaks = (np.diff(pairs[order], axis=0) != 1).any(axis=1)
    if owners is not None:
        breaks |= (np.diff(owners[order], axis=0) != 0).any(axis=1)
    return min(1, len(pairs)) + int(np.count_nonzero(breaks))
