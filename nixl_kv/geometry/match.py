"""Matches two engines: the ranks that exchange KV, and the reasons why two engines cannot.

A rank holds, for each of its layers, a range of the model's KV heads, of all tokens or of a stripe.
Tensor parallelism divides the heads, and copies them if there are more ranks than heads. Pipeline
parallelism divides the layers, decode context parallelism the tokens. Nothing here distinguishes
them: `routes` covers the heads of a reader with those of the remote ranks, for each stripe that
both have.

`layout_mismatches` and the functions beside it name each field that differs, with both values, so
that an operator knows which flag to change. The remote engine may have more layers than the local
one, which reads. Ranks are numbered `pp_rank * tp + tp_rank`.
"""

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from nixl_kv.errors import printable
from nixl_kv.geometry.layout import (
    ALL_TOKENS,
    WINDOW_EDGE,
    CacheLayout,
    Group,
    Stripe,
    check_range,
    num_token_segments,
)
from nixl_kv.geometry.plan import Heads, Share
from nixl_kv.ids import Rank

# Of a value that differs: it may be a peer's, and as long as a message may be.
SHOWN_CHARACTERS: Final = 100
# Per period of two block sizes. Each segment has rows of its own, so more make a plan slow.
MAX_TOKEN_SEGMENTS: Final = 512
# The same if ranks divide the tokens, perhaps one by one.
MAX_STRIPED_SEGMENTS: Final = 4096


class Holding(NamedTuple):
    """The part of a layer that one rank holds."""

    heads: Heads
    stripe: Stripe = ALL_TOKENS


Holdings: TypeAlias = Mapping[str, Holding]  # by layer


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
        by_heads: dict[Heads, Holding] = {}
        for region in group.regions:
            key = region.first_head, region.num_heads
            if key not in by_heads:
                by_heads[key] = Holding(region.heads, group.stripe)
            held[region.layer] = by_heads[key]
    return held


@dataclass(frozen=True)
class Route:
    """A remote rank and its readers. If it has none, the rank with this route must release it."""

    remote_rank: Rank
    readers: tuple[Rank, ...]
    share: Share = field(default_factory=dict)  # read by the rank with this route


def routes(
    reader: Rank, readers: Sequence[Holdings], remotes: Sequence[Holdings]
) -> tuple[Route, ...]:
    """The routes of one rank of a decode engine to the ranks of a prefill engine; see `assign`.

    Every rank of the decode engine computes the same assignment from the same records, so each can
    tell a remote rank who its readers are. Extra copies have no reader: the rank `remote rank mod
    number of readers` releases them.
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
    """Divide the heads of all layers: for each reader, its share of each remote rank.

    A reader reads each head of each of its tokens once, from as few remote ranks as it can. Readers
    of the same heads are spread over the remote ranks that have copies of them. A ValueError names
    a head that no remote rank holds.
    """
    # Layers that all ranks of both engines hold in the same way are assigned together. Compare
    # records by identity: hashing 4,000 of them takes milliseconds.
    alike: dict[tuple[int, ...], list[str]] = {}
    engines = [*readers, *remotes]
    for layer in sorted(set().union(*readers)):
        alike.setdefault(tuple([id(held.get(layer)) for held in engines]), []).append(layer)

    def num_copies(names: Sequence[str]) -> float:
        held = [remote[names[0]] for remote in remotes if names[0] in remote]
        return len(held) / len(set(held)) if held else 0

    shares: list[dict[Rank, dict[str, Heads]]] = [{} for _ in readers]
    num_readers: Counter[Rank] = Counter()  # of each remote rank
    # Layers with the fewest copies come first: the others then use the same remote ranks.
    for names in sorted(alike.values(), key=num_copies):
        held = [remote.get(names[0]) for remote in remotes]
        stripes = {holding.stripe for holding in held if holding} or {ALL_TOKENS}
        for reader, share in enumerate(shares):
            wanted = readers[reader].get(names[0])
            for stripe in sorted(stripes, key=lambda each: each.place):
                if wanted is None or not stripe.meets(wanted.stripe):
                    continue
                heads = [one.heads if one and one.stripe == stripe else None for one in held]
                for remote_rank, part in _cover(wanted.heads, heads, reader, share, num_readers):
                    num_readers[remote_rank] += remote_rank not in share
                    share.setdefault(remote_rank, {}).update(dict.fromkeys(names, part))
    return shares


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


# --- differences


@dataclass(frozen=True)
class Mismatch:
    """A field that differs."""

    field: str
    local: object
    remote: object

    def __str__(self) -> str:
        here, there = (printable(repr(v), SHOWN_CHARACTERS) for v in (self.local, self.remote))
        return f"{self.field} is {here} here and {there} there"


def _compare(field: str, mine: object, theirs: object) -> list[Mismatch]:
    return [] if mine == theirs else [Mismatch(field, mine, theirs)]


def model_mismatches(local: Mapping[str, str], remote: Mapping[str, str]) -> list[Mismatch]:
    names = sorted(local.keys() | remote.keys())
    return [each for name in names for each in _compare(name, local.get(name), remote.get(name))]


def extra_mismatches(local: Mapping[str, str], remote: Mapping[str, str]) -> list[Mismatch]:
    """Compare the further caches of two engines: prefill needs all that decode has."""
    return model_mismatches(local, {name: remote[name] for name in local.keys() & remote.keys()})


class _Sizes(NamedTuple):
    """The properties of a group in which all ranks of an engine should agree."""

    block_size: int
    blocks_per_entry: int
    window: int
    stripe_count: int
    stripe_width: int
    whole: bool

    def group(self) -> Group:
        stripe = Stripe(self.stripe_count, 0, self.stripe_width)
        sizes = self.block_size, self.blocks_per_entry, self.blocks_per_entry
        return Group(*sizes, (), self.window, stripe, self.whole)


# A layer on one rank, without addresses: heads, bytes of each part of a head and token, sizes,
# place of the stripe, element type, scales. A plain tuple: thousands are hashed for each peer.
_Piece: TypeAlias = tuple[Heads, tuple[int, ...], _Sizes, int, str, tuple[str, ...]]

Pieces: TypeAlias = Mapping[str, Sequence[_Piece]]  # by layer, for each rank that has it

_Segment: TypeAlias = tuple[int, int, str]  # a range of heads, and a text that applies to all


def pieces(layouts: Sequence[CacheLayout]) -> Pieces:
    """Summarize an engine's caches for `layout_mismatches`. 16 ranks of 126 layers take 4 ms."""
    result: dict[str, list[_Piece]] = {}
    for layout in layouts:
        for group in layout.groups:
            count, place, width = group.stripe.count, group.stripe.place, group.stripe.width
            sizes = _Sizes(
                group.block_size, group.blocks_per_entry, group.window, count, width, group.whole
            )
            for r in group.regions:
                heads = (r.first_head, r.first_head + r.num_heads)
                lengths = tuple([part.count * part.length for part in r.parts])
                piece = (heads, lengths, sizes, place, r.element, r.scales)
                result.setdefault(r.layer, []).append(piece)
    return result


