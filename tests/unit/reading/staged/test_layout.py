"""The contents of a slot of a ring; all bytes arrive through it, for any shape."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Span, Table
from nixl_kv.geometry.plan import Share, plan
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
from nixl_kv.reading.staged.ring import may_take, most_slots
from support.any_shape import Pair, check
from support.cases import Case, cases, typical
from support.oracle import Blocks, Layer, Store, byte_pairs, layout
from support.seeds import seed_or

LAYERS = tuple(Layer(name, heads=4, key=8, value=8) for name in "ab")
RING = Span(1 << 20, 1 << 16)


def remote(order: str) -> CacheLayout:
    return layout([Store(order, LAYERS, Blocks(count=6, tokens=4))], base=4096)


def staged(order: str, *heads: int) -> CacheLayout:
    share = {layer.name: (heads[0], heads[1]) for layer in LAYERS}
    return staged_layout(remote(order).groups[0], share, RING, memory="DRAM", device=0)


@pytest.mark.parametrize(
    ("order", "runs_of_a_block"),
    [
        ("LBHNC", 2),
        ("BLHNC", 2),
        ("BHLNC", 1),
        ("LBNHC", 8),
        ("BLNHC", 8),
        ("LHBNC", 4),
        ("LB2HNC", 4),
        ("L2BHNC", 4),
        ("L2BNHC", 16),
    ],
)
def test_prefill_packs_in_runs_that_are_as_long_as_its_own_layout_has_them(
    order: str, runs_of_a_block: int
) -> None:
    """Half of its heads, of two layers, of a block of four tokens."""
    pack = plan(staged(order, 2, 4), remote(order))
    reads = pack.reads([Table.of([5])], [Table.of([1])], range(4))
    assert reads.num_runs == runs_of_a_block
    assert reads.num_bytes == entry_bytes(staged(order, 2, 4)) == 2 * 2 * 4 * 16


def test_an_absent_share_or_a_small_ring_is_refused() -> None:
    group = remote("LBHNC").groups[0]
    for share, ring, why in (
        ({"a": (0, 5)}, RING, "allowed: within 0 to 4"),
        ({"a": (3, 3)}, RING, "allowed: within 0 to 4"),
        ({"a": (-1, 2)}, RING, "allowed: within 0 to 4"),
        ({"z": (0, 1)}, RING, "layer 'z' is not in the group"),
        ({"a": (0, 4), "b": (0, 4)}, Span(1 << 20, 511), "a block has 512 bytes"),
    ):
        with pytest.raises(ValueError, match=why):
            staged_layout(group, share, ring, memory="DRAM", device=0)


@pytest.mark.parametrize("entry", [1, 7, 24, 100, 101])
def test_a_chunk_that_fits_into_one_slot_fits_into_each(entry: int) -> None:
    ring = Ring(Span(4096, 700), 7)
    for slot in range(7):
        first = ring.first_entry(slot, entry)
        assert first * entry >= slot * 100
        assert (first + ring.capacity(entry)) * entry <= (slot + 1) * 100
    assert ring.capacity(entry) == {1: 100, 7: 13, 24: 3, 100: 0, 101: 0}[entry]


def group(block_size: int) -> Group:
    return replace(remote("LBHNC").groups[0], block_size=block_size, num_blocks=1)


@pytest.mark.parametrize("num_slots", range(1, 20))
def test_one_alone_gets_as_many_slots_as_are_said(num_slots: int) -> None:
    held = 0
    while may_take(held, num_slots - held):
        held += 1
    assert most_slots(num_slots) == held


@pytest.mark.parametrize(
    ("sizes", "tokens", "table", "most", "chunks"),
    [
        ((4, 4), range(10), Table.of([0, 0, 0]), 2, [(0, 8), (8, 10)]),
        ((4, 2), range(4, 16), Table.of([0, 0, 0], 1), 3, [(4, 8), (8, 12), (12, 16)]),
        ((2, 4), range(2, 16), Table.of([0] * 7, 1), 2, [(2, 8), (8, 16)]),
        ((4, 3), range(24), Table.of([0] * 6), 6, [(0, 12), (12, 24)]),
        ((4, 3), range(24), Table.of([0] * 6), 3, [(0, 8), (8, 12), (12, 20), (20, 24)]),
        ((4, 4), range(12), Table.of([ABSENT, 0, 0]), 9, [(4, 12)]),
        ((64, 4), range(9), Table.of([0]), 3, [(0, 9)]),
        ((4, 4), range(12), Table.of([ABSENT] * 3), 9, []),
    ],
)
def test_tokens_are_cut_at_blocks_of_both_sides_if_it_can_be_else_at_local_ones(
    sizes: tuple[int, int],
    tokens: range,
    table: Table,
    most: int,
    chunks: list[tuple[int, int]],
) -> None:
    groups = group(sizes[0]), group(sizes[1])
    cut = list(split_tokens(groups, table, tokens, most))
    assert [(chunk.start, chunk.stop) for chunk in cut] == chunks
    theirs = Table.of([0] * 99)
    assert all(len(staged_entries(theirs, groups[1], chunk)) <= most for chunk in cut)


def test_a_local_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into a slot"):
        list(split_tokens((group(64), group(4)), Table.of([0]), range(64), 3))


def test_bytes_that_prefill_lacks_are_not_in_the_slot() -> None:
    table = Table.of([7, ABSENT, 9, 3], 10)
    entries = staged_entries(table, group(4), range(56))
    assert entries == range(10, 14)
    assert staged_table(table, entries, 30) == Table.of([30, ABSENT, 32, 33], 10)
    assert staged_entries(table, group(4), range(48, 99)) == range(12, 14)
    assert staged_entries(table, group(4), range(40)) == range(10, 10)


# Bytes that are packed, read in one run and scattered

MAX_SLOT = 1 << 30


class StagedPair(Pair):
    """Compares what staged reads move with what direct reads do."""

    def check_pairs(
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
        """The bytes of each chunk: their addresses in the slot and in the cache."""
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


def _check_dense(packed: CacheLayout, remote: CacheLayout) -> None:
    """An entry has no gap, and each of its bytes once."""
    group = packed.groups[0]
    block = group.regions[0].block_stride
    content = sum(r.content * r.num_heads * group.units_per_block for r in group.regions)
    assert content == block
    table = Table.of(np.zeros(1, dtype=np.int32))
    others = [Table.of(np.zeros(1, dtype=np.int32)) for _ in remote.groups]
    pack = plan(packed, remote)
    reads = pack.reads([table], others, range(group.entry_size))
    written = byte_pairs(pack, reads)[:, 0] - packed.spans[0].address
    assert sorted(written.tolist()) == list(range(block * group.blocks_per_entry))


def test_typical_engines_exchange_all_kv() -> None:
    for changes in ({}, {"tp": (4, 2)}, {"block": (48, 32), "tokens": range(48, 150)}):
        check(typical(**changes), StagedPair)


@pytest.mark.parametrize("orders", [("LBHNC", "LBNHC"), ("LBNHC", "LBHNC"), ("BHLNC", "BLNHC")])
def test_whole_blocks_are_staged_as_well(orders: tuple[str, str]) -> None:
    check(typical(whole=True, tp=(2, 1), orders=orders, tokens=range(8, 21)), StagedPair)


@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_any_two_engines_exchange_all_kv(count: int) -> None:
    @seed(seed_or(2))
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def exchange(case: Case) -> None:
        check(case, StagedPair)

    exchange()
