"""The remote engines that a decode rank knows, and the state of each.

A peer is one incarnation of a remote engine. Decode fetches its description once, checks whether
it fits, and makes its memory readable; later loads find it READY.

A restarted engine is another peer, so nothing of the old incarnation applies to the new one.

Each failure to reach a peer or to read its memory may cost the loads that need it a timeout. The
record counts them until a read succeeds. After one, the next load tries the peer again. After
MAX_FAILURES in a row, no load waits for the peer's description any longer: loads fail at once, and
decode asks for the description in the background. It asks when a pause ends in which a load wanted
the peer, and when a ticket comes that shows that a silent engine is back.
"""

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.geometry.match import Route
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, Incarnation, Rank
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, Failure, FailureKind
from nixl_kv.protocol.machine import Deadlines, Machine, MachineState, Table

# A peer that sends no description, or does not let this rank in, is unusable and fails its loads.
CONNECT_TIMEOUT_S: Final = 5.0
MAX_FAILURES: Final = 2  # in a row until loads fail at once; one happens by itself
# Decode may try a peer again after its first failure. The pause doubles with each further one.
PAUSE_S: Final = 1.0
# Decode may try a peer again after many failures. Each attempt to read broken memory costs a load,
# and file descriptors until the agent ends.
MAX_PAUSE_S: Final = 64.0
# Decode may try again a peer that does not fit. Only a restart changes that.
INCOMPATIBLE_S: Final = 10.0
# Decode checks again whether a read still needs the memory of an unused peer.
LOOK_AGAIN_S: Final = 0.1
# Decode forgets an unused peer. Meeting it again costs its next load 40 to 160 ms.
KEPT_S: Final = 600.0
# Without a key, a client may have invented them.
MAX_UNUSABLE: Final = 1 << 12

NO_DESCRIPTION: Final = Failure(
    FailureKind.UNREACHABLE,
    f"no answer in {CONNECT_TIMEOUT_S:g} s; if prefill runs, a firewall may drop packets to its "
    "ports: `nixl-kv doctor --peer HOST:PORT` checks them",
)

UNREAD: Final = (
    "; it was the first read over a new connection, so if it is on another host, a firewall may "
    "drop packets to UCX's ports (docs/operations.md, Firewall)"
)


class PeerState(MachineState):
    CONNECTING = enum.auto()  # decode has asked its directory for the description
    # The description fits, and loads ask its ranks. These are also asked to let this one connect to
    # UCX's ports: NIXL must not connect before that, because a dropped SYN costs a second.
    ADMITTING = enum.auto()
    # Loads ask its ranks, and its memory is made readable and read once; again after a break.
    HANDSHAKING = enum.auto()
    READY = enum.auto()  # its memory was read; forgotten after KEPT_S without a load
    # Decode could not reach it, read its memory or use it. Loads fail at once for a pause. Its
    # memory is dropped once no read of it is in flight.
    UNUSABLE = enum.auto()


def pause_after(failures: int) -> float:
    """Seconds until another attempt. `failures`: those in a row before the latest one."""
    return min(PAUSE_S * (1 << min(failures, 16)), MAX_PAUSE_S)  # a higher power may overflow


class Reach(enum.Enum):
    """How far decode came with an UNUSABLE peer."""

    SILENT = enum.auto()  # it got no description that fits: a new ticket shows that the peer lives
    ALIVE = enum.auto()  # it may meet the peer again over the same connections
    DEAD = enum.auto()  # its connections broke, or are of no use


