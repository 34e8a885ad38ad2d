"""Tiny models of other shapes than Qwen3: sliding windows, shared layers, one latent head.

As with TinyModel, attention is sharp and outweighs a token's own embedding, so that an answer
depends on all of the prompt; a sliding window lets early words through from layer to layer.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import numpy as np

from pd.tiny_model import (
    ATTENTION_GAIN,
    EMBEDDING_GAIN,
    FORMAT,
    SHARPNESS,
    Dice,
    FloatArray,
    Numbers,
    TinyModel,
    vector,
)

SLIDING = "sliding_attention"
FULL = "full_attention"
VOCABULARY_UNIT = 3 * 64
LOGIT_GAIN = SHARPNESS**2  # how widely scores of attention spread

Tensors = dict[str, FloatArray]


@dataclass(frozen=True)
class Family(Numbers):
    """What all of them have; the rest of a Recipe is their own."""

    family: ClassVar[str]
    architecture: ClassVar[str]
    model_type: ClassVar[str]

    layers: int = 6

    def digest(self) -> str:
        """A short name for all values."""
        text = json.dumps([FORMAT, self.family, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says of every family."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "torch_dtype": self.dtype,
        }

    def mlp(self, dice: Dice) -> Tensors:
        """The weights of a layer's MLP."""
        return {
            "mlp.gate_proj.weight": dice.matrix(self.intermediate, self.hidden),
            "mlp.up_proj.weight": dice.matrix(self.intermediate, self.hidden),
            "mlp.down_proj.weight": dice.matrix(self.hidden, self.intermediate),
        }


@dataclass(frozen=True)
class PaddedQwen3(TinyModel):
    """As TinyModel, with a vocabulary that three ranks can share: vLLM pads to 64 only.

    The words more have no name; their scores are 0, and so they are never the best.
    """

    family: ClassVar[str] = "qwen3-padded"

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(_padded(vocab_size))

    def weights(self, vocab_size: int) -> Tensors:
        """All tensors."""
        weights = super().weights(vocab_size)
        more = ((0, _padded(vocab_size) - vocab_size), (0, 0))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = np.pad(weights[name], more)
        return weights


@dataclass(frozen=True)
class Gemma3(Family):
    """Sliding windows, and full attention in the last layer of each `period`."""

    family = "gemma3"
    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"

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

    def weights(self, vocab_size: int) -> Tensors:
        """All tensors. A norm's weight is 1 less than what it multiplies by."""
        dice = Dice(self.seed)
        hidden, head = self.hidden, self.head_dim
        queries, keys = self.heads * head, self.kv_heads * head
        weights = {
            "model.embed_tokens.weight": dice.matrix(vocab_size, hidden),
            "model.norm.weight": vector(hidden, 0.0),
            "lm_head.weight": dice.matrix(vocab_size, hidden),
        }
        for layer in range(self.layers):
            parts = {
                "input_layernorm.weight": vector(hidden, 0.0),
                "post_attention_layernorm.weight": vector(hidden, ATTENTION_GAIN - 1.0),
                "pre_feedforward_layernorm.weight": vector(hidden, 0.0),
                "post_feedforward_layernorm.weight": vector(hidden, 0.0),
                "self_attn.q_proj.weight": dice.matrix(queries, hidden),
                "self_attn.k_proj.weight": dice.matrix(keys, hidden),
                "self_attn.v_proj.weight": dice.matrix(keys, hidden),
                "self_attn.o_proj.weight": dice.matrix(hidden, queries),
                "self_attn.q_norm.weight": vector(head, SHARPNESS - 1.0),
                "self_attn.k_norm.weight": vector(head, SHARPNESS - 1.0),
                **self.mlp(dice),
            }
            weights |= _in_layer(layer, parts)
        return weights


