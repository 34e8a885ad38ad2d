"""The shapes between which loads are verified: two engines' caches, without the engines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region
from nixl_kv.geometry.shapes import EngineShape, ModelShape, layouts

ELEMENT: Final = 2
"""Bytes: of what K is transposed by."""
TOKENS: Final = 41


@dataclass(frozen=True)
class Cut:
    """How an engine cuts and stores a cache; `transposed`: K stands with its tokens innermost."""

    tp: int = 1
    pp: int = 1
    block: int = 4
    order: str = "LBHNC"
    per_entry: int = 1
    transposed: bool = False

    def layouts(self, model: ModelShape, entries: int) -> list[CacheLayout]:
        """Of all ranks, at made-up addresses, with so many entries for block tables."""
        shape = EngineShape(
            tp=self.tp,
            pp=self.pp,
            block_size=self.block,
            num_blocks=entries * self.per_entry,
            order=self.order,
            blocks_per_entry=self.per_entry,
            memory="DRAM",
        )
        found = layouts(model, shape)
        return [_transposed(layout) for layout in found] if self.transposed else found


@dataclass(frozen=True)
class Cell:
    """A model's KV, and how prefill and decode cut it; the first `hit` tokens are decode's own."""

    name: str
    prefill: Cut
    decode: Cut
    model: ModelShape
    tokens: int = TOKENS
    hit: int = 0


def _transposed(layout: CacheLayout) -> CacheLayout:
    """The same memory, but in each head's block K is [bytes, tokens], and V follows."""
    groups = tuple(
        replace(group, regions=tuple(_transposed_region(one, group) for one in group.regions))
        for group in layout.groups
    )
    return replace(layout, groups=groups)


def _transposed_region(region: Region, group: Group) -> Region:
    key, value = (part.length for part in region.parts)
    size = group.block_size
    parts = (
        Part(0, ELEMENT, key // ELEMENT, size * ELEMENT, token_stride=ELEMENT),
        Part(key * size, value, token_stride=value),
    )
    return replace(region, parts=parts)


def _model(heads: int = 2, content: tuple[int, ...] = (8, 8)) -> ModelShape:
    return ModelShape(2, heads, content, "uint8")


def _cell(
    name: str, prefill: Cut, decode: Cut, *, model: ModelShape | None = None, **more: int
) -> Cell:
    return Cell(name, prefill, decode, model or _model(), **more)


TP1: Final = Cut()
B6: Final = Cut(block=6)
B8: Final = Cut(block=8)
SLIDING: Final = ModelShape(4, 2, (8, 8), "uint8", window=10, sliding=(0, 2))

CELLS: Final[Sequence[Cell]] = (
    _cell("same", TP1, TP1),
    _cell("tp-1-2", TP1, Cut(tp=2), model=_model(4)),
    _cell("tp-2-1", Cut(tp=2), TP1, model=_model(4)),
    _cell("tp-2-3", Cut(tp=2), Cut(tp=3), model=_model(6)),
    _cell("tp-4-2", Cut(tp=4), Cut(tp=2), model=_model(8)),
    _cell("tp-8-1", Cut(tp=8), TP1, model=_model(16)),
    _cell("tp-4-1-above-heads", Cut(tp=4), TP1),
    _cell("tp-2-4-above-heads", Cut(tp=2), Cut(tp=4)),
    _cell("pp-1-2", TP1, Cut(pp=2)),
    _cell("pp-2-1", Cut(pp=2), TP1),
    _cell("tp2-pp2", Cut(tp=2), Cut(pp=2), model=_model(4)),
    _cell("block-4-8", TP1, B8),
    _cell("block-8-4", B8, TP1),
    _cell("block-6-4", B6, TP1),
    _cell("blocks-per-entry-2-3", Cut(per_entry=2), Cut(per_entry=3)),
    _cell("lbhnc-lbnhc", TP1, Cut(order="LBNHC")),
    _cell("lbnhc-lhbnc", Cut(order="LBNHC"), Cut(order="LHBNC")),
    _cell("lhbnc-blhnc", Cut(order="LHBNC"), Cut(order="BLHNC")),
    _cell("blhnc-blnhc", Cut(order="BLHNC"), Cut(order="BLNHC")),
    _cell("blnhc-bhlnc", Cut(order="BLNHC"), Cut(order="BHLNC")),
    _cell("bhlnc-lbhnc", Cut(order="BHLNC"), TP1),
    _cell("k-transposed-here", TP1, Cut(transposed=True)),
    _cell("k-transposed-there", Cut(order="BHLNC", transposed=True), Cut(order="BLNHC")),
    _cell("k-and-v-apart", Cut(order="L2BHNC"), Cut(order="LB2NHC")),
    _cell("k-longer-than-v", TP1, Cut(order="BLNHC"), model=_model(2, (12, 6))),
    _cell("one-part", TP1, Cut(tp=2, order="BLNHC"), model=_model(1, (18,))),
    _cell("sliding-window", TP1, Cut(order="BHLNC"), model=SLIDING),
    _cell("prefix-hit", TP1, Cut(tp=2), model=_model(4), hit=16),
    _cell("long", Cut(tp=2, block=8), Cut(order="BHLNC"), model=_model(4), tokens=200),
)
"""Prefill first. What is not said is: 2 layers of 2 heads, blocks of 4 tokens, 41 tokens."""
