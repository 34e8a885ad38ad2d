"""Scratch memory of the cache's kind, into which warm-up reads go."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.geometry.layout import CacheLayout, Span

SCRATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Scratch:
    """SCRATCH_BYTES of memory, allocated as long as `owner` lives."""

    span: Span
    owner: object


def make_scratch(layout: CacheLayout) -> Scratch | None:
    """Allocate memory where a rank's cache is; None if that fails."""
    if layout.memory == "DRAM":
        memory = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        return Scratch(Span(memory.ctypes.data, SCRATCH_BYTES), memory)
    try:
        address, owner = allocate_on_gpu(SCRATCH_BYTES, layout.device)
    except (ImportError, RuntimeError, AssertionError):  # the last one: torch without CUDA
        return None
    return Scratch(Span(address, SCRATCH_BYTES), owner)


def allocate_on_gpu(num_bytes: int, device: int) -> tuple[int, object]:
    """Return the address of GPU memory, and the object that keeps it allocated.

    Raises:
        RuntimeError: if there is no such GPU, or it lacks memory.
    """
    import torch  # noqa: PLC0415 - only GPU machines need it

    memory = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    return memory.data_ptr(), memory
