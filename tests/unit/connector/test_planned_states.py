"""What `nixl-kv plan` says of recurrent layers is what the connector finds in pages of vLLM's."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from nixl_kv.cli.model_config import model_shape
from nixl_kv.cli.options import ModelOptions
from nixl_kv.connector import state_layout
from nixl_kv.connector.state_layout import Place, state_regions
from nixl_kv.geometry.layout import Region
from nixl_kv.geometry.model_layouts import EngineShape, ModelShape, build_layouts
from support.recorded_vllm import torch

F32, B16 = torch.float32, torch.bfloat16
FULL, LINEAR = "full_attention", "linear_attention"
ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
GATED = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN3_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 8, **ATTENTION, **GATED}
BAILING = "BailingMoeV2_5ForCausalLM"


@dataclass(frozen=True)
class Case:
    """A configuration, and what vLLM makes of it."""

    config: dict[str, Any]
    kind: str
    shapes: Callable[[int], Any]
    """Of a rank's states, by the number of ranks."""
    recurrent: tuple[int, ...]
    without_kv: tuple[int, ...]
    dtypes: tuple[Any, ...] = (B16, B16)
    groups: int = 0
    """As the norm of Mamba2 knows them."""


def gated(tp: int) -> Any:
    return Shapes.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4)


CASES = [
    pytest.param(
        Case(
            QWEN3_NEXT,
            "GDN_ATTN",
            gated,
            recurrent=(0, 1, 2, 4, 5, 6),
            without_kv=(0, 1, 2, 4, 5, 6),
        ),
        id="Qwen3-Next",
    ),
    pytest.param(
        Case(
            {
                "model_type": "qwen3_5",
                "text_config": {
                    **ATTENTION,
                    **GATED,
                    "num_hidden_layers": 4,
                    "layer_types": [LINEAR, FULL] * 2,
                    "mamba_ssm_dtype": "float32",
                },
            },
            "GDN_ATTN",
            gated,
            recurrent=(0, 2),
            without_kv=(0, 2),
            dtypes=(B16, F32),
        ),
        id="Qwen3.5",
    ),
    pytest.param(
        Case(
            {
                "num_hidden_layers": 4,
                "num_attention_heads": 32,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 3],
                    "full_attn_layers": [4],
                    "num_heads": 32,
                    "head_dim": 128,
                    "short_conv_kernel_size": 4,
                },
            },
            "GDN_ATTN",
            lambda tp: Shapes.kda_state_shape(tp, 32, 128, conv_kernel_size=4),
            recurrent=(0, 1, 2),
            without_kv=(0, 1, 2),
            dtypes=(B16, F32),
        ),
        id="Kimi-Linear",
    ),
    pytest.param(
        Case(
            {
                **ATTENTION,
                "num_hidden_layers": 4,
                "layer_types": ["mamba", "mamba", "attention", "mamba"],
                "mamba_n_heads": 48,
                "mamba_d_head": 64,
                "mamba_n_groups": 1,
                "mamba_d_state": 128,
                "mamba_d_conv": 4,
            },
            "MAMBA2",
            lambda tp: Shapes.mamba2_state_shape(tp, 48 * 64, 1, 48, 64, 128, 4),
            recurrent=(0, 1, 3),
            without_kv=(0, 1, 3),
            groups=1,
        ),
        id="Granite 4",
    ),
    pytest.param(
        Case(
            {
                **ATTENTION,
                "num_hidden_layers": 6,
                "hybrid_override_pattern": "M-M*ME",
                "mamba_num_heads": 128,
                "mamba_head_dim": 80,
                "n_groups": 8,
                "ssm_state_size": 128,
                "conv_kernel": 4,
            },
            "MAMBA2",
            lambda tp: Shapes.mamba2_state_shape(tp, 128 * 80, 8, 128, 80, 128, 4),
            recurrent=(0, 2, 4),
            without_kv=(0, 1, 2, 4, 5),
            dtypes=(B16, F32),
            groups=8,
        ),
        id="Nemotron-H",
    ),
    pytest.param(
        Case(
            {
                **ATTENTION,
                "model_type": "falcon_h1",
                "num_hidden_layers": 2,
                "mamba_n_heads": 24,
                "mamba_d_head": 128,
                "mamba_n_groups": 2,
                "mamba_d_state": 256,
                "mamba_d_conv": 4,
            },
            "MAMBA2",
            lambda tp: Shapes.mamba2_state_shape(tp, 24 * 128, 2, 24, 128, 256, 4),
            recurrent=(0, 1),
            without_kv=(),
            groups=2,
        ),
        id="Falcon-H1",
    ),
    pytest.param(
        Case(
            {
                **ATTENTION,
                "num_hidden_layers": 8,
                "hidden_size": 2048,
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_expand": 2,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
            },
            "MAMBA1",
            lambda tp: Shapes.mamba1_state_shape(tp, 4096, 16, 4),
            recurrent=(0, 1, 2, 3, 5, 6, 7),
            without_kv=(0, 1, 2, 3, 5, 6, 7),
        ),
        id="Jamba",
    ),
    pytest.param(
        Case(
            {
                **ATTENTION,
                "num_hidden_layers": 3,
                "hidden_size": 2048,
                "conv_L_cache": 3,
                "layer_types": ["conv", FULL, "conv"],
            },
            "SHORT_CONV",
            lambda tp: Shapes.short_conv_state_shape(tp, 2048, 3),
            recurrent=(0, 2),
            without_kv=(0, 2),
        ),
        id="LFM2",
    ),
    pytest.param(
        Case(
            {
                **ATTENTION,
                "architectures": [BAILING],
                "num_hidden_layers": 6,
                "layer_group_size": 3,
            },
            "LINEAR",
            lambda tp: Shapes.linear_attention_state_shape(16, tp, 128),
            recurrent=(0, 1, 3, 4),
            without_kv=(0, 1, 3, 4),
        ),
        id="Bailing 2.5",
    ),
]


