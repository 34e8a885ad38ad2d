"""The cache layouts of engines that need not exist, from a few numbers, by vLLM's rules.

Layers        pipeline stages have them in order, divided as evenly as vLLM does.
Heads         `tp` ranks divide them evenly. Where there are more ranks than heads, neighbouring
              ranks have copies of one head. A latent cache is one head with content of one piece.
Groups        layers with a sliding window have block tables of their own. vLLM makes all groups of
              equally many layers. They share the same memory and use different blocks of it.
Memory        one array for a rank. Its axes have any order, from the outermost to the innermost:
              L layers, B blocks, H heads, N tokens, C content. V follows K inside the content,
              unless the axis 2 separates them; then each layer has memory of its own.

The addresses are made up.
"""

import itertools
from dataclasses import dataclass
from typing import Final

from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Part, Region, Span, check_range
from nixl_kv.geometry.ranks import ParallelShape
from nixl_kv.geometry.runs import Heads

PACKED: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's orders, with K and V in one content."""

APART: Final = ("L2BHNC", "L2BNHC", "LB2HNC", "LB2NHC")
"""Older orders: K and V in two halves of a layer, or side by side in each block."""

ORDERS: Final = PACKED + APART

BASE: Final = 1 << 32
"""The address of each rank's memory."""

MAX_LAYERS: Final = 1 << 14
MAX_PARTS: Final = 2
FEW_MORE: Final = 1.5
"""Below this ratio of two kinds of layers, vLLM pads the smaller kind, and does not divide the
larger one."""


@dataclass(frozen=True)
class ModelShape:
    """A model's KV.

    `content` is the bytes of K and of V of one head of one token, or of one latent piece. The
    layers whose numbers are in `sliding` have a window of `window` tokens; the others have none.
    """

    layers: int
    kv_heads: int
    content: tuple[int, ...]
    element: str
    window: int = 0
    sliding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range("layers", self.layers, high=MAX_LAYERS + 1)
        check_range("kv_heads", self.kv_heads, high=1 << 16)
        check_range("number of parts of content", len(self.content), high=MAX_PARTS + 1)
        for length in self.content:
            check_range("content", length, high=1 << 31)
        for layer in self.sliding:
            check_range("sliding layer", layer, low=0, high=self.layers)
        if len(set(self.sliding)) != len(self.sliding):
            raise ValueError(f"sliding is {self.sliding}; allowed: each layer once")
        if bool(self.window) != bool(self.sliding):
            raise ValueError(
                f"window is {self.window} with {len(self.sliding)} sliding layers; "
                "allowed: 1 or more with sliding layers, 0 without"
            )
        check_range("window", self.window, low=0, high=1 << 31)

    def groups(self) -> list[tuple[tuple[int, ...], int]]:
        """The layers that share a block table, and the window of each such group."""
        sliding = set(self.sliding)
        full = [layer for layer in range(self.layers) if layer not in sliding]
        kinds = [kind for kind in ((full, 0), (sorted(sliding), self.window)) if kind[0]]
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
    """How an engine is divided. `num_blocks` counts blocks of `block_size` tokens.

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

    def __post_init__(self) -> None:
        ParallelShape(self.tp, self.pp)  # checks them
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
    shards = [heads_of_rank(rank, engine.tp, model.kv_heads) for rank in range(engine.tp)]
    return [
        _RankArray(model, engine, stage, shard).layout()
        for stage in pipeline_stages(model.layers, engine.pp)
        for shard in shards
    ]


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
    """The name that both engines have for a layer."""
    return f"layer.{number}"


@dataclass(frozen=True)
class _RankArray:
    """One rank's memory; all groups begin at the same address."""

    model: ModelShape
    engine: EngineShape
    stage: range
    shard: Heads

    def layout(self) -> CacheLayout:
        """The layout of the whole array."""
        engine = self.engine
        sizes = engine.block_size, engine.num_blocks, engine.blocks_per_entry
        groups = tuple(Group(*sizes, self.regions(held), window) for held, window in self.groups)
        return CacheLayout(groups, engine.memory, 0, self.spans())

    @property
    def groups(self) -> list[tuple[tuple[int, ...], int]]:
        """The model's groups, with the layers of this stage only."""
        return [
            (tuple(layer for layer in layers if layer in self.stage), window)
            for layers, window in self.model.groups()
        ]

    @property
    def widest(self) -> int:
        """The number of layers in the largest group."""
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
