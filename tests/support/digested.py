"""Digests that are made while a plan's tiles are copied, as a kernel makes them, in numpy."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nixl_kv.geometry import digest
from nixl_kv.geometry.digest import Bytes, Digest, Key, digest_steps
from nixl_kv.geometry.layout import BlockTable, CacheLayout, Table
from nixl_kv.geometry.match import Route, holdings, routes
from nixl_kv.geometry.plan import Pieces, Plan, plan
from nixl_kv.geometry.slices import LocalSlice, SliceFinder, SliceNamer
from nixl_kv.ids import Rank
from nixl_kv.reading.copying.contents import Contents, DigestInput
from nixl_kv.reading.copying.tiles import JOB_COLUMNS, Launch, Tiling
from nixl_kv.reading.gather.base import Wanted
from support.cases import Case
from support.oracle import Cut, Engine, random_dense

KEY = Key("of a request")


def window(address: int, length: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def digest_of(key: Key, slices: Sequence[LocalSlice]) -> Digest:
    """Of what lies in memory."""
    steps = digest_steps(key, slices, window)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        made: Digest = end.value
        return made


def is_equal(one: Digest, other: Digest) -> bool:
    return np.array_equal(one.rows, other.rows) and np.array_equal(one.columns, other.columns)


def digest_of_copy(
    contents: Contents, tiling: Tiling, pieces: Sequence[Pieces], wanted: Wanted, tile_bytes: int
) -> Digest:
    """Of what is read from the other side, by what a kernel is given."""
    (launch,) = tiling.launches(pieces, tile_bytes)
    digest_input = contents.request(*wanted, pieces, launch)
    numbers = digest_input.numbers.copy()
    for tile in range(launch.num_tiles):
        _add_tile(contents, launch, digest_input, numbers, tile * tile_bytes, tile_bytes)
    return digest_input.digest(numbers)


def _add_tile(
    contents: Contents,
    launch: Launch,
    digest_input: DigestInput,
    numbers: np.ndarray,
    begin: int,
    tile_bytes: int,
) -> None:
    size, given = contents.size, digest_input.numbers
    jobs = launch.numbers[: launch.num_jobs * JOB_COLUMNS].reshape(-1, JOB_COLUMNS)
    job = jobs[np.flatnonzero(jobs[:, 0] * tile_bytes <= begin)[-1]].tolist()
    before, first_row, num_rows, width, _, stride, pieces_at, num_pieces, bytes_before = job
    per_row = width * launch.unit // size
    factors = given[8 : 8 + size // 4].view(np.uint64)
    multipliers = np.stack(np.split(factors, 2), axis=1).ravel()
    offset, step, column, heads_at, tokens_at, rows_at, columns_at, labels_at = given[:8].tolist()
    key = np.uint64(offset % 2**64), np.uint64(step % 2**64), multipliers
    first = (begin - before * tile_bytes) // size
    for number in range(first, min(first + tile_bytes // size, num_pieces * num_rows * per_row)):
        piece, row = number // per_row // num_rows, number // per_row % num_rows
        within = number % per_row
        remote = contents.numbers[2 * (first_row + row) + 1]
        remote += launch.numbers[pieces_at + 2 * piece + 1] * stride + within * size
        label = int(contents.numbers[labels_at + bytes_before // size + row * per_row + within])
        place = (pieces_at - launch.num_jobs * JOB_COLUMNS) // 2 + piece
        token = int(given[tokens_at + place]) + (label & 0xFFFFFFFF)
        which, start, end = given[heads_at + 3 * (label >> 32) :][:3].tolist()
        if start <= token < end:
            term = digest.terms(key, np.array([token]), window(int(remote), size)[None])
            sums = numbers.view(np.uint64)
            for place, weight in (
                (rows_at + which, 1),
                (columns_at + (token >> column), which * 2 + 1),
            ):
                sums[place : place + 1] += term * np.uint64(weight)


@dataclass
class DigestedRead:
    """What one decode rank reads from one prefill rank, to be digested meanwhile."""

    plan: Plan
    tiling: Tiling
    contents: Contents
    pieces: Sequence[Pieces]
    local: Wanted
    remote: Wanted
    pair: "DigestedPair"  # whose memory is read

    def copied(self, tile_bytes: int) -> Digest:
        return digest_of_copy(self.contents, self.tiling, self.pieces, self.local, tile_bytes)


class DigestedPair:
    """Prefill with a case's KV, decode with noise. Contents of which all runs are whole."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self.case = case
        self.prefill = Engine(case.prefill, case.model, rng, (0, 256))
        self.prefill.write(random_dense(case.model, case.table_tokens, rng, 256))
        self.decode = Engine(case.decode, case.model, rng, (0, 256))

    def reads(self) -> Iterator[DigestedRead]:
        held = [
            [holdings(rank.layout) for rank in engine.ranks]
            for engine in (self.decode, self.prefill)
        ]
        for number, rank in enumerate(self.decode.ranks):
            for route in routes(Rank(number), *held):
                if route.readers:
                    remote = self.prefill.ranks[route.remote_rank].layout
                    yield self._read(rank.layout, remote, route)

    def _read(self, local: CacheLayout, remote: CacheLayout, route: Route) -> DigestedRead:
        start, end = self.case.tokens.start, self.case.tokens.stop
        mine, theirs = _tables(self.case.decode, start), _tables(self.case.prefill, 0)
        planned = plan(local, remote, route.share)
        tables = _block_tables(mine, local)
        slices = SliceNamer(local, route.share, holdings(remote)).name(tables)
        tiling = Tiling(planned, lambda first, _: first)
        return DigestedRead(
            planned,
            tiling,
            Contents(tiling, planned, local),
            planned.pieces(mine, theirs, self.case.tokens),
            Wanted(KEY, SliceFinder(local).find(slices, tables, end=end)),
            Wanted(KEY, SliceFinder(remote).find(slices, _block_tables(theirs, remote), end=end)),
            self,
        )


def _tables(cut: Cut, start: int) -> list[Table]:
    """From the entry of token `start` on."""
    firsts = [start // group.entry_size for group in cut.groups]
    return [Table.of(g.table[n:], n) for g, n in zip(cut.groups, firsts, strict=True)]


def _block_tables(tables: Sequence[Table], layout: CacheLayout) -> list[BlockTable]:
    return [BlockTable.of(*pair) for pair in zip(tables, layout.groups, strict=True)]
