"""One agent that reads: a transport, the remote ranks that it can read, and its reads in progress.

The agent knows geometry, paths and the transport. The protocol knows the purpose of a read and
what follows from its end. All of it runs on the transfer thread, except `open_transport` and
`close`.

The first read of a rank makes the connection and maps memory. So the agent warms up a READY rank:
it reads a fence slot and some bytes of the cache and discards them. Meanwhile decode still asks for
a grant.
"""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from nixl_kv.errors import PeerLost, TransportError, get_logger
from nixl_kv.geometry.layout import CacheLayout, Span, block_ids
from nixl_kv.geometry.plan import ADDRESS, DEVICE
from nixl_kv.ids import Generation, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.reading.paths import ExtraMemory, Read, ReadOp
from nixl_kv.reading.peers import Ranks, RemotePeers, RemoteRank, WaitingRead, request_of
from nixl_kv.transport.base import Indices, ListHandle, ReadHandle, Rows, SlotPage, Transport

logger = get_logger(__name__)

MAX_SLOT_READS: Final = 4096
# Warm-up reads in progress, including those that never end.
MAX_WARM_UPS: Final = 256
# How long a warm-up keeps the agent busy. Prefill progresses NIXL for so long after a message.
WARM_UP_S: Final = 2.0
# A warm-up reads SAMPLE_BYTES of each of the first SAMPLED_SPANS registered regions.
SAMPLE_BYTES: Final = 4096
SAMPLED_SPANS: Final = 64
SCRATCH_BYTES: Final = 1 << 20
# Bytes per turn of the reads that are polled right after they are posted. Over shared memory they
# have ended by then, so further reads can begin; the limit leaves time for the rest of the turn.
AT_ONCE_BYTES: Final = 64 << 20
READING_PAUSE_S: Final = 0.0001
LONGEST_PAUSE_S: Final = 0.0005
# Pause between two polls, as a share of the read's time so far: on average, the agent notices an
# end late by half of it. A poll takes 40 us and holds the GIL, which vLLM's step needs.
PAUSE_SHARE: Final = 1 / 40


class Scratch(NamedTuple):
    """Memory of the cache's kind for warm-up reads; allocated as long as `owner` lives."""

    span: Span
    owner: object


def _make_scratch(layout: CacheLayout) -> Scratch | None:
    if layout.memory == "DRAM":
        memory = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        return Scratch(Span(memory.ctypes.data, SCRATCH_BYTES), memory)
    try:
        from nixl_kv.gpu import allocate  # noqa: PLC0415 - only GPU machines have Triton

        address, owner = allocate(SCRATCH_BYTES, layout.device)
    except (ImportError, TransportError):  # then warm-ups only read a slot
        return None
    return Scratch(Span(address, SCRATCH_BYTES), owner)


class Opened(NamedTuple):
    """A transport with which this rank's cache is registered, and memory that only it uses."""

    transport: Transport
    slots: SlotPage
    scratch: Scratch | None


def open_transport(
    make: Callable[[], Transport], layout: CacheLayout, memory: tuple[ExtraMemory, ...] = ()
) -> Opened:
    """Make a transport, and register this rank's cache and `memory` with it.

    Slow; runs on any thread.

    Raises:
        TransportError: if it cannot be created, or does not accept the memory.
    """
    opened = Opened(make(), SlotPage(MAX_SLOT_READS), _make_scratch(layout))
    register(opened.transport, layout, opened.slots, memory)
    if opened.scratch is not None:
        opened.transport.register(opened.scratch.span, layout.memory, layout.device)
    return opened


def register(
    transport: Transport, layout: CacheLayout, slots: SlotPage, memory: tuple[ExtraMemory, ...] = ()
) -> None:
    """Register this rank's cache, a page of slots and other memory with a transport."""
    for span in layout.spans:
        transport.register(span, layout.memory, layout.device)
    transport.register(slots.span, "DRAM", 0)
    for each in memory:
        transport.register(*each)


