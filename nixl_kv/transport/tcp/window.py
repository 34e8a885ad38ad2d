"""How much to have under way over a link, by what it was measured to do.

A link holds what it moves in a round trip. To be never idle it needs that under way, and a piece
more, which it moves meanwhile. Both measures are of the last seconds: the best rate, since a slower
one had too little under way or was shared; the shortest time of a piece, since a longer one waited.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

MAX_PIECE_BYTES: Final = 1 << 20
MIN_PIECE_BYTES: Final = 64 << 10
FIRST_PIECE_BYTES: Final = 256 << 10
"""While nothing is known."""
MAX_STREAMS: Final = 16
MIN_STREAMS: Final = 2
"""One piece is always on its way while another is asked for."""
GAIN: Final = 2.0
"""So that a link which could do more shows it: the rate is at most what was under way."""
SHORTEST_S: Final = 0.001
"""A piece is at least what the link moves in so long: a shorter one costs the owner as much."""
PAUSE_SHARE: Final = 0.125
LONGEST_PAUSE_S: Final = 0.0005
REMEMBERED_S: Final = 30.0
LATEST_SHARE: Final = 0.125
"""Of a piece in the average of their lengths."""


class _Best:
    """The greatest of the values of the last seconds."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()  # (when, value), values falling

    def add(self, value: float, now: float) -> None:
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - REMEMBERED_S:
            self._values.popleft()

    @property
    def value(self) -> float | None:
        return self._values[0][1] if self._values else None


@dataclass(frozen=True)
class Begun:
    """A piece under way: when it was asked for, and the bytes that had arrived by then."""

    at: float
    arrived: int


@dataclass
class Window:
    """What was measured of one peer, and what follows. Times are in seconds, of any clock."""

    arrived: int = 0
    """Bytes, of all pieces together."""
    length: float = 0.0
    """Bytes of a piece, on average; of the last ones most: where runs are small it is theirs."""
    _rate: _Best = field(default_factory=_Best)
    _speed: _Best = field(default_factory=_Best)  # 1 / time of a piece

    def begin(self, now: float) -> Begun:
        """A piece is asked for."""
        return Begun(now, self.arrived)

    def end(self, begun: Begun, num_bytes: int, now: float, *, is_part: bool = True) -> None:
        """It is here. One that is no part of a longer read says nothing of the length of parts."""
        self.arrived += num_bytes
        if is_part:
            self.length += (num_bytes - self.length) * (LATEST_SHARE if self.length else 1.0)
        seconds = max(now - begun.at, 1e-6)
        self._speed.add(1 / seconds, now)
        self._rate.add((self.arrived - begun.arrived) / seconds, now)

    @property
    def rate(self) -> float | None:
        """Bytes per second, at best."""
        return self._rate.value

    @property
    def round_trip_s(self) -> float | None:
        """Of a piece, at best; that of the shortest."""
        speed = self._speed.value
        return None if speed is None else 1 / speed

    @property
    def pause_s(self) -> float:
        """How long not to look: what arrives meanwhile is taken at once, for less of the core."""
        return min((self.round_trip_s or 0.0) * PAUSE_SHARE, LONGEST_PAUSE_S)

    @property
    def piece_bytes(self) -> int:
        """How long a piece may be."""
        rate, round_trip_s = self.rate, self.round_trip_s
        if rate is None or round_trip_s is None:
            return FIRST_PIECE_BYTES
        held = rate * max(round_trip_s, SHORTEST_S)
        return min(max(int(held), MIN_PIECE_BYTES), MAX_PIECE_BYTES)

    @property
    def streams(self) -> int:
        """How many pieces may be under way, each in a stream of its own."""
        rate, round_trip_s = self.rate, self.round_trip_s
        if rate is None or round_trip_s is None:
            return MIN_STREAMS
        held = GAIN * rate * round_trip_s
        wanted = 1 + math.ceil(held / min(self.length or math.inf, self.piece_bytes))
        return min(max(wanted, MIN_STREAMS), MAX_STREAMS)
