"""Measure how much a second engine adds to the time to the first token.

Each round asks with new prompts, in each way, in random order, each time just after prefill has
computed another prompt: prefill alone ("alone"), prefill and then decode as a router does
("serial"), the same with prefill's early answer ("early"), the same with a decode engine that has
`overlap` on decode ("fast"), and text through vllm-router to that engine ("router"; "alone, text"
is its comparison). "added" is the difference from prefill alone. `--picture` draws one more request
of the last length, serial and fast, from the engines' event logs.
Figures are medians in milliseconds.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks import engines
from benchmarks.floor import prompt
from benchmarks.shapes import Row
from benchmarks.transfer import WARM_UP
from harness.cluster.client import Client, Prompt
from harness.cluster.engines import HOST, Engine
from harness.cluster.metrics import LOADS, CountersSince
from harness.cluster.models.files import SPECIALS, words
from harness.cluster.pair import Pair
from nixl_kv.cli import client as cli
from nixl_kv.engine.event_log import EVERY_REQUEST
from nixl_kv.protocol.messages import Status
from support.trace_picture import DARK, GREEN, GREY, draw
from support.trace_picture import Row as Picture


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the prompts."""
    engines.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each length. Both decode engines have the same GPUs, and are asked in turns."""
    with engines.new_cluster() as cluster, ExitStack() as stack:
        prefill, decode = engines.pair_of("nixl-kv", options)
        prefill = engines.with_overlap(prefill)
        fast = engines.with_overlap(decode, name="fast")
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
        if options.picture:
            rows = [*timeline("serial", slow, length, 0), *timeline("fast", quick, length, None)]
            options.picture.write_text(draw(rows, "One request, serial and fast"), "utf-8")


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
    order = random.Random(seed).sample(list(ways), len(ways))  # noqa: S311 - the same each time
    times: dict[str, float] = {}
    for way in order:
        # The same work takes 3 % longer on a GPU that has just worked. So let it work before each.
        single(slow.to_prefill, prompt(length, f"{seed}/{way}/before"))
        times[way] = ways[way](prompt(length, f"{seed}/{way}"))
    for pair, counted in since:
        loads = counted.wait_for(LOADS, 2)[LOADS]
        if loads != 2:  # noqa: PLR2004 - serial and early, fast and router
            raise RuntimeError(f"{pair.decode.name}: {loads} loads; see {pair.decode.log_path}")
    return times


def timeline(way: str, pair: Pair, length: int, logprobs: int | None) -> Iterator[Picture]:
    """The bars of one request, in nanoseconds from its begin."""
    pair.to_prefill.complete(prompt(length, f"{way}/before"), 1, logprobs=None)
    tokens = prompt(length, f"{way}/picture")
    begin = time.time_ns()
    ticket, _ = pair.to_prefill.timed_ticket(tokens, logprobs=logprobs)
    answered = time.time_ns() - begin
    pair.decode_with(ticket, tokens, 1, logprobs=None)
    end = time.time_ns() - begin
    offer, load = (story(engine, begin) for engine in pair.engines)
    edges = itertools.pairwise(load)
    reads = [(since, until) for (name, since), (_, until) in edges if name == "READING"]
    offered = [at for name, at in offer if name == "OFFERED"] or [reads[-1][0]]
    yield f"{way}: the client waits", DARK, [(0, end)]
    yield "prefill answers", GREY, [(0, answered)]
    yield "prefill has computed", GREY, [(0, offered[0])]
    yield "decode reads KV", GREEN, reads
    yield "decode computes and answers", GREY, [(reads[-1][1], end)]


def story(engine: Engine, begin: int) -> list[tuple[str, int]]:
    """The states of the only request since `begin`, and when each began."""
    keys = cli.read_keys(None)
    description = cli.describe_at(f"{HOST}:{engine.side_port}", keys)
    _, answer = cli.rank_statuses(description, keys, EVERY_REQUEST)[0]
    if not isinstance(answer, Status):
        reason = f"{engine.name} gives no events: {answer}; see {engine.log_path}"
        raise RuntimeError(reason)  # noqa: TRY004 - it is an answer
    events = [(event["after"], round(event["time"] * 1e9)) for event in answer.lists["story"]]
    return [(name, at - begin) for name, at in events if at > begin]


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
