"""docs/plan.md shows what the commands print."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nixl_kv.cli.main import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = (DOCS / "plan.md").read_text(encoding="utf-8").split("```")[1::2]


@pytest.mark.parametrize("block", BLOCKS, ids=["LBHNC", "BHLNC", "LB2HNC"])
def test_what_stands_there_is_what_comes_out(block: str) -> None:
    _, command, shown = block.replace("\\\n", "").split("\n", 2)
    words = shlex.split(command.removeprefix("$ "))
    assert words[0] == "nixl-kv"
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_the_picture_is_that_of_the_first_command(
    qwen: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / "plan.svg"
    qwen(
        "--prefill tp=1,block=16,layout=LBHNC --decode tp=2,block=16,layout=LBHNC", f"--svg {path}"
    )
    assert path.read_text(encoding="utf-8") == (DOCS / "plan.svg").read_text(encoding="utf-8")