TRANSITIONS: Final[Table[PeerState]] = {
    PeerState.CONNECTING: {
        events.PeerFits: (PeerState.ADMITTING, PeerState.HANDSHAKING),
        events.PeerRefused: (PeerState.UNUSABLE,),
        messages.Refusal: (PeerState.UNUSABLE,),
        events.EndpointLost: (PeerState.UNUSABLE,),
        events.Tick: (PeerState.UNUSABLE,),
    },
    PeerState.ADMITTING: {
        messages.Admitted: (PeerState.HANDSHAKING, PeerState.UNUSABLE),
        events.EndpointLost: (PeerState.UNUSABLE,),
        events.Tick: (PeerState.UNUSABLE,),
    },
    PeerState.HANDSHAKING: {
        events.HandshakeDone: (PeerState.READY,),
        messages.Pending: (PeerState.UNUSABLE,),  # its engine hangs
        events.PeerRefused: (PeerState.UNUSABLE,),
        events.PeerBroken: (PeerState.UNUSABLE,),  # the first read has failed
        events.EndpointLost: (PeerState.UNUSABLE,),
    },
    PeerState.READY: {
        messages.Pending: (PeerState.UNUSABLE,),  # as above
        events.PeerBroken: (PeerState.HANDSHAKING, PeerState.UNUSABLE),
        events.EndpointLost: (PeerState.UNUSABLE,),
        events.Tick: (None,),
    },
    PeerState.UNUSABLE: {
        # A load wants it, after its pause or with a ticket that shows that it is back; or a tool.
        events.PrepareLoad: (PeerState.CONNECTING,),
        events.MeetPeer: (PeerState.CONNECTING,),
        events.Tick: (
            PeerState.CONNECTING,
            None,
        ),  # a wanted peer is tried again, another one is forgotten
    },
}
MACHINE: Final = Machine("peer", TRANSITIONS)


