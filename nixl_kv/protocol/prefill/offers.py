"""All offers of one prefill rank: which exist, who holds them, in which generation slot.

Whatever a message names is found by key, and time costs what is due, however many offers there are.
"""

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import EngineId, Nonce, Rank, new_generation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.deadlines import Deadlines
from nixl_kv.protocol.prefill.offer import Binding, Offer, State, reader_name


class OfferBook:
    """Offers and generation slots. Methods that end something return what must be done, in order.

    `lease_s` and `offer_ttl_s` are seconds; `now` is monotonic, in seconds.
    """

    def __init__(
        self, record: events.Record, *, num_slots: int, offer_ttl_s: float, lease_s: float
    ) -> None:
        """Start with nothing on offer."""
        self.lease_s = lease_s
        self._record = record
        self._offer_ttl_s = offer_ttl_s
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))
        self._offers: dict[Nonce, Offer] = {}
        self._by_reader: dict[tuple[EngineId, Rank], dict[Nonce, tuple[Offer, Binding]]] = {}
        self._due = Deadlines[Nonce]()

    def get(self, nonce: Nonce) -> Offer | None:
        """The offer, while it lives."""
        return self._offers.get(nonce)

    def all(self) -> list[Offer]:
        """Every offer that lives."""
        return list(self._offers.values())

    def held_by(self, reader: messages.Reader) -> list[tuple[Offer, Binding]]:
        """The offers that this reader may be reading."""
        held = self._by_reader.get((EngineId(reader.engine), Rank(reader.rank)), {}).values()
        return [each for each in held if each[1].expects(each[1].claim, reader)]

    @property
    def any_granted(self) -> bool:
        """Whether somebody may be reading this rank's memory."""
        return len(self._free_slots) < self._num_slots

    @property
    def next_due(self) -> float | None:
        """When some offer or lease may run out by itself; None for never."""
        return self._due.next

    def prepare(self, command: events.PrepareOffer) -> None:
        """Add an offer to come; again after a preemption, then with other blocks."""
        offer = self._offers.get(command.nonce)
        if offer is None:
            self._offers[command.nonce] = Offer(command, self._record)
        else:
            offer.prepare(command)

    def publish(self, command: events.PublishOffer, now: float) -> None:
        """Start the offer's time. One that is unknown was read already: readers can be quicker."""
        offer = self._offers.get(command.nonce)
        if offer is None:
            return
        granted = offer.state is State.GRANTED
        offer.move(State.GRANTED if granted else State.OFFERED, command)
        if not granted:
            offer.ends_at = now + self._offer_ttl_s
            self._due.set(offer.nonce, offer.ends_at)

    def withdraw(self, command: events.WithdrawOffer) -> None:
        """Forget an offer whose ticket never went out."""
        offer = self._offers.get(command.nonce)
        if offer is not None:
            offer.move(None, command)
            self._remove(offer)

    def clear(self) -> None:
        """Forget everything, whatever state this is in; all slots must have been cleared before."""
        self._offers.clear()
        self._by_reader.clear()
        self._due.clear()
        self._free_slots = list(range(self._num_slots))

    def bind(self, offer: Offer, ask: messages.Ask, now: float) -> events.WriteSlot | None:
        """Grant to the ask's claim, a lease for each expected reader; None if no slot is free."""
        if not self._free_slots:
            return None
        offer.binding = Binding(
            ask.claim,
            ask.reader.engine,
            self._free_slots.pop(),
            new_generation(),
            dict.fromkeys(ask.readers, now + self.lease_s),
        )
        offer.ends_at = None
        for rank in ask.readers:
            self._by_reader.setdefault((offer.binding.engine, rank), {})[offer.nonce] = (
                offer,
                offer.binding,
            )
        self._due.set(offer.nonce, now + self.lease_s)
        offer.move(State.GRANTED, ask, peer=reader_name(ask.reader))
        return events.WriteSlot(offer.binding.slot, offer.binding.generation)

    def settle(
        self,
        offer: Offer,
        event: messages.Release | messages.Renew | events.Tick,
        end: events.OfferEnd,
    ) -> list[events.Action]:
        """End the offer if all its readers have ended: first the slot, then the blocks."""
        binding = offer.binding
        if binding is None or binding.reading:
            return []
        peer = f"engine {binding.engine!r}"
        offer.move(None, event, peer=peer, detail=end.value)
        offer.binding = None
        self._free_slots.append(binding.slot)
        for rank in binding.leases:
            held = self._by_reader[binding.engine, rank]
            del held[offer.nonce]
            if not held:
                del self._by_reader[binding.engine, rank]
        self._remove(offer)
        return [
            events.ClearSlot(binding.slot),
            events.OfferEnded(offer.nonce, offer.request, end),
        ]

    def end_unclaimed(
        self,
        offer: Offer,
        event: messages.Release | events.Tick | events.RevokeOffer,
        end: events.OfferEnd,
    ) -> list[events.Action]:
        """End an offer that nobody was granted: nobody can be reading it."""
        offer.move(None, event, detail=end.value)
        self._remove(offer)
        return [events.OfferEnded(offer.nonce, offer.request, end)]

    def on_tick(self, tick: events.Tick, now: float) -> list[events.Action]:
        """End what has run out of time.

        A lease that was renewed is looked at when it would have run out, and then anew.
        """
        actions: list[events.Action] = []
        for nonce in self._due.pop_due(now):
            offer = self._offers[nonce]
            if offer.binding is None:
                actions += self.end_unclaimed(offer, tick, events.OfferEnd.UNCLAIMED)
                continue
            offer.binding.expire(now)
            actions += self.settle(offer, tick, events.OfferEnd.EXPIRED)
            if offer.binding is not None:
                self._due.set(nonce, offer.binding.next_expiry)
        return actions

    def validate(self) -> None:
        """Check every offer, and that each slot is granted once or free."""
        bound = [o.binding.slot for o in self._offers.values() if o.binding is not None]
        if sorted(bound + self._free_slots) != list(range(self._num_slots)):
            raise LocalProtocolError(f"slots {bound} granted, {self._free_slots} free")
        for offer in self._offers.values():
            offer.validate()

    def _remove(self, offer: Offer) -> None:
        del self._offers[offer.nonce]
        self._due.set(offer.nonce, None)
