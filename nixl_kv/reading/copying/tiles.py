"""A plan's runs as a kernel takes them: rows of equal width, whose bytes are counted through.

A job is a set of rows of one width, and the pieces of a request: each row has all pieces. The bytes
of a job are numbered: piece by piece, in each row by row. A kernel takes a fixed number of units at
a time, wherever they begin, so that long and short runs keep equally many bytes under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.plan import ADDRESS, COUNT, LENGTH, STRIDE, Ints, Pieces, Plan, Rows

UNITS: Final = (16, 8, 4, 2, 1)
"""Bytes that a thread takes at a time: what divides all addresses, strides and lengths."""

JOB_COLUMNS: Final = 8
"""Of a job: the tiles before it, its first row, rows, units of a row, the strides of both sides,
where its pieces begin, pieces."""


Locate: TypeAlias = Callable[[Ints, Ints], Ints]
"""A function of where pieces begin and end, as their owner has them; where they begin here."""


@dataclass(frozen=True)
class Job:
    """Rows of one width of one of the plan's `PagedRows`. Pairs are (local, remote)."""

    unit: int
    paged: int  # number within the plan
    first: int
    count: int
    width: int  # in units
    strides: tuple[int, int]
    num_pieces: tuple[int, int]  # of each row


@dataclass(frozen=True)
class Launch:
    """One request's jobs of one unit: `numbers` has the jobs, shape (jobs, 8), then the pieces.

    These are of the plan's `paged` rows, in this order: (local, remote) of each.
    """

    unit: int
    numbers: Ints
    num_jobs: int
    num_tiles: int
    paged: tuple[int, ...] = ()


class Tiling:
    """The rows of a plan, sorted by width and alignment.

    `rows` has the addresses of both sides, shape (rows, 2), int64: (local, remote). Each of `jobs`
    has some of them.
    """

    def __init__(self, plan: Plan, locate: Locate) -> None:
        """Cut a plan's rows; `locate` says where the remote ones are in this process."""
        self.rows: Ints = np.empty((0, 2), dtype=np.int64)
        self.jobs: list[Job] = []
        chunks: list[Ints] = []
        num_rows = 0
        for number, paged in enumerate(plan.paged_rows):
            local, remote = (
                _rows_of(plan.local, paged.first[0]),
                _rows_of(plan.remote, paged.first[1]),
            )
            strides = int(local[0, STRIDE]), int(remote[0, STRIDE])
            counts = int(local[0, COUNT]), int(remote[0, COUNT])
            last = (
                remote[:, ADDRESS] + remote[:, STRIDE] * (remote[:, COUNT] - 1) + remote[:, LENGTH]
            )
            addresses = np.stack([local[:, ADDRESS], locate(remote[:, ADDRESS], last)], axis=1)
            for length in np.unique(local[:, LENGTH]).tolist():
                same = addresses[local[:, LENGTH] == length]
                unit = _unit(np.array([length, *strides]), same)
                width = length // unit
                self.jobs.append(Job(unit, number, num_rows, len(same), width, strides, counts))
                chunks.append(same)
                num_rows += len(same)
        self.rows = np.concatenate([self.rows, *chunks])

    def launches(self, pieces: Sequence[Pieces], tile_bytes: int) -> list[Launch]:
        """The jobs of a request; `pieces` are those of all the plan's rows, in order."""
        launches = []
        for unit in sorted({job.unit for job in self.jobs}, reverse=True):
            jobs = [job for job in self.jobs if job.unit == unit and len(pieces[job.paged].local)]
            if jobs:
                launches.append(_launch(unit, jobs, pieces, tile_bytes))
        return launches


def _launch(unit: int, jobs: list[Job], pieces: Sequence[Pieces], tile_bytes: int) -> Launch:
    places: dict[int, int] = {}
    parts: list[npt.NDArray[np.int32]] = []
    at, tiles = len(jobs) * JOB_COLUMNS, 0
    table = np.empty((len(jobs), JOB_COLUMNS), dtype=np.int64)
    for row, job in zip(table, jobs, strict=True):
        wanted = pieces[job.paged]
        if job.paged not in places:
            places[job.paged] = at
            parts.append(np.stack([wanted.local, wanted.remote], axis=1).ravel())
            at += 2 * len(wanted.local)
        count = len(wanted.local)
        row[:] = (tiles, job.first, job.count, job.width, *job.strides, places[job.paged], count)
        tiles += -(-job.count * count * job.width * unit // tile_bytes)
    return Launch(unit, np.concatenate([table.ravel(), *parts]), len(jobs), tiles, tuple(places))


def _rows_of(rows: Rows, first: npt.NDArray[np.int32]) -> Ints:
    """The rows whose first pieces have these numbers."""
    counts = rows[:, COUNT].astype(np.int64)
    starts = np.cumsum(counts) - counts
    return rows[np.searchsorted(starts, first)].astype(np.int64)


def _unit(numbers: Ints, addresses: Ints) -> int:
    divisor = int(np.gcd.reduce(np.concatenate([numbers, addresses.ravel()])))
    return next(unit for unit in UNITS if divisor % unit == 0)
