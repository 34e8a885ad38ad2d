"""Digests of this rank's cache: for readers who verify what they read, and of what was read here.

They are made one after the other, each in short steps, so that the transfer thread stays free for
messages and reads. A digest that nobody waits for any more is dropped, so that under overload those
behind it are still in time; what it has read until it is dropped does no harm.

What was read here is digested while it is copied, where a kernel of ours copies it, else as soon as
it has landed; and kept until there is something to compare it with.
"""

import ctypes
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from nixl_kv.errors import DigestError
from nixl_kv.geometry import digest
from nixl_kv.geometry.digest import Bytes, Digest, Key
from nixl_kv.geometry.layout import BlockTable, CacheLayout, Table
from nixl_kv.geometry.slices import LocalSlice, SliceFinder, count_bytes
from nixl_kv.ids import Claim
from nixl_kv.protocol import events

Steps: TypeAlias = Generator[None, None, Digest]
DigestEvent: TypeAlias = events.DigestMade | events.DigestCompared


class Digester(ABC):
    """Digests memory where the cache is."""

    pause_s: float = 0.0
    """How long to wait between two steps, in seconds; 0 where each step is work."""

    @abstractmethod
    def __call__(self, key: Key, local_slices: Sequence[LocalSlice]) -> Steps:
        """The digest, at the end of the steps.

        Raises:
            DigestError: if that cannot be digested; also in a step.
        """

    def close(self) -> None:  # noqa: B027 - most read in their steps only
        """Return when the cache is not read any more."""


class HostDigester(Digester):
    """Digests memory that this process can read itself."""

    def __call__(self, key: Key, local_slices: Sequence[LocalSlice]) -> Steps:
        """See `geometry.digest.digest_steps`."""
        return digest.digest_steps(key, local_slices, _memory_view)


class NoDigester(Digester):
    """Digests nothing: here it cannot be done."""

    def __init__(self, reason: str) -> None:
        """`reason` is the answer to everybody who wants a digest."""
        self._reason = reason

    def __call__(self, key: Key, local_slices: Sequence[LocalSlice]) -> Steps:
        """Refuse.

        Raises:
            DigestError: always.
        """
        del key, local_slices
        raise DigestError(self._reason)


@dataclass(frozen=True)
class _Made:
    slices: Sequence[LocalSlice]
    digest: Digest


@dataclass
class _Job:
    actions: list[events.DigestAction]  # all want the same digest
    slices: Sequence[LocalSlice]
    steps: Steps
    started_at: float | None = None


