"""A digest of KV that is the same however a rank shards and stores the KV.

For each layer, part (K or V) and head it is a sum over tokens, modulo 2^64:

    sum of  mix(offset + step * token + sum of multipliers[i] * words[i])

over the 32-bit words (little-endian, the last one padded with zeros) of the content of that head
and token. `offset`, `step` and the multipliers are 64-bit numbers derived from a secret that both
ranks know.

A sum does not depend on the order of tokens and heads, or on the rank that has them. So decode's
ranks can compare with prefill's ranks at any TP, DCP, block size or layout. Each term depends on
the token's number, so tokens or blocks that changed places change the sum. Each head of each layer
has its own sum, so heads or layers that changed places change theirs.

The multipliers are odd, so a difference in one word always changes its token's term. Equal digests
hide any other difference within a token, made without the secret, with a probability of at most
2^-32: for 0 < |d| < 2^32, `multiplier * d` has a given value modulo 2^64 for at most one odd
multiplier in 2^32. (Two flipped sign bits reach this bound: there |d| is 2^31.) `mix` makes it
improbable that the terms of different tokens cancel.

The terms are summed a second time, over all layers and heads, for each column of 64 or more tokens.
In these sums row r counts 2r + 1 times, so rows that changed places change the columns too. Rows
name the head and layer of a difference, columns its tokens.

`sums` is the whole arithmetic, in int64, which wraps modulo 2^64. This file digests host memory
with it. The kernel of `gpu.py` computes the same for GPU memory.
"""

import ctypes
import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.protocol.messages import MAX_COLUMNS
from nixl_kv.verify.slices import LocalSlice

U64: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

Steps: TypeAlias = Generator[None, None, "Digest"]
"""Computes a digest. The first step reads no KV."""

WORD: Final = 4
MIN_COLUMN: Final = 64
STEP_BYTES: Final = 1 << 20
"""Bytes that one step digests on the host: they fit into a core's cache and take about 1 ms."""

