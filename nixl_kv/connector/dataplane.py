"""Reads of one rank: what is under way, and what has come of it.

Knows the geometry and the transport; what a read is for, and what follows from its end, is the
protocol's affair. Runs on the transfer thread alone.
"""

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from nixl_kv.connector.holds import NULL_BLOCK
from nixl_kv.connector.sources import Identity, Sources
from nixl_kv.errors import TransportError
from nixl_kv.geometry import blocks
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import Plan, Reads, Scratch
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.transport.base import ReadHandle, Transport
from nixl_kv.transport.slots import SlotPage

CHECKS: Final = 4096
"""Slots that can be read at the same time."""


@dataclass(frozen=True)
class Transferred:
    """One read of data that was proven good; for the counters."""

    num_bytes: int
    num_runs: int
    seconds: float


@dataclass
class _Running:
    """A read under way. `check` is the scratch slot that it fills, None for data."""

    handle: ReadHandle
    request: RequestId
    source: Rank
    check: int | None = None


@dataclass
class _Timing:
    num_bytes: int
    num_runs: int
    begun_at: float = field(default_factory=time.monotonic)


class DataPlane:
    """The reads of one rank; `sources` are the peers that can be read."""

    def __init__(self, transport: Transport, layout: CacheLayout, identity: Identity) -> None:
        """Register this rank's cache, and a page of scratch for slots that are read."""
        self._transport = transport
        self.sources = Sources(transport, layout, identity)
        self._running: list[_Running] = []
        self._timings: dict[tuple[RequestId, Rank], _Timing] = {}
        self._scratch = SlotPage(CHECKS)
        self._free_checks = list(range(CHECKS))
        self._indices = Scratch()
        for span in layout.spans:
            transport.register(span, layout.memory, layout.device)
        transport.register(self._scratch.span, "DRAM", 0)
        self._checks = transport.prepare(self._scratch.rows(), "DRAM", None)

    def __repr__(self) -> str:
        """Peers and reads."""
        return f"<DataPlane: {len(self._running)} reads, {self.sources!r}>"

    @property
    def busy(self) -> bool:
        """Whether a read is under way."""
        return bool(self._running)

    def start(self, action: events.StartRead) -> events.DataEvent | None:
        """Post the data read of one request from one rank."""
        request, rank = action.load.request, action.source
        try:
            source = self.sources.get(action.peer, rank)
            reads = _reads(source.plan, action, self._indices)
            if not len(reads.local):
                return events.ReadDone(request, rank)
            self._timings[request, rank] = _Timing(reads.num_bytes, reads.num_runs)
            indices = (reads.local, reads.remote)
            handle = self._transport.read(source.local, source.remote, indices)
        except (TransportError, ValueError) as error:
            return events.ReadFailed(request, rank, str(error))
        self._running.append(_Running(handle, request, rank))
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
            handle = self._transport.read(self._checks, source.slots, indices)
        except TransportError as error:
            self._free_checks.append(scratch)
            return events.ReadFailed(action.request, action.source, str(error))
        self._running.append(_Running(handle, action.request, action.source, scratch))
        return None

    def poll(self) -> list[events.DataEvent]:
        """Look after all reads; those that ended become events."""
        ended: list[events.DataEvent] = []
        still: list[_Running] = []
        for read in self._running:
            event = self._look(read)
            if event is None:
                still.append(read)
            else:
                ended.append(event)
        self._running = still
        return ended

    def finished(self, request: RequestId) -> list[Transferred]:
        """The figures of a request's reads; told once."""
        now = time.monotonic()
        keys = [key for key in self._timings if key[0] == request]
        timings = [self._timings.pop(key) for key in keys]
        return [Transferred(t.num_bytes, t.num_runs, now - t.begun_at) for t in timings]

    def _look(self, read: _Running) -> events.DataEvent | None:
        try:
            if not self._transport.poll(read.handle):
                return None
        except TransportError as error:
            if read.check is not None:
                self._free_checks.append(read.check)
            return events.ReadFailed(read.request, read.source, str(error))
        if read.check is None:
            return events.ReadDone(read.request, read.source)
        generation = self._scratch.read(read.check)
        self._free_checks.append(read.check)
        return events.SlotRead(read.request, read.source, generation)


def _reads(planned: Plan, action: events.StartRead, scratch: Scratch) -> Reads:
    """Which pieces to read, from the block tables of both sides."""
    load, grant = action.load, action.grant
    local, remote = (
        [_mark_absent(blocks.block_ids(table)) for table in tables]
        for tables in (load.tables, grant.tables)
    )
    return planned.reads(local, remote, range(load.begin, load.end), scratch=scratch)


def _mark_absent(ids: blocks.BlockIds) -> blocks.BlockIds:
    """The null block stands where a sliding window has passed."""
    return np.where(ids == NULL_BLOCK, np.int32(blocks.ABSENT), ids)
