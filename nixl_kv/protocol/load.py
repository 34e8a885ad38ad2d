"""One load on a decode rank: its reads from all prefill ranks, and the one report it owes.

The load asks each prefill rank that has a part of the request's KV, reads the granted blocks, and
proves each part by the rank's fence slot. It is prepared when the request arrives, before vLLM has
given it blocks, so that the grants are here by then. For each prefill rank it has a `RankRead`.

Only the end of the read itself leaves READING: NIXL has no abort, so the caller gets its blocks
back when no read can write into them. One failure cancels the reads from all ranks.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from msgspec.structs import replace

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.match import Route
from nixl_kv.ids import (
    ANY_INCARNATION,
    Claim,
    Endpoint,
    FenceToken,
    HintKey,
    Incarnation,
    Rank,
    RequestId,
    short,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, Failure, FailureKind
from nixl_kv.protocol.machine import Machine, MachineState, Table
from nixl_kv.protocol.read_queue import ReadQueue
from nixl_kv.protocol.ticket import Ticket

# Decode repeats a message without an answer. ZMQ may have dropped it.
ASK_AGAIN_S: Final = 1.0
# A load that reads from an unreachable rank fails, although NIXL reports no error.
SILENCE_S: Final = 3.0
# Decode abandons the reads of a late load that have not ended, and replaces their NIXL agent.
DRAIN_S: Final = 1.0
MAX_LOST: Final = 16  # preemptions of one request, after which decode computes it
MAX_TIMEOUTS: Final = 4  # a read that does not move is late then, whatever moves beside it

_Kept = TypeVar("_Kept")

DROPPED: Final = Failure(FailureKind.DROPPED, "dropped")


@dataclass(frozen=True)
class Cancelled:
    """The load's own event: it was dropped, is late, or the read from another rank failed."""

    failure: Failure


@dataclass(frozen=True)
class Compared:
    """The load's own event: a feature has compared the bytes of a read with prefill's."""

    failure: Failure | None


class ReadState(MachineState):
    """The state of a read; its value says what the read waits for."""

    ASKING = "a grant"  # the rank was asked for its blocks
    GRANTED = "its turn in the read queue"  # or local blocks; the rank holds its own
    READING = "data"  # it is landing in the local blocks; at last, the fence slot is read
    VERIFYING = "a digest"  # the fence token was still there; the digests are being compared
    DRAINING = "the end of a cancelled read"  # which may still write
    ABANDONED = "the end of an abandoned read"  # likewise; its agent is being replaced
    DONE = ""  # the bytes are proven
    FAILED = None  # no read writes later, and the bytes must not be used


_FAILED: Final = (ReadState.FAILED,)

READ_TRANSITIONS: Final[Table[ReadState]] = {
    ReadState.ASKING: {
        messages.Grant: (ReadState.GRANTED,),
        messages.Deny: _FAILED,
        messages.Recall: _FAILED,
        events.EndpointLost: _FAILED,
        Cancelled: _FAILED,
    },
    ReadState.GRANTED: {
        events.StartLoad: (ReadState.READING,),
        messages.Deny: _FAILED,
        messages.Recall: _FAILED,
        messages.Pending: (ReadState.ASKING,),  # prefill has preempted the request
        messages.Grant: (ReadState.ASKING,),  # and computes it again, but that message was lost
        messages.HeartbeatReply: (ReadState.ASKING, ReadState.FAILED),
        events.EndpointLost: _FAILED,
        Cancelled: _FAILED,
    },
    ReadState.READING: {
        # To GRANTED or ASKING: a part has landed, and prefill still computes the rest.
        events.ReadDone: (
            ReadState.GRANTED,
            ReadState.ASKING,
            ReadState.DONE,
            ReadState.VERIFYING,
            ReadState.FAILED,
        ),
        events.ReadFailed: _FAILED,
        Cancelled: (ReadState.DRAINING,),
    },
    ReadState.VERIFYING: {
        Compared: (ReadState.DONE, ReadState.FAILED),
        messages.Deny: _FAILED,
        # To ASKING: prefill has preempted an early request, and computes other bits.
        messages.HeartbeatReply: (ReadState.ASKING, ReadState.FAILED),
        events.EndpointLost: _FAILED,
        Cancelled: _FAILED,
    },
    ReadState.DRAINING: {
        events.ReadDone: _FAILED,
        events.ReadFailed: _FAILED,
        events.Tick: (ReadState.ABANDONED,),
    },
    ReadState.ABANDONED: {
        events.ReadDone: _FAILED,
        events.ReadFailed: _FAILED,
    },
    ReadState.DONE: {},
    ReadState.FAILED: {},
}

READ: Final = Machine("read", READ_TRANSITIONS)

