"""A tiny Qwen3: full attention in all layers."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from harness.cluster.models.recipe import (
    ATTENTION_GAIN,
    SHARPNESS,
    Family,
    RandomMatrices,
    Tensors,
    vector,
)

VOCABULARY_UNIT: Final = 3 * 64


@dataclass(frozen=True)
class TinyModel(Family):
    """A Qwen3: full attention in all layers."""

    family = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(vocab_size) | {
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
        }

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """All layers are of one kind."""
        del layer
        hidden, head = self.hidden, self.head_dim
        queries, keys = self.heads * head, self.kv_heads * head
        return {
            "input_layernorm.weight": vector(hidden),
            "post_attention_layernorm.weight": vector(hidden),
            "self_attn.q_proj.weight": random.matrix(queries, hidden),
            "self_attn.k_proj.weight": random.matrix(keys, hidden),
            "self_attn.v_proj.weight": random.matrix(keys, hidden),
            "self_attn.o_proj.weight": random.matrix(hidden, queries, ATTENTION_GAIN),
            "self_attn.q_norm.weight": vector(head, SHARPNESS),
            "self_attn.k_norm.weight": vector(head, SHARPNESS),
            **self.mlp(random),
        }


@dataclass(frozen=True)
class PaddedQwen3(TinyModel):
    """As TinyModel, with a vocabulary that three ranks can share: vLLM pads to 64 only.

    The words more have no name; their scores are 0, and so they are never the best.
    """

    family = "qwen3-padded"

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
