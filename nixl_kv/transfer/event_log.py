"""What happened on one rank, per request: every transition of the machines, the last 10,000.

It is always on: an event costs about a microsecond (`scripts/bench events`), and nothing happens
without one.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from nixl_kv.protocol.events import OVER, Transition
from nixl_kv.protocol.messages import EventRecord

logger = logging.getLogger(__name__)

KEPT: Final = 10_000


class EventLog:
    """Keeps transitions in order. At DEBUG each is also logged as it happens."""

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = KEPT) -> None:
        """`clock` is in seconds since the epoch; `kept` is how many transitions are kept."""
        self._clock = clock
        self._events: deque[tuple[float, Transition]] = deque(maxlen=kept)

    def __len__(self) -> int:
        """How many transitions are kept."""
        return len(self._events)

    @property
    def since(self) -> float | None:
        """When the oldest transition that is kept happened."""
        return self._events[0][0] if self._events else None

    def record(self, transition: Transition) -> None:
        """Keep a transition."""
        self._events.append((self._clock(), transition))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", describe(transition))

    def story(self, request: str, *, exact: bool = False) -> list[EventRecord]:
        """What happened to the requests whose id is, or contains, this text; oldest first.

        What happened meanwhile to the engines that they read from is part of it.
        """
        events = list(self._events)

        def is_wanted(transition: Transition) -> bool:
            name = transition.request
            return bool(name) and (name == request if exact else request in name)

        wanted = [number for number, (_, transition) in enumerate(events) if is_wanted(transition)]
        if not wanted:
            return []
        latest = {events[number][1].request: events[number][1] for number in wanted}
        are_over = all(_is_end(transition) for transition in latest.values())
        end = wanted[-1] + 1 if are_over else len(events)
        peers = {events[number][1].peer for number in wanted}
        return [
            EventRecord(time=when, **transition._asdict())
            for when, transition in events[wanted[0] : end]
            if is_wanted(transition) or (not transition.request and transition.peer in peers)
        ]

    def story_lines(self, request: str, limit: int) -> list[str]:
        """The story in at most so many lines, each with the seconds since its begin."""
        lines = story_text(self.story(request, exact=True))
        if len(lines) <= limit:
            return lines
        left_out = len(lines) - limit + 1  # one line says so
        return [f"({left_out} earlier events)", *lines[left_out:]]


def _is_end(transition: Transition) -> bool:
    """Whether an offer or a load is over with it; what a load reads from one rank may fail too."""
    is_load = transition.before in ("PREPARED", "STARTED")
    return transition.after == OVER or (is_load and transition.after in ("LOADED", "FAILED"))


def story_text(story: list[EventRecord]) -> list[str]:
    """One line for each event, with the seconds since the first."""
    begin = story[0].time if story else 0.0
    return [f"{event.time - begin:9.3f} s  {describe(event)}" for event in story]


def describe(event: Transition | EventRecord) -> str:
    """A transition in words."""
    states = f"{event.before} -> {event.after}" if event.before else event.after
    cause = f" ({event.cause})" if event.cause else ""
    num_bytes = f", {event.num_bytes} bytes" if event.num_bytes else ""
    subject = " ".join(filter(None, (event.request, event.peer)))
    return f"{subject}: {states}{cause}{num_bytes}"
