"""Computes and compares the digests of one rank, one after the other, on its transfer thread.

Prefill digests the slices that its readers ask for. Decode digests the bytes of a load as soon as
they have landed, and keeps the digest until prefill's has arrived and the fence was valid. Each
digest takes short steps, so that messages and reads go on between them. The queue drops a digest
that no reader or load waits for, so that later digests are still in time under overload.

The engine calls `open_digests` and nothing else of this folder.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from nixl_kv.errors import ConfigError, DigestError, get_logger
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.verify.digest import U64, Digest, Digester, Steps, describe_difference
from nixl_kv.verify.slices import LocalSlice, SliceFinder, SliceNamer, block_tables, count_bytes

logger = get_logger(__name__)

EMPTY: Final = Digest(np.empty(0, np.uint64), np.empty(0, np.uint64))


class NoDigester(Digester):
    """Refuses every digest."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        del secret, local_slices
        raise DigestError(self._reason)


_Requester: TypeAlias = tuple[object, ...]


@dataclass(eq=False)
class _Job:
    """A digest under way, or of a load that cannot compare it yet."""

    actions: dict[_Requester, events.DigestAction]  # that wait for the digest
    slices: Sequence[LocalSlice]
    steps: Steps
    started_at: float | None = None
    digest: Digest = EMPTY


