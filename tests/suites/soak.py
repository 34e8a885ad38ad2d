"""Does a healthy pair lose anything under load?

Prompts that no engine has seen go through the router, several at a time; some clients hang up at a
random moment. With --busy, processes that only compute run beside. Printed are all counters of both
engines that have changed, and what their logs warn of, alike lines counted once.

The exit status is 0 only if no request failed, every answer that was checked is prefill's own, all
blocks are free at the end, and no engine counted anything that an operator should act on.
"""

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

import httpx

from harness.cluster.client import Client, RefusedError
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.metrics import PREFIX, CountersSince, wait_until_free
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.processes import ProcessDiedError, busy
from harness.cluster.prompts import random_prompt
from lab.results import Figures, Results, verdict_of

NUM_BLOCKS: Final = 400
LENGTHS: Final = range(20, 600)
ANSWER_TOKENS: Final = range(1, 24)
HANG_UP: Final = 0.1
"""The share of clients that do."""
FIRST_GUESS_S: Final = 0.5
"""How long a request takes, before one has ended."""
CHECKED: Final = 200
"""Answers that are compared at the end."""
FREE_S: Final = 60.0
UNHEALTHY: Final = frozenset(
    f"{PREFIX}{name}_total"
    for name in (
        *("load_failures", "offers_expired", "offers_lost", "asks_denied", "tickets_refused"),
        *("messages_dropped", "peers_lost", "agents_recycled", "thread_restarts"),
    )
)
WARNING: Final = re.compile(r"WARNING \d\S* \S+ \[\S*\] (.*)")
VARIES: Final = re.compile(r"cmpl-\S+|\b[0-9a-f]{6,}\b|\d+(\.\d+)*")


@dataclass(frozen=True)
class Ended:
    """How a request ended: with so many tokens, by its client, or in an error."""

    seed: int
    seconds: float
    tokens: tuple[str, ...] = ()
    error: str = ""


class Load:
    """Requests, one after the other in each of several threads."""

    def __init__(self, url: str, seconds: float) -> None:
        """For so long, to the router."""
        self.ended: list[Ended] = []
        self._url = url
        self._until = time.monotonic() + seconds
        self._seeds = count()
        self._usual_s = FIRST_GUESS_S

    def run(self) -> None:
        """One client, until time is over."""
        with Client(self._url) as client:
            while time.monotonic() < self._until:
                self.ended.append(self._ask(client, next(self._seeds)))

    def _ask(self, client: Client, seed: int) -> Ended:
        prompt, num_tokens = request_of(seed)
        chooser = random.Random(f"hang up {seed}")  # noqa: S311 - the same each time
        begin = time.monotonic()
        try:
            if chooser.random() < HANG_UP:
                after_s = max(0.001, chooser.uniform(0, self._usual_s))
                client.disconnect_early(prompt, after_s, max_tokens=num_tokens)
                return Ended(seed, time.monotonic() - begin)
            answer = client.complete(prompt, num_tokens)
        except (RefusedError, httpx.HTTPError) as error:
            return Ended(seed, time.monotonic() - begin, error=str(error) or repr(error))
        self._usual_s = answer.seconds
        return Ended(seed, answer.seconds, answer.tokens)


def request_of(seed: int) -> tuple[str, int]:
    """A prompt, and how many tokens are wanted."""
    chooser = random.Random(f"request {seed}")  # noqa: S311 - the same each time
    return random_prompt(chooser.choice(LENGTHS), seed), chooser.choice(ANSWER_TOKENS)


