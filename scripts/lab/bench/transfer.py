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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pd.client import Client
from pd.cluster import PAIR_ROLES, Cluster, ClusterSpec
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

WANT_TICKET: Final = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """The medians of one prompt length; times in seconds."""

    tokens: int
    alone: float
    apart: float
    moved: Moved


class Pair:
    """A prefill and a decode engine, asked as a router asks them."""

    def __init__(self, cluster: Cluster, connector: Connector) -> None:
        """Connect to both."""
        self._prefill = Client(cluster.prefill[0].url)
        self._decode = Client(cluster.decode[0].url)
        self._names = METRICS[connector]
        self._seeds = itertools.count()

    def prompt(self, length: int) -> str:
        """A prompt that no engine has seen."""
        return random_prompt(length, next(self._seeds))

    def apart(self, prompt: str, max_tokens: int = 1) -> tuple[str, float]:
        """Prefill, then decode: the answer, and the seconds of both requests together."""
        begin = time.perf_counter()
        ticket = self._prefill.ticket(prompt, WANT_TICKET)
        answer = self._decode.complete(prompt, max_tokens, kv_transfer_params=ticket)
        return answer.text, time.perf_counter() - begin

    def alone(self, prompt: str, max_tokens: int = 1) -> tuple[str, float]:
        """The prefill engine does all by itself."""
        answer = self._prefill.complete(prompt, max_tokens)
        return answer.text, answer.seconds

    def row(self, length: int, repeat: int) -> Row:
        """Alone and apart in turn, each time on a prompt of its own."""
        alone, apart, moved = [], [], []
        for _ in range(repeat):
            alone.append(self.alone(self.prompt(length))[1])
            before = self._decode.counters()
            apart.append(self.apart(self.prompt(length))[1])
            changed = self._decode.counters_after(before, self._names.nbytes)
            moved.append(Moved.from_counters(changed, self._names))
        middle = sorted(moved, key=lambda one: one.seconds)[len(moved) // 2]
        return Row(length, statistics.median(alone), statistics.median(apart), middle)


def measure(pair: Pair, lengths: Sequence[int], repeat: int) -> list[Row]:
    """One row for each length; a first round, which connects and warms up, is not counted."""
    for length in lengths:
        pair.apart(pair.prompt(length))
        pair.alone(pair.prompt(length))
    return [pair.row(length, repeat) for length in lengths]


def count_matches(pair: Pair, lengths: Sequence[int]) -> int:
    """How many answers through both engines are those of the prefill engine alone."""
    prompts = [pair.prompt(length) for length in lengths]
    return sum(
        pair.apart(prompt, ANSWER_TOKENS)[0] == pair.alone(prompt, ANSWER_TOKENS)[0]
        for prompt in prompts
    )


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


def connector_config(options: argparse.Namespace) -> dict[str, object]:
    """Of nixl_kv."""
    layout = {"layout": options.layout} if options.layout else {}
    return {"verify": options.verify} | layout


def specs(options: argparse.Namespace, connector: Connector) -> ClusterSpec:
    """A prefill and a decode engine, which may share one device."""
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
        "connector_config": connector_config(options) if connector == "nixl-kv" else {},
    }
    prefill, decode = (
        EngineSpec(role, model, role, connector, tensor_parallel=tp, **shared)
        for role, tp in zip(PAIR_ROLES, options.tp, strict=True)
    )
    return ClusterSpec([prefill], [decode])


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--connector", nargs="+", default=["nixl-kv"])
    parser.add_argument("--shape", choices=["tiny", "qwen3-8b"], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend")
    parser.add_argument("--block-size", type=int)
    parser.add_argument(
        "--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"), help="default 1 1"
    )
    parser.add_argument("--layout", help="of nixl_kv's caches; default: its own choice")
    parser.add_argument("--verify", default="off", help="off (default), sample:RATE or all")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1000, 2000])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument("engine_args", nargs="*", help="more arguments of both engines, after --")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run; 0 only if all answers of a real model match."""
    options = parse_arguments(arguments)
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-transfer-"))
    good = True
    for connector in options.connector:
        spec = specs(options, connector)
        with Cluster(spec, log_dir=log_dir / connector, route=False) as cluster:
            pair = Pair(cluster, connector)
            rows = measure(pair, options.lengths, options.repeat)
            tp = "TP{} to TP{}".format(*options.tp)
            layout, backend = options.layout or "auto", options.attention_backend or "auto"
            print_rows(f"{connector}, {options.shape}, {tp}, {backend}, layout {layout}", rows)
            if options.shape == "tiny":
                checked = options.lengths * 4
                same = count_matches(pair, checked)
                print(f"{same}/{len(checked)} answers match")
                good = good and same == len(checked)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
