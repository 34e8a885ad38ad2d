"""The folder of a model: what transformers and vLLM load."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.cluster.models.files import write_json, write_tokenizer
from lab.accuracy.recall.model import Recall, Shape
from lab.accuracy.recall.task import EOS, PAD, vocabulary

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save(folder: Path, model: Recall, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write weights, configuration and tokenizer."""
    config = model.shape.config(str(dtype).removeprefix("torch."))
    write(folder, model.state_dict(), config, model.shape.max_positions, dtype)


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    max_positions: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a model of the recall task: weights in this type, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: part.detach().to("cpu", dtype).contiguous() for name, part in tensors.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # others may run the engine
    write_json(folder / CONFIG, config)
    write_json(folder / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    write_tokenizer(folder, vocabulary(), max_positions)


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
