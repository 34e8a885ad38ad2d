"""Any shape to any shape: a whole model's KV, divided on prefill, read by the ranks of decode.

The real routes, plans and reads move real bytes. Every byte that decode needs must be right and be
written once, nothing else may be touched, and the runs must be as few as possible.

    NIXL_KV_EXAMPLES=20000 NIXL_KV_SEED=7 pytest -s tests/unit/geometry/test_any_shape.py

prints how many cases there were, and of which kinds; the same seed makes the same cases.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Span, Table
from nixl_kv.geometry.match import holdings, layout_mismatches, routes
from nixl_kv.geometry.plan import IndexBuffer, Plan, Share, plan
from nixl_kv.ids import Rank
from nixl_kv.reading.staged.layout import (
    Crop,
    Ring,
    crops,
    entry_bytes,
    split_tokens,
    staged_entries,
    staged_layout,
    staged_table,
)
from nixl_kv.reading.tiles import Tiling
from support.cases import Case, cases, typical
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

EXAMPLES = int(os.environ.get("NIXL_KV_EXAMPLES", "120"))
SEED = int(os.environ.get("NIXL_KV_SEED", "2"))
ENOUGH = 120  # so many examples contain every kind of case

# The connector decides what prefill keeps for a window. Here prefill keeps all that decode reads.
WINDOW_MISMATCH = "for a sliding window"

# Each kind of byte has its own values: they show what was copied, and whether it should have been.
KV, PREFILL_NOISE, DECODE_NOISE = 100, (100, 150), (150, 256)


TILE_BYTES = 64  # a case has many of them
MAX_SLOT = 1 << 30


class RunCounts(NamedTuple):
    """Runs: planned, the fewest possible, the fewest possible if no blocks were neighbours."""

    planned: int
    fewest: int
    fewest_apart: int


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
        """The arguments of `Plan.reads`."""
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
            owners = [
                rank.owners[pairs[:, side] - rank.base] for side, rank in enumerate((local, remote))
            ]
            self._check_tiles(planned, pairs)
            self._check_staged(local.layout, remote.layout, route.share, pairs)
            copy_pieces(planned, reads)
            fewest = fewest_runs(pairs), fewest_runs(pairs, np.stack(owners, 1))
            yield len(pairs), RunCounts(reads.num_runs, *fewest)

    def _check_tiles(self, planned: Plan, pairs: np.ndarray) -> None:
        """A kernel that copies tiles copies the same bytes, each once."""
        pieces = planned.pieces(*self.tables(), self.case.tokens)
        tiled = tile_pairs(Tiling(planned, lambda first, _: first), pieces, TILE_BYTES)
        assert np.array_equal(tiled[np.lexsort(tiled.T)], pairs[np.lexsort(pairs.T)])

    def _check_staged(
        self, local: CacheLayout, remote: CacheLayout, share: Share, pairs: np.ndarray
    ) -> None:
        """Packed into slots, read there in one run and scattered, the same bytes arrive, once."""
        arrived = [
            chunk
            for crop in crops(local, remote, share)
            for chunk in self._stage(local, remote, crop)
        ]
        staged = np.concatenate([np.empty((0, 2), dtype=np.int64), *arrived])
        assert np.array_equal(staged[np.lexsort(staged.T)], pairs[np.lexsort(pairs.T)])

    def _stage(self, local: CacheLayout, remote: CacheLayout, crop: Crop) -> Iterator[np.ndarray]:
        """Of each chunk, where its bytes are and where they were."""
        groups = local.groups[crop.groups[0]], remote.groups[crop.groups[1]]
        # As many entries at a time as are needed for one local one, or one more.
        most = -(-groups[0].entry_size // groups[1].entry_size) + 1 + self.case.seed % 2
        ends = []
        for begin in (1000, 2000):  # both rings have other addresses, and slots of other numbers
            least = Ring(Span(begin, MAX_SLOT), 1)
            one = staged_layout(groups[1], crop.share, least.span, memory="DRAM", device=0)
            ring = Ring(Span(begin, entry_bytes(one) * (most + 1) * 3 + 2), 3)
            assert ring.capacity(entry_bytes(one)) >= most
            ends.append(
                (ring, staged_layout(groups[1], crop.share, ring.span, memory="DRAM", device=0))
            )
        (mine, landed), (theirs, packed) = ends
        _check_dense(packed, remote)
        tables = self.tables()
        mine_table, their_table = tables[0][crop.groups[0]], tables[1][crop.groups[1]]
        for number, tokens in enumerate(split_tokens(groups, mine_table, self.case.tokens, most)):
            entries = staged_entries(their_table, groups[1], tokens)
            size, slot = entry_bytes(packed), number % 3
            first = theirs.first_entry(slot, size), mine.first_entry(2 - slot, size)
            whole = range(entries.start * groups[1].entry_size, entries.stop * groups[1].entry_size)
            pack = plan(packed, remote).reads(
                [staged_table(their_table, entries, first[0])], tables[1], whole
            )
            scatter = plan(local, landed).reads(
                tables[0], [staged_table(their_table, entries, first[1])], tokens
            )
            packed_pairs = byte_pairs(plan(packed, remote), pack)
            packed_pairs = packed_pairs[np.argsort(packed_pairs[:, 0])]
            moved = theirs.span.address + first[0] * size - mine.span.address - first[1] * size
            for side, begin, used in ((theirs, first[0], slot), (mine, first[1], 2 - slot)):
                assert begin * size >= used * side.slot_bytes
                assert (begin + len(entries)) * size <= (used + 1) * side.slot_bytes
            arrived = byte_pairs(plan(local, landed), scatter)
            found = np.searchsorted(packed_pairs[:, 0], arrived[:, 1] + moved)
            assert np.array_equal(packed_pairs[found, 0], arrived[:, 1] + moved)
            yield np.stack([arrived[:, 0], packed_pairs[found, 1]], axis=1)

    def _check_count(self, more: int, planned: Plan) -> None:
        """Groups in the same memory on both sides share rows: there, runs of two groups may merge.

        So do blocks that are smaller than the width of a stripe. `num_runs` does not count that.
        """
        shared = self.case.decode.stacked and self.case.prefill.stacked
        shared |= has_stripes(self.case)
        assert 0 <= more <= (len(planned.paged_rows) - 1 if shared else 0)

    def check_memory(self, number: int, copied: int) -> None:
        """All of one rank's memory, after so many bytes were copied into it."""
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


