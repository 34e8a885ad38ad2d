"""Compare a load with a hit in decode's own prefix cache, the least that decode can take.

Each round, prefill computes a new prompt and decode is asked with its ticket: the leg, from
decode's request to its first token. Then decode is asked for the same prompt, of which it has all
but the last token in its prefix cache: the hit. Figures are medians; "leg over hit" and "leg to
hit" are the difference and the ratio of each round. "transfer" is the mean of all ranks.

With `--streams`, decode generates this number of other answers meanwhile, and requests come at
random times within a step. "step" is its time between two tokens, and "steps over hit" the mean of
"leg over hit" in steps. "fast" is a decode engine with `overlap`, which is measured after the
other, on the same GPUs.
"""

import argparse
import http.client
import json
import random
import statistics
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Final

from benchmarks import engines
from benchmarks.shapes import Row
from benchmarks.transfer import WARM_UP, ratio
from harness.cluster.client import COMPLETIONS, Client
from harness.cluster.engines import MODEL_NAME, Engine
from harness.cluster.metrics import LOADS, CountersSince, Loaded
from harness.cluster.models.files import SPECIALS, words

STEPS: Final = 100  # over which a step is measured
STREAM_TOKENS: Final = 8000  # more than decode generates while one length is measured
PAUSE_S: Final = 0.02  # more than a step


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the prompts."""
    engines.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048, 8192, 16384])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--streams", type=int, default=0, help="other answers of decode")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each length and decode engine."""
    with engines.new_cluster() as cluster:
        specs = list(engines.pair_of("nixl-kv", options, caching=True))
        if options.streams:
            specs.append(engines.with_overlap(specs[1], name="fast"))
        prefill, *others = cluster.start(*specs)
        for name, decode in zip(("decode", "fast"), others, strict=False):
            for length in options.lengths:
                row = row_of(prefill, decode, length, options)
                yield {"engine": name, "tokens": length, **row}


def row_of(prefill: Engine, decode: Engine, length: int, options: argparse.Namespace) -> Row:
    """The figures of one length."""
    with ExitStack() as stack:
        to_prefill, to_decode = (stack.enter_context(Client(one.url)) for one in (prefill, decode))
        if options.streams:
            stack.enter_context(busy(to_decode, options.streams))
        most = PAUSE_S if options.streams else 0.0
        samples = []
        for number in range(WARM_UP + options.repeat):
            # One token more than whole blocks: a hit computes it, as a load does. Without it, a
            # hit would compute its last block again.
            tokens = prompt(length + 1, f"{decode.name}/{options.seed}/{length}/{number}")
            samples.append(sample_of(decode, to_decode, to_prefill, tokens, most))
        samples = samples[WARM_UP:]
        row = figures(samples)
        if options.streams:
            step = step_of(to_decode)
            mean = statistics.fmean(sample["leg over hit"] for sample in samples)
            row = {**row, "step ms": step * 1e3, "steps over hit": mean / step}
        return row


@contextmanager
def busy(decode: Client, count: int) -> Iterator[None]:
    """Let decode generate answers. Their client reads nothing, and hangs up at the end."""
    address = urllib.parse.urlsplit(decode.url).netloc
    since = CountersSince(decode)
    tokens = prompt(16, "streams")
    body = {"model": MODEL_NAME, "prompt": tokens, "n": count, "max_tokens": STREAM_TOKENS}
    with closing(http.client.HTTPConnection(address)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", COMPLETIONS, json.dumps(body | {"ignore_eos": True}), headers)
        since.wait_for("vllm:num_requests_running", count)
        yield
    since.wait(lambda changed: not changed["vllm:num_requests_running"], 60.0)


def step_of(decode: Client) -> float:
    """The seconds between two tokens of an answer."""
    tokens = prompt(16, "step")
    first, whole = (decode.complete(tokens, n, logprobs=None).seconds for n in (1, 1 + STEPS))
    return (whole - first) / STEPS


def prompt(length: int, seed: str) -> list[int]:
    """Token ids of the vocabulary that all our models have."""
    chooser = random.Random(seed)  # noqa: S311 - the same each time
    return chooser.choices(range(len(SPECIALS), len(SPECIALS) + len(words())), k=length)


def sample_of(
    engine: Engine, decode: Client, prefill: Client, tokens: Sequence[int], most: float
) -> dict[str, float]:
    """Ask decode with a ticket, then without one, each after a pause of at most `most`; seconds.

    Raises:
        RuntimeError: if decode did not load the prompt.
    """
    # Right after an answer, which ends a step, the hit would always wait for the same part of one.
    pauses = random.Random(str(tokens))  # noqa: S311 - the same each time
    since = CountersSince(decode)
    ticket = prefill.ticket(tokens)
    time.sleep(pauses.uniform(0, most))
    leg = decode.complete(tokens, 1, logprobs=None, kv_transfer_params=ticket).seconds
    time.sleep(pauses.uniform(0, most))
    hit = decode.complete(tokens, 1, logprobs=None).seconds
    loaded = Loaded.from_counters(since.wait_for(LOADS))
    if loaded.loads != 1:
        raise RuntimeError(f"{engine.name}: {loaded.loads} loads; see {engine.log_path}")
    return {"leg": leg, "hit": hit, "leg over hit": leg - hit, "transfer": loaded.seconds}


def figures(samples: Sequence[dict[str, float]]) -> Row:
    """Medians of one length."""
    times = {name: [sample[name] for sample in samples] for name in samples[0]}
    medians = {f"{name} ms": statistics.median(times[name]) * 1e3 for name in times}
    return {**medians, "leg to hit": ratio(times["leg"], times["hit"])}
