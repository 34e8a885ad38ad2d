"""Who has which slot of the ring that prefill packs into.

    free        nobody has it
    writing     it is being packed, for a chunk of a reader
    packed      the reader may read it
    abandoned   it is still being packed, but nobody waits for it: then it is free

A slot is free again on the reader's word, or when its offer has ended: then the grant's generation
has been cleared before, so that who still reads there finds that out.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.staging import may_take
from nixl_kv.ids import Nonce, Rank

Holder: TypeAlias = tuple[Nonce, Rank]
"""One reader of one offer."""


@dataclass
class _Slot:
    """`since` is in monotonic seconds."""

    holder: Holder
    chunk: int
    since: float
    is_packed: bool = False
    is_abandoned: bool = False


class RingBook:
    """The slots of one prefill rank. `may_take` divides them."""

    def __init__(self, num_slots: int) -> None:
        """All are free; a rank that does not pack has none."""
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._slots: dict[int, _Slot] = {}
        self._held: dict[Holder, dict[int, int]] = {}  # for each reader, slots by chunk
        self._numbers: dict[Holder, int] = {}  # of each reader's latest request

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        """Whether somebody has, or had, each slot."""
        return not self._free

    def is_latest(self, holder: Holder, number: int) -> bool:
        """Whether a reader's request with this number was not overtaken by a later one."""
        if number < self._numbers.get(holder, 0):
            return False
        self._numbers[holder] = number
        return True

    def slot_of(self, holder: Holder, chunk: int) -> int | None:
        """The slot that a chunk has."""
        return self._held.get(holder, {}).get(chunk)

    def is_packed(self, slot: int) -> bool:
        """Whether a slot that a reader has may be read."""
        return self._slots[slot].is_packed

    def hold(self, holder: Holder, chunk: int, now: float) -> int | None:
        """Give a slot to a chunk, to be packed; None if there is none for it."""
        held = self._held.get(holder, {})
        if not may_take(len(held), len(self._free)):
            return None
        slot = self._free.pop(0)
        self._slots[slot] = _Slot(holder, chunk, now)
        self._held.setdefault(holder, {})[chunk] = slot
        return slot

    def on_packed(self, slot: int, *, is_packed: bool) -> bool:
        """It is not written any more. Whether a reader waits for it; it keeps what was packed."""
        entry = self._slots.get(slot)
        if entry is None:
            return False
        if entry.is_abandoned:
            self._end(slot)
            return False
        if is_packed:
            entry.is_packed = True
        else:
            self._release(entry.holder, entry.chunk)
            self._end(slot)
        return True

    def release(self, holder: Holder, holds: Collection[int]) -> None:
        """A reader has no more chunks than these."""
        for chunk in [chunk for chunk in self._held.get(holder, {}) if chunk not in holds]:
            slot = self._release(holder, chunk)
            if self._slots[slot].is_packed:
                self._end(slot)
            else:
                self._slots[slot].is_abandoned = True

    def forget(self, holder: Holder) -> None:
        """A reader has ended."""
        self.release(holder, ())
        self._numbers.pop(holder, None)

    def longest_held(self) -> tuple[Holder, float] | None:
        """Who has had a slot for longest, and since when; None where all are free."""
        held = [slot for slot in self._slots.values() if not slot.is_abandoned]
        oldest = min(held, key=lambda slot: slot.since, default=None)
        return None if oldest is None else (oldest.holder, oldest.since)

    def clear(self, writing: Collection[int]) -> None:
        """Forget all readers, whatever state this is in; these slots are still being written."""
        nobody = Nonce(""), Rank(0)
        self._held.clear()
        self._numbers.clear()
        self._slots = {slot: _Slot(nobody, 0, 0.0, is_abandoned=True) for slot in writing}
        self._free = [slot for slot in range(self._num_slots) if slot not in self._slots]

    def validate(self) -> None:
        """Check that each slot is free, or somebody's, or written for nobody."""
        held = [slot for chunks in self._held.values() for slot in chunks.values()]
        abandoned = [number for number, slot in self._slots.items() if slot.is_abandoned]
        if sorted(held + abandoned + self._free) != list(range(self._num_slots)):
            raise LocalProtocolError(
                f"ring slots {held} held, {abandoned} abandoned, {self._free} free"
            )

    def _release(self, holder: Holder, chunk: int) -> int:
        chunks = self._held[holder]
        slot = chunks.pop(chunk)
        if not chunks:
            del self._held[holder]
        return slot

    def _end(self, slot: int) -> None:
        del self._slots[slot]
        self._free.append(slot)
