"""A short run of scripts/simulate; the long ones are run by hand.

In processes of its own: there, vLLM is stood in for, and random names repeat.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOUND = sorted(Path(__file__).parent.glob("*.txt"))
"""Schedules that once broke a promise."""

QUICKLY_CAUGHT = [
    "one generation",
    "granted offer revoked",
    "dropped load not reported",
    "difference ignored",
    "digested from",
]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    return subprocess.run(
        [sys.executable, "-m", "sim.main", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_random_schedules_break_no_promise() -> None:
    done = simulate("--seeds", "140")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("140 seeds from 0: 0 broke a promise")


def test_all_short_schedules_of_the_scenes_break_no_promise() -> None:
    done = simulate("--depth", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 broke a promise") == 5


def test_planted_bugs_are_caught() -> None:
    done = simulate("--planted", "--seeds", "20", "--only", *QUICKLY_CAUGHT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT CAUGHT" not in done.stdout
    assert all(bug in done.stdout for bug in QUICKLY_CAUGHT)


@pytest.mark.parametrize("schedule", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once_is_mended(schedule: Path) -> None:
    done = simulate("--replay", str(schedule))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_schedule_is_the_same_each_time() -> None:
    steps = "world;prompt 5 1;step p;turn p.0;ask d0 0 0;step d0;turn d0.0;deliver 0;end calm"
    first, second = (simulate("--replay", steps) for _ in range(2))
    assert first.stdout == second.stdout
    assert "1 good loads" in first.stdout
    assert first.returncode == 0, first.stdout + first.stderr


def test_a_step_that_does_not_exist_is_named() -> None:
    done = simulate("--replay", "world;jump")
    assert done.returncode != 0
    assert "no such step: 'jump'" in done.stderr
