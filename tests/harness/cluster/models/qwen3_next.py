"""A tiny Qwen3-Next: gated delta nets, whose state stands for the prompt, and full attention.

vLLM's CPU build computes delta nets in bfloat16 alone, with heads of 64 or 128, and wants a layer
with experts.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from harness.cluster.models.gemma import FULL
from harness.cluster.models.recipe import (
    ATTENTION_GAIN,
    SHARPNESS,
    Family,
    RandomMatrices,
    Tensors,
    vector,
)

LINEAR: Final = "linear_attention"
DECAY: Final = (-6.0, -3.0)
"""The logarithms of what heads forget with each token: a state has early words in it, and all."""
QUIET: Final = 1 / 256
"""How much less a layer adds that shall not matter much."""


@dataclass(frozen=True)
class Qwen3Next(Family):
    """Full attention in the last layer of each `period`, experts in the first of `sparse_step`.

    All experts compute each token: a choice would turn a rounding into another answer. vLLM wants
    experts and attention in each pipeline stage.
    """

    family = "qwen3-next"
    architecture = "Qwen3NextForCausalLM"
    model_type = "qwen3_next"
    neutral_norm = 0.0

    dtype: str = "bfloat16"
    period: int = 4
    sparse_step: int = 4
    key_heads: int = 2
    value_heads: int = 4
    state_dim: int = 128
    """Of keys and values in a state."""
    kernel: int = 4
    """Of the convolution."""
    experts: int = 2
    expert_dim: int = 64

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(vocab_size) | {
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attn_output_gate": True,
            "layer_types": [self._kind(layer) for layer in range(self.layers)],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "linear_conv_kernel_dim": self.kernel,
            "linear_key_head_dim": self.state_dim,
            "linear_value_head_dim": self.state_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n in range(self.layers) if not self._has_experts(n)],
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts,
            "moe_intermediate_size": self.expert_dim,
            "shared_expert_intermediate_size": self.expert_dim,
            "norm_topk_prob": True,
        }

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """A norm's weight is 1 less than what it multiplies by, but that within a delta net."""
        is_full = self._kind(layer) == FULL
        return {
            "input_layernorm.weight": vector(self.hidden, 0.0),
            "post_attention_layernorm.weight": vector(self.hidden, 0.0),
            **(self._attention(random) if is_full else self._delta_net(random)),
            **(self._experts(random) if self._has_experts(layer) else self.mlp(random)),
        }

    def _has_experts(self, layer: int) -> bool:
        return layer % self.sparse_step == 0

    def _kind(self, layer: int) -> str:
        return LINEAR if (layer + 1) % self.period else FULL

    def _attention(self, random: RandomMatrices) -> Tensors:
        """Each head's query is followed by its gate."""
        hidden, head = self.hidden, self.head_dim
        queries, keys = self.heads * head, self.kv_heads * head
        return {
            "self_attn.q_proj.weight": random.matrix(2 * queries, hidden),
            "self_attn.k_proj.weight": random.matrix(keys, hidden),
            "self_attn.v_proj.weight": random.matrix(keys, hidden),
            "self_attn.o_proj.weight": random.matrix(hidden, queries, ATTENTION_GAIN),
            "self_attn.q_norm.weight": vector(head, SHARPNESS - 1.0),
            "self_attn.k_norm.weight": vector(head, SHARPNESS - 1.0),
        }

    def _delta_net(self, random: RandomMatrices) -> Tensors:
        keys, values = self.key_heads * self.state_dim, self.value_heads * self.state_dim
        channels = 2 * keys + values
        convolution = random.matrix(channels, self.kernel)[:, None, :]
        return {
            "linear_attn.in_proj_qkvz.weight": random.matrix(2 * keys + 2 * values, self.hidden),
            "linear_attn.in_proj_ba.weight": random.matrix(2 * self.value_heads, self.hidden),
            "linear_attn.conv1d.weight": convolution,
            "linear_attn.dt_bias": vector(self.value_heads),
            "linear_attn.A_log": np.linspace(*DECAY, self.value_heads, dtype=np.float32),
            "linear_attn.norm.weight": vector(self.state_dim),
            "linear_attn.out_proj.weight": random.matrix(self.hidden, values, ATTENTION_GAIN),
        }

    def _experts(self, random: RandomMatrices) -> Tensors:
        hidden, inner = self.hidden, self.expert_dim
        weights: Tensors = {"mlp.gate.weight": random.matrix(self.experts, hidden)}
        for expert in [*(f"experts.{n}" for n in range(self.experts)), "shared_expert"]:
            weights |= {
                f"mlp.{expert}.gate_proj.weight": random.matrix(inner, hidden),
                f"mlp.{expert}.up_proj.weight": random.matrix(inner, hidden),
                f"mlp.{expert}.down_proj.weight": random.matrix(hidden, inner),
            }
        return weights | {"mlp.shared_expert_gate.weight": random.matrix(1, hidden)}


@dataclass(frozen=True)
class Qwen3NextMtp(Qwen3Next):
    """A Qwen3-Next that predicts its own words, and is mostly right.

    Its last layer says almost all, and the predictor is that layer once more, for the word after.
    So a word that is predicted is right where the predictor has its KV of the whole prompt.
    """

    family = "qwen3-next-mtp"

    layers: int = 2
    period: int = 2

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(vocab_size) | {"num_nextn_predict_layers": 1}

    def weights(self, vocab_size: int) -> Tensors:
        """The predictor is given a word and what the model makes of it; this one sees the word."""
        weights = super().weights(vocab_size)
        last = f"model.layers.{self.layers - 1}."
        predictor = {
            name.replace(last, "mtp.layers.0."): part
            for name, part in weights.items()
            if name.startswith(last)
        }
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        predictor |= {f"mtp.{norm}.weight": vector(self.hidden, 0.0) for norm in norms}
        predictor["mtp.fc.weight"] = np.eye(self.hidden, 2 * self.hidden, dtype=np.float32)
        return weights | predictor

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """What the layers before the last one add is small."""
        weights = super().layer_weights(random, layer)
        if layer < self.layers - 1:
            for name in weights:
                if name.endswith(("out_proj.weight", "down_proj.weight")):
                    weights[name] *= np.float32(QUIET)
        return weights

    def _has_experts(self, layer: int) -> bool:
        """All have: vLLM's predictor has."""
        del layer
        return True
