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

Tokens = npt.NDArray[np.int64]
"""Shape (n,): positions in the prompt."""


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

    def starts(self, tokens: range) -> Tokens:
        """Where the stretches within these tokens begin; `tokens` begins at a block's edge."""
        first = tokens.start + (self.start - tokens.start) % self.period
        return np.arange(first, tokens.stop, self.period, dtype=np.int64)


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

    def blocks(self, tokens: Tokens) -> BlockIds:
        """For each token the block that holds it, -1 where the table's entry is absent.

        Raises:
            ValueError: for a token beyond the table, or an id that the cache does not have.
        """
        group = self.group
        positions = tokens // group.entry_size - self.first
        if len(positions) and not (positions.min() >= 0 and positions.max() < len(self.ids)):
            raise ValueError(
                f"block table has the entries {self.first} to {self.first + len(self.ids) - 1}; "
                f"needed: {positions.min() + self.first} to {positions.max() + self.first}"
            )
        ids = self.ids[positions]
        _check_range(ids, group.num_entries)
        if group.blocks_per_entry == 1:
            return ids
        within = (tokens % group.entry_size // group.block_size).astype(np.int32)
        return np.where(ids < 0, ids, ids * np.int32(group.blocks_per_entry) + within)


ABSENT = -1
"""In a `Table`: no block, as where a sliding window has passed."""


def _check_range(ids: BlockIds, num_entries: int) -> None:
    if len(ids) and not (ids.min() >= ABSENT and ids.max() < num_entries):
        wrong = int(ids.min() if ids.min() < ABSENT else ids.max())
        raise ValueError(f"block id {wrong}; allowed: 0 to {num_entries - 1}")


def pieces(blocks: BlockIds, tokens: Tokens, group: Group, *, per_block: int) -> BlockIds:
    """Where a row has `per_block` pieces for each block: the number of each token's piece."""
    if per_block == 1:
        return blocks
    within = tokens % group.block_size // (group.block_size // per_block)
    return blocks * np.int32(per_block) + within.astype(np.int32)
