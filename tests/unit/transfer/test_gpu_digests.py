"""The kernel for GPUs, run by Triton's interpreter: its sums are those of the numpy reference."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_makes_the_sums_of_the_reference() -> None:
    """In a process of its own: Triton asks for the interpreter when a kernel is defined."""
    ended = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS / "gpu")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split("\n")[-2] == "8 caches, 8 alike"


def interpreted() -> str:
    """Caches of four kinds in two orders, each with heads, beginnings and ends of its own."""
    import test_digest as gpu  # noqa: PLC0415 - it imports the kernel
    import torch  # noqa: PLC0415 - slow

    from nixl_kv.connector import device_digests  # noqa: PLC0415 - only under the interpreter
    from nixl_kv.geometry import digest  # noqa: PLC0415 - beside it
    from nixl_kv.geometry.excerpts import BlockTable, Excerpt, strips  # noqa: PLC0415

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
        layout = gpu.layout(host.ctypes.data, sizes, order, gpu=False)
        if order == "LBHNC":  # then the two layers end at different tokens
            group = layout.groups[0]
            regions = (replace(group.regions[0], opaque=True), *group.regions[1:])
            layout = replace(layout, groups=(replace(group, regions=regions),))
        table = BlockTable(rng.permutation(sizes.blocks).astype(np.int32))
        wanted = [
            Excerpt("layer.1", 0, sizes.heads, 5),
            Excerpt("layer.0", sizes.heads - 1, sizes.heads, 0),
        ]
        found = strips(layout, wanted, [table], end=121)
        expected = gpu.run(digest.digest(gpu.KEY, found, gpu.window))
        order_of = device_digests._Order.of(gpu.KEY, found)
        numbers = torch.from_numpy(order_of.numbers)
        for launch in order_of.launches:
            grid = (launch.num_rows * order_of.tiles,)
            device_digests._digest[grid](numbers, launch.first_row, launch.cut)
        rows_at, columns_at = order_of.sums_at
        sums = numbers.numpy().view(np.uint64)
        alike += np.array_equal(sums[rows_at:columns_at], expected.rows) and np.array_equal(
            sums[columns_at:], expected.columns
        )
    return f"{len(cases)} caches, {alike} alike"


if __name__ == "__main__":
    sys.stdout.write(interpreted() + "\n")
