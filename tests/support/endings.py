"""Prefill and decode whose engines live, end and live again; each in a process of its own.

What takes minutes in service takes a second here.
"""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.local.caches import Sizes
from harness.local.engine import HOST
from nixl_kv.config import Config
from nixl_kv.engine import loop, serving
from nixl_kv.protocol import peers
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.reading import replace
from nixl_kv.transport.base import Transport
from support.processes import WAIT_S, Side, SideProcess

SIZES: Final = Sizes(layers=2, blocks=32, heads=1, tokens=16, key=2**13, value=2**13)  # 16 MiB
SHORT_S: Final = 0.3
CHECK_S: Final = 2.0
"""Between prefill's checks while it is idle."""


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


class EndingSide(Side):
    """All long times are short in its process."""

    def __init__(self, role: str, tls: str, is_checked: bool) -> None:  # noqa: FBT001 - sent
        """UCX chooses among the transports `tls`; empty: among all.

        Only over loopback: an agent listens on each interface, and other tests make some meanwhile.
        """
        import nixl_kv.transport.nixl as module  # noqa: PLC0415 - only where NIXL is

        module.UCX_ENGINE_CONFIG += ",NET_DEVICES=lo" + (f",TLS={tls}" if tls else "")  # type: ignore[misc]
        peers.KEPT_S = SHORT_S  # type: ignore[misc]
        loop.LINK_KEPT_S = SHORT_S  # type: ignore[misc]
        replace.TIDY_S = SHORT_S  # type: ignore[misc]
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


def wait_for(measure: Callable[[], Any], is_enough: Callable[[Any], bool]) -> Any:
    """What is measured at last, once it is enough or the time is over."""
    deadline = time.monotonic() + WAIT_S
    while not is_enough(measured := measure()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return measured
