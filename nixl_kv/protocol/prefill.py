"""The prefill side of the protocol on one rank: offers, and who may read them until when.

An offer is a finished prefill whose blocks stay pinned until decode has read them. The rank grants
it to the first claim that asks, holds a lease for each reader of that claim, and gives the blocks
back when all readers have ended. `PrefillMachine` has no IO: commands, messages and ticks go into
`handle`, and actions come out.

    PREPARED  the step that completes the prompt is running; the ticket may not be out yet
    OFFERED   the ticket is out and no reader has asked; ends after `offer_ttl_s`
    GRANTED   bound to one claim; each expected reader has a lease, and none has begun to read
    RECALLED  the rank wants the blocks back: readers release the offer, unless they read it
    READING   a reader has begun

An offer ends, and is forgotten, when every reader has released it or lost its lease. It also ends
unclaimed: after its time, when its blocks are needed, or when no ticket went out.

The fence: the rank clears an offer's slot before it reports the offer as ended, and the caller
reuses the blocks only after that report. So a reader that finds the generation in the slot after
its last read knows that the rank held the blocks all the while.

Readers that ended are a set of ranks, never a count: a duplicate message ends one reader.
"""

import enum
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import (
    Claim,
    EngineId,
    Generation,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    new_generation,
    short,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import OfferEnd
from nixl_kv.protocol.machine import Deadlines, Machine, MachineState, Table
from nixl_kv.protocol.ring import RingBook, WaitingChunk

RECALL_S: Final = 1.0
"""How long readers may take to answer a recall; then the rank takes the blocks back."""


class State(MachineState):
    """The module's docstring explains each."""

    PREPARED = enum.auto()
    OFFERED = enum.auto()
    GRANTED = enum.auto()
    RECALLED = enum.auto()
    READING = enum.auto()


TRANSITIONS: Final[Table[State]] = {
    State.PREPARED: {
        events.PublishOffer: (State.OFFERED,),
        messages.Ask: (State.GRANTED,),
        messages.Release: (None,),
        events.WithdrawOffer: (None,),
    },
    State.OFFERED: {
        messages.Ask: (State.GRANTED,),
        messages.Release: (None,),
        events.Tick: (None,),
        events.RevokeOffer: (None,),
        events.ReclaimBlocks: (None,),
    },
    State.GRANTED: {
        events.PublishOffer: (State.GRANTED,),
        events.ReclaimBlocks: (State.RECALLED,),
        messages.Release: (None,),
        messages.Renew: (State.READING, None),
        events.Tick: (State.RECALLED, None),
    },
    State.RECALLED: {
        events.PublishOffer: (State.RECALLED,),
        messages.Release: (None,),
        messages.Renew: (State.READING, None),
        events.Tick: (None,),
    },
    State.READING: {
        events.PublishOffer: (State.READING,),
        messages.Release: (None,),
        messages.Renew: (None,),
        events.Tick: (None,),
    },
}
"""None: the offer ends.

Once it is granted, a Release, a Renew or an expired lease ends it only with its last reader.
A Tick also ends an offer that keeps a ring slot for too long while other chunks wait for one.
"""

MACHINE: Final = Machine("offer", TRANSITIONS)

BOUND: Final = frozenset({State.GRANTED, State.RECALLED, State.READING})
"""States in which a slot has the offer's generation."""

_ForClaim: TypeAlias = messages.Ask | messages.DigestRequest | messages.PackRequest


@dataclass
class Binding:
    """The claim that an offer is granted to. Times are in monotonic seconds."""

    claim: Claim
    engine: EngineId  # of the readers
    slot: int
    generation: Generation
    leases: dict[Rank, float]  # when each expected reader's lease ends, whether it asked or not
    held_until: float  # then an unread offer is recalled, and a recalled one taken back
    routes: dict[Rank, bytes] = field(default_factory=dict)  # to each reader that asked
    lives: dict[Rank, Incarnation] = field(default_factory=dict)  # of each reader that asked
    numbers: dict[Rank, int] = field(default_factory=dict)  # of each reader's latest ask
    ended: set[Rank] = field(default_factory=set)

    def expects(self, claim: Claim, reader: messages.Reader) -> bool:
        """Whether this reader belongs to the claim and has not ended.

        Each rank of an engine has its own incarnation; a rank's first ask tells which.
        """
        return (
            claim == self.claim
            and reader.engine == self.engine
            and reader.rank in self.leases
            and reader.rank not in self.ended
            and self.lives.get(reader.rank, reader.incarnation) == reader.incarnation
        )

    def expire(self, now: float) -> None:
        """End every reader whose lease has expired."""
        self.ended.update(rank for rank, until in self.leases.items() if until <= now)

    @property
    def next_expiry(self) -> float:
        return min(self.leases[rank] for rank in self.readers)

    @property
    def readers(self) -> list[Rank]:
        """Those that have not ended."""
        return sorted(set(self.leases) - self.ended)


@dataclass
class Offer:
    """One finished prefill of this rank. Times are in monotonic seconds."""

    prepared: events.PrepareOffer
    record: events.Record = field(repr=False)
    state: State = State.PREPARED
    ends_at: float | None = None  # while OFFERED
    binding: Binding | None = None  # while it is in BOUND
    is_written: bool = field(init=False)  # all its KV is in memory
    early: dict[tuple[type, Rank], events.Asked] = field(default_factory=dict)
    """Messages to answer once it is written: each reader's last one of each kind."""

    def __post_init__(self) -> None:
        self.is_written = self.prepared.is_written
        cause = f"PrepareOffer: offer {short(self.nonce)}"
        self.record(events.Transition(self.request, "", "", self.state.name, cause))

    @property
    def nonce(self) -> Nonce:
        return self.prepared.nonce

    @property
    def request(self) -> RequestId:
        return self.prepared.request

    @property
    def waits_for(self) -> str:
        """What has to happen next, for people."""
        if self.binding is not None:
            readers = ", ".join(map(str, self.binding.readers))
            return f"engine {self.binding.engine!r}, ranks {readers}"
        return "its ticket" if self.state is State.PREPARED else "a reader's ask"

    @property
    def num_blocks(self) -> int:
        """The blocks that it holds on this rank, including those it shares with other offers."""
        return sum(table.num_present for table in self.prepared.tables)

    @property
    def expires_at(self) -> float | None:
        """When it ends without another message; None: never."""
        if self.binding is None:
            return self.ends_at
        leases_end = max(self.binding.leases[rank] for rank in self.binding.readers)
        is_read = self.state is State.READING
        return leases_end if is_read else min(leases_end, self.binding.held_until)

    @property
    def next_due(self) -> float | None:
        """When time alone changes something; None: never."""
        if self.binding is None:
            return self.ends_at
        is_read = self.state is State.READING
        return min(self.binding.next_expiry, math.inf if is_read else self.binding.held_until)

    def may_be_asked_by(self, request: messages.DigestRequest) -> bool:
        """Whether this reader has not asked for the blocks yet, and still may."""
        binding = self.binding
        if binding is None:
            return True
        has_asked = request.reader.rank in binding.lives
        return not has_asked and binding.expects(request.claim, request.reader)

    def note(self, peer: str, cause: str) -> None:
        """Record why a reader got nothing; the state stays."""
        state = self.state.name
        self.record(events.Transition(self.request, peer, state, state, cause))

    def move(self, after: State | None, event: object, *, peer: str = "", detail: str = "") -> None:
        """Change the state; None: the offer ends."""
        self.state = MACHINE.move(
            self.record,
            (self.state, after),
            event,
            request=self.request,
            peer=peer,
            detail=detail,
        )

    def validate(self) -> None:
        """Check what must hold between any two events."""
        if (self.state in BOUND) != (self.binding is not None):
            raise LocalProtocolError(f"{self.state.name} with binding {self.binding}")
        if (self.state is State.OFFERED) != (self.ends_at is not None):
            raise LocalProtocolError(f"{self.state.name} with an end at {self.ends_at}")
        if self.binding is not None and not self.binding.readers:
            raise LocalProtocolError(f"{self.state.name}, but all readers have ended")


def reader_name(reader: messages.Reader) -> str:
    return f"engine {reader.engine!r}, rank {reader.rank}"


class PrefillMachine:
    """All offers of one prefill rank. Messages find them by key; a tick costs what is due.

    `now` is monotonic, in seconds. Methods that end something return the actions, in order.
    """

    def __init__(  # noqa: PLR0913 - the limits of one rank
        self,
        incarnation: Incarnation,
        record: events.Record,
        *,
        num_slots: int,
        offer_ttl_s: float,
        lease_s: float,
        hold_s: float,
        num_ring_slots: int = 0,
    ) -> None:
        """Begin the incarnation with no offer.

        Args:
            incarnation: of this rank; messages to another one change nothing.
            record: keeps transitions.
            num_slots: fence slots, which limits how many offers are granted at a time.
            offer_ttl_s: how long an offer waits for its first ask.
            lease_s: how long a reader may be silent.
            hold_s: how long a granted offer waits for its first read.
            num_ring_slots: slots of the staging ring; 0 if this rank does not pack.
        """
        self.ring = RingBook(num_ring_slots)
        self._incarnation = incarnation
        self._record = record
        self._offer_ttl_s = offer_ttl_s
        self._lease_s = lease_s
        self._hold_s = hold_s
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))
        self._offers: dict[Nonce, Offer] = {}
        self._by_reader: dict[tuple[EngineId, Rank], dict[Nonce, tuple[Offer, Binding]]] = {}
        self._due = Deadlines[Nonce]()

    def handle(self, event: events.PrefillEvent, now: float) -> list[events.Action]:
        """Feed one command, message or event to the machine."""
        actions = self._dispatch(event, now)
        return actions + self._pack_waiting(now) if self.ring.num_waiting else actions

    def _dispatch(self, event: events.PrefillEvent, now: float) -> list[events.Action]:  # noqa: C901 - one case per kind of event
        match event:
            case events.PrepareOffer():
                self._prepare(event)
            case events.MarkWritten():
                return self._on_written(event, now)
            case events.PublishOffer():
                self._publish(event, now)
            case events.WithdrawOffer():
                self._withdraw(event)
            case events.RevokeOffer():
                return self._revoke(event)
            case events.ReclaimBlocks():
                return self._reclaim(event, now)
            case events.Tick():
                due = [self._offers[nonce] for nonce in self._due.pop_due(now)]
                actions = [action for offer in due for action in self._on_due(offer, event, now)]
                return actions + self._take_back_slot(event, now)
            case events.DigestMade():
                return self._on_digest_made(event)
            case events.ChunkPacked():
                return self._on_packed(event)
            case events.Asked():
                return self._on_message(event, now)
        return []

    def get(self, nonce: Nonce) -> Offer | None:
        return self._offers.get(nonce)

    def all(self) -> list[Offer]:
        return list(self._offers.values())

    def held_by(self, reader: messages.Reader) -> list[tuple[Offer, Binding]]:
        """The offers that this reader may be reading."""
        held = self._by_reader.get((EngineId(reader.engine), Rank(reader.rank)), {}).values()
        return [each for each in held if each[1].expects(each[1].claim, reader)]

    @property
    def any_granted(self) -> bool:
        """Whether a reader may be reading this rank's memory."""
        return len(self._free_slots) < self._num_slots

    @property
    def next_due(self) -> float | None:
        """When a `Tick` does something; None: never."""
        since, due = self.ring.next_due_since, self._due.next
        if since is None:
            return due
        return since + self._hold_s if due is None else min(due, since + self._hold_s)

    def is_digest_wanted(self, request: messages.DigestRequest) -> bool:
        """Whether the rank may still send this digest."""
        return self._granted_to(request) is not None

    def clear(self, writing: Collection[int] = ()) -> None:
        """Forget everything, in whatever state it is. All fence slots must be cleared before.

        `writing` are the ring slots that are still being written.
        """
        self.ring.clear(writing)
        self._offers.clear()
        self._by_reader.clear()
        self._due.clear()
        self._free_slots = list(range(self._num_slots))

    def begin_life(self, incarnation: Incarnation, writing: Collection[int] = ()) -> None:
        """Forget everything and begin another incarnation."""
        self._incarnation = incarnation
        self.clear(writing)

    def validate(self) -> None:
        """Check every offer, and that each slot is granted once or free."""
        bound = [o.binding.slot for o in self._offers.values() if o.binding is not None]
        if sorted(bound + self._free_slots) != list(range(self._num_slots)):
            raise LocalProtocolError(f"slots {bound} granted, {self._free_slots} free")
        for offer in self._offers.values():
            offer.validate()
        self.ring.validate()

    # --- commands

    def _prepare(self, command: events.PrepareOffer) -> None:
        """Each nonce is prepared once; a preempted request gets a new one."""
        if command.nonce in self._offers:
            raise LocalProtocolError(f"offer of request {command.request!r} was prepared before")
        self._offers[command.nonce] = Offer(command, self._record)

    def _publish(self, command: events.PublishOffer, now: float) -> None:
        """Start the offer's time. Readers can be quicker than this command, even to the end."""
        offer = self._offers.get(command.nonce)
        if offer is None:
            return
        is_granted = offer.binding is not None
        offer.move(offer.state if is_granted else State.OFFERED, command)
        if not is_granted:
            offer.ends_at = now + self._offer_ttl_s
            self._due.set(offer.nonce, offer.ends_at)

    def _withdraw(self, command: events.WithdrawOffer) -> None:
        offer = self._offers.get(command.nonce)
        if offer is not None:
            offer.move(None, command)
            self._remove(offer)

    def _revoke(self, command: events.RevokeOffer) -> list[events.Action]:
        """The offer may have ended, or be granted, by now."""
        offer = self._offers.get(command.nonce)
        if offer is None or offer.state is not State.OFFERED:
            return []
        return self._end_unclaimed(offer, command, OfferEnd.REVOKED)

    def _reclaim(self, command: events.ReclaimBlocks, now: float) -> list[events.Action]:
        actions: list[events.Action] = []
        for offer in self.to_reclaim(command.num_blocks):
            if offer.state is State.OFFERED:
                actions += self._end_unclaimed(offer, command, OfferEnd.REVOKED)
            else:
                actions += self.recall(offer, command, now)
        return actions

    def _on_written(self, command: events.MarkWritten, now: float) -> list[events.Action]:
        """Answer the readers that asked before the KV was in memory."""
        offer = self._offers.get(command.nonce)
        if offer is None:
            return []
        offer.is_written = True
        early, offer.early = offer.early, {}
        return [action for asked in early.values() for action in self._on_message(asked, now)]

    # --- asks

    def _on_message(self, event: events.Asked, now: float) -> list[events.Action]:
        match event.message:
            case messages.Ask() as ask:
                return self._on_ask(ask, event.route, now)
            case messages.DigestRequest() as request:
                return self._on_digest_request(request, event.route)
            case messages.PackRequest() as pack:
                return self._on_pack_request(pack, event.route)
            case messages.Renew() as renew:
                return self._on_renew(renew, event.route, now)
            case messages.Release() as release:
                return self._on_release(release)

    def _on_ask(self, ask: messages.Ask, route: bytes, now: float) -> list[events.Action]:
        if ask.incarnation != self._incarnation:
            return self._deny(ask, route, f"meant for incarnation {short(ask.incarnation)}")
        offer = self._offers.get(ask.nonce)
        if offer is None:
            return self._deny(ask, route, "no such offer: used, expired, or never made")
        if offer.prepared.context != ask.context:
            return self._deny(ask, route, "another prompt")
        if offer.binding is not None:
            return self._grant(offer, offer.binding, ask, route=route, now=now)
        if ask.reader.rank not in ask.readers:
            detail = f"rank {ask.reader.rank} is not among its own readers"
            return self._deny(ask, route, detail)
        if not self._free_slots:
            return self._deny(ask, route, "all generation slots are granted")
        binding = self._bind(offer, ask, now)
        write_slot = events.WriteSlot(binding.slot, binding.generation)
        return [write_slot, *self._grant(offer, binding, ask, route=route, now=now)]

    def _bind(self, offer: Offer, ask: messages.Ask, now: float) -> Binding:
        """The first ask binds the offer to its claim, with a lease for each expected reader."""
        offer.binding = binding = Binding(
            ask.claim,
            ask.reader.engine,
            self._free_slots.pop(),
            new_generation(),
            dict.fromkeys(ask.readers, now + self._lease_s),
            held_until=now + self._hold_s,
        )
        offer.ends_at = None
        for rank in ask.readers:
            held = self._by_reader.setdefault((binding.engine, rank), {})
            held[offer.nonce] = offer, binding
        offer.move(State.GRANTED, ask, peer=reader_name(ask.reader))
        self._due.set(offer.nonce, offer.next_due)
        return binding

    def _grant(
        self, offer: Offer, binding: Binding, ask: messages.Ask, *, route: bytes, now: float
    ) -> list[events.Action]:
        """Grant, or grant again: the reader repeats its ask if the grant was lost."""
        if not binding.expects(ask.claim, ask.reader):
            return self._deny(ask, route, "claimed by another, or ended for this reader")
        if offer.state is State.RECALLED:
            return self._deny(ask, route, "its blocks are wanted back")
        rank = ask.reader.rank
        binding.routes[rank] = route
        binding.leases[rank] = now + self._lease_s
        binding.lives[rank] = ask.reader.incarnation
        binding.numbers[rank] = max(ask.number, binding.numbers.get(rank, 0))
        if not offer.is_written:
            offer.early[type(ask), rank] = events.Asked(route, ask)
            return []
        grant = messages.Grant(
            incarnation=self._incarnation,
            nonce=ask.nonce,
            claim=ask.claim,
            reader=ask.reader,
            lease_s=self._lease_s,
            tables=offer.prepared.tables,
            slot=binding.slot,
            generation=binding.generation,
        )
        return [events.Reply(route, grant)]

    def _deny(self, message: _ForClaim, route: bytes, reason: str) -> list[events.Action]:
        """Deny; the reason stays on this side, so that strangers learn nothing."""
        offer = self._offers.get(message.nonce)
        if offer is not None:  # strangers could fill the event log with unknown offers
            cause = f"{type(message).__name__} denied: {reason}"
            offer.note(reader_name(message.reader), cause)
        return [events.AskDenied(message.nonce, reason), self._denial(message, route)]

    def _denial(self, message: _ForClaim, route: bytes) -> events.Reply:
        denial = messages.Deny(
            incarnation=self._incarnation,
            nonce=message.nonce,
            claim=message.claim,
            reader=message.reader,
        )
        return events.Reply(route, denial)

    # --- digests

    def _granted_to(self, request: messages.DigestRequest | messages.PackRequest) -> Offer | None:
        """The offer, if it is granted to this reader and this reader has asked for it."""
        offer = self._offers.get(request.nonce)
        if offer is None or offer.binding is None or request.incarnation != self._incarnation:
            return None
        has_asked = request.reader.rank in offer.binding.lives
        is_expected = offer.binding.expects(request.claim, request.reader)
        return offer if has_asked and is_expected else None

    def _on_digest_request(
        self, request: messages.DigestRequest, route: bytes
    ) -> list[events.Action]:
        """Digest the blocks that a reader reads. Its request may overtake its ask."""
        offer = self._offers.get(request.nonce)
        if offer is None:  # its ask was denied, and the log says so
            return [self._denial(request, route)]
        if request.incarnation == self._incarnation and offer.may_be_asked_by(request):
            return []  # a denial would end the reader's whole load; it repeats this request
        offer = self._granted_to(request)
        if offer is None:
            return self._deny(request, route, "a digest of blocks that are not granted to it")
        if not offer.is_written:
            offer.early[type(request), request.reader.rank] = events.Asked(route, request)
            return []
        num_tokens = offer.prepared.num_tokens
        if request.end > num_tokens:
            return self._deny(request, route, f"a digest up to token {request.end} of {num_tokens}")
        return [events.MakeDigest(route, request, offer.prepared.tables)]

    def _on_digest_made(self, event: events.DigestMade) -> list[events.Action]:
        """Send a digest if the blocks were held until now; else they may have changed meanwhile."""
        request = event.digest_request
        if not self.is_digest_wanted(request):
            return [self._denial(request, event.route)]
        if event.refusal is not None:
            return self._deny(request, event.route, event.refusal)
        reply = messages.DigestReply(
            incarnation=self._incarnation,
            nonce=request.nonce,
            claim=request.claim,
            reader=request.reader,
            rows=event.rows,
            columns=event.columns,
        )
        return [events.Reply(event.route, reply)]

    # --- packed chunks

    def _on_pack_request(self, request: messages.PackRequest, route: bytes) -> list[events.Action]:
        """Pack a chunk for a reader, once there is a ring slot for it.

        The reader repeats its request if the answer was lost, and gets the same answer.
        """
        offer, ring = self._granted_to(request), self.ring
        if offer is None or not offer.is_written:
            return self._deny(request, route, "a chunk of blocks that are not granted to it")
        num_tokens = offer.prepared.num_tokens
        if request.end > num_tokens:
            return self._deny(request, route, f"a chunk up to token {request.end} of {num_tokens}")
        holder = offer.nonce, request.reader.rank
        if not ring.is_latest(holder, request.number):
            return []
        ring.release(holder, request.holds)
        if request.chunk not in request.holds:
            return []  # the reader has read it, and asks for nothing
        slot = ring.slot_of(holder, request.chunk)
        if slot is not None:
            return [self._packed(request, route, slot)] if ring.is_packed(slot) else []
        if ring.wait(WaitingChunk(route, request)):
            return []
        return [self._packed(request, route, None)]

    def _pack_waiting(self, now: float) -> list[events.Action]:
        """Pack waiting chunks into free slots, also into those that this event has freed."""
        actions: list[events.Action] = []
        for chunk, slot in self.ring.pop_packable(now):
            offer = self._offers.get(Nonce(chunk.request.nonce))
            if offer is not None:  # otherwise `forget` has removed the chunk
                tables = offer.prepared.tables
                actions.append(events.PackChunk(chunk.route, chunk.request, tables, slot))
        return actions

    def _on_packed(self, event: events.ChunkPacked) -> list[events.Action]:
        """Tell the reader, unless it has left meanwhile."""
        request = event.pack_request
        is_wanted = self.ring.on_packed(event.slot, is_packed=event.refusal is None)
        offer = self._granted_to(request)
        if not is_wanted or offer is None:
            return []
        if event.refusal is not None:
            offer.note(reader_name(request.reader), f"PackRequest denied: {event.refusal}")
            return [self._packed(request, event.route, None)]
        return [self._packed(request, event.route, event.slot)]

    def _packed(
        self, request: messages.PackRequest, route: bytes, slot: int | None
    ) -> events.Reply:
        reply = messages.PackReply(
            incarnation=self._incarnation,
            nonce=request.nonce,
            claim=request.claim,
            reader=request.reader,
            chunk=request.chunk,
            slot=slot,
        )
        return events.Reply(route, reply)

    def _take_back_slot(self, tick: events.Tick, now: float) -> list[events.Action]:
        """While chunks wait: end the offer that has held a ring slot longest, if for too long."""
        since, longest = self.ring.next_due_since, self.ring.longest_held()
        if since is None or longest is None or now < since + self._hold_s:
            return []
        offer = self._offers[longest[0][0]]
        if offer.binding is not None:
            offer.binding.ended.update(offer.binding.leases)
        return self.settle(offer, tick, OfferEnd.EXPIRED)

    # --- leases

    def _on_renew(self, renew: messages.Renew, route: bytes, now: float) -> list[events.Action]:
        """Extend the leases of the claims that the reader lists, and end its others.

        A message to a former incarnation says nothing about the claims of this one.
        """
        if renew.incarnation != self._incarnation:
            return [self._renewed(renew, renew.claims, route)]
        named, reading = set(renew.claims), set(renew.claims[: renew.num_reading])
        rank = renew.reader.rank
        held: set[Claim] = set()
        actions: list[events.Action] = []
        for offer, binding in self.held_by(renew.reader):
            held.add(binding.claim)
            if binding.claim in named:
                binding.leases[rank] = now + self._lease_s
                if rank in binding.lives:
                    binding.routes[rank] = route
                if binding.claim in reading and offer.state is not State.READING:
                    offer.move(State.READING, renew, peer=reader_name(renew.reader))
            elif binding.numbers.get(rank, renew.number) < renew.number:
                binding.ended.add(rank)
                self.ring.forget((offer.nonce, rank))
                actions += self.settle(offer, renew, OfferEnd.ABORTED)
        lost = tuple(claim for claim in renew.claims if claim not in held)
        return [*actions, self._renewed(renew, lost, route)]

    def _renewed(
        self, renew: messages.Renew, lost: tuple[Claim, ...], route: bytes
    ) -> events.Reply:
        answer = messages.Renewed(
            incarnation=self._incarnation, reader=renew.reader, number=renew.number, lost=lost
        )
        return events.Reply(route, answer)

    def _on_release(self, release: messages.Release) -> list[events.Action]:
        """End one reader. A reader that did not ask ends the offer: its engine does not need it.

        The engine then reads other ranks (`complete`), or gives up its whole load.
        """
        offer = self._offers.get(release.nonce)
        if offer is None or release.incarnation != self._incarnation:
            return []
        if offer.binding is None:
            return self._end_unclaimed(offer, release, OfferEnd.NOT_NEEDED)
        if offer.binding.expects(release.claim, release.reader):
            offer.binding.ended.add(release.reader.rank)
            self.ring.forget((offer.nonce, release.reader.rank))
        is_recalled = offer.state is State.RECALLED
        given_up = OfferEnd.REVOKED if is_recalled else OfferEnd.ABORTED
        return self.settle(offer, release, OfferEnd.READ if release.complete else given_up)

    def _on_due(self, offer: Offer, tick: events.Tick, now: float) -> list[events.Action]:
        """End or recall the offer if its time is up; else set its next deadline."""
        binding = offer.binding
        if binding is None:
            return self._end_unclaimed(offer, tick, OfferEnd.UNCLAIMED)
        # A reader whose lease expired may still read its ring slots: `settle` frees them later.
        binding.expire(now)
        end = OfferEnd.EXPIRED
        if offer.state is State.RECALLED and binding.readers and binding.held_until <= now:
            binding.ended.update(binding.leases)
            end = OfferEnd.REVOKED
        actions = self.settle(offer, tick, end)
        if offer.binding is None:
            return actions
        self._due.set(offer.nonce, offer.next_due)
        is_idle = offer.state is State.GRANTED and binding.held_until <= now
        return self.recall(offer, tick, now) if is_idle else []

    # --- blocks that the rank wants back

    def recall(
        self, offer: Offer, event: events.Tick | events.ReclaimBlocks, now: float
    ) -> list[events.Action]:
        """Ask the readers for the blocks. Readers that have not asked yet will be denied."""
        binding = offer.binding
        if binding is None or offer.state is not State.GRANTED:
            return []
        offer.move(State.RECALLED, event, peer=f"engine {binding.engine!r}")
        binding.held_until = now + RECALL_S
        self._due.set(offer.nonce, offer.next_due)
        actions: list[events.Action] = []
        for rank in binding.readers:
            if rank in binding.routes:
                reader = messages.Reader(
                    engine=binding.engine, incarnation=binding.lives[rank], rank=rank
                )
                recall = messages.Recall(
                    incarnation=self._incarnation,
                    nonce=offer.nonce,
                    claim=binding.claim,
                    reader=reader,
                )
                actions.append(events.Reply(binding.routes[rank], recall))
        return actions

    def to_reclaim(self, num_blocks: int) -> list[Offer]:
        """The fewest offers to end or recall so that `num_blocks` blocks come free.

        Unclaimed offers go first, then unread ones of the engine that holds most; oldest first.
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

    # --- the end of an offer

    def settle(
        self,
        offer: Offer,
        event: messages.Release | messages.Renew | events.Tick,
        end: OfferEnd,
    ) -> list[events.Action]:
        """End the offer if all its readers have ended. First the fence slot, then the blocks."""
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

    def _end_unclaimed(
        self,
        offer: Offer,
        event: messages.Release | events.Tick | events.RevokeOffer | events.ReclaimBlocks,
        end: OfferEnd,
    ) -> list[events.Action]:
        """End an offer that was never granted, so that no reader can be reading it."""
        offer.move(None, event, detail=end.value)
        self._remove(offer)
        return [events.OfferEnded(offer.nonce, offer.request, end)]

    def _remove(self, offer: Offer) -> None:
        del self._offers[offer.nonce]
        self._due.set(offer.nonce, None)