def layout_mismatches(
    local: Sequence[CacheLayout],
    remote: Sequence[CacheLayout],
    *,
    local_pieces: Pieces | None = None,
) -> list[Mismatch]:
    """Every reason why this engine cannot read another one, the most general first.

    Each side is the layouts of all its ranks. A caller may keep the local ones' `pieces`.
    """
    mine = pieces(local) if local_pieces is None else local_pieces
    theirs = pieces(remote)
    mismatches: list[Mismatch] = []
    missing = sorted(mine.keys() - theirs.keys())
    if missing:
        unknown = sorted(theirs.keys() - mine.keys())
        field = "layer that one side lacks"
        mismatches.append(Mismatch(field, _shorten(missing), _shorten(unknown)))
    repeated = [_shorten(sorted(_repeated_layers(side))) for side in (local, remote)]
    if repeated != ["nothing", "nothing"]:
        mismatches.append(Mismatch("layer that several pipeline stages have", *repeated))
    # Most layers of a model are alike, so one comparison covers all of them.
    alike: dict[tuple[tuple[_Piece, ...], tuple[_Piece, ...]], list[str]] = {}
    for layer in sorted(mine.keys() & theirs.keys()):
        alike.setdefault((tuple(mine[layer]), tuple(theirs[layer])), []).append(layer)
    layers: dict[Mismatch, list[str]] = {}
    for (here, there), names in alike.items():
        for mismatch in _layer_mismatches(here, there):
            layers.setdefault(mismatch, []).extend(names)
    for mismatch, names in sorted(layers.items(), key=lambda item: min(item[1])):
        field = f"{mismatch.field} of {_shorten(sorted(names))}"
        mismatches.append(Mismatch(field, mismatch.local, mismatch.remote))
    return mismatches


def _repeated_layers(layouts: Sequence[CacheLayout]) -> set[str]:
    """Layer names that different pipeline stages use: ranks with copies have all layers in common.

    vLLM numbers the layers of some draft models like layers of another stage.
    """
    held = {frozenset(r.layer for g in layout.groups for r in g.regions) for layout in layouts}
    counts = Counter(itertools.chain.from_iterable(held))
    return {layer for layer, count in counts.items() if count > 1}


