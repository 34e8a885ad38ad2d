"""Errors and logging, which every module may use.

The type of an error says whose fault it is and what happens next. A ConfigError stops the start.
IncompatiblePeer and RemoteProtocolError make the requests of that peer recompute. A TransportError
fails one transfer, a DigestError one comparison. A LocalProtocolError is a bug of ours.

Strangers can influence what an engine logs. So every module gets its logger from `get_logger`,
which bounds the length of records and escapes their text, and LimitedLog bounds their number.
"""

import logging
import time
import traceback
from collections.abc import Callable
from typing import Final

MAX_TEXT: Final = 2000
"""Characters of one argument of a log record. A peer, a client or a stranger may have chosen it."""

MAX_TRACEBACK_LINES: Final = 200

PAUSE_S: Final = 0.1
"""Pause after an error in a thread's loop, so that a recurring error does not burn the CPU."""


class NixlKVError(Exception):
    """Base of all errors below. A ValueError means that an argument is impossible."""


class ConfigError(NixlKVError):
    """A bad configuration key or value. Names the key, the value and what is allowed."""


class IncompatiblePeer(NixlKVError):  # noqa: N818 - a fact about two engines, not a failure
    """Two engines that cannot exchange KV. Names each differing field and both values."""


class LocalProtocolError(NixlKVError):
    """Our own code asked a state machine for something that its state does not allow."""


class RemoteProtocolError(NixlKVError):
    """A peer or a client sent something that the protocol does not allow."""


class ForeignVersion(RemoteProtocolError):  # noqa: N818 - a fact about two engines, not a failure
    """A peer or a ticket has another wire version. Names both versions."""


class TransportError(NixlKVError):
    """The data plane or the control plane failed."""


class PeerLost(TransportError):  # noqa: N818 - a fact about a peer, not a failure of ours
    """The peer's process or its connection is gone."""


class DigestError(NixlKVError):
    """This rank cannot digest KV."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module. Each of its records is printable and of bounded length.

    Formats are constants in our code; their arguments may come from outside, so they are escaped
    and cut. Tracebacks follow as indented lines.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_make_harmless)
    return logger


class LimitedLog:
    """Logs one warning per format and interval, and counts the others."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float], *, interval_s: float = 1.0
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, message: str, *args: object) -> None:
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
        False after an error. Its traceback is logged below `error_message`.
    """
    try:
        step()
    except Exception:
        _logger.critical(error_message, exc_info=True)
        time.sleep(PAUSE_S)
        return False
    return True


def printable(text: str, limit: int | None = None) -> str:
    """Escape line ends and control characters, which a terminal or a log reader would obey.

    A result of more than `limit` characters is cut and ends in "...".
    """
    is_cut = limit is not None and len(text) > limit
    text = text[:limit]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if limit is not None and (is_cut or len(text) > limit):
        text = text[: limit - 3] + "..."
    return text


def _make_harmless(record: logging.LogRecord) -> bool:
    """Escape and cut a record's arguments and traceback; a logging filter that drops nothing."""
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
