"""A circuit breaker for each prefill engine, so that an unreachable one costs few loads a timeout.

Each failure to reach an engine costs the loads that need it some seconds. After MAX_FAILURES in a
row its circuit is OPEN: loads from it fail at once. Decode then probes the engine in the
background, after pauses that double, until its directory and all its ranks answer.

A circuit belongs to one incarnation of an engine, and exists from the first failure to the next
good read. A restarted engine has none, so its tickets are tried at once.
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from nixl_kv.ids import Endpoint, EngineId, Incarnation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, Failure
from nixl_kv.protocol.machine import Deadlines, Machine, MachineState, Table
from nixl_kv.protocol.peers import ask_who, is_unnamed, unnamed

MAX_FAILURES: Final = 2  # in a row until loads fail at once; one happens by itself
PAUSE_S: Final = 1.0  # before the first probe
MAX_PAUSE_S: Final = 64.0
PROBE_S: Final = 5.0  # for the answers of an engine's directory and ranks
KEPT_S: Final = 600.0  # without a load; after that no load needs the result of a probe
MAX_CIRCUITS: Final = 1 << 12  # without a key, a client may invent engines


class State(MachineState):
    CLOSED = enum.auto()  # it failed, but not often enough
    OPEN = enum.auto()  # loads fail at once until a probe succeeds
    HALF_OPEN = enum.auto()  # a probe is under way


TRANSITIONS: Final[Table[State]] = {
    State.CLOSED: {Failure: (State.OPEN,), events.ReadDone: (None,)},
    State.OPEN: {events.Tick: (State.HALF_OPEN, None), events.ReadDone: (None,)},
    State.HALF_OPEN: {
        messages.HeartbeatReply: (None,),
        messages.Refusal: (None,),
        events.EndpointLost: (State.OPEN,),
        events.Tick: (State.OPEN,),
        events.ReadDone: (None,),
    },
}
MACHINE: Final = Machine("circuit", TRANSITIONS)


@dataclass
class Circuit:
    key: events.PeerKey
    failure: Failure  # the latest
    used_at: float  # monotonic seconds
    state: State = State.CLOSED
    failures: int = 0
    ranks: tuple[messages.RankDescription, ...] = ()  # that the probe asks, once described
    awaited: set[Endpoint] = field(default_factory=set)  # of these, the ones without an answer


class Breaker:
    """All circuits of a decode rank. `now` is monotonic, in seconds."""

    def __init__(
        self, record: events.Record, greet: Callable[[Sequence[messages.RankDescription]], Actions]
    ) -> None:
        """`greet` makes the ranks send a HeartbeatReply each."""
        self.deadlines = Deadlines[events.PeerKey]()
        self.circuits: dict[events.PeerKey, Circuit] = {}
        self._probes: dict[events.PeerKey, Circuit] = {}  # the HALF_OPEN ones
        self._record = record
        self._greet = greet

    @property
    def num_searched(self) -> int:
        """How many endpoints are probed of which nothing else is known."""
        return sum(map(is_unnamed, self._probes))

    def clear(self) -> None:
        for table in (self.circuits, self._probes, self.deadlines):
            table.clear()

    def check(self, key: events.PeerKey, now: float) -> Failure | None:
        """Why a load from this engine fails at once; None: it may be tried."""
        circuit = self.circuits.get(key)
        if circuit is None or circuit.state is State.CLOSED:
            return None
        circuit.used_at = now
        return circuit.failure

    def on_failure(self, key: events.PeerKey, failure: Failure, now: float) -> Actions:
        """Decode could not reach the engine, or one of its ranks."""
        circuit = self.circuits.pop(key, None) or Circuit(key, failure, now)
        self.circuits[key] = circuit
        if len(self.circuits) > MAX_CIRCUITS:
            oldest = next(iter(self.circuits))
            del self.circuits[oldest]
            self._probes.pop(oldest, None)
            self.deadlines.set(oldest, math.inf)
        circuit.failures += 1
        circuit.failure = msgspec.structs.replace(failure, is_known=True)
        if circuit.state is not State.CLOSED or circuit.failures < MAX_FAILURES:
            return []
        self._move(circuit, State.OPEN, failure, failure.detail)
        self.deadlines.set(key, now + PAUSE_S)
        return [events.PeerUnreachable(key, failure.detail)]

    def on_read(self, key: events.PeerKey, read: events.ReadDone) -> Actions:
        actions: Actions = []
        for circuit in filter(None, map(self.circuits.get, (key, unnamed(key.endpoint)))):
            actions += self._close(circuit, read)
        return actions

    # --- the probe

    def on_description(self, message: messages.Description, endpoint: Endpoint) -> Actions:
        key = events.PeerKey(EngineId(message.engine), Incarnation(message.incarnation), endpoint)
        actions: Actions = []
        for circuit in filter(None, map(self.circuits.get, (key, unnamed(endpoint)))):
            if circuit.state is State.HALF_OPEN and not circuit.ranks:
                circuit.ranks = message.ranks
                circuit.awaited = {rank.endpoint for rank in message.ranks}
                actions += self._greet(message.ranks)
        return actions

    def on_reply(self, reply: messages.HeartbeatReply, endpoint: Endpoint) -> Actions:
        actions: Actions = []
        for circuit in self._probed(endpoint):
            circuit.awaited.discard(endpoint)
            if circuit.ranks and not circuit.awaited:
                actions += self._close(circuit, reply)
        return actions

    def on_refusal(self, refusal: messages.Refusal, key: events.PeerKey) -> None:
        """Another incarnation answers, so no valid ticket names this one any longer."""
        circuit = self.circuits.get(key)
        if circuit is not None and circuit.state is State.HALF_OPEN:
            self._close(circuit, refusal)

    def on_endpoint_lost(self, event: events.EndpointLost, now: float) -> None:
        for circuit in self._probed(event.endpoint):
            self._reopen(circuit, event, now)

    def on_tick(self, tick: events.Tick, now: float, room: int) -> Actions:
        """Begin and end probes; of endpoints of which nothing else is known, at most `room`."""
        actions: Actions = []
        room -= self.num_searched
        for key in self.deadlines.pop_due(now):
            circuit, is_search = self.circuits[key], is_unnamed(key)
            if circuit.state is State.HALF_OPEN:
                self._reopen(circuit, tick, now)
            elif now >= circuit.used_at + KEPT_S:
                self._move(circuit, None, tick)
                del self.circuits[key]
            elif is_search and room <= 0:
                self.deadlines.set(key, now + PAUSE_S)
            else:
                room -= is_search
                self._move(circuit, State.HALF_OPEN, tick)
                self.deadlines.set(key, now + PROBE_S)
                circuit.ranks, circuit.awaited = (), {key.endpoint}
                actions.append(ask_who(key))
        return actions

    def _probed(self, endpoint: Endpoint) -> list[Circuit]:
        return [each for each in self._probes.values() if endpoint in each.awaited]

    def _reopen(self, circuit: Circuit, event: object, now: float) -> None:
        self._move(circuit, State.OPEN, event, ", ".join(sorted(circuit.awaited)))
        circuit.failures += 1
        pause_s = min(PAUSE_S * 2.0 ** (circuit.failures - MAX_FAILURES), MAX_PAUSE_S)
        self.deadlines.set(circuit.key, now + pause_s)

    def _close(self, circuit: Circuit, event: object) -> Actions:
        was_closed = circuit.state is State.CLOSED
        self._move(circuit, None, event)
        del self.circuits[circuit.key]
        self.deadlines.set(circuit.key, math.inf)
        return [] if was_closed else [events.PeerReachable(circuit.key)]

    def _move(self, circuit: Circuit, after: State | None, event: object, detail: str = "") -> None:
        states, about = (circuit.state, after), ("", str(circuit.key))
        circuit.state = MACHINE.move(self._record, states, event, about, detail)
        self._probes.pop(circuit.key, None)
        if after is State.HALF_OPEN:
            self._probes[circuit.key] = circuit
