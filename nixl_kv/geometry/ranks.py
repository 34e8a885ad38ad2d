"""Which ranks exchange KV with which, from nothing but the heads that each rank holds.

A rank holds, for each of its layers, a range of the model's KV heads. Tensor parallelism divides
the heads, and copies them where there are more ranks than heads. Pipeline parallelism divides the
layers. No function here distinguishes the two: a reader covers its own heads from those that the
remote ranks hold.

Ranks are numbered `pp_rank * tp + tp_rank`.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from nixl_kv.geometry.layout import CacheLayout, check_range
from nixl_kv.geometry.runs import Heads
from nixl_kv.ids import Rank

HeldHeads: TypeAlias = Mapping[str, Heads]
"""What one rank holds: for each of its layers a half-open range of the model's KV heads."""


@dataclass(frozen=True)
class ParallelShape:
    """How an engine is divided: `tp` ranks in each of `pp` pipeline stages."""

    tp: int
    pp: int

    def __post_init__(self) -> None:
        check_range("tp", self.tp, high=1025)
        check_range("pp", self.pp, high=1025)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp


def held_heads(layout: CacheLayout) -> HeldHeads:
    """What a rank with this cache holds."""
    return {region.layer: region.heads for group in layout.groups for region in group.regions}


@dataclass(frozen=True)
class Route:
    """A remote rank that has readers, or that one reader must release because it has none."""

    remote_rank: Rank
    readers: tuple[Rank, ...]  # none: release it
    share: Mapping[str, Heads] = field(default_factory=dict)  # what is read, by layer


def routes(
    reader: Rank, readers: Sequence[HeldHeads], remotes: Sequence[HeldHeads]
) -> tuple[Route, ...]:
    """What one rank of a decode engine does with each rank of a prefill engine.

    Every rank of the decode engine computes the same assignment from the same records, so that
    each of them can tell a remote rank who its readers are. A remote rank that nobody reads (an
    extra copy) is released by the reader `remote rank mod number of readers`.

    Args:
        reader: the rank that asks.
        readers: what each rank of its engine holds.
        remotes: what each rank of the other engine holds.

    Raises:
        ValueError: if a reader holds heads that no remote rank holds.
    """
    shares = assign(readers, remotes)
    result = []
    for remote_rank in map(Rank, range(len(remotes))):
        reading = tuple(Rank(rank) for rank, share in enumerate(shares) if remote_rank in share)
        if reader in reading:
            result.append(Route(remote_rank, reading, shares[reader][remote_rank]))
        elif not reading and remote_rank % len(readers) == reader:
            result.append(Route(remote_rank, ()))
    return tuple(result)


def assign(
    readers: Sequence[HeldHeads], remotes: Sequence[HeldHeads]
) -> list[dict[Rank, dict[str, Heads]]]:
    """For each reader, which heads of which layers it reads from which remote rank.

    Each head is read once by each reader that holds it. Readers of the same heads are spread over
    the remote ranks that hold copies of them. A reader reads from as few remote ranks as it can.

    Raises:
        ValueError: if a reader holds heads that no remote rank holds.
    """
    # Layers with the same heads on all ranks of both engines are assigned together.
    layers: dict[tuple[tuple[Heads | None, ...], tuple[Heads | None, ...]], list[str]] = {}
    for layer in sorted({layer for held in readers for layer in held}):
        pattern = _heads_of_layer(readers, layer), _heads_of_layer(remotes, layer)
        layers.setdefault(pattern, []).append(layer)
    shares: list[dict[Rank, dict[str, Heads]]] = [{} for _ in readers]
    num_readers: Counter[Rank] = Counter()  # of each remote rank
    # Layers with the fewest copies come first: the others then use the same remote ranks.
    for (wanted, held), names in sorted(layers.items(), key=lambda item: _num_copies(item[0][1])):
        for reader, heads in enumerate(wanted):
            share = shares[reader]
            cover = _cover(heads or (0, 0), held, reader, share, num_readers)
            for remote_rank, part in cover:
                num_readers[remote_rank] += remote_rank not in share
                share.setdefault(remote_rank, {}).update(dict.fromkeys(names, part))
    return shares


def _num_copies(held: Sequence[Heads | None]) -> float:
    """How many remote ranks hold each of a layer's ranges, on average."""
    ranges = [heads for heads in held if heads]
    return len(ranges) / len(set(ranges)) if ranges else 0


def _heads_of_layer(ranks: Sequence[HeldHeads], layer: str) -> tuple[Heads | None, ...]:
    return tuple(held.get(layer) for held in ranks)


def _cover(
    wanted: Heads,
    held: Sequence[Heads | None],
    reader: int,
    already_read: Container[Rank],
    num_readers: Mapping[Rank, int],
) -> list[tuple[Rank, Heads]]:
    """Cover a range from left to right, each time by the best remote rank for the next head.

    Best is a rank that is read anyway, then the one whose range ends last, then the one with the
    fewest readers. Of equal copies the first reader chooses the first, the second the second.
    """
    cover: list[tuple[Rank, Heads]] = []
    head = wanted[0]
    while head < wanted[1]:
        able = [(Rank(n), h[1]) for n, h in enumerate(held) if h and h[0] <= head < h[1]]
        if not able:
            raise ValueError(f"no remote rank holds KV head {head}")
        able = able[reader % len(able) :] + able[: reader % len(able)]
        remote_rank, end = max(
            ((rank, min(end, wanted[1])) for rank, end in able),
            key=lambda a: (a[0] in already_read, a[1], -num_readers[a[0]]),
        )
        cover.append((remote_rank, (head, end)))
        head = end
    return cover
