"""K and V of a block side by side: one region per layer, and yet a head slice has both of them.

FlashInfer keeps a layer as one tensor [blocks, 2, ...], older FlashAttention as [2, blocks, ...].
Told by their shape and strides, both make one region per layer with two parts.
"""

from typing import NamedTuple

import numpy as np
import pytest
from caches import Array

from nixl_kv.geometry.blocks import block_ids
from nixl_kv.geometry.layout import CacheLayout, Group, Region, Span
from nixl_kv.geometry.plan import plan
from nixl_kv.geometry.views import region
from nixl_kv.transport.memory import Fabric, MemoryTransport

LAYERS, HEADS, TOKENS, CONTENT = 3, 4, 8, 6
SIDE_BY_SIDE, HALVES = ("B2HNC", "B2NHC"), ("2BHNC", "2BNHC")
BLOCK = 2 * HEADS * TOKENS * CONTENT  # bytes of K and V of one block of all heads


class Cache(NamedTuple):
    """One tensor per layer; `heads` of the model's four, of which `first` is the first."""

    axes: str
    tensors: list[np.ndarray]
    first: int

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(
            region(f"layer.{number}", Array(tensor), self.axes, first_head=self.first)
            for number, tensor in enumerate(self.tensors)
        )

    @property
    def layout(self) -> CacheLayout:
        blocks = self.tensors[0].shape[self.axes.index("B")]
        spans = tuple(Span(tensor.ctypes.data, tensor.nbytes) for tensor in self.tensors)
        groups = (Group(TOKENS, blocks, 1, self.regions),)
        return CacheLayout(groups, "uint8", "DRAM", 0, spans)

    def kv(self, layer: int, block: int) -> np.ndarray:
        """Of a block: [K or V, head, token, content]."""
        order = [self.axes.index(letter) for letter in "B2HNC"]
        return self.tensors[layer].transpose(order)[block]


def cache(axes: str, *, blocks: int = 5, heads: int = HEADS, first: int = 0) -> Cache:
    sizes = {"2": 2, "B": blocks, "H": heads, "N": TOKENS, "C": CONTENT}
    shape = [sizes[letter] for letter in axes]
    rng = np.random.default_rng(blocks + first)
    tensors = [rng.integers(256, size=shape, dtype=np.uint8) for _ in range(LAYERS)]
    return Cache(axes, tensors, first)


def copy(mine: Cache, theirs: Cache, local: list[int], remote: list[int]) -> int:
    """Read these blocks. Returns the number of runs."""
    fabric = Fabric()
    reader, source = MemoryTransport(fabric), MemoryTransport(fabric)
    for transport, side in ((reader, mine), (source, theirs)):
        for span in side.layout.spans:
            transport.register(span, "DRAM", 0)
    planned = plan(mine.layout, theirs.layout)
    reads = planned.reads([block_ids(local)], [block_ids(remote)], range(TOKENS * len(local)))
    lists = (
        reader.prepare(planned.local, "DRAM", None),
        reader.prepare(planned.remote, "DRAM", reader.add_peer(source.metadata())),
    )
    assert reader.poll(reader.read(*lists, (reads.local, reads.remote)))
    return reads.num_runs


@pytest.mark.parametrize("axes", SIDE_BY_SIDE + HALVES)
@pytest.mark.parametrize("blocks", [2, 5], ids=["two blocks", "five blocks"])
def test_one_region_per_layer(axes: str, blocks: int) -> None:
    made = cache(axes, blocks=blocks)
    assert len(made.regions) == LAYERS
    for number, found in enumerate(made.regions):
        array = made.tensors[number]
        keys, values = (made.kv(number, 0)[part].ctypes.data for part in (0, 1))
        assert [found.base + part.offset for part in found.parts] == [keys, values]
        assert [part.length for part in found.parts] == [CONTENT, CONTENT]
        assert found.block_stride == array.strides[axes.index("B")]
    assert len(plan(made.layout, made.layout).local) <= LAYERS * 2


@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("heads", [(0, 4), (1, 3)], ids=["all heads", "two heads"])
def test_the_pieces_are_those_of_separate_k_and_v(
    heads: tuple[int, int], *, tokens_first: bool
) -> None:
    """Counted from the start of K and of V of block 0, both are cut alike."""
    found = []
    for axes in (SIDE_BY_SIDE[tokens_first], HALVES[tokens_first]):
        made, other = cache(axes), cache(HALVES[tokens_first])
        share = {f"layer.{number}": heads for number in range(LAYERS)}
        planned = plan(made.layout, other.layout, share)
        starts = [
            (layer, part, part.offset + layer.base)
            for layer in made.regions
            for part in layer.parts
        ]
        found.append(
            sorted(
                (layer.layer, layer.parts.index(part), int(row[0]) - start, int(row[1]))
                for row in planned.local
                for layer, part, start in starts
                if start <= row[0] < start + BLOCK // 2
            )
        )
    assert found[0] == found[1]
    per_part = TOKENS if tokens_first and heads != (0, HEADS) else 1
    assert len(found[0]) == LAYERS * 2 * per_part


@pytest.mark.parametrize("blocks", [2, 5], ids=["two blocks", "five blocks"])
@pytest.mark.parametrize("theirs", SIDE_BY_SIDE + HALVES)
@pytest.mark.parametrize("mine", SIDE_BY_SIDE)
def test_a_head_slice_takes_its_part_of_both(mine: str, theirs: str, blocks: int) -> None:
    """Heads 1 and 2 of four, on either side."""
    part, whole = cache(mine, blocks=blocks, heads=2, first=1), cache(theirs, blocks=blocks)
    before = [tensor.copy() for tensor in part.tensors]
    copy(part, whole, [1], [0])
    for layer in range(LAYERS):
        assert np.array_equal(part.kv(layer, 1), whole.kv(layer, 0)[:, 1:3])
        untouched = Cache(mine, before, 1).kv(layer, 0)
        assert np.array_equal(part.kv(layer, 0), untouched)
    copy(whole, part, [1], [0])
    for layer in range(LAYERS):
        assert np.array_equal(whole.kv(layer, 1)[:, 1:3], part.kv(layer, 0))


@pytest.mark.parametrize(
    ("mine", "theirs", "heads", "runs", "length"),
    [
        pytest.param("B2HNC", "B2HNC", 4, 1, BLOCK, id="K and V of a block are one run"),
        pytest.param("B2NHC", "B2NHC", 4, 1, BLOCK, id="tokens first"),
        pytest.param("2BHNC", "2BHNC", 4, 2, BLOCK // 2, id="in halves they are two"),
        pytest.param("2BNHC", "2BNHC", 4, 2, BLOCK // 2, id="in halves, tokens first"),
        pytest.param("B2HNC", "2BHNC", 4, 2, BLOCK // 2, id="in halves on one side"),
        pytest.param("B2NHC", "2BNHC", 4, 2, BLOCK // 2, id="on one side, tokens first"),
        pytest.param("B2HNC", "B2HNC", 2, 2, BLOCK // 4, id="a head slice"),
        pytest.param("B2NHC", "B2NHC", 2, 2 * TOKENS, 2 * CONTENT, id="a slice, tokens first"),
    ],
)
def test_runs_of_a_block(mine: str, theirs: str, heads: int, *, runs: int, length: int) -> None:
    local, remote = cache(mine, heads=heads), cache(theirs)
    assert set(plan(local.layout, remote.layout).local[:, 1].tolist()) == {length}
    assert copy(local, remote, [3], [1]) == LAYERS * runs
