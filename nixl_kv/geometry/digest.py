"""A digest of KV that is the same however a rank cuts and stores it.

For each layer, part (K or V) and head, it is a sum over tokens, modulo 2^64:

    sum of  mix(offset + step * position + sum of multipliers[i] * words[i])

over the 32-bit words (little-endian, the last padded with zeros) of the content of that head and
token. `offset`, `step` and the multipliers are 64 bits each and come from a secret of the request.

A sum does not care in which order, or on which rank, its tokens and heads stand: what decode's
ranks hold can be compared with what prefill's ranks hold, whatever the shapes. The position is in
each term, so that tokens or blocks that changed places change the sum, and each head of each layer
has a sum of its own, so that heads and layers that changed places do too.

What it proves: the multipliers are odd, so one word that differs always shows in its token's term.
Any other difference within a token that was made without knowing the secret is missed with a
probability of 2^-32 at most: for 0 < |d| < 2^32, `multiplier * d` takes a value modulo 2^64 for at
most one odd multiplier in 2^32. (Two sign flips come up to that: there |d| is 2^31.) `mix` keeps
terms of different tokens from cancelling.

The same terms are summed a second time, over all layers and heads, for each `column` of tokens,
those of each row times an odd `weight` of its own, so that rows that changed places show here too.
So a difference is found by head and layer, and by place.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.excerpts import Strip

U64: TypeAlias = npt.NDArray[np.uint64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

Numbers: TypeAlias = tuple[np.uint64, np.uint64, U64]
"""`offset`, `step` and odd multipliers."""

Window: TypeAlias = Callable[[int, int], Bytes]
"""A view of `length` bytes of memory from an address on: `window(address, length)`."""

WORD: Final = 4
MIN_COLUMN: Final = 64
MAX_COLUMNS: Final = 4096
STEP_BYTES: Final = 1 << 20
"""How much is digested at a time: it fits into a core's cache, and takes about 1 ms."""

_SHIFTS: Final = tuple(np.uint64(shift) for shift in (30, 27, 31))
_FACTORS: Final = tuple(np.uint64(f) for f in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Of splitmix64's last step (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
2014), in Stafford's variant 13."""


@dataclass(frozen=True)
class Key:
    """The secret numbers of one request's digests, the same on both sides."""

    secret: str

    def numbers(self, num_words: int) -> Numbers:
        """With a multiplier for each of so many words; fewer words have the first of them."""
        stream = hashlib.shake_256(self.secret.encode()).digest(8 * (2 + num_words))
        numbers = np.frombuffer(stream, dtype="<u8").astype(np.uint64) | np.uint64(1)
        return numbers[0], numbers[1], numbers[2:]


@dataclass(frozen=True)
class Digest:
    """Sums modulo 2^64: of each head of each strip, in their order; of each column of tokens."""

    rows: U64
    columns: U64

    @classmethod
    def empty(cls, found: Sequence[Strip], end: int) -> "Digest":
        """Of nothing yet."""
        num_rows = sum(strip.num_heads for strip in found)
        return cls(np.zeros(num_rows, np.uint64), np.zeros(num_columns(end), np.uint64))


