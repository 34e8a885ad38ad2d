"""A gather inside one process: addresses are as their owner has them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from nixl_kv.errors import TransportError
from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.protocol import messages
from nixl_kv.reading.copying.tiles import Tiling
from support.oracle import tile_pairs

TILE_BYTES = 256

EXPORT = messages.Export(
    host="here",
    pid=1,
    started=2,
    allocations=(messages.Allocation(address=4096, length=64, handle=b"handle"),),
    proof=messages.Proof(address=4096, value=b"0123456789abcdef"),
)


@dataclass(eq=False)
class Mapped:
    tiling: Tiling
    has_owner: bool = True


@dataclass(eq=False)
class MemoryRead:
    mapped: Mapped
    pieces: Sequence[Pieces]
    polls: int

    def land(self) -> None:
        for local, remote in tile_pairs(self.mapped.tiling, self.pieces, TILE_BYTES).tolist():
            ctypes.memmove(local, remote, 1)


@dataclass
class MemoryGather:
    """So many looks at a read find it under way: the first one is when it is started."""

    polls: int = 1
    is_able: bool = True  # to map memory
    num_ended: int = 0
    mapped: list[Mapped] = field(default_factory=list)
    num_reads: int = 0
    num_waits: int = 0
    is_closed: bool = False

    def map(self, exported: messages.Export, plan: Plan) -> Mapped:
        if not self.is_able:
            raise TransportError(f"process {exported.pid} is not seen here")
        self.mapped.append(Mapped(Tiling(plan, lambda first, _: first)))
        return self.mapped[-1]

    def unmap(self, mapped: Mapped) -> None:
        self.mapped.remove(mapped)

    def is_mapped(self, mapped: Mapped) -> bool:
        return mapped.has_owner

    def end_owners(self) -> None:
        """All processes whose memory is mapped end."""
        for mapped in self.mapped:
            mapped.has_owner = False
        self.num_ended += 1

    def read(self, mapped: Mapped, pieces: Sequence[Pieces]) -> MemoryRead:
        assert mapped in self.mapped, "it was unmapped"
        self.num_reads += 1
        return MemoryRead(mapped, pieces, self.polls)

    def poll(self, read: MemoryRead) -> bool:
        if read.polls == 0:
            read.land()
        read.polls -= 1
        return read.polls < 0

    def wait(self) -> None:
        self.num_waits += 1

    def close(self) -> None:
        self.is_closed = True
