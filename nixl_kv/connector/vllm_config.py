"""Reads vLLM's configuration and requests, and turns them into nixl_kv's records.

Model families, attention backends and platforms are data here and in `kv_layout.py`, and nowhere
else. The differences between vLLM versions are here too, at the top. `REFUSALS` lists the engines
that the connector cannot serve; their start fails.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, TypeGuard, cast

import torch
from vllm.config import KVTransferConfig, MultiModalConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from nixl_kv.config import Config
from nixl_kv.connector.decode import Prompt
from nixl_kv.connector.paging import Paging, StatePaging
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.layout import ALL_TOKENS, STATE_WINDOW, Stripe
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import EngineId, Rank, RequestId
from nixl_kv.transport.base import SEGMENT_FACT

# --- versions of vLLM: recognised by their features, so that builds from source are too

HIT_SOURCE: Any  # the label under which vLLM counts the tokens of our loads
try:
    from vllm.v1.metrics.cache_hit_source import (  # type: ignore[import-not-found, unused-ignore]
        CacheHitSource,
    )
except ImportError:  # vLLM 0.31 counts all external hits as one
    HIT_SOURCE = None
else:
    HIT_SOURCE = CacheHitSource.P2P


def has_sleep_hooks() -> bool:
    """Whether vLLM reports when the memory of the cache goes away, and when it is back (0.33)."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def zeroes_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM zeroes new blocks, which it does before it calls the workers' hooks."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True))


# --- engines that the connector cannot serve

# vLLM's class names for the supported kinds of a layer's cache.
SUPPORTED_SPECS: Final = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
}

# The supported kinds of recurrent layers (vLLM's backend names), and how many states each has.
STATE_KINDS: Final = {"GDN_ATTN": 2, "LINEAR": 1, "MAMBA1": 2, "MAMBA2": 2, "SHORT_CONV": 1}


def specs(kv_cache_config: KVCacheConfig) -> Iterator[Any]:
    for group in kv_cache_config.transfer_groups:
        for layer in group.layer_names:
            yield layer_spec(group.kv_cache_spec, layer)


# Each entry is the text of the error, and the condition.
REFUSALS: Final[Mapping[str, Callable[[VllmConfig, KVCacheConfig], bool]]] = {
    "this platform: run the engine on NVIDIA or AMD GPUs or on CPU": lambda _, __: (
        not (current_platform.is_cuda_alike() or current_platform.is_cpu())
    ),
    "prefill context parallelism (prefill_context_parallel_size > 1) together with decode context "
    "parallelism, or with another kv_role than kv_producer": lambda vllm, _: (
        vllm.parallel_config.prefill_context_parallel_size > 1
        and (
            vllm.parallel_config.decode_context_parallel_size > 1
            or transfer_config(vllm).is_kv_consumer
        )
    ),
    "a KV buffer on another device (kv_buffer_device): leave it out": lambda vllm, _: (
        transfer_config(vllm).kv_buffer_device != current_platform.device_type
    ),
    "the experts of each token in the output (--enable-return-routed-experts): decode does not "
    "have those of the prompt": lambda vllm, _: vllm.aux_output_config.enable_return_routed_experts,
    "sleep mode (--enable-sleep-mode): this vLLM does not notify connectors": lambda vllm, _: (
        vllm.model_config.enable_sleep_mode and not has_sleep_hooks()
    ),
    "images, audio and video without content hashes (--mm-processor-cache-gb 0 without prefix "
    "caching): turn one of these on, or all media off (--language-model-only)": (
        lambda vllm, _: counts_media(vllm)
    ),
    f"recurrent state of kinds other than {', '.join(STATE_KINDS)}": lambda _, kv: any(
        isinstance(spec, MambaSpec) and len(spec.shapes) != STATE_KINDS.get(spec.mamba_type.name)
        for spec in specs(kv)
    ),
    "several draft modules (num_speculative_tokens > 1) with recurrent state, on an engine that "
    "decodes: prefill has the state before the last token only": lambda vllm, kv: (
        transfer_config(vllm).is_kv_consumer
        and kv.has_mamba_layers
        and computed_on_decode(vllm) > 1
    ),
    "cache groups in host memory": lambda _, kv: bool(kv.host_group_ids),
    f"caches of kinds other than {', '.join(sorted(SUPPORTED_SPECS))}": lambda _, kv: any(
        type(spec).__name__ not in SUPPORTED_SPECS for spec in specs(kv)
    ),
    "several tokens in one stored state": lambda _, kv: any(
        spec.tokens_per_state > 1 for spec in specs(kv)
    ),
}


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    refusals = [text for text, applies in REFUSALS.items() if applies(vllm_config, kv_cache_config)]
    if refusals:
        raise ConfigError(f"NixlKVConnector does not support {'; nor '.join(refusals)}")


