"""Digests of a cache in GPU memory, by the array program of `digest.py` on torch tensors.

One tensor of integers covers the whole cache. A view of it has a cell for each place where the
content of a token can begin, so one index per head and token gathers the content of any layout: K
transposed in pieces of two bytes, states, content of odd length. Rows are heads. All heads whose
content has equal strides are one batch.

`torch.compile` makes one kernel of the gather and the sums; without it the same program runs
operation by operation, several times slower. Both run in chunks: one takes at most 64 MiB beside
the cache, or 24 bytes for each integer of the longest content if that is more.

Import this module only where the cache is in GPU memory: it needs torch.
"""

import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from nixl_kv.errors import DigestError, get_logger
from nixl_kv.geometry.layout import CacheLayout, Group, Part
from nixl_kv.gpu import on, translated
from nixl_kv.verify import digest
from nixl_kv.verify.digest import Digest, Digester, Ints, Steps
from nixl_kv.verify.slices import LocalSlice, alike

logger = get_logger(__name__)

MAX_TERMS: Final = 1 << 22
"""Terms of one call of a compiled program, which writes these 32 MiB once. Half as many take 5 to
50 % longer on an H100, twice as many 2 to 7 % less."""
MAX_UNITS: Final = 1 << 30
"""Integers that one call of a compiled program reads. From 2^31 on, torch.compile would need a
second version."""
MAX_EAGER_UNITS: Final = 1 << 21
"""Integers that one call of an uncompiled program reads. Integer, widened integer and product take
20 bytes each."""
MAX_PROGRAMS: Final = 8
"""torch.compile makes no more versions of one function. Few models have two."""

DTYPES: Final = {4: torch.int32, 2: torch.int16, 1: torch.int8}

SAMPLE: Final = 509, 4001
"""Rows and tokens of the call that compiles a program: about as many as in other calls."""

Program: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Sums: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Sums of the rows and of the columns, int64."""


@dataclass(frozen=True)
class Shape:
    """How the content of a token lies in memory. A program is compiled for one shape.

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


class TorchDigester:
    """Digests a cache through one tensor of bytes, on the current stream."""

    def __init__(self, memory: torch.Tensor, address: int, groups: Sequence[Group]) -> None:
        """`memory` is uint8, and its first byte is at `address`. 4 divides address and length."""
        self._memory = {unit: memory.view(dtype) for unit, dtype in DTYPES.items()}
        self._address = address
        self._shapes = _shapes(groups, address)
        self._programs: dict[Shape, Program] = {}

    def compile(self) -> None:
        """Compile the programs for the cache. States need none: a load has one token of them.

        Raises:
            Exception: torch, Triton and the C compiler raise many kinds.
        """
        shapes = dict.fromkeys(self._shapes.values())
        usual = [one for one in shapes if one.unit == digest.WORD and not one.is_state]
        for shape in usual[:MAX_PROGRAMS]:
            program = torch.compile(functools.partial(gathered_sums, shape))
            rows, tokens = SAMPLE
            sizes = rows, tokens, shape.num_units, tokens, rows
            zeros = [one.clone() for one in self._put(*(np.zeros(n, np.int64) for n in sizes))]
            for at in (0, 1, 3, 4):
                torch._dynamo.mark_dynamic(zeros[at], 0)  # noqa: SLF001 - documented
            for result in program(self._memory[shape.unit], *zeros):
                result.cpu()
            self._programs[shape] = program

    def launch(self, secret: str, slices: Sequence[LocalSlice]) -> Iterator[Sums | None]:
        """Start a part of the computation in each step; the last one yields the sums to be."""
        end = digest.last_end(slices)
        num_rows = sum(local.num_heads for local in slices)
        device = self._memory[1].device
        rows, columns = (
            torch.zeros(size, dtype=torch.int64, device=device)
            for size in (num_rows, digest.num_columns(end))
        )
        for batch in alike(slices):
            if len(batch[0][1].positions):
                column = digest.column_tokens(end)
                yield from self._add(secret, batch, rows, columns, column=column)
        yield rows, columns

    def _add(
        self,
        secret: str,
        batch: Sequence[tuple[int, LocalSlice]],
        rows: torch.Tensor,
        columns: torch.Tensor,
        *,
        column: int,
    ) -> Iterator[None]:
        """Add the sums of `alike` slices. `column` is the number of tokens of a column."""
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

        base, row, place, token, factors = self._put(
            (bases - self._address) // step_bytes,
            numbers,
            places,
            tokens,
            multipliers[word] << (8 * shift),
        )
        offsets, column_at = token * int(step) + int(offset), token // column
        # torch.compile would make another version for a size of 1.
        program = self._programs.get(shape) if min(len(bases), len(places)) > 1 else None
        sums = program or functools.partial(gathered_sums, shape)
        sizes = len(bases), len(places), shape.num_units
        for r, t in _chunks(*sizes, is_compiled=program is not None):
            # Without copies, torch.compile would make versions for views that begin elsewhere.
            views = base[r], place[t], factors, offsets[t], row[r]
            row_sums, token_sums = sums(self._memory[shape.unit], *(one.clone() for one in views))
            rows.index_add_(0, row[r], row_sums)
            columns.index_add_(0, column_at[t], token_sums)
            yield None

    def _put(self, *arrays: Ints) -> Sequence[torch.Tensor]:
        """Copy arrays to the device, in one piece."""
        # Not through pinned memory, which takes 5 ms to allocate.
        flat = torch.from_numpy(np.concatenate(arrays)).to(self._memory[1].device)
        return torch.split(flat, [len(array) for array in arrays])


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


