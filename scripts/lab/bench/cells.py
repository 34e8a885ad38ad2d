"""A cell of `bench transfer`: how two engines shard and lay out their caches."""

import argparse
import re
from dataclasses import dataclass
from typing import Final

from harness.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.geometry.layout import CacheLayout, Memory

ROLES: Final = ("prefill", "decode")
VERIFIED: Final = ", verified"
"""Follows the name of a path whose loads are compared with prefill's digest."""


@dataclass(frozen=True)
class Cut:
    """One engine's shape."""

    tp: int
    order: str
    block_size: int

    def layouts(self, model: ModelShape, tokens: int, memory: Memory) -> list[CacheLayout]:
        """The layouts of all ranks, with room for twice as many tokens and one more block.

        Raises:
            ValueError: if the model cannot be sharded like that.
        """
        num_blocks = 1 + 2 * (tokens // self.block_size)
        shape = EngineShape(self.tp, 1, self.block_size, num_blocks, self.order, memory=memory)
        return build_layouts(model, shape)


@dataclass(frozen=True)
class Cell:
    """Both engines, and the GPU of each rank; no GPUs if the caches are in host memory."""

    cuts: tuple[Cut, Cut]
    gpus: tuple[tuple[int, ...], tuple[int, ...]]

    def placed(self, side: int) -> dict[str, object]:
        """One engine, as its processes are told. Older ones read `blocks`."""
        cut = self.cuts[side]
        blocks = {"size": cut.block_size, "kernel": cut.block_size}
        shape = {"tp": cut.tp, "order": cut.order, "block_size": cut.block_size, "blocks": blocks}
        return {"cut": shape, "gpus": self.gpus[side]}

    @property
    def names(self) -> dict[str, str]:
        """The cell in a row, by heading."""
        prefill, decode = self.cuts
        return {
            "TP": f"{prefill.tp} to {decode.tp}",
            "layout": prefill.order,
            "blocks": f"{prefill.block_size} to {decode.block_size}",
            "GPUs": " to ".join(", ".join(map(str, gpus)) for gpus in self.gpus if gpus) or "none",
        }


def pair_of_numbers(text: str) -> tuple[int, int]:
    """Numbers of prefill and of decode, such as 1-2.

    Raises:
        argparse.ArgumentTypeError: for other text.
    """
    found = re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: PREFILL-DECODE, such as 1-2")
    return int(found[1]), int(found[2])