class DigestQueue:
    """See the module's head. Runs on the transfer thread alone."""

    def __init__(
        self,
        layout: CacheLayout,
        digester: Digester,
        counts: defaultdict[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with none to make. What is made is added to `counts`."""
        self._layout = layout
        self._finder = SliceFinder(layout)
        self._digester = digester
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._landed: dict[events.DigestLanded, _Made] = {}
        self._counts = counts

    def __repr__(self) -> str:
        return f"<DigestQueue: {len(self._jobs)} to make>"

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def wait_s(self) -> float | None:
        """How long the thread may wait before the next step, in seconds; None for ever."""
        return self._digester.pause_s if self._jobs else None

    def add(self, action: events.DigestAction) -> DigestEvent | None:
        """Queue a digest; an event if it cannot be made.

        One that is asked for again while it is made is made once, for each claim and rank.
        """
        if isinstance(action, events.CompareDigest):
            made = self._landed.pop(_landed(action), None)
            if made is not None:
                return _finished(action, made)
        if action in self._landed:
            return None
        pending = [(job, one) for job in self._jobs for one in job.actions]
        if any(_is_repeated(action, one) for _, one in pending):
            return None
        for job, one in pending:
            if _subject(one) == _subject(action):
                job.actions.append(action)
                return None
        try:
            local_slices = self.find_slices(action)
            steps = self._digester(Key(_claim(action)), local_slices)
        except (DigestError, ValueError) as error:
            if isinstance(action, events.DigestLanded):
                return None  # the comparison tries again
            return _refused(action, str(error))
        self._jobs.append(_Job([action], local_slices, steps))
        return None

    def find_slices(self, action: events.DigestAction) -> list[LocalSlice]:
        """What is to be digested.

        Raises:
            ValueError: if it is not in this rank's cache.
        """
        if isinstance(action, events.MakeDigest):
            request = action.digest_request
            end, wanted, tables = request.end, request.slices, action.tables
        else:
            end, wanted, tables = action.load.end, action.slices, action.load.tables
        return self._finder.find(wanted, block_tables(self._layout, tables), end=end)

    def keep(
        self, landed: events.DigestLanded, local_slices: Sequence[LocalSlice], made: Digest
    ) -> None:
        """It has landed, and was digested by what has copied it."""
        self._landed[landed] = _Made(local_slices, made)
        self._count(local_slices, 0.0)

    def poll(self, is_wanted: Callable[[events.DigestAction], bool]) -> list[DigestEvent]:
        """Do one step of the next digest that is wanted; what has ended."""
        for landed in [landed for landed in self._landed if not is_wanted(landed)]:
            del self._landed[landed]
        if not self._jobs:
            return []
        job = self._jobs[0]
        if not any(map(is_wanted, job.actions)):
            return self._fail_job("nobody waits for it any more")
        job.started_at = job.started_at or self._clock()
        try:
            next(job.steps)
        except StopIteration as end:
            self._jobs.popleft()
            self._count(job.slices, self._clock() - job.started_at)
            return self._finish(job, _Made(job.slices, end.value))
        except (DigestError, MemoryError) as error:
            return self._fail_job(str(error) or type(error).__name__)
        return []

    def clear(self) -> None:
        """Forget all of them."""
        self._jobs.clear()
        self._landed.clear()

    def close(self) -> None:
        """Return when the cache is not read any more."""
        self._digester.close()

    def _finish(self, job: _Job, made: _Made) -> list[DigestEvent]:
        ended = [
            _finished(action, made)
            for action in job.actions
            if not isinstance(action, events.DigestLanded)
        ]
        if not ended:  # what landed is compared later
            self._landed |= {
                one: made for one in job.actions if isinstance(one, events.DigestLanded)
            }
        return ended

    def _fail_job(self, reason: str) -> list[DigestEvent]:
        """Of what has landed, a comparison tries again."""
        job = self._jobs.popleft()
        return [
            _refused(action, reason)
            for action in job.actions
            if not isinstance(action, events.DigestLanded)
        ]

    def _count(self, local_slices: Sequence[LocalSlice], seconds: float) -> None:
        self._counts["digests"] += 1
        self._counts["digest_bytes"] += count_bytes(local_slices)
        self._counts["digest_seconds"] += seconds


def block_tables(layout: CacheLayout, tables: Sequence[Table]) -> list[BlockTable]:
    """The block table of each group of this cache."""
    pairs = zip(tables, layout.groups, strict=True)
    return [BlockTable.of(table, group) for table, group in pairs]


def _landed(action: events.CompareDigest) -> events.DigestLanded:
    """The same, before there was anything to compare it with."""
    claim = action.digest_reply.claim
    return events.DigestLanded(action.rank, action.slices, action.load, claim)


def _is_repeated(action: events.DigestAction, earlier: events.DigestAction) -> bool:
    """Whether the same is asked for by the same one."""
    return type(action) is type(earlier) and _requester(action) == _requester(earlier)


def _requester(action: events.DigestAction) -> tuple[object, ...]:
    if isinstance(action, events.MakeDigest):
        return action.digest_request.reader, action.digest_request.claim
    return action.load.request, action.rank, _claim(action)


def _subject(action: events.DigestAction) -> tuple[object, ...]:
    """Several readers of the same heads get the same digest."""
    if not isinstance(action, events.MakeDigest):
        return _requester(action)
    request = action.digest_request
    return request.claim, request.end, request.slices, action.tables


def _claim(action: events.DigestAction) -> Claim:
    """It is random, and both sides know it: the digest's secret."""
    match action:
        case events.MakeDigest():
            return action.digest_request.claim
        case events.CompareDigest():
            return action.digest_reply.claim
        case events.DigestLanded():
            return action.claim


def _finished(action: events.MakeDigest | events.CompareDigest, made: _Made) -> DigestEvent:
    if isinstance(action, events.MakeDigest):
        rows, columns = _to_bytes(made.digest.rows), _to_bytes(made.digest.columns)
        return events.DigestMade(action.route, action.digest_request, rows, columns)
    reply = action.digest_reply
    remote = Digest(_from_bytes(reply.rows), _from_bytes(reply.columns))
    difference = digest.describe_difference(made.digest, remote, made.slices)
    return events.DigestCompared(
        action.load.request, action.rank, reply.claim, difference=difference
    )


def _refused(action: events.MakeDigest | events.CompareDigest, reason: str) -> DigestEvent:
    if isinstance(action, events.MakeDigest):
        return events.DigestMade(action.route, action.digest_request, refusal=reason)
    claim = action.digest_reply.claim
    return events.DigestCompared(action.load.request, action.rank, claim, refusal=reason)


def _to_bytes(sums: digest.U64) -> bytes:
    return sums.astype("<u8", copy=False).tobytes()


def _from_bytes(payload: bytes) -> digest.U64:
    """A payload that is no whole number of sums is cut, and so differs."""
    return np.frombuffer(payload[: len(payload) // 8 * 8], dtype="<u8").astype(np.uint64)


def _memory_view(address: int, length: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
