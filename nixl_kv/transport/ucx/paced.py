"""Reads over TCP in small pieces, several of them in parallel.

Over TCP UCX has no one-sided reads: the owner of the memory answers each read with messages. If the
reader dies while an answer waits for room in a connection, or while a second question waits there,
UCX 1.23 aborts the *owner's* process (docs/operations.md, Paced reads). So each connection carries
one piece at a time, which fits into one TCP segment of UCX. To hide the round trip, a peer gets
several connections, each from a NIXL agent of its own; `Window` says how many.

Reads that do not go over TCP pass through to the first agent unchanged. Delete this file, with the
call of `pace` in `transport/nixl.py`, when UCX survives the death of a reader over TCP.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from nixl_kv.config import Config
from nixl_kv.errors import PeerLost, TransportError, get_logger
from nixl_kv.geometry.layout import Memory, Span, block_ids
from nixl_kv.geometry.plan import ADDRESS, COUNT, DEVICE, LENGTH, STRIDE
from nixl_kv.transport.base import (
    LONGEST_PAUSE_S,
    Indices,
    ListHandle,
    PeerName,
    ReadHandle,
    Rows,
    Transport,
)
from nixl_kv.transport.ucx.detect import ONLY_TCP, HostFacts, IsTcp, make_rule, ucx_settings

logger = get_logger(__name__)

PIECE_BYTES: Final = 1 << 20  # fits into one TCP segment of UCX (2 MiB) with room to spare
SHORT_BYTES: Final = 64 << 10
MAX_STREAMS: Final = 16
MIN_STREAMS: Final = 2  # one piece travels while the next is requested
# Keep more in flight than was measured: the measured rate cannot exceed the bytes in flight.
GAIN: Final = 2.0
# Between polls of a peer, as a share of the round trip: one poll takes a system call per stream.
PAUSE_SHARE: Final = 0.125
LATEST_SHARE: Final = 0.125  # weight of the latest piece in the average length

# The end of a NIXL agent fails, because another connection over TCP is still being opened.
CONNECTED_S: Final = 2.0

# Of an agent that reads over TCP only, without threads of its own.
STREAM_OPTIONS: Final = {"ucx_error_handling_mode": "peer"}

ONLY_PIECE: Final = block_ids([0])

# Bytes that are contiguous on both sides: local address and device, remote address and device,
# length.
Run: TypeAlias = tuple[int, int, int, int, int]


@dataclass
class Window:
    """How many pieces to keep in flight to a peer.

    A link holds rate * round trip bytes. To keep it busy, that many bytes have to be in flight, and
    one piece more, which the link moves in the meantime. The rate is the best yet, because a lower
    one had too little in flight or shared the link. The round trip is the shortest, because a
    longer one waited in a queue. Times are in seconds of any clock.
    """

    arrived: int = 0  # bytes of all pieces together
    length: float = PIECE_BYTES  # average bytes of a piece; small runs make short pieces
    rate: float = 0.0  # bytes per second
    round_trip_s: float = 1.0  # of a piece

    def end(self, num_bytes: int, seconds: float, *, before: int = 0, is_part: bool = True) -> None:
        """Record a piece that took `seconds`; when it was requested, `before` bytes had arrived."""
        self.arrived += num_bytes
        if is_part:  # of a longer read
            self.length += (num_bytes - self.length) * LATEST_SHARE
        seconds = max(seconds, 1e-6)
        self.round_trip_s = min(self.round_trip_s, seconds)
        self.rate = max(self.rate, (self.arrived - before) / seconds)

    @property
    def streams(self) -> int:
        """How many pieces may be in flight, each in a stream of its own."""
        wanted = 1 + math.ceil(GAIN * self.rate * self.round_trip_s / self.length)
        return min(max(wanted, MIN_STREAMS), MAX_STREAMS)


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
        self.is_short = len(self.runs) == 1 and self.runs[0][-1] <= SHORT_BYTES

    def cut_piece(self, limit: int) -> Run:
        here, device, there, their_device, length = self.runs[0]
        if length <= limit:
            return self.runs.popleft()
        self.runs[0] = (here + limit, device, there + limit, their_device, length - limit)
        return here, device, there, their_device, limit

    def stop(self) -> None:
        self.runs.clear()
        if self in self.peer.queue:
            self.peer.queue.remove(self)

    def fail(self, error: TransportError) -> None:
        """An error after which the read may go on outweighs one that ended it."""
        if self.failure in (None, PeerLost):
            self.failure = PeerLost if isinstance(error, PeerLost) else TransportError
            self.reason = str(error)
        self.stop()


@dataclass
class _Stream:
    """One agent's connection to a peer, and the piece that travels over it."""

    agent: Transport
    read: _Read | None = None  # whose piece it is; None: idle
    handle: ReadHandle = None
    lists: tuple[ListHandle, ListHandle] | None = None  # NIXL needs them until the read ends
    num_bytes: int = 0
    arrived: int = 0  # bytes of all other pieces when this one was requested
    used_at: float = -math.inf
    is_lost: bool = False  # the piece may go on for ever


