"""From tensors to regions: the axes are named, never guessed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.local.model_layouts import PACKED
from nixl_kv.geometry.layout import Part, Region
from nixl_kv.geometry.views import join_kv, region_from_tensor
from support.oracle import ALL_ORDERS, ArrayTensor, Blocks, Layer, Store


def tensor(*shape: int, dtype: str = "uint16", order: str = "C") -> ArrayTensor:
    return ArrayTensor(np.zeros(shape, dtype=dtype, order=order))  # type: ignore[call-overload]


def strides_and_heads(region: Region) -> tuple[int, ...]:
    return region.block_stride, region.head_stride, region.token_stride, region.num_heads


# Blocks of 16 tokens, 8 heads, 64 elements of two bytes; three blocks.
@pytest.mark.parametrize(
    ("shape", "axes", "expected", "parts"),
    [
        pytest.param(
            (3, 8, 16, 128), "BHNC", (32768, 4096, 256, 8), [(0, 256)], id="packed, one piece"
        ),
        pytest.param(
            (2, 3, 8, 16, 64),
            "2BHNC",
            (16384, 2048, 128, 8),
            [(0, 128), (49152, 128)],
            id="K and V in two halves",
        ),
        pytest.param(
            (3, 2, 8, 16, 64),
            "B2HNC",
            (32768, 2048, 128, 8),
            [(0, 128), (16384, 128)],
            id="K and V side by side",
        ),
        pytest.param((3, 16, 576), "BNC", (18432, 18432, 1152, 1), [(0, 1152)], id="latent"),
    ],
)
def test_strides_and_parts_follow_the_named_axes(
    shape: tuple[int, ...], axes: str, expected: tuple[int, ...], parts: list[tuple[int, int]]
) -> None:
    region = region_from_tensor("a", tensor(*shape), axes)
    assert strides_and_heads(region) == expected
    assert [(part.offset, part.length) for part in region.parts] == parts
    assert (region.layer, region.first_head) == ("a", 0)


@pytest.mark.parametrize("axes", ["B2HNC", "2BHNC"])
def test_two_blocks_are_not_taken_for_k_and_v(axes: str) -> None:
    """The shape [2, 2, ...] fits both orders: only the axes tell them apart."""
    region = region_from_tensor("a", tensor(2, 2, 4, 8, 16, dtype="uint8"), axes)
    block, apart = (1024, 512) if axes == "B2HNC" else (512, 1024)
    assert region.block_stride == block
    assert region.parts == (Part(0, 16), Part(apart, 16))


@pytest.mark.parametrize(
    ("axes", "content", "parts"),
    [
        pytest.param("BHNC", (10, 22), [(0, 10), (10, 22)], id="K, then V"),
        pytest.param("BHNC", (10, 18), [(0, 10), (10, 18)], id="K, V, then unused bytes"),
        pytest.param("BHNC", (32,), [(0, 32)], id="one piece"),
        pytest.param("BHNC", None, [(0, 32)], id="one piece by default"),
        pytest.param(
            "B2HNC", (4, 12), [(0, 4), (4, 12), (512, 4), (516, 12)], id="two pieces of K and of V"
        ),
    ],
)
def test_content_divides_the_last_axis_into_parts(
    axes: str, content: Sequence[int] | None, parts: list[tuple[int, int]]
) -> None:
    shape = (2, 4, 8, 16) if axes == "BHNC" else (3, 2, 2, 8, 16)
    region = region_from_tensor("a", tensor(*shape), axes, content=content)
    assert [(part.offset, part.length) for part in region.parts] == parts


def test_the_base_of_a_view_is_its_own_not_the_array_s() -> None:
    """All layers may be views of one array."""
    memory = np.zeros((3, 5, 2, 4, 6), dtype=np.uint8)  # blocks, layers, heads, tokens, content
    region = region_from_tensor("layer.2", ArrayTensor(memory[:, 2]), "BHNC", first_head=6)
    assert region.base == memory.ctypes.data + 2 * 48
    assert strides_and_heads(region) == (5 * 48, 24, 6, 2)
    assert region.heads == (6, 8)


@pytest.mark.parametrize(
    ("shape", "axes", "content", "message"),
    [
        pytest.param((2, 3, 4), "BHN", None, "axes are 'BHN'; allowed: B, N, C", id="no content"),
        pytest.param((2, 3, 4), "BHC", None, "axes are 'BHC'; allowed", id="no tokens"),
        pytest.param((2, 3, 4), "HNC", None, "axes are 'HNC'; allowed", id="no blocks"),
        pytest.param((2, 3, 4), "BNX", None, "axes are 'BNX'; allowed", id="unknown"),
        pytest.param((2, 3, 4, 5), "BNCX", None, "axes are 'BNCX'; allowed", id="one unknown"),
        pytest.param((2, 3, 4, 5), "BNCC", None, "axes are 'BNCC'; .*each once", id="twice"),
        pytest.param((2, 3, 4), "", None, "axes are ''; allowed", id="none"),
        pytest.param(
            (2, 3, 4), "BHNC", None, r"axes are 'BHNC' for a tensor of shape \(2, 3, 4\)", id="few"
        ),
        pytest.param((2, 3, 4, 5), "BNC", None, "axes are 'BNC' for a tensor", id="many"),
        pytest.param(
            (3, 3, 1, 4, 8), "2BHNC", None, "axis 2 of layer 'a' has length 3; allowed: 2", id="3"
        ),
        pytest.param(
            (3, 1, 1, 4, 8), "B2HNC", None, "axis 2 of layer 'a' has length 1; allowed: 2", id="1"
        ),
        pytest.param(
            (3, 1, 4, 8), "BHNC", (9, 8), r"content is \(9, 8\); allowed: up to 16 bytes", id="long"
        ),
        pytest.param((3, 1, 4, 8), "BHNC", (16, 0), "part length is 0", id="empty part"),
        pytest.param(
            (3, 1, 8, 4), "BHCN", (8, 8), r"content is \(8, 8\); allowed: none where", id="strided"
        ),
    ],
)
def test_axes_and_content_that_do_not_fit_are_refused(
    shape: tuple[int, ...], axes: str, content: Sequence[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        region_from_tensor("a", tensor(*shape), axes, content=content)


def test_content_of_one_element_has_no_stride() -> None:
    memory = np.zeros((2, 3, 4, 5), dtype=np.uint8)
    assert region_from_tensor("a", ArrayTensor(memory[..., :1]), "BHNC").parts == (Part(0, 1),)


@pytest.mark.parametrize(
    ("shape", "axes", "strides", "parts"),
    [
        pytest.param(
            (3, 8, 64, 16),
            "BHCN",
            (16384, 2048, 2),
            [Part(0, 2, 64, 32)],
            id="K as some kernels want it",
        ),
        pytest.param(
            (3, 2, 8, 64, 16),
            "B2HCN",
            (32768, 2048, 2),
            [Part(0, 2, 64, 32), Part(16384, 2, 64, 32)],
            id="K and V",
        ),
        pytest.param((3, 8, 1, 16), "BHCN", (256, 32, 2), [Part(0, 2)], id="one element"),
    ],
)
def test_with_tokens_inside_the_content_each_element_is_a_piece(
    shape: tuple[int, ...], axes: str, strides: tuple[int, ...], parts: list[Part]
) -> None:
    region = region_from_tensor("a", tensor(*shape), axes)
    assert (region.block_stride, region.head_stride, region.token_stride) == strides
    assert list(region.parts) == parts


def test_join_kv_of_transposed_k_beside_v() -> None:
    """A head's block is K as [content, tokens], then V as [tokens, content]."""
    memory = np.zeros((3, 8, 2 * 16 * 64), dtype=np.uint16)
    keys = memory[:, :, :1024].reshape(3, 8, 64, 16)
    values = memory[:, :, 1024:].reshape(3, 8, 16, 64)
    halves = [
        region_from_tensor("a", ArrayTensor(view), axes, first_head=8)
        for view, axes in ((keys, "BHCN"), (values, "BHNC"))
    ]
    k_part, v_part = Part(0, 2, 64, 32, 2), Part(2048, 128, token_stride=128)
    for pair, parts in ((halves, (k_part, v_part)), (halves[::-1], (v_part, k_part))):
        region = join_kv(*pair)
        assert region.parts == parts
        assert region.base == memory.ctypes.data
        assert (region.block_stride, region.head_stride, region.heads) == (32768, 4096, (8, 16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"layer": "b"}, "layer of K is 'a' and of V 'b'", id="layer"),
        pytest.param({"block_stride": 9}, "block_stride of K is 1024 and of V 9", id="blocks"),
        pytest.param({"head_stride": 9}, "head_stride of K is 128 and of V 9", id="heads"),
        pytest.param({"first_head": 9}, "first_head of K is 0 and of V 9", id="first head"),
        pytest.param({"num_heads": 9}, "num_heads of K is 4 and of V 9", id="number of heads"),
    ],
)
def test_join_kv_refuses_different_blocks_or_heads(changes: dict[str, Any], message: str) -> None:
    key = region_from_tensor("a", tensor(2, 4, 8, 16), "BHNC")
    key = replace(key, head_stride=128, block_stride=1024)
    with pytest.raises(ValueError, match=f"^{message}; allowed: the same$"):
        join_kv(key, replace(key, **changes))


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(
    order=st.sampled_from(ALL_ORDERS),
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    blocks=st.builds(
        Blocks, *[st.integers(1, 4)] * 2, pad=st.integers(0, 2), gap=st.integers(0, 2)
    ),
)
def test_any_strided_view_has_the_region_of_the_oracle(
    order: str, sizes: tuple[int, int, int, int], blocks: Blocks
) -> None:
    heads, key, value, first_head = sizes
    if order not in PACKED:  # K and V that are apart have the same content; elements are bytes
        key = value = 2 * key - 1
    layers = [Layer(name, heads, key, value, first_head=first_head) for name in "abc"]
    store = Store(order, layers, blocks)
    memory = np.zeros(store.end, dtype=np.uint8)
    if "T" in order:
        halves = [
            region_from_tensor("b", view(memory, numbers), "BHNC", first_head=first_head)
            for numbers in (store.parts["b"][0][..., 0], store.parts["b"][1][..., 0, :])
        ]
        region = join_kv(*halves)
    else:
        content = (key,) if "2" in order else (key, value)
        numbers, axes = store.arrays["b"], order.replace("L", "")
        region = region_from_tensor(
            "b", view(memory, numbers), axes, first_head=first_head, content=content
        )
    assert explicit(region) == explicit(store.region(layers[1], memory.ctypes.data))


def view(memory: np.ndarray, offsets: np.ndarray) -> ArrayTensor:
    """The bytes at these offsets, as a view of the memory."""
    strides = [step // offsets.itemsize for step in offsets.strides]
    first = int(offsets.min())
    return ArrayTensor(np.lib.stride_tricks.as_strided(memory[first:], offsets.shape, strides))


def explicit(region: Region) -> Region:
    """The region with every part's token stride written out."""
    parts = [replace(p, token_stride=p.token_stride or region.token_stride) for p in region.parts]
    return replace(region, parts=tuple(parts))
