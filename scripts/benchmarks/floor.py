"""Compare a load with a hit in decode's own prefix cache, the least that decode can take.

Each round, prefill computes a new prompt and decode is asked with its ticket: the leg, from
decode's request to its first token. Then decode is asked for the same prompt, of which it has all
but the last token in its prefix cache: the hit. Figures are medians; "leg over hit" and "leg to
hit" are the difference and the ratio of each round. "transfer" is the mean of all ranks.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence

from benchmarks import engines
from benchmarks.shapes import Row
from benchmarks.transfer import WARM_UP, ratio
from harness.cluster.client import Client
from harness.cluster.engines import Engine
from harness.cluster.metrics import LOADS, CountersSince, Loaded
from harness.cluster.models.files import SPECIALS, words


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the prompts."""
    engines.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048, 8192, 16384])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each length."""
    with engines.new_cluster() as cluster:
        prefill, decode = cluster.start(*engines.pair_of("nixl-kv", options, caching=True))
        with Client(prefill.url) as to_prefill, Client(decode.url) as to_decode:
            for length in options.lengths:
                samples = []
                for number in range(WARM_UP + options.repeat):
                    # One token more than whole blocks: a hit computes it, as a load does. Without
                    # it, a hit would compute its last block again.
                    tokens = prompt(length + 1, f"{options.seed}/{length}/{number}")
                    samples.append(sample_of(decode, to_decode, to_prefill, tokens))
                yield {"tokens": length} | figures(samples[WARM_UP:])


def prompt(length: int, seed: str) -> list[int]:
    """Token ids of the vocabulary that all our models have."""
    chooser = random.Random(seed)  # noqa: S311 - the same each time
    return chooser.choices(range(len(SPECIALS), len(SPECIALS) + len(words())), k=length)


def sample_of(
    engine: Engine, decode: Client, prefill: Client, tokens: Sequence[int]
) -> dict[str, float]:
    """Ask decode with a ticket, then without one; seconds.

    Raises:
        RuntimeError: if decode did not load the prompt.
    """
    since = CountersSince(decode)
    ticket = prefill.ticket(tokens)
    leg = decode.complete(tokens, 1, logprobs=None, kv_transfer_params=ticket).seconds
    hit = decode.complete(tokens, 1, logprobs=None).seconds
    loaded = Loaded.from_counters(since.wait_for(LOADS))
    if loaded.loads != 1:
        raise RuntimeError(f"{engine.name}: {loaded.loads} loads; see {engine.log_path}")
    return {"leg": leg, "hit": hit, "leg over hit": leg - hit, "transfer": loaded.seconds}


def figures(samples: Sequence[dict[str, float]]) -> dict[str, str | int | float]:
    """Medians of one length."""
    times = {name: [sample[name] for sample in samples] for name in samples[0]}
    medians = {f"{name} ms": statistics.median(times[name]) * 1e3 for name in times}
    return medians | {"leg to hit": ratio(times["leg"], times["hit"])}
