"""Runs `nixl-kv` in this process."""

import json
import shlex
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
