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

Where a rank keeps a stripe of the tokens only, a segment has tokens that both sides keep, and that
follow each other on both; other tokens may be between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import MAX_COUNT, Group, check_range

ABSENT: Final = -1
"""In a block table: no block, as where a sliding window has passed."""

MAX_ENTRIES: Final = 1 << 20
"""Of a block table, from the first one that is present to the last one."""

MAX_UNITS: Final = 1 << 16
"""Of one period, for which segments are counted."""

BlockIds = npt.NDArray[np.int32]
"""Shape (n,), int32: the element type that NIXL takes without a conversion."""


def entries(local: int, load: int, entry_size: int) -> range:
    """The positions in a block table whose blocks hold tokens [local, local + load)."""
    return range(local // entry_size, -(-(local + load) // entry_size))


def block_ids(ids: Sequence[int]) -> BlockIds:
    """Block ids as an array."""
    return np.asarray(ids, dtype=np.int32)


@dataclass(frozen=True)
class Table:
    """A request's block table as it is kept and sent: the entries from number `first` on.

    Entries are counted from the prompt's first token, whatever is read of it. Those before `first`
    are ABSENT: what a sliding window has passed, or the states before the last one, cost nothing.
    `ids` are little-endian int32, one for each entry; with them the table ends.
    """

    first: int
    ids: bytes

    def __post_init__(self) -> None:
        """Check the numbers: they also come from peers."""
        if len(self.ids) % 4 or len(self.ids) > 4 * MAX_ENTRIES:
            raise ValueError(
                f"ids of a block table are {len(self.ids)} bytes; "
                f"allowed: 4 for each of at most {MAX_ENTRIES} entries"
            )
        check_range("first of a block table", self.first, low=0, high=MAX_COUNT - self.num_ids)

    @classmethod
    def of(cls, ids: npt.ArrayLike, first: int = 0) -> "Table":
        """The table with these entries, of which the first has the number `first`."""
        array = np.asarray(ids, dtype="<i4")
        present = np.flatnonzero(array != ABSENT)
        num_absent = int(present[0]) if len(present) else len(array)
        return cls(first + num_absent, array[num_absent:].tobytes())

    @property
    def block_ids(self) -> BlockIds:
        """The entries from number `first` on."""
        return np.frombuffer(self.ids, dtype="<i4")

    @property
    def num_ids(self) -> int:
        """How many entries it has from number `first` on."""
        return len(self.ids) // 4

    @property
    def num_present(self) -> int:
        """How many entries are not ABSENT."""
        return int(np.count_nonzero(self.block_ids != ABSENT))


@dataclass(frozen=True)
class TokenSegment:
    """`length` tokens of a rank, of which token `start` is the first, in each later period too."""

    start: int
    length: int
    period: int

    def starts(self, tokens: range) -> range:
        """Where the segments within these tokens begin; `tokens` begins at a block's edge."""
        first = tokens.start + (self.start - tokens.start) % self.period
        return range(first, tokens.stop, self.period)


def token_segments(local: Group, remote: Group) -> list[TokenSegment]:
    """Cut one period of the tokens that both sides keep at the block edges of both."""
    unit, period = _unit_and_period(local, remote)
    tokens, is_cut = _cuts(local, remote, unit, period)
    first = np.flatnonzero(is_cut)
    lengths = np.diff(first, append=len(tokens)) * unit
    return [
        TokenSegment(start, length, period)
        for start, length in zip(tokens[first].tolist(), lengths.tolist(), strict=True)
    ]


def num_token_segments(local: Group, remote: Group) -> int:
    """The number of segments in one period, or more, without a list of them."""
    unit, period = _unit_and_period(local, remote)
    if local.stripe.count == remote.stripe.count == 1:
        return local.block_size // unit + remote.block_size // unit - 1
    units = period // unit
    if units > MAX_UNITS:
        return units
    return int(np.count_nonzero(_cuts(local, remote, unit, period)[1]))


def _cuts(
    local: Group, remote: Group, unit: int, period: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Every `unit`th token of a period, of those that both sides keep; where segments begin."""
    tokens = np.arange(0, period, unit)
    tokens = tokens[local.stripe.holds(tokens) & remote.stripe.holds(tokens)]
    is_cut = np.zeros(len(tokens), dtype=bool)
    for group in (local, remote):
        positions = group.stripe.position(tokens)
        is_cut |= positions % group.block_size == 0
        is_cut |= np.diff(positions, prepend=-unit) != unit
    return tokens, is_cut


def _unit_and_period(local: Group, remote: Group) -> tuple[int, int]:
    """Of so many tokens nothing comes between; after so many it all repeats."""
    sizes, periods = [], []
    for group in (local, remote):
        widths = [group.stripe.width] if group.stripe.count > 1 else []
        sizes += [group.block_size, *widths]
        periods.append(math.lcm(group.block_size, *widths) * group.stripe.count)
    return math.gcd(*sizes), math.lcm(*periods)


@dataclass(frozen=True)
class BlockTable:
    """A request's block table of one group on one side: `ids[0]` is its entry number `first`.

    Those before are absent.
    """

    ids: BlockIds
    group: Group
    first: int = 0

    @classmethod
    def of(cls, table: Table, group: Group) -> "BlockTable":
        """What was kept or sent, of this group."""
        return cls(table.block_ids, group, table.first)

    def piece_numbers(self, tokens: range, per_block: int) -> BlockIds:
        """For each token, the number of the piece that holds it.

        Each block has `per_block` pieces; they are numbered through all blocks of the cache. Where
        the table's entry is absent, the number is negative.

        Raises:
            ValueError: for a token behind the table's end, or an id that the cache does not have.
        """
        group = self.group
        ids = self._ids_of(tokens)
        if ids.size and not (ids.min() >= ABSENT and ids.max() < group.num_entries):
            wrong = ids[(ids < ABSENT) | (ids >= group.num_entries)][0]
            raise ValueError(f"block id {wrong}; allowed: 0 to {group.num_entries - 1}")
        per_entry = group.blocks_per_entry * per_block
        if per_entry == 1:
            return ids
        piece_size = group.slots_per_entry // per_entry
        positions = group.stripe.position(np.arange(tokens.start, tokens.stop, tokens.step))
        within = positions % group.slots_per_entry // piece_size
        return ids * np.int32(per_entry) + within.astype(np.int32)

    def _ids_of(self, tokens: range) -> BlockIds:
        """For each token, the id in its entry of the table."""
        size = self.group.entry_size
        if not tokens:
            return self.ids[:0]
        first, last = tokens[0] // size - self.first, tokens[-1] // size - self.first
        if last >= len(self.ids):
            raise ValueError(
                f"block table has {self.first + len(self.ids)} entries; "
                f"needed: {last + self.first + 1}"
            )
        if first >= 0 and tokens.step % size == 0:
            return self.ids[first : last + 1 : tokens.step // size]
        positions = np.arange(tokens.start, tokens.stop, tokens.step) // size - self.first
        ids = self.ids
        if first < 0:  # the last one of these stands for all that are absent before the first
            ids = np.append(ids, np.int32(ABSENT))
            positions = np.maximum(positions, -1)
        found: BlockIds = ids[positions]
        return found
