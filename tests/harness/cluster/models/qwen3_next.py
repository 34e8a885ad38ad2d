"""A tiny Qwen3-Next: gated delta nets, whose state stands for the prompt, and full attention.

vLLM's CPU build computes delta nets in bfloat16 alone, with heads of 64 or 128, and wants a layer
with experts.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from harness.cluster.models.recipe import (
    SHARP_ATTENTION,
    SHARPNESS,
    Family,
    FloatArray,
    Tensors,
    layer_types,
)

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
    gains = SHARP_ATTENTION
    # A norm's weight is 1 less than what it multiplies by, but that within a delta net.
    neutral_norm = 0.0
    constants: ClassVar = {
        "q_norm": SHARPNESS - 1.0,
        "k_norm": SHARPNESS - 1.0,
        "linear_attn.norm": 1.0,
        "dt_bias": 1.0,
    }

    dtype: str = "bfloat16"
    period: int = 4
    sparse_step: int = 4
    key_heads: int = 2
    value_heads: int = 4
    state_dim: int = 128
    """The size of keys and values in a state."""
    kernel: int = 4
    """The length of the convolution."""
    experts: int = 2
    expert_dim: int = 64

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "hidden_act": "silu",
            "attn_output_gate": True,
            "layer_types": layer_types(self.layers, self.period, "linear_attention"),
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
            "mlp_only_layers": [n for n in range(self.layers) if n % self.sparse_step],
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts,
            "moe_intermediate_size": self.expert_dim,
            "shared_expert_intermediate_size": self.expert_dim,
            "norm_topk_prob": True,
        }


@dataclass(frozen=True)
class Qwen3NextMtp(Qwen3Next):
    """A Qwen3-Next that predicts its own words, and is mostly right.

    Its last layer says almost all, and the predictor is that layer once more, for the word after.
    So a word that is predicted is right where the predictor has its KV of the whole prompt.
    """

    family = "qwen3-next-mtp"

    layers: int = 2
    period: int = 2
    sparse_step: int = 1  # vLLM's predictor has experts

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {"num_nextn_predict_layers": 1}

    def weights(self, vocab_size: int) -> Tensors:
        """The predictor is given a word and what the model makes of it; this one sees the word.

        transformers knows no predictor.
        """
        weights = super().weights(vocab_size)
        last = f"model.layers.{self.layers - 1}."
        predictor = {
            name.replace(last, "mtp.layers.0."): part
            for name, part in weights.items()
            if name.startswith(last)
        }
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        predictor |= {f"mtp.{norm}.weight": np.zeros(self.hidden, np.float32) for norm in norms}
        predictor["mtp.fc.weight"] = np.eye(self.hidden, 2 * self.hidden, dtype=np.float32)
        return weights | predictor

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        """The layers before the last one add little."""
        values = super().values(name, shape, random)
        is_last = f".{self.layers - 1}." in name
        is_added = name.endswith(("out_proj", "down_proj"))
        return values * np.float32(QUIET) if is_added and not is_last else values
