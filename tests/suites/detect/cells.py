"""The shapes between which loads are verified: how two engines divide and store a model's KV."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from harness.local.model_layouts import (
    EngineShape,
    ModelShape,
    StatePart,
    build_layouts,
)
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region
from nixl_kv.geometry.match import ParallelShape

ELEMENT: Final = 2
"""Bytes of what is moved when K is transposed."""

TOKENS: Final = 41


@dataclass(frozen=True)
class Cut:
    """How an engine divides and stores a cache.

    `transposed`: K has its tokens innermost, and a state its rows within each channel.
    """

    tp: int = 1
    pp: int = 1
    block: int = 4
    order: str = "LBHNC"
    per_entry: int = 1
    transposed: bool = False

    @property
    def shape(self) -> ParallelShape:
        """How many ranks."""
        return ParallelShape(self.tp, self.pp)

    @property
    def entry_size(self) -> int:
        """Tokens per entry of a block table."""
        return self.block * self.per_entry

    def num_entries(self, tokens: int) -> int:
        """How many entries the block table of so many tokens has."""
        return -(-tokens // self.entry_size)

    def layouts(self, model: ModelShape, entries: int) -> list[CacheLayout]:
        """The layouts of all ranks, for so many entries in all, at made-up addresses."""
        shape = EngineShape(
            tp=self.tp,
            pp=self.pp,
            block_size=self.block,
            num_blocks=entries * self.per_entry,
            order=self.order,
            blocks_per_entry=self.per_entry,
            memory="DRAM",
        )
        layouts = build_layouts(model, shape)
        return [_transpose(layout) for layout in layouts] if self.transposed else layouts


@dataclass(frozen=True)
class Cell:
    """A model's KV, and how prefill and decode divide it; decode has the first `hit` tokens."""

    name: str
    prefill: Cut
    decode: Cut
    model: ModelShape
    tokens: int = TOKENS
    hit: int = 0


def _transpose(layout: CacheLayout) -> CacheLayout:
    """The same memory, but in each head's block K is [bytes, tokens], and V follows.

    Rows of a state are together for each two bytes.
    """
    groups = tuple(
        replace(
            group,
            regions=tuple(
                _transpose_state(one) if group.keeps_states else _transpose_region(one, group)
                for one in group.regions
            ),
        )
        for group in layout.groups
    )
    return replace(layout, groups=groups)


