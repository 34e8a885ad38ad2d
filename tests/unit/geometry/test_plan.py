"""Plans of two ranks: runs, rows and indices of known shapes, written out.

test_any_shape.py shows that the right bytes move, whatever the shape.
"""

import tracemalloc
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.local.model_layouts import PACKED
from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Part, Region, Span, Table
from nixl_kv.geometry.plan import IndexBuffer, Plan, Reads, plan
from support.oracle import (
    Blocks,
    CacheGroup,
    Layer,
    Store,
    byte_pairs,
    check_rows,
    fewest_runs,
    layout,
    runs_within_rows,
)

LOCAL_DEVICE = 3
BASES = (1, 100_000_001)


def layers(count: int, **changes: Any) -> tuple[Layer, ...]:
    return tuple(Layer(f"layer.{number}", **changes) for number in range(count))


class Side(NamedTuple):
    """One rank with one cache group, and a request's block table."""

    order: str
    layers: tuple[Layer, ...]
    blocks: Blocks
    table: tuple[int, ...]


class Case:
    """Two ranks, and the tokens that one of them reads for a request."""

    def __init__(self, local: Side, remote: Side, tokens: range) -> None:
        self.sides = (local, remote)
        self.tokens = tokens
        self.stores = [Store(side.order, side.layers, side.blocks) for side in self.sides]
        self.layouts = [
            layout([store], base, device=device)
            for store, base, device in zip(self.stores, BASES, (LOCAL_DEVICE, 0), strict=True)
        ]
        self.plan = plan(self.layouts[0], self.layouts[1])

    def reads(self) -> Reads:
        local, remote = self.sides
        first = self.tokens.start // self.layouts[0].groups[0].entry_size
        return self.plan.reads(
            [Table.of(local.table[first:], first)], [Table.of(remote.table)], self.tokens
        )

    def pairs(self, tokens: range) -> np.ndarray:
        """The pairs (local byte, remote byte) of these tokens."""
        pairs = [np.empty((0, 2), dtype=np.int64)]
        for mine, theirs in zip(*(side.layers for side in self.sides), strict=True):
            heads = sorted(set(self._heads(mine)) & set(self._heads(theirs)))
            addresses = []
            for side, store, base, layer in zip(
                self.sides, self.stores, BASES, (mine, theirs), strict=True
            ):
                slots = CacheGroup((), side.blocks, side.table).slots()[list(tokens)]
                common = slice(heads[0] - layer.first_head, heads[-1] + 1 - layer.first_head)
                addresses.append(
                    [p[slots[:, 0], common, slots[:, 1]] + base for p in store.parts[layer.name]]
                )
            pairs += [np.stack([a.ravel(), b.ravel()], 1) for a, b in zip(*addresses, strict=True)]
        return np.concatenate(pairs)

    @staticmethod
    def _heads(layer: Layer) -> range:
        return range(layer.first_head, layer.first_head + layer.heads)

    def check(self, tokens: range) -> None:
        """Exactly these tokens are read, each byte once, by rows that a link takes."""
        reads = self.reads()
        copied, expected = byte_pairs(self.plan, reads), self.pairs(tokens)
        assert sorted(map(tuple, copied.tolist())) == sorted(map(tuple, expected.tolist()))
        assert reads.num_bytes == len(expected)
        assert reads.num_runs == runs_within_rows(self.plan, reads)
        check_rows(self.plan.local, self.layouts[0])
        check_rows(self.plan.remote, self.layouts[1])


def equal_ranks() -> Case:
    """Three layers, blocks of four tokens; three scattered blocks."""
    model = layers(3, heads=2, key=2, value=2)
    local = Side("LBHNC", model, Blocks(6, 4), (4, 1, 3))
    remote = Side("LBHNC", model, Blocks(8, 4), (2, 6, 4))
    return Case(local, remote, range(12))


