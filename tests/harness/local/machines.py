"""Checks the machines of a rank between two events: loads, offers, fence slots and ring.

Each function raises LocalProtocolError and says what does not hold.
"""

import math

from nixl_kv.errors import LocalProtocolError
from nixl_kv.protocol import events
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.load import ENDED, POSTED
from nixl_kv.protocol.load import State as ReadState
from nixl_kv.protocol.prefill import Offer, PrefillMachine, RingBook, State, may_take
from nixl_kv.protocol.read_queue import ReadQueue


def by_name(counts: events.Counts) -> dict[str, float]:
    """Amounts by `name` or `name label`; of durations, how many there are. Without the peers."""
    numbers = counts.amounts | {series: len(times) for series, times in counts.seconds.items()}
    return {" ".join(series).strip(): n for series, n in numbers.items() if series[0] != "peers"}


def check_decode(machine: DecodeMachine) -> None:
    """Check the loads, the tables that find them, and the read queue."""
    check_queue(machine._queue)
    reads = []
    for load in machine.loads:
        for read in load.reads.values():
            if read.state in POSTED and (load.start is None or read.grant is None):
                raise LocalProtocolError(f"{read.state.name} without blocks or grant")
            if read.state is ReadState.FAILED and load.failure is None:
                raise LocalProtocolError("FAILED without a reason")
            if read.state not in ENDED:
                reads.append((read.endpoint, (load.claim, read.rank)))
    found = [(endpoint, key) for endpoint, keys in machine._unfinished.items() for key in keys]
    if sorted(reads) != sorted(found):
        raise LocalProtocolError(f"reads {sorted(reads)}, found by endpoint {sorted(found)}")
    by_peer = [claim for loads in machine._by_peer.values() for claim in loads]
    if sorted(by_peer) != sorted(machine._loads):
        raise LocalProtocolError(f"loads {sorted(machine._loads)}, by peer {sorted(by_peer)}")


def check_queue(queue: ReadQueue) -> None:
    """Check the sums of all lanes, and the turns of those that wait."""
    lanes = queue._lanes
    moving = [lane for lane in lanes.values() if not lane.is_stalled]
    waiting = sorted(endpoint for endpoint, lane in lanes.items() if lane.waiting)
    if any(lane.num_bytes != sum(lane.under_way.values()) for lane in lanes.values()):
        raise LocalProtocolError("the bytes of a lane are not those under way in it")
    if queue._num_bytes != sum(lane.num_bytes for lane in moving):
        raise LocalProtocolError(f"{queue._num_bytes} bytes are not those of the lanes")
    if queue._num_reads != sum(len(lane.under_way) for lane in lanes.values()):
        raise LocalProtocolError(f"{queue._num_reads} reads are not those of the lanes")
    if sorted(queue._turns) != waiting:
        raise LocalProtocolError(f"lanes {waiting} wait, the turns are {queue._turns}")


def check_prefill(machine: PrefillMachine) -> None:
    """Check the fence slots, each offer and the ring."""
    offers = [o for o in machine.offers.values() if o.prepared.slot is None]  # not of `PairSlots`
    bound = [o.binding.slot for o in offers if o.binding is not None]
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
    since = math.inf if offer.binding is None else offer.binding.reading_since
    if (offer.state is State.READING and offer.is_pinned) != (since < math.inf):
        raise LocalProtocolError(f"{name}, pinned: {offer.is_pinned}, read since {since}")


def check_ring(ring: RingBook) -> None:
    """Check that no chunk waits for a slot that its reader may take."""
    free = ring.slots.count(None)
    for holder, _ in ring.waiting:
        held = sum(slot is not None and slot.holder == holder for slot in ring.slots)
        if may_take(held, free):
            raise LocalProtocolError(f"a chunk of {holder} waits beside {free} free slots")
