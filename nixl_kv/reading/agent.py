"""One agent that reads: the peers that it has prepared, and its reads under way.

It knows the geometry and the transport; what a read is for, and what follows from its end, is the
protocol's affair. Runs on the transfer thread alone.

A rank that can be read is read at once, for nothing: a slot, and some bytes of its cache into
memory that is nobody's. The first read of a peer pays for the connection and for mapping its
memory; so that is paid while the rank is still being asked, and by nobody who waits.
"""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.layout import CacheLayout, block_ids
from nixl_kv.geometry.plan import IndexBuffer
from nixl_kv.geometry.slices import LocalSlice
from nixl_kv.ids import Rank, RequestId
from nixl_kv.log_limit import get_logger
from nixl_kv.protocol import events
from nixl_kv.reading.gather.base import GatherRead, MappedPlan, Wanted
from nixl_kv.reading.paths import Path, choose
from nixl_kv.reading.peers import PreparedPeers, PreparedRank, RemotePeers
from nixl_kv.reading.scratch import Scratch, make_scratch
from nixl_kv.reading.staged.copier import Staging
from nixl_kv.reading.staged.read import STOPPED, StagedRead
from nixl_kv.transport.base import Indices, ListHandle, ReadHandle, Rows, Transport
from nixl_kv.transport.slots import SlotPage
from nixl_kv.verify.queue import DigestQueue

logger = get_logger(__name__)

MAX_SLOT_READS: Final = 4096
"""Slots that can be read at the same time."""
WARM_UP: Final = RequestId("")
"""In place of a request, of a read that warms up."""
MAX_WARM_UPS: Final = 256
"""Reads that warm up, under way at the same time; those that never end are among them."""
WARM_UP_S: Final = 2.0
"""How long the end of one is waited for: as long as prefill serves after a reader's last word."""
AT_ONCE_BYTES: Final = 64 << 20
"""Of reads of data of one turn, that are looked at when they are posted: the end of one lets the
next one begin, and a turn has more to do than to copy what waits."""
READING_PAUSE_S: Final = 0.0001
LONGEST_PAUSE_S: Final = 0.0005
PAUSE_SHARE: Final = 1 / 40
"""Of the time that a read has taken so far: its end is seen later by half of that on average. Each
look takes a core, and Python's lock from vLLM's step, for some 40 us."""


@dataclass(frozen=True)
class Opened:
    """A transport that may write into this rank's cache, and into memory of its own."""

    transport: Transport
    slots: SlotPage
    scratch: Scratch | None


def open_transport(
    make: Callable[[], Transport], layout: CacheLayout, staging: Staging | None = None
) -> Opened:
    """Make a transport that reads into this rank's cache.

    And into its ring, if it has one.

    Slow; runs on any thread.

    Raises:
        TransportError: if it cannot be created, or does not accept the memory.
    """
    opened = Opened(make(), SlotPage(MAX_SLOT_READS), make_scratch(layout))
    register(opened.transport, layout, opened.slots, staging)
    if opened.scratch is not None:
        opened.transport.register(opened.scratch.span, layout.memory, layout.device)
    return opened


def register(
    transport: Transport, layout: CacheLayout, slots: SlotPage, staging: Staging | None = None
) -> None:
    """Let a transport use this rank's cache and a page of slots: its own, or for those it reads.

    Raises:
        TransportError: if the transport does not accept the memory.
    """
    for span in layout.spans:
        transport.register(span, layout.memory, layout.device)
    transport.register(slots.span, "DRAM", 0)
    if staging is not None:
        transport.register(staging.ring.span, staging.memory, staging.device)


@dataclass(frozen=True)
class _Data:
    """What a data read reads, and by which path."""

    path: Path
    num_runs: int
    num_bytes: int
    goes_on_alone: bool  # who reads has nothing to do before its end


@dataclass(frozen=True)
class _Digested:
    """What is digested while it is read, for whom."""

    digests: DigestQueue
    landing: events.DigestLanded
    slices: list[LocalSlice]

    @property
    def wanted(self) -> Wanted:
        """As a gather is asked for it."""
        return Wanted(Key(self.landing.claim), self.slices)

    def keep(self, made: Digest | None) -> None:
        """All of it has landed."""
        if made is not None:
            self.digests.keep(self.landing, self.slices, made)


