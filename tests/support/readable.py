"""A prefill rank's memory that others may read, without its machines."""

import msgspec

from harness.local.caches import Cache, Sizes
from harness.local.engine import MODEL
from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.protocol.messages import Description, RankDescription, Slots
from nixl_kv.reading.agent import register
from nixl_kv.transport.base import SlotPage
from support.records import description


class ReadableRank:
    """A filled cache and a page of slots on a fabric, and the description of its engine."""

    def __init__(self, fabric: Fabric, sizes: Sizes, seed: int = 1, first_head: int = 0) -> None:
        self.cache = Cache(sizes, first_head=first_head).fill(seed)
        self.slots = SlotPage(8)
        self.transport = MemoryTransport(fabric)
        register(self.transport, self.cache.layout(), self.slots)

    def described(self, number: int = 0) -> RankDescription:
        return msgspec.structs.replace(
            description(number + 1).ranks[number],
            agent=self.transport.metadata(),
            slots=Slots(address=self.slots.address, count=self.slots.count),
            layout=self.cache.layout(),
        )


def engine_of(*ranks: ReadableRank) -> Description:
    """The description of an engine that consists of these ranks."""
    described = tuple(rank.described(number) for number, rank in enumerate(ranks))
    return msgspec.structs.replace(description(len(ranks)), model=dict(MODEL), ranks=described)
