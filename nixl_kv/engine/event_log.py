"""What happened on one rank, per request: every transition of the machines, the last 10,000.

It is always on: an event costs about two microseconds (`scripts/bench events`), and nothing happens
without one. Events are kept by request and by peer, so that a story costs what is in it.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from nixl_kv.log_limit import get_logger, printable
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import MAX_LISTED

logger = get_logger(__name__)

KEPT: Final = 10_000
MAX_CAUSE: Final = 300
"""Characters of a cause that are kept: part of it may be a peer's text."""


_Event: TypeAlias = tuple[int, float, events.Transition]
"""Its number, which counts all events; its time; and what changed."""


class EventLog:
    """See the module's head."""

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = KEPT) -> None:
        """`clock` is in seconds since the epoch; `kept` is how many transitions are kept."""
        self._clock = clock
        self._kept = kept
        self._count = 0
        self._of_request: dict[str, deque[_Event]] = {}
        self._of_peer: dict[str, deque[_Event]] = {}  # what concerns no single request
        self._order: deque[deque[_Event]] = deque()  # in which of them each event is, oldest first

    def __len__(self) -> int:
        return len(self._order)

    @property
    def since(self) -> float | None:
        """When the oldest event was that is kept."""
        return self._order[0][0][1] if self._order else None

    def record(self, transition: events.Transition) -> None:
        """Keep a transition."""
        cause = transition.cause
        if len(cause) > MAX_CAUSE or not cause.isprintable():
            transition = transition._replace(cause=printable(cause, MAX_CAUSE))
        kept, name = self._of_request, transition.request
        if not name:
            kept, name = self._of_peer, transition.peer
        same = kept.get(name)
        if same is None:
            same = kept[name] = deque()
        self._count += 1
        same.append((self._count, self._clock(), transition))
        self._order.append(same)
        if len(self._order) > self._kept:
            self._forget_oldest()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", describe(transition))

    def story(
        self, request: str, *, exact: bool = False, limit: int = MAX_LISTED
    ) -> list[tuple[float, events.Transition]]:
        """What happened to the requests whose id is, or contains, this text; oldest first.

        What happened meanwhile to the engines that they read from is part of it. Of more than
        `limit` events it has the last ones.
        """
        if exact or not request:
            names = [request] if request in self._of_request else []
        else:
            names = [name for name in self._of_request if request in name]
        own = sorted(event for name in names for event in self._of_request[name])
        if not own:
            return []
        are_over = all(_is_end(self._of_request[name][-1][2]) for name in names)
        begin, end = own[0][0], own[-1][0] if are_over else math.inf
        for peer in {transition.peer for _, _, transition in own}:
            own += [event for event in self._of_peer.get(peer, ()) if begin < event[0] < end]
        return [(when, transition) for _, when, transition in sorted(own)[-limit:]]

    def story_lines(self, request: str, limit: int) -> list[str]:
        """The story in at most so many lines, each with the seconds since its begin."""
        story = self.story(request, exact=True)
        lines = [f"{when - story[0][0]:9.3f} s  {describe(event)}" for when, event in story]
        if len(lines) <= limit:
            return lines
        left_out = len(lines) - limit + 1  # one line says so
        return [f"({left_out} earlier events)", *lines[left_out:]]

    def _forget_oldest(self) -> None:
        """The oldest of all events is the oldest of its request, or of its peer."""
        same = self._order.popleft()
        _, _, transition = same.popleft()
        if not same and transition.request:
            del self._of_request[transition.request]
        elif not same:
            del self._of_peer[transition.peer]


def _is_end(transition: events.Transition) -> bool:
    """Whether an offer or a load is over with it; what a load reads from one rank may fail too."""
    is_load = transition.before in ("PREPARED", "STARTED")
    return transition.after == events.OVER or (is_load and transition.after in ("LOADED", "FAILED"))


def describe(event: events.Transition) -> str:
    """A transition in words."""
    states = f"{event.before} -> {event.after}" if event.before else event.after
    cause = f" ({event.cause})" if event.cause else ""
    num_bytes = f", {event.num_bytes} bytes" if event.num_bytes else ""
    subject = " ".join(filter(None, (event.request, event.peer)))
    return f"{subject}: {states}{cause}{num_bytes}"
