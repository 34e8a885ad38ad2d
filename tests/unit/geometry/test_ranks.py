"""Which ranks exchange KV with which: typical cases by table, all others by brute force."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.local.model_layouts import heads_of_rank
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span, Stripe
from nixl_kv.geometry.match import Holding, Holdings, assign, holdings, routes
from nixl_kv.geometry.plan import Heads
from nixl_kv.ids import Rank

properties = settings(max_examples=80)


def test_a_layout_holds_the_heads_and_stripes_of_all_its_groups() -> None:
    a, b, c = (Region(name, 1, 64, 8, 8, 2, 3, (Part(0, 8),)) for name in "abc")
    stripe = Stripe(4, 3)
    groups = Group(1, 1, 1, (a, b)), Group(1, 1, 1, ()), Group(1, 1, 1, (c,), stripe=stripe)
    held = holdings(CacheLayout(groups, "DRAM", 0, (Span(1, 64),)))
    assert held == {"a": Holding((2, 5)), "b": Holding((2, 5)), "c": Holding((2, 5), stripe)}


# --- typical cases


def engine(
    tp: int,
    model: Mapping[str, int],
    stages: Sequence[str] | None = None,
    stripes: tuple[int, int] = (1, 1),
) -> list[dict[str, Holding]]:
    """The holdings of each rank; `model` has the heads of each layer, `stages` the layers of each.

    `stripes` is how many ranks in a row divide the tokens, and the width.
    """
    ranks = []
    for names, rank in itertools.product(stages or ["".join(model)], range(tp)):
        stripe = Stripe(stripes[0], rank % stripes[0], stripes[1])
        ranks.append(
            {name: Holding(heads_of_rank(rank, tp, model[name]), stripe) for name in names}
        )
    return ranks


def holding(**heads: Heads) -> dict[str, Holding]:
    return {layer: Holding(each) for layer, each in heads.items()}


Reading = dict[int, dict[str, Heads]]
"""The heads read of each layer, by remote rank."""


def both(first: int, end: int) -> dict[str, Heads]:
    """The same heads of layers a and b."""
    return {"a": (first, end), "b": (first, end)}


AB, LATENT = {"a": 4, "b": 4}, {"a": 1, "b": 1}


TYPICAL: dict[str, tuple[list[dict[str, Holding]], list[dict[str, Holding]], list[Reading]]] = {
    "TP 8 to 2, each head twice on prefill": (
        engine(2, {"a": 4}),
        engine(8, {"a": 4}),
        [{0: {"a": (0, 1)}, 2: {"a": (1, 2)}}, {5: {"a": (2, 3)}, 7: {"a": (3, 4)}}],
    ),
    "a latent before other layers: from a rank that is read anyway": (
        engine(2, {"a": 1, "b": 4}),
        engine(4, {"a": 1, "b": 4}),
        [
            {0: {"a": (0, 1), "b": (0, 1)}, 1: {"b": (1, 2)}},
            {2: {"a": (0, 1), "b": (2, 3)}, 3: {"b": (3, 4)}},
        ],
    ),
    "ranges that overlap: the one that ends last": (
        [holding(a=(0, 8))],
        [holding(a=heads) for heads in ((0, 3), (2, 5), (1, 6), (5, 8))],
        [{0: {"a": (0, 3)}, 2: {"a": (3, 6)}, 3: {"a": (6, 8)}}],
    ),
    "tokens divided on prefill, each twice: the second reads the second copies": (
        engine(2, LATENT),
        engine(8, LATENT, stripes=(4, 1)),
        [dict.fromkeys(range(4), both(0, 1)), dict.fromkeys(range(4, 8), both(0, 1))],
    ),
}


@pytest.mark.parametrize(("decode", "prefill", "expected"), TYPICAL.values(), ids=TYPICAL)
def test_assignment_of_typical_engines(
    decode: list[Holdings], prefill: list[Holdings], expected: list[Reading]
) -> None:
    assert assign(decode, prefill) == expected


@pytest.mark.parametrize(
    ("remotes", "missing"),
    [
        pytest.param([holding(b=(0, 8))], 2, id="another layer"),
        pytest.param([holding(a=(0, 2)), holding(a=(3, 8))], 2, id="without the first"),
        pytest.param([holding(a=(0, 3)), holding(a=(4, 8))], 3, id="without the second"),
        pytest.param([holding(a=(0, 4))], 4, id="without the last"),
    ],
)
def test_a_head_that_no_remote_rank_holds_is_an_error(
    remotes: list[Holdings], missing: int
) -> None:
    with pytest.raises(ValueError, match=f"^no remote rank holds KV head {missing}$"):
        assign([holding(a=(2, 5))], remotes)


# --- any case


STRIPES = ((1, 1), (1, 1), (2, 1), (2, 2), (3, 1), (4, 1))
PERIOD = 12
"""Tokens, after which all stripes begin anew."""


@st.composite
def engines(draw: st.DrawFn) -> tuple[list[dict[str, Holding]], list[dict[str, Holding]]]:
    """Two engines of one model. Tokens are divided where all layers have copies enough."""
    tps = draw(st.tuples(*[st.sampled_from((1, 2, 3, 4, 6, 8))] * 2))
    most = draw(st.sampled_from((1, 2, 12)))
    heads = [h for h in (1, 2, 4, 8, 12) if all(h % tp == 0 or tp % h == 0 for tp in tps)]
    model = {name: draw(st.sampled_from([h for h in heads if h <= most])) for name in "abcd"}
    pair = []
    for tp in tps:
        edges = sorted(draw(st.sets(st.integers(1, 3), max_size=2)))
        stages = ["abcd"[a:b] for a, b in itertools.pairwise([0, *edges, 4])]
        copies = [tp // heads for heads in model.values()]
        allowed = [each for each in STRIPES if not any(number % each[0] for number in copies)]
        stripes = draw(st.sampled_from(allowed if min(copies) > 1 else STRIPES[:1]))
        pair.append(engine(tp, model, stages, stripes))
    return pair[0], pair[1]


Element = tuple[str, int, int]
"""A layer, a head, a token."""


def elements(held: Holdings, within: Holdings | None = None) -> list[Element]:
    """All that is held, of the tokens that `within` has too."""
    tokens = np.arange(PERIOD)
    return [
        (layer, head, token)
        for layer, (heads, stripe) in held.items()
        for head in range(*heads)
        for token in tokens[
            stripe.holds(tokens) & (within or held)[layer].stripe.holds(tokens)
        ].tolist()
    ]


@properties
@given(pair=engines())
def test_all_readers_of_a_remote_rank_name_the_same_readers(
    pair: tuple[list[Holdings], list[Holdings]],
) -> None:
    """And exactly one reader releases a remote rank that no rank reads."""
    readers, remotes = pair
    shares = assign(readers, remotes)
    by_reader = [routes(Rank(reader), readers, remotes) for reader in range(len(readers))]
    for reader, own_routes in enumerate(by_reader):
        assert {r.remote_rank: r.share for r in own_routes if r.readers} == shares[reader]
        remote_ranks = [route.remote_rank for route in own_routes]
        assert remote_ranks == sorted(set(remote_ranks))
    for remote_rank in range(len(remotes)):
        named = [
            (reader, route.readers)
            for reader, own_routes in enumerate(by_reader)
            for route in own_routes
            if route.remote_rank == remote_rank
        ]
        reading = tuple(reader for reader, share in enumerate(shares) if remote_rank in share)
        released = [(remote_rank % len(readers), ())]
        assert named == ([(reader, reading) for reader in reading] or released)


@properties
@given(
    tps=st.tuples(*[st.sampled_from((1, 2, 3, 4, 6, 8))] * 2),
    heads=st.sampled_from((1, 2, 4, 8, 12)),
    stages=st.sampled_from((["ab"], ["a", "b"])),
)
def test_copies_are_used_evenly(tps: tuple[int, int], heads: int, stages: list[str]) -> None:
    """Readers of the same heads, in all stages, are spread over the ranks that hold them."""
    assume(all(heads % tp == 0 or tp % heads == 0 for tp in tps))
    model = {"a": heads, "b": heads}
    readers, remotes = engine(tps[0], model, stages), engine(tps[1], model)
    count = Counter(remote_rank for share in assign(readers, remotes) for remote_rank in share)
    copies: dict[Heads, list[int]] = {}
    for remote_rank, held in enumerate(remotes):
        copies.setdefault(held["a"].heads, []).append(count[Rank(remote_rank)])
    for counts in copies.values():
        assert max(counts) - min(counts) <= 1


def fewest_remote_ranks(held: Holdings, remotes: Sequence[Holdings]) -> int:
    """How many remote ranks together hold all that a reader holds, by brute force."""
    wanted = frozenset(elements(held))
    distinct = {wanted.intersection(elements(remote)) for remote in remotes}
    for count in range(len(distinct) + 1):
        if any(
            frozenset().union(*chosen) == wanted
            for chosen in itertools.combinations(distinct, count)
        ):
            return count
    raise AssertionError


@properties
@given(pair=engines())
def test_a_reader_reads_from_as_few_remote_ranks_as_possible(
    pair: tuple[list[Holdings], list[Holdings]],
) -> None:
    """Layers with copies, such as a latent, are read from ranks that are read anyway."""
    readers, remotes = pair
    for held, shares in zip(readers, assign(readers, remotes), strict=True):
        assert len(shares) == fewest_remote_ranks(held, remotes)
