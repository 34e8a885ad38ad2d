"""Medians of times, ratios of what was measured in turn, and CPU time."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

FEWEST: Final = 3
"""Rounds of which there is a median."""


def median_time(step: Callable[[], object], seconds: float) -> float:
    """Of a step that is repeated for so many seconds; in seconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < FEWEST:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def cpu_share(seconds: float) -> float:
    """Of a core, for so many seconds: what all other threads of this process use."""
    before, begin = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - before) / (time.monotonic() - begin)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Below 1 where ours are smaller: the median of the rounds, and where half of them lie."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def share(ceiling: Sequence[float], ours: Sequence[float]) -> float:
    """How much of the ceiling's speed ours reaches: the median of the rounds' ratios of times."""
    return statistics.median(best / one for best, one in zip(ceiling, ours, strict=True))
