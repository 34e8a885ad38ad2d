"""Gather: a kernel on decode's GPU reads a prefill rank's memory, which is mapped into decode.

This needs no descriptors, so it is faster than NIXL for any block table. It works between GPUs of
one host whose processes see each other. The kernel ends by itself, even if prefill dies. The fence
is the same as for every path: the agent reads the fence slot when the kernel has ended.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.geometry.plan import Pieces, Plan, Share
from nixl_kv.protocol import events, messages
from nixl_kv.reading.paths.base import Read, ReadOp

logger = get_logger(__name__)

MappedPlan: TypeAlias = Any
"""A plan whose remote rows are mapped; opaque."""

Copy: TypeAlias = Any
"""A kernel in progress; opaque."""


class Gather(Protocol):
    """Maps memory and copies from it: `gather.gpu` with CUDA, and tests within one process.

    All methods except `map`, `unmap`, `wait` and `close` run on the transfer thread.
    """

    @property
    def num_ended(self) -> int:
        """The number of owners of mapped memory that have ended."""

    def map(self, exported: messages.Export, plan: Plan) -> MappedPlan:
        """Map a rank's memory for a plan; 10 ms. On any thread.

        Raises:
            TransportError: if the memory cannot be mapped here; says why.
        """

    def unmap(self, mapped: MappedPlan) -> None:
        """Unmap a rank's memory, which no kernel reads; on any thread."""

    def is_mapped(self, mapped: MappedPlan) -> bool:
        """Whether the memory's owner is alive."""

    def read(self, mapped: MappedPlan, pieces: Sequence[Pieces]) -> Copy:
        """Start to copy remote pieces into local ones.

        Raises:
            TransportError: if the kernel cannot be started; then nothing is in progress.
        """

    def poll(self, copy: Copy) -> bool:
        """Whether all bytes have landed.

        Raises:
            TransportError: if the state is unknown; the kernel may go on.
        """

    def wait(self) -> None:
        """Wait for all kernels; on any thread."""

    def close(self) -> None:
        """Wait for all kernels, and end threads; may be called again."""


class MappedRank:
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


class GatherPath:
    """See `ReadPath`; shared by all agents of a rank."""

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
        self._has_ended = False
        rank.num_reads += 1

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def poll(self) -> list[events.ReadEvent]:
        if not self._has_ended and self._gather.poll(self._copy):
            self.release()
        return []

    def stop(self) -> None:
        """Nothing stops a kernel; it ends within milliseconds."""

    def end_copies(self) -> None:
        self._gather.wait()

    def release(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._rank.num_reads -= 1
            self._rank.unmap_if_unused()
