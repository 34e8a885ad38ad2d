"""What does it cost to keep what happens: for each event, for each request, and when idle?

Every transition of a rank's machines goes to its event log. An event must cost less than 5 us, and
without one nothing may happen: after a load, two ranks of this process (prefill and decode, with
real agents and sockets) use no CPU.
"""

import argparse
import contextlib
import logging
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lab.bench.timing import cpu_share
from lab.local.caches import Cache, Sizes
from lab.local.engine import LocalEngine
from lab.results import Figures, Results, verdict_of
from nixl_kv.config import Config
from nixl_kv.engine import event_log
from nixl_kv.engine.event_log import EventLog
from nixl_kv.protocol.events import Transition
from nixl_kv.transport.nixl import nixl_transport

MOST_US: Final = 5.0
MOST_IDLE_PERCENT: Final = 0.5
BATCHES: Final = 20
SETTLE_S: Final = 8.0
"""After a load: its lease, the last reads that prefill serves, and the links, which then close."""
LOG_FORMAT: Final = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
TOKENS: Final = 40


def cost(what: str, value: float, unit: str, most: float = math.inf) -> Figures:
    """A figure, and the most that it may be."""
    words = f"{value:g} {unit}" if isinstance(value, int) else f"{value:.2f} {unit}"
    too_much = f"{words}, allowed: {most:g}" if value > most else ""
    return Figures({"what": what, unit: value}, verdict_of(too_much, good=words))


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--events", type=int, default=200_000, help="to record")
    parser.add_argument("--seconds", type=float, default=10.0, help="to be idle")


def run(options: argparse.Namespace) -> int:
    """The log alone, then two ranks."""
    results = Results("the event log of a rank", "costs are small enough", options.json)
    results.add(cost("DEBUG off", us_an_event(options.events), "us an event", MOST_US))
    with debug_log():
        results.add(cost("DEBUG on", us_an_event(options.events // 10), "us an event"))
    for figures in costs_of_ranks(options.seconds):
        results.add(figures)
    return results.print(5)


def us_an_event(count: int) -> float:
    """CPU time of a transition, with its making as a machine does it; the median of batches."""
    log = EventLog()
    size = count // BATCHES
    peer, cause, num_bytes = "engine 'prefill' at tcp://127.0.0.1:5600 rank 0", "ReadDone", 1 << 20
    costs = []
    for _ in range(BATCHES):
        begin = time.process_time()
        for number in range(size):
            log.record(Transition(f"request-{number}", peer, "READING", "DONE", cause, num_bytes))
        costs.append((time.process_time() - begin) / size)
    return statistics.median(costs) * 1e6


@contextlib.contextmanager
def debug_log() -> Iterator[None]:
    """Each transition is formatted as vLLM does it, and written to where nobody reads it."""
    logger = event_log.logger
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        handler = logging.StreamHandler(nowhere)
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        before, logger.propagate = logger.level, False
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)
            logger.propagate = True


def costs_of_ranks(seconds: float) -> list[Figures]:
    """Of a load, and of the time after it."""
    config = Config(lease_s=2.0)
    caches = [Cache(Sizes()).fill(seed) for seed in (1, 2)]
    engines: list[LocalEngine] = []
    with contextlib.ExitStack() as stack:
        for name, cache in zip(("prefill", "decode"), caches, strict=True):
            engine = LocalEngine(
                name,
                [cache.layout()],
                lambda: nixl_transport(config, "DRAM"),
                config=config,
                roles=name,
            )
            stack.callback(engine.close)
            engines.append(engine)
        load(*engines)
        per_load = count_events(engines)
        time.sleep(SETTLE_S)
        settled = count_events(engines)
        percent = 100 * cpu_share(seconds)
        while_idle = count_events(engines) - settled
    return [
        cost("one load from one rank", per_load, "events"),
        cost(f"two idle ranks: CPU in {seconds:g} s", percent, "% of a core", MOST_IDLE_PERCENT),
        cost(f"two idle ranks: events in {seconds:g} s", while_idle, "events", 0),
    ]


def load(prefill: LocalEngine, decode: LocalEngine) -> None:
    """One prompt, from its offer to the ends that both report.

    Raises:
        RuntimeError: if it failed.
    """
    blocks = [range(TOKENS // Sizes.tokens)]
    decode.prepare_load("decode-1", prefill.offer("prefill-1", blocks, TOKENS))
    decode.start_load("decode-1", blocks, range(TOKENS))
    failure = decode.wait_failure("decode-1")
    if failure:
        raise RuntimeError(f"the load failed: {failure}")
    prefill.wait_offer("prefill-1")


def count_events(engines: Sequence[LocalEngine]) -> int:
    """How many events all ranks have kept."""
    return sum(len(rank.parts.event_log) for engine in engines for rank in engine.ranks)
