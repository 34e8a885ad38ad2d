"""Runs: pieces that are contiguous on both sides, and how two ranks' regions overlap in them.

Pairs are (local, remote).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import Group, Region

Ints = npt.NDArray[np.int64]

Heads = tuple[int, int]
"""A half-open range of the model's KV heads."""

MAX_PIECES: Final = 1 << 22
"""How many pieces one block may have: of one layer before they merge, of all layers after."""


@dataclass(frozen=True)
class Runs:
    """Parallel arrays, shape (n,), int64: addresses on both sides, and lengths in bytes."""

    local: Ints
    remote: Ints
    length: Ints

    def repeated(self, count: int, local_stride: int, remote_stride: int) -> "Runs":
        """The runs at `count` equally spaced places, in ascending order of the places."""
        steps = np.arange(count, dtype=np.int64)
        return self.shifted(steps * local_stride, steps * remote_stride)

    def shifted(self, local: Ints, remote: Ints) -> "Runs":
        """The runs at each of these m distances, shape (m,) on both sides: m times as many."""
        return Runs(
            (local[:, None] + self.local).ravel(),
            (remote[:, None] + self.remote).ravel(),
            np.tile(self.length, len(local)),
        )

    def merged(self) -> "Runs":
        """The same bytes in as few runs as possible, in ascending order of local addresses."""
        order = np.argsort(self.local, kind="stable")
        local, remote, length = self.local[order], self.remote[order], self.length[order]
        follows = local[:-1] + length[:-1] == local[1:]
        follows &= remote[:-1] + length[:-1] == remote[1:]
        starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        return Runs(local[starts], remote[starts], np.add.reduceat(length, starts))


def concatenate(parts: Iterable[Runs]) -> Runs:
    """All of these runs, in the given order."""
    columns = zip(*((runs.local, runs.remote, runs.length) for runs in parts), strict=True)
    return Runs(*map(np.concatenate, columns))


def _pieces(region: Region) -> tuple[Ints, Ints, Ints]:
    """The pieces of one head of one token.

    Returns:
        For each piece where it begins in the content, its offset in memory, its token stride.
    """
    count = [part.count for part in region.parts]
    length = np.repeat([part.length for part in region.parts], count)
    step = np.concatenate([np.arange(part.count) * part.stride for part in region.parts])
    offset = np.repeat([part.offset for part in region.parts], count) + step
    stride = np.repeat([region.token_stride_of(part) for part in region.parts], count)
    return np.cumsum(length) - length, offset, stride


@dataclass(frozen=True)
class Overlap:
    """How a layer's local and remote regions overlap, in a range of heads that both of them have.

    Name and base of the regions do not matter. Without them (see `_anywhere`), overlaps of many
    layers are equal; equal ones are planned once.
    """

    sides: tuple[Region, Region]
    heads: Heads

    def runs(self, num_tokens: int, slots: tuple[int, int]) -> Runs:
        """The runs of `num_tokens` tokens from these slots of a block on, relative to the bases.

        Raises:
            IncompatiblePeer: if a block has too many pieces.
        """
        parts = sum(part.count for side in self.sides for part in side.parts)
        _check_num_pieces(parts * num_tokens * (self.heads[1] - self.heads[0]))
        return concatenate(
            self._repeat(pieces, strides, num_tokens, slots=slots)
            for strides, pieces in self._common_pieces().items()
        ).merged()

    def _common_pieces(self) -> dict[tuple[int, int], Runs]:
        """One head of one token, cut where either side is cut, by the token strides of both."""
        local, remote = map(_pieces, self.sides)
        edges = np.union1d(local[0], remote[0])
        length = np.diff(edges, append=self.sides[0].content)
        offsets, strides = [], []
        for starts, side_offsets, side_strides in (local, remote):
            number = np.searchsorted(starts, edges, side="right") - 1
            offsets.append(side_offsets[number] + edges - starts[number])
            strides.append(side_strides[number])
        pairs = np.stack(strides, axis=1)
        pieces = {}
        for pair in np.unique(pairs, axis=0):
            same = (pairs == pair).all(axis=1)
            runs = Runs(offsets[0][same], offsets[1][same], length[same])
            pieces[int(pair[0]), int(pair[1])] = runs.merged()
        return pieces

    def _repeat(
        self, pieces: Runs, strides: tuple[int, int], num_tokens: int, *, slots: tuple[int, int]
    ) -> Runs:
        """These pieces for all tokens and heads.

        The smaller stride is repeated first, then the other. A merge after each step keeps the
        arrays as small as the layout allows.
        """
        local, remote = self.sides
        tokens = (num_tokens, *strides)
        heads = (self.heads[1] - self.heads[0], local.head_stride, remote.head_stride)
        runs = pieces
        for count, local_stride, remote_stride in sorted([tokens, heads], key=lambda s: s[1]):
            runs = runs.repeated(count, local_stride, remote_stride).merged()
        return Runs(
            runs.local + local.head_offset(self.heads[0]) + slots[0] * strides[0],
            runs.remote + remote.head_offset(self.heads[0]) + slots[1] * strides[1],
            runs.length,
        )


