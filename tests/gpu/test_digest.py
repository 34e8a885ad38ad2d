"""The kernel makes the sums of the numpy reference, whatever the layout."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nixl_kv.errors import DigestError
from nixl_kv.geometry import digest
from nixl_kv.geometry.blocks import BlockTable
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.slices import KVSlice, find_slices

torch = pytest.importorskip("torch")
gpu_digests = pytest.importorskip("nixl_kv.transfer.gpu_digests", exc_type=ImportError)

pytestmark = pytest.mark.gpu

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


def run(steps: Any) -> Digest:
    def to_the_end() -> Iterator[None]:
        results.append((yield from steps))

    results: list[Digest] = []
    for _ in to_the_end():
        pass
    return results[0]


def window(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class Both:
    """The same bytes in this process's memory and in the GPU's."""

    def __init__(self, sizes: Sizes, order: str) -> None:
        rng = np.random.default_rng(5)
        self.host = rng.integers(0, 256, sizes.shape(order), dtype=np.uint8)
        self.device = torch.from_numpy(self.host).cuda()
        self.host_layout = layout_of(self.host.ctypes.data, sizes, order, gpu=False)
        self.gpu_layout = layout_of(self.device.data_ptr(), sizes, order, gpu=True)
        self.digester = gpu_digests.GpuDigester(self.gpu_layout)
        torch.cuda.synchronize()

    def digests(
        self, wanted: Sequence[KVSlice], table: Sequence[int], end: int
    ) -> tuple[Digest, Digest]:
        on_host, on_gpu = (
            find_slices(layout, wanted, [self._block_table(layout, table)], end=end)
            for layout in (self.host_layout, self.gpu_layout)
        )
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
    ],
    ids=str,
)
def test_the_sums_are_those_of_the_reference(order: str, sizes: Sizes) -> None:
    both = Both(sizes, order)
    most = sizes.blocks * sizes.tokens
    table = np.random.default_rng(1).permutation(sizes.blocks).tolist()
    for end, begin in [(most, 0), (most - 1, 0), (most // 2 + 1, most // 3), (1, 0), (65, 64)]:
        wanted = [KVSlice(f"layer.{n}", 0, sizes.heads, begin) for n in range(sizes.layers)]
        assert same(both.digests(wanted, table, min(end, most)))
    heads = [KVSlice("layer.1", sizes.heads - 1, sizes.heads, 7), KVSlice("layer.0", 0, 1, 3)]
    assert same(both.digests(heads, table, most - 3))


def test_columns_larger_than_a_tile_are_summed() -> None:
    """Of a prompt so long that a column is larger than a tile."""
    sizes = Sizes(layers=1, heads=1, blocks=64, tokens=8192, parts=(8,))
    both = Both(sizes, "LBHNC")
    table = list(range(63, -1, -1))
    pair = both.digests([KVSlice("layer.0", 0, 1, 100)], table, 64 * 8192 - 5)
    assert same(pair)
    assert len(pair[0].columns) == 4096


def test_each_flipped_bit_changes_one_row_and_one_column() -> None:
    sizes = Sizes(layers=2, blocks=8, heads=2)
    both = Both(sizes, "BHLNC")
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
        pytest.param(Part(0, 1 << 16), "1 pieces of 65536 bytes.*up to 8192 bytes", id="long"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused_in_words(part: Part, words: str) -> None:
    region = Region("layer.0", 1 << 20, 1 << 16, 1 << 16, 1 << 16, 0, 1, (part,))
    with pytest.raises(DigestError, match=rf"layer\.0.*{words}"):
        gpu_digests._check(region)
