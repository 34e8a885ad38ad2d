"""Tiny Gemma models: sliding windows, and layers that share the cache of others.

A sliding window lets early words through from layer to layer.
"""

from dataclasses import dataclass
from typing import Final

from harness.cluster.models.recipe import (
    ATTENTION_GAIN,
    LOGIT_GAIN,
    SHARPNESS,
    Family,
    RandomMatrices,
    Tensors,
    vector,
)

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"


@dataclass(frozen=True)
class Gemma3(Family):
    """Sliding windows, and full attention in the last layer of each `period`."""

    family = "gemma3"
    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"
    embedding_gain = 1.0
    neutral_norm = 0.0

    layers: int = 6
    window: int = 200
    period: int = 6

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(vocab_size) | {
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "layer_types": [_layer_type(layer, self.period) for layer in range(self.layers)],
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        }

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """A norm's weight is 1 less than what it multiplies by."""
        del layer
        hidden, head = self.hidden, self.head_dim
        queries, keys = self.heads * head, self.kv_heads * head
        return {
            "input_layernorm.weight": vector(hidden, 0.0),
            "post_attention_layernorm.weight": vector(hidden, ATTENTION_GAIN - 1.0),
            "pre_feedforward_layernorm.weight": vector(hidden, 0.0),
            "post_feedforward_layernorm.weight": vector(hidden, 0.0),
            "self_attn.q_proj.weight": random.matrix(queries, hidden),
            "self_attn.k_proj.weight": random.matrix(keys, hidden),
            "self_attn.v_proj.weight": random.matrix(keys, hidden),
            "self_attn.o_proj.weight": random.matrix(hidden, queries),
            "self_attn.q_norm.weight": vector(head, SHARPNESS - 1.0),
            "self_attn.k_norm.weight": vector(head, SHARPNESS - 1.0),
            **self.mlp(random),
        }


@dataclass(frozen=True)
class Gemma4(Family):
    """As Gemma3, and the last layers read the cache of earlier ones.

    Layers of full attention may have KV heads of another number and size than the others.
    """

    family = "gemma4"
    architecture = "Gemma4ForCausalLM"
    model_type = "gemma4_text"
    embedding_gain = 1.0

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
        """What config.json says."""
        return super().config(vocab_size) | {
            "head_dim": self.head_dim,
            "global_head_dim": self.full_head_dim,
            "num_global_key_value_heads": self.full_kv_heads,
            "attention_k_eq_v": self._keys_are_values(),
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": self.shared_layers,
            "sliding_window": self.window,
            "layer_types": [_layer_type(layer, self.period) for layer in range(self.layers)],
        }

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """Layers that share a cache have no weights for keys and values."""
        hidden = self.hidden
        return {
            "input_layernorm.weight": vector(hidden),
            "post_attention_layernorm.weight": vector(hidden, ATTENTION_GAIN),
            "pre_feedforward_layernorm.weight": vector(hidden),
            "post_feedforward_layernorm.weight": vector(hidden),
            "layer_scalar": vector(1),
            **self._attention(random, layer),
            **self.mlp(random),
        }

    def _attention(self, random: RandomMatrices, layer: int) -> Tensors:
        full = _layer_type(layer, self.period) == FULL
        head = self.full_head_dim if full else self.head_dim
        keys = head * (self.full_kv_heads if full else self.kv_heads)
        sharp = vector(head, LOGIT_GAIN**0.5 / head**0.25)  # scores are not scaled by the model
        parts = {
            "self_attn.q_proj.weight": random.matrix(self.heads * head, self.hidden),
            "self_attn.o_proj.weight": random.matrix(self.hidden, self.heads * head),
            "self_attn.q_norm.weight": sharp,
        }
        if layer >= self.layers - self.shared_layers:
            return parts
        parts["self_attn.k_proj.weight"] = random.matrix(keys, self.hidden)
        parts["self_attn.k_norm.weight"] = sharp
        if not (full and self._keys_are_values()):
            parts["self_attn.v_proj.weight"] = random.matrix(keys, self.hidden)
        return parts

    def _keys_are_values(self) -> bool:
        """The only way in which this family may have fewer KV heads in some layers."""
        return self.full_kv_heads != self.kv_heads


def _layer_type(layer: int, period: int) -> str:
    return FULL if (layer + 1) % period == 0 else SLIDING
