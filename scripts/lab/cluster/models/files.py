"""A tiny Qwen3 with random weights, made locally: no model hub, and the same bytes every time.

The weights are scaled so that attention outweighs a token's own embedding: a greedy answer then
depends on all of the prompt, and KV that arrived wrong changes it.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

FloatArray = NDArray[np.float32]

REPO = Path(__file__).resolve().parents[2]
MODELS = REPO / ".models"
FORMAT = 1  # raise it when the same parameters shall give other files
SPECIALS: Final = ("<unk>", "<eos>", "<pad>")
ONSETS: Final = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z")
VOWELS: Final = ("a", "e", "i", "o")
DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # as in safetensors
EMBEDDING_GAIN = 16.0  # about 1 per element
ATTENTION_GAIN = 4.0
SHARPNESS = 2.0  # of attention: one word among thousands still shows
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


class Recipe(Protocol):
    """What the files of a model are made from: the same values give the same files."""

    family: ClassVar[str]

    @property
    def max_positions(self) -> int:
        """How long a prompt and its answer may be."""

    @property
    def dtype(self) -> str:
        """What the weights are stored in: a key of DTYPES."""

    def digest(self) -> str:
        """A short name for all values."""

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""

    def weights(self, vocab_size: int) -> dict[str, FloatArray]:
        """All tensors, by the names that vLLM's loader knows."""


class Dice:
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
class Numbers:
    """What every family of models is made from."""

    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 256
    intermediate: int = 512
    max_positions: int = 4096
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse shapes that vLLM would refuse only after half a minute."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class TinyModel(Numbers):
    """A Qwen3: full attention in all layers."""

    family: ClassVar[str] = "qwen3"

    def digest(self) -> str:
        """A short name for these parameters."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": vocab_size,
            "max_position_embeddings": self.max_positions,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "torch_dtype": self.dtype,
        }

    def weights(self, vocab_size: int) -> dict[str, FloatArray]:
        """All tensors, by the names that vLLM's loader knows."""
        dice = Dice(self.seed)
        hidden, inner, head = self.hidden, self.intermediate, self.head_dim
        queries, keys = self.heads * head, self.kv_heads * head
        weights = {
            "model.embed_tokens.weight": dice.matrix(vocab_size, hidden, EMBEDDING_GAIN),
            "model.norm.weight": vector(hidden),
            "lm_head.weight": dice.matrix(vocab_size, hidden),
        }
        for layer in range(self.layers):
            parts = {
                "input_layernorm.weight": vector(hidden),
                "post_attention_layernorm.weight": vector(hidden),
                "self_attn.q_proj.weight": dice.matrix(queries, hidden),
                "self_attn.k_proj.weight": dice.matrix(keys, hidden),
                "self_attn.v_proj.weight": dice.matrix(keys, hidden),
                "self_attn.o_proj.weight": dice.matrix(hidden, queries, ATTENTION_GAIN),
                "self_attn.q_norm.weight": vector(head, SHARPNESS),
                "self_attn.k_norm.weight": vector(head, SHARPNESS),
                "mlp.gate_proj.weight": dice.matrix(inner, hidden),
                "mlp.up_proj.weight": dice.matrix(inner, hidden),
                "mlp.down_proj.weight": dice.matrix(hidden, inner),
            }
            weights |= {f"model.layers.{layer}.{name}": part for name, part in parts.items()}
        return weights


def words() -> list[str]:
    """The 4,096 words of the vocabulary that are not special, in the order of their ids."""
    syllables = [onset + vowel for onset in ONSETS for vowel in VOWELS]
    return [first + second for first in syllables for second in syllables]


def ensure_tiny_model(
    root: Path = MODELS, model: Recipe | None = None, *, weights: bool = True
) -> Path:
    """The model's folder under root; made now if no earlier call made it.

    Without weights it is for vLLM's --load-format dummy.
    """
    model = model or TinyModel()
    target = root / f"{'tiny' if weights else 'shape'}-{model.family}-{model.digest()}"
    if not target.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
        try:
            write_model(scratch, model, weights=weights)
            scratch.rename(target)  # whole or not at all, also with two makers at once
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_model(folder: Path, model: Recipe, *, weights: bool = True) -> None:
    """Write all files of the model into a folder, perhaps but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    vocabulary = [*SPECIALS, *words()]
    write_json(folder / "config.json", model.config(len(vocabulary)))
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 2})
    write_tokenizer(folder, vocabulary, model.max_positions, chat_template=CHAT_TEMPLATE)
    if weights:
        tensors = model.weights(len(vocabulary))
        _write_safetensors(folder / "model.safetensors", tensors, model.dtype)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """As people read it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(
    folder: Path, vocabulary: Sequence[str], max_length: int, *, chat_template: str | None = None
) -> None:
    """One token per word, by its place in the vocabulary, which begins with SPECIALS."""
    ids = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", settings)


def _write_safetensors(path: Path, weights: Mapping[str, FloatArray], dtype: str) -> None:
    """A header in JSON, then the bytes. By hand: the library cannot make bfloat16 of numpy."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    parts: list[bytes] = []
    for name, values in weights.items():
        part = _bytes_of(values, dtype)
        span = [offset, offset + len(part)]
        header[name] = {"dtype": DTYPES[dtype], "shape": values.shape, "data_offsets": span}
        parts.append(part)
        offset += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def _bytes_of(values: FloatArray, dtype: str) -> bytes:
    if dtype != "bfloat16":
        return values.astype(dtype).tobytes()
    bits = values.view(np.uint32)
    to_even = (bits >> 16) & 1
    return ((bits + 0x7FFF + to_even) >> 16).astype(np.uint16).tobytes()
