"""Plans of two ranks: runs, rows and indices of known shapes, written out.

That the right bytes move, whatever the shape, is shown in test_any_shape.py.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from caches import ORDERS
from oracle import (
    APART,
    TRANSPOSED,
    Blocks,
    CacheGroup,
    Layer,
    Store,
    fewest_runs,
    layout,
    moved,
    runs_within_rows,
)

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.blocks import block_ids
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.plan import Plan, Reads, Scratch, Share, plan

ALL_ORDERS = ORDERS + APART + TRANSPOSED
DEVICE = 3
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
    """Two ranks, and what one of them reads for a request; pairs are (local, remote)."""

    def __init__(
        self, local: Side, remote: Side, tokens: range, share: Share | None = None
    ) -> None:
        self.sides = (local, remote)
        self.tokens = tokens
        self.stores = [Store(side.order, side.layers, side.blocks) for side in self.sides]
        self.layouts = [
            layout([store], base, device=device)
            for store, base, device in zip(self.stores, BASES, (DEVICE, 0), strict=True)
        ]
        self.plan = plan(*self.layouts, share)

    def reads(self) -> Reads:
        local, remote = self.sides
        first = self.tokens.start // self.layouts[0].groups[0].entry_size
        return self.plan.reads(
            [block_ids(local.table[first:])], [block_ids(remote.table)], self.tokens
        )

    def pairs(self, tokens: range) -> np.ndarray:
        """The pairs (local byte, remote byte) of these tokens."""
        found = [np.empty((0, 2), dtype=np.int64)]
        for mine, theirs in zip(*(side.layers for side in self.sides), strict=True):
            heads = sorted(set(self._heads(mine)) & set(self._heads(theirs)))
            ends = []
            for side, store, base, layer in zip(
                self.sides, self.stores, BASES, (mine, theirs), strict=True
            ):
                spots = CacheGroup((), side.blocks, side.table).spots[list(tokens)]
                held = slice(heads[0] - layer.first_head, heads[-1] + 1 - layer.first_head)
                ends.append(
                    [p[spots[:, 0], held, spots[:, 1]] + base for p in store.parts[layer.name]]
                )
            found += [np.stack([a.ravel(), b.ravel()], 1) for a, b in zip(*ends, strict=True)]
        return np.concatenate(found)

    @staticmethod
    def _heads(layer: Layer) -> range:
        return range(layer.first_head, layer.first_head + layer.heads)

    def check(self, tokens: range) -> None:
        """Just these tokens are moved, each byte once, by rows that a link takes."""
        reads = self.reads()
        copied, expected = moved(self.plan, reads), self.pairs(tokens)
        assert sorted(map(tuple, copied.tolist())) == sorted(map(tuple, expected.tolist()))
        assert reads.num_bytes == len(expected)
        assert reads.num_runs == runs_within_rows(self.plan, reads)
        for rows, side in zip((self.plan.local, self.plan.remote), self.layouts, strict=True):
            assert rows.dtype == np.uint64
            for address, length, device, stride, count in rows.tolist():
                assert device == side.device
                assert 1 <= length <= stride
                end = address + (count - 1) * stride + length
                assert any(s.address <= address and end <= s.address + s.length for s in side.spans)


def equal(order: str, other: str | None = None, **changes: Any) -> Case:
    """Three layers, blocks of four tokens; three blocks in no order."""
    made = layers(3, heads=2, key=2, value=2)
    mine = Side(order, made, Blocks(6, 4), (4, 1, 3))
    theirs = Side(other or order, made, Blocks(8, 4), (2, 6, 4))
    local = mine._replace(**changes)
    return Case(local, theirs, range(12))


@pytest.mark.parametrize("remote", ALL_ORDERS)
@pytest.mark.parametrize("local", ALL_ORDERS)
@pytest.mark.parametrize("size", [4, 6])
def test_all_orders(local: str, remote: str, size: int) -> None:
    """Unequal heads, content and block sizes; a hit that cuts a remote block; idle bytes."""
    mine = layers(3, heads=3, key=3, value=2, first_head=1)
    theirs = layers(3, heads=4, key=3, value=2)
    case = Case(
        Side(local, mine, Blocks(6, 2, per_entry=2, pad=1), (2, 0, 1)),
        Side(remote, theirs, Blocks(8, size, gap=2), (3, 1, 2)),
        range(4, 11),
    )
    case.check(range(4, 12))
    blocks = np.arange(4, 12)
    ids = np.stack([blocks // 2, blocks // size], axis=1)
    apart = sum(
        fewest_runs(case.pairs(range(int(stretch.min()), int(stretch.max()) + 1)))
        for stretch in (blocks[(ids == pair).all(axis=1)] for pair in np.unique(ids, axis=0))
    )
    assert fewest_runs(case.pairs(range(4, 12))) <= case.reads().num_runs <= apart


# Qwen3-8B, equal TP: 36 layers, 8 KV heads, 16 tokens per block; K and V are of four bytes instead
# of 256, on which the number of runs does not depend. Orders have in common what is contiguous in
# both of them: a whole block (1), a layer (36), a head of a layer (36 * 8 = 288), a token of a head
# (36 * 8 * 16 = 4608). Between BLHNC and BLNHC the end of a layer meets the next one's start on
# both sides, which saves 35.
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
        for remote, runs in zip(ORDERS, row, strict=True)
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
def test_runs_of_four_blocks(order: str, neighbours: int, scattered: int) -> None:
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
@pytest.mark.parametrize("reader", [0, 1], ids=["decode cut finer", "prefill cut finer"])
def test_runs_per_block_of_two_heads_out_of_eight(
    orders: tuple[str, str], runs: int, reader: int
) -> None:
    two = tuple(replace(layer, heads=2, first_head=4) for layer in QWEN3_8B)
    held = (two, QWEN3_8B) if reader == 0 else (QWEN3_8B, two)
    sides = [
        Side(order, made, Blocks(6, 16), (table,))
        for order, made, table in zip(orders, held, (5, 0), strict=True)
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
            id="a block's end meets the next block",
        ),
        pytest.param(
            Side("LB2NHC", layers(2, heads=2), Blocks(3, 8), (1,)),
            Side("L2BNHC", layers(2, heads=2), Blocks(9, 2), (4, 5, 6, 7)),
            16,
            4,
            id="small blocks in one line, of which larger ones are made up",
        ),
        pytest.param(
            Side("BLNHC", layers(2, heads=2), Blocks(9, 2), (1, 2, 3, 4)),
            Side("LBNHC", layers(2, heads=2), Blocks(3, 8), (1,)),
            8,
            8,
            id="but not where they are apart",
        ),
    ],
)
def test_where_the_count_is_not_the_least_possible(
    local: Side, remote: Side, counted: int, fewest: int
) -> None:
    """Pieces merge inside one row only: these are the exceptions, where blocks are neighbours."""
    tokens = range(local.blocks.tokens * len(local.table))
    case = Case(local, remote, tokens)
    case.check(tokens)
    assert case.reads().num_runs == counted
    assert fewest_runs(case.pairs(tokens)) == fewest


# ------------------------------------------------------------------ unequal blocks


def sizes(
    local: tuple[Blocks, tuple[int, ...]], remote: tuple[Blocks, tuple[int, ...]], tokens: range
) -> Case:
    """One layer of two heads, never in one line."""
    made = layers(1, heads=2)
    return Case(Side("LBHNC", made, *local), Side("LBHNC", made, *remote), tokens)


@pytest.mark.parametrize(
    ("local", "remote", "tokens", "read"),
    [
        pytest.param((4, (0, 1)), (4, (2, 0)), range(8), range(8), id="equal"),
        pytest.param((4, (0, 1)), (4, (2, 0)), range(5), range(8), id="the end cuts a block"),
        pytest.param((4, (0, 1)), (4, (2, 0)), range(4, 8), range(4, 8), id="after a hit"),
        pytest.param((4, (0, 1)), (4, (2, 0)), range(4, 4), range(0), id="nothing after a hit"),
        pytest.param((2, (0, 3)), (8, (1,)), range(3), range(4), id="the end cuts both"),
        pytest.param((2, (0, 3, 1)), (8, (1,)), range(2, 5), range(2, 6), id="the hit cuts one"),
        pytest.param((8, (1,)), (2, (0, 3)), range(3), range(4), id="only what is there"),
        pytest.param((8, (1, 0)), (2, (0, 3, 1, 2, 5)), range(8, 9), range(8, 10), id="4:1, a hit"),
        pytest.param((4, (2, 0)), (6, (1, 0)), range(7), range(8), id="4:6"),
        pytest.param((4, (2, 0)), (6, (1, 0)), range(4, 5), range(4, 6), id="4:6, after a hit"),
        pytest.param((3, (2, 0, 1)), (2, (1, 0, 2, 4)), range(3, 7), range(3, 8), id="3:2"),
    ],
)
def test_what_is_read(
    local: tuple[int, tuple[int, ...]],
    remote: tuple[int, tuple[int, ...]],
    tokens: range,
    read: range,
) -> None:
    """Up to the next edge of a block of either side, and nothing of a hit."""
    case = sizes((Blocks(4, local[0]), local[1]), (Blocks(6, remote[0]), remote[1]), tokens)
    case.check(read)


@pytest.mark.parametrize(
    ("per_entry", "local", "remote", "tokens"),
    [
        pytest.param((1, 2), (5, 1, 3), (2, 0), range(12), id="two on the remote side"),
        pytest.param((2, 1), (2, 0), (5, 1, 3, 0), range(12), id="two on the local side"),
        pytest.param((2, 3), (2, 0, 1), (1, 0), range(8, 20), id="two and three, after a hit"),
    ],
)
def test_entries_of_several_blocks(
    per_entry: tuple[int, int], local: tuple[int, ...], remote: tuple[int, ...], tokens: range
) -> None:
    blocks = [Blocks(6, 4, per_entry=count) for count in per_entry]
    sizes((blocks[0], local), (blocks[1], remote), tokens).check(tokens)


def test_rows_of_unequal_blocks() -> None:
    """Local blocks of two tokens, remote ones of four: each half of a remote block has its rows."""
    case = sizes((Blocks(4, 2), (3, 1, 0)), (Blocks(2, 4), (1, 0)), range(6))
    assert case.plan.local.tolist() == [[1, 4, DEVICE, 8, 4], [5, 4, DEVICE, 8, 4]]
    base = BASES[1]
    assert case.plan.remote.tolist() == [
        [base, 4, 0, 16, 2],
        [base + 8, 4, 0, 16, 2],
        [base + 4, 4, 0, 16, 2],
        [base + 12, 4, 0, 16, 2],
    ]
    reads = case.reads()
    assert reads.local.tolist() == [3, 0, 7, 4, 1, 5]
    assert reads.remote.tolist() == [1, 0, 3, 2, 5, 7]
    assert (reads.num_runs, reads.num_bytes) == (6, 24)


def test_rows_of_unequal_blocks_in_one_line() -> None:
    """One head: every two tokens are a piece, wherever a block ends, and neighbours merge."""
    case = Case(
        Side("LBHNC", layers(1), Blocks(3, 4), (2, 1)),
        Side("LBHNC", layers(1), Blocks(2, 6), (1, 0)),
        range(7),
    )
    assert case.plan.local.tolist() == [[1, 4, DEVICE, 4, 6]]
    assert case.plan.remote.tolist() == [[BASES[1], 4, 0, 4, 6]]
    reads = case.reads()
    assert reads.local.tolist() == [2, 3, 4, 5]
    assert reads.remote.tolist() == [5, 0, 3, 4]
    assert (reads.num_runs, reads.num_bytes) == (3, 16)
    case.check(range(8))


def test_equal_blocks_in_one_line_are_not_cut() -> None:
    case = Case(
        Side("LBHNC", layers(1), Blocks(3, 4), (2, 1)),
        Side("LBHNC", layers(1), Blocks(2, 4), (1, 0)),
        range(8),
    )
    assert case.plan.local.tolist() == [[1, 8, DEVICE, 8, 3]]


# ------------------------------------------------------------------ rows and indices


def one_layer(
    base: int, *, stride: int, blocks: int, name: str = "a", length: int = 8, heads: int = 1
) -> tuple[Region, Span]:
    """Heads of one token each, side by side."""
    region = Region(name, base, stride, length, length, 0, heads, (Part(0, length),))
    return region, Span(base, (blocks - 1) * stride + heads * length)


def rank(groups: list[tuple[int, list[tuple[Region, Span]]]], device: int = 0) -> CacheLayout:
    return CacheLayout(
        tuple(Group(1, count, 1, tuple(region for region, _ in found)) for count, found in groups),
        "uint8",
        "DRAM",
        device,
        tuple(span for _, found in groups for _, span in found),
    )


def two_groups() -> Plan:
    """The first with two layers, one of which is dense on one side only."""
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
    planned = two_groups()
    assert planned.local.tolist() == [[1000, 8, 2, 8, 4], [2000, 8, 2, 8, 4], [3000, 16, 2, 24, 3]]
    assert planned.remote.tolist() == [
        [8000, 8, 7, 8, 5],
        [7000, 8, 7, 20, 5],
        [9000, 16, 7, 16, 6],
    ]
    reads = planned.reads(
        [block_ids([0, 1, 3]), block_ids([0, 1, -1])],
        [block_ids([2, 3, 4]), block_ids([4, 5, 0])],
        range(3),
    )
    assert reads.local.tolist() == [0, 1, 3, 4, 5, 7, 8, 9]
    assert reads.remote.tolist() == [2, 3, 4, 7, 8, 9, 14, 15]
    assert reads.num_bytes == 3 * 8 + 3 * 8 + 2 * 16
    assert reads.num_runs == 2 + 3 + 2
    for side in (reads.local, reads.remote):
        assert side.dtype == np.int32
        assert side.flags.c_contiguous


def test_pieces_that_may_merge_are_named_in_the_order_of_local_blocks() -> None:
    """An allocator hands out runs, but often backwards: only in this order do they merge."""
    reads = two_groups().reads(
        [block_ids([3, 2, 0]), block_ids([-1] * 3)],
        [block_ids([4, 3, 0]), block_ids([0] * 3)],
        range(3),
    )
    assert reads.local.tolist() == [0, 2, 3, 7, 6, 4]
    assert reads.remote.tolist() == [0, 3, 4, 9, 8, 5]
    assert reads.num_runs == 2 + 3


def test_indices_in_memory_that_is_used_again() -> None:
    """They are those of the last request; more of them than ever before take new memory."""
    planned, scratch = equal("LBHNC").plan, Scratch()
    local, remote = [block_ids([4, 1, 3])], [block_ids([2, 6, 4])]
    for end in (8, 4, 12, 12):
        alone = planned.reads(local, remote, range(end))
        reads = planned.reads(local, remote, range(end), scratch=scratch)
        assert reads.local.tolist() == alone.local.tolist()
        assert reads.remote.tolist() == alone.remote.tolist()
        assert reads.local.flags.c_contiguous
        assert reads.remote.flags.c_contiguous
    again = planned.reads(local, remote, range(4), scratch=scratch)
    assert np.shares_memory(again.local, reads.local)
    assert not np.shares_memory(alone.local, reads.local)


def test_groups_in_one_memory_share_rows() -> None:
    """Equal rows stand in a list once: the blocks of both groups are numbered together."""
    regions = [one_layer(1000, stride=8, blocks=4, name=name) for name in "ab"]
    side = rank([(4, regions[:1]), (4, regions[1:])])
    planned = plan(side, side)
    assert planned.local.tolist() == planned.remote.tolist() == [[1000, 8, 0, 8, 4]]
    tables = [block_ids([1]), block_ids([3])]
    reads = planned.reads(tables, tables[::-1], range(1))
    assert (reads.local.tolist(), reads.remote.tolist()) == ([1, 3], [3, 1])


def test_groups_need_not_be_the_same() -> None:
    """A layer's blocks are those of its own group on each side; empty groups keep their number."""
    made = {
        name: one_layer(1000 * n, stride=8, blocks=4, name=name) for n, name in enumerate("abc", 1)
    }
    local = rank([(4, [made["a"], made["b"]]), (4, []), (4, [made["c"]])])
    remote = rank([(4, [made["b"], made["c"]]), (4, [made["a"]])])
    reads = plan(local, remote).reads(
        [block_ids([0]), block_ids([]), block_ids([1])], [block_ids([2]), block_ids([3])], range(1)
    )
    assert reads.local.tolist() == [0, 4, 9]  # a, b, c
    assert reads.remote.tolist() == [3, 6, 10]


