"""A model's KV cache, from a Hugging Face configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_kv.cli.model_config import model_shape
from nixl_kv.cli.options import ModelOptions
from nixl_kv.geometry.model_layouts import ModelShape
from support.nixl_kv_command import nixl_kv

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
SMALL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

Make = Callable[..., ModelShape]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The shape of a model with this configuration, and with these options."""

    def call(config: Any, **options: Any) -> ModelShape:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return model_shape(ModelOptions(model_config=path, **options))

    return call


def sliding(count: int, period: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(count) if layer % period != period - 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(QWEN3_8B, ModelShape(36, 8, (256, 256), "bfloat16"), id="Qwen3-8B"),
        pytest.param(
            {
                "model_type": "deepseek_v3",
                "hidden_size": 7168,
                "kv_lora_rank": 512,
                "num_attention_heads": 128,
                "num_hidden_layers": 61,
                "num_key_value_heads": 128,
                "qk_rope_head_dim": 64,
                "torch_dtype": "bfloat16",
            },
            ModelShape(61, 1, (1152,), "bfloat16"),
            id="DeepSeek-V3: one latent head",
        ),
        pytest.param(
            {
                "model_type": "gemma3",
                "torch_dtype": "bfloat16",
                "text_config": {
                    "head_dim": 128,
                    "hidden_size": 5376,
                    "model_type": "gemma3_text",
                    "num_attention_heads": 32,
                    "num_hidden_layers": 62,
                    "num_key_value_heads": 16,
                    "sliding_window": 1024,
                },
                "vision_config": {"num_hidden_layers": 27},
            },
            ModelShape(62, 16, (256, 256), "bfloat16", 1024, sliding(62, 6)),
            id="Gemma 3: nested, and five to one by default",
        ),
        pytest.param(
            {
                "model_type": "gpt_oss",
                "head_dim": 64,
                "layer_types": [SLIDING, FULL] * 12,
                "num_attention_heads": 64,
                "num_hidden_layers": 24,
                "num_key_value_heads": 8,
                "sliding_window": 128,
            },
            ModelShape(24, 8, (128, 128), "bfloat16", 128, tuple(range(0, 24, 2))),
            id="gpt-oss: types of layers, no dtype",
        ),
        pytest.param(
            {**SMALL, "layer_types": [CHUNKED] * 3 + [FULL], "attention_chunk_size": 8},
            ModelShape(4, 2, (128, 128), "bfloat16", 8, (0, 1, 2)),
            id="chunks",
        ),
        pytest.param(
            {**SMALL, "layer_types": [FULL] * 4, "sliding_window": 8},
            ModelShape(4, 2, (128, 128), "bfloat16"),
            id="a window of no layer",
        ),
        pytest.param(
            {**SMALL, "sliding_window": 4096, "torch_dtype": "float16"},
            ModelShape(4, 2, (128, 128), "float16", 4096, (0, 1, 2, 3)),
            id="Mistral: all layers slide",
        ),
        pytest.param(
            {**SMALL, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            ModelShape(4, 2, (128, 128), "bfloat16", 8, (3,)),
            id="Qwen2: the last layers slide",
        ),
        pytest.param(
            {**SMALL, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            ModelShape(4, 2, (128, 128), "bfloat16"),
            id="Qwen2: no layer slides",
        ),
        pytest.param(
            {**SMALL, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0},
            ModelShape(4, 2, (128, 128), "bfloat16"),
            id="Qwen2: sliding switched off",
        ),
        pytest.param(
            {**SMALL, "sliding_window": 8, "sliding_window_pattern": 4},
            ModelShape(4, 2, (128, 128), "bfloat16", 8, (0, 1, 2)),
            id="a pattern",
        ),
        pytest.param(
            {**SMALL, "num_key_value_heads": None, "dtype": "torch.float32"},
            ModelShape(4, 4, (256, 256), "float32"),
            id="as many KV heads as heads",
        ),
    ],
)
def test_model_shape_of_a_configuration(
    make: Make, config: dict[str, Any], expected: ModelShape
) -> None:
    assert make(config) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "fp8"}, ModelShape(36, 8, (128, 128), "fp8")),
        ({"layers": 2, "head_size": 8}, ModelShape(2, 8, (16, 16), "bfloat16")),
        ({"kv_heads": 2}, ModelShape(36, 2, (256, 256), "bfloat16")),
        ({"latent": 8}, ModelShape(36, 1, (16,), "bfloat16")),
        ({"window": 8, "layers": 2}, ModelShape(2, 8, (256, 256), "bfloat16", 8, (0, 1))),
        (
            {"window": 8, "layers": 4, "sliding": "1:1"},
            ModelShape(4, 8, (256, 256), "bfloat16", 8, (0, 2)),
        ),
    ],
)
def test_options_replace_numbers_of_the_configuration(
    make: Make, options: dict[str, Any], expected: ModelShape
) -> None:
    assert make(QWEN3_8B, **options) == expected


def test_folder_of_a_configuration_is_enough(make: Make, tmp_path: Path) -> None:
    assert make(QWEN3_8B) == model_shape(ModelOptions(model_config=tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers of {} is None; allowed: 1 or more"),
        ({"num_key_value_heads": [1, 2]}, "num_key_value_heads of {} is [1, 2]; allowed: 1 or"),
        ({"head_dim": "64"}, "head_dim of {} is '64'; allowed: 1 or more"),
        ({"hidden_size": 0}, "hidden_size of {} is 0; allowed: 1 or more"),
        ({"kv_lora_rank": 8}, "qk_rope_head_dim of {} is None; allowed: 1 or more"),
        ({"torch_dtype": "int4"}, "dtype is 'int4'; allowed: float32, bfloat16, float16, fp8, in"),
        (
            {"layer_types": [FULL, "linear_attention"] * 2},
            "{}: its recurrent layers are of a kind that is not known",
        ),
        ({"layer_types": [FULL, "retention"] * 2}, "layer_types of {} is ['full_attention', 'ret"),
        ({"layer_types": [FULL] * 3}, "layer_types of {} is ['full_attention', "),
        (
            {"layer_types": FULL},
            "layer_types of {} is 'full_attention'; allowed: 4 times one of attention, ",
        ),
        (
            {"layer_types": [SLIDING, CHUNKED] * 2, "sliding_window": 8},
            "layer_types of {} has chunked_attention and sliding_attention; allowed: one of them",
        ),
        ({"layer_types": [SLIDING] * 4}, "sliding_window of {} is None; allowed: 1 or more"),
        ({"global_head_dim": 512}, "{} has global_head_dim: its layers' caches differ, which"),
        (
            {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "index_head_dim": 128},
            "{} has index_head_dim: its layers' caches differ, which the numbers here cannot say; ",
        ),
    ],
)
def test_bad_configuration_is_refused_by_key_and_value(
    make: Make, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared with its beginning
        make({**SMALL, **changes})
    assert str(caught.value).startswith(words.format(tmp_path / "config.json"))


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\udcff"])
def test_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=f"^--model-config {path}: .*; allowed: an object in JSON"):
        model_shape(ModelOptions(model_config=path))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        model_shape(ModelOptions(model_config=tmp_path / "missing.json"))


def test_configuration_gives_the_same_plan_as_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    engines = "--prefill tp=1 --decode tp=2"
    by_config = nixl_kv("plan", f"--model-config {tmp_path}", engines)
    by_numbers = nixl_kv("plan", "--layers 36 --kv-heads 8 --head-size 128", engines)
    assert by_config.exit_code == 0
    assert by_config.stdout == by_numbers.stdout
