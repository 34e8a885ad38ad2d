"""Digests of a cache in GPU memory: one Triton kernel, on a stream of its own.

The sums are those of `geometry.digest`, which says what they mean. This module is imported only
where the cache is in GPU memory: Triton is only there.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from nixl_kv.errors import DigestError
from nixl_kv.geometry import digest
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.layout import CacheLayout, Region
from nixl_kv.geometry.slices import LocalSlice
from nixl_kv.transfer.digests import Digester, Steps

TILE: Final = digest.MIN_COLUMN
"""Tokens of a program: a column of the digest is a whole number of them."""

CHUNK: Final = 64
"""Words that a program takes at a time: 256 bytes, K or V of one head and token of most models."""

MAX_PART: Final = 1 << 13
"""Bytes of a part: the kernel is compiled for each length, in a time that grows with it. For the
64 KiB of a recurrent state it is minutes."""

VECTOR: Final = 16
"""Bytes that a thread loads at a time, where the cache is aligned to so many."""

UNABLE: Final = (AssertionError, OSError, RuntimeError, SubprocessError, triton.TritonError)
"""What torch and Triton raise: no memory, no compiler, nowhere to keep what it made, no CUDA."""

NUM_WARPS: Final = 2
NUM_HEADER: Final = 9


@triton.jit(do_not_specialize=["first_row"])  # type: ignore[untyped-decorator]
# Triton reads these annotations, and takes no others.
def _digest(numbers, first_row, cut: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add one tile of tokens of one row to the sums. `numbers` is an `_KernelInput`, all int64."""
    tokens: tl.constexpr = cut[0]
    num_words: tl.constexpr = cut[1]
    chunk: tl.constexpr = cut[2]
    unit: tl.constexpr = cut[3]
    num_tiles = tl.load(numbers + 3).to(tl.int32)
    tile = tl.program_id(0) % num_tiles
    row = numbers + tl.load(numbers + 4) + (first_row + tl.program_id(0) // num_tiles) * 8
    begin, end = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    position = tile * tokens + tl.arange(0, tokens)
    inside = (position >= begin) & (position < end)
    # Where the content of each token begins.
    size = tl.load(row + 6).to(tl.int32)
    number = tl.load(row + 5) + position // size - begin // size
    block = tl.load(numbers + tl.load(numbers + 5) + number, mask=inside, other=0)
    address = tl.load(row) + block * tl.load(row + 1) + position % size * tl.load(row + 2)
    first = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), unit)
    # Its words, each times its multiplier.
    factors = numbers + tl.load(numbers + 6)
    terms = tl.zeros([tokens], dtype=tl.uint64)
    for start in tl.static_range(0, num_words, chunk):
        word = start + tl.arange(0, chunk)
        factor = tl.load(factors + word, mask=word < num_words, other=0)
        known = inside[:, None] & (word < num_words)[None, :]
        value = tl.load(first[:, None] + word[None, :], mask=known, other=0)
        wide = value.to(tl.uint32, bitcast=True).to(tl.uint64)
        terms += tl.sum(wide * factor.to(tl.uint64, bitcast=True)[None, :], axis=1)
    # The position, and `geometry.digest.mix`.
    place = tl.load(numbers) + position.to(tl.int64) * tl.load(numbers + 1)
    terms += place.to(tl.uint64, bitcast=True)
    terms = (terms ^ (terms >> 30)) * 0xBF58476D1CE4E5B9
    terms = (terms ^ (terms >> 27)) * 0x94D049BB133111EB
    terms = terms ^ (terms >> 31)
    total = tl.sum(tl.where(inside, terms.to(tl.int64, bitcast=True), 0))
    which = tl.load(row + 7)
    column = tile * tokens // tl.load(numbers + 2).to(tl.int32)
    tl.atomic_add(numbers + tl.load(numbers + 7) + which, total)
    # `geometry.digest.weight`.
    tl.atomic_add(numbers + tl.load(numbers + 8) + column, total * (2 * which + 1))


@dataclass(frozen=True)
class _Launch:
    """Rows whose content is equally long: one launch of the kernel, which is compiled for it."""

    first_row: int
    num_rows: int
    cut: tuple[int, int, int, int]  # tokens, words, words at a time, alignment in bytes


