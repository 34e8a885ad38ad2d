"""Gather: a kernel on decode's GPU reads a prefill rank's memory, which is mapped into decode.

This needs no descriptors, so it is faster than NIXL for any block table. It works between GPUs of
one host whose processes see each other, or share a directory. The kernel ends by itself, even if
prefill dies. The fence is the same as for every path: the agent reads the fence slot when the
kernel has ended.
"""

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.geometry.plan import Plan, Share
from nixl_kv.ids import Endpoint
from nixl_kv.protocol import events, messages
from nixl_kv.reading.gather.share import SharingError, boot_id
from nixl_kv.reading.paths import PreparedRank, Read, ReadOp, ReadPath

if TYPE_CHECKING:  # they need Triton and CUDA's bindings, which only GPU machines have
    from nixl_kv.reading.gather.memory import Mapping
    from nixl_kv.reading.kernel import KernelPlan, KernelStream

logger = get_logger(__name__)


# Two H200, NIXL 1.5.1: reads of memory without CUDA IPC handles, and of memory with them.
SLOW: Final = (
    "NIXL reads memory without CUDA IPC handles (sleep mode, --enable-cumem-allocator, expandable "
    "segments, share_dir) at 0.5 instead of 154 to 392 GB/s"
)
ADVICE: Final = (
    "let both engines map each other's memory: set share_dir to a directory that both containers "
    "mount (docs/deploy/kubernetes.md, NVLink between containers)"
)
# Decode tries again to map memory that its owner did not hand out in time. The next read waits for
# that, for up to `share.PROVING_S` if the owner still hangs.
AGAIN_S: Final = 60.0


class UnmappedRank(PreparedRank):
    """A rank of this host that another path reads, because its memory is not mapped."""

    def __init__(
        self, path: "UnmappedPath", endpoint: Endpoint, detail: str, *, can_change: bool
    ) -> None:
        self.endpoint = endpoint
        self.detail = detail
        self._path = path
        self._again_at = time.monotonic() + AGAIN_S if can_change else math.inf

    @property
    def is_outdated(self) -> bool:
        return time.monotonic() >= self._again_at

    def release(self) -> None:
        self._path.forget(self)


class UnmappedPath(ReadPath):
    """Reads nothing, and tells which ranks of this host are slow because of that."""

    def __init__(self, why: str, advice: str = "") -> None:
        """Say `why` this rank maps no memory, and what to do about it."""
        self._why = why
        self._advice = advice
        self._unmapped: dict[UnmappedRank, None] = {}

    @property
    def unmapped(self) -> Sequence[tuple[Endpoint, str]]:
        return [(rank.endpoint, rank.detail) for rank in list(self._unmapped)]

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> PreparedRank | None:
        del share
        export = description.export
        try:
            if export is None or export.host.partition(" ")[0] != boot_id():
                return None
        except OSError:  # without `/proc` this rank maps nothing
            return None
        is_slow = not all(one.handle for one in export.allocations)
        if self._why and not is_slow:  # NIXL reads it fast
            return None
        try:
            return self.map(export, plan)
        except TransportError as error:
            can_change = isinstance(error, SharingError)
            parts = f"its GPU memory is not mapped: {error}", SLOW if is_slow else "", self._advice
        detail = "; ".join(part for part in parts if part)
        if (description.endpoint, detail) not in self.unmapped:
            logger.warning("the rank at %s is on this host, but %s", description.endpoint, detail)
        rank = UnmappedRank(self, description.endpoint, detail, can_change=can_change)
        self._unmapped[rank] = None
        return rank

    def map(self, export: messages.Export, plan: Plan) -> PreparedRank:
        """Map a rank's memory for a plan.

        Raises:
            TransportError: if that fails, or the memory is not the exported one.
        """
        del export, plan
        raise TransportError(self._why)

    def start(self, prepared: PreparedRank, read: Read) -> ReadOp | None:
        del prepared, read
        return None

    def forget(self, rank: UnmappedRank) -> None:
        """No agent reads the rank any longer; on any thread."""
        self._unmapped.pop(rank, None)


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


class GatherPath(UnmappedPath):
    """Shared by all agents of a rank. Kernels run one after the other, on `stream`.

    A mapping outlives its owner: until it is closed, no other process can allocate that GPU memory.
    So the transfer thread watches the owners, with `watch`.
    """

    def __init__(
        self,
        stream: "KernelStream",
        map_memory: Callable[[messages.Export], "Mapping"],
        watch: Callable[[int], None],
        share_dir: str | None = None,
    ) -> None:
        super().__init__("", ADVICE)
        self.stream = stream
        self._map_memory = map_memory
        self._share_dir = share_dir
        self._mapped: dict[MappedRank, bool] = {}
        self._owners = select.epoll()
        self._has_ended = False  # an owner has, and `tidy` has not unmapped all of its memory
        watch(self._owners.fileno())

    def wants_token(self, description: messages.RankDescription) -> bool:
        export = description.export
        if self._share_dir is None or export is None or export.share is None:
            return False
        # `Path.exists` raises some errors, such as that the directory cannot be entered.
        return os.path.exists(Path(self._share_dir, export.share.socket))  # noqa: PTH110

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
                self._owners.register(mapping.owner, select.EPOLLIN | select.EPOLLONESHOT)
            except (OSError, ValueError) as error:  # it is closed
                raise TransportError(f"watching process {export.pid}: {error}") from error
            undo.pop_all()
        rank = MappedRank(self, mapping, prepared)
        self._mapped[rank] = True
        # If the owner has ended before that, `tidy` has heard of it in vain, so repeat it.
        with contextlib.suppress(OSError, ValueError):  # it is unmapped, or the path closed
            self._owners.modify(mapping.owner, select.EPOLLIN | select.EPOLLONESHOT)
        return rank

    def start(self, prepared: PreparedRank, read: Read) -> ReadOp | None:
        """Always gather mapped memory, unless its owner has ended."""
        if not isinstance(prepared, MappedRank) or prepared not in self._mapped:
            return None
        if prepared.mapping.has_owner_ended:
            return None
        return GatherOp(self.stream, prepared, read)

    def unmap(self, rank: MappedRank) -> None:
        """Unmap a rank once, even if two threads try: `pop` is atomic."""
        if self._mapped.pop(rank, False):
            rank.mapping.close()  # closes the owner's descriptor, which ends the watch

    def tidy(self) -> None:
        """Unmap the memory of owners that have ended or take it back."""
        if self._owners.poll(0):
            self._has_ended = True
        if not self._has_ended:
            return
        for rank in list(self._mapped):
            if rank.mapping.has_owner_ended:
                rank.release()
        self._has_ended = any(rank.mapping.has_owner_ended for rank in list(self._mapped))

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
