"""The part of vLLM's OffloadingConnector that copies, for engines on CPU.

vLLM's own copies between a GPU and the host alone. Name this one in the `kv_connector_extra_config`
of that connector, by `spec_name` and `spec_module_path`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostTierSpec(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk is {self.blocks_per_chunk}; allowed: 1")
        return HostTierWorker(kv_caches, self.num_chunks)


class HostTierWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once: each job has ended when it is submitted."""

    def __init__(self, kv_caches: Any, num_chunks: int) -> None:
        """Beside each tensor of the cache stands one of chunks, each of a block's size."""
        self._groups = kv_caches.group_data_refs
        self._blocks = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self._chunks = [
            torch.zeros((num_chunks, blocks.shape[1]), dtype=torch.int8) for blocks in self._blocks
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_cache=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_cache=True)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: see the class."""

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_cache: bool) -> bool:
        num_bytes = 0
        for tensor, block, chunk in self._pairs(blocks, chunks):
            in_cache, kept = self._blocks[tensor][block], self._chunks[tensor][chunk]
            target, source = (in_cache, kept) if to_cache else (kept, in_cache)
            target.copy_(source)
            num_bytes += source.nbytes
        done = TransferResult(job_id, success=True, transfer_size=num_bytes, transfer_time=1e-3)
        self._finished.append(done)
        return True

    def _pairs(self, blocks: Any, chunks: Any) -> Iterator[tuple[int, int, int]]:
        """Tensors, each with a block and a chunk; both lists are in the order of cache groups."""
        pairs = iter(zip(blocks.block_ids, chunks.block_ids, strict=True))
        for size, layers in zip(blocks.group_sizes, self._groups, strict=True):
            tensors = {layer.tensor_idx for layer in layers}
            for _ in range(size):
                block, chunk = next(pairs)
                yield from ((tensor, int(block), int(chunk)) for tensor in tensors)
