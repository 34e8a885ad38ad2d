"""Prefill and decode in processes of their own, which a test calls, stops and kills."""

import gc
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from typing_extensions import Self

from harness.cluster.waiting import look_until
from harness.local.caches import Cache, Sizes
from harness.local.engine import HOST, LocalEngine
from nixl_kv.config import Config
from nixl_kv.engine import loop
from nixl_kv.protocol import peers
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.reading import turnover
from nixl_kv.transport.base import Ports, Transport
from nixl_kv.transport.ucx import serving
from support.integration import CONFIG, MakeTransport

START_S = 300.0  # how long a process may take to start, on a busy machine
WAIT_S = 120.0
"""For anything else."""


class Side:
    """Prefill or decode, of one rank; all blocks but the first are those of each request."""

    def __init__(
        self,
        role: str,
        make_transport: MakeTransport,
        sizes: Sizes,
        config: Config = CONFIG,
        ports: Ports | None = None,
    ) -> None:
        self.cache = Cache(sizes).fill(7) if role == "prefill" else Cache(sizes)
        self.expected = Cache(sizes).fill(7).view
        self.table = range(1, sizes.blocks)
        self.tokens = len(self.table) * sizes.tokens
        self.count = 0
        self._open = lambda: LocalEngine(
            role, [self.cache.layout()], make_transport, config=config, roles=role, ports=ports
        )
        self.engine = self._open()

    def close(self) -> None:
        self.engine.close()

    def restart(self) -> None:
        """Close the engine and open another, like a sleep and a wake-up."""
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

    def __init__(self, make: Callable[..., Any], *arguments: object) -> None:
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


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    side = make(*arguments)
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        name, given = command
        pipe.send(getattr(side, name)(*given))
    side.close()


def cut(ours: int, theirs: int) -> int:
    """Break all TCP connections between two processes; how many.

    Our end hears of it at once, the other one by a reset, as in a network that forgets connections.
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


# --- engines that live, end and live again

SIZES: Final = Sizes(layers=2, blocks=32, heads=1, tokens=16, key=2**13, value=2**13)  # 16 MiB
SHORT_S: Final = 0.3
CHECK_S: Final = 2.0
"""Between prefill's checks while it is idle."""


def transport() -> Transport:
    from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - only where NIXL is

    return nixl_transport(Config(host=HOST), "DRAM")


@dataclass(frozen=True)
class Usage:
    """The system's resources that a process uses."""

    descriptors: int
    threads: int
    mappings: int
    mib: float


class EndingSide(Side):
    """A side that ends and lives again. All long times are short in its process.

    So what takes minutes in service takes a second here.
    """

    def __init__(self, role: str, tls: str, is_checked: bool) -> None:  # noqa: FBT001 - sent
        """UCX chooses among the transports `tls`; empty: among all.

        Only over loopback: an agent listens on each interface, and other tests make some meanwhile.
        """
        import nixl_kv.transport.nixl as module  # noqa: PLC0415 - only where NIXL is

        module.UCX_ENGINE_CONFIG += ",NET_DEVICES=lo" + (f",TLS={tls}" if tls else "")  # type: ignore[misc]
        peers.KEPT_S = SHORT_S  # type: ignore[misc]
        loop.LINK_KEPT_S = SHORT_S  # type: ignore[misc]
        turnover.TIDY_S = SHORT_S  # type: ignore[misc]
        serving.IDLE_CHECK_S = CHECK_S  # type: ignore[misc]
        if not is_checked:
            serving.IDLE_CHECK_S = serving.AWAKE_CHECK_S = 1e6  # type: ignore[misc]
        super().__init__(role, transport, SIZES)

    def offer(self) -> Ticket:
        for rank in self.engine.ranks:
            rank.poll()
            if rank.description not in self.engine.description.ranks:
                self.engine.publish()
        return super().offer()

    def drain(self) -> None:
        """Be told to drain, as by a tool."""
        self.engine.directory.is_draining = True

    def remember(self) -> None:
        """Keep peers as long as in service."""
        peers.KEPT_S = 600.0  # type: ignore[misc]

    def forget(self) -> None:
        self.engine.wait(lambda: not self.engine.ranks[0].parts.decode.peers.known, WAIT_S)

    def settle(self) -> None:
        """Until nothing is known of any peer, and nothing is under way that ends by itself."""
        (rank,) = self.engine.ranks
        parts = rank.parts

        def is_settled() -> bool:
            if rank.engine.loop is not None:
                rank.engine.loop.wake()
            known = parts.decode.peers.known or parts.control.links()
            return not (known or parts.agents.is_busy or parts.agents.next_due is not None)

        self.engine.wait(is_settled, WAIT_S)

    def usage(self) -> Usage:
        gc.collect()
        status = Path("/proc/self/statm").read_text().split()
        return Usage(
            sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1,
            sum(1 for _ in Path("/proc/self/task").iterdir()),
            len(Path("/proc/self/maps").read_text().splitlines()),
            int(status[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        )

    def totals(self) -> dict[str, float]:
        for rank in self.engine.ranks:
            rank.poll()
        return dict(self.engine.ranks[0].counts)


def running(role: str, tls: str, *, is_checked: bool = True) -> SideProcess:
    return SideProcess(EndingSide, role, tls, is_checked)


wait_for = partial(look_until, timeout_s=WAIT_S, interval_s=0.1)
"""Measure until it is enough, or until the timeout; return the last measurement."""