def _layer_mismatches(mine: Sequence[_Piece], theirs: Sequence[_Piece]) -> list[Mismatch]:
    # With an incomplete set of stripes, no rank would read some tokens.
    held = [_describe_stripes(side) for side in (mine, theirs)]
    if held != ["complete", "complete"]:
        return [Mismatch("tokens that ranks hold", *held)]
    kinds = [{(lengths, sizes) for _, lengths, sizes, *_ in side} for side in (mine, theirs)]
    if any(len(side) > 1 for side in kinds):
        return [Mismatch("number of kinds of cache among the ranks", *map(len, kinds))]
    ((lengths, sizes),), ((their_lengths, their_sizes),) = kinds
    both_lengths = lengths, their_lengths
    elements = [", ".join(sorted({piece[4] for piece in side})) for side in (mine, theirs)]
    heads = _compare("number of KV heads", _count_heads(mine), _count_heads(theirs))
    return [
        *_compare("KV cache dtype", *elements),
        *_compare("bytes per head and block" if sizes.whole else "bytes per head", *both_lengths),
        *heads,
        *([] if heads else _scale_mismatches(mine, theirs)),
        *_block_mismatches(sizes.group(), their_sizes.group()),
    ]


def _describe_stripes(side: Sequence[_Piece]) -> str:
    """The gaps in the ranks' token stripes, or 'complete'."""
    held: dict[Stripe, set[_Segment]] = {}
    for (first, end), _, sizes, place, *_ in side:
        stripe = Stripe(sizes.stripe_count, place, sizes.stripe_width)
        held.setdefault(stripe, set()).add((first, end, ""))
    one = next(iter(held))
    if {Stripe(one.count, place, one.width) for place in range(one.count)} != held.keys():
        return ", ".join(sorted(map(_describe_stripe, held)))
    heads = {tuple(_merge(segments)) for segments in held.values()}
    return "complete" if len(heads) == 1 else f"of different heads, {sorted(heads)}"


def _merge(segments: Iterable[_Segment]) -> list[_Segment]:
    """The same in as few segments as possible, however ranks divide or copy the heads."""
    merged: list[_Segment] = []
    for first, end, text in sorted(segments):
        if merged and first <= merged[-1][1] and text == merged[-1][2]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), text)
        else:
            merged.append((first, end, text))
    return merged


def _count_heads(side: Iterable[_Piece]) -> object:
    heads = tuple((first, end) for first, end, _ in _merge({(*piece[0], "") for piece in side}))
    return heads[0][1] if len(heads) == 1 and heads[0][0] == 0 else heads


def _scale_mismatches(mine: Iterable[_Piece], theirs: Iterable[_Piece]) -> list[Mismatch]:
    """Compare scales per head; both sides have the same heads."""
    here, there = _merge_scales(mine), _merge_scales(theirs)
    return _compare("KV scales", _describe_scales(here - there), _describe_scales(there - here))


def _merge_scales(side: Iterable[_Piece]) -> set[_Segment]:
    segments: set[_Segment] = set()
    for (first, end), *_, scales in side:
        if len(scales) <= 1:
            segments.add((first, end, "".join(scales)))
        else:
            segments.update((n, n + 1, text) for n, text in enumerate(scales, first))
    return set(_merge(segments))


def _describe_scales(segments: Iterable[_Segment]) -> str:
    return "; ".join(
        f"{text or 'none'} (heads {first} to {end - 1})" for first, end, text in sorted(segments)
    )


def _block_mismatches(mine: Group, theirs: Group) -> list[Mismatch]:
    mismatches = []
    # Prefill must keep all tokens that decode's window reaches.
    if theirs.window and not 0 < mine.window <= theirs.window:
        mismatches.append(Mismatch("sliding window", mine.window or None, theirs.window))
    if mine.whole or theirs.whole:
        sizes = [f"{g.block_size}{'' if g.whole else ', not whole'}" for g in (mine, theirs)]
        return mismatches + _compare("block size (blocks are read whole)", *sizes)
    is_striped = max(mine.stripe.count, theirs.stripe.count) > 1
    limit = MAX_STRIPED_SEGMENTS if is_striped else MAX_TOKEN_SEGMENTS
    if num_token_segments(mine, theirs) > limit:
        interleave = " or interleave" if is_striped else ""
        field = f"block size{interleave} (makes more than {limit} token segments)"
        mismatches.append(Mismatch(field, _describe_blocks(mine), _describe_blocks(theirs)))
    # Decode fills its blocks from their first token on, so prefill must have kept that token.
    if theirs.window and WINDOW_EDGE % mine.entry_size and theirs.entry_size % mine.entry_size:
        field = f"block size (for a sliding window it must divide {WINDOW_EDGE} or prefill's)"
        mismatches.append(Mismatch(field, mine.entry_size, theirs.entry_size))
    return mismatches


def _describe_blocks(group: Group) -> object:
    if group.stripe == ALL_TOKENS:
        return group.block_size
    return f"{group.block_size}, of {_describe_stripe(group.stripe)}"


def _describe_stripe(stripe: Stripe) -> str:
    begin = stripe.place * stripe.width
    return f"tokens {begin} to {begin + stripe.width - 1} of every {stripe.period}"


def _shorten(layers: Sequence[str]) -> str:
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"{layers[0]}{more}" if layers else "nothing"
