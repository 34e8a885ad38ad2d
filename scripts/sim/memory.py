"""One rank's cache as bytes, and prompts whose KV is known."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span

TOKENS: Final = 4  # per block
CONTENT: Final = 8  # bytes of K and V per head and token
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Heads:
    """Which KV heads of the model a rank holds."""

    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt; its KV, [head, token, content], is like no other's."""

    number: int
    length: int
    heads: int  # of the model
    kv: Bytes = field(init=False)

    def __post_init__(self) -> None:
        """Compute it."""
        rng = np.random.default_rng(self.number)
        shape = (self.heads, self.length, CONTENT)
        object.__setattr__(self, "kv", rng.integers(0, 256, shape, dtype=np.uint8))

    @property
    def tokens(self) -> list[int]:
        """What a request for it brings."""
        return [self.number * 1000 + n for n in range(self.length)]


class Memory:
    """The cache of one rank, at the same address in all of its lives."""

    def __init__(self, blocks: int, heads: Heads) -> None:
        """Take memory of that many blocks."""
        self.heads = heads
        self.blocks = blocks
        self.view: Bytes = np.zeros((blocks, heads.count, TOKENS, CONTENT), dtype=np.uint8)
        address = self.view.ctypes.data
        self.span = address, address + self.view.nbytes  # first address, and the one behind
        self._stride = self.view.strides[0]
        self._junk = np.random.default_rng(blocks)

    def layout(self) -> CacheLayout:
        """For peers."""
        view = self.view
        half = CONTENT // 2
        region = Region(
            layer="layer.0",
            base=view.ctypes.data,
            block_stride=view.strides[0],
            head_stride=view.strides[1],
            token_stride=view.strides[2],
            first_head=self.heads.first,
            num_heads=self.heads.count,
            parts=(Part(0, half), Part(half, half)),
        )
        group = Group(TOKENS, self.blocks, 1, (region,))
        return CacheLayout((group,), "uint8", "DRAM", 0, (Span(view.ctypes.data, view.nbytes),))

    def block_at(self, address: int) -> int:
        """The block that an address lies in."""
        return (address - self.span[0]) // self._stride

    def write(self, prompt: Prompt, table: Sequence[int], tokens: range) -> None:
        """A forward computes these tokens."""
        for token in tokens:
            block = table[token // TOKENS]
            self.view[block, :, token % TOKENS] = self._of(prompt)[:, token]

    def spoil(self, blocks: Sequence[int]) -> None:
        """These blocks belong to somebody else now, who has written into them."""
        shape = self.view[list(blocks)].shape
        self.view[list(blocks)] = self._junk.integers(0, 256, shape, dtype=np.uint8)

    def wrong(self, prompt: Prompt, table: Sequence[int], tokens: range) -> list[int]:
        """The tokens whose bytes are not the prompt's."""
        kv = self._of(prompt)
        return [
            token
            for token in tokens
            if not np.array_equal(
                self.view[table[token // TOKENS], :, token % TOKENS], kv[:, token]
            )
        ]

    def _of(self, prompt: Prompt) -> Bytes:
        return prompt.kv[self.heads.first : self.heads.first + self.heads.count]
