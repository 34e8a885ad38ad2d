"""docs/plan.md shows what the commands print and draw."""

import re
from pathlib import Path

import pytest

from support.nixl_kv_command import nixl_kv

DOCS = Path(__file__).resolve().parents[3] / "docs"
BLOCKS = (DOCS / "plan.md").read_text(encoding="utf-8").replace("\\\n", "").split("```")[1::2]
NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?\b")


@pytest.mark.parametrize("block", BLOCKS, ids=["LBHNC", "BHLNC", "LB2HNC"])
def test_documented_output_is_what_the_command_prints(block: str) -> None:
    _, command, shown = block.split("\n", 2)
    result = nixl_kv(command.removeprefix("$ nixl-kv "))
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_documented_picture_is_what_the_first_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    command = BLOCKS[0].splitlines()[1].removeprefix("$ nixl-kv ")
    assert nixl_kv(command, f"--svg {path}").exit_code == 0
    drawn, documented = (each.read_text(encoding="utf-8") for each in (path, DOCS / "plan.svg"))
    assert re.findall(r">[^<>]+<", drawn) == re.findall(r">[^<>]+<", documented)
    # Releases of matplotlib may round lengths differently.
    assert NUMBER.sub("#", drawn) == NUMBER.sub("#", documented)
    lengths = [[float(number) for number in NUMBER.findall(svg)] for svg in (drawn, documented)]
    assert lengths[0] == pytest.approx(lengths[1], abs=1)
