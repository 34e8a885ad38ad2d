"""The failures of the last hour, by peer and reason, for `nixl-kv status`.

Counting takes about a microsecond. Memory is bounded, because a client may invent peers.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from nixl_kv.errors import printable
from nixl_kv.protocol.messages import MAX_LISTED

MINUTE_S: Final = 60
KEPT_MIN: Final = 60
RECENT_MIN: Final = 10
MAX_KINDS: Final = 256  # pairs of a peer and a reason; the one that is longest ago goes first
MAX_DETAIL: Final = 300  # characters, because a peer may have written part of it


@dataclass
class _Kind:
    minutes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_MIN))
    """Each minute with at least one fault, and the number of faults in it."""
    latest_at: float = 0.0  # seconds since the epoch
    detail: str = ""  # of the latest


class History:
    """One thread counts, and another may list. `clock` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def count(self, reason: str, *, peer: str = "", detail: str = "") -> None:
        now = self._clock()
        minute = int(now // MINUTE_S)
        kind = self._kinds.pop((peer, reason), None) or _Kind()
        self._kinds[peer, reason] = kind  # the latest is the last
        earlier = kind.minutes.pop()[1] if kind.minutes and kind.minutes[-1][0] == minute else 0
        kind.minutes.append((minute, earlier + 1))
        kind.latest_at, kind.detail = now, printable(detail, MAX_DETAIL)
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def listed(self) -> list[dict[str, Any]]:
        """The faults of the last hour, most frequent first, as records of a `Status`."""
        now = self._clock()
        minute = int(now // MINUTE_S)
        found: list[dict[str, Any]] = []
        for (peer, reason), kind in self._kinds.copy().items():
            counts = kind.minutes.copy()
            last_hour = sum(count for when, count in counts if when > minute - KEPT_MIN)
            recent = sum(count for when, count in counts if when > minute - RECENT_MIN)
            if last_hour:
                found.append(
                    {
                        "peer": peer,
                        "reason": reason,
                        "num_last_10_min": recent,
                        "num_last_hour": last_hour,
                        "latest_ago_s": max(0.0, now - kind.latest_at),
                        "detail": kind.detail,
                    }
                )
        found.sort(key=lambda record: -record["num_last_hour"])
        return found[:MAX_LISTED]
