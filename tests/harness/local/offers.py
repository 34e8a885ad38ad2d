"""Checks a prefill rank's offers, fence slots and ring between two events.

Each function raises LocalProtocolError and says what does not hold.
"""

import math

from nixl_kv.errors import LocalProtocolError
from nixl_kv.protocol.prefill import Offer, PrefillMachine, RingBook, State, may_take


def check_prefill(machine: PrefillMachine) -> None:
    """Check the fence slots, each offer and the ring."""
    bound = [o.binding.slot for o in machine.offers.values() if o.binding is not None]
    if sorted(bound + machine.free_slots) != list(range(machine.num_slots)):
        raise LocalProtocolError(f"slots {bound} granted, {machine.free_slots} free")
    for offer in machine.offers.values():
        check_offer(offer)
    check_ring(machine.ring)


def check_offer(offer: Offer) -> None:
    """Check that an offer's state fits its binding and its end."""
    name = offer.state.name
    if (offer.state in (State.PREPARED, State.OFFERED)) != (offer.binding is None):
        raise LocalProtocolError(f"{name} with binding {offer.binding}")
    if (offer.state is State.OFFERED) != (offer.ends_at < math.inf):
        raise LocalProtocolError(f"{name} with an end at {offer.ends_at}")
    if offer.binding is not None and not offer.binding.readers:
        raise LocalProtocolError(f"{name}, but all readers have ended")


def check_ring(ring: RingBook) -> None:
    """Check that no chunk waits for a slot that its reader may take."""
    free = ring.slots.count(None)
    for holder, _ in ring.waiting:
        held = sum(slot is not None and slot.holder == holder for slot in ring.slots)
        if may_take(held, free):
            raise LocalProtocolError(f"a chunk of {holder} waits beside {free} free slots")
