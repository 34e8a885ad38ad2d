"""All offers of one prefill rank: which exist, who holds them, in which generation slot.

Whatever a message names is found by key, and time costs what is due, however many offers there are.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import EngineId, Nonce, Rank, new_generation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.deadlines import Deadlines
from nixl_kv.protocol.prefill.offer import Binding, Offer, State, reader_name
from nixl_kv.protocol.prefill.ring import RingBook

RECALL_S: Final = 1.0
"""How long a reader may take to answer a recall; then the blocks are taken back without a word."""


class OfferBook:
    """Offers and generation slots. Methods that end something return what must be done, in order.

    All times are in seconds; `now` is monotonic.
    """

    def __init__(
        self,
        record: events.Record,
        *,
        num_slots: int,
        offer_ttl_s: float,
        lease_s: float,
        hold_s: float,
    ) -> None:
        """Start with nothing on offer."""
        self.ring = RingBook(0)
        self.lease_s = lease_s
        self._record = record
        self._offer_ttl_s = offer_ttl_s
        self._hold_s = hold_s
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))
        self._offers: dict[Nonce, Offer] = {}
        self._by_reader: dict[tuple[EngineId, Rank], dict[Nonce, tuple[Offer, Binding]]] = {}
        self._due = Deadlines[Nonce]()

    def set_ring(self, num_slots: int) -> None:
        """This rank packs what is read, into so many slots; before any offer."""
        self.ring = RingBook(num_slots)

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
        since, due = self.ring.next_due_since, self._due.next
        if since is None:
            return due
        return since + self._hold_s if due is None else min(due, since + self._hold_s)

    def prepare(self, command: events.PrepareOffer) -> None:
        """Add an offer to come. Each nonce is prepared once; a preempted request gets a new one."""
        if command.nonce in self._offers:
            raise LocalProtocolError(f"offer of request {command.request!r} was prepared before")
        self._offers[command.nonce] = Offer(command, self._record)

    def publish(self, command: events.PublishOffer, now: float) -> None:
        """Start the offer's time. One that is unknown was read already: readers can be quicker."""
        offer = self._offers.get(command.nonce)
        if offer is None:
            return
        is_granted = offer.binding is not None
        offer.move(offer.state if is_granted else State.OFFERED, command)
        if not is_granted:
            offer.ends_at = now + self._offer_ttl_s
            self._due.set(offer.nonce, offer.ends_at)

    def withdraw(self, command: events.WithdrawOffer) -> None:
        """Forget an offer whose ticket never went out."""
        offer = self._offers.get(command.nonce)
        if offer is not None:
            offer.move(None, command)
            self._remove(offer)

    def clear(self, writing: Collection[int] = ()) -> None:
        """Forget everything, whatever state this is in; all slots must have been cleared before.

        `writing` are the slots of the ring that are still being written.
        """
        self.ring.clear(writing)
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
            held_until=now + self._hold_s,
        )
        offer.ends_at = None
        for rank in ask.readers:
            self._by_reader.setdefault((offer.binding.engine, rank), {})[offer.nonce] = (
                offer,
                offer.binding,
            )
        offer.move(State.GRANTED, ask, peer=reader_name(ask.reader))
        self._due.set(offer.nonce, offer.next_due)
        return events.WriteSlot(offer.binding.slot, offer.binding.generation)

    def settle(
        self,
        offer: Offer,
        event: messages.Release | messages.Renew | events.Tick,
        end: events.OfferEnd,
    ) -> list[events.Action]:
        """End the offer if all its readers have ended: first the slot, then the blocks.

        What they have in the ring may be used again as well, when the slot has been cleared.
        """
        binding = offer.binding
        if binding is None or binding.readers:
            return []
        peer = f"engine {binding.engine!r}"
        offer.move(None, event, peer=peer, detail=end.value)
        offer.binding = None
        self._free_slots.append(binding.slot)
        for rank in binding.leases:
            self.ring.forget((offer.nonce, rank))
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
        event: messages.Release | events.Tick | events.RevokeOffer | events.ReclaimBlocks,
        end: events.OfferEnd,
    ) -> list[events.Action]:
        """End an offer that nobody was granted: nobody can be reading it."""
        offer.move(None, event, detail=end.value)
        self._remove(offer)
        return [events.OfferEnded(offer.nonce, offer.request, end)]

    def take_back_slot(self, tick: events.Tick, now: float) -> list[events.Action]:
        """While chunks wait for slots: a reader that has had one for too long loses its claim."""
        since, longest = self.ring.next_due_since, self.ring.longest_held()
        if since is None or longest is None or now < since + self._hold_s:
            return []
        offer = self._offers[longest[0][0]]
        if offer.binding is not None:
            offer.binding.ended.update(offer.binding.leases)
        return self.settle(offer, tick, events.OfferEnd.EXPIRED)

    def recall(
        self, offer: Offer, event: events.Tick | events.ReclaimBlocks, now: float
    ) -> list[tuple[Rank, bytes]]:
        """Ask for its blocks back. Returns the readers to tell, each with the route to it.

        Those who have not asked yet will be denied.
        """
        binding = offer.binding
        if binding is None or offer.state is not State.GRANTED:
            return []
        offer.move(State.RECALLED, event, peer=f"engine {binding.engine!r}")
        binding.held_until = now + RECALL_S
        self._due.set(offer.nonce, offer.next_due)
        return [(rank, binding.routes[rank]) for rank in binding.readers if rank in binding.routes]

    def to_reclaim(self, num_blocks: int) -> list[Offer]:
        """Which offers to end or recall, so that so many blocks come free: as few as possible.

        First those that nobody has claimed, then those that nobody reads yet, of the engine that
        holds most; the oldest first.
        """
        unclaimed = [offer for offer in self.all() if offer.state is State.OFFERED]
        granted: dict[EngineId, list[Offer]] = {}
        held: Counter[EngineId] = Counter()
        for offer in self.all():
            if offer.binding is None:
                continue
            held[offer.binding.engine] += offer.num_blocks
            if offer.state is State.GRANTED:
                granted.setdefault(offer.binding.engine, []).append(offer)
            elif offer.state is State.RECALLED:
                num_blocks -= offer.num_blocks
        chosen: list[Offer] = []
        while num_blocks > 0 and (unclaimed or granted):
            if unclaimed:
                offer = unclaimed.pop(0)
            else:
                engine = max(granted, key=lambda each: held[each])
                offer = granted[engine].pop(0)
                held[engine] -= offer.num_blocks
                if not granted[engine]:
                    del granted[engine]
            chosen.append(offer)
            num_blocks -= offer.num_blocks
        return chosen

    def pop_due(self, now: float) -> list[Offer]:
        """The offers for which time changes something, or did before they were renewed."""
        return [self._offers[nonce] for nonce in self._due.pop_due(now)]

    def on_time(self, offer: Offer, tick: events.Tick, now: float) -> list[events.Action]:
        """End it if it is out of time; or look at it again when it may be."""
        binding = offer.binding
        if binding is None:
            return self.end_unclaimed(offer, tick, events.OfferEnd.UNCLAIMED)
        # What such a reader has in the ring stays until the slot is cleared: it may still read.
        binding.expire(now)
        end = events.OfferEnd.EXPIRED
        if offer.state is State.RECALLED and binding.readers and binding.held_until <= now:
            binding.ended.update(binding.leases)
            end = events.OfferEnd.REVOKED
        actions = self.settle(offer, tick, end)
        if offer.binding is not None:
            self._due.set(offer.nonce, offer.next_due)
        return actions

    def validate(self) -> None:
        """Check every offer, and that each slot is granted once or free."""
        bound = [o.binding.slot for o in self._offers.values() if o.binding is not None]
        if sorted(bound + self._free_slots) != list(range(self._num_slots)):
            raise LocalProtocolError(f"slots {bound} granted, {self._free_slots} free")
        for offer in self._offers.values():
            offer.validate()
        self.ring.validate()

    def _remove(self, offer: Offer) -> None:
        del self._offers[offer.nonce]
        self._due.set(offer.nonce, None)
