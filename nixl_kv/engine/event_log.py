"""The last 10,000 transitions of a rank's state machines.

The log is always on, because a transition costs about a microsecond. `nixl-kv status --request` and
the log line of a failed load show them. `nixl-kv doctor` and `status` show the loads that failed.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from nixl_kv.errors import MAX_ID, get_logger, printable, shown_id
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import MAX_LISTED

logger = get_logger(__name__)

KEPT: Final = 10_000
# Characters of a cause that are kept, because a peer may have written part of it.
MAX_CAUSE: Final = 300
ID_START: Final = 64  # characters by which an id is found that was cut; its record has more
# Instead of a part of a request id: the events of all requests and peers.
EVERY_REQUEST: Final = "*"

# Status and doctor no longer count a load. It says little about the engine's present state.
RECENT_S: Final = 300.0
MAX_REQUESTS: Final = 3  # ids in a record of failures; `status --request` shows each one's story
DROPPED: Final = events.FailureKind.DROPPED.value


class EventLog:
    """Keeps the last `kept` transitions. `clock` is in seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = KEPT) -> None:
        self._clock = clock
        self._events: deque[tuple[float, events.Transition]] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def since(self) -> float | None:
        return self._events[0][0] if self._events else None

    def record(self, transition: events.Transition) -> None:
        cause = transition.cause
        if len(cause) > MAX_CAUSE or not cause.isprintable():
            transition = transition._replace(cause=printable(cause, MAX_CAUSE))
        if len(transition.request) > MAX_ID:
            transition = transition._replace(request=shown_id(transition.request))
        self._events.append((self._clock(), transition))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", describe(transition))

    def story(
        self, request: str, *, exact: bool = False, limit: int = MAX_LISTED
    ) -> list[tuple[float, events.Transition]]:
        """The last events of requests whose id contains this text or, if `exact`, equals it.

        They include the events of the engines that the requests read from meanwhile. It searches
        all events, which takes about a millisecond. EVERY_REQUEST finds all of them.
        """
        if exact and len(request) > MAX_ID:
            request = shown_id(request)  # as `record` has cut it
        kept = list(self._events)
        if request == EVERY_REQUEST:
            return kept[-limit:]
        own = [
            place
            for place, (_, event) in enumerate(kept)
            if (event.request == request if exact else _is_part(request, event.request))
        ]
        if not request or not own:
            return []
        requests = {kept[place][1].request for place in own}
        peers = {kept[place][1].peer for place in own}
        # Whether the latest load or offer of each request has ended.
        ended = {
            event.request: event.is_last
            for event in (kept[place][1] for place in own)
            if event.machine in ("load", "offer")
        }
        is_over = all(ended.get(request) for request in requests)
        found = [
            (when, event)
            for when, event in kept[own[0] : own[-1] + 1 if is_over else len(kept)]
            if event.request in requests or (event.machine == "peer" and event.peer in peers)
        ]
        return found[-limit:]

    @property
    def failures_span_s(self) -> float:
        """How far back `failures` sees: less than RECENT_S if newer events fill the log."""
        if len(self._events) < (self._events.maxlen or 0):
            return RECENT_S
        return min(RECENT_S, max(0.0, self._clock() - self._events[0][0]))

    def failures(self) -> list[dict[str, Any]]:
        """The loads that failed in the last RECENT_S, by peer and reason, most frequent first.

        These are records of a `Status`. Loads that vLLM cancelled are not failures.
        """
        now = self._clock()
        found: dict[tuple[str, str], list[tuple[float, events.Transition]]] = {}
        for when, event in itertools.takewhile(
            lambda each: each[0] > now - RECENT_S, reversed(self._events)
        ):
            if event.reason not in ("", DROPPED):
                found.setdefault((event.peer, event.reason), []).append((when, event))
        records: list[dict[str, Any]] = [
            {
                "peer": peer,
                "reason": reason,
                "num_loads": len(ends),
                "latest_ago_s": max(0.0, now - ends[0][0]),
                "requests": [event.request for _, event in ends[:MAX_REQUESTS]],  # latest first
                "detail": ends[0][1].cause,
            }
            for (peer, reason), ends in found.items()
        ]
        records.sort(key=lambda record: -record["num_loads"])
        return records[:MAX_LISTED]

    def story_lines(self, request: str, limit: int) -> list[str]:
        """The events of one request in at most `limit` lines, with seconds since the first."""
        story = self.story(request, exact=True)
        lines = [f"{when - story[0][0]:9.3f} s  {describe(event)}" for when, event in story]
        if len(lines) <= limit:
            return lines
        left_out = len(lines) - limit + 1  # one line counts them
        return [f"({left_out} earlier events)", *lines[left_out:]]


def _is_part(part: str, request: str) -> bool:
    # A cut id lacks its middle.
    return part in request or (len(request) == MAX_ID and part[:ID_START] in request)


def describe(event: events.Transition) -> str:
    states = f"{event.before} -> {event.after}" if event.before else event.after
    cause = f" ({event.cause})" if event.cause else ""
    num_bytes = f", {event.num_bytes} bytes" if event.num_bytes else ""
    subject = " ".join(filter(None, (event.request, event.peer)))
    return f"{subject}: {states}{cause}{num_bytes}"
