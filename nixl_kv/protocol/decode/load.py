"""One load on a decode rank: what it reads from each prefill rank, and the one report it owes.

A load is prepared on arrival of its request, before there are blocks to read into, so that
prefill's answer is there when the blocks are. For each prefill rank that it reads it has a
`RankRead`:

    ASKING     the rank was asked
    GRANTED    it holds the blocks; there are no local blocks yet, or other reads come first
    READING    data is landing in the local blocks
    CHECKING   all data has landed; the generation slot is being read
    VERIFYING  the slot was still valid after the last byte; the bytes are being compared with
               prefill's, where that is wanted
    DRAINING   no longer wanted, but a read may still write
    DONE       the slot was valid: the bytes are right
    FAILED     nothing of it can write any more, and nothing of it may be used

There is no way from READING or CHECKING to an end but through the end of the read itself: NIXL has
no abort, so a block goes back to the caller only when no read can write into it. One failure
cancels the reads from all other ranks. The load is over when every read has ended; then it is
reported (`LoadEnded`) if it was started, and forgotten without a word if it was cancelled before
that.
"""

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.match import Route
from nixl_kv.geometry.slices import KVSlice
from nixl_kv.ids import Claim, Endpoint, Incarnation, Rank, RequestId, short
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode.read_queue import ReadQueue
from nixl_kv.protocol.events import Failure, FailureKind
from nixl_kv.protocol.ticket import Ticket

ASK_AGAIN_S: Final = 1.0

SILENCE_S: Final = 3.0
"""How long a read may go on whose prefill rank is unreachable: it may have landed long ago."""

DRAIN_S: Final = 1.0
"""How long a read may take to end by itself after its time, before its agent is given up for it."""

MOST_TIMEOUTS: Final = 4
"""How many timeouts a read may be under way while others from the same rank end."""

DROPPED: Final = Failure(FailureKind.DROPPED, "dropped")


@dataclass(frozen=True)
class Cancelled:
    """Nobody wants what is read any more: an event of the load's own."""

    failure: Failure


class State(enum.Enum):
    """See the module's head."""

    ASKING = enum.auto()
    GRANTED = enum.auto()
    READING = enum.auto()
    CHECKING = enum.auto()
    VERIFYING = enum.auto()
    DRAINING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()

    __hash__ = object.__hash__  # Enum's own is Python code, and states are looked up all the time


_FAILED: Final = (State.FAILED,)

TRANSITIONS: Final[Mapping[State, Mapping[type, tuple[State, ...]]]] = {
    State.ASKING: {
        messages.Grant: (State.GRANTED,),
        messages.Deny: _FAILED,
        messages.Recall: _FAILED,
        events.EndpointLost: _FAILED,
        Cancelled: _FAILED,
    },
    State.GRANTED: {
        events.StartLoad: (State.READING,),
        messages.Deny: _FAILED,
        messages.Recall: _FAILED,
        messages.Renewed: _FAILED,
        events.EndpointLost: _FAILED,
        Cancelled: _FAILED,
    },
    State.READING: {
        events.ReadDone: (State.CHECKING,),
        events.ReadFailed: _FAILED,
        Cancelled: (State.DRAINING,),
    },
    State.CHECKING: {
        events.SlotRead: (State.DONE, State.VERIFYING, State.FAILED),
        events.ReadFailed: _FAILED,
        Cancelled: (State.DRAINING,),
    },
    State.VERIFYING: {
        events.DigestCompared: (State.DONE, State.FAILED),
        messages.Deny: _FAILED,
        messages.Renewed: _FAILED,
        events.EndpointLost: _FAILED,
        Cancelled: _FAILED,
    },
    State.DRAINING: {
        events.ReadDone: _FAILED,
        events.SlotRead: _FAILED,
        events.ReadFailed: _FAILED,
    },
    State.DONE: {},
    State.FAILED: {},
}
"""For each state, which event may lead to which states."""

POSTED: Final = frozenset({State.READING, State.CHECKING, State.DRAINING})
"""States in which a read may write into local memory."""

