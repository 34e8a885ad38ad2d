"""Child processes that end: each leads its own session, and the whole group goes with it."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

GRACE_S = 8.0
WAITING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORT_RANGE = range(20000, 32000)  # below where Linux takes the ports of outgoing connections


class ProcessDiedError(RuntimeError):
    """A process ended, or hung, before it was ready."""


class Ports:
    """Gives out ports that nobody listens on, each only once."""

    def __init__(self) -> None:
        """Nothing is given out yet."""
        self._given: set[int] = set()

    def take(self) -> int:
        """One more port."""
        while True:
            port = secrets.choice(PORT_RANGE)
            if port not in self._given and _is_free(port):
                self._given.add(port)
                return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class ManagedProcess:
    """One child in a session of its own, so that Ctrl-C reaches only us and we end it in order."""

    def __init__(self, name: str, log_path: Path) -> None:
        """Nothing runs before launch()."""
        self.name = name
        self.log_path = log_path
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The session leader's process id."""
        if self._popen is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._popen.pid

    def launch(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        """Start it, in this process's folder or in `cwd`; what it prints goes to the log file."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """How it ended; None while it runs, and before it was started."""
        return None if self._popen is None else self._popen.poll()

    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._popen is not None and self._popen.poll() is None

    def check_alive(self) -> None:
        """Raise, with the end of the log, if it has ended."""
        code = self.exit_code()
        if code is not None:
            raise ProcessDiedError(
                f"{self.name} ended with status {code}; its log is {self.log_path}\n{self.tail()}"
            )

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log."""
        if not self.log_path.exists():
            return ""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def terminate(self) -> None:
        """Ask the leader to end; vLLM then ends its own children."""
        if self.is_running():
            self._signal_group(signal.SIGTERM, leader_only=True)

    def kill(self) -> None:
        """End the whole group now, also children that outlived their leader."""
        if self._popen is not None:
            self._signal_group(signal.SIGKILL, leader_only=False)
            self._popen.wait()

    def stop(self) -> None:
        """Ask, wait a few seconds, then kill."""
        stop_all([self])

    def _signal_group(self, number: signal.Signals, *, leader_only: bool) -> None:
        try:
            if leader_only:
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # gone already, which is what was wanted


def stop_all(processes: Iterable[ManagedProcess], grace_s: float = GRACE_S) -> None:
    """Stop several at once, so that they share one grace period.

    Of one that is not over by then, also those children end that lead sessions of their own.
    """
    running = list(processes)
    with signals_wait():  # an impatient second Ctrl-C must not leave anything behind
        for process in running:
            process.terminate()
        deadline = time.monotonic() + grace_s
        while any(p.is_running() for p in running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in running:
            if process.is_running():
                end_children(process.pid)
            process.kill()


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """What would end us comes after the block. Signals reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in WAITING_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came[:1]:
        signal.raise_signal(number)


def end_children(pid: int) -> None:
    """Kill all that descends from a process, but not the process; wherever it has gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
