"""The fence slots of offers whose KV is not all written yet, on the caller's thread.

vLLM may preempt such a request in any step, and reuse its blocks in that step. Only the caller's
thread knows that before the step runs. So it writes and clears these slots itself, and waits for no
other thread. A slot is free when the transfer thread reports `EarlySlotFree`.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from nixl_kv.feature import StepPart
from nixl_kv.ids import FenceToken, Nonce, new_fence_token
from nixl_kv.protocol import events
from nixl_kv.transport.base import SlotPage

# Offers that are computed and granted at a time. Others are granted when they are complete.
NUM_SLOTS: Final = 256


class EarlySlots(StepPart):
    """The last slots of a page."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.num_slots = num_slots
        self._page: SlotPage
        self._free: list[int] = []
        self._tokens: dict[int, FenceToken] = {}  # of the slots that are not free
        self._held: dict[Nonce, tuple[int, FenceToken] | None] = {}  # None: freed early

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def bind(self, page: SlotPage, first: int) -> None:
        self._page, self._free = page, list(range(first, first + self.num_slots))

    def read(self, slot: int) -> FenceToken:
        return self._page.read(slot)

    def before_step(self, commands: Iterable[events.Command]) -> list[events.Command]:
        """Clear the slots of withdrawn offers, and give slots to early ones."""
        found: list[events.Command] = []
        for command in commands:
            match command:
                case events.WithdrawOffer():
                    self.clear(command.nonce)
                case events.PublishOffer():
                    self.publish(command.nonce)
                case events.PrepareOffer() if command.in_parts:
                    command = self.prepare(command)  # noqa: PLW2901 - with its slot
            found.append(command)
        return found

    def on_result(self, result: events.Result) -> None:
        if isinstance(result, events.EarlySlotFree):
            self.free(result)

    def prepare(self, offer: events.PrepareOffer) -> events.PrepareOffer:
        """Give the offer a slot with a token, the same in each step; none if all are in use."""
        if offer.nonce not in self._held:
            if not self._free:
                return offer
            slot, token = self._free.pop(), new_fence_token()
            self._page.write(slot, token)
            self._tokens[slot] = token
            self._held[offer.nonce] = slot, token
        held = self._held[offer.nonce]
        if held is None:
            return offer
        return msgspec.structs.replace(offer, slot=held[0], fence_token=held[1])

    def clear(self, nonce: Nonce) -> None:
        """The blocks may be reused from now on."""
        held = self._held.pop(nonce, None)
        if held is not None:
            self._page.clear(held[0])

    def publish(self, nonce: Nonce) -> None:
        """The blocks are pinned: from now on the transfer thread clears the slot."""
        self._held.pop(nonce, None)

    def free(self, report: events.EarlySlotFree) -> None:
        """Ignores a report whose token is not the slot's: it is a repetition."""
        if report.slot is not None:
            freed = [report.slot] if self._tokens.get(report.slot) == report.fence_token else []
        else:
            # Those that the transfer thread has cleared. This thread may have written others since.
            freed = [slot for slot, token in self._tokens.items() if self._page.read(slot) != token]
        for slot in freed:
            del self._tokens[slot]
            self._page.clear(slot)
            self._free.append(slot)
        for nonce, held in self._held.items():
            if held is not None and self._tokens.get(held[0]) != held[1]:
                self._held[nonce] = None
