"""The remote engines that a decode rank knows, and the state of each.

A peer is one incarnation of a remote engine. Decode fetches its description once, checks whether
it fits, and makes its memory readable; later loads find it READY.

A restarted engine is another peer, so nothing of the old incarnation applies to the new one. Only a
GONE peer's connections are dead, and only it can be met again without a pause.
"""

import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.geometry.match import Route
from nixl_kv.ids import ANY_ENGINE, ANY_INCARNATION, Endpoint, EngineId, Incarnation, Rank
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, Failure, FailureKind
from nixl_kv.protocol.machine import Deadlines, Machine, MachineState, Table

CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S: Final = 1.0
INCOMPATIBLE_S: Final = 10.0  # the pause of a peer that does not fit, which lasts
MAX_BREAKS: Final = 2  # broken connections in a row make a peer UNREADABLE; one happens by itself
UNREADABLE_S: Final = 1.0  # the first pause of an UNREADABLE peer
# Each attempt costs a load, and file descriptors until the agent ends.
MAX_UNREADABLE_S: Final = 64.0
LOOK_AGAIN_S: Final = 0.1  # between two checks whether a peer can be forgotten
KEPT_S: Final = 600.0  # for an unused peer; meeting it again costs its next load 40 to 160 ms

NO_DESCRIPTION: Final = Failure(
    FailureKind.UNREACHABLE,
    f"no answer in {CONNECT_TIMEOUT_S:g} s; if prefill runs, a firewall may drop packets to its "
    "ports: `nixl-kv doctor --peer HOST:PORT` checks them",
)


class State(MachineState):
    CONNECTING = enum.auto()  # decode has asked its directory for the description
    # The description fits, and loads ask its ranks. These are also asked to let this one connect to
    # UCX's ports: NIXL must not connect before that, because a dropped SYN costs a second.
    ADMITTING = enum.auto()
    HANDSHAKING = enum.auto()  # loads ask its ranks, and its memory is made readable
    READY = enum.auto()  # its memory can be read; forgotten after KEPT_S without a load
    # Its ranks answer, but connections to their memory break. Loads fail at once until the pause
    # ends, which doubles each time.
    UNREADABLE = enum.auto()
    BACKOFF = enum.auto()  # decode could not reach or use it; loads fail at once for a pause
    GONE = enum.auto()  # the link to a rank broke; forgotten once no read of it is in flight


TRANSITIONS: Final[Table[State]] = {
    State.CONNECTING: {
        events.PeerFits: (State.ADMITTING, State.HANDSHAKING),
        events.PeerRefused: (State.BACKOFF,),
        messages.Refusal: (State.BACKOFF,),
        events.EndpointLost: (State.BACKOFF,),
        events.Tick: (State.BACKOFF,),
        messages.Description: (None,),  # of a peer of which only the endpoint was known
    },
    State.ADMITTING: {
        messages.Admitted: (State.HANDSHAKING, State.BACKOFF),
        events.EndpointLost: (State.GONE,),
        events.Tick: (State.BACKOFF,),
    },
    State.HANDSHAKING: {
        events.HandshakeDone: (State.READY,),
        events.PeerRefused: (State.BACKOFF,),
        events.EndpointLost: (State.GONE,),
    },
    State.READY: {
        events.PeerBroken: (State.UNREADABLE,),
        events.EndpointLost: (State.GONE,),
        events.Tick: (None,),
    },
    State.UNREADABLE: {events.Tick: (State.READY,), events.EndpointLost: (State.GONE,)},
    State.BACKOFF: {events.Tick: (None,)},
    State.GONE: {events.Tick: (None,)},
}
MACHINE: Final = Machine("peer", TRANSITIONS)
MET: Final = (State.ADMITTING, State.HANDSHAKING, State.READY, State.UNREADABLE)
"""States in which the end of a link to one of its ranks makes it GONE."""


@dataclass
class Peer:
    key: events.PeerKey
    used_at: float  # monotonic seconds
    state: State = State.CONNECTING
    is_described: bool = False  # its description came and is being checked
    failure: Failure | None = None  # why it cannot be used, in UNREADABLE, BACKOFF and GONE
    breaks: int = 0  # connections to its memory that broke since the last successful read
    is_reported: bool = False  # the log says that it is unreadable
    description: messages.Description | None = None  # from ADMITTING or HANDSHAKING on
    routes: tuple[Route, ...] = ()
    # Its ranks that have to let this one in, and those of which the answer is missing (ADMITTING).
    introductions: tuple[events.Introduction, ...] = ()
    awaited: dict[Endpoint, events.Introduction] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)  # the addresses that its ranks connect from

    @property
    def endpoints(self) -> list[Endpoint]:
        """Its ranks' endpoints; its directory's while the ranks are unknown."""
        if self.description is None:
            return [self.key.endpoint]
        return [rank.endpoint for rank in self.description.ranks]

    def life_of(self, rank: Rank) -> Incarnation:
        """The incarnation of one of its ranks, once it is described."""
        ranks = self.description.ranks if self.description is not None else ()
        return ranks[rank].incarnation if rank < len(ranks) else ANY_INCARNATION


