"""Builds the cache layouts of imaginary engines from a few numbers, by vLLM's paging rules.

Tests and benchmarks use it to plan transfers without an engine. Addresses are invented.

Sliding-window layers and recurrent states have block tables of their own. vLLM makes all groups of
equally many layers; they share the same memory and use different blocks of it. Entries grow until a
state fits into one. An entry of a group of states is one block of one token.

A rank's memory is one array. Its axes have any order, from the outermost to the innermost: L
layers, B blocks, H heads, N tokens, C content. V follows K within the content, unless the axis 2
separates them; then each layer has its own memory. A latent cache (MLA) has one head, and content
of one part.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from nixl_kv.geometry.layout import (
    STATE_WINDOW,
    CacheLayout,
    Group,
    Memory,
    Part,
    Region,
    Span,
    check_range,
)
from nixl_kv.geometry.plan import Heads

WHOLE: Final = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Orders that keep a layer's block contiguous, which a recurrent state needs."""

PACKED: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's orders; V follows K within the content."""

APART: Final = ("L2BHNC", "L2BNHC", "LB2HNC", "LB2NHC")
"""Older orders: K and V in two halves of a layer, or next to each other in each block."""

ORDERS: Final = PACKED + APART

BASE: Final = 1 << 32
"""The address of each rank's memory."""


@dataclass(frozen=True)
class StatePart:
    """A part of a layer's state: `number` units, of `length` bytes in each of its `rows` rows.

    Ranks divide the units evenly; or all of them have all units, if it `is_copied`. Parts that
    follow each other and have equally many rows are side by side in each row.
    """

    name: str
    number: int
    length: int
    element: str
    rows: int = 1
    is_copied: bool = False

    def units_of_rank(self, rank: int, tp: int) -> Heads:
        if self.is_copied:
            return 0, self.number
        if self.number % tp:
            raise ValueError(f"tp is {tp}; allowed: divisors of {self.number} ({self.name})")
        each = self.number // tp
        return rank * each, (rank + 1) * each


