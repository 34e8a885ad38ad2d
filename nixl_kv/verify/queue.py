"""Computes and compares the digests of one rank, one after the other, on its transfer thread.

Prefill digests the slices that its readers ask for. Decode digests the bytes of a load as soon as
they have landed, and keeps the digest until prefill's has arrived and the fence was valid. Each
digest takes short steps, so that messages and reads go on between them. The queue drops a digest
that no reader or load waits for, so that later digests are still in time under overload.

"""

import contextlib
import enum
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from nixl_kv.errors import DigestError, LocalProtocolError
from nixl_kv.feature import Worker
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.protocol import events
from nixl_kv.protocol.machine import MachineState
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.verify.digest import Digest, Digester, Steps, describe_difference
from nixl_kv.verify.slices import LocalSlice, find_slices

_Requester: TypeAlias = tuple[object, ...]

_Subject: TypeAlias = tuple[str, int, tuple[KVSlice, ...], tuple[Table, ...]]
"""Secret, end, slices and block tables. The secret is the claim: it is random, and only both sides
know it."""


class JobState(MachineState):
    PREPARED = enum.auto()  # a load's: its bytes have not landed yet
    QUEUED = enum.auto()  # the digest is computed, after those before it
    MADE = enum.auto()  # prefill's digest, to compare with, has not come yet


class JobEvent(MachineState):
    LANDED = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()
    COMPARED = enum.auto()
    FORGOTTEN = enum.auto()  # the load has ended


# None ends the job for one reader or load; others may share it.
JOB_TRANSITIONS: Final[Mapping[JobState, Mapping[JobEvent, JobState | None]]] = {
    JobState.PREPARED: {JobEvent.LANDED: JobState.QUEUED, JobEvent.FORGOTTEN: None},
    JobState.QUEUED: {JobEvent.FINISHED: JobState.MADE, JobEvent.FAILED: None},
    JobState.MADE: {JobEvent.COMPARED: None, JobEvent.FORGOTTEN: None},
}


@dataclass(eq=False)
class _Job:
    """A digest of one subject."""

    actions: dict[_Requester, events.DigestAction]  # that wait for the digest
    subject: _Subject
    slices: Sequence[LocalSlice]
    steps: Steps
    state: JobState
    #: Once the first step of a QUEUED job has begun.
    started_at: float = math.inf
    #: In MADE.
    digest: Digest | None = None

    def move(self, event: JobEvent) -> None:
        after = JOB_TRANSITIONS[self.state][event]
        self.state = self.state if after is None else after


