"""Which ranks of two engines exchange KV, and why two engines cannot.

A rank holds, for each of its layers, a range of the model's KV heads, of all tokens or of a stripe.
Tensor parallelism divides the heads, and copies them if there are more ranks than heads. Pipeline
parallelism divides the layers, decode context parallelism the tokens. Nothing here distinguishes
them: `routes` covers the heads of a reader with those of the remote ranks, for each stripe that
both have.

`layout_mismatches` and the functions beside it name each field that differs, with both values, so
that an operator knows which flag to change. The engines may differ in tensor and pipeline parallel
size, block size, physical order and grouping of layers. The remote engine may have more layers than
the local one, which reads. Ranks are numbered `pp_rank * tp + tp_rank`.
"""

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from nixl_kv.geometry.layout import (
    ALL_TOKENS,
    WINDOW_EDGE,
    CacheLayout,
    Group,
    Stripe,
    check_range,
    num_token_segments,
)
from nixl_kv.geometry.plan import Heads
from nixl_kv.ids import Rank

SHOWN_CHARACTERS: Final = 100
"""Of a value that differs: it may be a peer's, and as long as a message may be."""
MAX_TOKEN_SEGMENTS: Final = 512
"""Per period of two block sizes. Each segment has rows of its own, so more make a plan slow."""
MAX_STRIPED_SEGMENTS: Final = 4096
"""The same if ranks divide the tokens, perhaps one by one."""


class Holding(NamedTuple):
    """What one rank holds of a layer: a half-open range of the model's KV heads, and a stripe."""

    heads: Heads
    stripe: Stripe = ALL_TOKENS


Holdings: TypeAlias = Mapping[str, Holding]
"""By layer."""


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
        return self.tp * self.pp


def holdings(layout: CacheLayout) -> Holdings:
    held: dict[str, Holding] = {}
    for group in layout.groups:
        # Layers with the same heads share one record, which `assign` recognizes by identity.
        by_heads: dict[tuple[int, int], Holding] = {}
        for region in group.regions:
            key = region.first_head, region.num_heads
            holding = by_heads.get(key)
            if holding is None:
                holding = by_heads[key] = Holding(region.heads, group.stripe)
            held[region.layer] = holding
    return held


@dataclass(frozen=True)
class Route:
    """A remote rank and its readers. If it has none, the rank with this route must release it."""

    remote_rank: Rank
    readers: tuple[Rank, ...]
    share: Mapping[str, Heads] = field(default_factory=dict)  # what this rank reads, by layer


def routes(
    reader: Rank, readers: Sequence[Holdings], remotes: Sequence[Holdings]
) -> tuple[Route, ...]:
    """The routes of one rank of a decode engine to the ranks of a prefill engine.

    Every rank of the decode engine computes the same assignment from the same records, so each can
    tell a remote rank who its readers are. Extra copies have no reader: the rank `remote rank mod
    number of readers` releases them.

    Args:
        reader: this rank.
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

    A reader reads each head of each of its tokens once, from as few remote ranks as it can. Readers
    of the same heads are spread over the remote ranks that have copies of them.

    Raises:
        ValueError: if a reader holds heads that no remote rank holds.
    """
    # Layers that all ranks of both engines hold in the same way are assigned together. Compare
    # records by identity first: hashing 4,000 of them takes milliseconds.
    alike: dict[tuple[int, ...], list[str]] = {}
    engines = [*readers, *remotes]
    for layer in sorted(set().union(*readers)):
        alike.setdefault(tuple([id(held.get(layer)) for held in engines]), []).append(layer)
    layers: dict[tuple[tuple[Holding | None, ...], ...], list[str]] = {}
    for names in alike.values():
        pattern = tuple(tuple(held.get(names[0]) for held in side) for side in (readers, remotes))
        layers.setdefault(pattern, []).extend(names)
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
    """How many remote ranks hold the same range of a layer, on average."""
    ranges = [holding for holding in held if holding]
    return len(ranges) / len(set(ranges)) if ranges else 0


def _cover_stripes(
    wanted: Holding,
    held: Sequence[Holding | None],
    reader: int,
    already_read: Container[Rank],
    num_readers: Mapping[Rank, int],
) -> Iterator[tuple[Rank, Heads]]:
    """Cover the heads of a reader, for each remote stripe that shares tokens with its own."""
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

    The best is a rank that is read anyway, then the one whose range ends last, then the one with
    the fewest readers. Among equal copies, reader number n starts with copy number n.
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


# --- what differs


@dataclass(frozen=True)
class Mismatch:
    """A field that differs."""

    field: str
    local: object
    remote: object

    def __str__(self) -> str:
        return f"{self.field} is {_short(self.local)} here and {_short(self.remote)} there"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def model_mismatches(local: Mapping[str, str], remote: Mapping[str, str]) -> list[Mismatch]:
    """Compare the facts about two models, field by field."""
    names = sorted(set(local) | set(remote))
    return [
        Mismatch(name, local.get(name), remote.get(name))
        for name in names
        if local.get(name) != remote.get(name)
    ]


