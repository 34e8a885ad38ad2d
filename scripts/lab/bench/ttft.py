"""How much longer does the first token take when decode runs elsewhere, and how fast is the link?

For each prompt length: the time of a prefill with one token on the prefill engine alone; the time
of the same on a prompt of its own through both engines, as a router would send it; the difference;
and from the decode engine's counters what was moved, in how many pieces, and how fast.

With --against, engines of another checkout of nixl_kv run beside ours, and both are asked in turn.
A ratio is ours to theirs, of each round: the median of all rounds, and where half of them lie.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lab.bench import engines
from lab.bench.checkouts import AGAINST, REPO, checkout
from lab.bench.timing import ratio
from lab.cluster.cluster import Cluster
from lab.cluster.engines import Connector
from lab.cluster.metrics import LOADED_METRICS, CountersSince, Loaded
from lab.cluster.pair import Pair
from lab.cluster.prompts import random_prompt
from lab.results import Figures, Results, verdict_of

ANSWER_TOKENS: Final = 16
CHECKED: Final = 4
"""Answers that are compared, of each length."""


@dataclass
class Samples:
    """What was measured at one prompt length, round by round; times in seconds."""

    alone: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    moved: list[Loaded] = field(default_factory=list)

    def add(self, pair: Pair, connector: Connector, alone: str, apart: str) -> None:
        """One round, with a prompt for each way.

        Raises:
            RuntimeError: if a rank of decode has not read its part.
        """
        self.alone.append(pair.to_prefill.complete(alone, 1).seconds)
        since = CountersSince(pair.to_decode)
        begin = time.perf_counter()
        pair.complete(apart, 1)
        self.apart.append(time.perf_counter() - begin)
        ranks = pair.decode.spec.ranks
        changed = since.wait_for(LOADED_METRICS[connector]["loads"], ranks)
        moved = Loaded.from_counters(changed, connector)
        if moved.loads < ranks:
            raise RuntimeError(
                f"{moved.loads} of {ranks} ranks of {pair.decode.name} have read; "
                f"see {pair.decode.log_path}"
            )
        self.moved.append(moved)

    @property
    def transfers(self) -> list[float]:
        """How long each transfer took; where several ranks read at the same time, on average."""
        return [moved.seconds / moved.loads for moved in self.moved]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Engines, prompts, and whom to compare with."""
    engines.add_options(parser)
    engines.add_engine_options(parser)
    parser.add_argument(
        "--against", type=checkout, metavar="DIR", help="a checkout of nixl_kv to compare with"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1000, 2000])
    parser.add_argument("--repeat", type=int, default=7, help="rounds, 2 or more")


def run(options: argparse.Namespace) -> int:
    """A row for each prompt length and pair of engines; 0 only if no answer is wrong."""
    results = Results(engines.title(options), "rows are measured", options.json)
    expected = 0
    with Cluster(options.log_dir, warm=False, start_timeout_s=engines.START_TIMEOUT_S) as cluster:
        for connector in options.connector:
            with running_pairs(cluster, connector, options) as pairs:
                expected += len(pairs) * len(options.lengths)
                for figures_of_pair in measure(pairs, connector, options):
                    results.add(figures_of_pair)
    return results.print(expected)


@contextlib.contextmanager
def running_pairs(
    cluster: Cluster, connector: Connector, options: argparse.Namespace
) -> Iterator[dict[str, Pair]]:
    """Our engines, and those of the other checkout."""
    checkouts: dict[str, Path] = {connector: REPO}
    if options.against and connector == "nixl-kv":
        checkouts[AGAINST] = options.against
    specs = [
        spec
        for name, path in checkouts.items()
        for spec in engines.pair_of(connector, options, path=path, of=len(checkouts), suffix=name)
    ]
    started = cluster.start(*specs)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.end, *started)
        yield {
            name: stack.enter_context(Pair(prefill, decode))
            for name, prefill, decode in zip(checkouts, started[::2], started[1::2], strict=True)
        }


def measure(
    pairs: Mapping[str, Pair], connector: Connector, options: argparse.Namespace
) -> Iterator[Figures]:
    """Rows of all pairs; each length is asked for once before, which connects and warms up."""
    seeds = itertools.count()
    for length in options.lengths:
        ask_in_turn(pairs, connector, [length], seeds)
    for length in options.lengths:
        samples = ask_in_turn(pairs, connector, [length] * options.repeat, seeds)
        for name, pair in pairs.items():
            asked = CHECKED if options.shape == "tiny" else 0
            prompts = [random_prompt(length, next(seeds)) for _ in range(asked)]
            same = count_matches(pair, prompts)
            matches = f"{same}/{asked} answers match" if asked else ""
            theirs = None if name == AGAINST else samples.get(AGAINST)
            yield Figures(
                {"engines": name, "tokens": length} | figures(samples[name], theirs),
                verdict_of("" if same == asked else matches, good=matches),
            )


def ask_in_turn(
    pairs: Mapping[str, Pair], connector: Connector, lengths: Sequence[int], seeds: Iterator[int]
) -> dict[str, Samples]:
    """A round for each length; who is first changes from round to round."""
    samples = {name: Samples() for name in pairs}
    for number, length in enumerate(lengths):
        prompts = [random_prompt(length, next(seeds)) for _ in range(2)]
        for name in sorted(pairs, reverse=bool(number % 2)):
            samples[name].add(pairs[name], connector, *prompts)
    return samples


def count_matches(pair: Pair, prompts: Sequence[str]) -> int:
    """How many answers through both engines are those of the prefill engine alone."""
    return sum(
        pair.complete(prompt, ANSWER_TOKENS).tokens
        == pair.to_prefill.complete(prompt, ANSWER_TOKENS).tokens
        for prompt in prompts
    )


def figures(ours: Samples, theirs: Samples | None) -> dict[str, str | int | float]:
    """The medians of a pair of engines, and ratios to another one's."""
    alone, apart = statistics.median(ours.alone), statistics.median(ours.apart)
    transfer = statistics.median_low(ours.transfers)
    moved = ours.moved[ours.transfers.index(transfer)]
    measured: dict[str, str | int | float] = {
        "alone ms": alone * 1e3,
        "apart ms": apart * 1e3,
        "added ms": (apart - alone) * 1e3,
        "MiB": moved.nbytes / 2**20,
        "pieces": moved.descriptors,
        "transfer ms": transfer * 1e3,
        "GB/s": moved.nbytes / transfer / 1e9,
    }
    if theirs is not None:
        measured["transfer ratio"] = ratio(ours.transfers, theirs.transfers)
        measured["apart ratio"] = ratio(ours.apart, theirs.apart)
    return measured
