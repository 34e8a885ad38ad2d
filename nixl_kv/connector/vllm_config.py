"""Reads vLLM's configuration and requests, and turns them into nixl_kv's records.

Model families, attention backends and platforms are data here and in `kv_layout.py`, and nowhere
else. The differences between vLLM versions are here too, at the top. `REFUSALS` and
`CACHE_REFUSALS` list the engines that the connector cannot serve; their start fails.
"""

import hashlib
import inspect
import itertools
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, TypeGuard, cast

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    MultiModalConfig,
    SpeculativeConfig,
    VllmConfig,
)
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
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from nixl_kv.config import DYNAMO_VARIABLE, ON, Config
from nixl_kv.connector import unpromised
from nixl_kv.connector.decode import Prompt, Rows
from nixl_kv.connector.media import NO_MEDIA, Media, MediaItem, MediaRules
from nixl_kv.connector.paging import Paging, StatePaging, WholePaging
from nixl_kv.errors import ConfigError, TicketRefused
from nixl_kv.geometry.layout import ALL_TOKENS, STATE_WINDOW, Stripe
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import EngineId, Rank, RequestId
from nixl_kv.protocol.messages import ContentFacts
from nixl_kv.protocol.params import check_bounds, foreign_fields, why_unbounded
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


def may_copy_blocks(cache_config: CacheConfig) -> bool:
    """Whether a prompt may reuse a part of a cached block, which vLLM then copies."""
    unit = cache_config.prefix_match_unit
    return unit is not None and unit != cache_config.block_size


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

# Rings: vLLM's names of the kinds that hold the last tokens of a request in one block, and words
# for each. They are not supported.
RINGS: Final = {
    "CircularBufferSpec": " (a ring with the last tokens of each request)",
    "KpoolTailSpec": " (the tokens that are not pooled yet)",  # vLLM 0.31
}

# The supported kinds of recurrent layers (vLLM's backend names), and how many states each has.
STATE_KINDS: Final = {"GDN_ATTN": 2, "LINEAR": 1, "MAMBA1": 2, "MAMBA2": 2, "SHORT_CONV": 1}


def specs(kv_cache_config: KVCacheConfig) -> Iterator[Any]:
    for group in kv_cache_config.transfer_groups:
        for layer in group.layer_names:
            yield layer_spec(group.kv_cache_spec, layer)


def other_kinds(kv_cache_config: KVCacheConfig) -> str:
    names = {type(spec).__name__ for spec in specs(kv_cache_config)} - SUPPORTED_SPECS
    return ", ".join(f"{name}{RINGS.get(name, '')}" for name in sorted(names))


def counts_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM numbers a request's images, audio and video instead of hashing them."""
    # It hashes only for its caches. Two engines number one image differently, or two images alike.
    multimodal = vllm_config.model_config.multimodal_config
    return bool(
        multimodal is not None
        and takes_media(vllm_config)
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


# Each entry is the text of the error, and the condition. These are checked before the weights load.
REFUSALS: Final[Mapping[str, Callable[[VllmConfig], bool]]] = {
    "this platform: run the engine on NVIDIA or AMD GPUs or on CPU": lambda _: (
        not (current_platform.is_cuda_alike() or current_platform.is_cpu())
    ),
    "prefill context parallelism (prefill_context_parallel_size > 1) together with decode context "
    "parallelism, or with another kv_role than kv_producer": lambda vllm: (
        vllm.parallel_config.prefill_context_parallel_size > 1
        and (
            vllm.parallel_config.decode_context_parallel_size > 1
            or transfer_config(vllm).is_kv_consumer
        )
    ),
    "a KV buffer on another device (kv_buffer_device): leave it out": lambda vllm: (
        transfer_config(vllm).kv_buffer_device != current_platform.device_type
    ),
    "the experts of each token in the output (--enable-return-routed-experts): decode does not "
    "have those of the prompt": lambda vllm: vllm.aux_output_config.enable_return_routed_experts,
    "sleep mode (--enable-sleep-mode): this vLLM does not notify connectors": lambda vllm: (
        vllm.model_config.enable_sleep_mode and not has_sleep_hooks()
    ),
    "images, audio and video without content hashes (--mm-processor-cache-gb 0 without prefix "
    "caching): turn one of these on, or all media off (--language-model-only)": counts_media,
}

# The same for the cache, which vLLM describes after it has loaded the weights. A condition may
# return the names of its findings.
CACHE_REFUSALS: Final[Mapping[str, Callable[[VllmConfig, KVCacheConfig], bool | str]]] = {
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
    f"caches of kinds other than {', '.join(sorted(SUPPORTED_SPECS))}": lambda _, kv: other_kinds(
        kv
    ),
    "several tokens in one stored state together with decode context parallelism": (
        lambda vllm, kv: (
            has_whole_blocks(kv) and vllm.parallel_config.decode_context_parallel_size > 1
        )
    ),
}


NOR: Final = "; nor "
"""Between several reasons."""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None) -> None:
    """Raise a ConfigError that names all that the connector cannot serve.

    Without the description of the cache, checks all that does not depend on it.
    """
    refusals = applying(REFUSALS, vllm_config)
    if kv_cache_config is not None:
        refusals += applying(CACHE_REFUSALS, vllm_config, kv_cache_config)
    if refusals:
        raise ConfigError(f"NixlKVConnector does not support {NOR.join(refusals)}")


