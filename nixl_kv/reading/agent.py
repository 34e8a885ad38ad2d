"""One agent that reads: a transport, the remote ranks that it can read, and its reads in progress.

The agent knows geometry, paths and the transport. The protocol knows the purpose of a read and
what follows from its end. All of it runs on the transfer thread, except `open_transport` and
`close`.

The first read of a rank makes the connection and maps memory. So the agent warms up a READY rank:
it reads a fence slot and some bytes of the cache and discards them. Meanwhile decode still asks for
a grant. The end of these reads proves that the rank can be read.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from nixl_kv.errors import PeerLost, TransportError, get_logger
from nixl_kv.geometry.layout import CacheLayout, block_ids
from nixl_kv.geometry.plan import ADDRESS, DEVICE, LENGTH
from nixl_kv.ids import FENCE_TOKEN_BYTES, FenceToken, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.reading.paths import RUNS_PER_TURN, Buffer, ExtraMemory, Read, ReadOp, Source, allocate
from nixl_kv.reading.peers import Ended, Ranks, RemotePeers, RemoteRank
from nixl_kv.transport.base import (
    LINGER_S,
    LONGEST_PAUSE_S,
    Indices,
    ListHandle,
    ReadHandle,
    Rows,
    SlotPage,
    Transport,
)

logger = get_logger(__name__)

MAX_SLOT_READS: Final = 4096
# Warm-up reads in progress, including those that never end.
MAX_WARM_UPS: Final = 256
# A warm-up reads SAMPLE_BYTES of each of the first SAMPLED_SPANS registered regions.
SAMPLE_BYTES: Final = 4096
SAMPLED_SPANS: Final = 64
SCRATCH_BYTES: Final = 1 << 20
# Of a probe, in one piece where a region is that long, so that packets have the largest size.
PROBE_BYTES: Final = 64 << 10
# Bytes per turn of the reads that are polled right after they are posted. Over shared memory they
# have ended by then, so further reads can begin; the limit leaves time for the rest of the turn.
AT_ONCE_BYTES: Final = 64 << 20
READING_PAUSE_S: Final = 0.0001
# Pause between two polls, as a share of the read's time so far: on average, the agent notices an
# end late by half of it. A poll takes 40 us and holds the GIL, which vLLM's step needs.
PAUSE_SHARE: Final = 1 / 40


class Opened(NamedTuple):
    """A transport with which this rank's cache is registered, and memory that only it uses."""

    transport: Transport
    slots: SlotPage
    scratch: Buffer | None  # for warm-up reads


def open_transport(
    make: Callable[[], Transport], layout: CacheLayout, memory: tuple[ExtraMemory, ...] = ()
) -> Opened:
    """Make a transport, and register this rank's cache and `memory`. Slow; on any thread.

    Raises:
        TransportError: if it cannot be created, or does not accept the memory.
    """
    scratch = None
    with contextlib.suppress(ImportError, TransportError):  # then warm-ups only read a slot
        scratch = allocate(SCRATCH_BYTES, layout.memory, layout.device)
    opened = Opened(make(), SlotPage(MAX_SLOT_READS), scratch)
    register(opened.transport, layout, opened.slots, memory)
    if scratch is not None:
        opened.transport.register(scratch.span, layout.memory, layout.device)
    return opened


def register(
    transport: Transport, layout: CacheLayout, slots: SlotPage, memory: tuple[ExtraMemory, ...] = ()
) -> None:
    for span in layout.spans:
        transport.register(span, layout.memory, layout.device)
    transport.register(slots.span, "DRAM", 0)
    for each in memory:
        transport.register(*each)


class SampleOp(ReadOp):
    """One read of a few bytes, posted at once: they arrive soon, or fail."""

    def __init__(self, transport: Transport, handle: ReadHandle) -> None:
        self._transport, self._handle = transport, handle

    def poll(self) -> list[events.ReadEvent]:
        try:
            if self._transport.poll(self._handle):
                self._land()
                self.release()
        except PeerLost as error:
            self.failure, self.is_connection_lost = str(error), True
            self.release()
        return []

    def stop(self) -> None:
        """Nothing is left to start."""

    def release(self) -> None:
        self.has_ended = True

    def _land(self) -> None:
        """All bytes have landed."""


