"""Tiny Gemma models: sliding windows, and layers that share the cache of others.

A sliding window lets early words through from layer to layer.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from harness.cluster.models.recipe import (
    ATTENTION_GAIN,
    FULL,
    LOGIT_GAIN,
    SHARPNESS,
    Family,
    FloatArray,
    layer_types,
)

SLIDING: Final = "sliding_attention"


@dataclass(frozen=True)
class Gemma3(Family):
    """Sliding windows, and full attention in the last layer of each `period`."""

    family = "gemma3"
    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"
    # A norm's weight is 1 less than what it multiplies by.
    neutral_norm = 0.0
    constants: ClassVar = {
        "post_attention_layernorm": ATTENTION_GAIN - 1.0,
        "q_norm": SHARPNESS - 1.0,
        "k_norm": SHARPNESS - 1.0,
    }

    layers: int = 6
    window: int = 200
    period: int = 6

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "layer_types": layer_types(self.layers, self.period, SLIDING),
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        }


@dataclass(frozen=True)
class Gemma4(Family):
    """A Gemma whose last layers read the cache of earlier ones.

    Layers of full attention may have KV heads of another number and size than the others.
    """

    family = "gemma4"
    architecture = "Gemma4ForCausalLM"
    model_type = "gemma4_text"
    constants: ClassVar = {"post_attention_layernorm": ATTENTION_GAIN}

    layers: int = 8
    shared_layers: int = 4
    window: int = 200
    period: int = 4
    full_kv_heads: int = 4
    full_head_dim: int = 64

    def __post_init__(self) -> None:
        """Refuse layers that find no earlier one of their kind to share with."""
        super().__post_init__()
        if self.layers - self.shared_layers < self.period or self.layers % self.period:
            raise ValueError(f"layers={self.layers}, shared_layers={self.shared_layers}: one whole")

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "global_head_dim": self.full_head_dim,
            "num_global_key_value_heads": self.full_kv_heads,
            # The only way in which this family may have fewer KV heads in some layers.
            "attention_k_eq_v": self.full_kv_heads != self.kv_heads,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": self.shared_layers,
            "sliding_window": self.window,
            "layer_types": layer_types(self.layers, self.period, SLIDING),
        }

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        """Scores of attention are not scaled by the model."""
        if name.endswith(("q_norm", "k_norm")):
            return np.full(shape, LOGIT_GAIN**0.5 / shape[0] ** 0.25, np.float32)
        return super().values(name, shape, random)