def test_rows_stand_in_the_order_of_local_addresses() -> None:
    made = layers(2, heads=2)[::-1]
    sides = [Side(order, made, Blocks(2), (0,)) for order in ("BLHNC", "LHBNC", "BHLNC")]
    planned = Case(sides[0], sides[1], range(1)).plan
    assert planned.local.tolist() == [[1 + 2 * n, 2, DEVICE, 8, 2] for n in range(4)]
    assert (planned.remote[:, 0] - BASES[1]).tolist() == [0, 4, 8, 12]
    turned = Case(sides[0], sides[2], range(1)).plan
    assert turned.local[:, 0].tolist() == [1, 3, 5, 7]
    assert (turned.remote[:, 0] - BASES[1]).tolist() == [0, 4, 2, 6]


def test_layers_are_found_by_name() -> None:
    local = rank([(1, [one_layer(100, stride=8, blocks=1)])])
    a, b = (one_layer(base, stride=8, blocks=1, name=n) for n, base in (("b", 300), ("a", 400)))
    assert plan(local, rank([(1, [a, b])])).remote.tolist() == [[400, 8, 0, 8, 1]]


def test_one_part_alone() -> None:
    """As of a latent cache: one head, everything of a token in one piece."""
    region = Region("a", 64, 576 * 4, 576 * 4, 576, 0, 1, (Part(0, 576),))
    side = CacheLayout((Group(4, 3, 1, (region,)),), "bf16", "VRAM", 0, (Span(64, 576 * 12),))
    assert plan(side, side).local.tolist() == [[64, 2304, 0, 2304, 3]]


