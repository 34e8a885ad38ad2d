"""Tiny models: transformers' own classes with random weights, the same for the same numbers.

Attention is sharp and outweighs a token's own embedding: a greedy answer then depends on all of the
prompt, and KV that arrived wrong changes it.
"""

import hashlib
import json
import tempfile
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Tensors = dict[str, FloatArray]

FORMAT: Final = 2  # raise it when the same numbers shall give other files
ATTENTION_GAIN: Final = 4.0
SHARPNESS: Final = 2.0  # one word among thousands still shows in attention
LOGIT_GAIN: Final = SHARPNESS**2  # how widely scores of attention spread
DECAY: Final = (-6.0, -3.0)
"""The logarithms of what heads forget with each token: a state has early words in it, and all."""
FULL: Final = "full_attention"


@dataclass(frozen=True)
class Family(ABC):
    """A kind of model; the same numbers give the same files."""

    family: ClassVar[str]
    architecture: ClassVar[str]
    model_type: ClassVar[str]
    gains: ClassVar[Mapping[str, float]] = {}
    """The size per element that a matrix gives vectors of size 1, by the end of its name."""
    constants: ClassVar[Mapping[str, float]] = {}
    """The value of all elements of a vector, by the end of its name."""
    neutral_norm: ClassVar[float] = 1.0  # the weight of a norm that scales nothing
    auto_class: ClassVar[str] = "AutoModelForCausalLM"  # the class of transformers that makes it
    special_words: ClassVar[Sequence[str]] = ()  # after those of all families
    tie: ClassVar[float | None] = None  # as `answers.TIES`, if this family rounds more than others
    chat_template: ClassVar[str] = (
        "{% for message in messages %}"
        "{{ message['role'] + ' ' + message['content'] + ' ' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )

    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 256
    intermediate: int = 512
    max_positions: int = 4096  # how long a prompt and its answer may be
    dtype: str = "float32"
    seed: int = 0

    def digest(self) -> str:
        """A short name for all numbers."""
        text = json.dumps([FORMAT, self.family, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def config(self, vocab_size: int) -> dict[str, object]:
        """The content of config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
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

    def processor(self) -> Mapping[str, object] | None:
        """The content of processor_config.json, for a model that takes media."""
        return None

    def weights(self, vocab_size: int) -> Tensors:
        """All tensors, by the names that vLLM's loader knows."""
        import torch  # noqa: PLC0415 - takes seconds, and few models are made
        import transformers  # noqa: PLC0415
        from safetensors.numpy import load_file  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()
        config = transformers.AutoConfig.for_model(**self.config(vocab_size))
        model = getattr(transformers, self.auto_class).from_config(config, dtype=torch.float32)
        random = np.random.Generator(np.random.PCG64(self.seed))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                values = self.values(name.removesuffix(".weight"), tuple(weight.shape), random)
                weight.copy_(torch.from_numpy(values))
        with tempfile.TemporaryDirectory() as folder:  # names of files differ from those in torch
            model.save_pretrained(folder)
            return dict(load_file(Path(folder) / "model.safetensors"))

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        """The values of one parameter."""
        if name.endswith("A_log"):
            return np.linspace(*DECAY, np.prod(shape), dtype=np.float32).reshape(shape)
        if len(shape) == 1:
            return np.full(shape, _by_end(self.constants, name, self.neutral_norm), np.float32)
        gain = _by_end(self.gains, name, 1.0)
        return random.standard_normal(shape, np.float32) * np.float32(gain / shape[-1] ** 0.5)


def _by_end(table: Mapping[str, float], name: str, default: float) -> float:
    return next((value for end, value in table.items() if name.endswith(end)), default)


SHARP_ATTENTION: Final = {
    "embed_tokens": 16.0,  # about 1 per element
    "o_proj": ATTENTION_GAIN,
    "out_proj": ATTENTION_GAIN,
}
"""The gains of a family whose attention has no norm behind it."""


def layer_types(layers: int, period: int, others: str) -> list[str]:
    """Full attention in the last layer of each `period`."""
    return [others if (layer + 1) % period else FULL for layer in range(layers)]
