"""Values of vLLM's configuration and requests, and which engines are refused."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from vllm.config import KVTransferConfig, MultiModalConfig, SpeculativeConfig, VllmConfig
from vllm.platforms import PlatformEnum, current_platform
from vllm.renderers.base import BaseRenderer
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import RequestStatus

from nixl_kv.connector import vllm_config as module
from nixl_kv.connector.kv_layout import choose_interleave
from nixl_kv.connector.paging import Paging, StatePaging, WholePaging
from nixl_kv.connector.plugin import Where, run_checks
from nixl_kv.connector.vllm_config import (
    DRAFT_FACT,
    STATE_KINDS,
    check_supported,
    computed_on_decode,
    counts_media,
    draft_facts,
    draft_model_of,
    has_sleep_hooks,
    model_facts,
    pagings,
    parallel_shape,
    prompt_of,
    required_layout,
    shorten,
    stripe,
    why_not_offered,
    why_not_shortened,
    window,
    worker_rank,
)
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.layout import Stripe
from nixl_kv.geometry.match import ParallelShape
from support.vllm_objects import new_request, override, vllm_config

ATTENTION: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.float16,
}


def sliding(tokens: int = 64) -> SlidingWindowSpec:
    return SlidingWindowSpec(**ATTENTION, sliding_window=tokens)


def mamba(kind: str = "MAMBA2", num_states: int = 2) -> MambaSpec:
    return MambaSpec(
        block_size=32,
        shapes=((2, 2),) * num_states,
        dtypes=(torch.float32,) * num_states,
        mamba_type=MambaAttentionBackendEnum[kind],
    )


def cache_of(*specs: Any, **changed: Any) -> KVCacheConfig:
    """A group for each spec."""
    groups = [KVCacheGroupSpec([f"layers.{n}"], spec) for n, spec in enumerate(specs)]
    for name, value in changed.items():
        setattr(groups[-1], name, value)
    return KVCacheConfig(16, [], groups)


# --- what cannot be served


def changing(path: str, value: Any) -> Callable[[VllmConfig], None]:
    *owners, name = path.split(".")

    def change(config: Any) -> None:
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return change


def media(
    *, gb: float = 0, is_prefix_cached: bool = False, **options: Any
) -> Callable[[VllmConfig], None]:
    """Makes the model one that takes images."""

    def change(config: Any) -> None:
        config.model_config.multimodal_config = MultiModalConfig(
            mm_processor_cache_gb=gb, **options
        )
        override(config, supports_multimodal_inputs=True)
        config.cache_config.enable_prefix_caching = is_prefix_cached

    return change


FULL = FullAttentionSpec(**ATTENTION)
STATES = FullAttentionSpec(**ATTENTION)
object.__setattr__(STATES, "tokens_per_state", 4)


class NewSpec(FullAttentionSpec):
    """A later vLLM's."""


class CircularBufferSpec(AttentionSpec):
    """VLLM 0.31 has none."""


PCP = changing("parallel_config.prefill_context_parallel_size", 2)
BUFFER = changing("kv_transfer_config.kv_buffer_device", "tpu")
EXPERTS = changing("aux_output_config", SimpleNamespace(enable_return_routed_experts=True))
OTHER_STATES = cache_of(FULL, mamba("GDN_ATTN", 4))

REFUSED: dict[str, tuple[Callable[[VllmConfig], None] | None, KVCacheConfig]] = {
    "prefill context parallelism": (PCP, cache_of(FULL)),
    "a KV buffer on another device": (BUFFER, cache_of(FULL)),
    "the experts of each token": (EXPERTS, cache_of(FULL)),
    "images, audio and video without content hashes": (media(), cache_of(FULL)),
    "recurrent state of kinds other than GDN_ATTN, LINEAR, MAMBA1": (None, OTHER_STATES),
    "than ChunkedLocalAttentionSpec, Full.*: NewSpec$": (None, cache_of(NewSpec(**ATTENTION))),
    r"caches of kinds .*: CircularBufferSpec \(a ring with the last tokens of each request\)$": (
        None,
        cache_of(FULL, CircularBufferSpec(**ATTENTION)),
    ),
}
if not has_sleep_hooks():
    REFUSED["sleep mode"] = changing("model_config.enable_sleep_mode", value=True), cache_of(FULL)


