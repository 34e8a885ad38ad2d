"""The accuracy launcher with real engines: a good run, and one that Ctrl-C ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

LAUNCHER = Path(__file__).resolve().parents[2] / "scripts/run_accuracy_test.sh"
ITEMS = 20
RUN_S = 300
START_S = 60
END_S = 30
INTERRUPTED = 128 + signal.SIGINT
ENGINES = ("prefill-0", "decode-0")


def environment() -> dict[str, str]:
    return os.environ | {"NIXL_KV_PYTHON": sys.executable}


def sessions_of(pid: int) -> set[int]:
    """Of the launcher's children: each engine leads a session, and takes its own children there."""
    return {pid} | {child.pid for child in psutil.Process(pid).children()}


def running_in(sessions: set[int]) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if is_in(process, sessions)]


def is_in(process: psutil.Process, sessions: set[int]) -> bool:
    try:
        return os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_accuracy_of_one_pair(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--limit", str(ITEMS), "--json", str(result), "--log-dir", str(tmp_path / "logs")]
    ended = subprocess.run(
        [str(LAUNCHER), *arguments],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "recall: ok" in ended.stdout
    assert f"logs in {tmp_path / 'logs'}" in ended.stderr
    (one,) = json.loads(result.read_text(encoding="utf-8"))
    assert one["items"] == ITEMS
    assert abs(one["accuracy"] - one["expected"]) <= one["tolerance"]
    assert one["counters"]["loads_total"] == ITEMS
    assert one["computed"] == ITEMS  # the last token of each prompt
    assert one["counters"]["load_failures_total"] == 0
    assert one["counters"]["bytes_read_total"] > 0


@pytest.mark.slow  # with stubs for engines: tests/launcher/test_ending.py
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(
            [str(LAUNCHER), "--log-dir", str(logs)],
            env=environment(),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        # Both engines run Python by then, and each has children or is about to.
        begun = [f"*/{name}.log" for name in ENGINES]
        deadline = time.monotonic() + START_S
        while not all(any(path.stat().st_size for path in logs.glob(one)) for one in begun):
            assert launcher.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        sessions = sessions_of(launcher.pid)
        assert len(sessions) == 1 + len(ENGINES)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(END_S) == INTERRUPTED
        assert running_in(sessions) == []
        assert "interrupted: everything is ended" in (tmp_path / "said").read_text("utf-8")
    finally:
        launcher.terminate()
        launcher.wait(END_S)
