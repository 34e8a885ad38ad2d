"""The remote engines that a decode rank knows, and the life of each.

    CONNECTING  its description is asked for
    JOINING     described and compatible: its ranks are asked, its memory is being made readable
    READY       its memory can be read; forgotten when long unused
    UNREADABLE  answers, but connections to its memory break; loads fail at once until the pause is
                over, which is twice as long each time
    BACKOFF     could not be reached or used; loads fail at once until the pause is over
    GONE        its ranks were known, and a connection to one broke; forgotten when no read of it is
                under way

A peer is one life: engine id *and* incarnation. A restarted engine is another peer, so nothing of
the old one (a pause, a memory address) is ever used for the new one.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Endpoint, EngineId, Incarnation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.deadlines import Deadlines
from nixl_kv.protocol.events import Failure, FailureKind

CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S: Final = 1.0
MAX_BREAKS: Final = 2
"""Connections to a peer that break in a row before it is left alone: one may break by itself."""
UNREADABLE_S: Final = 1.0
"""The first pause of a peer that cannot be read, ..."""
MAX_UNREADABLE_S: Final = 64.0
"""... and the longest. Each attempt costs a load, and some descriptors until the agent ends."""
LOOK_AGAIN_S: Final = 0.1
"""After a look whether a peer that is to be forgotten is still read."""
KEPT_S: Final = 600.0
"""How long a peer that nobody reads is kept: to know it saves its next reader 40 to 160 ms."""


class State(enum.Enum):
    """See the module's head."""

    CONNECTING = enum.auto()
    JOINING = enum.auto()
    READY = enum.auto()
    UNREADABLE = enum.auto()
    BACKOFF = enum.auto()
    GONE = enum.auto()

    __hash__ = object.__hash__  # Enum's own is Python code, and states are looked up all the time


TRANSITIONS: Final[Mapping[State, Mapping[type, State | None]]] = {
    State.CONNECTING: {
        events.PeerFits: State.JOINING,
        events.PeerRefused: State.BACKOFF,
        messages.Refusal: State.BACKOFF,
        events.EndpointLost: State.BACKOFF,
        events.Tick: State.BACKOFF,
    },
    State.JOINING: {
        events.PeerJoined: State.READY,
        events.PeerRefused: State.BACKOFF,
        events.EndpointLost: State.GONE,
    },
    State.READY: {
        events.PeerBroken: State.UNREADABLE,
        events.EndpointLost: State.GONE,
        events.Tick: None,
    },
    State.UNREADABLE: {events.Tick: State.READY, events.EndpointLost: State.GONE},
    State.BACKOFF: {events.Tick: None},
    State.GONE: {events.Tick: None},
}
"""For each state, which event leads to which; None: the peer is forgotten."""


