"""The life of one remote engine, as a decode rank sees it.

    UNKNOWN     never wanted, or forgotten
    CONNECTING  its description is asked for, or its memory is being added
    READY       described, compatible, its memory can be read
    BACKOFF     could not be reached or used; requests fail at once until the pause is over
    GONE        was READY, and its connection broke; forgotten when no read of it is under way

A peer is one life: engine id *and* incarnation. A restarted engine is another peer, so nothing of
the old one (a pause, a memory address) is ever taken for the new one.
"""

import enum
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.ranks import Route
from nixl_kv.protocol.events import Failure, PeerKey
from nixl_kv.protocol.messages import Description

CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S: Final = 1.0


class State(enum.Enum):
    """See the module's head."""

    UNKNOWN = enum.auto()
    CONNECTING = enum.auto()
    READY = enum.auto()
    BACKOFF = enum.auto()
    GONE = enum.auto()


class Cause(enum.Enum):
    """What moves a peer on."""

    WANTED = enum.auto()
    JOINED = enum.auto()
    UNUSABLE = enum.auto()
    PAUSE_OVER = enum.auto()
    LOST = enum.auto()
    FORGOTTEN = enum.auto()


TRANSITIONS: Final = {
    State.UNKNOWN: {Cause.WANTED: State.CONNECTING},
    State.CONNECTING: {Cause.JOINED: State.READY, Cause.UNUSABLE: State.BACKOFF},
    State.READY: {Cause.LOST: State.GONE},
    State.BACKOFF: {Cause.PAUSE_OVER: State.UNKNOWN},
    State.GONE: {Cause.FORGOTTEN: State.UNKNOWN},
}


@dataclass
class Peer:
    """One life of a remote engine. `until` ends CONNECTING and BACKOFF, in monotonic seconds."""

    key: PeerKey
    until: float = 0.0
    state: State = State.UNKNOWN
    failure: Failure | None = None  # why it cannot be used, in BACKOFF and GONE
    description: Description | None = None
    routes: tuple[Route, ...] = ()

    def move(self, cause: Cause) -> None:
        """The one place where the state changes.

        Raises:
            LocalProtocolError: if the table has no such move.
        """
        following = TRANSITIONS[self.state].get(cause)
        if following is None:
            raise LocalProtocolError(
                f"peer {self.key.engine!r} cannot be {cause.name} in state {self.state.name}; "
                f"allowed: {[c.name for c in TRANSITIONS[self.state]]}"
            )
        self.state = following

    @property
    def endpoints(self) -> list[str]:
        """Where its ranks answer."""
        return [rank.endpoint for rank in self.description.ranks] if self.description else []
