"""The kernel for GPUs, run by Triton's interpreter: its sums are those of the numpy reference."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[2]
PATHS = f"{TESTS.parent}:{TESTS}:{TESTS / 'gpu'}"


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def said() -> list[str]:
    """By a process of its own: Triton asks for the interpreter when a kernel is defined."""
    ended = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()


def test_the_kernel_makes_the_sums_of_the_reference(said: list[str]) -> None:
    assert "19 caches, 19 alike" in said


def test_what_a_request_needs_was_compiled_before(said: list[str]) -> None:
    """Two kernels for KV, one of them for divided tokens; two for states, one of them unaligned."""
    assert "4 compiled, none later" in said


def sums_alike(gpu: Any) -> str:
    """Caches of six kinds in two orders, each with heads, beginnings and ends of its own, and some
    with states beside KV.
    """
    kinds = (
        gpu.Sizes(layers=2, blocks=8, heads=2),
        gpu.Sizes(layers=2, blocks=8, heads=1, parts=(1152,)),
        gpu.Sizes(layers=2, blocks=8, heads=2, parts=(128, 64)),
        gpu.Sizes(layers=2, blocks=130, heads=2, tokens=1, parts=(4, 12)),
        gpu.Sizes(layers=2, blocks=8, heads=2, tokens=2, parts=(8192, 16388)),
        gpu.Sizes(layers=2, blocks=3, heads=2, tokens=3, parts=(1 << 16, 4)),
    )
    cases = [(sizes, order) for sizes in kinds for order in ("LBHNC", "BLNHC")]
    ends = (1, 64, 65, 127)
    alike = sum(_kv_is_alike(gpu, sizes, order) for sizes, order in cases)
    alike += sum(_hybrid_is_alike(gpu, end) for end in ends)
    stripes = (((1, 0, 1), (2, 1, 3)), ((4, 2, 16), (1, 0, 1)), ((2, 0, 1), (4, 2, 2)))
    alike += sum(_kv_is_alike(gpu, kinds[1], "LBHNC", pair) for pair in stripes)
    return f"{len(cases) + len(ends) + len(stripes)} caches, {alike} alike"


def _kv_is_alike(gpu: Any, sizes: Any, order: str, stripes: Any = ((1, 0, 1), (1, 0, 1))) -> bool:
    from nixl_kv.geometry.layout import BlockTable, Stripe  # noqa: PLC0415 - as the kernel
    from nixl_kv.geometry.slices import KVSlice, SliceFinder  # noqa: PLC0415

    rng = np.random.default_rng(5)
    host = rng.integers(0, 256, sizes.shape(order), dtype=np.uint8)
    layout = gpu.layout_of(host.ctypes.data, sizes, order, gpu=False)
    own, other = (Stripe(*one) for one in stripes)
    group = replace(layout.groups[0], stripe=own)
    if order == "LBHNC":  # then the two layers end at different tokens
        regions = (replace(group.regions[0], opaque=True), *group.regions[1:])
        group = replace(group, regions=regions)
    layout = replace(layout, groups=(group,))
    table = BlockTable(rng.permutation(sizes.blocks).astype(np.int32), group)
    wanted = [
        KVSlice("layer.1", 0, sizes.heads, 5, (other,)),
        KVSlice("layer.0", sizes.heads - 1, sizes.heads, 0, (other,)),
    ]
    end = min(121, sizes.blocks * sizes.tokens - 1)
    earlier = BlockTable(table.ids[::-1].copy(), group)  # of another request, which was shorter
    finder = SliceFinder(layout)
    return _is_alike(
        gpu,
        finder.find(wanted, [table], end=end),
        finder.find([replace(kv, begin=6 - kv.begin) for kv in wanted], [earlier], end=7),
    )


def _hybrid_is_alike(gpu: Any, end: int) -> bool:
    length = gpu.hybrid_layout(1, gpu=False).spans[0].length
    host = np.random.default_rng(5).integers(0, 256, length, dtype=np.uint8)
    slices = gpu.hybrid_slices(gpu.hybrid_layout(host.ctypes.data, gpu=False), end)
    return _is_alike(gpu, slices, slices)


def _is_alike(gpu: Any, slices: Any, earlier: Any) -> bool:
    """By a table that was made for an earlier request of slices like these."""
    import torch  # noqa: PLC0415 - slow

    from nixl_kv.geometry import digest  # noqa: PLC0415 - beside it
    from nixl_kv.verify import gpu as gpu_digests  # noqa: PLC0415 - only under the interpreter

    expected = gpu.run(digest.digest_steps(gpu.KEY, slices, gpu.window))
    table = gpu_digests._Table(earlier)
    kernel_input = gpu_digests._KernelInput.of(gpu.KEY, slices, table)
    numbers = torch.from_numpy(kernel_input.numbers)
    for launch in kernel_input.launches:
        launch.run(numbers)
    rows_at, columns_at = kernel_input.sums_at
    sums = numbers.numpy().view(np.uint64)
    same_rows = np.array_equal(sums[rows_at:columns_at], expected.rows)
    return same_rows and np.array_equal(sums[columns_at:], expected.columns)


def kernels_compiled(gpu: Any) -> str:
    """When a digester is made, and for requests of its cache."""
    from nixl_kv.verify import gpu as gpu_digests  # noqa: PLC0415 - as above

    def needed(slices: Any) -> set[Any]:
        return {one.cut for one in gpu_digests._Table(slices).fill(slices)[2]}

    layout = gpu.hybrid_layout(1 << 20, gpu=True)
    before = needed(gpu_digests._first_tokens(layout))
    requests = [gpu.hybrid_slices(layout, end) for end in (1, 64, 127)]
    some = [slices[first:] for slices in requests for first in range(len(slices))]
    later = set().union(*map(needed, some)) - before
    return f"{len(before)} compiled, {len(later) or 'none'} later"


def main() -> None:
    import test_digest as gpu  # type: ignore[import-not-found]  # noqa: PLC0415 - it imports the kernel

    sys.stdout.write(f"{sums_alike(gpu)}\n{kernels_compiled(gpu)}\n")


if __name__ == "__main__":
    main()
