"""Accuracy with real engines, of one pair and of the launcher; and a launcher that Ctrl-C ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/install")

from harness.cluster.cluster import Cluster
from harness.cluster.models.files import REPO
from lab.accuracy.evaluation import Job
from lab.accuracy.machine import Machine
from lab.accuracy.models import bundled
from lab.accuracy.run import run_pair
from lab.accuracy.settings import parse

pytestmark = pytest.mark.e2e

LAUNCHER = REPO / "scripts/run_accuracy_test.sh"
ALL_ITEMS = 200
START_S = 300
RUN_S = 1200
END_S = 60
INTERRUPTED = 128 + signal.SIGINT
ENGINES = ("prefill-0", "decode-0")


def environment() -> dict[str, str]:
    return os.environ | {"NIXL_KV_PYTHON": sys.executable}


def sessions_below(pid: int) -> set[int]:
    """Each engine leads a session, and so does the process that it is forked from."""
    return {os.getsid(process.pid) for process in psutil.Process(pid).children(recursive=True)}


def running_in(sessions: set[int]) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if is_in(process, sessions)]


def is_in(process: psutil.Process, sessions: set[int]) -> bool:
    try:
        return os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_prefill_and_decode_apart_answer_right(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(bundled(), parse(["--limit", "8"], {}, Machine()), tmp_path)
    outcome, _ = run_pair(job, cluster)
    assert str(outcome.verdict) == "ok"
    assert (outcome.accuracy, outcome.items, outcome.errors) == (1.0, 8, 0)
    assert outcome.counters["loads_total"] == outcome.counters["loads_verified_total"] == 8
    assert outcome.computed == 8  # the last token of each prompt


@pytest.mark.slow
def test_launcher_evaluates_all_items_beside_a_single_engine(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    ended = subprocess.run(
        [LAUNCHER, "--single", "--json", result, "--log-dir", tmp_path / "logs"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("1/1 models are good\n")
    assert f"logs in {tmp_path / 'logs'}" in ended.stderr
    (one,) = json.loads(result.read_text(encoding="utf-8"))
    assert one["items"] == ALL_ITEMS
    for accuracy in (one["accuracy"], one["single"]):
        assert abs(accuracy - one["expected"]) <= one["tolerance"]
    assert one["counters"]["loads_total"] == ALL_ITEMS
    assert one["counters"]["load_failures_total"] == 0
    assert one["counters"]["bytes_read_total"] > 0
    assert one["computed"] == ALL_ITEMS


@pytest.mark.slow  # with stubs for engines: tests/tools
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    logs, output = tmp_path / "logs", tmp_path / "output"
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [LAUNCHER, "--log-dir", logs],
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        # Both engines run Python by then, and each has children or is about to.
        begun = [f"*/{name}.log" for name in ENGINES]
        deadline = time.monotonic() + START_S
        while not all(any(path.stat().st_size for path in logs.glob(one)) for one in begun):
            assert launcher.poll() is None, output.read_text("utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.1)
        sessions = sessions_below(launcher.pid)
        assert len(sessions) > len(ENGINES)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(END_S) == INTERRUPTED
        assert running_in({launcher.pid, *sessions}) == []
        assert "interrupted: everything is ended" in output.read_text("utf-8")
    finally:
        launcher.terminate()
        launcher.wait(END_S)
