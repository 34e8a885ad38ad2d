"""The data plane of the simulator: `transport.memory`, whose reads land when the schedule says so.

A read lands piece by piece, in any order, for as long as its agent lives and its source's memory
can be read; whoever reads from a process that began anew at the same addresses reads the new one's.
"""

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.blocks import BlockIds
from nixl_kv.transport.memory import Fabric, MemoryTransport
from sim.seams import Fuse

Pair = tuple[tuple[int, int], tuple[int, int]]


@dataclass(eq=False)
class Place:
    """One engine's place in the world, through all of its lives."""

    name: str
    up: bool = True


@dataclass(eq=False)
class Read:
    """A read under way: what has not landed yet."""

    number: int
    transport: "SimTransport"
    source: Place
    pairs: list[Pair]
    into: list[int] = field(default_factory=list)  # local addresses, of all pieces
    server: "SimTransport | None" = None  # who has to take part, over TCP
    seen: int = 0  # how often it had by the last piece
    broken: bool = False
    stuck: bool = False  # never lands
    flips: bool = False  # a bit of the next piece

    @property
    def alive(self) -> bool:
        """Whether it may still write."""
        return bool(self.pairs) and not self.broken and not self.transport.closed

    def land(self, pick: int) -> None:
        """One more piece arrives."""
        if not self.alive or not self.source.up or self.stuck:
            return
        (address, length), (source, _) = self.pairs.pop(pick % len(self.pairs))
        ctypes.memmove(address, source, length)
        if self.flips:
            ctypes.c_uint8.from_address(address).value ^= 1
            self.flips = False

    def land_all(self) -> None:
        """The rest arrives."""
        for _ in range(len(self.pairs)):
            self.land(0)

    @property
    def served(self) -> bool:
        """Whether its source has taken part since the last piece."""
        if self.server is None:
            return True
        served, self.seen = self.server.served > self.seen, self.server.served
        return served


class SimFabric(Fabric):
    """All reads of the world, in the order in which they were begun."""

    def __init__(self, *, tcp: bool) -> None:
        """Begin with none. Over TCP, reads land only while their source's thread takes part."""
        super().__init__()
        self.tcp = tcp
        self.homes: dict[str, Place] = {}  # transport to engine, also of those that left
        self.reads: list[Read] = []
        self._count = 0

    def begun(self, transport: "SimTransport", pairs: list[Pair], peer: str) -> Read:
        """Note a read."""
        self._count += 1
        into = [local for (local, _), _ in pairs]
        read = Read(self._count, transport, self.homes[peer], pairs, into)
        if self.tcp:
            server = self.transports.get(peer)
            read.server = server if isinstance(server, SimTransport) else None
            read.seen = 0 if read.server is None else read.server.served
        self.reads.append(read)
        return read

    def leave(self, home: Place) -> None:
        """A process has died, and its reads with it."""
        for name, transport in list(self.transports.items()):
            if self.homes[name] is home:
                transport.close()

    def alive(self) -> list[Read]:
        """The reads that may still write; the others are forgotten."""
        self.reads = [read for read in self.reads if read.alive]
        return self.reads


class SimTransport(MemoryTransport):
    """A transport of one life of a rank."""

    def __init__(self, fabric: SimFabric, home: Place, fuse: Fuse) -> None:
        """Join the fabric."""
        super().__init__(fabric)
        self.closed = False
        self.served = 0
        self._sim = fabric
        self._fuse = fuse
        fabric.homes[self.name] = home

    def read(self, local: Any, remote: Any, indices: tuple[BlockIds, BlockIds]) -> Any:
        """Begin a read that the schedule lands."""
        self._fuse.touch()
        begun = super().read(local, remote, indices)
        return self._sim.begun(self, list(begun.pairs), begun.peer)

    def poll(self, read: Any) -> bool:
        """Whether all of it has landed."""
        self._fuse.touch()
        if read.broken:
            raise PeerLost("the schedule broke this read")
        return not read.pairs

    def progress(self) -> None:
        """Count."""
        self.served += 1

    def close(self) -> None:
        """Leave: nothing lands any more."""
        super().close()
        self.closed = True


@dataclass(eq=False)
class Work:
    """A call that waits for the schedule."""

    future: "Future[Any]"
    call: Callable[[], Any]


class Background(Executor):
    """Makes and destroys agents when the schedule says so."""

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self.waiting: list[Work] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Note it."""
        future: Future[Any] = Future()
        self.waiting.append(Work(future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as Executor's
        """Nothing runs by itself."""
        del wait, cancel_futures

    def work(self, *, fail: bool = False) -> None:
        """Do the oldest call; or let it fail, as making and destroying agents may."""
        if not self.waiting:
            return
        work = self.waiting.pop(0)
        if fail:
            work.future.set_exception(TransportError("the schedule let it fail"))
        else:
            work.future.set_result(work.call())


def addresses(reads: Iterable[Read], span: tuple[int, int]) -> list[tuple[Read, list[int]]]:
    """The reads that write between two addresses, and where."""
    found = []
    for read in reads:
        inside = [address for address in read.into if span[0] <= address < span[1]]
        if inside:
            found.append((read, inside))
    return found
