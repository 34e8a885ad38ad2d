"""The last 10,000 transitions of a rank's state machines, by request.

The log is always on, because a transition costs about two microseconds. It
keeps transitions by request and by peer, so that a lookup reads only its results. `nixl-kv
status --request` and the log line of a failed load show them.
"""

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final, TypeAlias

from nixl_kv.errors import get_logger, printable
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import MAX_LISTED

logger = get_logger(__name__)

KEPT: Final = 10_000
# Characters of a cause that are kept, because a peer may have written part of it.
MAX_CAUSE: Final = 300

# Its number in order of all events, its time, and the transition.
_Event: TypeAlias = tuple[int, float, events.Transition]
# A request, or a peer for an event that concerns no single request; the other one is empty.
_Key: TypeAlias = tuple[str, str]


class EventLog:
    """Keeps the last `kept` transitions. `clock` is in seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = KEPT) -> None:
        self._clock = clock
        self._kept = kept
        self._count = 0
        self._events: defaultdict[_Key, deque[_Event]] = defaultdict(deque)
        self._order: deque[_Key] = deque()  # the key of each event, oldest event first

    def __len__(self) -> int:
        return len(self._order)

    @property
    def since(self) -> float | None:
        return self._events[self._order[0]][0][1] if self._order else None

    def record(self, transition: events.Transition) -> None:
        cause = transition.cause
        if len(cause) > MAX_CAUSE or not cause.isprintable():
            transition = transition._replace(cause=printable(cause, MAX_CAUSE))
        key = transition.request, "" if transition.request else transition.peer
        self._count += 1
        self._events[key].append((self._count, self._clock(), transition))
        self._order.append(key)
        if len(self._order) > self._kept:  # the oldest of all is also the oldest of its key
            oldest = self._order.popleft()
            self._events[oldest].popleft()
            if not self._events[oldest]:
                del self._events[oldest]
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", describe(transition))

    def story(
        self, request: str, *, exact: bool = False, limit: int = MAX_LISTED
    ) -> list[tuple[float, events.Transition]]:
        """The last events of requests whose id contains this text or, if `exact`, equals it.

        They include the events of the engines that the requests read from meanwhile.
        """
        found = [(request, "")] if exact else [key for key in self._events if request in key[0]]
        keys = [key for key in found if request and key in self._events]
        own = sorted(event for key in keys for event in self._events[key])
        if not own:
            return []
        are_over = all(_is_end(self._events[key][-1][2]) for key in keys)
        begin, end = own[0][0], own[-1][0] if are_over else math.inf
        for peer in {transition.peer for _, _, transition in own}:
            own += [event for event in self._events.get(("", peer), ()) if begin < event[0] < end]
        return [(when, transition) for _, when, transition in sorted(own)[-limit:]]

    def story_lines(self, request: str, limit: int) -> list[str]:
        """The events of one request in at most `limit` lines, with seconds since the first."""
        story = self.story(request, exact=True)
        lines = [f"{when - story[0][0]:9.3f} s  {describe(event)}" for when, event in story]
        if len(lines) <= limit:
            return lines
        left_out = len(lines) - limit + 1  # one line counts them
        return [f"({left_out} earlier events)", *lines[left_out:]]


def _is_end(transition: events.Transition) -> bool:
    """Whether an offer or a load ended. A read from one rank also FAILS, but ends no load."""
    is_load = transition.before in ("PREPARED", "STARTED")
    return transition.after == events.OVER or (is_load and transition.after in ("LOADED", "FAILED"))


def describe(event: events.Transition) -> str:
    states = f"{event.before} -> {event.after}" if event.before else event.after
    cause = f" ({event.cause})" if event.cause else ""
    num_bytes = f", {event.num_bytes} bytes" if event.num_bytes else ""
    subject = " ".join(filter(None, (event.request, event.peer)))
    return f"{subject}: {states}{cause}{num_bytes}"
