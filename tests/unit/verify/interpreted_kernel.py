"""The kernel's sums, on tensors of this process: `TRITON_INTERPRET=1 pytest interpreted_kernel.py`.

test_gpu.py runs these in a process of their own, because Triton's interpreter is asked for when a
kernel is defined.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nixl_kv.geometry.layout import ALL_TOKENS, CacheLayout, Stripe
from nixl_kv.verify import gpu
from nixl_kv.verify.digest import Digest
from nixl_kv.verify.slices import LocalSlice
from support.digest_caches import (
    SECRET,
    Sizes,
    hybrid_layout,
    hybrid_slices,
    is_equal,
    layout_of,
    noise,
    reference,
    slices_of,
    whole_layout,
    whole_slices,
    window,
    with_opaque_layer,
)

KINDS = (
    Sizes(layers=2, blocks=8, heads=2),
    Sizes(layers=2, blocks=8, heads=1, parts=(1152,)),
    Sizes(layers=1, blocks=8, heads=1, parts=(1154,)),
    Sizes(layers=1, blocks=8, heads=1, parts=(656,)),
    Sizes(layers=2, blocks=8, heads=2, parts=(127, 64)),
    Sizes(layers=2, blocks=130, heads=2, tokens=1, parts=(4, 12)),
    Sizes(layers=1, blocks=3, heads=1, tokens=43, parts=(8192, 16388)),
)


def digester_of(layout: CacheLayout) -> Any:
    """A digester of the memory that the layout describes."""
    (span,) = layout.spans
    tensor = torch.from_numpy(window(span.address, -(-span.length // 4) * 4))
    digester = gpu.KernelDigester(tensor, span.address, layout.groups)
    digester.compile()
    return digester


def digest(digester: Any, slices: Sequence[LocalSlice]) -> Digest:
    *_, sums = digester.launch(SECRET, slices)
    return Digest(*(one.numpy().view(np.uint64) for one in sums))


@pytest.mark.parametrize("sizes", KINDS, ids=str)
@pytest.mark.parametrize("order", ["LBHNC", "BLNHC", "BHLNC"])
def test_the_sums_are_those_of_the_reference(sizes: Sizes, order: str) -> None:
    """Layers may end at different tokens."""
    host = noise(sizes.num_bytes)
    layout = with_opaque_layer(layout_of(host.ctypes.data, sizes, order))
    digester = digester_of(layout)
    for end, begin in ((127, 0), (65, 64), (1, 0)):
        slices = slices_of(layout, end, begin)
        assert is_equal(digest(digester, slices), reference(slices))


@pytest.mark.parametrize("stripe", [ALL_TOKENS, Stripe(2, 1, 4)], ids=["all", "striped"])
def test_a_rank_of_a_stripe_digests_its_tokens(stripe: Stripe) -> None:
    host = noise(KINDS[0].num_bytes)
    layout = layout_of(host.ctypes.data, KINDS[0], "LBHNC", stripe=stripe)
    slices = slices_of(layout, 127)
    assert is_equal(digest(digester_of(layout), slices), reference(slices))


@pytest.mark.parametrize("end", [1, 64, 127])
def test_states_are_digested_beside_kv(end: int) -> None:
    """One token of a state is long, or in pieces."""
    (span,) = hybrid_layout(4).spans
    host = noise(span.length)
    layout = hybrid_layout(host.ctypes.data)
    digester, slices = digester_of(layout), hybrid_slices(layout, end)
    assert is_equal(digest(digester, slices), reference(slices))
    assert is_equal(digest(digester, slices[5:-1]), reference(slices[5:-1]))


@pytest.mark.parametrize(("end", "begin"), [(1, 0), (300, 256), (511, 0)])
def test_whole_blocks_are_digested(end: int, begin: int) -> None:
    (span,) = whole_layout(4).spans
    host = noise(span.length)
    layout = whole_layout(host.ctypes.data)
    slices = whole_slices(layout, end, begin)
    assert is_equal(digest(digester_of(layout), slices), reference(slices))


def test_long_columns_are_summed() -> None:
    """In a long prompt a column has more than 64 tokens."""
    sizes = Sizes(layers=1, heads=1, blocks=64, tokens=8192, parts=(8,))
    host = noise(sizes.num_bytes)
    layout = layout_of(host.ctypes.data, sizes, "LBHNC")
    slices = slices_of(layout, 64 * 8192 - 5, 64 * 8192 - 3000)
    made = digest(digester_of(layout), slices)
    assert is_equal(made, reference(slices))
    assert len(made.columns) == 4096