@dataclass(frozen=True)
class Gemma4(Family):
    """As Gemma3, and the last layers read the cache of earlier ones.

    Layers of full attention may have KV heads of another number and size than the others.
    """

    family = "gemma4"
    architecture = "Gemma4ForCausalLM"
    model_type = "gemma4_text"

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

    def weights(self, vocab_size: int) -> Tensors:
        """All tensors."""
        dice = Dice(self.seed)
        hidden = self.hidden
        weights = {
            "model.embed_tokens.weight": dice.matrix(vocab_size, hidden),
            "model.norm.weight": vector(hidden),
            "lm_head.weight": dice.matrix(vocab_size, hidden),
        }
        for layer in range(self.layers):
            parts = {
                "input_layernorm.weight": vector(hidden),
                "post_attention_layernorm.weight": vector(hidden, ATTENTION_GAIN),
                "pre_feedforward_layernorm.weight": vector(hidden),
                "post_feedforward_layernorm.weight": vector(hidden),
                "layer_scalar": vector(1),
                **self._attention(dice, layer),
                **self.mlp(dice),
            }
            weights |= _in_layer(layer, parts)
        return weights

    def _attention(self, dice: Dice, layer: int) -> Tensors:
        full = _layer_type(layer, self.period) == FULL
        head = self.full_head_dim if full else self.head_dim
        keys = head * (self.full_kv_heads if full else self.kv_heads)
        sharp = vector(head, LOGIT_GAIN**0.5 / head**0.25)  # scores are not scaled by the model
        parts = {
            "self_attn.q_proj.weight": dice.matrix(self.heads * head, self.hidden),
            "self_attn.o_proj.weight": dice.matrix(self.hidden, self.heads * head),
            "self_attn.q_norm.weight": sharp,
        }
        if layer >= self.layers - self.shared_layers:
            return parts
        parts["self_attn.k_proj.weight"] = dice.matrix(keys, self.hidden)
        parts["self_attn.k_norm.weight"] = sharp
        if not (full and self._keys_are_values()):
            parts["self_attn.v_proj.weight"] = dice.matrix(keys, self.hidden)
        return parts

    def _keys_are_values(self) -> bool:
        """The only way in which this family may have fewer KV heads in some layers."""
        return self.full_kv_heads != self.kv_heads


@dataclass(frozen=True)
class DeepseekV2(Family):
    """Multi-head latent attention without experts: one latent head, which every rank holds.

    The latent sizes are DeepSeek's own: kernels know no others.
    """

    family = "deepseek-v2"
    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"

    layers: int = 4
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    latent: int = 512
    rope_dim: int = 64

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(vocab_size) | {
            "hidden_act": "silu",
            "kv_lora_rank": self.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.head_dim,
            "first_k_dense_replace": self.layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }

    def weights(self, vocab_size: int) -> Tensors:
        """All tensors."""
        dice = Dice(self.seed)
        hidden = self.hidden
        values = self.heads * self.head_dim
        queries = self.heads * (self.head_dim + self.rope_dim)
        weights = {
            "model.embed_tokens.weight": dice.matrix(vocab_size, hidden, EMBEDDING_GAIN),
            "model.norm.weight": vector(hidden),
            "lm_head.weight": dice.matrix(vocab_size, hidden),
        }
        for layer in range(self.layers):
            parts = {
                "input_layernorm.weight": vector(hidden),
                "post_attention_layernorm.weight": vector(hidden),
                "self_attn.q_proj.weight": dice.matrix(queries, hidden, LOGIT_GAIN),
                "self_attn.kv_a_proj_with_mqa.weight": dice.matrix(
                    self.latent + self.rope_dim, hidden
                ),
                "self_attn.kv_a_layernorm.weight": vector(self.latent),
                "self_attn.kv_b_proj.weight": dice.matrix(2 * values, self.latent),
                "self_attn.o_proj.weight": dice.matrix(hidden, values, ATTENTION_GAIN),
                **self.mlp(dice),
            }
            weights |= _in_layer(layer, parts)
        return weights


FAMILIES: Final[Mapping[str, type[Any]]] = {
    family.family: family for family in (TinyModel, PaddedQwen3, Gemma3, Gemma4, DeepseekV2)
}


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // VOCABULARY_UNIT) * VOCABULARY_UNIT


def _layer_type(layer: int, period: int) -> str:
    return FULL if (layer + 1) % period == 0 else SLIDING


def _in_layer(layer: int, parts: Tensors) -> Tensors:
    return {f"model.layers.{layer}.{name}": part for name, part in parts.items()}
