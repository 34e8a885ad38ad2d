"""What `bench transfer` measures one by one: how two engines are cut, and where their ranks are."""

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lab.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.geometry.layout import CacheLayout

ROLES: Final = ("prefill", "decode")
TABLES: Final = ("random", "contiguous")
VERIFIED: Final = ", verified"
"""Behind the name of a path whose loads are compared with prefill's bytes."""


@dataclass(frozen=True)
class Blocks:
    """An engine's block size in tokens, and that of its attention kernel's blocks."""

    size: int
    kernel: int

    def __str__(self) -> str:
        return f"{self.size}" if self.size == self.kernel else f"{self.size}/{self.kernel}"


@dataclass(frozen=True)
class Cut:
    """How one engine's cache is cut."""

    tp: int
    order: str
    blocks: Blocks

    def layouts(self, model: ModelShape, tokens: int, memory: str) -> list[CacheLayout]:
        """Of all ranks, with room for twice as many tokens and a block that no table names.

        Raises:
            ValueError: if the model cannot be cut like that.
        """
        per_entry = self.blocks.size // self.blocks.kernel
        shape = EngineShape(
            tp=self.tp,
            order=self.order,
            block_size=self.blocks.kernel,
            blocks_per_entry=per_entry,
            num_blocks=per_entry * (1 + 2 * (tokens // self.blocks.size)),
            memory="VRAM" if memory == "VRAM" else "DRAM",
        )
        return build_layouts(model, shape)


@dataclass(frozen=True)
class Cell:
    """Prefill's and decode's cut."""

    prefill: Cut
    decode: Cut

    @property
    def names(self) -> dict[str, str]:
        """For people, by heading."""
        return {
            "TP": f"{self.prefill.tp} to {self.decode.tp}",
            "layout": self.prefill.order,
            "blocks": f"{self.prefill.blocks} to {self.decode.blocks}",
        }


@dataclass(frozen=True)
class Share:
    """What one rank of decode reads from one of prefill: so many bytes."""

    decode: int
    prefill: int
    num_bytes: int


def cells(
    tps: Sequence[tuple[int, int]], orders: Sequence[str], blocks: Sequence[tuple[Blocks, Blocks]]
) -> Iterator[Cell]:
    """All that an engine can have: only where blocks are in one line can a kernel cut them."""
    for tp, order, pair in itertools.product(tps, orders, blocks):
        is_cut = any(one.size != one.kernel for one in pair)
        if not (is_cut and order.startswith("B")):
            yield Cell(Cut(tp[0], order, pair[0]), Cut(tp[1], order, pair[1]))


def shares(cell: Cell, model: ModelShape, tokens: int) -> list[Share]:
    """Who reads what from whom. Of ranks that have the same heads the first one is read."""
    prefill, decode = (
        [layout.groups[0].regions[0].heads for layout in cut.layouts(model, tokens, "DRAM")]
        for cut in (cell.prefill, cell.decode)
    )
    found = []
    for reader, mine in enumerate(decode):
        wanted = set(range(*mine))
        for rank, theirs in enumerate(prefill):
            heads = wanted & set(range(*theirs))
            wanted -= heads
            if heads:
                num_bytes = model.layers * len(heads) * sum(model.content) * tokens
                found.append(Share(reader, rank, num_bytes))
    return found


def gpus_of(tp: tuple[int, int], count: int) -> dict[str, list[int]]:
    """The GPU of each rank, of `count`: prefill has the first ones, and leaves one to decode."""
    if count == 1:
        return {role: [0] * ranks for role, ranks in zip(ROLES, tp, strict=True)}
    first = min(tp[0], count - 1)
    return {
        "prefill": [rank % first for rank in range(tp[0])],
        "decode": [first + rank % (count - first) for rank in range(tp[1])],
    }


def parse_tp(text: str) -> tuple[int, int]:
    """Ranks of prefill and decode: 1-2.

    Raises:
        argparse.ArgumentTypeError: if it is something else.
    """
    if not re.fullmatch(r"[1-9]\d*-[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: ranks of prefill-decode, as 1-2")
    prefill, decode = map(int, text.split("-"))
    return prefill, decode


def parse_blocks(text: str) -> tuple[Blocks, Blocks]:
    """Block sizes of prefill and decode: 16-64, or with the kernels' 128/64-128/64.

    Raises:
        argparse.ArgumentTypeError: if it is something else.
    """
    size = r"([1-9]\d*)(?:/([1-9]\d*))?"
    found = re.fullmatch(f"{size}-{size}", text)
    numbers = [int(one) if one else 0 for one in found.groups()] if found else []
    sizes = zip(numbers[::2], numbers[1::2], strict=True)
    pairs = [Blocks(block, kernel or block) for block, kernel in sizes]
    if not pairs or any(pair.size % pair.kernel for pair in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: sizes of prefill-decode, as 16-64, or with those of the kernels' "
            "blocks, which divide them, as 128/64-128/64"
        )
    return pairs[0], pairs[1]
