"""The models of the benchmarks, and how two engines shard and lay out their caches."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from harness.cluster.models.families import TinyModel
from harness.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.geometry.layout import CacheLayout, Memory

VERIFIED: Final = ", verified"
"""Follows the name of a path whose loads are compared with prefill's digest."""

REPO: Final = Path(__file__).resolve().parents[2]

Row: TypeAlias = Mapping[str, Any]
"""Text and figures by heading."""

MODELS: Final[Mapping[str, TinyModel]] = {
    "tiny": TinyModel(),
    "64-layers": TinyModel(layers=64, kv_heads=2, head_dim=128, dtype="bfloat16"),
    "qwen3-8b": TinyModel(  # 144 KiB of KV per token; the vocabulary is ours
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=4096,
        intermediate=12288,
        max_positions=40960,
        dtype="bfloat16",
    ),
}
"""Engines of vLLM load them with random weights."""

ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2}


def kv_shape(name: str) -> ModelShape:
    """The model's KV, for engines without vLLM."""
    model = MODELS[name]
    length = model.head_dim * ELEMENT_BYTES[model.dtype]
    return ModelShape(model.layers, model.kv_heads, (length, length), model.dtype)


@dataclass(frozen=True)
class Side:
    """One engine's shape, and the GPU of each rank; no GPUs if its cache is in host memory."""

    tp: int
    order: str
    block_size: int
    gpus: tuple[int, ...] = ()

    def layouts(self, model: ModelShape, tokens: int, memory: Memory) -> list[CacheLayout]:
        """The layouts of all ranks, with room for twice as many tokens and one more block.

        Raises:
            ValueError: if the model cannot be sharded like that.
        """
        num_blocks = 1 + 2 * (tokens // self.block_size)
        shape = EngineShape(self.tp, 1, self.block_size, num_blocks, self.order, memory=memory)
        return build_layouts(model, shape)


Cell: TypeAlias = tuple[Side, Side]
"""Prefill and decode."""


def names(cell: Cell) -> dict[str, str]:
    """The cell in a row, by heading."""
    prefill, decode = cell
    return {
        "TP": f"{prefill.tp} to {decode.tp}",
        "layout": prefill.order,
        "blocks": f"{prefill.block_size} to {decode.block_size}",
        "GPUs": " to ".join(", ".join(map(str, s.gpus)) for s in cell if s.gpus) or "none",
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
