"""What to copy from one peer rank, as maximal contiguous runs.

`plan(local, remote)` is made once per peer rank: it finds the runs that every block is made of,
and describes all blocks at once by one strided row per run and side. `Plan.reads` is made once per
request: it only turns block ids into indices into those rows.

A row is (address, length, device, stride, count): `count` pieces of `length` bytes, `stride` bytes
apart, one piece per block. The pieces of all rows are numbered in row order, and a request names
the ones it wants by number. Where a row is dense (stride == length) on both sides, pieces of
neighbouring blocks are neighbours in memory, and merge.

How it is put together: regions of one layer meet (`Meeting`); layers of a group whose blocks are
equally far apart are a `Bundle`; a `Lane` is a bundle's rows for one stretch of tokens.

Where the two sides' blocks are of different sizes, each stretch of tokens between two edges
(`blocks.stretches`) has rows of its own; or, where all tokens of the cache stand in one line, a
dense row of finer pieces, several for each block.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.blocks import BlockIds, Stretch, Table, stretches
from nixl_kv.geometry.layout import CacheLayout, Group, Region
from nixl_kv.geometry.runs import Bundle, Heads, Ints, bundles

Rows = npt.NDArray[np.uint64]
"""Shape (n, 5), uint64: address, length, device, stride, count."""

Share = Mapping[str, Heads]
"""What one rank reads from another: for each layer a range of heads that both hold."""

MAX_INDEX = 2**31 - 1
MAX_ROWS = 1 << 20
"""In one list: where blocks hardly ever meet, small caches have more rows than blocks."""


class Scratch:
    """Memory for indices, for one request after the other.

    For thousands of blocks, the kernel's fresh pages cost ten times what the arithmetic does.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._memory = np.empty(0, dtype=np.int32)

    def take(self, count: int) -> BlockIds:
        """Room for so many indices; what was taken before is overwritten."""
        if count > len(self._memory):
            self._memory = np.empty(2 * count, dtype=np.int32)
        return self._memory[:count]


@dataclass(frozen=True)
class Reads:
    """One request's transfer: equally long int32 index arrays into the two lists of rows."""

    local: BlockIds
    remote: BlockIds
    num_bytes: int
    num_runs: int  # maximal contiguous runs, which is what the link sees


@dataclass(frozen=True)
class Lane:
    """Rows that move the same stretches of tokens, by the numbers of their first pieces."""

    groups: tuple[int, int]  # numbers of the local and of the remote group
    stretch: Stretch
    per_block: tuple[int, int]  # pieces of a row for each block
    first: tuple[BlockIds, BlockIds]
    stretch_bytes: int
    dense_rows: int


