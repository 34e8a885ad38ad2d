"""What is in a slot of a ring. That all bytes arrive, for any shape, is in `test_any_shape`."""

from dataclasses import replace

import pytest

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Span, Table
from nixl_kv.geometry.plan import plan
from nixl_kv.protocol.prefill import may_take, most_slots
from nixl_kv.reading.staged.layout import (
    Ring,
    entry_bytes,
    split_tokens,
    staged_entries,
    staged_layout,
    staged_table,
)
from support.oracle import Blocks, Layer, Store, layout

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


def test_all_of_a_block_is_one_run_where_prefill_has_it_in_one_piece() -> None:
    pack = plan(staged("BLHNC", 0, 4), remote("BLHNC"))
    assert pack.reads([Table.of([5])], [Table.of([1])], range(4)).num_runs == 1


@pytest.mark.parametrize(("first", "end"), [(0, 5), (3, 3), (-1, 2)])
def test_heads_that_are_not_there_are_refused(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="allowed: within 0 to 4"):
        staged("LBHNC", first, end)


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 'z' is not in the group"):
        staged_layout(remote("LBHNC").groups[0], {"z": (0, 1)}, RING, memory="DRAM", device=0)


def test_a_ring_without_room_for_a_block_is_refused() -> None:
    small = Span(1 << 20, 511)
    with pytest.raises(ValueError, match="a block has 512 bytes"):
        staged_layout(
            remote("LBHNC").groups[0], {"a": (0, 4), "b": (0, 4)}, small, memory="DRAM", device=0
        )


@pytest.mark.parametrize("entry", [1, 7, 24, 100, 101])
def test_what_fits_into_a_slot_fits_into_each_slot(entry: int) -> None:
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


def test_what_prefill_does_not_have_is_not_in_the_slot() -> None:
    table = Table.of([7, ABSENT, 9, 3], 10)
    entries = staged_entries(table, group(4), range(56))
    assert entries == range(10, 14)
    assert staged_table(table, entries, 30) == Table.of([30, ABSENT, 32, 33], 10)
    assert staged_entries(table, group(4), range(48, 99)) == range(12, 14)
    assert staged_entries(table, group(4), range(40)) == range(10, 10)
