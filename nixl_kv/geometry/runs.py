"""Runs: pieces that are contiguous on both sides, and how two regions' maps meet in them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import Group, Part, Region

Ints = npt.NDArray[np.int64]

Heads = tuple[int, int]
"""A half-open range of the model's KV heads."""

MAX_PIECES: Final = 1 << 22
"""In one block: of a layer before they merge, of all layers after."""


@dataclass(frozen=True)
class Runs:
    """Parallel arrays, shape (n,), int64, bytes: addresses on both sides, and lengths."""

    local: Ints
    remote: Ints
    length: Ints

    def repeated(self, count: int, local_stride: int, remote_stride: int) -> "Runs":
        """The runs at `count` equally spaced places, in ascending order of the places."""
        steps = np.arange(count, dtype=np.int64)
        return self.moved(steps * local_stride, steps * remote_stride)

    def moved(self, local: Ints, remote: Ints) -> "Runs":
        """The runs at each of these distances, shape (m,) on both sides: m times as many."""
        return Runs(
            (local[:, None] + self.local).ravel(),
            (remote[:, None] + self.remote).ravel(),
            np.tile(self.length, len(local)),
        )

    def merged(self) -> "Runs":
        """The same bytes in as few runs as possible, in ascending order of local addresses."""
        order = np.argsort(self.local, kind="stable")
        local, remote, length = self.local[order], self.remote[order], self.length[order]
        joined = (local[:-1] + length[:-1] == local[1:]) & (remote[:-1] + length[:-1] == remote[1:])
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        return Runs(local[starts], remote[starts], np.add.reduceat(length, starts))


def joined(parts: Iterable[Runs]) -> Runs:
    """All of them, one after the other."""
    found = list(parts)
    return Runs(
        np.concatenate([runs.local for runs in found]),
        np.concatenate([runs.remote for runs in found]),
        np.concatenate([runs.length for runs in found]),
    )


@dataclass(frozen=True)
class Side:
    """One rank's region of a layer without its base: most layers of a model agree in it."""

    parts: tuple[Part, ...]
    token_stride: int
    head_stride: int
    head_offset: int  # of the first head that is read, from the base, in bytes

    @classmethod
    def of(cls, region: Region, first_head: int) -> "Side":
        """Of a region, from this head of the model on."""
        distance = (first_head - region.first_head) * region.head_stride
        return cls(region.parts, region.token_stride, region.head_stride, distance)

    @property
    def token_strides(self) -> set[int]:
        """Of all its parts."""
        return {part.token_stride or self.token_stride for part in self.parts}

    def pieces(self) -> tuple[Ints, Ints, Ints]:
        """Of one head of one token: where each begins in the content, its offset, token stride."""
        count = np.array([part.count for part in self.parts])
        length = np.repeat([part.length for part in self.parts], count)
        step = np.concatenate([np.arange(part.count) * part.stride for part in self.parts])
        offset = np.repeat([part.offset for part in self.parts], count) + step
        stride = np.repeat([part.token_stride or self.token_stride for part in self.parts], count)
        return np.cumsum(length) - length, offset, stride


