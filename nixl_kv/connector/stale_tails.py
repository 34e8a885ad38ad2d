"""Clears what a load leaves as it is in the last blocks that it fills.

Where a model has recurrent state, its pages and those of KV lie in the same memory. What a block
had before may then be any bytes, also such that are no numbers where KV is read from them; kernels
multiply them by zero for tokens that are not there yet, which is no zero. So vLLM clears new blocks
of such models, but for those that a connector fills; and of the last one we fill a part.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from nixl_kv.connector.vllm_config import holds_state
from nixl_kv.geometry.layout import Table
from nixl_kv.protocol import events


class StaleTails:
    """Those of one rank's cache; without recurrent state there is nothing to do."""

    def __init__(
        self, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        """For each group that is transferred the caches of its layers; a state is read whole."""
        self._num_entries = kv_cache_config.num_blocks
        self._groups: list[Sequence[torch.Tensor]] = []
        if kv_cache_config.has_mamba_layers:
            self._groups = [
                []
                if holds_state(group.kv_cache_spec)
                else [kv_caches[name] for name in group.layer_names if name in kv_caches]
                for group in kv_cache_config.transfer_groups
            ]
        tensors = [tensor for group in self._groups for tensor in group]
        self._stream: Any = None
        if tensors and tensors[0].is_cuda:
            stream: Any = torch.cuda.Stream  # untyped
            self._stream = stream(tensors[0].device)

    def clear(self, commands: Iterable[events.Command]) -> None:
        """Clear the last block of each group of these loads, which have not begun."""
        if not self._groups:
            return
        loads = [one for one in commands if isinstance(one, events.StartLoad)]
        if not loads:
            return
        # Not behind the forward under way, and no longer than the memory takes.
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for load in loads:
                for caches, table in zip(self._groups, load.tables, strict=True):
                    self._clear_last(caches, table)
        if self._stream:
            self._stream.synchronize()

    def _clear_last(self, caches: Sequence[torch.Tensor], table: Table) -> None:
        for last in table.block_ids[-1:].tolist():  # none where all are absent
            for cache in caches:
                per_entry = cache.shape[0] // self._num_entries
                cache[last * per_entry : (last + 1) * per_entry].zero_()
