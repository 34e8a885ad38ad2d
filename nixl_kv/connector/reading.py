"""One agent that reads: the peers it knows, and its reads under way.

Knows the geometry and the transport; what a read is for, and what follows from its end, is the
protocol's affair. Runs on the transfer thread alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nixl_kv.connector.digests import mark_absent
from nixl_kv.connector.registering import CHECKS, Opened
from nixl_kv.connector.results import Transferred
from nixl_kv.connector.sources import Sources
from nixl_kv.errors import TransportError
from nixl_kv.geometry import blocks
from nixl_kv.geometry.plan import Plan, Reads, Scratch
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.transport.base import ReadHandle

Key = tuple[RequestId, Rank]


@dataclass
class Running:
    """A read under way. `check` is the scratch slot that it fills, None for data."""

    handle: ReadHandle
    request: RequestId
    source: Rank
    check: int | None = None
    abandoned: bool = False


@dataclass
class _Timing:
    num_bytes: int
    num_runs: int
    begun_at: float
    ended_at: float | None = None


class ReadAgent:
    """See the module's head. `sources` are the peers that it can read."""

    def __init__(
        self,
        opened: Opened,
        sources: Sources,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with no read."""
        self.transport = opened.transport
        self._scratch = opened.scratch
        self.sources = sources
        self.running: list[Running] = []
        self._clock = clock
        self._timings: dict[Key, _Timing] = {}
        self._free_checks = list(range(CHECKS))
        self._indices = Scratch()
        self._checks = self.transport.prepare(self._scratch.rows(), "DRAM", None)

    def __repr__(self) -> str:
        """Peers and reads."""
        return f"<ReadAgent: {len(self.running)} reads, {self.sources!r}>"

    @property
    def stuck(self) -> bool:
        """Whether a read is left that nobody waits for any longer."""
        return any(read.abandoned for read in self.running)

    @property
    def hopeless(self) -> bool:
        """Whether nothing is left but such reads."""
        return all(read.abandoned for read in self.running)

    def start(self, action: events.StartRead) -> events.DataEvent | None:
        """Post the data read of one request from one rank."""
        request, rank = action.load.request, action.source
        try:
            source = self.sources.get(action.peer, rank)
            reads = _reads(source.plan, action, self._indices)
            if not len(reads.local):
                return events.ReadDone(request, rank)
            begun_at = self._clock()
            indices = (reads.local, reads.remote)
            handle = self.transport.read(source.local, source.remote, indices)
        except (TransportError, ValueError) as error:
            return events.ReadFailed(request, rank, str(error))
        self._timings[request, rank] = _Timing(reads.num_bytes, reads.num_runs, begun_at)
        self.running.append(Running(handle, request, rank))
        return None

    def check(self, action: events.CheckSlot) -> events.DataEvent | None:
        """Post the read of a generation slot, into scratch that says nothing good beforehand."""
        if not self._free_checks:
            return events.ReadFailed(action.request, action.source, "no scratch slot is free")
        scratch = self._free_checks.pop()
        self._scratch.clear(scratch)
        indices = (blocks.block_ids([scratch]), blocks.block_ids([action.slot]))
        try:
            source = self.sources.get(action.peer, action.source)
            handle = self.transport.read(self._checks, source.slots, indices)
        except TransportError as error:
            self._free_checks.append(scratch)
            return events.ReadFailed(action.request, action.source, str(error))
        self.running.append(Running(handle, action.request, action.source, scratch))
        return None

    def poll(self) -> list[events.DataEvent]:
        """Look after all reads; those that ended become events."""
        ended: list[events.DataEvent] = []
        still: list[Running] = []
        for read in self.running:
            event = self._look(read)
            if event is None:
                still.append(read)
            else:
                ended.append(event)
        self.running = still
        return ended

    def finished(self, request: RequestId) -> list[Transferred]:
        """The figures of a request's reads; told once."""
        now = self._clock()
        keys = [key for key in self._timings if key[0] == request]
        timings = [self._timings.pop(key) for key in keys]
        return [
            Transferred(t.num_bytes, t.num_runs, (t.ended_at or now) - t.begun_at) for t in timings
        ]

    def stopped(self) -> list[events.DataEvent]:
        """All reads have failed, since this agent is gone."""
        running, self.running = self.running, []
        told = "it did not end, and was stopped with its agent"
        return [events.ReadFailed(read.request, read.source, told) for read in running]

    def _look(self, read: Running) -> events.DataEvent | None:
        try:
            if not self.transport.poll(read.handle):
                return None
        except TransportError as error:
            if read.check is not None:
                self._free_checks.append(read.check)
            return events.ReadFailed(read.request, read.source, str(error))
        if read.check is None:
            timing = self._timings.get((read.request, read.source))
            if timing is not None:  # or else its request was reported without it
                timing.ended_at = self._clock()
            return events.ReadDone(read.request, read.source)
        generation = self._scratch.read(read.check)
        self._free_checks.append(read.check)
        return events.SlotRead(read.request, read.source, generation)


def _reads(planned: Plan, action: events.StartRead, scratch: Scratch) -> Reads:
    """Which pieces to read, from the block tables of both sides."""
    load, grant = action.load, action.grant
    local, remote = (
        [mark_absent(blocks.block_ids(table)) for table in tables]
        for tables in (load.tables, grant.tables)
    )
    return planned.reads(local, remote, range(load.begin, load.end), scratch=scratch)