# Qwen3-8B, equal TP: 36 layers, 8 KV heads, 16 tokens per block. K and V have four bytes instead of
# 256; the number of runs does not depend on that. A run is what is contiguous in both orders: a
# whole block (1), a layer (36), a head of a layer (36 * 8 = 288), a token of a head
# (36 * 8 * 16 = 4608). Between BLHNC and BLNHC the end of a layer touches the next one's start on
# both sides, which saves 35 runs.
QWEN3_8B = layers(36, heads=8, key=4, value=4)
RUNS_PER_BLOCK = {
    "LBHNC": (36, 4608, 288, 36, 4608, 288),
    "LBNHC": (4608, 36, 4608, 4608, 36, 4608),
    "LHBNC": (288, 4608, 288, 288, 4608, 288),
    "BLHNC": (36, 4608, 288, 1, 4573, 288),
    "BLNHC": (4608, 36, 4608, 4573, 1, 4608),
    "BHLNC": (288, 4608, 288, 288, 4608, 1),
}


def qwen(orders: tuple[str, str], local: tuple[int, ...], remote: tuple[int, ...]) -> Case:
    tables = (local, remote)
    sides = [
        Side(order, QWEN3_8B, Blocks(6, 16), t) for order, t in zip(orders, tables, strict=True)
    ]
    return Case(sides[0], sides[1], range(16 * len(local)))


@pytest.mark.parametrize(
    ("local", "remote", "runs"),
    [
        pytest.param(local, remote, runs, id=f"{local}-{remote}")
        for local, row in RUNS_PER_BLOCK.items()
        for remote, runs in zip(PACKED, row, strict=True)
    ],
)
def test_runs_per_block_at_equal_tp(local: str, remote: str, runs: int) -> None:
    reads = qwen((local, remote), (4,), (1,)).reads()
    assert (reads.num_runs, reads.num_bytes) == (runs, 36 * 8 * 16 * 8)
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
        pytest.param("LBHT", 36, 144, id="K transposed"),
    ],
)
def test_neighbouring_blocks_merge_where_both_sides_are_dense(
    order: str, neighbours: int, scattered: int
) -> None:
    def runs(local: tuple[int, ...], remote: tuple[int, ...]) -> int:
        return qwen((order, order), local, remote).reads().num_runs

    assert runs((1, 2, 3, 4), (0, 1, 2, 3)) == neighbours
    assert runs((4, 3, 2, 1), (3, 2, 1, 0)) == neighbours
    assert runs((1, 2, 3, 4), (3, 2, 1, 0)) == scattered
    assert runs((0, 2, 4, 5), (1, 2, 3, 5)) == scattered
    assert runs((0, 1, 4, 5), (1, 2, 4, 5)) == scattered // 2


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
        pytest.param(("LBHT", "LBHT"), 36, id="K transposed"),
        pytest.param(("LBHT", "LB2HNC"), 36 * 2 * (16 * 2 + 1), id="K transposed on one side"),
    ],
)
@pytest.mark.parametrize("sliced", [0, 1], ids=["decode has fewer", "prefill has fewer"])
def test_runs_per_block_of_two_heads_out_of_eight(
    orders: tuple[str, str], runs: int, sliced: int
) -> None:
    two = tuple(replace(layer, heads=2, first_head=4) for layer in QWEN3_8B)
    models = (two, QWEN3_8B) if sliced == 0 else (QWEN3_8B, two)
    sides = [
        Side(order, model, Blocks(6, 16), (table,))
        for order, model, table in zip(orders, models, (5, 0), strict=True)
    ]
    reads = Case(sides[0], sides[1], range(16)).reads()
    assert (reads.num_runs, reads.num_bytes) == (runs, 36 * 2 * 16 * 8)


@pytest.mark.parametrize(
    ("local", "remote", "counted", "fewest"),
    [
        pytest.param(
            Side("LBHNC", layers(2, heads=2), Blocks(3, 3), (0, 1, 2)),
            Side("LBHNC", layers(2, heads=2), Blocks(3, 3), (0, 1, 2)),
            2,
            1,
            id="the whole cache is one run",
        ),
        pytest.param(
            Side("BLHNC", layers(2, heads=2), Blocks(3, 3), (0, 1)),
            Side("BLNHC", layers(2, heads=2), Blocks(3, 3), (0, 1)),
            22,
            21,
            id="a block's end touches the next block",
        ),
        pytest.param(
            Side("LB2NHC", layers(2, heads=2), Blocks(3, 8), (1,)),
            Side("L2BNHC", layers(2, heads=2), Blocks(9, 2), (4, 5, 6, 7)),
            16,
            4,
            id="small blocks in one line on one side",
        ),
        pytest.param(
            Side("BLNHC", layers(2, heads=2), Blocks(9, 2), (1, 2, 3, 4)),
            Side("LBNHC", layers(2, heads=2), Blocks(3, 8), (1,)),
            8,
            8,
            id="small blocks apart on one side",
        ),
    ],
)
def test_runs_merge_only_inside_a_row(local: Side, remote: Side, counted: int, fewest: int) -> None:
    """The exceptions, all with neighbouring blocks, where fewer runs would be possible."""
    tokens = range(local.blocks.tokens * len(local.table))
    case = Case(local, remote, tokens)
    case.check(tokens)
    assert case.reads().num_runs == counted
    assert fewest_runs(case.pairs(tokens)) == fewest


