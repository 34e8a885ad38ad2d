"""Runs: what is contiguous on both sides, and how two ranks' regions overlap in such pieces."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.plan import OverlapGroup, Runs, group_overlaps
from support.oracle import Blocks, Layer, Store, fewest_runs, layout

properties = settings(deadline=None, database=None, derandomize=True)

Triples = list[tuple[int, int, int]]  # local, remote, length


def make_runs(triples: Triples) -> Runs:
    table = np.array(triples, dtype=np.int64).reshape(-1, 3)
    return Runs(table[:, 0], table[:, 1], table[:, 2])


def triples(runs: Runs) -> Triples:
    columns = (runs.local.tolist(), runs.remote.tolist(), runs.length.tolist())
    return list(zip(*columns, strict=True))


@properties
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
    """Of two ranks with one group each, (local, remote)."""
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
    regions = [
        Region(name, base, stride, 8, 8, 0, 1, (Part(0, 8),))
        for name, base, stride in (("a", 1000, 32), ("b", 1008, 32), ("c", 1016, 16))
    ]
    group = Group(1, 2, 1, tuple(regions))
    groups = group_overlaps(*alone(group))
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
    orders: tuple[str, str], heads: int, changes: dict[str, int], *, expected: bool
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
