"""A tiny Granite 4: Mamba2, whose state stands for the prompt, and full attention."""

from dataclasses import dataclass
from typing import ClassVar

from harness.cluster.models.recipe import LOGIT_GAIN, SHARP_ATTENTION, Family, layer_types


@dataclass(frozen=True)
class Granite4(Family):
    """Full attention in the last layer of each `period`, and no experts.

    All heads of a Mamba2 share one group of B and C: each tensor-parallel rank has a copy.
    """

    family = "granite4"
    architecture = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"
    gains: ClassVar = {**SHARP_ATTENTION, "q_proj": LOGIT_GAIN}
    constants: ClassVar = {"conv1d.bias": 0.0}

    hidden: int = 512
    period: int = 4
    expand: int = 2
    """How much wider Mamba2 is than the model."""
    mamba_head_dim: int = 64
    groups: int = 1
    state_dim: int = 128
    kernel: int = 4
    """The length of the convolution."""

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "hidden_act": "silu",
            "layer_types": layer_types(self.layers, self.period, "linear_attention"),
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_multiplier": self.head_dim**-0.5,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": self.intermediate,
            "mamba_expand": self.expand,
            "mamba_n_heads": self.expand * self.hidden // self.mamba_head_dim,
            "mamba_d_head": self.mamba_head_dim,
            "mamba_n_groups": self.groups,
            "mamba_d_state": self.state_dim,
            "mamba_d_conv": self.kernel,
            "mamba_conv_bias": True,  # without it vLLM cannot cut the model
            "mamba_proj_bias": False,
        }