# ------------------------------------------------------------------ shares


@pytest.mark.parametrize(
    ("share", "local", "remote"),
    [
        pytest.param(None, [[17, 24, 0, 64, 4]], [[1, 24, 0, 64, 4]], id="all that both hold"),
        pytest.param({"a": (2, 5)}, [[17, 24, 0, 64, 4]], [[1, 24, 0, 64, 4]], id="the same, told"),
        pytest.param({"a": (3, 4)}, [[25, 8, 0, 64, 4]], [[9, 8, 0, 64, 4]], id="one of three"),
        pytest.param({}, [], [], id="nothing"),
        pytest.param({"b": (2, 5)}, [], [], id="a layer that neither holds"),
    ],
)
def test_shares(share: Share | None, local: list[list[int]], remote: list[list[int]]) -> None:
    """Heads 0 to 4 here, 2 to 9 there, of eight bytes each."""
    sides = [
        CacheLayout(
            (Group(1, 4, 1, (Region("a", 1, 64, 8, 8, first, count, (Part(0, 8),)),)),),
            "uint8",
            "DRAM",
            0,
            (Span(1, 256),),
        )
        for first, count in ((0, 5), (2, 8))
    ]
    planned = plan(sides[0], sides[1], share)
    assert (planned.local.tolist(), planned.remote.tolist()) == (local, remote)
    assert planned.local.shape == (len(local), 5)