# In these states a read may write into local memory.
POSTED: Final = frozenset({ReadState.READING, ReadState.DRAINING, ReadState.ABANDONED})
ENDED: Final = frozenset({ReadState.DONE, ReadState.FAILED})


@dataclass(frozen=True)
class Settled:
    """The load's own event: no read can write into its blocks any longer."""


class LoadState(MachineState):
    """The state of a load. Each may come with local blocks or without: see `Load.start`."""

    CONNECTING = enum.auto()  # it waits for the description of prefill's engine
    ASKED = enum.auto()  # it asks prefill's ranks; prefill has not begun to compute the request
    READY = enum.auto()  # prefill computes the request, or has computed it: blocks are of use
    RELEASING = enum.auto()  # dropped while CONNECTING: it will release the ranks and end
    UNREACHED = enum.auto()  # failed while CONNECTING; it waits to be started or dropped
    FAILING = enum.auto()  # its reads are being ended, or it waits to be started or dropped
    OVERDUE = enum.auto()  # nothing moved; reads that do not end soon are abandoned
    LOADED = enum.auto()  # all bytes are proven
    FAILED = enum.auto()


_FAILING: Final = (LoadState.FAILING,)

LOAD_TRANSITIONS: Final[Table[LoadState]] = {
    LoadState.CONNECTING: {
        events.PrepareLoad: (LoadState.ASKED,),  # the peer is known already
        events.PeerFits: (LoadState.ASKED,),
        events.StartLoad: (LoadState.CONNECTING,),
        events.CancelLoad: (LoadState.RELEASING,),
        Failure: (LoadState.UNREACHED,),
    },
    LoadState.ASKED: {
        messages.Pending: (LoadState.READY,),
        messages.Grant: (LoadState.READY,),
        events.StartLoad: (LoadState.ASKED,),
        events.CancelLoad: (LoadState.FAILED,),
        Failure: _FAILING,
        Settled: (LoadState.LOADED,),  # this rank has none of the prompt's KV
    },
    LoadState.READY: {
        events.StartLoad: (LoadState.READY,),
        events.CancelLoad: (LoadState.FAILED,),
        Failure: _FAILING,
        Settled: (LoadState.LOADED,),
    },
    LoadState.RELEASING: {
        Settled: (LoadState.FAILED,),
    },
    LoadState.UNREACHED: {
        events.PeerFits: _FAILING,  # the ranks are released
        events.StartLoad: _FAILING,
        events.CancelLoad: (LoadState.FAILED,),
        Settled: (LoadState.FAILED,),
    },
    LoadState.FAILING: {
        events.StartLoad: _FAILING,
        events.CancelLoad: (LoadState.FAILED,),
        events.Tick: (LoadState.OVERDUE,),
        Settled: (LoadState.FAILED,),
    },
    LoadState.OVERDUE: {
        events.StartLoad: (LoadState.OVERDUE,),
        events.CancelLoad: (LoadState.FAILED,),
        Settled: (LoadState.FAILED,),
    },
    LoadState.LOADED: {},
    LoadState.FAILED: {},
}

LOAD: Final = Machine("load", LOAD_TRANSITIONS)

# The peer's ranks are unknown in these states.
PEER_UNKNOWN: Final = frozenset({LoadState.CONNECTING, LoadState.RELEASING, LoadState.UNREACHED})
OVER: Final = frozenset({LoadState.LOADED, LoadState.FAILED})
FAILED: Final = frozenset(
    {LoadState.UNREACHED, LoadState.FAILING, LoadState.OVERDUE, LoadState.FAILED}
)

DENIED: Final[Mapping[messages.DenyCause, tuple[FailureKind, str]]] = {
    "": (
        FailureKind.DENIED,
        "denied the ask: the offer was used, expired or revoked; its log has the reason",
    ),
    "unclaimed": (
        FailureKind.DENIED,
        "denied the ask: the offer expired before decode asked (offer_ttl_s of prefill)",
    ),
    "not_arrived": (
        FailureKind.NOT_ARRIVED,
        "never heard of this request: the router did not send it to that engine, or it hangs",
    ),
}

_Refusal: TypeAlias = (
    messages.Deny | messages.Recall | messages.HeartbeatReply | events.EndpointLost
)
# Why a load fails if a rank does not grant, or no longer does, or cannot be reached.
_REFUSALS: Final[Mapping[type, tuple[FailureKind, str]]] = {
    messages.Recall: (FailureKind.RECALLED, "recalled its blocks before decode had its own"),
    messages.HeartbeatReply: (FailureKind.LEASE_LOST, "let the lease run out"),
    events.EndpointLost: (FailureKind.UNREACHABLE, "is unreachable"),
}


class Numbers:
    """Numbers the asks, pack requests and heartbeats of a rank, so that prefill can order them."""

    last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


