"""The kernel for GPUs, run by Triton's interpreter: its sums are those of the numpy reference."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_makes_the_sums_of_the_reference() -> None:
    """In a process of its own: Triton asks for the interpreter when a kernel is defined."""
    ended = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS}:{TESTS / 'gpu'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split("\n")[-2] == "8 caches, 8 alike"


def interpreted() -> str:
    """Caches of four kinds in two orders, each with heads, beginnings and ends of its own."""
    import test_digest as gpu  # type: ignore[import-not-found]  # noqa: PLC0415 - it imports the kernel
    import torch  # noqa: PLC0415 - slow

    from nixl_kv.geometry import digest  # noqa: PLC0415 - beside it
    from nixl_kv.geometry.blocks import BlockTable  # noqa: PLC0415
    from nixl_kv.geometry.slices import KVSlice, find_slices  # noqa: PLC0415
    from nixl_kv.transfer import gpu_digests  # noqa: PLC0415 - only under the interpreter

    alike = 0
    kinds = (
        gpu.Sizes(layers=2, blocks=8, heads=2),
        gpu.Sizes(layers=2, blocks=8, heads=1, parts=(1152,)),
        gpu.Sizes(layers=2, blocks=8, heads=2, parts=(128, 64)),
        gpu.Sizes(layers=2, blocks=130, heads=2, tokens=1, parts=(4, 12)),
    )
    cases = [(sizes, order) for sizes in kinds for order in ("LBHNC", "BLNHC")]
    for sizes, order in cases:
        rng = np.random.default_rng(5)
        host = rng.integers(0, 256, sizes.shape(order), dtype=np.uint8)
        layout = gpu.layout_of(host.ctypes.data, sizes, order, gpu=False)
        group = layout.groups[0]
        if order == "LBHNC":  # then the two layers end at different tokens
            regions = (replace(group.regions[0], opaque=True), *group.regions[1:])
            group = replace(group, regions=regions)
            layout = replace(layout, groups=(group,))
        table = BlockTable(rng.permutation(sizes.blocks).astype(np.int32), group)
        wanted = [
            KVSlice("layer.1", 0, sizes.heads, 5),
            KVSlice("layer.0", sizes.heads - 1, sizes.heads, 0),
        ]
        slices = find_slices(layout, wanted, [table], end=121)
        expected = gpu.run(digest.digest_steps(gpu.KEY, slices, gpu.window))
        kernel_input = gpu_digests._KernelInput.of(gpu.KEY, slices)
        numbers = torch.from_numpy(kernel_input.numbers)
        for launch in kernel_input.launches:
            grid = (launch.num_rows * kernel_input.tiles,)
            gpu_digests._digest[grid](numbers, launch.first_row, launch.cut)
        rows_at, columns_at = kernel_input.sums_at
        sums = numbers.numpy().view(np.uint64)
        alike += np.array_equal(sums[rows_at:columns_at], expected.rows) and np.array_equal(
            sums[columns_at:], expected.columns
        )
    return f"{len(cases)} caches, {alike} alike"


if __name__ == "__main__":
    sys.stdout.write(interpreted() + "\n")
