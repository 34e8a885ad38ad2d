"""Copies between a rank's staging memory and its cache: the interface, and copies in host memory.

Prefill packs into its ring, and decode scatters from its own, by any plan of `geometry`. Host
copies run on threads, because numpy releases the GIL while it copies. Rows of a plan that are
equally far apart on both sides form one view of all blocks per side. A copy then takes one numpy
call per pair of views, for any block table. In GPU memory `reading.kernel` copies.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import BlockIds, CacheLayout, Group, Memory, Span
from nixl_kv.geometry.plan import Ints, Pieces, Plan, Share
from nixl_kv.reading.paths import Buffer, ExtraMemory
from nixl_kv.reading.staged.layout import Ring, staged_layout
from nixl_kv.reading.tiles import Job, Tiling

ALIGNMENT: Final = 64  # slots begin at a multiple of this number of bytes

# One thread does not saturate the memory; more than two would take cores from the model.
NUM_THREADS: Final = 2
# Bytes from which waking another thread pays off.
MIN_SHARE: Final = 1 << 20
# Bytes of a piece from which one call per piece is faster than numpy's fancy indexing, which copies
# twice.
LONG: Final = 1 << 14
# Views of a plan. Each costs a copy some microseconds, so with more of them direct reads win.
MAX_VIEWS: Final = 1 << 14

PreparedCopy: TypeAlias = Any  # a plan that one copier has prepared; opaque
Copy: TypeAlias = Any  # a copy in progress, for the copier that started it; opaque
View = npt.NDArray[Any]  # shape (pieces, rows, units)


class Copier(Protocol):
    """Copies within this rank's memory. `start` and `poll` run on the transfer thread.

    A copy ends by itself. Errors are TransportErrors.
    """

    def prepare(self, plan: Plan) -> PreparedCopy:
        """Prepare a plan whose sides are both this rank's own memory; on any thread."""

    def start(self, prepared: PreparedCopy, pieces: Sequence[Pieces]) -> Copy:
        """Start to copy the plan's remote pieces into the local ones.

        If it raises, nothing is in progress.
        """

    def poll(self, copy: Copy) -> bool:
        """Whether the copy is complete. If it raises, the copy no longer writes."""

    def end(self, copy: Copy) -> None:
        """Wait until it no longer writes, complete or not; on any thread."""


@dataclass(frozen=True)
class Staging:
    """A ring of this rank, in memory of the cache's kind. `buffer` keeps it allocated."""

    ring: Ring
    memory: Memory
    device: int
    copier: Copier
    buffer: Buffer

    @property
    def registered(self) -> tuple[ExtraMemory]:
        return (ExtraMemory(self.ring.span, self.memory, self.device),)

    def layout(self, group: Group, share: Share) -> CacheLayout:
        """The layout of the ring when it holds these layers and heads of a group."""
        span = self.ring.span
        return staged_layout(group, share, span, memory=self.memory, device=self.device)


def split(span: Span, count: int, num_slots: int) -> list[Ring]:
    length = span.length // count // num_slots // ALIGNMENT * ALIGNMENT * num_slots
    return [Ring(Span(span.address + n * length, length), num_slots) for n in range(count)]


@dataclass(frozen=True)
class _Rows:
    """Rows at equal distances. `paged` is the number of their `PagedRows` in the plan."""

    paged: int
    views: tuple[View, View]  # local, remote
    piece_bytes: int  # of all rows


class HostCopier:
    """Copies on the threads of an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def prepare(self, plan: Plan) -> list[_Rows]:
        tiling = Tiling(plan, lambda first, _: first)
        groups = [(job, group) for job in tiling.jobs for group in _split(tiling.rows, job)]
        if len(groups) > MAX_VIEWS:
            raise TransportError(f"the plan needs {len(groups)} views; allowed: {MAX_VIEWS}")
        return [_rows_at(job, group) for job, group in groups]

    def start(self, prepared: list[_Rows], pieces: Sequence[Pieces]) -> list[Future[None]]:
        wanted = [rows for rows in prepared if len(pieces[rows.paged].local)]
        num_bytes = sum([rows.piece_bytes * len(pieces[rows.paged].local) for rows in wanted])
        count = max(1, min(NUM_THREADS, num_bytes // MIN_SHARE))
        try:
            return [self._executor.submit(_copy, wanted[n::count], pieces) for n in range(count)]
        except RuntimeError as error:  # the process exits
            raise TransportError(f"starting a copy: {error}") from error

    def poll(self, copy: list[Future[None]]) -> bool:
        if not all(share.done() for share in copy):
            return False
        try:
            for share in copy:
                share.result()
        except Exception as error:
            raise TransportError(f"copying: {type(error).__name__}: {error}") from error
        return True

    def end(self, copy: list[Future[None]]) -> None:
        wait_for([share for share in copy if not share.cancel()])


def _split(addresses: Ints, job: Job) -> list[Ints]:
    """Split a job's rows into as few sets of equal distances as possible: shape (rows, 2) each."""
    rows = addresses[job.first : job.first + job.count]
    steps = np.diff(rows, axis=0)
    changes = (np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 2).tolist()
    found, start = [], 0
    for end in (*changes, len(rows)):
        if end > start + 1 or end == len(rows):  # a lone row joins the next set
            found.append(rows[start:end])
            start = end
    return found


def _rows_at(job: Job, rows: Ints) -> _Rows:
    step = rows[1] - rows[0] if len(rows) > 1 else np.zeros(2, dtype=np.int64)
    local, remote = (
        _view(int(rows[0, side]), (len(rows), int(step[side])), job, side) for side in (0, 1)
    )
    return _Rows(job.paged, (local, remote), len(rows) * job.width * job.unit)


def _view(address: int, rows: tuple[int, int], job: Job, side: int) -> View:
    """A view of all pieces of `rows[0]` rows, which are `rows[1]` bytes apart."""
    unit = min(job.unit, 8)
    count, width = rows[0], job.width * job.unit // unit
    num_pieces = job.num_pieces[side]
    length = (num_pieces - 1) * job.strides[side] + abs(rows[1]) * (count - 1) + width * unit
    first = min(address, address + rows[1] * (count - 1))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(first))
    view: View = np.ndarray(
        (num_pieces, count, width),
        dtype=f"u{unit}",
        buffer=memory.data,
        offset=address - first,
        strides=(job.strides[side], rows[1], unit),
    )
    return view


def _copy(rows: Sequence[_Rows], pieces: Sequence[Pieces]) -> None:
    for each in rows:
        (local, remote), ids = each.views, pieces[each.paged]
        # Slices index consecutive pieces, because numpy then makes no copy of its own.
        mine, theirs = _as_slice(ids.local), _as_slice(ids.remote)
        if isinstance(theirs, slice) or each.piece_bytes < LONG:
            local[mine] = remote[theirs]
            continue
        for to, where in zip(ids.local.tolist(), ids.remote.tolist(), strict=True):
            local[to] = remote[where]


def _as_slice(ids: BlockIds) -> slice | BlockIds:
    first = int(ids[0])
    if len(ids) == 1 or (ids[1:] - ids[:-1] == 1).all():
        return slice(first, first + len(ids))
    return ids