@pytest.mark.parametrize("words", REFUSED)
def test_an_engine_that_cannot_be_served_is_refused_with_the_reason(words: str) -> None:
    config, (change, cache) = vllm_config(), REFUSED[words]
    check_supported(config, cache_of(FULL))
    if change is not None:
        change(config)
    with pytest.raises(ConfigError, match=f"^NixlKVConnector does not support .*{words}"):
        check_supported(config, cache)


def nested(config: VllmConfig, depth: int) -> None:
    """Put the engine's connector into as many MultiConnectors."""
    own = config.kv_transfer_config
    assert own is not None
    names = ("kv_connector", "kv_role", "kv_buffer_device", "kv_connector_extra_config")
    transfer = {name: getattr(own, name) for name in names}
    for _ in range(depth):
        connectors = {"connectors": [transfer]}
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connectors,
        }
    config.kv_transfer_config = KVTransferConfig(**transfer)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("words", [words for words, (change, _) in REFUSED.items() if change])
def test_settings_are_refused_before_the_weights_load(words: str, depth: int) -> None:
    """Also in nested MultiConnectors: the child's role and buffer device count, not the outer."""
    config, (change, _) = vllm_config({"port": 0}), REFUSED[words]
    assert change is not None
    run_checks(config, Where.CONFIG)
    change(config)
    nested(config, depth)
    with pytest.raises(ConfigError, match=f"^NixlKVConnector does not support .*{words}"):
        run_checks(config, Where.CONFIG)


@pytest.mark.parametrize(
    ("platform", "is_served"),
    [("CUDA", True), ("ROCM", True), ("CPU", True), ("XPU", False), ("OOT", False)],
)
def test_other_platforms_are_refused(
    platform: str, *, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_platform, "_enum", PlatformEnum[platform])
    refused = pytest.raises(ConfigError, match="run the engine on NVIDIA or AMD GPUs")
    with contextlib.nullcontext() if is_served else refused:
        check_supported(vllm_config(), cache_of(FULL))


@pytest.mark.parametrize("gb", [0, 4])
@pytest.mark.parametrize("is_prefix_cached", [False, True])
def test_vllm_numbers_media_where_it_is_said_here(*, gb: float, is_prefix_cached: bool) -> None:
    """vLLM's own renderer names an image that comes without a name."""
    config: Any = vllm_config()
    media(gb=gb, is_prefix_cached=is_prefix_cached)(config)
    renderer: Any = SimpleNamespace(
        model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None
    )
    items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    names = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-7")
    assert bool(names) is counts_media(config)
    assert names in ({}, {"image": ["renderer0-mm-7-image-0"]})
    override(config, supports_multimodal_inputs=False)
    assert not counts_media(config), "text alone"


def test_prefill_alone_may_be_divided_by_prefill_context_parallelism() -> None:
    """All that is refused is named at once."""
    config = vllm_config(kv_role="kv_producer")
    PCP(config)
    check_supported(config, cache_of(FULL))
    config.parallel_config.decode_context_parallel_size = 2
    BUFFER(config)
    words = "together with decode context parallelism.*; nor a KV buffer"
    with pytest.raises(ConfigError, match=words):
        check_supported(config, cache_of(FULL))


@pytest.mark.parametrize(("kind", "num_states"), STATE_KINDS.items())
def test_recurrent_state_of_the_known_kinds_is_served(kind: str, num_states: int) -> None:
    """A group that is not transferred may be of any kind."""
    cache = cache_of(FULL, mamba(kind, num_states), STATES, enable_kv_transfer=False)
    check_supported(vllm_config(), cache)
    assert pagings(vllm_config(), cache) == (Paging(0, 32, 0), StatePaging(1, 32))


