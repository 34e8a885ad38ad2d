"""`nixl-kv plan`, for engines that need not exist."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.nixl_kv_command import hybrid_model, nixl_kv, plan_figures, plan_qwen

REPO = Path(__file__).resolve().parents[3]
IN_TREE = 36_864
"""Descriptors of vLLM's own connector for 16,384 tokens of Qwen3-8B, TP1 to TP2 in LBHNC."""


def both(numbers: str) -> str:
    """TP1 to TP2."""
    return f"--prefill tp=1,block=16,{numbers} --decode tp=2,block=16,{numbers}"


@pytest.mark.parametrize(
    ("order", "runs", "length", "descriptors"),
    [
        pytest.param("LBHNC", 36, 32 << 10, IN_TREE, id="one run per layer"),
        pytest.param("BHLNC", 1, 36 * 32 << 10, 1024, id="one run per block"),
        pytest.param("LB2HNC", 72, 16 << 10, 2 * IN_TREE, id="K and V of each layer"),
        pytest.param("LBNHC", 36 * 16, 2 << 10, 16 * IN_TREE, id="tokens outside of heads"),
    ],
)
def test_figures_of_qwen3_8b_from_tp1_to_tp2(
    order: str, runs: int, length: int, descriptors: int
) -> None:
    figures = plan_figures(both(f"layout={order}"))
    assert [(link["reader"], link["source"]) for link in figures["links"]] == [(0, 0), (1, 0)]
    assert [link["heads"] for link in figures["links"]] == [[[0, 4]], [[4, 8]]]
    for link in figures["links"]:
        assert link["layers"] == 36
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


def test_table_has_a_row_for_each_pair_of_ranks() -> None:
    result = plan_qwen(both("layout=LBHNC"))
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    row = "0 0 0-35 0-3 1, 1 36, 36 36 32 KiB 72 KiB 1.12 GiB 36,864 36,864 288 KiB"
    assert row.split() in lines
    assert row.replace("0 0 0-35 0-3", "1 0 0-35 4-7").split() in lines
    assert result.stdout.splitlines()[:2] == [
        "prefill: TP1, PP1, LBHNC, 30,000 blocks of 16 tokens in VRAM",
        "decode:  TP2, PP1, LBHNC, 30,000 blocks of 16 tokens in VRAM",
    ]
    assert result.stdout.rstrip().endswith(
        "Total: 2 links, 2.25 GiB, 73,728 descriptors scattered, 73,728 in a row."
    )
    assert "\x1b" not in result.stdout


def test_blocks_in_a_row_are_one_run_for_each_layer() -> None:
    (link,) = plan_figures("--prefill tp=2 --decode tp=2")["links"][:1]
    assert (link["descriptors"], link["descriptors_in_a_row"]) == (IN_TREE, 36)


