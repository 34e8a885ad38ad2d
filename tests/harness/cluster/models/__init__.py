"""Tiny models with random weights, made locally: no model hub, and the same bytes every time."""

from collections.abc import Callable, Mapping
from typing import Final

from harness.cluster.models.gemma import Gemma3, Gemma4
from harness.cluster.models.granite4 import Granite4
from harness.cluster.models.latent import DeepseekV2, KimiLinear
from harness.cluster.models.qwen3 import PaddedQwen3, TinyModel
from harness.cluster.models.qwen3_next import Qwen3Next, Qwen3NextMtp
from harness.cluster.models.recipe import Family

_ALL: Final = (
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
FAMILIES: Final[Mapping[str, Callable[..., Family]]] = {family.family: family for family in _ALL}
