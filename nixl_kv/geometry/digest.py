"""A digest of KV that does not depend on how a rank divides and stores the KV.

For each layer, part (K or V) and head, it is a sum over tokens, modulo 2^64:

    sum of  mix(offset + step * position + sum of multipliers[i] * words[i])

over the 32-bit words (little-endian, the last one padded with zeros) of the content of that head
and token. `offset`, `step` and the multipliers have 64 bits each and come from a secret of the
request.

A sum does not depend on the order of its tokens and heads, or on the rank that has them. So the KV
of decode's ranks can be compared with the KV of prefill's ranks, whatever their shapes. Each term
depends on the position: tokens or blocks that changed places change the sum. Each head of each
layer has a sum of its own: heads or layers that changed places change it too.

What it proves: the multipliers are odd, so a difference in one word always changes its token's
term. Any other difference within a token, made without knowledge of the secret, is missed with a
probability of at most 2^-32: for 0 < |d| < 2^32, `multiplier * d` has a given value modulo 2^64 for
at most one odd multiplier in 2^32. (Two sign flips reach this bound: there |d| is 2^31.) `mix`
makes it improbable that terms of different tokens cancel.

The same terms are summed a second time, over all layers and heads, for each column of tokens. The
terms of each row are multiplied by an odd `weight` of the row, so that rows that changed places
change the columns too. So a difference is found by head and layer, and by place.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.slices import LocalSlice

U64: TypeAlias = npt.NDArray[np.uint64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

Numbers: TypeAlias = tuple[np.uint64, np.uint64, U64]
"""`offset`, `step` and odd multipliers."""

MemoryView: TypeAlias = Callable[[int, int], Bytes]
"""A function of address and length that returns a view of that memory."""

WORD: Final = 4
MIN_COLUMN: Final = 64
MAX_COLUMNS: Final = 4096
STEP_BYTES: Final = 1 << 20
"""How many bytes one step digests: they fit into a core's cache, and take about 1 ms."""

_SHIFTS: Final = tuple(np.uint64(shift) for shift in (30, 27, 31))
_FACTORS: Final = tuple(np.uint64(f) for f in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Of splitmix64's last step (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
2014), in Stafford's variant 13."""


@dataclass(frozen=True)
class Key:
    """The secret numbers of one request's digests, the same on both sides."""

    secret: str

    def numbers(self, num_words: int) -> Numbers:
        """The numbers for content of so many words; longer content has the same ones, and more."""
        stream = hashlib.shake_256(self.secret.encode()).digest(8 * (2 + num_words))
        numbers = np.frombuffer(stream, dtype="<u8").astype(np.uint64) | np.uint64(1)
        return numbers[0], numbers[1], numbers[2:]


@dataclass(frozen=True)
class Digest:
    """Sums modulo 2^64: one row per head, in the order of the slices; one per column of tokens."""

    rows: U64
    columns: U64

    @classmethod
    def empty(cls, slices: Sequence[LocalSlice], end: int) -> "Digest":
        """All sums are zero."""
        num_rows = sum(kv.num_heads for kv in slices)
        return cls(np.zeros(num_rows, np.uint64), np.zeros(num_columns(end), np.uint64))