@dataclass(frozen=True)
class Meeting:
    """How two ranks' regions of a layer meet, but for their bases. Pairs are (local, remote).

    Layers that meet alike are equal here, and planned once.
    """

    sides: tuple[Side, Side]
    content: int  # bytes of one head of one token
    num_heads: int

    @classmethod
    def of(cls, mine: Region, theirs: Region, heads: Heads) -> "Meeting":
        """Of a layer's regions on both sides, for a range of heads that both of them hold."""
        sides = Side.of(mine, heads[0]), Side.of(theirs, heads[0])
        return cls(sides, mine.content, heads[1] - heads[0])

    def runs(self, num_tokens: int, slots: tuple[int, int]) -> Runs:
        """The runs of `num_tokens` tokens from these slots of a block on, relative to the bases.

        Raises:
            IncompatiblePeer: if they are too many to be worth looking for.
        """
        parts = sum(part.count for side in self.sides for part in side.parts)
        _check_number(parts * num_tokens * self.num_heads)
        return joined(
            self._spread(pieces, strides, num_tokens, slots=slots)
            for strides, pieces in self._pieces().items()
        ).merged()

    def _pieces(self) -> dict[tuple[int, int], Runs]:
        """One head of one token, cut where either side is, by the token strides of both."""
        both = [side.pieces() for side in self.sides]
        edges = np.union1d(both[0][0], both[1][0])
        length = np.diff(edges, append=self.content)
        number = [np.searchsorted(starts, edges, side="right") - 1 for starts, _, _ in both]
        offset = [
            offsets[n] + edges - starts[n]
            for n, (starts, offsets, _) in zip(number, both, strict=True)
        ]
        strides = np.stack([both[0][2][number[0]], both[1][2][number[1]]], axis=1)
        found = {}
        for pair in np.unique(strides, axis=0):
            same = (strides == pair).all(axis=1)
            runs = Runs(offset[0][same], offset[1][same], length[same])
            found[int(pair[0]), int(pair[1])] = runs.merged()
        return found

    def _spread(
        self, pieces: Runs, strides: tuple[int, int], num_tokens: int, *, slots: tuple[int, int]
    ) -> Runs:
        """The same pieces of all tokens and heads.

        The finer of token and head first, then the other: merging after each step keeps the
        arrays as small as the layout allows.
        """
        mine, theirs = self.sides
        tokens = (num_tokens, *strides)
        heads = (self.num_heads, mine.head_stride, theirs.head_stride)
        runs = pieces
        for count, local_stride, remote_stride in sorted([tokens, heads], key=lambda s: s[1]):
            runs = runs.repeated(count, local_stride, remote_stride).merged()
        return Runs(
            runs.local + mine.head_offset + slots[0] * strides[0],
            runs.remote + theirs.head_offset + slots[1] * strides[1],
            runs.length,
        )


@dataclass(frozen=True)
class Bundle:
    """Layers of one group whose blocks are equally far apart: their runs may merge."""

    groups: tuple[Group, Group]
    block_strides: tuple[int, int]
    bases: dict[Meeting, tuple[Ints, Ints]]

    def runs(self, num_tokens: int, slots: tuple[int, int]) -> Runs:
        """The runs of `num_tokens` tokens in block 0, from these slots on.

        Raises:
            IncompatiblePeer: if they are too many to be worth looking for.
        """
        found: list[Runs] = []
        total = 0
        for meeting, bases in self.bases.items():
            relative = meeting.runs(num_tokens, slots)
            total += len(relative.length) * len(bases[0])
            _check_number(total)
            found.append(relative.moved(*bases))
        return joined(found).merged()

    def is_linear(self, num_tokens: int) -> bool:
        """Whether all tokens of the cache stand in one line on both sides, across blocks.

        Then neighbouring stretches merge, in whatever blocks they are.
        """
        lengths = set(self.runs(num_tokens, (0, 0)).length.tolist())
        return all(
            stride * group.block_size == block_stride and lengths == {num_tokens * stride}
            for meeting in self.bases
            for side, group, block_stride in zip(
                meeting.sides, self.groups, self.block_strides, strict=True
            )
            for stride in side.token_strides
        )


def bundles(
    groups: tuple[Group, Group], pairs: Iterable[tuple[Region, Region, Heads]]
) -> list[Bundle]:
    """Sort pairs of regions of two groups, each with the heads to be read, into bundles."""
    found: dict[tuple[int, int], dict[Meeting, list[tuple[int, int]]]] = {}
    for mine, theirs, heads in pairs:
        same_strides = found.setdefault((mine.block_stride, theirs.block_stride), {})
        meeting = Meeting.of(mine, theirs, heads)
        same_strides.setdefault(meeting, []).append((mine.base, theirs.base))
    return [
        Bundle(groups, strides, {meeting: _columns(bases) for meeting, bases in meetings.items()})
        for strides, meetings in found.items()
    ]


def _columns(pairs: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    table = np.array(pairs, dtype=np.int64)
    return table[:, 0], table[:, 1]


def _check_number(pieces: int) -> None:
    if pieces > MAX_PIECES:
        raise IncompatiblePeer(f"a block has {pieces} pieces or more; allowed: {MAX_PIECES}")
