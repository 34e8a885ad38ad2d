"""The fence slots of blocks that are merely cached, for two threads without a lock.

vLLM may give such a block to another request in any step. The caller's thread knows that before the
step runs: it notes the step for each block, and then clears the slots of the grants that hold one.
The transfer thread works in the opposite order: it registers the blocks of a grant, writes the
slot, and then looks whether a block was reused. Both threads hold the GIL between their own write
and their look, so at least one of the two sees the other.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np

from nixl_kv.conversations.runs import Run
from nixl_kv.feature import StepPart
from nixl_kv.geometry.layout import BlockIds
from nixl_kv.ids import FenceToken, Nonce, new_fence_token
from nixl_kv.protocol import events
from nixl_kv.transport.base import SlotPage

# Grants of cached blocks at a time. Further asks are denied, and their readers compute.
NUM_SLOTS: Final = 256
WORD_BITS: Final = 64
# Steps whose end on the GPU is looked for. vLLM runs at most two ahead, and one for each further
# pipeline stage.
NUM_STEPS: Final = 16


class Fence(NamedTuple):
    slot: int
    token: FenceToken


class _Step(NamedTuple):
    number: int
    has_ended: Callable[[], bool]  # any thread asks it


class ContentSlots(StepPart):
    """`num_slots` of a page, and the latest reuse of each of the cache's `num_blocks` blocks."""

    def __init__(self, num_blocks: int, num_slots: int = NUM_SLOTS) -> None:
        self.num_slots = num_slots
        self._page: SlotPage
        self._first = 0
        # Written by the caller's thread: the steps so far, and the latest that reused each block.
        self._since = 0  # reuses in this step and later ones are known
        self._begun = 0
        self._epoch = 0
        self._reused = np.zeros(num_blocks, np.int64)
        self._steps: deque[_Step] = deque(maxlen=NUM_STEPS)
        # Written by the transfer thread: for each block the slots that hold it, one bit each.
        self._holders = np.zeros((num_blocks, -(-num_slots // WORD_BITS)), np.uint64)
        self._offers: list[Nonce | None] = [None] * num_slots
        self._blocks: dict[int, BlockIds] = {}
        self._free = deque(range(num_slots))

    def __len__(self) -> int:
        """How many are open."""
        return len(self._blocks)

    def bind(self, page: SlotPage, first: int) -> None:
        self._page, self._first = page, first

    # --- the caller's thread

    def before_step(self, commands: Iterable[events.Command]) -> list[events.Command]:
        """Clear the slots of the blocks that the step reuses, and withdraw their offers."""
        found: list[events.Command] = []
        for command in commands:
            if isinstance(command, events.BlocksTaken):
                found += [events.WithdrawOffer(offer) for offer in self._take(command)]
            else:
                found.append(command)
        return found

    def end_step(self, has_ended: Callable[[], bool] | None) -> None:
        self.is_in_step = False
        self._steps.append(_Step(self._begun, has_ended or (lambda: True)))

    def _take(self, taken: events.BlocksTaken) -> list[Nonce]:
        """Note the reuse, then look and clear; returns the offers of the slots."""
        is_next, is_same = taken.step == self._begun + 1, taken.epoch == self._epoch
        if not is_next:  # this rank has missed steps, or has just started
            self._since = taken.step
        self._epoch = taken.epoch
        ids = np.frombuffer(taken.ids, dtype="<i4")
        self._reused[ids] = taken.step
        self._begun, self.is_in_step = taken.step, True
        cleared: list[Nonce] = []
        for slot in self._holding(ids) if is_next and is_same else range(self.num_slots):
            offer = self._offers[slot]
            if offer is not None:  # else it is clear
                self._page.clear(self._first + slot)
                # Since then it may be another offer's, whose reader finds it clear.
                cleared.append(self._offers[slot] or offer)
        return cleared

    def _holding(self, ids: BlockIds) -> list[int]:
        """The slots that hold one of these blocks."""
        if not len(ids):
            return []
        words = np.bitwise_or.reduce(self._holders[ids], axis=0)
        if not words.any():
            return []
        bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")
        return [int(slot) for slot in np.flatnonzero(bits)]

    # --- the transfer thread

    def is_stale(self, run: Run) -> bool:
        """Whether a block may have other KV by now than the scheduler knew."""
        is_unknown = run.steps + 1 < self._since or run.epoch < self._epoch
        return is_unknown or bool((self._reused[run.block_ids] > run.steps).any())

    def is_written(self, run: Run) -> bool:
        """Whether this rank has written all of it, by the steps that have ended on the GPU."""
        return run.need <= self.last_written()

    def last_written(self) -> int:
        """The latest step that has ended on the GPU; -1: none."""
        steps = tuple(self._steps)
        return next((step.number for step in reversed(steps) if step.has_ended()), -1)

    def open(self, run: Run, offer: Nonce) -> Fence | None:
        """A slot with a token while nothing is reused; None without a free one, or if it is stale.

        The run `is_written`.
        """
        if not self._free or run.epoch != self._epoch:
            return None
        slot, ids = self._free.popleft(), run.block_ids
        fence = Fence(self._first + slot, new_fence_token())
        # All three in this order.
        self._register(slot, ids, offer)
        self._page.write(*fence)
        if self.is_stale(run):
            self._forget(slot)
            self._free.append(slot)
            return None
        return fence

    def is_valid(self, fence: Fence) -> bool:
        """Whether no step that has begun writes the blocks of this grant."""
        return self._page.read(fence.slot) == fence.token

    def close(self, slot: int) -> None:
        """Clear the slot; another grant may have it from now on."""
        self._forget(slot - self._first)
        self._free.append(slot - self._first)

    def close_all(self) -> None:
        # The transfer thread may have died at any point of the methods above.
        for slot in range(self.num_slots):
            self._page.clear(self._first + slot)
        self._offers[:] = [None] * self.num_slots
        self._blocks.clear()
        self._holders[:] = 0
        self._free = deque(range(self.num_slots))

    def _register(self, slot: int, ids: BlockIds, offer: Nonce) -> None:
        self._blocks[slot], self._offers[slot] = ids, offer
        self._holders[ids, slot // WORD_BITS] |= np.uint64(1 << slot % WORD_BITS)

    def _forget(self, slot: int) -> None:
        self._page.clear(self._first + slot)
        ids, self._offers[slot] = self._blocks.pop(slot), None
        self._holders[ids, slot // WORD_BITS] &= ~np.uint64(1 << slot % WORD_BITS)

    def check(self, offers: Iterable[tuple[Nonce, int]]) -> list[str]:
        """The broken promises, between two events, if these offers have these slots of the page."""
        known = {slot - self._first: offer for offer, slot in offers}
        mine = {slot: offer for slot, offer in enumerate(self._offers) if offer is not None}
        rest = sorted([*mine, *self._free])
        wrong = [f"slots {mine}, offers {known}"] if mine != known else []
        return wrong + ([f"slots {rest}"] if rest != list(range(self.num_slots)) else [])
