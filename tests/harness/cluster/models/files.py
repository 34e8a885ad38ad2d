"""The files of a tiny model: configuration, tokenizer, weights."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from harness.cluster.models.qwen3 import TinyModel
from harness.cluster.models.recipe import DTYPES, Family, FloatArray

REPO: Final = Path(__file__).resolve().parents[4]
MODELS: Final = REPO / ".models"
SPECIALS: Final = ("<unk>", "<eos>", "<pad>")
ONSETS: Final = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z")
VOWELS: Final = ("a", "e", "i", "o")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def words() -> list[str]:
    """The 4,096 words of the vocabulary that are not special, in the order of their ids."""
    syllables = [onset + vowel for onset in ONSETS for vowel in VOWELS]
    return [first + second for first in syllables for second in syllables]


def ensure_tiny_model(
    root: Path = MODELS, model: Family | None = None, *, weights: bool = True
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


def write_model(folder: Path, model: Family, *, weights: bool = True) -> None:
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