# --- the engine


def test_the_models_facts_are_those_of_its_configuration() -> None:
    config = vllm_config()
    config.model_config.served_model_name = ["tiny", "second"]
    facts = model_facts(config)
    assert {name: facts[name] for name in facts if name != "config digest"} == {
        "model_type": "qwen3",
        "vocab_size": "4099",
        "hidden_size": "128",
        "num_hidden_layers": "2",
        "num_attention_heads": "4",
        "num_key_value_heads": "2",
        "head_dim": "64",
        "served_model_name": "tiny",
        "architecture": "Qwen3ForCausalLM",
        "dtype": "float32",
        "TCP segments": "2m",
    }
    assert len(facts["config digest"]) == 16


@pytest.mark.parametrize(
    ("whose", "changed", "is_same"),
    [
        pytest.param("hf_text_config", {"rope_parameters": {"rope_theta": 5.0}}, False, id="rope"),
        pytest.param("hf_text_config", {"_name_or_path": "/models/copy"}, True, id="folder"),
        pytest.param("hf_text_config", {"transformers_version": "9"}, True, id="version"),
        pytest.param("hf_config", {"vision_config": {"depth": 4}}, False, id="encoder"),
        pytest.param("hf_config", {"vision_config": {"dtype": "float16"}}, True, id="its dtype"),
        pytest.param(
            "hf_config", {"text_config": {"_name_or_path": "/copy"}}, True, id="folder within"
        ),
    ],
)
def test_the_rest_of_the_configuration_is_compared_by_a_digest(
    whose: str, changed: dict[str, Any], *, is_same: bool
) -> None:
    config, other = vllm_config(), vllm_config()
    values = getattr(config.model_config, whose).to_dict()
    if whose == "hf_config":
        values |= {"vision_config": {}, "text_config": {}}
    for each, whole in ((config, values), (other, values | changed)):
        setattr(each.model_config, whose, SimpleNamespace(to_dict=lambda whole=whole: whole))
    assert (model_facts(config) == model_facts(other)) is is_same


def new_facts(change: Callable[[Any], None]) -> dict[str, str]:
    """Those that a change of the configuration adds."""
    config = vllm_config()
    before = model_facts(config)
    change(config)
    return {name: text for name, text in model_facts(config).items() if name not in before}


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("text", "max_model_len", "expected"),
    [
        pytest.param({}, 10**6, {}, id="plain"),
        pytest.param({"rope_parameters": LONGROPE}, 4096, {"4096": "False"}, id="longrope, short"),
        pytest.param({"rope_parameters": LONGROPE}, 4097, {"4096": "True"}, id="longrope, long"),
        pytest.param(
            {"rope_parameters": {"full_attention": LONGROPE}},
            5000,
            {"4096": "True"},
            id="of a type",
        ),
        pytest.param(
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 8192},
            5000,
            {"8192": "False"},
            id="as older configurations write it",
        ),
        pytest.param({"model_type": "llama4_text"}, 32769, {"32768": "True"}, id="Llama 4"),
    ],
)
def test_a_length_counts_where_vllm_computes_in_another_way_beyond_it(
    text: dict[str, Any], max_model_len: int, expected: dict[str, str]
) -> None:
    def change(config: Any) -> None:
        values = config.model_config.hf_text_config.to_dict() | text
        config.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: values)
        config.model_config.max_model_len = max_model_len

    assert new_facts(change) == {f"max_model_len above {n}": is_so for n, is_so in expected.items()}


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        pytest.param({"limit_per_prompt": {"image": 2}}, {}, id="a limit changes nothing"),
        pytest.param(
            {"mm_processor_kwargs": {"max_pixels": 9, "device": "cuda"}},
            {"mm_processor_kwargs": '{"max_pixels": 9}'},
            id="the processor's, but for its device",
        ),
        pytest.param(
            {"media_io_kwargs": {"video": {"num_frames": 40}}},
            {"media_io_kwargs": '{"video": {"num_frames": 40}}'},
            id="the reader's",
        ),
        pytest.param({"video_pruning_rate": 0.5}, {"video_pruning": "evs 0.5"}, id="pruning"),
    ],
)
def test_the_processing_of_media_is_a_fact(
    options: dict[str, Any], changed: dict[str, str]
) -> None:
    plain = {"mm_processor_kwargs": "{}", "media_io_kwargs": "{}", "video_pruning": "none"}
    assert new_facts(media(gb=4, **options)) == plain | changed
    long = new_facts(media(gb=4, mm_processor_kwargs={"a": "b" * 5000}))["mm_processor_kwargs"]
    assert re.fullmatch("digest .{1,22}", long), "a description has bounds"


