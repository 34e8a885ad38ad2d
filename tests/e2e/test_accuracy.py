"""The accuracy launcher with real engines: a pair, all items, and Ctrl-C."""

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

import accuracy
from harness.cluster.cluster import Cluster

pytestmark = pytest.mark.e2e

LAUNCHER = Path(__file__).resolve().parents[2] / "scripts/run_accuracy_test.sh"
ENVIRONMENT = os.environ | {"NIXL_KV_PYTHON": sys.executable}
START_S = 300
END_S = 60


@pytest.mark.filterwarnings("default")  # of what lm-eval imports
def test_prefill_and_decode_apart_answer_right(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECALL_HELDOUT", "")
    for name in accuracy.OFFLINE:
        monkeypatch.setenv(name, "1")
    settings = accuracy.read_settings((), {}, {"--limit": "8"})
    subject, outcome = accuracy.recall(accuracy.BUNDLED), accuracy.Outcome()
    accuracy.run_pair(outcome, subject, settings, cluster)
    assert [*accuracy.faults(outcome, subject, settings.knobs)] == []
    assert (outcome.accuracy, outcome.items, outcome.errors) == (1.0, 8, 0)
    loaded = outcome.counters["loads_total{outcome=loaded}"]
    assert loaded == outcome.counters["verified_loads_total"] == 8
    assert outcome.computed == 8  # the last token of each prompt


@pytest.mark.slow
def test_the_launcher_evaluates_all_items_beside_a_single_engine(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command: list[str | Path] = [
        LAUNCHER,
        "--single",
        "--json",
        result,
        "--log-dir",
        tmp_path / "logs",
    ]
    ended = subprocess.run(
        command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("1/1 models are good\n")
    assert f"logs in {tmp_path / 'logs'}" in ended.stderr
    (one,) = json.loads(result.read_text(encoding="utf-8"))
    assert (one["items"], one["computed"], one["counters"]["loads_total{outcome=loaded}"]) == (
        200,
        200,
        200,
    )
    assert min(one["accuracy"], one["single"]) >= one["expected"] - one["tolerance"]


def sessions_below(pid: int) -> set[int]:
    """Each engine leads a session, and so does the process that it is forked from."""
    return {os.getsid(process.pid) for process in psutil.Process(pid).children(recursive=True)}


def is_in(process: psutil.Process, sessions: set[int]) -> bool:
    try:
        return os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@pytest.mark.slow
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    logs, output = tmp_path / "logs", tmp_path / "output"
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [LAUNCHER, "--log-dir", logs],
            env=ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        # Both engines run Python by then, and each has children or is about to.
        engines = [f"*/{name}.log" for name in ("prefill-0", "decode-0")]
        deadline = time.monotonic() + START_S
        while not all(any(path.stat().st_size for path in logs.glob(one)) for one in engines):
            assert launcher.poll() is None, output.read_text("utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.1)
        sessions = sessions_below(launcher.pid)
        assert len(sessions) > len(engines)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(END_S) == 128 + signal.SIGINT
        assert not any(is_in(one, {launcher.pid, *sessions}) for one in psutil.process_iter())
        assert "interrupted: everything is ended" in output.read_text("utf-8")
    finally:
        launcher.terminate()
        launcher.wait(END_S)
