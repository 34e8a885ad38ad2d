"""One rank's cache as bytes, and prompts whose KV is known."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span

BLOCK_TOKENS: Final = 4
CONTENT: Final = 8  # bytes of K and V per head and token
NULL_BLOCK: Final = 0
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Heads:
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class KnownPrompt:
    """A prompt; its KV, [head, token, content], is like no other's."""

    number: int
    length: int
    heads: int  # of the model
    kv: Bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.number)
        shape = (self.heads, self.length, CONTENT)
        object.__setattr__(self, "kv", rng.integers(0, 256, shape, dtype=np.uint8))

    @property
    def token_ids(self) -> list[int]:
        return [self.number * 1000 + n for n in range(self.length)]


class RankCache:
    """The cache of one rank, at the same address in all of its lives."""

    def __init__(self, num_blocks: int, heads: Heads) -> None:
        self.heads = heads
        self.num_blocks = num_blocks
        self.view: Bytes = np.zeros((num_blocks, heads.count, BLOCK_TOKENS, CONTENT), np.uint8)
        self.begin = self.view.ctypes.data
        self._junk = np.random.default_rng(num_blocks)

    def layout(self, window: int) -> CacheLayout:
        view, half = self.view, CONTENT // 2
        region = Region(
            layer="layer.0",
            base=self.begin,
            block_stride=view.strides[0],
            head_stride=view.strides[1],
            token_stride=view.strides[2],
            first_head=self.heads.first,
            num_heads=self.heads.count,
            parts=(Part(0, half), Part(half, half)),
        )
        group = Group(BLOCK_TOKENS, self.num_blocks, 1, (region,), window)
        return CacheLayout((group,), "DRAM", 0, (Span(self.begin, view.nbytes),))

    def block_at(self, address: int) -> int | None:
        within = address - self.begin
        return within // self.view.strides[0] if 0 <= within < self.view.nbytes else None

    def write(self, prompt: KnownPrompt, table: Sequence[int], tokens: range) -> None:
        for token in tokens:
            block = table[token // BLOCK_TOKENS]
            if block != NULL_BLOCK:
                self.view[block, :, token % BLOCK_TOKENS] = self._kv(prompt)[:, token]

    def overwrite(self, blocks: Sequence[int]) -> None:
        """These blocks belong to somebody else now, who has written into them."""
        shape = self.view[list(blocks)].shape
        self.view[list(blocks)] = self._junk.integers(0, 256, shape, dtype=np.uint8)

    def wrong_tokens(self, prompt: KnownPrompt, table: Sequence[int], tokens: range) -> list[int]:
        """The tokens whose bytes are not the prompt's, of those that have a block."""
        kv = self._kv(prompt)
        pairs = [(token, table[token // BLOCK_TOKENS]) for token in tokens]
        return [
            token
            for token, block in pairs
            if block != NULL_BLOCK
            and not np.array_equal(self.view[block, :, token % BLOCK_TOKENS], kv[:, token])
        ]

    def _kv(self, prompt: KnownPrompt) -> Bytes:
        return prompt.kv[self.heads.first : self.heads.first + self.heads.count]