def applying(refusals: Mapping[str, Callable[..., bool | str]], *about: object) -> list[str]:
    """The reasons whose condition is true of these configurations, and what each has found."""
    found = {text: applies(*about) for text, applies in refusals.items()}
    return [text if it is True else f"{text}: {it}" for text, it in found.items() if it]


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
    return Config.of(vars(transfer_config(vllm_config)), os.environ)


def is_read(vllm_config: VllmConfig) -> bool:
    """Whether other engines read this one's cache: prefill's, and with `conversations` any."""
    return transfer_config(vllm_config).is_kv_producer or (
        parse_config(vllm_config).conversations == ON
    )


# Backends known to work with packed layouts, and the largest --block-size for each. vLLM cannot cut
# a packed block into smaller kernel blocks, and refuses to start. FlashInfer takes kernel blocks of
# at most 64 tokens.
MAX_PACKED_BLOCK_SIZE: Final = {"FLASH_ATTN": 1 << 20, "FLASHINFER": 64}

# The backend that vLLM chooses for a GPU's major compute capability, where that is known.
DEFAULT_BACKEND: Final = {9: "FLASH_ATTN"}


# In BHLNC, any range of heads of a block is one contiguous run over all layers. vLLM does not
# accept it if layers have pages of several sizes. In BLHNC, such a range is a run in each layer.
# vLLM's own choice may be LBNHC, where it is a run for each token.
PACKED: Final = ("BHLNC", "BLHNC")

# For models whose layers store keys beside KV: in packed layouts, vLLM's kernel overwrites KV with
# keys (docs/upstream/vllm-minimax-m3-packed-layout.md). In LBHNC, a range of heads is a run in each
# layer too.
APART: Final = ("LBHNC",)


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
    if (cache.block_size or 0) > MAX_PACKED_BLOCK_SIZE.get(backend, 0):
        return None
    accepted, has_keys = _found_by_vllm()
    wished = APART if has_keys else PACKED
    return next((each for each in wished if accepted is None or each in accepted), None)


def _found_by_vllm() -> tuple[list[str] | None, bool]:
    """The layouts that vLLM would accept now, and whether a layer stores keys beside its KV.

    None instead of layouts if this vLLM does not compare them.
    """
    # vLLM passes the configuration alone, and the layers are in other processes. But its function
    # that asks has compared the pages of all layers and the layouts of all backends.
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "resolve_kv_cache_layout":
        frame = frame.f_back
    found = {} if frame is None else frame.f_locals
    candidates, layers = found.get("candidates"), found.get("kv_cache_specs") or ()
    accepted = None if candidates is None else [layout.name for layout in candidates]
    return accepted, any(isinstance(layer, MLAAttentionSpec) for layer in layers)


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


def _media_facts(multimodal: MultiModalConfig) -> dict[str, str]:
    options = dict(multimodal.mm_processor_kwargs or {})
    options.pop("device", None)  # does not change the result
    rate = multimodal.video_pruning_rate
    return {
        "mm_processor_kwargs": json.dumps(options, sort_keys=True, default=str),
        "media_io_kwargs": json.dumps(multimodal.media_io_kwargs, sort_keys=True, default=str),
        "video_pruning": f"{multimodal.video_pruning_method} {rate}" if rate else "none",
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


def has_draft_layers(vllm_config: VllmConfig) -> bool:
    """Whether a draft model writes KV into the cache."""
    return _has_draft_layers(vllm_config.speculative_config)


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


def content_facts(vllm_config: VllmConfig, config: Config) -> ContentFacts:
    """How this engine hashes the blocks of its prefix cache; it has one group of full attention."""
    # Imported for this feature alone.
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    # vLLM initialises its own seed later, and resolves it likewise.
    cache = vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return ContentFacts(
        algorithm=algorithm,
        seed=resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
        block_size=int(cache.block_size or 0) * dcp,
        vllm=unpromised.version(),
        has_stand_ins=media_rules(config.media).ids_may_mislead,
    )


# --- cache groups


def pagings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Paging, ...]:
    numbers = kv_cache_config.transfer_group_ids
    specs = (group.kv_cache_spec for group in kv_cache_config.transfer_groups)
    is_whole = has_whole_blocks(kv_cache_config)
    # With several draft modules, decode computes more than the prompt's last token, so it attends
    # to tokens before that one's window.
    more = computed_on_decode(vllm_config) - 1

    def paging(number: int, spec: Any) -> Paging:
        if holds_state(spec):
            return StatePaging(number, spec.block_size)
        size, kept = spec.block_size * num_stripes(vllm_config, spec), window(spec)
        kept += more if kept else 0
        if not is_whole:
            return Paging(number, size, kept)
        if not kept:
            return WholePaging(number, size, kept)
        # Those of the window and of steps in progress; both ends may be within a block.
        most = (kept + vllm_config.max_in_flight_tokens) // size + 2
        return WholePaging(number, size, kept, most)

    return tuple(itertools.starmap(paging, zip(numbers, specs, strict=True)))


