"""What do clients see under load: the first token, the decode leg, the time between tokens?

Requests arrive by a Poisson process, or as a file says; each connector's pair of engines, and one
plain engine in decode's place, get the same ones. One after the other runs, alone. The client asks
as a router does: prefill, then decode with prefill's ticket. TTFT is the time to the first token,
the leg that from decode's request to it, and a gap the time between two tokens. With --client vllm,
`vllm bench serve` asks instead, through vllm-router before a pair: it knows nothing of legs.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lab.bench import engines, vllm_client
from lab.bench.arrivals import Arrival, poisson, prompt, prompts, recorded
from lab.bench.streams import Asker, Stream, percentile, sleep_until
from lab.cluster.client import Client
from lab.cluster.cluster import Cluster
from lab.cluster.engines import Connector
from lab.cluster.metrics import CountersSince, Loaded
from lab.results import Figures, Results, verdict_of

WARM_UP: Final = 2
"""Times that a short and a long prompt are asked before."""

PLAIN: Final = "plain"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What arrives, and where."""
    engines.add_options(parser)
    engines.add_engine_options(parser)
    parser.add_argument("--rates", type=float, nargs="+", default=[3.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--prompt-tokens", type=int, nargs=2, default=[1024, 16384], metavar=("LOW", "HIGH")
    )
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arrivals", type=Path, help="a recorded list, in place of all these")
    parser.add_argument("--client", choices=["own", "vllm"], default="own")
    parser.add_argument("--without-plain", action="store_true", help="no engine without connector")


def run(options: argparse.Namespace) -> int:
    """A row for each rate and for who answers; 0 only if all requests were answered."""
    loads = arrivals_of(options)
    asked = [*options.connector, *([] if options.without_plain else [PLAIN])]
    results = Results(engines.title(options), "loads are answered", options.json)
    with Cluster(options.log_dir, warm=False, start_timeout_s=engines.START_TIMEOUT_S) as cluster:
        for name in asked:
            for label, arrivals in loads.items():
                # Engines are new for each load, and what was cached is gone.
                figures, faults = measure(cluster, name, arrivals, options)
                about = {"engines": name, "a second": label, "requests": len(arrivals)}
                results.add(Figures(about | figures, verdict_of(*faults, good="answered")))
    return results.print(len(asked) * len(loads))


def arrivals_of(options: argparse.Namespace) -> dict[str, list[Arrival]]:
    """The lists, by what they are called."""
    if options.arrivals:
        return {options.arrivals.name: recorded(options.arrivals)}
    low, high = options.prompt_tokens
    return {
        f"{rate:g}": poisson(
            rate, options.seconds, (low, high), options.answer_tokens, options.seed
        )
        for rate in options.rates
    }


def measure(
    cluster: Cluster, name: str, arrivals: Sequence[Arrival], options: argparse.Namespace
) -> tuple[dict[str, str | int | float], list[str]]:
    """Start who answers, warm it up, and load it: figures, and what went wrong."""
    if name == PLAIN:
        started = cluster.start(engines.plain_engine(options))
    else:
        connector: Connector = "in-tree" if name == "in-tree" else "nixl-kv"
        started = cluster.start(*engines.pair_of(connector, options))
    prefill = started[0].url if name != PLAIN else None
    lengths = [one.prompt_tokens for one in arrivals]
    try:
        asyncio.run(warm_up(started[-1].url, prefill, (min(lengths), max(lengths))))
        with Client(started[-1].url) as client:
            since = CountersSince(client)
            if options.client == "vllm":
                return vllm_client.ask(cluster, started, arrivals, options)
            streams = asyncio.run(ask_all(started[-1].url, prefill, arrivals, options.seed))
            measured = figures_of(streams, arrivals)
            if name != PLAIN:
                measured |= moved(since, connector)
    finally:
        cluster.end(*started)
    errors = [stream.error for stream in streams if stream.error]
    return measured, [f"{len(errors)} failed: {errors[0]}"] if errors else []


async def warm_up(decode: str, prefill: str | None, lengths: Sequence[int]) -> None:
    """Connect, and let both engines compile what they compile."""
    async with Asker(decode, prefill) as asker:
        for number in range(WARM_UP):
            for length in lengths:
                await asker.ask(prompt(length, f"warm-up {number}"), 4)


async def ask_all(
    decode: str, prefill: str | None, arrivals: Sequence[Arrival], seed: int
) -> list[Stream]:
    """Ask each at its time, whatever became of those before."""
    every = prompts(arrivals, seed)
    async with Asker(decode, prefill) as asker:
        begin = time.perf_counter()

        async def ask(arrival: Arrival, tokens: Sequence[int]) -> Stream:
            await sleep_until(begin + arrival.second)
            return await asker.ask(tokens, arrival.answer_tokens)

        asked = (ask(one, tokens) for one, tokens in zip(arrivals, every, strict=True))
        return list(await asyncio.gather(*asked))


def figures_of(
    streams: Sequence[Stream], arrivals: Sequence[Arrival]
) -> dict[str, str | int | float]:
    """Percentiles over all that were answered."""
    good = [stream for stream in streams if not stream.error]
    if not good:
        return {}
    gaps = [gap for stream in good for gap in stream.gaps] or [0.0]
    seconds = max(stream.moments[-1] for stream in good) - min(stream.begin for stream in good)
    measured: dict[str, str | int | float] = {
        "prompt tokens": sum(one.prompt_tokens for one in arrivals) // len(arrivals)
    }
    for heading, values in (
        ("TTFT", [stream.first for stream in good]),
        ("leg", [stream.decode_leg for stream in good]),
        ("gap", gaps),
    ):
        measured[f"{heading} p50 ms"] = percentile(values, 50) * 1e3
        measured[f"{heading} p99 ms"] = percentile(values, 99) * 1e3
    measured["gap max ms"] = max(gaps) * 1e3
    measured["tokens/s"] = sum(len(stream.moments) for stream in good) / seconds
    return measured


def moved(since: CountersSince, connector: Connector) -> dict[str, str | int | float]:
    """What decode has counted."""
    loaded = Loaded.from_counters(since.changed(), connector)
    return {"GB": loaded.nbytes / 1e9, "loads": loaded.loads, "transfer s": loaded.seconds}
