"""A log for what strangers can cause at will: one line of a kind per interval, the rest counted."""

import logging
from collections.abc import Callable


class LimitedLog:
    """Logs one warning of each kind, named by its format, per interval."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float], *, interval_s: float = 1.0
    ) -> None:
        """`clock` is in monotonic seconds."""
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, message: str, *args: object) -> None:
        """Log it, or count it."""
        now = self._clock()
        if now < self._next.get(message, now):
            self._left_out[message] = self._left_out.get(message, 0) + 1
            return
        self._next[message] = now + self._interval_s
        left_out = self._left_out.pop(message, 0)
        self._logger.warning(message, *args)
        if left_out:
            self._logger.warning("  and %d more like it since the last such line", left_out)
