"""The slots of the ring into which prefill packs, and the chunks that wait for one.

    free        usable
    writing     a chunk of a reader is being packed into it
    packed      the reader may read it
    abandoned   still being packed, but its reader has left: free after that

A chunk waits until a slot is free: chunks wait in order, and `may_take` keeps one reader from
taking all slots. A slot is free again when its reader says that it has read it, or when its offer
has ended. In the second case the grant's fence slot has been cleared before, so a reader that still
reads finds out.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.staging import may_take
from nixl_kv.ids import Nonce, Rank
from nixl_kv.protocol import messages

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


@dataclass(frozen=True)
class WaitingChunk:
    """A chunk without a slot; `route` leads to its reader."""

    route: bytes
    request: messages.PackRequest

    @property
    def holder(self) -> Holder:
        return Nonce(self.request.nonce), Rank(self.request.reader.rank)


class RingBook:
    """The slots of one prefill rank."""

    def __init__(self, num_slots: int) -> None:
        """All are free; a rank that does not pack has none."""
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._slots: dict[int, _Slot] = {}
        self._held: dict[Holder, dict[int, int]] = {}  # for each reader, slots by chunk
        self._waiting: OrderedDict[tuple[Holder, int], WaitingChunk] = OrderedDict()
        self._numbers: dict[Holder, int] = {}  # of each reader's latest request

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Chunks that wait for a slot."""
        return len(self._waiting)

    @property
    def next_due_since(self) -> float | None:
        """Since when a slot has been held for longest, if a chunk waits; monotonic seconds."""
        longest = self.longest_held() if self._waiting and not self._free else None
        return None if longest is None else longest[1]

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

    def wait(self, chunk: WaitingChunk) -> bool:
        """Let a chunk wait for a slot; False if its reader may not have more than it has.

        A chunk that waits already keeps its place.
        """
        holder = chunk.holder
        num_held = len(self._held.get(holder, {}))
        num_waiting = sum(each == holder for each, _ in self._waiting)
        key = holder, chunk.request.chunk
        if key not in self._waiting and num_held + num_waiting >= self._num_slots:
            return False
        self._waiting[key] = chunk
        return True

    def pop_packable(self, now: float) -> list[tuple[WaitingChunk, int]]:
        """Give free slots to chunks that wait, in order: each is to be packed into its slot."""
        packable: list[tuple[WaitingChunk, int]] = []
        for (holder, number), chunk in list(self._waiting.items()) if self._free else ():
            if may_take(len(self._held.get(holder, {})), len(self._free)):
                slot = self._free.pop(0)
                self._slots[slot] = _Slot(holder, number, now)
                self._held.setdefault(holder, {})[number] = slot
                del self._waiting[holder, number]
                packable.append((chunk, slot))
        return packable

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
        """A reader waits for no other chunks than these, and reads no others."""
        for key in [key for key in self._waiting if key[0] == holder and key[1] not in holds]:
            del self._waiting[key]
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
        self._waiting.clear()
        self._numbers.clear()
        self._slots = {slot: _Slot(nobody, 0, 0.0, is_abandoned=True) for slot in writing}
        self._free = [slot for slot in range(self._num_slots) if slot not in self._slots]

    def validate(self) -> None:
        """Check that each slot has one state, and that no chunk waits that could be packed."""
        for holder, _ in self._waiting:
            if may_take(len(self._held.get(holder, {})), len(self._free)):
                raise LocalProtocolError(
                    f"a chunk of {holder} waits beside {self._free} free slots"
                )
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
