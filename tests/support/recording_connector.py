"""The connector, which also writes down what vLLM hands to its hooks. See `record_vllm`."""

import dataclasses
from typing import Any, Final

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.protocol import events

Record = dict[str, Any]

UNUSED: Final = frozenset(
    ("sampling_params", "pooling_params", "prompt_token_ids", "prefill_token_ids")
)
"""Of a request that is scheduled for the first time."""

calls: dict[str, list[Record]] = {"scheduler": [], "worker": []}
engine: Record = {}


def plain(value: Any) -> Any:
    """As JSON has it. What is none of these types is told by its type alone."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"<{type(value).__name__}>"


def fields_of(record: Any, leave_out: frozenset[str] = frozenset()) -> Record:
    """Of a dataclass, by name."""
    return {
        field.name: plain(getattr(record, field.name))
        for field in dataclasses.fields(record)
        if field.name not in leave_out
    }


def request_of(request: Request) -> Record:
    """What is used of a request, and changes while it lives."""
    return {
        "request_id": request.request_id,
        "status": request.status.name,
        "num_computed_tokens": request.num_computed_tokens,
    }


def output_of(output: SchedulerOutput) -> Record:
    """What is used of a step."""
    cached = fields_of(output.scheduled_cached_reqs, frozenset({"all_token_ids"}))
    return {
        "scheduled_new_reqs": [fields_of(new, UNUSED) for new in output.scheduled_new_reqs],
        "scheduled_cached_reqs": cached,
        "num_scheduled_tokens": plain(output.num_scheduled_tokens),
        "finished_req_ids": plain(output.finished_req_ids),
        "preempted_req_ids": plain(output.preempted_req_ids),
    }


def command_of(command: events.Command) -> Record:
    """Its kind, and what of it is the same in each run."""
    kept = {
        name: plain(value)
        for name, value in msgspec.structs.asdict(command).items()
        if isinstance(value, int | str | bool) and name not in ("nonce", "claim", "context")
    }
    return {"kind": type(command).__name__, **kept}


def tensor_of(tensor: torch.Tensor, storages: dict[int, int]) -> Record:
    """A view; `storage` is the number of the storage behind it."""
    storage = tensor.untyped_storage()
    number = storages.setdefault(storage.data_ptr(), len(storages))
    return {
        "storage": number,
        "storage_bytes": storage.nbytes(),
        "offset": tensor.storage_offset(),
        "shape": plain(tuple(tensor.shape)),
        "stride": plain(tensor.stride()),
        "dtype": plain(tensor.dtype),
    }


def cache_of(config: KVCacheConfig) -> Record:
    """Groups, with their layers' specs."""
    return {
        "num_blocks": config.num_blocks,
        "groups": [
            {
                "layer_names": plain(group.layer_names),
                "spec": type(group.kv_cache_spec).__name__,
                "fields": fields_of(group.kv_cache_spec),
            }
            for group in config.kv_cache_groups
        ],
    }


def engine_of(config: VllmConfig) -> Record:
    """What is used of an engine's configuration."""
    model = config.model_config
    return {
        "transfer": fields_of(config.kv_transfer_config),
        "model": {
            "served_model_name": plain(model.served_model_name),
            "architecture": model.architecture,
            "dtype": plain(model.dtype),
            "max_model_len": model.max_model_len,
            "use_mla": model.use_mla,
            "hf_text_config": plain(model.hf_text_config.to_dict()) | {"_name_or_path": "tiny"},
            "total_num_kv_heads": model.model_arch_config.total_num_kv_heads,
        },
        "block_size": config.cache_config.block_size,
        "backends": {
            name: layer.attn_backend.get_name()
            for name, layer in config.compilation_config.static_forward_context.items()
            if hasattr(layer, "attn_backend")
        },
    }


class RecordingConnector(NixlKVConnector):
    """Writes each call down, with what the connector answered."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine["cache"] = cache_of(kv_cache_config)

    def _scheduler_call(self, hook: str, result: Any = None, **arguments: Any) -> None:
        calls["scheduler"].append({"hook": hook, **arguments, "result": result})

    def _worker_call(self, hook: str, **arguments: Any) -> None:
        calls["worker"].append({"hook": hook, **arguments})

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        arrived = {
            "prompt_token_ids": plain(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "kv_transfer_params": plain(request.kv_transfer_params),
            "abort_immediately": request.abort_immediately,
        }
        self._scheduler_call("on_new_request", request=request_of(request) | arrived)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        result = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._scheduler_call(
            "get_num_new_matched_tokens",
            plain(result),
            request=request_of(request),
            num_computed_tokens=num_computed_tokens,
        )
        return result

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._scheduler_call(
            "update_state_after_alloc",
            request=request_of(request),
            block_ids=plain(blocks.get_block_ids()),
            num_external_tokens=num_external_tokens,
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        manager = self._blocks.manager
        scheduled = scheduler_output.num_scheduled_tokens
        tables = {request: plain(manager.get_block_ids(request)) for request in scheduled}
        metadata = super().build_connector_meta(scheduler_output)
        commands = [command_of(command) for command in metadata.commands]
        output = output_of(scheduler_output)
        if commands or any(output[name] for name in output if name != "scheduled_cached_reqs"):
            self._scheduler_call("build_connector_meta", commands, output=output, tables=tables)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        finished = {
            name: plain(getattr(connector_output, name))
            for name in ("finished_sending", "finished_recving")
        }
        if any(finished.values()):
            self._scheduler_call("update_connector_output", **finished)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        result = super().request_finished_all_groups(request, block_ids)
        self._scheduler_call(
            "request_finished_all_groups",
            plain(result),
            request=request_of(request),
            block_ids=plain(block_ids),
        )
        return result

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        ranks = [list(rank) for rank in metadata]
        self._scheduler_call("set_xfer_handshake_metadata_pp_aware", ranks=ranks)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        engine.update(engine_of(self._vllm_config))
        storages: dict[int, int] = {}
        tensors = {name: tensor_of(tensor, storages) for name, tensor in kv_caches.items()}
        self._worker_call("register_kv_caches", kv_caches=tensors)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        commands = [command_of(command) for command in connector_metadata.commands]
        if commands:
            self._worker_call("bind_connector_metadata", commands=commands)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if any(fields_of(results).values()):
            self._worker_call("get_transfer_results", result=fields_of(results))
        return results
