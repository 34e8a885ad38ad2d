"""Arithmetic on tokens and block ids. All ranges are half-open.

    tokens   0 ............ local ............ local + load ... prompt
             |-- cached here --|--- to be read ---|-- computed --|
    entries  [local // entry_size, ceil((local + load) / entry_size))

A block table has one entry (a block id) for every `entry_size` tokens. `local` is a multiple of the
entry size: vLLM reports only whole blocks of its own cache hits.

Where the two sides have different block sizes, tokens are cut at the block edges of both sides.
Each token segment then lies in one block on either side. The cuts repeat after the least common
multiple of the block sizes, which is the period:

    local    |       48       |       48       |
    remote   |    32    |    32    |    32    |      segments of 32, 16, 16, 32 tokens
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import Group

ABSENT: Final = -1
"""In a block table: no block, as where a sliding window has passed."""

BlockIds = npt.NDArray[np.int32]
"""Shape (n,), int32: the element type that NIXL takes without a conversion."""


def entries(local: int, load: int, entry_size: int) -> range:
    """The positions in a block table whose blocks hold tokens [local, local + load)."""
    return range(local // entry_size, -(-(local + load) // entry_size))


def block_ids(table: Sequence[int] | bytes) -> BlockIds:
    """A block table's ids as an array; bytes are little-endian int32, as on the wire."""
    if isinstance(table, bytes):
        return np.frombuffer(table, dtype="<i4")
    return np.asarray(table, dtype=np.int32)


def count_present(table: Sequence[int] | bytes) -> int:
    """How many entries of a block table are not ABSENT."""
    return int(np.count_nonzero(block_ids(table) != ABSENT))


def to_bytes(ids: BlockIds) -> bytes:
    """The wire form of block ids: little-endian int32."""
    return ids.astype("<i4", copy=False).tobytes()


@dataclass(frozen=True)
class TokenSegment:
    """Tokens [start, start + length), and the same tokens of every later period."""

    start: int
    length: int
    period: int

    def starts(self, tokens: range) -> range:
        """Where the segments within these tokens begin; `tokens` begins at a block's edge."""
        first = tokens.start + (self.start - tokens.start) % self.period
        return range(first, tokens.stop, self.period)


def token_segments(local_size: int, remote_size: int) -> list[TokenSegment]:
    """Cut one period of tokens at the block edges of both sides."""
    period = math.lcm(local_size, remote_size)
    edges = {*range(0, period, local_size), *range(0, period, remote_size), period}
    cuts = itertools.pairwise(sorted(edges))
    return [TokenSegment(start, end - start, period) for start, end in cuts]


def num_token_segments(local_size: int, remote_size: int) -> int:
    """The number of segments in one period, without a list of them."""
    common = math.gcd(local_size, remote_size)
    return local_size // common + remote_size // common - 1


@dataclass(frozen=True)
class BlockTable:
    """A request's block table of one group on one side: `ids[0]` is its entry number `first`."""

    ids: BlockIds
    group: Group
    first: int = 0

    def piece_numbers(self, tokens: range, per_block: int) -> BlockIds:
        """For each token, the number of the piece that holds it.

        Each block has `per_block` pieces; they are numbered through all blocks of the cache. Where
        the table's entry is absent, the number is negative.

        Raises:
            ValueError: for a token outside of the table, or an id that the cache does not have.
        """
        group = self.group
        ids = self._ids_of(tokens)
        if ids.size and not (ids.min() >= ABSENT and ids.max() < group.num_entries):
            wrong = ids[(ids < ABSENT) | (ids >= group.num_entries)][0]
            raise ValueError(f"block id {wrong}; allowed: 0 to {group.num_entries - 1}")
        per_entry = group.blocks_per_entry * per_block
        if per_entry == 1:
            return ids
        piece_size = group.entry_size // per_entry
        within = np.arange(tokens.start, tokens.stop, tokens.step) % group.entry_size // piece_size
        return ids * np.int32(per_entry) + within.astype(np.int32)

    def _ids_of(self, tokens: range) -> BlockIds:
        """For each token, the id in its entry of the table."""
        size = self.group.entry_size
        if not tokens:
            return self.ids[:0]
        first, last = tokens[0] // size - self.first, tokens[-1] // size - self.first
        if first < 0 or last >= len(self.ids):
            raise ValueError(
                f"block table has the entries {self.first} to {self.first + len(self.ids) - 1}; "
                f"needed: {first + self.first} to {last + self.first}"
            )
        if tokens.step % size == 0:
            return self.ids[first : last + 1 : tokens.step // size]
        positions = np.arange(tokens.start, tokens.stop, tokens.step) // size - self.first
        ids: BlockIds = self.ids[positions]
        return ids