class SlotOp(ReadOp):
    """The read of a fence slot into an entry of this agent's page. The entry is cleared first."""

    def __init__(self, agent: "ReadAgent", rank: RemoteRank, slot: int) -> None:
        self._transport, self._slots, self._free = agent.transport, agent.slots, agent.free_entries
        self._entry = self._free.pop()
        self.has_ended = False
        self.token: Generation | None = None
        self._slots.clear(self._entry)
        try:
            self._handle = self._transport.read(
                agent.entries, rank.slots, (block_ids([self._entry]), block_ids([slot]))
            )
        except TransportError:
            self.release()
            raise

    def poll(self) -> list[events.ReadEvent]:
        try:
            if self._transport.poll(self._handle):
                self.token = self._slots.read(self._entry)
                self.release()
        except PeerLost as error:
            self.failure, self.is_connection_lost = str(error), True
            self.release()
        return []

    def stop(self) -> None:
        """16 bytes arrive soon, or fail."""

    def release(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._free.append(self._entry)


@dataclass(eq=False)
class ActiveRead:
    """A read of a load's data or of a fence slot, while it is in progress."""

    op: ReadOp
    remote: RemoteRank
    request: RequestId
    started_at: float
    num_bytes: int = 0
    num_runs: int = 0
    slot_op: SlotOp | None = None  # the same as `op` if it reads the slot
    is_unwanted: bool = False
    is_abandoned: bool = False
    error: str = ""  # why its state is unknown; then it is not polled again

    @property
    def rank(self) -> Rank:
        return self.remote.rank

    def doubt(self, reason: str) -> None:
        self.is_abandoned, self.error = True, reason  # only the end of the agent ends it


@dataclass(eq=False)
class _WarmUp:
    """A warm-up read in progress. Its bytes land in scratch memory."""

    remote: RemoteRank
    handle: ReadHandle
    started_at: float
    entry: int | None = None  # of the slot page, if it reads a slot
    is_in_doubt: bool = False


class ReadAgent:
    """`counts` receives the number of first reads, and their seconds. `clock` is monotonic."""

    def __init__(
        self,
        opened: Opened,
        peers: RemotePeers,
        background: Executor,
        counts: defaultdict[str, float],
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
        self.warm_ups: list[_WarmUp] = []
        self.slots = opened.slots
        self.free_entries = list(range(self.slots.count))
        self.entries: ListHandle = self.transport.prepare(self.slots.rows(), "DRAM", None)
        self._scratch = opened.scratch
        self._layout = peers.layout
        self._paths = peers.paths
        self._clock = clock
        self._counts = counts
        self._at_once_bytes = AT_ONCE_BYTES  # left of this turn
        self._broken: set[events.PeerKey] = set()  # their connection broke
        self._breaks: list[events.PeerBroken] = []  # to be reported

    def __repr__(self) -> str:
        return f"<ReadAgent: {len(self.reads)} reads, {self.ranks!r}>"

    def is_reading(self, name: str) -> bool:
        """Whether a read needs this name, so that the transport must not forget the rank."""
        reads = (read.remote for read in self.reads)
        warm_ups = (read.remote for read in self.warm_ups if not read.is_in_doubt)
        return any(remote.name == name for remote in (*reads, *warm_ups))

    @property
    def is_busy(self) -> bool:
        """Whether to poll: a read, a rank's preparation, or a warm-up that is not late."""
        since = self._clock() - WARM_UP_S
        warms_up = any(not r.is_in_doubt and r.started_at > since for r in self.warm_ups)
        return bool(self.reads) or warms_up or self.ranks.is_busy

    @property
    def pause_s(self) -> float:
        """Seconds until the next poll, while the agent is busy."""
        now = self._clock()
        since = [r.started_at if r.op.is_autonomous else now for r in self.reads]
        since += [r.started_at for r in self.warm_ups]
        pause = (now - max(since, default=now)) * PAUSE_SHARE
        return min(max(READING_PAUSE_S, pause), LONGEST_PAUSE_S)

    @property
    def is_drained(self) -> bool:
        """Whether only abandoned reads are left, so that this agent can be destroyed."""
        return all(read.is_abandoned for read in self.reads) and not self.ranks.is_adding

    def start(self, action: WaitingRead) -> list[events.DataEvent]:
        """Start a read, or let it wait at the record of its rank; return the events so far."""
        request = request_of(action)
        rank = self.ranks.find(action.peer, action.rank)
        if rank is None:
            reason = f"engine {action.peer.engine!r} is gone"
            return [events.ReadFailed(request, action.rank, reason)]
        if rank.source is None or self.ranks.is_adding:
            self.ranks.wait(rank, action)
            return []
        try:
            if isinstance(action, events.ReadSlot):
                return self._start_slot(action, rank)
            return self._start_data(action, rank)
        except (TransportError, ValueError) as error:
            self._note(error, action.peer)
            return [events.ReadFailed(request, action.rank, str(error))]

    def on_chunk(self, action: events.ReadChunk) -> list[events.DataEvent]:
        happened: list[events.DataEvent] = []
        for read in self._reads_of(action.request, action.rank):
            read.op.on_message(action)
            if not self.ranks.is_adding:
                happened += self._poll(read)
        return happened

    def stop(self, action: events.StopRead) -> None:
        for read in self._reads_of(action.request, action.rank):
            read.is_unwanted = True  # the transport may be busy: the next poll stops it

    def poll(self) -> list[events.DataEvent]:
        """Continue all reads; return the events since the last call.

        If a bug raises here, the agent does not poll that read again.
        """
        if self.ranks.is_adding:
            return []
        self._at_once_bytes = AT_ONCE_BYTES
        self.ranks.budget.renew()
        for path in self._paths:
            path.tidy()
        for warm_up in list(self.warm_ups):
            self._poll_warm_up(warm_up)
        return [event for read in list(self.reads) for event in self._poll(read)]

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

    def drop_broken(self) -> list[WaitingRead]:
        """Forget engines with a broken connection once nothing reads them; later reads add them.

        Returns the reads that waited for a rank that such an engine shares with another one.
        """
        waiting: list[WaitingRead] = []
        for peer in list(self._broken):
            remotes = [read.remote for read in self.reads] + [r.remote for r in self.warm_ups]
            is_read = any(remote.peer == peer for remote in remotes)
            if not is_read and not self.ranks.is_preparing(peer):
                self._broken.remove(peer)
                waiting += self.ranks.drop(peer, is_lost=True)
        return waiting

    def pop_breaks(self) -> list[events.PeerBroken]:
        breaks, self._breaks = self._breaks, []
        return breaks

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

    def _start_slot(self, action: events.ReadSlot, rank: RemoteRank) -> list[events.DataEvent]:
        if not self.free_entries:
            raise TransportError(f"{MAX_SLOT_READS} fence slots are being read; allowed: no more")
        started_at = self._clock()
        op = SlotOp(self, rank, action.slot)
        read = ActiveRead(op, rank, action.request, started_at, slot_op=op)
        self.reads.append(read)
        return self._poll(read)

    def _start_data(self, action: events.StartRead, rank: RemoteRank) -> list[events.DataEvent]:
        load, source = action.load, rank.source
        assert source is not None  # noqa: S101 - READY
        tokens = range(load.begin, load.end)
        pieces = source.plan.pieces(load.tables, action.grant.tables, tokens)
        num_bytes, num_runs = source.plan.num_bytes(pieces), source.plan.num_runs(pieces)
        if not num_bytes:
            return [events.ReadDone(load.request, action.rank)]
        started_at = self._clock()
        request = Read(action, source, pieces, num_bytes, num_runs)
        ops = (path.start(prepared, request) for path, prepared in rank.paths)
        op = next(op for op in ops if op is not None)  # the last path accepts every read
        read = ActiveRead(op, rank, load.request, started_at, num_bytes, num_runs)
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
            read.doubt(str(error))
            return []
        except Exception as error:
            read.doubt(f"{type(error).__name__}: {error}")
            raise
        if not read.op.has_ended:
            return happened
        self.reads.remove(read)
        if read.op.is_connection_lost:
            self._break(read.remote.peer, read.op.failure or "a read ended in an error")
        return [*happened, self._end_of(read)]

    def _end_of(self, read: ActiveRead) -> events.DataEvent:
        op = read.op
        if op.failure is not None:
            return events.ReadFailed(read.request, read.rank, op.failure)
        if read.slot_op is not None and read.slot_op.token is not None:
            return events.SlotRead(read.request, read.rank, read.slot_op.token)
        is_direct = op.num_direct_bytes == read.num_bytes
        return events.ReadDone(
            read.request,
            read.rank,
            read.num_bytes,
            read.num_runs,
            self._clock() - read.started_at,
            "direct" if is_direct else op.path,
            0 if is_direct else op.num_direct_bytes,
        )

    def _reads_of(self, request: RequestId, rank: Rank) -> list[ActiveRead]:
        """At most one, except after a restart of the transfer thread."""
        return [read for read in self.reads if (read.request, read.rank) == (request, rank)]

    def _note(self, error: Exception, peer: events.PeerKey) -> None:
        # NIXL does not connect again by itself, so later reads of that engine would fail too.
        if isinstance(error, PeerLost):
            self._break(peer, str(error))

    def _break(self, peer: events.PeerKey, reason: str) -> None:
        if peer not in self._broken:  # one break ends several reads; report it once
            self._broken.add(peer)
            self._breaks.append(events.PeerBroken(peer, reason))

    # --- warm-up

    def _warm_up(self, rank: RemoteRank) -> None:
        """Read a slot and some bytes of the cache. If that fails, the next read reports it."""
        if len(self.warm_ups) + 2 > MAX_WARM_UPS:
            return
        try:
            self._warm_up_data(rank)
            if self.free_entries:
                entry = self.free_entries.pop()
                try:
                    pieces = block_ids([entry]), block_ids([0])
                    self._post_warm_up(rank, (self.entries, rank.slots), pieces, entry)
                except TransportError:
                    self.free_entries.append(entry)
                    raise
        except TransportError as error:
            logger.info("the warm-up read of %s failed: %s", rank, error)
            self._note(error, rank.peer)

    def _warm_up_data(self, rank: RemoteRank) -> None:
        """Read enough pieces to use all of the transport's connections to the rank."""
        source, scratch = rank.source, self._scratch
        count = 0 if source is None else self.transport.warm_up_pieces(source.name)
        # Over TCP this is 0, and the read of the slot makes the connection.
        if source is None or scratch is None or not count:
            return
        remote, layout = rank.description.layout, self._layout
        rows = sample_rows(remote)
        here = rows.copy()
        here[:, ADDRESS], here[:, DEVICE] = scratch.span.address, layout.device
        there = self.transport.prepare(rows, remote.memory, source.name)
        local = self.transport.prepare(here, layout.memory, None)
        times = -(-count // len(rows))
        pieces: Indices = np.tile(np.arange(len(rows), dtype=np.int32), times)
        self._post_warm_up(rank, (local, there), (pieces, pieces))

    def _post_warm_up(
        self,
        rank: RemoteRank,
        lists: tuple[ListHandle, ListHandle],
        pieces: tuple[Indices, Indices],
        entry: int | None = None,
    ) -> None:
        started_at = self._clock()
        handle = self.transport.read(*lists, pieces)
        self.warm_ups.append(_WarmUp(rank, handle, started_at, entry))

    def _poll_warm_up(self, read: _WarmUp) -> None:
        if read.is_in_doubt:
            return
        try:
            if not self.transport.poll(read.handle):
                return
            self._counts["warm_ups"] += 1
            self._counts["warm_up_seconds"] += self._clock() - read.started_at
        except PeerLost as error:
            logger.info("the warm-up read of %s failed: %s", read.remote, error)
            self._note(error, read.remote.peer)
        except TransportError:
            read.is_in_doubt = True
            return
        self.warm_ups.remove(read)
        if read.entry is not None:
            self.free_entries.append(read.entry)


def sample_rows(layout: CacheLayout) -> Rows:
    """One piece of each of the first SAMPLED_SPANS regions of a rank: shape (n, 5)."""
    pieces = [(s.address, min(SAMPLE_BYTES, s.length)) for s in layout.spans[:SAMPLED_SPANS]]
    rows = [(address, length, layout.device, length, 1) for address, length in pieces]
    return np.array(rows, dtype=np.uint64)
