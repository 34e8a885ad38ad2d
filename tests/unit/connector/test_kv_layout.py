"""Where a rank's KV is, by its tensors; and how a backend's own kernel writes its blocks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.config.model_arch import ModelArchitectureConfig
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from nixl_kv.connector import kv_layout
from nixl_kv.connector.backends import Cache, Form, find
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.layout import Part, Region, Span, Stripe
from support.oracle import ALL_ORDERS, TRANSPOSED, Blocks, Layer, Store
from support.vllm_objects import LAYERS, kv_cache_config, kv_caches, vllm_config

if not current_platform.is_cpu():
    pytest.skip("the CPU build's kernel", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS, HEADS = 3, 2


def addresses(region: Region, blocks: Blocks) -> np.ndarray:
    """The address of each byte, of shape [block, head, token, byte], by the region's formula."""
    block, head, token = np.ogrid[: blocks.count, : region.num_heads, : blocks.tokens]
    parts = []
    for part in region.parts:
        starts = region.base + part.offset + block * region.block_stride
        starts = starts + head * region.head_stride
        starts = starts + token * (part.token_stride or region.token_stride)
        pieces = np.arange(part.count)[:, None] * part.stride + np.arange(part.length)
        parts.append(starts[..., None] + pieces.ravel())
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [32, 64, 96, 128], ids="blocks of {}".format)
@pytest.mark.parametrize("head_size", [64, 80], ids="head size {}".format)
def test_the_cpu_kernels_blocks_are_described_byte_by_byte(
    dtype: torch.dtype, tokens: int, head_size: int
) -> None:
    from vllm._custom_ops import cpu_attn_reshape_and_cache  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=HEADS, head_size=head_size, dtype=dtype
    )
    isa = _get_attn_isa(dtype, tokens, head_size)
    stored = str(dtype).removeprefix("torch.")
    if find(Cache(f"CPU_ATTN {isa}", stored)).form is not Form.TRANSPOSED:
        pytest.skip(f"{isa} is exchanged in whole blocks")
    cache = torch.zeros(BLOCKS, HEADS, tokens, 2 * head_size, dtype=dtype)
    key, value = torch.randn(2, BLOCKS * tokens, HEADS, head_size).to(dtype)
    halves = cache.view(BLOCKS, HEADS, 2 * tokens, head_size).chunk(2, dim=2)
    cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(BLOCKS * tokens), isa)
    region = kv_layout.region_of("layers.0", cache, spec, first_head=0, form=Form.TRANSPOSED)
    stored = cache.view(-1).view(torch.uint8).numpy()
    found = stored[addresses(region, Blocks(BLOCKS, tokens)) - cache.data_ptr()]
    written = torch.cat([key, value], dim=2).view(BLOCKS, tokens, HEADS, -1).view(torch.uint8)
    np.testing.assert_array_equal(found, written.numpy().swapaxes(1, 2))


@settings(max_examples=20)
@given(
    order=st.sampled_from([order for order in ALL_ORDERS if "2" not in order]),
    heads=st.integers(1, 4),
    content=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    blocks=st.builds(Blocks, st.integers(1, 4), st.integers(1, 4), gap=st.integers(0, 2)),
)
def test_the_region_of_any_view_addresses_the_oracles_bytes(
    order: str, heads: int, content: tuple[int, int], blocks: Blocks
) -> None:
    key, value = content
    if order in TRANSPOSED:  # K and V have one size, and K's elements a byte here
        key = value = 2 * key - 1
    layers = [Layer(name, heads, key, value, first_head=4) for name in "abc"]
    store = Store(order, layers, blocks)
    memory = torch.zeros(store.end, dtype=torch.uint8)
    letters, offsets = order.replace("L", ""), store.arrays["b"]
    if order in TRANSPOSED:
        letters = letters.replace("T", "NC")
        offsets = offsets.reshape(*offsets.shape[:2], blocks.tokens, key + value)
    offsets = offsets.transpose([letters.index(axis) for axis in kv_layout.AXES])
    strides = [step // offsets.itemsize for step in offsets.strides]
    view = memory.as_strided(offsets.shape, strides, int(offsets.flat[0]))
    spec = FullAttentionSpec(
        block_size=blocks.tokens,
        num_kv_heads=heads,
        head_size=key,
        head_size_v=value,
        dtype=torch.uint8,
    )
    form = Form.TRANSPOSED if order in TRANSPOSED else Form.PLAIN
    region = kv_layout.region_of("b", view, spec, first_head=4, form=form)
    expected = [part.reshape(*part.shape[:3], -1) for part in store.parts["b"]]
    found = addresses(region, blocks) - memory.data_ptr()
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=-1))
    assert region.heads == (4, 4 + heads)