# --- unequal blocks


def sizes(
    local: tuple[Blocks, tuple[int, ...]], remote: tuple[Blocks, tuple[int, ...]], tokens: range
) -> Case:
    """One layer of two heads; its tokens are not in one line."""
    model = layers(1, heads=2)
    return Case(Side("LBHNC", model, *local), Side("LBHNC", model, *remote), tokens)


@pytest.mark.parametrize(
    ("local", "remote", "tokens", "read"),
    [
        pytest.param((4, (0, 1)), (4, (2, 0)), range(4, 4), range(0), id="nothing after a hit"),
        pytest.param((2, (0, 3, 1)), (8, (1,)), range(2, 5), range(2, 6), id="2:8, after a hit"),
        pytest.param((8, (1, 0)), (2, (0, 3, 1, 2, 5)), range(8, 9), range(8, 10), id="8:2, a hit"),
        pytest.param((4, (2, 0)), (6, (1, 0)), range(4, 5), range(4, 6), id="4:6, after a hit"),
    ],
)
def test_tokens_are_read_up_to_the_next_block_edge_of_either_side(
    local: tuple[int, tuple[int, ...]],
    remote: tuple[int, tuple[int, ...]],
    tokens: range,
    read: range,
) -> None:
    """And nothing of a prefix hit."""
    case = sizes((Blocks(4, local[0]), local[1]), (Blocks(6, remote[0]), remote[1]), tokens)
    case.check(read)


def test_unequal_blocks_in_one_line_have_one_row_of_smaller_pieces() -> None:
    """One head: every two tokens are a piece, wherever a block ends, and neighbours merge."""
    case = Case(
        Side("LBHNC", layers(1), Blocks(3, 4), (2, 1)),
        Side("LBHNC", layers(1), Blocks(2, 6), (1, 0)),
        range(7),
    )
    assert case.plan.local.tolist() == [[1, 4, LOCAL_DEVICE, 4, 6]]
    assert case.plan.remote.tolist() == [[BASES[1], 4, 0, 4, 6]]
    reads = case.reads()
    assert reads.local.tolist() == [2, 3, 4, 5]
    assert reads.remote.tolist() == [5, 0, 3, 4]
    assert (reads.num_runs, reads.num_bytes) == (3, 16)
    case.check(range(8))


# --- rows and indices


def one_layer(
    base: int, *, stride: int, blocks: int, name: str = "a", length: int = 8, heads: int = 1
) -> tuple[Region, Span]:
    """Heads of one token each, side by side."""
    region = Region(name, base, stride, length, length, 0, heads, (Part(0, length),))
    return region, Span(base, (blocks - 1) * stride + heads * length)


def rank(groups: list[tuple[int, list[tuple[Region, Span]]]], device: int = 0) -> CacheLayout:
    """Groups of so many blocks of one token."""
    return CacheLayout(
        tuple(Group(1, count, 1, tuple(region for region, _ in pairs)) for count, pairs in groups),
        "DRAM",
        device,
        tuple(span for _, pairs in groups for _, span in pairs),
    )


def plan_of_two_groups() -> Plan:
    """The first group has two layers; one of them is dense on one side only."""
    local = rank(
        [
            (
                4,
                [
                    one_layer(1000, stride=8, blocks=4),
                    one_layer(2000, stride=8, blocks=4, name="b"),
                ],
            ),
            (3, [one_layer(3000, stride=24, blocks=3, length=16, name="c")]),
        ],
        device=2,
    )
    remote = rank(
        [
            (
                5,
                [
                    one_layer(7000, stride=20, blocks=5, name="b"),
                    one_layer(8000, stride=8, blocks=5),
                ],
            ),
            (6, [one_layer(9000, stride=16, blocks=6, length=16, name="c")]),
        ],
        device=7,
    )
    return plan(local, remote)


