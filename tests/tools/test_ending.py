"""Whoever ends a program, and however impatiently: nothing stays behind."""

import contextlib
import os
import signal
from collections.abc import Iterator
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

PATIENCE_S = 120
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


def engine_in(folder: Path) -> int:
    return int((folder / "begun").read_text("utf-8").split()[0])


def end_begun(folder: Path) -> None:
    """What a failed test has left of engine and launcher, which both run in its folder."""
    for pid in map(int, (folder / "begun").read_text("utf-8").split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.cwd() == str(folder):
                process.kill()


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


def test_what_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    process = ManagedProcess("p", launcher_of(tmp_path, STUBBORN).with_suffix(".log"))
    process.launch(["bash", str(tmp_path / "launcher.sh")], os.environ)
    assert wait_until((tmp_path / "begun").exists, PATIENCE_S)
    stop_all([process], grace_s=0.5)
    assert (tmp_path / "ending").exists()
    assert wait_until(lambda: not is_running(engine_in(tmp_path)), PATIENCE_S)