def test_ranks_that_have_nothing_in_common() -> None:
    sides = [rank([(4, [one_layer(1000, stride=8, blocks=4, name=name)])]) for name in "ab"]
    planned = plan(sides[0], sides[1])
    reads = planned.reads([block_ids([1])], [block_ids([])], range(1))
    assert (reads.local.tolist(), reads.remote.tolist(), reads.num_bytes) == ([], [], 0)


# ------------------------------------------------------------------ block tables


def test_nothing_to_read() -> None:
    reads = equal("LBHNC").plan.reads([block_ids([])], [block_ids([])], range(8, 8))
    assert (len(reads.local), len(reads.remote)) == (0, 0)
    assert (reads.num_bytes, reads.num_runs) == (0, 0)
    assert reads.local.dtype == reads.remote.dtype == np.int32


@pytest.mark.parametrize(
    ("local", "remote", "read"),
    [
        pytest.param([-1, 1, 3], [-1, 6, 4], range(4, 12), id="on both sides"),
        pytest.param([-1, 1, 3], [2, 6, 4], range(4, 12), id="here alone"),
        pytest.param([4, -1, 3], [2, -1, 4], [*range(4), *range(8, 12)], id="in the middle"),
        pytest.param([-1, -1, -1], [2, 6, 4], range(0), id="all of it"),
    ],
)
def test_where_a_window_has_passed(local: list[int], remote: list[int], read: range) -> None:
    case = equal("LBHNC")
    reads = case.plan.reads([block_ids(local)], [block_ids(remote)], range(12))
    expected = case.pairs(read)
    assert sorted(map(tuple, moved(case.plan, reads).tolist())) == sorted(
        map(tuple, expected.tolist())
    )
    assert reads.num_bytes == len(expected)


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        pytest.param(
            [4, 1, 3],
            [-1, 6, 4],
            "the remote block of token 0 is absent; it is wanted here",
            id="absent there, at the start",
        ),
        pytest.param(
            [-1, 1, 3],
            [-1, -1, -1],
            "the remote block of token 4 is absent; it is wanted here",
            id="absent there, after a window",
        ),
        pytest.param([6, 1, 3], [2, 6, 4], "block id 6; allowed: 0 to 5", id="no such block here"),
        pytest.param([4, 1, 3], [2, 8, 4], "block id 8; allowed: 0 to 7", id="no such one there"),
        pytest.param([4, -2, 3], [2, 6, 4], "block id -2; allowed: 0 to 5", id="negative here"),
        pytest.param([4, 1, 3], [2, -2, 4], "block id -2; allowed: 0 to 7", id="negative there"),
        pytest.param(
            [4, 1], [2, 6, 4], "block table has the entries 0 to 1; needed: 0 to 2", id="short here"
        ),
        pytest.param(
            [4, 1, 3], [2], "block table has the entries 0 to 0; needed: 0 to 2", id="short there"
        ),
    ],
)
def test_tables_that_do_not_fit(local: list[int], remote: list[int], message: str) -> None:
    """A block that a cache does not have would name a piece of another row: another layer's."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        equal("LBHNC").plan.reads([block_ids(local)], [block_ids(remote)], range(12))


def test_a_block_table_for_each_group_is_required() -> None:
    """They come from peers."""
    planned, one = two_groups(), block_ids([1])
    for tables in (([one], [one] * 2), ([one] * 2, [one]), ([one] * 3, [one] * 2)):
        wrong = next(len(side) for side in tables if len(side) != 2)
        with pytest.raises(ValueError, match=f"^{wrong} block tables; allowed: 2, one per group$"):
            planned.reads(*tables, range(1))


def test_entries_beyond_the_tokens_are_not_looked_at() -> None:
    planned = equal("LBHNC").plan
    tables = [block_ids([4, 1, 99])], [block_ids([2, 6, 99, 99])]
    assert planned.reads(*tables, range(5)).num_bytes == 2 * 3 * 2 * 4 * 4


# ------------------------------------------------------------------ limits


def planned_of(num_blocks: int, heads: int) -> Plan:
    """One row per head: the heads' tokens are never in one run."""
    region = Region("a", 1, 64, 32, 8, 0, heads, (Part(0, 8),))
    group = Group(1, num_blocks, 1, (region,))
    side = CacheLayout((group,), "uint8", "DRAM", 0, (Span(1, 64 * num_blocks),))
    return plan(side, side)


