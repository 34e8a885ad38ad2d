"""Which ranks exchange KV with which, from nothing but what each rank holds.

A rank holds, for each of its layers, a range of the model's KV heads, of all tokens or of a stripe
of them. Tensor parallelism divides the heads, and copies them where there are more ranks than
heads. Pipeline parallelism divides the layers, context parallelism the tokens. No function here
distinguishes them: a reader covers its own heads from those that the remote ranks hold, for each
stripe of the remote ranks that meets its own.

Ranks are numbered `pp_rank * tp + tp_rank`.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from nixl_kv.geometry.layout import ALL_TOKENS, CacheLayout, Stripe, check_range
from nixl_kv.geometry.runs import Heads
from nixl_kv.ids import Rank


class Holding(NamedTuple):
    """What one rank holds of a layer: a half-open range of the model's KV heads, a token stripe."""

    heads: Heads
    stripe: Stripe = ALL_TOKENS


Holdings: TypeAlias = Mapping[str, Holding]
"""What one rank holds, by layer."""


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


def holdings(layout: CacheLayout) -> Holdings:
    """What a rank with this cache holds."""
    return {
        region.layer: Holding(region.heads, group.stripe)
        for group in layout.groups
        for region in group.regions
    }


@dataclass(frozen=True)
class Route:
    """A remote rank that has readers, or that one reader must release because it has none."""

    remote_rank: Rank
    readers: tuple[Rank, ...]  # none: release it
    share: Mapping[str, Heads] = field(default_factory=dict)  # what is read, by layer


def routes(
    reader: Rank, readers: Sequence[Holdings], remotes: Sequence[Holdings]
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
    readers: Sequence[Holdings], remotes: Sequence[Holdings]
) -> list[dict[Rank, dict[str, Heads]]]:
    """For each reader, which heads of which layers it reads from which remote rank.

    Each head of each token is read once by each reader that holds it. Of what it is to read from a
    rank, a reader reads the tokens that both hold. Readers of the same heads are spread over the
    remote ranks that hold copies of them. A reader reads from as few remote ranks as it can.

    Raises:
        ValueError: if a reader holds heads that no remote rank holds.
    """
    # Layers that all ranks of both engines hold alike are assigned together.
    layers: dict[tuple[tuple[Holding | None, ...], ...], list[str]] = {}
    for layer in sorted({layer for held in readers for layer in held}):
        pattern = tuple(tuple(held.get(layer) for held in side) for side in (readers, remotes))
        layers.setdefault(pattern, []).append(layer)
    shares: list[dict[Rank, dict[str, Heads]]] = [{} for _ in readers]
    num_readers: Counter[Rank] = Counter()  # of each remote rank
    # Layers with the fewest copies come first: the others then use the same remote ranks.
    for (wanted, held), names in sorted(layers.items(), key=lambda item: _num_copies(item[0][1])):
        for reader, holding in enumerate(wanted):
            if holding is None:
                continue
            share = shares[reader]
            for remote_rank, part in _cover_stripes(holding, held, reader, share, num_readers):
                num_readers[remote_rank] += remote_rank not in share
                share.setdefault(remote_rank, {}).update(dict.fromkeys(names, part))
    return shares


def _num_copies(held: Sequence[Holding | None]) -> float:
    """How many remote ranks hold each of a layer's ranges, on average."""
    ranges = [holding for holding in held if holding]
    return len(ranges) / len(set(ranges)) if ranges else 0


def _cover_stripes(
    wanted: Holding,
    held: Sequence[Holding | None],
    reader: int,
    already_read: Container[Rank],
    num_readers: Mapping[Rank, int],
) -> Iterator[tuple[Rank, Heads]]:
    """Cover what a reader holds, for each stripe of the remote ranks that has tokens of its own."""
    stripes = {holding.stripe for holding in held if holding}
    for stripe in sorted(stripes or {ALL_TOKENS}, key=lambda stripe: stripe.place):
        if stripe.meets(wanted.stripe):
            heads = [one.heads if one and one.stripe == stripe else None for one in held]
            yield from _cover(wanted.heads, heads, reader, already_read, num_readers)


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
