"""Errors and logging, which every module may use.

The type of an error says whose fault it is and what follows. A ConfigError stops the start.
IncompatiblePeer and RemoteProtocolError make the requests of that peer recompute. A TransportError
fails one transfer, a DigestError one comparison. A LocalProtocolError is a bug of ours.

Strangers can cause log lines and choose parts of them. Every module gets its logger from
`get_logger`, which escapes and cuts these texts. LimitedLog bounds the number of lines.
"""

import difflib
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Final

MAX_TEXT: Final = 2000  # characters of one argument of a log record
MAX_ID: Final = 128  # characters of a request's id
ID_END: Final = 24  # of them, its last ones
REQUEST_LINES: Final = 20
"""Lines per second about requests, for each reason: clients decide how many requests there are."""
MAX_TRACEBACK_LINES: Final = 200
MAX_KINDS: Final = 1000  # of lines that a LimitedLog tells apart
# A thread goes on after an error in its loop. A recurring error must not burn the CPU.
ERROR_PAUSE_S: Final = 0.1
# Between two equal log lines about a state that may last for hours; the second one has a count.
REPEATED_LOG_S: Final = 60.0


class NixlKVError(Exception):
    """Base of all errors below."""


class ConfigError(NixlKVError):
    """A bad configuration key or value. Names the key, the value and the allowed values."""


class IncompatiblePeer(NixlKVError):  # noqa: N818 - a fact about two engines, not a failure
    """Two engines that cannot exchange KV. Names each differing field and both values."""


class LocalProtocolError(NixlKVError):
    """Our own code asked a state machine for something that its state does not allow."""


class RemoteProtocolError(NixlKVError):
    """A peer or a client sent something that the protocol does not allow."""


TICKET_REASONS: Final = (
    *("malformed", "key", "version", "host", "role", "used", "prompt", "media", "weights"),
    *("not_offered", "other_connector"),
)


class TicketRefused(RemoteProtocolError):  # noqa: N818 - decode computes the request
    """Decode cannot use a ticket. `reason` is one of TICKET_REASONS."""

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class ForeignVersion(RemoteProtocolError):  # noqa: N818 - a fact about two engines, not a failure
    """A peer has another wire version. Names both versions."""


class TransportError(NixlKVError):
    """The data plane or the control plane failed."""


class PeerLost(TransportError):  # noqa: N818 - a fact about a peer, not a failure of ours
    """The peer's process or its connection is gone."""


class DigestError(NixlKVError):
    """This rank cannot digest KV."""


def get_logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.addFilter(_make_harmless)
    return logger


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the known name that is closest, and a space; or ''."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}? " if close else ""


class LimitedLog:
    """Logs some lines per format and interval, and counts the others."""

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float],
        *,
        interval_s: float = 1.0,
        lines: int = 1,
    ) -> None:
        """`clock` returns monotonic seconds; each interval has up to `lines`."""
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        self._lines = lines
        # End of the interval, and the lines that were asked for in it.
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def info(self, message: str, *args: object, about: str = "") -> bool:
        return self._write(logging.INFO, message, args, about)

    def warning(self, message: str, *args: object, about: str = "") -> bool:
        """Returns whether it wrote the line. `about` names a subject, which has its own lines."""
        return self._write(logging.WARNING, message, args, about)

    def error(self, message: str, *args: object, about: str = "") -> bool:
        return self._write(logging.ERROR, message, args, about)

    def _write(self, level: int, message: str, args: tuple[object, ...], about: str) -> bool:
        now, kind = self._clock(), (message, about)
        ends_at, number = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now >= ends_at:
            left_out = max(0, number - self._lines)
            ends_at, number = now + self._interval_s, 0
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
        self._kinds[kind] = ends_at, number + 1
        if number < self._lines:
            self._logger.log(level, message, *args)
        if left_out:
            self._logger.log(level, "  and %d more like it since the last such line", left_out)
        return number < self._lines


def run_guarded(step: Callable[[], object], error_message: str) -> bool:
    """Run one step of a thread's loop. Returns False after an error, which it has logged."""
    try:
        step()
    except Exception:
        _logger.critical(error_message, exc_info=True)
        time.sleep(ERROR_PAUSE_S)
        return False
    return True


def printable(text: str, limit: int | None = None) -> str:
    """Escape line ends and control characters, and cut the result to `limit` characters."""
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    is_cut = limit is not None and max(len(text), len(shown)) > limit
    return f"{shown[: limit - 3]}..." if limit is not None and is_cut else shown


def shown_id(request: str) -> str:
    """A request's id for logs and records, of at most MAX_ID characters: a client may choose it.

    A longer one keeps its end, because vLLM appends random digits there.
    """
    shown = printable(request[: MAX_ID + 1])
    if len(request) <= MAX_ID and len(shown) <= MAX_ID:
        return shown
    return f"{shown[: MAX_ID - ID_END - 3]}...{printable(request[-ID_END:])[-ID_END:]}"


def _make_harmless(record: logging.LogRecord) -> bool:
    """A logging filter that drops nothing, but escapes and cuts arguments and traceback."""
    # Formats are constants in our code. A peer, a client or a stranger may choose the arguments.
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
