"""How many bytes to keep in flight to a peer, from measurements of the last seconds.

A link holds rate * round trip bytes. To keep it busy, that many bytes have to be in flight, and one
piece more, which the link moves in the meantime. The rate is the best of the last seconds, because
a lower one had too little in flight or shared the link. The round trip is the shortest, because a
longer one waited in a queue.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

MAX_PIECE_BYTES: Final = 1 << 20  # fits into one TCP segment of UCX (2 MiB) with room to spare
MIN_PIECE_BYTES: Final = 64 << 10
FIRST_PIECE_BYTES: Final = 256 << 10  # before anything was measured
MAX_STREAMS: Final = 16
MIN_STREAMS: Final = 2  # one piece travels while the next is requested
# Keep more in flight than was measured: the measured rate cannot exceed the bytes in flight.
GAIN: Final = 2.0
# A piece has at least the bytes of this time: a shorter one costs the owner as much CPU time.
SHORTEST_S: Final = 0.001
PAUSE_SHARE: Final = 0.125
LONGEST_PAUSE_S: Final = 0.0005
REMEMBERED_S: Final = 30.0
LATEST_SHARE: Final = 0.125  # weight of the latest piece in the average length


class _Best:
    """The greatest value of the last seconds."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()  # (time, value), values falling

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
    """When a piece was requested, and how many bytes of others had arrived by then."""

    at: float
    arrived: int


@dataclass
class Window:
    """Measurements of one peer, and the pieces and streams that follow from them.

    Times are in seconds of any clock.
    """

    arrived: int = 0  # bytes of all pieces together
    length: float = 0.0  # average bytes of a piece; small runs make short pieces
    _rate: _Best = field(default_factory=_Best)  # bytes per second
    _speed: _Best = field(default_factory=_Best)  # 1 / seconds of a piece

    def begin(self, now: float) -> Begun:
        return Begun(now, self.arrived)

    def end(self, begun: Begun, num_bytes: int, now: float, *, is_part: bool = True) -> None:
        """Record a completed piece; the average length is of parts of longer reads only."""
        self.arrived += num_bytes
        if is_part:
            self.length += (num_bytes - self.length) * (LATEST_SHARE if self.length else 1.0)
        seconds = max(now - begun.at, 1e-6)
        self._speed.add(1 / seconds, now)
        self._rate.add((self.arrived - begun.arrived) / seconds, now)

    @property
    def rate(self) -> float | None:
        return self._rate.value

    @property
    def round_trip_s(self) -> float:
        """Shortest time of a piece; 0 before anything was measured."""
        speed = self._speed.value
        return 1 / speed if speed else 0.0

    @property
    def pause_s(self) -> float:
        """How long to wait between polls: one poll takes a system call per stream."""
        return min(self.round_trip_s * PAUSE_SHARE, LONGEST_PAUSE_S)

    @property
    def piece_bytes(self) -> int:
        if self.rate is None:
            return FIRST_PIECE_BYTES
        held = self.rate * max(self.round_trip_s, SHORTEST_S)
        return min(max(int(held), MIN_PIECE_BYTES), MAX_PIECE_BYTES)

    @property
    def streams(self) -> int:
        """How many pieces may be in flight, each in a stream of its own."""
        if self.rate is None:
            return MIN_STREAMS
        held = GAIN * self.rate * self.round_trip_s
        wanted = 1 + math.ceil(held / min(self.length or math.inf, self.piece_bytes))
        return min(max(wanted, MIN_STREAMS), MAX_STREAMS)
