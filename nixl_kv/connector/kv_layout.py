"""Turns vLLM's cache tensors into a `CacheLayout`: where this rank's KV lives.

Every attention backend gets a view [blocks, heads, tokens, content] of each layer, but some store
other bytes in it than the axes suggest. `backends.py` lists the known ones. Engines exchange whole
blocks of an unknown backend, and only if they are sharded alike.

A page of recurrent state contains the convolution state, if any, and then the temporal state. The
convolution state has a row of channels for each of the last tokens. vLLM shards each projection in
a row separately over the TP ranks, so each is a region of its own. Its "heads" are the units of
sharding, its block is one token, and it has one part for each row. In vLLM's DS layout, which keeps
the rows of a channel together, a part has one piece for each channel.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from nixl_kv.connector.backends import UNKNOWN, Cache, Form, Row, find
from nixl_kv.connector.vllm_config import (
    RINGS,
    draft_model_of,
    dtype_name,
    has_whole_blocks,
    holds_state,
    layer_spec,
    mappings,
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

# Backends whose kernels need a DCP interleave of one token.
ONE_BY_ONE: Final = {"FLASHINFER_MLA"}

# vLLM's type names: the stored type, and the one on platforms whose FP8 has no negative zero.
_E4M3: Final = ("float8_e4m3fn", "float8_e4m3fnuz")
FP8: Final = {
    "fp8": _E4M3,
    "fp8_e4m3": _E4M3,
    "fp8_e5m2": ("float8_e5m2", "float8_e5m2fnuz"),
    "fp8_per_token_head": tuple(f"{name} with scales" for name in _E4M3),
}

# An indexer has a scale of 4 bytes for each 128 of a key.
SCALED: Final = 128
SCALE: Final = 4

# Keys of model configurations that give the number of KV heads of some or all layers.
HEAD_COUNT: Final = re.compile(r"(key_value|kv)_heads$|^n_head_kv$|^num_attention_groups$")

# Channels per unit where vLLM may shard at any channel. Smaller if 64 ranks (RANKS) could not each
# have whole units.
CHANNELS: Final = 128
RANKS: Final = 64


def cache_layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> CacheLayout:
    """Describe where this rank's KV lives, from the shapes and strides of its tensors.

    `kv_caches` also has names of layers that share another layer's cache; no group names those.
    """
    groups = [
        (
            group.kv_cache_spec,
            [
                Layer(vllm_config, name, group.kv_cache_spec, kv_caches[name])
                for name in group.layer_names
                if name in kv_caches
            ],
        )
        for group in kv_cache_config.transfer_groups
    ]
    tensors = [layer.tensor for _, layers in groups for layer in layers]
    if not tensors:
        raise ConfigError("this rank has no layer with a KV cache; allowed: one or more")
    unknown = {
        layer.backend
        for spec, layers in groups
        for layer in layers
        if not holds_state(spec) and layer.row is UNKNOWN
    }
    for backend in sorted(unknown):
        logger.warning(
            "attention backend %s is not known: engines exchange whole blocks of its layers, "
            "between equal shards only",
            backend,
        )
    memory: Memory = "DRAM" if tensors[0].device.type == "cpu" else "VRAM"
    # Usually all layers are views of one storage.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return CacheLayout(
        groups=tuple(_group(vllm_config, spec, layers, kv_cache_config) for spec, layers in groups),
        memory=memory,
        device=tensors[0].device.index or 0,
        spans=tuple(itertools.starmap(Span, storages.items())),
    )


def choose_interleave(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Make DCP ranks divide tokens by whole blocks, if the operator and the kernels allow it.

    With vLLM's default, one token at a time, each token of each layer would be a run of its own.
    Changes `vllm_config`, which the model runner reads later. Call it in a worker only.
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
    vllm_config: VllmConfig,
    spec: Any,
    layers: Sequence["Layer"],
    kv_cache_config: KVCacheConfig,
) -> Group:
    num_entries = kv_cache_config.num_blocks
    is_whole = has_whole_blocks(kv_cache_config) and not holds_state(spec)
    sizes = {(layer.tensor.shape[0], layer.tensor.shape[2]) for layer in layers}
    if is_whole:  # any number of rows
        sizes = {(blocks, spec.block_size * num_entries // blocks) for blocks, _ in sizes}
    if len(sizes) > 1:
        raise ConfigError(f"layers of one cache group have (blocks, tokens) {sorted(sizes)}")
    if not sizes:  # no layer of this group is on this pipeline stage
        sizes = {(num_entries, 1 if holds_state(spec) else spec.block_size)}
    blocks, tokens = sizes.pop()
    own = stripe(vllm_config, spec)
    if own.count > 1:
        for layer in layers:
            layer.check_copies(own.count)
    return Group(
        block_size=tokens,
        num_blocks=blocks,
        blocks_per_entry=blocks // num_entries,
        regions=tuple(
            _whole_block(region, layer.tensor) if is_whole else region
            for layer in layers
            for region in layer.regions()
        ),
        window=window(spec),
        stripe=own,
        whole=is_whole,
    )


def _whole_block(region: Region, tensor: torch.Tensor) -> Region:
    """The region in a group of whole blocks: all rows of a head are one part."""
    item, rows = tensor.element_size(), tensor.shape[2]
    content, stride = tensor.shape[3] * item, tensor.stride(2) * item
    part = Part(0, content, rows, stride) if stride > content else Part(0, rows * content)
    return replace(region, parts=(part,), token_stride=region.block_stride)


class Place(NamedTuple):
    """A worker's TP rank and the TP size."""

    rank: int
    size: int


