"""How much longer does the first token take when decode runs elsewhere, and how fast is the link?

For each prompt length: the time of a prefill with one token on the prefill engine alone; the time
of the same on a prompt of its own through both engines, as a router would send it; the difference;
and from the decode engine's counters what was moved, in how many pieces, and how fast.

With --against, engines of another checkout of nixl_kv run beside ours, and both are asked in turn.
A ratio is ours to theirs, of each round: the median of all rounds, and where half of them lie.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lab.bench import engines
from lab.bench.checkouts import AGAINST, REPO, checkout, environment_of
from lab.bench.timing import ratio
from lab.cluster.cluster import Cluster, pair_specs
from lab.cluster.engines import Connector, EngineSpec
from lab.cluster.metrics import LOADED_METRICS, CountersSince, Loaded
from lab.cluster.models.files import ensure_tiny_model
from lab.cluster.models.qwen3 import TinyModel
from lab.cluster.pair import Pair
from lab.cluster.prompts import random_prompt
from lab.results import Figures, Results, verdict_of

QWEN3_8B: Final = TinyModel(
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

ANSWER_TOKENS: Final = 16
CHECKED: Final = 4
"""Answers that are compared, of each length."""
CPU_BLOCK_SIZE: Final = 128
CPU_CACHE_TOKENS: Final = 32_768
"""Of each engine on CPU: with vLLM's least cache, 1 GiB, many ranks do not fit into memory."""
GPU_SHARE: Final = 0.8
"""Of a GPU's memory, for all engines that share it."""
START_TIMEOUT_S: Final = 900.0
"""On two cores that others use too, four engines import vLLM for minutes."""