@dataclass(frozen=True)
class OverlapGroup:
    """Layers of one group whose blocks have the same strides: runs of different layers may merge.

    `bases` has, for each overlap, the base addresses of all layers that overlap like this: shape
    (2, layers), local and remote.
    """

    groups: tuple[Group, Group]
    block_strides: tuple[int, int]
    bases: dict[Overlap, Ints]

    def runs(self, num_tokens: int, slots: tuple[int, int]) -> Runs:
        """The runs of `num_tokens` tokens in block 0, from these slots on.

        Raises:
            IncompatiblePeer: if a block has too many pieces.
        """
        layers: list[Runs] = []
        total = 0
        for overlap, bases in self.bases.items():
            relative = overlap.runs(num_tokens, slots)
            total += len(relative.length) * bases.shape[1]
            _check_num_pieces(total)
            layers.append(relative.shifted(*bases))
        return concatenate(layers).merged()

    def is_linear(self, num_tokens: int) -> bool:
        """Whether all tokens of the cache are in one line on both sides, across blocks.

        Then neighbouring token segments merge, in whatever blocks they are.
        """
        lengths = set(self.runs(num_tokens, (0, 0)).length.tolist())
        return all(
            stride * group.block_size == block_stride and lengths == {num_tokens * stride}
            for overlap in self.bases
            for side, group, block_stride in zip(
                overlap.sides, self.groups, self.block_strides, strict=True
            )
            for stride in map(side.token_stride_of, side.parts)
        )


def group_overlaps(
    groups: tuple[Group, Group], pairs: Iterable[tuple[Region, Region, Heads]]
) -> list[OverlapGroup]:
    """Sort pairs of regions of two groups, each with the heads to read, by their block strides."""
    by_strides: dict[tuple[int, int], dict[Overlap, list[tuple[int, int]]]] = {}
    for local, remote, heads in pairs:
        same_strides = by_strides.setdefault((local.block_stride, remote.block_stride), {})
        overlap = Overlap((_anywhere(local), _anywhere(remote)), heads)
        same_strides.setdefault(overlap, []).append((local.base, remote.base))
    return [
        OverlapGroup(groups, strides, {key: np.array(bases).T for key, bases in overlaps.items()})
        for strides, overlaps in by_strides.items()
    ]


def _anywhere(region: Region) -> Region:
    """The region, whatever its layer's name and its base are."""
    return replace(region, layer="", base=1)


def _check_num_pieces(pieces: int) -> None:
    if pieces > MAX_PIECES:
        raise IncompatiblePeer(f"a block has {pieces} pieces or more; allowed: {MAX_PIECES}")