class Layer:
    """One layer's cache on this rank: which heads it holds, and what its bytes mean.

    vLLM splits a layer's heads into one shard per TP rank. If there are more ranks than heads,
    neighbouring ranks hold copies of one head.
    """

    def __init__(self, vllm_config: VllmConfig, name: str, spec: Any, tensor: torch.Tensor) -> None:
        """`spec` is that of the layer's cache group."""
        self.name = name
        self.spec: AttentionSpec = layer_spec(spec, name)  # or MambaSpec, see `regions`
        self.tensor = tensor
        self._vllm_config = vllm_config
        self._module = vllm_config.compilation_config.static_forward_context.get(name)
        self.backend = _backend_name(self._module)
        self._stored = getattr(self._module, "kv_cache_dtype", None)  # vLLM's name of the type
        tp: int = vllm_config.parallel_config.tensor_parallel_size
        self._place = Place(worker_rank(vllm_config) % tp, tp)

    def regions(self) -> Iterator[Region]:
        tensor = self.tensor
        if tensor.dim() != len(AXES) or tensor.stride(3) != 1:
            raise ConfigError(
                f"the KV cache of layer {self.name!r} has the shape {tuple(tensor.shape)} and the "
                f"strides {tensor.stride()}; allowed: [blocks, heads, tokens, content], and a "
                "stride of 1 for the content"
            )
        if isinstance(self.spec, MambaSpec):
            yield from state_regions(self.name, tensor, self.spec, self._module, self._place)
            return
        opaque_kind = self.opaque_kind()
        yield region_of(
            self.name,
            tensor,
            self.spec,
            form=self.form,
            first_head=self.first_head,
            opaque=bool(opaque_kind),
            element=f"{self.element()} {opaque_kind}".rstrip(),
            scales=self.scales(),
        )

    # --- heads

    @property
    def first_head(self) -> int:
        """The model-wide index of the first head in the layer's cache."""
        place = self._place
        return place.rank * self.num_shards() // place.size * self.tensor.shape[1]

    def num_shards(self) -> int:
        """How many distinct shards of the layer's heads the TP ranks hold."""
        tp = self._place.size
        if self.spec.max_tp_shards is not None:
            return int(min(tp, self.spec.max_tp_shards))
        if self._is_replicated:
            return 1
        if tp == 1 or self.spec.num_kv_heads > 1:
            return tp
        # One head per rank: either there are as many heads as ranks, or ranks hold copies.
        fitting = {count for count in self._head_counts() if tp % count == 0}
        if len(fitting) != 1:
            raise ConfigError(
                f"layer {self.name!r} has one KV head on each of {tp} ranks, and the model's "
                f"configuration names {sorted(fitting)} as possible numbers of KV heads; allowed: "
                "exactly one divisor of the number of ranks"
            )
        return fitting.pop()

    @property
    def _is_replicated(self) -> bool:
        """Whether each TP rank has the whole cache. Some specs leave `max_tp_shards` unset."""
        is_latent = isinstance(self.spec, MLAAttentionSpec | SlidingWindowMLASpec)
        # The "heads" of a ring may be K and a gate.
        return (is_latent and self.spec.num_kv_heads == 1) or type(self.spec).__name__ in RINGS

    def check_copies(self, num_stripes: int) -> None:
        """Refuse DCP ranks that would divide the tokens of different heads; vLLM admits them."""
        copies = self._place.size // self.num_shards()
        if copies % num_stripes:
            raise ConfigError(
                f"decode_context_parallel_size is {num_stripes}, and {copies} ranks have the same "
                f"KV heads of layer {self.name!r}; allowed: a divisor of {copies}"
            )

    def _head_counts(self) -> Iterator[int]:
        """All numbers of KV heads that the model's configuration gives for this or any layer."""
        draft = draft_model_of(self._vllm_config, self.name)
        model = self._vllm_config.model_config if draft is None else draft
        architecture = model.model_arch_config
        overrides = architecture.per_layer_overrides
        if overrides is not None:  # a draft layer's number is not an index into its overrides
            own = [extract_layer_index(self.name)]
            numbers = own if draft is None else range(len(overrides))
            yield from (architecture[number].total_num_kv_heads for number in numbers)
            return
        yield architecture.total_num_kv_heads
        for config in mappings(model.hf_text_config.to_dict()):
            for key, value in config.items():
                if HEAD_COUNT.search(str(key)) and isinstance(value, int) and value > 0:
                    yield value

    # --- bytes

    @functools.cached_property
    def row(self) -> Row:
        """The form of an attention layer's cache, as far as it is known."""
        spec, stored = self.spec, dtype_name(self.spec.dtype)
        if spec.kv_quant_mode:
            stored = self._stored or spec.kv_quant_mode.name
        sizes = (spec.num_head_slots, spec.state_content_bytes, spec.tokens_per_state)
        return find(Cache(self._kind, stored, *sizes))

    @property
    def form(self) -> Form:
        bound = getattr(self._module, "kv_cache", self.tensor)  # the kernels' view
        if self.row.form is Form.SCALES_LAST and bound.shape[-2] != self.tensor.shape[2]:
            return Form.WHOLE  # several kernel blocks in a block, each with its own scales
        return self.row.form

    @property
    def _kind(self) -> str:
        """The backend, and what else decides the layout of its blocks."""
        if self.backend == "CPU_ATTN":
            return f"{self.backend} {self._isa()}"
        return f"{self.backend} rocm" if current_platform.is_rocm() else self.backend

    def opaque_kind(self) -> str:
        """The kind of block, which two engines must share to exchange blocks whole.

        Empty if the bytes are known, so that engines may exchange any part of a block.
        """
        if self.form in (Form.PLAIN, Form.TRANSPOSED, Form.SCALES_LAST):
            return ""
        # The axes of a block, in decreasing order of stride. One head has no stride.
        shape, strides = self.tensor.shape, self.tensor.stride()
        axes = sorted(range(1, len(AXES)), key=lambda axis: -strides[axis])
        order = f" in the order {''.join(AXES[axis] for axis in axes)}" if shape[1] > 1 else ""
        own = stripe(self._vllm_config, self.spec)
        turns = f", {own.width} of every {own.period} tokens" if own.count > 1 else ""
        shards = f"{shape[2]} tokens and {self.num_shards()} shards"
        return f"in {self._kind} blocks of {shards}{order}{turns}"

    def element(self) -> str:
        """The stored type, such as 'bfloat16' or 'float8_e4m3fn'."""
        if not self.spec.kv_quant_mode:
            return dtype_name(self.spec.dtype)
        if self._stored is None:
            return f"{dtype_name(self.spec.dtype)} {self.spec.kv_quant_mode.name}"
        names = FP8.get(self._stored)
        return names[current_platform.is_fp8_fnuz()] if names else str(self._stored)

    def scales(self) -> tuple[str, ...]:
        # They are final here: vLLM has loaded the weights before it registers the cache.
        found = [getattr(self._module, name, None) for name in ("_k_scale", "_v_scale")]
        scales = [scale.flatten().tolist() for scale in found if scale is not None]
        if not self.spec.kv_quant_mode or len(scales) < len(found):
            return ()
        return tuple(f"k {key:.9g}, v {value:.9g}" for key, value in zip(*scales, strict=True))

    def _isa(self) -> str:
        """The instruction set that CPU_ATTN uses, which decides the layout of its blocks."""
        from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415 - CPU only
            _get_attn_isa,
        )

        dtype = self._vllm_config.model_config.dtype
        return str(_get_attn_isa(dtype, self.spec.block_size, self.spec.head_size))


