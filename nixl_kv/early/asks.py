"""Asks that precede their offer: an early ticket lets both legs of a request start together.

An early ticket names an offer before prefill has computed its request. Decode asks at once. A
prefill rank remembers such asks until it can grant the offer, and answers each with the state of
the request. Asks are bounded in number, in total and for each reader, and in time: decode repeats
an unanswered ask, and one that is not repeated expires.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, EngineId, Nonce, Rank, RequestId, short
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.machine import Deadlines, MachineState
from nixl_kv.protocol.messages import PAUSED_S, PrefillState
from nixl_kv.protocol.prefill import RoutedAsk

# A prefill rank denies an early ask, because its request has not arrived. Prefill may tokenize a
# long prompt for a second, behind others.
UNKNOWN_S: Final = 10.0
# A prefill rank forgets an early ask that decode has not repeated. Decode repeats it after 1 s.
# This allows for one that is lost, and a busy host.
REPEATED_S: Final = 5.0
MAX_ASKS: Final = 8192  # of all readers; an ask takes up to 5 KiB
MAX_ASKS_OF_READER: Final = 4096

_Reader: TypeAlias = tuple[EngineId, Rank]


@dataclass(frozen=True)
class _Waiting:
    asked: RoutedAsk
    expires_at: float


class Demand(MachineState):
    """Whether decode needs the offer of an early ticket on this rank."""

    WANTED = enum.auto()  # as far as this rank knows
    UNNEEDED = enum.auto()  # its readers have all bytes: they read another rank's copy
    GIVEN_UP = enum.auto()  # a reader has given up
    REPORTED = enum.auto()  # likewise, and the engine was told to end the request


class DemandEvent(MachineState):
    COMPLETE = enum.auto()  # a reader needs nothing more from this rank
    RELEASE = enum.auto()  # a reader gives up
    REPORT = enum.auto()  # the request has arrived, and no ask waits


DEMAND_TRANSITIONS: Final[Mapping[Demand, Mapping[DemandEvent, Demand]]] = {
    Demand.WANTED: {
        DemandEvent.COMPLETE: Demand.UNNEEDED,
        DemandEvent.RELEASE: Demand.GIVEN_UP,
    },
    Demand.UNNEEDED: {
        DemandEvent.COMPLETE: Demand.UNNEEDED,
        DemandEvent.RELEASE: Demand.GIVEN_UP,
    },
    Demand.GIVEN_UP: {
        DemandEvent.COMPLETE: Demand.GIVEN_UP,
        DemandEvent.RELEASE: Demand.GIVEN_UP,
        DemandEvent.REPORT: Demand.REPORTED,
    },
    Demand.REPORTED: {
        DemandEvent.COMPLETE: Demand.REPORTED,
        DemandEvent.RELEASE: Demand.REPORTED,
    },
}


@dataclass
class _Request:
    """A request with an early ticket on this rank, until its offer has ended."""

    state: PrefillState = "unknown"  # never "stalled", which is a fact about the engine
    demand: Demand = Demand.WANTED
    #: Unless its request is unknown: then only asks and releases have come.
    expected: events.ExpectOffer | None = None
    #: Finite while its request is unknown: it is forgotten then.
    known_by: float = math.inf
    expected_at: float = math.inf
    #: In order of arrival.
    asks: dict[tuple[Claim, _Reader], _Waiting] = field(default_factory=dict)

    def move(self, event: DemandEvent) -> None:
        self.demand = DEMAND_TRANSITIONS[self.demand][event]


class Steps:
    """Whether this engine hangs: vLLM steps while any request waits, even if no step does much.

    A paused engine does not step, nor does an idle one. The first step may compile for minutes.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._stepped_at = math.inf  # when a step last began or ended; finite after the first one
        self._paused_until = -math.inf
        self._number = 0  # of the latest `Paused`

    def on_step(self, now: float) -> None:
        self._stepped_at = now

    def on_pause(self, event: events.Paused, now: float) -> None:
        if event.number <= self._number:
            return
        self._number = event.number
        self._paused_until = now + PAUSED_S if event.is_paused else now

    def is_stalled(self, since: float, now: float) -> bool:
        """Whether no step has begun or ended for `stall_s`, in which a request waits `since`."""
        last = max(self._stepped_at, since, self._paused_until)
        return now - last > self._stall_s