# --- a rank's layout


def test_the_layout_of_a_registered_cache() -> None:
    """All layers are views of one storage, which is registered once.

    vLLM names a layer that shares another one's cache, but it is in no group.
    """
    caches = kv_caches()
    first, second = caches.values()
    layout = kv_layout.cache_layout(vllm_config(), kv_cache_config(), caches | {"shares": first})
    assert layout.spans == (Span(first.data_ptr(), first.untyped_storage().nbytes()),)
    assert (layout.memory, layout.device) == ("DRAM", 0)
    (group,) = layout.groups
    assert (group.block_size, group.num_blocks, group.blocks_per_entry) == (32, 16, 1)
    assert [region.layer for region in group.regions] == list(caches)
    assert [region.base for region in group.regions] == [first.data_ptr(), second.data_ptr()]
    assert {(region.first_head, region.num_heads) for region in group.regions} == {(0, 2)}
    assert all(region.element.startswith("float32") for region in group.regions)
    assert all(region.scales == () for region in group.regions)


def with_shape(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: change(tensor) for name, tensor in kv_caches().items()}


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({}, "no layer with a KV cache"),
        (with_shape(lambda t: t[..., None]), r"has the shape .*allowed: \[blocks, heads, tokens"),
        (with_shape(lambda t: t[..., ::2]), "and the strides .*a stride of 1 for the content"),
        (
            kv_caches() | {LAYERS[0]: torch.zeros(8, 2, 32, 128)},
            "layers of one cache group have",
        ),
    ],
    ids=["no cache", "another shape", "content with strides", "blocks of two sizes"],
)
def test_a_cache_of_another_form_is_refused(caches: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kv_layout.cache_layout(vllm_config(), kv_cache_config(), caches)


def with_new_backend(config: VllmConfig) -> VllmConfig:
    for layer in config.compilation_config.static_forward_context.values():
        layer.attn_backend = SimpleNamespace(get_name=lambda: "NEW_ATTN")
    return config


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """The second of two ranks that have the same heads, and divide the tokens by eight."""
    for name in ("get_tp_group", "get_dcp_group"):
        group = SimpleNamespace(rank_in_group=1)
        monkeypatch.setattr(f"nixl_kv.connector.vllm_config.{name}", lambda group=group: group)
    config = vllm_config()
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.decode_context_parallel_size = 2
    config.parallel_config.cp_kv_cache_interleave_size = 8
    return config


def test_ranks_with_the_same_heads_may_divide_the_tokens(divided: VllmConfig) -> None:
    """And whole blocks of divided tokens fit only their likes."""
    caches, cache = with_shape(lambda t: t[:, :1]), kv_cache_config(num_kv_heads=1, max_tp_shards=1)
    (group,) = kv_layout.cache_layout(divided, cache, caches).groups
    assert (group.stripe, group.block_size, group.entry_size) == (Stripe(2, 1, 8), 32, 64)
    assert {region.heads for region in group.regions} == {(0, 1)}
    (group,) = kv_layout.cache_layout(with_new_backend(divided), cache, caches).groups
    words = "float32 in NEW_ATTN blocks of 32 tokens and 1 shards, 8 of every 16 tokens"
    assert {region.element for region in group.regions} == {words}
    words = "decode_context_parallel_size is 2, and 1 ranks have the same KV heads of layer"
    with pytest.raises(ConfigError, match=words):
        kv_layout.cache_layout(divided, kv_cache_config(), kv_caches())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda t: t, "32 tokens and 1 shards in the order HNC", id="heads first"),
        pytest.param(
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            "32 tokens and 1 shards in the order NHC",
            id="tokens first",
        ),
        pytest.param(lambda t: t[:, :1], "32 tokens and 1 shards", id="one head"),
        pytest.param(
            lambda t: t.reshape(2 * len(t), t.shape[1], -1, t.shape[3]),
            "16 tokens and 1 shards in the order HNC",
            id="kernel blocks",
        ),
    ],
)
def test_a_backend_that_is_not_known_is_read_in_whole_blocks_by_its_likes(
    change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    config = with_new_backend(vllm_config())
    (group,) = kv_cache_config().transfer_groups
    name, tensor = next(iter(kv_caches().items()))
    (region,) = kv_layout.Layer(config, name, group.kv_cache_spec, change(tensor)).regions()
    assert (region.opaque, region.element) == (True, f"float32 in NEW_ATTN blocks of {words}")
    module = config.compilation_config.static_forward_context[name]
    del module.attn_backend  # a cache without attention
    module.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: "INDEXER")
    assert kv_layout.Layer(config, name, group.kv_cache_spec, tensor).backend == "INDEXER"


