"""A decode rank's agent and the memory of prefill ranks that it reads, without their machines."""

import dataclasses
from collections.abc import Sequence

from msgspec.structs import replace

from harness.local.caches import Cache, Sizes
from harness.local.engine import MODEL
from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.geometry.layout import Memory, Table
from nixl_kv.ids import Rank
from nixl_kv.protocol.events import Counts, DataEvent, PeerKey, StartLoad, StartRead
from nixl_kv.protocol.messages import Description, RankDescription, Slots, StagingRing
from nixl_kv.reading.agent import ReadAgent, open_transport, register
from nixl_kv.reading.paths import ReadPath
from nixl_kv.reading.peers import RemotePeers
from nixl_kv.transport.base import SlotPage
from support.records import D1, EXPORT, PEER, description, grant
from support.stepped import Background, Clock

SIZES = Sizes()
R0 = Rank(0)
RING = StagingRing(address=1 << 20, length=1 << 20, num_slots=4)


class ReadableRank:
    """A filled cache and a page of slots on a fabric, and the description of its engine."""

    def __init__(self, fabric: Fabric, sizes: Sizes, seed: int = 1, first_head: int = 0) -> None:
        self.cache = Cache(sizes, first_head=first_head).fill(seed)
        self.slots = SlotPage(8)
        self.transport = MemoryTransport(fabric)
        register(self.transport, self.cache.layout(), self.slots)

    def described(self, number: int = 0) -> RankDescription:
        return replace(
            description(number + 1).ranks[number],
            agent=self.transport.metadata(),
            slots=Slots(address=self.slots.address, count=self.slots.count),
            layout=self.cache.layout(),
        )


def engine_of(*ranks: ReadableRank) -> Description:
    """The description of an engine that consists of these ranks."""
    described = tuple(rank.described(number) for number, rank in enumerate(ranks))
    return replace(description(len(ranks)), model=dict(MODEL), ranks=described)


class Reading:
    """A decode rank's agent, and the prefill rank that it reads."""

    def __init__(
        self, paths: Sequence[ReadPath] = (), sizes: Sizes = SIZES, memory: Memory = "VRAM"
    ) -> None:
        self.fabric, self.clock = Fabric(), Clock()
        self.prefill = ReadableRank(self.fabric, sizes)
        self.cache = Cache(sizes).fill(2)
        layout = dataclasses.replace(self.cache.layout(), memory=memory)
        self.peers = RemotePeers(layout, R0, MODEL, paths=paths)
        engine = engine_of(self.prefill)
        ranks = tuple(replace(rank, export=EXPORT, ring=RING) for rank in engine.ranks)
        described = replace(engine, ranks=ranks)
        self.peers.descriptions[PEER] = described
        opened = open_transport(lambda: MemoryTransport(self.fabric), layout)
        self.counts = Counts()
        self.agent = ReadAgent(opened, self.peers, Background(), self.counts, self.clock)
        self.prepare()
        while self.agent.warm_ups:
            assert self.agent.poll() == []
        self.counts.pop()
        self.fabric.bytes_copied = 0

    def prepare(self) -> None:
        description = self.peers.descriptions[PEER]
        self.agent.ranks.prepare(PEER, description, self.peers.routes(description))
        while self.agent.ranks.is_busy:
            self.agent.ranks.collect()
            self.agent.ranks.begin_next()

    def start(
        self,
        local: list[int],
        remote: list[int],
        tokens: range,
        *,
        verify: bool = False,
        peer: PeerKey = PEER,
        slot: int = 3,
    ) -> list[DataEvent]:
        """Start a read; return the events that come at once."""
        load = StartLoad(D1, tokens.start, tokens.stop, (Table.of(local),), verify)
        granted = grant(tables=(Table.of(remote),), slot=slot)
        rank = self.agent.ranks.find(peer, R0)
        return self.agent.start(StartRead(peer, R0, granted, load), rank) or []

    def read_slot(self, slot: int, peer: PeerKey = PEER) -> list[DataEvent]:
        """The same of a read without data, of which only the fence slot is read."""
        return self.start([-1, -1], [7, 3], range(8), peer=peer, slot=slot)
