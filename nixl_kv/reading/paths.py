"""The interface of every way to read (`ReadPath`), and direct reads, which can read every rank.

A path prepares a remote rank once and starts one operation (`ReadOp`) per load. An agent asks its
paths in this order, and the first one that accepts a read performs it:

    gather   a kernel on decode's GPU reads memory of the remote rank that is mapped here
    staged   prefill packs short runs, NIXL reads them in one piece, decode scatters them
    direct   NIXL reads each contiguous run: one descriptor per run

So the rule is: gather if the memory is mapped, direct if the runs are long or few, staged
otherwise. The setting `path` leaves out the paths that it excludes.
"""

import abc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.feature import Feature
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.geometry.plan import IndexBuffer, Pieces, Plan, Share
from nixl_kv.ids import Endpoint
from nixl_kv.protocol import events, messages
from nixl_kv.transport.base import ListHandle, PeerName, ReadHandle, Transport

STOPPED: Final = "no longer wanted"

PAGE: Final = 4096

# Descriptors that one turn of the transfer thread posts, give or take one slice. NIXL takes 2 us
# for each on a host and 3.3 us on an H200: 54 ms, of a lease of 5 s.
RUNS_PER_TURN: Final = 1 << 14

# Runs per slice of a direct read. Posting 2 million runs at once takes 8 s, and a lease is 5 s.
SLICE_RUNS: Final = 1 << 14
# Bytes per slice. Over shared memory NIXL copies them while it posts: 8 ms for 64 MiB. NVLink moves
# 2 GiB in 6 ms. In shorter slices, reads from two ranks at once took 5 to 13 % longer on H100s. A
# link of 10 Gbit/s moves four slices in 7 s, well within `request_timeout_s`.
SLICE_BYTES: Final[dict[Memory, int]] = {"VRAM": 2 << 30, "DRAM": 64 << 20}
# The same over TCP, where a run may take 0.5 ms, because a read must show progress within
# `request_timeout_s`. Four slices are more bytes than a link of 10 Gbit/s and 50 ms has in flight.
TCP_SLICE_RUNS: Final = 1 << 11
TCP_SLICE_BYTES: Final = 16 << 20
# Slices in flight per read, so that the link is never idle between two turns.
MAX_SLICES: Final = 4


@dataclass
class Budget:
    """The descriptors that an agent may still post in this turn of the transfer thread."""

    runs: int = RUNS_PER_TURN


@dataclass(frozen=True)
class Source:
    """A remote rank that one agent can read. The lists are of the rank's whole plan."""

    transport: Transport
    name: PeerName
    description: messages.RankDescription
    plan: Plan
    local: ListHandle
    remote: ListHandle
    is_tcp: bool  # NIXL reads this rank over TCP, where the transport paces reads
    budget: Budget = field(default_factory=Budget)


class Read(NamedTuple):
    """One load's read of one remote rank."""

    action: events.StartRead
    source: Source
    pieces: Sequence[Pieces]
    num_bytes: int
    num_runs: int

    def part(self, plan: Plan, pieces: Sequence[Pieces]) -> "Read":
        num_bytes, num_runs = plan.num_bytes(pieces), plan.num_runs(pieces)
        return self._replace(pieces=pieces, num_bytes=num_bytes, num_runs=num_runs)


class ReadOp(abc.ABC):
    """A read in progress. All methods run on the transfer thread, except `end_copies`.

    Nothing stops bytes in flight, so an operation ends only when all of them have landed or
    failed. After that `poll` is not called again.
    """

    path: str = "direct"
    num_direct_bytes: int = 0  # of these, bytes that NIXL read run by run after all
    failure: str | None = None  # why the operation ends without all of its bytes
    is_connection_lost: bool = False  # reads of this rank fail until it is added again
    is_autonomous: bool = False  # it continues without calls, so a late poll costs little
    has_ended: bool = False  # nothing writes for it any longer

    @abc.abstractmethod
    def poll(self) -> list[events.ReadEvent]:
        """Continue; return progress, and the chunks that prefill shall pack, if the path has any.

        A read without progress for `request_timeout_s` fails. So an operation that may take
        longer returns a `ReadMoved` when some of its bytes have landed.

        Raises:
            TransportError: if the state of a read is unknown. It may go on for ever; `poll` must
                not be called again.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Start nothing more. The operation ends early, with a `failure` if bytes are missing."""

    def on_message(self, message: Any) -> None:
        """Handle what the path's `LoadPart` has for this operation."""
        del message

    def end_copies(self) -> None:  # noqa: B027 - most have none
        """Wait until no kernel or thread of this process writes for it; on any thread."""

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """Give back memory and slots. Nothing writes for it, however it ended."""


class PreparedRank:
    """A remote rank that one path has prepared for one agent."""

    @property
    def is_outdated(self) -> bool:
        """Whether it should be prepared anew, because a faster path may read it now."""
        return False

    def release(self) -> None:
        """Free its resources once no operation uses it: the agent no longer reads the rank.

        On the transfer thread, or on any thread after the agent has ended.
        """


