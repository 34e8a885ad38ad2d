"""The page of fence slots: 16 bytes each, in ordinary memory that peers may read.

Prefill writes a random token into a slot while a grant is valid. Decode reads the slot after the
data: if the token is still there, prefill held the blocks the whole time.
"""

import ctypes

import numpy as np

from nixl_kv.geometry.layout import Span
from nixl_kv.ids import GENERATION_BYTES, Generation
from nixl_kv.transport.base import Rows

PAGE_BYTES = 4096


class SlotPage:
    """`count` slots, all clear at first. Peers may read them at any time."""

    def __init__(self, count: int) -> None:
        size = count * GENERATION_BYTES
        self._memory = np.zeros(size + PAGE_BYTES, dtype=np.uint8)
        self.address = -(-self._memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        self.count = count

    @property
    def span(self) -> Span:
        return Span(self.address, self.count * GENERATION_BYTES)

    def rows(self) -> Rows:
        return slot_rows(self.address, self.count)

    def write(self, slot: int, generation: Generation) -> None:
        if len(generation) != GENERATION_BYTES:
            raise ValueError(f"{len(generation)} bytes; allowed: {GENERATION_BYTES}")
        ctypes.memmove(self._at(slot), generation, GENERATION_BYTES)

    def clear(self, slot: int) -> None:
        """Make a grant invalid, before its blocks can be reused."""
        self.write(slot, Generation(bytes(GENERATION_BYTES)))

    def clear_all(self) -> None:
        ctypes.memset(self.address, 0, self.count * GENERATION_BYTES)

    def read(self, slot: int) -> Generation:
        return Generation(ctypes.string_at(self._at(slot), GENERATION_BYTES))

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.count:
            raise IndexError(f"slot {slot}; allowed: 0 to {self.count - 1}")
        return self.address + slot * GENERATION_BYTES


def slot_rows(address: int, count: int) -> Rows:
    """A list of one row, with one piece per slot."""
    return np.array([[address, GENERATION_BYTES, 0, GENERATION_BYTES, count]], dtype=np.uint64)
