"""A tiny Granite 4: Mamba2, whose state stands for the prompt, and full attention."""

from dataclasses import dataclass

import numpy as np

from harness.cluster.models.gemma import FULL
from harness.cluster.models.qwen3_next import DECAY, LINEAR
from harness.cluster.models.recipe import (
    ATTENTION_GAIN,
    LOGIT_GAIN,
    Family,
    RandomMatrices,
    Tensors,
    vector,
)


@dataclass(frozen=True)
class Granite4(Family):
    """Full attention in the last layer of each `period`, and no experts.

    All heads of a Mamba2 share one group of B and C: each tensor-parallel rank has a copy.
    """

    family = "granite4"
    architecture = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"

    hidden: int = 512
    period: int = 4
    expand: int = 2
    """How much wider Mamba2 is than the model."""
    mamba_head_dim: int = 64
    groups: int = 1
    state_dim: int = 128
    kernel: int = 4
    """Of the convolution."""

    @property
    def mamba_heads(self) -> int:
        """Of a Mamba2."""
        return self.expand * self.hidden // self.mamba_head_dim

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(vocab_size) | {
            "hidden_act": "silu",
            "layer_types": [self._kind(layer) for layer in range(self.layers)],
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_multiplier": self.head_dim**-0.5,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": self.intermediate,
            "mamba_expand": self.expand,
            "mamba_n_heads": self.mamba_heads,
            "mamba_d_head": self.mamba_head_dim,
            "mamba_n_groups": self.groups,
            "mamba_d_state": self.state_dim,
            "mamba_d_conv": self.kernel,
            "mamba_conv_bias": True,  # without it vLLM cannot cut the model
            "mamba_proj_bias": False,
        }

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """Both kinds of layers have an MLP."""
        hidden, inner = self.hidden, self.intermediate
        is_full = self._kind(layer) == FULL
        return {
            "input_layernorm.weight": vector(hidden),
            "post_attention_layernorm.weight": vector(hidden),
            **(self._attention(random) if is_full else self._mamba(random)),
            "shared_mlp.input_linear.weight": random.matrix(2 * inner, hidden),
            "shared_mlp.output_linear.weight": random.matrix(hidden, inner),
        }

    def _kind(self, layer: int) -> str:
        return LINEAR if (layer + 1) % self.period else FULL

    def _attention(self, random: RandomMatrices) -> Tensors:
        hidden, keys = self.hidden, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": random.matrix(hidden, hidden, LOGIT_GAIN),
            "self_attn.k_proj.weight": random.matrix(keys, hidden),
            "self_attn.v_proj.weight": random.matrix(keys, hidden),
            "self_attn.o_proj.weight": random.matrix(hidden, hidden, ATTENTION_GAIN),
        }

    def _mamba(self, random: RandomMatrices) -> Tensors:
        values, heads = self.expand * self.hidden, self.mamba_heads
        channels = values + 2 * self.groups * self.state_dim
        return {
            "mamba.in_proj.weight": random.matrix(values + channels + heads, self.hidden),
            "mamba.conv1d.weight": random.matrix(channels, self.kernel)[:, None, :],
            "mamba.conv1d.bias": vector(channels, 0.0),
            "mamba.dt_bias": vector(heads),
            "mamba.A_log": np.linspace(*DECAY, heads, dtype=np.float32),
            "mamba.D": vector(heads),
            "mamba.norm.weight": vector(values),
            "mamba.out_proj.weight": random.matrix(self.hidden, values, ATTENTION_GAIN),
        }