def test_the_log_names_a_backend_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    kv_layout.cache_layout(vllm_config(), kv_cache_config(), kv_caches())
    assert not caplog.messages
    kv_layout.cache_layout(with_new_backend(vllm_config()), kv_cache_config(), kv_caches())
    (line,) = caplog.messages  # for two layers
    assert line.startswith("attention backend NEW_ATTN is not known: engines exchange whole blocks")


# --- whole blocks


@pytest.fixture
def compressed() -> tuple[VllmConfig, KVCacheConfig, dict[str, torch.Tensor]]:
    """Layers a and b keep a state for 4 or 128 tokens, c rows of a window; their pages are padded.

    All share one pool of blocks.
    """
    latent = {"num_kv_heads": 1, "head_size": 584, "dtype": torch.uint8, "max_tp_shards": 1}
    full = {
        name: MLAAttentionSpec(**latent, block_size=256, tokens_per_state=tokens)
        for name, tokens in (("a", 4), ("b", 128))
    }
    short = SlidingWindowMLASpec(
        **{**latent, "head_size": 512, "dtype": torch.float32}, block_size=4, sliding_window=8
    )
    groups = [
        KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs=full)),
        KVCacheGroupSpec(["c"], short),
    ]
    page, pool = 40000, torch.zeros(3 * 40000, dtype=torch.uint8)
    caches = {
        "a": pool.as_strided((3, 1, 64, 584), (page, 64 * 584, 584, 1)),
        "b": pool.as_strided((3, 1, 2, 584), (page, 2 * 584, 584, 1), 37440),
        "c": pool.view(torch.float32).as_strided((3, 1, 4, 512), (page // 4, 2048, 512, 1)),
    }
    config = vllm_config()
    for name in caches:
        kernels = "CompressorBackend" if name == "c" else "FLASHMLA_SPARSE_DSV4"
        backend = SimpleNamespace(get_name=lambda kernels=kernels: kernels)
        layer = SimpleNamespace(attn_backend=backend)
        config.compilation_config.static_forward_context[name] = layer
    return config, KVCacheConfig(3, [], groups), caches


def test_groups_of_states_for_several_tokens_are_of_whole_blocks(
    compressed: tuple[VllmConfig, KVCacheConfig, dict[str, torch.Tensor]],
) -> None:
    """A block is one part, without its padding, however many tokens a state is for."""
    layout = kv_layout.cache_layout(*compressed)
    groups = [(group.block_size, group.window, group.whole) for group in layout.groups]
    assert groups == [(256, 0, True), (4, 8, True)]
    base = layout.spans[0].address
    assert [
        (region.layer, region.base - base, region.block_stride, region.parts, region.opaque)
        for group in layout.groups
        for region in group.regions
    ] == [
        ("a", 0, 40000, (Part(0, 37376),), True),
        ("b", 37440, 40000, (Part(0, 1168),), True),
        ("c", 0, 40000, (Part(0, 8192),), False),
    ]


def test_whole_blocks_may_be_in_rows_and_divided_for_kernels(
    compressed: tuple[VllmConfig, KVCacheConfig, dict[str, torch.Tensor]],
) -> None:
    """The rows of a head lie apart where another head's are between them."""
    config, cache, _ = compressed
    cache.kv_cache_groups[0].layer_names.remove("b")
    tensor = torch.zeros(6, 16, 2, 8, dtype=torch.uint8).transpose(1, 2)
    group = kv_layout.cache_layout(config, cache, {"a": tensor}).groups[0]
    assert (group.block_size, group.blocks_per_entry, group.num_entries) == (128, 2, 3)
    (region,) = group.regions
    assert (region.num_heads, region.head_stride) == (2, 8)
    assert region.parts == (Part(0, 8, 16, 16),)


# --- what the bytes mean


def described(
    cache_dtype: str, key: list[float] | None = None, value: list[float] | None = None
) -> Region:
    """The first layer of a quantised cache with these scales."""
    config, mode = vllm_config(), get_kv_quant_mode(cache_dtype)
    cache = kv_cache_config(dtype=torch.uint8, kv_quant_mode=mode)
    for name, layer in config.compilation_config.static_forward_context.items():
        module = torch.nn.Module()
        set_default_quant_scales(module, register_buffer=True)
        module.attn_backend, module.kv_cache_dtype = layer.attn_backend, cache_dtype
        for scale, numbers in (("_k_scale", key), ("_v_scale", value)):
            if numbers is not None:
                module.register_buffer(scale, torch.tensor(numbers))
        config.compilation_config.static_forward_context[name] = module
    return kv_layout.cache_layout(config, cache, kv_caches()).groups[0].regions[0]


@pytest.mark.parametrize(
    ("cache_dtype", "is_fnuz", "element"),
    [
        ("fp8_e4m3", False, "float8_e4m3fn"),
        ("fp8_e5m2", False, "float8_e5m2"),
        ("fp8", True, "float8_e4m3fnuz"),
        ("fp8_e5m2", True, "float8_e5m2fnuz"),
        ("fp8_ds_mla", False, "fp8_ds_mla"),
        ("int8_per_token_head", False, "int8_per_token_head"),
        ("fp8_per_token_head", True, "float8_e4m3fnuz with scales"),
        ("nvfp4_4over6", False, "nvfp4_4over6"),
    ],
)
def test_the_stored_type_is_the_one_that_vllms_name_stands_for(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: str, element: str, *, is_fnuz: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: is_fnuz))
    assert described(cache_dtype).element.split(" in ")[0] == element


def test_a_quantised_layer_of_an_unknown_kind_is_named_by_its_spec() -> None:
    config = vllm_config()
    spec = spec_of(2, torch.uint8, kv_quant_mode=get_kv_quant_mode("fp8"))
    tensor = torch.zeros(3, 2, 32, 128, dtype=torch.uint8)
    (region,) = kv_layout.Layer(config, "indexer", spec, tensor).regions()
    assert region.element.startswith("uint8 FP8_PER_TENSOR in an unknown")
    assert region.scales == ()


@pytest.mark.parametrize(
    ("key", "value", "scales"),
    [
        pytest.param(None, None, ("k 1, v 1",), id="none in the checkpoint"),
        pytest.param(0.5, 0.1, ("k 0.5, v 0.100000001",), id="one for all heads"),
        pytest.param([0.5, 0.25], [2.0, 3.0], ("k 0.5, v 2", "k 0.25, v 3"), id="one for each"),
    ],
)
def test_scales_are_told_as_they_are(key: Any, value: Any, scales: tuple[str, ...]) -> None:
    """Not as many as heads, or one, stop the start."""
    assert described("fp8", key, value).scales == scales
    with pytest.raises(ValueError, match="number of scales is 3; allowed: 0, 1 or 2"):
        described("fp8", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])


