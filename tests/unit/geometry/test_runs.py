"""Runs: what is contiguous on both sides, and where two regions' maps meet in such pieces."""

import random
from dataclasses import replace

import numpy as np
import pytest
from caches import ORDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import APART, TRANSPOSED, Blocks, Layer, Store, fewest_runs, layout

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import Group, Part, Region
from nixl_kv.geometry.runs import Runs, bundles, joined

properties = settings(deadline=None, database=None, derandomize=True)

Triples = list[tuple[int, int, int]]  # local, remote, length


def runs(triples: Triples) -> Runs:
    table = np.array(triples, dtype=np.int64).reshape(-1, 3)
    return Runs(table[:, 0], table[:, 1], table[:, 2])


def triples(found: Runs) -> Triples:
    columns = (found.local.tolist(), found.remote.tolist(), found.length.tolist())
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize(
    ("given_runs", "expected"),
    [
        pytest.param([(0, 100, 4)], [(0, 100, 4)], id="one"),
        pytest.param([(0, 100, 4), (4, 104, 2)], [(0, 100, 6)], id="neighbours on both sides"),
        pytest.param([(4, 104, 2), (0, 100, 4)], [(0, 100, 6)], id="in any order"),
        pytest.param(
            [(0, 100, 4), (4, 104, 2), (6, 106, 1), (9, 109, 1)],
            [(0, 100, 7), (9, 109, 1)],
            id="three of four",
        ),
        pytest.param(
            [(0, 100, 4), (4, 105, 2)], [(0, 100, 4), (4, 105, 2)], id="on the local side alone"
        ),
        pytest.param(
            [(0, 100, 4), (5, 104, 2)], [(0, 100, 4), (5, 104, 2)], id="on the remote side alone"
        ),
        pytest.param(
            [(0, 104, 4), (4, 100, 4)], [(0, 104, 4), (4, 100, 4)], id="in opposite orders"
        ),
        pytest.param(
            [(8, 200, 1), (0, 100, 1)], [(0, 100, 1), (8, 200, 1)], id="sorted by the local side"
        ),
    ],
)
def test_merged(given_runs: Triples, expected: Triples) -> None:
    assert triples(runs(given_runs).merged()) == expected


def test_repeated() -> None:
    found = runs([(0, 100, 4), (50, 200, 2)]).repeated(3, 10, 1000)
    assert triples(found) == [
        (0, 100, 4),
        (50, 200, 2),
        (10, 1100, 4),
        (60, 1200, 2),
        (20, 2100, 4),
        (70, 2200, 2),
    ]


def test_moved() -> None:
    found = runs([(0, 100, 4), (50, 200, 2)]).moved(np.array([7, 1]), np.array([0, 30]))
    assert triples(found) == [(7, 100, 4), (57, 200, 2), (1, 130, 4), (51, 230, 2)]


def test_joined() -> None:
    found = joined(iter([runs([(5, 6, 7)]), runs([(0, 1, 2), (9, 9, 9)])]))
    assert triples(found) == [(5, 6, 7), (0, 1, 2), (9, 9, 9)]


@properties
@given(
    pairs=st.dictionaries(st.integers(0, 20), st.integers(0, 20), min_size=1, max_size=12),
    rng=st.randoms(use_true_random=False),
)
def test_merging_leaves_the_fewest_runs(pairs: dict[int, int], rng: random.Random) -> None:
    """Of single bytes, each of them copied once, in any order."""
    given_runs = [(local, remote, 1) for local, remote in pairs.items()]
    rng.shuffle(given_runs)
    found = triples(runs(given_runs).merged())
    copied = {
        local + step: remote + step for local, remote, length in found for step in range(length)
    }
    assert copied == pairs
    assert len(found) == fewest_runs(np.array(sorted(pairs.items())))


class Two:
    """Two ranks with one group each, and what they have in common of all layers."""

    def __init__(
        self,
        orders: tuple[str, str],
        layers: tuple[list[Layer], list[Layer]],
        blocks: tuple[Blocks, Blocks],
    ) -> None:
        self.stores = [
            Store(order, side, cut) for order, side, cut in zip(orders, layers, blocks, strict=True)
        ]
        mine, theirs = (
            layout([store], base).groups[0]
            for store, base in zip(self.stores, (1000, 9000), strict=True)
        )
        self.pairs = [
            (here, there, common(here, there))
            for here, there in zip(mine.regions, theirs.regions, strict=True)
        ]
        self.bundles = bundles((mine, theirs), self.pairs)

    def naive(self, num_tokens: int, slots: tuple[int, int]) -> np.ndarray:
        """The pairs (local byte, remote byte) of block 0."""
        found = []
        for mine, theirs, heads in self.pairs:
            sides = [
                [
                    part[0, heads[0] - first : heads[1] - first, slot : slot + num_tokens].ravel()
                    for part in store.parts[mine.layer]
                ]
                for store, first, slot in zip(
                    self.stores, (mine.first_head, theirs.first_head), slots, strict=True
                )
            ]
            found += [np.stack([a + 1000, b + 9000], axis=1) for a, b in zip(*sides, strict=True)]
        return np.concatenate(found)


