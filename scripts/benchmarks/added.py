"""Measure what a second engine adds to the time to the first token.

Each round asks with new prompts: prefill alone ("alone"), prefill and then decode as a router does
("serial"), the same with prefill's early answer ("early"), and with text through vllm-router
("router"; "alone, text" is its comparison). "added" is the difference from prefill alone. Figures
are medians in milliseconds.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from benchmarks import engines
from benchmarks.floor import prompt
from benchmarks.shapes import Row
from benchmarks.transfer import WARM_UP
from harness.cluster.metrics import LOADS, CountersSince
from harness.cluster.models.files import SPECIALS, words
from harness.cluster.pair import Pair

EARLY: Final = ("--middleware", "nixl_kv.connector.EarlyAnswer")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the prompts."""
    engines.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-router", action="store_true", help="ask the engines directly, only")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each length."""
    with engines.new_cluster() as cluster:
        prefill, decode = engines.pair_of("nixl-kv", options)
        prefill = replace(prefill, extra_args=(*EARLY, *prefill.extra_args))
        started = cluster.start(prefill, decode)
        router = None if options.no_router else cluster.route(started[:1], started[1:])
        with Pair(*started, router) as pair:
            for length in options.lengths:
                rounds = [
                    sample_of(pair, length, f"{options.seed}/{length}/{number}")
                    for number in range(WARM_UP + options.repeat)
                ]
                yield {"tokens": length} | figures(rounds[WARM_UP:])


def sample_of(pair: Pair, length: int, seed: str) -> dict[str, float]:
    """Ask in each way; seconds to the end of the answer's one token.

    Raises:
        RuntimeError: if decode did not load each prompt.
    """
    since = CountersSince(pair.to_decode)
    # Prefill answers early unless it is asked for log probabilities.
    ways = {"serial": {"logprobs": 0}, "early": {"logprobs": None}}
    times = {
        "alone": pair.to_prefill.complete(prompt(length, f"{seed}/0"), 1, logprobs=None).seconds
    }
    for way, extra in ways.items():
        tokens = prompt(length, f"{seed}/{way}")
        ticket, seconds = pair.to_prefill.timed_ticket(tokens, **extra)
        leg = pair.decode_with(ticket, tokens, 1, logprobs=None)
        times[way] = seconds + leg.seconds
    expected = len(ways)
    if pair.router is not None:
        text = text_of(prompt(length, f"{seed}/1"))
        times["alone, text"] = pair.to_prefill.complete(text, 1, logprobs=None).seconds
        text = text_of(prompt(length, f"{seed}/2"))
        times["router"] = pair.to_router.complete(text, 1, logprobs=None).seconds
        expected += 1
    loads = since.wait_for(LOADS, expected)[LOADS]
    if loads != expected:
        raise RuntimeError(f"{pair.decode.name}: {loads} loads; see {pair.decode.log_path}")
    return times


def text_of(tokens: list[int]) -> str:
    """The text that the model's tokenizer turns into these tokens."""
    vocabulary = words()
    return " ".join(vocabulary[token - len(SPECIALS)] for token in tokens)


def figures(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians of one length, and what each way adds."""
    times = {name: [each[name] * 1e3 for each in rounds] for name in rounds[0]}
    row = {f"{name} ms": statistics.median(times[name]) for name in times}
    for way, base in {"serial": "alone", "early": "alone", "router": "alone, text"}.items():
        if way in times:
            row[f"{way} added ms"] = row[f"{way} ms"] - row[f"{base} ms"]
    return row
