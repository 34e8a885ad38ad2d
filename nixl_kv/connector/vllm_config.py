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
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from nixl_kv.config import Config
from nixl_kv.connector.block_pinning import Paging
from nixl_kv.connector.prompt import Prompt
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.ranks import ParallelShape
from nixl_kv.ids import Rank, RequestId

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

SUPPORTED_SPECS: Final = frozenset(
    (
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
    )
)
"""What a layer's cache may be, by the names of vLLM's records."""


def specs(kv_cache_config: KVCacheConfig) -> Iterator[Any]:
    """Of all layers that are transferred."""
    for group in kv_cache_config.transfer_groups:
        for layer in group.layer_names:
            yield layer_spec(group.kv_cache_spec, layer)


REFUSALS: Final[Mapping[str, Callable[[VllmConfig, KVCacheConfig], bool]]] = {
    "decode context parallelism (decode_context_parallel_size > 1)": lambda vllm, _: (
        vllm.parallel_config.decode_context_parallel_size > 1
    ),
    "prefill context parallelism (prefill_context_parallel_size > 1)": lambda vllm, _: (
        vllm.parallel_config.prefill_context_parallel_size > 1
    ),
    "a KV buffer on another device (kv_buffer_device)": lambda vllm, _: (
        vllm.kv_transfer_config.kv_buffer_device != current_platform.device_type
    ),
    "KV scales measured at run time (calculate_kv_scales): they are not transferred": (
        lambda vllm, _: getattr(vllm.cache_config, "calculate_kv_scales", False)
    ),
    "sleep mode (--enable-sleep-mode): this vLLM does not tell connectors of it": lambda vllm, _: (
        getattr(vllm.model_config, "enable_sleep_mode", False)
        and not hasattr(KVConnectorBase_V1, "unregister_kv_caches")
    ),
    "recurrent state beside KV (Mamba and its kin)": lambda _, kv: kv.has_mamba_layers,
    "cache groups in host memory": lambda _, kv: bool(kv.host_group_ids),
    f"other caches than of {', '.join(sorted(SUPPORTED_SPECS))}": lambda _, kv: any(
        type(spec).__name__ not in SUPPORTED_SPECS for spec in specs(kv)
    ),
    "several tokens in one stored state": lambda _, kv: any(
        spec.tokens_per_state != 1 for spec in specs(kv)
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
    return Config.parse(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)


def model_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """What two engines must agree on to mean the same by the same bytes, in words.

    The weights themselves are not compared: the served name stands for them, which a router sends
    to both engines anyway. A digest of the rest of the model's configuration catches the others.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    names = model.served_model_name
    values = text.to_dict()  # a configuration whose layers differ raises for some attributes
    facts = {name: str(values[name]) for name in _FACTS if name in values}
    facts["served_model_name"] = str(names if isinstance(names, str) else names[0])
    facts["dtype"] = dtype_name(model.dtype)
    facts["paced_reads"] = str(parse_config(vllm_config).paced_reads)
    rest = {key: value for key, value in values.items() if key not in _VOLATILE}
    canonical = json.dumps(rest, sort_keys=True, default=str).encode()
    facts["config digest"] = hashlib.blake2b(canonical, digest_size=8).hexdigest()
    return facts


def required_layout(vllm_config: VllmConfig) -> str | None:
    """The physical order of the KV cache to ask vLLM for; None for vLLM's own choice.

    In BHLNC a block's bytes for any range of heads are one run over all layers.
    """
    wanted = parse_config(vllm_config).layout
    if wanted != "auto":
        return wanted
    if not current_platform.is_cuda() or vllm_config.model_config.use_mla:
        return None
    block_size = vllm_config.cache_config.block_size or 0
    good = block_size <= MAX_PACKED_BLOCK_SIZE.get(_backend(vllm_config), 0)
    return "BHLNC" if good else None


def _backend(vllm_config: VllmConfig) -> str:
    chosen = vllm_config.attention_config.backend
    if chosen is not None:
        return str(chosen.name)
    capability = current_platform.get_device_capability()
    return DEFAULT_BACKEND.get(capability.major, "") if capability else ""


def pagings(kv_cache_config: KVCacheConfig) -> tuple[Paging, ...]:
    """How vLLM pages each group that is transferred."""
    numbers = kv_cache_config.transfer_group_ids
    groups = kv_cache_config.transfer_groups
    return tuple(
        Paging(number, group.kv_cache_spec.block_size, window(group.kv_cache_spec))
        for number, group in zip(numbers, groups, strict=True)
    )


def layer_spec(spec: Any, layer: str) -> Any:
    """Layers with specs of their own may share a block table."""
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def window(spec: Any) -> int:
    """How many tokens before the next one a group's layers look at; 0 for all of them.

    Of a full-attention group vLLM keeps all tokens, whatever its layers look at.
    """
    inner = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
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


def writes_late(vllm_config: VllmConfig) -> bool:
    """Whether a step's output may leave before its last KV is written: that of draft layers.

    The model runner copies the output to the host before it lets the draft model propose.
    """
    return vllm_config.speculative_config is not None


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
    if getattr(request, "prompt_is_token_ids", None) is not None:
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


def request_ids(ids: Iterable[str] | None) -> list[RequestId]:
    """VLLM's request ids as ours."""
    return [RequestId(request) for request in ids or ()]