class DigestQueue(Worker):
    """The digests of a rank, in the order of the requests."""

    name = "digests"
    actions = frozenset({events.MakeDigest, events.CompareDigest})

    def __init__(
        self,
        layout: CacheLayout,
        digester: Digester | None,
        counts: events.Counts,
        clock: Callable[[], float] = time.monotonic,
        is_wanted: Callable[[events.DigestAction], bool] = lambda _action: True,
    ) -> None:
        """Counts the seconds of digests in `counts`. No digester: refuses all.

        `is_wanted` tells whether a reader or a load still waits for the digest of an action.
        """
        self._layout = layout
        self._digester = digester
        self._clock = clock
        self._is_wanted = is_wanted
        self.jobs: deque[_Job] = deque()
        self.waiting: dict[_Requester, _Job] = {}  # for the bytes, or for prefill's digest
        self._counts = counts

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def wait_s(self) -> float | None:
        return self._digester.pause_s if self._digester and self.jobs else None

    def add(self, action: events.DigestAction) -> events.DigestEvent | None:  # type: ignore[override] # see `actions`
        """Queue a digest or a comparison. Returns an event if it has ended at once."""
        if self._digester is None:
            return _refused(action, "this rank computes no digests")
        # A reader has one digest per claim at a time: asking again must not keep this rank busy.
        requester, subject = _keys(action)
        if requester in self.waiting:
            return self._go_on(requester, action)
        for job in self.jobs:
            if requester in job.actions:
                if _awaits_reply(job.actions[requester]):
                    job.actions[requester] = action
                return None
        is_early = isinstance(action, events.CompareDigest) and not action.has_landed
        for job in self.jobs:
            if job.subject == subject and not is_early:  # readers of the same heads share a digest
                job.actions[requester] = action
                return None
        secret, end, wanted, tables = subject
        try:
            local_slices = find_slices(self._layout, wanted, tables, end=end)
        except ValueError as error:
            return _refused(action, str(error))
        steps = self._digester(secret, local_slices)
        state = JobState.PREPARED if is_early else JobState.QUEUED
        job = _Job({requester: action}, subject, local_slices, steps, state)
        if not is_early:
            self.jobs.append(job)
            return None
        with contextlib.suppress(DigestError, MemoryError):  # tried again when the bytes are here
            next(job.steps)
            self.waiting[requester] = job
        return None

    def _go_on(
        self, requester: _Requester, action: events.DigestAction
    ) -> events.DigestEvent | None:
        job = self.waiting[requester]
        if job.digest is not None and not _awaits_reply(action):
            job.move(JobEvent.COMPARED)
            del self.waiting[requester]
            return _finished(action, job, job.digest)
        has_landed = isinstance(action, events.CompareDigest) and action.has_landed
        if job.state is JobState.PREPARED and has_landed:
            job.move(JobEvent.LANDED)
            del self.waiting[requester]
            job.actions[requester] = action
            self.jobs.append(job)
        return None

    def poll(self) -> list[events.DigestEvent]:
        """Do one step of the first digest, or drop it if no action is wanted any longer.

        Returns an event for each digest or comparison that has ended.
        """
        is_wanted = self._is_wanted
        for key, job in list(self.waiting.items()) if self.waiting else ():
            if not is_wanted(job.actions[key]):
                job.move(JobEvent.FORGOTTEN)
                del self.waiting[key]
        if not self.jobs:
            return []
        job = self.jobs[0]
        if not any(map(is_wanted, job.actions.values())):
            return self._fail_job("no reader waits for it any longer")
        if job.started_at == math.inf:
            job.started_at = self._clock()
        try:
            next(job.steps)
        except StopIteration as end:
            return self._finish_job(end.value, self._clock() - job.started_at)
        except (DigestError, MemoryError) as error:
            return self._fail_job(str(error) or type(error).__name__)
        return []

    def clear(self) -> None:
        self.jobs.clear()
        self.waiting.clear()

    def close(self) -> None:
        if self._digester is not None:
            self._digester.close()

    def check(self) -> None:
        """Check what the states promise.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        for job in (*self.jobs, *self.waiting.values()):
            is_queued, is_made = job.state is JobState.QUEUED, job.state is JobState.MADE
            if is_queued != (job in self.jobs) or is_made != (job.digest is not None):
                raise LocalProtocolError(f"a digest is {job.state.name}, with {job.digest}")

    def _finish_job(self, digest: Digest, seconds: float) -> list[events.DigestEvent]:
        job = self.jobs.popleft()
        job.move(JobEvent.FINISHED)
        job.digest = digest
        self._counts.observe("digest_seconds", seconds)
        self.waiting |= {key: job for key, one in job.actions.items() if _awaits_reply(one)}
        ended = [one for one in job.actions.values() if not _awaits_reply(one)]
        return [_finished(one, job, digest) for one in ended]

    def _fail_job(self, reason: str) -> list[events.DigestEvent]:
        job = self.jobs.popleft()
        job.move(JobEvent.FAILED)
        refused = [_refused(action, reason) for action in job.actions.values()]
        return [event for event in refused if event is not None]


def _awaits_reply(action: events.DigestAction) -> bool:
    return isinstance(action, events.CompareDigest) and not action.rows


def _keys(action: events.DigestAction) -> tuple[_Requester, _Subject]:
    if isinstance(action, events.MakeDigest):
        request = action.digest_request
        subject = request.claim, request.end, request.slices, action.tables
        return (request.reader, request.claim), subject
    load, claim = action.load, action.claim
    return (load.request, action.rank, claim), (claim, load.end, action.slices, load.tables)


def _finished(action: events.DigestAction, job: _Job, digest: Digest) -> events.DigestEvent:
    if isinstance(action, events.MakeDigest):
        rows, columns = digest.rows.tobytes(), digest.columns.tobytes()
        return events.DigestMade(action.route, action.digest_request, rows, columns)
    # An incomplete last sum is cut off, so the digests differ in length.
    remote = [
        np.frombuffer(sums[: len(sums) // 8 * 8], np.uint64)
        for sums in (action.rows, action.columns)
    ]
    difference = describe_difference(digest, Digest(*remote), job.slices)
    return events.DigestCompared(action.load.request, action.rank, action.claim, difference)


def _refused(action: events.DigestAction, reason: str) -> events.DigestEvent | None:
    if isinstance(action, events.MakeDigest):
        return events.DigestMade(action.route, action.digest_request, refusal=reason)
    if not action.rows:
        return None  # the arrival of prefill's digest tries again
    return events.DigestCompared(action.load.request, action.rank, action.claim, refusal=reason)
