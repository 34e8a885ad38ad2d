"""A data plane that has a bounded amount under way from each peer that it reads over TCP.

Over TCP UCX has no one-sided reads: the owner of the memory answers each with messages of its own.
If the reader dies while such answers wait for room in a connection, or while a second question
waits there, UCX 1.23 aborts the *owner's* process (docs/protocol.md). So each connection has one
piece under way, which fits into one TCP segment of UCX's, and there are as many connections to a
peer, each of an agent of its own, as hide the round trip (`window.py`).

What is read without TCP goes through the first agent alone, as if this were not here.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Memory, Span, block_ids
from nixl_kv.geometry.plan import ADDRESS, COUNT, DEVICE, LENGTH, STRIDE
from nixl_kv.log_limit import get_logger
from nixl_kv.transport.base import Indices, ListHandle, PeerName, ReadHandle, Rows, Transport
from nixl_kv.transport.tcp.window import MAX_STREAMS, MIN_PIECE_BYTES, Begun, Window

logger = get_logger(__name__)

SEGMENT_CONFIG: Final = "TCP_TX_SEG_SIZE=2m,TCP_RX_SEG_SIZE=2m"
"""UCX's settings by which a piece fits into a segment. All engines have them, whatever they read: a
longer segment than the reader expects aborts the reader."""

SEGMENT_FACT: Final = "2m"
"""What an engine says of itself, so that one with other segments is not read."""

UNUSED_S: Final = 60.0
"""How long a further agent is kept that reads nothing: to make it again costs 40 ms, and to keep it
costs each peer up to four descriptors."""
CONNECTED_S: Final = 2.0
"""How long `close` waits for an agent that is being connected or ended in the background."""

ONLY_PIECE: Final = block_ids([0])

Run: TypeAlias = tuple[int, int, int, int, int]
"""Bytes that are contiguous on both sides: address and device here and there, and their number."""


class TcpDetector(Protocol):
    """Tells which peers are read over TCP."""

    def is_tcp(self, metadata: bytes, memory: Memory) -> bool:
        """Whether such memory of the agent with this metadata is; to be on the safe side, yes."""

    def close(self) -> None:
        """Let go of whatever it needs for that."""


class AlwaysTcp:
    """Counts all as TCP."""

    def is_tcp(self, metadata: bytes, memory: Memory) -> bool:
        """It is."""
        del metadata, memory
        return True

    def close(self) -> None:
        """Nothing is needed."""


@dataclass(frozen=True)
class _List:
    """Rows of the caller's, in its counting, prepared by the first agent."""

    handle: ListHandle
    peer: PeerName | None
    memory: Memory
    rows: Rows
    first: Indices  # shape (rows,): number of each row's first piece

    def places(self, indices: Indices) -> Rows:
        """Address, device and length of pieces: shape (n, 3)."""
        row = np.searchsorted(self.first, indices, side="right") - 1
        within = indices - self.first[row]
        outside = (indices < 0) | (within >= self.rows[row, COUNT].astype(np.int64))
        if outside.any():
            raise TransportError(f"index {indices[outside][0]} is in no row")
        rows = self.rows[row]
        addresses = rows[:, ADDRESS] + within.astype(np.uint64) * rows[:, STRIDE]
        return np.stack((addresses, rows[:, DEVICE], rows[:, LENGTH]), axis=1)


@dataclass(eq=False)
class _Read:
    """A read, as runs of which the first are taken away piece by piece."""

    peer: PeerName
    memory: tuple[Memory, Memory]
    runs: deque[Run]
    num_under_way: int = 0
    failure: type[TransportError] | None = None
    reason: str = ""  # not the error, whose traceback would hold the agent

    is_short: bool = field(init=False)
    """Whether it is a piece at most: so that who waits for a slot waits for no other's data."""

    def __post_init__(self) -> None:
        self.is_short = len(self.runs) == 1 and self.runs[0][-1] <= MIN_PIECE_BYTES

    def take(self, limit: int) -> Run:
        """The next piece."""
        here, device, there, their_device, length = self.runs[0]
        if length <= limit:
            return self.runs.popleft()
        self.runs[0] = (here + limit, device, there + limit, their_device, length - limit)
        return here, device, there, their_device, limit


@dataclass
class _Step:
    """A piece under way."""

    read: _Read
    handle: ReadHandle
    lists: tuple[ListHandle, ListHandle]
    num_bytes: int
    begun: Begun


@dataclass
class _Stream:
    """One connection to a peer: that of one agent."""

    agent: Transport
    step: _Step | None = None
    is_new: bool = True
    is_lost: bool = False
    used_at: float = -math.inf


