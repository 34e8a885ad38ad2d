"""Pairs of vLLM engines whose cost is measured: the same for each connector."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Connector, EngineSpec
from harness.cluster.models.files import ensure_tiny_model
from lab.bench.models import MODELS

CPU_BLOCK_SIZE: Final = 128
CPU_CACHE_TOKENS: Final = 32_768
"""The size of a cache on CPU: with vLLM's least cache, 1 GiB, many ranks do not fit into memory."""

START_TIMEOUT_S: Final = 900.0
"""On two cores that others use too, four engines import vLLM for minutes."""

DECODE_GRAPHS: Final = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
"""vLLM compiles nothing, and decode's steps are CUDA graphs: a start takes seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines."""
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument("--shape", choices=list(MODELS), default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend")
    parser.add_argument("--block-size", type=int)
    parser.add_argument(
        "--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"), help="default 1 1"
    )
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}-gpus", metavar="N,N", help="default: the first ones")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4, help="of each engine")
    parser.add_argument("engine_args", nargs="*", help="more arguments of all engines, after --")


def add_connectors(parser: argparse.ArgumentParser) -> None:
    """The pairs; "none" is one engine, or two, without a connector."""
    choices = ["nixl-kv", "in-tree", "none"]
    parser.add_argument("--connector", nargs="+", choices=choices, default=["nixl-kv"])


@contextmanager
def cluster_of(options: argparse.Namespace) -> Iterator[Cluster]:
    """Engines that are not forked from a warm process, so that they cost as much as a user's."""
    with Cluster(options.log_dir, warm=False, start_timeout_s=START_TIMEOUT_S) as cluster:
        yield cluster


def pair_of(
    connector: Connector, options: argparse.Namespace, *, caching: bool = False, verify: str = "off"
) -> list[EngineSpec]:
    """Prefill and decode, with a prefix cache or without."""
    config = {"verify": verify} if connector == "nixl-kv" else {}
    fields = engine_fields(options, caching=caching) | {"connector_config": config}
    specs = pair_specs(model_of(options), connector, suffix=f"-{connector}-{verify}", **fields)
    gpus = options.prefill_gpus, options.decode_gpus
    return [
        on_gpus(replace(spec, tensor_parallel=tp), some)
        for spec, tp, some in zip(specs, options.tp, gpus, strict=True)
    ]


def plain_engine(options: argparse.Namespace, name: str = "plain") -> EngineSpec:
    """One engine without a connector, with decode's shape and GPUs."""
    spec = EngineSpec(name, model_of(options), **engine_fields(options, caching=False))
    return on_gpus(replace(spec, tensor_parallel=options.tp[1]), options.decode_gpus)


def engine_fields(options: argparse.Namespace, *, caching: bool) -> dict[str, Any]:
    """The fields that all specs have in common."""
    extra: list[str] = [] if caching else ["--no-enable-prefix-caching"]
    extra += DECODE_GRAPHS if options.device == "cuda" else ()
    extra += ["--load-format", "dummy"] if options.shape != "tiny" else []
    if options.attention_backend:
        extra += ["--attention-backend", options.attention_backend]
    fields: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "block_size": options.block_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "extra_args": (*extra, *options.engine_args),
        "cores": frozenset(),
    }
    if options.device == "cpu":
        fields["num_blocks"] = CPU_CACHE_TOKENS // (options.block_size or CPU_BLOCK_SIZE)
    return fields


def model_of(options: argparse.Namespace) -> Path:
    """The folder of its files, without weights unless it is tiny."""
    model = replace(MODELS[options.shape], dtype=options.dtype)
    return ensure_tiny_model(model=model, weights=options.shape == "tiny")


def on_gpus(spec: EngineSpec, gpus: str | None) -> EngineSpec:
    """An engine that sees these GPUs alone."""
    if gpus is None:
        return spec
    return replace(spec, extra_env={**spec.extra_env, "CUDA_VISIBLE_DEVICES": gpus})