HOLDING: Final = POSTED | {State.ASKING, State.GRANTED, State.VERIFYING}
"""States in which the prefill rank may hold blocks for this side: the claim is renewed."""


@dataclass
class RankRead:
    """What one load reads from one prefill rank, as its engine described it.

    `readers` are all ranks of this engine that read it, this one among them.
    """

    rank: Rank
    incarnation: Incarnation
    endpoint: Endpoint
    readers: tuple[Rank, ...]
    state: State = State.ASKING
    ask_again_at: float = -math.inf
    unreachable_since: float | None = None  # its connection broke, and it has said nothing since
    abandoned: bool = False
    started_at: float = math.inf  # when it was posted
    grant: messages.Grant | None = None
    granted_at: int = 0  # the number of the latest ask or renew then
    done: events.ReadDone | None = None  # what was read, once all data has landed
    slices: tuple[KVSlice, ...] = ()  # what is to be compared, once there are blocks
    digest: messages.DigestReply | None = None  # prefill's, of these slices
    chunks: dict[int, events.Chunk] = field(default_factory=dict)  # asked for, not answered
    holds: tuple[int, ...] = ()  # the chunks that it waits for, or still reads
    name: str = field(init=False)  # for people

    def __post_init__(self) -> None:
        self.name = f"rank {self.rank} at {self.endpoint}"

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in (State.DONE, State.FAILED)

    @property
    def lacks_answer(self) -> bool:
        """Whether its rank is asked until it answers: for a grant, for chunks, or for a digest."""
        match self.state:
            case State.READING:
                return bool(self.chunks)
            case State.VERIFYING:
                return self.digest is None
        return self.state is State.ASKING

    @property
    def awaits_prefill(self) -> bool:
        """Whether a refusal by prefill ends it: nothing is being read, and something is missing.

        Reads under way go on: the slot decides. A comparison goes on too: the bytes that it
        compares were held, and both digests are on this side.
        """
        return self.state in HOLDING - POSTED and not (
            self.state is State.VERIFYING and self.digest is not None
        )


