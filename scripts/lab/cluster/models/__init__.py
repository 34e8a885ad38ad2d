"""Tiny models with random weights, made locally: no model hub, and the same bytes every time."""

from collections.abc import Callable, Mapping
from typing import Final

from lab.cluster.models.deepseek import DeepseekV2
from lab.cluster.models.gemma import Gemma3, Gemma4
from lab.cluster.models.granite4 import Granite4
from lab.cluster.models.kimi_linear import KimiLinear
from lab.cluster.models.qwen3 import PaddedQwen3, TinyModel
from lab.cluster.models.qwen3_next import Qwen3Next, Qwen3NextMtp
from lab.cluster.models.recipe import Family

FAMILIES: Final[Mapping[str, Callable[..., Family]]] = {
    family.family: family
    for family in (
        TinyModel,
        PaddedQwen3,
        Gemma3,
        Gemma4,
        DeepseekV2,
        Qwen3Next,
        Qwen3NextMtp,
        Granite4,
        KimiLinear,
    )
}