@dataclass
class RankRead:
    """The read of one prefill rank for one load. All times are monotonic, in seconds."""

    route: Route
    endpoint: Endpoint
    incarnation: Incarnation
    layout: CacheLayout
    state: ReadState = ReadState.ASKING
    ask_again_at: float = -math.inf
    moved_at: float = -math.inf  # the last step forward, or the last bytes that are known to land
    unreachable_since: float = math.inf  # its connection broke, and it has not answered since
    grant: messages.Grant | None = None  # the latest
    granted_at: int = 0  # the number of this rank's last message when the grant came
    part: events.StartLoad | None = None  # the tokens that are being read
    fence_token: FenceToken | None = None  # of the grant under which this part is read
    num_lost: int = 0  # grants, to preemptions
    proven: int = 0  # the tokens before this one have landed, under a valid grant
    done: events.ReadDone | None = None  # of all parts that are proven
    kept: dict["LoadPart", Any] = field(default_factory=dict)  # see `keep`
    entered_at: dict[ReadState, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = self.route.remote_rank
        self.name = f"rank {self.rank} at {self.endpoint}"

    def keep(self, part: "LoadPart", make: Callable[[], _Kept]) -> _Kept:
        """The record that a part keeps about this read, made when the part first asks for it."""
        kept: _Kept | None = self.kept.get(part)
        if kept is None:
            kept = self.kept[part] = make()
        return kept

    @property
    def is_partial(self) -> bool:
        """Whether prefill has granted a part of the prompt, and computes the rest."""
        return self.grant is not None and self.grant.num_tokens is not None

    @property
    def silent_at(self) -> float:
        """When its rank has been unreachable for too long; infinity if nothing is being read."""
        return self.unreachable_since + SILENCE_S if self.state in POSTED else math.inf


class LoadPart:
    """A feature's part of all loads of a rank: its handlers, and calls at points of a load's life.

    Each method here is that of a feature which does nothing at that point. `now` is monotonic, in
    seconds.
    """

    #: Answers of prefill and events of a read, by type.
    handlers: Mapping[type, Callable[["Load", RankRead, Any, float], Actions]] = {}
    #: The read of a claim from one rank, if there is one.
    find: Callable[[Claim, Rank], RankRead | None]

    def compares(self, load: "Load") -> bool:
        """Whether the bytes are compared with prefill's, so that one computation made them all."""
        del load
        return False

    def on_blocks(self, load: "Load", read: RankRead, now: float) -> Actions:
        """The load has local blocks, or the peer is known now, whichever is later."""
        del load, read, now
        return []

    def on_new_grant(self, read: RankRead) -> None:
        """Prefill has granted the read anew, after it lost a grant to a preemption."""

    def on_begun(self, load: "Load", read: RankRead, part: events.StartLoad) -> Actions:
        """The read of these tokens begins."""
        del load, read, part
        return []

    def must_prove(self, load: "Load", read: RankRead, event: events.ReadDone) -> bool:
        """Whether the part has to `prove` a read whose bytes have all landed."""
        del load, read, event
        return False

    def prove(self, load: "Load", read: RankRead, now: float) -> Actions:
        """The read is VERIFYING, until the part calls `Load.end_proof`."""
        del load, read, now
        return []

    def is_awaiting(self, read: RankRead) -> bool:
        """Whether the read's rank owes the part an answer, without which it does not go on."""
        del read
        return False

    def ask(self, load: "Load", read: RankRead, now: float) -> Actions:
        """Ask the read's rank again."""
        del load, read, now
        return []


@dataclass
class Load:
    """One load. All times are monotonic, in seconds."""

    reader: messages.Reader
    request: RequestId
    ticket: Ticket
    claim: Claim
    peer: events.PeerKey
    timeout_s: float
    since: float  # when it was prepared, and from then on when it was started
    entry_size: int  # in tokens; each part but the last ends at a multiple of it
    prepared_at: float = field(init=False)
    record: events.Record = field(repr=False)
    queue: ReadQueue = field(repr=False)
    numbers: Numbers = field(repr=False)
    tell: Callable[[messages.Hint], Actions] = field(repr=False)  # the scheduler of this engine
    parts: Sequence[LoadPart] = field(default=(), repr=False)  # of features
    hint_key: HintKey = field(default=events.NO_HINTS, repr=False)
    found: bytes = field(default=b"", repr=False)  # see `PrepareLoad`
    finds_at: Endpoint | None = None  # see `SetEngine`
    num_cached: int | None = None  # by the latest grant
    told: messages.PrefillState = "unknown"  # the latest state of its request on prefill
    told_at: float = -math.inf  # when prefill last said that it will compute the request
    wait_for_prefill_s: float = math.inf  # until prefill computes the request
    state: LoadState = LoadState.CONNECTING
    #: Set once the peer is known. It stays empty if this rank has none of the prompt's KV.
    reads: dict[Rank, RankRead] = field(default_factory=dict)
    #: With the local blocks, once the caller has them. Never in RELEASING.
    start: events.StartLoad | None = None
    #: The first one explains the others. Always in UNREACHED, FAILING, OVERDUE and FAILED.
    failure: Failure | None = None
    overdue_since: float = math.inf  # finite in OVERDUE, and after it
    outbox: Actions = field(default_factory=list, repr=False)  # until the load is settled

    def __post_init__(self) -> None:
        self.peer_name, self.prepared_at = str(self.peer), self.since
        self.subject = short(self.claim)  # in transitions
        cause = f"PrepareLoad: offer {short(self.ticket.nonce)}"
        about = (LOAD.name, self.subject, self.request, self.peer_name)
        self.record(events.Transition(*about, "", self.state.name, cause))

    @property
    def has_settled(self) -> bool:
        """Whether no read can write into local blocks any longer, or ever begin."""
        if self.state in (LoadState.CONNECTING, LoadState.RELEASING) and self.failure is None:
            return False
        for read in self.reads.values():  # noqa: SIM110 - a generator takes twice as long
            if read.state not in ENDED:
                return False
        return True

    @property
    def waits_for(self) -> str:
        if self.has_settled:
            return "the scheduler, to start or cancel it"
        if self.state in PEER_UNKNOWN:
            return f"the description of {self.peer}"
        states = dict.fromkeys(read.state for read in self.reads.values())
        waits = [state.value for state in states if state not in ENDED]
        own = ReadState.GRANTED.value if self.start is None else None
        return ", ".join("local blocks" if each == own else each for each in waits)

    @property
    def is_compared(self) -> bool:
        """Whether all its bytes must be of one computation; known once there are local blocks."""
        return any(part.compares(self) for part in self.parts)

    def lacks_answer(self, read: RankRead) -> bool:
        """Whether the read's rank owes an answer: a grant, or the answer to a part's question."""
        match read.state:
            case ReadState.ASKING:
                return True
            case ReadState.GRANTED:
                return read.is_partial
        return self._is_awaiting(read)

    def _is_awaiting(self, read: RankRead) -> bool:
        for part in self.parts:  # noqa: SIM110 - as above
            if part.is_awaiting(read):
                return True
        return False

    @property
    def is_unheard(self) -> bool:
        """Whether a rank of the peer has not answered this load's ask yet."""
        reads = self.reads.values()
        return any(r.state is ReadState.ASKING and r.moved_at == -math.inf for r in reads)

    def is_reading(self, read: RankRead) -> bool:
        """Whether prefill must keep the blocks, because this read has local blocks."""
        is_queued = read.state is ReadState.GRANTED and self.start is not None
        return is_queued or read.state in POSTED or read.state is ReadState.VERIFYING

    def fail(self, failure: Failure) -> None:
        """Let the load end badly. Its reads end when it is settled."""
        if self.failure is None:
            self.failure = failure
            if self.state is LoadState.CONNECTING:
                self._move(LoadState.UNREACHED, failure, failure.kind.value)
            elif self.state is not LoadState.RELEASING:
                self._move(LoadState.FAILING, failure, failure.kind.value)

    # --- time

    @property
    def lacks_only_blocks(self) -> bool:
        """Whether every rank has granted and local blocks are missing: then it is never late."""
        is_granted = all(read.state is ReadState.GRANTED for read in self.reads.values())
        is_live = self.state in (LoadState.ASKED, LoadState.READY)
        return is_live and self.start is None and is_granted

    @property
    def next_due(self) -> float:
        due = math.inf if self.state is LoadState.OVERDUE else self.deadline
        for read in self.reads.values():
            if self.lacks_answer(read):
                due = min(due, read.ask_again_at)
            if read.state is ReadState.DRAINING:
                due = min(due, self.overdue_since + DRAIN_S)
        return due

    @property
    def deadline(self) -> float:
        """When it is late unless something moves before; infinity for never."""
        if self.start is None or not self.reads:
            if self.lacks_only_blocks:
                return math.inf
            due = max(self.since, self.told_at) + self.timeout_s
            return min(due, self.prepared_at + self.wait_for_prefill_s)
        unfinished = [read for read in self.reads.values() if read.state not in ENDED]
        return min(map(self._late_at, unfinished), default=math.inf)

    def _late_at(self, read: RankRead) -> float:
        """When one read is late. A read that moves never is, unless its rank is silent."""
        moved_at = max(self.since, read.moved_at)
        late_at = moved_at + self.timeout_s
        key = (self.claim, read.rank)
        if key in self.queue.where:
            others_moved_at = self.queue.moved_at(key)
            # A queued read has not begun: it is late only if nothing moves that it waits for.
            if read.state is ReadState.GRANTED:
                return max(late_at, others_moved_at + self.timeout_s)
            # A posted read shares the link with the rest of its load and its lane. While those
            # move, it may be starved rather than stuck, so it gets more time, but not without end.
            others_moved_at = max(others_moved_at, *[one.moved_at for one in self.reads.values()])
            longest = moved_at + MAX_TIMEOUTS * self.timeout_s
            late_at = max(late_at, min(others_moved_at + self.timeout_s, longest))
        return min(late_at, read.silent_at)

    def on_tick(self, tick: events.Tick, now: float) -> Actions:
        """Fail a late load. If that does not end a read in time, abandon the read."""
        # A late load stays late, whatever moves afterwards.
        if self.state is not LoadState.OVERDUE:
            if now < self.deadline:
                return []
            self.fail(Failure(FailureKind.LATE, self._why_late(now)))
            if self.state is LoadState.FAILING:
                self._move(LoadState.OVERDUE, tick)
            self.overdue_since = now
        actions: Actions = []
        for read in self.reads.values() if now >= self.overdue_since + DRAIN_S else ():
            if read.state is ReadState.DRAINING:
                self._move_read(read, ReadState.ABANDONED, tick, now)
                actions.append(events.AbandonRead(self.request, read.rank))
        return actions

    def _why_late(self, now: float) -> str:
        if any(read.silent_at <= now for read in self.reads.values()):
            return "prefill fell silent during the read"
        if self.state is LoadState.ASKED and self.told == "queued" and self.start is None:
            waited = f"{now - self.prepared_at:g} s"
            return f"prefill has not begun to compute the request within {waited}"
        return f"nothing moved for {self.timeout_s:g} s"

    # --- from arrival to the grant

    def open(
        self, description: messages.Description, routes: Iterable[Route], event: object
    ) -> Actions:
        """The peer is known: read some ranks, and release those that no rank here reads."""
        cause = type(event).__name__
        actions: Actions = []
        match self.state:
            case LoadState.CONNECTING:
                self._move(LoadState.ASKED, event)
            case LoadState.UNREACHED:
                self._move(LoadState.FAILING, event)
            case LoadState.RELEASING:
                self.fail(DROPPED)
        for route in routes:
            remote = description.ranks[route.remote_rank]
            read = RankRead(route, remote.endpoint, remote.incarnation, remote.layout)
            if route.readers:
                self.reads[read.rank] = read
                self._note(read, "", cause)
            else:
                actions.append(self.release(read, complete=True))
        return actions

    def ask(self, read: RankRead, now: float) -> Actions:
        match read.state:
            case ReadState.ASKING | ReadState.GRANTED:
                read.ask_again_at = now + ASK_AGAIN_S
                ask = messages.Ask(
                    **self.fields(read),
                    context=self.ticket.hashes,
                    number=self.numbers.next(),
                    readers=read.route.readers,
                    is_early=self.ticket.is_early,
                    found=self.found,
                    directory=self.finds_at,
                )
                return [events.Send(read.endpoint, ask)]
        return [action for part in self.parts for action in part.ask(self, read, now)]

    def on_blocks(self, start: events.StartLoad, now: float) -> Actions:
        """The request has local blocks, so its time begins again."""
        self.start, self.since = start, now
        after = LoadState.FAILING if self.state is LoadState.UNREACHED else self.state
        self._move(after, start, f"tokens {start.begin} to {start.end - 1}")
        return self.tell_parts(now)

    def tell_parts(self, now: float) -> Actions:
        """The peer and the local blocks may both be known now."""
        actions: Actions = []
        for read in self.reads.values():
            for part in self.parts:
                actions += part.on_blocks(self, read, now)
        return actions

    def drop(self, command: events.CancelLoad, now: float) -> Actions:
        """The caller does not need the load any longer; it hears of the end if it gave blocks."""
        if self.start is not None:
            self.fail(DROPPED)
        elif self.state is LoadState.CONNECTING:
            self._move(LoadState.RELEASING, command)
        elif self.state is not LoadState.RELEASING:
            self.failure = self.failure or DROPPED
            actions = self.cancel(self.failure, now)  # ends all reads: none has local blocks
            self._move(LoadState.FAILED, command, str(self.failure), self.failure.kind.value)
            return actions
        return []

    def next_part(self, read: RankRead) -> events.StartLoad | None:
        """The tokens to read now; None until the load has blocks and prefill has written more."""
        if self.start is None or read.grant is None:
            return None
        end, written = self.start.end, read.grant.num_tokens
        if written is not None and written < end:
            end = written // self.entry_size * self.entry_size
        begin = max(self.start.begin, read.proven)
        if begin == self.start.begin and end == self.start.end:
            return self.start
        return replace(self.start, begin=begin, end=end) if begin < end else None

    def start_read(self, read: RankRead, now: float) -> Actions:
        part = self.next_part(read)
        if self.start is None or read.grant is None or part is None:
            return []
        read.part, read.fence_token = part, read.grant.fence_token
        self._move_read(read, ReadState.READING, self.start, now)
        actions: Actions = [events.StartRead(self.peer, read.rank, read.grant, part)]
        for each in self.parts:
            actions += each.on_begun(self, read, part)
        return actions

    # --- the handlers of HANDLERS: a late or repeated message changes nothing

    def on_grant(self, read: RankRead, grant: messages.Grant, now: float) -> Actions:
        if read.state is ReadState.FAILED:
            return [self.release(read)]
        former = read.grant if read.state is ReadState.GRANTED else None
        if former is not None and former.fence_token != grant.fence_token:
            self._lose_grant(read, grant, now)
        self.num_cached = grant.num_cached
        self._note_begun(grant)
        if read.state is ReadState.ASKING:
            for part in self.parts if read.num_lost else ():
                part.on_new_grant(read)
            read.grant, read.granted_at = grant, self.numbers.last
            read.fence_token = grant.fence_token
            self._move_read(read, ReadState.GRANTED, grant, now)
        elif read.is_partial and read.state in (ReadState.GRANTED, ReadState.READING):
            before, after = read.grant, grant.num_tokens
            has_grown = before is None or after is None or after > (before.num_tokens or 0)
            read.grant, read.granted_at = grant, self.numbers.last
            read.ask_again_at = now + ASK_AGAIN_S
            if has_grown or self.start is None:  # a repeated answer is not progress
                read.moved_at = now
        return []

    def on_pending(self, read: RankRead, pending: messages.Pending, now: float) -> Actions:
        """The rank grants when it can."""
        if pending.state == "stalled":
            return self._on_stalled(read)
        if read.state is ReadState.GRANTED:
            self._lose_grant(read, pending, now)
        if read.state is not ReadState.ASKING:
            return []
        if pending.state != self.told:
            self._note(read, read.state.name, f"Pending: {pending.state}")
        self.told = pending.state
        if pending.state == "computing":
            self._note_begun(pending)
        # With local blocks, which other requests lack meanwhile, only new tokens are progress.
        if pending.state != "unknown" and self.start is None:
            self.told_at = read.moved_at = now
        return []

    def _on_stalled(self, read: RankRead) -> Actions:
        if self.ticket.is_early and read.state in (ReadState.ASKING, ReadState.GRANTED):
            detail = f"the engine of prefill rank {read.rank} hangs: no step of it begins or ends"
            self.fail(Failure(FailureKind.STALLED, detail))
        return []

    def _note_begun(self, event: messages.Grant | messages.Pending) -> None:
        if self.state is LoadState.ASKED:
            self._move(LoadState.READY, event)

    def on_refusal(self, read: RankRead, event: _Refusal, now: float) -> Actions:
        """The rank does not grant, or no longer does, or cannot be reached."""
        # The fence slot decides about a posted read. A comparison goes on once both digests are
        # here, because the fence has proven those bytes.
        is_undecided = read.state is ReadState.VERIFYING and self._is_awaiting(read)
        is_lost = isinstance(event, messages.HeartbeatReply)
        if is_lost and self.ticket.is_early and (is_undecided or read.state is ReadState.GRANTED):
            self._lose_grant(read, event, now)
            return self.ask(read, now)
        if isinstance(event, messages.Deny):
            kind, what = DENIED[event.cause]
        else:
            kind, what = _REFUSALS[type(event)]
        reason = f": {event.reason}" if isinstance(event, events.EndpointLost) else ""
        failure = Failure(kind, f"prefill rank {read.rank} {what}{reason}")
        if is_undecided or read.state in (ReadState.ASKING, ReadState.GRANTED):
            self.fail(failure)
            self._move_read(read, ReadState.FAILED, event, now)
        elif read.state is ReadState.READING and self._is_awaiting(read):  # in vain
            self.fail(failure)
        return [self.release(read)] if isinstance(event, messages.Recall) else []

    def on_moved(self, read: RankRead, _event: events.ReadMoved, now: float) -> Actions:
        self.note_progress(read, now)
        return []

    def on_read_done(self, read: RankRead, event: events.ReadDone, now: float) -> Actions:
        """The granted token proves that prefill held its blocks throughout the read."""
        slot_valid = read.grant is not None and event.fence_token == read.fence_token
        start, part, is_reading = self.start, read.part, read.state is ReadState.READING
        # Prefill may have granted another computation meanwhile, which it digests.
        is_renewed = read.grant is not None and read.grant.fence_token != read.fence_token
        is_lost = not slot_valid or (is_renewed and self.is_compared)
        if is_reading and self.ticket.is_early and is_lost:
            self._lose_grant(read, event, now)
            return self.ask(read, now)
        if is_reading and start is not None and part is not None and part.end < start.end:
            self.queue.remove((self.claim, read.rank), now, has_landed=True)
            self._add_part(read, event)
            self._move_read(read, ReadState.GRANTED, event, now)
            return []
        if not slot_valid:
            detail = f"prefill rank {read.rank} took its blocks back during the read"
            self.fail(Failure(FailureKind.FENCED, detail))
        if read.state in (ReadState.DRAINING, ReadState.ABANDONED) or not slot_valid:
            return self._end_read(read, ReadState.FAILED, event, now)
        self._add_part(read, event)
        prover = next((part for part in self.parts if part.must_prove(self, read, event)), None)
        if prover is None:
            return self._end_read(read, ReadState.DONE, event, now)
        self._move_read(read, ReadState.VERIFYING, event, now)
        return prover.prove(self, read, now)

    def end_proof(self, read: RankRead, failure: Failure | None, now: float) -> Actions:
        """A part has compared the bytes of a read that is VERIFYING."""
        if failure is not None:
            self.fail(failure)
        after = ReadState.DONE if failure is None else ReadState.FAILED
        return self._end_read(read, after, Compared(failure), now)

    def _lose_grant(self, read: RankRead, event: object, now: float) -> None:
        """Prefill has preempted the request, or has ended the offer and will deny the next ask."""
        # It computes the same tokens again, but not the same bits: a digest must be of bytes that
        # were computed together.
        if self.is_compared:
            read.proven, read.done = 0, None
        read.grant = None
        read.num_lost += 1
        self._move_read(read, ReadState.ASKING, event, now)
        if read.num_lost > MAX_LOST:
            detail = f"prefill rank {read.rank} took its blocks back {read.num_lost} times"
            self.fail(Failure(FailureKind.FENCED, detail))

    def _add_part(self, read: RankRead, event: events.ReadDone) -> None:
        before = read.done
        if read.part is not None:
            read.proven = read.part.end
        if before is not None:
            names = ("num_bytes", "num_runs", "seconds", "direct_bytes", "post_seconds")
            sums = {name: getattr(before, name) + getattr(event, name) for name in names}
            event = replace(event, **sums)
        read.done = event

    def on_read_failed(self, read: RankRead, event: events.ReadFailed, now: float) -> Actions:
        detail = f"reading prefill rank {read.rank} failed: {event.reason}"
        self.fail(Failure(FailureKind.BROKEN, detail))
        return self._end_read(read, ReadState.FAILED, event, now)

    # --- the end

    def cancel(self, failure: Failure, now: float) -> Actions:
        """End every read: release asks and grants now, and posted reads once they have drained."""
        actions: Actions = []
        for read in self.reads.values():
            if read.state is ReadState.READING:
                actions.append(events.StopRead(self.request, read.rank))
                self._move_read(read, ReadState.DRAINING, Cancelled(failure), now)
            elif read.state not in POSTED and read.state not in ENDED:
                actions += self._end_read(read, ReadState.FAILED, Cancelled(failure), now)
        return actions

    def end(self, now: float) -> Actions:
        """All reads have ended. The caller hears of a load to which it gave blocks."""
        start, failure, is_good = self.start, self.failure, self.failure is None
        if failure is None:
            self._move(LoadState.LOADED, Settled())
        else:
            self._move(LoadState.FAILED, Settled(), str(failure), failure.kind.value)
        if start is None:
            return []
        reads = tuple([r.done for r in self.reads.values() if is_good and r.done is not None])
        is_verified, num_tokens = is_good and self.is_compared, start.num_tokens
        ended = (self.request, num_tokens, failure, self.peer, is_verified, reads)
        num_cached = self.num_cached if is_good else None
        hint = self.tell(self.landed()) if is_good else []
        facts = self._waits(now), now, num_cached, bool(self.found)
        return [events.LoadEnded(*ended, *facts), *hint]

    def _waits(self, now: float) -> tuple[float, ...]:
        """The seconds in each of PHASES. The slowest read decides; a failed load stops early."""
        if self.failure is None and not self.reads:  # this rank has none of the prompt's KV
            return ()
        reads = self.reads.values()

        def last(*states: ReadState) -> float:
            entered = [[read.entered_at.get(state, now) for state in states] for read in reads]
            return max(map(min, entered), default=now)

        granted_at = last(ReadState.GRANTED)
        landed_at = last(ReadState.VERIFYING, ReadState.DONE)
        times = (granted_at, max(granted_at, self.since), last(ReadState.READING), landed_at, now)
        begins = (self.prepared_at, *times[:-1])
        return tuple(end - begin for begin, end in zip(begins, times, strict=True))

    def note_progress(self, read: RankRead, now: float) -> None:
        read.moved_at = now
        self.queue.note_progress((self.claim, read.rank), now)

    def _move(self, after: LoadState, event: object, detail: str = "", reason: str = "") -> None:
        """Change the load's state. The caller learns when blocks become of use, at most once."""
        before, about = self.state, (self.subject, self.request, self.peer_name)
        self.state = LOAD.move(self.record, (before, after), event, about, detail, reason=reason)
        was_waiting = before in (LoadState.CONNECTING, LoadState.ASKED)
        of_use = (LoadState.READY, LoadState.UNREACHED, LoadState.FAILING)
        if self.ticket.is_early and was_waiting and after in of_use:
            self.outbox += [events.LoadReady(self.request), *self.tell(self.ready())]

    def _about(self, read: RankRead) -> tuple[str, str, str]:
        return f"{self.subject}/{read.rank}", self.request, read.name

    def _note(self, read: RankRead, before: str, cause: str) -> None:
        about = self._about(read)
        self.record(events.Transition(READ.name, *about, before, read.state.name, cause))

    def _move_read(self, read: RankRead, after: ReadState, event: object, now: float) -> None:
        detail = event.failure.kind.value if isinstance(event, Cancelled) else ""
        num_bytes = event.num_bytes if isinstance(event, events.ReadDone) else 0
        states, about = (read.state, after), self._about(read)
        read.state = READ.move(self.record, states, event, about, detail, num_bytes)
        if after not in (ReadState.DRAINING, ReadState.ABANDONED, ReadState.FAILED):
            read.moved_at = now
            read.entered_at.setdefault(after, now)

    def pop_outbox(self) -> Actions:
        actions, self.outbox = self.outbox, []
        return actions

    def check(self) -> None:
        """Check what the states promise.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        name, states = self.state.name, {read.state for read in self.reads.values()}
        has_failed = self.state in FAILED
        rules = {
            "reads before the peer is known": self.state in PEER_UNKNOWN and states,
            "no failure": has_failed and self.failure is None,
            f"failure {self.failure}": not has_failed and self.failure is not None,
            "local blocks": self.state is LoadState.RELEASING and self.start is not None,
            "no time": (self.state is LoadState.OVERDUE) and self.overdue_since == math.inf,
            "reads that go on": (has_failed or self.state is LoadState.LOADED)
            and states - POSTED - ENDED,
            "a failed read": not has_failed and ReadState.FAILED in states,
            "unproven reads": self.state is LoadState.LOADED and states - {ReadState.DONE},
        }
        for read in self.reads.values():
            is_posted = read.state in POSTED
            lacks = self.start is None or read.grant is None
            rules[f"{read.state.name} without blocks or grant"] = is_posted and lacks
        for rule, is_broken in rules.items():
            if is_broken:
                raise LocalProtocolError(f"load {self.request!r} is {name}: {rule}")

    def _end_read(self, read: RankRead, after: ReadState, event: object, now: float) -> Actions:
        self._move_read(read, after, event, now)
        return [self.release(read, complete=after is ReadState.DONE)]

    def release(self, read: RankRead, *, complete: bool = False) -> events.Send:
        """Tell prefill that this reader has ended. If the message is lost, the lease expires."""
        release = messages.Release(**self.fields(read), complete=complete)
        return events.Send(read.endpoint, release)

    def fields(self, read: RankRead) -> messages.ClaimFields:
        return {
            "incarnation": read.incarnation,
            "nonce": self.ticket.nonce,
            "claim": self.claim,
            "reader": self.reader,
        }

    def ready(self) -> messages.Ready:
        return messages.Ready(
            incarnation=ANY_INCARNATION, hint_key=self.hint_key, reader=self.reader
        )

    def landed(self) -> messages.Landed:
        return messages.Landed(
            incarnation=ANY_INCARNATION,
            hint_key=self.hint_key,
            reader=self.reader,
            num_cached=self.num_cached,
        )


HANDLERS: Final[Mapping[type, Callable[[Load, RankRead, Any, float], Actions]]] = {
    messages.Grant: Load.on_grant,
    messages.Pending: Load.on_pending,
    messages.Deny: Load.on_refusal,
    messages.Recall: Load.on_refusal,  # of a read in progress, `DecodeMachine` answers it
    events.ReadMoved: Load.on_moved,
    events.ReadDone: Load.on_read_done,
    events.ReadFailed: Load.on_read_failed,
}
"""How a load handles an answer of a prefill rank, or an event of the read; parts add theirs."""
