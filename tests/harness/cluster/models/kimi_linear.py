"""A tiny Kimi Linear: delta nets, whose state stands for the prompt, and latent attention."""

from dataclasses import dataclass

import numpy as np

from harness.cluster.models.deepseek import DeepseekV2
from harness.cluster.models.qwen3_next import DECAY
from harness.cluster.models.recipe import ATTENTION_GAIN, RandomMatrices, Tensors, vector


@dataclass(frozen=True)
class KimiLinear(DeepseekV2):
    """Latent attention in the last layer of each `period`, and no experts."""

    family = "kimi-linear"
    architecture = "KimiLinearForCausalLM"
    model_type = "kimi_linear"

    period: int = 4
    state_heads: int = 4
    state_dim: int = 128
    """Of keys and values in a state."""
    kernel: int = 4
    """Of the convolutions."""

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says. It counts layers from 1."""
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

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """Both kinds of layers have an MLP."""
        if (layer + 1) % self.period == 0:
            return super().layer_weights(random, layer)
        return {
            "input_layernorm.weight": vector(self.hidden),
            "post_attention_layernorm.weight": vector(self.hidden),
            **{f"self_attn.{name}": part for name, part in self._delta_net(random).items()},
            **self.mlp(random),
        }

    def _delta_net(self, random: RandomMatrices) -> Tensors:
        hidden, size = self.hidden, self.state_dim
        channels = self.state_heads * size
        weights: Tensors = {}
        for name in "qkv":
            weights[f"{name}_proj.weight"] = random.matrix(channels, hidden)
            weights[f"{name}_conv1d.weight"] = random.matrix(channels, self.kernel)[:, None, :]
        for name in "fg":
            weights[f"{name}_a_proj.weight"] = random.matrix(size, hidden)
            weights[f"{name}_b_proj.weight"] = random.matrix(channels, size)
        return weights | {
            "b_proj.weight": random.matrix(self.state_heads, hidden),
            "dt_bias": vector(channels),
            "A_log": np.linspace(*DECAY, self.state_heads, dtype=np.float32),
            "o_norm.weight": vector(size),
            "o_proj.weight": random.matrix(hidden, channels, ATTENTION_GAIN),
        }
