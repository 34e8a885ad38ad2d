"""Digests of a cache in GPU memory: a Triton kernel, and the array program of `digest.py`.

One tensor of integers covers the whole cache. Its cells begin at each place where the content of a
token can begin, so one index per head and token finds the content of any layout: K transposed in
pieces of two bytes, states, content of odd length. Rows are heads. All heads whose content has
equal strides are one batch.

The kernel digests contiguous words, which is the KV of nearly all models, in one launch per batch.
For 2.3 GB of KV of Qwen3-8B on an H100 it takes 1.0 ms on the GPU, and on the host 0.7 ms before
the bytes land and 0.3 ms after. The array program compiled by `torch.compile` took 1.1 ms and 2 ms,
and up to 20 s to compile. The array program digests the rest, operation by operation and in chunks.
A digest takes at most 64 MiB beside the cache, or 20 bytes for each integer of the longest content
if that is more.

Import this module only where the cache is in GPU memory: it needs torch and Triton.
"""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl

from nixl_kv.errors import DigestError, get_logger
from nixl_kv.geometry.layout import CacheLayout, Group, Part
from nixl_kv.gpu import on, translated
from nixl_kv.verify import digest
from nixl_kv.verify.digest import Digest, Digester, Ints, Steps
from nixl_kv.verify.slices import LocalSlice, alike

logger = get_logger(__name__)

MAX_EAGER_UNITS: Final = 1 << 21
"""Integers that one call of the array program reads. Integer, widened integer and product take
20 bytes each."""
MAX_WORDS: Final = 1024
"""Words of a token that the kernel digests; it is compiled for each number of words."""
TILE: Final = digest.MIN_COLUMN
"""Tokens of one program of the kernel, at most. A tile lies within a column."""
CHUNK: Final = 64
"""Words of a token that a program reads at a time."""

DTYPES: Final = {4: torch.int32, 2: torch.int16, 1: torch.int8}

Sums: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Sums of the rows and of the columns, int64."""


@dataclass(frozen=True)
class Shape:
    """How the content of a token lies in memory.

    All numbers but `unit` count integers of `unit` bytes.
    """

    unit: int
    step: int  # content begins at multiples of it
    length: int
    count: int
    stride: int
    is_state: bool

    @property
    def num_units(self) -> int:
        return self.count * self.length


def gathered_sums(
    shape: Shape,
    memory: torch.Tensor,
    bases: torch.Tensor,
    places: torch.Tensor,
    *numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`digest.sums` of the content at base + place, in steps of the shape.

    `numbers` are the multipliers, the offsets and the numbers of the rows. Shapes: bases (rows,),
    places (tokens,).
    """
    extent = (shape.count - 1) * shape.stride + shape.length
    size = (memory.numel() - extent) // shape.step + 1, shape.count, shape.length
    cells = memory.as_strided(size, (shape.step, shape.stride, 1))
    units = cells[bases[:, None] + places].flatten(2).to(torch.int64)
    return digest.sums(units & (1 << 8 * shape.unit) - 1, *numbers)


