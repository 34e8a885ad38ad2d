"""Direct reads: NIXL reads each contiguous run of a load into its place.

A read is posted in slices of limited runs and bytes, a few at a time. So one turn of the transfer
thread posts a bounded number of descriptors, and each finished slice is progress. A cancelled read
ends after the slices in flight.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Memory
from nixl_kv.geometry.plan import IndexBuffer, Pieces, Plan, Share
from nixl_kv.protocol import events, messages
from nixl_kv.reading.paths.base import STOPPED, Prepared, Read, ReadOp, Source
from nixl_kv.transport.base import Indices, ReadHandle

SLICE_RUNS: Final = 1 << 14
"""Runs per slice. Posting 2 million runs at once takes 8 s, and a lease is 5 s."""
SLICE_BYTES: Final[dict[Memory, int]] = {"VRAM": 256 << 20, "DRAM": 64 << 20}
"""Bytes per slice. Over shared memory NIXL copies them while it posts: 8 ms for 64 MiB. NVLink
moves 256 MiB in 1 ms, which is several times the pause between two turns."""
TCP_SLICE_RUNS: Final = 1 << 11
TCP_SLICE_BYTES: Final = 16 << 20
"""The same over TCP, where a run may take 0.5 ms, because a read must show progress within
`request_timeout_s`. Four slices are more bytes than a link of 10 Gbit/s and 50 ms has in flight."""
MAX_SLICES: Final = 4
"""Slices in flight per read, so that the link is never idle between two turns."""


class _Rank:
    """A rank without anything to free: the lists of its plan belong to the agent."""

    def release(self) -> None:
        """Nothing to free."""


class DirectPath:
    """The last path that an agent asks: it can read every rank."""

    def __init__(self, memory: Memory) -> None:
        """`memory` says where this rank's cache is."""
        self._memory = memory
        self._buffer = IndexBuffer()

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> Prepared | None:
        del description, share, plan
        return _Rank()

    def start(self, prepared: Prepared, read: Read) -> ReadOp | None:
        del prepared
        max_runs, max_bytes = _slice_limits(read.source, self._memory)
        is_one_slice = read.num_runs <= max_runs and read.num_bytes <= max_bytes
        is_posted_now = read.source.budget.runs > 0
        op = DirectOp(read, self._memory, self._buffer if is_one_slice and is_posted_now else None)
        if is_posted_now:
            op.post_next()
        return op

    def tidy(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to wait for."""


class DirectOp(ReadOp):
    """See `ReadOp`. A staged read uses it for chunks that prefill cannot pack."""

    def __init__(
        self,
        read: Read,
        memory: Memory,
        buffer: IndexBuffer | None = None,
        *,
        plan: Plan | None = None,
    ) -> None:
        """Cut a read into slices; `poll` posts them.

        Args:
            read: the read, or a part of it.
            memory: where this rank's cache is.
            buffer: for the indices of a read that is a single slice and is posted before the next
                use of the buffer.
            plan: the part of the rank's plan that numbers the pieces; by default all of it.
        """
        self._source: Source = read.source
        self._action = read.action
        self.num_bytes = read.num_bytes
        self._local, self._remote = (plan or read.source.plan).indices(read.pieces, buffer)
        count = len(self._local)
        max_runs, max_bytes = _slice_limits(read.source, memory)
        per_slice = max(1, min(max_runs, count * max_bytes // max(1, read.num_bytes)))
        starts = range(0, count, per_slice)
        self._unposted = deque((start, min(start + per_slice, count)) for start in starts)
        self._posted: list[ReadHandle] = []
        self._is_stopped = False

    @property
    def has_ended(self) -> bool:
        return not self._posted and (self._is_stopped or not self._unposted)

    @property
    def is_autonomous(self) -> bool:  # type: ignore[override]
        """Paced reads need calls to continue, and so do unposted slices."""
        return not self._unposted and not self._source.is_tcp

    def post_next(self) -> None:
        """Post one slice.

        Only one: if a later one raised here, the caller would not know of those in flight.

        Raises:
            TransportError: if NIXL refuses it; then nothing is in flight.
        """
        start, end = self._unposted[0]
        indices: tuple[Indices, Indices] = self._local[start:end], self._remote[start:end]
        handle = self._source.transport.read(self._source.local, self._source.remote, indices)
        self._posted.append(handle)
        self._unposted.popleft()
        self._source.budget.runs -= end - start

    def _post(self) -> None:
        """Post further slices within the turn's budget.

        Raises:
            TransportError: if one cannot be posted; nothing of that one is in flight.
        """
        while self._unposted and len(self._posted) < MAX_SLICES and self._source.budget.runs > 0:
            self.post_next()

    def poll(self) -> list[events.ReadEvent]:
        has_progressed = self._poll_slices()
        if not self._is_stopped:
            try:
                self._post()
            except TransportError as error:
                self._fail(error)
        if has_progressed and not self.has_ended:
            return [events.ChunksWanted(self._action.load.request, self._action.rank, (), ())]
        return []

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            transport = self._source.transport
            are_cut = [transport.stop(handle) for handle in self._posted]
            if self._unposted or any(are_cut):
                self.failure = self.failure or STOPPED

    def _poll_slices(self) -> bool:
        """Whether a slice has ended since the last call."""
        transport, before = self._source.transport, len(self._posted)
        for handle in list(self._posted):
            try:
                has_ended = transport.poll(handle)
            except PeerLost as error:
                self._posted.remove(handle)
                self._fail(error)
                continue
            if has_ended:
                self._posted.remove(handle)
        return len(self._posted) < before

    def _fail(self, error: TransportError) -> None:
        self.failure = self.failure or str(error)
        self.is_connection_lost |= isinstance(error, PeerLost)
        self._is_stopped = True


def _slice_limits(source: Source, memory: Memory) -> tuple[int, int]:
    """The most runs and bytes of a slice."""
    if source.is_tcp:
        return TCP_SLICE_RUNS, TCP_SLICE_BYTES
    return SLICE_RUNS, SLICE_BYTES[memory]


def part_of(read: Read, plan: Plan, pieces: Sequence[Pieces]) -> Read:
    """Cut out the part of a read that consists of these pieces of a plan."""
    return read._replace(
        pieces=pieces, num_bytes=plan.num_bytes(pieces), num_runs=plan.num_runs(pieces)
    )
