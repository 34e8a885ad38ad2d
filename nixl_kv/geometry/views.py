"""From a tensor's shape and strides to a `Region`. The caller names the axes; nothing is guessed.

    "BHNC"     vLLM's packed view: K and V follow each other inside of the content
    "2BHNC"    K and V in two halves
    "B2HNC"    K and V of a block side by side; "B2NHC" the same with tokens outside of heads
    "BNC"      a latent cache: one head, no axis for it

B is the block, 2 tells K from V, H is the head, N the token within the block, C the content. A
shape alone does not tell these apart: a cache may have two blocks.
"""

from collections.abc import Sequence
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
        ValueError: if the axes do not fit the tensor, or the content is not contiguous.
    """
    if not REQUIRED <= set(axes) <= AXES or len(set(axes)) != len(axes):
        raise ValueError(f"axes are {axes!r}; allowed: B, N, C and perhaps 2 and H, each once")
    if len(axes) != len(tensor.shape):
        raise ValueError(f"axes are {axes!r} for a tensor of shape {tuple(tensor.shape)}")
    size = tensor.element_size()
    shape = dict(zip(axes, tensor.shape, strict=True))
    strides = dict(zip(axes, (step * size for step in tensor.stride()), strict=True))
    _check(layer, shape, strides, size=size)
    if content and sum(content) > shape["C"] * size:
        raise ValueError(f"content is {content}; allowed: up to {shape['C'] * size} bytes")
    return Region(
        layer=layer,
        base=tensor.data_ptr(),
        block_stride=strides["B"],
        head_stride=strides.get("H", shape["N"] * strides["N"]),
        token_stride=strides["N"],
        first_head=first_head,
        num_heads=shape.get("H", 1),
        parts=_parts(content or (shape["C"] * size,), strides.get("2")),
    )


def _parts(content: Sequence[int], apart: int | None) -> tuple[Part, ...]:
    """K and V that are `apart` have the same content; else its pieces are K and V themselves."""
    starts = [0] if apart is None else [0, apart]
    ends = [sum(content[: index + 1]) for index in range(len(content))]
    return tuple(
        Part(start + end - length, length)
        for start in starts
        for end, length in zip(ends, content, strict=True)
    )


def _check(layer: str, shape: dict[str, int], strides: dict[str, int], *, size: int) -> None:
    if shape.get("2", 2) != 2:  # noqa: PLR2004 - K and V
        raise ValueError(f"axis 2 of layer {layer!r} has length {shape['2']}; allowed: 2")
    if shape["C"] > 1 and strides["C"] != size:
        raise ValueError(f"content of layer {layer!r} has stride {strides['C']}; allowed: {size}")