# --- heads


def spec_of(heads: int, dtype: torch.dtype = torch.float16, **changed: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=32, num_kv_heads=heads, head_size=64, dtype=dtype, **changed
    )


@pytest.mark.parametrize(
    ("tp", "rank", "heads_here", "heads", "first"),
    [
        pytest.param(1, 0, 4, 4, 0, id="all"),
        pytest.param(8, 5, 1, 4, 2, id="two ranks hold the same one"),
        pytest.param(8, 7, 1, 1, 0, id="all ranks hold the same one"),
    ],
)
def test_neighbouring_ranks_hold_the_same_head_where_there_are_few(
    monkeypatch: pytest.MonkeyPatch, tp: int, rank: int, heads_here: int, heads: int, first: int
) -> None:
    config = vllm_config()
    config.parallel_config.tensor_parallel_size = tp
    config.model_config.model_arch_config.total_num_kv_heads = heads
    values: dict[str, Any] = {"num_key_value_heads": heads}
    config.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: values)
    monkeypatch.setattr("nixl_kv.connector.kv_layout.worker_rank", lambda _: rank)
    cache = torch.empty(3, heads_here, 32, 128)
    layer = kv_layout.Layer(config, "layers.0", spec_of(heads_here), cache)
    assert layer.first_head == first
    if heads_here == 1:  # one of as many heads, or a copy: their number must be certain
        values["text_config"] = {"n_head_kv": 8}
        words = rf"names \[{heads}, 8\] as possible numbers of KV heads"
        with pytest.raises(ConfigError, match=words):
            layer.num_shards()


