"""Reads of one rank: plans per peer rank, prepared lists, what is under way.

Knows the geometry and the transport; what a read is for, and what follows from its end, is the
protocol's affair. Runs on the transfer thread alone.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.errors import IncompatiblePeer, NixlKVError, TransportError
from nixl_kv.geometry import blocks, compat, ranks
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.geometry.ranks import Shape
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.messages import Description, Grant
from nixl_kv.transport.base import ListHandle, PeerName, ReadHandle, Transport
from nixl_kv.transport.slots import SlotPage, slot_rows

NULL_BLOCK: Final = 0
"""vLLM's placeholder in a block table, where a sliding window has passed."""

CHECKS: Final = 4096
"""Slots that can be read at the same time."""

SHOWN_MISMATCHES: Final = 4


@dataclass(frozen=True)
class Identity:
    """What this engine is: its model's facts, its shape, and which of its ranks this one is."""

    model: Mapping[str, str]
    shape: Shape
    rank: Rank


@dataclass(frozen=True)
class _Source:
    """One peer rank, ready to be read."""

    peer: PeerName
    plan: Plan
    local: ListHandle
    remote: ListHandle
    slots: ListHandle


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
    """Peers that can be read, and the reads."""

    def __init__(self, transport: Transport, layout: CacheLayout, identity: Identity) -> None:
        """Register this rank's cache, and a page of scratch for slots that are read."""
        self._transport = transport
        self._layout = layout
        self._identity = identity
        self._peers: dict[PeerKey, dict[Rank, _Source]] = {}
        self._running: list[_Running] = []
        self._timings: dict[tuple[RequestId, Rank], _Timing] = {}
        self._scratch = SlotPage(CHECKS)
        self._free_checks = list(range(CHECKS))
        for span in layout.spans:
            transport.register(span, layout.memory, layout.device)
        transport.register(self._scratch.span, "DRAM", 0)
        self._checks = transport.prepare(self._scratch.rows(), "DRAM", None)

    def __repr__(self) -> str:
        """Peers and reads."""
        return f"<DataPlane: {len(self._peers)} peers, {len(self._running)} reads>"

    @property
    def busy(self) -> bool:
        """Whether a read is under way."""
        return bool(self._running)

    def add_peer(self, action: events.AddPeer) -> events.DataEvent:
        """Check a description, load the peer's metadata, plan, and prepare the lists."""
        try:
            self._check_fit(action.description)
            self._peers[action.peer] = self._join(action.description)
        except (NixlKVError, IndexError) as error:
            return events.PeerRefused(action.peer, str(error))
        return events.PeerJoined(action.peer, action.description)

    def drop_peer(self, peer: PeerKey) -> None:
        """Forget a peer that nothing reads any more."""
        for source in self._peers.pop(peer, {}).values():
            self._transport.drop_peer(source.peer)

    def start(self, action: events.StartRead) -> events.DataEvent | None:
        """Post the data read of one request from one rank."""
        request, rank = action.load.request, action.source
        try:
            source = self._source(action.peer, rank)
            reads = source.plan.reads(self._pairs(action.load, action.grant))
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
            source = self._source(action.peer, action.source)
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

    def _source(self, peer: PeerKey, rank: Rank) -> _Source:
        if peer not in self._peers:
            raise TransportError(f"engine {peer.engine!r} is gone")
        return self._peers[peer][rank]

    def _check_fit(self, description: Description) -> None:
        found = compat.model_mismatches(self._identity.model, description.model)
        found += compat.shape_mismatches(self._identity.shape, description.shape)
        if not found:
            for rank in ranks.sources(self._identity.rank):
                found += compat.mismatches(self._layout, description.ranks[rank].layout)
        if found:
            more = len(found) - SHOWN_MISMATCHES
            shown = "; ".join(map(str, found[:SHOWN_MISMATCHES]))
            raise IncompatiblePeer(
                f"engine {description.engine!r} cannot be read: {shown}"
                + (f"; and {more} more" if more > 0 else "")
            )

    def _join(self, description: Description) -> dict[Rank, _Source]:
        sources: dict[Rank, _Source] = {}
        for rank in ranks.sources(self._identity.rank):
            there = description.ranks[rank]
            peer = self._transport.add_peer(there.agent)
            planned = plan(self._layout, there.layout)
            sources[rank] = _Source(
                peer,
                planned,
                self._transport.prepare(planned.local, self._layout.memory, None),
                self._transport.prepare(planned.remote, there.layout.memory, peer),
                self._transport.prepare(
                    slot_rows(there.slots.address, there.slots.count), "DRAM", peer
                ),
            )
        return sources

    def _pairs(
        self, load: events.Load, grant: Grant
    ) -> list[tuple[blocks.BlockIds, blocks.BlockIds]]:
        """For each group, which local block is filled from which remote one."""
        pairs = []
        layout = zip(self._layout.groups, load.first, load.tables, grant.tables, strict=True)
        for group, first, local_table, remote_table in layout:
            local = blocks.block_ids(local_table)
            remote = blocks.block_ids(remote_table)[first : first + len(local)]
            local, remote = blocks.pair(local, remote, absent=NULL_BLOCK)
            expanded = [blocks.expand(ids, group.blocks_per_entry) for ids in (local, remote)]
            pairs.append((expanded[0], expanded[1]))
        return pairs
