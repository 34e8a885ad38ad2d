"""Runs `nixl-kv` in this process."""

import json
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from nixl_kv.cli.main import app

QWEN3_8B = "--layers 36 --kv-heads 8 --head-size 128 --dtype bfloat16"


def nixl_kv(*arguments: str) -> Result:
    """Run a command; each argument may be several, as in a shell. No exception leaves it."""
    words = [word for argument in arguments for word in shlex.split(argument)]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def plan_qwen(*arguments: str) -> Result:
    """`nixl-kv plan` for the shape of Qwen3-8B."""
    return nixl_kv("plan", QWEN3_8B, *arguments)


def plan_figures(*arguments: str) -> dict[str, Any]:
    """The same, as JSON."""
    result = plan_qwen(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def hybrid_model(folder: Path) -> Path:
    """Write a configuration: three layers with a state of 262 KiB, one with 1 KiB for each token.

    Those are the tiny Qwen3-Next's, whose engines make blocks of 384 tokens.
    """
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
