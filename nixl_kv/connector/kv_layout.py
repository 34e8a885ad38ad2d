"""Turns vLLM's cache tensors into a `CacheLayout`: where this rank's KV lives.

Every attention backend gets a view [blocks, heads, tokens, content] of each layer, but some store
other bytes in it than the axes suggest. The known backends are listed here, as data. Engines
exchange whole blocks of an unknown backend, and only if they are sharded alike.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from nixl_kv.connector.state_layout import Place, state_regions
from nixl_kv.connector.vllm_config import (
    block_tokens,
    draft_model_of,
    dtype_name,
    layer_spec,
    num_stripes,
    parallel_shape,
    stripe,
    window,
    worker_rank,
)
from nixl_kv.errors import ConfigError, get_logger
from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Part, Region, Span

logger = get_logger(__name__)

AXES: Final = "BHNC"
"""The axes of vLLM's views. Within the content C, V follows K."""

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
"""Backends whose bytes follow the axes of the view."""

WIDE: Final = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Types of latent caches that keep a token in one piece. Quantised ones may store scales apart."""

_PER_TENSOR: Final = frozenset(("fp8", "fp8_e4m3"))
_PER_TOKEN_HEAD: Final = frozenset(
    ("fp8_per_token_head", "int4_per_token_head", "int8_per_token_head")
)
IN_ONE_PIECE: Final[Mapping[str, frozenset[str]]] = {
    "CUTLASS_MLA": _PER_TENSOR,
    "FLASHINFER_MLA": _PER_TENSOR,
    "FLASHMLA": _PER_TENSOR,
    "FLASHMLA_SPARSE": frozenset(("fp8_ds_mla", "nvfp4_ds_mla")),
    "TOKENSPEED_MLA": _PER_TENSOR,
    "TRITON_ATTN": _PER_TOKEN_HEAD,
    "TRITON_MLA": _PER_TENSOR,
}
"""Quantised caches that keep a token of a head, and its own scales, in one piece: for each backend,
the values of --kv-cache-dtype as the layer resolves them."""

ONE_BY_ONE: Final = frozenset(("FLASHINFER_MLA",))
"""Backends whose kernels need a DCP interleave of one token."""

TRANSPOSED_K: Final = frozenset(("vec", "vec16"))
"""The instruction sets for which CPU_ATTN stores a head's block as K [D, N], then V [N, D]."""

_E4M3: Final = ("float8_e4m3fn", "float8_e4m3fnuz")
FP8: Final = {
    "fp8": _E4M3,
    "fp8_e4m3": _E4M3,
    "fp8_e5m2": ("float8_e5m2", "float8_e5m2fnuz"),
    "fp8_per_token_head": tuple(f"{name} with scales" for name in _E4M3),
}
"""vLLM's type names: the stored type, and the one on platforms whose FP8 has no negative zero."""

HEAD_COUNT: Final = re.compile(r"(key_value|kv)_heads$|^n_head_kv$|^num_attention_groups$")
"""Keys of model configurations that give the number of KV heads of some or all layers."""

Groups: TypeAlias = list[tuple[Any, dict[str, torch.Tensor]]]
"""Each group's spec, and its layers' caches by name."""


