"""Reads memory of another process's GPU, which is mapped, by a kernel on this rank's own.

This module is imported only where the cache is in GPU memory: Triton is only there.
"""

import contextlib
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.geometry.tiles import Tiling
from nixl_kv.protocol import messages
from nixl_kv.transfer.gpu_copy import CopyRun, KernelStream
from nixl_kv.transfer.gpu_memory import Mapping, export


@dataclass(frozen=True)
class _MappedPlan:
    mapping: Mapping
    tiling: Tiling
    rows: torch.Tensor


class GpuGather:
    """See `gather.Gather`. Kernels run one after the other, on a stream of their own."""

    def __init__(self, device: int, on_owner_ended: Callable[[], None]) -> None:
        """Make a stream, and compile the kernels, which needs seconds the first time.

        Args:
            device: the ordinal of this rank's GPU.
            on_owner_ended: called on another thread when a process has ended whose memory is
                mapped, after it was counted in `num_ended`.

        Raises:
            TransportError: if that cannot be done here.
        """
        self.num_ended = 0
        self._device = device
        self._on_owner_ended = on_owner_ended
        self._owners = select.epoll()
        self._stream = KernelStream(device)
        mine = self._stream.to_device(np.zeros(1, dtype=np.int64))
        with contextlib.suppress(TransportError):  # no handles: what counts is who is asked first
            export([Span(mine.data_ptr(), mine.nbytes)], device)
        threading.Thread(target=self._watch_owners, name="nixl-kv-owners", daemon=True).start()

    def map(self, exported: messages.Export, plan: Plan) -> _MappedPlan:
        """Map a peer's memory, and put the plan's rows where kernels read them."""
        with contextlib.ExitStack() as undo:
            mapping = Mapping(exported, self._device)
            undo.callback(mapping.close)
            tiling = Tiling(plan, mapping.locate)
            if not len(tiling.rows):
                raise TransportError("nothing of it is read")
            rows = self._stream.to_device(tiling.rows)
            # Part of what the other GPU's first use costs; 115 ms remain, see docs/benchmarks.md.
            self._stream.touch(int(tiling.rows[0, 1]))
            try:
                self._owners.register(mapping.owner, select.EPOLLIN | select.EPOLLONESHOT)
            except OSError as error:
                raise TransportError(f"watching process {exported.pid}: {error}") from error
            undo.pop_all()
        return _MappedPlan(mapping, tiling, rows)

    def unmap(self, mapped: _MappedPlan) -> None:
        """Unmap it: its owner's descriptor is closed, and so no longer watched."""
        mapped.mapping.close()

    def is_mapped(self, mapped: _MappedPlan) -> bool:
        """Ask the kernel for the owner."""
        return not mapped.mapping.has_owner_ended

    def read(self, mapped: _MappedPlan, pieces: Sequence[Pieces]) -> CopyRun:
        """One launch per alignment of the plan's rows: one for most."""
        return self._stream.copy(mapped.tiling, mapped.rows, pieces)

    def poll(self, read: CopyRun) -> bool:
        """Ask for the event behind its kernels."""
        return self._stream.has_ended(read, "reading mapped memory")

    def close(self) -> None:
        """Wait for all kernels."""
        self._stream.wait()

    def _watch_owners(self) -> None:
        while True:
            for _ in self._owners.poll():
                self.num_ended += 1
                self._on_owner_ended()
