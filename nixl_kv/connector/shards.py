"""Which of the model's KV heads this worker's caches hold."""

import re
from collections.abc import Iterator
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.models.utils import extract_layer_index

from nixl_kv.errors import ConfigError
from nixl_kv.geometry.ranks import Shape
from nixl_kv.ids import Rank

HEAD_COUNT: Final = re.compile(r"(key_value|kv)_heads$|^n_head_kv$|^num_attention_groups$")
"""Names under which models' configurations say how many KV heads some or all layers have."""


def shape(vllm_config: VllmConfig) -> Shape:
    """How this engine is cut."""
    parallel = vllm_config.parallel_config
    return Shape(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def rank(vllm_config: VllmConfig) -> Rank:
    """Which rank this worker is, pipeline stage major; to be asked in a worker only."""
    stage, place = get_pp_group().rank_in_group, get_tp_group().rank_in_group
    return Rank(stage * shape(vllm_config).tp + place)


class Shards:
    """Tells, for each layer, which heads this tensor-parallel rank holds.

    vLLM cuts a layer's heads into as many shards as there are ranks; where there are more ranks
    than heads, neighbouring ranks hold the same one.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """To be made in a worker only."""
        self._model = vllm_config.model_config
        self._tp = shape(vllm_config).tp
        self._place = rank(vllm_config) % self._tp

    def first_head(self, layer: str, spec: Any, *, num_heads: int) -> int:
        """The model's number of the first head in a layer's cache, which has `num_heads`.

        Raises:
            ConfigError: if the model's configuration leaves open how many heads there are.
        """
        return self._place * self.number(layer, spec) // self._tp * num_heads

    def number(self, layer: str, spec: Any) -> int:
        """How many different sets of heads the tensor-parallel ranks hold of a layer."""
        if spec.max_tp_shards is not None:
            return int(min(self._tp, spec.max_tp_shards))
        if self._tp == 1 or spec.num_kv_heads > 1:
            return self._tp
        # One head per rank: as many heads as ranks, or copies of fewer.
        fitting = {count for count in self._head_counts(layer) if self._tp % count == 0}
        if len(fitting) != 1:
            raise ConfigError(
                f"layer {layer!r} has one KV head on each of {self._tp} ranks, and the model's "
                f"configuration speaks of {sorted(fitting)} KV heads; allowed: one such number"
            )
        return fitting.pop()

    def _head_counts(self, layer: str) -> Iterator[int]:
        """What the model's configuration says of this layer, or of any layer at all."""
        architecture = self._model.model_arch_config
        if architecture.per_layer_overrides is not None:
            yield architecture[extract_layer_index(layer)].total_num_kv_heads
            return
        yield architecture.total_num_kv_heads
        found = [self._model.hf_text_config.to_dict()]
        while found:
            for key, value in found.pop().items():
                if isinstance(value, dict):
                    found.append(value)
                elif HEAD_COUNT.search(str(key)) and isinstance(value, int) and value > 0:
                    yield value