def with_draft(
    method: str, *, tokens: int = 3, modules: int = 1, **values: Any
) -> Callable[[Any], None]:
    """Adds a draft model, or what else speculates."""

    def change(config: Any) -> None:
        speculative: Any = SpeculativeConfig.__new__(SpeculativeConfig)
        speculative.method = "mtp" if method == "gemma4_mtp" else method
        speculative.num_speculative_tokens = tokens
        whole = {"num_hidden_layers": 1, "max_position_embeddings": 10} | values
        hf_config = SimpleNamespace(
            to_dict=lambda: dict(whole), model_type=method, num_nextn_predict_layers=modules
        )
        speculative.draft_model_config = SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config,
            model_arch_config=SimpleNamespace(total_num_kv_heads=2, per_layer_overrides=None),
        )
        config.speculative_config = speculative

    return change


def draft_facts_of(change: Callable[[Any], None]) -> dict[str, str]:
    config = vllm_config()
    change(config)
    assert model_facts(config) == model_facts(vllm_config())  # a reader may lack these
    return draft_facts(config)


@pytest.mark.parametrize(
    ("method", "has_layers"),
    [
        ("ngram", False),
        ("eagle3", True),
        ("mtp", True),
        ("draft_model", True),
        ("gemma4_mtp", False),
    ],
)
def test_a_draft_model_with_layers_in_the_cache_is_a_fact(method: str, *, has_layers: bool) -> None:
    found = draft_facts_of(with_draft(method))
    assert set(found) == ({DRAFT_FACT} if has_layers else set())
    assert all(text.startswith(f"{method}, config digest ") for text in found.values())
    assert draft_facts_of(with_draft(method, max_position_embeddings=20)) == found
    others = draft_facts_of(with_draft(method, num_hidden_layers=2))
    assert (others != found) is has_layers


@pytest.mark.parametrize(
    ("method", "tokens", "modules", "computed"),
    [("ngram", 3, 1, 1), ("mtp", 3, 1, 1), ("mtp", 1, 3, 1), ("mtp", 2, 3, 2), ("mtp", 3, 3, 3)],
)
def test_decode_computes_the_tokens_that_draft_modules_look_ahead(
    method: str, tokens: int, modules: int, computed: int
) -> None:
    """One module writes for each drafted token, so their number is a fact."""
    config = vllm_config()
    assert computed_on_decode(config) == 1
    draft = with_draft(method, tokens=tokens, modules=modules)
    draft(config)
    assert computed_on_decode(config) == computed
    more = with_draft(method, tokens=tokens + 1, modules=modules)
    assert (draft_facts_of(draft) != draft_facts_of(more)) is (modules > 1)


