"""The kernel makes the sums of the numpy reference, whatever the layout."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest

from nixl_kv.errors import DigestError
from nixl_kv.geometry import digest
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.layout import BlockTable, CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.slices import KVSlice, LocalSlice, SliceFinder

torch = pytest.importorskip("torch")
gpu_digests = pytest.importorskip("nixl_kv.verify.gpu", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
KEY = Key("ab" * 16)


@dataclass(frozen=True)
class Sizes:
    layers: int = 3
    blocks: int = 40
    heads: int = 4
    tokens: int = 16
    parts: tuple[int, ...] = (256, 256)

    def shape(self, order: str) -> list[int]:
        letters = (self.layers, self.blocks, self.heads, self.tokens, sum(self.parts))
        return [dict(zip("LBHNC", letters, strict=True))[letter] for letter in order]


def layout_of(base: int, sizes: Sizes, order: str, *, gpu: bool) -> CacheLayout:
    shape = sizes.shape(order)
    strides = {letter: int(np.prod(shape[at + 1 :])) for at, letter in enumerate(order)}
    ends = np.cumsum(sizes.parts)
    parts = tuple(Part(int(end) - n, n) for end, n in zip(ends, sizes.parts, strict=True))
    regions = tuple(
        Region(
            f"layer.{layer}",
            base + layer * strides["L"],
            strides["B"],
            strides["H"],
            strides["N"],
            0,
            sizes.heads,
            parts,
        )
        for layer in range(sizes.layers)
    )
    group = Group(sizes.tokens, sizes.blocks, 1, regions)
    spans = (Span(base, int(np.prod(shape))),)
    return CacheLayout((group,), "VRAM" if gpu else "DRAM", 0, spans)


STATE_BLOCKS = 6
STATE_BYTES = 1 << 19
"""Of a layer's block, in which a few bytes stay unused."""
STATES = {
    "state": (2, 1 << 18, (Part(0, 1 << 16),)),
    "odd state": (2, 16388, (Part(1 << 17, 16388),)),
    "query": (4, 256, tuple(Part((1 << 18) + row * 1152, 256) for row in range(3))),
    "odd query": (3, 20, tuple(Part((1 << 18) + (1 << 14) + row * 60, 20) for row in range(3))),
}
"""Heads, head stride and parts: those of a temporal state, and rows of a convolution's."""


def hybrid_layout(base: int, *, gpu: bool) -> CacheLayout:
    """Layers with KV, and two with states, of which a block has all."""
    sizes = Sizes(layers=2, blocks=8, heads=2)
    kv = layout_of(base, sizes, "LBHNC", gpu=gpu)
    (span,) = kv.spans
    first, stride = base + span.length, 2 * STATE_BYTES
    regions = tuple(
        Region(f"layer.{layer} {name}", at, stride, head_stride, stride, 0, heads, parts)
        for layer, at in enumerate((first, first + STATE_BYTES))
        for name, (heads, head_stride, parts) in STATES.items()
    )
    states = Group(1, STATE_BLOCKS, 1, regions, window=1)
    spans = (Span(base, span.length + STATE_BLOCKS * stride),)
    return CacheLayout((*kv.groups, states), kv.memory, 0, spans)


def hybrid_slices(layout: CacheLayout, end: int) -> list[LocalSlice]:
    """All KV up to a token, and the states before it."""
    kv, states = layout.groups
    tables = [
        BlockTable(np.array([5, 0, 7, 3, 1, 2, 6, 4], np.int32), kv),
        BlockTable(np.array([end % STATE_BLOCKS], np.int32), states, end - 1),
    ]
    wanted = [
        KVSlice(region.layer, 0, region.num_heads, begin)
        for group, begin in zip(layout.groups, (0, end - 1), strict=True)
        for region in group.regions
    ]
    return SliceFinder(layout).find(wanted, tables, end=end)


def run(steps: Any) -> Digest:
    def to_the_end() -> Iterator[None]:
        results.append((yield from steps))

    results: list[Digest] = []
    for _ in to_the_end():
        pass
    return results[0]


