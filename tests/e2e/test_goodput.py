"""scripts/bench goodput with engines on CPU: a run, and a later one that continues its record."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import goodput_report, points
from benchmarks.points import Objective, Record
from benchmarks.shapes import REPO
from support.nixl_kv_command import nixl_kv

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = "200/100"
FEW, MANY = 6, 12
# On CPU, and with other tests beside, all requests are in time.
OBJECTIVE = Objective(60_000, 1_000)
OPTIONS = f"--shapes {SHAPE} --few {FEW} --many {MANY} --most {FEW} --capacity-tokens 900".split()
OPTIONS += [
    "--least-s",
    "0",
    "--ttft-ms",
    f"{OBJECTIVE.ttft_ms:g}",
    "--gap-ms",
    f"{OBJECTIVE.gap_ms:g}",
]


def goodput(record: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--record", str(record), "goodput"]
    return subprocess.run(
        [*command, *OPTIONS, *options],
        env=os.environ | {"PYTHONPATH": f"{REPO}:{REPO}/scripts:{REPO}/tests"},
        cwd=record.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def requests(record: Record, arm: str) -> dict[float, int]:
    """How many requests each rate has, in all runs."""
    found = points.grouped(record.runs).items()
    return {key.rate: sum(one.requests for one in some) for key, some in found if key.arm == arm}


def test_replicas_and_pairs_are_compared_and_a_later_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    ended = goodput(path, "--rates", "0.5", "1", "--arms", "replicas-512", "--seconds", "600")
    assert ended.returncode == 0, ended.stderr[-3000:]
    record = points.read(path)
    for arm in ("replicas-512", "overlap"):  # the reference is in every run
        assert requests(record, arm) == {0.5: FEW, 1.0: MANY}, arm
    for one in record.runs[0].points:
        assert one.failed == 0
        assert one.tokens == 100 * one.requests
        assert min(one.ttft) > 0
        assert one.good(OBJECTIVE) == one.requests
    # The figures are a command that works.
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("nixl-kv plan ")]
    planned = nixl_kv(line.removeprefix("nixl-kv ").replace("RATE", "1"))
    assert planned.exit_code == 0, line
    assert "prefill engine" in planned.stdout

    ended = goodput(path, "--rates", "0.5", "1", "2", "--arms", "serial", "in-tree")
    assert ended.returncode == 0, ended.stderr[-3000:]
    record = points.read(path)
    assert len(record.runs) == 2
    assert {one.arm for one in record.runs[1].points} == {"overlap", "serial", "in-tree"}
    assert requests(record, "replicas-512") == {0.5: FEW, 1.0: MANY}
    assert requests(record, "overlap") == {0.5: FEW, 1.0: MANY, 2.0: MANY}
    goodput_report.draw(record)
    assert "200/100" in goodput_report.verdict_table(record)


def test_without_time_for_a_point_the_run_says_so(tmp_path: Path) -> None:
    """An answer of 100 tokens may take 1,000 s."""
    options = "--rates 1 --arms overlap --seconds 600 --gap-ms 10000"
    ended = goodput(tmp_path / "goodput.json", *options.split())
    assert ended.returncode == 1
    assert "no point fits into the rest of --seconds 600" in ended.stderr