def test_several_draft_modules_beside_state_are_refused_on_decode() -> None:
    """It would need the state before the tokens that it computes."""
    config = vllm_config(kv_role="kv_consumer")
    with_draft("mtp", modules=1)(config)
    check_supported(config, cache_of(FULL, mamba()))
    with_draft("mtp", modules=3)(config)
    check_supported(config, cache_of(FULL, sliding()))
    with pytest.raises(ConfigError, match="several draft modules"):
        check_supported(config, cache_of(FULL, mamba()))
    prefill = vllm_config(kv_role="kv_producer")
    with_draft("mtp", modules=3)(prefill)
    check_supported(prefill, cache_of(FULL, mamba()))


@pytest.mark.parametrize(
    ("layer", "is_marked", "is_draft"),
    [
        ("model.layers.1.self_attn.attn", False, False),
        ("model.layers.1.self_attn.attn", True, True),
        ("model.layers.2.self_attn.attn", False, True),
        ("draft_model.model.layers.0.self_attn.attn", False, True),
        ("model.mtp.layers.0.self_attn.attn", False, True),
        ("model.norm", False, False),
    ],
)
def test_layers_of_a_draft_model_are_known_by_mark_or_name(
    layer: str, *, is_marked: bool, is_draft: bool
) -> None:
    config: Any = vllm_config()
    config.model_config.model_arch_config.total_num_hidden_layers = 2
    module = SimpleNamespace(is_draft_layer=is_marked)
    config.compilation_config.static_forward_context = {layer: module}
    assert draft_model_of(config, layer) is None
    with_draft("ngram")(config)
    assert draft_model_of(config, layer) is None
    with_draft("eagle3")(config)
    draft = config.speculative_config.draft_model_config
    assert draft_model_of(config, layer) is (draft if is_draft else None)


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        pytest.param("LBNHC", {"layout": "LBNHC", "is_cuda": False}, id="the operator's"),
        pytest.param("BHLNC", {}, id="Hopper's default"),
        pytest.param("BHLNC", {"backend": "FLASH_ATTN", "block_size": 256}, id="FlashAttention"),
        pytest.param("BHLNC", {"backend": "FLASHINFER", "block_size": 64}, id="FlashInfer"),
        pytest.param(None, {"backend": "FLASHINFER", "block_size": 128}, id="large blocks"),
        pytest.param(None, {"backend": "TRITON_ATTN"}, id="an unknown backend"),
        pytest.param(None, {"is_cuda": False, "backend": "FLASH_ATTN"}, id="CPU"),
        pytest.param(None, {"use_mla": True, "backend": "FLASH_ATTN"}, id="MLA"),
        pytest.param(None, {"major": None}, id="a default that is not known"),
        pytest.param(None, {"major": 10}, id="Blackwell"),
        pytest.param(None, {"cache_dtype": "nvfp4", "backend": "FLASHINFER"}, id="a packed cache"),
        pytest.param(None, {"is_hybrid": True}, id="pages of several kinds"),
    ],
)
def test_the_packed_layout_is_asked_for_where_it_is_known_good(
    monkeypatch: pytest.MonkeyPatch, expected: str | None, changed: dict[str, Any]
) -> None:
    given = {"layout": "auto", "is_cuda": True, "major": 9, "backend": None, "block_size": 16}
    given |= {"use_mla": False, "is_hybrid": False, "cache_dtype": "auto"} | changed
    capability, backend = (
        given[key] and SimpleNamespace(**{name: given[key]})
        for key, name in (("major", "major"), ("backend", "name"))
    )
    platform = SimpleNamespace(
        is_cuda=lambda: given["is_cuda"], get_device_capability=lambda: capability
    )
    monkeypatch.setattr(module, "current_platform", platform)
    config: Any = vllm_config({"layout": given["layout"]})
    override(config, use_mla=given["use_mla"], is_hybrid=given["is_hybrid"])
    config.cache_config.block_size = given["block_size"]
    config.cache_config.cache_dtype = given["cache_dtype"]
    config.attention_config = SimpleNamespace(backend=backend)
    assert required_layout(config) == expected


