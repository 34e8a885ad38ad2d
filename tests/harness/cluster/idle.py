"""CPU time of engines that have nothing to do."""

import contextlib
import time
from collections.abc import Sequence
from typing import Final

import psutil

from harness.cluster.cluster import say
from harness.cluster.engines import Engine

SETTLE_S: Final = 12.0
"""While a prefill engine holds blocks for a reader, vLLM itself steps all the time. Blocks that
have no reader are given up after some seconds. Only then is the engine idle."""
IDLE_S: Final = 10.0


def measure_idle(engines: Sequence[Engine]) -> float:
    """Percent of one core that the engines use once they hold nothing."""
    say(f"waiting {SETTLE_S:.0f} s, then measuring {IDLE_S:.0f} s")
    time.sleep(SETTLE_S)
    before, begin = cpu_seconds(engines), time.monotonic()
    time.sleep(IDLE_S)
    return 100 * (cpu_seconds(engines) - before) / (time.monotonic() - begin)


def cpu_seconds(engines: Sequence[Engine]) -> float:
    """User and system time of all processes of these engines."""
    total = 0.0
    for engine in engines:
        for process in engine.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total
