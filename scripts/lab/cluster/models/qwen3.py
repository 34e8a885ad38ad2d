"""A tiny Qwen3: full attention in all layers.

The weights are scaled so that attention outweighs a token's own embedding: a greedy answer then
depends on all of the prompt, and KV that arrived wrong changes it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Final

import numpy as np

from lab.cluster.models.recipe import (
    ATTENTION_GAIN,
    EMBEDDING_GAIN,
    FORMAT,
    SHARPNESS,
    Numbers,
    RandomMatrices,
    Tensors,
    in_layer,
    vector,
)

VOCABULARY_UNIT: Final = 3 * 64


@dataclass(frozen=True)
class TinyModel(Numbers):
    """A Qwen3: full attention in all layers."""

    family: ClassVar[str] = "qwen3"

    def digest(self) -> str:
        """A short name for these parameters."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": vocab_size,
            "max_position_embeddings": self.max_positions,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "torch_dtype": self.dtype,
        }

    def weights(self, vocab_size: int) -> Tensors:
        """All tensors, by the names that vLLM's loader knows."""
        random = RandomMatrices(self.seed)
        hidden, inner, head = self.hidden, self.intermediate, self.head_dim
        queries, keys = self.heads * head, self.kv_heads * head
        weights = {
            "model.embed_tokens.weight": random.matrix(vocab_size, hidden, EMBEDDING_GAIN),
            "model.norm.weight": vector(hidden),
            "lm_head.weight": random.matrix(vocab_size, hidden),
        }
        for layer in range(self.layers):
            parts = {
                "input_layernorm.weight": vector(hidden),
                "post_attention_layernorm.weight": vector(hidden),
                "self_attn.q_proj.weight": random.matrix(queries, hidden),
                "self_attn.k_proj.weight": random.matrix(keys, hidden),
                "self_attn.v_proj.weight": random.matrix(keys, hidden),
                "self_attn.o_proj.weight": random.matrix(hidden, queries, ATTENTION_GAIN),
                "self_attn.q_norm.weight": vector(head, SHARPNESS),
                "self_attn.k_norm.weight": vector(head, SHARPNESS),
                "mlp.gate_proj.weight": random.matrix(inner, hidden),
                "mlp.up_proj.weight": random.matrix(inner, hidden),
                "mlp.down_proj.weight": random.matrix(hidden, inner),
            }
            weights |= in_layer(layer, parts)
        return weights


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


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // VOCABULARY_UNIT) * VOCABULARY_UNIT
