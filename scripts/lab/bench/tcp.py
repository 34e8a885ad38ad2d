"""How fast is a read over TCP between two hosts, beside what one bulk stream moves there?

The hosts are network namespaces, joined by a wire that delays packets and holds them to a rate
(`lab.cluster.netns`). In each round, in an order that is drawn: one plain TCP stream of so many
bytes, from the byte that asks for it to the last of them; the same bytes read by nixl_kv as it is
by default; and by NIXL as vLLM's in-tree connector sets it up (its progress thread, 4 threads, no
pacing). Runs are read in random order, so that none merge.

A share is a round's rate to that of its bulk stream: the median, and where half of the rounds lie.
The wire is a program on this machine: what bulk moves says what it does at most. Needs root.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from lab.bench.tcp_ways import BULK, OWNERS, Order, run_owner, run_reader
from lab.bench.timing import ratio
from lab.cluster.netns import Namespace, Quality, Wire
from lab.results import Figures, Results

ROUND_TRIPS_MS: Final = (0.1, 1.0, 10.0)
RATES_GBIT: Final = (1.0, 10.0)
WARM_UP: Final = 1
QUEUE_BYTES: Final = 4 << 20
"""Of the wire, or what it moves in a round trip if that is more; what comes on top is dropped."""
GIGA: Final = 1e9
START_S: Final = 120.0
READ_S: Final = 300.0


class Pair:
    """Owner and reader of one way."""

    def __init__(
        self, way: str, hosts: tuple[Namespace, Namespace], options: argparse.Namespace
    ) -> None:
        """Start both, and connect."""
        spawning = multiprocessing.get_context("spawn")
        num_bytes, run = options.mib << 20, options.run_kib << 10
        to_owner, owners = spawning.Pipe()
        self._pipe, readers = spawning.Pipe()
        names = [host.name for host in hosts]
        self._processes = [
            spawning.Process(target=run_owner, args=(way, names[0], num_bytes, owners)),
            spawning.Process(target=run_reader, args=(way, names[1], num_bytes, run, readers)),
        ]
        self._way, self._to_owner = way, to_owner
        for process in self._processes:
            process.daemon = True
            process.start()
        self._pipe.send((_received(to_owner, way), hosts[0].wire_address))
        _received(self._pipe, way)

    def read(self, order: Order) -> float:
        """How long it takes, in seconds."""
        self._signal(signal.SIGCONT)
        self._pipe.send(order)
        seconds: float = _received(self._pipe, self._way, READ_S)
        self.pause()
        return seconds

    def pause(self) -> None:
        """Keep it off the cores while others are measured: NIXL's progress threads spin."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None:
                os.kill(process.pid, number)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The link, and what is read over it."""
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=ROUND_TRIPS_MS)
    parser.add_argument("--gbit", type=float, nargs="+", default=RATES_GBIT)
    parser.add_argument("--mib", type=int, default=256, help="of each read; default 256")
    parser.add_argument("--run-kib", type=int, default=1024, help="of each run; default 1024")
    parser.add_argument("--ways", nargs="+", choices=list(OWNERS), default=list(OWNERS))
    parser.add_argument("--congestion-control", metavar="NAME", help="default: this machine's")
    parser.add_argument("--rounds", type=int, default=5, help="2 or more; default 5")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """A row for each link and way."""
    if os.geteuid():
        print("network namespaces need root", file=sys.stderr)
        return 2
    title = f"reads of {options.mib} MiB over TCP in runs of {options.run_kib} KiB"
    results = Results(title, "ways are measured", options.json)
    links = list(itertools.product(options.gbit, options.round_trip_ms))
    for gbit, round_trip_ms in links:
        for figures in measure(gbit, round_trip_ms, options):
            results.add(figures)
    return results.print(len(links) * len(options.ways))


def measure(gbit: float, round_trip_ms: float, options: argparse.Namespace) -> Iterator[Figures]:
    """All ways over one link."""
    round_trip_s = round_trip_ms / 1e3
    quality = Quality(
        delay_s=round_trip_s / 2,
        rate=gbit * GIGA,
        queue_s=max(round_trip_s, QUEUE_BYTES * 8 / (gbit * GIGA)),
    )
    rng = random.Random(options.seed)  # noqa: S311 - the same rounds every time
    orders = np.random.default_rng(options.seed)
    num_runs = (options.mib << 10) // options.run_kib
    times: dict[str, list[float]] = {way: [] for way in options.ways}
    with running(options.ways, quality, options) as pairs:
        for number in range(WARM_UP + options.rounds):
            for way in rng.sample(options.ways, len(options.ways)):
                seconds = pairs[way].read(orders.permutation(num_runs).astype(np.int32))
                if number >= WARM_UP:
                    times[way].append(seconds)
    for way, seconds_of_way in times.items():
        yield Figures(
            {
                "link": f"{gbit:g} Gbit/s",
                "round trip ms": round_trip_ms,
                "way": way,
                "ms": statistics.median(seconds_of_way) * 1e3,
                "Gbit/s": (options.mib << 20) * 8 / statistics.median(seconds_of_way) / GIGA,
                "share of one stream": share(times.get(BULK, []), seconds_of_way),
            }
        )


def share(bulk: Sequence[float], seconds: Sequence[float]) -> str:
    """Of the bulk stream's rate."""
    return ratio(bulk, seconds) if bulk else ""


@contextmanager
def running(
    ways: Sequence[str], quality: Quality, options: argparse.Namespace
) -> Iterator[dict[str, Pair]]:
    """The wire, and a pair for each way."""
    with ExitStack() as stack:
        owners = stack.enter_context(Namespace("kv-owner", 1))
        readers = stack.enter_context(Namespace("kv-reader", 2))
        wire = stack.enter_context(Wire(owners, readers, offload=True))
        wire.quality = quality
        for host in (owners, readers) if options.congestion_control else ():
            set_congestion_control(host, options.congestion_control)
        pairs = {}
        for way in ways:
            pairs[way] = Pair(way, (owners, readers), options)
            stack.callback(pairs[way].close)
            pairs[way].pause()
        yield pairs


def set_congestion_control(host: Namespace, name: str) -> None:
    """Of all connections that are made there from now on."""
    setting = f"net.ipv4.tcp_congestion_control={name}"
    subprocess.run(host.inside(["sysctl", "-q", "-w", setting]), check=True)


def _received(pipe: Connection, way: str, timeout_s: float = START_S) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"{way}: nothing has come for {timeout_s:g} s")
    return pipe.recv()