def counts_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM numbers a request's images, audio and video instead of hashing them."""
    # It hashes only for its caches. Two engines number one image differently, or two images alike.
    model = vllm_config.model_config
    media = model.multimodal_config
    return bool(
        media is not None
        and media.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
        and model.supports_multimodal_inputs
    )


# --- the configuration


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    # Without one, vLLM creates no connector.
    return cast("KVTransferConfig", vllm_config.kv_transfer_config)


def engine_id(vllm_config: VllmConfig) -> EngineId:
    # vLLM generates one if the operator names none.
    return cast("EngineId", transfer_config(vllm_config).engine_id)


def is_child(connector: KVConnectorBase_V1) -> bool:
    """Whether another connector, such as vLLM's MultiConnector, is creating this one."""
    # It passes only this connector's part of the configuration.
    frame = inspect.currentframe()
    while frame is not None:
        creator = frame.f_locals.get("self")
        if isinstance(creator, KVConnectorBase_V1) and creator is not connector:
            return True
        frame = frame.f_back
    return False


def parse_config(vllm_config: VllmConfig) -> Config:
    return Config.parse(transfer_config(vllm_config).kv_connector_extra_config, os.environ)


# Backends known to work with BHLNC, and the largest --block-size for each. vLLM cannot cut a packed
# block into smaller kernel blocks, and refuses to start. FlashInfer takes kernel blocks of at most
# 64 tokens.
MAX_PACKED_BLOCK_SIZE: Final = {"FLASH_ATTN": 1 << 20, "FLASHINFER": 64}

# The backend that vLLM chooses for a GPU's major compute capability, where that is known.
DEFAULT_BACKEND: Final = {9: "FLASH_ATTN"}


def required_layout(vllm_config: VllmConfig) -> str | None:
    """The physical order of the KV cache to ask vLLM for; None leaves the choice to vLLM."""
    wanted = parse_config(vllm_config).layout
    if wanted != "auto":
        return wanted
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not current_platform.is_cuda() or model.use_mla:
        return None
    # FlashInfer requires dense pages for NVFP4, and vLLM does not pack different kinds of pages.
    if cache.cache_dtype.startswith("nvfp4") or model.is_hybrid:
        return None
    capability = current_platform.get_device_capability()
    default = DEFAULT_BACKEND.get(capability.major, "") if capability else ""
    chosen = vllm_config.attention_config.backend
    backend = default if chosen is None else chosen.name
    # In BHLNC, any range of heads of a block is one contiguous run over all layers.
    is_good = (cache.block_size or 0) <= MAX_PACKED_BLOCK_SIZE.get(backend, 0)
    return "BHLNC" if is_good else None


# --- the facts of the model that two engines must share, so that equal bytes mean the same KV

_VOLATILE: Final = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config")
)

_FACTS: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

# An operator sees this name if two engines differ in the fact.
DRAFT_FACT: Final = "draft model (prefill needs the same --speculative-config)"

# Above this --max-model-len, vLLM scales the queries of Llama 4 by their position.
LONG_TEMPERATURE: Final = 32768

# Characters of a fact. Engines compare a digest of a longer one.
MAX_FACT: Final = 1000


def model_facts(vllm_config: VllmConfig) -> dict[str, str]:
    model = vllm_config.model_config
    names: Any = model.served_model_name  # vLLM has set it
    values = model.hf_text_config.to_dict()  # some attributes raise if layers differ
    facts = {name: str(values[name]) for name in _FACTS if name in values}
    # The served name stands for the weights: a router sends it to both engines anyway. The digest
    # catches most other differences.
    facts["served_model_name"] = str(names if isinstance(names, str) else names[0])
    facts["architecture"] = model.architecture
    facts["dtype"] = dtype_name(model.dtype)
    facts["TCP segments"] = SEGMENT_FACT
    facts["config digest"] = _digest([values, model.hf_config.to_dict()])
    facts |= _length_facts(model.max_model_len, values)
    if model.multimodal_config is not None:
        facts |= _media_facts(model.multimodal_config)
    return {
        name: text if len(text) <= MAX_FACT else f"digest {_digest(text)}"
        for name, text in facts.items()
    }