def _transpose_state(region: Region) -> Region:
    """The first row's offset says how many bytes are before it in each row, and so in all."""
    rows, length = len(region.parts), region.parts[0].length
    if rows == 1:
        return region
    begin = region.parts[0].offset * rows
    parts = tuple(
        Part(begin + row * ELEMENT, ELEMENT, length // ELEMENT, rows * ELEMENT)
        for row in range(rows)
    )
    return replace(region, head_stride=length * rows, parts=parts)


def _transpose_region(region: Region, group: Group) -> Region:
    key, value = (part.length for part in region.parts)
    size = group.block_size
    parts = (
        Part(0, ELEMENT, key // ELEMENT, size * ELEMENT, token_stride=ELEMENT),
        Part(key * size, value, token_stride=value),
    )
    return replace(region, parts=parts)


def _model(heads: int = 2, content: tuple[int, ...] = (8, 8)) -> ModelShape:
    return ModelShape(2, heads, content, "uint8")


TP1: Final = Cut()
ONE_HEAD: Final = _model(1)
TWO_HEADS: Final = _model()
FOUR_HEADS: Final = _model(4)
SLIDING: Final = ModelShape(4, 2, (8, 8), "uint8", window=10, sliding=(0, 2))

STATES: Final = ModelShape(
    4,
    4,
    (8, 8),
    "uint8",
    without_kv=(0, 1, 2),
    recurrent=(0, 1, 2),
    state=(
        StatePart("query", 2, 4, "state", rows=3),
        StatePart("key", 2, 4, "state", rows=3),
        StatePart("value", 4, 6, "state", rows=3),
        StatePart("state", 4, 32, "state"),
    ),
)
"""Three recurrent layers with a convolution of three projections, and one with KV."""
COPIES: Final = replace(
    STATES,
    without_kv=(),
    state=(
        StatePart("x", 4, 6, "state", rows=3),
        StatePart("B", 1, 8, "state", rows=3, is_copied=True),
        StatePart("C", 1, 8, "state", rows=3, is_copied=True),
        StatePart("state", 4, 16, "state"),
    ),
)
"""Layers with KV and a state, of which all ranks have a part."""

CELLS: Final[Sequence[Cell]] = (
    Cell("same", TP1, TP1, TWO_HEADS),
    Cell("tp-1-2", TP1, Cut(tp=2), FOUR_HEADS),
    Cell("tp-2-1", Cut(tp=2), TP1, FOUR_HEADS),
    Cell("tp-2-3", Cut(tp=2), Cut(tp=3), _model(6)),
    Cell("tp-4-2", Cut(tp=4), Cut(tp=2), _model(8)),
    Cell("tp-8-1", Cut(tp=8), TP1, _model(16)),
    Cell("tp-4-1-above-heads", Cut(tp=4), TP1, TWO_HEADS),
    Cell("tp-2-4-above-heads", Cut(tp=2), Cut(tp=4), TWO_HEADS),
    Cell("pp-1-2", TP1, Cut(pp=2), TWO_HEADS),
    Cell("pp-2-1", Cut(pp=2), TP1, TWO_HEADS),
    Cell("tp2-pp2", Cut(tp=2), Cut(pp=2), FOUR_HEADS),
    Cell("block-4-8", TP1, Cut(block=8), TWO_HEADS),
    Cell("block-8-4", Cut(block=8), TP1, TWO_HEADS),
    Cell("block-6-4", Cut(block=6), TP1, TWO_HEADS),
    Cell("block-4-6-one-head", TP1, Cut(block=6), ONE_HEAD, tokens=37),
    Cell("blocks-per-entry-2-3", Cut(per_entry=2), Cut(per_entry=3), TWO_HEADS),
    Cell("lbhnc-lbnhc", TP1, Cut(order="LBNHC"), TWO_HEADS),
    Cell("lbnhc-lhbnc", Cut(order="LBNHC"), Cut(order="LHBNC"), TWO_HEADS),
    Cell("lhbnc-blhnc", Cut(order="LHBNC"), Cut(order="BLHNC"), TWO_HEADS),
    Cell("blhnc-blnhc", Cut(order="BLHNC"), Cut(order="BLNHC"), TWO_HEADS),
    Cell("blnhc-bhlnc", Cut(order="BLNHC"), Cut(order="BHLNC"), TWO_HEADS),
    Cell("bhlnc-lbhnc", Cut(order="BHLNC"), TP1, TWO_HEADS),
    Cell("k-transposed-here", TP1, Cut(transposed=True), TWO_HEADS),
    Cell(
        "k-transposed-there",
        Cut(order="BHLNC", transposed=True),
        Cut(order="BLNHC"),
        TWO_HEADS,
    ),
    Cell("k-and-v-apart", Cut(order="L2BHNC"), Cut(order="LB2NHC"), TWO_HEADS),
    Cell("k-longer-than-v", TP1, Cut(order="BLNHC"), _model(2, (12, 6))),
    Cell("one-part", TP1, Cut(tp=2, order="BLNHC"), _model(1, (18,))),
    Cell("sliding-window", TP1, Cut(order="BHLNC"), SLIDING),
    Cell("state-1-2", TP1, Cut(tp=2), STATES),
    Cell("state-2-1", Cut(tp=2, order="BLHNC"), TP1, STATES),
    Cell("state-pp-hit", Cut(pp=4), Cut(tp=2, block=8), STATES, hit=16),
    Cell("state-rows-apart", Cut(transposed=True), Cut(tp=2), STATES),
    Cell("state-copies", Cut(tp=4, block=8), Cut(tp=2, block=16), COPIES),
    Cell("prefix-hit", TP1, Cut(tp=2), FOUR_HEADS, hit=16),
    Cell("long", Cut(tp=2, block=8), Cut(order="BHLNC"), FOUR_HEADS, tokens=200),
)
"""Prefill first. What is not said is: 2 layers of 2 heads, blocks of 4 tokens, 41 tokens."""