ALL_LAYOUTS = [layout.name for layout in KVCacheLayout]
SIZES: Any = {"block_size": 128, "head_size": 128, "dtype": torch.bfloat16}
TWO_HEADS = FullAttentionSpec(num_kv_heads=2, **SIZES)
FOUR_HEADS = FullAttentionSpec(num_kv_heads=4, **SIZES)
KEY = MLAAttentionSpec(num_kv_heads=1, **SIZES)  # for each token, as an indexer stores it


@pytest.mark.parametrize(
    ("expected", "supported", "specs"),
    [
        pytest.param("BHLNC", ALL_LAYOUTS, [TWO_HEADS], id="pages of one size"),
        pytest.param("BLHNC", ALL_LAYOUTS, [TWO_HEADS, FOUR_HEADS], id="pages of several sizes"),
        pytest.param("BLHNC", ["LBHNC", "BLHNC"], [TWO_HEADS], id="kernels that need whole heads"),
        pytest.param("LBHNC", ALL_LAYOUTS, [TWO_HEADS, KEY], id="keys beside KV"),
        pytest.param(
            "LBNHC",
            ["LBNHC", "LBHNC"],
            [TWO_HEADS, FOUR_HEADS],
            id="kernels that know only layers apart",
        ),
        pytest.param("BLNHC", ["BLNHC", "BLHNC"], [TWO_HEADS, KEY], id="keys, nothing apart"),
    ],
)
def test_vllm_takes_the_best_layout_that_all_layers_allow(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: str,
    supported: list[str],
    specs: list[KVCacheSpec],
) -> None:
    capability = SimpleNamespace(major=9)
    hopper = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: capability)
    monkeypatch.setattr(module, "current_platform", hopper)
    config = vllm_config()
    config.attention_config.backend = None
    config.cache_config.kv_cache_layout = None
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    assert resolve_kv_cache_layout(config, [supported], specs).name == expected
    assert not any("does not satisfy" in line for line in caplog.messages)


def with_media_at(offset: int) -> dict[str, Any]:
    position = SimpleNamespace(offset=offset, length=10)
    return {"mm_features": [SimpleNamespace(mm_position=position)]}


NO_CACHE = {"sampling_params": SimpleNamespace(skip_reading_prefix_cache=True)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"num_prompt_tokens": 1}, "its prompt has one token", id="one token"),
        pytest.param(NO_CACHE, "its client asks for the prompt's log prob", id="log probs"),
        pytest.param(with_media_at(90), "its prompt ends within an image", id="media at the end"),
        pytest.param(with_media_at(80), "", id="media before"),
        pytest.param({}, "", id="any other"),
    ],
)
def test_a_request_that_needs_its_last_token_computes_it(
    change: dict[str, Any], words: str
) -> None:
    request = new_request(num_tokens=100)
    for name, value in change.items():
        setattr(request, name, value)
    assert why_not_shortened(request).startswith(words)
    assert bool(why_not_shortened(request)) == bool(words)


def test_a_shortened_request_has_no_last_token() -> None:
    request = new_request(num_tokens=3)
    request.max_tokens = 16
    ids, request.prompt_is_token_ids = request.prompt_token_ids, [True, True, True]
    before = request.sampling_params
    shorten(request, has_drafts=False)
    assert request.sampling_params is before
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (2, 2, 1)
    assert list(request.prompt_token_ids) == list(request.all_token_ids) == [0, 1]
    assert request.prompt_is_token_ids == [True, True]
    assert ids == [0, 1, 2]  # that of the prompt's context


@pytest.mark.parametrize("is_structured", [False, True])
def test_the_draft_model_of_a_shortened_request_gets_the_prompts_last_token(
    *, is_structured: bool
) -> None:
    """VLLM gives it the sampled token. A grammar may not allow the prompt's."""
    request = new_request(num_tokens=3)
    before = request.sampling_params
    if is_structured:
        request.structured_output_request = object()
    shorten(request, has_drafts=True)
    assert request.sampling_params.allowed_token_ids == (None if is_structured else [2])
    assert before.allowed_token_ids is None, "other requests may have the same object"


