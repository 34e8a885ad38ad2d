"""From a tensor's shape and strides to a `Region`. The caller names the axes; nothing is guessed.

    "BHNC"     vLLM's packed view: V follows K inside the content
    "2BHNC"    K and V in two halves
    "B2HNC"    K and V of a block side by side; "B2NHC" is the same with tokens outside heads
    "BNC"      a latent cache: one head, and no axis for it
    "BHCN"     tokens inside the content, as some kernels want K

B is the block, 2 separates K from V, H is the head, N is the token within the block, C is the
content. A shape alone does not tell these apart: a cache may have two blocks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from nixl_kv.geometry.layout import Part, Region

AXES: Final = frozenset("B2HNC")
REQUIRED: Final = frozenset("BNC")


class Tensor(Protocol):
    """The methods of torch's tensors that are used here."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements along each axis."""

    def stride(self) -> Sequence[int]:
        """Elements between neighbours along each axis."""

    def element_size(self) -> int:
        """Bytes of an element."""

    def data_ptr(self) -> int:
        """Address of the first element."""


def region_from_tensor(
    layer: str,
    tensor: Tensor,
    axes: str,
    *,
    first_head: int = 0,
    content: Sequence[int] | None = None,
    element: str = "uint8",
) -> Region:
    """Describe one layer's cache on one rank.

    Args:
        layer: its name, the same on all ranks.
        tensor: its cache, a view with any strides.
        axes: one letter per axis of the tensor, as above.
        first_head: the number of the tensor's first head among the model's KV heads.
        content: where V follows K along C, the bytes of each; by default one piece.
        element: the name of the stored type.

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
        parts=parts + _shifted(parts, strides["2"]) if "2" in shape else parts,
        element=element,
    )


def join_kv(key: Region, value: Region) -> Region:
    """Make one region of a layer's K and V, which were described apart.

    Raises:
        ValueError: if K and V have different strides of blocks or heads, or different heads.
    """
    names = ["layer", "block_stride", "first_head", "num_heads"]
    if key.num_heads > 1:
        names.append("head_stride")
    for name in names:
        of_key, of_value = getattr(key, name), getattr(value, name)
        if of_key != of_value:
            raise ValueError(f"{name} of K is {of_key!r} and of V {of_value!r}; allowed: the same")
    base = min(key.base, value.base)
    parts = [
        replace(part, token_stride=region.token_stride_of(part))
        for region in (key, value)
        for part in _shifted(region.parts, region.base - base)
    ]
    return replace(key, base=base, parts=tuple(parts))


def _parts(
    count: int, stride: int, *, size: int, content: Sequence[int] | None
) -> tuple[Part, ...]:
    """The parts of `count` elements, `stride` bytes apart: one for each length in the content."""
    if stride != size and count > 1:
        if content:
            raise ValueError(f"content is {tuple(content)}; allowed: none where C has strides")
        return (Part(0, size, count, stride),)
    content = content or (count * size,)
    if sum(content) > count * size:
        raise ValueError(f"content is {tuple(content)}; allowed: up to {count * size} bytes")
    ends = itertools.accumulate(content)
    return tuple(Part(end - length, length) for end, length in zip(ends, content, strict=True))


def _shifted(parts: Sequence[Part], distance: int) -> tuple[Part, ...]:
    return tuple(replace(part, offset=part.offset + distance) for part in parts)