def _check_dense(packed: CacheLayout, remote: CacheLayout) -> None:
    """An entry has no gap, and each of its bytes once."""
    group = packed.groups[0]
    block = group.regions[0].block_stride
    content = sum(r.content * r.num_heads * group.block_size for r in group.regions)
    assert content == block
    table = Table.of(np.zeros(1, dtype=np.int32))
    others = [Table.of(np.zeros(1, dtype=np.int32)) for _ in remote.groups]
    pack = plan(packed, remote)
    reads = pack.reads([table], others, range(group.entry_size))
    written = byte_pairs(pack, reads)[:, 0] - packed.spans[0].address
    assert sorted(written.tolist()) == list(range(block * group.blocks_per_entry))


def check(case: Case) -> list[RunCounts]:
    """Move a case's KV and check everything."""
    pair = Pair(case)
    mismatches = layout_mismatches(*pair.layouts)
    assert [m for m in mismatches if WINDOW_MISMATCH not in m.field] == []
    counts = []
    for number in range(len(pair.decode.ranks)):
        reads = list(pair.read(number))
        pair.check_memory(number, sum(num_bytes for num_bytes, _ in reads))
        for _, runs in reads:
            assert runs.fewest <= runs.planned
            assert runs.planned <= runs.fewest_apart or has_stripes(case)
            assert runs.fewest == runs.fewest_apart or not case.scattered
            counts.append(runs)
    return counts


def has_stripes(case: Case) -> bool:
    """Then a head's first run may follow another head's last one, and is not merged with it."""
    groups = case.decode.groups + case.prefill.groups
    return any(group.blocks.stripes > 1 for group in groups)


LATENT = tuple(Layer(name, 1, 5, 0) for name in "abc")
EVEN = tuple(Layer(name, 4, 6, 4) for name in "abc")
MIXED = (Layer("a", 1, 5, 0), Layer("b", 4, 2, 3), Layer("c", 12, 1, 4))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tp": (8, 8)}, id="TP 8 to 8, each head twice on both sides"),
        pytest.param({"tp": (4, 2), "pp": (1, 2)}, id="PP 2 TP 2 to TP 4"),
        pytest.param({"tp": (2, 8), "model": LATENT}, id="a latent on all ranks, TP 8 to 2"),
        pytest.param({"tp": (4, 2), "model": MIXED}, id="layers of all kinds, TP 2 to 4"),
        pytest.param({"block": (48, 32), "tokens": range(48, 150)}, id="block size 32 to 48"),
        pytest.param(
            {"tp": (2, 1), "stripes": ((2, 1), (1, 1)), "model": LATENT},
            id="a latent's tokens divided on decode, one by one",
        ),
        pytest.param(
            {"tp": (2, 8), "stripes": ((1, 1), (4, 4)), "model": LATENT},
            id="a latent's tokens divided on prefill in blocks, each twice",
        ),
        pytest.param(
            {"tp": (8, 8), "stripes": ((2, 2), (2, 4)), "tokens": range(8, 45)},
            id="TP 8 with 4 heads, tokens divided on both by other widths",
        ),
        pytest.param({"per_entry": (4, 2)}, id="four blocks per entry on decode, two on prefill"),
        pytest.param({"tp": (2, 1), "orders": ("LBHT", "BHLNC"), "model": EVEN}, id="K transposed"),
        pytest.param(
            {"tp": (4, 2), "block": (4, 6), "orders": ("BHLNC", "LB2NHC")},
            id="TP, block size and order differ",
        ),
    ],
)
def test_typical_engines_exchange_all_kv(changes: dict[str, Any]) -> None:
    check(typical(**changes))


