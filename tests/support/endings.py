"""Prefill and decode in processes of their own, whose engines live, end and live again.

Each answers commands over a pipe. What takes minutes in service takes a second here.
"""

import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness.local.caches import Cache, Sizes
from harness.local.engine import HOST
from nixl_kv.config import Config
from nixl_kv.engine import loop, serving
from nixl_kv.protocol import peers
from nixl_kv.reading import replace
from nixl_kv.transport.base import Transport
from support.pair import CONFIG, SmallEngine
from support.processes import START_S, process_context

SIZES: Final = Sizes(layers=2, blocks=32, heads=1, tokens=16, key=2**13, value=2**13)  # 16 MiB
TABLE: Final = range(1, 32)
TOKENS: Final = len(TABLE) * SIZES.tokens
SHORT_S: Final = 0.3
CHECK_S: Final = 2.0
"""Between prefill's checks while it is idle."""
WAIT_S: Final = 60.0
"""For anything, on a busy machine."""


def transport() -> Transport:
    from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - only where NIXL is

    return nixl_transport(Config(host=HOST), "DRAM")


@dataclass(frozen=True)
class Usage:
    """What a process has of the system."""

    descriptors: int
    threads: int
    mappings: int
    mib: float

    @classmethod
    def now(cls) -> "Usage":
        gc.collect()
        status = Path("/proc/self/statm").read_text().split()
        return cls(
            sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1,
            sum(1 for _ in Path("/proc/self/task").iterdir()),
            len(Path("/proc/self/maps").read_text().splitlines()),
            int(status[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        )


def use_only(tls: str) -> None:
    """Let UCX choose among these transports in this process; empty: among all.

    Only over loopback: an agent listens on each interface, and other tests make some meanwhile.
    """
    import nixl_kv.transport.nixl as module  # noqa: PLC0415 - only where NIXL is

    module.UCX_ENGINE_CONFIG += ",NET_DEVICES=lo" + (f",TLS={tls}" if tls else "")  # type: ignore[misc]


def hurry() -> None:
    """Make all long times short, in this process."""
    peers.KEPT_S = SHORT_S  # type: ignore[misc]
    loop.LINK_KEPT_S = SHORT_S  # type: ignore[misc]
    replace.TIDY_S = SHORT_S  # type: ignore[misc]
    serving.IDLE_CHECK_S = CHECK_S  # type: ignore[misc]


class Side:
    """One engine of the process; `commands` are its methods."""

    def __init__(self, role: str, tls: str) -> None:
        hurry()
        use_only(tls)
        self.role = role.split(maxsplit=1)[0]
        if "unchecked" in role:
            serving.IDLE_CHECK_S = serving.AWAKE_CHECK_S = 1e6  # type: ignore[misc]
        self.cache = Cache(SIZES).fill(7) if self.role == "prefill" else Cache(SIZES)
        self.count = 0
        self.begin()

    def begin(self) -> None:
        self.engine = SmallEngine(
            self.role,
            self.cache,
            transport,
            roles=self.role,
            config=CONFIG,
        )

    def end(self) -> None:
        self.engine.close()

    def restart(self) -> None:
        """As by a sleep and a wake-up."""
        self.end()
        self.begin()

    def offer(self) -> Any:
        self.count += 1
        for rank in self.engine.ranks:
            rank.poll()
            if rank.description not in self.engine.description.ranks:
                self.engine.publish()
        return self.engine.offer(f"p{os.getpid()}-{self.count}", [TABLE], TOKENS)

    def load(self, ticket: Any) -> str | None:
        """Why a load failed, and None if it is good."""
        self.count += 1
        name = f"d{os.getpid()}-{self.count}"
        self.engine.prepare_load(name, ticket)
        self.engine.load(name, TABLE, end=TOKENS)
        return self.engine.wait_failure(name, WAIT_S)

    def drain(self) -> None:
        """Be told to drain, as by a tool."""
        self.engine.directory.is_draining = True

    def remember(self) -> None:
        """Keep peers as long as in service."""
        peers.KEPT_S = 600.0  # type: ignore[misc]

    def is_right(self) -> bool:
        """Whether the blocks hold what prefill offers."""
        return bool(np.array_equal(self.cache.blocks(TABLE), Cache(SIZES).fill(7).blocks(TABLE)))

    def forget(self) -> None:
        self.engine.wait(lambda: not self.engine.parts.decode.peers.known, WAIT_S)

    def settle(self) -> None:
        """Until nothing is known of any peer, and nothing is under way that ends by itself."""
        transfer, parts = self.engine.ranks[0].engine, self.engine.parts

        def is_settled() -> bool:
            if transfer.loop is not None:
                transfer.loop.wake()
            known = parts.decode.peers.known or parts.control.links()
            return not (known or parts.agents.is_busy or parts.agents.next_due is not None)

        self.engine.wait(is_settled, WAIT_S)

    def usage(self) -> Usage:
        return Usage.now()

    def totals(self) -> dict[str, float]:
        for rank in self.engine.ranks:
            rank.poll()
        return dict(self.engine.ranks[0].counts)


def _serve(pipe: Connection, role: str, tls: str) -> None:
    side = Side(role, tls)
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        name, arguments = command
        pipe.send(getattr(side, name)(*arguments))
    side.end()


class EndingProcess:
    """Such a process, seen from outside: each method of `Side` can be called."""

    def __init__(self, role: str, tls: str) -> None:
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, role, tls), daemon=True)
        self.process.start()
        theirs.close()
        self._receive(START_S)

    def _receive(self, timeout_s: float = 2 * WAIT_S) -> Any:
        assert self._pipe.poll(timeout_s), "no answer"
        return self._pipe.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            self._pipe.send((name, arguments))
            return self._receive()

        return call

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def leave(self) -> None:
        self._pipe.send(None)
        self.process.join(WAIT_S)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self.process.join()
        self._pipe.close()


def wait_for(measure: Callable[[], Any], is_enough: Callable[[Any], bool]) -> Any:
    """What is measured at last, once it is enough or the time is over."""
    deadline = time.monotonic() + WAIT_S
    while not is_enough(measured := measure()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return measured