def _backend_name(module: Any) -> str:
    backend = getattr(module, "attn_backend", None)
    if backend is None:
        backend = getattr(module, "get_attn_backend", lambda: None)()
    return str(backend.get_name()) if backend is not None else "an unknown backend"


def region_of(
    layer: str, tensor: torch.Tensor, spec: AttentionSpec, *, form: Form, **options: Any
) -> Region:
    """Address the bytes of an attention layer's view. `options` are further fields."""
    item, tokens = tensor.element_size(), tensor.shape[2]
    block_stride, head_stride, token_stride = (step * item for step in tensor.stride()[:3])
    if form is Form.TRANSPOSED:
        # A head's block is K as [head size, tokens], then V as [tokens, head size].
        size = tensor.shape[3] // 2
        key = Part(0, item, size, tokens * item, token_stride=item)
        value = Part(size * tokens * item, size * item, token_stride=size * item)
        parts: tuple[Part, ...] = (key, value)
        token_stride = item
    elif form is Form.SCALES_LAST:
        # A block is the keys of all tokens, then their scales.
        scale = tensor.shape[3] * item // (SCALED + SCALE) * SCALE
        token_stride = tensor.shape[3] * item - scale
        behind = Part(tokens * token_stride, scale, token_stride=scale)
        parts = (Part(0, token_stride), behind)
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
        num_heads=tensor.shape[1],
        parts=parts,
        **options,
    )


