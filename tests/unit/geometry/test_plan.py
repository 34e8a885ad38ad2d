"""Plans of two ranks: runs, rows and indices of known shapes, written out.

test_any_shape.py shows that the right bytes move, whatever the shape.
"""

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Part, Region, Span, Table, extent
from nixl_kv.geometry.plan import IndexBuffer, OverlapGroup, Plan, Reads, Runs, group_overlaps, plan
from support.oracle import Blocks, Layer, Store, fewest_runs, layout

LOCAL_DEVICE = 3
BASES = (1, 100_000_001)


def layers(count: int, *, heads: int = 1, key: int = 1, value: int = 1) -> tuple[Layer, ...]:
    return tuple(Layer(f"layer.{number}", heads, key, value) for number in range(count))


def plan_of(order: str, model: tuple[Layer, ...], *blocks: Blocks) -> Plan:
    """The plan of two ranks with one cache group each, (local, remote)."""
    stores = [Store(order, model, each) for each in blocks]
    local = layout([stores[0]], BASES[0], device=LOCAL_DEVICE)
    return plan(local, layout([stores[1]], BASES[1]))


def equal_ranks() -> Plan:
    """Three layers, blocks of four tokens."""
    return plan_of("LBHNC", layers(3, heads=2, key=2, value=2), Blocks(6, 4), Blocks(8, 4))


@pytest.mark.parametrize(
    ("order", "per_block"),
    [
        pytest.param("LBHNC", 36, id="LBHNC"),
        pytest.param("LHBNC", 288, id="LHBNC"),
        pytest.param("BLHNC", 1, id="BLHNC"),
        pytest.param("L2BHNC", 72, id="K and V in two halves"),
        pytest.param("LB2HNC", 36, id="K and V side by side"),
        pytest.param("LBHT", 36, id="K transposed"),
    ],
)
def test_neighbouring_blocks_merge(order: str, per_block: int) -> None:
    """Qwen3-8B: 36 layers, 8 KV heads. K and V have four bytes instead of 256."""
    model = layers(36, heads=8, key=4, value=4)
    planned = plan_of(order, model, Blocks(6, 16), Blocks(6, 16))
    for local, remote, num_runs in (
        ([1, 2, 3, 4], [0, 1, 2, 3], 1),
        ([4, 3, 2, 1], [3, 2, 1, 0], 1),
        ([1, 2, 3, 4], [3, 2, 1, 0], 4),
        ([0, 2, 4, 5], [1, 2, 3, 5], 4),
        ([0, 1, 4, 5], [1, 2, 4, 5], 2),
    ):
        reads = planned.reads([Table.of(local)], [Table.of(remote)], range(64))
        assert reads.num_runs == num_runs * per_block


def test_unequal_blocks_in_one_line_have_one_row_of_smaller_pieces() -> None:
    """One head: every two tokens are a piece, wherever a block ends, and neighbours merge."""
    planned = plan_of("LBHNC", layers(1), Blocks(3, 4), Blocks(2, 6))
    assert planned.local.tolist() == [[1, 4, LOCAL_DEVICE, 4, 6]]
    assert planned.remote.tolist() == [[BASES[1], 4, 0, 4, 6]]
    reads = planned.reads([Table.of([2, 1])], [Table.of([1, 0])], range(7))
    assert reads.local.tolist() == [2, 3, 4, 5]
    assert reads.remote.tolist() == [5, 0, 3, 4]
    assert (reads.num_runs, reads.num_bytes) == (3, 16)


# --- rows and indices


def heads_apart(layer: str, base: int, stride: int, length: int = 8, heads: int = 1) -> Region:
    """Heads of one token each, side by side."""
    return Region(layer, base, stride, length, length, 0, heads, (Part(0, length),))


def rank(*groups: tuple[int, list[Region]], device: int = 0) -> CacheLayout:
    """Groups of these numbers of blocks of one token."""
    made = tuple(Group(1, count, 1, tuple(regions)) for count, regions in groups)
    spans = {Span(r.base, extent(r, group)) for group in made for r in group.regions}
    return CacheLayout(made, "DRAM", device, tuple(spans))


