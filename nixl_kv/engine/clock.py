"""A clock that stands still while its loop should run but does not.

A busy machine, or a debugger, can stop the transfer thread for a long time: 25 s were seen beside
busy loops. Its peers' answers wait in its sockets meanwhile. So the thread must not call a peer
late before it has run for that time itself.
"""

import math
import time
from collections.abc import Callable
from threading import get_ident
from typing import Final

# A turn of the transfer thread that does not run no longer counts toward its timeouts. It may wait
# for a device or a lock, and does run then.
MAX_GAP_S: Final = 1.0


class LoopClock:
    """Monotonic seconds, without the gaps in which the loop did not run. For the loop's thread.

    A gap is time after the end of a wait, or after a turn began, in which the thread did no work.
    Of each gap, the first `max_gap_s` seconds count. Another thread may call the clock as well.
    Threads' computing times differ, so a gap that ends in another thread's call counts whole.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_gap_s: float = MAX_GAP_S,
        work: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._max_gap_s = max_gap_s
        self._work = work
        self._left_out = 0.0  # seconds
        self._due = clock()  # since when the thread should be running
        self._worked = work()  # seconds of computing time of `_thread` until then
        self._thread = get_ident()

    def __call__(self) -> float:
        now, worked, thread = self._clock(), self._work(), get_ident()
        gap_s = now - self._due - (worked - self._worked)
        if gap_s > self._max_gap_s and thread == self._thread:
            self._left_out += gap_s - self._max_gap_s
        self._due, self._worked, self._thread = now, worked, thread
        return now - self._left_out

    def begin_wait(self, wait_s: float | None) -> None:
        """The thread waits for so long; None: without a limit."""
        self()
        self._due = math.inf if wait_s is None else self._due + wait_s

    def end_wait(self) -> None:
        """The thread runs."""
        self()

    def keep_up(self) -> None:
        """In a simulation: the loop could have run until now."""
        self._due = max(self._due, self._clock())
