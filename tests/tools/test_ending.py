"""Whoever ends a matrix or a run, and however impatiently: nothing stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.cluster.cluster import Cluster
from harness.cluster.processes import (
    ManagedProcess,
    delayed_signals,
    end_on_signals,
    exit_on_signal,
    stop_all,
)
from harness.cluster.waiting import wait_until

REPO = Path(__file__).resolve().parents[2]
PATIENCE_S = 120
INTERRUPTED = 128 + signal.SIGINT
MATRIX = """\
import signal, sys
from pathlib import Path
from suites.matrix import accuracy
from suites.matrix.__main__ import main
if sys.argv[1] == "terminal":  # also where these tests run below nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
accuracy.LAUNCHER, accuracy.GRACE_S = Path(sys.argv[2]), float(sys.argv[3])
sys.exit(main(sys.argv[4:]))
"""
# An engine leads a session, as those of the launcher do.
BEGIN = """\
cd "{folder}"
setsid sleep 300 &
engine=$!
trap '{on_term}' TERM
echo $engine $$ > begun.new
mv begun.new begun
while :; do sleep 0.05; done
"""
ORDERLY = "touch ending; sleep 1; kill $engine; touch ended; exit 143"
STUBBORN = "touch ending"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def launcher_of(folder: Path, on_term: str) -> Path:
    path = folder / "launcher.sh"
    path.write_text(BEGIN.format(folder=folder, on_term=on_term), encoding="utf-8")
    return path


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """In the place of torch, which takes seconds: a machine without a GPU."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    text = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    (folder / "torch.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def matrix(tmp_path: Path, stubs: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the matrix with one cell, and a launcher that ends in its own way."""
    started: list[subprocess.Popen[bytes]] = []

    def start(on_term: str, *before: str, grace_s: float = 60.0) -> subprocess.Popen[bytes]:
        launcher, where = launcher_of(tmp_path, on_term), "nohup" if before else "terminal"
        script = [sys.executable, "-c", MATRIX, where, str(launcher), str(grace_s)]
        arguments = ["--judge", "accuracy", "--only", "same", "--log-dir", str(tmp_path / "logs")]
        path = os.pathsep.join([str(stubs), str(REPO / "scripts"), str(REPO / "tests")])
        with (tmp_path / "said").open("wb") as said:
            started.append(
                subprocess.Popen(
                    [*before, *script, *arguments],
                    env=os.environ | {"PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        assert wait_until(
            lambda: (tmp_path / "begun").exists() or started[-1].poll() is not None, PATIENCE_S
        )
        assert started[-1].poll() is None, (tmp_path / "said").read_text("utf-8")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    end_begun(tmp_path)


def engine_in(folder: Path) -> int:
    return int((folder / "begun").read_text("utf-8").split()[0])


def end_begun(folder: Path) -> None:
    """What a failed test has left of engine and launcher, which both run in its folder."""
    for pid in map(int, (folder / "begun").read_text("utf-8").split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.cwd() == str(folder):
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_impatient_second_signal_leaves_no_engine_behind(
    tmp_path: Path, matrix: Callable[..., subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    process = matrix(ORDERLY)
    process.send_signal(signal.SIGINT)
    assert wait_until((tmp_path / "ending").exists, PATIENCE_S, interval_s=0.02)
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 128 + number
    assert (tmp_path / "ended").exists()  # in its own time
    assert not is_running(engine_in(tmp_path))


def test_a_launcher_that_does_not_end_is_ended_with_its_engines(
    tmp_path: Path, matrix: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = matrix(STUBBORN, grace_s=0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == INTERRUPTED
    assert (tmp_path / "ending").exists()
    assert not is_running(engine_in(tmp_path))


def test_a_matrix_below_nohup_outlives_its_terminal(
    tmp_path: Path, matrix: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = matrix(ORDERLY, "nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == INTERRUPTED
    assert not is_running(engine_in(tmp_path))


def test_a_case_has_nothing_of_an_earlier_matrix(
    tmp_path: Path, matrix: Callable[..., subprocess.Popen[bytes]]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("same.json", "same.log"):
        (logs / name).write_text("[]", encoding="utf-8")
    process = matrix(ORDERLY)
    assert not (logs / "same.json").exists()
    assert (logs / "same.log").read_text("utf-8") == ""
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == INTERRUPTED


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for install in (end_on_signals, Cluster(tmp_path).__enter__):
        install()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is exit_on_signal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_on_signals()
    assert signal.getsignal(signal.SIGHUP) is exit_on_signal


@pytest.mark.usefixtures("handlers")
def test_signals_come_after_the_block() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start us without
    done = False
    with pytest.raises(KeyboardInterrupt), delayed_signals():  # noqa: PT012 - what comes after it
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done


def test_what_ends_in_time_keeps_its_children(tmp_path: Path) -> None:
    process = ManagedProcess("p", launcher_of(tmp_path, "exit 0").with_suffix(".log"))
    process.launch(["bash", str(tmp_path / "launcher.sh")], os.environ)
    assert wait_until((tmp_path / "begun").exists, PATIENCE_S)
    stop_all([process])
    assert process.exit_code() == 0
    assert is_running(engine_in(tmp_path))
    end_begun(tmp_path)
