"""Reads vLLM's configuration and requests: turns them into our own records.

Model families, backends and platforms are data here and in `kv_layout`, and nowhere else. What
cannot be served is refused in one table, at the start, in words.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from vllm.config import VllmConfig
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
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from nixl_kv.config import Config
from nixl_kv.connector.paging import Paging, StatePaging
from nixl_kv.connector.prompt import Prompt
from nixl_kv.connector.vllm_versions import is_told_of_sleep
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.layout import ALL_TOKENS, STATE_WINDOW, Stripe
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import Rank, RequestId
from nixl_kv.transport.base import SEGMENT_FACT

MAX_PACKED_BLOCK_SIZE: Final = {"FLASH_ATTN": 1 << 20, "FLASHINFER": 64}
"""Backends that BHLNC is known good for, and up to which --block-size.

A packed block cannot be cut into smaller kernel blocks, and vLLM then refuses to start: FlashInfer
wants kernel blocks of at most 64 tokens.
"""

DEFAULT_BACKEND: Final = {9: "FLASH_ATTN"}
"""What vLLM picks by itself, by the device's major compute capability, where that is known."""

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

DRAFT_FACT: Final = "draft model (prefill needs the same --speculative-config)"
"""As it is named where two engines differ in it."""

DRAFT_NAMES: Final = frozenset(("draft_model", "mtp"))
"""In the dotted names of layers of draft models."""

LONG_TEMPERATURE: Final = 32768
"""Above this --max-model-len vLLM scales the queries of Llama 4 by their position."""

MAX_FACT: Final = 1000
"""Characters of a fact; of a longer one a digest is compared."""

THIS_MACHINE: Final = ("127.0.0.1", "localhost", "::1")
"""As --master-addr: nodes that are processes of one machine."""

SUPPORTED_SPECS: Final = frozenset(
    (
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
    )
)
"""What a layer's cache may be, by the names of vLLM's records."""

STATE_KINDS: Final = {"GDN_ATTN": 2, "LINEAR": 1, "MAMBA1": 2, "MAMBA2": 2, "SHORT_CONV": 1}
"""Kinds of recurrent layers, by the names of vLLM's backends, and how many states each keeps."""


def specs(kv_cache_config: KVCacheConfig) -> Iterator[Any]:
    """Of all layers that are transferred."""
    for group in kv_cache_config.transfer_groups:
        for layer in group.layer_names:
            yield layer_spec(group.kv_cache_spec, layer)


REFUSALS: Final[Mapping[str, Callable[[VllmConfig, KVCacheConfig], bool]]] = {
    "this platform: run the engine on NVIDIA or AMD GPUs or on CPU": lambda _, __: (
        not (current_platform.is_cuda_alike() or current_platform.is_cpu())
    ),
    "prefill context parallelism (prefill_context_parallel_size > 1) together with decode context "
    "parallelism, or with another kv_role than kv_producer": lambda vllm, _: (
        vllm.parallel_config.prefill_context_parallel_size > 1
        and (
            vllm.parallel_config.decode_context_parallel_size > 1
            or vllm.kv_transfer_config.is_kv_consumer
        )
    ),
    "a KV buffer on another device (kv_buffer_device)": lambda vllm, _: (
        vllm.kv_transfer_config.kv_buffer_device != current_platform.device_type
    ),
    "the experts of each token in the answer (--enable-return-routed-experts): those of the prompt "
    "stay on prefill": lambda vllm, _: vllm.aux_output_config.enable_return_routed_experts,
    "sleep mode (--enable-sleep-mode): this vLLM does not tell connectors of it": lambda vllm, _: (
        vllm.model_config.enable_sleep_mode and not is_told_of_sleep()
    ),
    "images, audio and video that are not told apart by their content, as with "
    "--mm-processor-cache-gb 0 and without prefix caching: turn one of these on, or all media off "
    "(--language-model-only)": lambda vllm, _: counts_media(vllm),
    f"recurrent state of other kinds than {', '.join(STATE_KINDS)}": lambda _, kv: any(
        isinstance(spec, MambaSpec) and len(spec.shapes) != STATE_KINDS.get(spec.mamba_type.name)
        for spec in specs(kv)
    ),
    "several draft modules (num_speculative_tokens > 1) beside recurrent state, on an engine that "
    "decodes: prefill has the state before the last token alone": lambda vllm, kv: (
        vllm.kv_transfer_config.is_kv_consumer
        and kv.has_mamba_layers
        and computed_on_decode(vllm) > 1
    ),
    "cache groups in host memory": lambda _, kv: bool(kv.host_group_ids),
    f"other caches than of {', '.join(sorted(SUPPORTED_SPECS))}": lambda _, kv: any(
        type(spec).__name__ not in SUPPORTED_SPECS for spec in specs(kv)
    ),
    "several tokens in one stored state": lambda _, kv: any(
        spec.tokens_per_state > 1 for spec in specs(kv)
    ),
}
"""What this connector cannot serve, by the words of the error."""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Stop the start if the engine is of a kind that cannot be served.

    Raises:
        ConfigError: names what is not supported.
    """
    refusals = [
        words for words, applies in REFUSALS.items() if applies(vllm_config, kv_cache_config)
    ]
    if refusals:
        raise ConfigError(f"NixlKVConnector does not support {'; nor '.join(refusals)}")


def parse_config(vllm_config: VllmConfig) -> Config:
    """The operator's choices. See `Config.parse`."""
    return parse_extra(vllm_config.kv_transfer_config.kv_connector_extra_config)


