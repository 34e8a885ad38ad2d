"""Loads without vLLM: which cells there are, that wrong bytes are seen, and what is computed."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lab.bench import __main__ as bench
from lab.bench import transfer, transfer_cells
from lab.bench.checkouts import REPO
from lab.bench.models import MODELS
from lab.bench.transfer_cells import Blocks, Cell, Cut, Share

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

TINY = MODELS["tiny"]
SIXTEEN = Blocks(16, 16)


def cell(prefill: int, decode: int) -> Cell:
    return Cell(Cut(prefill, "LBHNC", SIXTEEN), Cut(decode, "LBHNC", SIXTEEN))


@pytest.mark.slow
@pytest.mark.nixl
def test_cells_are_loaded_by_two_checkouts_beside_the_ceiling(tmp_path: Path) -> None:
    """This one against itself."""
    path = tmp_path / "figures.json"
    command = ["transfer", "--shape", "tiny", "--tokens", "128", "--repeat", "2", "--tp", "1-2"]
    command += ["--orders", "LBNHC", "BHLNC", "--blocks", "16-64", "128/64-128/64"]
    command += ["--tables", "random", "--against", str(REPO), "--json", str(path)]
    assert bench.main(command) == 0
    results = json.loads(path.read_text(encoding="utf-8"))
    assert [result["verdict"] for result in results] == ["same bytes"] * 6
    rows = [result["figures"] for result in results]
    cells = [(row["path"], row["layout"], row["blocks"], row["runs"]) for row in rows[::2]]
    assert cells == [
        ("auto", "LBNHC", "16 to 64", 2 * 128 * 4),  # each token of each layer, for both ranks
        ("auto", "LBNHC", "128/64 to 128/64", 2 * 128 * 4),
        ("auto", "BHLNC", "16 to 64", 2 * 8 * 2 * 4),  # each block, head and layer
    ]
    for row in rows:
        assert row["MiB"] == 128 * 4 * 4 * 512 / 2**20
        assert row["load ms"] >= row["read ms"] > 0
        assert row["bulk GB/s"] > 0
        assert ("load ratio" in row) == (row["path"] == "auto")


@pytest.mark.slow
@pytest.mark.nixl
def test_verified_loads_are_loaded_beside(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["transfer", "--shape", "tiny", "--tokens", "64", "--repeat", "2", "--tp", "1-1"]
    command += ["--orders", "BHLNC", "--blocks", "16-16", "--tables", "random", "--verify"]
    assert bench.main([*command, "--json", str(path)]) == 0
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = [result["figures"] for result in results]
    assert [(row["path"], "verify adds ms" in row) for row in rows] == [
        ("auto", False),
        ("auto, verified", True),
    ]


@pytest.mark.slow
@pytest.mark.nixl
def test_agents_of_vllms_own_connector_read_beside(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["transfer", "--shape", "tiny", "--tokens", "64", "--repeat", "2", "--tp", "2-1"]
    command += ["--orders", "LBHNC", "--blocks", "16-16", "--tables", "random"]
    assert bench.main([*command, "--beside-in-tree-agent", "--json", str(path)]) == 0
    (result,) = json.loads(path.read_text(encoding="utf-8"))
    row = result["figures"]
    assert row["in-tree agent ms"] > 0
    assert row["in-tree agent to read"] == pytest.approx(row["in-tree agent ms"] / row["read ms"])


class Agent:
    """Whose transfers are in these states, one after the other."""

    def __init__(self, *states: str) -> None:
        self._states = iter(states)

    def check_xfer_state(self, _: object) -> str:
        return next(self._states)


def test_read_of_an_in_tree_agent_ends_well_or_is_an_error() -> None:
    from lab.bench import in_tree_agent  # noqa: PLC0415 - needs NIXL

    in_tree_agent.wait_until_done(Agent("PROC", "PROC", "DONE", "DONE"), [1, 2])
    with pytest.raises(RuntimeError, match="ended as ERR"):
        in_tree_agent.wait_until_done(Agent("DONE", "PROC", "ERR"), [1, 2])


def test_process_that_ends_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(1)", encoding="utf-8")
    with transfer.Process(program, {}, {}) as process, pytest.raises(RuntimeError, match="ended"):
        process.ask("start")


class Process:
    """Answers as told, and notes what it was asked."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.asked: list[str] = []
        self._answers = answers or {}

    def ask(self, question: str, **_: object) -> Any:
        self.tell(question)
        return self.answer()

    def tell(self, question: str, **_: object) -> None:
        self.asked.append(question)

    def answer(self) -> Any:
        return self._answers.get(self.asked[-1])


