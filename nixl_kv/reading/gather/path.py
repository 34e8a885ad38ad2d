"""Gather: a kernel on decode's GPU reads a prefill rank's memory, which is mapped into decode.

This needs no descriptors, so it is faster than NIXL for any block table. It works between GPUs of
one host whose processes see each other. The kernel ends by itself, even if prefill dies. The fence
is the same as for every path: the agent reads the fence slot when the kernel has ended.
"""

import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from nixl_kv.errors import TransportError, get_logger, run_guarded
from nixl_kv.geometry.plan import Pieces, Plan, Share
from nixl_kv.protocol import events, messages
from nixl_kv.reading.paths import PreparedRank, Read, ReadOp, ReadPath

logger = get_logger(__name__)

MappedPlan: TypeAlias = Any  # a plan whose remote rows are mapped; opaque
Copy: TypeAlias = Any  # a kernel in progress; opaque


class Gather(Protocol):
    """Maps memory and copies from it: `gather.gpu` with CUDA, and tests within one process.

    All methods except `map`, `unmap`, `wait` and `close` run on the transfer thread.
    """

    @property
    def num_ended(self) -> int:
        """The number of owners of mapped memory that have ended."""

    def map(self, exported: messages.Export, plan: Plan) -> MappedPlan:
        """Map a rank's memory for a plan, in 10 ms, or raise TransportError."""

    def unmap(self, mapped: MappedPlan) -> None:
        """Unmap a rank's memory, which no kernel reads."""

    def is_mapped(self, mapped: MappedPlan) -> bool:
        """Whether the memory's owner is alive."""

    def read(self, mapped: MappedPlan, pieces: Sequence[Pieces]) -> Copy:
        """Start to copy remote pieces into local ones; if it raises, nothing is in progress."""

    def poll(self, copy: Copy) -> bool:
        """Whether all bytes have landed. If it raises, the kernel may go on."""

    def wait(self) -> None:
        """Wait for all kernels."""

    def close(self) -> None:
        """Wait for all kernels, and end threads; may be called again."""


class MappedRank(PreparedRank):
    """A remote rank whose memory is mapped. It is unmapped after the last kernel that reads it."""

    def __init__(self, path: "GatherPath", mapped: MappedPlan) -> None:
        self.mapped = mapped
        self.num_reads = 0
        self.is_released = False
        self._path = path

    def release(self) -> None:
        self.is_released = True
        self.unmap_if_unused()

    def unmap_if_unused(self) -> None:
        if self.is_released and not self.num_reads:
            self._path.unmap(self)


class GatherPath(ReadPath):
    """Shared by all agents of a rank."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._mapped: dict[MappedRank, MappedPlan] = {}
        self._num_ended = 0  # owners whose memory `tidy` has unmapped, see `Gather.num_ended`

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> MappedRank | None:
        del share
        if description.export is None:
            return None
        try:
            mapped = self._gather.map(description.export, plan)
        except TransportError as error:
            logger.info("cannot map the GPU memory of %s: %s", description.endpoint, error)
            return None
        rank = MappedRank(self, mapped)
        self._mapped[rank] = mapped
        return rank

    def start(self, prepared: MappedRank, read: Read) -> ReadOp | None:
        """Always gather mapped memory, unless its owner has ended."""
        if prepared not in self._mapped or not self._gather.is_mapped(prepared.mapped):
            return None
        return GatherOp(self._gather, prepared, read)

    def unmap(self, rank: MappedRank) -> None:
        """Unmap a rank once, even if two threads try: `pop` is atomic."""
        mapped = self._mapped.pop(rank, None)
        if mapped is not None:
            self._gather.unmap(mapped)

    def tidy(self) -> None:
        """Unmap the memory of ended processes; until then nothing can allocate it again."""
        num_ended = self._gather.num_ended
        if num_ended == self._num_ended:
            return
        for rank in list(self._mapped):
            if not self._gather.is_mapped(rank.mapped):
                rank.release()
        if all(self._gather.is_mapped(rank.mapped) for rank in list(self._mapped)):
            self._num_ended = num_ended

    def close(self) -> None:
        self._gather.close()


class GatherOp(ReadOp):
    """A kernel in progress. It reads 80 GB within a second, so it reports no progress."""

    path = "gather"
    is_autonomous = True

    def __init__(self, gather: Gather, rank: MappedRank, read: Read) -> None:
        self._gather = gather
        self._rank = rank
        self._copy = gather.read(rank.mapped, read.pieces)
        self.has_ended = False
        rank.num_reads += 1

    def poll(self) -> list[events.ReadEvent]:
        if self._gather.poll(self._copy):
            self.release()
        return []

    def stop(self) -> None:
        """Nothing stops a kernel; it ends within milliseconds."""

    def end_copies(self) -> None:
        self._gather.wait()

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
        """End the thread; may be called again."""
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