def _chunks(
    num_rows: int, num_tokens: int, num_units: int, *, is_compiled: bool
) -> Iterator[tuple[slice, slice]]:
    """Ranges of rows and of tokens that one call takes."""
    limit = min(MAX_TERMS, MAX_UNITS // num_units) if is_compiled else MAX_EAGER_UNITS // num_units
    most_rows = min(num_rows, max(1, limit // 4))
    most_tokens = max(1, limit // most_rows)
    return itertools.product(_split(num_rows, most_rows), _split(num_tokens, most_tokens))


def _split(total: int, most: int) -> list[slice]:
    """Ranges of about equal size, so that none is of size 1 if `most` is 3 or more."""
    count = -(-total // most)
    edges = [total * number // count for number in range(count)]
    return [slice(*pair) for pair in itertools.pairwise([*edges, total])]


class GpuDigester(Digester):
    """Digests the cache of one GPU on a stream of its own. No step waits for the GPU."""

    pause_s = 0.0001

    def __init__(self, layout: CacheLayout) -> None:
        """Compile the programs; a DigestError if this GPU cannot digest the cache at all."""
        self._device = torch.device("cuda", layout.device)
        # torch.compile makes a version for each state of the calling thread. vLLM has changed the
        # state of this one; the transfer thread has that of a new one. Wait for it: vLLM captures
        # CUDA graphs next, and a thread that synchronizes the GPU would break them.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._open, layout).result()

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

    def _open(self, layout: CacheLayout) -> None:
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
                "digests run without torch.compile, several times slower: %s: %s",
                type(error).__name__,
                str(error).strip().split("\n")[0],
            )
        else:
            logger.info("compiled the digest in %.1f s", time.monotonic() - began)

    def _map(self, layout: CacheLayout) -> tuple[torch.Tensor, int]:
        # One tensor from the first span to the last one. Digests never read between the spans.
        begin = min(span.address for span in layout.spans) // 4 * 4
        end = max(span.address + span.length for span in layout.spans)
        shape = (-(-(end - begin) // 4) * 4,)
        described = {"data": (begin, False), "shape": shape, "typestr": "|u1", "version": 3}
        memory: Any = SimpleNamespace(__cuda_array_interface__=described)
        return torch.as_tensor(memory, device=self._device), begin