def extra_mismatches(local: Mapping[str, str], remote: Mapping[str, str]) -> list[Mismatch]:
    """Compare what two engines cache besides their models: prefill needs all that decode has."""
    return [
        Mismatch(name, text, remote.get(name))
        for name, text in sorted(local.items())
        if remote.get(name) != text
    ]


def layout_mismatches(
    local: Sequence[CacheLayout],
    remote: Sequence[CacheLayout],
    *,
    local_pieces: "Pieces | None" = None,
) -> list[Mismatch]:
    """Every reason why this engine cannot read another one, the most general first.

    Args:
        local: the layouts of all ranks of this engine.
        remote: the layouts of all ranks of the other engine.
        local_pieces: `pieces` of the local layouts, if the caller keeps them.
    """
    mine = pieces(local) if local_pieces is None else local_pieces
    theirs = pieces(remote)
    mismatches: list[Mismatch] = []
    unmatched = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if unmatched[0]:
        mismatches.append(Mismatch("layer that one side lacks", *map(_shorten, unmatched)))
    shared = [_shorten(sorted(_shared(side))) for side in (local, remote)]
    if shared != ["nothing", "nothing"]:
        mismatches.append(Mismatch("layer that several pipeline stages have", *shared))
    # Most layers of a model are alike, so one comparison covers all of them.
    alike: dict[tuple[tuple[_Piece, ...], tuple[_Piece, ...]], list[str]] = {}
    for layer in sorted(mine.keys() & theirs.keys()):
        alike.setdefault((tuple(mine[layer]), tuple(theirs[layer])), []).append(layer)
    layers: dict[Mismatch, list[str]] = {}
    for (here, there), names in alike.items():
        for mismatch in _layer_mismatches(_Layer.of(here), _Layer.of(there)):
            layers.setdefault(mismatch, []).extend(names)
    for mismatch, names in sorted(layers.items(), key=lambda item: min(item[1])):
        field = f"{mismatch.field} of {_shorten(sorted(names))}"
        mismatches.append(Mismatch(field, mismatch.local, mismatch.remote))
    return mismatches


@dataclass(frozen=True)
class _Kind:
    """What a layer is on one rank. The ranks of an engine should agree, but a peer's may not."""

    lengths: tuple[int, ...]
    group: Group  # without whatever may differ between ranks


_Segment: TypeAlias = tuple[int, int, str]
"""A half-open range of heads, and a text that applies to all of them."""


@dataclass
class _Layer:
    """A layer in one engine, collected from all ranks."""

    kinds: set[_Kind] = field(default_factory=set)
    elements: set[str] = field(default_factory=set)
    held: dict[Stripe, set[_Segment]] = field(default_factory=dict)
    scales: set[_Segment] = field(default_factory=set)

    @classmethod
    def of(cls, pieces: Iterable["_Piece"]) -> "_Layer":
        layer = cls()
        for first, last, lengths, element, scales, group in pieces:
            bare = Stripe(group.stripe.count, 0, group.stripe.width)
            sizes = group.block_size, group.blocks_per_entry, group.blocks_per_entry
            layer.kinds.add(_Kind(lengths, Group(*sizes, (), group.window, bare)))
            layer.elements.add(element)
            layer.held.setdefault(group.stripe, set()).add((first, last, ""))
            if len(scales) <= 1:
                layer.scales.add((first, last, "".join(scales)))
            else:
                layer.scales.update((n, n + 1, text) for n, text in enumerate(scales, first))
        return layer

    @property
    def heads(self) -> tuple[Heads, ...]:
        """The heads that the engine has of any token, merged."""
        held = set().union(*self.held.values())
        return tuple((first, last) for first, last, _ in _merge(held))

    @property
    def stripes(self) -> str:
        """What is wrong with the ranks' token stripes; 'complete' if nothing is."""
        number, width = next((stripe.count, stripe.width) for stripe in self.held)
        heads = {tuple(_merge(held)) for held in self.held.values()}
        if {Stripe(number, place, width) for place in range(number)} != self.held.keys():
            return ", ".join(sorted(map(_stripe_words, self.held)))
        return "complete" if len(heads) == 1 else f"of different heads, {sorted(heads)}"


def _merge(segments: Iterable[_Segment]) -> list[_Segment]:
    """The same in as few segments as possible, however ranks divide or copy the heads."""
    merged: list[_Segment] = []
    for first, last, text in sorted(segments):
        if merged and first <= merged[-1][1] and text == merged[-1][2]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]), text)
        else:
            merged.append((first, last, text))
    return merged


class _Sizes:
    """The block sizes of a group. `pieces` makes equal ones one object, which hashes fast."""

    def __init__(self, group: Group) -> None:
        self.block_size = group.block_size
        self.blocks_per_entry = group.blocks_per_entry
        self.window = group.window
        self.stripe = group.stripe