@pytest.mark.parametrize(
    ("layer", "rank", "first"),
    [
        pytest.param("model.layers.1.self_attn.attn", 5, 5, id="the model's: 8 heads"),
        pytest.param("model.layers.2.self_attn.attn", 5, 1, id="the draft's: 2 heads"),
        pytest.param("mtp.layers.0.self_attn.attn", 3, 0, id="the draft's, by name"),
    ],
)
@pytest.mark.parametrize("has_overrides", [False, True])
def test_how_many_heads_a_draft_has_its_own_configuration_says(
    monkeypatch: pytest.MonkeyPatch, layer: str, rank: int, first: int, *, has_overrides: bool
) -> None:
    """Its layers are numbered behind the model's, not as in its own configuration."""

    def model_of(heads: int, layers: int) -> Any:
        architecture = ModelArchitectureConfig.__new__(ModelArchitectureConfig)
        architecture.total_num_hidden_layers = layers
        architecture.total_num_kv_heads = heads
        architecture.per_layer_overrides = [{"head_size": 1}] * layers if has_overrides else None
        text = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads})
        return SimpleNamespace(model_arch_config=architecture, hf_text_config=text)

    config: Any = vllm_config()
    config.parallel_config.tensor_parallel_size = 8
    config.model_config = model_of(8, 2)
    config.speculative_config = SimpleNamespace(
        draft_model_config=model_of(2, 1),
        use_gemma4_mtp=lambda: False,
        uses_draft_kv_cache=lambda: True,
    )
    monkeypatch.setattr("nixl_kv.connector.kv_layout.worker_rank", lambda _: rank)
    assert (
        kv_layout.Layer(config, layer, spec_of(1), torch.empty(3, 1, 32, 128)).first_head == first
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("spec", "heads", "changed"),
    [
        pytest.param("FullAttentionSpec", 4, {}, id="heads of MiniMax-M3"),
        pytest.param("MLAAttentionSpec", 0, {"block_size": 128}, id="indexer of MiniMax-M3"),
        pytest.param(
            "MLAAttentionSpec",
            0,
            {"tokens_per_state": 2, "state_content_bytes": 528, "alignment": 528},
            id="records of DeepSeek-V4.1",
        ),
        pytest.param(
            "SlidingWindowMLASpec", 0, {"sliding_window": 128}, id="window of DeepSeek-V4.1"
        ),
        pytest.param(
            "CircularBufferSpec", 0, {"head_size_v": 0, "block_size": 8}, id="ring of DeepSeek-V4.1"
        ),
        pytest.param("MLAAttentionSpec", 0, {"tokens_per_state": 4}, id="keys of Qwen4-exp"),
        pytest.param("CircularBufferSpec", 0, {"head_size_v": 0}, id="ring of Qwen4-exp"),
        pytest.param(
            "CircularBufferSpec",
            0,
            {"num_kv_heads": 2, "head_size_v": 0, "dcp_sharded": False},
            id="ring of GLM 5 Next: keys and gates",
        ),
        pytest.param(
            "KpoolTailSpec",
            0,
            {"num_kv_heads": 2, "head_size_v": 0, "sliding_window": 8, "dcp_sharded": False},
            id="ring of GLM 5 Next, vLLM 0.31",
        ),
    ],
)
def test_all_ranks_hold_the_whole_of_a_latent_and_of_a_ring(
    monkeypatch: pytest.MonkeyPatch, spec: str, heads: int, tp: int, changed: dict[str, Any]
) -> None:
    """Their specs leave `max_tp_shards` unset. `heads` is 0 where all ranks hold all."""
    kind = getattr(kv_cache_interface, spec, None)
    if kind is None:
        pytest.skip(f"this vLLM has no {spec}")
    values = {"block_size": 64, "num_kv_heads": max(1, heads // tp), "head_size": 128}
    made = kind(**{**values, "dtype": torch.uint8, **changed})
    assert made.max_tp_shards is None
    config = vllm_config()
    config.parallel_config.tensor_parallel_size = tp
    config.model_config.model_arch_config.total_num_kv_heads = 4
    config.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: {"num_kv_heads": 4})
    monkeypatch.setattr("nixl_kv.connector.kv_layout.worker_rank", lambda _: tp - 1)
    cache = torch.empty(3, made.num_heads, made.num_states, made.state_content_size_bytes)
    layer = kv_layout.Layer(config, "layers.0", made, cache)
    assert layer.num_shards() == (min(tp, heads) or 1)
    assert layer.first_head == (heads - made.num_heads if heads else 0)
    for count in (each for each in (2, 4, 8, 16) if tp % each == 0):
        if heads and tp // min(tp, heads) % count:
            with pytest.raises(ConfigError, match=f"decode_context_parallel_size is {count}"):
                layer.check_copies(count)
        else:
            layer.check_copies(count)


# --- quantised caches


def quantised(
    backend: str,
    cache_dtype: str,
    *,
    spec: Any = FullAttentionSpec,
    block_size: int = 64,
    **changed: Any,
) -> Region:
    """One layer as vLLM would register it."""
    config = vllm_config()
    module = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend), kv_cache_dtype=cache_dtype
    )
    config.compilation_config.static_forward_context = {"a": module}
    values = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8, **changed}
    mode = get_kv_quant_mode(cache_dtype)
    spec = spec(block_size=block_size, kv_quant_mode=mode, **values)
    if backend == "TRITON_ATTN":
        spec = TritonAttentionBackend.customize_spec(spec)
    content = spec.state_content_size_bytes
    tensor = torch.zeros(3, spec.num_heads, block_size, content, dtype=torch.uint8)
    tensor = tensor.view(spec.dtype)
    (region,) = kv_layout.Layer(config, "a", spec, tensor).regions()
    return region


