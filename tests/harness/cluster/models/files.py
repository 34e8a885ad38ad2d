"""The files of a tiny model: configuration, tokenizer, weights."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from harness.cluster.models.families import TinyModel
from harness.cluster.models.recipe import Family

REPO: Final = Path(__file__).resolve().parents[4]
MODELS: Final = REPO / ".models"
SPECIALS: Final = ("<unk>", "<eos>", "<pad>")
ONSETS: Final = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z")
VOWELS: Final = ("a", "e", "i", "o")


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
    import torch  # noqa: PLC0415 - takes seconds, and few models are made
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.chmod(0o755)  # others may run the engine
    specials = (*SPECIALS, *model.special_words)
    vocabulary = [*specials, *words()]
    write_json(folder / "config.json", model.config(len(vocabulary)))
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 2})
    write_tokenizer(folder, vocabulary, specials, model)
    if processor := model.processor():
        write_json(folder / "processor_config.json", processor)
    if weights:
        dtype = getattr(torch, model.dtype)
        tensors = model.weights(len(vocabulary)).items()
        weighted = {name: torch.from_numpy(values).to(dtype) for name, values in tensors}
        path = folder / "model.safetensors"
        save_file(weighted, path, metadata={"format": "pt"})
        path.chmod(0o644)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(
    folder: Path, vocabulary: Sequence[str], specials: Sequence[str], model: Family
) -> None:
    """One token per word, by its place in the vocabulary."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - see write_model
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: PLC0415

    ids = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name in all versions of transformers
        "unk_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": model.chat_template,
    }
    if model.special_words:
        settings["extra_special_tokens"] = list(model.special_words)
    write_json(folder / "tokenizer_config.json", settings)
