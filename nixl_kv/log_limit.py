"""Limits what strangers can cause in a log: the number of lines, their length, their characters."""

import logging
import time
import traceback
from collections.abc import Callable
from typing import Final

MAX_TEXT: Final = 2000
"""Characters of one argument of a log line; a peer, a client or a stranger may have chosen it."""

MAX_TRACEBACK_LINES: Final = 200

PAUSE_S: Final = 0.1
"""Pause after an error in a thread's loop, so that a recurring error does not burn the CPU."""


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; each of its records is one printable line of bounded length.

    All modules of this package log through it. Their formats are constants; whatever is filled in
    may come from outside, so it is escaped and cut. Tracebacks follow as indented lines.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_make_harmless)
    return logger


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


def run_guarded(step: Callable[[], object], error_message: str) -> bool:
    """Run one step of a thread's loop.

    Returns:
        False after an error, which is logged with its traceback below `error_message`.
    """
    try:
        step()
    except Exception:
        _logger.critical(error_message, exc_info=True)
        time.sleep(PAUSE_S)
        return False
    return True


def printable(text: str, limit: int | None = None) -> str:
    """The text with escapes for line ends and whatever a terminal would obey.

    If the result has more than `limit` characters, it is cut and ends in "...".
    """
    is_cut = limit is not None and len(text) > limit
    text = text[:limit]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if limit is not None and (is_cut or len(text) > limit):
        text = text[: limit - 3] + "..."
    return text


def _make_harmless(record: logging.LogRecord) -> bool:
    """A filter that lets every record pass, with texts that are escaped and cut."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            arg if isinstance(arg, int | float) else printable(str(arg), MAX_TEXT)
            for arg in record.args
        )
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        lines = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
        record.exc_text = "\n".join(
            f"  {printable(line, MAX_TEXT)}" for line in lines[-MAX_TRACEBACK_LINES:]
        )
    return True


_logger = get_logger(__name__)
