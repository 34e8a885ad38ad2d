"""K and V of a block side by side: one region per layer, of which a head slice has both K and V.

FlashInfer has one tensor [blocks, 2, ...] per layer, older FlashAttention [2, blocks, ...]. Their
shapes and strides make one region per layer with two parts.
"""

from typing import NamedTuple

import numpy as np
import pytest

from nixl_kv.geometry.blocks import block_ids
from nixl_kv.geometry.layout import CacheLayout, Group, Region, Span
from nixl_kv.geometry.plan import ADDRESS, LENGTH, plan
from nixl_kv.geometry.views import region_from_tensor
from support.oracle import ArrayTensor, check_rows, copy_pieces

LAYERS, HEADS, TOKENS, CONTENT = 3, 4, 8, 6
SIDE_BY_SIDE, HALVES = ("B2HNC", "B2NHC"), ("2BHNC", "2BNHC")
BLOCK = 2 * HEADS * TOKENS * CONTENT  # bytes of K and V of one block of all heads


class Cache(NamedTuple):
    """One tensor per layer, with some of the model's four heads, from head `first` on."""

    axes: str
    tensors: list[np.ndarray]
    first: int

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(
            region_from_tensor(
                f"layer.{number}", ArrayTensor(tensor), self.axes, first_head=self.first
            )
            for number, tensor in enumerate(self.tensors)
        )

    @property
    def layout(self) -> CacheLayout:
        blocks = self.tensors[0].shape[self.axes.index("B")]
        spans = tuple(Span(tensor.ctypes.data, tensor.nbytes) for tensor in self.tensors)
        groups = (Group(TOKENS, blocks, 1, self.regions),)
        return CacheLayout(groups, "uint8", "DRAM", 0, spans)

    def kv(self, layer: int, block: int) -> np.ndarray:
        """One block, as [K or V, head, token, content]."""
        order = [self.axes.index(letter) for letter in "B2HNC"]
        return self.tensors[layer].transpose(order)[block]


def cache(axes: str, *, blocks: int = 5, heads: int = HEADS, first: int = 0) -> Cache:
    sizes = {"2": 2, "B": blocks, "H": heads, "N": TOKENS, "C": CONTENT}
    shape = [sizes[letter] for letter in axes]
    rng = np.random.default_rng(blocks + first)
    tensors = [rng.integers(256, size=shape, dtype=np.uint8) for _ in range(LAYERS)]
    return Cache(axes, tensors, first)


def copy(local: Cache, remote: Cache, local_ids: list[int], remote_ids: list[int]) -> int:
    """Read these blocks. Returns the number of runs."""
    planned = plan(local.layout, remote.layout)
    check_rows(planned.local, local.layout)
    check_rows(planned.remote, remote.layout)
    tokens = range(TOKENS * len(local_ids))
    reads = planned.reads([block_ids(local_ids)], [block_ids(remote_ids)], tokens)
    copy_pieces(planned, reads)
    return reads.num_runs


@pytest.mark.parametrize("axes", SIDE_BY_SIDE + HALVES)
@pytest.mark.parametrize("blocks", [2, 5], ids=["two blocks", "five blocks"])
def test_a_layer_has_one_region_with_k_and_v(axes: str, blocks: int) -> None:
    both = cache(axes, blocks=blocks)
    assert len(both.regions) == LAYERS
    for number, region in enumerate(both.regions):
        keys, values = (both.kv(number, 0)[part].ctypes.data for part in (0, 1))
        assert [region.base + part.offset for part in region.parts] == [keys, values]
        assert [part.length for part in region.parts] == [CONTENT, CONTENT]
        assert region.block_stride == both.tensors[number].strides[axes.index("B")]
    assert len(plan(both.layout, both.layout).local) <= LAYERS * 2


@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("heads", [(0, 4), (1, 3)], ids=["all heads", "two heads"])
def test_k_and_v_side_by_side_have_the_same_pieces_as_in_halves(
    heads: tuple[int, int], *, tokens_first: bool
) -> None:
    """Addresses count from the start of K, or of V, in block 0."""
    pieces = []
    for axes in (SIDE_BY_SIDE[tokens_first], HALVES[tokens_first]):
        local, remote = cache(axes), cache(HALVES[tokens_first])
        share = {f"layer.{number}": heads for number in range(LAYERS)}
        planned = plan(local.layout, remote.layout, share)
        starts = [
            (region.layer, number, part.offset + region.base)
            for region in local.regions
            for number, part in enumerate(region.parts)
        ]
        pieces.append(
            sorted(
                (layer, number, int(row[ADDRESS]) - start, int(row[LENGTH]))
                for row in planned.local
                for layer, number, start in starts
                if start <= row[ADDRESS] < start + BLOCK // 2
            )
        )
    assert pieces[0] == pieces[1]
    per_part = TOKENS if tokens_first and heads != (0, HEADS) else 1
    assert len(pieces[0]) == LAYERS * 2 * per_part


@pytest.mark.parametrize("blocks", [2, 5], ids=["two blocks", "five blocks"])
@pytest.mark.parametrize("other", SIDE_BY_SIDE + HALVES)
@pytest.mark.parametrize("sliced", SIDE_BY_SIDE)
def test_a_head_slice_has_its_part_of_k_and_of_v(sliced: str, other: str, blocks: int) -> None:
    """Heads 1 and 2 of four: read from all heads, and read into all heads."""
    part, whole = cache(sliced, blocks=blocks, heads=2, first=1), cache(other, blocks=blocks)
    before = [tensor.copy() for tensor in part.tensors]
    copy(part, whole, [1], [0])
    for layer in range(LAYERS):
        assert np.array_equal(part.kv(layer, 1), whole.kv(layer, 0)[:, 1:3])
        untouched = Cache(sliced, before, 1).kv(layer, 0)
        assert np.array_equal(part.kv(layer, 0), untouched)
    copy(whole, part, [1], [0])
    for layer in range(LAYERS):
        assert np.array_equal(whole.kv(layer, 1)[:, 1:3], part.kv(layer, 0))


@pytest.mark.parametrize(
    ("local", "remote", "heads", "runs", "length"),
    [
        pytest.param("B2HNC", "B2HNC", 4, 1, BLOCK, id="K and V of a block are one run"),
        pytest.param("B2NHC", "B2NHC", 4, 1, BLOCK, id="one run, tokens first"),
        pytest.param("2BHNC", "2BHNC", 4, 2, BLOCK // 2, id="in halves they are two runs"),
        pytest.param("2BNHC", "2BNHC", 4, 2, BLOCK // 2, id="in halves, tokens first"),
        pytest.param("B2HNC", "2BHNC", 4, 2, BLOCK // 2, id="in halves on one side"),
        pytest.param("B2NHC", "2BNHC", 4, 2, BLOCK // 2, id="on one side, tokens first"),
        pytest.param("B2HNC", "B2HNC", 2, 2, BLOCK // 4, id="a head slice"),
        pytest.param("B2NHC", "B2NHC", 2, 2 * TOKENS, 2 * CONTENT, id="a slice, tokens first"),
    ],
)
def test_number_and_length_of_the_runs_of_a_block(
    local: str, remote: str, heads: int, *, runs: int, length: int
) -> None:
    mine, theirs = cache(local, heads=heads), cache(remote)
    assert set(plan(mine.layout, theirs.layout).local[:, LENGTH].tolist()) == {length}
    assert copy(mine, theirs, [3], [1]) == LAYERS * runs
