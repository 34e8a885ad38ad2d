"""Conversations in the prefill machine: asks for blocks that are merely cached.

The scheduler of this engine has found the blocks, and the reader brings its answer, sealed. The
rank waits until it has written them, and makes an offer of them that nothing pins. From then on the
machine treats it like any other, but vLLM hears nothing of it. If vLLM reuses a block, `slots` has
cleared the fence slot before, and withdraws the offer.
"""

import math
from typing import Final, NamedTuple, TypeAlias

from nixl_kv.config import ON
from nixl_kv.conversations.runs import Run, open_run
from nixl_kv.conversations.slots import NUM_SLOTS, ContentSlots, Fence
from nixl_kv.errors import LocalProtocolError
from nixl_kv.feature import Feature, RankSetup
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Claim, EngineId, Nonce, Rank, RequestId, short
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions
from nixl_kv.protocol.prefill import Offer, PrefillPart, RoutedAsk

# Asks that wait for the step which fills their blocks; each takes up to 64 KiB.
MAX_WAITING: Final = 256
MAX_WAITING_OF_READER: Final = 64
# A rank denies an ask for cached blocks, because it has not written all of them. A step of a GPU
# engine takes less than 0.5 s.
WAIT_S: Final = 2.0
# A grant of MAX_HASHES blocks takes 0.2 ms, and other work of the rank waits for it.
GRANTS_OF_TURN: Final = 16
# Between two looks whether the GPU has ended a step, while an ask waits for one.
LOOK_S: Final = 0.001

NOT_SEALED: Final = "this life of the engine has not found these blocks for this offer"
STALE: Final = "a block was reused since, or the cache was reset"
NO_READER: Final = "the reader is not among its own readers"
FULL: Final = "too many readers of cached blocks"
NOT_WRITTEN: Final = f"a block was not written within {WAIT_S:g} s"

_Reader: TypeAlias = tuple[EngineId, Rank]
_Key: TypeAlias = tuple[Nonce, Claim, _Reader]


class _Waiting(NamedTuple):
    asked: RoutedAsk
    run: Run
    until: float


