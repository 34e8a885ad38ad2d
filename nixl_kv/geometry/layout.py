"""Where each byte of KV lives on one rank, as bases and strides.

Every element of KV is (layer, part, head, token), where a part is K, or V, or both in one piece
where they are never apart (as in a latent cache). A rank keeps the element at

    region.base + part.offset + block * block_stride + head * head_stride + slot * token_stride

with `block` from the request's block table at `token // block_size`, `slot = token % block_size`
and `head` counted from the region's first. `part.length` bytes stand there in one piece; the rest
of the part, if it has more of them, in pieces `part.stride` bytes apart.

That one formula covers all of these, told apart by numbers alone, never by a backend's name:

    vLLM's packed view [B, H, N, K+V] in any physical order   V's offset is K's length
    separate K and V, [2, B, H, N, D]                         V's offset is half of the tensor
    K and V of a block side by side, [B, 2, H, N, D]          V's offset is half of the block stride
    one latent head [B, 1, N, C]                              one part, one head on every rank
    K transposed within the block, [B, H, D, N]               K has D pieces of one element, and a
                                                              token_stride of its own

These records come from peers too, so each checks its own numbers and raises ValueError.
"""

from dataclasses import dataclass
from typing import Literal

MAX_ADDRESS = 2**63
MAX_COUNT = 2**31

WINDOW_EDGE = 256
"""Prefill keeps what a sliding window needs from a multiple of this many tokens on."""

Memory = Literal["VRAM", "DRAM"]


def _check(name: str, value: int, *, low: int = 1, high: int) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; allowed: {low} to {high - 1}")


@dataclass(frozen=True)
class Part:
    """A part of one head's content of one token: `count` pieces of `length` bytes.

    The first is at `offset`, the others follow `stride` bytes apart. A `token_stride` of 0 means
    the region's.
    """

    offset: int
    length: int
    count: int = 1
    stride: int = 0
    token_stride: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check("part offset", self.offset, low=0, high=MAX_ADDRESS)
        _check("part length", self.length, high=MAX_COUNT)
        _check("part count", self.count, high=1 << 16)
        _check("part stride", self.stride, low=0, high=MAX_ADDRESS)
        _check("part token_stride", self.token_stride, low=0, high=MAX_ADDRESS)

    @property
    def content(self) -> int:
        """Bytes of all its pieces."""
        return self.count * self.length


@dataclass(frozen=True)
class Region:
    """One layer's KV on one rank. All strides are bytes; heads are counted over the whole model.

    Where it is `opaque`, only its own kernel knows which bytes of a head's block are which token's:
    strides and parts say no more than which bytes the block has. It is moved, and looked at, whole.
    """

    layer: str
    base: int
    block_stride: int
    head_stride: int
    token_stride: int
    first_head: int
    num_heads: int
    parts: tuple[Part, ...]
    opaque: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check("base", self.base, high=MAX_ADDRESS)
        for name in ("block_stride", "head_stride", "token_stride"):
            _check(name, getattr(self, name), high=MAX_ADDRESS)
        _check("first_head", self.first_head, low=0, high=1 << 16)
        _check("num_heads", self.num_heads, high=1 << 16)
        _check("number of parts", len(self.parts), high=9)

    @property
    def heads(self) -> tuple[int, int]:
        """The half-open range of the model's heads."""
        return self.first_head, self.first_head + self.num_heads

    @property
    def content(self) -> int:
        """Bytes of one head of one token, all parts together."""
        return sum(part.content for part in self.parts)


@dataclass(frozen=True)
class Group:
    """Layers that share one block table; a pipeline stage may have none of them.

    `block_size` (in tokens) and `num_blocks` are those of the regions. Where vLLM's block table
    counts larger blocks, each of them is `blocks_per_entry` consecutive ones of ours. Of tokens
    that lie `window` or more before the last one nothing is kept; 0 means that all are.
    """

    block_size: int
    num_blocks: int
    blocks_per_entry: int
    regions: tuple[Region, ...]
    window: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check("block_size", self.block_size, high=1 << 20)
        _check("num_blocks", self.num_blocks, high=MAX_COUNT)
        _check("blocks_per_entry", self.blocks_per_entry, high=1 << 16)
        _check("number of regions", len(self.regions), low=0, high=1 << 14)
        _check("window", self.window, low=0, high=MAX_COUNT)

    @property
    def num_entries(self) -> int:
        """How many different ids a block table may hold."""
        return self.num_blocks // self.blocks_per_entry

    @property
    def entry_size(self) -> int:
        """Tokens per entry of the block table."""
        return self.block_size * self.blocks_per_entry


@dataclass(frozen=True)
class Span:
    """Memory registered in one piece: `length` bytes at `address`."""

    address: int
    length: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check("span address", self.address, high=MAX_ADDRESS)
        _check("span length", self.length, high=MAX_ADDRESS)


@dataclass(frozen=True)
class CacheLayout:
    """The whole KV cache of one rank.

    `device` is the ordinal of the device that holds the memory, 0 for DRAM; `element` names the
    stored type.
    """

    groups: tuple[Group, ...]
    element: str
    memory: Memory
    device: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        """Check the numbers, and that every block of every region lies in one span."""
        _check("number of groups", len(self.groups), high=65)
        _check("device", self.device, low=0, high=1 << 10)
        num_regions = sum(len(group.regions) for group in self.groups)
        # Each region is looked for in all spans.
        _check("regions times spans", (num_regions + 1) * len(self.spans), low=0, high=1 << 20)
        for group in self.groups:
            for region in group.regions:
                self._check_inside(group, region)

    def _check_inside(self, group: Group, region: Region) -> None:
        end = region.base + extent(region, group)
        if not any(s.address <= region.base and end <= s.address + s.length for s in self.spans):
            raise ValueError(
                f"region of layer {region.layer!r} reaches from {region.base:#x} to {end:#x}; "
                "allowed: inside one of the layout's spans"
            )


def extent(region: Region, group: Group) -> int:
    """Bytes from the region's base to the end of its last element."""
    return (
        (group.num_blocks - 1) * region.block_stride
        + (region.num_heads - 1) * region.head_stride
        + max(
            part.offset
            + part.length
            + (part.count - 1) * part.stride
            + (group.block_size - 1) * (part.token_stride or region.token_stride)
            for part in region.parts
        )
    )
