"""Computes and compares the digests of one rank, one after the other, on its transfer thread.

Prefill digests what its readers ask for. Decode digests what a load has read, as soon as that has
landed, and keeps the digest until prefill's has arrived and the fence was valid. Each digest is
computed in short steps, so that messages and reads go on between them. A digest that no reader or
load waits for any more is dropped, so that under overload those behind it are still in time. The
steps only read memory: a dropped one does no harm.

`open_digests` is all that the engine needs of this folder.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from nixl_kv.errors import ConfigError, DigestError, get_logger
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.protocol import events
from nixl_kv.verify.digest import U64, Digest, Digester, Key, Steps, describe_difference
from nixl_kv.verify.slices import LocalSlice, SliceFinder, SliceNamer, block_tables, count_bytes

logger = get_logger(__name__)

EMPTY: Final = Digest(np.empty(0, np.uint64), np.empty(0, np.uint64))


class NoDigester(Digester):
    """Refuses every digest."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, key: Key, local_slices: Sequence[LocalSlice]) -> Steps:
        del key, local_slices
        raise DigestError(self._reason)


_Requester: TypeAlias = tuple[object, ...]


@dataclass(eq=False)
class _Job:
    """A digest under way, or of what a load has read and cannot compare yet."""

    actions: dict[_Requester, events.DigestAction]  # that wait for it
    slices: Sequence[LocalSlice]
    steps: Steps
    started_at: float | None = None
    digest: Digest = EMPTY


class DigestQueue:
    """Digests in the order in which they were asked for."""

    def __init__(
        self,
        layout: CacheLayout,
        digester: Digester,
        counts: defaultdict[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counts` get the number of digests, their bytes and seconds."""
        self.name_slices = SliceNamer(layout)
        self._layout = layout
        self._finder = SliceFinder(layout)
        self._digester = digester
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._landed: dict[_Requester, _Job] = {}
        self._counts = counts

    def __repr__(self) -> str:
        return f"<DigestQueue: {len(self._jobs)} to make>"

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def wait_s(self) -> float | None:
        """How long the thread may wait before the next step, in seconds; None without jobs."""
        return self._digester.pause_s if self._jobs else None

    def add(self, action: events.DigestAction) -> events.DigestEvent | None:
        """Queue a digest or a comparison; an event if it has ended at once.

        Readers of the same heads share a digest. A reader has one digest per claim at a time, so
        that it cannot keep this rank busy by asking again.
        """
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
        for job in self._jobs:
            if any(_subject(other) == _subject(action) for other in job.actions.values()):
                job.actions[requester] = action
                return None
        try:
            local_slices = self._find_slices(action)
            steps = self._digester(Key(_claim(action)), local_slices)
        except (DigestError, ValueError) as error:
            return _refused(action, str(error))
        self._jobs.append(_Job({requester: action}, local_slices, steps))
        return None

    def _find_slices(self, action: events.DigestAction) -> list[LocalSlice]:
        if isinstance(action, events.MakeDigest):
            request = action.digest_request
            end, wanted, tables = request.end, request.slices, action.tables
        else:
            end, wanted, tables = action.load.end, action.slices, action.load.tables
        return self._finder.find(wanted, block_tables(self._layout, tables), end=end)

    def poll(self, is_wanted: Callable[[events.DigestAction], bool]) -> list[events.DigestEvent]:
        """Do one step of the first digest that is still wanted; return what has ended."""
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
        """Return when nothing reads the cache any longer."""
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
    """Open the digests of a rank.

    On a GPU this compiles the program, which takes seconds: on every rank that prefills, since any
    reader may ask, and on one that decodes if it `verifies`.

    Raises:
        ConfigError: if this rank is to verify loads and cannot digest them.
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
    """Open a digester for the memory that holds the cache.

    Raises:
        ImportError, DigestError: if it cannot be digested here.
    """
    if layout.memory == "DRAM":
        return Digester()
    if not is_used:
        return NoDigester("verify is off on this rank")
    from nixl_kv.verify.gpu import GpuDigester  # noqa: PLC0415 - torch: GPUs only

    return GpuDigester(layout)


def _awaits_reply(action: events.DigestAction) -> bool:
    """Whether decode cannot compare this yet."""
    return isinstance(action, events.CompareDigest) and not action.rows


def _requester(action: events.DigestAction) -> _Requester:
    if isinstance(action, events.MakeDigest):
        return action.digest_request.reader, action.digest_request.claim
    return action.load.request, action.rank, action.claim


def _subject(action: events.DigestAction) -> tuple[object, ...]:
    if isinstance(action, events.CompareDigest):
        return _requester(action)
    request = action.digest_request
    return request.claim, request.end, request.slices, action.tables


def _claim(action: events.DigestAction) -> str:
    """The secret of a digest: it is random, both sides know it, and no stranger does."""
    return action.claim if isinstance(action, events.CompareDigest) else action.digest_request.claim


def _finished(action: events.DigestAction, job: _Job) -> events.DigestEvent:
    made = job.digest
    if isinstance(action, events.MakeDigest):
        rows, columns = _to_bytes(made.rows), _to_bytes(made.columns)
        return events.DigestMade(action.route, action.digest_request, rows, columns)
    remote = Digest(_from_bytes(action.rows), _from_bytes(action.columns))
    difference = describe_difference(made, remote, job.slices)
    return events.DigestCompared(action.load.request, action.rank, action.claim, difference)


def _refused(action: events.DigestAction, reason: str) -> events.DigestEvent | None:
    """An event that says so; None without prefill's digest, since its arrival tries again."""
    if isinstance(action, events.MakeDigest):
        return events.DigestMade(action.route, action.digest_request, refusal=reason)
    if not action.rows:
        return None
    return events.DigestCompared(action.load.request, action.rank, action.claim, refusal=reason)


def _to_bytes(sums: U64) -> bytes:
    return sums.astype("<u8", copy=False).tobytes()


def _from_bytes(payload: bytes) -> U64:
    """Sums of a peer; an incomplete last one is cut off, so that the digests differ in length."""
    return np.frombuffer(payload[: len(payload) // 8 * 8], dtype="<u8").astype(np.uint64)
