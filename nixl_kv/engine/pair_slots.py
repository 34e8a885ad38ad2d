"""Fence slots and write marks, for offers whose KV is not all written yet. The caller owns both.

`PairSlots` has the fence slots of offers that are still being computed. vLLM may preempt such a
request in any step, and reuse its blocks in that step. Only the caller's thread knows that before
the step runs. So it writes and clears these slots itself, and waits for no other thread. A slot is
free when the transfer thread reports `PairSlotFree`. `UnwrittenOffers` tells the transfer thread
when the KV of a step is written.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from nixl_kv.ids import FenceToken, Nonce, new_fence_token
from nixl_kv.protocol import events
from nixl_kv.transport.base import SlotPage


class PairSlots:
    """The last slots of a page, from `first` on. For the caller's thread alone."""

    def __init__(self, page: SlotPage, first: int) -> None:
        self._page = page
        self._free = list(range(first, page.count))
        self._tokens: dict[int, FenceToken] = {}  # of the slots that are not free
        self._held: dict[Nonce, tuple[int, FenceToken] | None] = {}  # None: freed early

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def apply(self, commands: Iterable[events.Command]) -> list[events.Command]:
        """Clear the slots of withdrawn offers, and give slots to pairs. Call it before the step."""
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

    def free(self, report: events.PairSlotFree) -> None:
        """The report may come twice, and the slot may have another token by then."""
        for slot in list(self._tokens) if report.slot is None else [report.slot]:
            if report.slot is None or self._tokens.get(slot) == report.fence_token:
                del self._tokens[slot]
                self._page.clear(slot)
                self._free.append(slot)
        for nonce, held in self._held.items():
            if held is not None and self._tokens.get(held[0]) != held[1]:
                self._held[nonce] = None


class UnwrittenOffers:
    """Offers that prefill must not grant before an event on the GPU's stream.

    With speculative decoding, a step's output leaves before the draft model writes the KV of its
    own layers. The offer of a pair is granted in parts, while prefill still computes it.
    """

    def __init__(self, record_event: Callable[[], Callable[[], bool] | None]) -> None:
        """`record_event` tells whether all writes that are on the stream now have ended.

        It returns None if they have ended already.
        """
        self._record_event = record_event
        self._current: list[events.MarkWritten] = []  # of the current step

    def add(self, commands: Iterable[events.Command]) -> None:
        self._current += [
            events.MarkWritten(command.nonce, command.computed, command.attempt)
            for command in commands
            if isinstance(command, events.PrepareOffer) and not command.is_written
        ]

    def pop(self) -> Sequence[events.Command]:
        """All writes of the step are on the stream. May be called twice per step."""
        marks, self._current = self._current, []
        is_done = self._record_event() if marks else None
        return marks if is_done is None else [events.AwaitWrites(tuple(marks), is_done)]