def loaded(begin: float, end: float, read: float) -> dict[str, float]:
    return {"begin": begin, "end": end, "read": read, "cpu": 0.1, "num_bytes": 4, "num_runs": 2}


def pair_of(prefill: Process, *decode: Process) -> transfer.Pair:
    processes: tuple[Any, Any] = prefill, decode
    return transfer.Pair(*processes, ["auto", "direct"])


def test_wrong_bytes_are_named_with_their_path() -> None:
    good, bad = (Process({"check": right, "load": loaded(0, 1, 1)}) for right in (True, False))
    assert pair_of(Process(), good, bad).check() == "wrong bytes on path auto, direct"
    assert bad.asked == good.asked == ["clear", "prepare_load", "load", "check"] * 2
    assert pair_of(Process(), good).check() == ""


def test_a_load_is_as_long_as_from_the_first_rank_that_began_to_the_last_that_ended() -> None:
    ranks = [Process({"load": loaded(5, 7, 1.5), "read_bulk": [5, 7]})]
    ranks += [Process({"load": loaded(6, 9, 1.25), "read_bulk": [6, 9]})]
    pair = pair_of(Process(), *ranks)
    assert pair.load("auto") == {
        "load": 4.0,
        "read": 1.5,
        "cpu": 0.2,
        "num_bytes": 8,
        "num_runs": 4,
    }
    assert pair.read_bulk([]) == {"read": 4.0}


def test_ranks_that_a_cell_lacks_have_no_engines() -> None:
    ranks = [Process({"load": loaded(0, 1, 1)}) for _ in range(2)]
    pair = pair_of(Process(), *ranks)
    gpus: dict[str, list[int]] = {"prefill": [], "decode": []}
    pair.start(cell(1, 1), gpus)
    pair.load("auto")
    pair.start(cell(1, 2), gpus)
    pair.load("auto")
    assert ranks[0].asked == ["start", "prepare_load", "load"] * 2
    assert ranks[1].asked == ["stop", "start", "prepare_load", "load"]


def test_figures_are_medians_and_ratios_of_each_round() -> None:
    ours, theirs = (
        [
            {
                "load": n * 0.004,
                "read": n * 0.002,
                "cpu": 0.001,
                "num_bytes": 1 << 21,
                "num_runs": 7,
            }
            for n in factors
        ]
        for factors in ((1, 2, 3), (2, 4, 6))
    )
    bulk = [{"read": seconds} for seconds in (0.001, 0.002, 0.004)]
    samples = {"auto": ours, transfer.AGAINST: theirs, transfer.BULK: bulk}
    figures = transfer.figures(samples, "auto")
    assert figures == {
        "rounds": 3,
        "MiB": 2.0,
        "runs": 7,
        "load ms": 8.0,
        "read ms": 4.0,
        "cpu ms": 1.0,
        "GB/s": pytest.approx(0.524288),
        "bulk GB/s": pytest.approx(1.048576),
        "read of bulk": pytest.approx(0.5),
        "load of bulk": pytest.approx(0.25),
        "load ratio": "0.50 (0.50 to 0.50)",
        "read ratio": "0.50 (0.50 to 0.50)",
        "cpu ratio": "1.00 (1.00 to 1.00)",
    }
    assert "load ratio" not in transfer.figures(samples, transfer.AGAINST)
    later = zip(ours, (3, 1, 2), strict=True)
    verified = [sample | {"load": sample["load"] + more} for sample, more in later]
    with_verified = {**samples, "auto, verified": verified}
    added = transfer.figures(with_verified, "auto, verified")["verify adds ms"]
    assert added == pytest.approx(2000)
    with_copy = transfer.figures({**samples, transfer.COPY: bulk}, "auto")
    assert with_copy["copy GB/s"] == figures["bulk GB/s"]