@dataclass(eq=False)
class ActiveRead:
    """A read under way: of data, or of a slot into the entry `slot` of this side's page."""

    handle: ReadHandle | GatherRead
    peer: events.PeerKey
    request: RequestId
    rank: Rank
    started_at: float
    data: _Data | None = None
    slot: int | None = None
    digested: _Digested | None = None
    mapped: MappedPlan | None = None  # of a gather
    is_unwanted: bool = False  # its end is waited for, not its bytes
    is_cut: bool = False  # not all of it is read
    is_abandoned: bool = False
    error: str = ""  # it cannot be told whether it goes on, so it is abandoned too

    @property
    def warms_up(self) -> bool:
        """Whether it is for no request."""
        return self.request == WARM_UP

    def doubt(self, reason: str) -> None:
        """It cannot be told whether it goes on: who waits for it need not."""
        self.is_abandoned, self.error = not self.warms_up, reason

    @property
    def may_be_late(self) -> bool:
        """Whether a look at it may be late by a share of its time."""
        return self.warms_up or (self.data is not None and self.data.goes_on_alone)


class ReadAgent:
    """See the module's head."""

    def __init__(
        self,
        opened: Opened,
        peers: RemotePeers,
        background: Executor,
        counts: defaultdict[str, float],
        clock: Callable[[], float],
    ) -> None:
        """Start with no read.

        Args:
            opened: what `open_transport` gave.
            peers: that this rank may read.
            background: where they are prepared, see `PreparedPeers`.
            counts: the seconds that warming up took are added to them.
            clock: monotonic seconds.
        """
        self.transport = opened.transport
        self.peers = PreparedPeers(
            self.transport,
            peers,
            background,
            is_reading=self.is_reading,
            is_using=self.is_using,
            on_rank=self._warm_up,
        )
        self.reads: list[ActiveRead] = []
        self._layout = peers.layout
        self._clock = clock
        self._counts = counts
        self._slots, self._scratch = opened.slots, opened.scratch
        self._free_slots = list(range(self._slots.count))
        self._slot_list = self.transport.prepare(self._slots.rows(), "DRAM", None)
        self._indices = IndexBuffer()
        self._gather, self._digests = peers.means.gather, peers.means.digests
        self._wanted = peers.means.wanted
        self._num_ended = 0  # of `Gather.num_ended`, what has been dealt with
        self._at_once_bytes = AT_ONCE_BYTES  # left of this turn
        self._broken: set[events.PeerKey] = set()  # to be prepared anew: their connection broke
        self._breaks: list[events.PeerBroken] = []  # to be told

    def __repr__(self) -> str:
        return f"<ReadAgent: {len(self.reads)} reads, {self.peers!r}>"

    def is_reading(self, peer: events.PeerKey) -> bool:
        """Whether something of a peer is being read: then it must not be dropped.

        What warms up and cannot be told from what has ended writes where nobody looks.
        """
        return any(read.peer == peer and not (read.warms_up and read.error) for read in self.reads)

    def is_using(self, mapped: MappedPlan) -> bool:
        """Whether a kernel reads memory that is mapped so: then it must not be unmapped."""
        return any(read.mapped is mapped for read in self.reads)

    @property
    def is_busy(self) -> bool:
        """Whether a peer is being prepared, or the end of a read is waited for."""
        since = self._clock() - WARM_UP_S
        ends = any(not r.warms_up or (not r.error and r.started_at > since) for r in self.reads)
        return ends or self.peers.is_busy

    @property
    def pause_s(self) -> float:
        """How long it need not be looked at, in seconds, while it is busy."""
        now = self._clock()
        since = max((r.started_at if r.may_be_late else now for r in self.reads), default=now)
        return min(max(READING_PAUSE_S, (now - since) * PAUSE_SHARE), LONGEST_PAUSE_S)

    @property
    def is_drained(self) -> bool:
        """Whether nobody waits for anything of it, and no call of its transport is under way."""
        awaited = any(not (read.warms_up or read.is_abandoned) for read in self.reads)
        return not awaited and not self.peers.is_adding

    def start_read(self, action: events.StartRead) -> list[events.DataEvent] | None:
        """Post the data read of one load from one rank; what is known of it at once.

        None: it has to wait, until it is planned how that rank is read.
        """
        request, rank, load = action.load.request, action.rank, action.load
        try:
            prepared = self.peers.get(action.peer, rank)
            tokens = range(load.begin, load.end)
            pieces = prepared.plan.pieces(load.tables, action.grant.tables, tokens)
            num_bytes, num_runs = prepared.plan.num_bytes(pieces), prepared.plan.num_runs(pieces)
            if not num_bytes:
                return [events.ReadDone(request, rank)]
            paths, is_digested = self._paths(prepared), self._is_digested(prepared, action)
            path = self._choose(prepared, paths, num_runs, num_bytes)
            staged = self._staged_read(prepared, action) if path == "staged" else None
            if path == "staged" and staged is None:
                if self.peers.is_planning(action.peer, rank):
                    return None
                # It cannot be cut so that it fits.
                paths.remove("staged")
                path = self._choose(prepared, paths, num_runs, num_bytes)
            goes_on = path == "gather" or (path == "direct" and not self._is_paced(prepared))
            data = _Data(path, num_runs, num_bytes, goes_on)
            digested = mapped = None
            started_at = self._clock()
            if staged is not None:
                handle = staged
            elif path == "gather" and self._gather is not None:
                digested = self._digested(action) if is_digested else None
                wanted = None if digested is None else digested.wanted
                mapped = prepared.mapped
                handle = self._gather.read(mapped, pieces, wanted)
            else:
                indices = prepared.plan.indices(pieces, self._indices)
                handle = self.transport.read(prepared.local, prepared.remote_list, indices)
        except (TransportError, ValueError) as error:
            self._note(error, action.peer)
            return [events.ReadFailed(request, rank, str(error))]
        read = ActiveRead(handle, action.peer, request, rank, started_at, data)
        read.digested, read.mapped = digested, mapped
        self.reads.append(read)
        known = self._look_at(read) if num_bytes <= self._at_once_bytes else self._advance(read)
        self._at_once_bytes -= num_bytes
        return known

    def read_chunk(self, action: events.ReadChunk) -> list[events.DataEvent]:
        """Go on with a read by chunks, if it is one of this agent's."""
        wanted: list[events.DataEvent] = []
        for read in self._staged_reads(action.request, action.rank):
            read.handle.on_packed(action)
            wanted += self._advance(read)
        return wanted

    def stop_read(self, action: events.StopRead) -> None:
        """End a read of data as soon as can be, if it is one of this agent's."""
        for read in self.reads:
            is_meant = read.request == action.request and read.rank == action.rank
            read.is_unwanted |= is_meant and read.data is not None
        for staged in self._staged_reads(action.request, action.rank):
            staged.handle.stop()

    def read_slot(self, action: events.ReadSlot) -> list[events.DataEvent]:
        """Post the read of a generation slot, into an entry that is cleared beforehand."""
        if not self._free_slots:
            return [events.ReadFailed(action.request, action.rank, "too many slots are being read")]
        slot = self._free_slots.pop()
        self._slots.clear(slot)
        indices = (block_ids([slot]), block_ids([action.slot]))
        started_at = self._clock()
        try:
            prepared = self.peers.get(action.peer, action.rank)
            handle = self.transport.read(self._slot_list, prepared.slots, indices)
        except TransportError as error:
            self._note(error, action.peer)
            self._free_slots.append(slot)
            return [events.ReadFailed(action.request, action.rank, str(error))]
        read = ActiveRead(handle, action.peer, action.request, action.rank, started_at, slot=slot)
        self.reads.append(read)
        return self._look_at(read)

    def poll(self) -> list[events.DataEvent]:
        """Ask for the state of all reads; those that ended become events.

        A read that the thread dies of, by a bug, is not asked again: nor are those that have ended.
        """
        if self.peers.is_adding:
            return []
        self._unmap_ended()
        self._at_once_bytes = AT_ONCE_BYTES
        return [event for read in list(self.reads) for event in self._look_at(read)]

    def _look_at(self, read: ActiveRead) -> list[events.DataEvent]:
        """What is known of it; also when it was just posted: over shared memory it has ended."""
        try:
            known = self._advance(read)
            event = None if read.error else self._poll_read(read)
        except Exception as error:
            read.doubt(f"{type(error).__name__}: {error}")
            raise
        if event is None:
            return known
        self.reads.remove(read)
        if read.warms_up:
            self._on_warm(read, event)
            return known
        return [*known, event]

    def fail_all(self) -> list[events.DataEvent]:
        """All reads have failed, since this agent is gone."""
        reads, self.reads = self.reads, []
        for read in reads:
            if isinstance(read.handle, StagedRead):
                read.handle.release()
        return [
            events.ReadFailed(
                read.request,
                read.rank,
                f"{read.error or 'it did not end'}, and was stopped with its agent",
            )
            for read in reads
            if not read.warms_up
        ]

    def _unmap_ended(self) -> None:
        """Processes have ended whose memory is mapped: others may need it."""
        if self._gather is not None and self._num_ended != self._gather.num_ended:
            num_ended = self._gather.num_ended
            if self.peers.unmap_ended():
                self._num_ended = num_ended

    def drop_broken(self) -> None:
        """Those of which nothing is read any more; who reads them next prepares them anew."""
        for peer in list(self._broken):
            if not self.is_reading(peer) and not self.peers.is_preparing(peer):
                self._broken.remove(peer)
                self.peers.drop(peer, is_lost=True)

    def close(self) -> None:
        """End its transport: nothing of it writes any more. Kernels end by themselves.

        Raises:
            TransportError: if that cannot be proven; it may be called again.
        """
        if self._gather is not None:
            self._gather.wait()  # before anything is unmapped that a kernel reads
        self.peers.close()
        self.peers.unmap_all()
        for read in self.reads:
            if isinstance(read.handle, StagedRead):
                read.handle.end_copies()
        self.transport.close()

    def _warm_up(self, peer: events.PeerKey, prepared: PreparedRank) -> None:
        """Read a slot, and some bytes of its cache; if that fails, the next read will say so."""
        if sum(read.warms_up for read in self.reads) + 2 > MAX_WARM_UPS:
            return
        try:
            self._warm_up_data(peer, prepared)
            self._warm_up_slot(peer, prepared)
        except TransportError as error:
            logger.info("the first read of %s failed: %s", peer, error)
            self._note(error, peer)

    def _warm_up_data(self, peer: events.PeerKey, prepared: PreparedRank) -> None:
        """As many pieces as it takes to use all of the transport's connections to the rank."""
        spread = self.transport.spread(prepared.name)
        if self._scratch is None or not spread:  # the slot's read connects
            return
        lengths = prepared.sample_lengths
        into = [(self._scratch.span.address, n, self._layout.device, n, 1) for n in lengths]
        rows: Rows = np.array(into, dtype=np.uint64)
        local = self.transport.prepare(rows, self._layout.memory, None)
        times = -(-spread // len(lengths))
        pieces: Indices = np.tile(np.arange(len(lengths), dtype=np.int32), times)
        self._post_warm_up(peer, prepared, (local, prepared.sample), (pieces, pieces))

    def _warm_up_slot(self, peer: events.PeerKey, prepared: PreparedRank) -> None:
        if self._free_slots:
            slot = self._free_slots.pop()
            pieces = block_ids([slot]), block_ids([0])
            lists = self._slot_list, prepared.slots
            self._post_warm_up(peer, prepared, lists, pieces, slot=slot)

    def _post_warm_up(
        self,
        peer: events.PeerKey,
        prepared: PreparedRank,
        lists: tuple[ListHandle, ListHandle],
        pieces: tuple[Indices, Indices],
        *,
        slot: int | None = None,
    ) -> None:
        started_at = self._clock()
        try:
            handle = self.transport.read(*lists, pieces)
        except TransportError:
            if slot is not None:
                self._free_slots.append(slot)
            raise
        self.reads.append(ActiveRead(handle, peer, WARM_UP, prepared.rank, started_at, slot=slot))

    def _on_warm(self, read: ActiveRead, event: events.DataEvent) -> None:
        if isinstance(event, events.ReadFailed):
            logger.info("the first read of %s failed: %s", read.peer, event.reason)
        else:
            self._counts["warm_ups"] += 1
            self._counts["warm_up_seconds"] += self._clock() - read.started_at

    def _note(self, error: Exception, peer: events.PeerKey) -> None:
        """NIXL does not connect again by itself: all later reads of that peer would fail, too."""
        if isinstance(error, PeerLost):
            self._break(peer, str(error))

    def _break(self, peer: events.PeerKey, reason: str) -> None:
        """Say so once for each connection, however many reads it costs."""
        if peer not in self._broken:
            self._broken.add(peer)
            self._breaks.append(events.PeerBroken(peer, reason))

    def pop_breaks(self) -> list[events.PeerBroken]:
        """The peers whose connection broke since the last call."""
        breaks, self._breaks = self._breaks, []
        return breaks

    def _poll_read(self, read: ActiveRead) -> events.DataEvent | None:
        try:
            if not self._poll_handle(read):
                return None
        except PeerLost as error:
            self._note(error, read.peer)
            if read.slot is not None:
                self._free_slots.append(read.slot)
            return events.ReadFailed(read.request, read.rank, str(error))
        except TransportError as error:
            read.doubt(str(error))
            return None
        if isinstance(read.handle, StagedRead) and read.data is not None:
            staged = read.handle
            if staged.is_lost:
                self._break(read.peer, staged.failure or "a chunk could not be read")
            if staged.failure is not None:
                return events.ReadFailed(read.request, read.rank, staged.failure)
        if read.slot is not None:
            generation = self._slots.read(read.slot)
            self._free_slots.append(read.slot)
            return events.SlotRead(read.request, read.rank, generation)
        return self._end_data(read)

    def _end_data(self, read: ActiveRead) -> events.DataEvent:
        """All that was read has landed."""
        if read.is_cut:
            return events.ReadFailed(read.request, read.rank, STOPPED)
        if read.digested is not None and self._gather is not None:
            read.digested.keep(self._gather.digest(read.handle))
        return _read_done(read, self._clock() - read.started_at)

    def _is_digested(self, prepared: PreparedRank, action: events.StartRead) -> bool:
        """Whether it is digested while it is gathered, if it is gathered."""
        gather, mapped = self._gather, prepared.mapped
        if not action.slices or gather is None or mapped is None or self._digests is None:
            return False
        return gather.can_digest(mapped)

    def _digested(self, action: events.StartRead) -> _Digested | None:
        """What is digested while it is gathered."""
        if self._digests is None:
            return None
        landing = events.DigestLanded(action.rank, action.slices, action.load, action.grant.claim)
        return _Digested(self._digests, landing, self._digests.find_slices(landing))

    def _poll_handle(self, read: ActiveRead) -> bool:
        if isinstance(read.handle, StagedRead):
            return read.handle.has_ended
        if read.data is not None and read.data.path == "gather" and self._gather is not None:
            return self._gather.poll(read.handle)
        if read.is_unwanted and not read.is_cut:
            read.is_cut = self.transport.stop(read.handle)
        return self.transport.poll(read.handle)

    def _choose(
        self, prepared: PreparedRank, paths: list[Path], num_runs: int, num_bytes: int
    ) -> Path:
        return choose(
            paths,
            num_runs,
            num_bytes,
            memory=self._layout.memory,
            is_tcp=self._is_paced(prepared),
            wanted=self._wanted,
        )

    def _is_paced(self, prepared: PreparedRank) -> bool:
        return self.transport.spread(prepared.name) == 0

    def _staged_reads(self, request: RequestId, rank: Rank) -> list[ActiveRead]:
        """At most one, but after a restart."""
        return [
            read
            for read in self.reads
            if read.request == request and read.rank == rank and isinstance(read.handle, StagedRead)
        ]

    def _advance(self, read: ActiveRead) -> list[events.DataEvent]:
        """Look after the chunks of a read, if it has some; those that are to be asked for."""
        if not isinstance(read.handle, StagedRead) or read.error or self.peers.is_adding:
            return []
        try:
            return read.handle.advance()
        except TransportError as error:
            read.doubt(str(error))
            return []

    def _staged_read(self, prepared: PreparedRank, action: events.StartRead) -> StagedRead | None:
        """The read by chunks, if it can be."""
        staged = self.peers.stage(prepared)
        try:
            return None if staged is None else StagedRead(staged, action)
        except ValueError as error:
            logger.debug("request %s is not read by chunks: %s", action.load.request, error)
            return None

    def _paths(self, prepared: PreparedRank) -> list[Path]:
        """By which ways it can be read; whether by chunks is known when that is planned."""
        paths: list[Path] = ["direct"]
        mapped = prepared.mapped
        if self._gather is not None and mapped is not None and self._gather.is_mapped(mapped):
            paths.insert(0, "gather")
        if self.peers.may_stage(prepared):
            paths.append("staged")
        return paths


def _read_done(read: ActiveRead, seconds: float) -> events.ReadDone:
    """All of it has landed."""
    data = read.data
    if data is None:
        return events.ReadDone(read.request, read.rank, seconds=seconds)
    return events.ReadDone(
        read.request, read.rank, data.num_bytes, data.num_runs, seconds, data.path
    )
