"""A run of pytest that a signal ends tears its fixtures down, and starts no other test."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from harness.cluster.models.files import REPO
from harness.cluster.processes import END_SIGNALS

TEXT: Final = """
import os
import pytest
from harness.cluster.processes import end_on_signals

@pytest.fixture(scope="session", autouse=True)
def engines():
    end_on_signals()
    yield
    print("torn down")

def test_a():
    os.kill(os.getpid(), {number})

def test_b():
    print("went on")
"""


@pytest.mark.parametrize("number", END_SIGNALS)
def test_a_signal_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "test_one.py").write_text(TEXT.format(number=int(number)), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-c", os.devnull, "-p", "conftest", tmp_path],
        env={**os.environ, "PYTHONPATH": str(REPO / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 128 + number, ended.stdout
    assert "torn down" in ended.stdout
    assert "went on" not in ended.stdout