class EarlyAsks:
    """The requests with early tickets of one prefill rank. `now` is monotonic, in seconds."""

    def __init__(self, stall_s: float) -> None:
        """`stall_s`: how long a step may take."""
        self.steps = Steps(stall_s)
        self.due = Deadlines[Nonce]()
        self._requests: dict[Nonce, _Request] = {}
        self._num_asks = 0
        self._of_reader: dict[_Reader, int] = {}

    def __contains__(self, nonce: Nonce) -> bool:
        return nonce in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_asks(self) -> int:
        return self._num_asks

    def expected(self, nonce: Nonce) -> events.ExpectOffer | None:
        known = self._requests.get(nonce)
        return None if known is None else known.expected

    def is_other(self, ask: messages.Ask) -> bool:
        """Whether the request that it asks for has arrived with another prompt."""
        expected = self.expected(Nonce(ask.nonce))
        return expected is not None and expected.context != ask.context

    def expect(self, event: events.ExpectOffer, now: float) -> list[RoutedAsk]:
        """The request has arrived. Returns the asks for another prompt, to be denied."""
        known = self._requests.setdefault(event.nonce, _Request())
        known.expected, known.state, known.known_by = event, "queued", math.inf
        known.expected_at = now
        self._set_due(event.nonce, known)
        asks = {key: each.asked for key, each in known.asks.items()}
        others = {key: each for key, each in asks.items() if each.ask.context != event.context}
        for key in others:
            self._drop(event.nonce, known, key)
        return list(others.values())

    def set_state(self, nonce: Nonce, state: PrefillState) -> list[RoutedAsk]:
        """Note the state of a request. Returns the asks to answer with Pending."""
        known = self._requests.get(nonce)
        if known is None or known.expected is None or known.state == state:
            return []
        known.state = state
        return [each.asked for each in known.asks.values()]

    def add(self, ask: messages.Ask, route: bytes, now: float) -> PrefillState | None:
        """Remember an ask. Returns the state of its request, or None if there are too many."""
        known, key = self._requests.get(ask.nonce), _key(ask)
        if known is None or key not in known.asks:
            of_reader = self._of_reader.get(key[1], 0)
            if self._num_asks >= MAX_ASKS or of_reader >= MAX_ASKS_OF_READER:
                return None
            self._num_asks += 1
            self._of_reader[key[1]] = of_reader + 1
        if known is None:
            known = self._requests[ask.nonce] = _Request(known_by=now + UNKNOWN_S)
        known.asks[key] = _Waiting(RoutedAsk(route, ask), now + REPEATED_S)
        self._set_due(ask.nonce, known)
        return "stalled" if self.steps.is_stalled(known.expected_at, now) else known.state

    def release(self, release: messages.Release, now: float) -> None:
        """Decode does not need the offer, of which this rank may not have heard."""
        known = self._requests.get(release.nonce)
        if known is None and len(self._requests) < MAX_ASKS:
            known = self._requests[release.nonce] = _Request(known_by=now + UNKNOWN_S)
            self._set_due(release.nonce, known)
        if known is None:
            return
        # Another decode engine may have the same ticket, as after a router's retry.
        if all(claim == release.claim for claim, _ in known.asks):
            known.move(DemandEvent.COMPLETE if release.complete else DemandEvent.RELEASE)
        self._drop(release.nonce, known, _key(release))

    def is_declined(self, nonce: Nonce) -> bool:
        known = self._requests.get(nonce)
        return known is not None and known.demand is not Demand.WANTED

    def pop_given_up(self, nonce: Nonce) -> RequestId | None:
        """The request whose offer no reader needs any longer, if it has arrived; given once."""
        known = self._requests.get(nonce)
        if known is None or known.expected is None or known.asks:
            return None
        if known.demand is not Demand.GIVEN_UP:
            return None
        known.move(DemandEvent.REPORT)
        return known.expected.request

    def pop(self, nonce: Nonce) -> list[RoutedAsk]:
        """The offer can be granted: its asks, in order of arrival."""
        known = self._requests.get(nonce)
        if known is None:
            return []
        asks = {key: each.asked for key, each in known.asks.items()}
        for key in asks:
            self._drop(nonce, known, key)
        return list(asks.values())

    def forget(self, nonce: Nonce) -> list[RoutedAsk]:
        """The request has ended: the asks that are left must be denied."""
        asks = self.pop(nonce)
        self._requests.pop(nonce, None)
        self.due.set(nonce, math.inf)
        return asks

    def pop_due(self, now: float) -> list[RoutedAsk]:
        """Forget expired asks; returns those of requests that stayed unknown, to be denied."""
        denied: list[RoutedAsk] = []
        for nonce in self.due.pop_due(now):
            known = self._requests[nonce]
            if known.known_by <= now:
                denied += self.forget(nonce)
                continue
            for key in [key for key, ask in known.asks.items() if ask.expires_at <= now]:
                self._drop(nonce, known, key)
            if nonce in self._requests:
                self._set_due(nonce, known)
        return denied

    def clear(self) -> None:
        for table in (self._requests, self._of_reader, self.due):
            table.clear()
        self._num_asks = 0

    def _drop(self, nonce: Nonce, known: _Request, key: tuple[Claim, _Reader]) -> None:
        if known.asks.pop(key, None) is None:
            return
        self._num_asks -= 1
        self._of_reader[key[1]] -= 1
        if not self._of_reader[key[1]]:
            del self._of_reader[key[1]]
        is_kept = known.demand is not Demand.WANTED and len(self._requests) <= MAX_ASKS
        if known.expected is None and not known.asks and not is_kept:
            del self._requests[nonce]
            self.due.set(nonce, math.inf)
        else:
            self._set_due(nonce, known)

    def check(self) -> None:
        """Check what the states promise.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        for nonce, known in self._requests.items():
            is_unknown = known.state == "unknown"
            rules = {
                f"expected {known.expected}": is_unknown != (known.expected is None),
                f"known by {known.known_by}": is_unknown != (known.known_by < math.inf),
                "reported": is_unknown and known.demand is Demand.REPORTED,
            }
            for rule, is_broken in rules.items():
                if is_broken:
                    raise LocalProtocolError(f"early ask {short(nonce)} is {known.state}: {rule}")
        of_readers = sum(self._of_reader.values())
        num_asks = sum(len(known.asks) for known in self._requests.values())
        if not self._num_asks == of_readers == num_asks:
            raise LocalProtocolError(f"{num_asks} asks, counted {self._num_asks}, {of_readers}")

    def _set_due(self, nonce: Nonce, known: _Request) -> None:
        first = min((ask.expires_at for ask in known.asks.values()), default=math.inf)
        self.due.set(nonce, min(first, known.known_by))


def _key(message: messages.Ask | messages.Release) -> tuple[Claim, _Reader]:
    return message.claim, (message.reader.engine, message.reader.rank)