LATENT = {"spec": MLAAttentionSpec, "num_kv_heads": 1, "head_size": 576, "max_tp_shards": 1}
KEY = {**LATENT, "head_size": 128, "dtype": torch.bfloat16, "max_tp_shards": None}
"""The spec of an indexer that does not quantise its keys."""


@pytest.mark.parametrize(
    ("backend", "cache_dtype", "changed", "element", "content"),
    [
        ("FLASHINFER_MLA", "fp8", LATENT, "float8_e4m3fn", 576),
        ("FLASHMLA_SPARSE", "fp8_ds_mla", LATENT | {"state_content_bytes": 656}, "", 656),
        ("FLASHMLA_SPARSE", "nvfp4_ds_mla", LATENT | {"state_content_bytes": 352}, "", 352),
        ("MINIMAX_M3_SPARSE_INDEXER", "auto", KEY, "bfloat16", 2 * 128),
        ("FLASH_ATTN", "fp8", {}, "float8_e4m3fn", 2 * 64),
        # K, its scale, V, its scale: so heads may be cut in any way.
        ("TRITON_ATTN", "int8_per_token_head", {}, "", 2 * (64 + 4)),
        ("TRITON_ATTN", "fp8_per_token_head", {}, "float8_e4m3fn with scales", 2 * (64 + 4)),
        ("TRITON_ATTN", "int4_per_token_head", {}, "", 2 * (32 + 4)),
    ],
)
def test_quantised_tokens_are_read_by_any_engine_with_their_kind(
    backend: str, cache_dtype: str, changed: dict[str, Any], element: str, content: int
) -> None:
    sizes = [quantised(backend, cache_dtype, block_size=size, **changed) for size in (64, 128)]
    assert not any(region.opaque for region in sizes)
    assert {region.element for region in sizes} == {element or cache_dtype}
    assert {sum(part.length for part in region.parts) for region in sizes} == {content}


