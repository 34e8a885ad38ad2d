"""Plans, held against a naive oracle; runs and rows of known shapes, written out."""

from dataclasses import replace

import numpy as np
import pytest
from caches import ORDERS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import (
    APART,
    DEVICE,
    Bytes,
    Shape,
    fewest_runs,
    layout,
    moved,
    named,
    runs_within_rows,
    wanted,
)

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry import blocks
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.plan import Plan, Reads, plan

ABSENT = -1
QWEN3_8B = Shape(layers=36, blocks=6, heads=8, tokens=16, key=256, value=256)


class Case:
    """Two ranks and a request's block tables, one (local, remote) pair per group."""

    def __init__(
        self,
        orders: tuple[str, str],
        shapes: list[tuple[Shape, Shape]],
        tables: list[tuple[list[int], list[int]]],
        *,
        aliased: tuple[bool, bool] = (False, False),
        backwards: bool = False,
    ) -> None:
        self.orders = orders
        self.tables = tables
        self.sides = [
            [
                Bytes(orders[side], pair[side], 1 if aliased[side] else 1 + number * 10_000_000)
                for number, pair in enumerate(shapes)
            ]
            for side in (0, 1)
        ]
        self.layouts = (
            layout(self.sides[0], device=DEVICE),
            layout(self.sides[1], backwards=backwards),
        )
        self.plan = plan(*self.layouts)

    def reads(self) -> Reads:
        pairs = []
        for side, (local, remote) in zip(self.sides[0], self.tables, strict=True):
            paired = blocks.pair(blocks.block_ids(local), blocks.block_ids(remote), ABSENT)
            expanded = [blocks.expand(ids, side.shape.per_entry) for ids in paired]
            pairs.append((expanded[0], expanded[1]))
        return self.plan.reads(pairs)

    def wanted(self) -> np.ndarray:
        found = []
        for mine, theirs, table in zip(*self.sides, self.tables, strict=True):
            per = mine.shape.per_entry
            kernel = [[entry * per + step for entry in ids for step in range(per)] for ids in table]
            found.append(wanted(mine, theirs, zip(*kernel, strict=True)))
        return np.concatenate(found)


