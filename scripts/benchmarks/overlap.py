"""Time requests over a slow link, with prefill's early answer and without it.

Two engines on CPU run on hosts (network namespaces) that a wire joins (`harness.cluster.netns`).
Its rate is set such that a prompt's transfer takes as long as its prefill. Each round asks with new
prompts: one leg after the other ("serial", of which "prefill" and "transfer" are the legs), then
both together ("early"). "to longer" is early's time to the first token, divided by the longer leg
of its round. Figures are medians. Needs root.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from benchmarks import engines
from benchmarks.floor import prompt
from benchmarks.shapes import Row
from benchmarks.tcp import QUEUE_BYTES
from benchmarks.transfer import ROLES, WARM_UP, ratio
from harness.cluster.cluster import Cluster
from harness.cluster.engines import halves
from harness.cluster.metrics import LOADS, NBYTES, CountersSince
from harness.cluster.netns import ADDRESSES, Namespace, Quality, Wire
from harness.cluster.pair import Pair

CALIBRATING: Final = 3  # serial requests over a fast wire: the rate follows from their prefill
PATIENCE_S: Final = 600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines, the prompt and the link."""
    engines.add_options(parser)
    parser.add_argument("--tokens", type=int, default=3840, help="default 3840")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step; default 256")
    parser.add_argument("--round-trip-ms", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=9, help="rounds, 2 or more")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row.

    Raises:
        SystemExit: without root.
    """
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    with ExitStack() as stack:
        pair, wire = started(options, stack)
        numbers = range(WARM_UP + CALIBRATING)
        calls = [legs(pair, options, f"{options.seed}/calibration/{n}", 0) for n in numbers]
        prefill_s = statistics.median(prefill for prefill, _, _ in calls[WARM_UP:])
        rate, round_trip_s = calls[0][2] * 8 / prefill_s, options.round_trip_ms / 1e3
        queue_s = max(round_trip_s, QUEUE_BYTES * 8 / rate)
        wire.quality = Quality(delay_s=round_trip_s / 2, rate=rate, queue_s=queue_s)
        rounds = [
            sample_of(pair, options, f"{options.seed}/{n}") for n in range(WARM_UP + options.repeat)
        ]
        times = {name: [each[name] for each in rounds[WARM_UP:]] for name in rounds[0]}
        medians = {f"{name} ms": statistics.median(times[name]) * 1e3 for name in times}
        longer = list(map(max, times["prefill"], times["transfer"]))
        about = {"tokens": options.tokens, "chunk": options.chunk, "Gbit/s": rate / 1e9}
        yield about | medians | {"to longer": ratio(times["early"], longer)}


def started(options: argparse.Namespace, stack: ExitStack) -> tuple[Pair, Wire]:
    """Both engines, each on a half of the cores, and the wire between them."""
    hosts = [stack.enter_context(Namespace(f"kv-{r}", n)) for n, r in enumerate(ROLES, 1)]
    wire = stack.enter_context(Wire(*hosts, offload=True))
    # No figure includes a start, so they are forked from a process that has imported vLLM.
    cluster = stack.enter_context(Cluster(start_timeout_s=engines.START_TIMEOUT_S))
    steps = ("--max-num-batched-tokens", str(options.chunk))
    specs = [
        replace(
            engines.with_options(spec, *steps),
            host=host,
            cores=cores,
            connector_config={
                **spec.connector_config,
                "insecure": True,
                "peers": [ADDRESSES],
                "host": host.wire_address,
            },
        )
        for spec, host, cores in zip(
            map(engines.with_overlap, engines.pair_of("nixl-kv", options)),
            hosts,
            halves(os.sched_getaffinity(0)),
            strict=True,
        )
    ]
    prefill, decode = cluster.start(*specs)
    return stack.enter_context(Pair(prefill, decode, timeout_s=PATIENCE_S)), wire


def legs(
    pair: Pair, options: argparse.Namespace, seed: str, logprobs: int | None
) -> tuple[float, float, float]:
    """One request: the seconds of both legs, and the bytes that decode has read.

    Raises:
        RuntimeError: if decode did not load the prompt.
    """
    since, tokens = CountersSince(pair.to_decode), prompt(options.tokens, seed)
    # Prefill answers early unless it is asked for log probabilities.
    ticket, seconds = pair.to_prefill.timed_ticket(tokens, logprobs=logprobs)
    answer = pair.decode_with(ticket, tokens, 1, logprobs=None)
    changed = since.wait_for(LOADS)
    if changed[LOADS] != 1:
        raise RuntimeError(f"{pair.decode.name}: no load; see {pair.decode.log_path}")
    return seconds, answer.seconds, changed[NBYTES]


def sample_of(pair: Pair, options: argparse.Namespace, seed: str) -> dict[str, float]:
    """Seconds of one round."""
    prefill, transfer, _ = legs(pair, options, f"{seed}/serial", 0)
    early = sum(legs(pair, options, f"{seed}/early", None)[:2])
    return {"prefill": prefill, "transfer": transfer, "serial": prefill + transfer, "early": early}
