"""Cuts a plan's runs into equal tiles for a kernel.

A job is a set of rows of one width, with the pieces of a request: each row has all pieces. The
units of a job are numbered piece by piece, and row by row within a piece. A tile is a fixed number
of consecutive units, so long and short runs keep the same number of bytes in flight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.plan import ADDRESS, COUNT, LENGTH, STRIDE, Ints, Pieces, Plan, Rows

# Bytes of one access of a thread: the largest one that divides addresses, strides, lengths.
UNITS: Final = (16, 8, 4, 2, 1)

# Columns of a job: tiles before it, first row, rows, units per row, local and remote stride, index
# of its first piece, pieces.
JOB_COLUMNS: Final = 8

# Maps the begins and ends of pieces at their owner to their begins in this process.
Locate: TypeAlias = Callable[[Ints, Ints], Ints]


@dataclass(frozen=True)
class Job:
    """Rows of one width, of one of the plan's `PagedRows`. Pairs are (local, remote)."""

    unit: int
    paged: int  # number within the plan
    first: int
    count: int
    width: int  # in units
    strides: tuple[int, int]
    num_pieces: tuple[int, int]  # of each row


@dataclass(frozen=True)
class Launch:
    """One request's jobs of one unit.

    `numbers` holds the jobs, shape (jobs, 8), then the pieces: pairs (local, remote).
    """

    unit: int
    numbers: Ints
    num_jobs: int
    num_tiles: int


class Tiling:
    """The rows of a plan, grouped by width and alignment.

    `rows` holds the addresses of both sides, shape (rows, 2), int64: (local, remote). Each of
    `jobs` covers some of them.
    """

    def __init__(self, plan: Plan, locate: Locate) -> None:
        self.rows: Ints = np.empty((0, 2), dtype=np.int64)
        self.jobs: list[Job] = []
        chunks: list[Ints] = []
        num_rows = 0
        for number, paged in enumerate(plan.paged_rows):
            local = _rows_of(plan.local, paged.first[0])
            remote = _rows_of(plan.remote, paged.first[1])
            strides = int(local[0, STRIDE]), int(remote[0, STRIDE])
            counts = int(local[0, COUNT]), int(remote[0, COUNT])
            begin = remote[:, ADDRESS]
            end = begin + remote[:, STRIDE] * (remote[:, COUNT] - 1) + remote[:, LENGTH]
            addresses = np.stack([local[:, ADDRESS], locate(begin, end)], axis=1)
            for length in np.unique(local[:, LENGTH]).tolist():
                same = addresses[local[:, LENGTH] == length]
                unit = _unit(np.array([length, *strides]), same)
                width = length // unit
                self.jobs.append(Job(unit, number, num_rows, len(same), width, strides, counts))
                chunks.append(same)
                num_rows += len(same)
        self.rows = np.concatenate([self.rows, *chunks])

    def launches(self, pieces: Sequence[Pieces], tile_bytes: int) -> list[Launch]:
        """Make the launches of a request. `pieces` are those of all the plan's rows, in order."""
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
    return Launch(unit, np.concatenate([table.ravel(), *parts]), len(jobs), tiles)


def _rows_of(rows: Rows, first: npt.NDArray[np.int32]) -> Ints:
    counts = rows[:, COUNT].astype(np.int64)
    starts = np.cumsum(counts) - counts
    return rows[np.searchsorted(starts, first)].astype(np.int64)


def _unit(numbers: Ints, addresses: Ints) -> int:
    divisor = int(np.gcd.reduce(np.concatenate([numbers, addresses.ravel()])))
    return next(unit for unit in UNITS if divisor % unit == 0)
