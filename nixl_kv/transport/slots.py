"""A page of generation slots: 16 bytes each, in ordinary memory that peers may read."""

import ctypes

import numpy as np

from nixl_kv.geometry.layout import Span
from nixl_kv.ids import GENERATION_BYTES, Generation
from nixl_kv.transport.base import Rows

_EMPTY = Generation(bytes(GENERATION_BYTES))


class SlotPage:
    """`count` slots, all clear at first."""

    def __init__(self, count: int) -> None:
        """Allocate zeroed memory, on a page boundary of its own."""
        size = count * GENERATION_BYTES
        self._memory = np.zeros(size + 4096, dtype=np.uint8)
        self.address = (self._memory.ctypes.data + 4095) // 4096 * 4096
        self.count = count

    @property
    def span(self) -> Span:
        """The memory to be registered."""
        return Span(self.address, self.count * GENERATION_BYTES)

    def rows(self) -> Rows:
        """One row, one piece per slot."""
        return slot_rows(self.address, self.count)

    def write(self, slot: int, generation: Generation) -> None:
        """Make a grant valid."""
        if len(generation) != GENERATION_BYTES:
            raise ValueError(f"{len(generation)} bytes; allowed: {GENERATION_BYTES}")
        ctypes.memmove(self._at(slot), generation, GENERATION_BYTES)

    def clear(self, slot: int) -> None:
        """Make a grant invalid."""
        self.write(slot, _EMPTY)

    def clear_all(self) -> None:
        """Make every grant invalid."""
        ctypes.memset(self.address, 0, self.count * GENERATION_BYTES)

    def read(self, slot: int) -> Generation:
        """What is in a slot."""
        return Generation(ctypes.string_at(self._at(slot), GENERATION_BYTES))

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.count:
            raise IndexError(f"slot {slot}; allowed: 0 to {self.count - 1}")
        return self.address + slot * GENERATION_BYTES


def slot_rows(address: int, count: int) -> Rows:
    """The rows of a page of slots, shape (1, 5)."""
    return np.array([[address, GENERATION_BYTES, 0, GENERATION_BYTES, count]], dtype=np.uint64)
