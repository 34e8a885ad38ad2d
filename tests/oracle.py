"""What a plan has to do, byte by byte, from nothing but numpy's own reshape and transpose.

A rank's memory is described by a physical order: the letters of one big array from the outermost
axis to the innermost. L layers, B blocks, H heads, N tokens, C content; with a "2" K and V stand
apart, without one V follows K inside of C.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.plan import Plan, Reads

APART = ("L2BHNC", "L2BNHC", "LB2HNC", "LB2NHC")
DEVICE = 3


@dataclass(frozen=True)
class Shape:
    """One group of one rank. `pad` bytes after each content belong to nobody."""

    layers: int = 1
    blocks: int = 1
    heads: int = 1
    tokens: int = 1
    key: int = 1
    value: int = 1
    pad: int = 0
    first_head: int = 0
    per_entry: int = 1


class Bytes:
    """Where each byte of one group stands: `parts[part][layer, block, head, token]`."""

    def __init__(self, order: str, shape: Shape, base: int) -> None:
        apart = "2" in order
        content = max(shape.key, shape.value) if apart else shape.key + shape.value
        sizes = {
            "2": 2,
            "L": shape.layers,
            "B": shape.blocks,
            "H": shape.heads,
            "N": shape.tokens,
            "C": content + shape.pad,
        }
        lengths = [sizes[letter] for letter in order]
        self.shape = shape
        self.base = base
        self.size = int(np.prod(lengths))
        numbers = np.arange(base, base + self.size).reshape(lengths)
        if apart:
            both = numbers.transpose([order.index(letter) for letter in "2LBHNC"])
            self.parts = [both[0, ..., : shape.key], both[1, ..., : shape.value]]
        else:
            all_of_it = numbers.transpose([order.index(letter) for letter in "LBHNC"])
            end = shape.key + shape.value
            self.parts = [all_of_it[..., : shape.key], all_of_it[..., shape.key : end]]

    def group(self, *, backwards: bool = False) -> Group:
        """The same for the planner, in strides; layers in either order."""
        shape, (keys, values) = self.shape, self.parts
        block, head, token = (stride // keys.itemsize for stride in keys.strides[1:4])
        origin = (0, 0, 0, 0, 0)
        regions = [
            Region(
                layer=f"layer.{layer}",
                base=int(keys[layer, 0, 0, 0, 0]),
                block_stride=block,
                head_stride=head,
                token_stride=token,
                first_head=shape.first_head,
                num_heads=shape.heads,
                parts=(
                    Part(0, shape.key),
                    Part(int(values[origin] - keys[origin]), shape.value),
                ),
            )
            for layer in range(shape.layers)
        ]
        ordered = tuple(reversed(regions) if backwards else regions)
        return Group(shape.tokens, shape.blocks, shape.per_entry, ordered)


def layout(groups: Sequence[Bytes], *, backwards: bool = False, device: int = 0) -> CacheLayout:
    """One rank; each group's memory is registered in one piece."""
    spans = {(group.base, group.size) for group in groups}
    return CacheLayout(
        tuple(group.group(backwards=backwards) for group in groups),
        "uint8",
        "VRAM",
        device,
        tuple(Span(base, size) for base, size in sorted(spans)),
    )


def wanted(mine: Bytes, theirs: Bytes, blocks: Iterable[tuple[int, int]]) -> np.ndarray:
    """The pairs (local byte, remote byte) of some pairs of blocks, shape (n, 2)."""
    ours, there = mine.shape, theirs.shape
    heads = sorted(
        set(range(ours.first_head, ours.first_head + ours.heads))
        & set(range(there.first_head, there.first_head + there.heads))
    )
    found = [np.empty((0, 2), dtype=np.int64)]
    for local, remote in blocks:
        for head in heads:
            for to, source in zip(mine.parts, theirs.parts, strict=True):
                here = to[:, local, head - ours.first_head]
                away = source[:, remote, head - there.first_head]
                found.append(np.stack([here.ravel(), away.ravel()], axis=1))
    return np.concatenate(found)


def pieces(rows: np.ndarray) -> np.ndarray:
    """(row, address, length) of each piece of a list of rows, in the order of their numbers."""
    table = rows.astype(np.int64)
    return np.array(
        [
            (number, address + step * stride, length)
            for number, (address, length, _, stride, count) in enumerate(table.tolist())
            for step in range(count)
        ]
    )


def named(plan: Plan, reads: Reads) -> tuple[np.ndarray, np.ndarray]:
    """The pieces that a request names, on both sides."""
    return pieces(plan.local)[reads.local], pieces(plan.remote)[reads.remote]


def moved(plan: Plan, reads: Reads) -> np.ndarray:
    """The pairs (local byte, remote byte) that a request copies, shape (n, 2)."""
    local, remote = named(plan, reads)
    assert np.array_equal(local[:, 2], remote[:, 2]), "pieces of different lengths"
    lengths = local[:, 2]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.stack(
        [np.repeat(local[:, 1], lengths) + within, np.repeat(remote[:, 1], lengths) + within],
        axis=1,
    )


def runs_within_rows(plan: Plan, reads: Reads) -> int:
    """What merging makes of the named pieces, in the order they are named, inside each row."""
    local, remote = (side.tolist() for side in named(plan, reads))
    runs = 0
    before: tuple[list[int], list[int]] | None = None
    for here, there in zip(local, remote, strict=True):
        runs += before is None or not (_follows(before[0], here) and _follows(before[1], there))
        before = (here, there)
    return runs


def _follows(before: list[int], after: list[int]) -> bool:
    return before[0] == after[0] and before[1] + before[2] == after[1]


def fewest_runs(pairs: np.ndarray) -> int:
    """In how few runs these pairs of bytes can be copied at all."""
    ordered = pairs[np.argsort(pairs[:, 0])]
    if not len(ordered):
        return 0
    return 1 + int(np.count_nonzero((np.diff(ordered, axis=0) != 1).any(axis=1)))
