"""From a tensor's shape and strides to a `Region`. The caller names the axes; nothing is guessed.

    "BHNC"     vLLM's packed view: K and V follow each other inside of the content
    "2BHNC"    K and V in two halves
    "B2HNC"    K and V of a block side by side; "B2NHC" the same with tokens outside of heads
    "BNC"      a latent cache: one head, no axis for it
    "BHCN"     tokens inside of the content, as kernels like K to be

B is the block, 2 tells K from V, H is the head, N the token within the block, C the content. A
shape alone does not tell these apart: a cache may have two blocks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from nixl_kv.geometry.layout import Part, Region

AXES: Final = frozenset("B2HNC")
REQUIRED: Final = frozenset("BNC")


class Tensor(Protocol):
    """What is asked of a tensor; torch's has it."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements along each axis."""

    def stride(self) -> Sequence[int]:
        """Elements between neighbours along each axis."""

    def element_size(self) -> int:
        """Bytes of an element."""

    def data_ptr(self) -> int:
        """Address of the first element."""


def region(
    layer: str,
    tensor: Tensor,
    axes: str,
    *,
    first_head: int = 0,
    content: Sequence[int] | None = None,
) -> Region:
    """Describe one layer's cache on one rank.

    Args:
        layer: its name, the same on all ranks.
        tensor: its cache, a view of any strides.
        axes: one letter per axis of the tensor, as above.
        first_head: which of the model's KV heads the tensor's first one is.
        content: where K and V follow each other along C, the bytes of each; by default one piece.

    Raises:
        ValueError: if the axes or the content do not fit the tensor.
    """
    if not REQUIRED <= set(axes) <= AXES or len(set(axes)) != len(axes):
        raise ValueError(f"axes are {axes!r}; allowed: B, N, C and perhaps 2 and H, each once")
    if len(axes) != len(tensor.shape):
        raise ValueError(f"axes are {axes!r} for a tensor of shape {tuple(tensor.shape)}")
    size = tensor.element_size()
    shape = dict(zip(axes, tensor.shape, strict=True))
    strides = dict(zip(axes, (step * size for step in tensor.stride()), strict=True))
    if shape.get("2", 2) != 2:  # noqa: PLR2004 - K and V
        raise ValueError(f"axis 2 of layer {layer!r} has length {shape['2']}; allowed: 2")
    parts = _parts(shape["C"], strides["C"], size=size, content=content)
    return Region(
        layer=layer,
        base=tensor.data_ptr(),
        block_stride=strides["B"],
        head_stride=strides.get("H", shape["N"] * strides["N"]),
        token_stride=strides["N"],
        first_head=first_head,
        num_heads=shape.get("H", 1),
        parts=parts + _moved(parts, strides["2"]) if "2" in shape else parts,
    )


def together(key: Region, value: Region) -> Region:
    """One region for K and V of a layer that were described apart.

    Raises:
        ValueError: if their blocks or heads are not equally far apart, or not the same ones.
    """
    names = ["layer", "block_stride", "first_head", "num_heads"]
    if key.num_heads > 1:
        names.append("head_stride")
    for name in names:
        mine, theirs = getattr(key, name), getattr(value, name)
        if mine != theirs:
            raise ValueError(f"{name} of K is {mine!r} and of V {theirs!r}; allowed: the same")
    base = min(key.base, value.base)
    parts = [
        replace(part, token_stride=part.token_stride or region.token_stride)
        for region in (key, value)
        for part in _moved(region.parts, region.base - base)
    ]
    return replace(key, base=base, parts=tuple(parts))


def _parts(
    count: int, stride: int, *, size: int, content: Sequence[int] | None
) -> tuple[Part, ...]:
    """Of `count` elements, `stride` bytes apart: the content's lengths, or a single part."""
    if stride != size and count > 1:
        if content:
            raise ValueError(f"content is {tuple(content)}; allowed: none where C has strides")
        return (Part(0, size, count, stride),)
    content = content or (count * size,)
    if sum(content) > count * size:
        raise ValueError(f"content is {tuple(content)}; allowed: up to {count * size} bytes")
    ends = itertools.accumulate(content)
    return tuple(Part(end - length, length) for end, length in zip(ends, content, strict=True))


def _moved(parts: Sequence[Part], distance: int) -> tuple[Part, ...]:
    return tuple(replace(part, offset=part.offset + distance) for part in parts)