@dataclass
class Samples:
    """What was measured at one prompt length, round by round; times in seconds."""

    alone: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    moved: list[Loaded] = field(default_factory=list)

    def add(self, pair: Pair, connector: Connector, alone: str, apart: str) -> None:
        """One round, with a prompt for each way.

        Raises:
            RuntimeError: if a rank of decode has not read its part.
        """
        self.alone.append(pair.to_prefill.complete(alone, 1).seconds)
        since = CountersSince(pair.to_decode)
        begin = time.perf_counter()
        pair.complete(apart, 1)
        self.apart.append(time.perf_counter() - begin)
        ranks = pair.decode.spec.ranks
        changed = since.wait_for(LOADED_METRICS[connector]["loads"], ranks)
        moved = Loaded.from_counters(changed, connector)
        if moved.loads < ranks:
            raise RuntimeError(
                f"{moved.loads} of {ranks} ranks of {pair.decode.name} have read; "
                f"see {pair.decode.log_path}"
            )
        self.moved.append(moved)

    @property
    def transfers(self) -> list[float]:
        """How long each transfer took; where several ranks read at the same time, on average."""
        return [moved.seconds / moved.loads for moved in self.moved]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Engines, prompts, and whom to compare with."""
    engines.add_options(parser)
    parser.add_argument(
        "--against", type=checkout, metavar="DIR", help="a checkout of nixl_kv to compare with"
    )
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
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help=f"of each engine; default: {GPU_SHARE} for all together. All use the first GPUs",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1000, 2000])
    parser.add_argument("--repeat", type=int, default=7, help="rounds, 2 or more")
    parser.add_argument("engine_args", nargs="*", help="more arguments of all engines, after --")


def run(options: argparse.Namespace) -> int:
    """A row for each prompt length and pair of engines; 0 only if no answer is wrong."""
    tp, layout = "TP{} to TP{}".format(*options.tp), options.layout or "auto"
    backend = options.attention_backend or "auto"
    title = f"{options.shape} on {options.device}, {tp}, backend {backend}, layout {layout}"
    results = Results(title, "rows are measured", options.json)
    expected = 0
    with Cluster(options.log_dir, warm=False, start_timeout_s=START_TIMEOUT_S) as cluster:
        for connector in options.connector:
            with running_pairs(cluster, connector, options) as pairs:
                expected += len(pairs) * len(options.lengths)
                for figures_of_pair in measure(pairs, connector, options):
                    results.add(figures_of_pair)
    return results.print(expected)


@contextlib.contextmanager
def running_pairs(
    cluster: Cluster, connector: Connector, options: argparse.Namespace
) -> Iterator[dict[str, Pair]]:
    """Our engines, and those of the other checkout."""
    checkouts: dict[str, Path] = {connector: REPO}
    if options.against and connector == "nixl-kv":
        checkouts[AGAINST] = options.against
    share = options.gpu_memory_utilization or GPU_SHARE / (2 * len(checkouts))
    specs = [
        spec
        for name, path in checkouts.items()
        for spec in engine_specs(connector, name, path, share, options)
    ]
    started = cluster.start(*specs)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.end, *started)
        yield {
            name: stack.enter_context(Pair(prefill, decode))
            for name, prefill, decode in zip(checkouts, started[::2], started[1::2], strict=True)
        }


def engine_specs(
    connector: Connector, name: str, path: Path, gpu_share: float, options: argparse.Namespace
) -> list[EngineSpec]:
    """Prefill and decode, which may share GPUs."""
    extra = ["--no-enable-prefix-caching", "--enforce-eager"]
    if options.shape == "tiny":
        model = ensure_tiny_model(model=replace(TinyModel(), dtype=options.dtype))
    else:
        model = ensure_tiny_model(model=QWEN3_8B, weights=False)
        extra += ["--load-format", "dummy"]
    if options.attention_backend:
        extra += ["--attention-backend", options.attention_backend]
    fields: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "block_size": options.block_size,
        "gpu_memory_utilization": gpu_share,
        "extra_args": (*extra, *options.engine_args),
    }
    if options.device == "cuda":
        fields["cores"] = frozenset()
    else:
        fields["num_blocks"] = CPU_CACHE_TOKENS // (options.block_size or CPU_BLOCK_SIZE)
    if connector == "nixl-kv":
        layout = {"layout": options.layout} if options.layout else {}
        fields["connector_config"] = {"verify": options.verify} | layout
        fields["extra_env"] = environment_of(path)
    specs = pair_specs(model, connector, suffix=f"-{name}", **fields)
    return [replace(spec, tensor_parallel=tp) for spec, tp in zip(specs, options.tp, strict=True)]


def measure(
    pairs: Mapping[str, Pair], connector: Connector, options: argparse.Namespace
) -> Iterator[Figures]:
    """Rows of all pairs; each length is asked for once before, which connects and warms up."""
    seeds = itertools.count()
    for length in options.lengths:
        ask_in_turn(pairs, connector, [length], seeds)
    for length in options.lengths:
        samples = ask_in_turn(pairs, connector, [length] * options.repeat, seeds)
        for name, pair in pairs.items():
            asked = CHECKED if options.shape == "tiny" else 0
            prompts = [random_prompt(length, next(seeds)) for _ in range(asked)]
            same = count_matches(pair, prompts)
            matches = f"{same}/{asked} answers match" if asked else ""
            theirs = None if name == AGAINST else samples.get(AGAINST)
            yield Figures(
                {"engines": name, "tokens": length} | figures(samples[name], theirs),
                verdict_of("" if same == asked else matches, good=matches),
            )


def ask_in_turn(
    pairs: Mapping[str, Pair], connector: Connector, lengths: Sequence[int], seeds: Iterator[int]
) -> dict[str, Samples]:
    """A round for each length; who is first changes from round to round."""
    samples = {name: Samples() for name in pairs}
    for number, length in enumerate(lengths):
        prompts = [random_prompt(length, next(seeds)) for _ in range(2)]
        for name in sorted(pairs, reverse=bool(number % 2)):
            samples[name].add(pairs[name], connector, *prompts)
    return samples


def count_matches(pair: Pair, prompts: Sequence[str]) -> int:
    """How many answers through both engines are those of the prefill engine alone."""
    return sum(
        pair.complete(prompt, ANSWER_TOKENS).tokens
        == pair.to_prefill.complete(prompt, ANSWER_TOKENS).tokens
        for prompt in prompts
    )


def figures(ours: Samples, theirs: Samples | None) -> dict[str, str | int | float]:
    """The medians of a pair of engines, and ratios to another one's."""
    alone, apart = statistics.median(ours.alone), statistics.median(ours.apart)
    transfer = statistics.median_low(ours.transfers)
    moved = ours.moved[ours.transfers.index(transfer)]
    measured: dict[str, str | int | float] = {
        "alone ms": alone * 1e3,
        "apart ms": apart * 1e3,
        "added ms": (apart - alone) * 1e3,
        "MiB": moved.nbytes / 2**20,
        "pieces": moved.descriptors,
        "transfer ms": transfer * 1e3,
        "GB/s": moved.nbytes / transfer / 1e9,
    }
    if theirs is not None:
        measured["transfer ratio"] = ratio(ours.transfers, theirs.transfers)
        measured["apart ratio"] = ratio(ours.apart, theirs.apart)
    return measured
