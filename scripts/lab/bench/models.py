"""The shapes of models whose KV is moved without vLLM."""

from collections.abc import Mapping
from typing import Final

from lab.local.model_layouts import ModelShape

MODELS: Final[Mapping[str, ModelShape]] = {
    "qwen3-8b": ModelShape(36, 8, (256, 256), "bfloat16"),
    "llama-70b-tp8": ModelShape(80, 1, (256, 256), "bfloat16"),
    "deepseek": ModelShape(61, 1, (576, 576), "bfloat16"),
    "64-layers": ModelShape(64, 2, (256, 256), "bfloat16"),
    "tiny": ModelShape(4, 4, (256, 256), "bfloat16"),
}