class SlotOp(SampleOp):
    """The read of a fence slot into an entry of the agent's page. The entry is cleared first."""

    token: FenceToken | None = None

    def __init__(self, agent: "ReadAgent", rank: RemoteRank, slot: int) -> None:
        if not agent.free_entries:
            raise TransportError(f"{MAX_SLOT_READS} fence slots are being read; allowed: no more")
        self._slots, self._free = agent.slots, agent.free_entries
        entry = self._entry = self._free[-1]
        self._slots.clear(entry)
        pieces = block_ids([entry]), block_ids([slot])
        super().__init__(agent.transport, agent.transport.read(agent.entries, rank.slots, pieces))
        self._free.pop()

    def _land(self) -> None:
        self.token = self._slots.read(self._entry)

    def release(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._free.append(self._entry)


@dataclass(eq=False)
class ActiveRead:
    """A read in progress: of a load's data and then of its fence slot, or to warm up a rank."""

    op: ReadOp
    remote: RemoteRank
    request: RequestId  # empty: it warms up or probes, and nothing needs its bytes
    started_at: float
    num_bytes: int = 0  # of a load or a probe
    num_runs: int = 0
    slot: int = 0  # of the load's fence token
    post_seconds: float = 0.0
    # Bytes, runs, seconds, path, direct bytes and seconds to post, once all data has landed.
    landed: tuple[int, int, float, str, int, float] | None = None
    is_unwanted: bool = False
    is_abandoned: bool = False
    error: str = ""  # why its state is unknown; then it is not polled again

    @property
    def rank(self) -> Rank:
        return self.remote.rank


class ReadAgent:
    """`counts` receives the seconds of first reads. `clock` is monotonic."""

    def __init__(
        self,
        opened: Opened,
        peers: RemotePeers,
        background: Executor,
        counts: events.Counts,
        clock: Callable[[], float],
    ) -> None:
        self.transport = opened.transport
        self.ranks = Ranks(
            self.transport,
            peers,
            background,
            is_reading=self.is_reading,
            on_ready=self._warm_up,
        )
        self.reads: list[ActiveRead] = []
        self.is_stuck = False  # a read was abandoned, so another agent must serve new ones
        self.warm_ups: list[ActiveRead] = []
        self.slots = opened.slots
        self.free_entries = list(range(self.slots.count))
        self.entries: ListHandle = self.transport.prepare(self.slots.rows(), "DRAM", None)
        self._scratch = opened.scratch
        self._peers = peers
        self._layout = peers.layout
        self._paths = peers.paths
        self._clock = clock
        self._counts = counts
        self._at_once_bytes = AT_ONCE_BYTES  # left of this turn
        self.broken: set[events.PeerKey] = set()  # their connection broke
        self._breaks: list[events.PeerBroken] = []  # to be reported

    def __repr__(self) -> str:
        return f"<ReadAgent: {len(self.reads)} reads, {self.ranks!r}>"

    def is_reading(self, name: str) -> bool:
        """Whether a read needs this name, so that the transport must not forget the rank."""
        reads = (*self.reads, *(read for read in self.warm_ups if not read.error))
        return any(read.remote.name == name for read in reads)

    def is_warming_up(self, peer: events.PeerKey) -> bool:
        """Whether a first read of one of its ranks goes on.

        One of a former record of the rank does not count, because it may never end.
        """
        return any(
            read.remote.peer == peer and self.ranks.find(peer, read.rank) is read.remote
            for read in self.warm_ups
        )

    @property
    def is_busy(self) -> bool:
        if self.reads or self.ranks.is_busy:
            return True
        since = self._clock() - LINGER_S  # prefill no longer progresses an older one
        return any(not read.error and read.started_at > since for read in self.warm_ups)

    @property
    def pause_s(self) -> float:
        """Seconds until the next poll, while the agent is busy."""
        now = self._clock()
        since = [r.started_at if r.op.is_autonomous else now for r in self.reads]
        since += [read.started_at for read in self.warm_ups]
        pause = (now - max(since, default=now)) * PAUSE_SHARE
        return min(max(READING_PAUSE_S, pause), LONGEST_PAUSE_S)

    @property
    def is_drained(self) -> bool:
        """Whether only abandoned reads are left, so that this agent can be destroyed."""
        return all(read.is_abandoned for read in self.reads) and not self.ranks.is_adding

    def start(
        self, action: events.StartRead, rank: RemoteRank | None
    ) -> list[events.DataEvent] | None:
        request = action.load.request
        if rank is None:
            reason = f"engine {action.peer.engine!r} is gone"
            return [events.ReadFailed(request, action.rank, reason)]
        if rank.source is None or self.ranks.is_adding:
            return None
        try:
            return self._start_data(action, rank, rank.source)
        except (TransportError, ValueError) as error:
            self._note(error, action.peer)
            return [events.ReadFailed(request, action.rank, str(error))]

    def prepare(self, peer: events.PeerKey) -> None:
        """Make the ranks of a peer readable in the background, unless the peer is forgotten."""
        description = self._peers.descriptions.get(peer)
        if description is not None:
            self.ranks.prepare(peer, description, self._peers.routes(description))

    def tell(self, action: events.TellRead) -> list[events.DataEvent]:
        happened: list[events.DataEvent] = []
        for read in self._reads_of(action.request, action.rank):
            read.op.on_message(action.message)
            if not self.ranks.is_adding:
                happened += self._poll(read)
        return happened

    def abandon(self, read: ActiveRead, error: str = "") -> None:
        read.is_abandoned, read.error = True, read.error or error
        self.is_stuck |= bool(read.request)

    def stop(self, action: events.StopRead) -> None:
        for read in self._reads_of(action.request, action.rank):
            read.is_unwanted = True  # the transport may be busy: the next poll stops it

    def poll(self) -> list[events.DataEvent]:
        """Continue all reads; return the events since the last call.

        If a bug raises here, the agent does not poll that read again.
        """
        happened: list[events.DataEvent] = []
        self._at_once_bytes, self.ranks.budget.runs = AT_ONCE_BYTES, RUNS_PER_TURN
        reads = (*self.warm_ups, *self.reads)
        for path in self._paths[:-1]:  # the last path is direct, which has nothing to tidy
            path.tidy()
        if not self.ranks.is_adding:
            for read in reads:
                happened += self._poll(read)
        if self._breaks:
            happened += self._breaks
            self._breaks = []
        return happened

    def fail_all(self) -> list[events.DataEvent]:
        """Fail all reads. The transport is gone, so nothing writes for them."""
        reads, self.reads = self.reads, []
        for read in reads:
            read.op.release()
        return [
            events.ReadFailed(
                read.request,
                read.rank,
                f"{read.error or 'it did not end'}; destroying its NIXL agent stopped it",
            )
            for read in reads
        ]

    def collect(self) -> list[Ended]:
        """Return the preparations that have ended, and forget engines with a broken connection."""
        self.drop_broken()
        return self.ranks.collect()

    def drop_broken(self) -> None:
        """Forget engines with a broken connection once nothing reads them.

        A new read adds such an engine again, so it calls this first. A read that waited for the
        engine does not: it fails with the connection, or it could wait for ever.
        """
        for peer in list(self.broken) if self.broken and not self.ranks.is_adding else ():
            is_read = any(read.remote.peer == peer for read in (*self.reads, *self.warm_ups))
            if not is_read and not self.ranks.is_preparing(peer):
                self.broken.remove(peer)
                self.ranks.drop(peer, is_lost=True)

    def close(self) -> None:
        """Wait for copies and end the transport. Then nothing of this agent writes.

        Runs on any thread, while nothing else uses the agent.

        Raises:
            TransportError: if the end cannot be proven; call it again.
        """
        for read in self.reads:
            read.op.end_copies()  # before memory is unmapped that a kernel reads
        self.ranks.close()
        self.transport.close()
        for read in self.reads:
            read.op.release()

    # --- reads

    def _start_data(
        self, action: events.StartRead, rank: RemoteRank, source: Source
    ) -> list[events.DataEvent]:
        load, plan = action.load, source.plan
        pieces = plan.pieces(load.tables, action.grant.tables, range(load.begin, load.end))
        num_bytes, num_runs = plan.num_bytes(pieces), plan.num_runs(pieces)
        started_at, slot = self._clock(), action.grant.slot
        if not num_bytes:
            of_slot = SlotOp(self, rank, slot)
            read = ActiveRead(
                of_slot, rank, load.request, started_at, landed=(0, 0, 0.0, "direct", 0, 0.0)
            )
            self.reads.append(read)
            return self._poll(read)
        request = Read(action, source, pieces, num_bytes, num_runs)
        ops = (path.start(prepared, request) for path, prepared in rank.paths)
        op = next(op for op in ops if op is not None)  # the last path accepts every read
        read = ActiveRead(op, rank, load.request, started_at, num_bytes, num_runs, slot)
        read.post_seconds = self._clock() - started_at
        self.reads.append(read)
        is_polled = num_bytes <= self._at_once_bytes
        self._at_once_bytes -= num_bytes
        return self._poll(read) if is_polled else []

    def _poll(self, read: ActiveRead) -> list[events.DataEvent]:
        """Continue a read. Over shared memory even a read that was just posted has ended."""
        if read.error:
            return []
        happened: list[events.DataEvent] = []
        try:
            if read.is_unwanted:
                read.op.stop()
            happened += read.op.poll()
        except TransportError as error:
            self.abandon(read, str(error))
            if not read.request:  # no load notices it
                self._break(read.remote.peer, str(error))
            return []
        except Exception as error:
            self.abandon(read, f"{type(error).__name__}: {error}")
            raise
        if not read.op.has_ended:
            return happened
        return [*happened, *self._end(read)]

    def _end(self, read: ActiveRead) -> list[events.DataEvent]:
        op, request, seconds = read.op, read.request, self._clock() - read.started_at
        if op.is_connection_lost:
            self._break(read.remote.peer, op.failure or "a read ended in an error")
        if not request:
            self.warm_ups.remove(read)
            if op.failure is None and not read.num_bytes:
                self._counts.observe("first_contact_seconds", seconds, "warm_up")
            return []
        if op.failure is None and read.landed is None:
            is_direct = op.num_direct_bytes == read.num_bytes
            path, num_direct = ("direct", 0) if is_direct else (op.path, op.num_direct_bytes)
            runs, post = read.num_runs, read.post_seconds
            read.landed = read.num_bytes, runs, seconds, path, num_direct, post
            if not read.is_unwanted:
                return self._read_slot(read)
        self.reads.remove(read)
        if op.failure is not None or read.landed is None:
            return [events.ReadFailed(request, read.rank, op.failure or "it has not landed")]
        token = op.token if isinstance(op, SlotOp) else None
        return [events.ReadDone(request, read.rank, *read.landed, token)]

    def _read_slot(self, read: ActiveRead) -> list[events.DataEvent]:
        """All data has landed: as its last part, read the fence slot."""
        try:
            read.op = SlotOp(self, read.remote, read.slot)
        except (TransportError, ValueError) as error:
            self.reads.remove(read)
            self._note(error, read.remote.peer)
            return [events.ReadFailed(read.request, read.rank, str(error))]
        # The end of the data is progress, and the slot has its own time.
        progress = events.ReadMoved(read.request, read.rank)
        return self._poll(read) or [progress]

    def _reads_of(self, request: RequestId, rank: Rank) -> list[ActiveRead]:
        # At most one, except after a restart of the transfer thread.
        return [read for read in self.reads if (read.request, read.rank) == (request, rank)]

    def _note(self, error: Exception, peer: events.PeerKey) -> None:
        # NIXL does not connect again by itself, so later reads of that engine would fail too.
        if isinstance(error, PeerLost):
            self._break(peer, str(error))

    def _break(self, peer: events.PeerKey, reason: str) -> None:
        if peer not in self.broken:  # one break ends several reads; report it once
            self.broken.add(peer)
            self._breaks.append(events.PeerBroken(peer, reason))

    # --- warm-up

    def _warm_up(self, rank: RemoteRank) -> None:
        if len(self.warm_ups) + 2 > MAX_WARM_UPS:
            return
        started_at = self._clock()
        try:
            for op in self._warm_up_ops(rank):
                self.warm_ups.append(ActiveRead(op, rank, RequestId(""), started_at))
        except TransportError as error:
            logger.info("the warm-up read of %s failed: %s", rank, error)
            self._note(error, rank.peer)

    def _warm_up_ops(self, rank: RemoteRank) -> Iterator[SampleOp]:
        """Read enough pieces to use all of the transport's connections to the rank."""
        source = rank.source
        count = self.transport.warm_up_pieces(source.name) if source and self._scratch else 0
        # Over TCP it is 0, and the read of the slot makes the connection.
        if source is not None and count:
            rows = sample_rows(rank.description.layout, SAMPLE_BYTES)
            pieces = np.tile(np.arange(len(rows), dtype=np.int32), -(-count // len(rows)))
            yield self._sample(rank, source, rows, pieces)
        if self.free_entries:
            yield SlotOp(self, rank, 0)

    def _sample(self, rank: RemoteRank, source: Source, rows: Rows, pieces: Indices) -> SampleOp:
        """Read these pieces of a rank's cache into memory that no other read needs.

        Raises:
            TransportError: if this rank has no such memory, or the transport refuses the read.
        """
        if self._scratch is None:
            raise TransportError("this rank has no spare memory to read into")
        here = rows.copy()
        here[:, ADDRESS], here[:, DEVICE] = self._scratch.span.address, self._layout.device
        there = self.transport.prepare(rows, rank.description.layout.memory, source.name)
        local = self.transport.prepare(here, self._layout.memory, None)
        return SampleOp(self.transport, self.transport.read(local, there, (pieces, pieces)))

    # --- probes

    def probe(self, rank: RemoteRank, *, is_small: bool) -> ActiveRead:
        """Read a fence slot, if `is_small`, or PROBE_BYTES of the cache of a READY rank.

        The transport must not be busy (`Ranks.is_adding`).

        Raises:
            TransportError: if no such read can begin.
        """
        if rank.source is None or len(self.warm_ups) >= MAX_WARM_UPS:
            raise TransportError("this rank has too many first reads that do not end")
        started_at, num_bytes = self._clock(), FENCE_TOKEN_BYTES
        try:
            if is_small:
                op: SampleOp = SlotOp(self, rank, 0)
            else:
                rows = sample_rows(rank.description.layout, PROBE_BYTES)[:1]
                num_bytes = int(rows[0, LENGTH])
                op = self._sample(rank, rank.source, rows, block_ids([0]))
        except TransportError as error:
            self._note(error, rank.peer)
            raise
        read = ActiveRead(op, rank, RequestId(""), started_at, num_bytes)
        self.warm_ups.append(read)
        return read


def sample_rows(layout: CacheLayout, num_bytes: int) -> Rows:
    """One piece of up to `num_bytes` of each of the first SAMPLED_SPANS regions: shape (n, 5)."""
    pieces = [(s.address, min(num_bytes, s.length)) for s in layout.spans[:SAMPLED_SPANS]]
    rows = [(address, length, layout.device, length, 1) for address, length in pieces]
    return np.array(rows, dtype=np.uint64)