def window(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


Build: TypeAlias = Callable[..., CacheLayout]
"""A function of the address, and of `gpu`."""


class Both:
    """The same bytes in this process's memory and in the GPU's."""

    def __init__(self, build: Build) -> None:
        (span,) = build(1, gpu=False).spans
        self.host = np.random.default_rng(5).integers(0, 256, span.length, dtype=np.uint8)
        self.device = torch.from_numpy(self.host).cuda()
        self.host_layout = build(self.host.ctypes.data, gpu=False)
        self.gpu_layout = build(self.device.data_ptr(), gpu=True)
        self.digester = gpu_digests.GpuDigester(self.gpu_layout)
        torch.cuda.synchronize()

    def digests(
        self, wanted: Sequence[KVSlice], table: Sequence[int], end: int
    ) -> tuple[Digest, Digest]:
        on_host, on_gpu = (
            SliceFinder(layout).find(wanted, [self._block_table(layout, table)], end=end)
            for layout in (self.host_layout, self.gpu_layout)
        )
        return self.of_slices(on_host, on_gpu)

    def of_slices(
        self, on_host: Sequence[LocalSlice], on_gpu: Sequence[LocalSlice]
    ) -> tuple[Digest, Digest]:
        return run(digest.digest_steps(KEY, on_host, window)), run(self.digester(KEY, on_gpu))

    @staticmethod
    def _block_table(layout: CacheLayout, table: Sequence[int]) -> BlockTable:
        return BlockTable(np.array(table, np.int32), layout.groups[0])


def same(pair: tuple[Digest, Digest]) -> bool:
    host, gpu = pair
    return np.array_equal(host.rows, gpu.rows) and np.array_equal(host.columns, gpu.columns)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(heads=1, parts=(1152,)),
        Sizes(tokens=48, parts=(128, 64)),
        Sizes(tokens=1, blocks=640, parts=(4, 12)),
        Sizes(blocks=5, tokens=128, parts=(656,)),
        Sizes(layers=2, blocks=20, heads=2, tokens=4, parts=(1 << 16, 16388)),
    ],
    ids=str,
)
def test_the_sums_are_those_of_the_reference(order: str, sizes: Sizes) -> None:
    both = Both(partial(layout_of, sizes=sizes, order=order))
    most = sizes.blocks * sizes.tokens
    table = np.random.default_rng(1).permutation(sizes.blocks).tolist()
    for end, begin in [(most, 0), (most - 1, 0), (most // 2 + 1, most // 3), (1, 0), (65, 64)]:
        wanted = [KVSlice(f"layer.{n}", 0, sizes.heads, begin) for n in range(sizes.layers)]
        assert same(both.digests(wanted, table, min(end, most)))
    heads = [KVSlice("layer.1", sizes.heads - 1, sizes.heads, 7), KVSlice("layer.0", 0, 1, 3)]
    assert same(both.digests(heads, table, most - 3))


@pytest.mark.parametrize("end", [1, 64, 65, 127])
def test_the_sums_of_states_beside_kv_are_those_of_the_reference(end: int) -> None:
    both = Both(hybrid_layout)
    on_host, on_gpu = (hybrid_slices(one, end) for one in (both.host_layout, both.gpu_layout))
    assert same(both.of_slices(on_host, on_gpu))
    assert same(both.of_slices(on_host[5:-1], on_gpu[5:-1]))


def test_columns_larger_than_a_tile_are_summed() -> None:
    """Of a prompt so long that a column is larger than a tile."""
    sizes = Sizes(layers=1, heads=1, blocks=64, tokens=8192, parts=(8,))
    both = Both(partial(layout_of, sizes=sizes, order="LBHNC"))
    table = list(range(63, -1, -1))
    pair = both.digests([KVSlice("layer.0", 0, 1, 100)], table, 64 * 8192 - 5)
    assert same(pair)
    assert len(pair[0].columns) == 4096


def test_each_flipped_bit_changes_one_row_and_one_column() -> None:
    sizes = Sizes(layers=2, blocks=8, heads=2)
    both = Both(partial(layout_of, sizes=sizes, order="BHLNC"))
    wanted = [KVSlice(f"layer.{n}", 0, 2, 0) for n in range(2)]
    rng = np.random.default_rng(2)
    for _ in range(100):
        at, bit = int(rng.integers(both.host.size)), int(rng.integers(8))
        flat = both.device.view(-1)
        flat[at] ^= 1 << bit
        torch.cuda.synchronize()
        host, gpu = both.digests(wanted, list(range(8)), 128)
        assert (host.rows != gpu.rows).sum() == 1
        assert (host.columns != gpu.columns).sum() == 1
        flat[at] ^= 1 << bit
    torch.cuda.synchronize()
    assert same(both.digests(wanted, list(range(8)), 128))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        pytest.param(Part(0, 2, 128, 32, 2), "128 pieces of 2 bytes", id="pieces"),
        pytest.param(Part(0, 6), "1 pieces of 6 bytes.*whole 4-byte words", id="half a word"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused_in_words(part: Part, words: str) -> None:
    region = Region("layer.0", 1 << 20, 1 << 16, 1 << 16, 1 << 16, 0, 1, (part,))
    with pytest.raises(DigestError, match=rf"layer\.0.*{words}"):
        gpu_digests._check(region)
