"""The simulator finds nothing in the code as it is, and each bug that is planted into it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.local.engine import HOST_PATHS
from sim.planted import PLANTED, Edit
from sim.schedule import replay

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def simulate(*arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """In a process of its own, in which vLLM and torch cannot be imported."""
    program = (
        "import sys; sys.modules.update(vllm=None, torch=None, nixl=None);"
        "from sim.main import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {"PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def planted_schedules() -> Iterator[tuple[str, str, list[str]]]:
    """For each planted bug what catches it, and a short schedule that shows it.

    As `scripts/simulate --planted --verbose` prints them. Three are schedules that once broke a
    promise; there the bug is what was the cause.
    """
    text = (HERE / "planted.txt").read_text(encoding="utf-8")
    for title, steps in re.findall(r"^(\S.*)\n((?: .*\n)+)", text, re.MULTILINE):
        name, check, _ = title.split("|")
        if name.strip() in PLANTED or "staged" in HOST_PATHS:  # else the bug's path is not there
            yield name.strip(), check.strip(), steps.replace("    ", "").splitlines()


@pytest.mark.parametrize(
    ("name", "check", "lines"), [pytest.param(*each, id=each[0]) for each in planted_schedules()]
)
def test_a_planted_bug_breaks_a_promise(name: str, check: str, lines: list[str]) -> None:
    assert replay(lines).violation is None
    with PLANTED[name].plant():
        violation = replay(lines).violation
    assert violation is not None
    assert violation.check == check


def test_every_planted_bug_has_a_schedule() -> None:
    assert [name for name, _, _ in planted_schedules()] == list(PLANTED)


def test_a_bug_that_the_code_has_moved_away_from_is_an_error() -> None:
    edit = Edit("protocol.prefill:Binding.readers", ["no such text"], ["pass"])
    with pytest.raises(LookupError, match="not once: no such text"), edit.apply():
        pass


def test_random_schedules_break_no_promise() -> None:
    """As many as a minute allows."""
    done = simulate("--minutes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 broke a promise" in done.stdout


def test_as_many_seeds_are_run_as_asked_for() -> None:
    done = simulate("--seeds", "7", "--first", "4")
    assert re.match(r"7 seeds from 4, \d worlds: 0 broke a promise", done.stdout), done.stdout


def test_a_planted_bug_is_caught_by_random_schedules_and_shown_short() -> None:
    done = simulate("--planted", "--seeds", "20", "--only", "unclaimed", "--verbose")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT CAUGHT" not in done.stdout
    steps = [line.strip() for line in done.stdout.splitlines() if line.startswith(" ")]
    assert [step.split()[0] for step in steps] == ["world", "prefill", "end"]


def test_a_planted_bug_that_no_schedule_shows_is_reported() -> None:
    done = simulate("--planted", "--seeds", "0", "--only", "unclaimed")
    assert done.returncode == 1
    assert "NOT CAUGHT" in done.stdout


def test_a_schedule_is_the_same_each_time() -> None:
    steps = "world;prefill 5 1;step p;step p;turn p.0;decode d0 0 0;step d0;turn d0.0;end calm"
    first, second = (simulate("--replay", steps) for _ in range(2))
    assert first.stdout == second.stdout
    assert "1 good loads" in first.stdout
    assert first.returncode == 0, first.stdout + first.stderr


def test_a_step_that_does_not_exist_is_named() -> None:
    done = simulate("--replay", "world;jump")
    assert done.returncode != 0
    assert "no such step: 'jump'" in done.stderr


@pytest.mark.slow
def test_many_random_schedules_break_no_promise() -> None:
    done = simulate("--minutes", "20", "--first", "10000", timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_random_schedules_catch_every_planted_bug() -> None:
    done = simulate("--planted", "--seeds", "5000", timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT CAUGHT" not in done.stdout