@pytest.mark.parametrize(
    ("backend", "cache_dtype", "changed"),
    [
        pytest.param(
            "FLASHMLA", "fp8_ds_mla", LATENT | {"state_content_bytes": 656}, id="another's"
        ),
        pytest.param("ROCM_AITER_MLA", "fp8", LATENT, id="an unknown backend"),
        pytest.param("FLASHINFER", "nvfp4", {"state_content_bytes": 36}, id="NVFP4"),
        pytest.param("FLASH_ATTN", "fp8", {"num_head_slots": 4}, id="packed heads"),
    ],
)
def test_other_quantised_caches_are_exchanged_in_whole_blocks(
    backend: str, cache_dtype: str, changed: dict[str, Any]
) -> None:
    region = quantised(backend, cache_dtype, **changed)
    assert region.opaque
    assert f" in {backend} blocks of 64 tokens and 1 shards" in region.element


def indexer(tokens: int, kernel_tokens: int) -> tuple[Region, torch.Tensor]:
    """The cache of one indexer, whose keys have 128 bytes and a scale of 4 each."""
    config = vllm_config()
    stored = torch.zeros(BLOCKS, tokens * 132, dtype=torch.uint8)
    name = SimpleNamespace(get_name=lambda: "DEEPSEEK_V32_INDEXER")
    bound = stored.view(-1, kernel_tokens, 132)
    module = SimpleNamespace(attn_backend=name, kv_cache=bound)
    config.compilation_config.static_forward_context = {"a": module}
    spec = MLAAttentionSpec(
        block_size=tokens, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=torch.uint8
    )
    view = stored.view(BLOCKS, 1, tokens, 132)
    (region,) = kv_layout.Layer(config, "a", spec, view).regions()
    return region, stored


def test_the_scales_of_an_indexer_lie_behind_the_keys_of_a_block() -> None:
    """vLLM's CUDA kernel `indexer_k_quant_and_cache` writes them like this."""
    region, stored = indexer(tokens=64, kernel_tokens=64)
    assert not region.opaque
    token = np.arange(BLOCKS * 64, dtype=np.uint8).reshape(BLOCKS, 64, 1)
    blocks = stored.numpy()
    blocks[:, : 64 * 128].reshape(BLOCKS, 64, 128)[:] = token
    blocks[:, 64 * 128 :].reshape(BLOCKS, 64, 4)[:] = token
    found = stored.view(-1).numpy()[addresses(region, Blocks(BLOCKS, 64)) - stored.data_ptr()]
    np.testing.assert_array_equal(found[:, 0], np.broadcast_to(token, (BLOCKS, 64, 132)))


def test_several_kernel_blocks_in_a_block_of_an_indexer_are_read_whole() -> None:
    region, _ = indexer(tokens=128, kernel_tokens=64)
    assert region.opaque
    assert region.element == "uint8 in DEEPSEEK_V32_INDEXER blocks of 128 tokens and 1 shards"
