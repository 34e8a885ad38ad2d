"""vLLM's own scheduler around a connector, without workers: the test plays those."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from nixl_kv.connector.scheduler_hooks import hook_scheduler
from nixl_kv.connector.stats import RankReports
from nixl_kv.connector.worker import HandshakeMetadata, WorkerMetadata
from nixl_kv.ids import Incarnation, RequestId, new_incarnation
from nixl_kv.protocol.events import Failure, LoadEnded
from nixl_kv.protocol.messages import encode
from support.records import rank_description
from support.vllm_objects import MAX_TOKENS, MODEL

BLOCK: Final = 16
WANT_TICKET: Final = {"do_remote_decode": True, "do_remote_prefill": False}
OURS: Final = {
    "kv_connector": "NixlKVConnector",
    "kv_connector_module_path": "nixl_kv.connector",
}
"""The fields of KVTransferConfig by which vLLM finds this connector."""
TIER: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
}
"""Those of vLLM's connector for a tier in host memory."""


def ours(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The fields of this connector on any port, without a key; `extra` are its own settings."""
    extra = {"port": 0, "insecure": True, **extra}
    return {**OURS, "kv_role": role, "kv_connector_extra_config": extra}


def multi(*children: Mapping[str, Any], policy: str = "recompute") -> KVTransferConfig:
    """A MultiConnector of these connectors."""
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [dict(child) for child in children]},
    )


def load_reported(
    name: str, num_tokens: int, failure: Failure | None = None, **fields: Any
) -> dict[str, Any]:
    """The report of all workers that a load has ended, for `SteppedScheduler.end`."""
    reports = RankReports()
    reports.add([LoadEnded(RequestId(name), num_tokens, failure, **fields)])
    return {
        "finished_recving": {name},
        "failed_recving": {name} if failure else set(),
        "kv_connector_worker_meta": WorkerMetadata({}, reports),
    }


def make_config(
    transfer: KVTransferConfig | None,
    num_blocks: int,
    *,
    is_async: bool = False,
    caches_prefixes: bool = True,
    **scheduling: Any,
) -> VllmConfig:
    """An engine's configuration; `scheduling` are fields of SchedulerConfig."""
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    config = VllmConfig(
        model_config=MODEL,
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            async_scheduling=is_async,
            **values | scheduling,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caches_prefixes),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )
    register_all_kvcache_specs(config)
    config.scheduler_config.async_scheduling = is_async  # vLLM turns it off on CPUs
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def make_scheduler(
    config: VllmConfig,
    groups: Sequence[KVCacheGroupSpec] = (),
    kind: type[Scheduler] | None = None,
) -> Scheduler:
    """The scheduler, with its connector; by default for one layer with full attention."""
    if not groups:
        dtype = config.model_config.dtype
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=dtype)
        groups = [KVCacheGroupSpec(["layer"], spec)]
    default = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return (kind or default)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(config.cache_config.num_gpu_blocks, [], list(groups)),
        structured_output_manager=StructuredOutputManager(config),
        block_size=max(group.kv_cache_spec.block_size for group in groups),
        hash_block_size=BLOCK,
        log_stats=True,
    )


def hooked(config: VllmConfig) -> type[Scheduler]:
    """The class that vLLM would choose, with the connector's hooks, as a start has it."""
    hook_scheduler(config)
    kind: type[Scheduler] = config.scheduler_config.get_scheduler_cls()
    return kind


@cache
def _hasher() -> Callable[..., Any]:
    kv_cache_utils.init_none_hash(sha256)
    hasher: Callable[..., Any] = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    return hasher


def make_request(
    name: str, tokens: Sequence[int], params: object = None, *, max_tokens: int = 1, **more: Any
) -> Request:
    """A request as vLLM's frontend makes it; it is not added."""
    extra = None if params is None else {"kv_transfer_params": params}
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra, ignore_eos=True),
        pooling_params=None,
        block_hasher=_hasher(),
        **more,
    )


def num_free_blocks(scheduler: Scheduler) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


class SteppedScheduler:
    """vLLM's scheduler with the connector of its configuration. The test is its workers."""

    def __init__(self, config: VllmConfig, kind: type[Scheduler] | None = None) -> None:
        self.vllm = make_scheduler(config, kind=kind)
        self.connector: Any = self.vllm.connector
        self.idle = self.free_blocks

    def describe(self, incarnation: Incarnation | None = None) -> None:
        """Give the scheduler a worker's handshake, as after a start and after a sleep."""
        rank = rank_description(incarnation=incarnation or new_incarnation())
        handshake = {(0, 0): HandshakeMetadata(encode(rank))}
        self.connector.set_xfer_handshake_metadata_pp_aware(handshake)

    @property
    def free_blocks(self) -> int:
        return num_free_blocks(self.vllm)

    def blocks_of(self, name: str) -> list[int]:
        return list(self.vllm.kv_cache_manager.get_block_ids(name)[0])

    def add(self, name: str, tokens: Sequence[int], params: object = None, **more: Any) -> Request:
        request = make_request(name, tokens, params, **more)
        self.vllm.add_request(request)
        return request

    def end(self, output: SchedulerOutput, **reported: Any) -> list[Any]:
        """The outputs of a step. A request that has computed all its tokens gets one more.

        Args:
            reported: fields of the workers' KVConnectorOutput.
        """
        names = list(output.num_scheduled_tokens)
        result = EMPTY_MODEL_RUNNER_OUTPUT
        if names or reported:
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=[[7] * self._is_computed(name) for name in names],
                kv_connector_output=KVConnectorOutput(**reported) if reported else None,
            )
        clients = self.vllm.update_from_output(output, result)
        return [one for client in clients.values() for one in client.outputs]

    def _is_computed(self, name: str) -> bool:
        request = self.vllm.requests.get(name)
        return request is not None and request.num_computed_tokens >= request.num_tokens
