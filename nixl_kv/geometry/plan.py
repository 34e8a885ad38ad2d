"""What to copy from one peer rank, as maximal contiguous runs.

`plan(local, remote)` is made once per peer rank: it finds the runs that every block is made of,
and describes all blocks at once by one strided row per run and side. `Plan.reads` is made once per
request: it only turns block ids into indices into those rows.

A row is (address, length, device, stride, count): `count` pieces of `length` bytes, `stride` bytes
apart, one piece per block. The pieces of all rows are numbered in row order, and a request names
the ones it wants by number. Where a row is dense (stride == length) on both sides, pieces of
neighbouring blocks are neighbours in memory, and merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.blocks import BlockIds
from nixl_kv.geometry.layout import CacheLayout, Group, Region

Rows = npt.NDArray[np.uint64]
"""Shape (n, 5), uint64: address, length, device, stride, count."""

_Ints = npt.NDArray[np.int64]

MAX_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Runs:
    """Pieces that are contiguous on both sides: parallel arrays, shape (n,), int64, bytes."""

    local: _Ints
    remote: _Ints
    length: _Ints

    def repeated(self, count: int, local_stride: int, remote_stride: int) -> "Runs":
        """The runs at `count` equally spaced places, in ascending order of the places."""
        steps = np.arange(count, dtype=np.int64)[:, None]
        return Runs(
            (self.local + steps * local_stride).ravel(),
            (self.remote + steps * remote_stride).ravel(),
            np.tile(self.length, count),
        )

    def merged(self) -> "Runs":
        """The same bytes in as few runs as possible, in ascending order of local addresses."""
        order = np.argsort(self.local, kind="stable")
        local, remote, length = self.local[order], self.remote[order], self.length[order]
        joined = (local[:-1] + length[:-1] == local[1:]) & (remote[:-1] + length[:-1] == remote[1:])
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        return Runs(local[starts], remote[starts], np.add.reduceat(length, starts))


@dataclass(frozen=True)
class Reads:
    """One request's transfer: equally long int32 index arrays into the two lists of rows."""

    local: BlockIds
    remote: BlockIds
    num_bytes: int
    num_runs: int  # maximal contiguous runs, which is what the link sees


@dataclass(frozen=True)
class GroupPlan:
    """One group's rows, by the numbers of their first pieces in the plan's lists."""

    first_local: BlockIds
    first_remote: BlockIds
    num_blocks: tuple[int, int]  # local, remote
    block_bytes: int
    dense_rows: int


@dataclass(frozen=True)
class Plan:
    """How to read everything that a peer rank and this one have in common."""

    local: Rows
    remote: Rows
    groups: tuple[GroupPlan, ...]

    def reads(self, blocks: Sequence[tuple[BlockIds, BlockIds]]) -> Reads:
        """Indices for one request.

        Args:
            blocks: for each group the local and the remote block ids, equally long, already
                expanded to the regions' blocks (`blocks.expand`) and ordered (`blocks.pair`).

        Raises:
            ValueError: for a block id that the caches do not have; it would name a piece of
                another row.
        """
        pairs = list(zip(self.groups, blocks, strict=True))
        for group, ids in pairs:
            if len(ids[0]) != len(ids[1]):
                raise ValueError(f"{len(ids[0])} local and {len(ids[1])} remote blocks")
            for side in range(2):
                _check_range(ids[side], group.num_blocks[side])
        return Reads(
            _indices([(g.first_local, local) for g, (local, _) in pairs]),
            _indices([(g.first_remote, remote) for g, (_, remote) in pairs]),
            sum(g.block_bytes * len(local) for g, (local, _) in pairs),
            sum(_count_runs(g, local, remote) for g, (local, remote) in pairs),
        )


def _check_range(ids: BlockIds, num_blocks: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < num_blocks):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ValueError(f"block id {wrong}; allowed: 0 to {num_blocks - 1}")


def _indices(groups: list[tuple[BlockIds, BlockIds]]) -> BlockIds:
    """Row-major indices: NIXL merges only neighbours in this order."""
    return np.concatenate([(first[:, None] + ids).ravel() for first, ids in groups])


def _count_runs(group: GroupPlan, local: BlockIds, remote: BlockIds) -> int:
    if not len(local):
        return 0
    breaks = int(np.count_nonzero((np.diff(local) != 1) | (np.diff(remote) != 1)))
    loose_rows = len(group.first_local) - group.dense_rows
    return group.dense_rows * (breaks + 1) + loose_rows * len(local)


