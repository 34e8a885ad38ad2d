"""The parts of vLLM that this connector relies on, but that no public API of vLLM promises.

`PARTS` lists them, with the effect of their absence. A start looks them up, before the weights are
loaded: a `ConfigError` or one WARNING names everything that this vLLM lacks.

Presence does not prove that vLLM calls its methods and our hooks in the known order, or that no new
method does the same. So everything that rests on this is off with a vLLM that was not tested; see
`rests_on_order`.
"""

import ast
import dis
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import nixl_kv
from nixl_kv.config import Config
from nixl_kv.errors import ConfigError, get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Engine:
    """The facts about an engine that decide which parts it needs."""

    vllm_config: Any
    config: Config
    is_prefill: bool

    @property
    def has_state(self) -> bool:
        model = self.vllm_config.model_config
        return bool(model.is_hybrid or model.is_attention_free)

    @property
    def num_ranks(self) -> int:
        return int(self.vllm_config.parallel_config.world_size)

    @property
    def has_quantised_cache(self) -> bool:
        stored = str(self.vllm_config.cache_config.cache_dtype)
        return stored.startswith(("fp8", "int", "nvfp4"))

    @property
    def takes_media(self) -> bool:
        model = self.vllm_config.model_config
        return model.multimodal_config is not None and bool(model.supports_multimodal_inputs)

    @property
    def is_on_cpu(self) -> bool:
        return bool(_load("vllm.platforms:current_platform").is_cpu())


@dataclass(frozen=True)
class Absence:
    """The effect of a missing part."""

    text: str
    ends_start: bool = False  # else a feature is off
    concerns: Callable[[Engine], bool] = lambda _: True  # of a start: which engines it ends
    rests_on_order: bool = False  # also off with an untested vLLM


START: Final = Absence("the engine does not start", ends_start=True)
STATE: Final = Absence(
    "a prefill engine with recurrent state does not start",
    ends_start=True,
    concerns=lambda engine: engine.is_prefill and engine.has_state,
)
SEVERAL_STATES: Final = Absence(
    "an engine of several ranks with recurrent state does not start",
    ends_start=True,
    concerns=lambda engine: engine.has_state and engine.num_ranks > 1,
)
SCALES: Final = Absence(
    "an engine with a quantised KV cache does not start",
    ends_start=True,
    concerns=lambda engine: engine.has_quantised_cache,
)
CPU: Final = Absence(
    "an engine on CPU does not start", ends_start=True, concerns=lambda engine: engine.is_on_cpu
)
MEDIA: Final = Absence(
    "an engine whose model takes media does not start, unless media is 'own'",
    ends_start=True,
    concerns=lambda engine: engine.takes_media and engine.config.media != "own",
)
PRIVATE: Final = Absence(
    "media: 'ticket' is refused",
    ends_start=True,
    concerns=lambda engine: engine.takes_media and engine.config.media == "ticket",
)
CHUNKS: Final = Absence(
    "decode reads no prompt in chunks while prefill computes it", rests_on_order=True
)
OVERLAP: Final = Absence("overlap has no effect on decode", rests_on_order=True)
WHOLE_BLOCKS: Final = Absence("engines exchange whole blocks only")
LAYOUT: Final = Absence("layers with pages of several sizes are read in runs of a token")
EARLY_CHECKS: Final = Absence("some settings are checked later in the start")
CONVERSATIONS: Final = Absence("conversations has no effect", rests_on_order=True)
USAGE: Final = Absence("decode tells its clients that all loaded tokens were cached")
MODULE_PATH: Final = Absence(
    '"kv_connector": "NixlKVConnector" needs "kv_connector_module_path": "nixl_kv.connector"'
)
SHARED: Final = Absence("share_dir has no effect on prefill")
# In the API server.
EARLY_ANSWER: Final = Absence("overlap has no effect on prefill", rests_on_order=True)


class Part(NamedTuple):
    """Members of one class, module or function of vLLM that serve one purpose."""

    owner: str  # module:name, or a module
    # `name` for data, `name(a, b)` for a callable whose first parameters are a and b. Further ones
    # must be optional.
    members: tuple[str, ...]
    purpose: str
    absence: Absence = START