@dataclass(eq=False)
class _Peer:
    """A peer that is read over TCP."""

    name: PeerName
    metadata: bytes
    streams: list[_Stream]  # the agents in their order
    window: Window = field(default_factory=Window)
    queue: deque[_Read] = field(default_factory=deque)
    max_streams: int = MAX_STREAMS
    poll_at: float = 0.0


@dataclass(frozen=True)
class _Job:
    """A further agent connects to a peer in the background."""

    peer: _Peer
    agent: Transport | None  # None: a new one
    result: "Future[Transport | str]"  # the agent, or the reason without one


def pace(
    first: Transport,
    make: Callable[..., Transport],
    config: Config,
    memory: Memory,
    engine_config: str,
) -> "PacedTransport":
    """Wrap a rank's first agent, which has UCX's settings `engine_config`; `make` makes others."""
    settings = ucx_settings(os.environ, engine_config)
    own = HostFacts.find(settings)
    rule = make_rule(own, settings, memory)
    is_tcp = rule if config.backends[0] == "UCX" else (lambda _metadata: False)
    only_tcp = f"{engine_config},TLS={ONLY_TCP[memory]}"
    make_agent = partial(make, ucx_options=STREAM_OPTIONS, engine_config=only_tcp)
    background = ThreadPoolExecutor(1, "nixl-kv-streams")
    return PacedTransport(first, make_agent, is_tcp, background, facts=own.suffix())


