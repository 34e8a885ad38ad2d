"""Which ranks exchange KV with which, from nothing but what each of them holds.

A rank holds, of each of its layers, a range of the model's KV heads. Tensor parallelism cuts the
heads, and copies them where there are more ranks than heads; pipeline parallelism cuts the layers.
Here neither has a name: a reader covers what it lacks from what the sources hold.

Ranks are numbered `pp_rank * tp + tp_rank`.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.runs import Heads
from nixl_kv.ids import Rank

Holding: TypeAlias = Mapping[str, Heads]
"""What one rank holds: for each of its layers a half-open range of the model's KV heads."""


@dataclass(frozen=True)
class Shape:
    """How an engine is cut: `tp` ranks side by side in each of `pp` pipeline stages."""

    tp: int
    pp: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if not 1 <= value <= 1024:  # noqa: PLR2004
                raise ValueError(f"{name} is {value}; allowed: 1 to 1024")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp


def holding(layout: CacheLayout) -> Holding:
    """What a rank with this cache holds."""
    return {region.layer: region.heads for group in layout.groups for region in group.regions}


@dataclass(frozen=True)
class Route:
    """A source that somebody reads, or that one reader must release because nobody does."""

    source: Rank
    readers: tuple[Rank, ...]  # none: to be released
    share: Mapping[str, Heads] = field(default_factory=dict)  # what is read, by layer


def routes(
    reader: Rank, readers: Sequence[Holding], sources: Sequence[Holding]
) -> tuple[Route, ...]:
    """What one rank has to do with each rank of a prefill engine.

    Every rank of the decode engine computes the same assignment from the same records, so that
    each source can be told who its readers are. A source that nobody reads (a copy too many) is
    released by the reader `source mod number of readers`.

    Args:
        reader: the rank that asks.
        readers: what each rank of its engine holds.
        sources: what each rank of the other engine holds.

    Raises:
        ValueError: if a reader holds heads that no source does.
    """
    shares = assign(readers, sources)
    found = []
    for number in range(len(sources)):
        source = Rank(number)
        reading = tuple(Rank(rank) for rank, share in enumerate(shares) if source in share)
        if reader in reading:
            found.append(Route(source, reading, shares[reader][source]))
        elif not reading and number % len(readers) == reader:
            found.append(Route(source, ()))
    return tuple(found)


def assign(
    readers: Sequence[Holding], sources: Sequence[Holding]
) -> list[dict[Rank, dict[str, Heads]]]:
    """For each reader, which heads of which layers it reads from which source.

    Each head is read once by each reader that holds it. Readers of the same heads are spread over
    the sources that hold copies of them, and a reader goes to as few sources as it can.

    Raises:
        ValueError: if a reader holds heads that no source does.
    """
    layers: dict[tuple[tuple[Heads | None, ...], tuple[Heads | None, ...]], list[str]] = {}
    for layer in sorted({layer for held in readers for layer in held}):
        pattern = _column(readers, layer), _column(sources, layer)
        layers.setdefault(pattern, []).append(layer)
    shares: list[dict[Rank, dict[str, Heads]]] = [{} for _ in readers]
    busy: Counter[Rank] = Counter()  # how many readers each source has
    # Layers that leave the least choice come first: the others follow to the same sources.
    for (wanted, held), names in sorted(layers.items(), key=lambda item: _copies(item[0][1])):
        for reader, heads in enumerate(wanted):
            share = shares[reader]
            turn = Turn(reader, share, busy)
            for source, part in _cover(heads or (0, 0), held, turn):
                busy[source] += source not in share
                share.setdefault(source, {}).update(dict.fromkeys(names, part))
    return shares


def _copies(held: Sequence[Heads | None]) -> float:
    """On how many sources each of a layer's ranges stands, on average."""
    ranges = [heads for heads in held if heads]
    return len(ranges) / len(set(ranges)) if ranges else 0


def _column(holdings: Sequence[Holding], layer: str) -> tuple[Heads | None, ...]:
    return tuple(held.get(layer) for held in holdings)


@dataclass(frozen=True)
class Turn:
    """Whose turn it is to choose among sources, and what counts for the choice."""

    reader: int
    known: Container[Rank]  # whom it reads anyway
    busy: Mapping[Rank, int]  # how many readers each source has


def _cover(wanted: Heads, held: Sequence[Heads | None], turn: Turn) -> list[tuple[Rank, Heads]]:
    """Cover a range from left to right, each time by the source that is best for what comes next.

    Best is who is read anyway, then who reaches farthest, then who has the fewest readers; of
    equal copies the first reader takes the first one, the second the second.
    """
    found: list[tuple[Rank, Heads]] = []
    head = wanted[0]
    while head < wanted[1]:
        able = [(Rank(n), h[1]) for n, h in enumerate(held) if h and h[0] <= head < h[1]]
        if not able:
            raise ValueError(f"no source holds KV head {head}")
        able = able[turn.reader % len(able) :] + able[: turn.reader % len(able)]
        source, reach = max(
            able, key=lambda a: (a[0] in turn.known, min(a[1], wanted[1]), -turn.busy[a[0]])
        )
        end = min(reach, wanted[1])
        found.append((source, (head, end)))
        head = end
    return found
