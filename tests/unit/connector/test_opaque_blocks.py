"""Blocks of which only vLLM's kernel knows what is in them are digested as a whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nixl_kv.connector import kv_layout
from nixl_kv.geometry.layout import CacheLayout, Group, Span, Table
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.verify.slices import find_slices
from support.digest_caches import reference

if not current_platform.is_cpu():
    pytest.skip("the CPU build's kernel", allow_module_level=True)

HEADS = 2


def test_what_only_a_kernel_knows_is_digested_in_whole_blocks() -> None:
    """Nothing is said of these blocks; each byte that vLLM's kernel writes into them counts."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache  # noqa: PLC0415

    size, tokens, end = 64, 32, 10
    spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=HEADS, head_size=size, dtype=torch.float32
    )
    cache = torch.zeros(1, HEADS, tokens, 2 * size)
    region = replace(
        kv_layout.region_of("layers.0", cache, spec, first_head=0, is_transposed=False), opaque=True
    )
    span = Span(cache.data_ptr(), cache.nbytes)
    group = Group(tokens, 1, 1, (region,))
    layout = CacheLayout((group,), "DRAM", 0, (span,))
    slices = find_slices(layout, [KVSlice("layers.0", 0, HEADS, 0)], [Table.of([0])], end=end)
    content = cache.view(-1).view(torch.uint8).numpy()
    key, value = torch.randn(2, end, HEADS, size)
    halves = cache.view(1, HEADS, 2 * tokens, size).chunk(2, dim=2)
    cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(end), "vec")
    before = reference(slices).rows.tolist()
    written = np.flatnonzero(content)
    assert len(written) > end * HEADS * 2 * size
    for place in np.random.default_rng(1).choice(written, 300, replace=False):
        content[place] ^= 1
        assert reference(slices).rows.tolist() != before
        content[place] ^= 1
