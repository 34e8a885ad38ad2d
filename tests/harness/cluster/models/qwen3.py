"""A tiny Qwen3: full attention in all layers."""

from dataclasses import dataclass
from typing import ClassVar, Final

from harness.cluster.models.recipe import SHARP_ATTENTION, SHARPNESS, Family, Tensors

VOCABULARY_UNIT: Final = 3 * 64


@dataclass(frozen=True)
class TinyModel(Family):
    """A Qwen3: full attention in all layers."""

    family = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    gains = SHARP_ATTENTION
    constants: ClassVar = {"q_norm": SHARPNESS, "k_norm": SHARPNESS}

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {"hidden_act": "silu", "rope_theta": 10000.0}


@dataclass(frozen=True)
class PaddedQwen3(TinyModel):
    """A TinyModel with a vocabulary that three ranks can share: vLLM pads to 64 only.

    The words more have no name; their scores are 0, and so they are never the best.
    """

    family = "qwen3-padded"

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(-(-vocab_size // VOCABULARY_UNIT) * VOCABULARY_UNIT)

    def weights(self, vocab_size: int) -> Tensors:
        weights = super().weights(vocab_size)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name][vocab_size:] = 0
        return weights
