"""One rank's cache as bytes, and prompts whose KV is known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from harness.local.caches import Bytes, Cache, Sizes
from nixl_kv.geometry.layout import CacheLayout

BLOCK_TOKENS: Final = 4
CONTENT: Final = 8  # bytes of K and V per head and token
NULL_BLOCK: Final = 0


@dataclass(frozen=True)
class KnownPrompt:
    number: int
    length: int
    heads: int  # of the model

    @cached_property
    def kv(self) -> Bytes:
        """Its KV, [head, token, content], is like no other prompt's."""
        rng = np.random.default_rng(self.number)
        return rng.integers(0, 256, (self.heads, self.length, CONTENT), dtype=np.uint8)

    @property
    def token_ids(self) -> list[int]:
        return [self.number * 1000 + n for n in range(self.length)]


class RankCache(Cache):
    """The cache of one rank, at the same address in all of its lives."""

    def __init__(self, num_blocks: int, heads: range) -> None:
        half = CONTENT // 2
        sizes = Sizes(1, num_blocks, len(heads), BLOCK_TOKENS, half, half)
        super().__init__(sizes, first_head=heads.start)
        self.num_blocks = num_blocks
        self._heads = slice(heads.start, heads.stop)
        self._blocks = self.view[0]
        self._junk = np.random.default_rng(num_blocks)

    def layout_with(self, window: int) -> CacheLayout:
        layout = self.layout()
        return replace(layout, groups=(replace(layout.groups[0], window=window),))

    def block_at(self, address: int) -> int | None:
        """The block that an address lies in, if it is in this cache."""
        within = address - self.memory.ctypes.data
        return within // self._blocks.strides[0] if 0 <= within < self.memory.nbytes else None

    def write(self, prompt: KnownPrompt, table: Sequence[int], tokens: range) -> None:
        """A forward computes these tokens."""
        for token in tokens:
            block = table[token // BLOCK_TOKENS]
            if block != NULL_BLOCK:
                self._blocks[block, :, token % BLOCK_TOKENS] = prompt.kv[self._heads, token]

    def overwrite(self, blocks: Sequence[int]) -> None:
        """These blocks belong to another request now, which has written into them."""
        shape = self._blocks[list(blocks)].shape
        self._blocks[list(blocks)] = self._junk.integers(0, 256, shape, dtype=np.uint8)

    def wrong_tokens(self, prompt: KnownPrompt, table: Sequence[int], tokens: range) -> list[int]:
        """The tokens whose bytes are not the prompt's, of those that have a block."""
        return [
            token
            for token in tokens
            if (block := table[token // BLOCK_TOKENS]) != NULL_BLOCK
            and (
                self._blocks[block, :, token % BLOCK_TOKENS] != prompt.kv[self._heads, token]
            ).any()
        ]
