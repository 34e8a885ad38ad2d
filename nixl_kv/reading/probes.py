"""First reads of a rank that tell how fast its link is: what they read is thrown away.

One short piece, many short ones, and some long ones, until these take long enough to tell: so what
a read costs, a run, and a byte. No more than about a millisecond each, but where a link is slow.
"""

from typing import Final

import numpy as np

from nixl_kv.geometry.layout import CacheLayout, Span
from nixl_kv.transport.base import Indices, Rows

SHORT_BYTES: Final = 1 << 10
NUM_SHORT: Final = 1 << 8
"""To post them takes up to a millisecond, in which the transfer thread does nothing else."""
LONG_BYTES: Final = 1 << 20
NUM_LONG: Final = 8
GROWTH: Final = 4
MOST_LONG: Final = NUM_LONG * GROWTH**2
LONG_S: Final = 1e-3
"""Many looks at a read: then it does not count when the last one was."""

NUM_SINGLE: Final = 3
"""The first one does not count: it may be the first use of that memory."""
NUM_MANY: Final = 2
NUM_LAST: Final = 2
"""Of long ones that take long enough."""


class Prober:
    """The reads of one rank, one after the other, and what they tell."""

    def __init__(self, layout: CacheLayout, remote: CacheLayout, scratch: Span) -> None:
        """Read the rank's longest registered memory into `scratch`, one piece over the other.

        Pieces are apart on the other side, so that each is a run.

        Raises:
            ValueError: if that memory is too short to tell anything.
        """
        span = max(remote.spans, key=lambda each: each.length)
        if span.length < 2 * NUM_LONG * LONG_BYTES or scratch.length < LONG_BYTES:
            raise ValueError(f"its longest memory has {span.length} bytes")
        shapes = ((SHORT_BYTES, NUM_SHORT), (LONG_BYTES, NUM_LONG))
        here = [(scratch.address, length, layout.device, length, 1) for length, _ in shapes]
        there = [
            (span.address, length, remote.device, span.length // count, count)
            for length, count in shapes
        ]
        self.rows: tuple[Rows, Rows] = np.array(here, np.uint64), np.array(there, np.uint64)
        self._singles: list[float] = []
        self._many: list[float] = []
        self._long: list[float] = []
        self._num_long = NUM_LONG

    @property
    def next(self) -> tuple[Indices, Indices] | None:
        """The pieces of the next read, local and remote; None where all is known."""
        if len(self._singles) < NUM_SINGLE:
            return _pieces(0, np.zeros(1, dtype=np.int32))
        if len(self._many) < NUM_MANY:
            return _pieces(0, np.arange(NUM_SHORT, dtype=np.int32))
        if len(self._long) == NUM_LAST:
            return None
        long = np.arange(self._num_long, dtype=np.int32) % NUM_LONG + NUM_SHORT
        return _pieces(1, long.astype(np.int32))

    def on_end(self, seconds: float) -> None:
        """The next one has ended, after so long."""
        if len(self._singles) < NUM_SINGLE:
            self._singles.append(seconds)
        elif len(self._many) < NUM_MANY:
            self._many.append(seconds)
        elif not self._long and seconds < LONG_S and self._num_long < MOST_LONG:
            self._num_long *= GROWTH
        else:
            self._long.append(seconds)

    @property
    def costs(self) -> tuple[float, float, float] | None:
        """Seconds of a read, of a run, of a byte; None if that cannot be."""
        single, many, long = min(self._singles[1:]), min(self._many), min(self._long)
        runs = [NUM_SHORT - 1, self._num_long - 1]
        num_bytes = [(NUM_SHORT - 1) * SHORT_BYTES, self._num_long * LONG_BYTES - SHORT_BYTES]
        more = [many - single, long - single]
        run, byte = np.linalg.solve(np.array([runs, num_bytes], dtype=float).T, more).tolist()
        start = single - run - SHORT_BYTES * byte
        return (start, run, byte) if min(start, run, byte) > 0 else None


def _pieces(row: int, remote: Indices) -> tuple[Indices, Indices]:
    """On this side all are the one piece of a row."""
    return np.full(len(remote), row, dtype=np.int32), remote
