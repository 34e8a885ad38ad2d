"""One agent that reads: the peers that it has prepared, and its reads under way.

It knows the geometry and the transport; what a read is for, and what follows from its end, is the
protocol's affair. Runs on the transfer thread alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry import blocks
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import IndexBuffer
from nixl_kv.geometry.slices import slices_read
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.transfer.digests import block_tables
from nixl_kv.transfer.remote_peers import PreparedPeers, RemotePeers
from nixl_kv.transport.base import ReadHandle, Transport
from nixl_kv.transport.slots import SlotPage

MAX_SLOT_READS: Final = 4096
"""Slots that can be read at the same time."""


def open_transport(
    make: Callable[[], Transport], layout: CacheLayout
) -> tuple[Transport, SlotPage]:
    """Make a transport that may write into this rank's cache, and into a page for slots it reads.

    Slow; runs on any thread.

    Raises:
        TransportError: if it cannot be created, or does not accept the memory.
    """
    transport, slots = make(), SlotPage(MAX_SLOT_READS)
    register(transport, layout, slots)
    return transport, slots


def register(transport: Transport, layout: CacheLayout, slots: SlotPage) -> None:
    """Let a transport use this rank's cache and a page of slots: its own, or for those it reads.

    Raises:
        TransportError: if the transport does not accept the memory.
    """
    for span in layout.spans:
        transport.register(span, layout.memory, layout.device)
    transport.register(slots.span, "DRAM", 0)


@dataclass
class ActiveRead:
    """A read under way: of data, or of a slot into the entry `slot` of this side's page."""

    handle: ReadHandle
    peer: events.PeerKey
    request: RequestId
    rank: Rank
    started_at: float
    num_bytes: int = 0
    num_runs: int = 0
    slot: int | None = None
    is_abandoned: bool = False
    error: str = ""  # it cannot be told whether it goes on, so it is abandoned too


class ReadAgent:
    """See the module's head."""

    def __init__(
        self,
        transport: Transport,
        slots: SlotPage,
        peers: RemotePeers,
        clock: Callable[[], float],
    ) -> None:
        """Start with no read, on what `open_transport` gave. `clock` is in monotonic seconds."""
        self.transport = transport
        self.peers = PreparedPeers(transport, peers)
        self.reads: list[ActiveRead] = []
        self._layout = peers.layout
        self._clock = clock
        self._slots = slots
        self._free_slots = list(range(slots.count))
        self._slot_list = transport.prepare(slots.rows(), "DRAM", None)
        self._indices = IndexBuffer()
        self._broken: set[events.PeerKey] = set()  # to be prepared anew: their connection broke

    def __repr__(self) -> str:
        return f"<ReadAgent: {len(self.reads)} reads, {self.peers!r}>"

    def is_reading(self, peer: events.PeerKey) -> bool:
        """Whether something of a peer is being read: then it must not be dropped."""
        return any(read.peer == peer for read in self.reads)

    def start_read(self, action: events.StartRead) -> list[events.DataEvent]:
        """Post the data read of one load from one rank; what is known of it at once."""
        request, rank, load = action.load.request, action.rank, action.load
        try:
            self._drop_broken()
            prepared = self.peers.get(action.peer, rank)
            reads = prepared.plan.reads(
                load.tables,
                action.grant.tables,
                range(load.begin, load.end),
                buffer=self._indices,
            )
            if not len(reads.local):
                return [events.ReadDone(request, rank)]
            started_at = self._clock()
            indices = (reads.local, reads.remote)
            handle = self.transport.read(prepared.local, prepared.remote, indices)
        except (TransportError, ValueError) as error:
            self._note(error, action.peer)
            return [events.ReadFailed(request, rank, str(error))]
        self.reads.append(
            ActiveRead(
                handle, action.peer, request, rank, started_at, reads.num_bytes, reads.num_runs
            )
        )
        if not load.verify:
            return []
        tables = block_tables(self._layout, load.tables)
        slices = slices_read(self._layout, prepared.share, tables, prepared.holdings)
        return [events.ReadStarted(request, rank, slices)]

    def read_slot(self, action: events.ReadSlot) -> list[events.DataEvent]:
        """Post the read of a generation slot, into an entry that is cleared beforehand."""
        if not self._free_slots:
            return [events.ReadFailed(action.request, action.rank, "too many slots are being read")]
        slot = self._free_slots.pop()
        self._slots.clear(slot)
        indices = (blocks.block_ids([slot]), blocks.block_ids([action.slot]))
        started_at = self._clock()
        try:
            prepared = self.peers.get(action.peer, action.rank)
            handle = self.transport.read(self._slot_list, prepared.slots, indices)
        except TransportError as error:
            self._note(error, action.peer)
            self._free_slots.append(slot)
            return [events.ReadFailed(action.request, action.rank, str(error))]
        self.reads.append(
            ActiveRead(handle, action.peer, action.request, action.rank, started_at, slot=slot)
        )
        return []

    def poll(self) -> list[events.DataEvent]:
        """Ask for the state of all reads; those that ended become events."""
        ended: list[events.DataEvent] = []
        active: list[ActiveRead] = []
        for read in self.reads:
            event = None if read.error else self._poll_read(read)
            if event is None:
                active.append(read)
            else:
                ended.append(event)
        self.reads = active
        return ended

    def fail_all(self) -> list[events.DataEvent]:
        """All reads have failed, since this agent is gone."""
        reads, self.reads = self.reads, []
        return [
            events.ReadFailed(
                read.request,
                read.rank,
                f"{read.error or 'it did not end'}, and was stopped with its agent",
            )
            for read in reads
        ]

    def _note(self, error: Exception, peer: events.PeerKey) -> None:
        """NIXL does not connect again by itself: all later reads of that peer would fail, too."""
        if isinstance(error, PeerLost):
            self._broken.add(peer)

    def _drop_broken(self) -> None:
        """Those of which nothing is read any more; who reads them next prepares them anew."""
        for peer in [peer for peer in self._broken if not self.is_reading(peer)]:
            self._broken.remove(peer)
            self.peers.drop(peer)

    def _poll_read(self, read: ActiveRead) -> events.DataEvent | None:
        try:
            if not self.transport.poll(read.handle):
                return None
        except PeerLost as error:
            self._note(error, read.peer)
            if read.slot is not None:
                self._free_slots.append(read.slot)
            return events.ReadFailed(read.request, read.rank, str(error))
        except TransportError as error:
            read.is_abandoned, read.error = True, str(error)
            return None
        if read.slot is None:
            seconds = self._clock() - read.started_at
            return events.ReadDone(read.request, read.rank, read.num_bytes, read.num_runs, seconds)
        generation = self._slots.read(read.slot)
        self._free_slots.append(read.slot)
        return events.SlotRead(read.request, read.rank, generation)
