"""Reads over TCP in small pieces, several of them in parallel.

Over TCP UCX has no one-sided reads: the owner of the memory answers each read with messages. If the
reader dies while an answer waits for room in a connection, or while a second question waits there,
UCX 1.23 aborts the *owner's* process (docs/protocol.md, Over TCP). So each connection carries one
piece at a time, which fits into one TCP segment of UCX. To hide the round trip, a peer gets several
connections, each from a NIXL agent of its own; `window.py` says how many.

Reads that do not go over TCP pass through to the first agent unchanged.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from nixl_kv.config import OFF, ON
from nixl_kv.errors import PeerLost, TransportError, get_logger
from nixl_kv.geometry.layout import Memory, Span, block_ids
from nixl_kv.geometry.plan import ADDRESS, COUNT, DEVICE, LENGTH, STRIDE
from nixl_kv.transport.base import Indices, ListHandle, PeerName, ReadHandle, Rows, Transport
from nixl_kv.transport.tcp.detect import IsTcp, Place, always, make_rule, never, ucx_settings
from nixl_kv.transport.tcp.window import MAX_STREAMS, MIN_PIECE_BYTES, Begun, Window

logger = get_logger(__name__)

# How long an idle further agent is kept. A new one takes 40 ms; an idle one costs each peer up to
# four descriptors.
UNUSED_S: Final = 60.0
# How long `close` waits for an agent that connects or closes in the background.
CONNECTED_S: Final = 2.0

ONLY_PIECE: Final = block_ids([0])

# Bytes that are contiguous on both sides: local address and device, remote address and device,
# length.
Run: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class _List:
    """The caller's rows, and the first agent's handle for them."""

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
            raise TransportError(f"index {indices[outside][0]} is not in any row")
        rows = self.rows[row]
        addresses = rows[:, ADDRESS] + within.astype(np.uint64) * rows[:, STRIDE]
        return np.stack((addresses, rows[:, DEVICE], rows[:, LENGTH]), axis=1)


@dataclass(eq=False)
class _Read:
    peer: "_Peer"
    memory: tuple[Memory, Memory]
    runs: deque[Run]  # still to be requested; pieces are cut off the front
    num_in_flight: int = 0
    failure: type[TransportError] | None = None
    reason: str = ""  # text only: an error's traceback would keep the agent alive

    def __post_init__(self) -> None:
        # Fits into one piece. Such a read, of a fence slot, overtakes long ones.
        self.is_short = len(self.runs) == 1 and self.runs[0][-1] <= MIN_PIECE_BYTES

    def cut_piece(self, limit: int) -> Run:
        here, device, there, their_device, length = self.runs[0]
        if length <= limit:
            return self.runs.popleft()
        self.runs[0] = (here + limit, device, there + limit, their_device, length - limit)
        return here, device, there, their_device, limit


@dataclass
class _Piece:
    read: _Read
    handle: ReadHandle
    lists: tuple[ListHandle, ListHandle]  # NIXL needs them until the read ends
    num_bytes: int
    begun: Begun


@dataclass
class _Stream:
    """One agent's connection to a peer."""

    agent: Transport
    piece: _Piece | None = None
    is_new: bool = True  # nothing was read over it yet
    is_lost: bool = False  # its piece may go on for ever
    used_at: float = -math.inf


@dataclass(eq=False)
class _Peer:
    """A peer that is read over TCP."""

    name: PeerName
    metadata: bytes
    streams: list[_Stream]
    window: Window = field(default_factory=Window)
    queue: deque[_Read] = field(default_factory=deque)
    max_streams: int = MAX_STREAMS
    poll_at: float = 0.0


@dataclass(frozen=True)
class _Connecting:
    """A further connection to a peer that is made in the background."""

    peer: _Peer
    agent: Transport | None  # None for a new one
    # The agent, or None if it could not be made; and the reason if it is not connected.
    made: "Future[tuple[Transport | None, str]]"


