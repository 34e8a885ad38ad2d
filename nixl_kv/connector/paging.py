"""How vLLM pages a cache group, and which part of a block table a transfer is told of."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.geometry.layout import ABSENT, WINDOW_EDGE, BlockIds, Table, entries

NULL_BLOCK: Final = 0
"""vLLM's placeholder in a block table, where a sliding window has passed."""


@dataclass(frozen=True)
class Paging:
    """A group that keeps something for each token: its number, tokens per block, the window.

    A window of 0 is all tokens.
    """

    group: int
    block_size: int
    window: int

    def wanted(self, num_tokens: int) -> range:
        """The entries of a block table that decode may ask for, of a prompt of so many tokens."""
        start = num_tokens - self.window if self.window else 0
        begin = max(0, start) // WINDOW_EDGE * WINDOW_EDGE
        return entries(begin, num_tokens - begin, self.block_size)

    def count(self, num_tokens: int) -> int:
        """How many blocks so many tokens take at most."""
        return -(-num_tokens // self.block_size)

    def table(self, ids: Sequence[int], tokens: range) -> Table:
        """Of a whole block table of vLLM's the part for these tokens, as the protocol has it.

        The entries are those of the group in the `CacheLayout`.
        """
        span = entries(tokens.start, len(tokens), self.block_size)
        return table_of(ids[span.start : span.stop], span.start)


@dataclass(frozen=True)
class StatePaging(Paging):
    """A group that keeps one state for all tokens before, not something for each.

    The state after t tokens is in the entry of token t - 1, and the other entries are empty, or
    states of no use to decode. In the `CacheLayout` a block of such a group has one token, and the
    window is one token.
    """

    window: int = 0
    """Nothing is to be pinned: vLLM keeps the last state until the request's blocks come free."""

    def wanted(self, num_tokens: int) -> range:
        """See `Paging.wanted`."""
        last = (num_tokens - 1) // self.block_size
        return range(last, last + 1)

    def count(self, num_tokens: int) -> int:
        """See `Paging.count`."""
        return min(num_tokens, 1)

    def table(self, ids: Sequence[int], tokens: range) -> Table:
        """See `Paging.table`. Without the state it is too short, so that nobody reads by it."""
        states = [ids[entry] for entry in self.wanted(tokens.stop) if entry < len(ids)]
        return table_of([state for state in states if state], tokens.stop - 1)


def table_of(ids: Sequence[int], first: int) -> Table:
    """Entries of a block table of vLLM's, from number `first` on, as the protocol has them.

    ABSENT is in place of the null block.
    """
    entries = ids_of(ids)
    if (entries != NULL_BLOCK).all():
        return Table(first, entries.tobytes())
    return Table.of(np.where(entries == NULL_BLOCK, ABSENT, entries), first)


def ids_of(ids: Sequence[int]) -> BlockIds:
    """Block ids of vLLM's, which are a list."""
    packed = struct.pack(f"<{len(ids)}i", *ids)  # numpy takes four times as long
    return np.frombuffer(packed, dtype="<i4")