def measure(pair: Pair, options: argparse.Namespace) -> Figures:
    """Load the pair, then look at what it holds, counts and warns of."""
    before = {engine.name: len(engine.log_text()) for engine in pair.engines}
    since = {
        engine.name: CountersSince(client)
        for engine, client in zip(pair.engines, (pair.to_prefill, pair.to_decode), strict=True)
    }
    load = Load(pair.to_router.url, options.seconds)
    with busy(options.busy), ThreadPoolExecutor(options.at_once) as pool:
        for client in [pool.submit(load.run) for _ in range(options.at_once)]:
            client.result()
    clients = pair.to_prefill, pair.to_decode
    held = sum(wait_until_free(client, NUM_BLOCKS, FREE_S) for client in clients)
    changed = {
        name: {key: round(now) for key, now in one.changed().items() if now and is_ours(key)}
        for name, one in since.items()
    }
    for engine in pair.engines:
        print(f"{engine.name}: {shown(changed[engine.name])}")
        for line, times in warnings(engine.log_text()[before[engine.name] :]).most_common():
            print(f"  {times} x {line}")
    return judged(load.ended, num_wrong(pair.to_prefill, load.ended), held, changed)


def judged(
    ended: Sequence[Ended], wrong: int, held: int, changed: Mapping[str, Mapping[str, int]]
) -> Figures:
    """The row of the table."""
    errors = Counter(one.error for one in ended if one.error)
    answered = [one for one in ended if one.tokens]
    unhealthy = sorted({name for one in changed.values() for name in one} & UNHEALTHY)
    figures: dict[str, str | int | float] = {
        "requests": len(ended),
        "answered": len(answered),
        "hung up": len(ended) - len(answered) - errors.total(),
        "failed": errors.total(),
        "wrong": wrong,
        "blocks held": held,
        "slowest s": max((one.seconds for one in answered), default=0.0),
    }
    faults = (
        *(f"{times} x {error}" for error, times in errors.items()),
        f"{wrong} wrong" if wrong else "",
        f"{held} blocks held" if held else "",
        *(name.removeprefix(PREFIX).removesuffix("_total") for name in unhealthy),
    )
    return Figures(figures, verdict_of(*faults))


def num_wrong(prefill: Client, ended: Sequence[Ended]) -> int:
    """How many answers differ from what prefill alone says: of the first ones, and the slowest."""
    answered = [one for one in ended if one.tokens]
    slowest = sorted(answered[CHECKED // 2 :], key=lambda one: -one.seconds)
    checked = [*answered[: CHECKED // 2], *slowest[: CHECKED // 2]]
    return sum(prefill.complete(*request_of(one.seed)).tokens != one.tokens for one in checked)


def is_ours(name: str) -> bool:
    """Whether the connector counts it."""
    return name.startswith(PREFIX) and not name.endswith("_created")


def shown(changed: Mapping[str, int]) -> str:
    """Counters in one line."""
    return ", ".join(
        f"{name.removeprefix(PREFIX).removesuffix('_total')} {amount:,}"
        for name, amount in changed.items()
    )


def warnings(log: str) -> Counter[str]:
    """The connector's, without what differs from one to the next."""
    found = WARNING.findall(log)
    return Counter(VARIES.sub("*", line) for line in found)


def run(options: argparse.Namespace) -> int:
    """Start the pair and load it; the exit status."""
    specs = pair_specs(
        ensure_tiny_model(),
        num_blocks=NUM_BLOCKS,
        cores=frozenset(),
        connector_config={"verify": options.verify},
    )
    ranked = [
        replace(spec, tensor_parallel=ranks) for spec, ranks in zip(specs, options.tp, strict=True)
    ]
    title = (
        f"{'TP{} to TP{}'.format(*options.tp)}, {options.at_once} at a time for "
        f"{options.seconds:.0f} s, {options.busy} busy processes beside"
    )
    results = Results(title, "healthy", options.json)
    with Cluster(options.log_dir) as cluster:
        prefill, decode = cluster.start(*ranked)
        with Pair(prefill, decode, cluster.route([prefill], [decode])) as pair:
            results.add(measure(pair, options))
    return results.print(1)


def main() -> int:
    """Run what the command line says; the exit status."""
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--busy", type=int, default=0, help="processes that only compute, beside")
    parser.add_argument(
        "--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"), help="default 1 1"
    )
    parser.add_argument("--verify", default="off", help="as in the connector's configuration")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    try:
        return run(parser.parse_args())
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
