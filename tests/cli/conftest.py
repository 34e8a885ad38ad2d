"""Runs `nixl-kv` in this process."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nixl_kv.cli.main import app

QWEN3_8B = ["--layers", "36", "--kv-heads", "8", "--head-size", "128", "--dtype", "bfloat16"]

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Takes the arguments after `nixl-kv plan`, as one string or several."""

    def call(*arguments: str) -> Result:
        result = CliRunner().invoke(app, ["plan", *(a for arg in arguments for a in arg.split())])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return call


@pytest.fixture
def qwen(run: Run) -> Run:
    """The same for the shape of Qwen3-8B."""
    return lambda *arguments: run(*QWEN3_8B, *arguments)


@pytest.fixture
def figures(qwen: Run) -> Callable[..., dict[str, Any]]:
    """The same, as JSON."""

    def call(*arguments: str) -> dict[str, Any]:
        result = qwen(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout))

    return call