@dataclass(frozen=True)
class Plan:
    """How to read one rank's share of what a peer rank and this one have in common."""

    local: Rows
    remote: Rows
    lanes: tuple[Lane, ...]
    groups: tuple[tuple[Group, ...], tuple[Group, ...]]  # local, remote

    def reads(
        self,
        local: Sequence[BlockIds],
        remote: Sequence[BlockIds],
        tokens: range,
        *,
        scratch: Scratch | None = None,
    ) -> Reads:
        """Indices for one request, which needs these tokens of its prompt.

        Args:
            local: for each local group the entries of the block table from the one that holds
                `tokens.start` on; -1 where it has no block, as where a sliding window has passed.
            remote: for each remote group the whole block table, likewise.
            tokens: begins at an edge of an entry of each local group's table. Beyond the end, up
                to the next edge of a block on either side is read too: it belongs to the same
                request on both sides.
            scratch: where the indices are to stand; they are good until it is used again.

        Raises:
            ValueError: for a table that is too short, a block id that the caches do not have
                (it would name a piece of another row), or a remote block that is absent while the
                local one is there.
        """
        for side, tables in enumerate((local, remote)):
            if len(tables) != len(self.groups[side]):
                raise ValueError(
                    f"{len(tables)} block tables; allowed: {len(self.groups[side])}, one per group"
                )
        picked = [(lane, *self._pick(lane, (local, remote), tokens)) for lane in self.lanes]
        count = sum(len(lane.first[0]) * len(here) for lane, here, _ in picked)
        indices = (scratch or Scratch()).take(2 * count).reshape(2, count)
        _fill(indices[0], [(lane.first[0], here) for lane, here, _ in picked])
        _fill(indices[1], [(lane.first[1], there) for lane, _, there in picked])
        return Reads(
            indices[0],
            indices[1],
            sum(lane.stretch_bytes * len(here) for lane, here, _ in picked),
            sum(_count_runs(lane, here, there) for lane, here, there in picked),
        )

    def _pick(
        self, lane: Lane, tables: tuple[Sequence[BlockIds], Sequence[BlockIds]], tokens: range
    ) -> tuple[BlockIds, BlockIds]:
        """The pieces of one lane's rows, on both sides.

        Where pieces can merge they come in ascending order of the local ones: an allocator hands
        out runs, but often backwards.
        """
        mine, theirs = (self.groups[side][lane.groups[side]] for side in (0, 1))
        first = tokens.start // mine.entry_size
        starts = lane.stretch.starts(range(first * mine.entry_size, tokens.stop))
        here = Table(tables[0][lane.groups[0]], mine, first).pieces(starts, lane.per_block[0])
        there = Table(tables[1][lane.groups[1]], theirs).pieces(starts, lane.per_block[1])
        wanted = here >= 0
        if not wanted.all():
            here, there = here[wanted], there[wanted]
        if there.size and there.min() < 0:
            missing = np.array(starts)[wanted][there < 0][0]
            raise ValueError(f"the remote block of token {missing} is absent; it is wanted here")
        if not lane.dense_rows or (here[1:] > here[:-1]).all():
            return here, there
        # Sorted as pairs in one word each, which is several times faster than by an order.
        pairs = (here.astype(np.int64) << 32) | there
        pairs.sort()
        return (pairs >> 32).astype(np.int32), (pairs & MAX_INDEX).astype(np.int32)


def _fill(indices: BlockIds, lanes: list[tuple[BlockIds, BlockIds]]) -> None:
    """Row-major indices: NIXL merges only neighbours in this order."""
    start = 0
    for first, pieces in lanes:
        end = start + len(first) * len(pieces)
        room = indices[start:end].reshape(len(first), len(pieces))
        np.add(first[:, None], pieces, out=room)
        start = end


def _count_runs(lane: Lane, local: BlockIds, remote: BlockIds) -> int:
    if not len(local):
        return 0
    loose = (len(lane.first[0]) - lane.dense_rows) * len(local)
    if not lane.dense_rows:
        return loose
    breaks = (local[1:] - local[:-1] != 1) | (remote[1:] - remote[:-1] != 1)
    return loose + lane.dense_rows * (int(np.count_nonzero(breaks)) + 1)


def plan(local: CacheLayout, remote: CacheLayout, share: Share | None = None) -> Plan:
    """Intersect two ranks' maps.

    Args:
        local: of this rank.
        remote: of the peer rank.
        share: what to read; by default all that both ranks hold.

    Raises:
        IncompatiblePeer: if the lists of rows are too long to be indexed by int32. That the ranks
            fit each other is for `compat.mismatches` to say, before.
    """
    drafts = [
        draft
        for numbers, pairs in _meetings(local, remote, share)
        for bundle in bundles((local.groups[numbers[0]], remote.groups[numbers[1]]), pairs)
        for draft in _drafts(bundle, numbers)
    ]
    lists = _List(local.device), _List(remote.device)
    lanes = tuple(draft.lane(lists) for draft in drafts)
    return Plan(lists[0].rows(), lists[1].rows(), lanes, (local.groups, remote.groups))


