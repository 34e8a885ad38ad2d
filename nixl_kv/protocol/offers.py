"""The book of all offers of one prefill rank: which exist, who holds them, in which slot."""

from collections.abc import Iterator

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Nonce, Rank, new_generation
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Ask, Reader
from nixl_kv.protocol.sending import Binding, Cause, Offering, State


class Offers:
    """Offers and generation slots. Methods that end something return what must be done, in order.

    `lease_s` and `offer_ttl_s` are seconds; `now` is monotonic, in seconds.
    """

    def __init__(self, *, num_slots: int, offer_ttl_s: float, lease_s: float) -> None:
        """Begin with nothing on offer."""
        self.lease_s = lease_s
        self._offer_ttl_s = offer_ttl_s
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))
        self._offers: dict[Nonce, Offering] = {}

    def __repr__(self) -> str:
        """How many offers are in which state."""
        states = [offer.state.name for offer in self._offers.values()]
        counts = ", ".join(f"{states.count(name)} {name}" for name in sorted(set(states)))
        return f"<Offers: {counts or 'none'}>"

    def get(self, nonce: str) -> Offering | None:
        """The offer, while it lives."""
        return self._offers.get(Nonce(nonce))

    def held_by(self, reader: Reader) -> Iterator[tuple[Offering, Binding]]:
        """The offers that this reader may be reading."""
        for offer in list(self._offers.values()):
            binding = offer.binding
            if binding is not None and binding.expects(binding.claim, reader):
                yield offer, binding

    @property
    def granted(self) -> bool:
        """Whether somebody may be reading this rank's memory."""
        return any(offer.state is State.GRANTED for offer in self._offers.values())

    @property
    def timed(self) -> bool:
        """Whether some offer or lease runs out by itself."""
        return any(o.state in (State.OFFERED, State.GRANTED) for o in self._offers.values())

    def prepare(self, command: events.Prepare) -> None:
        """Note an offer to come; again after a preemption, then with other blocks.

        Raises:
            LocalProtocolError: if its ticket is out already.
        """
        known = self._offers.get(command.nonce)
        if known is not None and known.state is not State.PREPARED:
            raise LocalProtocolError(f"request {command.request!r} is {known.state.name} already")
        self._offers[command.nonce] = Offering(
            command.nonce, command.request, command.context, command.num_tokens, command.tables
        )

    def ticket_out(self, nonce: Nonce, now: float) -> None:
        """Start the offer's time. One that is unknown was read already: readers can be quicker."""
        offer = self._offers.get(nonce)
        if offer is None:
            return
        offer.move(Cause.TICKET_OUT)
        if offer.state is State.OFFERED:
            offer.ends_at = now + self._offer_ttl_s

    def withdraw(self, nonce: Nonce) -> None:
        """Forget an offer whose ticket never went out."""
        offer = self._offers.get(nonce)
        if offer is not None:
            offer.move(Cause.NO_TICKET)
            del self._offers[nonce]

    def clear(self) -> None:
        """Forget everything, whatever state this is in; all slots must have been cleared before."""
        self._offers.clear()
        self._free_slots = list(range(self._num_slots))

    def bind(self, offer: Offering, ask: Ask, now: float) -> events.WriteSlot | None:
        """Grant to the ask's claim, a lease for each expected reader; None if no slot is free."""
        if not self._free_slots:
            return None
        offer.binding = Binding(
            Claim(ask.claim),
            ask.reader.engine,
            self._free_slots.pop(),
            new_generation(),
            {Rank(rank): now + self.lease_s for rank in ask.readers},
        )
        offer.ends_at = None
        offer.move(Cause.CLAIMED)
        return events.WriteSlot(offer.binding.slot, offer.binding.generation)

    def settle(self, offer: Offering, how: events.How) -> list[events.Action]:
        """Release the offer if all its readers have ended: first the slot, then the blocks."""
        binding = offer.binding
        if binding is None or not binding.all_ended:
            return []
        offer.move(Cause.ALL_ENDED)
        offer.binding = None
        self._free_slots.append(binding.slot)
        del self._offers[offer.nonce]
        return [events.ClearSlot(binding.slot), events.Sent(offer.request, how)]

    def give_up(self, offer: Offering, cause: Cause, how: events.How) -> list[events.Action]:
        """Release an offer that nobody was granted: nobody can be reading it."""
        offer.move(cause)
        if offer.state is State.GRANTED:
            return []
        offer.ends_at = None
        del self._offers[offer.nonce]
        return [events.Sent(offer.request, how)]

    def expire(self, now: float) -> list[events.Action]:
        """End what has run out of time."""
        actions: list[events.Action] = []
        for offer in list(self._offers.values()):
            if offer.binding is not None:
                offer.binding.expire(now)
                actions += self.settle(offer, events.How.EXPIRED)
            elif offer.ends_at is not None and offer.ends_at <= now:
                actions += self.give_up(offer, Cause.UNCLAIMED, events.How.UNCLAIMED)
        return actions

    def validate(self) -> None:
        """Check the book.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        bound = [o.binding.slot for o in self._offers.values() if o.binding is not None]
        if sorted(bound + self._free_slots) != list(range(self._num_slots)):
            raise LocalProtocolError(f"slots {bound} granted, {self._free_slots} free")
        for offer in self._offers.values():
            offer.validate()