def has_whole_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether blocks are read whole: some layers keep one state for several tokens.

    VLLM fixes the block sizes of such a model. The layers of a group may keep states for unequal
    numbers of tokens, and the scheduler sees the first layer of each group alone.
    """
    return any(spec.tokens_per_state > 1 for spec in specs(kv_cache_config))


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

PARAMS: Final = "kv_transfer_params"  # in a request's `extra_args`

# vLLM's own parts of a request that reach its workers may be as large as they like.
PICKLED: Final[Mapping[str, Any]] = {"max_levels": 100, "max_size": None}


def prompt_of(request: Request, reader: "MediaReader | None" = None) -> Prompt:
    """`reader` is None for a model without images, audio and video."""
    return Prompt(
        RequestId(request.request_id),
        request.num_prompt_tokens,
        request.prompt_token_ids,
        tuple(_extras(request)),
        tuple(_rows(request)),
        NO_MEDIA if reader is None else reader.media_of(request),
    )


def prompt_of_client(request: Any, num_tokens: int, reader: "MediaReader | None") -> Prompt:
    """The prompt of an `EngineCoreRequest`, as the engine will see it."""
    return Prompt(
        RequestId(request.request_id),
        num_tokens,
        request.prompt_token_ids,
        tuple(_extras(request)),
        tuple(_rows(request)),
        NO_MEDIA if reader is None else reader.media_of(request),
    )


def check_params(request: Request) -> None:
    """Raise a TicketRefused for `kv_transfer_params` that are too deep or large, or not an object.

    The request has none then: other connectors also send parts of them to their workers, and
    vLLM's scheduler ends the engine if they are not an object. vLLM takes them from `vllm_xargs`
    too, and does not check those.
    """
    params: object = request.kv_transfer_params
    try:
        check_bounds(params)
        _check_object(params)
    except TicketRefused:
        request.kv_transfer_params = {}
        request.sampling_params, _ = for_workers(request.sampling_params)
        raise


def _check_object(params: object) -> None:
    if params is not None and not isinstance(params, dict):
        raise TicketRefused(
            f"kv_transfer_params is of type {type(params).__name__}; allowed: an object"
        )


def for_workers(params: Any) -> tuple[Any, list[str]]:
    """The `SamplingParams` that vLLM may send to its workers, and the entries that they lack.

    vLLM pickles them, and pickle ends the engine at 500 levels. No worker reads our fields.
    """
    given = getattr(params, "extra_args", None)
    if not given:
        return params, []
    # Some connectors find their own fields there.
    ours = foreign_fields(given.get(PARAMS))
    kept = {k: v for k, v in given.items() if k != PARAMS}
    dropped = [k for k, v in kept.items() if why_unbounded(v, **PICKLED)]
    kept = {k: v for k, v in kept.items() if k not in dropped} | ({PARAMS: ours} if ours else {})
    if kept == given:
        return params, []
    # A copy, because in one process the front end reads the same object, as do other requests.
    changed = copy(params)
    changed.extra_args = kept or None
    return changed, dropped


def _extras(request: Request) -> Iterator[bytes]:
    """The adapter and the salt, on which a request's KV depends."""
    if request.lora_request is not None:
        yield b"lora" + str(request.lora_request.lora_name).encode()
    if request.cache_salt:
        yield b"salt" + str(request.cache_salt).encode()


def _rows(request: Request) -> Iterator[Rows]:
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds.contiguous().view(torch.uint8)
        yield Rows(b"embeds", memoryview(embeds.flatten().numpy()), embeds[0].numel())
    if request.prompt_is_token_ids is not None:
        yield Rows(b"mask", memoryview(bytes(request.prompt_is_token_ids)), 1)


# Settings of a model's config that name the token that stands for a part of an image, an audio or a
# video, such as `image_token_id`. Others name tokens before and after it.
_PLACEHOLDER: Final = re.compile(
    "(image|img|video|audio|vision|speech)_(pad_|context_)?token_(id|index)"
)

