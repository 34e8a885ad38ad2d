"""The models whose KV is moved: engines of vLLM load them with random weights."""

from collections.abc import Mapping
from typing import Final

from harness.cluster.models.qwen3 import TinyModel
from harness.local.model_layouts import ModelShape

ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2}

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


def kv_shape(name: str) -> ModelShape:
    """The model's KV, for engines without vLLM."""
    model = MODELS[name]
    length = model.head_dim * ELEMENT_BYTES[model.dtype]
    return ModelShape(model.layers, model.kv_heads, (length, length), model.dtype)
