"""The prefill side of the protocol on one rank: offers, their readers, and their leases.

An offer is a finished prefill whose blocks stay pinned until decode has read them. The rank grants
it to the first claim that asks, holds a lease for each reader of that claim, and frees the blocks
when all readers have ended.

An offer ends when every reader has released it or lost its lease. It also ends unclaimed: after its
time, when its blocks are needed, or when no ticket went out. The rank clears its fence slot before
it reports the end, and the caller reuses the blocks only after that report.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import (
    Claim,
    Endpoint,
    EngineId,
    FenceToken,
    Incarnation,
    Nonce,
    Rank,
    new_fence_token,
    short,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, OfferEnd
from nixl_kv.protocol.machine import Deadlines, Machine, MachineState, Table

# A prefill rank takes recalled blocks back from readers that have not answered.
RECALL_S: Final = 1.0

# A prefill rank takes its blocks back from a reader that still reads. It believes a heartbeat that
# says so, but a reader may hang or lie. An honest one gives up a read that does not move after
# 4 x request_timeout_s, 120 s by default; 100 GB over 1 Gbit/s take 800 s.
READING_S: Final = 900.0
# A prefill rank takes its blocks back from a reader, if a local request waits for blocks. A reader
# that loses them computes the prompt.
READING_WANTED_S: Final = 150.0


class State(MachineState):
    PREPARED = enum.auto()  # the step that completes the prompt runs; a ticket may not be out yet
    OFFERED = enum.auto()  # the ticket is out and no reader has asked; ends after `offer_ttl_s`
    GRANTED = enum.auto()  # bound to one claim; each expected reader has a lease, none reads yet
    RECALLED = enum.auto()  # the rank wants the blocks: readers release it, unless they read it
    READING = enum.auto()  # a reader has begun


# None ends the offer. A Release, a Heartbeat or an expired lease ends a granted one only with its
# last reader.
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
        events.PublishOffer: (None,),  # an early one that decode has declined before
        events.Tick: (None,),
        events.RevokeOffer: (None,),
        events.RevokeAll: (None,),
        events.ReclaimBlocks: (None,),
    },
    State.GRANTED: {
        events.ReclaimBlocks: (State.RECALLED,),
        events.RevokeAll: (None,),
        messages.Release: (None,),
        messages.Heartbeat: (State.READING, None),
        events.Tick: (State.RECALLED, None),
        events.WithdrawOffer: (None,),  # an early one that was still being computed
    },
    State.RECALLED: {
        messages.Release: (None,),
        messages.Heartbeat: (State.READING, None),
        events.RevokeAll: (None,),
        events.Tick: (None,),
        events.WithdrawOffer: (None,),  # of cached blocks
    },
    State.READING: {
        messages.Release: (None,),
        messages.Heartbeat: (None,),
        events.ReclaimBlocks: (None,),
        events.RevokeAll: (None,),
        events.Tick: (None,),
        events.WithdrawOffer: (None,),
    },
}
MAX_ENDED: Final = 4096  # ended offers that are remembered, oldest first
END_REASONS: Final = {
    OfferEnd.NOT_NEEDED: "the offer was released unread",
    OfferEnd.READ: "the offer was read already; a ticket is good for one load",
    OfferEnd.UNCLAIMED: "the offer has expired: no ask came within offer_ttl_s of the ticket",
    OfferEnd.ABORTED: "the reader of the offer aborted it",
    OfferEnd.REVOKED: "the offer's blocks were needed for other requests",
    OfferEnd.EXPIRED: "the lease of the offer's reader has expired (lease_s)",
    OfferEnd.OVERDUE: "the reader of the offer has read it for too long",
    OfferEnd.LOST: "the offer was lost when the transfer thread restarted",
}
"""Why an ask for an ended offer is denied."""
OTHER_PROMPT: Final = "another prompt, or a ticket from before a reset or other weights"
NO_OFFER: Final = "no such offer: used, expired, or never made"
NOT_ARRIVED: Final = "its request did not arrive"
CAUSES: Final[Mapping[str, messages.DenyCause]] = {
    NOT_ARRIVED: "not_arrived",
    END_REASONS[OfferEnd.UNCLAIMED]: "unclaimed",
}
"""The reasons that decode may know: its operator looks for them in the wrong place otherwise."""
WITHDRAWN: Final = "its request ended without an offer"

MACHINE: Final = Machine("offer", TRANSITIONS)


class RoutedAsk(NamedTuple):
    route: bytes  # back to the reader
    ask: messages.Ask


@dataclass
class Binding:
    """The claim that an offer is granted to. Times are in monotonic seconds."""

    claim: Claim
    engine: EngineId  # of the readers
    slot: int
    fence_token: FenceToken
    leases: dict[Rank, float]  # when each expected reader's lease ends, whether it asked or not
    asked_at: float
    held_until: float  # then an unread offer is recalled, and a recalled one taken back
    reading_since: float = math.inf  # of an offer that is READING and holds something
    routes: dict[Rank, bytes] = field(default_factory=dict)  # to each reader that asked
    asked: dict[Rank, messages.Ask] = field(default_factory=dict)  # by each reader that asked
    # The number of each reader's latest ask or pack request.
    numbers: dict[Rank, int] = field(default_factory=dict)
    # A set of ranks, never a count: a duplicate message must not end a second reader.
    ended: set[Rank] = field(default_factory=set)

    @property
    def directory(self) -> Endpoint | None:
        """Where the readers' engine answers `Find`; None: it does not."""
        return next((ask.directory for ask in self.asked.values() if ask.directory), None)

    def expects(self, claim: Claim, reader: messages.Reader) -> bool:
        # Each rank of an engine has its own incarnation, which its first ask tells.
        ask = self.asked.get(reader.rank)
        return (
            claim == self.claim
            and reader.engine == self.engine
            and reader.rank in self.leases
            and reader.rank not in self.ended
            and (ask is None or ask.reader == reader)
        )

    @property
    def readers(self) -> list[Rank]:
        return sorted(set(self.leases) - self.ended)