def parse_extra(extra: Mapping[str, Any]) -> Config:
    """The same, from `kv_connector_extra_config` and this process's environment."""
    return Config.parse(extra, os.environ)


def counts_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM numbers a request's images and so on, and does not hash them.

    It hashes only for the sake of its caches. A number is unlike that of another engine, or by
    coincidence like that of another image.
    """
    model = vllm_config.model_config
    media = model.multimodal_config
    return bool(
        media is not None
        and media.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
        and model.supports_multimodal_inputs
    )


def choose_load_failure_policy(vllm_config: VllmConfig) -> str:
    """Set what vLLM does with a request whose KV cannot be read; the answer is the policy.

    vLLM's scheduler looks at its own `kv_load_failure_policy` after it has made the connector. Of a
    MultiConnector's configuration each child has only its own part, so there this has no effect.
    """
    policy = parse_config(vllm_config).on_load_failure
    vllm_config.kv_transfer_config.kv_load_failure_policy = policy
    return policy


def model_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """What two engines must agree on to mean the same by the same bytes, in words.

    The weights themselves are not compared: the served name stands for them, which a router sends
    to both engines anyway. A digest of the rest of the model's configuration catches the others.
    """
    model = vllm_config.model_config
    names = model.served_model_name
    values = model.hf_text_config.to_dict()  # as attributes, some raise where layers differ
    facts = {name: str(values[name]) for name in _FACTS if name in values}
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
    """Where vLLM computes all positions in another way if --max-model-len is above a number."""
    edges = {
        inner.get(
            "original_max_position_embeddings", values.get("original_max_position_embeddings")
        )
        for inner in _inner(values)
        if inner.get("rope_type", inner.get("type")) == "longrope"
    }
    if str(values.get("model_type")).startswith("llama4"):
        edges.add(LONG_TEMPERATURE)
    return {f"max_model_len above {edge}": str(max_model_len > edge) for edge in edges if edge}


def _media_facts(media: Any) -> dict[str, str]:
    """What an engine makes of images, audio and video. On which device, does not matter."""
    options = {k: v for k, v in (media.mm_processor_kwargs or {}).items() if k != "device"}
    rate = media.video_pruning_rate
    return {
        "mm_processor_kwargs": json.dumps(options, sort_keys=True, default=str),
        "media_io_kwargs": json.dumps(media.media_io_kwargs, sort_keys=True, default=str),
        "video_pruning": f"{media.video_pruning_method} {rate}" if rate else "none",
    }


def draft_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Of a draft model that has layers in the cache. Decode needs them of prefill if it has them.

    Without its KV of the prompt the draft model would look at what its blocks had before.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not has_draft_layers(speculative):
        return {}
    config = speculative.draft_model_config.hf_config.to_dict()
    # vLLM raises it to the target's --max-model-len; it only bounds the positions.
    config.pop("max_position_embeddings", None)
    words = f"{speculative.method}, config digest {_digest(config)}"
    if speculative.use_multi_module_mtp():  # of several modules only so many write
        words += f", {speculative.num_speculative_tokens} tokens"
    return {DRAFT_FACT: words}


def has_draft_layers(speculative: Any) -> bool:
    """Whether a draft model has layers in the cache: Gemma 4's reads the target's."""
    return bool(speculative.uses_draft_kv_cache() and not speculative.use_gemma4_mtp())


def draft_model_of(vllm_config: VllmConfig, layer: str) -> Any:
    """The configuration of the draft model that has this layer; None if it is the model's own.

    vLLM's older model runner does not mark such layers. They are numbered from the last of the
    model's layers on, or named by one of DRAFT_NAMES. To be called in a worker only.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not has_draft_layers(speculative):
        return None
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    names = layer.split(".")
    number = next((int(name) for name in names if name.isdecimal()), 0)
    is_draft = (
        getattr(module, "is_draft_layer", False)
        or number >= vllm_config.model_config.model_arch_config.total_num_hidden_layers
        or not DRAFT_NAMES.isdisjoint(names)
    )
    return speculative.draft_model_config if is_draft else None