@dataclass
class Load:
    """See the module's head. `reads` is None until the peer is known; times are monotonic."""

    reader: messages.Reader
    request: RequestId
    ticket: Ticket
    claim: Claim
    peer: events.PeerKey
    timeout_s: float
    deadline: float  # unless something moves before; see `_late_at`
    record: events.Record = field(repr=False)
    queue: ReadQueue = field(repr=False)
    reads: dict[Rank, RankRead] | None = None
    start: events.StartLoad | None = None  # once there are blocks
    is_cancelled: bool = False
    has_progressed: bool = False  # since `deadline` was set
    failure: Failure | None = None  # the first one; the others follow from it
    overdue_since: float | None = None

    def __post_init__(self) -> None:
        cause = f"PrepareLoad: offer {short(self.ticket.nonce)}"
        self.record(events.Transition(self.request, str(self.peer), "", "PREPARED", cause))

    @property
    def rank_reads(self) -> list[RankRead]:
        """What is read from each prefill rank; nothing before the peer is known."""
        return list(self.reads.values()) if self.reads else []

    @property
    def is_over(self) -> bool:
        """Whether no read can write any more, and none will be started."""
        if self.reads is None:
            return self.failure is not None
        return all(read.has_ended for read in self.reads.values())

    @property
    def waits_for(self) -> str:
        """What happens next, in words."""
        if self.is_over:
            return "its caller, to start or to cancel it"
        if self.reads is None:
            return f"the description of {self.peer}"
        waits = [self._read_waits_for(read) for read in self.rank_reads if not read.has_ended]
        return ", ".join(dict.fromkeys(waits))

    def _read_waits_for(self, read: RankRead) -> str:
        if read.state is State.GRANTED and self.start is None:
            return "blocks of its own"
        return _WAITS_FOR[read.state]

    @property
    def lacks_only_blocks(self) -> bool:
        """Whether all is granted, and blocks to read into are missing: then it is never late."""
        states = {read.state for read in self.rank_reads}
        return self.start is None and self.reads is not None and states <= {State.GRANTED}

    @property
    def next_due(self) -> float | None:
        """When time changes something by itself, in monotonic seconds; None for never."""
        if self.is_over:
            return None
        times = [read.ask_again_at for read in self.rank_reads if read.lacks_answer]
        if self.overdue_since is None:
            times.append(self._late_at)
        elif any(read.state in POSTED and not read.abandoned for read in self.rank_reads):
            times.append(self.overdue_since + DRAIN_S)
        return min((when for when in times if when < math.inf), default=None)

    @property
    def _late_at(self) -> float:
        """When nothing has moved for too long, or a rank that is read has been silent for it."""
        silent = [
            read.unreachable_since + SILENCE_S
            for read in self.rank_reads
            if read.state in POSTED and read.unreachable_since is not None
        ]
        if self.start is None or not self.reads:
            return min([math.inf if self.lacks_only_blocks else self.deadline, *silent])
        still = [self._read_late_at(read) for read in self.rank_reads if not read.has_ended]
        return min([*still, *silent], default=math.inf)

    def _read_late_at(self, read: RankRead) -> float:
        """What is queued, or on a link with others, is not late as long as those advance."""
        key = (self.claim, read.rank)
        if key not in self.queue:
            return self.deadline
        advancing = self.queue.progressed_at(key) + self.timeout_s
        longest = read.started_at + MOST_TIMEOUTS * self.timeout_s
        return max(self.deadline, min(advancing, longest))

    def move_deadline(self, now: float) -> None:
        """Once it was started, its time runs from what moved last."""
        if self.has_progressed and self.start is not None:
            self.deadline = now + self.timeout_s
        self.has_progressed = False

    def is_reading(self, read: RankRead) -> bool:
        """Whether it is being read, or will be without any other step of the caller's."""
        is_queued = read.state is State.GRANTED and self.start is not None
        return is_queued or read.state in POSTED or read.state is State.VERIFYING

    def fail(self, failure: Failure) -> None:
        """Keep the first failure."""
        if self.failure is None:
            self.failure = failure

    # --- from arrival to the grant

    def open(
        self,
        description: messages.Description,
        routes: Iterable[Route],
        event: events.PrepareLoad | events.PeerFits,
    ) -> list[events.Action]:
        """The peer is known, by this event: some ranks are read, others this side only releases."""
        self.reads = {}
        actions: list[events.Action] = []
        for route in routes:
            remote = description.ranks[route.remote_rank]
            read = RankRead(
                rank=route.remote_rank,
                incarnation=remote.incarnation,
                endpoint=remote.endpoint,
                readers=route.readers,
            )
            if route.readers:
                self.reads[read.rank] = read
                cause = type(event).__name__
                self.record(events.Transition(self.request, read.name, "", read.state.name, cause))
            else:
                actions.append(self._release(read, complete=True))
        return actions

    def ask(self, read: RankRead, number: int, now: float) -> events.Send:
        """Ask one rank for the blocks, or ask it again."""
        read.ask_again_at = now + ASK_AGAIN_S
        ask = messages.Ask(
            incarnation=read.incarnation,
            nonce=self.ticket.nonce,
            claim=self.claim,
            context=self.ticket.context,
            reader=self.reader,
            number=number,
            readers=read.readers,
        )
        return events.Send(read.endpoint, ask)

    def on_grant(
        self, read: RankRead, grant: messages.Grant, last_number: int
    ) -> list[events.Action]:
        """A grant; one that comes twice, or too late, changes nothing."""
        if read.state is State.FAILED:
            return [self._release(read, complete=False)]
        if read.state is not State.ASKING:
            return []
        read.grant, read.granted_at = grant, last_number
        self._move(read, State.GRANTED, grant)
        return []

    def on_blocks(self, start: events.StartLoad, now: float) -> None:
        """There are blocks: what is granted can be read, in its turn."""
        self.start, self.deadline = start, now + self.timeout_s
        cause = f"StartLoad: tokens {start.begin} to {start.end - 1}"
        self.record(events.Transition(self.request, str(self.peer), "PREPARED", "STARTED", cause))

    def start_read(self, read: RankRead, now: float) -> list[events.Action]:
        """It is its turn."""
        if self.start is None or read.grant is None:
            return []
        read.started_at = now
        self._move(read, State.READING, self.start)
        return [events.StartRead(self.peer, read.rank, read.grant, self.start, read.slices)]

    def on_recall(self, read: RankRead, recall: messages.Recall) -> list[events.Action]:
        """Prefill wants its blocks back, and nobody reads them: release them."""
        if read.state in (State.ASKING, State.GRANTED):
            detail = f"prefill rank {read.rank} wanted its blocks back before there were any here"
            self.fail(Failure(FailureKind.RECALLED, detail))
            self._move(read, State.FAILED, recall)
        return [self._release(read, complete=False)]

    def on_refusal(
        self,
        read: RankRead,
        event: messages.Deny | messages.Renewed | events.EndpointLost,
        failure: Failure,
    ) -> None:
        """The rank does not grant, or no longer. What it is to pack would never come."""
        if read.awaits_prefill:
            self.fail(failure)
            self._move(read, State.FAILED, event)
        elif read.state is State.READING and read.chunks:
            self.fail(failure)

    # --- a read by chunks

    def on_chunks_wanted(self, read: RankRead, event: events.ChunksWanted) -> list[events.Action]:
        """A read advances, so it is not late; some chunks of it may have to be asked for."""
        read.holds = event.holds
        self.has_progressed |= read.state is State.READING
        if event.chunks and read.state is not State.READING:
            return [events.StopRead(self.request, read.rank)]
        read.chunks |= {each.number: each for each in event.chunks if each.number in event.holds}
        return []

    def ask_chunks(
        self, read: RankRead, chunks: Iterable[events.Chunk], number: int, now: float
    ) -> list[events.Action]:
        """Ask for chunks, or ask for them again."""
        read.ask_again_at = now + ASK_AGAIN_S
        return [
            events.Send(
                read.endpoint,
                messages.PackRequest(
                    incarnation=read.incarnation,
                    nonce=self.ticket.nonce,
                    claim=self.claim,
                    reader=self.reader,
                    number=number,
                    chunk=chunk.number,
                    begin=chunk.begin,
                    end=chunk.end,
                    layers=chunk.layers,
                    holds=read.holds,
                ),
            )
            for chunk in chunks
        ]

    def on_packed(self, read: RankRead, reply: messages.PackReply) -> list[events.Action]:
        """A chunk is packed, or will not be; an answer that comes twice, or late, changes nothing.

        A read that goes on by chunks is not stuck.
        """
        if read.state is not State.READING or read.chunks.pop(reply.chunk, None) is None:
            return []
        self.has_progressed = True
        return [events.ReadChunk(self.request, read.rank, reply.chunk, reply.slot)]

    # --- the read and its proof

    def on_read_done(self, read: RankRead, event: events.ReadDone) -> list[events.Action]:
        """All data has landed; the slot tells whether the blocks were held until now."""
        if read.state is State.DRAINING or read.grant is None:
            self._move(read, State.FAILED, event)
            return [self._release(read, complete=False)]
        self._move(read, State.CHECKING, event)
        read.done = event
        actions: list[events.Action] = [
            events.ReadSlot(self.peer, read.rank, self.request, read.grant.slot)
        ]
        if self.start is not None and read.slices:  # by when prefill's digest is here
            actions.append(
                events.DigestLanded(read.rank, read.slices, self.start, claim=self.claim)
            )
        return actions

    def on_slot(self, read: RankRead, event: events.SlotRead) -> list[events.Action]:
        """The slot was read."""
        slot_valid = read.grant is not None and event.generation == read.grant.generation
        if not slot_valid:
            detail = f"prefill rank {read.rank} took its blocks back while they were read"
            self.fail(Failure(FailureKind.FENCED, detail))
        if read.state is State.DRAINING or not slot_valid:
            self._move(read, State.FAILED, event)
            return [self._release(read, complete=False)]
        if self._is_verified(read):
            self._move(read, State.VERIFYING, event)
            return self._compare(read)
        self._move(read, State.DONE, event)
        return [self._release(read, complete=True)]

    def _is_verified(self, read: RankRead) -> bool:
        """Also if nothing tells what it has read: then it is late, and not good."""
        has_data = read.done is not None and read.done.num_bytes > 0
        return self.start is not None and self.start.verify and (has_data or bool(read.slices))

    def on_read_failed(self, read: RankRead, event: events.ReadFailed) -> list[events.Action]:
        """The read ended in an error."""
        detail = f"reading prefill rank {read.rank} failed: {event.reason}"
        self.fail(Failure(FailureKind.BROKEN, detail))
        self._move(read, State.FAILED, event)
        return [self._release(read, complete=False)]

    # --- the comparison of digests

    def ask_digest(self, read: RankRead, now: float) -> list[events.Action]:
        """Ask for the digest of what is read, or ask again."""
        if self.start is None or not read.slices:
            return []
        read.ask_again_at = now + ASK_AGAIN_S
        request = messages.DigestRequest(
            incarnation=read.incarnation,
            nonce=self.ticket.nonce,
            claim=self.claim,
            reader=self.reader,
            end=self.start.end,
            slices=read.slices,
        )
        return [events.Send(read.endpoint, request)]

    def on_digest(self, read: RankRead, reply: messages.DigestReply) -> list[events.Action]:
        """Prefill's digest is here; one that comes twice, or too late, changes nothing."""
        if not read.slices or read.digest is not None:
            return []
        read.digest = reply
        return self._compare(read)

    def _compare(self, read: RankRead) -> list[events.Action]:
        """Compare, once both the bytes and prefill's digest are here."""
        if read.state is not State.VERIFYING or self.start is None:
            return []
        if read.digest is None:
            return []
        return [events.CompareDigest(read.rank, read.slices, self.start, read.digest)]

    def is_digest_wanted(self, action: events.DigestLanded | events.CompareDigest) -> bool:
        """Whether anything depends on this digest, or will."""
        read = (self.reads or {}).get(action.rank)
        if isinstance(action, events.CompareDigest):
            claim, states = action.digest_reply.claim, {State.VERIFYING}
        else:
            claim, states = action.claim, {State.CHECKING, State.VERIFYING}
        return self.claim == claim and read is not None and read.state in states

    def on_compared(self, read: RankRead, event: events.DigestCompared) -> list[events.Action]:
        """The bytes were compared; perhaps nobody wants to know any more."""
        if read.state is not State.VERIFYING or event.claim != self.claim:
            return []
        subject = f"what was read from prefill rank {read.rank}"
        if event.refusal is not None:
            detail = f"{subject} cannot be verified: {event.refusal}"
            self.fail(Failure(FailureKind.INTERNAL, detail))
        elif event.difference is not None:
            detail = f"{subject} is not what it has: {event.difference}"
            self.fail(Failure(FailureKind.CORRUPT, detail))
        is_equal = event.refusal is None and event.difference is None
        self._move(read, State.DONE if is_equal else State.FAILED, event)
        return [self._release(read, complete=is_equal)]

    # --- the end

    def cancel(self, failure: Failure) -> list[events.Action]:
        """Nobody wants it any more. What was asked is released now, what is read when drained."""
        self.fail(failure)
        actions: list[events.Action] = []
        for read in self.rank_reads:
            if read.has_ended or read.state is State.DRAINING:
                continue
            if read.state in POSTED:
                if read.state is State.READING:
                    actions.append(events.StopRead(self.request, read.rank))
                self._move(read, State.DRAINING, Cancelled(failure))
            else:
                self._move(read, State.FAILED, Cancelled(failure))
                actions.append(self._release(read, complete=False))
        return actions

    def on_cancel(self) -> list[events.Action]:
        """The request is over. Before the peer is known there is nobody to release."""
        self.is_cancelled = True
        return [] if self.reads is None else self.cancel(DROPPED)

    def late_failure(self, now: float) -> Failure | None:
        """Why its time is over; None while it is not. What moves later gives it none back."""
        if self.overdue_since is None and now < self._late_at:
            return None
        if now < self.deadline or self.lacks_only_blocks:
            return Failure(FailureKind.LATE, "prefill fell silent while it was read")
        return Failure(FailureKind.LATE, f"nothing of it has moved for {self.timeout_s:g} s")

    def on_late(self, failure: Failure, now: float) -> list[events.Action]:
        """Cancel it. A read that then does not end by itself is abandoned, once."""
        actions = self.cancel(failure)
        if self.overdue_since is None:
            self.overdue_since = now
        if now < self.overdue_since + DRAIN_S:
            return actions
        for read in self.rank_reads:
            if read.state in POSTED and not read.abandoned:
                read.abandoned = True
                actions.append(events.AbandonRead(self.request, read.rank))
        return actions

    def end(self) -> events.LoadEnded | None:
        """Record its end; the report that it owes, if it was started."""
        before = "PREPARED" if self.start is None else "STARTED"
        after = "LOADED" if self.failure is None else "FAILED"
        cause = "" if self.failure is None else str(self.failure)
        self.record(events.Transition(self.request, str(self.peer), before, after, cause))
        if self.start is None:
            return None
        reads = tuple(read.done for read in self.rank_reads if read.done is not None)
        return events.LoadEnded(
            self.request,
            self.start.num_tokens,
            self.failure,
            self.peer,
            verified=self.start.verify and self.failure is None,
            reads=reads if self.failure is None else (),
        )

    def validate(self) -> None:
        """Check what must hold between any two events."""
        for read in self.rank_reads:
            if read.state in POSTED and (self.start is None or read.grant is None):
                raise LocalProtocolError(f"{read.state.name} without blocks or grant")
            if read.state is State.FAILED and self.failure is None:
                raise LocalProtocolError("FAILED without a reason")

    def _move(self, read: RankRead, after: State, event: object) -> None:
        """The one place where the state of a read changes."""
        moves = TRANSITIONS[read.state]
        if after not in moves.get(type(event), ()):
            allowed = [f"{kind.__name__} to {s.name}" for kind in moves for s in moves[kind]]
            raise LocalProtocolError(
                f"load {self.request!r}, prefill rank {read.rank}: {type(event).__name__} leads "
                f"from {read.state.name} to {after.name}; allowed: {allowed}"
            )
        self.record(
            events.Transition(
                self.request,
                read.name,
                read.state.name,
                after.name,
                _cause(event),
                event.num_bytes if isinstance(event, events.ReadDone) else 0,
            )
        )
        read.state = after
        if after not in (State.DRAINING, State.FAILED):
            self.has_progressed = True

    def _release(self, read: RankRead, *, complete: bool) -> events.Send:
        """Tell prefill that this reader has ended. A lost message costs prefill a lease."""
        return events.Send(
            read.endpoint,
            messages.Release(
                incarnation=read.incarnation,
                nonce=self.ticket.nonce,
                claim=self.claim,
                reader=self.reader,
                complete=complete,
            ),
        )


def _cause(event: object) -> str:
    """The event's type, and why a read is cancelled."""
    kind = type(event).__name__
    return f"{kind}: {event.failure.kind.value}" if isinstance(event, Cancelled) else kind


_WAITS_FOR: Final[Mapping[State, str]] = {
    State.ASKING: "a grant",
    State.GRANTED: "its turn to be read",
    State.READING: "data",
    State.CHECKING: "the generation slot",
    State.VERIFYING: "a digest",
    State.DRAINING: "the end of a read that is no longer wanted",
}