# --- recurrent states


class Units(NamedTuple):
    """The units of one projection or state that one rank holds."""

    name: str
    number: int
    size: int  # channels of a projection, bytes of a state
    is_copied: bool = False  # whether all ranks hold the same units


# The units, the bytes from one unit to the next, and the rows of the first unit.
_Cut = tuple[Units, int, tuple[Part, ...]]


def state_regions(
    layer: str, page: torch.Tensor, spec: MambaSpec, module: Any, place: Place
) -> Iterator[Region]:
    """The regions of one recurrent layer on a rank.

    `page` is an int8 view of shape [blocks, 1, 1, bytes of all states]. `module` is vLLM's layer,
    for facts that `spec` lacks.
    """
    kind, device = spec.mamba_type.name, page.device.type
    offset = 0
    for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        # Kernels of different devices store equal shapes differently.
        element = f"{dtype_name(dtype)} state of {kind} on {device}"
        cuts: Iterable[_Cut]
        if number == 0 and kind != "LINEAR":
            cuts = _convolution(spec, module, place, offset)
        else:  # sharded along the first axis, which is channels for Mamba 1
            run = _channels(shape[0], place) if kind == "MAMBA1" else 1
            size = run * math.prod(shape[1:]) * dtype.itemsize
            cuts = [(Units("state", shape[0] // run, size), size, (Part(offset, size),))]
        for units, stride, rows in cuts:
            yield Region(
                layer=f"{layer} {units.name}",
                base=page.data_ptr(),
                block_stride=page.stride(0),
                head_stride=stride,
                token_stride=page.stride(0),  # unused: a block is one token
                first_head=0 if units.is_copied else place.rank * units.number,
                num_heads=units.number,
                parts=rows,
                element=element,
            )
        offset += math.prod(shape) * dtype.itemsize


def _convolution(spec: MambaSpec, module: Any, place: Place, offset: int) -> Iterator[_Cut]:
    by_channel = is_conv_state_dim_first()
    channels, length = spec.shapes[0] if by_channel else reversed(spec.shapes[0])
    size = spec.dtypes[0].itemsize
    # Rows beyond the convolution's window are for tokens that speculation may reject. No peer needs
    # those.
    num_unused = 0 if spec.mamba_type.name == "MAMBA1" else int(spec.num_speculative_blocks)
    rows = range(length - num_unused)
    start = 0
    for units in _projections(spec, module, place, channels):
        if by_channel:
            begin, stride = offset + start * length * size, units.size * length * size
            parts = [Part(begin + row * size, size, units.size, length * size) for row in rows]
        else:
            stride = units.size * size
            parts = [Part(offset + (row * channels + start) * size, stride) for row in rows]
        yield units, stride, tuple(parts)
        start += units.number * units.size


def _projections(spec: MambaSpec, module: Any, place: Place, channels: int) -> list[Units]:
    """The projections of a convolution with `channels` on this rank, in order."""
    match spec.mamba_type.name:
        case "GDN_ATTN":
            heads, value_size, key_size = spec.shapes[1]
            keys = (channels - heads * value_size) // 2 // key_size
            return [
                Units("query", keys, key_size),
                Units("key", keys, key_size),
                Units("value", heads, value_size),
            ]
        case "MAMBA2":
            heads, head_size, state_size = spec.shapes[1]
            groups = (channels - heads * head_size) // 2 // state_size
            is_copied = _has_copies(module, groups, place)
            return [
                Units("x", heads, head_size),
                Units("B", groups, state_size, is_copied),
                Units("C", groups, state_size, is_copied),
            ]
        case _:
            is_copied = spec.tp_replicated
            run = _channels(channels, Place(0, 1) if is_copied else place)
            return [Units("convolution", channels // run, run, is_copied)]


def _has_copies(module: Any, groups: int, place: Place) -> bool:
    """Whether every rank holds the model's only group, instead of its own share of several."""
    if groups > 1 or place.size == 1:
        return False
    number = getattr(getattr(module, "norm", None), "n_groups", None)
    if number not in (1, place.size):
        raise ConfigError(
            f"a recurrent layer has one group of heads on each of {place.size} ranks, and its "
            f"model has {number} groups; allowed: 1 or {place.size}"
        )
    return bool(number == 1)


def _channels(on_rank: int, place: Place) -> int:
    """Channels per unit, by a rule that gives the same result on all engines of the model."""
    total = on_rank * place.size
    run = math.gcd(total // math.gcd(total, RANKS), CHANNELS)
    return run if on_rank % run == 0 else 1
