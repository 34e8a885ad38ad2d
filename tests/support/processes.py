"""Prefill and decode in processes of their own, which a test calls, stops and kills."""

import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from typing_extensions import Self

from harness.local.caches import Cache, Sizes
from harness.local.engine import LocalEngine
from nixl_kv.config import Config
from nixl_kv.protocol.ticket import Ticket
from support.integration import CONFIG, MakeTransport

START_S = 300.0  # how long a process may take to start, on a busy machine
WAIT_S = 120.0
"""For anything else."""


class Side:
    """Prefill or decode, of one rank; all blocks but the first are those of each request."""

    def __init__(
        self, role: str, make_transport: MakeTransport, sizes: Sizes, config: Config = CONFIG
    ) -> None:
        self.cache = Cache(sizes).fill(7) if role == "prefill" else Cache(sizes)
        self.expected = Cache(sizes).fill(7).view
        self.table = range(1, sizes.blocks)
        self.tokens = len(self.table) * sizes.tokens
        self.count = 0
        self._open = lambda: LocalEngine(
            role, [self.cache.layout()], make_transport, config=config, roles=role
        )
        self.engine = self._open()

    def close(self) -> None:
        self.engine.close()

    def restart(self) -> None:
        """As by a sleep and a wake-up."""
        self.close()
        self.engine = self._open()

    def offer(self) -> Ticket:
        self.count += 1
        return self.engine.offer(f"p{self.count}", [self.table], self.tokens)

    def start(self, ticket: Ticket) -> str:
        """Begin a load into empty blocks; its name."""
        self.cache.memory[...] = 0
        self.count += 1
        name = f"d{self.count}"
        self.engine.prepare_load(name, ticket)
        self.engine.start_load(name, [self.table], range(self.tokens))
        return name

    def begin(self, ticket: Ticket) -> str:
        """The same, until some of the data is there, perhaps not all of it."""
        name, view = self.start(ticket), self.cache.view
        self.engine.wait(lambda: view[:, self.table[0]].any() or view[:, self.table[-1]].any())
        return name

    def is_right(self) -> bool:
        """Whether the blocks hold what prefill offers."""
        return bool(np.array_equal(self.cache.view[:, 1:], self.expected[:, 1:]))

    def failure(self, name: str) -> str | None:
        """Why a load failed; None if it is good."""
        failure = self.engine.wait_failure(name, WAIT_S)
        return failure or (None if self.is_right() else "wrong bytes")

    def load(self, ticket: Ticket) -> str | None:
        return self.failure(self.start(ticket))


class SideProcess:
    """A side in a process of its own: each of its methods can be called. It ends with a block."""

    def __init__(self, make: Callable[..., Side], *arguments: object) -> None:
        """Processes are forked from one that has imported NIXL, which takes seconds."""
        context = get_context("forkserver")
        context.set_forkserver_preload(["nixl._api"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._receive(START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _receive(self, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), "the process says nothing"
        return self._pipe.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            self._pipe.send((name, arguments))
            return self._receive(2 * WAIT_S)

        return call

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def leave(self) -> None:
        self._pipe.send(None)
        self.process.join(WAIT_S)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _serve(pipe: Connection, make: Callable[..., Side], arguments: tuple[object, ...]) -> None:
    side = make(*arguments)
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        name, given = command
        pipe.send(getattr(side, name)(*given))
    side.close()


def cut(ours: int, theirs: int) -> int:
    """Break all TCP connections between two processes; how many.

    Our end is told at once, the other one by a reset, as from a network that forgets connections.
    """
    ports = {one.laddr.port for one in psutil.Process(theirs).net_connections("tcp")}
    ends = [
        (one.laddr.port, one.raddr.port)
        for one in psutil.Process(ours).net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED and one.raddr.port in ports
    ]
    which = " or ".join(f"( sport = :{here} and dport = :{there} )" for here, there in ends)
    if which:
        command = ["ss", "--kill", "--tcp", "state", "established", f"( {which} )"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return len(ends)
