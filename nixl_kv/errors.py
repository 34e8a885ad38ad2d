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
MAX_TRACEBACK_LINES: Final = 200
MAX_KINDS: Final = 1000  # of lines that a LimitedLog tells apart
PAUSE_S: Final = 0.1
"""Pause after an error in a thread's loop, so that a recurring error does not burn the CPU."""


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
    """Logs one warning per format and interval, and counts the others."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float], *, interval_s: float = 1.0
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        # Time of the next line, and lines left out.
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def warning(self, message: str, *args: object, about: str = "") -> None:
        """`about` tells subjects apart, each of which gets lines of its own."""
        now, kind = self._clock(), (message, about)
        next_at, left_out = self._kinds.get(kind, (now, 0))
        if now < next_at:
            self._kinds[kind] = next_at, left_out + 1
            return
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = now + self._interval_s, 0
        self._logger.warning(message, *args)
        if left_out:
            self._logger.warning("  and %d more like it since the last such line", left_out)


def run_guarded(step: Callable[[], object], error_message: str) -> bool:
    """Run one step of a thread's loop. Returns False after an error, which it has logged."""
    try:
        step()
    except Exception:
        _logger.critical(error_message, exc_info=True)
        time.sleep(PAUSE_S)
        return False
    return True


def printable(text: str, limit: int | None = None) -> str:
    """Escape line ends and control characters, and cut the result to `limit` characters."""
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    is_cut = limit is not None and max(len(text), len(shown)) > limit
    return f"{shown[: limit - 3]}..." if limit is not None and is_cut else shown


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
