"""The early answer's part of the prefill machine: asks that precede their offer.

`asks` remembers them. This part answers them with the state of their request, and has them granted
when vLLM has written the first tokens. It tells the caller which requests no decode engine needs
any longer, and gives the fence slots of `slots` back to the caller's thread.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from nixl_kv.early.asks import EarlyAsks
from nixl_kv.early.slots import NUM_SLOTS, EarlySlots
from nixl_kv.feature import Feature, RankSetup
from nixl_kv.ids import FenceToken, Nonce
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, OfferEnd
from nixl_kv.protocol.prefill import (
    END_REASONS,
    NOT_ARRIVED,
    OTHER_PROMPT,
    WITHDRAWN,
    Offer,
    PrefillPart,
    RoutedAsk,
)

TOO_MANY: Final = "too many early asks wait"


class EarlyPart(PrefillPart):
    def __init__(self, stall_s: float, read_slot: Callable[[int], FenceToken]) -> None:
        """`stall_s`: how long a step of this engine may take. `read_slot` reads a fence slot."""
        self.asks = EarlyAsks(stall_s)
        self._read_slot = read_slot
        self.event_handlers = {
            events.ExpectOffer: self._expect,
            events.Stepped: self._on_step,
            events.Paused: self._on_pause,
        }

    @property
    def next_due(self) -> float:  # type: ignore[override]
        return self.asks.due.next

    def on_tick(self, now: float) -> Actions:
        return self.machine.deny_all(self.asks.pop_due(now), NOT_ARRIVED)

    def _on_step(self, _event: events.Stepped, now: float) -> Actions:
        self.asks.steps.on_step(now)
        return []

    def _on_pause(self, event: events.Paused, now: float) -> Actions:
        self.asks.steps.on_pause(event, now)
        return []

    def _expect(self, command: events.ExpectOffer, now: float) -> Actions:
        denials = self.machine.deny_all(self.asks.expect(command, now), OTHER_PROMPT)
        return denials + self._report_given_up(command.nonce)

    # --- the offer

    def admit(self, command: events.PrepareOffer) -> tuple[events.PrepareOffer, Actions]:
        """Without its slot, if a restart has cleared that since the caller's thread wrote it."""
        if command.slot is None or not command.is_early:
            return command, []
        if self._read_slot(command.slot) == command.fence_token:
            return command, []
        freed = self.on_refused(command)
        return msgspec.structs.replace(command, slot=None, fence_token=events.NO_TOKEN), freed

    def on_refused(self, command: events.PrepareOffer) -> Actions:
        if command.slot is None or not command.is_early:
            return []
        return [events.EarlySlotFree(command.slot, command.fence_token)]

    def on_prepared(self, offer: Offer, now: float) -> Actions:
        # A restart of the thread may have lost the command that the request has arrived.
        denials: Actions = []
        if offer.prepared.is_early and self.asks.expected(offer.nonce) is None:
            expect = events.ExpectOffer(offer.nonce, offer.request, offer.prepared.context)
            denials = self.machine.deny_all(self.asks.expect(expect, now), OTHER_PROMPT)
        return denials + self._tell(offer.nonce, "computing")

    def on_withdrawn(self, command: events.WithdrawOffer) -> Actions:
        if not command.is_final:
            return self._tell(command.nonce, "queued")
        expected = self.asks.expected(command.nonce)
        denials = self.machine.deny_all(self.asks.forget(command.nonce), WITHDRAWN)
        if expected is None:
            return denials
        # No reader is left, for example after a reset.
        return [events.EarlyReleased(command.nonce, expected.request), *denials]

    def on_freed(self, offer: Offer) -> Actions:
        return self.on_refused(offer.prepared)

    def on_ended(self, offer: Offer, end: OfferEnd) -> Actions:
        denials = self.machine.deny_all(self.asks.forget(offer.nonce), END_REASONS[end])
        if offer.is_pinned or end is OfferEnd.READ or not offer.prepared.is_early:
            return denials
        return [*denials, events.EarlyReleased(offer.nonce, offer.request)]

    # --- asks

    def answer_ask(
        self, ask: messages.Ask, offer: Offer | None, route: bytes, now: float
    ) -> Actions | None:
        machine = self.machine
        if offer is None:
            if self.asks.is_other(ask):
                return machine.deny(ask, route, OTHER_PROMPT)
            if not ask.is_early:
                return None
        if offer is None or not offer.can_be_bound:
            state = self.asks.add(ask, route, now)
            if state is None:
                return machine.deny(ask, route, TOO_MANY)
            return [self._pending(RoutedAsk(route, ask), state)]
        is_computed = offer.is_written or not offer.prepared.is_early
        if is_computed or not self.asks.steps.is_stalled(offer.prepared_at, now):
            return None
        return [self._pending(RoutedAsk(route, ask), "stalled")]

    def expects(self, nonce: Nonce) -> bool:
        return nonce in self.asks

    def pop_asks(self, offer: Offer) -> list[RoutedAsk]:
        return self.asks.pop(offer.nonce)

    def is_needless(self, offer: Offer) -> bool:
        return self.asks.is_declined(offer.nonce)

    def on_release(self, release: messages.Release, now: float) -> Actions:
        self.asks.release(release, now)
        return self._report_given_up(Nonce(release.nonce))

    def _report_given_up(self, nonce: Nonce) -> Actions:
        request = self.asks.pop_given_up(nonce)
        return [] if request is None else [events.EarlyReleased(nonce, request)]

    def _tell(self, nonce: Nonce, state: messages.PrefillState) -> Actions:
        return [self._pending(each, state) for each in self.asks.set_state(nonce, state)]

    def _pending(self, asked: RoutedAsk, state: messages.PrefillState) -> events.Reply:
        pending = messages.Pending(**self.machine.fields(asked.ask), state=state)
        return events.Reply(asked.route, pending)

    def clear(self) -> Actions:
        self.asks.clear()
        return [events.EarlySlotFree(None)]

    def check(self) -> None:
        self.asks.check()


def build(setup: RankSetup, *, num_early_slots: int = NUM_SLOTS) -> Feature:
    """Let prefill keep asks that precede their offer. `num_early_slots`: fence slots for them."""
    if not setup.is_prefill:
        return Feature()
    slots = EarlySlots(num_early_slots)
    return Feature(prefill=EarlyPart(setup.config.stall_s, slots.read), step=slots)
