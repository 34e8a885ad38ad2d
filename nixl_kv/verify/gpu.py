"""Digests of a cache in GPU memory, by the array program of `digest.py` on torch tensors.

One tensor of integers covers the whole cache. Rows are heads. All heads whose content has equal
strides are one batch, which gathers its words from that tensor by index. So the program digests any
layout: K transposed in pieces of two bytes, states, content of odd length.

`torch.compile` makes one kernel of the gather and the sums; without it the same program runs
operation by operation, several times slower. Both run in chunks: one takes at most 64 MiB beside
the cache, or 24 bytes for each integer of the longest content if that is more.

Import this module only where the cache is in GPU memory: it needs torch.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from nixl_kv.errors import DigestError, get_logger
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.gpu import on, translated
from nixl_kv.verify import digest
from nixl_kv.verify.digest import Digest, Digester, Ints, Steps
from nixl_kv.verify.slices import LocalSlice, alike

logger = get_logger(__name__)

MAX_TERMS: Final = 1 << 21
"""Terms of one call of the compiled program, which writes these 16 MiB once."""
MAX_UNITS: Final = 1 << 28
"""Integers that one call of the compiled program reads: 1 GiB takes less than 1 ms. From 2^31 on,
torch.compile would need a second version."""
MAX_EAGER_UNITS: Final = 1 << 21
"""Integers that one call of the uncompiled program reads. Index, integer and product take 24 bytes
each."""

DTYPES: Final = {4: torch.int32, 2: torch.int16, 1: torch.int8}

SAMPLE: Final = 509, 4001
"""Rows and tokens of the call that compiles the program: about as many as in other calls. They
differ from each other and from any number of units, because torch.compile assumes that equal sizes
stay equal."""

Program: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def gathered_sums(
    memory: torch.Tensor,
    bases: torch.Tensor,
    places: torch.Tensor,
    units: torch.Tensor,
    *numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`digest.sums` of the integers of `memory` at base + place + unit.

    `numbers` are the multipliers, the offsets and the numbers of the rows. Shapes: bases (rows,),
    places (tokens,), units (units of a head's token,).
    """
    at = (bases[:, None] + places)[:, :, None] + units
    mask = (1 << 8 * memory.element_size()) - 1
    return digest.sums(memory[at].to(torch.int64) & mask, *numbers)