def column(end: int) -> int:
    """How many tokens make a column, in a prompt of so many: both sides must agree."""
    tokens = MIN_COLUMN
    while -(-end // tokens) > MAX_COLUMNS:
        tokens *= 2
    return tokens


def num_columns(end: int) -> int:
    """Of a prompt of so many tokens."""
    return -(-end // column(end))


def weight(row: int) -> int:
    """By what the terms of this row of the digest count in the columns."""
    return 2 * row + 1


def num_words(content: int) -> int:
    """Of so many bytes."""
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
        positions: shape (tokens,): where in the prompt they stand.
        content: shape (..., tokens, bytes).

    Returns:
        Shape (..., tokens).
    """
    offset, step, multipliers = numbers
    products = np.multiply(_words(content), multipliers, dtype=np.uint64)
    places = positions.astype(np.uint64) * step + offset
    return mix(products.sum(axis=-1, dtype=np.uint64) + places)


def digest(key: Key, found: Sequence[Strip], window: Window) -> Generator[None, None, Digest]:
    """The digest of strips, about `STEP_BYTES` at each step."""
    end = end_of(found)
    sums = Digest.empty(found, end)
    numbers = {size: key.numbers(num_words(size)) for size in {s.part.content for s in found}}
    row = done = 0
    for strip in found:
        rows = sums.rows[row : row + strip.num_heads]
        weights = np.array([weight(row + n) for n in range(strip.num_heads)], np.uint64)
        for positions, content in _content(strip, window):
            found_terms = terms(numbers[strip.part.content], positions, content)
            rows += found_terms.sum(axis=1, dtype=np.uint64)
            np.add.at(sums.columns, positions // column(end), weights @ found_terms)
            done += content.size
            if done >= STEP_BYTES:
                done = 0
                yield
        row += strip.num_heads
    return sums


def end_of(found: Sequence[Strip]) -> int:
    """The token before which all of them end."""
    return max(strip.end for strip in found)


def difference(mine: Digest, theirs: Digest, found: Sequence[Strip]) -> str | None:
    """Where two digests of the same excerpts differ, in words; None if they do not.

    `found` are this side's strips: places are named by the blocks of its own table.
    """
    shapes = [(len(one.rows), len(one.columns)) for one in (mine, theirs)]
    if shapes[0] != shapes[1]:
        return f"digests of {shapes[0]} heads and columns here and {shapes[1]} there"
    rows = np.flatnonzero(mine.rows != theirs.rows)
    columns = np.flatnonzero(mine.columns != theirs.columns)
    if not len(rows) and not len(columns):
        return None
    heads = [(name, strip) for strip in found for name in strip.names]
    what = _few([heads[row][0] for row in rows]) if len(rows) else "no single head"
    strip = heads[rows[0]][1] if len(rows) else found[0]
    return f"{what} {_where(columns, strip, end_of(found))}"


def _few(heads: Sequence[str]) -> str:
    more = f" and {len(heads) - 1} more heads" if len(heads) > 1 else ""
    return f"{heads[0]}{more}"


def _where(columns: npt.NDArray[np.int64], strip: Strip, end: int) -> str:
    if not len(columns):
        return "in no single place"
    tokens, size = column(end), strip.group.entry_size
    begin = max(strip.begin, int(columns[0]) * tokens)
    last = min(end, (int(columns[-1]) + 1) * tokens) - 1
    return (
        f"differs in tokens {begin} to {last} (blocks {begin // size} to {last // size} "
        f"of the request; {len(columns)} of {num_columns(end)} columns of {tokens} tokens)"
    )


def _blocks_of(strip: Strip, window: Window) -> npt.NDArray[np.generic]:
    """A view of all blocks, shape (heads, blocks, tokens, pieces, words of a piece)."""
    part, group, region = strip.part, strip.group, strip.region
    shape = (strip.num_heads, group.num_blocks, group.block_size, part.count, part.length)
    strides = (region.head_stride, region.block_stride, strip.token_stride, part.stride, 1)
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    unit = next(unit for unit in (8, 4, 2, 1) if part.length % unit == 0)
    memory = window(strip.base, size)
    view = np.lib.stride_tricks.as_strided(memory, shape, strides, writeable=False)
    return view.view(f"u{unit}")


def _content(strip: Strip, window: Window) -> Iterator[tuple[npt.NDArray[np.int64], Bytes]]:
    """Some blocks at a time: where their tokens stand in the prompt, and what is in them."""
    size, content = strip.group.block_size, strip.part.content
    blocks = _blocks_of(strip, window)
    batch = max(1, STEP_BYTES // (strip.num_heads * size * content))
    for first in range(0, len(strip.ids), batch):
        ids = strip.ids[first : first + batch]
        start = strip.first_token + first * size
        begin, end = max(start, strip.begin), min(start + len(ids) * size, strip.end)
        copied = blocks[:, ids].view(np.uint8).reshape(strip.num_heads, -1, content)
        yield np.arange(begin, end), copied[:, begin - start : end - start]


def _words(content: Bytes) -> npt.NDArray[np.uint32]:
    """Shape (..., words)."""
    lacking = -content.shape[-1] % WORD
    if lacking:
        content = np.pad(content, [(0, 0)] * (content.ndim - 1) + [(0, lacking)])
    return np.ascontiguousarray(content).view("<u4")