def common(here: Region, there: Region) -> tuple[int, int]:
    return max(here.heads[0], there.heads[0]), min(here.heads[1], there.heads[1])


def one_layer(orders: tuple[str, str], *, heads: tuple[int, int] = (2, 2), first: int = 0) -> Two:
    """Blocks of four tokens, K and V of one byte each. `first` is of the local heads."""
    return Two(
        orders,
        ([Layer("a", heads[0], first_head=first)], [Layer("a", heads[1])]),
        (Blocks(3, 4), Blocks(2, 4)),
    )


@pytest.mark.parametrize(
    ("two", "tokens", "slots", "expected"),
    [
        pytest.param(
            one_layer(("LBHNC", "LBHNC")), 4, (0, 0), [(1000, 9000, 16)], id="a whole block"
        ),
        pytest.param(
            one_layer(("LBHNC", "LBHNC")),
            2,
            (2, 0),
            [(1004, 9000, 4), (1012, 9008, 4)],
            id="two tokens of each head, at different slots",
        ),
        pytest.param(
            one_layer(("LBNHC", "LBNHC")), 2, (2, 1), [(1008, 9004, 8)], id="tokens of all heads"
        ),
        pytest.param(
            one_layer(("LBHNC", "LBNHC")),
            2,
            (0, 2),
            [(1000, 9008, 2), (1002, 9012, 2), (1008, 9010, 2), (1010, 9014, 2)],
            id="a token of a head",
        ),
        pytest.param(
            one_layer(("LBHNC", "LBHNC"), heads=(1, 2), first=1),
            4,
            (0, 0),
            [(1000, 9008, 8)],
            id="the second head",
        ),
        pytest.param(
            one_layer(("L2BHNC", "LB2HNC")),
            4,
            (0, 0),
            [(1000, 9000, 8), (1024, 9008, 8)],
            id="K and V apart",
        ),
        pytest.param(
            one_layer(("LBHT", "LB2HNC"), heads=(1, 1)),
            4,
            (0, 0),
            [(1000, 9000, 8)],
            id="content of one byte is the same transposed",
        ),
    ],
)
def test_runs_of_a_block(two: Two, tokens: int, slots: tuple[int, int], expected: Triples) -> None:
    (bundle,) = two.bundles
    assert triples(bundle.runs(tokens, slots)) == expected


@st.composite
def twos(draw: st.DrawFn) -> tuple[Two, int, tuple[int, int]]:
    """Two ranks, so many tokens, and their slots on both sides."""
    first = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    more = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    kinds = draw(st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=1, max_size=3))
    layers = [
        [
            Layer(
                f"layer.{n}", max(first) - first[side] + more[side], key + 1, value, 0, first[side]
            )
            for n, (key, value) in enumerate(kinds)
        ]
        for side in (0, 1)
    ]
    tokens = draw(st.integers(1, 4))
    slots = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    cut = st.builds(Blocks, st.integers(1, 3), pad=st.integers(0, 1), gap=st.integers(0, 1))
    blocks = [replace(draw(cut), tokens=slot + tokens + draw(st.integers(0, 2))) for slot in slots]
    orders = draw(st.tuples(*[st.sampled_from(ORDERS + APART + TRANSPOSED)] * 2))
    return Two(orders, (layers[0], layers[1]), (blocks[0], blocks[1])), tokens, slots


@settings(properties, max_examples=200)
@given(drawn=twos())
def test_runs_are_all_bytes_and_the_fewest(drawn: tuple[Two, int, tuple[int, int]]) -> None:
    two, tokens, slots = drawn
    found = joined(bundle.runs(tokens, slots) for bundle in two.bundles)
    copied = [
        (local + step, remote + step)
        for local, remote, length in triples(found)
        for step in range(length)
    ]
    expected = two.naive(tokens, slots)
    assert sorted(copied) == sorted(map(tuple, expected.tolist()))
    assert len(found.local) == fewest_runs(expected)