@dataclass
class Peer:
    """One life of a remote engine. `used_at` is in monotonic seconds."""

    key: events.PeerKey
    used_at: float
    state: State = State.CONNECTING
    is_described: bool = False  # its description came, and is looked at
    failure: Failure | None = None  # why it cannot be used, in UNREADABLE, BACKOFF and GONE
    breaks: int = 0  # of connections to its memory, since something was read
    is_told: bool = False  # that it is unreadable
    description: messages.Description | None = None
    routes: tuple[Route, ...] = ()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where its ranks answer, or its directory as long as they are not known."""
        if self.description is None:
            return [self.key.endpoint]
        return [rank.endpoint for rank in self.description.ranks]


def _describe(key: events.PeerKey) -> events.Send:
    return events.Send(
        key.endpoint, messages.Describe(incarnation=key.incarnation, engine=key.engine)
    )


class PeerBook:
    """Peers by key. `now` is monotonic, in seconds."""

    def __init__(self, record: events.Record) -> None:
        self._record = record
        self._peers: dict[events.PeerKey, Peer] = {}
        self._at: dict[Endpoint, dict[events.PeerKey, Peer]] = {}
        self._due = Deadlines[events.PeerKey]()

    @property
    def next_due(self) -> float | None:
        """When time changes something by itself; None for never."""
        return self._due.next

    def all(self) -> list[Peer]:
        """Every peer that is known."""
        return list(self._peers.values())

    def clear(self) -> None:
        """Forget all peers."""
        self._peers.clear()
        self._at.clear()
        self._due.clear()

    def get_or_connect(self, key: events.PeerKey, now: float) -> tuple[Peer, list[events.Action]]:
        """Find a peer; one that is not known yet is asked for its description."""
        peer = self._peers.get(key)
        if peer is not None:
            peer.used_at = now
            return peer, []
        peer = self._peers[key] = Peer(key, now)
        self._index(peer)
        self._due.set(key, now + CONNECT_TIMEOUT_S)
        self._record(events.Transition("", str(key), "", State.CONNECTING.name, "PrepareLoad"))
        return peer, [_describe(key)]

    def ask_again(self, endpoint: Endpoint) -> list[events.Action]:
        """The link to an endpoint broke: ask again for the descriptions that have not come."""
        peers = self._at.get(endpoint, {}).values()
        return [
            _describe(peer.key)
            for peer in peers
            if peer.state is State.CONNECTING and not peer.is_described
        ]

    def is_connecting(self, key: events.PeerKey) -> bool:
        """Whether this peer was asked for its description, and is not known to fit yet."""
        return self._is(key, State.CONNECTING)

    def is_joining(self, key: events.PeerKey) -> bool:
        """Whether this peer fits, and its memory is being made readable."""
        return self._is(key, State.JOINING)

    def is_describing(self, endpoint: Endpoint) -> bool:
        """Whether an engine is asked for its description at this endpoint."""
        peers = self._at.get(endpoint, {}).values()
        return any(peer.state is State.CONNECTING for peer in peers)

    def on_description(
        self, message: messages.Description, endpoint: Endpoint
    ) -> list[events.Action]:
        """An engine described itself; one that was not asked, or has done so, is ignored."""
        key = events.PeerKey(EngineId(message.engine), Incarnation(message.incarnation), endpoint)
        if not self.is_connecting(key) or self._peers[key].is_described:
            return []
        self._peers[key].is_described = True
        return [events.JoinPeer(key, message), *self._disconnect(key)]

    def on_fits(self, event: events.PeerFits) -> None:
        """The ranks of a peer that is CONNECTING are known."""
        peer = self._peers[event.peer]
        self._move(peer, event, f"{len(event.routes)} of {len(event.description.ranks)} ranks")
        self._unindex(peer)
        peer.description = event.description
        peer.routes = event.routes
        self._index(peer)
        self._due.set(peer.key, None)  # it waits for this side, which others may keep busy

    def on_joined(self, event: events.PeerJoined, now: float) -> None:
        """A peer that is JOINING can be read."""
        self._move(self._peers[event.peer], event)
        self._due.set(event.peer, now + KEPT_S)

    def get(self, key: events.PeerKey) -> Peer | None:
        """A peer, if it is known."""
        return self._peers.get(key)

    def on_unusable(
        self,
        key: events.PeerKey,
        event: events.PeerRefused | messages.Refusal | events.EndpointLost | events.Tick,
        failure: Failure,
        now: float,
    ) -> list[events.Action]:
        """A peer could not be reached, does not fit or cannot be read: not again for a while."""
        peer = self._peers[key]
        self._move(peer, event, failure.detail)
        peer.failure = failure
        self._due.set(key, now + BACKOFF_S)
        if peer.description is not None:
            return []
        is_looked_at = peer.is_described and not isinstance(event, events.PeerRefused)
        return [*([events.DropPeer(key)] if is_looked_at else []), *self._disconnect(key)]

    def on_broken(self, event: events.PeerBroken, now: float) -> list[events.Action]:
        """A connection to a peer's memory broke; the second one in a row makes it UNREADABLE."""
        peer = self._peers.get(event.peer)
        if peer is None or peer.state not in (State.JOINING, State.READY):
            return []
        peer.breaks += 1
        if peer.breaks < MAX_BREAKS or peer.state is State.JOINING:
            return []
        pause_s = min(UNREADABLE_S * 2 ** (peer.breaks - MAX_BREAKS), MAX_UNREADABLE_S)
        self._move(peer, event, event.reason)
        self._due.set(peer.key, now + pause_s)
        detail = f"engine {peer.key.engine!r} answers but cannot be read: {event.reason}"
        peer.failure = Failure(FailureKind.UNREACHABLE, detail)
        if peer.is_told:
            return []
        peer.is_told = True
        return [events.PeerUnreadable(peer.key, event.reason)]

    def on_read(self, key: events.PeerKey) -> list[events.Action]:
        """Something was read from a peer."""
        peer = self._peers.get(key)
        if peer is None or not peer.breaks:
            return []
        was_told, peer.is_told, peer.breaks = peer.is_told, False, 0
        return [events.PeerReadable(key)] if was_told else []

    def on_endpoint_lost(self, event: events.EndpointLost, now: float) -> list[events.PeerKey]:
        """A connection broke. Returns the peers that could not be reached because of it."""
        unreachable = []
        for peer in list(self._at.get(event.endpoint, {}).values()):
            if peer.state is State.CONNECTING:
                unreachable.append(peer.key)
            elif peer.state in (State.JOINING, State.READY, State.UNREADABLE):
                self._move(peer, event, event.reason)
                self._due.set(peer.key, now)
                peer.failure = Failure(FailureKind.UNREACHABLE, f"{event.endpoint}: {event.reason}")
        return unreachable

    def on_tick(
        self, tick: events.Tick, is_in_use: Callable[[events.PeerKey], bool], now: float
    ) -> tuple[list[events.PeerKey], list[events.Action]]:
        """Forget peers whose pause is over, and those that are gone or long unused.

        Returns:
            The peers that did not describe themselves in time, and what is to be done for others.
        """
        overdue: list[events.PeerKey] = []
        actions: list[events.Action] = []
        for key in self._due.pop_due(now):
            peer = self._peers[key]
            kept_until = peer.used_at + KEPT_S if peer.state is State.READY else now
            if peer.state is State.CONNECTING:
                overdue.append(key)
            elif peer.state is State.UNREADABLE:
                self._move(peer, tick)
                peer.failure = None
                self._due.set(key, now + KEPT_S)
            elif is_in_use(key) or now < kept_until:
                self._due.set(key, max(kept_until, now + LOOK_AGAIN_S))
            else:
                actions += self._forget(peer, tick)
        return overdue, actions

    def _is(self, key: events.PeerKey, state: State) -> bool:
        peer = self._peers.get(key)
        return peer is not None and peer.state is state

    def _forget(self, peer: Peer, tick: events.Tick) -> list[events.Action]:
        is_dead = peer.state is State.GONE
        self._move(peer, tick)
        self._unindex(peer)
        del self._peers[peer.key]
        if peer.description is None:
            return []
        drop = events.DropPeer(peer.key, is_dead=is_dead)
        return [drop, *map(events.Disconnect, peer.endpoints)]

    def _index(self, peer: Peer) -> None:
        for endpoint in peer.endpoints:
            self._at.setdefault(endpoint, {})[peer.key] = peer

    def _unindex(self, peer: Peer) -> None:
        for endpoint in peer.endpoints:
            del self._at[endpoint][peer.key]
            if not self._at[endpoint]:
                del self._at[endpoint]

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
        if after is not None:
            peer.state = after

    def _disconnect(self, key: events.PeerKey) -> list[events.Action]:
        """Close a description's connection, unless another life is being asked for there."""
        others = self._at.get(key.endpoint, {})
        if any(other != key and self.is_connecting(other) for other in others):
            return []
        return [events.Disconnect(key.endpoint)]