def test_ranks_are_numbered_pipeline_stage_major(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config()
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.pipeline_parallel_size = 2
    for name, rank in (("get_pp_group", 1), ("get_tp_group", 3)):
        group = SimpleNamespace(rank_in_group=rank)
        monkeypatch.setattr(module, name, lambda group=group: group)
    assert parallel_shape(config) == ParallelShape(4, 2)
    assert worker_rank(config) == 7


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (FULL, 0),
        (sliding(64), 64),
        (ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=128), 128),
        (UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layers.0": sliding(48)}), 48),
    ],
    ids=["full", "sliding", "chunked", "layers with specs of their own"],
)
def test_a_groups_window_is_that_of_its_layers(spec: Any, tokens: int) -> None:
    assert window(spec) == tokens
    assert pagings(vllm_config(), cache_of(spec)) == (Paging(0, 32, tokens),)


LATENT = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.uint8, "max_tp_shards": 1}
SHORT = SlidingWindowMLASpec(**LATENT, block_size=4, sliding_window=8)


@pytest.mark.parametrize(
    "full",
    [
        MLAAttentionSpec(**LATENT, block_size=256, tokens_per_state=4),
        UniformTypeKVCacheSpecs(
            block_size=256,
            kv_cache_specs={
                "layers.0": MLAAttentionSpec(**LATENT, block_size=256, tokens_per_state=4),
                "layers.1": MLAAttentionSpec(**LATENT, block_size=256, tokens_per_state=128),
            },
        ),
    ],
    ids=["as the scheduler sees a group", "as a worker does"],
)
def test_blocks_are_whole_where_a_layer_keeps_one_state_for_several_tokens(full: Any) -> None:
    """In all groups: vLLM fixes the sizes of their blocks."""
    config = vllm_config()
    most = (8 + config.max_in_flight_tokens) // 4 + 2
    cache = cache_of(full, SHORT)
    check_supported(config, cache)
    assert pagings(config, cache) == (WholePaging(0, 256, 0), WholePaging(1, 4, 8, most=most))
    assert pagings(config, cache_of(FULL, SHORT)) == (Paging(0, 32, 0), Paging(1, 4, 8))
    config.parallel_config.decode_context_parallel_size = 2
    words = "several tokens in one stored state together with decode context parallelism$"
    with pytest.raises(ConfigError, match=words):
        check_supported(config, cache)


def test_prefill_keeps_the_window_of_the_first_token_that_decode_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several draft modules that is not the prompt's last one."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", 3)
    assert [paging.window for paging in pagings(vllm_config(), cache_of(FULL, SHORT))] == [0, 10]


# --- tokens that are divided among ranks

REPLICATED = replace(FULL, dcp_sharded=False)


def divided(number: int = 2, width: int = 1, **changed: Any) -> Any:
    config = vllm_config()
    config.parallel_config.decode_context_parallel_size = number
    config.parallel_config.cp_kv_cache_interleave_size = width
    config.parallel_config._allow_auto_resolve_cp_interleave_size = True
    for name, value in changed.items():
        owner = config.parallel_config if hasattr(config.parallel_config, name) else config
        setattr(owner, name, value)
    return config


def test_a_rank_has_a_stripe_of_divided_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr(module, "get_dcp_group", lambda: group)
    monkeypatch.setattr(module, "get_pcp_group", lambda: group)
    assert stripe(divided(width=16), FULL) == Stripe(2, 1, 16)
    assert stripe(divided(), REPLICATED) == stripe(divided(), mamba("GDN_ATTN", 2)) == Stripe()
    assert stripe(vllm_config(), FULL) == Stripe()
    words = "--cp-kv-cache-interleave-size is 5; allowed: a divisor of the block size 32"
    with pytest.raises(ConfigError, match=f"^{words}$"):
        stripe(divided(width=5), FULL)