def test_rows_and_indices_written_out() -> None:
    planned = plan_of_two_groups()
    assert planned.local.tolist() == [[1000, 8, 2, 8, 4], [2000, 8, 2, 8, 4], [3000, 16, 2, 24, 3]]
    assert planned.remote.tolist() == [
        [8000, 8, 7, 8, 5],
        [7000, 8, 7, 20, 5],
        [9000, 16, 7, 16, 6],
    ]
    reads = planned.reads(
        [Table.of([0, 1, 3]), Table.of([0, 1, ABSENT])],
        [Table.of([2, 3, 4]), Table.of([4, 5, 0])],
        range(3),
    )
    assert reads.local.tolist() == [0, 1, 3, 4, 5, 7, 8, 9]
    assert reads.remote.tolist() == [2, 3, 4, 7, 8, 9, 14, 15]
    assert reads.num_bytes == 3 * 8 + 3 * 8 + 2 * 16
    assert reads.num_runs == 2 + 3 + 2
    for side in (reads.local, reads.remote):
        assert side.dtype == np.int32
        assert side.flags.c_contiguous


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
    planned, buffer = equal_ranks().plan, IndexBuffer()
    local, remote = [Table.of([4, 1, 3])], [Table.of([2, 6, 4])]
    for end in (8, 4, 12, 12):
        alone = planned.reads(local, remote, range(end))
        reads = planned.reads(local, remote, range(end), buffer=buffer)
        assert reads.local.tolist() == alone.local.tolist()
        assert reads.remote.tolist() == alone.remote.tolist()
        assert reads.local.flags.c_contiguous
        assert reads.remote.flags.c_contiguous
    again = planned.reads(local, remote, range(4), buffer=buffer)
    assert np.shares_memory(again.local, reads.local)
    assert not np.shares_memory(alone.local, reads.local)


def test_groups_in_the_same_memory_share_rows() -> None:
    """Equal rows are in a list once."""
    regions = [one_layer(1000, stride=8, blocks=4, name=name) for name in "ab"]
    side = rank([(4, regions[:1]), (4, regions[1:])])
    planned = plan(side, side)
    assert planned.local.tolist() == planned.remote.tolist() == [[1000, 8, 0, 8, 4]]
    tables = [Table.of([1]), Table.of([3])]
    reads = planned.reads(tables, tables[::-1], range(1))
    assert (reads.local.tolist(), reads.remote.tolist()) == ([1, 3], [3, 1])


# --- shares


def test_ranks_with_nothing_in_common_read_nothing() -> None:
    sides = [rank([(4, [one_layer(1000, stride=8, blocks=4, name=name)])]) for name in "ab"]
    planned = plan(sides[0], sides[1])
    reads = planned.reads([Table.of([1])], [Table.of([])], range(1))
    assert (reads.local.tolist(), reads.remote.tolist(), reads.num_bytes) == ([], [], 0)


# --- block tables


def test_no_tokens_have_no_indices() -> None:
    reads = equal_ranks().plan.reads([Table.of([])], [Table.of([])], range(8, 8))
    assert (len(reads.local), len(reads.remote)) == (0, 0)
    assert (reads.num_bytes, reads.num_runs) == (0, 0)
    assert reads.local.dtype == reads.remote.dtype == np.int32


