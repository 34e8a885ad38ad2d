"""Engines that are forked from a process that has imported vLLM.

Each of an engine's three processes imports torch and vLLM, in 20 s of CPU time; the rest of a start
costs 4 s. Here one process imports them once. Engines are its children, and fork their other two
processes, which vLLM would spawn on CPU. Nothing else differs from the command line: the same main
function gets the same arguments, environment and folder.

    python -m harness.cluster.warm DESCRIPTOR    # of the socket that asks for engines
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil

from harness.cluster import netns
from harness.cluster.processes import ManagedProcess, ProcessDiedError

MAIN: Final = "vllm.entrypoints.launchers.api_server.entry"
PRELOADED: Final = (
    "vllm.entrypoints.openai.api_server",
    MAIN,
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "compressed_tensors",
    "pydantic.v1",
)
"""Modules that an engine's three processes import, in some version of vLLM."""
POLL_S: Final = 0.02
TESTS: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Launch:
    """All that a command line, an environment and a shell would say about a new engine."""

    arguments: tuple[str, ...]
    env: dict[str, str]
    log_path: str
    folder: str
    cores: tuple[int, ...] = ()  # where it may run; none: everywhere
    namespace: str | None = None  # where it runs; None: on this machine
    main: str | None = None
    """The module whose function of that name it runs; None: the API server's."""


class ForkedProcess:
    """An engine that the server has forked, as `subprocess.Popen` has it."""

    def __init__(self, server: "WarmServer", pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.exit_code_of(self.pid)
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code


class WarmServer(ManagedProcess):
    """The process that forks engines, as its owner sees it. It ends with its owner."""

    def __init__(self, name: str, log_dir: Path) -> None:
        super().__init__(name, log_dir / f"{name}.log")
        self._lock = threading.Lock()
        ours, self._theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())

    def start(self, env: Mapping[str, str], python: Path) -> None:
        path = os.pathsep.join(filter(None, (str(TESTS), env.get("PYTHONPATH"))))
        with self._theirs:
            descriptor = self._theirs.fileno()
            self.launch(
                [str(python), "-m", __name__, str(descriptor)],
                {**env, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                self.log_path.parent,
                pass_fds=[descriptor],
            )

    def fork(self, launch: Launch) -> ForkedProcess:
        """One more engine; waits until vLLM is imported."""
        try:
            pid = self._ask(launch)
        except (OSError, EOFError):
            raise ProcessDiedError(f"{self.name} has ended; its log:\n{self.tail()}") from None
        assert pid is not None
        return ForkedProcess(self, pid)

    def exit_code_of(self, pid: int) -> int | None:
        try:
            return self._ask(pid)
        except (OSError, EOFError):  # the server was killed: the engine's status is unknown
            return None if psutil.pid_exists(pid) else -signal.SIGKILL

    def close(self) -> None:
        """End it; its engines go on."""
        self._pipe.close()
        self.kill()

    def _ask(self, question: "Launch | int") -> int | None:
        with self._lock:
            self._pipe.send(question)
            reply: int | None = self._pipe.recv()
            return reply


def preload() -> None:
    """Import what engines need, such that their processes are forked instead of spawned."""
    system_utils = importlib.import_module("vllm.utils.system_utils")
    vars(system_utils)["get_mp_context"] = partial(multiprocessing.get_context, "fork")
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # vLLM collects garbage at each start: 1 s in each process for what stands here


def serve(pipe: Connection) -> Launch | None:
    """Fork engines until the owner ends (None); in an engine, return its launch."""
    while True:
        try:
            question: Launch | int = pipe.recv()
        except EOFError:
            return None
        if isinstance(question, int):
            ended, status = os.waitpid(question, os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(status) if ended else None)
        elif pid := os.fork():
            pipe.send(pid)
        else:
            pipe.close()
            return question


def become(launch: Launch) -> None:
    """Turn this process into one that a shell might have started."""
    os.setsid()
    log = os.open(launch.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, descriptor)
    os.close(log)
    os.chdir(launch.folder)
    if launch.namespace is not None:
        netns.enter(launch.namespace)
    if launch.cores:
        os.sched_setaffinity(0, launch.cores)
    os.environ.clear()
    os.environ.update(launch.env)
    added = launch.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [path for path in added if path and path not in sys.path]
    sys.argv = ["api_server", *launch.arguments]


def main() -> None:
    """Import, then serve; a forked process runs its engine."""
    preload()
    launch = serve(Connection(int(sys.argv[1])))
    if launch is not None:
        become(launch)
        importlib.import_module(launch.main or MAIN).main()


if __name__ == "__main__":
    main()
