"""Which head and token the bytes of a copied run are, for a digest that is made while they pass.

What copies a plan's tiles has all bytes of a read in its registers, so it can sum them up without a
second pass over the memory; `geometry.digest` says what the sums mean. Head and token are looked up
by the row and the block where bytes are put, in this rank's layout and block table, and not by the
plan: a run that goes to a wrong place changes the sums.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry import digest
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.layout import ALL_TOKENS, CacheLayout, Region
from nixl_kv.geometry.plan import Ints, Pieces, Plan
from nixl_kv.geometry.slices import LocalSlice, SlicePlace
from nixl_kv.reading.copying.tiles import Launch, Tiling

UNIT: Final = 16
"""Bytes that a thread takes at a time; four words of the digest."""

MAX_SIZE: Final = 1 << 12

NO_TOKEN: Final = -(1 << 31)
"""In the place of the first token of a block that the request does not have."""

NUM_HEADER: Final = 8
"""Of a request's numbers: offset and step of the key, the logarithm of the tokens of a column, and
where there begin heads, tokens, sums of rows and of columns, and in `Contents.numbers` labels."""

HEAD_COLUMNS: Final = 3
"""Of a head: its row of the digest, its first token, the token after its last one."""


class DigestInput(NamedTuple):
    """What a kernel is given to digest a request's bytes, and has room for the sums in.

    `numbers`, int64: the header, the multipliers of the first word of each 8 bytes, then those of
    the second; a row for each head; the first token of each piece, in the order of the launch's
    pieces; the sums of rows, and of columns.
    """

    numbers: Ints

    def digest(self, numbers: Ints) -> Digest:
        """The sums in `numbers`, as the kernel left them."""
        rows_at, columns_at = self.numbers[5:7].tolist()
        sums = numbers.view(np.uint64)
        return Digest(sums[rows_at:columns_at].copy(), sums[columns_at:].copy())


def content_size(layout: CacheLayout) -> int:
    """Bytes of one head of one token, where all parts of a cache have the same power of two.

    Else 0: such a cache is not digested while it is copied. Nor are states, divided tokens, and
    what is in pieces.
    """
    sizes = set()
    for group in layout.groups:
        for region in group.regions:
            if group.keeps_states or group.stripe != ALL_TOKENS:
                return 0
            sizes |= {part.length if part.count == 1 else 0 for part in region.parts}
    size = sizes.pop() if len(sizes) == 1 else 0
    return size if UNIT <= size <= MAX_SIZE and size & (size - 1) == 0 else 0


class Contents:
    """The heads and slots of a tiling's rows.

    `numbers`, int64, has the rows, one after the other, and then a label for each `size` bytes of
    them: head << 32 | slot. Heads are numbered through all parts of the cache, slots from the
    beginning of block 0.
    """

    def __init__(self, tiling: Tiling, plan: Plan, layout: CacheLayout) -> None:
        """Look up where each row's bytes are put.

        Raises:
            ValueError: if rows do not consist of whole heads and tokens of one size.
        """
        self.size = content_size(layout)
        if not self.size or any(
            job.unit != UNIT or job.width * UNIT % self.size for job in tiling.jobs
        ):
            raise ValueError("not all runs are of whole heads and tokens of one size")
        self._plan = plan
        self._first_heads: dict[tuple[str, int], int] = {}  # by layer and part
        self._num_heads = 0
        self._first_tokens = np.full(
            max(group.num_blocks for group in layout.groups), NO_TOKEN, dtype=np.int64
        )
        self._kept: tuple[list[SlicePlace], Ints] = ([], np.empty(0, dtype=np.int64))
        places = [self._places(group.regions, group.block_size) for group in layout.groups]
        chunks: list[Ints] = []
        for job in tiling.jobs:
            paged = plan.paged_rows[job.paged]
            starts, labels, strides = places[paged.groups[0]]
            rows = tiling.rows[job.first : job.first + job.count, 0]
            addresses = (rows[:, None] + np.arange(0, job.width * UNIT, self.size)).ravel()
            numbers = np.minimum(np.searchsorted(starts, addresses), len(starts) - 1)
            if not np.array_equal(starts[numbers], addresses):
                raise ValueError("a run does not begin with a head's token")
            if (strides[numbers] != job.strides[0] * paged.per_block[0]).any():
                raise ValueError("blocks are not as far apart as the layout says")
            chunks.append(labels[numbers])
        self._labels_at = tiling.rows.size
        self.numbers: Ints = np.concatenate([tiling.rows.ravel(), *chunks])

    def _places(self, regions: Sequence[Region], block_size: int) -> tuple[Ints, Ints, Ints]:
        """Where the contents of block 0 begin, in ascending order, their labels, block strides."""
        starts: list[Ints] = [np.empty(0, dtype=np.int64)]
        labels: list[Ints] = [np.empty(0, dtype=np.int64)]
        strides: list[Ints] = [np.empty(0, dtype=np.int64)]
        slots = np.arange(block_size, dtype=np.int64)
        for region in regions:
            heads = np.arange(region.num_heads, dtype=np.int64)[:, None]
            for number, part in enumerate(region.parts):
                token_stride = region.token_stride_of(part)
                first = region.base + part.offset
                starts.append((first + heads * region.head_stride + slots * token_stride).ravel())
                labels.append(((self._num_heads + heads) << 32 | slots).ravel())
                strides.append(np.full(len(starts[-1]), region.block_stride, dtype=np.int64))
                self._first_heads[region.layer, number] = self._num_heads
                self._num_heads += region.num_heads
        addresses = np.concatenate(starts)
        order = np.argsort(addresses)
        addresses = addresses[order]
        if (addresses[1:] == addresses[:-1]).any():
            raise ValueError("two layers have the same memory")
        return addresses, np.concatenate(labels)[order], np.concatenate(strides)[order]

    def request(
        self,
        key: Key,
        local_slices: Sequence[LocalSlice],
        pieces: Sequence[Pieces],
        launch: Launch,
    ) -> DigestInput:
        """What a request's digest needs: of these slices, by a launch of these pieces."""
        end = digest.last_end(local_slices)
        offset, step, multipliers = key.numbers(digest.num_words(self.size))
        sums = Digest.empty(local_slices, end)
        tokens = self._tokens(local_slices, pieces, launch)
        parts: list[npt.NDArray[np.generic]] = [
            np.concatenate([multipliers[::2], multipliers[1::2]]),
            self._heads(local_slices).ravel(),
            tokens,
            sums.rows,
            sums.columns,
        ]
        places = NUM_HEADER + np.cumsum([part.size for part in parts])
        column = digest.column_tokens(end).bit_length() - 1  # a power of two
        header = [offset, step, column, *places[:-1], self._labels_at]
        flat = [np.array(header, np.uint64), *parts]
        return DigestInput(np.concatenate([part.view(np.int64) for part in flat]))

    def _heads(self, local_slices: Sequence[LocalSlice]) -> Ints:
        """Shape (heads, 3); of what is not read all tokens count as row 0's, which finds them."""
        places = [local.place for local in local_slices]
        if places != self._kept[0]:
            numbers = [
                self._first_heads[place.region.layer, place.part_number]
                + np.arange(place.heads[0], place.heads[1])
                - place.region.first_head
                for place in places
            ]
            self._kept = places, np.concatenate(numbers)
        heads = self._kept[1]
        table = np.zeros((self._num_heads, HEAD_COLUMNS), dtype=np.int64)
        table[:, 2] = digest.last_end(local_slices)
        ranges = np.array([(local.begin, local.end) for local in local_slices], dtype=np.int64)
        table[heads, 0] = np.arange(len(heads))
        table[heads, 1:] = np.repeat(ranges, [place.num_heads for place in places], axis=0)
        return table

    def _tokens(
        self, local_slices: Sequence[LocalSlice], pieces: Sequence[Pieces], launch: Launch
    ) -> Ints:
        """The first token of each piece's block, and of the piece within it."""
        tables: dict[int, LocalSlice] = {}
        for local in local_slices:
            first = tables.setdefault(local.place.table_number, local)
            if local.begin < first.begin:
                tables[local.place.table_number] = local
        chunks = {
            number: np.full(len(pieces[number].local), NO_TOKEN, dtype=np.int64)
            for number in launch.paged
        }
        for group, local in tables.items():
            size = local.group.block_size
            first_tokens = local.first_position + np.arange(len(local.ids)) * size
            self._first_tokens[local.ids] = first_tokens
            for number in launch.paged:
                rows = self._plan.paged_rows[number]
                if rows.groups[0] == group:
                    blocks, within = np.divmod(pieces[number].local, rows.per_block[0])
                    tokens = within * (size // rows.per_block[0])
                    chunks[number] = self._first_tokens[blocks] + tokens
            self._first_tokens[local.ids] = NO_TOKEN
        return np.concatenate([np.empty(0, dtype=np.int64), *chunks.values()])
