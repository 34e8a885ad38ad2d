"""Staging memory of a GPU, and a kernel that copies between it and the cache.

Imported only where the cache is in GPU memory, because only GPU machines have Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nixl_kv.geometry.layout import Span
from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.gpu import allocate
from nixl_kv.reading.copying.kernel import TILE_BYTES, CopyRun, KernelStream
from nixl_kv.reading.copying.tiles import Tiling
from nixl_kv.reading.paths import PAGE


class GpuMemory:
    """Memory of one GPU that begins at a page."""

    def __init__(self, length: int, device: int) -> None:
        address, self._owner = allocate(length + PAGE, device)
        self.span = Span(-(-address // PAGE) * PAGE, length)


@dataclass(frozen=True)
class _Prepared:
    tiling: Tiling
    rows: torch.Tensor


class GpuCopier:
    """Runs kernels one after the other, on a stream of its own. They take seconds to compile."""

    def __init__(self, device: int) -> None:
        self._stream = KernelStream(device)

    def prepare(self, plan: Plan) -> _Prepared:
        tiling = Tiling(plan, lambda first, _: first)
        return _Prepared(tiling, self._stream.to_device(tiling.rows))

    def start(self, prepared: _Prepared, pieces: Sequence[Pieces]) -> CopyRun:
        launches = prepared.tiling.launches(pieces, TILE_BYTES)
        return self._stream.copy(launches, prepared.rows)

    def poll(self, copy: CopyRun) -> bool:
        return self._stream.has_ended(copy, "copying staged KV")

    def end(self, copy: CopyRun) -> None:
        del copy
        self._stream.wait()
