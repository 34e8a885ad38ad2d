"""Runs: pieces that are contiguous on both sides, and how two regions' maps meet in them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import Group, Region

Ints = npt.NDArray[np.int64]

Heads = tuple[int, int]
"""A half-open range of the model's KV heads."""

MAX_PIECES: Final = 1 << 24
"""K and V of a head of a token in a layer, over one block of all layers."""


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
class Meeting:
    """How two ranks' regions of a layer meet, but for their bases: most layers of a model agree.

    Pairs are (local, remote), all in bytes. `parts` are (local offset, remote offset, length).
    """

    parts: tuple[tuple[int, int, int], ...]
    num_heads: int
    first_head: tuple[int, int]  # the distance of the first common head from the base
    head_strides: tuple[int, int]
    token_strides: tuple[int, int]

    @classmethod
    def of(cls, mine: Region, theirs: Region, heads: Heads) -> "Meeting":
        """Of a layer's regions on both sides, for a range of heads that both of them hold."""
        return cls(
            tuple(
                (here.offset, there.offset, here.length)
                for here, there in zip(mine.parts, theirs.parts, strict=True)
            ),
            heads[1] - heads[0],
            (
                (heads[0] - mine.first_head) * mine.head_stride,
                (heads[0] - theirs.first_head) * theirs.head_stride,
            ),
            (mine.head_stride, theirs.head_stride),
            (mine.token_stride, theirs.token_stride),
        )

    def runs(self, num_tokens: int, slots: tuple[int, int]) -> Runs:
        """The runs of `num_tokens` tokens from these slots of a block on, relative to the bases.

        Parts, then the finer of token and head, then the other: merging after each step keeps the
        arrays as small as the layout allows.
        """
        parts = np.array(self.parts, dtype=np.int64)
        runs = Runs(parts[:, 0], parts[:, 1], parts[:, 2]).merged()
        steps = [(num_tokens, *self.token_strides), (self.num_heads, *self.head_strides)]
        for count, local_stride, remote_stride in sorted(steps, key=lambda step: step[1]):
            runs = runs.repeated(count, local_stride, remote_stride).merged()
        shifts = [self.first_head[side] + slots[side] * self.token_strides[side] for side in (0, 1)]
        return Runs(runs.local + shifts[0], runs.remote + shifts[1], runs.length)


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
        pieces = sum(
            len(meeting.parts) * meeting.num_heads * num_tokens * len(bases[0])
            for meeting, bases in self.bases.items()
        )
        if pieces > MAX_PIECES:
            raise IncompatiblePeer(f"a block has {pieces} pieces; allowed: {MAX_PIECES}")
        return joined(
            meeting.runs(num_tokens, slots).moved(*bases) for meeting, bases in self.bases.items()
        ).merged()

    def is_linear(self, num_tokens: int) -> bool:
        """Whether all tokens of the cache stand in one line on both sides, across blocks.

        Then neighbouring stretches merge, in whatever blocks they are.
        """
        runs = self.runs(num_tokens, (0, 0))
        return all(
            meeting.token_strides[side] * self.groups[side].block_size == self.block_strides[side]
            and bool((runs.length == num_tokens * meeting.token_strides[side]).all())
            for meeting in self.bases
            for side in (0, 1)
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