def test_ways_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def way(name: str) -> transfer.Sample:
        order.append(name)
        return {"read": len(order)}

    ways = {name: lambda name=name: way(name) for name in ("a", "b")}
    samples = transfer.rounds(ways, 2, 60.0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [{"read": 4}, {"read": 5}], "b": [{"read": 3}, {"read": 6}]}


@pytest.mark.parametrize(("count", "rounds"), [(2, 2), (9, 3)])
def test_slow_rounds_are_as_few_as_a_median_needs(count: int, rounds: int) -> None:
    assert len(transfer.rounds({"a": dict}, count, -1.0)["a"]) == rounds


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        pytest.param((1, 1), [(0, 0, 8)], id="equal"),
        pytest.param((1, 2), [(0, 0, 4), (1, 0, 4)], id="decode has more"),
        pytest.param((2, 1), [(0, 0, 4), (0, 1, 4)], id="prefill has more"),
        pytest.param((8, 1), [(0, 2 * n, 2) for n in range(4)], id="copies are read once"),
        pytest.param((1, 8), [(n, 0, 2) for n in range(8)], id="copies are written twice"),
    ],
)
def test_shares_are_what_each_rank_reads(
    tp: tuple[int, int], expected: list[tuple[int, int, int]]
) -> None:
    half_head = 4 * 512 * 32 // 2
    assert transfer_cells.shares(cell(*tp), TINY, 32) == [
        Share(decode, prefill, heads * half_head) for decode, prefill, heads in expected
    ]


@pytest.mark.parametrize(
    ("tp", "count", "prefill", "decode"),
    [
        pytest.param((1, 2), 1, [0], [0, 0], id="one GPU"),
        pytest.param((1, 2), 2, [0], [1, 1], id="two, 1-2"),
        pytest.param((2, 1), 2, [0, 0], [1], id="two, 2-1"),
        pytest.param((1, 2), 4, [0], [1, 2], id="four, 1-2"),
        pytest.param((2, 1), 4, [0, 1], [2], id="four, 2-1"),
    ],
)
def test_prefill_has_the_first_gpus(
    tp: tuple[int, int], count: int, prefill: list[int], decode: list[int]
) -> None:
    assert transfer_cells.gpus_of(tp, count) == {"prefill": prefill, "decode": decode}


def test_packed_blocks_have_no_kernel_blocks() -> None:
    pairs = [transfer_cells.parse_blocks(text) for text in ("16-64", "128/64-128/64")]
    found = list(transfer_cells.cells([(1, 1)], ["BHLNC", "LBNHC"], pairs))
    assert [(one.prefill.order, str(one.decode.blocks)) for one in found] == [
        ("BHLNC", "64"),
        ("LBNHC", "64"),
        ("LBNHC", "128/64"),
    ]


@pytest.mark.parametrize("text", ["16", "16-", "0-16", "128/48-128", "a-b"])
def test_block_sizes_that_cannot_be(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed"):
        transfer_cells.parse_blocks(text)


@pytest.mark.parametrize("text", ["1", "0-1", "1-2-3"])
def test_ranks_that_cannot_be(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed"):
        transfer_cells.parse_tp(text)


def test_tokens_must_fill_blocks() -> None:
    with pytest.raises(SystemExit, match="multiples of 128"):
        bench.main(["transfer", "--tokens", "1000"])


def test_memory_holds_the_largest_cell() -> None:
    options = argparse.Namespace(shape="tiny", tokens=32)
    sizes = transfer.largest([cell(1, 2), cell(1, 1)], "decode", options)
    each = TINY.layers * (1 + 2 * 2) * 16 * 4 * 512
    assert sizes == [each, each // 2]
    assert asdict(cell(1, 1).prefill)["blocks"] == {"size": 16, "kernel": 16}
