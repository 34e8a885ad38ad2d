"""Tiny models with latent attention: DeepSeek-V2, and Kimi Linear with delta nets beside it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from harness.cluster.models.recipe import LOGIT_GAIN, SHARP_ATTENTION, Family, FloatArray, Tensors


@dataclass(frozen=True)
class DeepseekV2(Family):
    """Multi-head latent attention without experts: one latent head, which every rank holds.

    The latent sizes are DeepSeek's own: kernels know no others.
    """

    family = "deepseek-v2"
    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"
    gains: ClassVar = {**SHARP_ATTENTION, "q_proj": LOGIT_GAIN}

    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    latent: int = 512
    rope_dim: int = 64

    def config(self, vocab_size: int) -> dict[str, object]:
        config = super().config(vocab_size) | {
            "hidden_act": "silu",
            "kv_lora_rank": self.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.head_dim,
            "first_k_dense_replace": self.layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }
        del config["head_dim"]  # it is that of the part with rotary embedding here
        return config


@dataclass(frozen=True)
class KimiLinear(DeepseekV2):
    """Latent attention in the last layer of each `period`, delta nets elsewhere, and no experts."""

    family = "kimi-linear"
    architecture = "KimiLinearForCausalLM"
    model_type = "kimi_linear"

    period: int = 4
    state_heads: int = 4
    state_dim: int = 128
    """The size of keys and values in a state."""
    kernel: int = 4
    """The length of the convolutions."""

    def config(self, vocab_size: int) -> dict[str, object]:
        """Layers are counted from 1 here."""
        latent = [n for n in range(1, self.layers + 1) if n % self.period == 0]
        return super().config(vocab_size) | {
            "mla_use_nope": True,
            "num_experts": None,
            "linear_attn_config": {
                "full_attn_layers": latent,
                "kda_layers": [n for n in range(1, self.layers + 1) if n not in latent],
                "num_heads": self.state_heads,
                "head_dim": self.state_dim,
                "short_conv_kernel_size": self.kernel,
            },
        }

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        """A delta net normalizes its queries: they need no gain."""
        if name.endswith("q_proj") and shape[0] == self.state_heads * self.state_dim:
            return super().values("", shape, random)
        return super().values(name, shape, random)

    def weights(self, vocab_size: int) -> Tensors:
        """transformers writes the name that layers with experts have in vLLM."""
        weights = super().weights(vocab_size)
        return {name.replace("block_sparse_moe", "mlp"): part for name, part in weights.items()}