class TorchDigester:
    """Digests a cache through one tensor of bytes, on the current stream."""

    def __init__(self, memory: torch.Tensor, address: int) -> None:
        """`memory` is uint8, and its first byte is at `address`. 4 divides address and length."""
        self._memory = {unit: memory.view(dtype) for unit, dtype in DTYPES.items()}
        self._address = address
        self._compiled: Program | None = None

    def compile(self, num_units: int) -> None:
        """Compile the program, for content of about `num_units` 4-byte words.

        Raises:
            Exception: torch, Triton and the C compiler raise many kinds.
        """
        program: Program = torch.compile(gathered_sums, dynamic=True)
        rows, tokens = SAMPLE
        sizes = rows, tokens, num_units, num_units, tokens, rows
        zeros = [self._put(np.zeros(size, np.int64)) for size in sizes]
        for result in program(self._memory[digest.WORD], *zeros):
            result.cpu()
        self._compiled = program

    def digest(self, secret: str, slices: Sequence[LocalSlice]) -> Digest:
        end = digest.last_end(slices)
        num_rows = sum(local.num_heads for local in slices)
        rows, columns = (
            self._put(np.zeros(size, np.int64)) for size in (num_rows, digest.num_columns(end))
        )
        for batch in alike(slices):
            if len(batch[0][1].positions):
                self._add(secret, batch, rows, columns, column=digest.column_tokens(end))
        return Digest(*(sums.cpu().numpy().view(np.uint64) for sums in (rows, columns)))

    def _add(
        self,
        secret: str,
        batch: Sequence[tuple[int, LocalSlice]],
        rows: torch.Tensor,
        columns: torch.Tensor,
        *,
        column: int,
    ) -> None:
        """Add the sums of `alike` slices. `column` is the number of tokens of a column."""
        first = batch[0][1]
        part, block_stride = first.part, first.region.block_stride
        heads = [(row, one, np.arange(one.num_heads)) for row, one in batch]
        numbers = np.concatenate([row + each for row, _, each in heads])
        bases = np.concatenate([one.base + each * one.region.head_stride for _, one, each in heads])
        bases -= self._address
        own = np.arange(first.positions.start, first.positions.stop)
        tokens, is_kept = first.tokens(own)
        own, tokens = own[is_kept], tokens[is_kept]
        block, within = np.divmod(own - first.first_position, first.group.block_size)
        places = first.ids[block].astype(np.int64) * block_stride + within * first.token_stride
        strides = [part.length, part.stride, block_stride, first.token_stride]
        divisor = int(np.gcd.reduce(np.concatenate([bases, strides])))
        unit = next(unit for unit in DTYPES if divisor % unit == 0)
        pieces = np.arange(part.count)[:, None] * part.stride
        units = (pieces + np.arange(0, part.length, unit)).ravel()
        # A word's product is the sum of its units' products, each with the shifted multiplier.
        word, shift = np.divmod(np.arange(0, part.content, unit), digest.WORD)
        offset, step, multipliers = digest.numbers_of(secret, part.content)
        factors = multipliers[word] << (8 * shift)

        # torch.compile would make another version for shorter integers, or for a size of 1, which a
        # chunk of the longest contents could have.
        is_usual = unit == digest.WORD and min(len(bases), len(places), len(units)) > 1
        is_usual = is_usual and len(units) <= MAX_UNITS // 16
        compiled = self._compiled if is_usual else None
        by_unit = [self._put(one) for one in (units // unit, factors)]
        by_row = [self._put(one) for one in (bases // unit, numbers)]
        by_token = [
            self._put(one) for one in (places // unit, tokens * step + offset, tokens // column)
        ]
        for r, t in _chunks(len(bases), len(places), len(units), is_compiled=compiled is not None):
            # Without copies, torch.compile would make versions for views that begin elsewhere.
            base, row = (one[r].clone() for one in by_row)
            place, offsets, column_at = (one[t].clone() for one in by_token)
            row_sums, token_sums = (compiled or gathered_sums)(
                self._memory[unit], base, place, *by_unit, offsets, row
            )
            rows.index_add_(0, row, row_sums)
            columns.index_add_(0, column_at, token_sums)

    def _put(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._memory[1].device)


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
    """Digests the cache of one GPU on its own thread and stream, so the transfer thread is free."""

    pause_s = 0.0001

    def __init__(self, layout: CacheLayout) -> None:
        """Compile the program; a DigestError if this GPU cannot digest the cache at all."""
        # Wait for the compiler: vLLM captures CUDA graphs next, and another thread that
        # synchronizes the GPU would break them.
        self._device = torch.device("cuda", layout.device)
        self._thread = ThreadPoolExecutor(1, "nixl-kv-digest")
        try:
            self._thread.submit(self._open, layout).result()
        except DigestError:
            self._thread.shutdown()
            raise

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        """Digest slices. A step raises a DigestError if the GPU fails or has no memory left."""
        made = self._thread.submit(self._digest, secret, local_slices)
        try:
            while not made.done():
                yield
            return made.result()
        finally:
            made.cancel()

    def close(self) -> None:
        self._thread.shutdown()

    def _digest(self, secret: str, local_slices: Sequence[LocalSlice]) -> Digest:
        with translated(DigestError, "digesting"), on(self._stream):
            return self._digester.digest(secret, local_slices)

    def _open(self, layout: CacheLayout) -> None:
        doing = "opening the cache for digests"
        with translated(DigestError, doing), torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with on(self._stream):
                self._digester = TorchDigester(*self._map(layout))
        contents = [part.content for g in layout.groups for r in g.regions for part in r.parts]
        began = time.monotonic()
        try:
            with on(self._stream):
                self._digester.compile(min(max(8, *contents) // 4, 128))
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
