"""A gather inside one process: addresses are as their owner has them."""

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nixl_kv.errors import TransportError
from nixl_kv.geometry.plan import Ints, Pieces, Plan
from nixl_kv.protocol import messages
from nixl_kv.reading.gather.path import GatherPath
from nixl_kv.reading.tiles import Tiling
from support.oracle import tile_pairs
from support.records import EXPORT

TILE_BYTES = 256


@dataclass(eq=False)
class MemoryMapping:
    """See `gather.memory.Mapping`."""

    close: Callable[[], None]
    owner: int = field(default_factory=lambda: os.eventfd(0))
    has_owner_ended: bool = False

    def locate(self, first: Ints, last: Ints) -> Ints:
        del last
        return first


@dataclass(eq=False)
class MemoryRead:
    mapping: MemoryMapping
    tiling: Tiling
    pieces: Sequence[Pieces]
    polls: int


@dataclass
class MemoryGather:
    """So many looks at a read find it under way: the first one is when it is started.

    It is the stream, and maps memory.
    """

    polls: int = 1
    is_able: bool = True  # to map memory
    mapped: list[MemoryMapping] = field(default_factory=list)
    num_waits: int = 0

    @property
    def path(self) -> GatherPath:
        stream: Any = self
        return GatherPath(stream, stream.map, lambda _descriptor: None)

    def map(self, exported: messages.Export) -> MemoryMapping:
        if not self.is_able:
            raise TransportError(f"process {exported.pid} is not seen here")
        mapping = MemoryMapping(lambda: self._unmap(mapping))
        self.mapped.append(mapping)
        return mapping

    def _unmap(self, mapping: MemoryMapping) -> None:
        self.mapped.remove(mapping)
        os.close(mapping.owner)

    def end_owners(self) -> None:
        """All processes whose memory is mapped end."""
        for mapping in self.mapped:
            mapping.has_owner_ended = True
            os.eventfd_write(mapping.owner, 1)

    def prepare(self, plan: Plan, locate: Callable[[Ints, Ints], Ints]) -> SimpleNamespace:
        return SimpleNamespace(tiling=Tiling(plan, locate), mapping=self.mapped[-1])

    def read_16(self, address: int) -> bytes:
        assert address == EXPORT.proof.address
        return EXPORT.proof.value

    def start(self, prepared: SimpleNamespace, pieces: Sequence[Pieces]) -> MemoryRead:
        assert prepared.mapping in self.mapped, "it was unmapped"
        return MemoryRead(prepared.mapping, prepared.tiling, pieces, self.polls)

    def poll(self, read: MemoryRead) -> bool:
        if read.polls == 0:
            assert read.mapping in self.mapped, "it was unmapped"
            for local, remote in tile_pairs(read.tiling, read.pieces, TILE_BYTES).tolist():
                ctypes.memmove(local, remote, 1)
        read.polls -= 1
        return read.polls < 0

    def end(self) -> None:
        self.num_waits += 1
