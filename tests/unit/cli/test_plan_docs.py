"""docs/plan.md shows what `nixl-kv plan` prints."""

import pytest

from lab.local.model_layouts import EngineShape, ModelShape
from support.documented import DOCS
from support.nixl_kv_command import HYBRID, QWEN3_8B, described, plan

BLOCKS = (DOCS / "plan.md").read_text(encoding="utf-8").split("```")[1::2]
PAIRS = [
    (QWEN3_8B, EngineShape(order="LBHNC"), EngineShape(tp=2, order="LBHNC")),
    (QWEN3_8B, EngineShape(order="BHLNC"), EngineShape(tp=2, order="BHLNC")),
    (HYBRID, EngineShape(block_size=128), EngineShape(tp=2, block_size=128)),
]


@pytest.mark.parametrize(
    ("block", "pair"), [*zip(BLOCKS, PAIRS, strict=True)], ids=["LBHNC", "BHLNC", "states"]
)
def test_documented_output_is_what_the_command_prints(
    block: str, pair: tuple[ModelShape, EngineShape, EngineShape]
) -> None:
    model, prefill, decode = pair
    _, command, shown = block.split("\n", 2)
    assert command.startswith("$ nixl-kv plan --prefill-at 10.0.0.1:5600 --decode-at 10.0.0.2:5600")
    result = plan(described(prefill, model, name="P"), described(decode, model, name="D"))
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()