@dataclass(frozen=True)
class _KernelInput:
    """What the kernel is given, and room for its sums: one array of int64.

    The header: offset, step, tokens of a column, tiles of a row, and where these begin: rows, block
    numbers, multipliers, sums of rows, sums of columns. A row: address, block stride, token stride,
    first token, end, where its block numbers begin, block size, which sum.
    """

    numbers: npt.NDArray[np.int64]
    launches: list[_Launch]
    tiles: int
    sums_at: tuple[int, int]

    @classmethod
    def of(cls, key: Key, local_slices: Sequence[LocalSlice]) -> "_KernelInput":
        """For these slices, one row for each head."""
        end = digest.last_end(local_slices)
        rows, blocks = _tables(local_slices)
        words = np.concatenate(
            [np.full(s.num_heads, digest.num_words(s.part.content)) for s in local_slices]
        )
        order = np.argsort(words, kind="stable")
        rows, words = rows[order], words[order]
        offset, step, multipliers = key.numbers(int(words[-1]))
        sums = Digest.empty(local_slices, end)
        parts = [rows, blocks, multipliers, sums.rows, sums.columns]
        places = NUM_HEADER + np.cumsum([0, *(part.size for part in parts)])
        tiles = -(-end // TILE)
        header = [offset, step, digest.column_tokens(end), tiles, *places[:-1]]
        flat = [np.array(header, np.uint64), *(part.ravel() for part in parts)]
        numbers = np.concatenate([part.view(np.int64) for part in flat])
        return cls(numbers, _launches(rows, words), tiles, (int(places[3]), int(places[4])))


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
        with _translated():
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._warm_up(layout)

    def __call__(self, key: Key, local_slices: Sequence[LocalSlice]) -> Steps:
        """The digest, when the GPU has made it.

        Raises:
            DigestError: in a step, if the GPU fails, or has no memory left.
        """
        return self._steps(_KernelInput.of(key, local_slices))

    def close(self) -> None:
        """Wait until nothing reads the cache any more."""
        self._stream.synchronize()

    def _warm_up(self, layout: CacheLayout) -> None:
        """Compile as for a request: a token of everything that this cache has."""
        block = np.zeros(1, np.int32)
        local_slices = [
            LocalSlice(region, group, number, region.heads, 0, 1, block)
            for group in layout.groups
            for region in group.regions
            for number in range(len(region.parts))
        ]
        for _ in self(Key("none"), local_slices):
            self._stream.synchronize()

    def _steps(self, kernel_input: _KernelInput) -> Steps:
        rows_at, columns_at = kernel_input.sums_at
        with _translated(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            there = (
                torch.from_numpy(kernel_input.numbers)
                .pin_memory()
                .to(self._device, non_blocking=True)
            )
            for launch in kernel_input.launches:
                grid = (launch.num_rows * kernel_input.tiles,)
                _digest[grid](there, launch.first_row, launch.cut, num_warps=NUM_WARPS)
            sums = torch.empty(len(there) - rows_at, dtype=there.dtype, pin_memory=True)
            sums.copy_(there[rows_at:], non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        while not _has_happened(done):
            yield
        result = sums.numpy().view(np.uint64)
        split = columns_at - rows_at
        return Digest(result[:split].copy(), result[split:].copy())


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """What torch and Triton raise becomes a DigestError."""
    try:
        yield
    except UNABLE as error:
        raise DigestError(f"{type(error).__name__}: {error}") from error


def _has_happened(event: torch.cuda.Event) -> bool:
    with _translated():
        return bool(event.query())  # type: ignore[no-untyped-call]


def _check(region: Region) -> None:
    """Whether the kernel can read it."""
    for part in region.parts:
        strides = region.block_stride, region.head_stride, region.token_stride
        places = (region.base, part.offset, part.length, part.token_stride, *strides)
        is_long = part.length > MAX_PART
        if part.count > 1 or is_long or any(place % digest.WORD for place in places):
            raise DigestError(
                f"the KV cache of layer {region.layer!r} has {part.count} pieces of "
                f"{part.length} bytes for each head and token, which cannot be digested on a "
                f"GPU; allowed: one piece of whole {digest.WORD}-byte words, up to {MAX_PART} bytes"
            )


def _tables(
    local_slices: Sequence[LocalSlice],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows, shape (rows, 8), and the block numbers that they point into.

    Layers of a group share their block numbers.
    """
    places: dict[int, int] = {}
    blocks: list[npt.NDArray[np.int32]] = []
    for local in local_slices:
        if id(local.ids) not in places:
            places[id(local.ids)] = sum(map(len, blocks))
            blocks.append(local.ids)
    slice_rows = np.array([_row(local, places[id(local.ids)]) for local in local_slices], np.int64)
    heads = np.array([local.num_heads for local in local_slices])
    rows = np.repeat(slice_rows, heads, axis=0)
    numbers = np.arange(len(rows))
    within = numbers - np.repeat(np.cumsum(heads) - heads, heads)
    rows[:, 0] += within * rows[:, -1]
    rows[:, -1] = numbers
    return rows, np.concatenate(blocks).astype(np.int64)


def _row(local: LocalSlice, blocks_at: int) -> tuple[int, ...]:
    """Of the slice's first head; the head stride is where the row's number will be."""
    return (
        local.base,
        local.region.block_stride,
        local.token_stride,
        local.begin,
        local.end,
        blocks_at,
        local.group.block_size,
        local.region.head_stride,
    )


def _launches(rows: npt.NDArray[np.int64], words: npt.NDArray[np.int64]) -> list[_Launch]:
    """Rows are in ascending order of their words."""
    launches = []
    for number, first in zip(*np.unique(words, return_index=True), strict=True):
        count = int(np.count_nonzero(words == number))
        places = rows[first : first + count, :3]  # address and strides
        unit = VECTOR if not (places % VECTOR).any() else digest.WORD
        chunk = min(CHUNK, 1 << (int(number) - 1).bit_length())
        launches.append(_Launch(int(first), count, (TILE, int(number), chunk, unit)))
    return launches
