"""What copies between a rank's staging memory and its cache, and that memory.

Prefill packs into its ring, and decode scatters from its own, by any plan of `geometry`.
`host_copier` copies in host memory, `gpu_copier` on GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.geometry.staging import Ring

PAGE: Final = 4096
ALIGNMENT: Final = 64
"""Of slots, in bytes."""

PreparedCopy: TypeAlias = Any
"""A plan as a copier takes it, opaque, of use only to the copier that made it."""

Copy: TypeAlias = Any
"""A copy under way, opaque, of use only to the copier that started it."""


class Copier(Protocol):
    """Copies within this rank's memory. All methods but `end` run on the transfer thread.

    A copy that was started ends by itself.
    """

    def prepare(self, plan: Plan) -> PreparedCopy:
        """Prepare a plan, both sides of which are this rank's own memory.

        Raises:
            TransportError: if it cannot be prepared.
        """

    def start(self, prepared: PreparedCopy, pieces: Sequence[Pieces]) -> Copy:
        """Start to copy the plan's remote pieces into the local ones.

        Raises:
            TransportError: if it cannot be started; then nothing is under way.
        """

    def poll(self, copy: Copy) -> bool:
        """Whether it has ended well.

        Raises:
            TransportError: if it has failed, and writes no more.
        """

    def end(self, copy: Copy) -> None:
        """Return when it writes no more, whatever is missing; may run on any thread."""


class StagingMemory(Protocol):
    """Allocated until it is forgotten."""

    span: Span


class HostMemory:
    """Zeroed memory of this process, on a page boundary of its own; pages are there when used."""

    def __init__(self, length: int) -> None:
        """Allocate so many bytes."""
        self._memory = np.zeros(length + PAGE, dtype=np.uint8)
        address = -(-self._memory.ctypes.data // PAGE) * PAGE
        self.span = Span(address, length)


@dataclass(frozen=True)
class Staging:
    """One side's ring, in memory of the cache's kind. `owner` keeps it allocated."""

    ring: Ring
    memory: Memory
    device: int
    copier: Copier
    owner: StagingMemory


def split(span: Span, count: int, num_slots: int) -> list[Ring]:
    """So many rings, one behind the other."""
    length = span.length // count // num_slots // ALIGNMENT * ALIGNMENT * num_slots
    return [Ring(Span(span.address + n * length, length), num_slots) for n in range(count)]
