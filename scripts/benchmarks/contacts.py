"""Time the first request of fresh pairs of engines, answered early and one leg after the other.

Each round starts new engines with `overlap`. Every decode engine then meets every prefill engine
once, in random order, early and serial in turn; no other request runs meanwhile. A process with
high priority watches the machine: "gap ms" is the longest time for which it did not run during a
request. "most ms" is the slowest request, "most without gap ms" the slowest one beside which it saw
no gap. All times are from the request to prefill until decode's first token.
"""

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

from typing_extensions import Self

from benchmarks import engines
from benchmarks.floor import prompt
from benchmarks.shapes import Row
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.metrics import LOADS, CountersSince
from harness.cluster.pair import Pair

WAYS: Final = ("early", "serial")
GAP_S: Final = 0.25

WATCH: Final = f"""
import os, time
try:
    os.nice(-15)
except PermissionError:
    pass
last = time.monotonic()
while True:
    time.sleep(0.05)
    now = time.monotonic()
    if now - last > {GAP_S}:
        print(last, now, flush=True)
    last = now
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and their number."""
    engines.add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefills", type=int, default=2, help="in each round")
    parser.add_argument("--decodes", type=int, default=5, help="in each round")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)


class Monitor(AbstractContextManager["Monitor"]):
    """Notes when nothing with a normal priority can have run."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", WATCH], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def longest(self, begin: float, end: float) -> float:
        """The longest gap that overlaps this time, in seconds; 0 for none."""
        gaps = [until - since for since, until in self._gaps if since < end and until > begin]
        return max(gaps, default=0.0)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            since, until = map(float, line.split())
            self._gaps.append((since, until))


@dataclass(frozen=True)
class Contact:
    """The first request of a pair. Times are in seconds."""

    way: str
    seconds: float
    gap: float
    is_loaded: bool


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each way."""
    contacts: list[Contact] = []
    ways = itertools.cycle(WAYS)
    with Monitor() as monitor:
        for number in range(options.rounds):
            seed = f"{options.seed}/{number}"
            with Cluster(warm=False, start_timeout_s=engines.START_TIMEOUT_S) as cluster:
                started = cluster.start(*specs_of(options))
                contacts += meet(started, options, seed, ways, monitor)
    yield from (row_of(way, [each for each in contacts if each.way == way]) for way in WAYS)


def specs_of(options: argparse.Namespace) -> list[EngineSpec]:
    pair = [engines.with_overlap(each) for each in engines.pair_of("nixl-kv", options)]
    counts = options.prefills, options.decodes
    return [
        replace(spec, name=f"{spec.name}-{number}", gpu_memory_utilization=0.8 / count)
        for spec, count in zip(pair, counts, strict=True)
        for number in range(count)
    ]


def meet(
    started: list[Engine],
    options: argparse.Namespace,
    seed: str,
    ways: Iterator[str],
    monitor: Monitor,
) -> Iterator[Contact]:
    prefills, decodes = started[: options.prefills], started[options.prefills :]
    for engine in started:  # the measurement excludes an engine's own first steps
        with Pair(engine, engine) as alone:
            alone.to_decode.complete(prompt(options.tokens, f"{seed}/{engine.name}"), 2)
    pairs = list(itertools.product(prefills, decodes))
    random.Random(seed).shuffle(pairs)  # noqa: S311 - the same each time
    for number, (prefill, decode) in enumerate(pairs):
        tokens, way = prompt(options.tokens, f"{seed}/{number}"), next(ways)
        with Pair(prefill, decode) as pair:
            since = CountersSince(pair.to_decode)
            begin = time.monotonic()
            # Prefill does not answer a request for log probabilities early.
            logprobs = None if way == "early" else 0
            ticket, _ = pair.to_prefill.timed_ticket(tokens, logprobs=logprobs)
            pair.decode_with(ticket, tokens, 1, logprobs=None)
            end = time.monotonic()
            is_loaded = since.wait_for(LOADS, 1)[LOADS] == 1
        contact = Contact(way, end - begin, monitor.longest(begin, end), is_loaded)
        print(contact, file=sys.stderr, flush=True)
        yield contact


def row_of(way: str, contacts: list[Contact]) -> dict[str, Any]:
    undisturbed = [each.seconds for each in contacts if not each.gap]
    return {
        "way": way,
        "pairs": len(contacts),
        "loaded": sum(each.is_loaded for each in contacts),
        "median ms": statistics.median(each.seconds for each in contacts) * 1e3,
        "most ms": max(each.seconds for each in contacts) * 1e3,
        "gaps": len(contacts) - len(undisturbed),
        "longest gap ms": max(each.gap for each in contacts) * 1e3,
        "most without gap ms": max(undisturbed, default=0.0) * 1e3,
    }
