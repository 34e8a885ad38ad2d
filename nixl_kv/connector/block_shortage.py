"""Whether a request waits for blocks while nothing moves: then offers have to give theirs back.

Offers that decode has claimed slow prefill down until they are read, which is as it should be. But
two engines that prefill for each other may each hold what the other one waits for.
"""

import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 1.0
"""How long a request waits while no request gets blocks, and no offer ends."""


class BlockShortage:
    """Sees the scheduler's questions, step by step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nobody waiting. `clock` is in monotonic seconds."""
        self._clock = clock
        self._needed = 0  # of the request that waits in this step; 0 for none
        self._still_since: float | None = None  # while one waits

    def on_question(self, num_blocks: int) -> None:
        """The scheduler would run a request, if there are so many blocks."""
        self._needed = num_blocks

    def on_progress(self) -> None:
        """That request has its blocks, or others have come free."""
        self._needed = 0
        self._still_since = None

    def pop_needed(self) -> int:
        """At the end of each step: how many blocks must come free; 0 while there is patience."""
        needed, self._needed = self._needed, 0
        if not needed:
            self._still_since = None
            return 0
        now = self._clock()
        if self._still_since is None:
            self._still_since = now
        if now < self._still_since + PATIENCE_S:
            return 0
        self._still_since = now
        return needed