def plan_of_two_groups() -> Plan:
    """The first group has two layers; one of them is dense on one side only."""
    local = rank(
        (4, [heads_apart("a", 1000, 8), heads_apart("b", 2000, 8)]),
        (3, [heads_apart("c", 3000, 24, 16)]),
        device=2,
    )
    remote = rank(
        (5, [heads_apart("b", 7000, 20), heads_apart("a", 8000, 8)]),
        (6, [heads_apart("c", 9000, 16, 16)]),
        device=7,
    )
    return plan(local, remote)


def test_indices_of_dense_rows_are_in_the_order_of_local_blocks() -> None:
    """An allocator hands out neighbours, but often backwards: they merge in this order only."""
    reads = plan_of_two_groups().reads(
        [Table.of([3, 2, 0]), Table.of([ABSENT] * 3)],
        [Table.of([4, 3, 0]), Table.of([0] * 3)],
        range(3),
    )
    assert reads.local.tolist() == [0, 2, 3, 7, 6, 4]
    assert reads.remote.tolist() == [0, 3, 4, 9, 8, 5]
    assert reads.num_runs == 2 + 3


def test_an_index_buffer_is_used_again_and_grows() -> None:
    planned, buffer = equal_ranks(), IndexBuffer()
    tables = [Table.of([4, 1, 3])], [Table.of([2, 6, 4])]
    for end in (8, 4, 12):
        reads = planned.reads(*tables, range(end), buffer=buffer)
        alone = planned.reads(*tables, range(end))
        assert np.array_equal(reads.local, alone.local)
        assert np.array_equal(reads.remote, alone.remote)
        assert reads.local.flags.c_contiguous
    again = planned.reads(*tables, range(4), buffer=buffer)
    assert np.shares_memory(again.local, reads.local)


def test_ranks_with_nothing_in_common_and_no_tokens_read_nothing() -> None:
    local, remote = (rank((4, [heads_apart(name, 1000, 8)])) for name in "ab")
    apart = plan(local, remote).reads([Table.of([1])], [Table.of([])], range(1))
    no_tokens = equal_ranks().reads([Table.of([])], [Table.of([])], range(8, 8))
    for reads in (apart, no_tokens):
        assert len(reads.local) == len(reads.remote) == reads.num_bytes == reads.num_runs == 0
        assert reads.local.dtype == reads.remote.dtype == np.int32


# --- block tables


@pytest.mark.parametrize(
    ("local", "remote", "token"), [([4, 1, 3], [-1, 6, 4], 0), ([-1, 1, 3], [-1] * 3, 4)]
)
def test_an_absent_remote_block_that_is_wanted_is_refused(
    local: list[int], remote: list[int], token: int
) -> None:
    message = f"^the remote block of token {token} is absent; it is wanted here$"
    with pytest.raises(ValueError, match=message):
        equal_ranks().reads([Table.of(local)], [Table.of(remote)], range(12))


def test_a_state_costs_the_same_whatever_the_prompts_length() -> None:
    """Its table has one entry, that of the last token."""
    planned = plan_of("LBHNC", layers(2, heads=2, key=4), Blocks(6, 1), Blocks(6, 1))

    def reads(last: int) -> Reads:
        tokens = range(last + 1)
        return planned.reads([Table.of([4], first=last)], [Table.of([2], first=last)], tokens)

    tracemalloc.start()
    try:
        long, (_, peak) = reads((1 << 20) - 1), tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, "bytes"
    alone = reads(0)
    assert long.num_bytes == alone.num_bytes > 0
    assert np.array_equal(long.local, alone.local)
    assert np.array_equal(long.remote, alone.remote)


def test_each_group_must_have_a_block_table() -> None:
    planned, one = plan_of_two_groups(), Table.of([1])
    for local, remote, wrong in ((1, 2, 1), (2, 1, 1), (3, 2, 3)):
        with pytest.raises(ValueError, match=f"^{wrong} block tables; allowed: 2, one per group$"):
            planned.reads([one] * local, [one] * remote, range(1))


