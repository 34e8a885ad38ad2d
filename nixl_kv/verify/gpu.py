"""Digests of a cache in GPU memory: one Triton kernel, on a stream of its own.

The sums are those of `geometry.digest`, which says what they mean. This module is imported only
where the cache is in GPU memory: Triton is only there.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from nixl_kv.errors import DigestError
from nixl_kv.geometry import digest
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.layout import ALL_TOKENS, CacheLayout, Region, Stripe
from nixl_kv.geometry.plan import Ints
from nixl_kv.geometry.slices import LocalSlice, SlicePlace
from nixl_kv.gpu import on, translated
from nixl_kv.verify.gpu_sums import mixed, position
from nixl_kv.verify.queue import Digester, Steps

TILE: Final = digest.MIN_COLUMN
"""Tokens of a program, where they are short: a column of the digest is a whole number of them."""

CHUNK: Final = 64
"""Words that such a program takes at a time: 256 bytes, K or V of one head and token of most
models."""

MAX_UNROLLED: Final = 128
"""Loads of a short token, at most: 2 KiB where they are of VECTOR bytes. The kernel is compiled for
each number of words, in a time that grows with the loads, here up to some seconds. A longer token
has a program to itself, which is compiled once for all lengths; and so has a group's only token,
however short: in a tile, the place of 63 others would idle."""

LOOPED: Final = 0
"""In the place of the number of words: the rows say how many."""

LOOP_CHUNK: Final = 1 << 10
"""Words that a program of one token takes at a time."""

VECTOR: Final = 16
"""Bytes that a thread loads at a time, where a row is aligned to so many; else it is one word."""

MAX_TABLES: Final = 64
"""That are kept: each is of the places of one set of slices."""

NUM_HEADER: Final = 9
BEGIN: Final = 3
END: Final = 4
BLOCKS_AT: Final = 5
WORDS: Final = 7
"""Columns of a row."""


@triton.jit  # type: ignore[untyped-decorator]
# Triton reads these annotations, and takes no others.
def _products(first, inside, factors, start, num_words, chunk: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Some words of each token, each times its multiplier; shape (tokens, chunk)."""
    word = start + tl.arange(0, chunk)
    factor = tl.load(factors + word, mask=word < num_words, other=0)
    known = inside[:, None] & (word < num_words)[None, :]
    value = tl.load(first[:, None] + word[None, :], mask=known, other=0)
    wide = value.to(tl.uint32, bitcast=True).to(tl.uint64)
    return wide * factor.to(tl.uint64, bitcast=True)[None, :]


