"""Staging memory of a GPU, and a kernel that copies between it and the cache.

Imported only where the cache is in GPU memory, because only GPU machines have Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.gpu import translated
from nixl_kv.reading.copying.kernel import TILE_BYTES, CopyRun, KernelStream
from nixl_kv.reading.copying.tiles import Tiling
from nixl_kv.reading.staged.copier import PAGE


class GpuMemory:
    """Memory of one GPU that begins at a page."""

    def __init__(self, length: int, device: int) -> None:
        """Allocate `length` bytes.

        Raises:
            TransportError: if the GPU lacks memory.
        """
        with translated(TransportError, "allocating staging memory"):
            self._memory = torch.empty(length + PAGE, dtype=torch.uint8, device=f"cuda:{device}")
        self.span = Span(-(-self._memory.data_ptr() // PAGE) * PAGE, length)


@dataclass(frozen=True)
class _Prepared:
    tiling: Tiling
    rows: torch.Tensor


class GpuCopier:
    """See `Copier`. Kernels run one after the other, on a stream of their own."""

    def __init__(self, device: int) -> None:
        """Make a stream and compile the kernels, which takes seconds the first time.

        Raises:
            TransportError: if the GPU cannot do that.
        """
        self._stream = KernelStream(device)

    def prepare(self, plan: Plan) -> _Prepared:
        """Copy the plan's rows to the GPU."""
        tiling = Tiling(plan, lambda first, _: first)
        return _Prepared(tiling, self._stream.to_device(tiling.rows))

    def start(self, prepared: _Prepared, pieces: Sequence[Pieces]) -> CopyRun:
        """One launch per alignment of the plan's rows: one for most plans."""
        launches = prepared.tiling.launches(pieces, TILE_BYTES)
        return self._stream.copy(launches, prepared.rows)

    def poll(self, copy: CopyRun) -> bool:
        """Query the event behind its kernels."""
        return self._stream.has_ended(copy, "copying staged KV")

    def end(self, copy: CopyRun) -> None:
        """Wait for all kernels."""
        del copy
        self._stream.wait()
