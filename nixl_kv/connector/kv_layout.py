"""Turns vLLM's cache tensors into a `CacheLayout`: where this rank's KV lives.

Every attention backend gets a view [blocks, heads, tokens, content] of each layer, but some store
other bytes in it than the axes suggest. The known backends are listed here, as data. Engines
exchange whole blocks of an unknown backend, and only if they are sharded alike.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

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
    draft_model_of,
    dtype_name,
    holds_state,
    layer_spec,
    num_stripes,
    stripe,
    window,
    worker_rank,
)
from nixl_kv.errors import ConfigError, get_logger
from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Part, Region, Span

logger = get_logger(__name__)

# The axes of vLLM's views. Within the content C, V follows K.
AXES: Final = "BHNC"

# Backends whose bytes follow the axes of the view.
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

# Types of latent caches that keep a token in one piece. Quantised ones may store scales apart.
WIDE: Final = frozenset((torch.float32, torch.bfloat16, torch.float16))

# Quantised caches that keep a token of a head, and its own scales, in one piece: for each backend,
# the values of --kv-cache-dtype as the layer resolves them.
_PER_TENSOR: Final = frozenset(("fp8", "fp8_e4m3"))
IN_ONE_PIECE: Final[Mapping[str, frozenset[str]]] = {
    "CUTLASS_MLA": _PER_TENSOR,
    "FLASHINFER_MLA": _PER_TENSOR,
    "FLASHMLA": _PER_TENSOR,
    "FLASHMLA_SPARSE": frozenset(("fp8_ds_mla", "nvfp4_ds_mla")),
    "TOKENSPEED_MLA": _PER_TENSOR,
    "TRITON_ATTN": frozenset(("fp8_per_token_head", "int4_per_token_head", "int8_per_token_head")),
    "TRITON_MLA": _PER_TENSOR,
}

# Backends whose kernels need a DCP interleave of one token.
ONE_BY_ONE: Final = frozenset(("FLASHINFER_MLA",))

# The instruction sets for which CPU_ATTN stores a head's block as K [D, N], then V [N, D].
TRANSPOSED_K: Final = frozenset(("vec", "vec16"))

# vLLM's type names: the stored type, and the one on platforms whose FP8 has no negative zero.
_E4M3: Final = ("float8_e4m3fn", "float8_e4m3fnuz")
FP8: Final = {
    "fp8": _E4M3,
    "fp8_e4m3": _E4M3,
    "fp8_e5m2": ("float8_e5m2", "float8_e5m2fnuz"),
    "fp8_per_token_head": tuple(f"{name} with scales" for name in _E4M3),
}

# Keys of model configurations that give the number of KV heads of some or all layers.
HEAD_COUNT: Final = re.compile(r"(key_value|kv)_heads$|^n_head_kv$|^num_attention_groups$")


def cache_layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> CacheLayout:
    """Describe where this rank's KV lives, from the shapes and strides of its tensors.

    `kv_caches` also has names of layers that share another layer's cache; no group names those.

    Raises:
        ConfigError: for a cache of another shape, or a rank without any.
    """
    groups: list[tuple[Any, dict[str, torch.Tensor]]] = [
        (group.kv_cache_spec, {n: kv_caches[n] for n in group.layer_names if n in kv_caches})
        for group in kv_cache_config.transfer_groups
    ]
    tensors = [tensor for _, caches in groups for tensor in caches.values()]
    if not tensors:
        raise ConfigError("this rank has no layer with a KV cache; allowed: one or more")
    memory: Memory = "DRAM" if tensors[0].device.type == "cpu" else "VRAM"
    layers = _Layers(vllm_config)
    # Usually all layers are views of one storage.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return CacheLayout(
        groups=tuple(
            _group(spec, caches, layers, kv_cache_config.num_blocks) for spec, caches in groups
        ),
        memory=memory,
        device=tensors[0].device.index or 0,
        spans=tuple(Span(address, length) for address, length in storages.items()),
    )


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
    if ONE_BY_ONE.isdisjoint(map(_backend_name, layers)):
        parallel.cp_kv_cache_interleave_size = sizes.pop()
        logger.info(
            "decode context parallel ranks take turns every %d tokens "
            "(cp_kv_cache_interleave_size)",
            parallel.cp_kv_cache_interleave_size,
        )


def _group(
    spec: Any, caches: Mapping[str, torch.Tensor], layers: "_Layers", num_entries: int
) -> Group:
    sizes = {(tensor.shape[0], tensor.shape[2]) for tensor in caches.values()}
    if len(sizes) > 1:
        raise ConfigError(f"layers of one cache group have (blocks, tokens) {sorted(sizes)}")
    if not sizes:  # no layer of this group is on this pipeline stage
        sizes = {(num_entries, 1 if holds_state(spec) else spec.block_size)}
    blocks, tokens = sizes.pop()
    own = stripe(layers.vllm_config, spec)
    if own.count > 1:
        for name in caches:
            layers.check_copies(name, layer_spec(spec, name), own.count)
    return Group(
        block_size=tokens,
        num_blocks=blocks,
        blocks_per_entry=blocks // num_entries,
        regions=tuple(
            region
            for name, tensor in caches.items()
            for region in layers.regions(name, tensor, layer_spec(spec, name))
        ),
        window=window(spec),
        stripe=own,
    )


class _Layers:
    """Knows which heads of each layer this rank holds, and the bytes of their cache.

    vLLM splits a layer's heads into one shard per TP rank. If there are more ranks than heads,
    neighbouring ranks hold copies of one head.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._tp: int = vllm_config.parallel_config.tensor_parallel_size
        self._place = Place(worker_rank(vllm_config) % self._tp, self._tp)

    def regions(self, layer: str, tensor: torch.Tensor, spec: Any) -> Iterator[Region]:
        """One region for a layer's KV, or one for each part of a recurrent layer's state."""
        if tensor.dim() != len(AXES) or tensor.stride(3) != 1:
            raise ConfigError(
                f"the KV cache of layer {layer!r} has the shape {tuple(tensor.shape)} and the "
                f"strides {tensor.stride()}; allowed: [blocks, heads, tokens, content], and a "
                "stride of 1 for the content"
            )
        if isinstance(spec, MambaSpec):
            yield from state_regions(layer, tensor, spec, self._module(layer), self._place)
            return
        opaque_kind = self.opaque_kind(layer, spec, tensor)
        yield replace(
            region_of(
                layer,
                tensor,
                spec,
                first_head=self.first_head(layer, spec, num_heads=tensor.shape[1]),
                is_transposed=self._is_transposed(layer, spec),
            ),
            opaque=bool(opaque_kind),
            element=f"{self.element(layer, spec)} {opaque_kind}".rstrip(),
            scales=self.scales(layer, spec),
        )

    # --- heads

    def first_head(self, layer: str, spec: Any, *, num_heads: int) -> int:
        """The model-wide index of the first head in a layer's cache, which has `num_heads`."""
        return self._place.rank * self.num_shards(layer, spec) // self._tp * num_heads

    def num_shards(self, layer: str, spec: Any) -> int:
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
        """Refuse DCP ranks that would divide the tokens of different heads; vLLM admits them."""
        copies = self._tp // self.num_shards(layer, spec)
        if copies % num_stripes:
            raise ConfigError(
                f"decode_context_parallel_size is {num_stripes}, and {copies} ranks have the same "
                f"KV heads of layer {layer!r}; allowed: a divisor of {copies}"
            )

    def _head_counts(self, layer: str) -> Iterator[int]:
        """All numbers of KV heads that the model's configuration gives for this or any layer."""
        draft = draft_model_of(self.vllm_config, layer)
        model = self.vllm_config.model_config if draft is None else draft
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

    # --- bytes

    def _is_transposed(self, layer: str, spec: Any) -> bool:
        plain = self._backend(layer) == "CPU_ATTN" and not spec.kv_quant_mode
        return plain and self._isa(spec) in TRANSPOSED_K

    def opaque_kind(self, layer: str, spec: Any, tensor: torch.Tensor) -> str:
        """The kind of block, which two engines must share to exchange blocks whole.

        Empty if the bytes are known, so that engines may exchange any part of a block.
        """
        if self._is_transposed(layer, spec) or self._is_plain(layer, spec):
            return ""
        backend = self._backend(layer)
        kind = f"{backend} {self._isa(spec)}" if backend == "CPU_ATTN" else backend
        shards = self.num_shards(layer, spec)
        # The axes of a block, in decreasing order of stride. One head has no stride.
        strides = tensor.stride()
        axes = sorted(range(1, len(AXES)), key=lambda axis: -strides[axis])
        order = "".join(AXES[axis] for axis in axes) if tensor.shape[1] > 1 else ""
        own = stripe(self.vllm_config, spec)
        turns = f", {own.width} of every {own.period} tokens" if own.count > 1 else ""
        return (
            f"in {kind} blocks of {tensor.shape[2]} tokens and {shards} shards"
            f"{order and f' in the order {order}'}{turns}"
        )

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

    def element(self, layer: str, spec: Any) -> str:
        """The stored type, such as 'bfloat16' or 'float8_e4m3fn'."""
        name = self._stored(layer)
        if not spec.kv_quant_mode:
            return dtype_name(spec.dtype)
        if name is None:
            return f"{dtype_name(spec.dtype)} {spec.kv_quant_mode.name}"
        return FP8[name][current_platform.is_fp8_fnuz()] if name in FP8 else name

    def scales(self, layer: str, spec: Any) -> tuple[str, ...]:
        """The divisors of K and V before quantisation, for all heads or for each."""
        module = self._module(layer)
        # They are final here: vLLM has loaded the weights before it registers the cache.
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
        return _backend_name(self._module(layer))