def test_the_last_index_that_fits() -> None:
    planned = planned_of(2**31 - 1, heads=1)
    last = [block_ids([2**31 - 2])]
    assert planned.reads(last, last, range(1)).local.tolist() == [2147483646]
    planned = planned_of(2**30 - 1, heads=2)
    last = [block_ids([2**30 - 2])]
    assert planned.reads(last, last, range(1)).local.tolist() == [2**30 - 2, 2**31 - 3]


def test_more_pieces_than_int32_can_number_are_refused() -> None:
    with pytest.raises(IncompatiblePeer, match="make 2147483648 pieces or more; allowed: 21474836"):
        planned_of(2**30, heads=2)


def test_the_side_with_more_pieces_decides() -> None:
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


def test_addresses_up_to_the_top_are_exact() -> None:
    """Doubles would round here, and signed sums overflow."""
    base = 2**63 - 1
    side = rank([(2, [one_layer(base, stride=2**62 + 1, blocks=2, heads=3)])])
    assert plan(side, side).local.tolist() == [[base, 24, 0, 2**62 + 1, 2]]


def test_blocks_that_come_apart_into_more_rows_than_are_worth_a_list_are_refused() -> None:
    """Few blocks, so few pieces; but a peer's numbers must not cost this side its memory."""
    sides = []
    for size in (2**7, 2**15):
        head = 2 * size  # each token's byte stands alone
        region = Region("a", 1, 64 * head, head, 2, 0, 64, (Part(0, 1),))
        group = Group(size, 2, 1, (region,))
        sides.append(CacheLayout((group,), "uint8", "DRAM", 0, (Span(1, 2 * 64 * head),)))
    with pytest.raises(IncompatiblePeer, match=r"^a block has \d+ runs or more; allowed: 1048576$"):
        plan(*sides)