class PeerBook:
    """All peers of a rank, by key. `now` is monotonic, in seconds."""

    def __init__(self, record: events.Record, get_reader: Callable[[], messages.Reader]) -> None:
        """`get_reader` tells how this rank is called."""
        self.deadlines = Deadlines[events.PeerKey]()
        self.get_reader = get_reader
        self._record = record
        self.known: dict[events.PeerKey, Peer] = {}
        self._at: dict[Endpoint, dict[events.PeerKey, Peer]] = {}
        self.failed: list[Peer] = []  # they became unusable: the caller fails their loads
        self.num_in = Counter[State]()  # how many peers are in each state
        self._changed: set[State] = set()  # whose number has changed
        self._searched: set[events.PeerKey] = set()  # CONNECTING, known by their endpoint alone

    @property
    def num_searched(self) -> int:
        """How many endpoints are asked for an engine of which nothing else is known."""
        return len(self._searched)

    def pop_changed(self) -> set[State]:
        changed, self._changed = self._changed, set()
        return changed

    def clear(self) -> None:
        self._changed |= self.num_in.keys()
        self.num_in.clear()
        for table in (self.known, self._at, self.failed, self.deadlines, self._searched):
            table.clear()

    def get_or_connect(self, key: events.PeerKey, now: float) -> tuple[Peer, Actions]:
        peer = self.known.get(key)
        if peer is not None:
            peer.used_at = now
            return peer, []
        peer = self.known[key] = Peer(key, now)
        self._index(peer)
        if is_unnamed(key):
            self._searched.add(key)
        self._count(peer.state, 1)
        self.deadlines.set(key, now + CONNECT_TIMEOUT_S)
        self._record(events.Transition("", str(key), "", State.CONNECTING.name, "PrepareLoad"))
        return peer, [ask_who(key)]

    def on_found(self, message: messages.Description, endpoint: Endpoint) -> bool:
        """End the search for the engine at an endpoint. Returns whether there was one."""
        peer = self.known.get(unnamed(endpoint))
        if peer is None or peer.state is not State.CONNECTING:
            return False
        self._forget(peer, message)
        self.deadlines.set(peer.key, math.inf)
        return True

    def ask_again(self, endpoint: Endpoint) -> Actions:
        """Repeat the requests that a broken link may have lost."""
        connecting = self._in_state(State.CONNECTING, endpoint)
        actions: Actions = [ask_who(peer.key) for peer in connecting if not peer.is_described]
        for peer in self._in_state(State.ADMITTING, endpoint):
            if endpoint in peer.awaited:
                actions.append(self._introduce(peer, endpoint))
        return actions

    def is_asked(self, endpoint: Endpoint) -> bool:
        """Whether an answer of this endpoint is awaited."""
        admitting = self._in_state(State.ADMITTING, endpoint)
        is_awaited = any(endpoint in peer.awaited for peer in admitting)
        return is_awaited or bool(self._in_state(State.CONNECTING, endpoint))

    def _in_state(self, state: State, endpoint: Endpoint) -> list[Peer]:
        peers = self._at.get(endpoint, {}).values()
        return [peer for peer in peers if peer.state is state]

    def on_description(self, message: messages.Description, endpoint: Endpoint) -> Actions:
        """Have a description checked, unless this rank did not ask for it or has it already."""
        key = events.PeerKey(EngineId(message.engine), Incarnation(message.incarnation), endpoint)
        peer = self.known.get(key)
        if peer is None or peer.state is not State.CONNECTING or peer.is_described:
            return []
        peer.is_described = True
        return [events.StartHandshake(key, message), *self._disconnect(peer)]

    def on_fits(self, event: events.PeerFits, now: float) -> Actions | None:
        """Ask its ranks to let this one in, if that is necessary. None: it is not wanted now."""
        peer, introductions = self.known.get(event.peer), event.introductions
        if peer is None or peer.state is not State.CONNECTING:
            return None
        detail = f"{len(event.routes)} of {len(event.description.ranks)} ranks"
        self._move(peer, State.ADMITTING if introductions else State.HANDSHAKING, event, detail)
        self._unindex(peer)
        peer.description, peer.routes = event.description, event.routes
        self._index(peer)
        peer.introductions = introductions
        peer.awaited = {event.description.ranks[one.rank].endpoint: one for one in introductions}
        # No deadline to handshake: only background threads of this side take time then.
        self.deadlines.set(peer.key, now + CONNECT_TIMEOUT_S if introductions else math.inf)
        return [self._introduce(peer, endpoint) for endpoint in peer.awaited]

    def _introduce(self, peer: Peer, endpoint: Endpoint) -> events.Send:
        one = peer.awaited[endpoint]
        admit = messages.Admit(
            incarnation=peer.life_of(one.rank),
            reader=self.get_reader(),
            sources=one.sources,
            listens=one.listens,
        )
        return events.Send(endpoint, admit)

    def on_admitted(self, answer: messages.Admitted, endpoint: Endpoint, now: float) -> Actions:
        """Connect once all ranks have let this one in."""
        actions: Actions = []
        for peer in self._in_state(State.ADMITTING, endpoint):
            one = peer.awaited.get(endpoint)
            if one is None:
                continue
            if peer.life_of(one.rank) != answer.incarnation:
                detail = f"prefill rank {one.rank} has restarted, slept or reset its cache since"
                failure = Failure(FailureKind.UNREACHABLE, detail)
            elif set(one.sources) <= set(answer.refused):
                detail = (
                    f"prefill rank {one.rank} lets none of this host's addresses "
                    f"({', '.join(one.sources)}) connect to UCX's ports; its log says why"
                )
                failure = Failure(FailureKind.INCOMPATIBLE, detail)
            else:
                del peer.awaited[endpoint]
                peer.sources.update(answer.sources)
                if not peer.awaited:
                    self._move(peer, State.HANDSHAKING, answer)
                    self.deadlines.set(peer.key, math.inf)
                    actions.append(events.Connect(peer.key, tuple(sorted(peer.sources))))
                continue
            actions += self._pause(peer, answer, failure, now)
        return actions

    def leave(self, peer: Peer) -> list[events.Send]:
        """Tell the ranks that let this one in that it is gone. A dead one would not hear it."""
        if peer.description is None or peer.state in (State.GONE, State.BACKOFF):
            return []
        return [
            events.Send(
                peer.description.ranks[one.rank].endpoint,
                messages.Leave(incarnation=peer.life_of(one.rank), reader=self.get_reader()),
            )
            for one in peer.introductions
            # Another peer may have the same rank: an incarnation of its engine before or after.
            if not self._is_needed_by_others(peer.description.ranks[one.rank].endpoint, peer)
        ]

    def on_handshake_done(self, event: events.HandshakeDone, now: float) -> Actions:
        peer = self.known.get(event.peer)
        if peer is not None and peer.state is State.HANDSHAKING:
            self._move(peer, State.READY, event)
            self.deadlines.set(event.peer, now + KEPT_S)
        return []

    def on_refused(
        self, key: events.PeerKey, event: events.PeerRefused | messages.Refusal, now: float
    ) -> Actions:
        peer, is_ours = self.known.get(key), isinstance(event, events.PeerRefused)
        if peer is None or type(event) not in TRANSITIONS[peer.state]:
            return []
        kind = FailureKind.INCOMPATIBLE if is_ours else FailureKind.UNREACHABLE
        return self._pause(peer, event, Failure(kind, event.reason), now)

    def on_broken(self, event: events.PeerBroken, now: float) -> Actions:
        peer = self.known.get(event.peer)
        if peer is None or peer.state not in (State.HANDSHAKING, State.READY):
            return []
        peer.breaks += 1
        if peer.breaks < MAX_BREAKS or peer.state is State.HANDSHAKING:
            return []
        pause_s = min(UNREADABLE_S * 2 ** (peer.breaks - MAX_BREAKS), MAX_UNREADABLE_S)
        detail = f"engine {peer.key.engine!r} answers but cannot be read: {event.reason}"
        self._move(peer, State.UNREADABLE, event, event.reason)
        self._fail(peer, Failure(FailureKind.UNREACHABLE, detail), now + pause_s)
        was_reported, peer.is_reported = peer.is_reported, True
        return [] if was_reported else [events.PeerUnreadable(peer.key, event.reason)]

    def on_read(self, key: events.PeerKey) -> Actions:
        peer = self.known.get(key)
        if peer is None or not peer.breaks:
            return []
        was_reported, peer.is_reported, peer.breaks = peer.is_reported, False, 0
        return [events.PeerReadable(key)] if was_reported else []

    def on_endpoint_lost(self, event: events.EndpointLost, now: float) -> Actions:
        """Peers whose description this rank awaits are unusable; other peers are GONE."""
        actions: Actions = []
        failure = Failure(FailureKind.UNREACHABLE, f"{event.endpoint}: {event.reason}")
        for peer in list(self._at.get(event.endpoint, {}).values()):
            if peer.state is State.CONNECTING:
                actions += self._pause(peer, event, failure, now)
            elif peer.state in MET:
                # Its loads do not fail here: each of their reads knows whether it needs prefill.
                self._move(peer, State.GONE, event, event.reason)
                self.deadlines.set(peer.key, now)
                peer.failure = failure
        return actions

    def on_tick(
        self, tick: events.Tick, is_in_use: Callable[[events.PeerKey], bool], now: float
    ) -> Actions:
        """End pauses that are over, and forget peers that are gone or long unused."""
        actions: Actions = []
        for key in self.deadlines.pop_due(now):
            peer = self.known[key]
            kept_until = peer.used_at + KEPT_S if peer.state is State.READY else now
            if peer.state in (State.CONNECTING, State.ADMITTING):
                actions += self._pause(peer, tick, NO_DESCRIPTION, now)
            elif peer.state is State.UNREADABLE:
                self._move(peer, State.READY, tick)
                peer.failure = None
                self.deadlines.set(key, now + KEPT_S)
            elif is_in_use(key) or now < kept_until:
                self.deadlines.set(key, max(kept_until, now + LOOK_AGAIN_S))
            else:
                actions += self._forget(peer, tick)
        return actions

    def _pause(self, peer: Peer, event: object, failure: Failure, now: float) -> Actions:
        self._move(peer, State.BACKOFF, event, failure.detail)
        does_fit = failure.kind is not FailureKind.INCOMPATIBLE
        self._fail(peer, failure, now + (BACKOFF_S if does_fit else INCOMPATIBLE_S))
        if isinstance(event, messages.Admitted) or peer.awaited:
            peer.awaited.clear()
            return [events.DropPeer(peer.key)]
        if peer.description is not None:
            return []
        is_checked = peer.is_described and not isinstance(event, events.PeerRefused)
        return [*([events.DropPeer(peer.key)] if is_checked else []), *self._disconnect(peer)]

    def _fail(self, peer: Peer, failure: Failure, until: float) -> None:
        peer.failure = failure
        self.failed.append(peer)
        self.deadlines.set(peer.key, until)

    def _forget(self, peer: Peer, event: object) -> Actions:
        is_dead, farewell = peer.state is State.GONE, self.leave(peer)
        self._move(peer, None, event)
        self._unindex(peer)
        del self.known[peer.key]
        if peer.description is None:
            return []
        # After a farewell the peer ends the connections, and the idle link closes by itself.
        closing = [] if farewell else self._disconnect(peer)
        dropped = events.DropPeer(peer.key, is_dead=is_dead or bool(farewell))
        return [dropped, *farewell, *closing]

    def _index(self, peer: Peer) -> None:
        for endpoint in peer.endpoints:
            self._at.setdefault(endpoint, {})[peer.key] = peer

    def _unindex(self, peer: Peer) -> None:
        for endpoint in peer.endpoints:
            del self._at[endpoint][peer.key]
            if not self._at[endpoint]:
                del self._at[endpoint]

    def _move(self, peer: Peer, after: State | None, event: object, detail: str = "") -> None:
        states = peer.state, after
        self._count(peer.state, -1)
        if after is not None:
            self._count(after, 1)
        peer.state = MACHINE.move(self._record, states, event, ("", str(peer.key)), detail)
        if after is not State.CONNECTING:
            self._searched.discard(peer.key)
        elif is_unnamed(peer.key):
            self._searched.add(peer.key)

    def _count(self, state: State, amount: int) -> None:
        self.num_in[state] += amount
        self._changed.add(state)

    def _disconnect(self, peer: Peer) -> Actions:
        """Close the links to a peer that no other one needs."""
        return [
            events.Disconnect(each)
            for each in peer.endpoints
            if not self._is_needed_by_others(each, peer)
        ]

    def _is_needed_by_others(self, endpoint: Endpoint, peer: Peer) -> bool:
        # Another incarnation may have the same ports, and a router's id may name the port of a
        # rank.
        others = [each for each in self._at.get(endpoint, {}).values() if each is not peer]
        return any(each.state is State.CONNECTING or each.description for each in others)


def unnamed(endpoint: Endpoint) -> events.PeerKey:
    """The peer at an endpoint, for a load that does not know more of it."""
    return events.PeerKey(ANY_ENGINE, ANY_INCARNATION, endpoint)


def is_unnamed(key: events.PeerKey) -> bool:
    return key == unnamed(key.endpoint)


def ask_who(key: events.PeerKey) -> events.Send:
    describe = messages.Describe(incarnation=key.incarnation, engine=key.engine)
    return events.Send(key.endpoint, describe)