def _meetings(
    local: CacheLayout, remote: CacheLayout, share: Share | None
) -> Iterator[tuple[tuple[int, int], list[tuple[Region, Region, Heads]]]]:
    """For each pair of groups that have layers in common: their regions, and the heads to read."""
    there = {r.layer: (number, r) for number, g in enumerate(remote.groups) for r in g.regions}
    for number, group in enumerate(local.groups):
        by_group: dict[int, list[tuple[Region, Region, Heads]]] = {}
        for mine in group.regions:
            peer_number, theirs = there.get(mine.layer, (-1, mine))
            heads = _common(mine, theirs) if share is None else share.get(mine.layer, (0, 0))
            if peer_number >= 0 and heads[0] < heads[1]:
                by_group.setdefault(peer_number, []).append((mine, theirs, heads))
        for peer_number, pairs in by_group.items():
            yield (number, peer_number), pairs


def _common(mine: Region, theirs: Region) -> Heads:
    return max(mine.heads[0], theirs.heads[0]), min(mine.heads[1], theirs.heads[1])


@dataclass(frozen=True)
class _Draft:
    """A lane whose rows have no place in the lists yet."""

    bundle: Bundle
    numbers: tuple[int, int]
    stretch: Stretch
    per_block: tuple[int, int] = (1, 1)

    def lane(self, lists: "tuple[_List, _List]") -> Lane:
        """Give the rows their places."""
        slots = [self.stretch.start % group.block_size for group in self.bundle.groups]
        runs = self.bundle.runs(self.stretch.length, (slots[0], slots[1]))
        mine = self._rows(0, runs.local, runs.length)
        theirs = self._rows(1, runs.remote, runs.length)
        dense = (mine[:, 1] == mine[:, 2]) & (theirs[:, 1] == theirs[:, 2])
        return Lane(
            self.numbers,
            self.stretch,
            self.per_block,
            (lists[0].place(mine), lists[1].place(theirs)),
            int(runs.length.sum()),
            int(np.count_nonzero(dense)),
        )

    def _rows(self, side: int, address: Ints, length: Ints) -> Ints:
        """Columns (address, length, stride, count)."""
        per_block = self.per_block[side]
        rows = np.empty((len(address), 4), dtype=np.int64)
        rows[:, 0] = address
        rows[:, 1] = length
        rows[:, 2] = self.bundle.block_strides[side] // per_block
        rows[:, 3] = self.bundle.groups[side].num_blocks * per_block
        return rows


def _drafts(bundle: Bundle, numbers: tuple[int, int]) -> Iterator[_Draft]:
    """One lane for each stretch, or a single one where all tokens stand in one line."""
    sizes = [group.block_size for group in bundle.groups]
    cut = stretches(sizes[0], sizes[1])
    step = math.gcd(*sizes)
    if len(cut) > 1 and bundle.is_linear(step):
        per_block = (sizes[0] // step, sizes[1] // step)
        yield _Draft(bundle, numbers, Stretch(0, step, step), per_block)
    else:
        for stretch in cut:
            yield _Draft(bundle, numbers, stretch)


@dataclass
class _List:
    """One side's list of rows as it grows; equal sets of rows stand in it once."""

    device: int
    length: int = 0
    num_rows: int = 0
    chunks: list[Ints] = field(default_factory=list)
    places: dict[bytes, BlockIds] = field(default_factory=dict)

    def place(self, rows: Ints) -> BlockIds:
        """Add rows. Returns for each the number of its first piece, counted over all rows."""
        key = rows.tobytes()
        if key not in self.places:
            self.num_rows += len(rows)
            if self.num_rows > MAX_ROWS:
                raise IncompatiblePeer(
                    f"a block has {self.num_rows} runs or more; allowed: {MAX_ROWS}"
                )
            total = self.length + sum(rows[:, 3].tolist())
            if total > MAX_INDEX:
                raise IncompatiblePeer(
                    f"the runs of all blocks make {total} pieces or more; allowed: {MAX_INDEX}"
                )
            ends = self.length + np.cumsum(rows[:, 3])
            self.places[key] = (ends - rows[:, 3]).astype(np.int32)
            self.chunks.append(rows)
            self.length = total
        return self.places[key]

    def rows(self) -> Rows:
        """All rows, with the device."""
        together = np.concatenate(self.chunks) if self.chunks else np.empty((0, 4), dtype=np.int64)
        device = np.full(len(together), self.device)
        return np.insert(together, 2, device, axis=1).astype(np.uint64)
