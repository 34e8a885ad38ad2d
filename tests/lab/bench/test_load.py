"""Loads without vLLM: what is timed, and how two checkouts are compared."""

import json
from pathlib import Path

import pytest

from lab.bench import __main__ as bench
from lab.bench import load
from lab.bench.checkouts import REPO

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)


@pytest.mark.slow
def test_two_checkouts_load_the_same_in_turn(tmp_path: Path) -> None:
    """This one against itself: real engines, whose bytes move in memory."""
    path = tmp_path / "figures.json"
    command = ["load", "--transport", "memory", "--tp", "1", "2", "--tokens", "32"]
    command += ["--at-once", "2", "--repeat", "2", "--against", str(REPO), "--json", str(path)]
    assert bench.main(command) == 0
    ours, theirs = (result["figures"] for result in json.loads(path.read_text(encoding="utf-8")))
    for figures in (ours, theirs):
        assert figures["MiB"] == 2 * 32 * 4 * 4 * 512 / 2**20
        assert figures["load ms"] >= figures["read ms"] > 0
        assert figures["cpu ms"] > 0
    assert "load ratio" in ours
    assert "load ratio" not in theirs


def test_figures_are_medians_and_ratios_of_ours_to_theirs() -> None:
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
    assert load.figures(ours, theirs) == {
        "MiB": 2.0,
        "runs": 7,
        "load ms": 8.0,
        "read ms": 4.0,
        "cpu ms": 1.0,
        "read GB/s": pytest.approx(0.524288),
        "load ratio": "0.50 (0.50 to 0.50)",
        "read ratio": "0.50 (0.50 to 0.50)",
        "cpu ratio": "1.00 (1.00 to 1.00)",
    }


def test_process_that_ends_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(1)", encoding="utf-8")
    with load.Process(program, {}, {}) as process, pytest.raises(RuntimeError, match="has ended"):
        process.ask()
