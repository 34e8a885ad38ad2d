"""vLLM's objects, made again from what `record_vllm` has written down."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVQuantMode
from vllm.v1.request import Request, RequestStatus

Record = dict[str, Any]

FOLDER: Final = Path(__file__).resolve().parents[1] / "unit/connector/recorded"


def recorded(name: str) -> Any:
    """The content of a file, a new one each time."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def spec_of(record: Record, **changed: Any) -> KVCacheSpec:
    """Of a cache group."""
    values = record["fields"] | changed
    values["dtype"] = getattr(torch, values["dtype"])
    values["kv_quant_mode"] = KVQuantMode(values["kv_quant_mode"])
    spec: KVCacheSpec = getattr(kv_cache_interface, record["spec"])(**values)
    return spec


def kv_cache_config() -> KVCacheConfig:
    """Of the engine that was recorded."""
    cache = recorded("engine")["cache"]
    groups = [KVCacheGroupSpec(group["layer_names"], spec_of(group)) for group in cache["groups"]]
    return KVCacheConfig(cache["num_blocks"], [], groups)


def vllm_config(extra: Record | None = None, **transfer: Any) -> VllmConfig:
    """The same engine's configuration.

    Args:
        extra: `kv_connector_extra_config`, by default with any free port.
        transfer: other fields of `kv_transfer_config` that are to differ.
    """
    engine = recorded("engine")
    config = VllmConfig()
    values = engine["transfer"] | {"kv_connector_extra_config": extra or {"port": 0}} | transfer
    config.kv_transfer_config = KVTransferConfig(**values)
    config.cache_config.block_size = engine["block_size"]
    model = engine["model"]
    text_config = model["hf_text_config"]
    hf_config = SimpleNamespace(to_dict=lambda: dict(text_config))
    config.model_config = SimpleNamespace(
        architecture=model["architecture"],
        enable_sleep_mode=False,
        is_hybrid=False,
        max_model_len=model["max_model_len"],
        multimodal_config=None,
        served_model_name=model["served_model_name"],
        dtype=getattr(torch, model["dtype"]),
        use_mla=model["use_mla"],
        hf_config=hf_config,
        hf_text_config=hf_config,
        model_arch_config=SimpleNamespace(
            total_num_kv_heads=model["total_num_kv_heads"], per_layer_overrides=None
        ),
    )
    config.compilation_config.static_forward_context = {
        layer: SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda name=name: name))
        for layer, name in engine["backends"].items()
    }
    return config


def kv_caches() -> dict[str, torch.Tensor]:
    """Caches of zeros, as a worker registers them: views of one storage."""
    (call,) = (call for call in recorded("worker") if call["hook"] == "register_kv_caches")
    records = call["kv_caches"]
    storages = {
        record["storage"]: torch.zeros(record["storage_bytes"], dtype=torch.uint8)
        for record in records.values()
    }
    return {
        layer: storages[record["storage"]]
        .view(getattr(torch, record["dtype"]))
        .as_strided(record["shape"], record["stride"], record["offset"])
        for layer, record in records.items()
    }


def request_of(record: Record) -> Request:
    """A request on arrival."""
    transfer = record["kv_transfer_params"]
    return Request(
        request_id=record["request_id"],
        prompt_token_ids=record["prompt_token_ids"],
        sampling_params=SamplingParams(
            max_tokens=record["max_tokens"],
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        ),
        pooling_params=None,
        abort_immediately=record["abort_immediately"],
    )


_numbers = itertools.count()


def new_request(params: Any = None, num_tokens: int = 100, **changed: Any) -> Request:
    """A request like the recorded ones, with an id of its own."""
    values = {
        "request_id": f"request-{next(_numbers)}",
        "prompt_token_ids": list(range(num_tokens)),
        "max_tokens": 1,
        "kv_transfer_params": params,
        "abort_immediately": False,
    }
    return request_of(values | changed)


def update(request: Request, record: Record) -> None:
    """Let a request be as it was at a later call."""
    request.status = RequestStatus[record["status"]]
    request.num_computed_tokens = record["num_computed_tokens"]


def output_of(record: Record) -> SchedulerOutput:
    """What a step computes."""
    cached = record["scheduled_cached_reqs"]
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                **new | {"prompt_token_ids": [], "sampling_params": None, "pooling_params": None}
            )
            for new in record["scheduled_new_reqs"]
        ],
        scheduled_cached_reqs=CachedRequestData(
            **cached | {"all_token_ids": {}, "resumed_req_ids": set(cached["resumed_req_ids"])}
        ),
        num_scheduled_tokens=record["num_scheduled_tokens"],
        total_num_scheduled_tokens=sum(record["num_scheduled_tokens"].values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(record["finished_req_ids"]),
        num_common_prefix_blocks=[],  # vLLM 0.31 has no default for it
        free_encoder_mm_hashes=[],
        preempted_req_ids=set(record["preempted_req_ids"] or ()),
    )


def empty_output() -> SchedulerOutput:
    """A step that computes nothing."""
    output: SchedulerOutput = SchedulerOutput.make_empty()
    return output
