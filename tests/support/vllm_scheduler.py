"""vLLM's own scheduler around a connector, without workers: the test plays those."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from support.vllm_objects import MAX_TOKENS, MODEL

BLOCK: Final = 16


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


def make_scheduler(config: VllmConfig, groups: Sequence[KVCacheGroupSpec] = ()) -> Scheduler:
    """The scheduler, with its connector; by default for one layer with full attention."""
    if not groups:
        dtype = config.model_config.dtype
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=dtype)
        groups = [KVCacheGroupSpec(["layer"], spec)]
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(config.cache_config.num_gpu_blocks, [], list(groups)),
        structured_output_manager=StructuredOutputManager(config),
        block_size=max(group.kv_cache_spec.block_size for group in groups),
        hash_block_size=BLOCK,
        log_stats=True,
    )


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
