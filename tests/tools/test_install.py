"""scripts/install and scripts/demo are never silent for long, whatever takes its time."""

import contextlib
import io
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

import demo

REPO = Path(__file__).resolve().parents[2]
LONGEST_S = 20
"""The longest silence that the demo may have."""

PYTHON = """#!/bin/sh
# Stands in for Python: makes an environment of stand-ins, and takes its time.
case "$*" in
  "-c import sys; print("*) echo 3.12 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/uv"; /bin/sleep 1 ;;
  "-m pip install "*) /bin/sleep 1 ;;
  "pip install "*) /bin/sleep 1; exit "$UV_STATUS" ;;
esac
"""
SLEEP = """#!/bin/sh
# A hundred times as fast, so that seconds of the script pass in hundredths.
echo "$1" >> "$SLEEPS"
exec /bin/sleep "0.$1"
"""


@pytest.mark.parametrize("status", [0, 3])
def test_an_installation_speaks_while_commands_run(tmp_path: Path, status: int) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("python-stand-in", PYTHON), ("sleep", SLEEP)):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o700)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(programs / "python-stand-in"),
        "SLEEPS": str(tmp_path / "sleeps"),
        "UV_STATUS": str(status),
    }
    ended = subprocess.run(
        [str(REPO / "scripts/install"), "--demo", "--quiet", "--venv", str(tmp_path / "venv")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == (1 if status else 0), ended.stderr
    for step in ("creating", "installing uv", "installing into"):
        said = re.findall(rf"install: {step}.*, for \d+ s$", ended.stderr, re.MULTILINE)
        assert len(said) >= 3, step
    pauses = {float(line) for line in (tmp_path / "sleeps").read_text("utf-8").split()}
    assert max(pauses) <= LONGEST_S / 2, "a busy machine is late"
    last = (tmp_path / "sleeps").read_text("utf-8")
    time.sleep(0.5)  # five of the script's pauses
    assert (tmp_path / "sleeps").read_text("utf-8") == last, "it speaks no more"


def test_the_demo_speaks_while_a_step_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.SILENCE_S <= LONGEST_S / 2
    monkeypatch.setattr(demo, "SILENCE_S", 0.01)
    output = io.StringIO()
    with contextlib.redirect_stderr(output), demo.Progress() as progress:
        for step in ("making", "asking"):
            progress.begin(step)
            until = time.monotonic() + 10
            while output.getvalue().count(f" s: {step}") < 2 and time.monotonic() < until:
                time.sleep(0.01)
    said = output.getvalue()
    assert said.startswith("making\n")
    assert all(said.count(f" s: {step}") >= 2 for step in ("making", "asking"))
    time.sleep(0.1)
    assert output.getvalue() == said, "its thread has ended"
