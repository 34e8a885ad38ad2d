"""Maps GPU memory of another process and copies from it with a kernel on this rank's GPU.

Imported only where the cache is in GPU memory: Triton and CUDA's bindings are only there.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.protocol import messages
from nixl_kv.reading.copying.kernel import TILE_BYTES, CopyRun, KernelStream
from nixl_kv.reading.copying.tiles import Tiling
from nixl_kv.reading.gather.memory import Exported, Mapping
from nixl_kv.reading.gather.path import OwnerWatch


@dataclass(frozen=True)
class _MappedPlan:
    mapping: Mapping
    tiling: Tiling
    rows: torch.Tensor


class GpuGather:
    """See `path.Gather`. Kernels run one after the other, on a stream of their own."""

    def __init__(self, device: int, on_owner_ended: Callable[[], None]) -> None:
        """Make a stream and compile the kernels, which takes seconds the first time.

        `on_owner_ended` is called on another thread when a process has ended whose memory is
        mapped, after `num_ended` has counted it.
        """
        self._device = device
        self._stream = KernelStream(device)
        mine = self._stream.to_device(np.zeros(1, dtype=np.int64))
        # The first export of a process takes long, so do it now. Memory without handles is not an
        # error here; the export of the cache reports it.
        with contextlib.suppress(TransportError):
            Exported([Span(mine.data_ptr(), mine.nbytes)], device).close()
        self._owners = OwnerWatch(on_owner_ended)

    @property
    def num_ended(self) -> int:
        return self._owners.num_ended

    def map(self, exported: messages.Export, plan: Plan) -> _MappedPlan:
        with contextlib.ExitStack() as undo:
            mapping = Mapping(exported, self._device)
            undo.callback(mapping.close)
            tiling = Tiling(plan, mapping.locate)
            if not len(tiling.rows):
                raise TransportError("the plan reads nothing of it")
            rows = self._stream.to_device(tiling.rows)
            self._check(exported.proof, mapping)
            try:
                self._owners.add(mapping.owner)
            except OSError as error:
                raise TransportError(f"watching process {exported.pid}: {error}") from error
            undo.pop_all()
        return _MappedPlan(mapping, tiling, rows)

    def unmap(self, mapped: _MappedPlan) -> None:
        mapped.mapping.close()  # closes the owner's descriptor, which ends the watch

    def is_mapped(self, mapped: _MappedPlan) -> bool:
        return not mapped.mapping.has_owner_ended

    def read(self, mapped: _MappedPlan, pieces: Sequence[Pieces]) -> CopyRun:
        return self._stream.copy(mapped.tiling.launches(pieces, TILE_BYTES), mapped.rows)

    def poll(self, copy: CopyRun) -> bool:
        return self._stream.has_ended(copy, "reading mapped memory")

    def wait(self) -> None:
        self._stream.wait()

    def close(self) -> None:
        self.wait()
        self._owners.close()

    def _check(self, proof: messages.Proof, mapping: Mapping) -> None:
        """Read the proof through the mapping. This also is the first access to the other GPU."""
        place = np.array([proof.address], dtype=np.int64)
        (at,) = mapping.locate(place, place + len(proof.value))
        if self._stream.read_16(int(at)) != proof.value:
            raise TransportError(
                "the mapped memory does not hold the 16 bytes that its description names: it is "
                "other memory, or this GPU cannot read that one"
            )
