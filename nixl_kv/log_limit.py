"""What strangers can cause in a log at will is limited: in lines, in length and in characters."""

import logging
from collections.abc import Callable


class LimitedLog:
    """Logs one warning of each kind, named by its format, per interval; the rest is counted."""

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
        """Log it, or count it for the next time."""
        now = self._clock()
        if now < self._next.get(message, now):
            self._left_out[message] = self._left_out.get(message, 0) + 1
            return
        self._next[message] = now + self._interval_s
        left_out = self._left_out.pop(message, 0)
        self._logger.warning(message, *args)
        if left_out:
            self._logger.warning("  and %d more like it since the last such line", left_out)


def printable(text: str, limit: int | None = None) -> str:
    """The text with escapes for line ends and whatever a terminal would obey.

    Of a text that is longer than `limit` characters the begin, and "..." for the rest.
    """
    if limit is not None and len(text) > limit:
        text = text[: limit - 3] + "..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
