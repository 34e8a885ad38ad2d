"""What tiny models are made from: numbers, and random weights that are the same every time.

Attention is sharp and outweighs a token's own embedding: a greedy answer then depends on all of the
prompt, and KV that arrived wrong changes it.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Tensors = dict[str, FloatArray]

FORMAT: Final = 1
"""Raise it when the same numbers shall give other files."""
DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""By the names that safetensors has for them."""
EMBEDDING_GAIN: Final = 16.0
"""About 1 per element."""
ATTENTION_GAIN: Final = 4.0
SHARPNESS: Final = 2.0
"""Of attention: one word among thousands still shows."""
LOGIT_GAIN: Final = SHARPNESS**2
"""How widely scores of attention spread."""


class RandomMatrices:
    """Random matrices, the same for the same seed and order of calls."""

    def __init__(self, seed: int) -> None:
        """Nothing is drawn yet."""
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> FloatArray:
        """A matrix that makes vectors of size 1 per element into vectors of size `gain`."""
        values = self._generator.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain / columns**0.5)


def vector(size: int, value: float = 1.0) -> FloatArray:
    """The same value everywhere, such as the weight of a norm."""
    return np.full(size, value, dtype=np.float32)


@dataclass(frozen=True)
class Family(ABC):
    """What a model's files are made from: the same numbers give the same files."""

    family: ClassVar[str]
    architecture: ClassVar[str]
    model_type: ClassVar[str]
    embedding_gain: ClassVar[float] = EMBEDDING_GAIN
    neutral_norm: ClassVar[float] = 1.0
    """The weight of a norm that scales nothing."""

    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 256
    intermediate: int = 512
    max_positions: int = 4096
    """How long a prompt and its answer may be."""
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse shapes that vLLM would refuse only after half a minute."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: one of {', '.join(DTYPES)}")

    def digest(self) -> str:
        """A short name for all numbers."""
        text = json.dumps([FORMAT, self.family, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
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

    def weights(self, vocab_size: int) -> Tensors:
        """All tensors, by the names that vLLM's loader knows."""
        random = RandomMatrices(self.seed)
        weights = {
            "model.embed_tokens.weight": random.matrix(
                vocab_size, self.hidden, self.embedding_gain
            ),
            "model.norm.weight": vector(self.hidden, self.neutral_norm),
            "lm_head.weight": random.matrix(vocab_size, self.hidden),
        }
        for layer in range(self.layers):
            parts = self.layer_weights(random, layer)
            weights |= {f"model.layers.{layer}.{name}": part for name, part in parts.items()}
        return weights

    @abstractmethod
    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """The tensors of a layer, by their names in it."""

    def mlp(self, random: RandomMatrices) -> Tensors:
        """The weights of a layer's MLP."""
        return {
            "mlp.gate_proj.weight": random.matrix(self.intermediate, self.hidden),
            "mlp.up_proj.weight": random.matrix(self.intermediate, self.hidden),
            "mlp.down_proj.weight": random.matrix(self.hidden, self.intermediate),
        }