def planned(config: dict[str, Any], folder: Path, **options: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model_shape(ModelOptions(model_config=folder, **options))


def facts(region: Region, layer: str) -> Any:
    """All but where its memory is, and which device it is on."""
    assert region.token_stride == region.block_stride
    dtype = region.element.split(" state", 1)[0]
    places = [(part.offset, part.length, part.count) for part in region.parts]
    return region.layer.removeprefix(layer), region.heads, region.head_stride, places, dtype


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_plan_has_the_states_that_the_connector_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: Case, tp: int
) -> None:
    monkeypatch.setattr(state_layout, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(
        "vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first", lambda: False
    )
    model = planned(case.config, tmp_path)
    assert (model.recurrent, model.without_kv) == (case.recurrent, case.without_kv)
    shapes = tuple(case.shapes(tp))
    spec = MambaSpec(
        block_size=16,
        shapes=shapes,
        dtypes=case.dtypes[-len(shapes) :],
        mamba_type=MambaAttentionBackendEnum[case.kind],
    )
    module = SimpleNamespace(norm=SimpleNamespace(n_groups=case.groups))
    for rank, layout in enumerate(build_layouts(model, EngineShape(tp=tp, num_blocks=3000))):
        states = [group for group in layout.groups if group.window == 1]
        found = [region for group in states for region in group.regions]
        size = sum(
            math.prod(shape) * t.itemsize for shape, t in zip(shapes, spec.dtypes, strict=True)
        )
        assert all(region.block_stride >= size for region in found)
        page = torch.zeros(1, 1, 1, size, dtype=torch.int8)
        expected = list(state_regions("", page, spec, module, Place(rank, tp)))
        of_layers = {
            f"layer.{n}": [r for r in found if r.layer.split()[0] == f"layer.{n}"]
            for n in case.recurrent
        }
        for layer, regions in of_layers.items():
            assert [facts(region, layer) for region in regions] == [
                facts(region, "") for region in expected
            ]


def test_a_temporal_state_has_the_dtype_that_is_said(tmp_path: Path) -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        state = planned(QWEN3_NEXT, tmp_path, state_dtype=dtype).state[-1]
        assert (state.element, state.length) == (f"{dtype} state", 128 * 128 * size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"layer_types": [LINEAR] * 8}, "no layer keeps KV; allowed: one or more", id="no KV"
        ),
        pytest.param(
            {"linear_num_value_heads": None}, "linear_num_value_heads of .* is None", id="number"
        ),
        pytest.param(
            {"layer_types": ["retention", FULL] * 4}, "layer_types of .* is .*retention", id="word"
        ),
        pytest.param(
            {"mamba_ssm_dtype": "int4"}, "dtype of states is 'int4'; allowed: ", id="dtype"
        ),
    ],
)
def test_what_is_not_known_of_a_state_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        planned({**QWEN3_NEXT, **changes}, tmp_path)
