"""The folder of a model: what transformers and vLLM load."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pd.tiny_model import SPECIALS
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from recall.model import Recall, Shape
from recall.task import EOS, PAD, vocabulary

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save(folder: Path, model: Recall, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: part.detach().to("cpu", dtype).contiguous()
        for name, part in model.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # others may run the engine
    _write_json(folder / CONFIG, model.shape.config(str(dtype).removeprefix("torch.")))
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    _write_tokenizer(folder, model.shape.max_positions)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Recall:
    """Read a model that save() wrote."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    shape = Shape(
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
    )
    model = Recall(shape)
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.to(dtype).eval()


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, max_length: int) -> None:
    ids = {word: number for number, word in enumerate(vocabulary())}
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
    _write_json(folder / "tokenizer_config.json", settings)