@dataclass
class Offer:
    """One finished prefill of this rank. Times are in monotonic seconds."""

    prepared: events.PrepareOffer
    record: events.Record = field(repr=False)
    state: State = State.PREPARED
    ends_at: float = math.inf  # while OFFERED
    binding: Binding | None = None  # once granted
    prepared_at: float = -math.inf  # when the latest step of an early one began
    written: int = field(init=False)  # tokens whose KV is in memory
    # An ask with its nonce proves that, unless it is early or of cached blocks.
    is_pinned: bool = field(init=False)
    # Messages to answer once it is written: each reader's last one of each kind.
    delayed: dict[tuple[type, Rank], events.Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nonce, self.request = self.prepared.nonce, self.prepared.request
        self.written = self.prepared.num_tokens if self.prepared.is_written else 0
        self.is_pinned = not (self.prepared.is_early or self.prepared.is_cached)
        self.subject = short(self.nonce)
        cause = f"PrepareOffer: offer {self.subject}"
        self._record("", "", self.state.name, cause)

    @property
    def waits_for(self) -> str:
        if self.binding is not None:
            readers = ", ".join(map(str, self.binding.readers))
            return f"engine {self.binding.engine!r}, ranks {readers}"
        return "its ticket" if self.state is State.PREPARED else "a reader's ask"

    @property
    def is_written(self) -> bool:
        return self.written == self.prepared.num_tokens

    @property
    def can_be_bound(self) -> bool:
        """Whether a fence slot can show that its blocks are held, from now on."""
        return self.is_pinned or (self.prepared.slot is not None and self.written > 0)

    @property
    def can_be_granted(self) -> bool:
        return self.is_written if self.is_pinned else self.can_be_bound

    @property
    def holds(self) -> bool:
        """Whether its readers keep blocks, or one of a few slots, from others."""
        return self.is_pinned or self.prepared.is_cached

    @property
    def num_blocks(self) -> int:
        """Includes the blocks that it shares with other offers."""
        return sum(table.num_present for table in self.prepared.tables)

    def due_at(self, of_leases: Callable[[Iterable[float]], float] = min) -> float:
        """When time alone changes it, or with `max` ends it; infinity for never."""
        if self.binding is None:
            return self.ends_at
        lease = of_leases(self.binding.leases[rank] for rank in self.binding.readers)
        if self.state is State.READING:
            return min(lease, self.binding.reading_since + READING_S)
        return min(lease, self.binding.held_until)

    def has_read_for(self, seconds: float, now: float) -> bool:
        """Whether readers have been reading for this long, of an offer that holds something."""
        if self.binding is None or self.state is not State.READING:
            return False
        return self.binding.reading_since + seconds <= now

    @property
    def asks(self) -> list[RoutedAsk]:
        """The asks of the readers that it is granted to."""
        held = self.binding
        if held is None:
            return []
        return [RoutedAsk(held.routes[r], held.asked[r]) for r in held.readers if r in held.asked]

    def delay(self, message: messages.OfClaim, route: bytes) -> None:
        """Answer a message once the tokens that it needs are written."""
        self.delayed[type(message), message.reader.rank] = events.Asked(route, message)

    def note(self, peer: str, cause: str) -> None:
        self._record(peer, self.state.name, self.state.name, cause)

    def _record(self, peer: str, before: str, after: str, cause: str) -> None:
        about = (MACHINE.name, self.subject, self.request, peer)
        self.record(events.Transition(*about, before, after, cause))

    def move(self, after: State | None, event: object, *, peer: str = "", detail: str = "") -> None:
        states, about = (self.state, after), (self.subject, self.request, peer)
        self.state = MACHINE.move(self.record, states, event, about, detail)

    def check(self) -> None:
        """Check that the state fits the binding and the end.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        is_unbound = self.state in (State.PREPARED, State.OFFERED)
        since = math.inf if self.binding is None else self.binding.reading_since
        is_read = self.state is State.READING and self.holds
        rules = {
            f"binding {self.binding}": is_unbound != (self.binding is None),
            f"an end at {self.ends_at}": (self.state is State.OFFERED) != (self.ends_at < math.inf),
            "all readers have ended": self.binding is not None and not self.binding.readers,
            f"pinned: {self.is_pinned}, read since {since}": is_read != (since < math.inf),
        }
        for rule, is_broken in rules.items():
            if is_broken:
                raise LocalProtocolError(f"offer {short(self.nonce)} is {self.state.name}: {rule}")


def reader_name(reader: messages.Reader) -> str:
    return f"engine {reader.engine!r}, rank {reader.rank}"


class PrefillPart:
    """A feature's part of `PrefillMachine`: its handlers, and calls at points of an offer's life.

    Each method here is that of a feature which does nothing at that point. `now` is monotonic, in
    seconds.
    """

    machine: "PrefillMachine"  # once it is built
    #: Messages of readers, by type, with the route back to the reader.
    message_handlers: Mapping[type, Callable[[Any, bytes, float], Actions]] = {}
    #: Commands and events, by type.
    event_handlers: Mapping[type, Callable[[Any, float], Actions]] = {}
    next_due: float = math.inf

    def on_tick(self, now: float) -> Actions:
        """Handle the deadlines that have passed; other parts may have had them."""
        del now
        return []

    def on_prepared(self, offer: Offer, now: float) -> Actions:
        """A step that computes tokens of this offer begins."""
        del offer, now
        return []

    def answer_ask(
        self, ask: messages.Ask, offer: Offer | None, route: bytes, now: float
    ) -> Actions | None:
        """Answer an ask that may not be granted yet; None leaves it to the machine."""
        del ask, offer, route, now
        return None

    def expects(self, nonce: Nonce) -> bool:
        """Whether an offer is expected, so that readers may send messages about it."""
        del nonce
        return False

    def pop_asks(self, offer: Offer) -> list[RoutedAsk]:
        """The asks that have waited for an offer which can be granted from now on."""
        del offer
        return []

    def is_needless(self, offer: Offer) -> bool:
        """Whether a published offer can end at once."""
        del offer
        return False

    def on_release(self, release: messages.Release, now: float) -> Actions:
        """A reader needs nothing of an offer that is neither bound nor pinned, or is unknown."""
        del release, now
        return []

    def on_reader_ended(self, offer: Offer, rank: Rank) -> None:
        """A reader of an offer has ended; may come twice."""

    def on_freed(self, offer: Offer) -> Actions:
        """The fence slot of an offer is clear, and no grant names it any longer."""
        del offer
        return []

    def is_void(self, offer: Offer) -> bool:
        """Whether the caller's thread has cleared the fence slot already, and will withdraw it."""
        del offer
        return False

    def on_withdrawn(self, command: events.WithdrawOffer) -> Actions:
        """No ticket went out."""
        del command
        return []

    def on_ended(self, offer: Offer, end: OfferEnd) -> Actions:
        """An offer has ended, other than by a command of the caller."""
        del offer, end
        return []

    def admit(self, command: events.PrepareOffer) -> tuple[events.PrepareOffer, Actions]:
        """The command as the machine may have it."""
        return command, []

    def on_refused(self, command: events.PrepareOffer) -> Actions:
        """The machine may not have this command: its offer has ended already."""
        del command
        return []

    def pop_actions(self) -> Actions:
        """Actions that are possible after an event."""
        return []

    def clear(self) -> Actions:
        """Forget all readers and offers. All fence slots are clear."""
        return []

    def check(self) -> None:
        """Check what the part promises between two events; a LocalProtocolError if it is broken."""


class PrefillMachine:
    """All offers of one prefill rank. `now` is monotonic, in seconds."""

    def __init__(  # noqa: PLR0913 - the limits of one rank
        self,
        incarnation: Incarnation,
        record: events.Record,
        *,
        num_slots: int,  # fence slots, and so the most offers that are granted at a time
        offer_ttl_s: float,  # how long an offer waits for its first ask
        lease_s: float,  # how long a reader may be silent
        hold_s: float,  # how long a granted offer waits for its first read
        parts: Sequence[PrefillPart] = (),  # of features
    ) -> None:
        self.offers: dict[Nonce, Offer] = {}
        self.incarnation = incarnation
        self._record = record
        self._offer_ttl_s = offer_ttl_s
        self._lease_s = lease_s
        self._hold_s = hold_s
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))
        self._by_reader: dict[tuple[EngineId, Rank], dict[Nonce, tuple[Offer, Binding]]] = {}
        self._ended: dict[Nonce, str] = {}  # why asks for the latest ones are denied
        self._due = Deadlines[Nonce]()
        self._parts = tuple(parts)
        self._messages: dict[type, Callable[[Any, bytes, float], Actions]] = {
            messages.Ask: self._on_ask,
            messages.Heartbeat: self._on_heartbeat,
            messages.Release: self._on_release,
        }
        self._events: dict[type, Callable[[Any, float], Actions]] = {
            events.Asked: self._on_message,
            events.Tick: self._on_tick,
            events.PrepareOffer: self._prepare,
            events.PublishOffer: self._on_offer_command,
            events.MarkWritten: self._on_offer_command,
            events.RevokeOffer: self._on_offer_command,
            events.WithdrawOffer: self._withdraw,
            events.ReclaimBlocks: self._reclaim,
            events.RevokeAll: self._revoke_all,
        }
        for part in self._parts:
            part.machine = self
            self._messages |= part.message_handlers
            self._events |= part.event_handlers

    def handle(self, event: events.PrefillEvent, now: float) -> Actions:
        handler = self._events.get(type(event))  # none for an event of a part that is not here
        actions = [] if handler is None else handler(event, now)
        for part in self._parts:
            actions += part.pop_actions()
        return actions

    def _on_tick(self, tick: events.Tick, now: float) -> Actions:
        due = [self.offers[nonce] for nonce in self._due.pop_due(now)]
        actions = [action for offer in due for action in self._on_due(offer, tick, now)]
        return actions + [action for part in self._parts for action in part.on_tick(now)]

    def held_by(self, reader: messages.Reader) -> list[tuple[Offer, Binding]]:
        held = self._by_reader.get((EngineId(reader.engine), Rank(reader.rank)), {}).values()
        return [each for each in held if each[1].expects(each[1].claim, reader)]

    @property
    def any_granted(self) -> bool:
        return bool(self._by_reader)

    @property
    def next_due(self) -> float | None:
        due = min([self._due.next, *[part.next_due for part in self._parts]])
        return None if due == math.inf else due

    def check(self) -> None:
        """Check the fence slots, each offer and the parts, between two events.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        offers = [o for o in self.offers.values() if o.prepared.slot is None]  # not of `EarlySlots`
        bound = [o.binding.slot for o in offers if o.binding is not None]
        if sorted(bound + self.free_slots) != list(range(self.num_slots)):
            raise LocalProtocolError(f"slots {bound} granted, {self.free_slots} free")
        for offer in self.offers.values():
            offer.check()
        for part in self._parts:
            part.check()

    def clear(self) -> Actions:
        """Forget all offers. Clear all fence slots before."""
        for table in (self.offers, self._by_reader, self._due, self._ended):
            table.clear()
        self.free_slots = list(range(self.num_slots))
        return [action for part in self._parts for action in part.clear()]

    def begin_life(self, incarnation: Incarnation) -> Actions:
        self.incarnation = incarnation
        return self.clear()

    def refuse(self, command: events.PrepareOffer) -> Actions:
        """The caller's offer has ended already, and its blocks may belong to another request."""
        return [action for part in self._parts for action in part.on_refused(command)]

    def _on_offer_command(
        self,
        command: events.PublishOffer | events.RevokeOffer | events.MarkWritten,
        now: float,
    ) -> Actions:
        offer = self.offers.get(command.nonce)
        match command:
            case _ if offer is None:  # readers can be quicker than a command, even to the end
                return []
            case events.PublishOffer():
                return self._publish(offer, command, now)
            case events.MarkWritten():
                return self._mark_written(offer, command, now)
            case events.RevokeOffer() if offer.state is State.OFFERED:
                return self._end(offer, command, OfferEnd.REVOKED)
        return []

    def _prepare(self, command: events.PrepareOffer, now: float) -> Actions:
        actions: Actions = []
        for part in self._parts:
            command, more = part.admit(command)
            actions += more
        offer = self.offers.get(command.nonce)
        if offer is None:
            offer = self.offers[command.nonce] = Offer(command, self._record)
        elif command.is_early and not offer.is_pinned:
            if offer.prepared.slot is not None:  # readers may have it
                fence = {"slot": offer.prepared.slot, "fence_token": offer.prepared.fence_token}
                command = msgspec.structs.replace(command, **fence)
            offer.prepared = command
        else:  # a preempted request that is not early gets a new nonce
            raise LocalProtocolError(f"offer of request {command.request!r} exists already")
        offer.prepared_at = now
        return actions + [a for part in self._parts for a in part.on_prepared(offer, now)]

    def _mark_written(self, offer: Offer, command: events.MarkWritten, now: float) -> Actions:
        """Grant the tokens written so far, also to readers that have a grant of fewer."""
        num_tokens = command.num_tokens or offer.prepared.num_tokens
        if num_tokens <= offer.written or command.attempt != offer.prepared.attempt:
            return []
        offer.written = num_tokens
        binding, actions = offer.binding, self._grant_waiting(offer, now)
        delayed, offer.delayed = offer.delayed, {}
        # It may be pinned already: that command may overtake the end of the step on the GPU.
        if binding is not None and offer.prepared.is_early and offer.state is not State.RECALLED:
            actions += [
                self._grant(offer, binding, each.route, each.ask)
                for each in offer.asks
                if (messages.Ask, each.ask.reader.rank) not in delayed
            ]
        return actions + [a for asked in delayed.values() for a in self._on_message(asked, now)]

    def _publish(self, offer: Offer, command: events.PublishOffer, now: float) -> Actions:
        offer.is_pinned = True
        if offer.binding is not None:
            offer.binding.held_until = now + self._hold_s
            if offer.state is State.READING:  # its time begins when it costs pinned blocks
                offer.binding.reading_since = now
            self._due.set(offer.nonce, offer.due_at())
            return []
        offer.move(State.OFFERED, command)
        offer.ends_at = now + self._offer_ttl_s
        self._due.set(offer.nonce, offer.ends_at)
        if any(part.is_needless(offer) for part in self._parts):
            return self._end(offer, command, OfferEnd.NOT_NEEDED)
        return self._grant_waiting(offer, now)

    def _withdraw(self, command: events.WithdrawOffer, now: float) -> Actions:
        offer, actions = self.offers.get(command.nonce), list[events.Action]()
        asks: list[RoutedAsk] = []
        if offer is not None:
            if offer.binding is not None and offer.is_pinned:
                raise LocalProtocolError(
                    f"offer of request {offer.request!r} is granted and pinned, but was withdrawn"
                )
            # The caller has cleared an early offer's slot already, before the blocks were reused.
            asks = offer.asks
            actions = self._unbind(offer, is_cleared=True)
            offer.move(None, command)
            self._remove(offer)
        if command.is_final:
            self._note_end(command.nonce, WITHDRAWN)
        actions += [a for part in self._parts for a in part.on_withdrawn(command)]
        if command.is_final:
            return actions + self.deny_all(asks, WITHDRAWN)
        return actions + self._ask_again(asks, now)  # vLLM computes a preempted request again

    # --- asks

    def _on_message(self, event: events.Asked, now: float) -> Actions:
        message = event.message
        handler = self._messages.get(type(message))
        if handler is not None:
            return handler(message, event.route, now)
        if not isinstance(message, messages.OfClaim):
            return []
        return self.deny(message, event.route, f"this rank handles no {type(message).__name__}")

    def _on_ask(self, ask: messages.Ask, route: bytes, now: float) -> Actions:
        offer = self.offers.get(ask.nonce)
        reason = self._why_denied(ask, offer)
        if reason:
            return self.deny(ask, route, reason)
        actions: Actions = []
        if offer is not None and offer.can_be_bound:
            actions = self._accept(offer, ask, route, now)
        for part in self._parts:
            answer = part.answer_ask(ask, offer, route, now)
            if answer is not None:
                return actions + answer
        if offer is None or offer.binding is None:
            return self.deny(ask, route, NO_OFFER)
        if not offer.can_be_granted:
            offer.delay(ask, route)
            return actions
        return [*actions, self._grant(offer, offer.binding, route, ask)]

    def _accept(self, offer: Offer, ask: messages.Ask, route: bytes, now: float) -> Actions:
        """Bind the offer to the first claim that asks; in any case, begin this reader's lease."""
        rank, binding, actions = ask.reader.rank, offer.binding, list[events.Action]()
        if binding is None:
            binding = self._bind(offer, ask, now)
            if offer.prepared.slot is None:
                actions = [events.WriteSlot(binding.slot, binding.fence_token)]
        binding.routes[rank], binding.asked[rank] = route, ask
        binding.leases[rank] = now + self._lease_s
        binding.numbers[rank] = max(ask.number, binding.numbers.get(rank, 0))
        return actions

    def _grant(
        self, offer: Offer, binding: Binding, route: bytes, ask: messages.Ask
    ) -> events.Reply:
        written = None if offer.is_written else offer.written
        prepared = offer.prepared
        grant = messages.Grant(
            **self.fields(ask),
            lease_s=self._lease_s,
            tables=prepared.tables,
            num_tokens=written,
            num_cached=prepared.num_cached,
            slot=binding.slot,
            fence_token=binding.fence_token,
        )
        return events.Reply(route, grant)

    def _why_denied(self, ask: messages.Ask, offer: Offer | None) -> str:
        rank = ask.reader.rank
        if ask.incarnation != self.incarnation:
            return f"meant for incarnation {short(ask.incarnation)}"
        if offer is None:
            return self._ended.get(ask.nonce, "")
        if offer.prepared.context != ask.context:
            return OTHER_PROMPT
        if offer.binding is not None:
            if not offer.binding.expects(ask.claim, ask.reader):
                return "claimed by another, or ended for this reader"
            return "its blocks were recalled" if offer.state is State.RECALLED else ""
        if rank not in ask.readers:
            return f"rank {rank} is not among its own readers"
        has_slot = offer.prepared.slot is not None or self.free_slots
        return "" if has_slot or not offer.can_be_bound else "all fence slots are granted"

    def _grant_waiting(self, offer: Offer, now: float) -> Actions:
        """Grant the offer to the first claim that has asked before, as soon as that is possible."""
        if not offer.can_be_granted:
            return []
        asks = [ask for part in self._parts for ask in part.pop_asks(offer)]
        return self._ask_again(asks, now)

    def _ask_again(self, asks: Iterable[RoutedAsk], now: float) -> Actions:
        return [action for each in asks for action in self._on_ask(each.ask, each.route, now)]

    def deny_all(self, asks: Iterable[RoutedAsk], reason: str) -> Actions:
        return [action for each in asks for action in self.deny(each.ask, each.route, reason)]

    def _bind(self, offer: Offer, ask: messages.Ask, now: float) -> Binding:
        """The first ask binds the offer to its claim, with a lease for each expected reader."""
        if offer.prepared.slot is None:
            slot, token = self.free_slots.pop(), new_fence_token()
        else:
            slot, token = offer.prepared.slot, offer.prepared.fence_token
        offer.binding = binding = Binding(
            ask.claim,
            ask.reader.engine,
            slot,
            token,
            dict.fromkeys(ask.readers, now + self._lease_s),
            asked_at=now,
            held_until=now + self._hold_s if offer.holds else math.inf,
        )
        offer.ends_at = math.inf
        for rank in ask.readers:
            held = self._by_reader.setdefault((binding.engine, rank), {})
            held[offer.nonce] = offer, binding
        offer.move(State.GRANTED, ask, peer=reader_name(ask.reader))
        self._due.set(offer.nonce, offer.due_at())
        return binding

    def deny(self, message: messages.OfClaim, route: bytes, reason: str) -> Actions:
        """Deny; the reason stays on this side, so that strangers learn nothing."""
        offer = self.offers.get(message.nonce)
        if offer is not None:  # strangers could fill the event log with unknown offers
            cause = f"{type(message).__name__} denied: {reason}"
            offer.note(reader_name(message.reader), cause)
        denial = messages.Deny(**self.fields(message), cause=CAUSES.get(reason, ""))
        is_usual = isinstance(message, messages.Ask) and bool(message.found)
        return [events.AskDenied(message.nonce, reason, is_usual), events.Reply(route, denial)]

    def fields(self, message: messages.OfClaim) -> messages.ClaimFields:
        """Those of an answer to a message about a claim."""
        return {
            "incarnation": self.incarnation,
            "nonce": message.nonce,
            "claim": message.claim,
            "reader": message.reader,
        }

    def is_expected(self, nonce: Nonce) -> bool:
        """Whether an offer that is unknown here may still come."""
        return any(part.expects(nonce) for part in self._parts)

    def is_void(self, offer: Offer) -> bool:
        """Whether its blocks may be written, although no command has told the machine yet."""
        return any(part.is_void(offer) for part in self._parts)

    def granted_to(self, request: messages.OfClaim) -> Offer | None:
        """The offer, if it is granted to this reader and this reader has asked for it."""
        offer = self.offers.get(request.nonce)
        if offer is None or offer.binding is None or request.incarnation != self.incarnation:
            return None
        has_asked = request.reader.rank in offer.binding.asked
        return offer if has_asked and offer.binding.expects(request.claim, request.reader) else None

    # --- leases

    def _on_heartbeat(self, heartbeat: messages.Heartbeat, route: bytes, now: float) -> Actions:
        """Extend the leases of the claims that the reader lists, and end its others."""
        named, reading = set(heartbeat.claims), set(heartbeat.claims[: heartbeat.num_reading])
        rank = heartbeat.reader.rank
        held: set[Claim] = set()
        actions: Actions = []
        # A heartbeat to a former incarnation says nothing about the claims of this one.
        is_meant = heartbeat.incarnation == self.incarnation
        for offer, binding in self.held_by(heartbeat.reader) if is_meant else ():
            held.add(binding.claim)
            if binding.claim in named:
                binding.leases[rank] = now + self._lease_s
                if rank in binding.asked:
                    binding.routes[rank] = route
                if binding.claim in reading and offer.state is not State.READING:
                    offer.move(State.READING, heartbeat, peer=reader_name(heartbeat.reader))
                    binding.reading_since = now if offer.holds else math.inf
                    self._due.set(offer.nonce, offer.due_at())
            elif binding.numbers.get(rank, heartbeat.number) < heartbeat.number:
                self._end_reader(offer, binding, rank)
                actions += self.settle(offer, heartbeat, OfferEnd.ABORTED)
        lost = tuple(claim for claim in heartbeat.claims if claim not in held)
        answer = messages.HeartbeatReply(
            incarnation=self.incarnation,
            reader=heartbeat.reader,
            number=heartbeat.number,
            lost=lost,
        )
        return [*actions, events.Reply(route, answer)]

    def _on_release(self, release: messages.Release, _route: bytes, now: float) -> Actions:
        """End one reader. A reader that did not ask ends the offer: its engine does not need it."""
        offer = self.offers.get(release.nonce)
        if release.incarnation != self.incarnation:
            return []
        if offer is None or (offer.binding is None and not offer.is_pinned):
            if release.nonce in self._ended:
                return []
            return [a for part in self._parts for a in part.on_release(release, now)]
        if offer.binding is None:
            return self._end(offer, release, OfferEnd.NOT_NEEDED)
        if offer.binding.expects(release.claim, release.reader):
            self._end_reader(offer, offer.binding, Rank(release.reader.rank))
        is_recalled = offer.state is State.RECALLED
        given_up = OfferEnd.REVOKED if is_recalled else OfferEnd.ABORTED
        return self.settle(offer, release, OfferEnd.READ if release.complete else given_up)

    def _end_reader(self, offer: Offer, binding: Binding, rank: Rank) -> None:
        binding.ended.add(rank)
        for part in self._parts:
            part.on_reader_ended(offer, rank)

    def _on_due(self, offer: Offer, tick: events.Tick, now: float) -> Actions:
        """End or recall the offer if it is late; otherwise set its next deadline."""
        binding = offer.binding
        if binding is None:
            return self._end(offer, tick, OfferEnd.UNCLAIMED)
        # A reader whose lease expired may still read: parts are told when the offer ends.
        binding.ended.update(rank for rank, until in binding.leases.items() if until <= now)
        end = OfferEnd.EXPIRED
        if offer.state is State.RECALLED and binding.readers and binding.held_until <= now:
            binding.ended.update(binding.leases)
            end = OfferEnd.REVOKED
        elif offer.has_read_for(READING_S, now) and binding.readers:
            binding.ended.update(binding.leases)
            end = OfferEnd.OVERDUE
        actions = self.settle(offer, tick, end)
        if offer.binding is None:
            return actions
        self._due.set(offer.nonce, offer.due_at())
        is_idle = offer.state is State.GRANTED and binding.held_until <= now
        return self.recall(offer, tick, now) if is_idle else []

    # --- blocks that the rank wants back

    def recall(self, offer: Offer, event: object, now: float) -> Actions:
        """Ask the readers for the blocks. The rank denies readers that ask later."""
        binding = offer.binding
        if binding is None or offer.state is not State.GRANTED or not offer.holds:
            return []
        offer.move(State.RECALLED, event, peer=f"engine {binding.engine!r}")
        binding.held_until = now + RECALL_S
        self._due.set(offer.nonce, offer.due_at())
        told = self._tell_recalled(offer)
        # Readers whose asks wait for the last step will get no grant, and so no digest.
        for kind, rank in offer.delayed:
            if kind is messages.Ask:
                del binding.asked[rank]
        offer.delayed.clear()
        return told

    def _tell_recalled(self, offer: Offer) -> Actions:
        return [
            events.Reply(each.route, messages.Recall(**self.fields(each.ask)))
            for each in offer.asks
        ]

    def _revoke_all(self, command: events.RevokeAll, _now: float) -> Actions:
        """End each offer whose ticket is out. A fence ends the loads that read one."""
        actions: Actions = []
        for offer in list(self.offers.values()):
            if offer.is_pinned and offer.state is not State.PREPARED:
                actions += self._tell_recalled(offer)
                actions += self._end(offer, command, OfferEnd.REVOKED)
        return actions

    def _reclaim(self, command: events.ReclaimBlocks, now: float) -> Actions:
        """End as few unclaimed offers as are needed, then recall unread ones; oldest first.

        At last, end those that have been read for too long.
        """
        offers = list(self.offers.values())
        missing = command.num_blocks  # beside the recalled ones, which come back soon
        missing -= sum(o.num_blocks for o in offers if o.is_pinned and o.state is State.RECALLED)
        actions: Actions = []
        for state in (State.OFFERED, State.GRANTED):
            for offer in offers:
                if missing <= 0 or offer.state is not state or not offer.is_pinned:
                    continue
                missing -= offer.num_blocks
                if state is State.OFFERED:
                    actions += self._end(offer, command, OfferEnd.REVOKED)
                else:
                    actions += self.recall(offer, command, now)
        for offer in offers:
            if missing > 0 and offer.is_pinned and offer.has_read_for(READING_WANTED_S, now):
                missing -= offer.num_blocks
                actions += self._end(offer, command, OfferEnd.OVERDUE)
        return actions

    # --- the end of an offer

    def settle(self, offer: Offer, event: object, end: OfferEnd) -> Actions:
        """End a granted offer if all its readers have ended."""
        is_over = offer.binding is not None and not offer.binding.readers
        return self._end(offer, event, end) if is_over else []

    def _end(self, offer: Offer, event: object, end: OfferEnd) -> Actions:
        """First the fence slot, then the blocks."""
        binding = offer.binding
        peer = "" if binding is None else f"engine {binding.engine!r}"
        actions = self._unbind(offer)
        offer.move(None, event, peer=peer, detail=end.value)
        self._note_end(offer.nonce, END_REASONS[end])
        self._remove(offer)
        about = (binding.engine, binding.asked_at, binding.directory) if binding else ()
        actions.append(events.OfferEnded(offer.nonce, offer.request, end, *about))
        return actions + [a for part in self._parts for a in part.on_ended(offer, end)]

    def _unbind(self, offer: Offer, *, is_cleared: bool = False) -> Actions:
        """Clear the fence slot, unless that is done, and free it and what parts have for it."""
        binding, offer.binding = offer.binding, None
        slot, actions = offer.prepared.slot, list[events.Action]()
        if binding is not None:
            for rank in binding.leases:
                for part in self._parts:
                    part.on_reader_ended(offer, rank)
                held = self._by_reader[binding.engine, rank]
                del held[offer.nonce]
                if not held:
                    del self._by_reader[binding.engine, rank]
            if slot is None:
                self.free_slots.append(binding.slot)
                actions.append(events.ClearSlot(binding.slot))
        # The part of cached blocks clears its slots itself, and may give them away at once.
        if slot is not None and not is_cleared and not offer.prepared.is_cached:
            actions.append(events.ClearSlot(slot))
        return actions + [a for part in self._parts for a in part.on_freed(offer)]

    def _remove(self, offer: Offer) -> None:
        del self.offers[offer.nonce]
        self._due.set(offer.nonce, math.inf)

    def _note_end(self, nonce: Nonce, reason: str) -> None:
        self._ended[nonce] = reason
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
