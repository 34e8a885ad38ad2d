"""From vLLM's cache tensors to a `CacheLayout`: where this rank's KV lives.

Every backend gets a view [blocks, heads, tokens, content] of each layer, but not every one keeps
in it what the axes say. What is known of their insides stands here, as data. A backend that is not
known is exchanged in whole blocks, between engines that are cut alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec, SlidingWindowMLASpec

from nixl_kv.connector.shards import Shards
from nixl_kv.connector.translate import dtype_name, layer_spec, window
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Region, Span
from nixl_kv.geometry.views import region, together

AXES: Final = "BHNC"
"""Of the views that vLLM registers: K and V follow each other in the content."""

PLAIN: Final = frozenset(
    (
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
    )
)
"""Backends whose caches are what the axes say."""

WIDE: Final = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Types of latent caches that keep a token in one piece; quantised ones may put scales apart."""

TRANSPOSED_K: Final = frozenset(("vec", "vec16"))
"""Of CPU_ATTN's instruction sets those that keep a head's block as K [D, N], then V [N, D]."""

Groups: TypeAlias = list[tuple[Any, dict[str, torch.Tensor]]]
"""Each group's spec, and its layers' caches."""


def cache_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> CacheLayout:
    """Where this rank's KV lives, from its tensors' shapes and strides.

    Layers are taken from the groups, never from `kv_caches`, which names a layer that shares
    another one's cache a second time.

    Args:
        vllm_config: of this engine.
        kv_cache_config: its cache groups.
        kv_caches: by layer, a strided view of shape [blocks, heads, tokens, content].

    Raises:
        ConfigError: for a cache of another shape, or a rank without any.
    """
    groups: Groups = [
        (group.kv_cache_spec, {n: kv_caches[n] for n in group.layer_names if n in kv_caches})
        for group in kv_cache_config.transfer_groups
    ]
    tensors = [tensor for _, layers in groups for tensor in layers.values()]
    if not tensors:
        raise ConfigError("this rank has no layer with a KV cache; allowed: one or more")
    insides = Insides(vllm_config)
    first = tensors[0]
    memory: Memory = "DRAM" if first.device.type == "cpu" else "VRAM"
    return CacheLayout(
        groups=tuple(
            _group(spec, layers, insides, num_entries=kv_cache_config.num_blocks)
            for spec, layers in groups
        ),
        element=", ".join(sorted(set(_elements(groups, insides)))),
        memory=memory,
        device=first.device.index or 0,
        spans=_spans(tensors),
    )


class Insides:
    """What is in the layers' views."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """To be made in a worker only."""
        self.vllm_config = vllm_config
        self.shards = Shards(vllm_config)

    def is_transposed(self, layer: str, spec: Any) -> bool:
        """Whether K is transposed within each head's block."""
        plain = self._backend(layer) == "CPU_ATTN" and not spec.kv_quant_mode
        return plain and self._isa(spec) in TRANSPOSED_K

    def unknown(self, layer: str, spec: Any) -> str:
        """What makes a layer's blocks meaningful to its like only; empty if nothing does."""
        backend = self._backend(layer)
        latent = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
        known = spec.dtype in WIDE if latent else backend in PLAIN
        packed = spec.num_head_slots is not None or spec.state_content_bytes is not None
        if self.is_transposed(layer, spec) or (known and not packed):
            return ""
        kind = f"{backend} {self._isa(spec)}" if backend == "CPU_ATTN" else backend
        shards = self.shards.number(layer, spec)
        return f"in {kind} blocks of {spec.block_size} tokens and {shards} shards"

    def _isa(self, spec: Any) -> str:
        """Which code path CPU_ATTN takes, by which it lays out its blocks."""
        try:
            from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415 - CPU only
                _get_attn_isa,
            )
        except ImportError:
            return "of an unknown version"
        dtype = self.vllm_config.model_config.dtype
        return str(_get_attn_isa(dtype, spec.block_size, spec.head_size))

    def _backend(self, layer: str) -> str:
        module = self.vllm_config.compilation_config.static_forward_context.get(layer)
        backend = getattr(module, "attn_backend", None)
        return str(backend.get_name()) if backend is not None else "an unknown backend"


def _group(
    spec: Any, layers: Mapping[str, torch.Tensor], insides: Insides, *, num_entries: int
) -> Group:
    sizes = {(tensor.shape[0], tensor.shape[2]) for tensor in layers.values()}
    if len(sizes) > 1:
        raise ConfigError(f"layers of one cache group have (blocks, tokens) {sorted(sizes)}")
    blocks, tokens = sizes.pop() if sizes else (num_entries, spec.block_size)
    return Group(
        block_size=tokens,
        num_blocks=blocks,
        blocks_per_entry=blocks // num_entries,
        regions=tuple(
            _region(name, tensor, layer_spec(spec, name), insides=insides)
            for name, tensor in layers.items()
        ),
        window=window(spec),
    )


def _region(layer: str, tensor: torch.Tensor, spec: Any, *, insides: Insides) -> Region:
    if tensor.dim() != len(AXES):
        raise ConfigError(
            f"the KV cache of layer {layer!r} has the shape {tuple(tensor.shape)}; "
            "allowed: [blocks, heads, tokens, content]"
        )
    first_head = insides.shards.first_head(layer, spec, num_heads=tensor.shape[1])
    if not insides.is_transposed(layer, spec):
        content = _content(spec, tensor.shape[3] * tensor.element_size())
        found = region(layer, tensor, AXES, first_head=first_head, content=content)
        return replace(found, opaque=bool(insides.unknown(layer, spec)))
    blocks, heads, tokens, _ = tensor.shape
    key, value = tensor.view(blocks, heads, 2, -1).unbind(2)
    return together(
        region(layer, key.view(blocks, heads, -1, tokens), "BHCN", first_head=first_head),
        region(layer, value.view(blocks, heads, tokens, -1), AXES, first_head=first_head),
    )


def _content(spec: Any, content: int) -> tuple[int, ...]:
    """Bytes of K and of V, where they fill the content; else one piece, as of a latent."""
    size = spec.dtype.itemsize
    key, value = spec.head_size * size, (spec.head_size_v or 0) * size
    return (key, value) if value and key + value == content else (content,)


def _elements(groups: Groups, insides: Insides) -> Iterator[str]:
    """The stored types of all layers, such as 'bfloat16' or 'uint8 FP8_PER_TENSOR'."""
    for group_spec, layers in groups:
        for layer in layers:
            spec = layer_spec(group_spec, layer)
            quantised = spec.kv_quant_mode.name if spec.kv_quant_mode else ""
            words = (dtype_name(spec.dtype), quantised, insides.unknown(layer, spec))
            yield " ".join(filter(None, words))


def _spans(tensors: list[torch.Tensor]) -> tuple[Span, ...]:
    """The storages behind the views: all layers are usually views of one."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return tuple(Span(address, length) for address, length in storages.items())
