"""One offer on a prefill rank: a finished prefill, and who may read it until when.

    PREPARED  the step that completes the prompt is under way; no ticket is out as far as we know
    OFFERED   the ticket is out, nobody has asked; ends by itself after the offer's time
    GRANTED   bound to one claim; each expected reader has a lease

An offer that has ended is forgotten: when every reader has ended (released, or its lease ran out),
when nobody asked in time or before its blocks were wanted back, when nobody needs this rank, or
when no ticket went out.

A slot is cleared before its offer is reported, and the caller uses blocks again only after the
report. That order is the whole fence: who finds the generation in the slot after its last read
knows that the blocks were held all the while.

Readers that ended are a set of ranks, never a count: a message that comes twice ends one reader.
"""

import enum
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

    __hash__ = object.__hash__  # Enum's own is Python code, and states are looked up all the time


TRANSITIONS: Final[Mapping[State, Mapping[type, State | None]]] = {
    State.PREPARED: {
        events.PrepareOffer: State.PREPARED,
        events.PublishOffer: State.OFFERED,
        messages.Ask: State.GRANTED,
        messages.Release: None,
        events.WithdrawOffer: None,
    },
    State.OFFERED: {
        messages.Ask: State.GRANTED,
        messages.Release: None,
        events.Tick: None,
        events.RevokeOffer: None,
    },
    State.GRANTED: {
        events.PublishOffer: State.GRANTED,
        events.RevokeOffer: State.GRANTED,
        messages.Release: None,
        messages.Renew: None,
        events.Tick: None,
    },
}
"""For each state, which event leads to which; None: the offer ends.

From GRANTED these events end the offer only when they end its last reader.
"""


@dataclass
class Binding:
    """Whom an offer is granted to, and until when. Leases end in monotonic seconds."""

    claim: Claim
    engine: EngineId  # the readers'
    slot: int
    generation: Generation
    leases: dict[Rank, float]  # of every expected reader, also of one that has not asked yet
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
        return min(self.leases[rank] for rank in self.reading)

    @property
    def reading(self) -> list[Rank]:
        """The readers that have not ended."""
        return sorted(set(self.leases) - self.ended)


@dataclass
class Offer:
    """One finished prefill of this rank. `ends_at` is in monotonic seconds."""

    prepared: events.PrepareOffer
    record: events.Record = field(repr=False)
    state: State = State.PREPARED
    ends_at: float | None = None  # while OFFERED
    binding: Binding | None = None  # while GRANTED

    def __post_init__(self) -> None:
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
            readers = ", ".join(map(str, self.binding.reading))
            return f"engine {self.binding.engine!r}, ranks {readers}"
        return "its ticket" if self.state is State.PREPARED else "somebody to ask"

    @property
    def expires_at(self) -> float | None:
        """When it ends by itself, in monotonic seconds; None for not at all."""
        if self.binding is not None:
            return max(self.binding.leases[rank] for rank in self.binding.reading)
        return self.ends_at

    def prepare(self, command: events.PrepareOffer) -> None:
        """It is prepared anew: after a preemption it has other blocks."""
        self.move(State.PREPARED, command)
        self.prepared = command

    def note(self, peer: str, cause: str) -> None:
        """Record what changed nothing, but tells why somebody got nothing."""
        state = self.state.name
        self.record(events.Transition(self.request, peer, state, state, cause))

    def move(self, after: State | None, event: object, *, peer: str = "", detail: str = "") -> None:
        """The one place where the state changes. None: it ends."""
        moves = TRANSITIONS[self.state]
        if type(event) not in moves or moves[type(event)] is not after:
            allowed = [
                f"{kind.__name__} to {s.name if s else events.OVER}" for kind, s in moves.items()
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
        if (self.state is State.GRANTED) != (self.binding is not None):
            raise LocalProtocolError(f"{self.state.name} with binding {self.binding}")
        if (self.state is State.OFFERED) != (self.ends_at is not None):
            raise LocalProtocolError(f"{self.state.name} with an end at {self.ends_at}")
        if self.binding is not None and not self.binding.reading:
            raise LocalProtocolError(f"{self.state.name}, but all readers have ended")


def reader_name(reader: messages.Reader) -> str:
    """For logs."""
    return f"engine {reader.engine!r}, rank {reader.rank}"