def column_tokens(end: int) -> int:
    """How many tokens make a column, in a prompt of `end` tokens; the same on both sides."""
    tokens = MIN_COLUMN
    while -(-end // tokens) > MAX_COLUMNS:
        tokens *= 2
    return tokens


def num_columns(end: int) -> int:
    """How many columns a prompt of `end` tokens has."""
    return -(-end // column_tokens(end))


def weight(row: int) -> int:
    """The factor of this row's terms in the sums of columns."""
    return 2 * row + 1


def num_words(content: int) -> int:
    """How many words so many bytes have."""
    return -(-content // WORD)


def mix(terms: U64) -> U64:
    """A bijection of 64-bit numbers in which each bit depends on all others; changes its input."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        terms ^= terms >> shift
        terms *= factor
    terms ^= terms >> _SHIFTS[-1]
    return terms


def terms(numbers: Numbers, positions: npt.NDArray[np.int64], content: Bytes) -> U64:
    """The terms of the sums.

    Args:
        numbers: of the key, for the words of this content.
        positions: shape (tokens,): where the tokens are in the prompt.
        content: shape (..., tokens, bytes).

    Returns:
        Shape (..., tokens).
    """
    offset, step, multipliers = numbers
    products = np.multiply(_words(content), multipliers, dtype=np.uint64)
    places = positions.astype(np.uint64) * step + offset
    return mix(products.sum(axis=-1, dtype=np.uint64) + places)


def digest_steps(
    key: Key, slices: Sequence[LocalSlice], memory: MemoryView
) -> Generator[None, None, Digest]:
    """Digest slices, about `STEP_BYTES` at each step; the generator returns the digest."""
    end = last_end(slices)
    sums = Digest.empty(slices, end)
    numbers = {size: key.numbers(num_words(size)) for size in {s.part.content for s in slices}}
    row = done = 0
    for kv in slices:
        rows = sums.rows[row : row + kv.num_heads]
        weights = np.array([weight(row + n) for n in range(kv.num_heads)], np.uint64)
        for positions, content in _content(kv, memory):
            chunk = terms(numbers[kv.part.content], positions, content)
            rows += chunk.sum(axis=1, dtype=np.uint64)
            np.add.at(sums.columns, positions // column_tokens(end), weights @ chunk)
            done += content.size
            if done >= STEP_BYTES:
                done = 0
                yield
        row += kv.num_heads
    return sums


def last_end(slices: Sequence[LocalSlice]) -> int:
    """The end of the slice that ends last."""
    return max(kv.end for kv in slices)


def describe_difference(local: Digest, remote: Digest, slices: Sequence[LocalSlice]) -> str | None:
    """Say where two digests of the same slices differ; None if they do not.

    `slices` are those of this side: the text numbers blocks as its block table does.
    """
    shapes = [(len(side.rows), len(side.columns)) for side in (local, remote)]
    if shapes[0] != shapes[1]:
        return f"digests of {shapes[0]} heads and columns here and {shapes[1]} there"
    rows = np.flatnonzero(local.rows != remote.rows)
    columns = np.flatnonzero(local.columns != remote.columns)
    if not len(rows) and not len(columns):
        return None
    heads = [(name, kv) for kv in slices for name in kv.names]
    name, first = heads[rows[0]] if len(rows) else ("no single head", slices[0])
    more = f" and {len(rows) - 1} more heads" if len(rows) > 1 else ""
    return f"{name}{more} {_describe_place(columns, first, last_end(slices))}"


def _describe_place(columns: npt.NDArray[np.int64], kv: LocalSlice, end: int) -> str:
    if not len(columns):
        return "in no single place"
    tokens, size = column_tokens(end), kv.group.entry_size
    begin = max(kv.begin, int(columns[0]) * tokens)
    last = min(end, (int(columns[-1]) + 1) * tokens) - 1
    return (
        f"differs in tokens {begin} to {last} (blocks {begin // size} to {last // size} "
        f"of the request; {len(columns)} of {num_columns(end)} columns of {tokens} tokens)"
    )


def _view_blocks(kv: LocalSlice, memory: MemoryView) -> npt.NDArray[np.generic]:
    """A view of all blocks, shape (heads, blocks, tokens, pieces, words of a piece)."""
    part, group, region = kv.part, kv.group, kv.region
    shape = (kv.num_heads, group.num_blocks, group.block_size, part.count, part.length)
    strides = (region.head_stride, region.block_stride, kv.token_stride, part.stride, 1)
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    unit = next(unit for unit in (8, 4, 2, 1) if part.length % unit == 0)
    view = np.lib.stride_tricks.as_strided(memory(kv.base, size), shape, strides, writeable=False)
    return view.view(f"u{unit}")


def _content(kv: LocalSlice, memory: MemoryView) -> Iterator[tuple[npt.NDArray[np.int64], Bytes]]:
    """Places in the prompt and content of the tokens, some blocks at a time."""
    size, content, positions = kv.group.block_size, kv.part.content, kv.positions
    blocks = _view_blocks(kv, memory)
    batch = max(1, STEP_BYTES // (kv.num_heads * size * content))
    for first in range(0, len(kv.ids), batch):
        ids = kv.ids[first : first + batch]
        start = kv.first_position + first * size
        begin, end = max(start, positions.start), min(start + len(ids) * size, positions.stop)
        copied = blocks[:, ids].view(np.uint8).reshape(kv.num_heads, -1, content)
        tokens, is_kept = kv.tokens(np.arange(begin, end))
        there = copied[:, begin - start : end - start]
        yield (tokens, there) if is_kept.all() else (tokens[is_kept], there[:, is_kept])


def _words(content: Bytes) -> npt.NDArray[np.uint32]:
    """Shape (..., words)."""
    padding = -content.shape[-1] % WORD
    if padding:
        content = np.pad(content, [(0, 0)] * (content.ndim - 1) + [(0, padding)])
    return np.ascontiguousarray(content).view("<u4")