@triton.jit(do_not_specialize=["first_row", "first_tile", "num_tiles"])  # type: ignore[untyped-decorator]
def _digest(numbers, first_row, first_tile, num_tiles, cut: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add one tile of tokens of one row to the sums. `numbers` is an `_KernelInput`, all int64."""
    tokens: tl.constexpr = cut[0]
    unrolled: tl.constexpr = cut[1]
    chunk: tl.constexpr = cut[2]
    unit: tl.constexpr = cut[3]
    is_striped: tl.constexpr = cut[4]
    tile = first_tile + tl.program_id(0) % num_tiles
    row = numbers + tl.load(numbers + 3) + (first_row + tl.program_id(0) // num_tiles) * 10
    begin, end = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    token = tile * tokens + tl.arange(0, tokens)
    inside = (token >= begin) & (token < end)
    place = token
    if is_striped:  # `geometry.layout.Stripe`, of this rank and of the other side
        stripes = numbers + tl.load(numbers + 8) + tl.load(row + 8) * 6
        count, number = tl.load(stripes).to(tl.int32), tl.load(stripes + 1).to(tl.int32)
        width, other = tl.load(stripes + 2).to(tl.int32), tl.load(stripes + 3).to(tl.int32)
        inside &= token // width % count == number
        inside &= token // tl.load(stripes + 5).to(tl.int32) % other == tl.load(stripes + 4)
        place = token // (count * width) * width + token % width
    # Where the content of each token begins.
    size = tl.load(row + 6).to(tl.int32)
    block_at = tl.load(row + 5) + place // size
    block = tl.load(numbers + tl.load(numbers + 4) + block_at, mask=inside, other=0)
    address = tl.load(row) + block * tl.load(row + 1) + place % size * tl.load(row + 2)
    first = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), unit)
    factors = numbers + tl.load(numbers + 5)
    if unrolled:
        terms = tl.zeros([tokens], dtype=tl.uint64)
        for start in tl.static_range(0, unrolled, chunk):
            products = _products(first, inside, factors, start, unrolled, chunk)
            terms += tl.sum(products, axis=1)
    else:
        num_words = tl.multiple_of(tl.load(row + 7).to(tl.int32), unit // 4)
        sums = tl.zeros([tokens, chunk], dtype=tl.uint64)
        for start in range(0, num_words, chunk):
            sums += _products(first, inside, factors, start, num_words, chunk)
        terms = tl.sum(sums, axis=1)
    terms = mixed(terms + position(tl.load(numbers), tl.load(numbers + 1), token))
    total = tl.sum(tl.where(inside, terms.to(tl.int64, bitcast=True), 0))
    which = tl.load(row + 9)
    column = tile * tokens // tl.load(numbers + 2).to(tl.int32)
    tl.atomic_add(numbers + tl.load(numbers + 6) + which, total)
    # `geometry.digest.weight`.
    tl.atomic_add(numbers + tl.load(numbers + 7) + column, total * (2 * which + 1))


@dataclass(frozen=True)
class _Launch:
    """Rows of a group, whose tokens are the same, that the same compiled kernel takes."""

    first_row: int
    num_rows: int
    first_tile: int
    num_tiles: int
    cut: tuple[int, int, int, int, bool]
    """Tokens, words or LOOPED, words at a time, alignment in bytes, whether tokens are divided."""

    def run(self, numbers: torch.Tensor) -> None:
        """Add its rows to the sums that `numbers`, a `_KernelInput`, has room for."""
        grid = (self.num_rows * self.num_tiles,)
        num_warps = 4 if self.cut[1] == LOOPED else 2
        places = self.first_row, self.first_tile, self.num_tiles
        _digest[grid](numbers, *places, self.cut, num_warps=num_warps)


@dataclass(frozen=True)
class _KernelInput:
    """What the kernel is given, and room for its sums: one array of int64.

    The header: offset, step, tokens of a column, and where these begin: rows, block numbers,
    multipliers, sums of rows, sums of columns, stripes. A row: address, block stride, token stride,
    first token, end, where the number of its block 0 would be, block size, words, which stripes,
    which sum. Stripes: count, place and width of both sides.
    """

    numbers: Ints
    launches: list[_Launch]
    sums_at: tuple[int, int]

    @classmethod
    def of(cls, key: Key, local_slices: Sequence[LocalSlice], table: "_Table") -> "_KernelInput":
        """For these slices, one row for each head; `table` is theirs."""
        end = digest.last_end(local_slices)
        rows, blocks, launches = table.fill(local_slices)
        # For the 64 KiB of a recurrent state that is 0.4 ms of hashing, once in a digest: less than
        # a step of `digest.digest_steps`, of which as many bytes in host memory take dozens.
        offset, step, multipliers = key.numbers(table.max_words)
        sums = Digest.empty(local_slices, end)
        parts = [table.stripes, rows, blocks, multipliers, sums.rows, sums.columns]
        places = NUM_HEADER + np.cumsum([0, *(part.size for part in parts)])
        header = [offset, step, digest.column_tokens(end), *places[1:-1], places[0]]
        flat = [np.array(header, np.uint64), *(part.ravel() for part in parts)]
        numbers = np.concatenate([part.view(np.int64) for part in flat])
        return cls(numbers, launches, (int(places[4]), int(places[5])))


class GpuDigester(Digester):
    """Digests memory of the GPU that holds the cache."""

    pause_s = 0.0001

    def __init__(self, layout: CacheLayout) -> None:
        """Make a stream, and compile the kernel, which needs seconds the first time.

        Raises:
            DigestError: if this cache cannot be digested, or the kernel not be compiled here.
        """
        for group in layout.groups:
            for region in group.regions:
                _check(region)
        self._device = torch.device("cuda", layout.device)
        self._tables: dict[tuple[SlicePlace, ...], _Table] = {}
        with translated(DigestError, "making a stream"):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._warm_up(layout)

    def __call__(self, key: Key, local_slices: Sequence[LocalSlice]) -> Steps:
        """The digest, when the GPU has made it.

        Raises:
            DigestError: in a step, if the GPU fails, or has no memory left.
        """
        places = tuple(local.place for local in local_slices)
        table = self._tables.pop(places, None) or _Table(local_slices)
        self._tables[places] = table  # the last one used is the last one to go
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        return self._steps(_KernelInput.of(key, local_slices, table))

    def close(self) -> None:
        """Wait until nothing reads the cache any more."""
        self._stream.synchronize()

    def _warm_up(self, layout: CacheLayout) -> None:
        """Compile as for a request."""
        for _ in self(Key("none"), _first_tokens(layout)):
            self._stream.synchronize()

    def _steps(self, kernel_input: _KernelInput) -> Steps:
        rows_at, columns_at = kernel_input.sums_at
        with translated(DigestError, "starting a digest"), on(self._stream):
            there = (
                torch.from_numpy(kernel_input.numbers)
                .pin_memory()
                .to(self._device, non_blocking=True)
            )
            for launch in kernel_input.launches:
                launch.run(there)
            sums = torch.empty(len(there) - rows_at, dtype=there.dtype, pin_memory=True)
            sums.copy_(there[rows_at:], non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        while not _has_happened(done):
            yield
        result = sums.numpy().view(np.uint64)
        split = columns_at - rows_at
        return Digest(result[:split].copy(), result[split:].copy())


def _has_happened(event: torch.cuda.Event) -> bool:
    with translated(DigestError, "digesting"):
        return bool(event.query())  # type: ignore[no-untyped-call]


def _check(region: Region) -> None:
    """Whether the kernel can read it."""
    for part in region.parts:
        strides = region.block_stride, region.head_stride, region.token_stride
        places = (region.base, part.offset, part.length, part.token_stride, *strides)
        if part.count > 1 or any(place % digest.WORD for place in places):
            raise DigestError(
                f"the KV cache of layer {region.layer!r} has {part.count} pieces of "
                f"{part.length} bytes for each head and token, which cannot be digested on a "
                f"GPU; allowed: one piece of whole {digest.WORD}-byte words"
            )


def _first_tokens(layout: CacheLayout) -> list[LocalSlice]:
    """A token of everything that this cache has, for peers that have all tokens, or a part."""
    block = np.zeros(1, np.int32)
    return [
        LocalSlice(SlicePlace(region, group, number, region.heads, other), 0, 1, block)
        for group in layout.groups
        for region in group.regions
        for number in range(len(region.parts))
        for other in (ALL_TOKENS, Stripe(2))[: 1 if group.keeps_states else 2]
    ]


class _Table:
    """The rows of slices, but for their tokens and blocks, in the order of their launches.

    Hundreds of rows take a millisecond; most requests are of the same few sets of slices.
    """

    def __init__(self, local_slices: Sequence[LocalSlice]) -> None:
        pairs = [(local.group.stripe, local.other) for local in local_slices]
        stripes = list(dict.fromkeys(pairs))
        numbers_of = [(s.count, s.place, s.width) for pair in stripes for s in pair]
        self.stripes: Ints = np.array(numbers_of, np.int64)
        rows = np.array(
            [
                _row(local, stripes.index(pair))
                for local, pair in zip(local_slices, pairs, strict=True)
            ],
            np.int64,
        )
        heads = np.array([local.num_heads for local in local_slices])
        slices = np.repeat(np.arange(len(heads)), heads)
        rows = rows[slices]
        numbers = np.arange(len(rows))
        within = numbers - np.repeat(np.cumsum(heads) - heads, heads)
        rows[:, 0] += within * rows[:, -1]
        rows[:, -1] = numbers
        kinds = _kinds(rows, local_slices, slices)
        order = np.lexsort(kinds.T)
        self._rows, self._slices, kinds = rows[order], slices[order], kinds[order]
        edges = np.flatnonzero(np.diff(kinds, axis=0, prepend=-1).any(axis=1)).tolist()
        self._launches = [
            (range(first, stop), kinds[first].tolist())
            for first, stop in itertools.pairwise([*edges, len(rows)])
        ]
        self.max_words = int(rows[:, WORDS].max())

    def fill(
        self, local_slices: Sequence[LocalSlice]
    ) -> tuple[Ints, npt.NDArray[np.int64], list[_Launch]]:
        """A request's rows, the block numbers that they point into, and the launches.

        Layers of a group share their block numbers.
        """
        places: dict[tuple[int, int], int] = {}
        """By block numbers and first token: where the number of the region's block 0 would be."""
        blocks: list[npt.NDArray[np.int32]] = []
        tokens = np.empty((len(local_slices), 3), dtype=np.int64)
        num_blocks = 0
        for number, (place, begin, end, ids) in enumerate(local_slices):
            if (id(ids), begin) not in places:
                first = local_slices[number].first_position // place.group.block_size
                places[id(ids), begin] = num_blocks - first
                blocks.append(ids)
                num_blocks += len(ids)
            tokens[number] = begin, end, places[id(ids), begin]
        rows = self._rows.copy()
        rows[:, [BEGIN, END, BLOCKS_AT]] = tokens[self._slices]
        launches = [_launch(numbers, rows, *kind) for numbers, kind in self._launches]
        return rows, np.concatenate(blocks).astype(np.int64), launches


def _row(local: LocalSlice, stripes_at: int) -> tuple[int, ...]:
    """Of the slice's first head; the head stride is where the row's number will be.

    BEGIN, END and BLOCKS_AT are those of a request.
    """
    return (
        local.base,
        local.region.block_stride,
        local.token_stride,
        0,
        0,
        0,
        local.group.block_size,
        digest.num_words(local.part.content),
        stripes_at,
        local.region.head_stride,
    )


def _kinds(rows: Ints, local_slices: Sequence[LocalSlice], slices: Ints) -> Ints:
    """Of each row what is compiled for it, and its group: rows of a kind share a launch.

    What is compiled does not depend on the other rows, or on where a row begins and ends: so it is
    compiled before the first request.
    """
    is_alone = np.array([local.group.window == 1 for local in local_slices])[slices]
    words = rows[:, WORDS]
    places = np.column_stack([rows[:, :3], words * digest.WORD])  # address, strides and length
    units = np.where((places % VECTOR).any(axis=1), digest.WORD, VECTOR)
    is_looped = is_alone | (words * digest.WORD > MAX_UNROLLED * units)
    unrolled = np.where(is_looped, LOOPED, words)
    divided = [local.group.stripe.count > 1 or local.other.count > 1 for local in local_slices]
    groups = np.array([local.place.table_number for local in local_slices])[slices]
    kinds: Ints = np.column_stack([unrolled, units, groups, np.array(divided)[slices]])
    return kinds


def _launch(
    numbers: range, rows: Ints, num_words: int, unit: int, _group: int, is_striped: int
) -> _Launch:
    """Of the rows with these numbers, which are of one kind."""
    begin = int(rows[numbers.start : numbers.stop, BEGIN].min())
    if num_words == LOOPED:
        cut = 1, LOOPED, LOOP_CHUNK, unit, bool(is_striped)
    else:
        chunk = min(CHUNK, 1 << (num_words - 1).bit_length())
        cut = TILE, num_words, chunk, unit, bool(is_striped)
    first_tile = begin // cut[0]
    last = int(rows[numbers.start : numbers.stop, END].max())
    return _Launch(numbers.start, len(numbers), first_tile, -(-last // cut[0]) - first_tile, cut)
