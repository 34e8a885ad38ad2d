"""`nixl-kv plan`: pairs of ranks and numbers of descriptors, for engines of many shapes."""

import itertools
import json
from dataclasses import replace

import pytest

from harness.local.model_layouts import EngineShape, ModelShape, StatePart
from nixl_kv.cli.compare import compare, example_reads, layers_text, ranges_text, run_lengths
from nixl_kv.cli.doctor import engines as engines_of_doctor
from nixl_kv.geometry import match
from nixl_kv.geometry.plan import plan as make_plan
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
WINDOWS = ModelShape(6, 4, (8, 8), "bfloat16", 24, (0, 1, 3, 4))
ORDERS = ("LBHNC", "LBNHC", "BHLNC", "LB2HNC")
CUTS = (((1, 4), (1, 4)), ((2, 4), (1, 12)), ((1, 8), (4, 12)))


def engines(
    prefill: EngineShape, decode: EngineShape, model: ModelShape = QWEN3_8B
) -> tuple[Description, Description]:
    return described(prefill, model), described(decode, model)


# --- figures


@pytest.mark.parametrize(
    ("order", "runs", "length", "descriptors"),
    [
        pytest.param("LBHNC", 36, 32 << 10, 36_864, id="one run per layer"),
        pytest.param("BHLNC", 1, 36 * 32 << 10, 1024, id="one run per block"),
    ],
)
def test_figures_of_qwen3_8b_from_tp1_to_tp2(
    order: str, runs: int, length: int, descriptors: int
) -> None:
    shapes = (EngineShape(order=order), EngineShape(tp=2, order=order))
    figures = plan_figures(*engines(*shapes))
    assert [(link["reader"], link["source"]) for link in figures["links"]] == [(0, 0), (1, 0)]
    assert [link["heads"] for link in figures["links"]] == [[[0, 4]], [[4, 8]]]
    for link in figures["links"]:
        assert (link["layers"], link["layer_numbers"]) == (36, "0-35")
        assert link["period"] == 16
        assert link["runs_per_period"] == runs
        assert link["run_bytes"] == [length, length, length]
        assert link["bytes_per_token"] == 72 << 10
        assert link["request_bytes"] == 16_384 * 72 << 10
        assert link["descriptors"] == link["descriptors_in_a_row"] == descriptors
        assert link["index_bytes"] == 8 * descriptors
    assert figures["total"] == {
        "links": 2,
        "bytes": 16_384 * 144 << 10,
        "descriptors": 2 * descriptors,
        "descriptors_in_a_row": 2 * descriptors,
        "state_bytes": 0,
        "state_runs": 0,
    }
    assert figures["mismatches"] == figures["unread"] == []
    assert figures["tokens"] == 16_384


def test_runs_of_unequal_blocks_are_counted_over_a_period() -> None:
    """Runs of several lengths show the shortest, the median and the longest."""
    asked = engines(EngineShape(tp=8, block_size=64), EngineShape(tp=8, block_size=48))
    link = plan_figures(*asked)["links"][0]
    assert (link["period"], link["entry_sizes"]) == (192, [[48], [64]])
    # Segments of 48, 16, 32, 32, 16 and 48 tokens, of one head.
    assert link["runs_per_period"] == 36 * 6
    assert link["run_bytes"] == [16 * 512, 32 * 512, 48 * 512]
    shown = plan(*asked).stdout
    assert "8 KiB / 16 KiB / 24 KiB" in shown
    assert "blocks of 64 tokens" in shown.splitlines()[0]
    assert "192 tokens" in shown.splitlines()[4], "the heading of the runs per period"


HYBRIDS = engines(EngineShape(block_size=128), EngineShape(tp=2, block_size=128), HYBRID)


def test_states_are_read_once_per_request_of_any_length() -> None:
    links = [plan_figures(*HYBRIDS, f"--tokens {n}")["links"][0] for n in (384, 768)]
    assert links[0]["state"] == links[1]["state"]
    parts = [(one["part"], one["heads"], one["num_bytes"]) for one in links[0]["state"]]
    assert parts == [
        ("query", [0, 1], 3 * 3 * 256),
        ("key", [0, 1], 3 * 3 * 256),
        ("value", [0, 2], 3 * 3 * 512),
        ("state", [0, 2], 3 * 2 * 128 * 128 * 4),
    ]
    state = sum(size for _, _, size in parts)
    # In each layer: three rows of three projections, and two consecutive heads of the state.
    assert [link["state_runs"] for link in links] == [3 * (3 * 3 + 1)] * 2
    assert [link["request_bytes"] for link in links] == [384 * 512 + state, 768 * 512 + state]
    assert [link["descriptors"] for link in links] == [30 + 3, 30 + 6]
    for link in links:
        assert (link["layers"], link["heads"], link["entry_sizes"]) == (4, [[0, 2]], [[384]] * 2)
        assert (link["bytes_per_token"], link["runs_per_period"]) == (512, 3)