class ContentPart(PrefillPart):
    def __init__(self, slots: ContentSlots, entry_size: int) -> None:
        """`entry_size`: tokens of a block."""
        self.slots = slots
        self._entry_size = entry_size
        self._key = b""
        self._waiting: dict[_Key, _Waiting] = {}  # in order of arrival
        self.event_handlers = {events.SetContentKey: self._set_key}

    def __len__(self) -> int:
        """How many asks wait."""
        return len(self._waiting)

    def _set_key(self, command: events.SetContentKey, _now: float) -> Actions:
        self._key = command.key
        return []

    # --- asks

    def answer_ask(
        self, ask: messages.Ask, offer: Offer | None, route: bytes, now: float
    ) -> Actions | None:
        if not ask.found or offer is not None:
            return None
        asked = RoutedAsk(route, ask)
        run = open_run(ask.found, Nonce(ask.nonce), self._key)
        if run is None or not run.ids:
            return self.machine.deny(ask, route, NOT_SEALED)
        if ask.reader.rank not in ask.readers:  # the machine would bind no reader
            return self.machine.deny(ask, route, NO_READER)
        if self.slots.is_written(run):
            self._waiting.pop(_key(ask), None)
            return self._grant(asked, run, now)
        if self.slots.is_stale(run):
            return self._deny(asked, STALE)
        return self._wait(asked, run, now)

    def _wait(self, asked: RoutedAsk, run: Run, now: float) -> Actions:
        key = _key(asked.ask)
        known = self._waiting.get(key)
        if known is None:
            of_reader = sum(reader == key[-1] for _, _, reader in self._waiting)
            if len(self._waiting) >= MAX_WAITING or of_reader >= MAX_WAITING_OF_READER:
                return self._deny(asked, FULL)
        self._waiting[key] = _Waiting(asked, run, now + WAIT_S if known is None else known.until)
        self.next_due = min(self.next_due, now + LOOK_S)
        pending = messages.Pending(**self.machine.fields(asked.ask), state="computing")
        return [events.Reply(asked.route, pending)]

    def _grant(self, asked: RoutedAsk, run: Run, now: float) -> Actions:
        """Offer the blocks, and let the machine answer."""
        machine, (route, ask) = self.machine, asked
        try:  # before a slot is taken: a reader said at which place the run begins
            table = Table(run.first_block, run.ids)
        except ValueError as error:
            return self._deny(asked, str(error))
        fence = self.slots.open(run, Nonce(ask.nonce))
        if fence is None:
            return self._deny(asked, STALE if self.slots.is_stale(run) else FULL)
        offer = events.PrepareOffer(
            Nonce(ask.nonce),
            RequestId(f"cached {short(ask.nonce)}"),
            ask.context,
            run.end_block * self._entry_size,
            (table,),
            is_cached=True,
            slot=fence.slot,
            fence_token=fence.token,
        )
        return machine.handle(offer, now) + machine.handle(events.Asked(route, ask), now)

    def _deny(self, asked: RoutedAsk, reason: str) -> Actions:
        self._waiting.pop(_key(asked.ask), None)
        return self.machine.deny(asked.ask, asked.route, reason)

    def on_tick(self, now: float) -> Actions:
        if now < self.next_due:
            return []
        actions: Actions = []
        written, num_granted = self.slots.last_written(), 0
        for each in list(self._waiting.values()):
            # Whether a block was reused costs more, so only a grant looks for that.
            if each.run.need <= written:
                if num_granted == GRANTS_OF_TURN:
                    self.next_due = now
                    return actions
                num_granted += 1
                key = _key(each.asked.ask)
                del self._waiting[key]
                if key[0] in self.machine.offers:  # another rank of its engine was first
                    actions += self.machine.handle(events.Asked(*each.asked), now)
                else:
                    actions += self._grant(each.asked, each.run, now)
            elif each.until <= now:
                actions += self._deny(each.asked, NOT_WRITTEN)
        self.next_due = now + LOOK_S if self._waiting else math.inf
        return actions

    def expects(self, nonce: Nonce) -> bool:
        return any(waiting == nonce for waiting, _, _ in self._waiting)

    def on_release(self, release: messages.Release, now: float) -> Actions:
        del now
        self._waiting.pop(_key(release), None)
        return []

    # --- the offer

    def is_void(self, offer: Offer) -> bool:
        prepared = offer.prepared
        if not prepared.is_cached or prepared.slot is None:
            return False
        return not self.slots.is_valid(Fence(prepared.slot, prepared.fence_token))

    def on_freed(self, offer: Offer) -> Actions:
        if offer.prepared.is_cached and offer.prepared.slot is not None:
            self.slots.close(offer.prepared.slot)
        return []

    def clear(self) -> Actions:
        self._waiting.clear()
        self.next_due = math.inf
        self.slots.close_all()
        return []

    def check(self) -> None:
        offers = self.machine.offers.values()
        mine = [(o.nonce, o.prepared.slot) for o in offers if o.prepared.is_cached]
        wrong = self.slots.check((nonce, slot) for nonce, slot in mine if slot is not None)
        if self._waiting and self.next_due == math.inf:
            wrong.append(f"{len(self._waiting)} asks wait without a deadline")
        if wrong:
            raise LocalProtocolError(f"cached blocks: {'; '.join(wrong)}")


def _key(message: messages.Ask | messages.Release) -> _Key:
    return message.nonce, message.claim, (message.reader.engine, message.reader.rank)


def build(setup: RankSetup, *, num_content_slots: int = NUM_SLOTS) -> Feature:
    """Let other engines read cached blocks, of up to `num_content_slots` offers at a time."""
    groups = setup.layout.groups
    is_on = setup.config.conversations == ON and setup.is_prefill
    if not is_on or len(groups) != 1:  # the scheduler's half refuses several groups at the start
        return Feature()
    slots = ContentSlots(groups[0].num_entries, num_content_slots)
    return Feature(prefill=ContentPart(slots, groups[0].entry_size), step=slots)
