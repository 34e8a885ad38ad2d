"""One offer on a prefill rank: a finished prefill, and who may read it until when.

    PREPARED  the step that completes the prompt is under way; no ticket is out as far as we know
    OFFERED   the ticket is out, nobody has asked; ends by itself after the offer's time
    GRANTED   bound to one claim; each expected reader has a lease, and none has begun to read
    RECALLED  its blocks are wanted back: the readers are asked to release it, unless they read it
    READING   a reader has begun

An offer that has ended is forgotten: when every reader has ended (released, or its lease ran out),
when nobody asked in time or before its blocks were wanted back, when nobody answered its recall,
when nobody needs this rank, or when no ticket went out.

A slot is cleared before its offer is reported, and the caller uses blocks again only after the
report. That order is the whole fence: who finds the generation in the slot after its last read
knows that the blocks were held all the while.

Readers that ended are a set of ranks, never a count: a message that comes twice ends one reader.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, EngineId, Generation, Incarnation, Nonce, Rank, RequestId, short
from nixl_kv.protocol import events, messages


class State(enum.Enum):
    """See the module's head."""

    PREPARED = enum.auto()
    OFFERED = enum.auto()
    GRANTED = enum.auto()
    RECALLED = enum.auto()
    READING = enum.auto()

    __hash__ = object.__hash__  # Enum's own is Python code, and states are looked up all the time


TRANSITIONS: Final[Mapping[State, Mapping[type, tuple[State | None, ...]]]] = {
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
"""For each state, which event leads to which; None: the offer ends.

Once it is granted, a Release, a Renew or a lease that runs out ends it only with its last reader.
A Tick also ends it if it keeps a slot of the ring for too long while others wait.
"""

BOUND: Final = frozenset({State.GRANTED, State.RECALLED, State.READING})
"""States in which a slot has the offer's generation."""


@dataclass
class Binding:
    """Whom an offer is granted to, and until when. Leases and holds end in monotonic seconds."""

    claim: Claim
    engine: EngineId  # the readers'
    slot: int
    generation: Generation
    leases: dict[Rank, float]  # of every expected reader, also of one that has not asked yet
    held_until: float  # if nobody reads: until it is recalled; once it is: until it is taken back
    routes: dict[Rank, bytes] = field(default_factory=dict)  # to each that asked
    lives: dict[Rank, Incarnation] = field(default_factory=dict)  # of each that asked
    numbers: dict[Rank, int] = field(default_factory=dict)  # of each reader's latest ask
    ended: set[Rank] = field(default_factory=set)

    def expects(self, claim: Claim, reader: messages.Reader) -> bool:
        """Whether this reader is one of the claim's and has not ended.

        Each rank of an engine has an incarnation of its own; the first ask tells which.
        """
        return (
            claim == self.claim
            and reader.engine == self.engine
            and reader.rank in self.leases
            and reader.rank not in self.ended
            and self.lives.get(reader.rank, reader.incarnation) == reader.incarnation
        )

    def expire(self, now: float) -> None:
        """End every reader whose lease has run out."""
        self.ended.update(rank for rank, until in self.leases.items() if until <= now)

    @property
    def next_expiry(self) -> float:
        """When the first lease of a reader that has not ended runs out."""
        return min(self.leases[rank] for rank in self.readers)

    @property
    def readers(self) -> list[Rank]:
        """Those that have not ended."""
        return sorted(set(self.leases) - self.ended)


@dataclass
class Offer:
    """One finished prefill of this rank. `ends_at` is in monotonic seconds."""

    prepared: events.PrepareOffer
    record: events.Record = field(repr=False)
    state: State = State.PREPARED
    ends_at: float | None = None  # while OFFERED
    binding: Binding | None = None  # from GRANTED on
    is_written: bool = field(init=False)
    early: dict[tuple[type, Rank], events.Asked] = field(default_factory=dict)
    """What is answered once it is written: of each kind the last of each reader."""

    def __post_init__(self) -> None:
        self.is_written = self.prepared.is_written
        cause = f"PrepareOffer: offer {short(self.nonce)}"
        self.record(events.Transition(self.request, "", "", self.state.name, cause))

    @property
    def nonce(self) -> Nonce:
        """Its name."""
        return self.prepared.nonce

    @property
    def request(self) -> RequestId:
        """Whose prefill it is."""
        return self.prepared.request

    @property
    def waits_for(self) -> str:
        """What happens next, in words."""
        if self.binding is not None:
            readers = ", ".join(map(str, self.binding.readers))
            return f"engine {self.binding.engine!r}, ranks {readers}"
        return "its ticket" if self.state is State.PREPARED else "somebody to ask"

    @property
    def num_blocks(self) -> int:
        """How many blocks it holds here; those that it shares with other offers count."""
        return sum(table.num_present for table in self.prepared.tables)

    @property
    def expires_at(self) -> float | None:
        """When it ends by itself if nobody says more, in monotonic seconds; None: not at all."""
        if self.binding is None:
            return self.ends_at
        leases_end = max(self.binding.leases[rank] for rank in self.binding.readers)
        is_read = self.state is State.READING
        return leases_end if is_read else min(leases_end, self.binding.held_until)

    @property
    def next_due(self) -> float | None:
        """When time changes something, in monotonic seconds; None for never."""
        if self.binding is None:
            return self.ends_at
        is_read = self.state is State.READING
        return min(self.binding.next_expiry, math.inf if is_read else self.binding.held_until)

    def may_be_asked_by(self, request: messages.DigestRequest) -> bool:
        """Whether its reader has not asked for the blocks yet, and still may."""
        binding = self.binding
        if binding is None:
            return True
        has_asked = request.reader.rank in binding.lives
        return not has_asked and binding.expects(request.claim, request.reader)

    def note(self, peer: str, cause: str) -> None:
        """Record what changed nothing, but tells why somebody got nothing."""
        state = self.state.name
        self.record(events.Transition(self.request, peer, state, state, cause))

    def move(self, after: State | None, event: object, *, peer: str = "", detail: str = "") -> None:
        """The one place where the state changes. None: it ends."""
        moves = TRANSITIONS[self.state]
        if after not in moves.get(type(event), ()):
            allowed = [
                f"{kind.__name__} to {state.name if state else events.OVER}"
                for kind in moves
                for state in moves[kind]
            ]
            raise LocalProtocolError(
                f"offer of request {self.request!r}: {type(event).__name__} leads from "
                f"{self.state.name} to {after.name if after else events.OVER}; allowed: {allowed}"
            )
        name = after.name if after is not None else events.OVER
        cause = f"{type(event).__name__}: {detail}" if detail else type(event).__name__
        self.record(events.Transition(self.request, peer, self.state.name, name, cause))
        if after is not None:
            self.state = after

    def validate(self) -> None:
        """Check what must hold between any two events."""
        if (self.state in BOUND) != (self.binding is not None):
            raise LocalProtocolError(f"{self.state.name} with binding {self.binding}")
        if (self.state is State.OFFERED) != (self.ends_at is not None):
            raise LocalProtocolError(f"{self.state.name} with an end at {self.ends_at}")
        if self.binding is not None and not self.binding.readers:
            raise LocalProtocolError(f"{self.state.name}, but all readers have ended")


def reader_name(reader: messages.Reader) -> str:
    """For logs."""
    return f"engine {reader.engine!r}, rank {reader.rank}"