def _length_facts(max_model_len: int, values: Mapping[str, Any]) -> dict[str, str]:
    """Thresholds of --max-model-len above which vLLM computes every position differently."""
    original = "original_max_position_embeddings"
    edges = {
        inner.get(original, values.get(original))
        for inner in mappings(values)
        if inner.get("rope_type", inner.get("type")) == "longrope"
    }
    if str(values.get("model_type")).startswith("llama4"):
        edges.add(LONG_TEMPERATURE)
    return {f"max_model_len above {edge}": str(max_model_len > edge) for edge in edges if edge}


def _media_facts(media: MultiModalConfig) -> dict[str, str]:
    options = dict(media.mm_processor_kwargs or {})
    options.pop("device", None)  # does not change the result
    rate = media.video_pruning_rate
    return {
        "mm_processor_kwargs": json.dumps(options, sort_keys=True, default=str),
        "media_io_kwargs": json.dumps(media.media_io_kwargs, sort_keys=True, default=str),
        "video_pruning": f"{media.video_pruning_method} {rate}" if rate else "none",
    }


def draft_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """The facts of a draft model with layers in the cache. Decode needs its KV from prefill."""
    speculative = vllm_config.speculative_config
    if not _has_draft_layers(speculative):
        return {}
    config = speculative.draft_model_config.hf_config.to_dict()
    # vLLM raises it to the target's --max-model-len; it only bounds the positions.
    config.pop("max_position_embeddings", None)
    text = f"{speculative.method}, config digest {_digest(config)}"
    if speculative.use_multi_module_mtp():  # only this many modules write KV
        text += f", {speculative.num_speculative_tokens} tokens"
    return {DRAFT_FACT: text}


def _has_draft_layers(speculative: SpeculativeConfig | None) -> TypeGuard[SpeculativeConfig]:
    """Whether a draft model has layers in the cache. Gemma 4's reads the target model's."""
    return bool(
        speculative is not None
        and speculative.uses_draft_kv_cache()
        and not speculative.use_gemma4_mtp()
    )


def draft_model_of(vllm_config: VllmConfig, layer: str) -> Any:
    """The draft model's configuration if it has this layer, else None. Call it in a worker only."""
    speculative = vllm_config.speculative_config
    if not _has_draft_layers(speculative):
        return None
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    names = layer.split(".")
    number = next((int(name) for name in names if name.isdecimal()), 0)
    # vLLM's V1 model runner does not mark draft layers. Their numbers continue those of the model,
    # or their dotted names contain one of two words.
    is_draft = (
        getattr(module, "is_draft_layer", False)
        or number >= vllm_config.model_config.model_arch_config.total_num_hidden_layers
        or "draft_model" in names
        or "mtp" in names
    )
    return speculative.draft_model_config if is_draft else None


def mappings(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        for each in value.values():
            yield from mappings(each)


def _digest(value: object) -> str:
    """Digest a configuration without its volatile keys, such as its path, at any depth."""

    def stable(value: object) -> object:
        if isinstance(value, Mapping):
            return {str(k): stable(v) for k, v in value.items() if k not in _VOLATILE}
        return [stable(each) for each in value] if isinstance(value, list | tuple) else value

    canonical = json.dumps(stable(value), sort_keys=True, default=str).encode()
    return hashlib.blake2b(canonical, digest_size=8).hexdigest()


# --- cache groups


def pagings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Paging, ...]:
    numbers = kv_cache_config.transfer_group_ids
    specs = (group.kv_cache_spec for group in kv_cache_config.transfer_groups)
    return tuple(
        StatePaging(number, spec.block_size)
        if holds_state(spec)
        else Paging(number, spec.block_size * num_stripes(vllm_config, spec), window(spec))
        for number, spec in zip(numbers, specs, strict=True)
    )


def num_stripes(vllm_config: VllmConfig, spec: KVCacheSpec) -> int:
    """The number of DCP ranks that share a group's tokens. Each has a part of every block."""
    is_shared = _first(spec).dcp_sharded
    return int(vllm_config.parallel_config.decode_context_parallel_size) if is_shared else 1


def stripe(vllm_config: VllmConfig, spec: KVCacheSpec) -> Stripe:
    """Which tokens of a group this DCP rank has. Call it in a worker only."""
    number = num_stripes(vllm_config, spec)
    if number == 1:
        return ALL_TOKENS
    width = vllm_config.parallel_config.cp_kv_cache_interleave_size
    if spec.block_size % width:
        raise ConfigError(
            f"--cp-kv-cache-interleave-size is {width}; "
            f"allowed: a divisor of the block size {spec.block_size}"
        )
    return Stripe(number, get_dcp_group().rank_in_group, width)


