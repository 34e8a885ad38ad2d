"""How near is a load to a hit in decode's own cache, which is the least that decode can take?

Each round, a prompt that nobody has seen is prefilled, then decode is asked with the ticket: the
leg, from decode's request to its first token. Then the same prompt is asked again on decode, which
by now has all of it but the last token in its prefix cache: the hit. A decode engine with
`verify: all` runs beside and is asked in turn.
"""

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lab.bench import engines
from lab.bench.arrivals import prompt
from lab.bench.streams import Asker
from lab.cluster.client import Client
from lab.cluster.cluster import Cluster
from lab.cluster.engines import Engine, EngineSpec
from lab.cluster.metrics import LOADS, CountersSince, Loaded
from lab.results import Figures, Results

VERIFY: Final = ("off", "all")
WARM_UP: Final = 2


@dataclass(frozen=True)
class Sample:
    """Of one prompt; seconds. `transfer` is the mean of all ranks."""

    leg: float
    hit: float
    transfer: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which prompts, where."""
    engines.add_hit_options(parser, lengths=[64, 512, 2048, 8192, 16384])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """A row for each length."""
    results = Results(engines.title(options), "lengths are measured", options.json)
    with Cluster(options.log_dir, warm=False, start_timeout_s=engines.START_TIMEOUT_S) as cluster:
        prefill, *decodes = cluster.start(*specs(options))
        for length in options.lengths:
            samples = asyncio.run(measure(prefill, decodes, length, options))
            results.add(Figures({"tokens": length} | figures(samples)))
    return results.print(len(options.lengths))


def specs(options: argparse.Namespace) -> list[EngineSpec]:
    """Prefill, and a decode engine for each kind of `verify`."""
    prefill, decode = engines.pair_of("nixl-kv", options, of=2, caching=True)
    return [
        prefill,
        *(
            replace(
                decode,
                name=f"{decode.name}-verify-{verify}",
                connector_config={**decode.connector_config, "verify": verify},
            )
            for verify in VERIFY
        ),
    ]


async def measure(
    prefill: Engine, decodes: Sequence[Engine], length: int, options: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Rounds with each decode engine in turn, after some that are not counted."""
    samples: dict[str, list[Sample]] = {verify: [] for verify in VERIFY}
    async with contextlib.AsyncExitStack() as stack:
        asked = [
            (verify, decode, await stack.enter_async_context(Asker(decode.url, prefill.url)))
            for verify, decode in zip(VERIFY, decodes, strict=True)
        ]
        for number in range(WARM_UP + options.repeat):
            for verify, decode, asker in reversed(asked) if number % 2 else asked:
                # One token more than whole blocks: it is what a hit leaves to compute, as a load
                # does. Of whole blocks a hit leaves the last one: its step would be a longer one.
                tokens = prompt(length + 1, f"{options.seed}/{length}/{number}/{verify}")
                sample = await sample_of(decode, asker, tokens)
                if number >= WARM_UP:
                    samples[verify].append(sample)
    return samples


async def sample_of(decode: Engine, asker: Asker, tokens: Sequence[int]) -> Sample:
    """One prompt, with a ticket and then without one; decode has been asked before.

    Raises:
        RuntimeError: if one was not answered, or nothing was loaded.
    """
    with Client(decode.url) as client:
        since = CountersSince(client)
        with_ticket = await asker.ask(tokens, 1)
        hit = await asker.ask(tokens, 1, prefill_first=False)
        for stream in (with_ticket, hit):
            if stream.error:
                raise RuntimeError(f"{decode.name}: {stream.error}; see {decode.log_path}")
        ranks = decode.spec.ranks
        loaded = Loaded.from_counters(since.wait_for(LOADS, ranks))
    if loaded.loads != ranks:
        raise RuntimeError(f"{decode.name}: {loaded.loads} loads; see {decode.log_path}")
    return Sample(with_ticket.decode_leg, hit.decode_leg, loaded.seconds / ranks)


def figures(samples: dict[str, list[Sample]]) -> dict[str, str | int | float]:
    """Medians; differences are those of each round."""
    off, everything = (samples[verify] for verify in VERIFY)
    return {
        "leg ms": _median_ms(one.leg for one in off),
        "hit ms": _median_ms(one.hit for one in off),
        "leg over hit ms": _median_ms(one.leg - one.hit for one in off),
        "transfer ms": _median_ms(one.transfer for one in off),
        "leg, verify all ms": _median_ms(one.leg for one in everything),
        "verify adds ms": _median_ms(
            (mine.leg - mine.hit) - (other.leg - other.hit)
            for mine, other in zip(everything, off, strict=True)
        ),
    }


def _median_ms(values: Iterable[float]) -> float:
    return statistics.median(values) * 1e3
