"""Engines whose groups are of whole blocks, with the KV of one request, against dense arrays.

All groups share one pool of blocks: a page has the layers of the group that owns it, one after
another. A layer's block has any number of bytes, and stands for as many tokens as its group says.
Every rank has a copy of everything.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.connector.paging import Paging, WholePaging, table_of
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span, Table

GAP: Final = 3  # bytes of a page after each layer's, at least
NULL: Final = 0  # vLLM's block for entries that a window has passed


@dataclass(frozen=True)
class Entries:
    """A group: the tokens of an entry, the window (0: all), and the bytes of each layer's block."""

    tokens: int
    window: int
    layers: Mapping[str, int]


@dataclass(frozen=True)
class Request:
    """Decode has the first `local` tokens, loads up to `end`, and computes the one behind it."""

    groups: tuple[Entries, ...]
    local: int
    end: int

    @property
    def num_tokens(self) -> int:
        """The length of the prompt."""
        return self.end + 1

    def pagings(self) -> list[WholePaging]:
        return [WholePaging(n, one.tokens, one.window) for n, one in enumerate(self.groups)]

    def num_entries(self) -> list[int]:
        return [-(-self.num_tokens // one.tokens) for one in self.groups]

    def kept_on_decode(self) -> list[range]:
        """The entries with a block once vLLM has allocated those of the load."""
        skipped = [max(0, self.end - g.window + 1) if g.window else 0 for g in self.groups]
        return [
            range(before // one.tokens, -(-self.end // one.tokens))
            for before, one in zip(skipped, self.groups, strict=True)
        ]

    def kept_on_prefill(self) -> list[range]:
        return [paging.wanted(self.num_tokens) for paging in self.pagings()]


GROUPS: Final = (
    Entries(256, 0, {"four": 64, "hundred": 2}),
    Entries(64, 128, {"window": 9}),
    Entries(4, 8, {"state": 16}),
)
"""A model that keeps states for 4 and for 100 tokens, a window, and its last states."""


class WholeEngine:
    """One rank's memory: noise, and the blocks of the entries that it keeps."""

    def __init__(
        self,
        request: Request,
        kept: Sequence[range],
        rng: np.random.Generator,
        *,
        spare: int,
        gap: int = GAP,
        backwards: bool = False,
    ) -> None:
        self.request, self._gap = request, gap
        self._order = -1 if backwards else 1
        pages = [sum(size + gap for size in one.layers.values()) for one in request.groups]
        self.page = max(pages) + gap
        ids = iter(1 + rng.permutation(sum(map(len, kept)) + spare))
        # vLLM's tables, with the null block for entries that a window has passed.
        self.ids = [[NULL] * one.start + [int(next(ids)) for _ in one] for one in kept]
        self.num_blocks = 1 + sum(map(len, kept)) + spare
        self.memory = rng.integers(0, 256, self.num_blocks * self.page, dtype=np.uint8)

    def layout(self) -> CacheLayout:
        base = self.memory.ctypes.data
        groups = tuple(
            Group(
                one.tokens,
                self.num_blocks,
                1,
                tuple(
                    Region(
                        layer,
                        base + offset,
                        block_stride=self.page,
                        head_stride=one.layers[layer],
                        token_stride=self.page,
                        first_head=0,
                        num_heads=1,
                        parts=(Part(0, one.layers[layer]),),
                    )
                    for layer, offset in self._offsets(one).items()
                ),
                one.window,
                whole=True,
            )
            for one in self.request.groups
        )
        return CacheLayout(groups, "DRAM", 0, (Span(base, len(self.memory)),))

    def _offsets(self, group: Entries) -> dict[str, int]:
        offsets, at = {}, 0
        for layer in list(group.layers)[:: self._order]:
            offsets[layer] = at
            at += group.layers[layer] + self._gap
        return offsets

    def blocks(self, layer: str) -> np.ndarray:
        """A view of the layer's blocks, shape (blocks, bytes)."""
        group = next(one for one in self.request.groups if layer in one.layers)
        at, pages = self._offsets(group)[layer], self.memory.reshape(self.num_blocks, self.page)
        return pages[:, at : at + group.layers[layer]]

    def write(self, dense: Mapping[str, np.ndarray], since: Sequence[int]) -> None:
        """Write the entries of all groups, from numbers `since` on."""
        for group, ids, first in zip(self.request.groups, self.ids, since, strict=True):
            for layer in group.layers:
                for entry in range(first, len(ids)):
                    if ids[entry] != NULL:
                        self.blocks(layer)[ids[entry]] = dense[layer][entry]

    def tables(self, tokens: range) -> list[Table]:
        """The tables of a load, or of an offer."""
        pagings: list[Paging] = [*self.request.pagings()]
        pairs = zip(pagings, self.ids, strict=True)
        return [paging.table(ids, tokens) for paging, ids in pairs]

    def offered(self) -> list[Table]:
        return [table_of(ids, 0) for ids in self.ids]


def dense_of(request: Request, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The bytes of each layer's entries, shape (entries, bytes)."""
    return {
        layer: rng.integers(0, 256, (entries, size), dtype=np.uint8)
        for group, entries in zip(request.groups, request.num_entries(), strict=True)
        for layer, size in group.layers.items()
    }


def alignment(groups: Sequence[Entries]) -> int:
    """Where vLLM's prefix cache may end."""
    return math.lcm(*(one.tokens for one in groups))
