"""One offer's life on a prefill rank.

    PREPARED   the step that completes the prompt is under way; no ticket is out as far as we know
    OFFERED    the ticket is out, nobody has asked; ends by itself after the offer's time
    GRANTED    bound to one claim; each expected reader has a lease
    RELEASED   every expected reader has ended (done, aborted, or its lease ran out), or the
               claim was given up before it was granted
    EXPIRED    nobody asked in time, or before its blocks were wanted back
    WITHDRAWN  no ticket went out

A slot is cleared before its offer is reported, and vLLM uses blocks again only after the report.
That order is the whole fence: who finds the generation standing after its last read knows that
the blocks were held all the while.

Readers that ended are a set of ranks, never a count: a message that comes twice ends one reader.
"""

import enum
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Generation, Nonce, Rank, RequestId
from nixl_kv.protocol.messages import Reader


class State(enum.Enum):
    """See the module's head."""

    PREPARED = enum.auto()
    OFFERED = enum.auto()
    GRANTED = enum.auto()
    RELEASED = enum.auto()
    EXPIRED = enum.auto()
    WITHDRAWN = enum.auto()


class Cause(enum.Enum):
    """What moves an offer on."""

    TICKET_OUT = enum.auto()
    CLAIMED = enum.auto()
    GIVEN_UP = enum.auto()
    ALL_ENDED = enum.auto()
    UNCLAIMED = enum.auto()
    REVOKED = enum.auto()
    NO_TICKET = enum.auto()


TRANSITIONS: Final = {
    State.PREPARED: {
        Cause.TICKET_OUT: State.OFFERED,
        Cause.CLAIMED: State.GRANTED,
        Cause.GIVEN_UP: State.RELEASED,
        Cause.NO_TICKET: State.WITHDRAWN,
    },
    State.OFFERED: {
        Cause.CLAIMED: State.GRANTED,
        Cause.GIVEN_UP: State.RELEASED,
        Cause.UNCLAIMED: State.EXPIRED,
        Cause.REVOKED: State.EXPIRED,
    },
    State.GRANTED: {
        Cause.TICKET_OUT: State.GRANTED,
        Cause.REVOKED: State.GRANTED,
        Cause.ALL_ENDED: State.RELEASED,
    },
    State.RELEASED: {},
    State.EXPIRED: {},
    State.WITHDRAWN: {},
}

TERMINAL: Final = frozenset(state for state, moves in TRANSITIONS.items() if not moves)


@dataclass
class Binding:
    """Whom an offer is granted to, and until when."""

    claim: Claim
    engine: str  # the readers'
    slot: int
    generation: Generation
    leases: dict[Rank, float]  # of every expected reader, also of one that has not asked yet
    lives: dict[Rank, str] = field(default_factory=dict)  # incarnation of each that asked
    numbers: dict[Rank, int] = field(default_factory=dict)  # of each reader's latest ask
    ended: set[Rank] = field(default_factory=set)

    def expects(self, claim: str, reader: Reader) -> bool:
        """Whether this reader is one of the claim's and has not ended.

        Each rank of an engine has an incarnation of its own; the first ask tells which.
        """
        rank = Rank(reader.rank)
        return (
            claim == self.claim
            and reader.engine == self.engine
            and rank in self.leases
            and rank not in self.ended
            and self.lives.get(rank, reader.incarnation) == reader.incarnation
        )

    def expire(self, now: float) -> None:
        """End every reader whose lease has run out."""
        self.ended.update(rank for rank, until in self.leases.items() if until <= now)

    @property
    def all_ended(self) -> bool:
        """Whether nobody reads any more."""
        return self.ended >= set(self.leases)


@dataclass
class Offering:
    """One finished prefill of this rank."""

    nonce: Nonce
    request: RequestId
    context: str
    num_tokens: int
    tables: tuple[bytes, ...]
    state: State = State.PREPARED
    ends_at: float | None = None  # while OFFERED
    binding: Binding | None = None  # while GRANTED

    def move(self, cause: Cause) -> None:
        """The one place where the state changes.

        Raises:
            LocalProtocolError: if the table has no such move.
        """
        following = TRANSITIONS[self.state].get(cause)
        if following is None:
            raise LocalProtocolError(
                f"offer of request {self.request!r} cannot be {cause.name} in state "
                f"{self.state.name}; allowed: {[c.name for c in TRANSITIONS[self.state]]}"
            )
        self.state = following

    def validate(self) -> None:
        """Check what must hold between any two events.

        Raises:
            LocalProtocolError: says what does not.
        """
        if (self.state is State.GRANTED) != (self.binding is not None):
            raise LocalProtocolError(f"{self.state.name} with binding {self.binding}")
        if (self.state is State.OFFERED) != (self.ends_at is not None):
            raise LocalProtocolError(f"{self.state.name} with an end at {self.ends_at}")
        if self.binding is not None and self.binding.all_ended:
            raise LocalProtocolError(f"{self.state.name}, but all readers have ended")
