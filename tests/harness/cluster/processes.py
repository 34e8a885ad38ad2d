"""Child processes: started with a log, ended with all that they have started, whatever happens."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, Protocol

import psutil

from harness.cluster.waiting import wait_until

GRACE_S: Final = 8.0
ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
DELAYED_SIGNALS: Final = (signal.SIGINT, *ENDING_SIGNALS)
PORT_RANGE: Final = range(20000, 32000)
"""Below the ports that Linux gives to outgoing connections."""

Handlers = dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None]


class ProcessDiedError(RuntimeError):
    """A process ended, or hung, before it was ready."""


class Child(Protocol):
    """A process that was started, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def wait(self) -> int:
        """Wait for its end; its exit status."""


class Ports:
    """Gives out ports that nobody listens on, each only once."""

    def __init__(self) -> None:
        """Nothing is given out yet."""
        self._given: set[int] = set()

    def next_free(self) -> int:
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
        self._child: Child | None = None

    def __repr__(self) -> str:
        """Its name and how it is."""
        if self._child is None:
            state = "not started"
        else:
            code = self._child.poll()
            state = "runs" if code is None else f"ended with status {code}"
        return f"<{type(self).__name__} {self.name}: {state}>"

    @property
    def pid(self) -> int:
        """The session leader's process id."""
        if self._child is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._child.pid

    def launch(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it, in this process's folder or in `cwd`; what it prints goes to the log file."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self.adopt(
                subprocess.Popen(
                    command,
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
            )

    def adopt(self, child: Child) -> None:
        """Manage a child that leads a session already."""
        self._child = child

    def exit_code(self) -> int | None:
        """How it ended; None while it runs, and before it was started."""
        return None if self._child is None else self._child.poll()

    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def check_alive(self) -> None:
        """Raise, with the end of the log, if it has ended.

        Raises:
            ProcessDiedError: if it has.
        """
        code = self.exit_code()
        if code is not None:
            raise ProcessDiedError(
                f"{self.name} ended with status {code}; its log is {self.log_path}\n{self.tail()}"
            )

    def is_ready(self) -> bool:
        """Whether it can be used; raises if it has ended."""
        self.check_alive()
        return True

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it can be used.

        Raises:
            ProcessDiedError: if it ends, or if time is over before it can.
        """
        if not wait_until(self.is_ready, timeout_s):
            raise ProcessDiedError(f"{self.name} not ready in {timeout_s:.0f} s:\n{self.tail()}")

    def log_text(self, start: int = 0) -> str:
        """What stands in its log, from that byte on."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_bytes()[start:].decode("utf-8", errors="replace")

    def log_size(self) -> int:
        """The bytes of its log."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def members(self) -> list[psutil.Process]:
        """All processes of its session, also those that outlived their parent."""
        return [process for process in psutil.process_iter() if _session(process.pid) == self.pid]

    def terminate(self) -> None:
        """Ask the leader to end; vLLM then ends its own children."""
        if self.is_running():
            self.signal_leader(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group now, also children that outlived their leader."""
        if self._child is not None:
            self.signal_group(signal.SIGKILL)
            self._child.wait()

    def stop(self) -> None:
        """Ask, wait a few seconds, then kill."""
        stop_all([self])

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to its leader alone, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all its processes that are there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def nixl_kv_command(*arguments: str) -> list[str]:
    """The command line of `nixl-kv`, of the package that runs here, installed or not."""
    return [sys.executable, "-c", "from nixl_kv.cli.main import app; app()", *arguments]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def stop_all(processes: Iterable[ManagedProcess], grace_s: float = GRACE_S) -> None:
    """Stop several at once, so that they share one grace period.

    Of one that has not ended by then, also those children end that lead sessions of their own.
    """
    running = list(processes)
    with delayed_signals():  # an impatient second Ctrl-C must not leave anything behind
        for process in running:
            process.terminate()
        wait_until(lambda: not any(p.is_running() for p in running), grace_s, interval_s=0.05)
        for process in running:
            if process.is_running():
                kill_descendants(process.pid)
            process.kill()


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """What would end us comes after the block. Signals reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before: Handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in DELAYED_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for first in received[:1]:
        signal.raise_signal(first)


def kill_descendants(pid: int) -> None:
    """Kill all that descends from a process, but not the process; wherever it has gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exception, so that `with` blocks end what they started."""
    raise SystemExit(128 + number)


def end_on_signals() -> Handlers:
    """Exit on a signal that would end us; what nohup ignores stays ignored. The handlers before."""
    before: Handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    for number, handler in before.items():
        if (number, handler) != (signal.SIGHUP, signal.SIG_IGN):
            signal.signal(number, exit_on_signal)
    return before


def restore_handlers(handlers: Handlers) -> None:
    """Set the handlers that were there before."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
