"""docs/plan.md shows what `nixl-kv plan` prints."""

from harness.local.model_layouts import EngineShape
from support.documented import DOCS
from support.nixl_kv_command import QWEN3_8B, described, plan


def test_documented_output_is_what_the_command_prints() -> None:
    (block,) = (DOCS / "plan.md").read_text(encoding="utf-8").split("```")[1::2]
    _, command, shown = block.split("\n", 2)
    assert command.startswith("$ nixl-kv plan --prefill-at 10.0.0.1:5600 --decode-at 10.0.0.2:5600")
    shapes = {"P": EngineShape(order="BHLNC"), "D": EngineShape(tp=2, order="BHLNC")}
    prefill, decode = (described(shape, QWEN3_8B, name=name) for name, shape in shapes.items())
    result = plan(prefill, decode)
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()