# One compilation for all calls: the numbers and sums are parts of one tensor, at any address.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["numbers", "by_row", "by_column"],
)
# Triton reads the annotations and accepts only its own.
def _digest_tiles(memory, numbers, by_row, by_column, num_tokens, cut: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add one tile of tokens of one row to the sums.

    `numbers` are for each row its base and number, for each token its place and offset, for each
    tile its begin, end and column, and the multipliers.
    """
    step: tl.constexpr = cut[0]
    num_words: tl.constexpr = cut[1]
    size: tl.constexpr = cut[2]
    chunk: tl.constexpr = cut[3]
    rows = numbers + tl.num_programs(1)
    places = rows + tl.num_programs(1)
    offsets = places + num_tokens
    tiles = offsets + num_tokens
    factors = tiles + tl.num_programs(0) * 3
    tile = tiles + tl.program_id(0) * 3
    token = tl.load(tile) + tl.arange(0, size)
    inside = token < tl.load(tile + 1)
    cell = tl.load(numbers + tl.program_id(1)) + tl.load(places + token, mask=inside, other=0)
    terms = tl.load(offsets + token, mask=inside, other=0)
    for start in tl.static_range(0, num_words, chunk):
        word = start + tl.arange(0, chunk)
        factor = tl.load(factors + word, mask=word < num_words, other=0)
        known = inside[:, None] & (word < num_words)[None, :]
        value = tl.load(memory + (cell * step)[:, None] + word[None, :], mask=known, other=0)
        terms += tl.sum(value.to(tl.uint32, bitcast=True).to(tl.int64) * factor[None, :], 1)
    # `digest.mix`
    mixed = terms.to(tl.uint64, bitcast=True)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    total = tl.sum(tl.where(inside, mixed.to(tl.int64, bitcast=True), 0), 0)
    row = tl.load(rows + tl.program_id(1))
    tl.atomic_add(by_row + row, total)
    tl.atomic_add(by_column + tl.load(tile + 2), total * (2 * row + 1))


class TorchDigester:
    """Digests a cache through one tensor of bytes, on the current stream."""

    def __init__(self, memory: torch.Tensor, address: int, groups: Sequence[Group]) -> None:
        """`memory` is uint8, and its first byte is at `address`. 4 divides address and length."""
        self._memory = {unit: memory.view(dtype) for unit, dtype in DTYPES.items()}
        self._address = address
        self._shapes = _shapes(groups, address)
        self._compiled: set[Shape] = set()  # shapes that the kernel digests

    def compile(self) -> None:
        """Compile the kernel for the shapes of the cache.

        States need none: a load has one token of them, and a tile would be empty but for it.

        Raises:
            Exception: torch, Triton and the C compiler raise many kinds.
        """
        for shape in dict.fromkeys(self._shapes.values()):
            is_usual = shape.unit == digest.WORD and shape.count == 1 and not shape.is_state
            if is_usual and shape.num_units <= MAX_WORDS:
                sizes = 7 + shape.num_units, 1, 1  # of one row, one tile and no token; of the sums
                numbers, *sums = (self._to_device(np.zeros(size, np.int64)) for size in sizes)
                self._launch(shape, (1, 1, 0), numbers, sums)
                self._compiled.add(shape)

    def launch(self, secret: str, slices: Sequence[LocalSlice]) -> Iterator[Sums | None]:
        """Start a part of the computation in each step; the last one yields the sums to be.

        The first step reads no KV. It copies all numbers that the other steps need to the GPU.
        """
        end = digest.last_end(slices)
        sizes = [sum(local.num_heads for local in slices), digest.num_columns(end)]
        zeros = np.zeros(sum(sizes), np.int64)
        batches = [
            self._numbers(secret, batch, column=digest.column_tokens(end))
            for batch in alike(slices)
            if len(batch[0][1].positions)
        ]
        arrays = [array for _, numbers in batches for array in numbers]
        # Not through pinned memory, which takes 5 ms to allocate.
        flat = self._to_device(np.concatenate([zeros, *arrays]))
        rows, columns, *views = torch.split(flat, sizes + [len(array) for array in arrays])
        yield None
        for number, (shape, _) in enumerate(batches):
            bases, row, places, offsets, at, factors = views[6 * number : 6 * number + 6]
            if not len(places):
                continue
            if shape in self._compiled:  # it finds the other numbers behind the bases
                counts = len(at) // 3, len(bases), len(places)
                self._launch(shape, counts, bases, (rows, columns))
                continue
            for r, t in _chunks(len(bases), len(places), shape.num_units):
                row_sums, token_sums = gathered_sums(
                    shape,
                    self._memory[shape.unit],
                    bases[r],
                    places[t],
                    factors,
                    offsets[t],
                    row[r],
                )
                rows.index_add_(0, row[r], row_sums)
                columns.index_add_(0, at[t], token_sums)
                yield None
        yield rows, columns

    def _numbers(
        self, secret: str, batch: Sequence[tuple[int, LocalSlice]], *, column: int
    ) -> tuple[Shape, Sequence[Ints]]:
        """Numbers for the sums of `alike` slices. `column` is the number of tokens of a column.

        Returns the bases and numbers of the rows, the places and offsets of the tokens, the tiles
        (or, for the array program, the columns of the tokens), and the multipliers.
        """
        first = batch[0][1]
        shape = self._shapes[_key(first.table_number, first.part)]
        counts = [one.num_heads for _, one in batch]
        within = np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = np.repeat([row for row, _ in batch], counts) + within
        strides = np.repeat([one.region.head_stride for _, one in batch], counts)
        bases = np.repeat([one.base for _, one in batch], counts) + within * strides
        size, begin = first.group.block_size, first.positions.start - first.first_position
        step_bytes = shape.step * shape.unit
        in_block = np.arange(size) * (first.token_stride // step_bytes)
        places = first.ids[:, None] * np.int64(first.region.block_stride // step_bytes) + in_block
        places = places.ravel()[begin : begin + len(first.positions)]
        tokens, is_kept = first.tokens(np.arange(first.positions.start, first.positions.stop))
        if not is_kept.all():
            places, tokens = places[is_kept], tokens[is_kept]
        # A word's product is the sum of its units' products, each with the shifted multiplier.
        word, shift = np.divmod(np.arange(0, first.part.content, shape.unit), digest.WORD)
        offset, step, multipliers = digest.numbers_of(secret, first.part.content)
        at = _tiles(tokens, column).ravel() if shape in self._compiled else tokens // column
        bases = (bases - self._address) // step_bytes
        offsets, factors = tokens * step + offset, multipliers[word] << (8 * shift)
        return shape, (bases, numbers, places, offsets, at, factors)

    def _launch(
        self, shape: Shape, sizes: tuple[int, int, int], numbers: torch.Tensor, sums: Sequence[Any]
    ) -> None:
        """Start the kernel; the sizes are numbers of tiles, rows and tokens."""
        cut = shape.step, shape.num_units, TILE, CHUNK
        num_tiles, num_rows, num_tokens = sizes
        memory = self._memory[shape.unit]
        _digest_tiles[num_tiles, num_rows](memory, numbers, *sums, num_tokens, cut, num_warps=4)

    def _to_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._memory[1].device)


def _key(group_number: int, part: Part) -> tuple[int, ...]:
    return group_number, part.length, part.count, part.stride


def _shapes(groups: Sequence[Group], address: int) -> dict[tuple[int, ...], Shape]:
    """The shapes of the content of a cache, from all places where such content can begin."""
    alignments: dict[tuple[int, ...], int] = defaultdict(lambda: 4 * digest.WORD)
    for number, group in enumerate(groups):
        for region in group.regions:
            for part in region.parts:
                begin = region.base + part.offset - address
                strides = region.block_stride, region.head_stride, region.token_stride_of(part)
                key = _key(number, part)
                alignments[key] = math.gcd(alignments[key], begin, *strides)
    shapes = {}
    for key, alignment in alignments.items():
        number, length, count, stride = key
        unit = math.gcd(digest.WORD, alignment, length, stride)
        sizes = alignment // unit, length // unit, count, stride // unit
        shapes[key] = Shape(unit, *sizes, groups[number].keeps_states)
    return shapes


def _tiles(tokens: Ints, column: int) -> Ints:
    """Begin, end and column of each tile, shape (tiles, 3). The tokens ascend."""
    begins = np.flatnonzero(np.diff(tokens // TILE, prepend=-1))
    return np.stack([begins, np.append(begins[1:], len(tokens)), tokens[begins] // column], axis=1)


def _chunks(num_rows: int, num_tokens: int, num_units: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of rows and of tokens that one call of the array program takes."""
    limit = max(1, MAX_EAGER_UNITS // num_units)
    most_rows = min(num_rows, limit)
    most_tokens = max(1, limit // most_rows)
    return itertools.product(_split(num_rows, most_rows), _split(num_tokens, most_tokens))


def _split(total: int, most: int) -> list[slice]:
    return [slice(begin, min(begin + most, total)) for begin in range(0, total, most)]


class GpuDigester(Digester):
    """Digests the cache of one GPU on a stream of its own. No step waits for the GPU."""

    pause_s = 0.00002  # a digest takes 1 ms, and decode waits for its end

    def __init__(self, layout: CacheLayout) -> None:
        """Compile the kernel; a DigestError if this GPU cannot digest the cache at all."""
        self._device = torch.device("cuda", layout.device)
        began = time.monotonic()
        with (
            translated(DigestError, "opening the cache for digests"),
            torch.cuda.device(self._device),
        ):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with on(self._stream):
                self._digester = TorchDigester(*self._map(layout), layout.groups)
        try:
            with on(self._stream):
                self._digester.compile()
        except Exception as error:  # noqa: BLE001 - compilers raise many kinds
            logger.warning(
                "digests run without a compiled kernel, a hundred times slower: %s: %s",
                type(error).__name__,
                str(error).strip().split("\n")[0],
            )
        else:
            logger.info("compiled the digest kernel in %.1f s", time.monotonic() - began)

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        """Digest slices. A step raises a DigestError if the GPU fails or has no memory left."""
        launches = self._digester.launch(secret, local_slices)
        sums: Sums | None = None
        while True:
            with translated(DigestError, "digesting"), on(self._stream):
                if sums is None:
                    sums, event = next(launches), self._stream.record_event()
                elif event.query():
                    return Digest(*(one.cpu().numpy().view(np.uint64) for one in sums))
            yield

    def close(self) -> None:
        with translated(DigestError, "closing the digester"):
            self._stream.synchronize()

    def _map(self, layout: CacheLayout) -> tuple[torch.Tensor, int]:
        # One tensor from the first span to the last one. Digests never read between the spans.
        begin = min(span.address for span in layout.spans) // 4 * 4
        end = max(span.address + span.length for span in layout.spans)
        shape = (-(-(end - begin) // 4) * 4,)
        described = {"data": (begin, False), "shape": shape, "typestr": "|u1", "version": 3}
        memory: Any = SimpleNamespace(__cuda_array_interface__=described)
        return torch.as_tensor(memory, device=self._device), begin