@dataclass
class _Peer:
    """A peer that is read over TCP."""

    metadata: bytes
    streams: list[_Stream]
    window: Window = field(default_factory=Window)
    queue: deque[_Read] = field(default_factory=deque)
    max_streams: int = MAX_STREAMS
    look_at: float = 0.0

    @property
    def num_streams(self) -> int:
        """How many may be in use by now."""
        return min(self.window.streams, self.max_streams)


@dataclass(frozen=True)
class _Connecting:
    """A further connection to a peer, which is being made by the agent with this number."""

    name: PeerName
    peer: _Peer
    number: int
    agent: "Future[tuple[Transport | None, str]]"
    """None if there is no such agent yet, and why the peer is not connected to it, if so."""


class PacedTransport:
    """See `Transport`, and the module's head.

    Further connections are made on a thread of their own: one takes 15 ms, and 40 ms where it needs
    an agent that is not there yet. Meanwhile that agent is left alone.
    """

    def __init__(
        self,
        first: Transport,
        make_agent: Callable[[Memory], Transport],
        detector: TcpDetector,
        background: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with one agent.

        Args:
            first: the agent that peers read this side by, and that reads whatever is not TCP.
            make_agent: makes further ones, which read such memory over TCP.
            detector: which peers are read over TCP.
            background: where further connections are made; ended with this.
            clock: monotonic seconds.
        """
        self._agents = [first]
        self._make_agent = make_agent
        self._detector = detector
        self._background = background
        self._connecting: _Connecting | None = None
        self._closing: list[tuple[Transport, Future[None]]] = []
        self._clock = clock
        self._registered: list[tuple[Span, Memory, int]] = []
        self._peers: dict[PeerName, _Peer] = {}

    def __repr__(self) -> str:
        streams = ", ".join(f"{len(peer.streams)} to {name}" for name, peer in self._peers.items())
        return f"<PacedTransport {self._agents[0]}: {streams or 'no TCP'}>"

    def spread(self, peer: PeerName) -> int:
        """As the first agent; what is read over TCP begins with one connection."""
        return 0 if peer in self._peers else self._agents[0].spread(peer)

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """As the agents."""
        for agent in self._agents:
            agent.register(span, memory, device)
        self._registered.append((span, memory, device))

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        """As the first agent, and find out what it would be read over itself."""
        self._agents[0].rehearse(span, memory, device)
        self._detector.is_tcp(self.metadata(), memory)

    def metadata(self) -> bytes:
        """That of the first agent."""
        return self._agents[0].metadata()

    def add_peer(self, metadata: bytes) -> PeerName:
        """As the first agent; and find out whether it is read over TCP."""
        name = self._agents[0].add_peer(metadata)
        peer = self._peers.get(name)
        if peer is not None:
            if self._connecting is not None and self._connecting.peer is peer:
                wait([self._connecting.agent])
                self._end_connecting()
            peer.metadata = metadata
            for stream in peer.streams[1:]:
                stream.agent.add_peer(metadata)
        elif self._detector.is_tcp(metadata, self._memory):
            self._peers[name] = _Peer(metadata, [_Stream(self._agents[0])])
        return name

    def drop_peer(self, peer: PeerName) -> None:
        """As the agents; its reads have ended."""
        known = self._peers.pop(peer, None)
        for stream in known.streams[1:] if known else ():
            stream.agent.drop_peer(peer)
        self._agents[0].drop_peer(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        """Keep the rows; the first agent checks them also where it does not read them itself."""
        handle = self._agents[0].prepare(rows, memory, peer)
        counts = rows[:, COUNT].astype(np.int64)
        first = (np.cumsum(counts) - counts).astype(np.int32)
        return _List(handle, peer, memory, np.array(rows, dtype=np.uint64), first)

    def read(
        self, local: _List, remote: _List, indices: tuple[Indices, Indices]
    ) -> _Read | ReadHandle:
        """Queue it, if it goes over TCP."""
        if remote.peer not in self._peers:
            return self._agents[0].read(local.handle, remote.handle, indices)
        if not len(indices[0]) or len(indices[0]) != len(indices[1]):
            raise TransportError(f"{len(indices[0])} local and {len(indices[1])} remote pieces")
        read = _Read(remote.peer, (local.memory, remote.memory), _runs((local, remote), indices))
        queue = self._peers[remote.peer].queue
        if read.is_short:
            queue.appendleft(read)
        else:
            queue.append(read)
        return read

    def poll(self, read: _Read | ReadHandle) -> bool:
        """Go on with all that its peer is read for."""
        if not isinstance(read, _Read):
            return self._agents[0].poll(read)
        peer = self._peers.get(read.peer)
        if peer is None:
            raise PeerLost(f"peer {read.peer} was dropped while it was read")
        now = self._clock()
        if now >= peer.look_at:
            self._end_connecting()
            self._finish(peer)
            self._go_on(read.peer, peer)
            peer.look_at = now + peer.window.pause_s
        if read.failure is not None and not (read.num_under_way and read.failure is PeerLost):
            raise read.failure(read.reason)
        return not read.num_under_way and not read.runs

    def stop(self, read: _Read | ReadHandle) -> bool:
        """Forget what was not asked for."""
        if not isinstance(read, _Read) or not read.runs:
            return False
        read.runs.clear()
        peer = self._peers.get(read.peer)
        if peer is not None and read in peer.queue:
            peer.queue.remove(read)
        return True

    def progress(self) -> None:
        """As the first agent: nobody reads from the others."""
        self._agents[0].progress()

    def tidy(self) -> bool:
        """End the last agents, as long as no peer has been read by them for a while."""
        closing, self._closing = self._closing, []
        for agent, closed in closing:
            has_failed = closed.done() and closed.exception() is not None
            again = self._background.submit(agent.close) if has_failed else closed
            if not _is_closed(again):
                self._closing.append((agent, again))
        if self._connecting is not None:
            return True
        now = self._clock()
        while len(self._agents) > 1 and self._is_spare(len(self._agents) - 1, now):
            agent = self._agents.pop()
            for peer in self._peers.values():
                del peer.streams[len(self._agents) :]
            self._closing.append((agent, self._background.submit(agent.close)))
        return len(self._agents) > 1 or bool(self._closing)

    def _is_spare(self, number: int, now: float) -> bool:
        """Whether no stream of the agent with this number is used."""
        streams = [p.streams[number] for p in self._peers.values() if number < len(p.streams)]
        return all(one.step is None and one.used_at + UNUSED_S <= now for one in streams)

    def close(self) -> None:
        """As the agents.

        Raises:
            TransportError: also if an agent is still being connected or ended after `CONNECTED_S`.
        """
        self._background.shutdown(wait=False)
        if self._connecting is not None and self._connecting.agent.cancel():
            self._connecting = None
        pending: list[Future[Any]] = [closed for _, closed in self._closing]
        if self._connecting is not None:
            pending.append(self._connecting.agent)
        if wait(pending, CONNECTED_S).not_done:
            raise TransportError("an agent that reads over TCP is still being connected or ended")
        self._end_connecting()
        self._agents += [agent for agent, closed in self._closing if not _is_closed(closed)]
        self._closing.clear()
        for peer in self._peers.values():
            for stream in peer.streams:
                stream.step = None
        self._detector.close()
        while self._agents:
            self._agents[-1].close()
            self._agents.pop()

    @property
    def _memory(self) -> Memory:
        """Where the cache is."""
        return "VRAM" if any(memory == "VRAM" for _, memory, _ in self._registered) else "DRAM"

    def _finish(self, peer: _Peer) -> None:
        """Take the pieces that have arrived, or have failed."""
        for stream in peer.streams:
            step = stream.step
            if step is None or stream.is_lost or self._is_connecting(stream):
                continue
            try:
                if not stream.agent.poll(step.handle):
                    continue
                is_part = not step.read.is_short
                peer.window.end(step.begun, step.num_bytes, self._clock(), is_part=is_part)
            except PeerLost as error:
                _fail(peer, step.read, error)
            except TransportError as error:  # it may go on
                stream.is_lost = True
                _fail(peer, step.read, error)
                continue
            stream.step, stream.is_new = None, False
            step.read.num_under_way -= 1

    def _go_on(self, name: PeerName, peer: _Peer) -> None:
        """Ask for the next pieces, as many as may be under way; one more connection at most."""
        while peer.queue:
            used = peer.streams[: peer.num_streams]
            free = [each for each in used if each.step is None and not each.is_lost]
            if not free and len(used) < peer.num_streams:
                self._connect(name, peer)
            ready = next((each for each in free if not self._is_connecting(each)), None)
            if ready is None:
                return
            self._ask(peer, ready)

    def _ask(self, peer: _Peer, stream: _Stream) -> None:
        """Ask for the next piece; the first one of a connection waits for that, so it is short."""
        read = peer.queue[0]
        limit = MIN_PIECE_BYTES if stream.is_new else peer.window.piece_bytes
        here, device, there, their_device, length = read.take(limit)
        if not read.runs:
            peer.queue.popleft()
        try:
            lists = (
                stream.agent.prepare(_row(here, device, length), read.memory[0], None),
                stream.agent.prepare(_row(there, their_device, length), read.memory[1], read.peer),
            )
            begun = peer.window.begin(self._clock())
            handle = stream.agent.read(*lists, (ONLY_PIECE, ONLY_PIECE))
            stream.used_at = begun.at
        except TransportError as error:  # nothing of this piece is under way
            _fail(peer, read, PeerLost(str(error)))
            return
        stream.step = _Step(read, handle, lists, length, begun)
        read.num_under_way += 1

    def _is_connecting(self, stream: _Stream) -> bool:
        """Whether its agent is connected to some peer just now: NIXL lets others wait for that."""
        number = self._connecting.number if self._connecting else len(self._agents)
        return number < len(self._agents) and stream.agent is self._agents[number]

    def _connect(self, name: PeerName, peer: _Peer) -> None:
        """Begin to connect once more, by an agent that the peer is not connected to yet."""
        if self._connecting is None:
            number = len(peer.streams)
            agent = self._agents[number] if number < len(self._agents) else None
            made = self._background.submit(self._connect_agent, agent, peer.metadata)
            self._connecting = _Connecting(name, peer, number, made)

    def _connect_agent(
        self, agent: Transport | None, metadata: bytes
    ) -> tuple[Transport | None, str]:
        """In the background. An error would hold the agent, by its traceback.

        Any error fails this connection alone. The transfer thread would fail all loads for it.
        """
        try:
            agent = agent or self._make_stream_agent()
            agent.add_peer(metadata)
        except Exception as error:  # noqa: BLE001 - its type is told
            return agent, str(error) if isinstance(error, TransportError) else repr(error)
        return agent, ""

    def _end_connecting(self) -> None:
        """Use the connection that was being made, if there is one by now."""
        if self._connecting is None or not self._connecting.agent.done():
            return
        connecting, self._connecting = self._connecting, None
        (agent, refusal), number = connecting.agent.result(), connecting.number
        if agent is not None and number == len(self._agents):
            self._agents.append(agent)
        if self._peers.get(connecting.name) is not connecting.peer:
            if agent is not None and not refusal:
                _drop(agent, connecting.name)
        elif agent is None or refusal:
            logger.warning("no more than %d connections to a peer: %s", number, refusal)
            connecting.peer.max_streams = number
        else:
            connecting.peer.streams.append(_Stream(agent))

    def _make_stream_agent(self) -> Transport:
        """Make an agent that reads into all that the first one does."""
        agent = self._make_agent(self._memory)
        try:
            for registered in self._registered:
                agent.register(*registered)
        except Exception:
            agent.close()
            raise
        return agent


def _is_closed(closed: "Future[None]") -> bool:
    """Whether an agent has ended; one that could not be ended is tried again with the last."""
    return closed.done() and not closed.cancelled() and closed.exception() is None


def _drop(agent: Transport, name: PeerName) -> None:
    """A peer that is gone; that it cannot be dropped is nobody's fault who reads another one."""
    try:
        agent.drop_peer(name)
    except TransportError as error:
        logger.info("a connection of %s was not dropped: %s", name, error)


def _fail(peer: _Peer, read: _Read, error: TransportError) -> None:
    """Ask for nothing more of it. That it may go on outweighs that it has ended."""
    if read.failure in (None, PeerLost):
        read.failure = PeerLost if isinstance(error, PeerLost) else TransportError
        read.reason = str(error)
    read.runs.clear()
    if read in peer.queue:
        peer.queue.remove(read)


def _row(address: int, device: int, length: int) -> Rows:
    return np.array([[address, length, device, length, 1]], dtype=np.uint64)


def _runs(lists: tuple[_List, _List], indices: tuple[Indices, Indices]) -> deque[Run]:
    """What is to be read; neighbours on both sides are one run."""
    local, remote = lists[0].places(indices[0]), lists[1].places(indices[1])
    if not np.array_equal(local[:, 2], remote[:, 2]):
        raise TransportError("a local and a remote piece differ in length")
    follows = np.ones(len(local) - 1, dtype=bool)
    for side in (local, remote):
        follows &= side[1:, 0] == side[:-1, 0] + side[:-1, 2]
        follows &= side[1:, 1] == side[:-1, 1]
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths = np.add.reduceat(local[:, 2], starts)
    columns = (*local[starts, :2].T, *remote[starts, :2].T, lengths)
    return deque(zip(*(column.tolist() for column in columns), strict=True))
