"""The base of the protocol's state machines: checked transitions, and deadlines.

A machine has subjects (offers, reads, peers), each in one state of an enum. Its table lists for
each state which event may lead to which states. `Machine.move` checks every change against the
table, so the code does what the tables in docs/protocol.md say.
"""

import enum
import heapq
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from nixl_kv.errors import LocalProtocolError
from nixl_kv.protocol import events


class MachineState(enum.Enum):
    __hash__ = object.__hash__  # Enum's own is Python code, and every event looks states up


_State = TypeVar("_State", bound=MachineState)
_Key = TypeVar("_Key", bound=Hashable)

Table: TypeAlias = Mapping[_State, Mapping[type, tuple[_State | None, ...]]]
"""For each state, the states that an event of a type may lead to; None ends the subject."""


@dataclass(frozen=True)
class Machine(Generic[_State]):
    name: str  # of a subject, in errors and transitions
    table: Table[_State]

    def move(  # noqa: PLR0913 - the fields of a transition
        self,
        record: events.Record,
        states: tuple[_State, _State | None],
        event: object,
        about: tuple[str, str, str],
        detail: str = "",
        num_bytes: int = 0,
        *,
        reason: str = "",
    ) -> _State:
        """Check and record the transition by `event` between two `states`; return the new state.

        `about` names the subject, the request and the peer; `detail` and the rest see
        `Transition`. At its end, a subject's last state stays.
        """
        (before, after), (subject, request, peer) = states, about
        kind, name = type(event).__name__, events.OVER if after is None else after.name
        if after not in self.table[before].get(type(event), ()):
            raise LocalProtocolError(
                f"{self.name} (request {request!r}, peer {peer!r}): {kind} leads from "
                f"{before.name} to {name}; allowed: the transitions in docs/protocol.md"
            )
        cause = f"{kind}: {detail}" if detail else kind
        is_last = after is None or not self.table[after]
        change = (before.name, name, cause, num_bytes, reason, is_last)
        record(events.Transition(self.name, subject, request, peer, *change))
        return before if after is None else after


class Deadlines(Generic[_Key]):
    """One deadline per key, in monotonic seconds. A tick costs as much as there are due keys."""

    def __init__(self) -> None:
        self.next = math.inf  # the earliest deadline
        self._due: dict[_Key, float] = {}
        self._heap: list[tuple[float, int, _Key]] = []
        self._count = 0  # breaks ties in the heap, so that keys are never compared

    def get(self, key: _Key) -> float:
        return self._due.get(key, math.inf)

    def set(self, key: _Key, when: float) -> None:
        if self._due.get(key, math.inf) == when:
            return
        if when == math.inf:
            del self._due[key]
        else:
            self._due[key] = when
            self._count += 1
            heapq.heappush(self._heap, (when, self._count, key))
        # Replaced entries stay in the heap until they are due, or until they are most of it.
        if len(self._heap) > 2 * len(self._due) + 16:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        self.next = self._heap[0][0] if self._heap else math.inf

    def pop_due(self, now: float) -> list[_Key]:
        """Remove the keys that are due and return them, earliest first."""
        due: list[_Key] = []
        while self.next <= now:
            due.append(self._heap[0][2])
            self.set(due[-1], math.inf)
        return due

    def clear(self) -> None:
        self._due.clear()
        self._heap.clear()
        self.next = math.inf