def test_a_block_table_counts_blocks_of_all_ranks() -> None:
    cache = cache_of(FULL, REPLICATED, mamba("GDN_ATTN", 2))
    expected = (Paging(0, 128, 0), Paging(1, 32, 0), StatePaging(2, 32))
    assert pagings(divided(4), cache) == expected


@pytest.mark.parametrize(
    ("config", "backend", "width"),
    [
        pytest.param(divided(), "FLASH_ATTN_MLA", 32, id="in whole blocks"),
        pytest.param(divided(), "FLASHINFER_MLA", 1, id="a kernel that cannot"),
        pytest.param(divided(speculative_config=object()), "TRITON_MLA", 1, id="speculation"),
        pytest.param(divided(1), "TRITON_MLA", 1, id="not divided"),
        pytest.param(
            divided(width=4, _allow_auto_resolve_cp_interleave_size=False),
            "TRITON_MLA",
            4,
            id="the operator's",
        ),
        pytest.param(
            divided(width=4, dcp_kv_cache_interleave_size=4),
            "TRITON_MLA",
            4,
            id="the operator's, by the older flag, of which vLLM makes a copy",
        ),
    ],
)
def test_tokens_are_divided_in_whole_blocks_where_they_can(
    config: Any, backend: str, width: int
) -> None:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    config.compilation_config.static_forward_context = {"layer": layer}
    choose_interleave(config, cache_of(FULL, REPLICATED))
    assert config.parallel_config.cp_kv_cache_interleave_size == width


# --- requests


IMAGES: Final = [
    SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=2), identifier="id")
    for offset in (1, 5)
]


@pytest.mark.parametrize(
    ("field", "value", "extras"),
    [
        ("lora_request", None, ()),
        ("lora_request", SimpleNamespace(lora_name="a"), (b"loraa",)),
        ("cache_salt", "s", (b"salts",)),
        ("prompt_embeds", torch.zeros(3, 2), (b"embeds" + bytes(16),)),
        ("prompt_is_token_ids", [True, False, True], (b"mask\1\0",)),
    ],
    ids=["nothing", "adapter", "salt", "embeddings", "a mask"],
)
def test_a_prompt_is_its_tokens_and_what_else_its_kv_depends_on(
    field: str, value: object, extras: tuple[bytes, ...]
) -> None:
    request: Any = new_request(num_tokens=3)
    setattr(request, field, value)
    prompt = prompt_of(request)
    assert (prompt.request, prompt.num_tokens) == (request.request_id, 3)
    assert prompt.token_ids == [0, 1, 2]
    assert tuple(prompt._extras(2)) == extras, "of the first two tokens"


def test_only_a_complete_prompt_is_offered() -> None:
    """No other end of a request is good, nor one that a later vLLM adds."""
    request: Any = new_request()
    request.num_computed_tokens = 100
    reasons = {}
    for request.status in RequestStatus:
        reasons[request.status.name] = why_not_offered(request)
    assert reasons["FINISHED_ABORTED"] == "it ended as FINISHED_ABORTED"
    good = ["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"]
    assert [name for name, reason in reasons.items() if not reason] == good
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_STOPPED, 99
    assert why_not_offered(request) == "99 of 100 tokens computed"


@pytest.mark.parametrize(("unit", "expected"), [(None, False), (32, False), (16, True)])
def test_vllm_copies_blocks_if_a_prompt_may_end_within_one(
    unit: int | None, *, expected: bool
) -> None:
    """Then decode reads no prompt in chunks: model runner V2 copies before it calls the hooks."""
    config = vllm_config({"insecure": True, "port": 0})
    config.cache_config.prefix_match_unit = unit
    assert module.may_copy_blocks(config.cache_config) is expected