def test_layers_merge_only_where_their_blocks_are_equally_far_apart() -> None:
    """Three neighbours in block 0; in block 1 only two of them still are."""
    made = [
        Region(name, base, stride, 8, 8, 0, 1, (Part(0, 8),))
        for name, base, stride in (("a", 1000, 32), ("b", 1008, 32), ("c", 1016, 16))
    ]
    group = Group(1, 2, 1, tuple(made))
    found = bundles((group, group), [(region, region, (0, 1)) for region in made])
    assert [bundle.block_strides for bundle in found] == [(32, 32), (16, 16)]
    assert [triples(bundle.runs(1, (0, 0))) for bundle in found] == [
        [(1000, 1000, 16)],
        [(1016, 1016, 8)],
    ]


def test_layers_that_meet_alike_are_looked_at_once() -> None:
    layers = [Layer(f"layer.{number}", 2) for number in range(5)]
    layers[3] = replace(layers[3], key=4)
    two = Two(("LBHNC", "BLHNC"), (layers, layers), (Blocks(3, 4), Blocks(2, 4)))
    assert [sorted(len(bases[0]) for bases in bundle.bases.values()) for bundle in two.bundles] == [
        [4],
        [1],
    ]


@pytest.mark.parametrize(
    ("orders", "heads", "changes", "expected"),
    [
        pytest.param(("LBNHC", "LBNHC"), 2, {}, True, id="tokens outside of all heads"),
        pytest.param(("L2BNHC", "L2BNHC"), 2, {}, True, id="K's, then V's"),
        pytest.param(("LBHNC", "LBNHC"), 1, {}, True, id="one head, in either order"),
        pytest.param(("LBHNC", "LBHNC"), 2, {}, False, id="heads outside of tokens"),
        pytest.param(("LBNHC", "LBHNC"), 2, {}, False, id="on the remote side"),
        pytest.param(("LB2NHC", "LB2NHC"), 2, {}, False, id="V of a block before K of the next"),
        pytest.param(("LBNHC", "BLNHC"), 2, {}, False, id="other layers in between there"),
        pytest.param(("BLNHC", "LBNHC"), 2, {}, False, id="other layers in between here"),
        pytest.param(("LBNHC", "L2BNHC"), 2, {}, False, id="K and V together and apart"),
        pytest.param(("LBNHC", "LBNHC"), 2, {"pad": 1}, False, id="idle bytes in the content"),
        pytest.param(("LBNHC", "LBNHC"), 2, {"gap": 1}, False, id="idle bytes between blocks"),
        pytest.param(("LBHT", "LBHT"), 1, {}, False, id="K transposed"),
    ],
)
def test_is_linear(
    orders: tuple[str, str], heads: int, changes: dict[str, int], *, expected: bool
) -> None:
    layers = [Layer(name, heads, 2, 2) for name in "ab"]
    blocks = Blocks(3, 4, **changes)
    for side in (0, 1):
        cut = (blocks, Blocks(3, 4)) if side == 0 else (Blocks(3, 4), blocks)
        (bundle,) = Two(orders, (layers, layers), cut).bundles
        assert bundle.is_linear(2) == expected


def test_half_of_the_heads_are_not_in_one_line() -> None:
    for heads, first in (((1, 2), 0), ((1, 2), 1)):
        (bundle,) = one_layer(("LBNHC", "LBNHC"), heads=heads, first=first).bundles
        assert not bundle.is_linear(2)


def test_more_pieces_than_are_worth_looking_for() -> None:
    """A peer's numbers: they must not cost this side its memory."""
    size = 8192
    region = Region("a", 1, size * 4096, 1, 4096, 0, 4096, (Part(0, 1),))
    group = Group(size, 2, 1, (region,))
    (bundle,) = bundles((group, group), [(region, region, (0, 4096))])
    with pytest.raises(
        IncompatiblePeer, match=r"^a block has \d+ pieces or more; allowed: 4194304$"
    ):
        bundle.runs(size, (0, 0))
    assert triples(bundle.runs(1, (3, 0))) == [(1 + 3 * 4096, 1, 4096)]


def test_pieces_that_merge_are_worth_looking_for() -> None:
    """As of a model of 32 layers with 32 heads of 128 elements: equal blocks are one run each."""
    made = [
        Region(
            f"layer.{n}",
            1 + n * 2**30,
            2**21,
            2**16,
            2,
            0,
            32,
            (Part(0, 2, 128, 256, 2), Part(2**15, 256, token_stride=256)),
        )
        for n in range(32)
    ]
    group = Group(128, 9, 1, tuple(made))
    (bundle,) = bundles((group, group), [(region, region, (0, 32)) for region in made])
    assert len(bundle.runs(128, (0, 0)).local) == 32
