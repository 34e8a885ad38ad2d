"""Compare a load with a hit in decode's own prefix cache, the least that decode can take.

Each round, prefill computes a new prompt and decode is asked with its ticket: the leg, from
decode's request to its first token. Then decode is asked for the same prompt, of which it has all
but the last token in its prefix cache: the hit. A second decode engine with `verify: all` takes
turns with the first. Figures are medians; differences are those of each round.
"""

import argparse
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from harness.cluster.client import Client
from harness.cluster.engines import Engine
from harness.cluster.metrics import LOADS, CountersSince, Loaded
from harness.cluster.models.files import SPECIALS, words
from lab.bench import engines
from lab.bench.transfer import WARM_UP
from lab.results import Figures

VERIFY: Final = ("off", "all")


@dataclass(frozen=True)
class Sample:
    """One prompt; seconds. `transfer` is the mean of all ranks."""

    leg: float
    hit: float
    transfer: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the prompts."""
    engines.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048, 8192, 16384])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """A row for each length."""
    prefill, decode = engines.pair_of("nixl-kv", options, caching=True)
    _, verified = engines.pair_of("nixl-kv", options, caching=True, verify="all")
    with engines.cluster_of(options) as cluster, ExitStack() as stack:
        started = cluster.start(prefill, decode, verified)
        clients = [stack.enter_context(Client(engine.url)) for engine in started]
        asked = list(zip(VERIFY, started[1:], clients[1:], strict=True))
        for length in options.lengths:
            samples: dict[str, list[Sample]] = {verify: [] for verify in VERIFY}
            for number in range(WARM_UP + options.repeat):
                for verify, engine, client in reversed(asked) if number % 2 else asked:
                    # One token more than whole blocks: a hit computes it, as a load does. Without
                    # it, a hit would compute its last block again.
                    tokens = prompt(length + 1, f"{options.seed}/{length}/{number}/{verify}")
                    sample = sample_of(engine, client, clients[0], tokens)
                    if number >= WARM_UP:
                        samples[verify].append(sample)
            yield Figures({"tokens": length} | figures(samples))


def prompt(length: int, seed: str) -> list[int]:
    """Token ids of the vocabulary that all our models have."""
    chooser = random.Random(seed)  # noqa: S311 - the same each time
    return chooser.choices(range(len(SPECIALS), len(SPECIALS) + len(words())), k=length)


def sample_of(engine: Engine, decode: Client, prefill: Client, tokens: Sequence[int]) -> Sample:
    """Ask decode with a ticket, then without one.

    Raises:
        RuntimeError: if decode did not load the prompt.
    """
    since, ranks = CountersSince(decode), engine.spec.ranks
    ticket = prefill.ticket(tokens)
    leg = decode.complete(tokens, 1, logprobs=None, kv_transfer_params=ticket).seconds
    hit = decode.complete(tokens, 1, logprobs=None).seconds
    loaded = Loaded.from_counters(since.wait_for(LOADS, ranks))
    if loaded.loads != ranks:
        raise RuntimeError(f"{engine.name}: {loaded.loads} loads; see {engine.log_path}")
    return Sample(leg, hit, loaded.seconds / ranks)


def figures(samples: dict[str, list[Sample]]) -> dict[str, str | int | float]:
    """Medians of one length."""
    off, verified = (samples[verify] for verify in VERIFY)
    pairs = list(zip(verified, off, strict=True))
    return {
        "leg ms": _median_ms(one.leg for one in off),
        "hit ms": _median_ms(one.hit for one in off),
        "leg over hit ms": _median_ms(one.leg - one.hit for one in off),
        "transfer ms": _median_ms(one.transfer for one in off),
        "verified leg ms": _median_ms(one.leg for one in verified),
        "verify adds ms": _median_ms(
            (one.leg - one.hit) - (other.leg - other.hit) for one, other in pairs
        ),
    }


def _median_ms(values: Iterable[float]) -> float:
    return statistics.median(values) * 1e3
