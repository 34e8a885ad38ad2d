"""What to copy from one peer rank, as maximal contiguous runs.

`plan(local, remote)` is made once per peer rank: it finds the runs that every block is made of,
and describes all blocks at once by one strided row per run and side. `Plan.reads` is made once per
request: it only turns block ids into indices into those rows.

A row is (address, length, device, stride, count): `count` pieces of `length` bytes, `stride` bytes
apart, one piece per block. The pieces of all rows are numbered in row order, and a request names
the ones it wants by number. Where a row is dense (stride == length) on both sides, pieces of
neighbouring blocks are neighbours in memory, and merge.

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
from nixl_kv.geometry.blocks import BlockIds, Stretch, Table, pieces, stretches
from nixl_kv.geometry.layout import CacheLayout, Group, Region
from nixl_kv.geometry.runs import Bundle, Heads, Ints, bundles

Rows = npt.NDArray[np.uint64]
"""Shape (n, 5), uint64: address, length, device, stride, count."""

Share = Mapping[str, Heads]
"""What one rank reads from another: for each layer a range of heads that both hold."""

MAX_INDEX = 2**31 - 1


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

    def reads(self, local: Sequence[BlockIds], remote: Sequence[BlockIds], tokens: range) -> Reads:
        """Indices for one request, which needs these tokens of its prompt.

        Args:
            local: for each local group the entries of the block table from the one that holds
                `tokens.start` on; -1 where it has no block, as where a sliding window has passed.
            remote: for each remote group the whole block table, likewise.
            tokens: begins at an edge of a local block. Of a block that the end cuts, the rest may
                be read too: it belongs to the same request on both sides.

        Raises:
            ValueError: for a table that is too short, a block id that the caches do not have
                (it would name a piece of another row), or a remote block that is absent while the
                local one is there.
        """
        picked = [(lane, *self._pick(lane, (local, remote), tokens)) for lane in self.lanes]
        return Reads(
            _indices([(lane.first[0], here) for lane, here, _ in picked]),
            _indices([(lane.first[1], there) for lane, _, there in picked]),
            sum(lane.stretch_bytes * len(here) for lane, here, _ in picked),
            sum(_count_runs(lane, here, there) for lane, here, there in picked),
        )

    def _pick(
        self, lane: Lane, tables: tuple[Sequence[BlockIds], Sequence[BlockIds]], tokens: range
    ) -> tuple[BlockIds, BlockIds]:
        """The pieces of one lane's rows, on both sides, in ascending order of the local ones.

        In that order neighbours merge: an allocator hands out runs, but often backwards.
        """
        mine, theirs = (self.groups[side][lane.groups[side]] for side in (0, 1))
        first = tokens.start // mine.entry_size
        starts = lane.stretch.starts(range(first * mine.entry_size, tokens.stop))
        blocks = Table(tables[0][lane.groups[0]], mine, first).blocks(starts)
        wanted = blocks >= 0
        if not wanted.all():
            blocks, starts = blocks[wanted], starts[wanted]
        there = Table(tables[1][lane.groups[1]], theirs).blocks(starts)
        if len(there) and there.min() < 0:
            missing = int(starts[np.flatnonzero(there < 0)[0]])
            raise ValueError(f"the remote block of token {missing} is absent; it is wanted here")
        here = pieces(blocks, starts, mine, per_block=lane.per_block[0])
        there = pieces(there, starts, theirs, per_block=lane.per_block[1])
        if not lane.dense_rows:
            return here, there
        order = np.argsort(here, kind="stable")
        return here[order], there[order]


def _indices(lanes: list[tuple[BlockIds, BlockIds]]) -> BlockIds:
    """Row-major indices: NIXL merges only neighbours in this order."""
    indices = np.empty(sum(len(first) * len(ids) for first, ids in lanes), dtype=np.int32)
    start = 0
    for first, ids in lanes:
        end = start + len(first) * len(ids)
        np.add(first[:, None], ids, out=indices[start:end].reshape(len(first), len(ids)))
        start = end
    return indices


def _count_runs(lane: Lane, local: BlockIds, remote: BlockIds) -> int:
    if not len(local):
        return 0
    breaks = int(np.count_nonzero((np.diff(local) != 1) | (np.diff(remote) != 1)))
    loose_rows = len(lane.first[0]) - lane.dense_rows
    return lane.dense_rows * (breaks + 1) + loose_rows * len(local)


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
    chunks: list[Ints] = field(default_factory=list)
    places: dict[bytes, BlockIds] = field(default_factory=dict)

    def place(self, rows: Ints) -> BlockIds:
        """Add rows. Returns for each the number of its first piece, counted over all rows."""
        key = rows.tobytes()
        if key not in self.places:
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