_CONFIG: Final = "vllm.config"
_SPECS: Final = "vllm.v1.kv_cache_interface"
_SCHED: Final = "vllm.v1.core.sched"
_KV: Final = "vllm.distributed.kv_transfer.kv_connector"
_LAYERS: Final = "vllm.model_executor.layers.attention"

PARTS: Final = (
    # --- requests
    Part(
        "vllm.v1.request:Request",
        (
            *("request_id", "kv_transfer_params", "sampling_params", "status", "trace_headers"),
            *("resumable", "use_structured_output"),
            *("num_tokens", "num_prompt_tokens", "num_computed_tokens", "prompt_token_ids"),
            *("prompt_embeds", "prompt_is_token_ids", "mm_features", "lora_request", "cache_salt"),
        ),
        "a request's prompt, progress and parameters",
    ),
    Part(
        "vllm.v1.request:Request",
        ("abort_immediately",),
        "tells that vLLM's frontend refused the request, so that it is neither offered nor loaded",
    ),
    Part(
        "vllm.v1.request:Request",
        ("_all_token_ids", "max_tokens", "get_skip_reading_prefix_cache()"),
        "prefill computes all of a prompt but its last token",
        STATE,
    ),
    Part(
        "vllm.v1.request:RequestStatus",
        ("FINISHED_ERROR", "FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "PREEMPTED"),
        "only a prompt that was computed to its end is offered",
    ),
    Part(
        "vllm.v1.request:Request",
        ("client_index", "take_events()", "get_finished_reason()"),
        "ends a request that decode may not compute",
        MEDIA,
    ),
    Part("vllm.v1.request:Request", ("prefill_stats",), "cached tokens in usage", USAGE),
    Part(
        "vllm.v1.metrics.stats:PrefillStats",
        ("num_cached_tokens", "num_prompt_tokens"),
        "the same",
        USAGE,
    ),
    Part(
        "vllm.v1.request:Request",
        ("block_hashes", "update_block_hashes()"),
        "keeps the blocks of a request with stand-ins from other requests",
        PRIVATE,
    ),
    Part(
        "vllm.multimodal.inputs:MultiModalFeatureSpec",
        ("identifier", "mm_position", "data"),
        "media",
    ),
    Part("vllm.multimodal.inputs:PlaceholderRange", ("offset", "length"), "media"),
    # --- steps
    Part(
        f"{_SCHED}.output:SchedulerOutput",
        (
            *("num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids"),
            *("scheduled_new_reqs", "scheduled_cached_reqs"),
        ),
        "the tokens that a step computes, and the requests that it takes blocks from",
    ),
    Part(
        f"{_SCHED}.output:NewRequestData",
        ("req_id", "num_computed_tokens", "sampling_params"),
        "the same",
    ),
    Part(
        "vllm.sampling_params:SamplingParams",
        ("extra_args", "allowed_token_ids"),
        "kv_transfer_params, and the token after a shortened prompt",
    ),
    Part(f"{_SCHED}.output:CachedRequestData", ("req_ids", "num_computed_tokens"), "the same"),
    Part(
        "vllm.v1.outputs:KVConnectorOutput",
        (
            *("finished_sending", "finished_recving", "failed_recving"),
            "kv_connector_worker_meta",
        ),
        "loads and offers that have ended",
    ),
    # --- blocks
    Part(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        ("free(request)", "pop_blocks_for_free(request)"),
        "wrapped: tells that a request loses its blocks, before another request gets them",
    ),
    Part(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        ("get_block_ids(request_id)", "get_blocks(request_id)", "block_pool"),
        "a request's block table, and its blocks of sliding windows",
    ),
    Part("vllm.v1.core.kv_cache_manager:KVCacheBlocks", ("blocks", "get_block_ids()"), "the same"),
    Part("vllm.v1.core.kv_cache_utils:KVCacheBlock", ("block_id", "is_null"), "the same"),
    Part(
        "vllm.v1.core.block_pool:BlockPool",
        ("touch(blocks)", "free_blocks(ordered_blocks)"),
        "pins blocks of sliding windows for decode",
    ),
    # --- the cache
    Part(
        f"{_SPECS}:KVCacheConfig",
        (
            *("num_blocks", "kv_cache_groups", "has_mamba_layers", "host_group_ids"),
            *("transfer_groups", "transfer_group_ids", "select_transfer_block_ids(block_ids)"),
        ),
        "the cache groups whose KV moves",
    ),
    Part(
        f"{_SPECS}:KVCacheConfig",
        ("needs_kv_cache_zeroing",),
        "tells that no step zeroes new blocks before it calls the connector",
        CHUNKS,
    ),
    Part(f"{_SPECS}:KVCacheGroupSpec", ("layer_names", "kv_cache_spec"), "layers of a group"),
    Part(
        f"{_SPECS}:KVCacheSpec",
        ("block_size", "tokens_per_state", "dcp_sharded"),
        "tokens of a block",
    ),
    Part(
        f"{_SPECS}:AttentionSpec",
        (
            *("num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode"),
            *("max_tp_shards", "num_head_slots", "state_content_bytes"),
        ),
        "the bytes of a block",
    ),
    Part(f"{_SPECS}:SlidingWindowSpec", ("sliding_window", "extra_retained_tokens"), "the window"),
    Part(f"{_SPECS}:ChunkedLocalAttentionSpec", ("attention_chunk_size",), "the window"),
    Part(
        f"{_SPECS}:MambaSpec",
        ("shapes", "dtypes", "mamba_type", "num_speculative_blocks", "tp_replicated"),
        "the bytes of a recurrent state",
    ),
    Part(f"{_SPECS}:UniformTypeKVCacheSpecs", ("kv_cache_specs",), "layers of different sizes"),
    # --- layers
    Part(
        f"{_LAYERS}.attention:Attention",
        ("attn_backend", "kv_cache", "kv_cache_dtype"),
        "tells which kernels read the cache, and so what its bytes mean",
        WHOLE_BLOCKS,
    ),
    Part(
        f"{_LAYERS}.attention:set_default_quant_scales",
        ("_k_scale", "_v_scale"),
        "decode compares them with prefill's",
        SCALES,
    ),
    Part(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        ("get_attn_backend()", "is_draft_layer"),
        "kernels; layers of a draft model",
    ),
    Part(
        "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
        ("candidates", "kv_cache_specs"),
        "tell which layouts vLLM accepts, and which layers store keys",
        LAYOUT,
    ),
    Part(
        "vllm.v1.attention.backends.cpu_attn",
        ("_get_attn_isa(dtype, block_size, head_size)",),
        "tells how CPU kernels store a block",
        CPU,
    ),
    Part(
        "vllm.model_executor.layers.mamba.mamba_utils",
        ("is_conv_state_dim_first()",),
        "the bytes of a recurrent state",
    ),
    Part(
        "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2",
        ("norm",),
        "tells whether ranks have copies of Mamba 2's groups",
        SEVERAL_STATES,
    ),
    Part(
        "vllm.model_executor.layers.mamba.mamba_mixer2:Mixer2RMSNormGated",
        ("n_groups",),
        "the same",
        SEVERAL_STATES,
    ),
    Part(
        "vllm.model_executor.models.utils",
        ("extract_layer_index(layer_name)",),
        "the heads of one layer",
    ),
    Part(
        "vllm.distributed.parallel_state",
        ("get_dcp_group()", "get_pcp_group()", "get_pp_group()", "get_tp_group()"),
        "this worker's rank",
    ),
    # --- configuration
    Part(
        f"{_CONFIG}:VllmConfig",
        (
            *("model_config", "cache_config", "parallel_config", "scheduler_config"),
            *("kv_transfer_config", "attention_config", "compilation_config"),
            *("speculative_config", "observability_config", "aux_output_config"),
            *("num_prefill_lookahead_tokens", "max_in_flight_tokens"),
        ),
        "the engine's configuration",
    ),
    Part(
        f"{_CONFIG}:KVTransferConfig",
        (
            *("kv_connector", "kv_connector_extra_config", "engine_id", "kv_buffer_device"),
            *("is_kv_producer", "is_kv_consumer", "kv_role"),
        ),
        "--kv-transfer-config",
    ),
    Part(
        f"{_CONFIG}:KVTransferConfig",
        ("kv_load_failure_policy",),
        "written when the connector is created, before vLLM's scheduler reads it",
    ),
    Part(
        f"{_CONFIG}:ModelConfig",
        (
            *("architecture", "dtype", "hf_config", "hf_text_config", "served_model_name"),
            *("max_model_len", "model_arch_config", "multimodal_config", "enable_sleep_mode"),
            *("supports_multimodal_inputs", "use_mla", "is_hybrid", "is_attention_free"),
            "uses_mrope",
        ),
        "facts that two engines must share",
    ),
    Part(
        f"{_CONFIG}:ModelConfig",
        ("enable_cumem_allocator",),
        "whether the cache is in the pool of vLLM's sleep mode",
        SHARED,
    ),
    Part(
        "vllm.config.model_arch:ModelArchitectureConfig",
        ("total_num_kv_heads", "total_num_hidden_layers", "per_layer_overrides"),
        "heads of each layer, and which layers belong to a draft model",
    ),
    Part(
        f"{_CONFIG}:MultiModalConfig",
        (
            *("mm_processor_cache_gb", "mm_processor_kwargs", "media_io_kwargs"),
            *("video_pruning_method", "video_pruning_rate"),
        ),
        "media options that two engines must share",
    ),
    Part(
        f"{_CONFIG}:CacheConfig",
        ("block_size", "cache_dtype", "enable_prefix_caching", "prefix_match_unit"),
        "settings of the cache",
    ),
    Part(
        f"{_CONFIG}:ParallelConfig",
        (
            *("rank", "world_size", "tensor_parallel_size", "pipeline_parallel_size"),
            *("data_parallel_size", "data_parallel_index", "decode_context_parallel_size"),
            *("prefill_context_parallel_size", "cp_kv_cache_interleave_size", "master_addr"),
            *("nnodes_within_dp", "node_rank_within_dp", "distributed_executor_backend"),
            *("data_parallel_size_local", "data_parallel_backend"),
        ),
        "ranks of the engine, and where they run",
    ),
    Part(
        f"{_CONFIG}:ParallelConfig",
        ("_allow_auto_resolve_cp_interleave_size", "dcp_kv_cache_interleave_size"),
        "tells that the operator left the DCP interleave open",
    ),
    Part(f"{_CONFIG}:AttentionConfig", ("backend",), "the layout to ask for"),
    Part(f"{_CONFIG}:CompilationConfig", ("static_forward_context",), "layers by name"),
    Part(f"{_CONFIG}:ObservabilityConfig", ("otlp_traces_endpoint",), "spans"),
    Part(
        "vllm.config.aux_output:AuxOutputConfig",
        ("enable_return_routed_experts",),
        "an output that decode does not have",
    ),
    Part(
        f"{_CONFIG}:SpeculativeConfig",
        (
            *("method", "num_speculative_tokens", "draft_model_config", "uses_draft_kv_cache()"),
            *("use_gemma4_mtp()", "use_multi_module_mtp()"),
        ),
        "the layers of a draft model",
    ),
    # --- the connector's place in vLLM
    Part(
        f"{_KV}.factory:KVConnectorFactory",
        ("_registry", "register_connector(name, module_path, class_name)"),
        "makes the name NixlKVConnector known",
        MODULE_PATH,
    ),
    Part(
        "vllm.v1.executor.abstract:Executor",
        ("__init__(vllm_config)",),
        "wrapped: the last place before the weights are loaded",
        EARLY_CHECKS,
    ),
    Part(
        "vllm.engine.arg_utils:EngineArgs",
        ("create_engine_config()",),
        "wrapped: the first place that has the engine's configuration",
        EARLY_CHECKS,
    ),
    Part(
        f"{_KV}.v1.metrics:KVConnectorPromMetrics",
        (
            *("_counter_cls", "_gauge_cls", "_histogram_cls", "_labelnames"),
            "per_engine_labelvalues",
        ),
        "Prometheus metrics",
    ),
    # --- the hooks over the scheduler
    Part(
        f"{_CONFIG}:SchedulerConfig",
        ("scheduler_cls", "get_scheduler_cls()"),
        "puts the hooks before the scheduler's class",
        MEDIA,
    ),
    Part(
        "vllm.v1.executor.abstract:Executor",
        ("__init__(vllm_config)",),
        "wrapped: the place for that, after the workers have their copy of the configuration",
        MEDIA,
    ),
    Part(
        f"{_KV}.v1.multi_connector:MultiConnector",
        ("sub_connectors",),
        "finds this connector among others",
        MEDIA,
    ),
    Part(
        f"{_SCHED}.scheduler:Scheduler",
        (
            *("connector", "requests", "scheduler_config", "schedule()"),
            "update_from_output(scheduler_output, model_runner_output)",
            "finish_requests(request_ids, finished_status)",
        ),
        "ends requests that decode may not compute",
        MEDIA,
    ),
    Part(
        "vllm.v1.engine:EngineCoreOutput",
        (*("request_id", "new_token_ids", "finish_reason", "events", "trace_headers"),),
        "tells the API server of such an end",
        MEDIA,
    ),
    Part("vllm.v1.engine", ("EngineCoreOutput(request_id, new_token_ids)",), "the same", MEDIA),
    Part("vllm.v1.engine:EngineCoreOutputs", ("outputs",), "the same", MEDIA),
    Part(
        f"{_SCHED}.scheduler:Scheduler",
        (
            "set_pause_state(pause_state)",
            "_update_from_kv_xfer_finished(kv_connector_output)",
        ),
        "tells vLLM's scheduler which loads have ended",
        OVERLAP,
    ),
    # --- requests that wait for prefill
    Part(
        f"{_SCHED}.scheduler:Scheduler",
        (
            *("waiting", "deferred_waiting", "requests", "get_request_counts()"),
            "finish_requests(request_ids, finished_status)",
        ),
        "takes requests that wait for prefill out of its queue, and counts them",
        OVERLAP,
    ),
    Part(
        f"{_SCHED}.request_queue:RequestQueue",
        (
            "peek_request()",
            "pop_request()",
            "prepend_request(request)",
            "remove_requests(requests)",
        ),
        "the same",
        OVERLAP,
    ),
    Part("vllm.v1.request:Request", ("arrival_time", "is_finished()"), "the same", OVERLAP),
    # --- KV that this engine has cached
    Part(
        "vllm.v1.core.block_pool:BlockPool",
        (
            *("get_new_blocks(num_blocks)", "reset_prefix_cache()"),
            (
                "cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, "
                "block_size, kv_cache_group_id)"
            ),
        ),
        "wrapped: tells which blocks a step may write, and which ones it fills",
        CONVERSATIONS,
    ),
    Part(
        "vllm.v1.core.block_pool:BlockPool",
        ("num_gpu_blocks", "cached_block_hash_to_block"),
        "finds blocks by their content",
        CONVERSATIONS,
    ),
    Part(
        "vllm.v1.core.block_pool:BlockHashToBlockMap",
        ("get_one_block(key)",),
        "the same",
        CONVERSATIONS,
    ),
    Part(
        "vllm.v1.core.kv_cache_utils",
        ("make_block_hash_with_group_id(block_hash, group_id)",),
        "the same",
        CONVERSATIONS,
    ),
    Part(f"{_SCHED}.output:SchedulerOutput", ("has_sync_kv_loads",), "the same", CONVERSATIONS),
    Part(f"{_SPECS}:KVCacheConfig", ("needs_kv_cache_zeroing",), "the same", CONVERSATIONS),
    Part(
        "vllm.v1.core.kv_cache_utils",
        ("resolve_none_hash_seed(hash_fn)",),
        "tells other engines how this one hashes blocks",
        CONVERSATIONS,
    ),
    # --- KV that other engines have cached
    Part(
        "vllm.v1.request:Request",
        ("block_hashes", "get_skip_reading_prefix_cache()"),
        "which blocks of a prompt another engine may have",
        CONVERSATIONS,
    ),
    Part(
        "vllm.v1.core.kv_cache_utils",
        ("generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)",),
        "hashes of blocks as another engine makes them",
        CONVERSATIONS,
    ),
    Part("vllm.utils.hashing", ("get_hash_fn_by_name(hash_fn_name)",), "the same", CONVERSATIONS),
    Part(f"{_CONFIG}:CacheConfig", ("prefix_caching_hash_algo",), "the same", CONVERSATIONS),
    Part(
        f"{_SCHED}.scheduler:Scheduler",
        ("recompute_kv_load_failures",),
        "tells that vLLM computes a request whose load fails",
        CONVERSATIONS,
    ),
    # --- the early answer
    Part(
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("_add_request(request, prompt, parent_req, index, queue)",),
        "wrapped: the place where all front ends add a request that they have checked",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("vllm_config", "output_processor", "engine_core", "errored"),
        "the engine client's state",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.v1.engine.output_processor:OutputProcessor",
        ("request_states", "update_scheduler_stats(scheduler_stats)"),
        "the state of a request, and signs of life of the engine",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.v1.engine.output_processor:RequestState",
        (
            *("prompt_len", "num_cached_tokens"),
            "make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason)",
        ),
        "makes the early answer as vLLM makes others",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.outputs:RequestOutput",
        ("finished", "outputs", "kv_transfer_params"),
        "the answer, and the engine's own",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.outputs:CompletionOutput",
        ("token_ids", "finish_reason"),
        "the answer has no token",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.sampling_params:SamplingParams",
        ("max_tokens", "n", "logprobs", "prompt_logprobs"),
        "which requests can be answered early",
        EARLY_ANSWER,
    ),
    Part(f"{_CONFIG}:SchedulerConfig", ("max_num_seqs",), "how many of them", EARLY_ANSWER),
    Part("vllm.v1.engine.core:EngineCore", ("scheduler",), "has the address", EARLY_ANSWER),
    Part(
        "vllm.v1.engine.output_processor:RequestOutputCollector",
        ("put(output)",),
        "takes the answer to the front end",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.v1.engine.core_client:MPClient",
        ("core_engine", "core_engines"),
        "the engines of a client",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.v1.engine.core_client:AsyncMPClient",
        ("_call_utility_async(method, args, engine)",),
        "asks an engine for its address",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.v1.engine.core_client:DPLBAsyncMPClient",
        ("reqs_in_flight",),
        "names the data-parallel rank that vLLM has chosen",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.v1.engine:EngineCoreRequest",
        (
            *("request_id", "sampling_params", "prompt_token_ids", "prompt_embeds", "mm_features"),
            *("prompt_is_token_ids", "lora_request", "cache_salt", "resumable"),
            "abort_immediately",
        ),
        "a prompt and its parameters",
        EARLY_ANSWER,
    ),
    Part(
        "vllm.engine.protocol:EngineClient",
        ("notify_kv_transfer_request_rejected(request_id, kv_transfer_params)",),
        "tells the engine that vLLM's frontend refused a request that was answered early",
        EARLY_ANSWER,
    ),
)


FEATURES: Final = (
    *(CHUNKS, OVERLAP, CONVERSATIONS, WHOLE_BLOCKS, LAYOUT, USAGE, EARLY_CHECKS, MODULE_PATH),
)

# --- at the start

_REMEDY: Final = "install one of these, or a release of nixl_kv that is tested with this vLLM"


def check(engine: Engine) -> None:
    """Raise a ConfigError that names all missing parts without which this engine cannot start."""
    concerned = [part for part in PARTS if part.absence.ends_start]
    lacks = list(missing(part for part in concerned if part.absence.concerns(engine)))
    if lacks:
        raise ConfigError(f"vLLM {version()} lacks {'; '.join(lacks)}; {_tested()}; {_REMEDY}")


def warn(*absences: Absence) -> bool:
    """Log one WARNING if some of these features are off; returns whether it did."""
    off = [absence for absence in absences if is_off(absence)]
    if not off:
        return False
    lacks = list(missing(part for part in PARTS if part.absence in off))
    reason = f"lacks {'; '.join(lacks)}" if lacks else "was not tested with this connector"
    effects = "; ".join(absence.text for absence in off)
    logger.warning("vLLM %s %s (%s), so: %s", version(), reason, _tested(), effects)
    return True


def is_off(absence: Absence) -> bool:
    """Whether this vLLM lacks a part with this effect, or is untested where that matters."""
    if absence.rests_on_order and not is_tested(version()):
        return True
    return any(missing(part for part in PARTS if part.absence is absence))


def import_error(error: ImportError) -> Exception:
    """The error to raise if a module of this package could not import all that it needs."""
    if error.name is None or not error.name.startswith("vllm."):
        return error
    lacks = [name for name in dict.fromkeys(_imports()) if not _can_load(name)]
    names = ", ".join(each.replace(":", ".") for each in lacks) or str(error)
    return ConfigError(f"vLLM {version()} lacks {names}; {_tested()}; {_REMEDY}")


def _imports() -> Iterator[str]:
    """The parts of vLLM that this package imports whenever its modules are imported."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
                yield from (f"{node.module}:{each.name}" for each in node.names)


def version() -> str:
    """The version that vLLM gives for itself: "dev" for a checkout without one."""
    return str(importlib.import_module("vllm").__version__)


def is_tested(text: str) -> bool:
    """Whether a version is a release of a tested minor, or its patch or rebuild.

    A nightly build has the number of the release after the last tag and a `.dev` part. Its code may
    be newer than that release, so it is untested, as are release candidates and "dev".
    """
    release = re.fullmatch(r"v?(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?", text)
    return release is not None and release[1] in nixl_kv.TESTED_VLLM


def _tested() -> str:
    first, *_, last = nixl_kv.TESTED_VLLM
    return f"nixl_kv {nixl_kv.__version__} is tested with vLLM {first} to {last}"


# --- looking parts up


def missing(parts: Iterable[Part]) -> Iterator[str]:
    """The missing members, each with its purpose."""
    for part in parts:
        if not _can_load(part.owner):
            yield f"{part.owner.replace(':', '.')} ({part.purpose})"
            continue
        owner, name = _load(part.owner), part.owner.rpartition(":")[2]
        for member in part.members:
            found = _find(owner, member)
            if found != member:
                instead = f", and has {found}" if found else ""
                yield f"{name}.{member} ({part.purpose}{instead})"


def _can_load(path: str) -> bool:
    try:
        _load(path)
    except (ImportError, AttributeError):
        return False
    return True


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def _find(owner: Any, member: str) -> str:
    """The member if the owner has it, else its other form there, or ''."""
    name, has_parameters, rest = member.partition("(")
    if not _has(owner, name):
        return ""
    if not has_parameters:
        return member
    function = getattr(owner, name, None)
    if not callable(function):
        return f"{name}, which cannot be called"
    wanted = [each for each in rest.removesuffix(")").split(", ") if each]
    parameters = list(inspect.signature(function).parameters.values())
    if inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, name)):
        parameters = parameters[1:]  # self
    names = [each.name for each in parameters]
    needed = [each.name for each in parameters if _is_needed(each)]
    is_same = names[: len(wanted)] == wanted and set(needed) <= set(wanted)
    return member if is_same else f"{name}({', '.join(needed)})"


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variable


def _has(owner: Any, name: str) -> bool:
    """Whether a class, one of its instances, or a module has it, or a function sets or knows it."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        code = getattr(inspect.unwrap(owner), "__code__", None)
        is_local = code is not None and name in code.co_varnames
        return is_local or name in _assigned(owner) or name in _texts(owner)
    classes = list(map(vars, inspect.getmro(owner)))
    if any(name in each.get("__annotations__", ()) for each in classes):
        return True
    inits = ("__init__", "__post_init__")
    return any(name in _assigned(each.get(init)) for each in classes for init in inits)


def _assigned(function: Any) -> set[str]:
    """The attributes that a function assigns, of any object."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    instructions = () if code is None else dis.get_instructions(code)
    return {each.argval for each in instructions if each.opname == "STORE_ATTR"}


def _texts(function: Any) -> set[object]:
    """The strings in a function: it may assign attributes by name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else {each for each in code.co_consts if isinstance(each, str)}