_MIX: Final = tuple(
    (shift, (1 << 64 - shift) - 1, factor - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
"""Shifts, their masks and signed factors of splitmix64's last step (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, 2014), in Stafford's variant 13."""


def numbers_of(secret: str, content: int) -> tuple[np.int64, np.int64, Ints]:
    """Offset, step and multipliers for `content` bytes. More bytes have the same ones and more."""
    stream = hashlib.shake_256(secret.encode()).digest(8 * (2 - -content // WORD))
    numbers = np.frombuffer(stream, dtype="<i8").astype(np.int64) | np.int64(1)
    return numbers[0], numbers[1], numbers[2:]


@dataclass(frozen=True)
class Digest:
    """Sums modulo 2^64: a row for each head, in the order of the slices, and the columns."""

    rows: U64
    columns: U64


def column_tokens(end: int) -> int:
    tokens = MIN_COLUMN
    while -(-end // tokens) > MAX_COLUMNS:
        tokens *= 2
    return tokens


def num_columns(end: int) -> int:
    return -(-end // column_tokens(end))


def mix(numbers: Ints) -> Ints:
    for shift, mask, factor in _MIX:
        # An int64 is shifted with its sign; the mask makes that a shift of 64 plain bits.
        numbers = (numbers ^ (numbers >> shift & mask)) * factor
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)


def terms(words: npt.NDArray[np.uint32], multipliers: Ints, offsets: Ints) -> Ints:
    """The terms of the sums, shape (..., tokens); for the arguments see `sums`."""
    return mix((words * multipliers).sum(-1) + offsets)


def sums(
    words: npt.NDArray[np.uint32], multipliers: Ints, offsets: Ints, rows: Ints
) -> tuple[Ints, Ints]:
    """Sum the terms of some rows and tokens.

    Args:
        words: shape (rows, tokens, words).
        multipliers: shape (words,).
        offsets: shape (tokens,): `offset + step * token`.
        rows: shape (rows,), the numbers of the rows.

    Returns:
        A sum for each row, and a weighted sum for each token.
    """
    each = terms(words, multipliers, offsets)
    return each.sum(1), (each * (2 * rows + 1)[:, None]).sum(0)


class Digester:
    """Digests memory of this process, about `STEP_BYTES` in a step; subclasses, other memory."""

    pause_s: float = 0.0  # between two steps; 0 where each step is work

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        """Digest slices; the steps return the digest. The call or a step raises a DigestError."""
        end = last_end(local_slices)
        tokens_per_column = column_tokens(end)
        longest = max(local.part.content for local in local_slices)
        offset, step, multipliers = numbers_of(secret, longest)
        rows = np.zeros(sum(local.num_heads for local in local_slices), np.int64)
        columns = np.zeros(num_columns(end), np.int64)
        yield
        row = done = 0
        for local in local_slices:
            own = np.arange(row, row + local.num_heads)
            row += local.num_heads
            for tokens, content in _content(local):
                words = _words(content)
                offsets = tokens * step + offset
                by_row, by_token = sums(words, multipliers[: words.shape[-1]], offsets, own)
                rows[own] += by_row
                np.add.at(columns, tokens // tokens_per_column, by_token)
                done += content.size
                if done >= STEP_BYTES:
                    done = 0
                    yield
        return Digest(rows.view(np.uint64), columns.view(np.uint64))

    def close(self) -> None:
        """Return when nothing reads the cache any longer; may be called again."""


def last_end(slices: Sequence[LocalSlice]) -> int:
    return max(local.end for local in slices)


def describe_difference(local: Digest, remote: Digest, slices: Sequence[LocalSlice]) -> str | None:
    """Where two digests of the same slices differ; None if they are equal.

    The text numbers blocks as the block table of this side does, which has `slices`.
    """
    shapes = [(len(side.rows), len(side.columns)) for side in (local, remote)]
    if shapes[0] != shapes[1]:
        return f"digests of {shapes[0]} heads and columns here and {shapes[1]} there"
    rows = np.flatnonzero(local.rows != remote.rows)
    columns = np.flatnonzero(local.columns != remote.columns)
    if not len(rows) and not len(columns):
        return None
    heads = [(name, one) for one in slices for name in one.names]
    name, first = heads[rows[0]] if len(rows) else ("no single head", slices[0])
    more = f" and {len(rows) - 1} more heads" if len(rows) > 1 else ""
    if not len(columns):
        return f"{name}{more} in no single place"
    end = last_end(slices)
    tokens, size = column_tokens(end), first.group.entry_size
    begin = max(first.begin, int(columns[0]) * tokens)
    last = min(end, (int(columns[-1]) + 1) * tokens) - 1
    return (
        f"{name}{more} differs in tokens {begin} to {last} (blocks {begin // size} to "
        f"{last // size} of the request; {len(columns)} of {num_columns(end)} columns of "
        f"{tokens} tokens)"
    )


def _content(local: LocalSlice) -> Iterator[tuple[Ints, Bytes]]:
    """Batches of token numbers and their content, shape (heads, tokens, bytes)."""
    positions, size, content = local.positions, local.group.units_per_block, local.part.content
    blocks = _view_blocks(local)
    batch = max(1, STEP_BYTES // (local.num_heads * size * content))
    for first in range(0, len(local.ids), batch):
        ids = local.ids[first : first + batch]
        start = local.first_position + first * size
        begin, end = max(start, positions.start), min(start + len(ids) * size, positions.stop)
        copied = blocks[:, ids].view(np.uint8).reshape(local.num_heads, -1, content)
        tokens, is_kept = local.tokens(np.arange(begin, end))
        batched = copied[:, begin - start : end - start]
        yield (tokens, batched) if is_kept.all() else (tokens[is_kept], batched[:, is_kept])


def _view_blocks(local: LocalSlice) -> npt.NDArray[np.generic]:
    """All blocks of the cache, shape (heads, blocks, units, pieces, bytes of a piece)."""
    part, group, region = local.part, local.group, local.region
    shape = (local.num_heads, group.num_blocks, group.units_per_block, part.count, part.length)
    strides = (region.head_stride, region.block_stride, local.token_stride, part.stride, 1)
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(local.base))
    view = np.lib.stride_tricks.as_strided(memory, shape, strides, writeable=False)
    unit = next(unit for unit in (8, 4, 2, 1) if part.length % unit == 0)
    return view.view(f"u{unit}")  # numpy copies long units faster


def _words(content: Bytes) -> npt.NDArray[np.uint32]:
    """Shape (..., words)."""
    padding = -content.shape[-1] % WORD
    if padding:
        content = np.pad(content, [(0, 0)] * (content.ndim - 1) + [(0, padding)])
    return np.ascontiguousarray(content).view("<u4")