# --- limits


def test_as_many_pieces_as_int32_can_number_are_allowed() -> None:
    """Two heads are two rows, because they are not in one run."""
    num_blocks = 2**30 - 1
    side = rank((num_blocks, [Region("a", 1, 64, 32, 8, 0, 2, (Part(0, 8),))]))
    last = [Table.of([num_blocks - 1])]
    assert plan(side, side).reads(last, last, range(1)).local.tolist() == [2**30 - 2, 2**31 - 3]


def test_more_pieces_than_int32_can_number_are_refused() -> None:
    few, many = (
        rank((count, [heads_apart(str(n), 1 + n * 2**40, 16) for n in (0, 1)]))
        for count in (10, 2**30)
    )
    for sides in ((few, many), (many, few)):
        with pytest.raises(
            IncompatiblePeer, match="2147483648 pieces or more; allowed: 2147483647"
        ):
            plan(*sides)


def test_the_largest_addresses_are_exact() -> None:
    """Floating point would round here, and signed sums would overflow."""
    base = 2**63 - 1
    side = rank((2, [heads_apart("a", base, 2**62 + 1, heads=3)]))
    assert plan(side, side).local.tolist() == [[base, 24, 0, 2**62 + 1, 2]]


def test_too_many_rows_are_refused() -> None:
    """Few blocks make few pieces; but a peer's numbers must not cost this side its memory."""
    sides = []
    for size in (2**7, 2**15):
        # No two tokens' bytes are neighbours.
        region = Region("a", 1, 128 * size, 2 * size, 2, 0, 64, (Part(0, 1),))
        sides.append(
            CacheLayout((Group(size, 2, 1, (region,)),), "DRAM", 0, (Span(1, 256 * size),))
        )
    with pytest.raises(IncompatiblePeer, match=r"^a block has \d+ runs or more; allowed: 1048576$"):
        plan(sides[0], sides[1])


# --- runs: bytes that are contiguous on both sides


Triples = list[tuple[int, int, int]]  # local, remote, length


def make_runs(triples: Triples) -> Runs:
    table = np.array(triples, dtype=np.int64).reshape(-1, 3)
    return Runs(table[:, 0], table[:, 1], table[:, 2])


def triples(runs: Runs) -> Triples:
    columns = (runs.local.tolist(), runs.remote.tolist(), runs.length.tolist())
    return list(zip(*columns, strict=True))


@given(
    pairs=st.dictionaries(st.integers(0, 20), st.integers(0, 20), min_size=1, max_size=12),
    rng=st.randoms(use_true_random=False),
)
def test_merged_runs_are_the_fewest_possible(pairs: dict[int, int], rng: random.Random) -> None:
    """Single bytes, each copied once, in any order."""
    single_bytes = [(local, remote, 1) for local, remote in pairs.items()]
    rng.shuffle(single_bytes)
    merged = make_runs(single_bytes).merged()
    assert sorted(copied_bytes(merged)) == sorted(pairs.items())
    assert len(merged.local) == fewest_runs(np.array(sorted(pairs.items())))
    assert merged.local.tolist() == sorted(merged.local.tolist())


def copied_bytes(runs: Runs) -> list[tuple[int, int]]:
    """The pairs (local byte, remote byte)."""
    return [
        (local + step, remote + step)
        for local, remote, length in triples(runs)
        for step in range(length)
    ]


# --- overlaps of two ranks


def overlaps_of(
    orders: Sequence[str],
    layers: list[Layer],
    blocks: Sequence[Blocks] = (Blocks(3, 4), Blocks(2, 4)),
) -> list[OverlapGroup]:
    """The overlaps of two ranks with one group each, (local, remote)."""
    local, remote = (
        layout([Store(order, layers, cut)], base)
        for order, cut, base in zip(orders, blocks, (1000, 9000), strict=True)
    )
    return group_overlaps(local, remote)


