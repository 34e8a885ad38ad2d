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
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import (
    Claim,
    EngineId,
    FenceToken,
    Incarnation,
    Nonce,
    Rank,
    new_fence_token,
    short,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.early import EarlyAsks, RoutedAsk
from nixl_kv.protocol.events import Actions, OfferEnd
from nixl_kv.protocol.machine import Deadlines, Machine, MachineState, Table

RECALL_S: Final = 1.0  # for readers to answer a recall; then the rank takes the blocks back

# The rank takes its blocks back from a reader that still reads after this long. It believes a
# heartbeat that says so, but a reader may hang or lie. An honest one gives up a read that does not
# move after 4 x request_timeout_s, 120 s by default; 100 GB over 1 Gbit/s take 800 s.
READING_S: Final = 900.0
# The same while a local request waits for blocks. A reader that loses them computes the prompt.
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
        events.PublishOffer: (None,),  # of a pair that decode has declined before
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
        events.WithdrawOffer: (None,),  # of a pair that was still being computed
    },
    State.RECALLED: {
        messages.Release: (None,),
        messages.Heartbeat: (State.READING, None),
        events.RevokeAll: (None,),
        events.Tick: (None,),
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
ENDED: Final = {
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
NOT_ARRIVED: Final = "its request did not arrive"
CAUSES: Final[Mapping[str, messages.DenyCause]] = {
    NOT_ARRIVED: "not_arrived",
    ENDED[OfferEnd.UNCLAIMED]: "unclaimed",
}
"""The reasons that decode may know: its operator looks for them in the wrong place otherwise."""
WITHDRAWN: Final = "its request ended without an offer"

MACHINE: Final = Machine("offer", TRANSITIONS)

_ForClaim: TypeAlias = messages.Ask | messages.DigestRequest | messages.PackRequest
Holder: TypeAlias = tuple[Nonce, Rank]  # one reader of one offer
WaitingChunk: TypeAlias = tuple[bytes, messages.PackRequest]  # with the route to its reader


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
    reading_since: float = math.inf  # of a pinned offer that is READING
    routes: dict[Rank, bytes] = field(default_factory=dict)  # to each reader that asked
    asked: dict[Rank, messages.Ask] = field(default_factory=dict)  # by each reader that asked
    # The number of each reader's latest ask or pack request.
    numbers: dict[Rank, int] = field(default_factory=dict)
    # A set of ranks, never a count: a duplicate message must not end a second reader.
    ended: set[Rank] = field(default_factory=set)

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
    prepared_at: float = -math.inf  # when the latest step of a pair began
    written: int = field(init=False)  # tokens whose KV is in memory
    is_pinned: bool = field(init=False)  # an ask with its nonce proves that; not one of a pair
    # Messages to answer once it is written: each reader's last one of each kind.
    early: dict[tuple[type, Rank], events.Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nonce, self.request = self.prepared.nonce, self.prepared.request
        self.written = self.prepared.num_tokens if self.prepared.is_written else 0
        self.is_pinned = not self.prepared.is_pair
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
        """Whether readers of pinned blocks have been reading for this long."""
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
        is_read = self.state is State.READING and self.is_pinned
        rules = {
            f"binding {self.binding}": is_unbound != (self.binding is None),
            f"an end at {self.ends_at}": (self.state is State.OFFERED) != (self.ends_at < math.inf),
            "all readers have ended": self.binding is not None and not self.binding.readers,
            f"pinned: {self.is_pinned}, read since {since}": is_read != (since < math.inf),
        }
        for rule, is_broken in rules.items():
            if is_broken:
                raise LocalProtocolError(f"offer {short(self.nonce)} is {self.state.name}: {rule}")


@dataclass
class _Slot:
    holder: Holder | None  # the reader; None: it has left, and the chunk is still being packed
    chunk: int
    is_packed: bool = False  # the reader may read it


def may_take(held: int, free: int) -> bool:
    """Whether a reader that holds `held` slots of a ring may take one of the `free` ones.

    One reader gets two thirds of the ring, two get two fifths each, and some room always remains
    for another. These are dynamic thresholds with a factor of 2, after Choudhury and Hahne,
    "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998.
    """
    return held < 2 * free


def most_slots(num_slots: int) -> int:
    """How many slots of a ring `may_take` gives to a single reader."""
    return -(-2 * num_slots // 3)


class RingBook:
    """The slots of the staging ring into which this rank packs, and the chunks that wait for one.

    A slot is free again when its reader has read it, or when its offer has ended: then the fence
    slot is clear, so a reader that still reads finds out. All loops are over a few slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots: list[_Slot | None] = [None] * num_slots  # None: free
        self.waiting: OrderedDict[tuple[Holder, int], WaitingChunk] = OrderedDict()

    def check(self) -> None:
        """Check that no chunk waits for a slot that its reader may take.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        free = self.slots.count(None)
        for holder, _ in self.waiting:
            if may_take(len(self._held(holder)), free):
                raise LocalProtocolError(f"a chunk of {holder} waits beside {free} free slots")

    def find(self, holder: Holder, chunk: int) -> tuple[int, bool] | None:
        """The slot that a reader has for a chunk, and whether the chunk is in it."""
        held = self._held(holder)
        return next(((n, slot.is_packed) for n, slot in held if slot.chunk == chunk), None)

    def wait(self, holder: Holder, route: bytes, request: messages.PackRequest) -> bool:
        """Queue a chunk, once; False if its reader already has or awaits all slots."""
        num_waiting = sum(each == holder for each, _ in self.waiting)
        key = holder, request.chunk
        if key not in self.waiting and len(self._held(holder)) + num_waiting >= len(self.slots):
            return False
        self.waiting[key] = route, request
        return True

    def pop_packable(self) -> list[tuple[WaitingChunk, int]]:
        """Give free slots to waiting chunks, in order: pack each into its slot."""
        packable: list[tuple[WaitingChunk, int]] = []
        for (holder, chunk), waiting in list(self.waiting.items()):
            if may_take(len(self._held(holder)), self.slots.count(None)):
                slot = self.slots.index(None)
                self.slots[slot] = _Slot(holder, chunk)
                del self.waiting[holder, chunk]
                packable.append((waiting, slot))
        return packable

    def on_packed(self, slot: int, *, is_packed: bool) -> bool:
        """The write to a slot has ended. Whether a reader waits for it."""
        entry = self.slots[slot]
        if entry is None:
            return False
        entry.is_packed = is_packed
        if entry.holder is None or not is_packed:
            self.slots[slot] = None
        return entry.holder is not None

    def release(self, holder: Holder, holds: Collection[int] = ()) -> None:
        """Free the slots of a reader's other chunks, which it neither waits for nor reads."""
        for key in [key for key in self.waiting if key[0] == holder and key[1] not in holds]:
            del self.waiting[key]
        for number, slot in self._held(holder):
            if slot.chunk not in holds:
                slot.holder = None
                if slot.is_packed:
                    self.slots[number] = None

    def clear(self, writing: Collection[int]) -> None:
        """Forget all readers. The slots in `writing` are still being written."""
        self.waiting.clear()
        numbers = range(len(self.slots))
        self.slots = [_Slot(None, 0) if slot in writing else None for slot in numbers]

    def _held(self, holder: Holder) -> list[tuple[int, _Slot]]:
        return [(n, slot) for n, slot in enumerate(self.slots) if slot and slot.holder == holder]


def reader_name(reader: messages.Reader) -> str:
    return f"engine {reader.engine!r}, rank {reader.rank}"


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
        stall_s: float = math.inf,  # how long a step of this engine may take
        num_ring_slots: int = 0,  # of the staging ring; 0 if this rank does not pack
    ) -> None:
        self.offers: dict[Nonce, Offer] = {}
        self.ring = RingBook(num_ring_slots)
        self.early = EarlyAsks(stall_s)
        self._incarnation = incarnation
        self._record = record
        self._offer_ttl_s = offer_ttl_s
        self._lease_s = lease_s
        self._hold_s = hold_s
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))
        self._by_reader: dict[tuple[EngineId, Rank], dict[Nonce, tuple[Offer, Binding]]] = {}
        self._ended: dict[Nonce, str] = {}  # why asks for the latest ones are denied
        self._due = Deadlines[Nonce]()

    def handle(self, event: events.PrefillEvent, now: float) -> Actions:
        match event:
            case events.Asked():
                actions = self._on_message(event, now)
            case events.Tick():
                due = [self.offers[nonce] for nonce in self._due.pop_due(now)]
                actions = [action for offer in due for action in self._on_due(offer, event, now)]
                actions += self._deny_all(self.early.pop_due(now), NOT_ARRIVED)
            case events.DigestMade():
                actions = self._on_digest_made(event)
            case events.ChunkPacked():
                actions = self._on_packed(event)
            case events.Stepped():
                self.early.steps.on_step(now)
                return []
            case events.Paused():
                self.early.steps.on_pause(event, now)
                return []
            case _:
                actions = self._on_command(event, now)
        # Slots that the event has freed take waiting chunks.
        for (route, request), slot in self.ring.pop_packable() if self.ring.waiting else ():
            tables = self.offers[request.nonce].prepared.tables
            actions.append(events.PackChunk(route, request, tables, slot))
        return actions

    def held_by(self, reader: messages.Reader) -> list[tuple[Offer, Binding]]:
        held = self._by_reader.get((EngineId(reader.engine), Rank(reader.rank)), {}).values()
        return [each for each in held if each[1].expects(each[1].claim, reader)]

    @property
    def any_granted(self) -> bool:
        return bool(self._by_reader)

    @property
    def next_due(self) -> float | None:
        due = min(self._due.next, self.early.due.next)
        return None if due == math.inf else due

    def is_digest_wanted(self, request: messages.DigestRequest) -> bool:
        return self._granted_to(request) is not None

    def check(self) -> None:
        """Check the fence slots, each offer and the ring, between two events.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        offers = [o for o in self.offers.values() if o.prepared.slot is None]  # not of `PairSlots`
        bound = [o.binding.slot for o in offers if o.binding is not None]
        if sorted(bound + self.free_slots) != list(range(self.num_slots)):
            raise LocalProtocolError(f"slots {bound} granted, {self.free_slots} free")
        for offer in self.offers.values():
            offer.check()
        self.ring.check()
        self.early.check()

    def clear(self, writing: Collection[int] = ()) -> None:
        """Forget all but the ring slots that are still written. Clear all fence slots before."""
        self.ring.clear(writing)
        self.early.clear()
        for table in (self.offers, self._by_reader, self._due, self._ended):
            table.clear()
        self.free_slots = list(range(self.num_slots))

    def begin_life(self, incarnation: Incarnation, writing: Collection[int] = ()) -> None:
        self._incarnation = incarnation
        self.clear(writing)

    def _on_command(self, command: events.PrefillCommand, now: float) -> Actions:
        if isinstance(command, events.ReclaimBlocks):
            return self._reclaim(command, now)
        if isinstance(command, events.RevokeAll):
            return self._revoke_all(command)
        if isinstance(command, events.ExpectOffer):
            denials = self._deny_all(self.early.expect(command, now), OTHER_PROMPT)
            return denials + self._report_given_up(command.nonce)
        if isinstance(command, events.PrepareOffer):
            return self._prepare(command, now)
        offer = self.offers.get(command.nonce)
        if isinstance(command, events.WithdrawOffer):
            return self._withdraw(command, offer, now)
        if offer is None:  # readers can be quicker than a command, even to the end
            return []
        match command:
            case events.PublishOffer():
                return self._publish(offer, command, now)
            case events.RevokeOffer() if offer.state is State.OFFERED:
                return self._end(offer, command, OfferEnd.REVOKED)
            case events.MarkWritten():
                return self._mark_written(offer, command, now)
        return []

    def _prepare(self, command: events.PrepareOffer, now: float) -> Actions:
        offer = self.offers.get(command.nonce)
        if offer is None:
            offer = self.offers[command.nonce] = Offer(command, self._record)
        elif command.is_pair and not offer.is_pinned:
            if offer.prepared.slot is not None:  # readers may have it
                fence = {"slot": offer.prepared.slot, "fence_token": offer.prepared.fence_token}
                command = msgspec.structs.replace(command, **fence)
            offer.prepared = command
        else:  # a preempted request without a pair gets a new nonce
            raise LocalProtocolError(f"offer of request {command.request!r} exists already")
        offer.prepared_at = now
        # A restart of the thread may have lost the command that the request has arrived.
        denials: Actions = []
        if command.is_pair and self.early.expected(command.nonce) is None:
            expect = events.ExpectOffer(command.nonce, command.request, command.context)
            denials = self._deny_all(self.early.expect(expect, now), OTHER_PROMPT)
        return denials + self._tell(command.nonce, "computing")

    def _mark_written(self, offer: Offer, command: events.MarkWritten, now: float) -> Actions:
        """Grant the tokens written so far, also to readers that have a grant of fewer."""
        num_tokens = command.num_tokens or offer.prepared.num_tokens
        if num_tokens <= offer.written or command.attempt != offer.prepared.attempt:
            return []
        offer.written = num_tokens
        binding, actions = offer.binding, self._grant_early(offer, now)
        early, offer.early = offer.early, {}
        # A pair may be pinned already: that command may overtake the end of the step on the GPU.
        if binding is not None and offer.prepared.is_pair and offer.state is not State.RECALLED:
            actions += [
                self._grant(offer, binding, each.route, each.ask)
                for each in offer.asks
                if (messages.Ask, each.ask.reader.rank) not in early
            ]
        return actions + [a for asked in early.values() for a in self._on_message(asked, now)]

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
        if self.early.is_declined(offer.nonce):
            return self._end(offer, command, OfferEnd.NOT_NEEDED)
        return self._grant_early(offer, now)

    def _withdraw(self, command: events.WithdrawOffer, offer: Offer | None, now: float) -> Actions:
        actions: Actions = []
        asks: list[RoutedAsk] = []
        if offer is not None:
            if offer.binding is not None and offer.is_pinned:
                raise LocalProtocolError(
                    f"offer of request {offer.request!r} is granted and pinned, but was withdrawn"
                )
            # The caller has cleared the slot of a pair already, before the blocks were reused.
            asks = offer.asks
            actions = self._unbind(offer, is_cleared=True)
            offer.move(None, command)
            self._remove(offer)
        if not command.is_final:  # a preempted request of a pair: vLLM computes it again
            told = self._tell(command.nonce, "queued")
            return actions + told + self._ask_again(asks, now)
        self._note_end(command.nonce, WITHDRAWN)
        expected = self.early.expected(command.nonce)
        if expected is not None:  # no reader is left, for example after a reset
            actions.append(events.PairReleased(command.nonce, expected.request))
        asks += self.early.forget(command.nonce)
        return actions + self._deny_all(asks, WITHDRAWN)

    # --- asks

    def _on_message(self, event: events.Asked, now: float) -> Actions:
        match event.message:
            case messages.Ask() as ask:
                return self._on_ask(ask, event.route, now)
            case messages.DigestRequest() as request:
                return self._on_digest_request(request, event.route)
            case messages.PackRequest() as pack:
                return self._on_pack_request(pack, event.route)
            case messages.Heartbeat() as heartbeat:
                return self._on_heartbeat(heartbeat, event.route, now)
            case messages.Release() as release:
                return self._on_release(release, now)

    def _on_ask(self, ask: messages.Ask, route: bytes, now: float) -> Actions:
        offer, rank = self.offers.get(ask.nonce), ask.reader.rank
        reason = self._why_denied(ask, offer)
        if reason:
            return self._deny(ask, route, reason)
        if offer is None or not offer.can_be_bound:
            state = self.early.add(ask, route, now)
            if state is None:
                return self._deny(ask, route, "too many early asks wait")
            return [events.Reply(route, messages.Pending(**self._fields(ask), state=state))]
        actions: Actions = []
        binding = offer.binding
        if binding is None:
            binding = self._bind(offer, ask, now)
            if offer.prepared.slot is None:
                actions = [events.WriteSlot(binding.slot, binding.fence_token)]
        binding.routes[rank], binding.asked[rank] = route, ask
        binding.leases[rank] = now + self._lease_s
        binding.numbers[rank] = max(ask.number, binding.numbers.get(rank, 0))
        is_computed = offer.is_written or not offer.prepared.is_pair
        if not is_computed and self.early.steps.is_stalled(offer.prepared_at, now):
            pending = messages.Pending(**self._fields(ask), state="stalled")
            return [*actions, events.Reply(route, pending)]
        if not offer.can_be_granted:
            offer.early[type(ask), rank] = events.Asked(route, ask)
            return actions
        return [*actions, self._grant(offer, binding, route, ask)]

    def _grant(
        self, offer: Offer, binding: Binding, route: bytes, ask: messages.Ask
    ) -> events.Reply:
        written = None if offer.is_written else offer.written
        prepared = offer.prepared
        grant = messages.Grant(
            **self._fields(ask),
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
        if ask.incarnation != self._incarnation:
            return f"meant for incarnation {short(ask.incarnation)}"
        if offer is None:
            if ask.nonce in self._ended:
                return self._ended[ask.nonce]
            expected = self.early.expected(ask.nonce)
            if expected is not None and expected.context != ask.context:
                return OTHER_PROMPT
            return "" if ask.is_early else "no such offer: used, expired, or never made"
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

    def _grant_early(self, offer: Offer, now: float) -> Actions:
        """Grant a pair's offer to the first claim that has asked, as soon as that is possible."""
        if not offer.can_be_granted:
            return []
        return self._ask_again(self.early.pop(offer.nonce), now)

    def _ask_again(self, asks: Iterable[RoutedAsk], now: float) -> Actions:
        return [action for each in asks for action in self._on_ask(each.ask, each.route, now)]

    def _tell(self, nonce: Nonce, state: messages.PrefillState) -> Actions:
        return [
            events.Reply(each.route, messages.Pending(**self._fields(each.ask), state=state))
            for each in self.early.set_state(nonce, state)
        ]

    def _deny_all(self, asks: Iterable[RoutedAsk], reason: str) -> Actions:
        return [action for each in asks for action in self._deny(each.ask, each.route, reason)]

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
            held_until=now + self._hold_s if offer.is_pinned else math.inf,
        )
        offer.ends_at = math.inf
        for rank in ask.readers:
            held = self._by_reader.setdefault((binding.engine, rank), {})
            held[offer.nonce] = offer, binding
        offer.move(State.GRANTED, ask, peer=reader_name(ask.reader))
        self._due.set(offer.nonce, offer.due_at())
        return binding

    def _deny(self, message: _ForClaim, route: bytes, reason: str) -> Actions:
        """Deny; the reason stays on this side, so that strangers learn nothing."""
        offer = self.offers.get(message.nonce)
        if offer is not None:  # strangers could fill the event log with unknown offers
            cause = f"{type(message).__name__} denied: {reason}"
            offer.note(reader_name(message.reader), cause)
        denial = messages.Deny(**self._fields(message), cause=CAUSES.get(reason, ""))
        return [events.AskDenied(message.nonce, reason), events.Reply(route, denial)]

    def _fields(self, message: _ForClaim) -> messages.ClaimFields:
        """Those of an answer to a message about a claim."""
        return {
            "incarnation": self._incarnation,
            "nonce": message.nonce,
            "claim": message.claim,
            "reader": message.reader,
        }

    # --- digests

    def _granted_to(self, request: messages.DigestRequest | messages.PackRequest) -> Offer | None:
        """The offer, if it is granted to this reader and this reader has asked for it."""
        offer = self.offers.get(request.nonce)
        if offer is None or offer.binding is None or request.incarnation != self._incarnation:
            return None
        has_asked = request.reader.rank in offer.binding.asked
        return offer if has_asked and offer.binding.expects(request.claim, request.reader) else None

    def _on_digest_request(self, request: messages.DigestRequest, route: bytes) -> Actions:
        offer, rank = self.offers.get(request.nonce), request.reader.rank
        if offer is None and request.nonce in self.early:  # the reader repeats it
            return []
        if offer is None:  # its ask was denied, and the log says so
            return [events.Reply(route, messages.Deny(**self._fields(request)))]
        binding = offer.binding
        is_expected = binding is None or binding.expects(request.claim, request.reader)
        if request.incarnation != self._incarnation or not is_expected:
            return self._deny(request, route, "a digest of blocks that are not granted to it")
        # The request may have overtaken the reader's ask. A denial would end the reader's whole
        # load; without an answer it repeats the request.
        if binding is None or rank not in binding.asked:
            return []
        num_tokens = offer.prepared.num_tokens
        if offer.written < min(request.end, num_tokens):
            offer.early[type(request), rank] = events.Asked(route, request)
            return []
        if request.end > num_tokens:
            return self._deny(request, route, f"a digest up to token {request.end} of {num_tokens}")
        return [events.MakeDigest(route, request, offer.prepared.tables)]

    def _on_digest_made(self, event: events.DigestMade) -> Actions:
        request = event.digest_request
        # The blocks may have changed under the digest unless the grant still holds.
        if not self.is_digest_wanted(request):
            return [events.Reply(event.route, messages.Deny(**self._fields(request)))]
        if event.refusal is not None:
            return self._deny(request, event.route, event.refusal)
        digest = messages.DigestReply(
            **self._fields(request), rows=event.rows, columns=event.columns
        )
        return [events.Reply(event.route, digest)]

    # --- packed chunks

    def _on_pack_request(self, request: messages.PackRequest, route: bytes) -> Actions:
        """Pack a chunk once it has a ring slot. A repeated request gets the same answer."""
        offer, ring, rank = self._granted_to(request), self.ring, request.reader.rank
        # A pair's last step may still be written when it is pinned: earlier parts stay granted.
        if offer is None or offer.binding is None or not offer.written:
            return self._deny(request, route, "a chunk of blocks that are not granted to it")
        num_tokens = offer.written
        if request.end > num_tokens:
            return self._deny(request, route, f"a chunk up to token {request.end} of {num_tokens}")
        if request.number < offer.binding.numbers[rank]:
            return []
        offer.binding.numbers[rank] = request.number
        holder = offer.nonce, rank
        ring.release(holder, request.holds)
        if request.chunk not in request.holds:
            return []  # the reader has read it, and asks for nothing
        slot, is_packed = ring.find(holder, request.chunk) or (None, False)
        if slot is None:
            is_waiting = ring.wait(holder, route, request)
            return [] if is_waiting else self._packed(request, route, None)
        return self._packed(request, route, slot) if is_packed else []

    def _on_packed(self, event: events.ChunkPacked) -> Actions:
        request = event.pack_request
        is_wanted = self.ring.on_packed(event.slot, is_packed=event.refusal is None)
        offer = self._granted_to(request)
        if not is_wanted or offer is None:
            return []
        if event.refusal is not None:
            offer.note(reader_name(request.reader), f"PackRequest denied: {event.refusal}")
            return self._packed(request, event.route, None)
        return self._packed(request, event.route, event.slot)

    def _packed(self, request: messages.PackRequest, route: bytes, slot: int | None) -> Actions:
        packed = messages.PackReply(**self._fields(request), chunk=request.chunk, slot=slot)
        return [events.Reply(route, packed)]

    # --- leases

    def _on_heartbeat(self, heartbeat: messages.Heartbeat, route: bytes, now: float) -> Actions:
        """Extend the leases of the claims that the reader lists, and end its others."""
        named, reading = set(heartbeat.claims), set(heartbeat.claims[: heartbeat.num_reading])
        rank = heartbeat.reader.rank
        held: set[Claim] = set()
        actions: Actions = []
        # A heartbeat to a former incarnation says nothing about the claims of this one.
        is_meant = heartbeat.incarnation == self._incarnation
        for offer, binding in self.held_by(heartbeat.reader) if is_meant else ():
            held.add(binding.claim)
            if binding.claim in named:
                binding.leases[rank] = now + self._lease_s
                if rank in binding.asked:
                    binding.routes[rank] = route
                if binding.claim in reading and offer.state is not State.READING:
                    offer.move(State.READING, heartbeat, peer=reader_name(heartbeat.reader))
                    binding.reading_since = now if offer.is_pinned else math.inf
                    self._due.set(offer.nonce, offer.due_at())
            elif binding.numbers.get(rank, heartbeat.number) < heartbeat.number:
                binding.ended.add(rank)
                self.ring.release((offer.nonce, rank))
                actions += self.settle(offer, heartbeat, OfferEnd.ABORTED)
        lost = tuple(claim for claim in heartbeat.claims if claim not in held)
        answer = messages.HeartbeatReply(
            incarnation=self._incarnation,
            reader=heartbeat.reader,
            number=heartbeat.number,
            lost=lost,
        )
        return [*actions, events.Reply(route, answer)]

    def _on_release(self, release: messages.Release, now: float) -> Actions:
        """End one reader. A reader that did not ask ends the offer: its engine does not need it."""
        offer = self.offers.get(release.nonce)
        if release.incarnation != self._incarnation:
            return []
        if offer is None or (offer.binding is None and not offer.is_pinned):
            if release.nonce not in self._ended:
                self.early.release(release, now)
            return self._report_given_up(release.nonce)
        if offer.binding is None:
            return self._end(offer, release, OfferEnd.NOT_NEEDED)
        if offer.binding.expects(release.claim, release.reader):
            offer.binding.ended.add(release.reader.rank)
            self.ring.release((offer.nonce, release.reader.rank))
        is_recalled = offer.state is State.RECALLED
        given_up = OfferEnd.REVOKED if is_recalled else OfferEnd.ABORTED
        return self.settle(offer, release, OfferEnd.READ if release.complete else given_up)

    def _report_given_up(self, nonce: Nonce) -> Actions:
        request = self.early.pop_given_up(nonce)
        return [] if request is None else [events.PairReleased(nonce, request)]

    def _on_due(self, offer: Offer, tick: events.Tick, now: float) -> Actions:
        """End or recall the offer if it is late; otherwise set its next deadline."""
        binding = offer.binding
        if binding is None:
            return self._end(offer, tick, OfferEnd.UNCLAIMED)
        # A reader whose lease expired may still read its ring slots: `settle` frees them later.
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
        if binding is None or offer.state is not State.GRANTED or not offer.is_pinned:
            return []
        offer.move(State.RECALLED, event, peer=f"engine {binding.engine!r}")
        binding.held_until = now + RECALL_S
        self._due.set(offer.nonce, offer.due_at())
        told = self._tell_recalled(offer)
        # Readers whose asks wait for the last step will get no grant, and so no digest.
        for kind, rank in offer.early:
            if kind is messages.Ask:
                del binding.asked[rank]
        offer.early.clear()
        return told

    def _tell_recalled(self, offer: Offer) -> Actions:
        return [
            events.Reply(each.route, messages.Recall(**self._fields(each.ask)))
            for each in offer.asks
        ]

    def _revoke_all(self, command: events.RevokeAll) -> Actions:
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
        missing -= sum(offer.num_blocks for offer in offers if offer.state is State.RECALLED)
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
            if missing > 0 and offer.has_read_for(READING_WANTED_S, now):
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
        self._note_end(offer.nonce, ENDED[end])
        self._remove(offer)
        actions += self._deny_all(self.early.forget(offer.nonce), ENDED[end])
        reader, asked_at = (binding.engine, binding.asked_at) if binding else (None, 0.0)
        ended = events.OfferEnded(offer.nonce, offer.request, end, reader, asked_at)
        if offer.is_pinned or end is OfferEnd.READ:
            return [*actions, ended]
        return [*actions, ended, events.PairReleased(offer.nonce, offer.request)]

    def _unbind(self, offer: Offer, *, is_cleared: bool = False) -> Actions:
        """Clear the fence slot, unless that is done, and free it and the slots of the ring."""
        binding, offer.binding = offer.binding, None
        slot = offer.prepared.slot
        if binding is not None:
            for rank in binding.leases:
                self.ring.release((offer.nonce, rank))
                held = self._by_reader[binding.engine, rank]
                del held[offer.nonce]
                if not held:
                    del self._by_reader[binding.engine, rank]
            if slot is None:
                self.free_slots.append(binding.slot)
                return [events.ClearSlot(binding.slot)]
        if slot is None:
            return []
        free = events.PairSlotFree(slot, offer.prepared.fence_token)
        return [free] if is_cleared else [events.ClearSlot(slot), free]

    def _remove(self, offer: Offer) -> None:
        del self.offers[offer.nonce]
        self._due.set(offer.nonce, math.inf)

    def _note_end(self, nonce: Nonce, reason: str) -> None:
        self._ended[nonce] = reason
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