_Piece: TypeAlias = tuple[int, int, tuple[int, ...], str, tuple[str, ...], _Sizes]
"""A layer on one rank, without addresses: first and last head, lengths of the parts, element type,
scales, block sizes."""


Pieces: TypeAlias = Mapping[str, Sequence[_Piece]]
"""By layer: a piece for each rank that has it."""


def pieces(layouts: Sequence[CacheLayout]) -> Pieces:
    """Summarize an engine's caches for `layout_mismatches`. 16 ranks of 126 layers take 4 ms."""
    result: dict[str, list[_Piece]] = {}
    known: dict[tuple[int, int, int, Stripe], _Sizes] = {}
    for layout in layouts:
        for group in layout.groups:
            key = group.block_size, group.blocks_per_entry, group.window, group.stripe
            sizes = known.setdefault(key, _Sizes(group))
            for r in group.regions:
                lengths = tuple([part.count * part.length for part in r.parts])
                last = r.first_head + r.num_heads
                piece = (r.first_head, last, lengths, r.element, r.scales, sizes)
                result.setdefault(r.layer, []).append(piece)
    return result


def _shared(layouts: Sequence[CacheLayout]) -> set[str]:
    """Layer names that different pipeline stages use: ranks with copies have all layers in common.

    vLLM numbers the layers of some draft models like layers of another stage.
    """
    held = {frozenset(r.layer for g in layout.groups for r in g.regions) for layout in layouts}
    counts = Counter(itertools.chain.from_iterable(held))
    return {layer for layer, count in counts.items() if count > 1}


def _layer_mismatches(mine: _Layer, theirs: _Layer) -> list[Mismatch]:
    # With an incomplete set of stripes, some tokens would be read by no rank.
    if not mine.stripes == theirs.stripes == "complete":
        return [Mismatch("tokens that ranks hold", mine.stripes, theirs.stripes)]
    if len(mine.kinds) > 1 or len(theirs.kinds) > 1:
        field = "number of kinds of cache among the ranks"
        return [Mismatch(field, len(mine.kinds), len(theirs.kinds))]
    (here,), (there,) = mine.kinds, theirs.kinds
    elements = [", ".join(sorted(side.elements)) for side in (mine, theirs)]
    heads = _compare("number of KV heads", _count_heads(mine.heads), _count_heads(theirs.heads))
    return [
        *_compare("KV cache dtype", *elements),
        *_compare("bytes per head", here.lengths, there.lengths),
        *heads,
        *([] if heads else _scale_mismatches(mine.scales, theirs.scales)),
        *_block_mismatches(here.group, there.group),
    ]


def _scale_mismatches(mine: Iterable[_Segment], theirs: Iterable[_Segment]) -> list[Mismatch]:
    """Compare scales per head; both sides have the same heads."""
    here, there = set(_merge(mine)), set(_merge(theirs))
    return _compare("KV scales", _words(here - there), _words(there - here))


def _words(segments: Iterable[_Segment]) -> str:
    return "; ".join(
        f"{text or 'none'} (heads {first} to {last - 1})" for first, last, text in sorted(segments)
    )


def _compare(field: str, mine: object, theirs: object) -> list[Mismatch]:
    return [] if mine == theirs else [Mismatch(field, mine, theirs)]


def _block_mismatches(mine: Group, theirs: Group) -> list[Mismatch]:
    mismatches = []
    # Prefill must keep all tokens that decode's window reaches.
    if theirs.window and not 0 < mine.window <= theirs.window:
        mismatches.append(Mismatch("sliding window", mine.window or None, theirs.window))
    is_striped = max(mine.stripe.count, theirs.stripe.count) > 1
    limit = MAX_STRIPED_SEGMENTS if is_striped else MAX_TOKEN_SEGMENTS
    if num_token_segments(mine, theirs) > limit:
        interleave = " or interleave" if is_striped else ""
        field = f"block size{interleave} (makes more than {limit} token segments)"
        mismatches.append(Mismatch(field, _block_words(mine), _block_words(theirs)))
    # Decode fills its blocks from their first token on, so prefill must have kept that token.
    if theirs.window and WINDOW_EDGE % mine.entry_size and theirs.entry_size % mine.entry_size:
        field = f"block size (for a sliding window it must divide {WINDOW_EDGE} or prefill's)"
        mismatches.append(Mismatch(field, mine.entry_size, theirs.entry_size))
    return mismatches


def _block_words(group: Group) -> object:
    if group.stripe == ALL_TOKENS:
        return group.block_size
    return f"{group.block_size}, of {_stripe_words(group.stripe)}"


def _stripe_words(stripe: Stripe) -> str:
    begin = stripe.place * stripe.width
    return f"tokens {begin} to {begin + stripe.width - 1} of every {stripe.period}"


def _count_heads(heads: tuple[Heads, ...]) -> object:
    """The number of heads; if some are missing, the ranges of the others."""
    return heads[0][1] if len(heads) == 1 and heads[0][0] == 0 else heads


def _shorten(layers: Sequence[str]) -> str:
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"{layers[0]}{more}" if layers else "nothing"
