"""Plans the copy from one remote rank to this one, as maximal contiguous runs.

`plan(local, remote)` intersects two ranks' caches, once per remote rank. `Plan.pieces` is called
once per request and only turns block ids into numbers, because the transfer thread waits for it.
Wherever two things come as a pair, it is (local, remote).

The cache has many blocks alike, so a run that recurs in every block is one *row* per side:
(address, length, device, stride, count) stands for `count` pieces of `length` bytes, `stride` bytes
apart, one piece per block. The pieces of all rows are numbered in row order, and a request names
the pieces that it reads by number. NIXL takes such rows and numbers as they are. If a row is dense
(stride == length) on both sides, pieces of neighbouring blocks are contiguous and merge.

A plan is made in three steps. The two regions of a layer have an `Overlap`: the runs of one block.
Layers of a group whose blocks are equally far apart form an `OverlapGroup`, in which runs of
different layers can merge. Its rows for one token segment are `PagedRows`. Different block sizes
have several token segments (`layout.token_segments`) with rows of their own. If all tokens of the
cache are in one line, one dense row of smaller pieces, several per block, is enough.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import (
    BlockIds,
    CacheLayout,
    Group,
    Region,
    Table,
    TokenSegment,
    token_segments,
)

Ints = npt.NDArray[np.int64]

# A half-open range of the model's KV heads.
Heads = tuple[int, int]

# The heads that one rank reads from another: for each layer a range that both have.
Share = Mapping[str, Heads]

# Shape (n, 5), uint64. The columns are the address of the first piece, the bytes of a piece, the
# device's ordinal, the bytes from one piece to the next, the number of pieces.
Rows = npt.NDArray[np.uint64]
ADDRESS, LENGTH, DEVICE, STRIDE, COUNT = range(5)

# In one block: of one layer before they merge, of all layers after.
MAX_PIECES: Final = 1 << 22
MAX_INDEX: Final = 2**31 - 1
# In one list. With few common block edges, a small cache would have more rows than blocks.
MAX_ROWS: Final = 1 << 20


@dataclass(frozen=True)
class Runs:
    """Parallel arrays, shape (n,), int64: addresses on both sides, and lengths in bytes."""

    local: Ints
    remote: Ints
    length: Ints

    def shifted(self, local: Ints, remote: Ints) -> "Runs":
        """The runs at each of m distances, given as arrays of shape (m,)."""
        return Runs(
            (local[:, None] + self.local).ravel(),
            (remote[:, None] + self.remote).ravel(),
            np.tile(self.length, len(local)),
        )

    def merged(self) -> "Runs":
        """The same bytes in as few runs as possible, by ascending local address."""
        order = np.argsort(self.local, kind="stable")
        local, remote, length = self.local[order], self.remote[order], self.length[order]
        follows = local[:-1] + length[:-1] == local[1:]
        follows &= remote[:-1] + length[:-1] == remote[1:]
        starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        return Runs(local[starts], remote[starts], np.add.reduceat(length, starts))


def concatenate(parts: Iterable[Runs]) -> Runs:
    columns = zip(*((runs.local, runs.remote, runs.length) for runs in parts), strict=True)
    return Runs(*map(np.concatenate, columns))


def _pieces(region: Region) -> tuple[Ints, Ints, Ints]:
    """For each piece of one head and token: its offset in the content and in memory, its stride."""
    count = [part.count for part in region.parts]
    length = np.repeat([part.length for part in region.parts], count)
    step = np.concatenate([np.arange(part.count) * part.stride for part in region.parts])
    offset = np.repeat([part.offset for part in region.parts], count) + step
    stride = np.repeat([region.token_stride_of(part) for part in region.parts], count)
    return np.cumsum(length) - length, offset, stride


@dataclass(frozen=True)
class Overlap:
    """A layer's local and remote region, and a range of heads that both have.

    The regions have neither names nor bases. So the overlaps of most layers are equal, and equal
    ones are planned once.
    """

    sides: tuple[Region, Region]
    heads: Heads

    def runs(self, num_tokens: int, slots: tuple[int, int]) -> Runs:
        """The runs of `num_tokens` tokens from two slots of a block on, relative to the bases.

        An IncompatiblePeer says that a block has too many pieces.
        """
        num_heads = self.heads[1] - self.heads[0]
        parts = sum(part.count for side in self.sides for part in side.parts)
        _check_num_pieces(parts * num_tokens * num_heads)
        pieces = [_pieces(side) for side in self.sides]
        # A piece is cut where a piece of the other side begins.
        edges = np.union1d(pieces[0][0], pieces[1][0])
        length = np.diff(edges, append=self.sides[0].content)
        starts = []
        for (begins, offsets, strides), slot in zip(pieces, slots, strict=True):
            number = np.searchsorted(begins, edges, side="right") - 1
            tokens = np.arange(slot, slot + num_tokens)[:, None]
            starts.append(offsets[number] + edges - begins[number] + tokens * strides[number])
        runs = Runs(starts[0].ravel(), starts[1].ravel(), np.tile(length, num_tokens))
        heads = [
            side.head_offset(self.heads[0]) + np.arange(num_heads) * side.head_stride
            for side in self.sides
        ]
        # Merging before the heads are added keeps the arrays small.
        return runs.merged().shifted(*heads).merged()


@dataclass(frozen=True)
class OverlapGroup:
    """Layers of one group whose blocks have the same strides, so that their runs can merge.

    `bases` has, for each overlap, the base addresses of its layers: shape (2, layers).
    """

    numbers: tuple[int, int]  # of the groups
    groups: tuple[Group, Group]
    block_strides: tuple[int, int]
    bases: dict[Overlap, Ints]

    def runs(self, num_tokens: int, slots: tuple[int, int]) -> Runs:
        """The runs of `num_tokens` tokens in block 0, from two slots on; raises like `Overlap`."""
        layers: list[Runs] = []
        total = 0
        if self.groups[0].whole:
            num_tokens, slots = 1, (0, 0)
        for overlap, bases in self.bases.items():
            relative = overlap.runs(num_tokens, slots)
            total += len(relative.length) * bases.shape[1]
            _check_num_pieces(total)
            layers.append(relative.shifted(*bases))
        return concatenate(layers).merged()

    def is_linear(self, num_tokens: int) -> bool:
        """Whether all tokens of both caches are in one line, so that token segments merge."""
        lengths = set(self.runs(num_tokens, (0, 0)).length.tolist())
        return all(
            stride * group.block_size == block_stride and lengths == {num_tokens * stride}
            for overlap in self.bases
            for side, group, block_stride in zip(
                overlap.sides, self.groups, self.block_strides, strict=True
            )
            for stride in map(side.token_stride_of, side.parts)
        )


def group_overlaps(
    local: CacheLayout, remote: CacheLayout, share: Share | None = None
) -> list[OverlapGroup]:
    """Group the layers that both ranks have by their groups and block strides."""
    found: dict[tuple[tuple[int, int], tuple[int, int]], dict[Overlap, list[tuple[int, int]]]] = {}
    remote_regions = remote.regions
    for layer, (number, mine) in local.regions.items():
        if layer not in remote_regions:
            continue
        remote_number, theirs = remote_regions[layer]
        if share is None:
            heads = max(mine.heads[0], theirs.heads[0]), min(mine.heads[1], theirs.heads[1])
        else:
            heads = share.get(layer, (0, 0))
        if heads[0] < heads[1]:
            key = (number, remote_number), (mine.block_stride, theirs.block_stride)
            sides = replace(mine, layer="", base=1), replace(theirs, layer="", base=1)
            bases = found.setdefault(key, {}).setdefault(Overlap(sides, heads), [])
            bases.append((mine.base, theirs.base))
    return [
        OverlapGroup(
            numbers,
            (local.groups[numbers[0]], remote.groups[numbers[1]]),
            strides,
            {overlap: np.array(bases).T for overlap, bases in overlaps.items()},
        )
        for (numbers, strides), overlaps in found.items()
    ]


def _check_num_pieces(pieces: int) -> None:
    if pieces > MAX_PIECES:
        raise IncompatiblePeer(f"a block has {pieces} pieces or more; allowed: {MAX_PIECES}")


class IndexBuffer:
    """Memory that the indices of successive requests share."""

    # For thousands of blocks, fresh pages from the kernel cost ten times as much as the arithmetic.
    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.int32)

    def reserve(self, count: int) -> BlockIds:
        if count > len(self._memory):
            self._memory = np.empty(2 * count, dtype=np.int32)
        return self._memory[:count]


@dataclass(frozen=True)
class Reads:
    """One request's transfer: two index arrays of equal length into the two lists of rows."""

    local: BlockIds
    remote: BlockIds
    num_bytes: int
    num_runs: int  # maximal contiguous runs