def test_states_have_a_table_of_their_own() -> None:
    shown = plan(*HYBRIDS).stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["0", "0", "0-2", "query", "0", "2.25", "KiB"] in rows
    assert ["1", "0", "0-2", "state", "2-3", "384", "KiB"] in rows
    assert "786 KiB of recurrent states in 60 descriptors" in shown


def test_prefill_ranks_that_no_rank_reads_are_released() -> None:
    asked = engines(EngineShape(tp=16), EngineShape(tp=8))
    figures = plan_figures(*asked)
    assert len(figures["links"]) == 8
    read = {link["source"] for link in figures["links"]}
    unread = {one["source"]: one["released_by"] for one in figures["unread"]}
    assert read | set(unread) == set(range(16))
    assert all(reader == source % 8 for source, reader in unread.items())
    assert ", ".join(f"{s} ({r})" for s, r in unread.items()) in plan(*asked).stdout


def test_the_default_prompt_fits_into_the_smaller_cache() -> None:
    """One that fills the cache has scattered blocks."""
    asked = engines(EngineShape(num_blocks=100), EngineShape(num_blocks=200))
    figures = plan_figures(*asked)
    assert figures["tokens"] == 1600
    (link,) = figures["links"]
    assert (link["descriptors"], link["descriptors_in_a_row"]) == (100 * 36, 36)
    assert plan_figures(*asked, "--tokens 160")["tokens"] == 160


def test_documented_output_is_what_the_command_prints() -> None:
    (block,) = (DOCS / "plan.md").read_text(encoding="utf-8").split("```")[1::2]
    _, command, shown = block.split("\n", 2)
    assert command.startswith("$ nixl-kv plan --prefill-at 10.0.0.1:5600 --decode-at 10.0.0.2:5600")
    shapes = {"P": EngineShape(order="BHLNC"), "D": EngineShape(tp=2, order="BHLNC")}
    prefill, decode = (described(shape, QWEN3_8B, name=name) for name, shape in shapes.items())
    result = plan(prefill, decode)
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


# --- the figures against the planner


@pytest.mark.parametrize(
    ("model", "here", "there", "cut"),
    [
        *[(MODEL, "LBHNC", "BHLNC", cut) for cut in CUTS],
        *[(WINDOWS, here, there, CUTS[-1]) for here, there in itertools.pairwise(ORDERS)],
    ],
    ids=str,
)
def test_run_lengths_add_up_to_what_the_planner_reads(
    model: ModelShape, here: str, there: str, cut: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    decode, prefill = (
        described(EngineShape(tp=tp, block_size=block, num_blocks=300, order=order), model)
        for (tp, block), order in zip(cut, (here, there), strict=True)
    )
    links = {(one["reader"], one["source"]): one for one in compare(decode, prefill, 96)["links"]}
    assert links
    ours, theirs = ([rank.layout for rank in engine.ranks] for engine in (decode, prefill))
    held = [[match.holdings(layout) for layout in layouts] for layouts in (ours, theirs)]
    for (reader, source), figures in links.items():
        (route,) = (r for r in match.routes(reader, *held) if r.remote_rank == source)
        planned = make_plan(ours[reader], theirs[source], route.share)
        for reads in (
            example_reads(planned, 96),
            example_reads(planned, 96, scattered=False),
            example_reads(planned, 96, windows=False),
        ):
            lengths = run_lengths(planned, reads)
            assert len(lengths) == reads.num_runs
            assert lengths.sum() == reads.num_bytes
        whole = example_reads(planned, 96, windows=False)
        assert whole.num_runs == figures["runs_per_period"] * 96 // figures["period"]
        assert whole.num_bytes == figures["bytes_per_token"] * 96
        assert figures["descriptors_in_a_row"] <= figures["descriptors"]


# --- engines that do not fit, and bad input


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


OTHER_MODEL = described(EngineShape(), facts={"served_model_name": "llama"})
OTHER_SHAPE = described(EngineShape(), MODEL)
FITS = described(EngineShape())


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
    assert r"p\x1b[2J\n" in result.stdout


@pytest.mark.parametrize(
    ("num_blocks", "options", "words"),
    [
        ((10_000, 10_000), ("--tokens 160001",), "error: tokens is 160001; allowed: 1 to 160000"),
        ((2, 1), (), "48 tokens need 3 blocks; allowed: up to 2"),
    ],
    ids=["a prompt", "a period"],
)
def test_what_does_not_fit_exits_2(
    num_blocks: tuple[int, int], options: tuple[str, ...], words: str
) -> None:
    shapes = (EngineShape(block_size=16), EngineShape(block_size=48))
    prefill, decode = (
        replace(shape, num_blocks=number) for shape, number in zip(shapes, num_blocks, strict=True)
    )
    result = plan(*engines(prefill, decode), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


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