def _inner(value: object) -> Iterator[Mapping[str, Any]]:
    """A mapping, and all mappings in it."""
    if isinstance(value, Mapping):
        yield value
        for each in value.values():
            yield from _inner(each)


def _digest(value: object) -> str:
    """Of a configuration without what does not matter, such as its folder, at any depth."""
    canonical = json.dumps(_essence(value), sort_keys=True, default=str).encode()
    return hashlib.blake2b(canonical, digest_size=8).hexdigest()


def _essence(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _essence(each) for k, each in value.items() if k not in _VOLATILE}
    return [_essence(each) for each in value] if isinstance(value, list | tuple) else value


def required_layout(vllm_config: VllmConfig) -> str | None:
    """The physical order of the KV cache to ask vLLM for; None for vLLM's own choice.

    In BHLNC a block's bytes for any range of heads are one run over all layers.
    """
    wanted = parse_config(vllm_config).layout
    if wanted != "auto":
        return wanted
    if not current_platform.is_cuda() or vllm_config.model_config.use_mla:
        return None
    if vllm_config.cache_config.cache_dtype.startswith("nvfp4"):
        return None  # FlashInfer takes dense pages only
    if vllm_config.model_config.is_hybrid:
        return None  # vLLM does not pack pages of several kinds
    block_size = vllm_config.cache_config.block_size or 0
    good = block_size <= MAX_PACKED_BLOCK_SIZE.get(_backend(vllm_config), 0)
    return "BHLNC" if good else None


def _backend(vllm_config: VllmConfig) -> str:
    chosen = vllm_config.attention_config.backend
    if chosen is not None:
        return str(chosen.name)
    capability = current_platform.get_device_capability()
    return DEFAULT_BACKEND.get(capability.major, "") if capability else ""


def pagings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Paging, ...]:
    """How vLLM pages each group that is transferred."""
    numbers = kv_cache_config.transfer_group_ids
    groups = kv_cache_config.transfer_groups
    return tuple(
        _paging(number, group.kv_cache_spec, num_stripes(vllm_config, group.kv_cache_spec))
        for number, group in zip(numbers, groups, strict=True)
    )


def _paging(number: int, spec: Any, num_stripes: int) -> Paging:
    if holds_state(spec):
        return StatePaging(number, spec.block_size)
    return Paging(number, spec.block_size * num_stripes, window(spec))


def num_stripes(vllm_config: VllmConfig, spec: Any) -> int:
    """Among how many ranks a group's tokens are divided, each of which has a part of each block."""
    number = vllm_config.parallel_config.decode_context_parallel_size
    return int(number) if _first(spec).dcp_sharded else 1


def stripe(vllm_config: VllmConfig, spec: Any) -> Stripe:
    """Which tokens of a group this rank has; to be called in a worker only.

    Raises:
        ConfigError: for an interleave that does not divide the group's blocks.
    """
    number = num_stripes(vllm_config, spec)
    if number == 1:
        return ALL_TOKENS
    width = vllm_config.parallel_config.cp_kv_cache_interleave_size
    if spec.block_size % width:
        raise ConfigError(
            f"--cp-kv-cache-interleave-size is {width}; "
            f"allowed: what divides the block size {spec.block_size}"
        )
    return Stripe(number, get_dcp_group().rank_in_group, width)


def holds_state(spec: Any) -> bool:
    """Whether a group's layers keep a recurrent state, and nothing for each token."""
    return isinstance(_first(spec), MambaSpec)


def block_tokens(spec: Any) -> int:
    """How many tokens a block of a group has, as the layout counts them: a state is one."""
    return 1 if holds_state(spec) else int(spec.block_size)


def _first(spec: Any) -> Any:
    """Of one of the layers, if they have specs of their own."""
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