@st.composite
def head_ranges(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two (first, count) that have at least one head in common."""
    common = draw(st.integers(0, 3))
    found = []
    for _ in range(2):
        first = draw(st.integers(0, common))
        found.append((first, draw(st.integers(common - first + 1, 4))))
    return found[0], found[1]


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[Shape, Shape]:
    heads = draw(head_ranges())
    per_entry = draw(st.integers(1, 3))
    common = Shape(
        layers=draw(st.integers(1, 4)),
        tokens=draw(st.integers(1, 5)),
        key=draw(st.integers(1, 6)),
        value=draw(st.integers(1, 6)),
        per_entry=per_entry,
    )
    found = [
        replace(
            common,
            blocks=draw(st.integers(1, 6)) * per_entry,
            pad=draw(st.integers(0, 2)),
            first_head=first,
            heads=count,
        )
        for first, count in heads
    ]
    return found[0], found[1]


@st.composite
def entry_ids(draw: st.DrawFn, shape: Shape) -> list[int]:
    """All entries of a table: any order, or one that has runs."""
    ids = list(range(shape.blocks // shape.per_entry))
    return draw(st.one_of(st.permutations(ids), st.sampled_from([ids, ids[::-1]])))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Groups with memory of their own, or groups that share one memory and divide its blocks."""
    count = draw(st.integers(1, 3))
    aliased = (False, False)
    if draw(st.booleans()):
        shapes = [draw(shape_pairs())] * count
        aliased = (draw(st.booleans()), draw(st.booleans()))
        ids = [draw(entry_ids(shape)) for shape in shapes[0]]
        length = draw(st.integers(0, min(map(len, ids)) // count))
        tables = [
            (ids[0][n * length : (n + 1) * length], ids[1][n * length : (n + 1) * length])
            for n in range(count)
        ]
    else:
        shapes = [draw(shape_pairs()) for _ in range(count)]
        tables = []
        for pair in shapes:
            ids = [draw(entry_ids(shape)) for shape in pair]
            length = draw(st.integers(0, min(map(len, ids))))
            tables.append((ids[0][:length], ids[1][:length]))
    order = st.sampled_from(ORDERS + APART)
    return Case(
        (draw(order), draw(order)),
        shapes,
        tables,
        aliased=aliased,
        backwards=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None, database=None)
@given(case=cases())
def test_every_wanted_byte_is_copied_once_and_no_other(case: Case) -> None:
    check_bytes(case)


def check_bytes(case: Case) -> None:
    reads = case.reads()
    copied, expected = moved(case.plan, reads), case.wanted()
    assert len(np.unique(copied[:, 0])) == len(copied)
    assert np.array_equal(np.unique(copied, axis=0), np.unique(expected, axis=0))
    assert reads.num_bytes == len(expected)
    assert reads.num_runs == runs_within_rows(case.plan, reads)
    assert reads.num_runs >= fewest_runs(expected)
    check_rows(case)


def check_rows(case: Case) -> None:
    """What a link takes: each row inside one registered span, its pieces apart, its device."""
    for rows, side in zip((case.plan.local, case.plan.remote), case.layouts, strict=True):
        assert rows.dtype == np.uint64
        for address, length, device, stride, count in rows.tolist():
            assert device == side.device
            assert length >= 1
            assert stride >= length
            end = address + (count - 1) * stride + length
            assert any(s.address <= address and end <= s.address + s.length for s in side.spans)


@pytest.mark.parametrize("remote", ORDERS + APART)
@pytest.mark.parametrize("local", ORDERS + APART)
def test_all_orders_with_unequal_heads_and_content(local: str, remote: str) -> None:
    mine = Shape(layers=3, blocks=6, heads=3, tokens=4, key=5, value=3, first_head=1, per_entry=2)
    theirs = replace(mine, blocks=8, heads=4, first_head=0)
    check_bytes(Case((local, remote), [(mine, theirs)], [([2, 0, 1], [3, 1, 2])]))


@settings(max_examples=80, deadline=None, database=None)
@given(shapes=shape_pairs(), orders=st.tuples(*[st.sampled_from(ORDERS + APART)] * 2))
@example(shapes=(QWEN3_8B, QWEN3_8B), orders=("BLHNC", "BHLNC"))
def test_one_block_takes_the_fewest_runs(
    shapes: tuple[Shape, Shape], orders: tuple[str, str]
) -> None:
    mine, theirs = (replace(shape, per_entry=1) for shape in shapes)
    case = Case(orders, [(mine, theirs)], [([mine.blocks - 1], [0])])
    assert case.reads().num_runs == fewest_runs(case.wanted())


# Qwen3-8B, bf16, equal TP: 36 layers, 8 KV heads, 16 tokens per block, K and V of 256 bytes.
# Orders have in common what is contiguous in both of them: a whole block (1), a layer (36),
# a head of a layer (36 * 8 = 288), a token of a head (36 * 8 * 16 = 4608). Between BLHNC and BLNHC
# the end of a layer meets the next one's start on both sides, which saves 35.
RUNS_PER_BLOCK = {
    "LBHNC": (36, 4608, 288, 36, 4608, 288),
    "LBNHC": (4608, 36, 4608, 4608, 36, 4608),
    "LHBNC": (288, 4608, 288, 288, 4608, 288),
    "BLHNC": (36, 4608, 288, 1, 4573, 288),
    "BLNHC": (4608, 36, 4608, 4573, 1, 4608),
    "BHLNC": (288, 4608, 288, 288, 4608, 1),
}


@pytest.mark.parametrize(
    ("local", "remote", "runs"),
    [
        pytest.param(local, remote, runs, id=f"{local}-{remote}")
        for local, row in RUNS_PER_BLOCK.items()
        for remote, runs in zip(ORDERS, row, strict=True)
    ],
)
def test_runs_per_block_at_equal_tp(local: str, remote: str, runs: int) -> None:
    reads = Case((local, remote), [(QWEN3_8B, QWEN3_8B)], [([4], [1])]).reads()
    assert (reads.num_runs, reads.num_bytes) == (runs, 2_359_296)
    assert len(reads.local) == len(reads.remote) == runs


@pytest.mark.parametrize(
    ("order", "neighbours", "scattered"),
    [
        pytest.param("LBHNC", 36, 144, id="LBHNC"),
        pytest.param("LBNHC", 36, 144, id="LBNHC"),
        pytest.param("LHBNC", 288, 1152, id="LHBNC"),
        pytest.param("BLHNC", 1, 4, id="BLHNC"),
        pytest.param("BLNHC", 1, 4, id="BLNHC"),
        pytest.param("BHLNC", 1, 4, id="BHLNC"),
        pytest.param("L2BHNC", 72, 288, id="K and V in two halves"),
        pytest.param("LB2HNC", 36, 144, id="K and V side by side"),
    ],
)
def test_runs_of_four_blocks(order: str, neighbours: int, scattered: int) -> None:
    shapes = [(QWEN3_8B, QWEN3_8B)]

    def runs(local: list[int], remote: list[int]) -> int:
        return Case((order, order), shapes, [(local, remote)]).reads().num_runs

    assert runs([1, 2, 3, 4], [0, 1, 2, 3]) == neighbours
    assert runs([4, 3, 2, 1], [3, 2, 1, 0]) == neighbours
    assert runs([1, 2, 3, 4], [3, 2, 1, 0]) == scattered
    assert runs([0, 2, 4, 5], [1, 2, 3, 5]) == scattered
    assert runs([0, 1, 4, 5], [1, 2, 4, 5]) == scattered // 2


@pytest.mark.parametrize(
    ("orders", "runs"),
    [
        pytest.param(("BHLNC", "BHLNC"), 1, id="BHLNC"),
        pytest.param(("LBHNC", "LBHNC"), 36, id="LBHNC"),
        pytest.param(("BLHNC", "BLHNC"), 36, id="BLHNC"),
        pytest.param(("LHBNC", "LHBNC"), 36 * 2, id="LHBNC"),
        pytest.param(("LBNHC", "LBNHC"), 36 * 16, id="LBNHC"),
        pytest.param(("BLNHC", "BLNHC"), 36 * 16, id="BLNHC"),
        pytest.param(("LB2HNC", "LB2HNC"), 36 * 2, id="K and V side by side"),
        pytest.param(("L2BHNC", "LB2HNC"), 36 * 2, id="K and V apart in two ways"),
        pytest.param(("LB2NHC", "LB2NHC"), 36 * 2 * 16, id="K and V side by side, tokens first"),
        pytest.param(("LBHNC", "LB2HNC"), 36 * 2 * 16 * 2, id="K and V together and apart"),
    ],
)
@pytest.mark.parametrize("reader", [0, 1], ids=["decode cut finer", "prefill cut finer"])
def test_runs_per_block_of_two_heads_out_of_eight(
    orders: tuple[str, str], runs: int, reader: int
) -> None:
    whole, part = QWEN3_8B, replace(QWEN3_8B, heads=2, first_head=4)
    shapes = (part, whole) if reader == 0 else (whole, part)
    case = Case(orders, [shapes], [([5], [0])])
    assert case.reads().num_runs == runs
    assert case.reads().num_bytes == 36 * 2 * 16 * 512


@pytest.mark.parametrize(
    ("orders", "tables", "counted", "fewest"),
    [
        pytest.param(
            ("LBHNC", "LBHNC"), [([0, 1, 2], [0, 1, 2])], 2, 1, id="the whole cache is one run"
        ),
        pytest.param(
            ("BLHNC", "BLNHC"), [([0, 1], [0, 1])], 22, 21, id="a block's end meets the next block"
        ),
        pytest.param(
            ("BLHNC", "BLHNC"), [([0], [1]), ([1], [2])], 2, 1, id="groups that share one memory"
        ),
    ],
)
def test_where_the_count_is_not_the_least_possible(
    orders: tuple[str, str], tables: list[tuple[list[int], list[int]]], counted: int, fewest: int
) -> None:
    """Pieces merge inside one row only. These are the exceptions; none is common."""
    shape = Shape(layers=2, blocks=3, heads=2, tokens=3)
    case = Case(orders, [(shape, shape)] * len(tables), tables, aliased=(True, True))
    check_bytes(case)
    assert case.reads().num_runs == counted
    assert fewest_runs(case.wanted()) == fewest


def one_layer(
    base: int, *, stride: int, blocks_: int, name: str = "a", length: int = 8, heads: int = 1
) -> tuple[Region, Span]:
    """Heads of one token each, side by side."""
    region = Region(name, base, stride, length, length, 0, heads, (Part(0, length),))
    return region, Span(base, (blocks_ - 1) * stride + heads * length)


def ranks_layout(
    groups: list[tuple[int, list[tuple[Region, Span]]]], device: int = 0
) -> CacheLayout:
    return CacheLayout(
        tuple(Group(1, count, 1, tuple(r for r, _ in layers)) for count, layers in groups),
        "uint8",
        "DRAM",
        device,
        tuple(span for _, layers in groups for _, span in layers),
    )


def test_rows_and_indices_written_out() -> None:
    """Two groups; the first with two layers, one of which is dense on one side only."""
    local = ranks_layout(
        [
            (
                4,
                [
                    one_layer(1000, stride=8, blocks_=4),
                    one_layer(2000, stride=8, blocks_=4, name="b"),
                ],
            ),
            (3, [one_layer(3000, stride=24, blocks_=3, length=16)]),
        ],
        device=2,
    )
    remote = ranks_layout(
        [
            (
                5,
                [
                    one_layer(7000, stride=20, blocks_=5, name="b"),
                    one_layer(8000, stride=8, blocks_=5),
                ],
            ),
            (6, [one_layer(9000, stride=16, blocks_=6, length=16)]),
        ],
        device=7,
    )
    planned = plan(local, remote)
    assert planned.local.tolist() == [
        [1000, 8, 2, 8, 4],
        [2000, 8, 2, 8, 4],
        [3000, 16, 2, 24, 3],
    ]
    assert planned.remote.tolist() == [
        [8000, 8, 7, 8, 5],
        [7000, 8, 7, 20, 5],
        [9000, 16, 7, 16, 6],
    ]
    ids = blocks.block_ids
    reads = planned.reads([(ids([0, 1, 3]), ids([2, 3, 4])), (ids([0, 1]), ids([4, 5]))])
    assert reads.local.tolist() == [0, 1, 3, 4, 5, 7, 8, 9]
    assert reads.remote.tolist() == [2, 3, 4, 7, 8, 9, 14, 15]
    assert reads.num_bytes == 3 * 8 + 3 * 8 + 2 * 16
    assert reads.num_runs == 2 + 3 + 2
    for side in (reads.local, reads.remote):
        assert side.dtype == np.int32
        assert side.flags.c_contiguous


def test_layers_of_a_group_merge_only_where_their_block_strides_agree() -> None:
    """Three neighbours in block 0; in block 1 only two of them still are."""
    layers = [("a", 1000, 32), ("b", 1008, 32), ("c", 1016, 16)]
    made = [one_layer(base, stride=stride, blocks_=2, name=n) for n, base, stride in layers]
    group = Group(1, 2, 1, tuple(region for region, _ in made))
    side = CacheLayout((group,), "uint8", "DRAM", 0, (Span(1000, 64),))
    assert plan(side, side).local.tolist() == [[1000, 16, 0, 32, 2], [1016, 8, 0, 16, 2]]


def test_rows_stand_in_the_order_of_local_addresses() -> None:
    shape = Shape(layers=2, blocks=2, heads=2)
    planned = Case(("BLHNC", "LHBNC"), [(shape, shape)], [([0], [0])], backwards=True).plan
    assert planned.local.tolist() == [
        [1, 2, DEVICE, 8, 2],
        [3, 2, DEVICE, 8, 2],
        [5, 2, DEVICE, 8, 2],
        [7, 2, DEVICE, 8, 2],
    ]
    assert planned.remote[:, 0].tolist() == [1, 5, 9, 13]
    turned = Case(("BLHNC", "BHLNC"), [(shape, shape)], [([0], [0])]).plan
    assert turned.local[:, 0].tolist() == [1, 3, 5, 7]
    assert turned.remote[:, 0].tolist() == [1, 5, 3, 7]


def test_as_many_groups_on_both_sides() -> None:
    one = ranks_layout([(1, [one_layer(100, stride=8, blocks_=1)])])
    two = replace(one, groups=one.groups * 2)
    for sides in ((one, two), (two, one)):
        with pytest.raises(ValueError, match="zip"):
            plan(*sides)


def test_layers_are_found_by_name() -> None:
    local = ranks_layout([(1, [one_layer(100, stride=8, blocks_=1, name=n) for n in "ab"][:1])])
    a, b = (one_layer(base, stride=8, blocks_=1, name=n) for n, base in (("b", 300), ("a", 400)))
    assert plan(local, ranks_layout([(1, [a, b])])).remote.tolist() == [[400, 8, 0, 8, 1]]


def test_one_part_alone() -> None:
    """As of a latent cache: one head, everything of a token in one piece."""
    region = Region("a", 64, 576 * 4, 576 * 4, 576, 0, 1, (Part(0, 576),))
    side = CacheLayout((Group(4, 3, 1, (region,)),), "bf16", "VRAM", 0, (Span(64, 576 * 12),))
    assert plan(side, side).local.tolist() == [[64, 2304, 0, 2304, 3]]


def test_nothing_to_read() -> None:
    shape = Shape(layers=2, blocks=3)
    reads = Case(("LBHNC", "BLHNC"), [(shape, shape)] * 2, [([], []), ([], [])]).reads()
    assert (len(reads.local), len(reads.remote)) == (0, 0)
    assert (reads.num_bytes, reads.num_runs) == (0, 0)
    assert reads.local.dtype == reads.remote.dtype == np.int32


def test_a_group_without_blocks_adds_nothing() -> None:
    shape = Shape(layers=2, blocks=3)
    case = Case(("LBHNC", "LBHNC"), [(shape, shape)] * 2, [([], []), ([2], [1])])
    assert case.reads().num_runs == 2
    assert [row for row, _, _ in named(case.plan, case.reads())[0].tolist()] == [2, 3]


def test_a_block_table_for_each_group_is_required() -> None:
    shape = Shape(blocks=2)
    planned = Case(("LBHNC", "LBHNC"), [(shape, shape)] * 2, [([], []), ([], [])]).plan
    ids = blocks.block_ids([1])
    with pytest.raises(ValueError, match="zip"):
        planned.reads([(ids, ids)])


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        pytest.param([3], [0], "block id 3; allowed: 0 to 2", id="beyond the local cache"),
        pytest.param([0], [5], "block id 5; allowed: 0 to 4", id="beyond the remote cache"),
        pytest.param([-1], [0], "block id -1; allowed: 0 to 2", id="negative here"),
        pytest.param([0], [-1], "block id -1; allowed: 0 to 4", id="negative there"),
        pytest.param([0, 1], [0], "2 local and 1 remote blocks", id="unequal numbers"),
        pytest.param([0, 1, 2], [4, 9, 0], "block id 9; allowed: 0 to 4", id="among good ones"),
        pytest.param([0, 1, 2], [4, -2, 9], "block id -2; allowed: 0 to 4", id="both at once"),
    ],
)
@pytest.mark.parametrize("group", [0, 1])
def test_blocks_that_no_cache_has(
    local: list[int], remote: list[int], message: str, group: int
) -> None:
    """Each would name a piece of another row: bytes of another layer."""
    shapes = (Shape(layers=2, blocks=3), Shape(layers=2, blocks=5))
    planned = Case(("LBHNC", "LBHNC"), [shapes] * 2, [([], []), ([], [])]).plan
    last = (blocks.block_ids([2]), blocks.block_ids([4]))
    tables = [last, last]
    assert planned.reads(tables).num_runs == 4
    tables[group] = (blocks.block_ids(local), blocks.block_ids(remote))
    with pytest.raises(ValueError, match=f"^{message}$"):
        planned.reads(tables)


def planned_of(num_blocks: int, heads: int) -> Plan:
    """One row per head: there the heads stand in the opposite order of tokens, never in one run."""
    local, remote = (
        ranks_layout([(num_blocks, [one_layer(1, stride=16, blocks_=num_blocks, name="a")])])
        for _ in range(2)
    )
    if heads == 2:
        apart = Region("a", 1, 64, 32, 8, 0, 2, (Part(0, 8),))
        group = Group(1, num_blocks, 1, (apart,))
        local = remote = CacheLayout((group,), "uint8", "DRAM", 0, (Span(1, 64 * num_blocks),))
    return plan(local, remote)


def test_the_last_index_that_fits() -> None:
    planned = planned_of(2**31 - 1, heads=1)
    last = blocks.block_ids([2**31 - 2])
    assert planned.reads([(last, last)]).local.tolist() == [2147483646]
    assert len(planned_of(2**30 - 1, heads=2).local) == 2


def test_more_pieces_than_int32_can_number_are_refused() -> None:
    with pytest.raises(
        IncompatiblePeer,
        match="2 runs per block make 2147483648 pieces; allowed: 2147483647",
    ):
        planned_of(2**30, heads=2)


def test_the_side_with_more_pieces_decides() -> None:
    few, many = (
        ranks_layout(
            [
                (
                    count,
                    [
                        one_layer(1 + n * 2**40, stride=16, blocks_=count, name=str(n))
                        for n in (0, 1)
                    ],
                )
            ]
        )
        for count in (10, 2**30)
    )
    for sides in ((few, many), (many, few)):
        with pytest.raises(IncompatiblePeer, match="2147483648 pieces"):
            plan(*sides)


def test_addresses_up_to_the_top_are_exact() -> None:
    """Doubles would round here, and signed sums overflow."""
    base = 2**63 - 1
    region, span = one_layer(base, stride=2**62 + 1, blocks_=2, heads=3)
    side = ranks_layout([(2, [(region, span)])])
    assert plan(side, side).local.tolist() == [[base, 24, 0, 2**62 + 1, 2]]
