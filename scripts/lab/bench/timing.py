"""Times of what is compared: in turn, so that whatever else the machine does slows them alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

FEWEST: Final = 3
"""Rounds of which there is a median."""


def medians(compared: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Of each step, after so many seconds for all of them; in seconds."""
    times: list[list[float]] = [[] for _ in compared]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < FEWEST:
        for step, its_times in zip(compared, times, strict=True):
            begin = time.perf_counter()
            step()
            its_times.append(time.perf_counter() - begin)
    return [statistics.median(its_times) for its_times in times]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Below 1 where ours are smaller: the median of the rounds, and where half of them lie."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"
