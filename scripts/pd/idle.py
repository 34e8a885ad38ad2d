"""CPU time of engines that have nothing to do."""

import contextlib
import time
from collections.abc import Sequence

import psutil

from pd.client import Client
from pd.cluster import Cluster, say_on_stderr
from pd.prompts import random_prompt

REQUESTS = 5
PROMPT_TOKENS = 300
# While a prefill engine holds blocks for a reader, vLLM itself steps all the time. Blocks that
# nobody fetched are given up after some seconds: only then does what is left belong to idleness.
SETTLE_S = 12.0
IDLE_S = 10.0


def measure_idle(cluster: Cluster, urls: Sequence[str]) -> float:
    """Percent of one core that the cluster's engines take, after a few requests to each URL."""
    for url in urls:
        with Client(url) as client:
            for seed in range(REQUESTS):
                client.complete(random_prompt(PROMPT_TOKENS, seed))
    say_on_stderr(f"waiting {SETTLE_S:.0f} s, then measuring {IDLE_S:.0f} s")
    time.sleep(SETTLE_S)
    pids = [engine.pid for engine in cluster.engines]
    before, begin = cpu_seconds(pids), time.monotonic()
    time.sleep(IDLE_S)
    return 100 * (cpu_seconds(pids) - before) / (time.monotonic() - begin)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of these processes and all their descendants."""
    total = 0.0
    for pid in pids:
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total
