"""The interface of copies between a rank's staging memory and its cache, and that memory.

Prefill packs into its ring, and decode scatters from its own, by any plan of `geometry`.
`host_copier` copies in host memory, and `gpu_copier` on GPUs.
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
"""Slots begin at a multiple of this number of bytes."""

PreparedCopy: TypeAlias = Any
"""A plan that one copier has prepared; opaque."""

Copy: TypeAlias = Any
"""A copy in progress, for the copier that started it; opaque."""


class Copier(Protocol):
    """Copies within this rank's memory. All methods but `end` run on the transfer thread.

    A copy ends by itself.
    """

    def prepare(self, plan: Plan) -> PreparedCopy:
        """Prepare a plan whose sides are both this rank's own memory.

        Raises:
            TransportError: if it cannot be prepared.
        """

    def start(self, prepared: PreparedCopy, pieces: Sequence[Pieces]) -> Copy:
        """Start to copy the plan's remote pieces into the local ones.

        Raises:
            TransportError: if it cannot be started; then nothing is in progress.
        """

    def poll(self, copy: Copy) -> bool:
        """Whether the copy is complete.

        Raises:
            TransportError: if it has failed, and no longer writes.
        """

    def end(self, copy: Copy) -> None:
        """Wait until it no longer writes, complete or not; on any thread."""


class StagingMemory(Protocol):
    """Memory for a ring; allocated as long as this object lives."""

    span: Span


class HostMemory:
    """Zeroed host memory that begins at a page. Linux adds its pages when they are used."""

    def __init__(self, length: int) -> None:
        """Allocate `length` bytes."""
        self._memory = np.zeros(length + PAGE, dtype=np.uint8)
        address = -(-self._memory.ctypes.data // PAGE) * PAGE
        self.span = Span(address, length)


@dataclass(frozen=True)
class Staging:
    """A ring of this rank, in memory of the cache's kind. `owner` keeps it allocated."""

    ring: Ring
    memory: Memory
    device: int
    copier: Copier
    owner: StagingMemory


def split(span: Span, count: int, num_slots: int) -> list[Ring]:
    """Divide memory into `count` rings."""
    length = span.length // count // num_slots // ALIGNMENT * ALIGNMENT * num_slots
    return [Ring(Span(span.address + n * length, length), num_slots) for n in range(count)]
