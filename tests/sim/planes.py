"""Both planes of a simulated rank: its sockets, and a transport whose reads land by the schedule.

A read lands piece by piece, in any order, for as long as its agent lives and its source's memory
can be read. A reader of a process that started anew at the same addresses reads the new process's
bytes. On links that have a rate reads land as time passes, all reads of a link side by side. As in
NIXL, a transport that has dropped a peer says nothing of a read's end, which goes on.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from harness.local.memory import Fabric, MemoryTransport
from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.ids import Endpoint, FenceToken
from nixl_kv.transport.base import Bounds, Indices, PeerName, Received, SlotPage
from sim.repeatable import Violation
from support.stepped import Clock

HOST: Final = "10.0.0.1"
EMPTY = FenceToken(bytes(16))

Piece = tuple[tuple[int, int], tuple[int, int]]
"""Address and length on this side, and on the side that is read."""


class InjectedError(Exception):
    """A bug of our own somewhere in the transfer thread, which the schedule put there."""


class Faults:
    """Lets the thread die at the n-th thing that it does, refuse the next peer, or fail to send.

    A thing is an event that a machine handles, or a call of sockets, agents, digests or slots.
    """

    def __init__(self) -> None:
        self.dies_after: int | None = None
        self.refuses_peer = False
        self.unsent = 0  # messages to endpoints that cannot be sent, from the next one on

    def touch(self) -> None:
        if self.dies_after is None:
            return
        self.dies_after -= 1
        if self.dies_after < 0:
            self.dies_after = None
            raise InjectedError("planned by the schedule")

    def guard(self, owner: object, name: str) -> None:
        """A method of an object may be what the thread dies of."""
        method: Callable[..., Any] = getattr(owner, name)

        def guarded(*args: Any) -> Any:
            self.touch()
            return method(*args)

        setattr(owner, name, guarded)


@dataclass(eq=False)
class Process:
    name: str
    is_up: bool = True


@dataclass(eq=False)
class Read:
    number: int
    transport: "SimTransport"
    peer: str
    source: Process
    pieces: list[Piece]
    addresses: tuple[int, ...]  # on this side, of all pieces
    server: "SimTransport | None" = None  # which has to take part, over TCP
    served_before: int = 0  # how often it had taken part by the latest piece
    is_broken: bool = False
    is_forgotten: bool = False  # its peer was dropped: no rank learns of its end
    hangs: bool = False  # it never lands
    is_damaged: bool = False  # a bit of the next piece changes on its way

    @property
    def can_write(self) -> bool:
        return bool(self.pieces) and not self.is_broken and not self.transport.is_closed

    def land(self, pick: int) -> None:
        if not self.can_write or not self.source.is_up or self.hangs:
            return
        (address, length), (source, _) = self.pieces.pop(pick % len(self.pieces))
        ctypes.memmove(address, source, length)
        if self.is_damaged:
            ctypes.c_uint8.from_address(address).value ^= 1
            self.is_damaged = False

    def land_all(self) -> None:
        for _ in range(len(self.pieces)):
            self.land(0)

    def serve(self) -> bool:
        """Whether its source has taken part since the latest piece."""
        if self.server is None:
            return True
        has_served = self.server.served > self.served_before
        self.served_before = self.server.served
        return has_served


class SimFabric(Fabric):
    """All reads of the world, in the order in which they were started."""

    def __init__(self, clock: Clock, *, tcp: bool, rate: float) -> None:
        super().__init__()
        self.clock = clock
        self.tcp = tcp  # reads land only while their source's thread takes part
        self.rate = rate  # of each link between two engines; 0: the schedule lands reads
        self.processes: dict[str, Process] = {}  # of each transport, also of one that has left
        self._reads: list[Read] = []
        self._count = 0
        self._flowed_at = clock.now
        self._unspent: dict[tuple[Process, Process], float] = {}  # bytes, of each link

    def start(self, transport: "SimTransport", pieces: list[Piece], peer: str) -> Read:
        self._count += 1
        addresses = tuple(address for (address, _), _ in pieces)
        source = self.processes[peer]
        read = Read(self._count, transport, peer, source, pieces, addresses)
        server = self.transports.get(peer)
        if self.tcp and isinstance(server, SimTransport):
            read.server, read.served_before = server, server.served
        self._reads.append(read)
        return read

    def flow(self) -> None:
        """Land the bytes that the links carried meanwhile, a piece of each read in turn."""
        seconds, self._flowed_at = self.clock.now - self._flowed_at, self.clock.now
        if not self.rate or not seconds:
            return
        under_way: dict[tuple[Process, Process], deque[Read]] = {}
        for read in self.reads():
            if read.source.is_up and not read.hangs:
                under_way.setdefault((read.source, read.transport.process), deque()).append(read)
        unspent, self._unspent = self._unspent, {}
        for link, reads in under_way.items():
            allowed = unspent.get(link, 0.0) + seconds * self.rate
            while reads and reads[0].pieces[0][0][1] <= allowed:
                read = reads.popleft()
                allowed -= read.pieces[0][0][1]
                read.land(0)
                reads.extend([read] if read.pieces else [])
            if reads:
                self._unspent[link] = allowed

    def leave(self, process: Process) -> None:
        for name, transport in list(self.transports.items()):
            if self.processes[name] is process:
                transport.close()

    def reads(self) -> list[Read]:
        """The reads that may still write; the others are forgotten."""
        self._reads = [read for read in self._reads if read.can_write]
        return self._reads


class SimTransport(MemoryTransport):
    """A transport of one life of a rank."""

    def __init__(self, fabric: SimFabric, process: Process, faults: Faults) -> None:
        super().__init__(fabric)
        self.process = process
        self.is_closed = False
        self.served = 0
        self._peers: set[str] = set()
        self._reads = fabric
        self._faults = faults
        fabric.processes[self.name] = process

    def add_peer(self, metadata: bytes) -> PeerName:
        if self._faults.refuses_peer:
            self._faults.refuses_peer = False
            raise TransportError("the schedule refused this peer")
        name = super().add_peer(metadata)
        self._peers.add(name)
        return name

    def drop_peer(self, peer: PeerName) -> None:
        """Forget a peer. Its reads go on, and no rank learns how they end."""
        self._peers.discard(peer)
        for read in self._reads.reads():
            if read.transport is self and read.peer == peer:
                read.is_forgotten = True

    def read(self, local: Any, remote: Any, indices: tuple[Indices, Indices]) -> Any:
        self._faults.touch()
        if remote.owner not in self._peers:
            raise TransportError(f"no such peer: {remote.owner}")
        read = super().read(local, remote, indices)
        return self._reads.start(self, list(read.pairs), read.peer)

    def poll(self, read: Any) -> bool:
        self._faults.touch()
        if read.is_forgotten:
            raise TransportError("no such read")
        if read.is_broken:
            raise PeerLost("the schedule broke this read")
        return not read.pieces

    def progress(self) -> None:
        self.served += 1

    def close(self) -> None:
        super().close()
        self.is_closed = True


class SimSlots(SlotPage):
    """A rank's page of slots, at the same address in all of its lives."""

    def __init__(self, count: int, num_pairs: int = 0, num_cached: int = 0) -> None:
        """The last ones are those of `EarlySlots` and `ContentSlots`, in this order.

        The step thread may clear one of them again. `before_write` is called once, before a token
        of cached blocks is written.
        """
        super().__init__(count)
        self.faults = Faults()
        self.num_of_steps = num_pairs + num_cached
        self._num_cached = num_cached
        self.before_write: Callable[[], None] | None = None

    def start_life(self, faults: Faults) -> None:
        self.faults, self.before_write = faults, None
        ctypes.memset(self.address, 0, self.span.length)

    def write(self, slot: int, fence_token: FenceToken) -> None:
        self.faults.touch()
        is_of_step = slot >= self.count - self.num_of_steps
        is_cached = slot >= self.count - self._num_cached
        if is_cached and fence_token != EMPTY and self.before_write is not None:
            before, self.before_write = self.before_write, None
            before()
        if not is_of_step and (self.read(slot) == EMPTY) == (fence_token == EMPTY):
            action = "cleared" if fence_token == EMPTY else "granted"
            raise Violation(f"slot {action} twice", f"slot {slot}")
        super().write(slot, fence_token)

    def clear_all(self) -> None:
        self.faults.touch()
        super().clear_all()

    @property
    def any_valid(self) -> bool:
        return any(self.read(slot) != EMPTY for slot in range(self.count))


class SimControl(MemoryControl):
    """The sockets of one life of a rank. It listens where its former life did: the worst case."""

    def __init__(self, name: str, port: int, network: MemoryNetwork, faults: Faults) -> None:
        super().__init__(network, name)
        self.wait_s: float | None = 0.0  # of the latest poll
        self.on_reply: Callable[[bytes], None] = lambda _payload: None
        self.on_send: Callable[[Endpoint, bytes], None] = lambda _endpoint, _payload: None
        self._port = port
        self._faults = faults

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        return super().listen(host, port or self._port, bounds)

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        self._faults.touch()
        if self._faults.unsent:
            self._faults.unsent -= 1
            raise TransportError("the schedule let it fail")
        self.on_send(endpoint, payload)
        super().send(endpoint, payload)

    def reply(self, route: bytes, payload: bytes) -> None:
        self._faults.touch()
        self.on_reply(payload)
        super().reply(route, payload)

    def poll(self, timeout_s: float | None) -> list[Received]:
        self._faults.touch()
        self.wait_s = timeout_s
        return super().poll(0)
