"""The remote engines that a decode rank knows, and the life of each.

    CONNECTING  its description is asked for, or its memory is being made readable
    READY       described, compatible, its memory can be read
    BACKOFF     could not be reached or used; loads fail at once until the pause is over
    GONE        was READY, and its connection broke; forgotten when no read of it is under way

A peer is one life: engine id *and* incarnation. A restarted engine is another peer, so nothing of
the old one (a pause, a memory address) is ever used for the new one.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.ranks import Route
from nixl_kv.ids import Endpoint, EngineId, Incarnation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Failure, FailureKind

CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S: Final = 1.0


class State(enum.Enum):
    """See the module's head."""

    CONNECTING = enum.auto()
    READY = enum.auto()
    BACKOFF = enum.auto()
    GONE = enum.auto()

    __hash__ = object.__hash__  # Enum's own is Python code, and states are looked up all the time


TRANSITIONS: Final[Mapping[State, Mapping[type, State | None]]] = {
    State.CONNECTING: {
        events.PeerJoined: State.READY,
        events.PeerRefused: State.BACKOFF,
        messages.Refusal: State.BACKOFF,
        events.EndpointLost: State.BACKOFF,
        events.Tick: State.BACKOFF,
    },
    State.READY: {events.EndpointLost: State.GONE},
    State.BACKOFF: {events.Tick: None},
    State.GONE: {events.Tick: None},
}
"""For each state, which event leads to which; None: the peer is forgotten."""


@dataclass
class Peer:
    """One life of a remote engine. `until` ends CONNECTING and BACKOFF, in monotonic seconds."""

    key: events.PeerKey
    until: float
    state: State = State.CONNECTING
    failure: Failure | None = None  # why it cannot be used, in BACKOFF and GONE
    description: messages.Description | None = None
    routes: tuple[Route, ...] = ()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where its ranks answer."""
        return [rank.endpoint for rank in self.description.ranks] if self.description else []


class PeerBook:
    """Peers by key. `now` is monotonic, in seconds."""

    def __init__(self, record: events.Record) -> None:
        self._record = record
        self._peers: dict[events.PeerKey, Peer] = {}

    @property
    def has_timers(self) -> bool:
        """Whether a time-out or a pause is running, or a peer waits to be forgotten."""
        return any(peer.state is not State.READY for peer in self._peers.values())

    def all(self) -> list[Peer]:
        """Every peer that is known."""
        return list(self._peers.values())

    def clear(self) -> None:
        """Forget all peers."""
        self._peers.clear()

    def get_or_connect(self, key: events.PeerKey, now: float) -> tuple[Peer, list[events.Action]]:
        """Find a peer; one that is not known yet is asked for its description."""
        peer = self._peers.get(key)
        if peer is not None:
            return peer, []
        peer = self._peers[key] = Peer(key, now + CONNECT_TIMEOUT_S)
        self._record(events.Transition("", str(key), "", State.CONNECTING.name, "PrepareLoad"))
        describe = messages.Describe(incarnation=key.incarnation, engine=key.engine)
        return peer, [events.Send(key.endpoint, describe)]

    def is_connecting(self, key: events.PeerKey) -> bool:
        """Whether this peer was asked for its description, and has not joined yet."""
        peer = self._peers.get(key)
        return peer is not None and peer.state is State.CONNECTING

    def on_description(
        self, message: messages.Description, endpoint: Endpoint
    ) -> list[events.Action]:
        """An engine described itself; one that was not asked is ignored."""
        key = events.PeerKey(EngineId(message.engine), Incarnation(message.incarnation), endpoint)
        if not self.is_connecting(key):
            return []
        return [events.JoinPeer(key, message), *self._disconnect(key)]

    def on_joined(self, event: events.PeerJoined) -> None:
        """A peer that is CONNECTING can be read."""
        peer = self._peers[event.peer]
        self._move(peer, event, f"{len(event.routes)} of {len(event.description.ranks)} ranks")
        peer.description = event.description
        peer.routes = event.routes

    def on_unusable(
        self,
        key: events.PeerKey,
        event: events.PeerRefused | messages.Refusal | events.EndpointLost | events.Tick,
        failure: Failure,
        now: float,
    ) -> list[events.Action]:
        """A peer that is CONNECTING could not be reached or does not fit: not again for a while."""
        peer = self._peers[key]
        self._move(peer, event, failure.detail)
        peer.failure = failure
        peer.until = now + BACKOFF_S
        return self._disconnect(key)

    def on_endpoint_lost(self, event: events.EndpointLost) -> list[events.PeerKey]:
        """A connection broke. Returns the peers that could not be reached because of it."""
        unreachable = []
        for peer in self._peers.values():
            if peer.state is State.CONNECTING and peer.key.endpoint == event.endpoint:
                unreachable.append(peer.key)
            elif peer.state is State.READY and event.endpoint in peer.endpoints:
                self._move(peer, event, event.reason)
                peer.failure = Failure(FailureKind.UNREACHABLE, f"{event.endpoint}: {event.reason}")
        return unreachable

    def overdue(self, now: float) -> list[events.PeerKey]:
        """The peers that did not describe themselves in time."""
        return [
            peer.key
            for peer in self._peers.values()
            if peer.state is State.CONNECTING and peer.until <= now
        ]

    def forget(
        self, tick: events.Tick, in_use: set[events.PeerKey], now: float
    ) -> list[events.Action]:
        """Forget peers whose pause is over, and gone ones that nothing reads."""
        actions: list[events.Action] = []
        for peer in self.all():
            if peer.state is State.BACKOFF and peer.until <= now:
                self._move(peer, tick)
            elif peer.state is State.GONE and peer.key not in in_use:
                self._move(peer, tick)
                actions.append(events.DropPeer(peer.key))
                actions += [events.Disconnect(endpoint) for endpoint in peer.endpoints]
        return actions

    def _move(self, peer: Peer, event: object, detail: str = "") -> None:
        """The one place where a peer's state changes."""
        moves = TRANSITIONS[peer.state]
        if type(event) not in moves:
            raise LocalProtocolError(
                f"peer {peer.key.engine!r} got {type(event).__name__} in state "
                f"{peer.state.name}; allowed: {[kind.__name__ for kind in moves]}"
            )
        after, before = moves[type(event)], peer.state.name
        cause = f"{type(event).__name__}: {detail}" if detail else type(event).__name__
        name = events.OVER if after is None else after.name
        self._record(events.Transition("", str(peer.key), before, name, cause))
        if after is None:
            del self._peers[peer.key]
        else:
            peer.state = after

    def _disconnect(self, key: events.PeerKey) -> list[events.Action]:
        """Close a description's connection, unless another life is being asked for there."""
        others = (other for other in self._peers if other != key)
        if any(o.endpoint == key.endpoint and self.is_connecting(o) for o in others):
            return []
        return [events.Disconnect(key.endpoint)]
