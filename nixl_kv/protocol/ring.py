"""The slots of the staging ring into which prefill packs, and the chunks that wait for one.

    free        usable
    writing     a chunk is being packed into it for a reader
    packed      the reader may read it
    abandoned   still being packed, but its reader has left: free after that

Chunks wait in order, and `may_take` keeps one reader from taking all slots. A slot is free again
when its reader has read it, or when its offer has ended. The rank has then cleared the grant's
fence slot, so a reader that still reads finds out.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Nonce, Rank
from nixl_kv.protocol import messages

Holder: TypeAlias = tuple[Nonce, Rank]
"""One reader of one offer."""
WaitingChunk: TypeAlias = tuple[bytes, messages.PackRequest]
"""A chunk without a ring slot, and the route to its reader."""


def may_take(held: int, free: int) -> bool:
    """Whether a reader that holds `held` slots of a ring may take one of the `free` ones.

    One reader gets two thirds of the ring, two get two fifths each, and some room always remains
    for another. These are dynamic thresholds with a factor of 2, after Choudhury and Hahne,
    "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998.
    """
    return held < 2 * free


def most_slots(num_slots: int) -> int:
    """How many slots of a ring `may_take` gives to a single reader."""
    return -(-2 * num_slots // 3)


@dataclass
class _Slot:
    holder: Holder | None  # None: abandoned
    chunk: int
    since: float  # monotonic seconds
    is_packed: bool = False


class RingBook:
    # A ring has a few slots (`NUM_SLOTS` of `reading.staged`), so looking at all of them is cheap.

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._slots: dict[int, _Slot] = {}
        self._waiting: OrderedDict[tuple[Holder, int], WaitingChunk] = OrderedDict()
        self._numbers: dict[Holder, int] = {}  # of each reader's latest request

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def blocking(self) -> tuple[Holder, float] | None:
        """If chunks wait for a slot: the reader that has had one longest, and since when."""
        if self._free or not self._waiting:
            return None
        held = [(slot.holder, slot.since) for slot in self._slots.values() if slot.holder]
        return min(held, key=lambda each: each[1], default=None)

    def is_latest(self, holder: Holder, number: int) -> bool:
        """Whether no later request of this reader arrived before."""
        if number < self._numbers.get(holder, 0):
            return False
        self._numbers[holder] = number
        return True

    def slot_of(self, holder: Holder, chunk: int) -> int | None:
        return self._held(holder).get(chunk)

    def is_packed(self, slot: int) -> bool:
        return self._slots[slot].is_packed

    def wait(self, holder: Holder, route: bytes, request: messages.PackRequest) -> bool:
        """Queue a chunk, once; False if its reader already has or awaits all slots."""
        num_waiting = sum(each == holder for each, _ in self._waiting)
        key = holder, request.chunk
        if key not in self._waiting and len(self._held(holder)) + num_waiting >= self._num_slots:
            return False
        self._waiting[key] = route, request
        return True

    def pop_packable(self, now: float) -> list[tuple[WaitingChunk, int]]:
        """Give free slots to waiting chunks, in order: pack each into its slot."""
        packable: list[tuple[WaitingChunk, int]] = []
        for (holder, number), chunk in list(self._waiting.items()) if self._free else ():
            if may_take(len(self._held(holder)), len(self._free)):
                slot = self._free.pop(0)
                self._slots[slot] = _Slot(holder, number, now)
                del self._waiting[holder, number]
                packable.append((chunk, slot))
        return packable

    def on_packed(self, slot: int, *, is_packed: bool) -> bool:
        """The write to a slot has ended. Whether a reader waits for it."""
        entry = self._slots.get(slot)
        if entry is None:
            return False
        is_wanted = entry.holder is not None
        if is_wanted and is_packed:
            entry.is_packed = True
        else:
            self._end(slot)
        return is_wanted

    def release(self, holder: Holder, holds: Collection[int]) -> None:
        """Free the slots of a reader's other chunks, which it neither waits for nor reads."""
        for key in [key for key in self._waiting if key[0] == holder and key[1] not in holds]:
            del self._waiting[key]
        for chunk, slot in self._held(holder).items():
            if chunk not in holds:
                if self._slots[slot].is_packed:
                    self._end(slot)
                else:
                    self._slots[slot].holder = None

    def forget(self, holder: Holder) -> None:
        self.release(holder, ())
        self._numbers.pop(holder, None)

    def clear(self, writing: Collection[int]) -> None:
        """Forget all readers. The slots in `writing` are still being written."""
        self._waiting.clear()
        self._numbers.clear()
        self._slots = {slot: _Slot(None, 0, 0.0) for slot in writing}
        self._free = [slot for slot in range(self._num_slots) if slot not in self._slots]

    def validate(self) -> None:
        for holder, _ in self._waiting:
            if may_take(len(self._held(holder)), len(self._free)):
                raise LocalProtocolError(
                    f"a chunk of {holder} waits beside {self._free} free slots"
                )
        if sorted([*self._slots, *self._free]) != list(range(self._num_slots)):
            raise LocalProtocolError(f"ring slots {list(self._slots)} used, {self._free} free")

    def _held(self, holder: Holder) -> dict[int, int]:
        """A reader's slots by chunk."""
        return {slot.chunk: n for n, slot in self._slots.items() if slot.holder == holder}

    def _end(self, slot: int) -> None:
        del self._slots[slot]
        self._free.append(slot)