def cache_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> CacheLayout:
    """Describe where this rank's KV lives, from the shapes and strides of its tensors.

    Args:
        vllm_config: this engine's.
        kv_cache_config: its cache groups, which name the layers. `kv_caches` has further names for
            layers that share another layer's cache.
        kv_caches: for each layer a strided view [blocks, heads, tokens, content].

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
    backends = _Backends(vllm_config)
    first = tensors[0]
    memory: Memory = "DRAM" if first.device.type == "cpu" else "VRAM"
    return CacheLayout(
        groups=tuple(
            _group(spec, layers, backends, num_entries=kv_cache_config.num_blocks)
            for spec, layers in groups
        ),
        memory=memory,
        device=first.device.index or 0,
        spans=_spans(tensors),
    )


class _Backends:
    """Knows the bytes that attention backends store in their layers' views. In a worker only."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.shards = _HeadShards(vllm_config)

    def regions(self, layer: str, tensor: torch.Tensor, spec: Any) -> Iterator[Region]:
        """One region for a layer's KV, or one for each part of a recurrent layer's state."""
        _check_shape(layer, tensor)
        if isinstance(spec, MambaSpec):
            yield from state_regions(layer, tensor, spec, self._module(layer), self.shards.place)
            return
        yield replace(
            _bytes_of(layer, tensor, spec, self),
            opaque=bool(self.opaque_kind(layer, spec, tensor)),
            element=self.element(layer, spec, tensor),
            scales=self.scales(layer, spec),
        )

    def is_transposed(self, layer: str, spec: Any) -> bool:
        plain = self._backend(layer) == "CPU_ATTN" and not spec.kv_quant_mode
        return plain and self._isa(spec) in TRANSPOSED_K

    def opaque_kind(self, layer: str, spec: Any, tensor: torch.Tensor) -> str:
        """The kind of block, which two engines must share to exchange blocks whole.

        Empty if the bytes are known, so that engines may exchange any part of a block.
        """
        if self.is_transposed(layer, spec) or self._is_plain(layer, spec):
            return ""
        backend = self._backend(layer)
        kind = f"{backend} {self._isa(spec)}" if backend == "CPU_ATTN" else backend
        shards = self.shards.number(layer, spec)
        order = f" in the order {_order(tensor)}" if tensor.shape[1] > 1 else ""
        own = stripe(self.vllm_config, spec)
        turns = f", {own.width} of every {own.period} tokens" if own.count > 1 else ""
        return f"in {kind} blocks of {tensor.shape[2]} tokens and {shards} shards{order}{turns}"

    def _is_plain(self, layer: str, spec: Any) -> bool:
        """Whether the bytes of a layer follow the axes of its view."""
        backend, stored = self._backend(layer), self._stored(layer)
        if spec.num_head_slots is not None:
            return False
        if spec.kv_quant_mode and stored in IN_ONE_PIECE.get(backend, ()):
            return True
        latent = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
        known = spec.dtype in WIDE if latent else backend in PLAIN
        return known and spec.state_content_bytes is None

    def element(self, layer: str, spec: Any, tensor: torch.Tensor) -> str:
        """The stored type, such as 'bfloat16' or 'float8_e4m3fn', with the `opaque_kind`."""
        name = self._stored(layer)
        if not spec.kv_quant_mode:
            name = dtype_name(spec.dtype)
        elif name is None:
            name = f"{dtype_name(spec.dtype)} {spec.kv_quant_mode.name}"
        elif name in FP8:
            name = FP8[name][current_platform.is_fp8_fnuz()]
        return " ".join(filter(None, (name, self.opaque_kind(layer, spec, tensor))))

    def scales(self, layer: str, spec: Any) -> tuple[str, ...]:
        """The divisors of K and V before quantisation, for all heads or for each.

        They are final here: vLLM has loaded the weights before it registers the cache.
        """
        module = self._module(layer)
        found = [getattr(module, name, None) for name in ("_k_scale", "_v_scale")]
        scales = [scale.flatten().tolist() for scale in found if scale is not None]
        if not spec.kv_quant_mode or len(scales) < len(found):
            return ()
        return tuple(f"k {key:.9g}, v {value:.9g}" for key, value in zip(*scales, strict=True))

    def _isa(self, spec: Any) -> str:
        """The instruction set that CPU_ATTN uses, which decides the layout of its blocks."""
        from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415 - CPU only
            _get_attn_isa,
        )

        dtype = self.vllm_config.model_config.dtype
        return str(_get_attn_isa(dtype, spec.block_size, spec.head_size))

    def _module(self, layer: str) -> Any:
        return self.vllm_config.compilation_config.static_forward_context.get(layer)

    def _stored(self, layer: str) -> str | None:
        """The cache type of a layer by vLLM's name; None if the layer has none."""
        return getattr(self._module(layer), "kv_cache_dtype", None)

    def _backend(self, layer: str) -> str:
        return backend_name(self._module(layer))


