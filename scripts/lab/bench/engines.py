"""Engines of vLLM whose cost is measured: the same for each connector."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lab.bench.checkouts import REPO, environment_of
from lab.cluster.cluster import Cluster, pair_specs
from lab.cluster.engines import Connector, EngineSpec
from lab.cluster.models.files import ensure_tiny_model
from lab.cluster.models.qwen3 import TinyModel
from lab.cluster.router import Router
from lab.suites.demo import CONNECTORS

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

CPU_BLOCK_SIZE: Final = 128
CPU_CACHE_TOKENS: Final = 32_768
"""Of each engine on CPU: with vLLM's least cache, 1 GiB, many ranks do not fit into memory."""
GPU_SHARE: Final = 0.8
"""Of a GPU's memory, for all engines that share it."""
START_TIMEOUT_S: Final = 900.0
"""On two cores that others use too, four engines import vLLM for minutes."""
DECODE_GRAPHS: Final = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
"""Nothing is compiled, and decode's steps are CUDA graphs: to start takes seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which connectors."""
    parser.add_argument("--connector", nargs="+", choices=CONNECTORS, default=["nixl-kv"])
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")


@contextlib.contextmanager
def running_pair(cluster: Cluster, model: Path, connector: Connector) -> Iterator[Router]:
    """Prefill and decode on all cores, without digests, which the one inside vLLM does not have."""
    config = {"verify": "off"} if connector == "nixl-kv" else {}
    specs = pair_specs(
        model, connector, suffix=f"-{connector}", cores=frozenset(), connector_config=config
    )
    prefill, decode = cluster.start(*specs)
    try:
        yield cluster.route([prefill], [decode])
    finally:
        cluster.end(prefill, decode)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How prefill and decode are made."""
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
    parser.add_argument("--eager", action="store_true", help="on GPUs: no CUDA graphs on decode")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-gpus", metavar="N,N", help="default: as many of the first ones as it needs"
        )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help=f"of each engine; default: {GPU_SHARE} for all together",
    )
    parser.add_argument("engine_args", nargs="*", help="more arguments of all engines, after --")


def add_hit_options(parser: argparse.ArgumentParser, *, lengths: Sequence[int]) -> None:
    """The same where loads are compared with prefix hits; `lengths` are the default."""
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    add_engine_options(parser)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=lengths,
        help="tokens that are loaded or hit, in whole blocks; one more is computed",
    )


def title(options: argparse.Namespace) -> str:
    """What all engines of a run have in common."""
    tp, layout = "TP{} to TP{}".format(*options.tp), options.layout or "auto"
    backend = options.attention_backend or "auto"
    return f"{options.shape} on {options.device}, {tp}, backend {backend}, layout {layout}"


def pair_of(
    connector: Connector,
    options: argparse.Namespace,
    *,
    path: Path = REPO,
    of: int = 1,
    suffix: str = "",
    caching: bool = False,
    **fields: Any,
) -> list[EngineSpec]:
    """Prefill and decode, of the checkout at `path`.

    Args:
        connector: of both.
        options: see `add_engine_options`.
        path: where nixl_kv is imported from.
        of: how many such pairs run at the same time, and share GPUs.
        suffix: of their names.
        caching: whether they have a prefix cache.
        fields: more of both specs.
    """
    given = {**engine_fields(options, of=2 * of, caching=caching), **fields}
    if connector == "nixl-kv":
        layout = {"layout": options.layout} if options.layout else {}
        given["connector_config"] = {"verify": options.verify} | layout
        given["extra_env"] = environment_of(path) | given.get("extra_env", {})
    specs = pair_specs(model_of(options), connector, suffix=f"-{suffix or connector}", **given)
    return [
        on_gpus(replace(spec, tensor_parallel=tp), gpus)
        for spec, tp, gpus in zip(
            specs, options.tp, (options.prefill_gpus, options.decode_gpus), strict=True
        )
    ]


def plain_engine(options: argparse.Namespace) -> EngineSpec:
    """One engine without a connector, in decode's place."""
    spec = EngineSpec("plain", model_of(options), **engine_fields(options, of=1, caching=False))
    return on_gpus(replace(spec, tensor_parallel=options.tp[1]), options.decode_gpus)


def engine_fields(options: argparse.Namespace, *, of: int, caching: bool) -> dict[str, Any]:
    """What each engine's spec says, where so many share GPUs."""
    extra: list[str] = [] if caching else ["--no-enable-prefix-caching"]
    if options.device == "cuda":
        extra += ["--enforce-eager"] if options.eager else DECODE_GRAPHS
    if options.shape != "tiny":
        extra += ["--load-format", "dummy"]
    if options.attention_backend:
        extra += ["--attention-backend", options.attention_backend]
    fields: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "block_size": options.block_size,
        "gpu_memory_utilization": options.gpu_memory_utilization or GPU_SHARE / of,
        "extra_args": (*extra, *options.engine_args),
        "cores": frozenset(),
    }
    if options.device == "cpu":
        fields["num_blocks"] = CPU_CACHE_TOKENS // (options.block_size or CPU_BLOCK_SIZE)
    return fields


def model_of(options: argparse.Namespace) -> Path:
    """The folder of its model."""
    if options.shape == "tiny":
        return ensure_tiny_model(model=replace(TinyModel(), dtype=options.dtype))
    return ensure_tiny_model(model=QWEN3_8B, weights=False)


def on_gpus(spec: EngineSpec, gpus: str | None) -> EngineSpec:
    """An engine that sees these GPUs alone."""
    if gpus is None:
        return spec
    return replace(spec, extra_env={**spec.extra_env, "CUDA_VISIBLE_DEVICES": gpus})
