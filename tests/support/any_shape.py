"""A whole model's KV, divided on prefill, read by the ranks of decode; see test_any_shape."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Table
from nixl_kv.geometry.match import holdings, layout_mismatches, routes
from nixl_kv.geometry.plan import IndexBuffer, Plan, Share, plan
from nixl_kv.ids import Rank
from nixl_kv.reading.tiles import Tiling
from support.cases import Case
from support.oracle import (
    Dense,
    Engine,
    Layer,
    RankMemory,
    byte_pairs,
    check_rows,
    copy_pieces,
    fewest_runs,
    random_dense,
    runs_within_rows,
    tile_pairs,
)

# The connector decides what prefill keeps for a window. Here prefill keeps all that decode reads.
WINDOW_MISMATCH = "for a sliding window"

# Each kind of byte has its own values: they show which bytes were copied, and which should be.
KV, PREFILL_NOISE, DECODE_NOISE = 100, (100, 150), (150, 256)


TILE_BYTES = 64  # a case has many of them


class RunCounts(NamedTuple):
    """Runs: planned, and the fewest possible."""

    planned: int
    fewest: int


class Pair:
    """Two engines with a case's KV in prefill's memory."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self.case = case
        self.dense: Dense = random_dense(case.model, case.table_tokens, rng, KV)
        self.prefill = Engine(case.prefill, case.model, rng, PREFILL_NOISE)
        self.prefill.write(self.dense)
        self.decode = Engine(case.decode, case.model, rng, DECODE_NOISE)
        self.before = [rank.memory.copy() for rank in self.decode.ranks]
        self.layouts = [
            [rank.layout for rank in engine.ranks] for engine in (self.decode, self.prefill)
        ]
        self.held = [list(map(holdings, layouts)) for layouts in self.layouts]
        self.buffer = IndexBuffer()

    def tables(self) -> tuple[list[Table], list[Table]]:
        start = self.case.tokens.start
        return (
            [
                Table.of(g.table[start // g.entry_size :], start // g.entry_size)
                for g in self.case.decode.groups
            ],
            [Table.of(group.table) for group in self.case.prefill.groups],
        )

    def read(self, number: int) -> Iterator[tuple[int, RunCounts]]:
        """Do all reads of one decode rank; yield bytes and runs of each."""
        local = self.decode.ranks[number]
        for route in routes(Rank(number), *self.held):
            if not route.readers:
                continue
            remote = self.prefill.ranks[route.remote_rank]
            planned = plan(local.layout, remote.layout, route.share)
            check_rows(planned.local, local.layout)
            check_rows(planned.remote, remote.layout)
            reads = planned.reads(*self.tables(), self.case.tokens, buffer=self.buffer)
            pairs = byte_pairs(planned, reads)
            assert reads.num_bytes == len(pairs)
            self._check_count(reads.num_runs - runs_within_rows(planned, reads), planned)
            self._check_tiles(planned, pairs)
            self.check_pairs(local.layout, remote.layout, route.share, pairs)
            copy_pieces(planned, reads)
            yield len(pairs), RunCounts(reads.num_runs, fewest_runs(pairs))

    def _check_tiles(self, planned: Plan, pairs: np.ndarray) -> None:
        """A kernel that copies tiles copies the same bytes, each once."""
        pieces = planned.pieces(*self.tables(), self.case.tokens)
        tiled = tile_pairs(Tiling(planned, lambda first, _: first), pieces, TILE_BYTES)
        assert np.array_equal(tiled[np.lexsort(tiled.T)], pairs[np.lexsort(pairs.T)])

    def check_pairs(
        self, local: CacheLayout, remote: CacheLayout, share: Share, pairs: np.ndarray
    ) -> None:
        """Another way to read checks here that it moves the same bytes: pairs of addresses."""

    def _check_count(self, more: int, planned: Plan) -> None:
        """Groups in the same memory on both sides share rows: there, runs of two groups may merge.

        So do blocks that are smaller than the width of a stripe. `num_runs` does not count that.
        """
        shared = self.case.decode.stacked and self.case.prefill.stacked
        shared |= has_stripes(self.case)
        assert 0 <= more <= (len(planned.paged_rows) - 1 if shared else 0)

    def check_memory(self, number: int, copied: int) -> None:
        """All of one rank's memory, after this number of bytes was copied into it."""
        rank, before = self.decode.ranks[number], self.before[number]
        needed = np.zeros(len(before), dtype=bool)
        allowed, right = needed.copy(), before.copy()
        for layer in rank.layers:
            tokens = rank.present(layer.name)
            tokens = tokens[tokens >= self.case.tokens.start]
            for offsets in rank.offsets(layer.name, tokens[tokens < self.case.tokens.stop]):
                needed[offsets] = True
            tokens = self._with_rests(rank, layer)
            for offsets in rank.offsets(layer.name, tokens):
                allowed[offsets] = True
            rank.put(right, layer, tokens, self.dense)
        touched = rank.memory < DECODE_NOISE[0]
        assert np.array_equal(rank.memory, np.where(touched, right, before))
        assert not (needed & ~touched).any(), "not read"
        assert not (touched & ~allowed).any(), "read, but not allowed"
        assert copied == np.count_nonzero(touched), "read twice"

    def _with_rests(self, rank: RankMemory, layer: Layer) -> np.ndarray:
        """The tokens before the end, and those behind it that share a block on both sides."""
        tokens = self.case.tokens
        mine = rank.slots(layer.name)
        allowed = np.zeros(len(mine), dtype=bool)
        group = self.case.prefill.group_of(layer.name)
        for place in range(group.blocks.stripes):
            theirs = group.slots(place)
            length = min(len(mine), len(theirs))
            blocks = np.stack([mine[:length, 0], theirs[:length, 0]], axis=1)
            common = (blocks != ABSENT).all(axis=1)
            common[: tokens.start] = False
            wanted = set(map(tuple, blocks[: tokens.stop][common[: tokens.stop]].tolist()))
            for token in np.flatnonzero(common).tolist():
                allowed[token] |= tuple(blocks[token].tolist()) in wanted
        return np.flatnonzero(allowed)


def check(case: Case, make_pair: Callable[[Case], "Pair"] = Pair) -> list[RunCounts]:
    """Move a case's KV and check everything."""
    pair = make_pair(case)
    mismatches = layout_mismatches(*pair.layouts)
    assert [m for m in mismatches if WINDOW_MISMATCH not in m.field] == []
    counts = []
    for number in range(len(pair.decode.ranks)):
        reads = list(pair.read(number))
        pair.check_memory(number, sum(num_bytes for num_bytes, _ in reads))
        for _, runs in reads:
            assert runs.fewest <= runs.planned
            assert runs.fewest == runs.planned or not case.scattered or has_stripes(case)
            counts.append(runs)
    return counts


def has_stripes(case: Case) -> bool:
    """Then a head's first run may follow another head's last one, and is not merged with it."""
    groups = case.decode.groups + case.prefill.groups
    return any(group.blocks.stripes > 1 for group in groups)