@dataclass
class Peer:
    key: events.PeerKey
    used_at: float  # monotonic seconds
    state: PeerState = PeerState.CONNECTING
    is_described: bool = False  # CONNECTING: its description came and is being checked
    failures: int = 0  # to reach it or to read its memory, since the last successful read
    failure: Failure | None = None  # the latest one; always in UNUSABLE
    is_reported: bool = False  # the log says that it cannot be used
    # UNUSABLE: when a load may begin an attempt, and whether one wanted it since it failed.
    pause_ends_at: float = -math.inf
    is_wanted: bool = False
    reach: Reach = Reach.ALIVE  # UNUSABLE
    lost: Endpoint | None = None  # UNUSABLE: of the rank whose link ended
    # From ADMITTING or HANDSHAKING on, until its memory is dropped.
    description: messages.Description | None = None
    routes: tuple[Route, ...] = ()
    # Its ranks that have to let this one in, and those of which the answer is missing (ADMITTING).
    introductions: tuple[events.Introduction, ...] = ()
    awaited: dict[Endpoint, events.Introduction] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)  # the addresses that its ranks connect from
    tokens: dict[Rank, bytes] = field(default_factory=dict)  # with which this one maps its memory

    @property
    def kept_until(self) -> float:
        """When it is forgotten unless it is in use, or wanted by the end of its pause."""
        # Without failures, another attempt costs no load more than the first one.
        is_harmless = self.state is PeerState.UNUSABLE and not self.failures
        return self.pause_ends_at if is_harmless else self.used_at + KEPT_S

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
        self.num_in = Counter[PeerState]()  # how many peers are in each state
        self._changed: set[PeerState] = set()  # whose number has changed
        self._unusable: dict[events.PeerKey, Peer] = {}  # in the order of their failures

    def pop_changed(self) -> set[PeerState]:
        changed, self._changed = self._changed, set()
        return changed

    def clear(self) -> None:
        self._changed |= self.num_in.keys()
        self.num_in.clear()
        for table in (self.known, self._at, self._unusable):
            table.clear()
        self.failed.clear()
        self.deadlines.clear()

    def want(
        self,
        key: events.PeerKey,
        event: events.PrepareLoad | events.MeetPeer,
        now: float,
        *,
        is_sealed: bool,
    ) -> tuple[Peer, Actions]:
        """Note that a load needs the peer, and ask for its description if it is time for that.

        `is_sealed`: the peer itself made the load's ticket, or the tool's.
        """
        peer = self.known.get(key)
        if peer is None:
            peer = self.known[key] = Peer(key, now)
            self._index(peer)
            self._count(peer.state, 1)
            self.deadlines.set(key, now + CONNECT_TIMEOUT_S)
            cause = type(event).__name__
            begin = ("", PeerState.CONNECTING.name, cause)
            self._record(events.Transition(MACHINE.name, str(key), "", str(key), *begin))
            return peer, [ask_who(key)]
        peer.used_at = now
        if peer.state is PeerState.UNUSABLE:
            peer.is_wanted = True
            is_back = is_sealed and (peer.reach is Reach.SILENT or peer.failures < MAX_FAILURES)
            does_fit = peer.failure is None or peer.failure.kind is not FailureKind.INCOMPATIBLE
            is_due = peer.pause_ends_at <= now or (is_back and does_fit)
            if is_due and peer.description is None:
                return peer, self._attempt(peer, event, now)
        return peer, []

    def meet(self, event: events.MeetPeer, now: float) -> Actions:
        """A person wants to know whether the peer can be read: try it now, whatever its pause."""
        known = self.known.get(event.peer)
        if known is not None and known.state is PeerState.UNUSABLE:
            known.pause_ends_at = now
        _, actions = self.want(event.peer, event, now, is_sealed=True)
        return actions

    def _attempt(self, peer: Peer, event: object, now: float) -> Actions:
        self._move(peer, PeerState.CONNECTING, event)
        peer.is_described = peer.is_wanted = False
        peer.lost, peer.reach = None, Reach.ALIVE
        self.deadlines.set(peer.key, now + CONNECT_TIMEOUT_S)
        return [ask_who(peer.key)]

    def ask_again(self, endpoint: Endpoint) -> Actions:
        """Repeat the requests that a broken link may have lost."""
        connecting = self._in_state(PeerState.CONNECTING, endpoint)
        actions: Actions = [ask_who(peer.key) for peer in connecting if not peer.is_described]
        for peer in self._in_state(PeerState.ADMITTING, endpoint):
            if endpoint in peer.awaited:
                actions.append(self._introduce(peer, endpoint))
        return actions

    def is_asked(self, endpoint: Endpoint) -> bool:
        """Whether an answer of this endpoint is awaited."""
        admitting = self._in_state(PeerState.ADMITTING, endpoint)
        is_awaited = any(endpoint in peer.awaited for peer in admitting)
        return is_awaited or bool(self._in_state(PeerState.CONNECTING, endpoint))

    def _in_state(self, state: PeerState, endpoint: Endpoint) -> list[Peer]:
        peers = self._at.get(endpoint, {}).values()
        return [peer for peer in peers if peer.state is state]

    def on_description(
        self, message: messages.Description, endpoint: Endpoint, now: float
    ) -> Actions:
        """Have a description checked, unless this rank did not ask for it or has it already."""
        key = events.PeerKey(EngineId(message.engine), Incarnation(message.incarnation), endpoint)
        peer = self.known.get(key)
        if peer is None or peer.state is not PeerState.CONNECTING or peer.is_described:
            return []
        peer.is_described = True
        for former in list(self.known.values()):
            # One directory describes one life at a time, so the others are over.
            if former.key.endpoint == endpoint and former is not peer:
                self._outdate(former, now)
        return [events.StartHandshake(key, message), *self._disconnect(peer)]

    def _outdate(self, peer: Peer, now: float) -> None:
        """Let the next tick forget it, unless a load still reads it then."""
        if peer.state in (PeerState.READY, PeerState.UNUSABLE):
            peer.used_at, peer.pause_ends_at, peer.is_wanted = -math.inf, now, False
            self.deadlines.set(peer.key, now)

    def on_fits(self, event: events.PeerFits, now: float) -> Actions | None:
        """Ask its ranks to let this one in, if that is necessary. None: it is not wanted now."""
        peer, introductions = self.known.get(event.peer), event.introductions
        if peer is None or peer.state is not PeerState.CONNECTING:
            return None
        detail = f"{len(event.routes)} of {len(event.description.ranks)} ranks"
        self._move(
            peer, PeerState.ADMITTING if introductions else PeerState.HANDSHAKING, event, detail
        )
        self._unindex(peer)
        peer.description, peer.routes = event.description, event.routes
        self._index(peer)
        peer.introductions = introductions
        peer.tokens.clear()
        peer.awaited = {event.description.ranks[one.rank].endpoint: one for one in introductions}
        # A handshake has its own time, from when background threads have prepared the ranks. These
        # wait for the peer only to map its memory, and not for long (`reading.gather.share`).
        self.deadlines.set(peer.key, now + CONNECT_TIMEOUT_S if introductions else math.inf)
        return [self._introduce(peer, endpoint) for endpoint in peer.awaited]

    def _introduce(self, peer: Peer, endpoint: Endpoint) -> events.Send:
        one = peer.awaited[endpoint]
        admit = messages.Admit(
            incarnation=peer.life_of(one.rank),
            reader=self.get_reader(),
            sources=one.sources,
            listens=one.listens,
            maps=one.maps,
        )
        return events.Send(endpoint, admit)

    def on_admitted(self, answer: messages.Admitted, endpoint: Endpoint, now: float) -> Actions:
        """Connect once all ranks have let this one in."""
        actions: Actions = []
        for peer in self._in_state(PeerState.ADMITTING, endpoint):
            one = peer.awaited.get(endpoint)
            if one is None:
                continue
            if peer.life_of(one.rank) != answer.incarnation:
                detail = f"prefill rank {one.rank} has restarted, slept or reset its cache since"
                failure = Failure(FailureKind.UNREACHABLE, detail)
            elif one.sources and set(one.sources) <= set(answer.refused):
                detail = (
                    f"prefill rank {one.rank} lets none of this host's addresses "
                    f"({', '.join(one.sources)}) connect to UCX's ports; its log says why"
                )
                failure = Failure(FailureKind.INCOMPATIBLE, detail)
            else:
                del peer.awaited[endpoint]
                peer.sources.update(answer.sources)
                if answer.token:
                    peer.tokens[one.rank] = answer.token
                if not peer.awaited:
                    self._move(peer, PeerState.HANDSHAKING, answer)
                    self.deadlines.set(peer.key, math.inf)
                    sources, tokens = tuple(sorted(peer.sources)), dict(peer.tokens)
                    actions.append(events.Connect(peer.key, sources, tokens))
                continue
            actions += self._fail(peer, answer, failure, now)
        return actions

    def leave(self, peer: Peer) -> list[events.Send]:
        """Tell the ranks that this one asked to let it in that it is gone."""
        if peer.description is None:
            return []
        # A rank that has only given a token for its memory has let in no address.
        named = [one for one in peer.introductions if one.sources]
        endpoints = [(one, peer.description.ranks[one.rank].endpoint) for one in named]
        return [
            events.Send(
                endpoint,
                messages.Leave(incarnation=peer.life_of(one.rank), reader=self.get_reader()),
            )
            for one, endpoint in endpoints
            # A dead rank would not hear it. Another peer may have the same rank: an incarnation of
            # its engine before or after.
            if endpoint != peer.lost and not self._is_needed_by_others(endpoint, peer)
        ]

    def on_handshake_done(self, event: events.HandshakeDone, now: float) -> Actions:
        peer = self.known.get(event.peer)
        if peer is not None and peer.state is PeerState.HANDSHAKING:
            self._move(peer, PeerState.READY, event)
            self.deadlines.set(event.peer, now + KEPT_S)
        return []

    def on_refused(
        self, key: events.PeerKey, event: events.PeerRefused | messages.Refusal, now: float
    ) -> Actions:
        peer, is_ours = self.known.get(key), isinstance(event, events.PeerRefused)
        if peer is None or type(event) not in TRANSITIONS[peer.state]:
            return []
        kind = FailureKind.INCOMPATIBLE if is_ours else FailureKind.UNREACHABLE
        return self._fail(peer, event, Failure(kind, event.reason), now)

    def on_broken(self, event: events.PeerBroken, now: float) -> Actions:
        """A broken connection costs the loads that are read over it, and two in a row the peer.

        After the first one, decode connects anew and reads once more to prove that it can. If such
        a read fails, the peer is unusable at once.
        """
        peer = self.known.get(event.peer)
        if peer is None or peer.state not in (PeerState.HANDSHAKING, PeerState.READY):
            return []
        if peer.state is PeerState.READY and peer.failures + 1 < MAX_FAILURES:
            peer.failures += 1
            self._move(peer, PeerState.HANDSHAKING, event)
            self.deadlines.set(peer.key, math.inf)
            return [events.Connect(peer.key, tuple(sorted(peer.sources)))]
        detail = f"engine {peer.key.engine!r} answers but cannot be read: {event.reason}"
        if peer.state is PeerState.HANDSHAKING:
            detail += UNREAD
        return self._fail(peer, event, Failure(FailureKind.UNREACHABLE, detail), now)

    def on_stalled(
        self, key: events.PeerKey, event: messages.Pending, failure: Failure, now: float
    ) -> Actions:
        """Its engine hangs. Each of its loads hears that itself, unless prefill has computed it."""
        peer = self.known.get(key)
        if peer is None or messages.Pending not in TRANSITIONS[peer.state]:
            return []
        return self._fail(peer, event, failure, now, fails_loads=False)

    def on_read(self, key: events.PeerKey) -> Actions:
        """A read has succeeded: failures count from the beginning."""
        peer = self.known.get(key)
        if peer is None:
            return []
        actions: Actions = [events.PeerUsable(key)] if peer.is_reported else []
        peer.failures, peer.is_reported = 0, False
        if peer.state is PeerState.UNUSABLE:
            peer.pause_ends_at = -math.inf
        else:
            peer.failure = None
        return actions

    def on_endpoint_lost(
        self, event: events.EndpointLost, failed: Collection[events.PeerKey], now: float
    ) -> Actions:
        """Peers whose description this rank awaits, or one of whose ranks it knew, are unusable.

        `failed`: the peers with loads that this has ended. For others it does not count.
        """
        actions: Actions = []
        failure = Failure(FailureKind.UNREACHABLE, f"{event.endpoint}: {event.reason}")
        for peer in list(self._at.get(event.endpoint, {}).values()):
            if peer.state is not PeerState.UNUSABLE:
                is_cheap = peer.state is not PeerState.CONNECTING and peer.key not in failed
                actions += self._fail(peer, event, failure, now, is_cheap=is_cheap)
        return actions

    def on_tick(
        self, tick: events.Tick, is_in_use: Callable[[events.PeerKey], bool], now: float
    ) -> Actions:
        """End pauses that are over, drop the memory of peers, and forget unused ones."""
        actions: Actions = []
        for key in self.deadlines.pop_due(now):
            peer = self.known[key]
            if peer.state in (PeerState.CONNECTING, PeerState.ADMITTING):
                actions += self._fail(peer, tick, NO_DESCRIPTION, now)
            elif is_in_use(key):
                kept_until = now if peer.state is PeerState.UNUSABLE else peer.kept_until
                self.deadlines.set(key, max(kept_until, now + LOOK_AGAIN_S))
            else:
                actions += self._on_unused(peer, tick, now)
        return actions

    def _on_unused(self, peer: Peer, tick: events.Tick, now: float) -> Actions:
        """The deadline of a READY or UNUSABLE peer has passed, and no load reads it."""
        dropped = self._drop(peer) if peer.state is PeerState.UNUSABLE else []
        if peer.state is PeerState.UNUSABLE and now < peer.pause_ends_at:
            self.deadlines.set(peer.key, peer.pause_ends_at)
        elif peer.state is PeerState.UNUSABLE and peer.is_wanted:
            return dropped + self._attempt(peer, tick, now)
        elif now < peer.kept_until:
            self.deadlines.set(peer.key, peer.kept_until)
        else:
            return dropped + self._forget(peer, tick)
        return dropped

    def _fail(
        self,
        peer: Peer,
        event: object,
        failure: Failure,
        now: float,
        *,
        is_cheap: bool = False,
        fails_loads: bool = True,
    ) -> Actions:
        """The peer is unusable: the caller fails its loads, unless each read knows its own fate.

        `is_cheap`: no load has paid for this, so it does not count.
        """
        before, does_fit = peer.state, failure.kind is not FailureKind.INCOMPATIBLE
        self._move(peer, PeerState.UNUSABLE, event, failure.detail)
        peer.failure, peer.is_wanted = failure, False
        if not does_fit:
            pause_s = INCOMPATIBLE_S
        elif is_cheap:
            pause_s = 0.0
        else:
            pause_s = pause_after(peer.failures)
            peer.failures += 1
        peer.pause_ends_at = now + pause_s
        is_lost = isinstance(event, events.EndpointLost)
        if before is PeerState.CONNECTING:
            peer.reach = Reach.SILENT
        elif is_lost or isinstance(event, events.PeerBroken):
            peer.reach = Reach.DEAD
        fails_loads &= peer.reach is Reach.SILENT or not is_lost
        peer.awaited.clear()
        if fails_loads:
            self.failed.append(peer)
        actions: Actions = []
        if peer.reach is Reach.SILENT:
            # The answer to StartHandshake must find no peer.
            if peer.is_described and not isinstance(event, events.PeerRefused):
                actions.append(events.DropPeer(peer.key))
            actions += self._disconnect(peer)
            self.deadlines.set(peer.key, peer.pause_ends_at)
        else:
            peer.lost = event.endpoint if isinstance(event, events.EndpointLost) else None
            self.deadlines.set(peer.key, now)
        if does_fit and peer.failures >= MAX_FAILURES and not peer.is_reported:
            peer.is_reported = True
            actions.append(events.PeerUnusable(peer.key, failure.detail))
        if len(self._unusable) > MAX_UNUSABLE:  # the next tick forgets the oldest one
            self._outdate(self._unusable.pop(next(iter(self._unusable))), now)
        return actions

    def _forget(self, peer: Peer, event: object) -> Actions:
        actions = self._drop(peer)
        self._move(peer, None, event)
        self._unindex(peer)
        del self.known[peer.key]
        self.deadlines.set(peer.key, math.inf)
        return actions

    def _drop(self, peer: Peer) -> Actions:
        """Forget the memory of a peer that is not being read, and what its ranks know of this."""
        if peer.description is None:
            return []
        farewell = self.leave(peer)
        # After a farewell the peer ends the connections, and the idle link closes by itself.
        closing = [] if farewell else self._disconnect(peer)
        self._unindex(peer)
        peer.description, peer.introductions = None, ()
        self._index(peer)
        dropped = events.DropPeer(peer.key, is_dead=peer.reach is Reach.DEAD or bool(farewell))
        return [dropped, *farewell, *closing]

    def _index(self, peer: Peer) -> None:
        for endpoint in peer.endpoints:
            self._at.setdefault(endpoint, {})[peer.key] = peer

    def _unindex(self, peer: Peer) -> None:
        for endpoint in peer.endpoints:
            del self._at[endpoint][peer.key]
            if not self._at[endpoint]:
                del self._at[endpoint]

    def _move(self, peer: Peer, after: PeerState | None, event: object, detail: str = "") -> None:
        states = peer.state, after
        self._count(peer.state, -1)
        if after is not None:
            self._count(after, 1)
        name = str(peer.key)
        peer.state = MACHINE.move(self._record, states, event, (name, "", name), detail)
        self._unusable.pop(peer.key, None)
        if after is PeerState.UNUSABLE:
            self._unusable[peer.key] = peer

    def _count(self, state: PeerState, amount: int) -> None:
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
        # Another incarnation may have the same ports.
        others = [each for each in self._at.get(endpoint, {}).values() if each is not peer]
        return any(each.state is PeerState.CONNECTING or each.description for each in others)


def ask_who(key: events.PeerKey) -> events.Send:
    describe = messages.Describe(incarnation=key.incarnation, engine=key.engine)
    return events.Send(key.endpoint, describe)