def backend_name(module: Any) -> str:
    backend = getattr(module, "attn_backend", None)
    if backend is None:
        backend = getattr(module, "get_attn_backend", lambda: None)()
    return str(backend.get_name()) if backend is not None else "an unknown backend"


def choose_interleave(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Make DCP ranks divide tokens by whole blocks, if the operator and the kernels allow it.

    vLLM's default is one token at a time, so that each token of each layer would be a run of its
    own. The model runner reads the interleave after it has created the connector. Changes
    `vllm_config`. Call it in a worker only.
    """
    parallel = vllm_config.parallel_config
    sizes = {
        group.kv_cache_spec.block_size
        for group in kv_cache_config.kv_cache_groups
        if num_stripes(vllm_config, group.kv_cache_spec) > 1
    }
    is_open = parallel._allow_auto_resolve_cp_interleave_size  # noqa: SLF001 - vLLM has no other
    is_open &= parallel.dcp_kv_cache_interleave_size == 1  # its former name
    if len(sizes) != 1 or not is_open or vllm_config.speculative_config is not None:
        return
    layers = vllm_config.compilation_config.static_forward_context.values()
    if ONE_BY_ONE.isdisjoint(map(backend_name, layers)):
        parallel.cp_kv_cache_interleave_size = sizes.pop()
        logger.info(
            "decode context parallel ranks take turns every %d tokens "
            "(cp_kv_cache_interleave_size)",
            parallel.cp_kv_cache_interleave_size,
        )


def _group(
    spec: Any, layers: Mapping[str, torch.Tensor], backends: _Backends, *, num_entries: int
) -> Group:
    sizes = {(tensor.shape[0], tensor.shape[2]) for tensor in layers.values()}
    if len(sizes) > 1:
        raise ConfigError(f"layers of one cache group have (blocks, tokens) {sorted(sizes)}")
    blocks, tokens = sizes.pop() if sizes else (num_entries, block_tokens(spec))
    own = stripe(backends.vllm_config, spec)
    for name in layers if own.count > 1 else ():
        backends.shards.check_copies(name, layer_spec(spec, name), own.count)
    return Group(
        block_size=tokens,
        num_blocks=blocks,
        blocks_per_entry=blocks // num_entries,
        regions=tuple(
            region
            for name, tensor in layers.items()
            for region in backends.regions(name, tensor, layer_spec(spec, name))
        ),
        window=window(spec),
        stripe=own,
    )


def _check_shape(layer: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != len(AXES):
        raise ConfigError(
            f"the KV cache of layer {layer!r} has the shape {tuple(tensor.shape)}; "
            "allowed: [blocks, heads, tokens, content]"
        )
    if tensor.stride(3) != 1:
        raise ConfigError(
            f"the KV cache of layer {layer!r} has the strides {tensor.stride()}; "
            "allowed: 1 for the last axis (content)"
        )


def _bytes_of(layer: str, tensor: torch.Tensor, spec: Any, backends: _Backends) -> Region:
    """Address the bytes of a layer. `_Backends.regions` adds their type and scales."""
    item = tensor.element_size()
    block_stride, head_stride, token_stride = (step * item for step in tensor.stride()[:3])
    if backends.is_transposed(layer, spec):
        # A head's block is K as [head size, tokens], then V as [tokens, head size].
        tokens, size = tensor.shape[2], tensor.shape[3] // 2
        key = Part(0, item, size, tokens * item, token_stride=item)
        value = Part(size * tokens * item, size * item, token_stride=size * item)
        parts: tuple[Part, ...] = (key, value)
        token_stride = item
    else:
        lengths = _content(spec, tensor.shape[3] * item)
        ends = itertools.accumulate(lengths)
        parts = tuple(Part(end - length, length) for end, length in zip(ends, lengths, strict=True))
    return Region(
        layer=layer,
        base=tensor.data_ptr(),
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        first_head=backends.shards.first_head(layer, spec, num_heads=tensor.shape[1]),
        num_heads=tensor.shape[1],
        parts=parts,
    )


def _order(tensor: torch.Tensor) -> str:
    """The axes of a block of this view, in decreasing order of stride."""
    strides = zip(tensor.stride()[1:], AXES[1:], strict=True)
    return "".join(axis for _, axis in sorted(strides, key=lambda pair: -pair[0]))


def _content(spec: Any, content: int) -> tuple[int, ...]:
    """The bytes of K and of V if they fill the content; else one piece, as for a latent cache."""
    size = spec.dtype.itemsize
    key, value = spec.head_size * size, (spec.head_size_v or 0) * size
    return (key, value) if value and key + value == content else (content,)


def _spans(tensors: list[torch.Tensor]) -> tuple[Span, ...]:
    """The storages behind the views. Usually all layers are views of one."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return tuple(Span(address, length) for address, length in storages.items())


class _HeadShards:
    """Which heads of each layer this TP rank holds. In a worker only.

    vLLM splits a layer's heads into one shard per rank. If there are more ranks than heads,
    neighbouring ranks hold copies of one head.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._tp = parallel_shape(vllm_config).tp
        self.place = Place(worker_rank(vllm_config) % self._tp, self._tp)

    def first_head(self, layer: str, spec: Any, *, num_heads: int) -> int:
        """The model-wide index of the first head in a layer's cache, which has `num_heads`.

        Raises:
            ConfigError: if the model's configuration does not say how many heads there are.
        """
        return self.place.rank * self.number(layer, spec) // self._tp * num_heads

    def number(self, layer: str, spec: Any) -> int:
        """How many distinct shards of a layer's heads the TP ranks hold."""
        if spec.max_tp_shards is not None:
            return int(min(self._tp, spec.max_tp_shards))
        if self._tp == 1 or spec.num_kv_heads > 1:
            return self._tp
        # One head per rank: either there are as many heads as ranks, or ranks hold copies.
        fitting = {count for count in self._head_counts(layer) if self._tp % count == 0}
        if len(fitting) != 1:
            raise ConfigError(
                f"layer {layer!r} has one KV head on each of {self._tp} ranks, and the model's "
                f"configuration names {sorted(fitting)} as possible numbers of KV heads; allowed: "
                "exactly one divisor of the number of ranks"
            )
        return fitting.pop()

    def check_copies(self, layer: str, spec: Any, num_stripes: int) -> None:
        """Refuse DCP ranks that would divide the tokens of different heads; vLLM admits them.

        Raises:
            ConfigError: names the DCP size and the number of copies.
        """
        copies = self._tp // self.number(layer, spec)
        if copies % num_stripes:
            raise ConfigError(
                f"decode_context_parallel_size is {num_stripes}, and {copies} ranks have the same "
                f"KV heads of layer {layer!r}; allowed: a divisor of {copies}"
            )

    def _head_counts(self, layer: str) -> Iterator[int]:
        """All numbers of KV heads that the model's configuration gives for this or any layer."""
        draft = draft_model_of(self._vllm_config, layer)
        model = self._vllm_config.model_config if draft is None else draft
        architecture = model.model_arch_config
        overrides = architecture.per_layer_overrides
        if overrides is not None:  # a draft layer's number is not an index into its overrides
            numbers = [extract_layer_index(layer)] if draft is None else range(len(overrides))
            yield from (architecture[number].total_num_kv_heads for number in numbers)
            return
        yield architecture.total_num_kv_heads
        configs = [model.hf_text_config.to_dict()]
        while configs:
            for key, value in configs.pop().items():
                if isinstance(value, dict):
                    configs.append(value)
                elif HEAD_COUNT.search(str(key)) and isinstance(value, int) and value > 0:
                    yield value
