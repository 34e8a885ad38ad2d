"""Whoever ends a sweep or a run, and however impatiently: nothing stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pd.cluster import Cluster, ClusterSpec, end_on_signals, exit_on_signal
from pd.processes import ManagedProcess, signals_wait, stop_all

REPO = Path(__file__).resolve().parents[2]
PATIENCE_S = 30
INTERRUPTED = 128 + signal.SIGINT
SWEEP = """\
import sys
from pathlib import Path
from pd import sweep
sweep.LAUNCHER, sweep.GRACE_S = Path(sys.argv[1]), float(sys.argv[2])
sys.exit(sweep.main(sys.argv[3:]))
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


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
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
def sweep(tmp_path: Path, stubs: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a sweep over one case, with a launcher that ends in its own way."""
    started: list[subprocess.Popen[bytes]] = []

    def start(on_term: str, *before: str, grace_s: float = 20.0) -> subprocess.Popen[bytes]:
        script = [sys.executable, "-c", SWEEP, str(launcher_of(tmp_path, on_term)), str(grace_s)]
        arguments = ["--only", "tp1-tp1", "--log-dir", str(tmp_path / "logs")]
        path = os.pathsep.join([str(stubs), str(REPO / "scripts")])
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
        until(lambda: (tmp_path / "begun").exists() or started[-1].poll() is not None)
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
    tmp_path: Path, sweep: Callable[..., subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    process = sweep(ORDERLY)
    process.send_signal(signal.SIGINT)
    until((tmp_path / "ending").exists)
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 128 + number
    assert (tmp_path / "ended").exists()  # in its own time
    assert not runs(engine_in(tmp_path))


def test_a_launcher_that_does_not_end_is_ended_with_its_engines(
    tmp_path: Path, sweep: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = sweep(STUBBORN, grace_s=0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == INTERRUPTED
    assert (tmp_path / "ending").exists()
    assert not runs(engine_in(tmp_path))


def test_a_sweep_below_nohup_outlives_its_terminal(
    tmp_path: Path, sweep: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = sweep(ORDERLY, "nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == INTERRUPTED
    assert not runs(engine_in(tmp_path))


def test_a_case_has_nothing_of_an_earlier_sweep(
    tmp_path: Path, sweep: Callable[..., subprocess.Popen[bytes]]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("tp1-tp1.json", "tp1-tp1.log"):
        (logs / name).write_text("[]", encoding="utf-8")
    process = sweep(ORDERLY)
    assert not (logs / "tp1-tp1.json").exists()
    assert (logs / "tp1-tp1.log").read_text("utf-8") == ""
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == INTERRUPTED


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for install in (end_on_signals, Cluster(ClusterSpec(), log_dir=tmp_path).__enter__):
        install()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is exit_on_signal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_on_signals()
    assert signal.getsignal(signal.SIGHUP) is exit_on_signal


def test_signals_come_after_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), signals_wait():  # noqa: PT012 - what comes after it
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done


def test_what_ends_in_time_keeps_its_children(tmp_path: Path) -> None:
    process = ManagedProcess("p", launcher_of(tmp_path, "exit 0").with_suffix(".log"))
    process.launch(["bash", str(tmp_path / "launcher.sh")], os.environ)
    until((tmp_path / "begun").exists)
    stop_all([process])
    assert process.exit_code() == 0
    assert runs(engine_in(tmp_path))
    end_begun(tmp_path)