def layer_spec(spec: Any, layer: str) -> Any:
    """Layers with specs of their own may share a block table."""
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def window(spec: Any) -> int:
    """How many tokens before the next one a group's layers look at; 0 for all of them.

    Of a full-attention group vLLM keeps all tokens, whatever its layers look at. A state stands for
    all tokens, and is kept as if it were the last one's.
    """
    if holds_state(spec):
        return STATE_WINDOW
    inner = _first(spec)
    if isinstance(inner, SlidingWindowSpec):
        return int(inner.sliding_window + inner.extra_retained_tokens)
    if isinstance(inner, ChunkedLocalAttentionSpec):
        return int(inner.attention_chunk_size)
    return 0


def dtype_name(dtype: Any) -> str:
    """Such as 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def parallel_shape(vllm_config: VllmConfig) -> ParallelShape:
    """How this engine is cut."""
    parallel = vllm_config.parallel_config
    return ParallelShape(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def spans_machines(vllm_config: VllmConfig) -> bool:
    """Whether the ranks of this engine run on several machines, by vLLM's own executor."""
    parallel = vllm_config.parallel_config
    return parallel.nnodes_within_dp > 1 and parallel.master_addr not in THIS_MACHINE


def writes_late(vllm_config: VllmConfig) -> bool:
    """Whether a step's output may leave before its last KV is written: that of draft layers.

    The model runner copies the output to the host before it lets the draft model propose.
    """
    return vllm_config.speculative_config is not None


def is_copy(vllm_config: VllmConfig) -> bool:
    """Whether another worker has the same rank, and the same KV; to be called in a worker only.

    With prefill context parallelism several workers compute a prompt together, and all keep all of
    its KV. The first of them speaks for all.
    """
    has_copies = vllm_config.parallel_config.prefill_context_parallel_size > 1
    return bool(has_copies and get_pcp_group().rank_in_group > 0)


def is_awaited(vllm_config: VllmConfig) -> bool:
    """Whether others wait for a worker whose step computes nothing.

    Of several stages the others may compute, and data-parallel engines compute in lockstep: one
    that has nothing to do takes part in the steps of the others.
    """
    parallel = vllm_config.parallel_config
    return bool(parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1)


def computed_on_decode(vllm_config: VllmConfig) -> int:
    """How many of a prompt's last tokens decode computes, at least: one, for its logits.

    Each module of a draft model looks one token further ahead than the one before it. Where there
    are several, prefill has filled their last slots from draft tokens that nobody has verified.
    """
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def worker_rank(vllm_config: VllmConfig) -> Rank:
    """Which rank this worker is, pipeline stage major; to be called in a worker only."""
    stage, place = get_pp_group().rank_in_group, get_tp_group().rank_in_group
    return Rank(stage * parallel_shape(vllm_config).tp + place)


def prompt_of(request: Request) -> Prompt:
    """What the KV of a request depends on."""
    return Prompt(
        RequestId(request.request_id),
        request.num_prompt_tokens,
        request.prompt_token_ids,
        tuple(_extras(request)),
    )


def _extras(request: Any) -> Iterator[bytes]:
    """What a request's KV depends on besides its token ids. See `ticket.context_hash`."""
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
    """The positions that a step computes, of each request that is wanted and scheduled."""
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
    """Why a request must compute its prompt's last token, in words; empty if it need not."""
    last = request.num_prompt_tokens - 1
    if not last:
        return "its prompt has one token"
    if request.get_skip_reading_prefix_cache():
        return "its client wants the prompt's log probabilities"
    if any(one.mm_position.offset + one.mm_position.length > last for one in request.mm_features):
        return "its prompt ends within an image, audio or video"
    return ""


def shorten(request: Request) -> None:
    """Let a request that has just arrived compute all of its prompt but the last token.

    Its answer is then of no use to anybody, so it has one token.
    """
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:-1]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-1]
    del request._all_token_ids[-1:]  # noqa: SLF001 - vLLM has no way to shorten a prompt
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def why_not_offered(request: Request) -> str:
    """Why the KV of a finished request is not complete, in words; empty if it is."""
    if request.status not in (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
    ):
        return f"it ended as {request.status}"
    if request.num_computed_tokens < request.num_prompt_tokens:
        return f"{request.num_computed_tokens} of {request.num_prompt_tokens} tokens computed"
    return ""


def has_failed(request: Request) -> bool:
    """Whether vLLM ends a request with an error: for a load that failed, if its policy says so."""
    return bool(request.status is RequestStatus.FINISHED_ERROR)


def request_ids(ids: Iterable[str] | None) -> list[RequestId]:
    """VLLM's request ids as ours."""
    return [RequestId(request) for request in ids or ()]