@dataclass(frozen=True)
class Pieces:
    """The pieces of some rows that a request reads: (local[i], remote[i]) of each row."""

    local: BlockIds
    remote: BlockIds


@dataclass(frozen=True)
class PagedRows:
    """Rows of the same token segment."""

    groups: tuple[int, int]  # numbers of the local and the remote group
    segment: TokenSegment
    per_block: tuple[int, int]  # pieces of a row in each block
    first: tuple[BlockIds, BlockIds]  # for each row, the number of its first piece
    segment_bytes: int
    dense_rows: int  # how many of the rows are dense on both sides


@dataclass(frozen=True)
class Plan:
    """The rows of both sides for reads from one remote rank."""

    local: Rows
    remote: Rows
    paged_rows: tuple[PagedRows, ...]
    groups: tuple[tuple[Group, ...], tuple[Group, ...]]  # local, remote

    def pieces(
        self, local: Sequence[Table], remote: Sequence[Table], tokens: range
    ) -> tuple[Pieces, ...]:
        """The pieces of each of `paged_rows` for one request; each side has one table per group.

        Absent local blocks are not read. `tokens` begin at an entry's edge in each local table.
        Tokens after their end, up to the next block edge of either side, are read as well: they
        belong to the same request. A ValueError names a table that is too short, a block id that
        a cache does not have, or an absent remote block for a local one.
        """
        for side, tables in enumerate((local, remote)):
            if len(tables) != len(self.groups[side]):
                raise ValueError(
                    f"{len(tables)} block tables; allowed: {len(self.groups[side])}, one per group"
                )
        return tuple(self._pieces(rows, (local, remote), tokens) for rows in self.paged_rows)

    def num_bytes(self, pieces: Sequence[Pieces]) -> int:
        pairs = zip(self.paged_rows, pieces, strict=True)
        return sum(rows.segment_bytes * len(each.local) for rows, each in pairs)

    def num_runs(self, pieces: Sequence[Pieces]) -> int:
        count = 0
        for rows, each in zip(self.paged_rows, pieces, strict=True):
            count += (len(rows.first[0]) - rows.dense_rows) * len(each.local)
            if rows.dense_rows and len(each.local):
                breaks = (np.diff(each.local) != 1) | (np.diff(each.remote) != 1)
                count += rows.dense_rows * (int(np.count_nonzero(breaks)) + 1)
        return count

    def indices(
        self, pieces: Sequence[Pieces], buffer: IndexBuffer | None = None
    ) -> tuple[BlockIds, BlockIds]:
        """The numbers of these pieces in the two lists, in `buffer` until its next use."""
        pairs = list(zip(self.paged_rows, pieces, strict=True))
        count = sum(len(rows.first[0]) * len(each.local) for rows, each in pairs)
        local, remote = (buffer or IndexBuffer()).reserve(2 * count).reshape(2, count)
        start = 0
        for rows, each in pairs:
            # Row by row: only in this order does NIXL merge neighbours.
            shape = len(rows.first[0]), len(each.local)
            end = start + shape[0] * shape[1]
            np.add(rows.first[0][:, None], each.local, out=local[start:end].reshape(shape))
            np.add(rows.first[1][:, None], each.remote, out=remote[start:end].reshape(shape))
            start = end
        return local, remote

    def reads(
        self,
        local: Sequence[Table],
        remote: Sequence[Table],
        tokens: range,
        *,
        buffer: IndexBuffer | None = None,
    ) -> Reads:
        pieces = self.pieces(local, remote, tokens)
        indices = self.indices(pieces, buffer)
        return Reads(*indices, self.num_bytes(pieces), self.num_runs(pieces))

    def _pieces(
        self, rows: PagedRows, tables: tuple[Sequence[Table], Sequence[Table]], tokens: range
    ) -> Pieces:
        mine, theirs = (tables[side][number] for side, number in enumerate(rows.groups))
        groups = [self.groups[side][number] for side, number in enumerate(rows.groups)]
        size = groups[0].entry_size
        first = max(tokens.start // size, mine.first)
        starts = rows.segment.starts(range(first * size, tokens.stop))
        local = mine.piece_numbers(groups[0], starts, rows.per_block[0])
        remote = theirs.piece_numbers(groups[1], starts, rows.per_block[1])
        present = local >= 0
        if not present.all():
            local, remote = local[present], remote[present]
        if remote.size and remote.min() < 0:
            missing = np.array(starts)[present][remote < 0][0]
            raise ValueError(f"the remote block of token {missing} is absent; it is wanted here")
        if not rows.dense_rows or (local[1:] > local[:-1]).all():
            return Pieces(local, remote)
        # Pieces merge only in ascending order, and an allocator often hands out blocks backwards.
        # A sort of pairs, each in one word, is several times faster than an argsort.
        pairs = (local.astype(np.int64) << 32) | remote
        pairs.sort()
        return Pieces((pairs >> 32).astype(np.int32), (pairs & MAX_INDEX).astype(np.int32))


def plan(local: CacheLayout, remote: CacheLayout, share: Share | None = None) -> Plan:
    """Plan what to read of a remote rank's cache: `share`, or all that both ranks have.

    `match.layout_mismatches` must have found no difference between their engines. An
    IncompatiblePeer says that there are too many pieces or rows.
    """
    lists = _RowList(local.device), _RowList(remote.device)
    paged_rows = tuple(
        _place(overlaps, segment, per_block, lists)
        for overlaps in group_overlaps(local, remote, share)
        for segment, per_block in _segments(overlaps)
    )
    return Plan(lists[0].rows(), lists[1].rows(), paged_rows, (local.groups, remote.groups))


def _segments(overlaps: OverlapGroup) -> Iterator[tuple[TokenSegment, tuple[int, int]]]:
    """The token segments that get rows, each with the number of pieces per block on either side."""
    segments = token_segments(*overlaps.groups)
    sizes = [group.block_size for group in overlaps.groups]
    step = math.gcd(*sizes)
    is_whole = all(group.stripe.count == 1 for group in overlaps.groups)
    if is_whole and len(segments) > 1 and overlaps.is_linear(step):
        yield TokenSegment(0, step, step), (sizes[0] // step, sizes[1] // step)
    else:
        for segment in segments:
            yield segment, (1, 1)


def _place(
    overlaps: OverlapGroup,
    segment: TokenSegment,
    per_block: tuple[int, int],
    lists: "tuple[_RowList, _RowList]",
) -> PagedRows:
    """Add the rows of a token segment to both lists."""
    slots = [g.stripe.position(segment.start) % g.block_size for g in overlaps.groups]
    runs = overlaps.runs(segment.length, (slots[0], slots[1]))
    strides = [overlaps.block_strides[side] // per_block[side] for side in (0, 1)]
    counts = [overlaps.groups[side].num_blocks * per_block[side] for side in (0, 1)]
    dense = (runs.length == strides[0]) & (runs.length == strides[1])
    first = (
        lists[0].place(runs.local, runs.length, strides[0], counts[0]),
        lists[1].place(runs.remote, runs.length, strides[1], counts[1]),
    )
    num_dense = int(np.count_nonzero(dense))
    return PagedRows(overlaps.numbers, segment, per_block, first, int(runs.length.sum()), num_dense)


@dataclass
class _RowList:
    """One side's list of rows while it grows. Equal sets of rows share their place."""

    device: int
    num_pieces: int = 0
    num_rows: int = 0
    chunks: list[Ints] = field(default_factory=list)
    places: dict[bytes, BlockIds] = field(default_factory=dict)

    def place(self, address: Ints, length: Ints, stride: int, count: int) -> BlockIds:
        columns = np.broadcast_arrays(address, length, self.device, stride, count)
        rows = np.stack(columns, axis=1, dtype=np.int64)
        key = rows.tobytes()
        if key not in self.places:
            self.num_rows += len(rows)
            if self.num_rows > MAX_ROWS:
                raise IncompatiblePeer(
                    f"a block has {self.num_rows} runs or more; allowed: {MAX_ROWS}"
                )
            total = self.num_pieces + len(rows) * count
            if total > MAX_INDEX:
                raise IncompatiblePeer(
                    f"the runs of all blocks make {total} pieces or more; allowed: {MAX_INDEX}"
                )
            self.places[key] = np.arange(self.num_pieces, total, count, dtype=np.int32)
            self.chunks.append(rows)
            self.num_pieces = total
        return self.places[key]

    def rows(self) -> Rows:
        rows: Ints = np.concatenate([np.empty((0, 5), dtype=np.int64), *self.chunks])
        return rows.astype(np.uint64)