def test_ranks_with_the_same_heads_may_divide_the_tokens() -> None:
    links = plan_figures("--prefill tp=8 --decode tp=16,dcp=2")["links"]
    assert [link["source"] for link in links] == [n // 2 for n in range(16)]
    halves = plan_figures("--prefill tp=8 --decode tp=16")["links"]
    assert {link["descriptors"] for link in links} == {halves[0]["descriptors"] // 2}
    assert {link["request_bytes"] for link in links} == {halves[0]["request_bytes"] // 2}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_runs_of_unequal_blocks_are_counted_over_a_period(side: str) -> None:
    sizes = {"prefill": 16, "decode": 16, side: 48}
    asked = " ".join(f"--{name} tp=1,block={size}" for name, size in sizes.items())
    (link,) = plan_figures(asked)["links"]
    assert link["period"] == 48
    assert link["entry_sizes"] == [[sizes["decode"]], [sizes["prefill"]]]
    assert link["runs_per_period"] == 36 * 8 * 3
    assert link["run_bytes"] == [8 << 10] * 3
    words = (
        f"Blocks have {sizes['decode']} tokens on decode and {sizes['prefill']} on prefill: "
        "their edges meet every 48 tokens, and runs are counted over those."
    )
    assert words in plan_qwen(asked).stdout


def test_runs_of_several_lengths_show_least_median_and_most() -> None:
    asked = "--prefill tp=8,block=64 --decode tp=8,block=48"
    link = plan_figures(asked)["links"][0]
    assert link["period"] == 192
    # Segments of 48, 16, 32, 32, 16 and 48 tokens, of one head.
    assert link["run_bytes"] == [16 * 512, 32 * 512, 48 * 512]
    assert "8 KiB / 16 KiB / 24 KiB" in plan_qwen(asked).stdout


def plan_hybrid(folder: Path, *arguments: str) -> str:
    result = nixl_kv("plan", f"--model-config {hybrid_model(folder)}", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_states_are_read_once_whatever_the_prompt(tmp_path: Path) -> None:
    numbers = "--prefill tp=1,block=128 --decode tp=2,block=128"
    links = [
        json.loads(plan_hybrid(tmp_path, numbers, f"--json --tokens {tokens}"))["links"][0]
        for tokens in (384, 768)
    ]
    assert links[0]["state"] == links[1]["state"]
    parts = [(one["part"], one["heads"], one["num_bytes"]) for one in links[0]["state"]]
    assert parts == [
        ("query", [0, 1], 3 * 3 * 256),
        ("key", [0, 1], 3 * 3 * 256),
        ("value", [0, 2], 3 * 3 * 512),
        ("state", [0, 2], 3 * 2 * 128 * 128 * 4),
    ]
    state = sum(size for _, _, size in parts)
    # In each layer: three rows of three projections, and two heads of the state in a row.
    assert [link["state_runs"] for link in links] == [3 * (3 * 3 + 1)] * 2
    assert [link["request_bytes"] for link in links] == [384 * 512 + state, 768 * 512 + state]
    assert [link["descriptors"] for link in links] == [30 + 3, 30 + 6]
    for link in links:
        assert (link["layers"], link["heads"], link["entry_sizes"]) == (4, [[0, 2]], [[384]] * 2)
        assert (link["bytes_per_token"], link["runs_per_period"]) == (512, 3)


def test_states_have_a_table_of_their_own(tmp_path: Path) -> None:
    numbers = "--prefill tp=1,block=128 --decode tp=2,block=128"
    shown = plan_hybrid(tmp_path, numbers)
    assert "prefill: TP1, PP1, LBHNC, 10,000 blocks of 384 tokens in VRAM" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["0", "0", "0-2", "query", "0", "2.25", "KiB"] in rows
    assert ["1", "0", "0-2", "state", "2-3", "384", "KiB"] in rows
    assert "Of these, states are 786 KiB in 60 descriptors: read once for each request" in shown


@pytest.mark.parametrize("order", ["LBNHC", "BLHNC", "BLNHC"])
def test_states_have_the_same_bytes_in_other_orders(tmp_path: Path, order: str) -> None:
    numbers = f"--prefill pp=2,block=128,layout={order} --decode tp=2,block=64"
    figures = json.loads(plan_hybrid(tmp_path, numbers, "--json"))
    assert figures["total"]["state_bytes"] == 3 * (2 * 3 * 512 + 3 * 1024 + 4 * 65536)


def test_ranks_that_nobody_reads_are_released() -> None:
    asked = "--prefill tp=16 --decode tp=8"
    figures = plan_figures(asked)
    assert len(figures["links"]) == 8
    read = {link["source"] for link in figures["links"]}
    unread = {one["source"]: one["released_by"] for one in figures["unread"]}
    assert read | set(unread) == set(range(16))
    assert all(reader == source % 8 for source, reader in unread.items())
    words = "Nobody reads these ranks of prefill (who of decode releases each): "
    assert words + ", ".join(f"{s} ({r})" for s, r in unread.items()) in plan_qwen(asked).stdout


def test_pipeline_stages_read_the_layers_they_hold() -> None:
    asked = "--prefill tp=1,pp=2 --decode tp=1,pp=3"
    links = plan_figures(asked)["links"]
    pairs = [(link["reader"], link["source"], link["layers"]) for link in links]
    assert pairs == [(0, 0, 12), (1, 0, 6), (1, 1, 6), (2, 1, 12)]
    table = plan_qwen(asked).stdout
    assert all(layers in table for layers in ("0-11", "12-17", "18-23", "24-35"))


def test_blocks_that_a_window_has_passed_are_not_read() -> None:
    figures = plan_figures("--window 1024 --sliding 5:1 --prefill tp=1 --decode tp=1")
    (link,) = figures["links"]
    assert link["runs_per_period"] == 36
    assert link["descriptors"] == 6 * 1024 + 30 * 64
    assert link["request_bytes"] == link["descriptors"] * 16 * 8 * 512


def test_every_rank_reads_the_one_latent_head() -> None:
    result = nixl_kv("plan", "--layers 61 --latent 576 --prefill tp=2 --decode tp=4")
    rows = [line.split()[:4] for line in result.stdout.splitlines() if " 0-60 " in line]
    assert rows == [[str(n), str(n % 2), "0-60", "0"] for n in range(4)]


def test_prompt_without_a_number_is_as_long_as_fits() -> None:
    assert plan_figures(both("layout=LBHNC"), "--blocks 100")["tokens"] == 1600
    assert plan_figures(both("layout=LBHNC"), "--blocks 100 --tokens 160")["tokens"] == 160
    assert plan_figures(both("blocks=200"), "--blocks 100")["tokens"] == 3200


def test_prompt_that_fills_the_cache_has_scattered_blocks() -> None:
    (link,) = plan_figures("--prefill tp=1,blocks=64 --decode tp=1,blocks=64")["links"]
    assert link["descriptors"] == 64 * 36
    assert link["descriptors_in_a_row"] == 36


def test_more_pieces_than_can_be_numbered_exit_1() -> None:
    result = plan_qwen(
        "--prefill tp=1,layout=LBNHC,blocks=1000000 --decode tp=2,layout=LBHNC,blocks=1000000"
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the runs of all blocks make 2304000000 pieces")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            "--prefill tp=1",
            "allowed: --prefill and --decode with a model's numbers, "
            "or --prefill-at and --decode-at",
            id="one engine",
        ),
        pytest.param(
            "--prefill-at 127.0.0.1:5600 --decode tp=1",
            "allowed: --prefill and --decode with a model's numbers, "
            "or --prefill-at and --decode-at",
            id="one runs",
        ),
        pytest.param(
            "--prefill-at 127.0.0.1:5600 --decode-at 127.0.0.1:5601",
            "--layers is given; allowed: no model's numbers with running engines",
            id="numbers of running engines",
        ),
        pytest.param(
            "--prefill tp=3 --decode tp=1",
            "--prefill tp=3: tp is 3; allowed: divisors and multiples of kv_heads (8)",
            id="heads that cannot be cut",
        ),
        pytest.param(
            "--prefill tp=1 --decode pp=40",
            "--decode pp=40: pp is 40; allowed: 1 to 36",
            id="stages without layers",
        ),
        pytest.param(
            "--prefill tp=one --decode tp=1",
            "--prefill tp=one: tp is 'one'; allowed: a number",
            id="no number",
        ),
        pytest.param(
            "--prefill tp=2,dcp=2 --decode tp=1",
            "--prefill tp=2,dcp=2: dcp is 2; allowed: what divides the 1 ranks with the same heads",
            id="other heads",
        ),
        pytest.param(
            "--prefill ep=1 --decode tp=1",
            "--prefill ep=1: 'ep' is no field; "
            "allowed: tp, pp, dcp, interleave, block, blocks, layout, per-entry, memory",
            id="no field",
        ),
        pytest.param(
            "--prefill layout=HBLNC --decode tp=1",
            "--prefill layout=HBLNC: order is 'HBLNC'; allowed: LBHNC, LBNHC, LHBNC, BLHNC, "
            "BLNHC, BHLNC, L2BHNC, L2BNHC, LB2HNC, LB2NHC",
            id="no order",
        ),
        pytest.param(
            "--prefill tp=1 --decode tp=1 --tokens 480001",
            "tokens is 480001; allowed: 1 to 480000, for which there is room",
            id="no room",
        ),
        pytest.param(
            "--prefill block=16,blocks=2 --decode block=48,blocks=1",
            "48 tokens take 3 blocks; allowed: up to 2",
            id="no room for a period",
        ),
        pytest.param(
            "--prefill tp=1 --decode tp=1 --sliding 5-1 --window 4",
            "--sliding is '5-1'; allowed: two numbers, such as 5:1",
            id="no pattern",
        ),
        pytest.param(
            "--prefill tp=1 --decode tp=1 --sliding 0:1 --window 4",
            "--sliding is '0:1'; allowed: 1 or more before the colon",
            id="nothing slides",
        ),
        pytest.param(
            "--prefill tp=1 --decode tp=1 --sliding 5:1",
            "--window is missing; give it, or --model-config",
            id="no window",
        ),
        pytest.param(
            "--prefill tp=1 --decode tp=1 --dtype int4",
            "dtype is 'int4'; allowed: float32, bfloat16, float16, fp8, int8",
            id="no dtype",
        ),
    ],
)
def test_bad_options_exit_2_and_say_what_is_allowed(arguments: str, words: str) -> None:
    result = plan_qwen(arguments)
    assert result.exit_code == 2
    assert result.stderr == f"error: {words}\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--layers is missing"),
        ("--layers 2", "--head-size is missing"),
        ("--layers 2 --kv-heads 2", "--head-size is missing"),
        ("--layers 2 --head-size 64", "--kv-heads is missing"),
    ],
)
def test_missing_number_of_a_model_exits_2(arguments: str, words: str) -> None:
    result = nixl_kv("plan", arguments, "--prefill tp=1 --decode tp=1")
    assert result.exit_code == 2
    assert result.stderr == f"error: {words}; give it, or --model-config\n"


def test_number_out_of_range_exits_2() -> None:
    result = nixl_kv("plan", "--layers 0 --prefill tp=1 --decode tp=1")
    assert result.exit_code == 2
    assert "--layers" in result.stderr


PROGRAM = """
import sys
import nixl_kv.cli.main
heavy = {"vllm", "torch", "nixl", "nixl_cu12", "nixl_cu13", "matplotlib"}
print(sorted(heavy & {name.split(".")[0] for name in sys.modules}))
"""


def test_the_program_imports_neither_vllm_nor_torch_nor_nixl_nor_matplotlib() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"


def test_the_console_script_is_declared() -> None:
    declared = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.scripts]\nnixl-kv = "nixl_kv.cli.main:app"\n' in declared
