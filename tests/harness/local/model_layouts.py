"""Builds the cache layouts of imaginary engines from a few numbers, by vLLM's paging rules.

Tests and benchmarks use it to plan transfers without an engine. Addresses are invented.

Layers        Pipeline stages hold consecutive layers, divided as evenly as vLLM does.
Heads         `tp` ranks divide them evenly. With more ranks than heads, neighbouring ranks hold
              copies of one head. A latent cache (MLA) has one head with content of one part.
Groups        Sliding-window layers have their own block tables, and so have recurrent states, which
              summarise all earlier tokens. vLLM makes all groups of equally many layers. Groups
              share the same memory and use different blocks of it.
States        A state fits into one entry of a block table: entries grow until it does. An entry of
              a group of states is one block of one token.
Memory        One array per rank. Its axes have any order, from the outermost to the innermost:
              L layers, B blocks, H heads, N tokens, C content. V follows K within the content,
              unless the axis 2 separates them; then each layer has its own memory.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from nixl_kv.geometry.layout import (
    ALL_TOKENS,
    STATE_WINDOW,
    CacheLayout,
    Group,
    Memory,
    Part,
    Region,
    Span,
    Stripe,
    check_range,
)
from nixl_kv.geometry.match import ParallelShape
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

MAX_LAYERS: Final = 1 << 14
MAX_PARTS: Final = 2
MAX_ROWS: Final = 8
FEW_MORE: Final = 1.5
"""Below this ratio of two kinds of layers, vLLM pads the smaller kind instead of dividing the
larger one."""


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

    def __post_init__(self) -> None:
        check_range(f"number of units of {self.name}", self.number, high=1 << 16)
        check_range(f"bytes of a unit of {self.name}", self.length, high=1 << 31)
        check_range(f"rows of {self.name}", self.rows, high=MAX_ROWS + 1)

    def units_of_rank(self, rank: int, tp: int) -> Heads:
        """Which units one of `tp` ranks has, as a half-open range."""
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

    def __post_init__(self) -> None:
        check_range("layers", self.layers, high=MAX_LAYERS + 1)
        check_range("kv_heads", self.kv_heads, high=1 << 16)
        check_range("number of parts of content", len(self.content), high=MAX_PARTS + 1)
        for length in self.content:
            check_range("content", length, high=1 << 31)
        for name in ("sliding", "without_kv", "recurrent"):
            layers = getattr(self, name)
            for layer in layers:
                check_range(f"{name} layer", layer, low=0, high=self.layers)
            if len(set(layers)) != len(layers):
                raise ValueError(f"{name} is {layers}; allowed: each layer once")
        if not set(range(self.layers)) - set(self.without_kv):
            raise ValueError("no layer keeps KV; allowed: one or more")
        if both := sorted(set(self.sliding) & set(self.without_kv)):
            raise ValueError(f"sliding layers without KV are {both}; allowed: none")
        if bool(self.recurrent) != bool(self.state):
            raise ValueError(
                f"{len(self.recurrent)} recurrent layers have a state of {len(self.state)} parts; "
                "allowed: both, or neither"
            )
        if bool(self.window) != bool(self.sliding):
            raise ValueError(
                f"window is {self.window} with {len(self.sliding)} sliding layers; "
                "allowed: 1 or more with sliding layers, 0 without"
            )
        check_range("window", self.window, low=0, high=1 << 31)
        if self.window == STATE_WINDOW:
            raise ValueError(f"window is {self.window}; allowed: 0, or 2 or more")

    def groups(self) -> list[tuple[tuple[int, ...], int]]:
        """The layers and the window of each group, which has one block table."""
        others = {*self.sliding, *self.without_kv}
        every = (
            ([layer for layer in range(self.layers) if layer not in others], 0),
            (sorted(self.sliding), self.window),
            (sorted(self.recurrent), STATE_WINDOW),
        )
        kinds = [kind for kind in every if kind[0]]
        kinds.sort(key=lambda kind: kind[0][0])
        fewest, most = min(len(k) for k, _ in kinds), max(len(k) for k, _ in kinds)
        size = most if most < FEW_MORE * fewest else fewest
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
    ones of these. `dcp` ranks with the same heads divide the tokens, `interleave` at a time; 0 is
    an entry.
    """

    tp: int = 1
    pp: int = 1
    block_size: int = 16
    num_blocks: int = 30_000
    order: str = "LBHNC"
    blocks_per_entry: int = 1
    memory: Memory = "VRAM"
    dcp: int = 1
    interleave: int = 0

    def __post_init__(self) -> None:
        ParallelShape(self.tp, self.pp)  # checks them
        check_range("dcp", self.dcp, high=self.tp + 1)
        check_range("interleave", self.interleave, low=0, high=1 << 20)
        check_range("block_size", self.block_size, high=1 << 20)
        check_range("num_blocks", self.num_blocks, high=1 << 31)
        check_range("blocks_per_entry", self.blocks_per_entry, high=1 << 16)
        for name, allowed in (("order", ORDERS), ("memory", ("VRAM", "DRAM"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}"
                )
        if self.num_blocks % self.blocks_per_entry:
            raise ValueError(
                f"num_blocks is {self.num_blocks}; allowed: multiples of blocks_per_entry "
                f"({self.blocks_per_entry})"
            )
        if self.blocks_per_entry > 1 and not self.order.startswith(("LB", "L2B")):
            raise ValueError(
                f"blocks_per_entry is {self.blocks_per_entry}; allowed: 1 where a layer's blocks "
                f"are not in one line (order {self.order})"
            )


def build_layouts(model: ModelShape, engine: EngineShape) -> list[CacheLayout]:
    """The layouts of all ranks, in rank order: `pp_rank * tp + tp_rank`.

    Raises:
        ValueError: if the model cannot be divided like that.
    """
    if model.state and engine.order not in WHOLE:
        allowed = ", ".join(WHOLE)
        raise ValueError(f"order is {engine.order!r}; allowed where layers have states: {allowed}")
    return [
        _RankArray(model, _enlarged(model, engine), stage, rank).layout()
        for stage in pipeline_stages(model.layers, engine.pp)
        for rank in range(engine.tp)
    ]


def _enlarged(model: ModelShape, engine: EngineShape) -> EngineShape:
    """With entries that are as large as a state, on all ranks."""
    if not model.state:
        return engine
    heads = heads_of_rank(0, engine.tp, model.kv_heads)
    entry = engine.block_size * engine.blocks_per_entry * sum(model.content) * (heads[1] - heads[0])
    times = -(-_num_state_bytes(model.state, engine.tp) // entry)
    # As many bytes as were asked for, and one entry at the least.
    entries = max(engine.num_blocks // engine.blocks_per_entry // times, 1)
    if engine.order.startswith("B"):  # blocks are not parts of entries
        return replace(engine, block_size=engine.block_size * times, num_blocks=entries)
    per_entry = engine.blocks_per_entry * times
    return replace(engine, blocks_per_entry=per_entry, num_blocks=entries * per_entry)


def _num_state_bytes(state: Sequence[StatePart], tp: int) -> int:
    """Of one rank."""
    units = [part.units_of_rank(0, tp) for part in state]
    return sum(
        (u[1] - u[0]) * part.rows * part.length for u, part in zip(units, state, strict=True)
    )


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


@dataclass(frozen=True)
class _RankArray:
    """The memory of one rank. All groups begin at the same address."""

    model: ModelShape
    engine: EngineShape
    stage: range
    rank: int

    def layout(self) -> CacheLayout:
        engine = self.engine
        sizes = engine.block_size, engine.num_blocks, engine.blocks_per_entry
        entries = engine.num_blocks // engine.blocks_per_entry
        groups = tuple(
            Group(1, entries, 1, self.states(held), window)
            if window == STATE_WINDOW
            else Group(*sizes, self.regions(held), window, self.stripe)
            for held, window in self.groups
        )
        return CacheLayout(groups, engine.memory, 0, self.spans())

    @property
    def stripe(self) -> Stripe:
        engine = self.engine
        copies = max(1, engine.tp // self.model.kv_heads)
        if copies % engine.dcp:
            raise ValueError(
                f"dcp is {engine.dcp}; allowed: what divides the {copies} ranks with the same heads"
            )
        width = engine.interleave or engine.block_size * engine.blocks_per_entry
        return Stripe(engine.dcp, self.rank % engine.dcp, width) if engine.dcp > 1 else ALL_TOKENS

    @property
    def shard(self) -> Heads:
        return heads_of_rank(self.rank, self.engine.tp, self.model.kv_heads)

    @property
    def groups(self) -> list[tuple[tuple[int, ...], int]]:
        """The model's groups, with the layers of this stage only."""
        return [
            (tuple(layer for layer in layers if layer in self.stage), window)
            for layers, window in self.model.groups()
        ]

    @property
    def widest(self) -> int:
        return max(len(layers) for layers, _ in self.groups)

    @property
    def order(self) -> str:
        """The engine's order; content of one piece has no axis to separate K from V."""
        order = self.engine.order
        return order if len(self.model.content) > 1 else order.replace("2", "")

    def strides(self, layers: int) -> dict[str, int]:
        """In bytes, for a group of so many layers. All groups have the same block stride."""
        model, engine = self.model, self.engine
        content = max(model.content) if "2" in self.order else sum(model.content)
        sizes = {"L": layers, "B": engine.num_blocks, "2": 2, "N": engine.block_size, "C": content}
        sizes["H"] = self.shard[1] - self.shard[0]
        steps = itertools.accumulate((sizes[axis] for axis in self.order[:0:-1]), int.__mul__)
        strides = dict(zip(self.order[::-1], (1, *steps), strict=True))
        if self.order.startswith("B"):
            strides["B"] = strides["B"] // layers * self.widest
        return strides

    def regions(self, layers: tuple[int, ...]) -> tuple[Region, ...]:
        """A region for each layer of a group; a stage may have no layer of it."""
        if not layers:
            return ()
        strides, parts = self.strides(len(layers)), self.parts
        return tuple(
            Region(
                layer=layer_name(layer),
                base=BASE + place * strides["L"],
                block_stride=strides["B"],
                head_stride=strides["H"],
                token_stride=strides["N"],
                first_head=self.shard[0],
                num_heads=self.shard[1] - self.shard[0],
                parts=parts,
                element=self.model.element,
            )
            for place, layer in enumerate(layers)
        )

    def states(self, layers: tuple[int, ...]) -> tuple[Region, ...]:
        """A region for each part of the state of each layer of a group."""
        strides = self.strides(len(layers)) if layers else {}
        page = strides.get("B", 0)
        if not self.engine.order.startswith("B"):
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

    @property
    def parts(self) -> tuple[Part, ...]:
        """K, and V if there is one."""
        key, *value = self.model.content
        distance = self.strides(self.widest)["2"] if "2" in self.order else key
        return (Part(0, key), *(Part(distance, length) for length in value))

    def spans(self) -> tuple[Span, ...]:
        """One span for all layers of a packed order, else one per layer."""
        strides = self.strides(self.widest)
        if self.order.startswith("B"):
            return (Span(BASE, self.engine.num_blocks * strides["B"]),)
        if self.engine.order in PACKED:
            return (Span(BASE, self.widest * strides["L"]),)
        return tuple(Span(BASE + n * strides["L"], strides["L"]) for n in range(self.widest))
