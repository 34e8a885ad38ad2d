"""`nixl-kv plan`: pairs of ranks and the verdict, for engines of many shapes."""

import json

import pytest

from harness.local.model_layouts import EngineShape, ModelShape, StatePart
from nixl_kv.cli.compare import layers_text, ranges_text
from nixl_kv.cli.doctor import engines as engines_of_doctor
from nixl_kv.protocol.messages import Description
from support.documented import DOCS
from support.nixl_kv_command import (
    HYBRID,
    QWEN3_8B,
    answered,
    described,
    plan,
    plan_figures,
)

MODEL = ModelShape(6, 4, (8, 8), "bfloat16")


def engines(
    prefill: EngineShape, decode: EngineShape, model: ModelShape = QWEN3_8B
) -> tuple[Description, Description]:
    return described(prefill, model), described(decode, model)


def test_a_rank_that_reads_recurrent_states_shows_their_layers() -> None:
    """Three layers have a state, the fourth has KV heads. The first stage has no KV."""
    shapes = EngineShape(block_size=128), EngineShape(tp=2, block_size=128)
    links = plan_figures(*engines(*shapes, HYBRID))["links"]
    assert [(link["layer_numbers"], link["heads"]) for link in links] == [
        ("0-3", [[0, 2]]),
        ("0-3", [[2, 4]]),
    ]
    stages = engines(EngineShape(block_size=128), EngineShape(pp=2, block_size=128), HYBRID)
    links = plan_figures(*stages)["links"]
    assert [(link["layer_numbers"], link["heads"]) for link in links] == [
        ("0-1", []),
        ("2-3", [[0, 4]]),
    ]
    assert ["0", "0", "0-1", "-"] in [line.split() for line in plan(*stages).stdout.splitlines()]


def test_prefill_ranks_that_no_rank_reads_are_released() -> None:
    asked = engines(EngineShape(tp=16), EngineShape(tp=8))
    figures = plan_figures(*asked)
    assert len(figures["links"]) == 8
    read = {link["source"] for link in figures["links"]}
    unread = {one["source"]: one["released_by"] for one in figures["unread"]}
    assert read | set(unread) == set(range(16))
    assert all(reader == source % 8 for source, reader in unread.items())
    assert ", ".join(f"{s} ({r})" for s, r in unread.items()) in plan(*asked).stdout


def test_documented_output_is_what_the_command_prints() -> None:
    (block,) = (DOCS / "runbook.md").read_text(encoding="utf-8").split("```")[1::2]
    _, command, shown = block.split("\n", 2)
    assert command.startswith("$ nixl-kv plan --prefill-at 10.0.0.1:5600 --decode-at 10.0.0.2:5600")
    shapes = {"P": EngineShape(order="BHLNC"), "D": EngineShape(tp=2, order="BHLNC")}
    prefill, decode = (described(shape, QWEN3_8B, name=name) for name, shape in shapes.items())
    result = plan(prefill, decode)
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


# --- engines that do not fit, and bad input


OTHER_MODEL = described(EngineShape(), facts={"served_model_name": "llama"})
OTHER_SHAPE = described(EngineShape(), MODEL)
FITS = described(EngineShape())


def test_a_mismatch_exits_1_and_is_named() -> None:
    prefill = described(EngineShape())
    decode = described(EngineShape(), facts={"served_model_name": "llama"})
    result = plan(prefill, decode)
    assert result.exit_code == 1
    assert "served_model_name is 'llama' here and 'qwen' there" in result.stdout
    result = plan(prefill, decode, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["mismatches"] == [
        {"field": "served_model_name", "decode": "llama", "prefill": "qwen"}
    ]


@pytest.mark.parametrize(
    ("decode", "labels", "fields"),
    [
        pytest.param(FITS, ("", ""), [], id="alike"),
        pytest.param(described(EngineShape(tp=2)), ("7", "7"), [], id="another TP"),
        pytest.param(FITS, ("7", ""), ["weights"], id="one label"),
        pytest.param(FITS, ("7", "8"), ["weights"], id="other labels"),
        pytest.param(OTHER_MODEL, ("", ""), ["served_model_name"], id="another model"),
        pytest.param(OTHER_MODEL, ("7", "8"), ["served_model_name", "weights"], id="both"),
        pytest.param(OTHER_SHAPE, ("", ""), None, id="another shape"),
    ],
)
def test_plan_and_doctor_give_one_verdict(
    decode: Description, labels: tuple[str, str], fields: list[str] | None
) -> None:
    """One function decides for both, so a pipeline may ask either."""
    result = plan(FITS, decode, labels=labels)
    prefill, reader = answered(FITS, labels[0], "p:1"), answered(decode, labels[1], "d:1")
    check = engines_of_doctor._pair(reader, prefill)
    assert (result.exit_code, check.verdict) == ((0, "ok") if fields == [] else (1, "error"))
    shown = json.loads(plan(FITS, decode, "--json", labels=labels).stdout)["mismatches"]
    named = [each["field"] for each in shown]
    assert fields is None or named == fields
    assert bool(named) == (fields != [])
    for field in named[:3]:
        assert f"{field} is " in result.stdout
        assert f"{field} is " in check.detail
    assert ("set-weights" in (check.fix or "")) == (named == ["weights"])


def test_names_of_an_engine_cannot_control_the_terminal() -> None:
    part = StatePart("p\x1b[2J\n", 2, 8, "bfloat16 state")
    model = ModelShape(2, 2, (64, 64), "bfloat16", recurrent=(0,), without_kv=(0,), state=(part,))
    prefill, decode = (
        described(EngineShape(num_blocks=100), model, name=f"{side}\x1b]0;") for side in "PD"
    )
    result = plan(prefill, decode)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert r"P\x1b]0;" in result.stdout


def test_more_pieces_than_can_be_numbered_exit_1() -> None:
    prefill = EngineShape(order="LBNHC", num_blocks=1_000_000)
    decode = EngineShape(tp=2, num_blocks=1_000_000)
    result = plan(*engines(prefill, decode))
    assert result.exit_code == 1
    assert "2304000000 pieces" in result.stderr


# --- text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["model.layers.0.self_attn", "model.layers.1.self_attn"], "0-1"),
        ([f"x{number}.y" for number in range(36)], "0-35"),
        ([f"model.{number}.attn.1" for number in range(36)], "36"),
        (["a.0", "b.0"], "2"),
        (["a.0.1", "a.0.2"], "2"),
        (["a"], "1"),
    ],
)
def test_layers_are_shown_by_number_if_each_has_one(names: list[str], text: str) -> None:
    assert layers_text(names) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (range(4), "0-3"),
        ([5, 0, 1, 2], "0-2, 5"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 2, 4, 6], "4 of 0-6"),
    ],
)
def test_ranges_text(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text
