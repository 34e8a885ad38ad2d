"""Loads without vLLM: wrong bytes are seen, and figures are computed from the same rounds."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.bench import __main__ as bench
from lab.bench import cells, record, transfer
from lab.bench.cells import Cell, Cut
from lab.bench.record import REPO

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

TINY = ["--shape", "tiny", "--repeat", "2"]


def rows_of(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    """The rows of a run, which must end well."""
    path = tmp_path / "run.json"
    assert bench.main([*command, "--record", str(path)]) == 0
    return record.load(path).rows


def cell(prefill: int, decode: int) -> Cell:
    return Cell((Cut(prefill, "LBHNC", 16), Cut(decode, "LBHNC", 16)), ((), ()))


@pytest.mark.slow
@pytest.mark.nixl
def test_cells_are_loaded_by_two_checkouts_beside_the_link(tmp_path: Path) -> None:
    """This one against itself."""
    command = ["transfer", *TINY, "--tokens", "128", "--tp", "1-2", "--blocks", "16-64"]
    rows = rows_of(tmp_path, *command, "--orders", "LBNHC", "BHLNC", "--against", str(REPO))
    assert [row["verdict"] for row in rows] == ["same bytes"] * 4
    assert [(row["path"], row["layout"], row["runs"]) for row in rows[::2]] == [
        ("auto", "LBNHC", 2 * 128 * 4),  # each token of each layer, for both ranks
        ("auto", "BHLNC", 2 * 8 * 2 * 4),  # each block, head and layer
    ]
    for row in rows:
        assert row["MiB"] == 128 * 4 * 4 * 512 / 2**20
        assert row["load ms"] >= row["read ms"] > 0
        assert row["bulk GB/s"] > 0
        assert ("load ratio" in row) == (row["path"] == "auto")


@pytest.mark.slow
@pytest.mark.nixl
def test_verified_loads_and_in_tree_agents_are_beside(tmp_path: Path) -> None:
    command = ["transfer", *TINY, "--tokens", "64", "--tp", "2-1", "--blocks", "16-16"]
    rows = rows_of(tmp_path, *command, "--orders", "BHLNC", "--verify", "--in-tree")
    verified = [(row["path"], "verify adds ms" in row) for row in rows]
    assert verified == [("auto", False), ("auto, verified", True)]
    assert all(row["in-tree GB/s"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.nixl
def test_the_first_load_is_timed_in_parts(tmp_path: Path) -> None:
    command = ["connect", "--tokens", "64", "--tp", "1-2", "--rounds", "1", "--later", "2"]
    (row,) = rows_of(tmp_path, *command)
    assert row["first ms"] > row["join ms"] > 0
    assert row["added ms"] == pytest.approx(row["first ms"] - row["later ms"], rel=0.01)


class Agent:
    """Its transfers are in these states, one after the other."""

    def __init__(self, *states: str) -> None:
        self._states = iter(states)

    def check_xfer_state(self, _: object) -> str:
        return next(self._states)

    def release_xfer_handle(self, _: object) -> None: ...


def test_read_of_an_in_tree_agent_ends_well_or_is_an_error() -> None:
    from lab.bench.raw_reads import InTreeTransport  # noqa: PLC0415 - needs NIXL

    transport = InTreeTransport.__new__(InTreeTransport)
    transport._agent = Agent("PROC", "DONE", "ERR")
    assert [transport.poll(1), transport.poll(1)] == [False, True]
    with pytest.raises(RuntimeError, match="ended as ERR"):
        transport.poll(2)


def test_process_that_ends_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(1)", encoding="utf-8")
    with transfer.Process(program, {}, {}) as process, pytest.raises(RuntimeError, match="ended"):
        transfer.ask([process], "start")


class Process:
    """Answers as told, and notes what it was asked."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.asked: list[str] = []
        self._answers = answers or {}

    def tell(self, question: str, **_: object) -> None:
        self.asked.append(question)

    def answer(self) -> Any:
        return self._answers.get(self.asked[-1])


