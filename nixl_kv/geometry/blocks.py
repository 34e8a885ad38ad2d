"""Arithmetic on tokens and block ids. All ranges are half open.

    tokens   0 ............ local ............ local + load ... prompt
             |-- cached here --|---- to be read ----|-- computed --|
    entries  [local // size, ceil((local + load) / size))

`local` is a multiple of the entry size: vLLM shows a connector only whole blocks of its own hits.

Where the block sizes of the two sides differ, tokens are cut at the blocks' edges of both, into
stretches that lie in one block on either side. They repeat with the least common multiple:

    local    |       48       |       48       |
    remote   |    32    |    32    |    32    |      stretches of 32, 16, 16, 32 tokens
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import Group

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


def to_bytes(ids: BlockIds) -> bytes:
    """The wire form of `block_ids`."""
    return ids.astype("<i4", copy=False).tobytes()


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, start + length), and those one or more periods later."""

    start: int
    length: int
    period: int

    def starts(self, tokens: range) -> range:
        """Where the stretches within these tokens begin; `tokens` begins at a block's edge."""
        first = tokens.start + (self.start - tokens.start) % self.period
        return range(first, tokens.stop, self.period)


def stretches(local_size: int, remote_size: int) -> list[Stretch]:
    """Cut tokens at the edges of both sides' blocks, over one period."""
    period = math.lcm(local_size, remote_size)
    edges = {*range(0, period, local_size), *range(0, period, remote_size), period}
    return [Stretch(start, end - start, period) for start, end in itertools.pairwise(sorted(edges))]


def num_stretches(local_size: int, remote_size: int) -> int:
    """How many they are, without making them."""
    common = math.gcd(local_size, remote_size)
    return local_size // common + remote_size // common - 1


@dataclass(frozen=True)
class Table:
    """A request's block table on one side: `ids[0]` is its entry number `first`."""

    ids: BlockIds
    group: Group
    first: int = 0

    def pieces(self, tokens: range, per_block: int) -> BlockIds:
        """For each token the number of its piece, in a row that has `per_block` for each block.

        Where the table's entry is absent, the number is negative.

        Raises:
            ValueError: for a token beyond the table, or an id that the cache does not have.
        """
        group = self.group
        ids = self._entries(tokens)
        if ids.size and not (ids.min() >= ABSENT and ids.max() < group.num_entries):
            wrong = ids[(ids < ABSENT) | (ids >= group.num_entries)][0]
            raise ValueError(f"block id {wrong}; allowed: 0 to {group.num_entries - 1}")
        per_entry = group.blocks_per_entry * per_block
        if per_entry == 1:
            return ids
        piece = group.entry_size // per_entry
        within = np.arange(tokens.start, tokens.stop, tokens.step) % group.entry_size // piece
        return ids * np.int32(per_entry) + within.astype(np.int32)

    def _entries(self, tokens: range) -> BlockIds:
        """The table's entry of each token."""
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
        entries: BlockIds = self.ids[positions]
        return entries


ABSENT = -1
"""In a `Table`: no block, as where a sliding window has passed."""
