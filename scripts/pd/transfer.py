"""How much longer does the first token take when decode runs elsewhere, and how fast is the link?

For each prompt length: the time of a prefill with one token on the prefill engine alone; the time
of the same on a prompt of its own through both engines, as a router would send it; the difference;
and from the decode engine's counters what was moved, in how many pieces, and how fast.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pd.client import Client
from pd.cluster import Cluster, ClusterSpec
from pd.engines import Connector, EngineSpec
from pd.measure import METRICS, Moved
from pd.prompts import random_prompt
from pd.tiny_model import MODELS, TinyModel, ensure_tiny_model

QWEN3_8B = TinyModel(
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    intermediate=12288,
    max_positions=40960,
    dtype="bfloat16",
)
"""Its KV cache has 144 KiB per token; the vocabulary is ours."""

WANT_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """The medians of one prompt length; times in seconds."""

    tokens: int
    alone: float
    apart: float
    moved: Moved


def ask_apart(prefill: Client, decode: Client, prompt: str, max_tokens: int) -> tuple[str, float]:
    """What a router does: the answer, and the seconds of both requests together."""
    begin = time.perf_counter()
    ticket = prefill.ticket(prompt, WANT_TICKET)
    answer = decode.complete(prompt, max_tokens, kv_transfer_params=ticket)
    return answer.text, time.perf_counter() - begin


def measure(cluster: Cluster, connector: Connector, lengths: Sequence[int], repeat: int) -> list[Row]:
    """One row for each length; a first round, which connects and warms up, is not counted."""
    seeds = itertools.count()
    with Client(cluster.prefill[0].url) as prefill, Client(cluster.decode[0].url) as decode:
        for length in lengths:
            ask_apart(prefill, decode, random_prompt(length, next(seeds)), 1)
            prefill.complete(random_prompt(length, next(seeds)), 1)
        return [
            _measure_length(prefill, decode, length, connector, itertools.islice(seeds, 2 * repeat))
            for length in lengths
        ]


def _measure_length(
    prefill: Client, decode: Client, length: int, connector: Connector, seeds: Iterator[int]
) -> Row:
    names = METRICS[connector]
    alone, apart, moved = [], [], []
    for seed in seeds:
        alone.append(prefill.complete(random_prompt(length, seed), 1).seconds)
        before = decode.counters()
        prompt = random_prompt(length, next(seeds))
        apart.append(ask_apart(prefill, decode, prompt, 1)[1])
        changed = decode.counters_after(before, names.nbytes)
        moved.append(Moved.from_counters(changed, names))
    middle = sorted(moved, key=lambda one: one.seconds)[len(moved) // 2]
    return Row(length, statistics.median(alone), statistics.median(apart), middle)


def print_rows(name: str, rows: Sequence[Row]) -> None:
    """A table in Markdown."""
    print(f"\n{name}\n")
    print("| prompt tokens | alone ms | apart ms | added ms | MiB | pieces | transfer ms | GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        moved = row.moved
        speed = moved.nbytes / moved.seconds / 1e9 if moved.seconds else 0.0
        print(
            f"| {row.tokens} | {row.alone * 1e3:.1f} | {row.apart * 1e3:.1f} "
            f"| {(row.apart - row.alone) * 1e3:.1f} | {moved.nbytes / 2**20:.0f} "
            f"| {moved.descriptors} | {moved.seconds * 1e3:.2f} | {speed:.1f} |",
            flush=True,
        )


def count_matches(cluster: Cluster, lengths: Sequence[int]) -> tuple[int, int]:
    """How many answers through both engines are those of the prefill engine alone."""
    same = 0
    with Client(cluster.prefill[0].url) as prefill, Client(cluster.decode[0].url) as decode:
        for seed, length in enumerate(lengths):
            prompt = random_prompt(length, 10_000 + seed)
            alone = prefill.complete(prompt, ANSWER_TOKENS).text
            same += ask_apart(prefill, decode, prompt, ANSWER_TOKENS)[0] == alone
    return same, len(lengths)


def specs(options: argparse.Namespace, connector: Connector) -> ClusterSpec:
    """A prefill and a decode engine that share one device."""
    extra = ["--no-enable-prefix-caching", "--enforce-eager"]
    if options.shape == "tiny":
        model = ensure_tiny_model(model=replace(TinyModel(), dtype=options.dtype))
    else:
        model = ensure_tiny_model(MODELS, QWEN3_8B, weights=False)
        extra += ["--load-format", "dummy"]
    if options.attention_backend:
        extra += ["--attention-backend", options.attention_backend]
    if options.block_size:
        extra += ["--block-size", str(options.block_size)]
    shared = {
        "device": options.device,
        "dtype": options.dtype,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "extra_args": (*extra, *options.engine_args),
    }
    prefill = EngineSpec("prefill", model, "prefill", connector, **shared)
    decode = EngineSpec("decode", model, "decode", connector, **shared)
    return ClusterSpec([prefill], [decode])


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench-transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--connector", nargs="+", default=["nixl-kv"])
    parser.add_argument("--shape", choices=["tiny", "qwen3-8b"], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1000, 2000])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument("engine_args", nargs="*", help="more arguments of both engines, after --")
    return parser.parse_args()


def main() -> int:
    """Run; 0 only if all answers of a real model match."""
    options = parse_arguments()
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-transfer-"))
    good = True
    for connector in options.connector:
        spec = specs(options, connector)
        with Cluster(spec, log_dir=log_dir / connector, route=False) as cluster:
            rows = measure(cluster, connector, options.lengths, options.repeat)
            print_rows(f"{connector}, {options.shape}, {options.attention_backend or 'auto'}", rows)
            if options.shape == "tiny":
                same, total = count_matches(cluster, options.lengths * 4)
                print(f"{same}/{total} answers match")
                good = good and same == total
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
