"""Pairs of vLLM engines whose cost is measured: the same for each connector."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.shapes import MODELS
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import OVERLAP, Connector, EngineSpec
from harness.cluster.models.files import ensure_tiny_model

CPU_BLOCKS: Final = 256
"""On CPU, of 128 tokens: with vLLM's least cache, 1 GiB, many ranks do not fit into memory."""

START_TIMEOUT_S: Final = 900.0
"""On two cores that others use too, four engines import vLLM for minutes."""

DECODE_GRAPHS: Final = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
"""vLLM compiles nothing, and decode's steps are CUDA graphs: a start takes seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines."""
    parser.add_argument("--shape", choices=list(MODELS), default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"), help="default 1 1"
    )
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}-gpus", metavar="N,N", help="default: the first ones")
    parser.add_argument("engine_args", nargs="*", help="more arguments of all engines, after --")


def new_cluster() -> Cluster:
    """Engines that are not forked from a warm process, so that they cost as much as a user's."""
    return Cluster(warm=False, start_timeout_s=START_TIMEOUT_S)


def pair_of(
    connector: Connector, options: argparse.Namespace, *, caching: bool = False
) -> list[EngineSpec]:
    """Prefill and decode, with a prefix cache or without. Loads are not verified."""
    config = {"verify": "off", "overlap": "off"} if connector == "nixl-kv" else {}
    fields = engine_fields(options, caching=caching) | {"connector_config": config}
    specs = pair_specs(model_of(options), connector, suffix=f"-{connector}", **fields)
    gpus = options.prefill_gpus, options.decode_gpus
    return [
        replace(spec, tensor_parallel=tp, extra_env=visible(some))
        for spec, tp, some in zip(specs, options.tp, gpus, strict=True)
    ]


def with_overlap(spec: EngineSpec, name: str | None = None) -> EngineSpec:
    """The same engine with the setting `overlap`."""
    config = {**spec.connector_config, **OVERLAP}
    return replace(spec, name=name or spec.name, connector_config=config)


def with_options(spec: EngineSpec, *extra: str, name: str | None = None) -> EngineSpec:
    """The same engine with further options of `vllm serve`."""
    return replace(spec, name=name or spec.name, extra_args=(*extra, *spec.extra_args))


def plain_engine(options: argparse.Namespace, *, prefill: bool = False) -> EngineSpec:
    """One engine without a connector, with decode's shape and GPUs, or prefill's."""
    fields = engine_fields(options, caching=False)
    gpus = options.prefill_gpus if prefill else options.decode_gpus
    fields |= {"tensor_parallel": options.tp[not prefill], "extra_env": visible(gpus)}
    return EngineSpec("plain", model_of(options), **fields)


def engine_fields(options: argparse.Namespace, *, caching: bool) -> dict[str, Any]:
    """The fields that all specs have in common."""
    extra: list[str] = [] if caching else ["--no-enable-prefix-caching"]
    extra += DECODE_GRAPHS if options.device == "cuda" else ()
    extra += ["--load-format", "dummy"] if options.shape != "tiny" else []
    return {
        "device": options.device,
        "dtype": options.dtype,
        "extra_args": (*extra, *options.engine_args),
        "cores": frozenset(),
        "num_blocks": CPU_BLOCKS if options.device == "cpu" else None,
    }


def model_of(options: argparse.Namespace) -> Path:
    """The folder of its files, without weights unless it is tiny."""
    model = replace(MODELS[options.shape], dtype=options.dtype)
    return ensure_tiny_model(model=model, weights=options.shape == "tiny")


def weight_bytes(options: argparse.Namespace) -> int:
    """The bytes of all weights. Imports transformers."""
    import torch  # noqa: PLC0415 - takes seconds
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - likewise

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_of(options)))
    itemsize = int(getattr(torch, options.dtype).itemsize)
    return itemsize * sum(int(one.numel()) for one in model.parameters())


def visible(gpus: str | None) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