@dataclass(frozen=True)
class ModelShape:
    """A model's KV, and the state of its recurrent layers.

    `content` is the bytes of K and of V of one head of one token, or of one latent piece. The
    layers whose numbers are in `sliding` have a window of `window` tokens; the others have none.
    Those in `without_kv` keep no KV. Those in `recurrent` have a `state`, with KV or without.
    """

    layers: int
    kv_heads: int
    content: tuple[int, ...]
    element: str
    window: int = 0
    sliding: tuple[int, ...] = ()
    without_kv: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()
    state: tuple[StatePart, ...] = ()

    def groups(self) -> list[tuple[tuple[int, ...], int]]:
        """The layers and the window of each group, which has one block table."""
        others = {*self.sliding, *self.without_kv}
        every = (
            ([layer for layer in range(self.layers) if layer not in others], 0),
            (sorted(self.sliding), self.window),
            (sorted(self.recurrent), STATE_WINDOW),
        )
        kinds = sorted((kind for kind in every if kind[0]), key=lambda kind: kind[0][0])
        size = min(len(layers) for layers, _ in kinds)
        counts = [-(-len(layers) // size) for layers, _ in kinds]
        return [
            (tuple(layers[first::count]), window)
            for (layers, window), count in zip(kinds, counts, strict=True)
            for first in range(count)
        ]


@dataclass(frozen=True)
class EngineShape:
    """The parallel shape and the cache of an engine. A block has `block_size` tokens.

    Where vLLM's block table counts larger blocks, each entry is `blocks_per_entry` consecutive
    ones of these.
    """

    tp: int = 1
    pp: int = 1
    block_size: int = 16
    num_blocks: int = 30_000
    order: str = "LBHNC"
    blocks_per_entry: int = 1
    memory: Memory = "VRAM"


def build_layouts(model: ModelShape, engine: EngineShape) -> list[CacheLayout]:
    """The layouts of all ranks, in rank order: `pp_rank * tp + tp_rank`.

    Raises:
        ValueError: if the model cannot be divided like that.
    """
    orders = WHOLE if model.state else ORDERS
    if engine.order not in orders:
        raise ValueError(f"order is {engine.order!r}; allowed: {', '.join(orders)}")
    return [
        _RankArray(model, _enlarged(model, engine), stage, rank).layout()
        for stage in pipeline_stages(model.layers, engine.pp)
        for rank in range(engine.tp)
    ]


def _enlarged(model: ModelShape, engine: EngineShape) -> EngineShape:
    """With entries that are as large as a state, on all ranks."""
    if not model.state:
        return engine
    first, end = heads_of_rank(0, engine.tp, model.kv_heads)
    entry = engine.block_size * engine.blocks_per_entry * sum(model.content) * (end - first)
    units = [part.units_of_rank(0, engine.tp)[1] for part in model.state]
    state = sum(n * p.rows * p.length for n, p in zip(units, model.state, strict=True))
    times = -(-state // entry)
    # As many bytes as were asked for, and one entry at the least.
    entries = max(engine.num_blocks // engine.blocks_per_entry // times, 1)
    if engine.order.startswith("B"):  # blocks are not parts of entries
        return replace(engine, block_size=engine.block_size * times, num_blocks=entries)
    per_entry = engine.blocks_per_entry * times
    return replace(engine, blocks_per_entry=per_entry, num_blocks=entries * per_entry)


def heads_of_rank(rank: int, tp: int, kv_heads: int) -> Heads:
    """Which heads one of `tp` ranks has, as a half-open range."""
    if kv_heads % tp == 0:
        each = kv_heads // tp
        return rank * each, (rank + 1) * each
    if tp % kv_heads == 0:
        head = rank * kv_heads // tp
        return head, head + 1
    raise ValueError(f"tp is {tp}; allowed: divisors and multiples of kv_heads ({kv_heads})")


def pipeline_stages(layers: int, pp: int) -> list[range]:
    """The layers of each pipeline stage.

    Where the layers do not divide evenly, some stages before the last one have one more, the later
    ones first. The last stage also computes the model's head, and the first one its embedding.
    """
    check_range("pp", pp, high=layers + 1)
    each, more = divmod(layers, pp)
    sizes = [each + (pp - 1 - more <= stage < pp - 1) for stage in range(pp)]
    edges = [0, *itertools.accumulate(sizes)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def layer_name(number: int) -> str:
    return f"layer.{number}"


class _RankArray:
    """The memory of one rank. All groups begin at the same address."""

    def __init__(self, model: ModelShape, engine: EngineShape, stage: range, rank: int) -> None:
        self.model = model
        self.engine = engine
        self.rank = rank
        self.first_head, end = heads_of_rank(rank, engine.tp, model.kv_heads)
        self.num_heads = end - self.first_head
        self.groups = [
            (tuple(layer for layer in layers if layer in stage), window)
            for layers, window in model.groups()
        ]
        self.widest = max(len(layers) for layers, _ in self.groups)
        # Content of one piece has no axis to separate K from V.
        self.order = engine.order if len(model.content) > 1 else engine.order.replace("2", "")
        self.strides = self.strides_of(self.widest)

    def layout(self) -> CacheLayout:
        engine = self.engine
        sizes = engine.block_size, engine.num_blocks, engine.blocks_per_entry
        entries = engine.num_blocks // engine.blocks_per_entry
        groups = tuple(
            Group(1, entries, 1, self.states(held), window)
            if window == STATE_WINDOW
            else Group(*sizes, self.regions(held), window)
            for held, window in self.groups
        )
        return CacheLayout(groups, engine.memory, 0, self.spans())

    def strides_of(self, layers: int) -> dict[str, int]:
        """Strides in bytes, for a group of `layers` layers. All have the same block stride."""
        model, engine = self.model, self.engine
        content = max(model.content) if "2" in self.order else sum(model.content)
        sizes = {"L": layers, "B": engine.num_blocks, "2": 2, "N": engine.block_size, "C": content}
        sizes["H"] = self.num_heads
        steps = itertools.accumulate((sizes[axis] for axis in self.order[:0:-1]), int.__mul__)
        strides = dict(zip(self.order[::-1], (1, *steps), strict=True))
        if self.order.startswith("B") and layers:
            strides["B"] = strides["B"] // layers * self.widest
        return strides

    def regions(self, layers: tuple[int, ...]) -> tuple[Region, ...]:
        """A region for each layer of a group; a stage may have no layer of it."""
        strides = self.strides_of(len(layers))
        key, *value = self.model.content
        distance = self.strides["2"] if "2" in self.order else key
        return tuple(
            Region(
                layer=layer_name(layer),
                base=BASE + place * strides["L"],
                block_stride=strides["B"],
                head_stride=strides["H"],
                token_stride=strides["N"],
                first_head=self.first_head,
                num_heads=self.num_heads,
                parts=(Part(0, key), *(Part(distance, length) for length in value)),
                element=self.model.element,
            )
            for place, layer in enumerate(layers)
        )

    def states(self, layers: tuple[int, ...]) -> tuple[Region, ...]:
        """A region for each part of the state of each layer of a group."""
        strides = self.strides_of(len(layers))
        page = strides["B"]
        if not self.order.startswith("B"):
            page *= self.engine.blocks_per_entry
        return tuple(
            Region(
                layer=f"{layer_name(layer)} {part.name}",
                base=BASE + place * strides["L"],
                block_stride=page,
                head_stride=part.length,
                token_stride=page,  # there is one
                first_head=units[0],
                num_heads=units[1] - units[0],
                parts=rows,
                element=part.element,
            )
            for place, layer in enumerate(layers)
            for part, units, rows in self.state_parts()
        )

    def state_parts(self) -> Iterator[tuple[StatePart, Heads, tuple[Part, ...]]]:
        """Each part of a state, with its units on this rank, and where the first one's rows are."""
        offset, tp = 0, self.engine.tp
        for num_rows, together in itertools.groupby(self.model.state, lambda part: part.rows):
            side_by_side = [(part, part.units_of_rank(self.rank, tp)) for part in together]
            lengths = [(units[1] - units[0]) * part.length for part, units in side_by_side]
            before = (0, *itertools.accumulate(lengths))
            for (part, units), start in zip(side_by_side, before, strict=False):
                places = (offset + start + row * before[-1] for row in range(num_rows))
                yield part, units, tuple(Part(place, part.length) for place in places)
            offset += num_rows * before[-1]

    def spans(self) -> tuple[Span, ...]:
        """One span for all layers of a packed order, else one per layer."""
        step = self.strides["L"]
        if self.order.startswith("B"):
            return (Span(BASE, self.engine.num_blocks * self.strides["B"]),)
        if self.engine.order in PACKED:
            return (Span(BASE, self.widest * step),)
        return tuple(Span(BASE + place * step, step) for place in range(self.widest))
