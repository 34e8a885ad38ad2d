"""Child processes: started with a log, ended with all that they have started, whatever happens."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import psutil

from harness.cluster.waiting import wait_until

GRACE_S: Final = 8.0
END_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
END_CODES: Final = tuple(128 + number for number in END_SIGNALS)
"""The exit status of a program that `end_on_signals` ends."""
PORT_RANGE: Final = range(20000, 32000)  # below the ports that Linux gives to outgoing connections


class ProcessDiedError(RuntimeError):
    """A process ended, or hung, before it was ready."""


class Ports:
    """Gives out free ports, each only once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def next_free(self) -> int:
        while True:
            port = secrets.choice(PORT_RANGE)
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
                if port not in self._given:
                    self._given.add(port)
                    return port


class ManagedProcess:
    """One child in a session of its own, so that Ctrl-C reaches only us and we end it in order."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._child: Any = None  # a `subprocess.Popen`, or a `warm.ForkedProcess`

    @property
    def pid(self) -> int:
        """The session leader's process id."""
        return int(self._child.pid)

    def launch(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        **options: Any,
    ) -> None:
        """Start it, in this process's folder or in `cwd`; its output goes to the log file."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        options |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with self.log_path.open("ab") as log:
            self.adopt(
                subprocess.Popen(
                    command, env=dict(env), cwd=cwd, stdout=log, start_new_session=True, **options
                )
            )

    def adopt(self, child: Any) -> None:
        """Manage a child that leads a session already."""
        self._child = child

    def exit_code(self) -> int | None:
        """None while it runs, and before it was started."""
        code: int | None = self._child and self._child.poll()
        return code

    def is_running(self) -> bool:
        return self._child is not None and self.exit_code() is None

    def check_alive(self) -> None:
        """Raise ProcessDiedError, with the end of the log, if it has ended."""
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
        """Wait until it can be used."""
        if not wait_until(self.is_ready, timeout_s):
            raise ProcessDiedError(f"{self.name} not ready in {timeout_s:.0f} s:\n{self.tail()}")

    def log_text(self, start: int = 0) -> str:
        """Its log, from that byte on."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_bytes()[start:].decode("utf-8", errors="replace")

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def members(self) -> list[psutil.Process]:
        """All processes of its session, also those that outlived their parent."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                found += [process] if os.getsid(process.pid) == self.pid else []
        return found

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
        stop_all([self])

    def signal_leader(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def nixl_kv_command(*arguments: str) -> list[str]:
    """The command line of `nixl-kv`, of the package that runs here, installed or not."""
    return [sys.executable, "-c", "from nixl_kv.cli.main import app; app()", *arguments]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run this many processes that only compute."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def stop_all(processes: Iterable[ManagedProcess], grace_s: float = GRACE_S) -> None:
    """Stop several at once, so that they share one grace period.

    If one has not ended by then, those of its children end too that lead sessions of their own.
    """
    running = list(processes)
    try:
        for process in running:
            process.terminate()
        wait_until(lambda: not any(p.is_running() for p in running), grace_s, interval_s=0.05)
    finally:  # also after a second Ctrl-C
        for process in running:
            if process.is_running():
                kill_descendants(process.pid)
            process.kill()


def kill_descendants(pid: int) -> None:
    """Kill all that descends from a process, but not the process; wherever it has gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end `with` blocks, as Ctrl-C does; what nohup ignores stays ignored."""
    for number in END_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit_on_signal)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
