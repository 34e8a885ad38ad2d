"""The kernel has the sums of numpy, whatever the layout.

python -m pytest -s -m gpu tests/gpu/test_digest.py
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import pytest

from harness.local.model_layouts import PACKED
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.verify.digest import Digest
from nixl_kv.verify.slices import LocalSlice
from support.digest_caches import (
    SECRET,
    Sizes,
    finished,
    hybrid_layout,
    hybrid_slices,
    is_equal,
    layout_of,
    reference,
    slices_of,
    whole_layout,
    whole_slices,
)

torch = pytest.importorskip("torch")
gpu = pytest.importorskip("nixl_kv.verify.gpu", exc_type=ImportError)
from support.gpus import needs_gpus  # noqa: E402

pytestmark = needs_gpus(1)

Build: TypeAlias = Callable[..., CacheLayout]
"""A function of the address, and of `gpu`."""
Find: TypeAlias = Callable[[CacheLayout], list[LocalSlice]]


class Both:
    """The same bytes in this process's memory and in the GPU's."""

    def __init__(self, build: Build) -> None:
        (span,) = build(4, gpu=False).spans
        self.host = np.random.default_rng(5).integers(0, 256, span.length, dtype=np.uint8)
        self.device = torch.from_numpy(self.host).cuda()
        self.host_layout = build(self.host.ctypes.data, gpu=False)
        self.gpu_layout = build(self.device.data_ptr(), gpu=True)
        torch.cuda.synchronize()
        self.digester = gpu.GpuDigester(self.gpu_layout)

    def digests(self, find: Find) -> tuple[Digest, Digest]:
        """numpy's and the GPU's digest of the slices that `find` returns for a layout."""
        on_gpu: Sequence[LocalSlice] = find(self.gpu_layout)
        return reference(find(self.host_layout)), finished(self.digester(SECRET, on_gpu))


@pytest.mark.parametrize("order", PACKED)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(heads=1, parts=(1152,)),
        Sizes(layers=1, heads=1, tokens=48, parts=(128, 62)),
        Sizes(tokens=1, blocks=640, parts=(4, 12)),
        Sizes(blocks=5, tokens=128, parts=(656,)),
        Sizes(blocks=5, tokens=128, parts=(65, 33)),
        Sizes(layers=2, blocks=20, heads=2, tokens=4, parts=(1 << 16, 16388)),
    ],
    ids=str,
)
def test_the_sums_are_those_of_the_reference(order: str, sizes: Sizes) -> None:
    both = Both(partial(layout_of, sizes=sizes, order=order))
    most = sizes.blocks * sizes.tokens
    for end, begin in [(most, 0), (most - 1, 0), (most // 2 + 1, most // 3), (1, 0), (65, 64)]:
        assert is_equal(*both.digests(partial(slices_of, end=min(end, most), begin=begin)))
    one_head = (sizes.heads - 1, sizes.heads)
    assert is_equal(*both.digests(partial(slices_of, end=most - 3, begin=3, heads=one_head)))


@pytest.mark.parametrize("end", [1, 64, 65, 127])
def test_the_sums_of_states_beside_kv_are_those_of_the_reference(end: int) -> None:
    both = Both(hybrid_layout)
    assert is_equal(*both.digests(partial(hybrid_slices, end=end)))


@pytest.mark.parametrize(("end", "begin"), [(1, 0), (300, 256), (511, 0)])
def test_the_sums_of_whole_blocks_are_those_of_the_reference(end: int, begin: int) -> None:
    both = Both(whole_layout)
    assert is_equal(*both.digests(partial(whole_slices, end=end, begin=begin)))


def test_memory_beside_the_cache_is_bounded() -> None:
    """For 1.1 GiB of KV of Qwen3-8B's shape."""
    sizes = Sizes(layers=36, blocks=512, heads=8)
    both = Both(partial(layout_of, sizes=sizes, order="BHLNC"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    finished(both.digester(SECRET, slices_of(both.gpu_layout, 8192)))
    assert torch.cuda.max_memory_allocated() - before < 4 << 20