def alone(group: Group) -> tuple[CacheLayout, CacheLayout]:
    """Two ranks that have this group, at the same addresses."""
    layout = CacheLayout((group,), "DRAM", 0, (Span(1, 1 << 40),))
    return layout, layout


def test_layers_merge_only_where_their_block_strides_are_equal() -> None:
    """Three layers are neighbours in block 0; in block 1 only two of them still are."""
    places = ("a", 1000, 32), ("b", 1008, 32), ("c", 1016, 16)
    side = rank((2, [heads_apart(*place) for place in places]))
    groups = group_overlaps(side, side)
    assert [overlaps.block_strides for overlaps in groups] == [(32, 32), (16, 16)]
    assert [triples(overlaps.runs(1, (0, 0))) for overlaps in groups] == [
        [(1000, 1000, 16)],
        [(1016, 1016, 8)],
    ]


def test_layers_with_equal_overlaps_are_planned_once() -> None:
    layers = [Layer(f"layer.{number}", 2) for number in range(5)]
    layers[3] = replace(layers[3], key=4)
    groups = overlaps_of(("LBHNC", "BLHNC"), layers)
    num_layers = [[bases.shape[1] for bases in group.bases.values()] for group in groups]
    assert num_layers == [[4], [1]]


@pytest.mark.parametrize(
    ("orders", "heads", "changes", "expected"),
    [
        pytest.param(("LBNHC", "LBNHC"), 2, {}, True, id="tokens outside heads"),
        pytest.param(("L2BNHC", "L2BNHC"), 2, {}, True, id="all K, then all V"),
        pytest.param(("LBHNC", "LBNHC"), 1, {}, True, id="one head, in either order"),
        pytest.param(("LBHNC", "LBHNC"), 2, {}, False, id="heads outside tokens"),
        pytest.param(("LB2NHC", "LB2NHC"), 2, {}, False, id="V of a block before K of the next"),
        pytest.param(("LBNHC", "BLNHC"), 2, {}, False, id="layers interleaved on one side"),
        pytest.param(("LBNHC", "L2BNHC"), 2, {}, False, id="K and V together and apart"),
        pytest.param(("LBNHC", "LBNHC"), 2, {"pad": 1}, False, id="unused bytes in the content"),
        pytest.param(("LBNHC", "LBNHC"), 2, {"gap": 1}, False, id="unused bytes between blocks"),
        pytest.param(("LBHT", "LBHT"), 1, {}, False, id="K transposed"),
    ],
)
def test_which_layouts_have_all_tokens_in_one_line(
    orders: tuple[str, str], heads: int, changes: dict[str, Any], *, expected: bool
) -> None:
    layers = [Layer(name, heads, 2, 2) for name in "ab"]
    blocks = Blocks(3, 4, **changes), Blocks(3, 4)
    for step in (1, -1):
        (group,) = overlaps_of(orders[::step], layers, blocks[::step])
        assert group.is_linear(2) == expected


def test_blocks_of_too_many_pieces_are_refused() -> None:
    """A peer's numbers must not cost this side its memory."""
    size = 8192
    region = Region("a", 1, size * 4096, 1, 4096, 0, 4096, (Part(0, 1),))
    (overlaps,) = group_overlaps(*alone(Group(size, 2, 1, (region,))))
    with pytest.raises(
        IncompatiblePeer, match=r"^a block has \d+ pieces or more; allowed: 4194304"
    ):
        overlaps.runs(size, (0, 0))
    assert triples(overlaps.runs(1, (3, 0))) == [(1 + 3 * 4096, 1, 4096)]


def test_many_pieces_that_merge_are_allowed() -> None:
    """A model of 32 layers with 32 heads of 128 elements, K transposed: one run per layer."""
    parts = Part(0, 2, 128, 256, 2), Part(2**15, 256, token_stride=256)
    regions = [Region(f"{n}", 1 + n * 2**30, 2**21, 2**16, 2, 0, 32, parts) for n in range(32)]
    (overlaps,) = group_overlaps(*alone(Group(128, 9, 1, tuple(regions))))
    assert len(overlaps.runs(128, (0, 0)).local) == 32