def loaded(begin: float, end: float, read: float) -> dict[str, float]:
    return {"begin": begin, "end": end, "read": read, "cpu": 0.1, "num_bytes": 4, "num_runs": 2}


def pair_of(decode: Sequence[Process], *paths: str) -> transfer.Pair:
    processes: tuple[Any, Any] = Process(), decode
    return transfer.Pair(*processes, paths)


def test_wrong_bytes_are_named_with_their_path() -> None:
    good, bad = (Process({"check": right, "load": loaded(0, 1, 1)}) for right in (True, False))
    assert pair_of([good, bad], "auto", "direct").check() == "wrong bytes on path auto, direct"
    assert bad.asked == good.asked == ["clear", "prepare_load", "load", "check"] * 2
    assert pair_of([good], "auto").check() == ""


def test_a_load_is_as_long_as_from_the_first_rank_that_began_to_the_last_that_ended() -> None:
    ranks = [Process({"load": loaded(5, 7, 1.5), "read_raw": [5, 7]})]
    ranks += [Process({"load": loaded(6, 9, 1.25), "read_raw": [6, 9]})]
    pair = pair_of(ranks, "auto")
    together = {"load": 4.0, "read": 1.5, "cpu": 0.2, "num_bytes": 8, "num_runs": 4}
    assert pair.load("auto") == together
    assert pair.read_raw("bulk") == {"read": 4.0}


def test_ranks_that_a_cell_lacks_have_no_engines() -> None:
    ranks = [Process({"load": loaded(0, 1, 1)}) for _ in range(2)]
    pair = pair_of(ranks, "auto")
    for decode in (1, 2):
        pair.start(cell(1, decode))
        pair.load("auto")
    once = ["start", "choose_blocks", "prepare_load", "load"]
    assert ranks[0].asked == once * 2
    assert ranks[1].asked == ["stop", *once]


def samples_of(factors: Sequence[int]) -> list[transfer.Sample]:
    times = [{"load": n * 0.004, "read": n * 0.002, "cpu": 0.001} for n in factors]
    return [each | {"num_bytes": 1 << 21, "num_runs": 7} for each in times]


def test_figures_are_medians_and_ratios_of_each_round() -> None:
    bulk = [{"read": seconds} for seconds in (0.001, 0.002, 0.004)]
    samples = {"auto": samples_of((1, 2, 3)), f"{transfer.AGAINST} auto": samples_of((2, 4, 6))}
    samples |= {transfer.BULK: bulk, transfer.IN_TREE: [{"read": 0.008}]}
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
        "in-tree GB/s": pytest.approx(0.262144),
        "read of bulk": pytest.approx(0.5),
        "load of bulk": pytest.approx(0.25),
        "load ratio": "0.50 (0.50 to 0.50)",
        "read ratio": "0.50 (0.50 to 0.50)",
        "cpu ratio": "1.00 (1.00 to 1.00)",
    }
    samples["auto, verified"] = samples_of((2, 4, 7))
    assert transfer.figures(samples, "auto, verified")["verify adds ms"] == pytest.approx(8.0)


def test_ratio_compares_each_round_with_itself() -> None:
    """The machine became ten times slower between the rounds, for both sides."""
    assert transfer.ratio([1.0, 2.0, 10.0, 22.0], [1.0, 2.0, 10.0, 20.0]) == "1.00 (1.00 to 1.02)"


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


@pytest.mark.parametrize("text", ["1", "0-1", "1-2-3", "16-", "a-b"])
def test_pairs_of_numbers_that_cannot_be(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed"):
        cells.pair_of_numbers(text)


def test_tokens_must_fill_blocks() -> None:
    with pytest.raises(SystemExit, match="multiples of 64"):
        bench.main(["transfer", "--tokens", "1000"])


def test_memory_holds_the_largest_cell() -> None:
    options = argparse.Namespace(shape="tiny", tokens=32)
    sizes = transfer.largest([cell(1, 2).cuts[1], cell(1, 1).cuts[1]], options)
    each = 4 * (1 + 2 * 2) * 16 * 4 * 512
    assert sizes == [each, each // 2]