def test_any_two_engines_exchange_all_kv() -> None:
    seen, runs, began = Counter[str](), Counter[str](), time.monotonic()

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=cases())
    def check_and_count(case: Case) -> None:
        for counts in check(case):
            runs.update({} if case.scattered else counts._asdict())
        seen.update({"cases": True, **kinds(case)})

    check_and_count()
    print(f"\nseed {SEED}, {time.monotonic() - began:.0f} s")  # noqa: T201 - what -s is for
    for kind, count in seen.items():
        print(f"{count:6} {kind}")  # noqa: T201
    print(f"runs where blocks may be neighbours: {dict(runs)}")  # noqa: T201
    if EXAMPLES >= ENOUGH:
        assert all(seen.values()), "the strategy no longer draws a kind of case"
        assert runs["planned"] <= 1.05 * runs["fewest"], "neighbours do not merge often enough"


def kinds(case: Case) -> dict[str, bool]:
    """What is special about a case."""
    decode, prefill = case.decode, case.prefill
    heads = {layer.heads for layer in case.model if layer.value}
    first_blocks = [cut.groups[0].blocks for cut in (decode, prefill)]
    pairs = [tuple(c.group_of(x.name).blocks for c in (decode, prefill)) for x in case.model]
    sizes = {(mine.tokens, theirs.tokens) for mine, theirs in pairs}
    return {
        "unequal TP": decode.tp != prefill.tp,
        "TP that does not divide": max(decode.tp, prefill.tp) % min(decode.tp, prefill.tp) > 0,
        "heads copied on prefill": any(prefill.tp > count for count in heads),
        "heads copied on decode": any(decode.tp > count for count in heads),
        "heads copied on both": any(min(decode.tp, prefill.tp) > count for count in heads),
        "unequal PP": decode.stages != prefill.stages,
        "unequal TP and PP": decode.tp != prefill.tp and decode.stages != prefill.stages,
        "unequal orders": decode.orders != prefill.orders,
        "K transposed": any("T" in order for order in decode.orders + prefill.orders),
        "smaller blocks on prefill": any(mine > theirs for mine, theirs in sizes),
        "smaller blocks on decode": any(mine < theirs for mine, theirs in sizes),
        "block sizes that do not divide": any(max(s) % min(s) > 0 for s in sizes),
        "unequal blocks per entry": any(mine.per_entry != b.per_entry for mine, b in pairs),
        "several groups": len(decode.groups) > 1,
        "unequal groups": {g.layers for g in decode.groups} != {g.layers for g in prefill.groups},
        "groups in one memory": decode.stacked or prefill.stacked,
        "a window beside full attention": len({layer.window for layer in case.model}) > 1,
        "a window has passed": any(ABSENT in group.table for group in decode.groups),
        "a prefix hit": case.tokens.start > 0,
        "a hit that ends within a block of prefill": any(
            case.tokens.start % b.tokens for _, b in pairs
        ),
        "an end within a block": any(case.tokens.stop % mine.tokens for mine, _ in pairs),
        "a latent": any(not layer.value for layer in case.model),
        "a latent beside K and V": len({layer.value == 0 for layer in case.model}) > 1,
        "unequal heads": len(heads) > 1,
        "unequal K and V": any(layer.value not in {0, layer.key} for layer in case.model),
        "two blocks": any(2 in (mine.count, b.count) for mine, b in pairs),
        "unused bytes": any(blocks.pad or blocks.gap for blocks in first_blocks),
        "tokens divided on decode": any(mine.stripes > 1 for mine, _ in pairs),
        "tokens divided on prefill": any(b.stripes > 1 for _, b in pairs),
        "tokens divided alike": any(mine.stripes == b.stripes > 1 for mine, b in pairs),
        "tokens divided unlike": any(
            (mine.stripes, mine.width) != (b.stripes, b.width) and min(mine.stripes, b.stripes) > 1
            for mine, b in pairs
        ),
        "no neighbours": case.scattered,
    }