def pace(
    first: Transport,
    make_agent: Callable[[], Transport],
    memory: Memory,
    paced_reads: str,
    engine_config: str,
) -> "PacedTransport":
    """Wrap a NIXL agent of a rank whose cache is in such memory.

    `make_agent` makes further agents, which read over TCP only. `paced_reads` is the setting of
    that name. The first agent has UCX's settings `engine_config`.
    """
    settings = ucx_settings(os.environ, engine_config)
    own = Place.find(settings)
    is_tcp = {ON: always, OFF: never}.get(paced_reads) or make_rule(own, settings, memory)
    background = ThreadPoolExecutor(1, "nixl-kv-streams")
    return PacedTransport(first, make_agent, is_tcp, background, facts=own.suffix())


class PacedTransport:
    """See `Transport` and the module's docstring.

    One background thread makes further connections, because each takes 15 ms, or 40 ms with a new
    agent. No other thread uses that agent meanwhile.
    """

    def __init__(
        self,
        first: Transport,
        make_agent: Callable[[], Transport],
        is_tcp: IsTcp,
        background: Executor,
        *,
        facts: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with one agent.

        Args:
            first: the agent that peers read, and that reads peers without TCP.
            make_agent: makes further agents, which read over TCP only.
            is_tcp: decides which peers are read over TCP.
            background: makes connections; shut down with this transport.
            facts: appended to the metadata, for the peers' `is_tcp`.
            clock: in seconds.
        """
        self._agents = [first]
        self._make_agent = make_agent
        self._is_tcp = is_tcp
        self._background = background
        self._facts = facts
        self._connecting: _Connecting | None = None
        self._closing: list[tuple[Transport, Future[None]]] = []
        self._clock = clock
        self._registered: list[tuple[Span, Memory, int]] = []
        self._peers: dict[PeerName, _Peer] = {}

    def __repr__(self) -> str:
        streams = ", ".join(f"{len(peer.streams)} to {name}" for name, peer in self._peers.items())
        return f"<PacedTransport {self._agents[0]}: {streams or 'no TCP'}>"

    def spread(self, peer: PeerName) -> int:
        return 0 if peer in self._peers else self._agents[0].spread(peer)

    def register(self, span: Span, memory: Memory, device: int) -> None:
        for agent in self._agents:
            agent.register(span, memory, device)
        self._registered.append((span, memory, device))

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        self._agents[0].rehearse(span, memory, device)

    def metadata(self) -> bytes:
        return self._agents[0].metadata() + self._facts

    def add_peer(self, metadata: bytes) -> PeerName:
        name = self._agents[0].add_peer(metadata)
        peer = self._peers.get(name)
        if peer is not None:
            if self._connecting is not None and self._connecting.peer is peer:
                wait([self._connecting.made])
                self._end_connecting()
            peer.metadata = metadata
            for stream in peer.streams[1:]:
                stream.agent.add_peer(metadata)
        elif self._is_tcp(metadata):
            self._peers[name] = _Peer(name, metadata, [_Stream(self._agents[0])])
        return name

    def drop_peer(self, peer: PeerName) -> None:
        known = self._peers.pop(peer, None)
        for stream in known.streams[1:] if known else ():
            stream.agent.drop_peer(peer)
        self._agents[0].drop_peer(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        # The first agent checks the rows also where further agents will read them.
        handle = self._agents[0].prepare(rows, memory, peer)
        counts = rows[:, COUNT].astype(np.int64)
        first = (np.cumsum(counts) - counts).astype(np.int32)
        return _List(handle, peer, memory, np.array(rows, dtype=np.uint64), first)

    def read(
        self, local: _List, remote: _List, indices: tuple[Indices, Indices]
    ) -> _Read | ReadHandle:
        peer = self._peers.get(remote.peer) if remote.peer is not None else None
        if peer is None:
            return self._agents[0].read(local.handle, remote.handle, indices)
        if not len(indices[0]) or len(indices[0]) != len(indices[1]):
            raise TransportError(f"{len(indices[0])} local and {len(indices[1])} remote pieces")
        read = _Read(peer, (local.memory, remote.memory), _runs((local, remote), indices))
        if read.is_short:
            peer.queue.appendleft(read)
        else:
            peer.queue.append(read)
        return read

    def poll(self, read: _Read | ReadHandle) -> bool:
        """Advance all reads of the same peer."""
        if not isinstance(read, _Read):
            return self._agents[0].poll(read)
        peer = read.peer
        if self._peers.get(peer.name) is not peer:
            raise PeerLost(f"peer {peer.name} was dropped during a read")
        now = self._clock()
        if now >= peer.poll_at:
            self._end_connecting()
            self._finish(peer)
            self._start(peer)
            peer.poll_at = now + peer.window.pause_s
        if read.failure is not None and not (read.num_in_flight and read.failure is PeerLost):
            raise read.failure(read.reason)
        return not read.num_in_flight and not read.runs

    def stop(self, read: _Read | ReadHandle) -> bool:
        if not isinstance(read, _Read) or not read.runs:
            return False
        _start_no_more(read)
        return True

    def progress(self) -> None:
        self._agents[0].progress()  # peers read no other agent

    def tidy(self) -> bool:
        # Close the last agents, as far as no peer has been read through them for a while.
        for number, (agent, closed) in enumerate(self._closing):
            if closed.done() and closed.exception() is not None:
                self._closing[number] = agent, self._background.submit(agent.close)
        self._closing = [each for each in self._closing if not _is_closed(each[1])]
        if self._connecting is not None:
            return True
        now = self._clock()
        while len(self._agents) > 1:
            last = len(self._agents) - 1
            streams = [p.streams[last] for p in self._peers.values() if last < len(p.streams)]
            if any(one.piece is not None or one.used_at + UNUSED_S > now for one in streams):
                return True
            agent = self._agents.pop()
            for peer in self._peers.values():
                del peer.streams[last:]
            self._closing.append((agent, self._background.submit(agent.close)))
        return bool(self._closing)

    def close(self) -> None:
        """Close all agents.

        Raises:
            TransportError: also if an agent still connects or closes after `CONNECTED_S`.
        """
        self._background.shutdown(wait=False)
        if self._connecting is not None and self._connecting.made.cancel():
            self._connecting = None
        pending: list[Future[Any]] = [closed for _, closed in self._closing]
        if self._connecting is not None:
            pending.append(self._connecting.made)
        if wait(pending, CONNECTED_S).not_done:
            raise TransportError("an agent that reads over TCP still connects or closes")
        self._end_connecting()
        self._agents += [agent for agent, closed in self._closing if not _is_closed(closed)]
        self._closing.clear()
        for peer in self._peers.values():
            for stream in peer.streams:
                stream.piece = None
        while self._agents:
            self._agents[-1].close()
            self._agents.pop()

    # --- reads

    def _finish(self, peer: _Peer) -> None:
        """Record the pieces that have arrived or failed."""
        for stream in peer.streams:
            piece = stream.piece
            if piece is None or stream.is_lost or self._is_connecting(stream):
                continue
            try:
                if not stream.agent.poll(piece.handle):
                    continue
                is_part = not piece.read.is_short
                peer.window.end(piece.begun, piece.num_bytes, self._clock(), is_part=is_part)
            except PeerLost as error:
                _fail(piece.read, error)
            except TransportError as error:
                stream.is_lost = True  # the piece may go on, so never use its stream again
                _fail(piece.read, error)
                continue
            stream.piece, stream.is_new = None, False
            piece.read.num_in_flight -= 1

    def _start(self, peer: _Peer) -> None:
        """Start as many pieces as the window allows, and at most one more connection."""
        while peer.queue:
            num_streams = min(peer.window.streams, peer.max_streams)
            used = peer.streams[:num_streams]
            free = [each for each in used if each.piece is None and not each.is_lost]
            if not free and len(used) < num_streams:
                self._connect(peer)
            ready = next((each for each in free if not self._is_connecting(each)), None)
            if ready is None:
                return
            self._start_piece(peer, ready)

    def _start_piece(self, peer: _Peer, stream: _Stream) -> None:
        read = peer.queue[0]
        # The first piece of a connection waits for the connection, so it is short.
        limit = MIN_PIECE_BYTES if stream.is_new else peer.window.piece_bytes
        here, device, there, their_device, length = read.cut_piece(limit)
        if not read.runs:
            peer.queue.popleft()
        try:
            lists = (
                stream.agent.prepare(_row(here, device, length), read.memory[0], None),
                stream.agent.prepare(_row(there, their_device, length), read.memory[1], peer.name),
            )
            begun = peer.window.begin(self._clock())
            handle = stream.agent.read(*lists, (ONLY_PIECE, ONLY_PIECE))
            stream.used_at = begun.at
        except TransportError as error:  # nothing of this piece is in flight
            _fail(read, PeerLost(str(error)))
            return
        stream.piece = _Piece(read, handle, lists, length, begun)
        read.num_in_flight += 1

    # --- connections

    def _is_connecting(self, stream: _Stream) -> bool:
        """Whether its agent connects to a peer now: NIXL would make other calls wait for that."""
        return self._connecting is not None and stream.agent is self._connecting.agent

    def _connect(self, peer: _Peer) -> None:
        """Begin to connect the next agent to a peer, unless another one connects now."""
        if self._connecting is None:
            number = len(peer.streams)
            agent = self._agents[number] if number < len(self._agents) else None
            made = self._background.submit(self._connect_agent, agent, peer.metadata)
            self._connecting = _Connecting(peer, agent, made)

    def _connect_agent(
        self, agent: Transport | None, metadata: bytes
    ) -> tuple[Transport | None, str]:
        """Runs in the background."""
        try:
            agent = agent or self._make_stream_agent()
            agent.add_peer(metadata)
        except Exception as error:  # noqa: BLE001 - the text names its type
            # Any error costs this connection only: on the transfer thread it would fail all loads.
            # Keep its text alone: a traceback would keep the agent alive.
            return agent, str(error) if isinstance(error, TransportError) else repr(error)
        return agent, ""

    def _end_connecting(self) -> None:
        """Start to use a new connection, if it is complete."""
        if self._connecting is None or not self._connecting.made.done():
            return
        connecting, self._connecting = self._connecting, None
        peer, number = connecting.peer, len(connecting.peer.streams)
        agent, refusal = connecting.made.result()
        if agent is not None and connecting.agent is None:
            self._agents.append(agent)
        if self._peers.get(peer.name) is not peer:  # it was dropped meanwhile
            if agent is not None and not refusal:
                try:
                    agent.drop_peer(peer.name)
                except TransportError as error:  # it must not fail other reads
                    logger.info("a connection to %s was not dropped: %s", peer.name, error)
        elif agent is None or refusal:
            logger.warning(
                "%s keeps %d connections, because another failed: %s", peer.name, number, refusal
            )
            peer.max_streams = number
        else:
            peer.streams.append(_Stream(agent))

    def _make_stream_agent(self) -> Transport:
        agent = self._make_agent()
        try:
            for registered in self._registered:
                agent.register(*registered)
        except Exception:
            agent.close()
            raise
        return agent


def _is_closed(closed: "Future[None]") -> bool:
    return closed.done() and not closed.cancelled() and closed.exception() is None


def _fail(read: _Read, error: TransportError) -> None:
    """Start no more of a read. An error after which it may go on outweighs one that ended it."""
    if read.failure in (None, PeerLost):
        read.failure = PeerLost if isinstance(error, PeerLost) else TransportError
        read.reason = str(error)
    _start_no_more(read)


def _start_no_more(read: _Read) -> None:
    read.runs.clear()
    if read in read.peer.queue:
        read.peer.queue.remove(read)


def _row(address: int, device: int, length: int) -> Rows:
    return np.array([[address, length, device, length, 1]], dtype=np.uint64)


def _runs(lists: tuple[_List, _List], indices: tuple[Indices, Indices]) -> deque[Run]:
    """The bytes to read; pieces that are neighbours on both sides become one run."""
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
