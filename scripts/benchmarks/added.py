"""Measure what a second engine adds to the time to the first token.

Each round asks with new prompts, in each way, in random order: prefill alone ("alone"), prefill and
then decode as a router does ("serial"), the same with prefill's early answer ("early"), the same
with a decode engine that has our scheduler class ("fast"), and text through vllm-router to that
engine ("router"; "alone, text" is its comparison). "added" is the difference from prefill alone.
Figures are medians in milliseconds.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from benchmarks import engines
from benchmarks.floor import prompt
from benchmarks.shapes import Row
from benchmarks.transfer import WARM_UP
from harness.cluster.client import Client, Prompt
from harness.cluster.metrics import LOADS, CountersSince
from harness.cluster.models.files import SPECIALS, words
from harness.cluster.pair import Pair


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the prompts."""
    engines.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each length. Both decode engines have the same GPUs, and are asked in turns."""
    with engines.new_cluster() as cluster, ExitStack() as stack:
        prefill, decode = engines.pair_of("nixl-kv", options)
        prefill = engines.with_options(prefill, *engines.EARLY)
        fast = engines.with_options(decode, *engines.FAST, name="fast")
        first, *others = cluster.start(prefill, decode, fast)
        slow, quick = (
            stack.enter_context(Pair(first, one, cluster.route([first], [one]))) for one in others
        )
        for length in options.lengths:
            rounds = [
                sample_of(slow, quick, length, f"{options.seed}/{length}/{number}")
                for number in range(WARM_UP + options.repeat)
            ]
            yield {"tokens": length} | figures(rounds[WARM_UP:])


def sample_of(slow: Pair, fast: Pair, length: int, seed: str) -> dict[str, float]:
    """Ask in each way; seconds to the end of the answer's one token.

    Raises:
        RuntimeError: if decode did not load each prompt.
    """
    since = [(pair, CountersSince(pair.to_decode)) for pair in (slow, fast)]

    def legs(pair: Pair, tokens: list[int], logprobs: int | None) -> float:
        # Prefill answers early unless it is asked for log probabilities.
        ticket, seconds = pair.to_prefill.timed_ticket(tokens, logprobs=logprobs)
        return seconds + pair.decode_with(ticket, tokens, 1, logprobs=None).seconds

    def single(client: Client, tokens: Prompt) -> float:
        return client.complete(tokens, 1, logprobs=None).seconds

    ways: dict[str, Callable[[list[int]], float]] = {
        "alone": lambda tokens: single(slow.to_prefill, tokens),
        "serial": lambda tokens: legs(slow, tokens, 0),
        "early": lambda tokens: legs(slow, tokens, None),
        "fast": lambda tokens: legs(fast, tokens, None),
        "alone, text": lambda tokens: single(slow.to_prefill, text_of(tokens)),
        "router": lambda tokens: single(fast.to_router, text_of(tokens)),
    }
    # The same work takes 3 % longer on a GPU that has just worked.
    order = random.Random(seed).sample(list(ways), len(ways))  # noqa: S311 - the same each time
    times = {way: ways[way](prompt(length, f"{seed}/{way}")) for way in order}
    for pair, counted in since:
        loads = counted.wait_for(LOADS, 2)[LOADS]
        if loads != 2:  # noqa: PLR2004 - serial and early, fast and router
            raise RuntimeError(f"{pair.decode.name}: {loads} loads; see {pair.decode.log_path}")
    return times


def text_of(tokens: list[int]) -> str:
    """The text that the model's tokenizer turns into these tokens."""
    vocabulary = words()
    return " ".join(vocabulary[token - len(SPECIALS)] for token in tokens)


def figures(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians of one length, and what each way adds."""
    bases = {"serial": "alone", "early": "alone", "fast": "alone", "router": "alone, text"}
    names = dict.fromkeys([*bases.values(), *bases])
    row = {f"{name} ms": statistics.median(r[name] for r in rounds) * 1e3 for name in names}
    added = {f"{way} added ms": row[f"{way} ms"] - row[f"{base} ms"] for way, base in bases.items()}
    return row | added