class ReadPath(abc.ABC):
    """One way to read, for all remote ranks and all agents of this rank."""

    @abc.abstractmethod
    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> PreparedRank | None:
        """Prepare to read a remote rank; None if this path cannot read it. Background thread."""

    @abc.abstractmethod
    def start(self, prepared: Any, read: Read) -> ReadOp | None:
        """Start a read; None if a later path shall read it. Transfer thread.

        Raises:
            TransportError: if the read cannot be posted; then nothing is in progress.
            ValueError: for block tables that this cache cannot have.
        """

    def wants_token(self, description: messages.RankDescription) -> bool:  # noqa: ARG002
        """Whether `prepare` needs a token of the remote rank; see `messages.Share`."""
        return False

    @property
    def unmapped(self) -> Sequence[tuple[Endpoint, str]]:
        """The ranks of this host that this path could read but does not, and why."""
        return ()

    def tidy(self) -> None:  # noqa: B027 - most have none
        """Free unused memory. Called in each turn."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Wait for copies in progress and end threads. May be called again."""


class DirectPath(ReadPath):
    """The last path that an agent asks: it can read every rank.

    A read is posted in slices of limited runs and bytes, a few at a time. So one turn of the
    transfer thread posts a bounded number of descriptors, and each finished slice is progress. A
    cancelled read ends after the slices in flight.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffer = IndexBuffer()

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> PreparedRank:
        del description, share, plan
        return PreparedRank()

    def start(self, prepared: PreparedRank, read: Read) -> ReadOp:
        del prepared
        max_runs, max_bytes = _slice_limits(read.source, self._memory)
        is_one_slice = read.num_runs <= max_runs and read.num_bytes <= max_bytes
        is_posted_now = read.source.budget.runs > 0
        # Only a read whose indices are all posted before the next use may share the buffer.
        op = DirectOp(read, self._memory, self._buffer if is_one_slice and is_posted_now else None)
        if is_posted_now:
            op.post_next()
        return op


class DirectOp(ReadOp):
    """See `ReadOp`. A staged read uses it for chunks that prefill cannot pack.

    `plan` is the part of the rank's plan that numbers the pieces, by default all of it. `poll`
    posts the slices.
    """

    def __init__(
        self,
        read: Read,
        memory: Memory,
        buffer: IndexBuffer | None = None,
        *,
        plan: Plan | None = None,
    ) -> None:
        self._source = read.source
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
    def has_ended(self) -> bool:  # type: ignore[override]
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
        indices = self._local[start:end], self._remote[start:end]
        handle = self._source.transport.read(self._source.local, self._source.remote, indices)
        self._posted.append(handle)
        self._unposted.popleft()
        self._source.budget.runs -= end - start

    def _post(self) -> None:
        while self._unposted and len(self._posted) < MAX_SLICES and self._source.budget.runs > 0:
            self.post_next()

    def poll(self) -> list[events.ReadEvent]:
        has_progressed = False
        for handle in list(self._posted):
            try:
                has_landed = self._source.transport.poll(handle)
            except PeerLost as error:
                has_landed = True
                self._fail(error)
            if has_landed:
                self._posted.remove(handle)
                has_progressed = True
        if not self._is_stopped:
            try:
                self._post()
            except TransportError as error:
                self._fail(error)
        if has_progressed and not self.has_ended:
            return [events.ReadMoved(self._action.load.request, self._action.rank)]
        return []

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            are_cut = [self._source.transport.stop(handle) for handle in self._posted]
            if self._unposted or any(are_cut):
                self.failure = self.failure or STOPPED

    def _fail(self, error: TransportError) -> None:
        self.failure = self.failure or str(error)
        self.is_connection_lost |= isinstance(error, PeerLost)
        self._is_stopped = True


def _slice_limits(source: Source, memory: Memory) -> tuple[int, int]:
    """The most runs and bytes of a slice."""
    if source.is_tcp:
        return TCP_SLICE_RUNS, TCP_SLICE_BYTES
    return SLICE_RUNS, SLICE_BYTES[memory]


# --- paths as features of one rank


class ExtraMemory(NamedTuple):
    """Memory besides the cache that a transport registers."""

    span: Span
    memory: Memory
    device: int


class Buffer(NamedTuple):
    """Memory that begins at a page; allocated as long as `owner` lives."""

    span: Span
    owner: object


def allocate(num_bytes: int, memory: Memory = "DRAM", device: int = 0) -> Buffer:
    """Allocate memory. Host memory is zeroed, and Linux adds its pages when they are used.

    Raises:
        ImportError, TransportError: if the GPU does not exist or lacks memory.
    """
    owner: object
    if memory == "DRAM":
        owner = zeros = np.zeros(num_bytes + PAGE, dtype=np.uint8)
        address = zeros.ctypes.data
    else:
        from nixl_kv import gpu  # noqa: PLC0415 - only GPU machines have Triton

        address, owner = gpu.allocate(num_bytes + PAGE, device)
    return Buffer(Span(-(-address // PAGE) * PAGE, num_bytes), owner)


@dataclass(frozen=True, kw_only=True)
class PathFeature(Feature):
    """An optional path on one rank, with the objects of both roles."""

    path: ReadPath | None = None
    description: messages.PathFields = field(default_factory=messages.PathFields)
    read_into: tuple[ExtraMemory, ...] = ()  # each reading agent of this rank registers it
    served: tuple[ExtraMemory, ...] = ()  # the serving agent of this rank registers it