# The sizes in a feature's data from which vLLM computes M-RoPE positions.
_GEOMETRY: Final = (
    *("image_grid_thw", "video_grid_thw", "second_per_grid_ts"),
    *("audio_feature_lengths", "use_audio_in_video"),
)


def takes_media(vllm_config: VllmConfig) -> bool:
    """Whether the model takes images, audio or video, and the operator has not turned them off."""
    model = vllm_config.model_config
    return model.multimodal_config is not None and bool(model.supports_multimodal_inputs)


def has_hooks(vllm_config: VllmConfig) -> bool:
    """Whether the scheduler has the hooks of `scheduler_hooks.py`."""
    # Its class has them while vLLM creates it, and with it this connector.
    # An operator may have named a class that has them.
    return getattr(vllm_config.scheduler_config.get_scheduler_cls(), "are_hooks", False)


def check_hooks(vllm_config: VllmConfig) -> None:
    """Raise a ConfigError unless the scheduler can end single requests (`scheduler_hooks.py`)."""
    if not has_hooks(vllm_config):
        raise ConfigError(
            "media is not 'own', but nixl_kv's hooks over vLLM's scheduler are missing, so decode "
            "cannot fail a request whose images, audio or video it does not have; allowed: with a "
            "model that takes media, a start that loads vLLM's plugins (VLLM_PLUGINS), or media "
            "'own', if the router sends decode the same media as prefill"
        )


def media_rules(setting: str) -> MediaRules:
    """The rules of this process: Dynamo's worker has loaded `dynamo`, or its parent process has."""
    is_dynamo = "dynamo" in sys.modules or DYNAMO_VARIABLE in os.environ
    return MediaRules(setting, has_stand_ins=is_dynamo)


@dataclass(frozen=True)
class MediaReader:
    """Reads the images, audio and video of requests."""

    placeholders: frozenset[int]  # token ids, as far as the model's config names them
    has_geometry: bool  # positions depend on sizes (M-RoPE)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "MediaReader | None":
        if not takes_media(vllm_config):
            return None
        model = vllm_config.model_config
        tokens = frozenset(
            value
            for config in mappings(model.hf_config.to_dict())
            for name, value in config.items()
            if _PLACEHOLDER.fullmatch(str(name)) and type(value) is int
        )
        return cls(tokens, bool(model.uses_mrope))

    def media_of(self, request: Request) -> Media:
        items = []
        for feature in request.mm_features or ():
            begin = feature.mm_position.offset
            data: Mapping[str, Any] = feature.data or {}
            items.append(
                MediaItem(
                    begin,
                    begin + feature.mm_position.length,
                    feature.identifier,
                    # vLLM's cache in shared memory leaves an address here.
                    is_data=bool(data)
                    and not any(name.endswith("_embeds") or name == "address" for name in data),
                    geometry=_geometry(data) if self.has_geometry else b"",
                )
            )
        return Media(tuple(items), tuple(self._bare(request.prompt_token_ids or (), items)))

    def _bare(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Iterator[int]:
        if self.placeholders.isdisjoint(token_ids):
            return
        covered = {at for item in items for at in range(item.begin, item.end)}
        for at, token in enumerate(token_ids):
            if token in self.placeholders and at not in covered:
                yield at


def _geometry(data: Mapping[str, Any]) -> bytes:
    values = {name: torch.as_tensor(data[name].data).tolist() for name in _GEOMETRY if name in data}
    return json.dumps(values, sort_keys=True).encode() if values else b""


def keep_private(request: Request) -> None:
    """Keep vLLM from using a new request's blocks for another one, and from finding some for it."""
    request.cache_salt = secrets.token_hex(16)
    request.block_hashes = []
    request.update_block_hashes()


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


def shorten(request: Request, *, has_drafts: bool) -> None:
    """Make a new request compute all of its prompt except the last token.

    `has_drafts`: a draft model writes KV as well. At the last position it writes that for the token
    that was sampled there, so vLLM has to sample the prompt's last token.
    """
    if has_drafts and request.prompt_token_ids and not request.use_structured_output:
        params: Any = copy(request.sampling_params)
        params.allowed_token_ids = request.prompt_token_ids[-1:]
        request.sampling_params = params
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        values = getattr(request, name)
        if values is not None:
            setattr(request, name, values[:-1])
    del request._all_token_ids[-1:]  # noqa: SLF001 - vLLM has no way to shorten a prompt
    request.num_prompt_tokens -= 1
    request.max_tokens = 1  # its output is meaningless now


def ended_well(request: Request) -> bool:
    return request.status in (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
    )


def why_not_offered(request: Request) -> str:
    """Why the KV of a finished request is incomplete; empty if it is complete."""
    if not ended_well(request):
        return f"it ended as {request.status}"
    if request.num_computed_tokens < request.num_prompt_tokens:
        return f"{request.num_computed_tokens} of {request.num_prompt_tokens} tokens computed"
    return ""
