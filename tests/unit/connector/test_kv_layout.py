"""What is said of a backend's blocks is what its own kernel writes into them."""

import ctypes
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of others, on import
    pytest.importorskip("vllm", reason="needs vLLM: scripts/install")
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from nixl_kv.connector import caches
    from nixl_kv.geometry import digest
    from nixl_kv.geometry.digest import Key
    from nixl_kv.geometry.excerpts import BlockTable, Excerpt, Strip, strips
    from nixl_kv.geometry.layout import CacheLayout, Group, Region, Span

if not current_platform.is_cpu():
    pytest.skip("the CPU build's kernel", allow_module_level=True)

BLOCKS, HEADS = 3, 2


def element(region: Region, size: int, place: tuple[int, int, int]) -> bytes:
    """The content of one token by the region's own formula; `place` is (block, head, slot)."""
    block, head, slot = place
    found = b""
    for part in region.parts:
        start = region.base + part.offset + block * region.block_stride
        start += head * region.head_stride + slot * (part.token_stride or region.token_stride)
        for piece in range(part.count):
            found += ctypes.string_at(start + piece * part.stride, part.length)
    assert len(found) == size
    return found


def test_what_only_a_kernel_knows_is_digested_in_whole_blocks() -> None:
    """Nothing is said of these blocks; each byte that vLLM's kernel writes into them counts."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache  # noqa: PLC0415

    size, tokens, end = 64, 32, 10
    spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=HEADS, head_size=size, dtype=torch.float32
    )
    cache = torch.zeros(1, HEADS, tokens, 2 * size)
    insides = SimpleNamespace(
        is_transposed=lambda *_: False,
        unknown=lambda *_: "in CPU_ATTN vec blocks",
        shards=SimpleNamespace(first_head=lambda *_, **__: 0),
    )
    region = caches._region("layers.0", cache, spec, insides=insides)
    span = Span(cache.data_ptr(), cache.nbytes)
    layout = CacheLayout((Group(tokens, 1, 1, (region,)),), "float32", "DRAM", 0, (span,))
    table = BlockTable(np.zeros(1, np.int32))
    found = strips(layout, [Excerpt("layers.0", 0, HEADS, 0)], [table], end=end)
    content = cache.view(-1).view(torch.uint8).numpy()
    key, value = torch.randn(2, end, HEADS, size)
    halves = cache.view(1, HEADS, 2 * tokens, size).chunk(2, dim=2)
    cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(end), "vec")
    before = rows_of(found, content)
    written = np.flatnonzero(content)
    assert len(written) > end * HEADS * 2 * size
    for place in np.random.default_rng(1).choice(written, 300, replace=False):
        content[place] ^= 1
        assert rows_of(found, content) != before
        content[place] ^= 1


def rows_of(found: list[Strip], content: np.ndarray) -> list[int]:
    """Of a digest of what is in this memory."""
    start = content.ctypes.data
    made = []

    def window(address: int, length: int) -> np.ndarray:
        return content[address - start :][:length]

    def keep() -> Iterator[None]:
        made.append((yield from digest.digest(Key("secret"), found, window)))

    list(keep())
    return made[0].rows.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [32, 64, 96, 128], ids="blocks of {}".format)
@pytest.mark.parametrize("head_size", [64, 80], ids="head size {}".format)
def test_the_blocks_of_the_cpu_kernel(dtype: torch.dtype, tokens: int, head_size: int) -> None:
    from vllm._custom_ops import cpu_attn_reshape_and_cache  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=HEADS, head_size=head_size, dtype=dtype
    )
    isa = _get_attn_isa(dtype, tokens, head_size)
    if isa not in caches.TRANSPOSED_K:
        pytest.skip(f"{isa} is exchanged in whole blocks")
    cache = torch.zeros(BLOCKS, HEADS, tokens, 2 * head_size, dtype=dtype)
    key, value = torch.randn(2, BLOCKS * tokens, HEADS, head_size).to(dtype)
    halves = cache.view(BLOCKS, HEADS, 2 * tokens, head_size).chunk(2, dim=2)
    cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(BLOCKS * tokens), isa)
    insides = SimpleNamespace(
        is_transposed=lambda *_: True,
        unknown=lambda *_: "",
        shards=SimpleNamespace(first_head=lambda *_, **__: 0),
    )
    region = caches._region("layers.0", cache, spec, insides=insides)
    whole = torch.cat([key, value], dim=2).view(torch.uint8).numpy()
    rng = np.random.default_rng(0)
    for token, head in rng.integers((0, 0), (BLOCKS * tokens, HEADS), (100, 2)).tolist():
        place = (token // tokens, head, token % tokens)
        assert element(region, whole.shape[2], place) == whole[token, head].tobytes()