def holds_state(spec: KVCacheSpec) -> bool:
    return isinstance(_first(spec), MambaSpec)


def _first(spec: KVCacheSpec) -> KVCacheSpec:
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


def layer_spec(spec: Any, layer: str) -> Any:
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def window(spec: KVCacheSpec) -> int:
    """How many tokens before the next one a group keeps; 0 for all of them.

    vLLM keeps all tokens of a full-attention group, even if some layers have a window.
    """
    if holds_state(spec):
        return STATE_WINDOW  # stored like the KV of the last token
    inner = _first(spec)
    if isinstance(inner, SlidingWindowSpec):
        return int(inner.sliding_window + inner.extra_retained_tokens)
    if isinstance(inner, ChunkedLocalAttentionSpec):
        return int(inner.attention_chunk_size)
    return 0


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# --- ranks


def parallel_shape(vllm_config: VllmConfig) -> ParallelShape:
    parallel = vllm_config.parallel_config
    return ParallelShape(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def is_copy(vllm_config: VllmConfig) -> bool:
    """Whether another worker serves the same rank and KV. Call it in a worker only."""
    # With prefill context parallelism, several workers compute a prompt together and each keeps all
    # of its KV. The first of them serves it.
    has_copies = vllm_config.parallel_config.prefill_context_parallel_size > 1
    return bool(has_copies and get_pcp_group().rank_in_group > 0)


def computed_on_decode(vllm_config: VllmConfig) -> int:
    """How many of a prompt's last tokens decode computes, at least: one, for its logits."""
    # Each module of a draft model looks one token further ahead than the module before. With
    # several modules, prefill has filled their last slots from tokens that were never verified.
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def worker_rank(vllm_config: VllmConfig) -> Rank:
    """This worker's rank: PP stage * TP size + TP rank. Call it in a worker only."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    return Rank(get_pp_group().rank_in_group * tp + get_tp_group().rank_in_group)


# --- requests and steps


def prompt_of(request: Request) -> Prompt:
    return Prompt(
        RequestId(request.request_id),
        request.num_prompt_tokens,
        request.prompt_token_ids,
        tuple(_extras(request)),
    )


def _extras(request: Request) -> Iterator[bytes]:
    """Everything except token ids that a request's KV depends on. See `ticket.context_hash`."""
    if request.lora_request is not None:
        yield b"lora" + str(request.lora_request.lora_name).encode()
    if request.cache_salt:
        yield b"salt" + str(request.cache_salt).encode()
    for feature in request.mm_features:
        position = feature.mm_position
        yield f"mm {position.offset} {position.length} {feature.identifier}".encode()
    if request.prompt_embeds is not None:
        yield b"embeds" + request.prompt_embeds.contiguous().view(torch.uint8).numpy().tobytes()
    if request.prompt_is_token_ids is not None:
        yield b"mask" + bytes(request.prompt_is_token_ids)


def progress(
    output: SchedulerOutput, wanted: Collection[RequestId]
) -> Iterator[tuple[RequestId, range]]:
    """The token positions that a step computes, for each scheduled request in `wanted`."""
    if not wanted:
        return
    new = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    resumed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request, before in (*new, *resumed):
        if request in wanted:
            after = before + output.num_scheduled_tokens[request]
            yield RequestId(request), range(before, after)


def why_not_shortened(request: Request) -> str:
    """Why prefill must compute a request's last token too; empty if it need not."""
    last = request.num_prompt_tokens - 1
    if not last:
        return "its prompt has one token"
    if request.get_skip_reading_prefix_cache():
        return "its client asks for the prompt's log probabilities"
    if any(one.mm_position.offset + one.mm_position.length > last for one in request.mm_features):
        return "its prompt ends within an image, audio or video"
    return ""


def shorten(request: Request) -> None:
    """Make a new request compute all of its prompt except the last token."""
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        values = getattr(request, name)
        if values is not None:
            setattr(request, name, values[:-1])
    del request._all_token_ids[-1:]  # noqa: SLF001 - vLLM has no way to shorten a prompt
    request.num_prompt_tokens -= 1
    request.max_tokens = 1  # its output is meaningless now


def why_not_offered(request: Request) -> str:
    """Why the KV of a finished request is incomplete; empty if it is complete."""
    ended_well = RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED
    if request.status not in ended_well:
        return f"it ended as {request.status}"
    if request.num_computed_tokens < request.num_prompt_tokens:
        return f"{request.num_computed_tokens} of {request.num_prompt_tokens} tokens computed"
    return ""
