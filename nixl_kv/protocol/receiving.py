"""What one request on decode reads from one prefill rank.

    ASKING    the rank has been asked, or will be as soon as its engine is known
    GRANTED   it holds the blocks; we have none of our own yet
    READING   data is landing in our blocks
    CHECKING  all data has landed; the generation slot is being read
    PROVING   the slot still stood after the last byte had landed; whether these bytes are
              prefill's is being checked, where that is wanted
    DRAINING  no longer wanted, but a read of it may still write
    DONE      the slot still stood: the bytes are right
    FAILED    nothing of it can write any more, and nothing of it may be used

There is no way from READING or CHECKING to an end but through the end of the read itself: NIXL has
no abort, so a block goes back to vLLM only when no read can write into it.
"""

import enum
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.excerpts import Excerpt
from nixl_kv.ids import Incarnation, Rank
from nixl_kv.protocol.messages import Grant, Proof


class State(enum.Enum):
    """See the module's head."""

    ASKING = enum.auto()
    GRANTED = enum.auto()
    READING = enum.auto()
    CHECKING = enum.auto()
    PROVING = enum.auto()
    DRAINING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Cause(enum.Enum):
    """What moves a source on."""

    GRANT = enum.auto()
    REFUSED = enum.auto()  # denied, lost, its peer cannot be used, or its bytes not be compared
    BLOCKS = enum.auto()
    LANDED = enum.auto()
    STANDS = enum.auto()
    UNPROVEN = enum.auto()  # it stands, and the bytes are to be verified
    FELL = enum.auto()
    PROVEN = enum.auto()
    CORRUPT = enum.auto()
    BROKEN = enum.auto()  # the read ended in an error
    UNWANTED = enum.auto()  # aborted, out of time, or another source failed


TRANSITIONS: Final = {
    State.ASKING: {
        Cause.GRANT: State.GRANTED,
        Cause.REFUSED: State.FAILED,
        Cause.UNWANTED: State.FAILED,
    },
    State.GRANTED: {
        Cause.BLOCKS: State.READING,
        Cause.REFUSED: State.FAILED,
        Cause.UNWANTED: State.FAILED,
    },
    State.READING: {
        Cause.LANDED: State.CHECKING,
        Cause.BROKEN: State.FAILED,
        Cause.UNWANTED: State.DRAINING,
    },
    State.CHECKING: {
        Cause.STANDS: State.DONE,
        Cause.UNPROVEN: State.PROVING,
        Cause.FELL: State.FAILED,
        Cause.BROKEN: State.FAILED,
        Cause.UNWANTED: State.DRAINING,
    },
    State.PROVING: {
        Cause.PROVEN: State.DONE,
        Cause.CORRUPT: State.FAILED,
        Cause.REFUSED: State.FAILED,
        Cause.UNWANTED: State.FAILED,
    },
    State.DRAINING: {
        Cause.LANDED: State.FAILED,
        Cause.STANDS: State.FAILED,
        Cause.FELL: State.FAILED,
        Cause.BROKEN: State.FAILED,
        Cause.UNWANTED: State.DRAINING,
    },
    State.DONE: {Cause.UNWANTED: State.DONE},
    State.FAILED: {Cause.UNWANTED: State.FAILED},
}

POSTED: Final = frozenset({State.READING, State.CHECKING, State.DRAINING})
HOLDING: Final = frozenset({State.ASKING, State.GRANTED, State.PROVING}) | POSTED
"""States in which the prefill rank may hold blocks for us: the claim is renewed."""


@dataclass
class Proving:
    """What a source's bytes are compared with: prefill's proof of these excerpts, once here."""

    excerpts: tuple[Excerpt, ...]
    proof: Proof | None = None


@dataclass
class Source:
    """One prefill rank that a request reads from, as its engine described it.

    `readers` are all ranks of this engine that read it, this one among them.
    """

    rank: Rank
    incarnation: Incarnation
    endpoint: str
    readers: tuple[Rank, ...]
    state: State = State.ASKING
    ask_again_at: float = 0.0
    silent_since: float | None = None  # its connection broke, and it has said nothing since
    abandoned: bool = False
    grant: Grant | None = None
    proving: Proving | None = None  # None: the bytes are not verified

    def move(self, cause: Cause) -> None:
        """The one place where the state changes.

        Raises:
            LocalProtocolError: if the table has no such move.
        """
        following = TRANSITIONS[self.state].get(cause)
        if following is None:
            raise LocalProtocolError(
                f"source {self.rank} cannot be {cause.name} in state {self.state.name}; "
                f"allowed: {[c.name for c in TRANSITIONS[self.state]]}"
            )
        self.state = following

    def silent(self, now: float) -> None:
        """Its connection broke; what it says later takes that back."""
        if self.silent_since is None:
            self.silent_since = now

    @property
    def compares(self) -> bool:
        """Whether all that is left is to compare bytes with a proof: both are here."""
        proof = self.proving.proof if self.proving is not None else None
        return self.state is State.PROVING and proof is not None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in (State.DONE, State.FAILED)
