"""A gather inside one process: addresses are as their owner has them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from nixl_kv.errors import TransportError
from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.geometry.tiles import Tiling
from nixl_kv.protocol import messages
from support.oracle import tile_pairs

EXPORT = messages.Export(
    host="here",
    pid=1,
    started=2,
    allocations=(messages.Allocation(address=4096, length=64, handle=b"handle"),),
)


@dataclass(eq=False)
class Mapped:
    tiling: Tiling
    has_owner: bool = True


@dataclass
class MemoryGather:
    """A read lands at this poll after it was started."""

    polls: int = 0
    is_able: bool = True  # to map memory
    num_ended: int = 0
    mapped: list[Mapped] = field(default_factory=list)
    num_reads: int = 0
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

    def read(self, mapped: Mapped, pieces: Sequence[Pieces]) -> list[object]:
        assert mapped in self.mapped, "it was unmapped"
        self.num_reads += 1
        return [self.polls, tile_pairs(mapped.tiling, pieces, 64)]

    def poll(self, read: list[object]) -> bool:
        polls, pairs = read
        read[0] = polls - 1  # type: ignore[operator]
        if polls == 0:
            for local, remote in pairs.tolist():  # type: ignore[attr-defined]
                ctypes.memmove(local, remote, 1)
        return polls <= 0  # type: ignore[operator]

    def close(self) -> None:
        self.is_closed = True