class PacedTransport:
    """Reads some peers by several agents.

    One background thread makes further connections, because each takes 15 ms, or 40 ms
    with a new agent. No other thread uses that agent meanwhile.
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
        """Start with the agent that peers read, and that reads peers without TCP.

        `make_agent` makes further agents, which read over TCP only. `is_tcp` decides which peers
        they read; `facts` stand behind the metadata, for the peers' `is_tcp`. `background` makes
        connections, and is shut down with this transport.
        """
        self._first = first
        self._agents = [first]
        self._make_agent = make_agent
        self._is_tcp = is_tcp
        self._background = background
        self._facts = facts
        self._job: _Job | None = None
        self._clock = clock
        self._registered: list[tuple[Span, Memory, int]] = []
        self._peers: dict[PeerName, _Peer] = {}

    def __repr__(self) -> str:
        streams = ", ".join(f"{len(peer.streams)} to {name}" for name, peer in self._peers.items())
        return f"<PacedTransport {self._first}: {streams or 'no TCP'}>"

    def warm_up_pieces(self, peer: PeerName) -> int:
        return 0 if peer in self._peers else self._first.warm_up_pieces(peer)

    def register(self, span: Span, memory: Memory, device: int) -> None:
        for agent in self._agents:
            agent.register(span, memory, device)
        self._registered.append((span, memory, device))

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        self._first.rehearse(span, memory, device)

    def metadata(self) -> bytes:
        return self._first.metadata() + self._facts

    def add_peer(self, metadata: bytes) -> PeerName:
        name = self._first.add_peer(metadata)
        if name not in self._peers and self._is_tcp(metadata):
            self._peers[name] = _Peer(name, metadata, [_Stream(self._first)])
        return name

    def drop_peer(self, peer: PeerName) -> None:
        dropped = self._peers.pop(peer, None)
        for stream in dropped.streams[1:] if dropped is not None else ():
            stream.agent.drop_peer(peer)
        self._first.drop_peer(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        # The first agent checks the rows also where further agents will read them.
        handle = self._first.prepare(rows, memory, peer)
        counts = rows[:, COUNT].astype(np.int64)
        first = (np.cumsum(counts) - counts).astype(np.int32)
        return _List(handle, peer, memory, np.array(rows, dtype=np.uint64), first)

    def read(
        self, local: _List, remote: _List, indices: tuple[Indices, Indices]
    ) -> _Read | ReadHandle:
        peer = self._peers.get(remote.peer) if remote.peer is not None else None
        if peer is None:
            return self._first.read(local.handle, remote.handle, indices)
        if not len(indices[0]) or len(indices[0]) != len(indices[1]):
            raise TransportError(f"{len(indices[0])} local and {len(indices[1])} remote pieces")
        read = _Read(peer, (local.memory, remote.memory), _runs((local, remote), indices))
        (peer.queue.appendleft if read.is_short else peer.queue.append)(read)
        return read

    def poll(self, read: _Read | ReadHandle) -> bool:
        if not isinstance(read, _Read):
            return self._first.poll(read)
        peer = read.peer
        if self._peers.get(peer.name) is not peer:
            raise PeerLost(f"peer {peer.name} was dropped during a read")
        now = self._clock()
        if now >= peer.poll_at:
            self._end_job()
            self._finish(peer)
            self._start(peer)
            peer.poll_at = now + min(peer.window.round_trip_s * PAUSE_SHARE, LONGEST_PAUSE_S)
        if read.failure is not None and not (read.num_in_flight and read.failure is PeerLost):
            raise read.failure(read.reason)
        return not read.num_in_flight and not read.runs

    def stop(self, read: _Read | ReadHandle) -> bool:
        if not isinstance(read, _Read) or not read.runs:
            return False
        read.stop()
        return True

    def progress(self) -> None:
        self._first.progress()  # peers read no other agent

    def close(self) -> None:
        self._background.shutdown(wait=False)
        if self._job is not None and not self._job.result.cancel():
            if wait([self._job.result], CONNECTED_S).not_done:
                raise TransportError("an agent that reads over TCP still connects")
            self._end_job()
        self._job = None
        while self._agents:
            self._agents[-1].close()
            self._agents.pop()

    # --- reads

    def _finish(self, peer: _Peer) -> None:
        for stream in peer.streams:
            read = stream.read
            if read is None or stream.is_lost or self._is_busy(stream):
                continue
            try:
                if not stream.agent.poll(stream.handle):
                    continue
                peer.window.end(
                    *(stream.num_bytes, self._clock() - stream.used_at),
                    before=stream.arrived,
                    is_part=not read.is_short,
                )
            except PeerLost as error:
                read.fail(error)
            except TransportError as error:
                stream.is_lost = True  # the piece may go on, so never use its stream again
                read.fail(error)
                continue
            stream.read = stream.handle = stream.lists = None
            read.num_in_flight -= 1

    def _start(self, peer: _Peer) -> None:
        """Start as many pieces as the window allows, and at most one more connection."""
        while peer.queue:
            num_streams = min(peer.window.streams, peer.max_streams)
            used = peer.streams[:num_streams]
            free = [each for each in used if each.read is None]
            if not free and len(used) < num_streams:
                self._connect(peer)
            ready = next((each for each in free if not self._is_busy(each)), None)
            if ready is None:
                return
            self._start_piece(peer, ready)

    def _start_piece(self, peer: _Peer, stream: _Stream) -> None:
        read = peer.queue[0]
        # The first piece of a connection waits for the connection, so it is short.
        is_new = stream.used_at == -math.inf
        run = read.cut_piece(SHORT_BYTES if is_new else PIECE_BYTES)
        here, device, there, their_device, length = run
        if not read.runs:
            peer.queue.popleft()
        try:
            lists = (
                stream.agent.prepare(_row(here, device, length), read.memory[0], None),
                stream.agent.prepare(_row(there, their_device, length), read.memory[1], peer.name),
            )
            now = self._clock()
            handle = stream.agent.read(*lists, (ONLY_PIECE, ONLY_PIECE))
        except TransportError as error:  # nothing of this piece is in flight
            read.fail(PeerLost(str(error)))
            return
        stream.read, stream.handle, stream.lists = read, handle, lists
        stream.num_bytes, stream.arrived, stream.used_at = length, peer.window.arrived, now
        read.num_in_flight += 1

    # --- connections

    def _is_busy(self, stream: _Stream) -> bool:
        """Whether its agent connects to a peer now: NIXL would make other calls wait for that."""
        return self._job is not None and stream.agent is self._job.agent

    def _connect(self, peer: _Peer) -> None:
        """Begin to connect the next agent to a peer, unless the background thread is busy."""
        if self._job is None:
            number = len(peer.streams)
            agent = self._agents[number] if number < len(self._agents) else None
            connected = self._background.submit(self._connect_agent, agent, peer.metadata)
            self._job = _Job(peer, agent, connected)

    def _connect_agent(self, agent: Transport | None, metadata: bytes) -> Transport | str:
        """Runs in the background. Closes a new agent that it cannot connect."""
        try:
            with ExitStack() as stack:
                if agent is None:
                    agent = self._make_agent()
                    stack.callback(agent.close)
                    for registered in self._registered:
                        agent.register(*registered)
                agent.add_peer(metadata)
                stack.pop_all()
        except Exception as error:  # noqa: BLE001 - the text names its type
            # Any error costs this connection only: on the transfer thread it would fail all loads.
            # Keep its text alone: a traceback would keep the agent alive.
            return str(error) if isinstance(error, TransportError) else repr(error)
        return agent

    def _end_job(self) -> None:
        """Use a new connection that is complete."""
        job = self._job
        if job is None or not job.result.done():
            return
        self._job = None
        peer, agent = job.peer, job.result.result()
        number = len(peer.streams)
        if isinstance(agent, str):
            logger.warning(
                "%s keeps %d connections, because another failed: %s", peer.name, number, agent
            )
            peer.max_streams = number
            return
        if job.agent is None:
            self._agents.append(agent)
        if self._peers.get(peer.name) is peer:
            peer.streams.append(_Stream(agent))
        else:  # it was dropped meanwhile; an error must not fail other reads
            with suppress(TransportError):
                agent.drop_peer(peer.name)


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