@pytest.mark.parametrize(
    ("local", "remote", "read"),
    [
        pytest.param([-1, 1, 3], [-1, 6, 4], range(4, 12), id="absent on both sides"),
        pytest.param([-1, 1, 3], [2, 6, 4], range(4, 12), id="absent on the local side only"),
        pytest.param([4, -1, 3], [2, -1, 4], [*range(4), *range(8, 12)], id="in the middle"),
        pytest.param([-1, -1, -1], [2, 6, 4], range(0), id="all absent"),
    ],
)
def test_absent_local_blocks_are_not_read(local: list[int], remote: list[int], read: range) -> None:
    case = equal_ranks()
    reads = case.plan.reads([Table.of(local)], [Table.of(remote)], range(12))
    copied, expected = byte_pairs(case.plan, reads), case.pairs(read)
    assert sorted(map(tuple, copied.tolist())) == sorted(map(tuple, expected.tolist()))
    assert reads.num_bytes == len(expected)


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        pytest.param(
            [4, 1, 3],
            [-1, 6, 4],
            "the remote block of token 0 is absent; it is wanted here",
            id="a remote block absent, at the start",
        ),
        pytest.param(
            [-1, 1, 3],
            [-1, -1, -1],
            "the remote block of token 4 is absent; it is wanted here",
            id="a remote block absent, after a window",
        ),
        pytest.param([6, 1, 3], [2, 6, 4], "block id 6; allowed: 0 to 5", id="large local id"),
        pytest.param(
            [4, 1, 3],
            [2],
            "block table has 1 entries; needed: 3",
            id="short remote table",
        ),
    ],
)
def test_wrong_block_tables_are_refused(local: list[int], remote: list[int], message: str) -> None:
    """A block id that a cache does not have would name a piece of another layer's row."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        equal_ranks().plan.reads([Table.of(local)], [Table.of(remote)], range(12))


def test_a_state_costs_the_same_whatever_the_prompts_length() -> None:
    """Its table has one entry, that of the last token."""
    model = layers(2, heads=2, key=4)
    side = Side("LBHNC", model, Blocks(6, 1), (0,))
    planned = Case(side, side, range(1)).plan

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
    for tables in (([one], [one] * 2), ([one] * 2, [one]), ([one] * 3, [one] * 2)):
        wrong = next(len(side) for side in tables if len(side) != 2)
        with pytest.raises(ValueError, match=f"^{wrong} block tables; allowed: 2, one per group$"):
            planned.reads(*tables, range(1))


def test_entries_after_the_tokens_are_not_checked() -> None:
    planned = equal_ranks().plan
    tables = [Table.of([4, 1, 99])], [Table.of([2, 6, 99, 99])]
    assert planned.reads(*tables, range(5)).num_bytes == 2 * 3 * 2 * 4 * 4


# --- limits


def plan_of_rows(heads: int, num_blocks: int) -> Plan:
    """One row per head; no two heads are in one run."""
    region = Region("a", 1, 64, 32, 8, 0, heads, (Part(0, 8),))
    group = Group(1, num_blocks, 1, (region,))
    side = CacheLayout((group,), "DRAM", 0, (Span(1, 64 * num_blocks),))
    return plan(side, side)


@pytest.mark.parametrize(
    ("heads", "num_blocks", "expected"),
    [
        pytest.param(1, 2**31 - 1, [2**31 - 2], id="one row"),
        pytest.param(2, 2**30 - 1, [2**30 - 2, 2**31 - 3], id="two rows"),
    ],
)
def test_as_many_pieces_as_int32_can_number_are_allowed(
    heads: int, num_blocks: int, expected: list[int]
) -> None:
    last = [Table.of([num_blocks - 1])]
    reads = plan_of_rows(heads, num_blocks).reads(last, last, range(1))
    assert reads.local.tolist() == expected


def test_more_pieces_than_int32_can_number_are_refused() -> None:
    with pytest.raises(IncompatiblePeer, match="make 2147483648 pieces or more; allowed: 21474836"):
        plan_of_rows(2, num_blocks=2**30)


def test_too_many_pieces_on_either_side_are_refused() -> None:
    few, many = (
        rank(
            [
                (
                    count,
                    [
                        one_layer(1 + n * 2**40, stride=16, blocks=count, name=str(n))
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


def test_the_largest_addresses_are_exact() -> None:
    """Floating point would round here, and signed sums would overflow."""
    base = 2**63 - 1
    side = rank([(2, [one_layer(base, stride=2**62 + 1, blocks=2, heads=3)])])
    assert plan(side, side).local.tolist() == [[base, 24, 0, 2**62 + 1, 2]]


def test_too_many_rows_are_refused() -> None:
    """Few blocks make few pieces; but a peer's numbers must not cost this side its memory."""
    sides = []
    for size in (2**7, 2**15):
        head = 2 * size  # no two tokens' bytes are neighbours
        region = Region("a", 1, 64 * head, head, 2, 0, 64, (Part(0, 1),))
        group = Group(size, 2, 1, (region,))
        sides.append(CacheLayout((group,), "DRAM", 0, (Span(1, 2 * 64 * head),)))
    with pytest.raises(IncompatiblePeer, match=r"^a block has \d+ runs or more; allowed: 1048576$"):
        plan(sides[0], sides[1])