def plan(local: CacheLayout, remote: CacheLayout) -> Plan:
    """Intersect two ranks' maps.

    Raises:
        IncompatiblePeer: if they are too large to be indexed by int32. That they fit each other
            is for `compat.mismatches` to say, before.
    """
    rows = [
        _group_rows((mine, theirs), (local.device, remote.device))
        for mine, theirs in zip(local.groups, remote.groups, strict=True)
    ]
    local_starts = _first_indices([mine for mine, _ in rows])
    remote_starts = _first_indices([theirs for _, theirs in rows])
    groups = [
        GroupPlan(
            first_local,
            first_remote,
            (local.groups[number].num_blocks, remote.groups[number].num_blocks),
            int(mine[:, 1].sum()),
            _count_dense(mine, theirs),
        )
        for number, (first_local, first_remote, (mine, theirs)) in enumerate(
            zip(local_starts, remote_starts, rows, strict=True)
        )
    ]
    return Plan(
        np.concatenate([mine for mine, _ in rows]),
        np.concatenate([theirs for _, theirs in rows]),
        tuple(groups),
    )


def _first_indices(groups: list[Rows]) -> list[BlockIds]:
    """For each group the number of each row's first piece, counted over all rows."""
    counts = np.concatenate([rows[:, 4] for rows in groups]).astype(np.int64)
    ends = np.cumsum(counts)
    if ends[-1] > MAX_INDEX:
        raise IncompatiblePeer(
            f"{len(counts)} runs per block make {ends[-1]} pieces; allowed: {MAX_INDEX}"
        )
    starts = (ends - counts).astype(np.int32)
    return np.split(starts, np.cumsum([len(rows) for rows in groups])[:-1])


def _count_dense(mine: Rows, theirs: Rows) -> int:
    return int(np.count_nonzero((mine[:, 1] == mine[:, 3]) & (theirs[:, 1] == theirs[:, 3])))


def _group_rows(groups: tuple[Group, Group], devices: tuple[int, int]) -> tuple[Rows, Rows]:
    """Rows of all runs of one group; regions with equal block strides merge with each other."""
    mine, theirs = groups
    there = {region.layer: region for region in theirs.regions}
    by_strides: dict[tuple[int, int], list[Runs]] = {}
    for region in mine.regions:
        peer = there[region.layer]
        runs = _block_runs(region, peer, mine.block_size)
        by_strides.setdefault((region.block_stride, peer.block_stride), []).append(runs)
    local_rows, remote_rows = [], []
    for strides, parts in by_strides.items():
        runs = _joined(parts).merged()
        tails = [(devices[side], strides[side], groups[side].num_blocks) for side in range(2)]
        local_rows.append(_rows(runs.local, runs.length, tails[0]))
        remote_rows.append(_rows(runs.remote, runs.length, tails[1]))
    return np.concatenate(local_rows), np.concatenate(remote_rows)


def _joined(parts: list[Runs]) -> Runs:
    return Runs(
        np.concatenate([runs.local for runs in parts]),
        np.concatenate([runs.remote for runs in parts]),
        np.concatenate([runs.length for runs in parts]),
    )


def _block_runs(mine: Region, theirs: Region, block_size: int) -> Runs:
    """The runs of block 0 of one layer: parts, then the finer of token and head, then the other.

    Merging after each step keeps the arrays as small as the layout allows.
    """
    first = max(mine.first_head, theirs.first_head)
    last = min(mine.first_head + mine.num_heads, theirs.first_head + theirs.num_heads)
    runs = Runs(
        np.array([part.offset for part in mine.parts], dtype=np.int64),
        np.array([part.offset for part in theirs.parts], dtype=np.int64),
        np.array([part.length for part in mine.parts], dtype=np.int64),
    ).merged()
    steps = [
        (block_size, mine.token_stride, theirs.token_stride),
        (last - first, mine.head_stride, theirs.head_stride),
    ]
    for count, local_stride, remote_stride in sorted(steps, key=lambda step: step[1]):
        runs = runs.repeated(count, local_stride, remote_stride).merged()
    return Runs(
        runs.local + mine.base + (first - mine.first_head) * mine.head_stride,
        runs.remote + theirs.base + (first - theirs.first_head) * theirs.head_stride,
        runs.length,
    )


def _rows(address: _Ints, length: _Ints, tail: tuple[int, int, int]) -> Rows:
    """Rows with the same (device, stride, count)."""
    rows = np.empty((len(address), 5), dtype=np.uint64)
    rows[:, 0] = address
    rows[:, 1] = length
    rows[:, 2:] = tail
    return rows
