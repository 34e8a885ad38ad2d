"""Gather: a kernel on decode's GPU reads a prefill rank's memory, which is mapped into decode.

This needs no descriptors, so it is faster than NIXL for any block table. It works between GPUs of
one host whose processes see each other. The kernel ends by itself, even if prefill dies. The fence
is the same as for every path: the agent reads the fence slot when the kernel has ended.
"""

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from nixl_kv.errors import TransportError, get_logger, run_guarded
from nixl_kv.geometry.plan import Plan, Share
from nixl_kv.protocol import events, messages
from nixl_kv.reading.paths import PreparedRank, Read, ReadOp, ReadPath

if TYPE_CHECKING:  # they need Triton and CUDA's bindings, which only GPU machines have
    from nixl_kv.reading.gather.memory import Mapping
    from nixl_kv.reading.kernel import KernelPlan, KernelStream

logger = get_logger(__name__)


class MappedRank(PreparedRank):
    """A remote rank whose memory is mapped. It is unmapped after the last kernel that reads it."""

    def __init__(self, path: "GatherPath", mapping: "Mapping", plan: "KernelPlan") -> None:
        self.mapping = mapping
        self.plan = plan
        self.num_reads = 0
        self._is_released = False
        self._path = path

    def release(self) -> None:
        self._is_released = True
        self.unmap_if_unused()

    def unmap_if_unused(self) -> None:
        if self._is_released and not self.num_reads:
            self._path.unmap(self)


class GatherPath(ReadPath):
    """Shared by all agents of a rank. Kernels run one after the other, on `stream`."""

    def __init__(
        self,
        stream: "KernelStream",
        map_memory: Callable[[messages.Export], "Mapping"],
        owners: "OwnerWatch",
    ) -> None:
        self.stream = stream
        self._map_memory = map_memory
        self._owners = owners
        self._mapped: dict[MappedRank, bool] = {}
        self._num_ended = 0  # owners whose memory `tidy` has unmapped

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> MappedRank | None:
        del share
        if description.export is None:
            return None
        try:
            return self.map(description.export, plan)
        except TransportError as error:
            logger.info("cannot map the GPU memory of %s: %s", description.endpoint, error)
            return None

    def map(self, export: messages.Export, plan: Plan) -> MappedRank:
        """Map a rank's memory for a plan, in 10 ms.

        Raises:
            TransportError: if that fails, or the memory is not the exported one.
        """
        with contextlib.ExitStack() as undo:
            mapping = self._map_memory(export)
            undo.callback(mapping.close)
            prepared = self.stream.prepare(plan, mapping.locate)
            if not len(prepared.tiling.rows):
                raise TransportError("the plan reads nothing of it")
            self._check(export.proof, mapping)
            try:
                self._owners.add(mapping.owner)
            except OSError as error:
                raise TransportError(f"watching process {export.pid}: {error}") from error
            undo.pop_all()
        rank = MappedRank(self, mapping, prepared)
        self._mapped[rank] = True
        return rank

    def start(self, prepared: MappedRank, read: Read) -> ReadOp | None:
        """Always gather mapped memory, unless its owner has ended."""
        if prepared not in self._mapped or prepared.mapping.has_owner_ended:
            return None
        return GatherOp(self.stream, prepared, read)

    def unmap(self, rank: MappedRank) -> None:
        """Unmap a rank once, even if two threads try: `pop` is atomic."""
        if self._mapped.pop(rank, False):
            rank.mapping.close()  # closes the owner's descriptor, which ends the watch

    def tidy(self) -> None:
        """Unmap the memory of ended processes; until then nothing can allocate it again."""
        num_ended = self._owners.num_ended
        if num_ended == self._num_ended:
            return
        for rank in list(self._mapped):
            if rank.mapping.has_owner_ended:
                rank.release()
        if not any(rank.mapping.has_owner_ended for rank in list(self._mapped)):
            self._num_ended = num_ended

    def close(self) -> None:
        self.stream.end()
        self._owners.close()

    def _check(self, proof: messages.Proof, mapping: "Mapping") -> None:
        """Read the proof through the mapping. This also is the first access to the other GPU."""
        place = np.array([proof.address], dtype=np.int64)
        (at,) = mapping.locate(place, place + len(proof.value))
        if self.stream.read_16(int(at)) != proof.value:
            raise TransportError(
                "the mapped memory does not hold the 16 bytes that its description names: it is "
                "other memory, or this GPU cannot read that one"
            )


class GatherOp(ReadOp):
    """A kernel in progress. It reads 80 GB within a second, so it reports no progress."""

    path = "gather"
    is_autonomous = True

    def __init__(self, stream: "KernelStream", rank: MappedRank, read: Read) -> None:
        self._stream = stream
        self._rank = rank
        self._copy = stream.start(rank.plan, read.pieces)
        self.has_ended = False
        rank.num_reads += 1

    def poll(self) -> list[events.ReadEvent]:
        if self._stream.poll(self._copy):
            self.release()
        return []

    def stop(self) -> None:
        """Nothing stops a kernel; it ends within milliseconds."""

    def end_copies(self) -> None:
        self._stream.end()

    def release(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._rank.num_reads -= 1
            self._rank.unmap_if_unused()


class OwnerWatch:
    """A thread that waits for the ends of processes whose memory is mapped here.

    A mapping outlives its owner: until it is closed, no other process can allocate that GPU memory.
    The thread calls `on_ended` after it has counted an end in `num_ended`.
    """

    def __init__(self, on_ended: Callable[[], None]) -> None:
        self.num_ended = 0
        self._on_ended = on_ended
        self._owners = select.epoll()
        self._closing = os.eventfd(0)
        self._owners.register(self._closing, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="nixl-kv-owners", daemon=True)
        self._thread.start()

    def add(self, process: int) -> None:
        """Watch a process until its pidfd, `process`, is closed.

        Raises:
            OSError: if it cannot be watched, or this watch is closed.
        """
        try:
            self._owners.register(process, select.EPOLLIN | select.EPOLLONESHOT)
        except ValueError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        if not self._owners.closed:
            os.eventfd_write(self._closing, 1)
            self._thread.join()
            self._owners.close()
            os.close(self._closing)

    def _watch(self) -> None:
        while True:
            for descriptor, _ in self._owners.poll():
                if descriptor == self._closing:
                    return
                self.num_ended += 1
                run_guarded(
                    self._on_ended, "could not report that the owner of mapped memory ended"
                )