class DigestQueue:
    """The digests of a rank, in the order of the requests."""

    def __init__(
        self,
        layout: CacheLayout,
        digester: Digester,
        counts: defaultdict[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Counts digests, their bytes and their seconds in `counts`."""
        self.name_slices = SliceNamer(layout)
        self._layout = layout
        self._finder = SliceFinder(layout)
        self._digester = digester
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._landed: dict[_Requester, _Job] = {}
        self._counts = counts

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def wait_s(self) -> float | None:
        """How long the thread may wait before the next step; None without jobs."""
        return self._digester.pause_s if self._jobs else None

    def add(self, action: events.DigestAction) -> events.DigestEvent | None:
        """Queue a digest or a comparison. Returns an event if it has ended at once."""
        # A reader has one digest per claim at a time: asking again must not keep this rank busy.
        requester = _requester(action)
        if requester in self._landed:
            if _awaits_reply(action):
                return None
            return _finished(action, self._landed.pop(requester))
        for job in self._jobs:
            if requester in job.actions:
                if _awaits_reply(job.actions[requester]):
                    job.actions[requester] = action
                return None
        # The readers of the same heads share a digest.
        secret, end, wanted, tables = subject = _subject(action)
        for job in self._jobs:
            if any(_subject(other) == subject for other in job.actions.values()):
                job.actions[requester] = action
                return None
        try:
            found = block_tables(self._layout, tables)
            local_slices = self._finder.find(wanted, found, end=end)
            steps = self._digester(secret, local_slices)
        except (DigestError, ValueError) as error:
            return _refused(action, str(error))
        self._jobs.append(_Job({requester: action}, local_slices, steps))
        return None

    def poll(self, is_wanted: Callable[[events.DigestAction], bool]) -> list[events.DigestEvent]:
        """Do one step of the first digest, or drop it if no action is wanted any longer.

        Returns an event for each digest or comparison that has ended.
        """
        for requester, landed in list(self._landed.items()):
            if not is_wanted(landed.actions[requester]):
                del self._landed[requester]
        if not self._jobs:
            return []
        job = self._jobs[0]
        if not any(map(is_wanted, job.actions.values())):
            return self._fail_job("no reader waits for it any longer")
        job.started_at = job.started_at or self._clock()
        try:
            next(job.steps)
        except StopIteration as end:
            job.digest = end.value
            return self._finish_job(self._clock() - job.started_at)
        except (DigestError, MemoryError) as error:
            return self._fail_job(str(error) or type(error).__name__)
        return []

    def clear(self) -> None:
        self._jobs.clear()
        self._landed.clear()

    def close(self) -> None:
        self._digester.close()

    def _finish_job(self, seconds: float) -> list[events.DigestEvent]:
        job = self._jobs.popleft()
        self._counts["digests"] += 1
        self._counts["digest_bytes"] += count_bytes(job.slices)
        self._counts["digest_seconds"] += seconds
        self._landed |= {key: job for key, one in job.actions.items() if _awaits_reply(one)}
        return [_finished(one, job) for one in job.actions.values() if not _awaits_reply(one)]

    def _fail_job(self, reason: str) -> list[events.DigestEvent]:
        refused = [_refused(action, reason) for action in self._jobs.popleft().actions.values()]
        return [event for event in refused if event is not None]


def open_digests(
    layout: CacheLayout,
    counts: defaultdict[str, float],
    clock: Callable[[], float],
    *,
    is_prefill: bool,
    verifies: bool,
) -> DigestQueue:
    """Open the digests of a rank; a ConfigError if it `verifies` and cannot digest KV.

    On a GPU this compiles the program, which takes seconds: on each prefill rank, because any
    reader may ask, and on a decode rank that `verifies`.
    """
    try:
        digester = open_digester(layout, is_used=is_prefill or verifies)
    except (ImportError, DigestError) as error:
        if verifies:
            raise ConfigError(
                f"verify is on, but KV cannot be digested here: {error}; allowed: 'off'"
            ) from error
        logger.warning("loads that read from this rank cannot be verified: %s", error)
        digester = NoDigester(str(error))
    return DigestQueue(layout, digester, counts, clock)


def open_digester(layout: CacheLayout, *, is_used: bool) -> Digester:
    """A digester for the memory that holds the cache; an ImportError or DigestError without one."""
    if layout.memory == "DRAM":
        return Digester()
    if not is_used:
        return NoDigester("verify is off on this rank")
    from nixl_kv.verify.gpu import GpuDigester  # noqa: PLC0415 - torch: GPUs only

    return GpuDigester(layout)


def _awaits_reply(action: events.DigestAction) -> bool:
    return isinstance(action, events.CompareDigest) and not action.rows


def _requester(action: events.DigestAction) -> _Requester:
    if isinstance(action, events.MakeDigest):
        return action.digest_request.reader, action.digest_request.claim
    return action.load.request, action.rank, action.claim


def _subject(
    action: events.DigestAction,
) -> tuple[str, int, tuple[KVSlice, ...], tuple[Table, ...]]:
    """Secret, end, slices and block tables of a digest.

    The secret is the claim: it is random, and only both sides know it.
    """
    if isinstance(action, events.CompareDigest):
        return action.claim, action.load.end, action.slices, action.load.tables
    request = action.digest_request
    return request.claim, request.end, request.slices, action.tables


def _finished(action: events.DigestAction, job: _Job) -> events.DigestEvent:
    made = job.digest
    if isinstance(action, events.MakeDigest):
        rows, columns = _to_bytes(made.rows), _to_bytes(made.columns)
        return events.DigestMade(action.route, action.digest_request, rows, columns)
    remote = Digest(_from_bytes(action.rows), _from_bytes(action.columns))
    difference = describe_difference(made, remote, job.slices)
    return events.DigestCompared(action.load.request, action.rank, action.claim, difference)


def _refused(action: events.DigestAction, reason: str) -> events.DigestEvent | None:
    if isinstance(action, events.MakeDigest):
        return events.DigestMade(action.route, action.digest_request, refusal=reason)
    if not action.rows:
        return None  # the arrival of prefill's digest tries again
    return events.DigestCompared(action.load.request, action.rank, action.claim, refusal=reason)


def _to_bytes(sums: U64) -> bytes:
    return sums.astype("<u8", copy=False).tobytes()


def _from_bytes(payload: bytes) -> U64:
    # An incomplete last sum is cut off, so the digests differ in length.
    return np.frombuffer(payload[: len(payload) // 8 * 8], dtype="<u8").astype(np.uint64)