def _backend_name(module: Any) -> str:
    backend = getattr(module, "attn_backend", None)
    if backend is None:
        backend = getattr(module, "get_attn_backend", lambda: None)()
    return str(backend.get_name()) if backend is not None else "an unknown backend"


def region_of(
    layer: str, tensor: torch.Tensor, spec: Any, *, first_head: int, is_transposed: bool
) -> Region:
    """Address the bytes of an attention layer's view."""
    item = tensor.element_size()
    block_stride, head_stride, token_stride = (step * item for step in tensor.stride()[:3])
    if is_transposed:
        # A head's block is K as [head size, tokens], then V as [tokens, head size].
        tokens, size = tensor.shape[2], tensor.shape[3] // 2
        key = Part(0, item, size, tokens * item, token_stride=item)
        value = Part(size * tokens * item, size * item, token_stride=size * item)
        parts: tuple[Part, ...] = (key, value)
        token_stride = item
    else:
        # K and V if they fill the content; else one piece, as for a latent cache.
        content = tensor.shape[3] * item
        lengths = [size * spec.dtype.itemsize for size in (spec.head_size, spec.head_size_v or 0)]
        if not lengths[1] or sum(lengths) != content:
            lengths = [content]
        ends = itertools.accumulate(lengths)
        parts = tuple(Part(end - length, length) for end, length in zip(ends, lengths, strict=True))
    return Region(
        layer=layer,
        base=tensor.data_ptr(),
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        first_head=first_head,
        num_heads=tensor.shape[1],
        parts=parts,
    )
