"""Memory of the cache's kind that is nobody's: what is read into it is thrown away."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.geometry.layout import CacheLayout, Span

SCRATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Scratch:
    """SCRATCH_BYTES of memory, for as long as this is referred to."""

    span: Span
    owner: object


def make_scratch(layout: CacheLayout) -> Scratch | None:
    """Where a rank's cache is; None where none can be had there."""
    if layout.memory == "DRAM":
        memory = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        return Scratch(Span(memory.ctypes.data, SCRATCH_BYTES), memory)
    try:
        from nixl_kv.reading.gpu_scratch import allocate  # noqa: PLC0415 - torch: GPUs only

        address, owner = allocate(SCRATCH_BYTES, layout.device)
    except (ImportError, RuntimeError, AssertionError):  # the last one: torch without CUDA
        return None
    return Scratch(Span(address, SCRATCH_BYTES), owner)
