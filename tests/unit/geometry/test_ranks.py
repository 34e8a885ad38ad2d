"""Which ranks exchange KV with which: classic cases by table, others held against brute force."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import heads_of

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.ranks import Holding, Route, Shape, assign, holding, routes
from nixl_kv.geometry.runs import Heads
from nixl_kv.ids import Rank

properties = settings(deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize(
    ("tp", "pp", "size"), [(1, 1, 1), (8, 1, 8), (1, 4, 4), (4, 2, 8), (1024, 1024, 1048576)]
)
def test_size(tp: int, pp: int, size: int) -> None:
    assert Shape(tp, pp).size == size


@pytest.mark.parametrize("value", [-1, 0, 1025])
def test_bounds(value: int) -> None:
    with pytest.raises(ValueError, match=f"^tp is {value}; allowed: 1 to 1024$"):
        Shape(value, 1)
    with pytest.raises(ValueError, match=f"^pp is {value}; allowed: 1 to 1024$"):
        Shape(1, value)


def test_a_shape_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Shape(1, 1).tp = 2  # type: ignore[misc]


def test_what_a_layout_holds() -> None:
    regions = [Region(name, 1, 64, 8, 8, 2, 3, (Part(0, 8),)) for name in "abc"]
    groups = (Group(1, 1, 1, tuple(regions[:2])), Group(1, 1, 1, ()), Group(1, 1, 1, (regions[2],)))
    layout = CacheLayout(groups, "uint8", "DRAM", 0, (Span(1, 64),))
    assert holding(layout) == {"a": (2, 5), "b": (2, 5), "c": (2, 5)}


# ------------------------------------------------------------------ classic cases


def engine(
    tp: int, model: Mapping[str, int], stages: Sequence[str] | None = None
) -> list[dict[str, Heads]]:
    """What each rank holds; `model` has the heads of each layer, `stages` the layers of each."""
    found = []
    for names, rank in itertools.product(stages or ["".join(model)], range(tp)):
        held = {name: heads_of(rank, tp, model[name]) for name in names}
        found.append({name: (first, first + count) for name, (first, count) in held.items()})
    return found


Reading = dict[int, dict[str, Heads]]
"""By source: what is read from it."""


def all_of(layers: str, first: int, last: int) -> dict[str, Heads]:
    return dict.fromkeys(layers, (first, last))


AB, ABCD, LATENT = {"a": 4, "b": 4}, dict.fromkeys("abcd", 4), {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        pytest.param(
            engine(2, AB),
            engine(2, AB),
            [{0: all_of("ab", 0, 2)}, {1: all_of("ab", 2, 4)}],
            id="equal: rank by rank",
        ),
        pytest.param(
            engine(2, AB),
            engine(1, AB),
            [{0: all_of("ab", 0, 2)}, {0: all_of("ab", 2, 4)}],
            id="TP 1 to 2",
        ),
        pytest.param(
            engine(1, AB),
            engine(2, AB),
            [{0: all_of("ab", 0, 2), 1: all_of("ab", 2, 4)}],
            id="TP 2 to 1",
        ),
        pytest.param(
            engine(3, {"a": 6}),
            engine(2, {"a": 6}),
            [{0: {"a": (0, 2)}}, {0: {"a": (2, 3)}, 1: {"a": (3, 4)}}, {1: {"a": (4, 6)}}],
            id="TP 2 to 3",
        ),
        pytest.param(
            engine(2, {"a": 6}),
            engine(3, {"a": 6}),
            [{0: {"a": (0, 2)}, 1: {"a": (2, 3)}}, {1: {"a": (3, 4)}, 2: {"a": (4, 6)}}],
            id="TP 3 to 2",
        ),
        pytest.param(
            engine(6, {"a": 12}),
            engine(4, {"a": 12}),
            [
                {0: {"a": (0, 2)}},
                {0: {"a": (2, 3)}, 1: {"a": (3, 4)}},
                {1: {"a": (4, 6)}},
                {2: {"a": (6, 8)}},
                {2: {"a": (8, 9)}, 3: {"a": (9, 10)}},
                {3: {"a": (10, 12)}},
            ],
            id="TP 4 to 6",
        ),
        pytest.param(
            engine(8, {"a": 4}),
            engine(8, {"a": 4}),
            [{rank: {"a": (rank // 2, rank // 2 + 1)}} for rank in range(8)],
            id="TP 8 to 8, each head twice: rank by rank",
        ),
        pytest.param(
            engine(8, {"a": 1}),
            engine(8, {"a": 1}),
            [{rank: {"a": (0, 1)}} for rank in range(8)],
            id="TP 8 to 8, one head: rank by rank",
        ),
        pytest.param(
            engine(2, {"a": 4}),
            engine(8, {"a": 4}),
            [{0: {"a": (0, 1)}, 2: {"a": (1, 2)}}, {5: {"a": (2, 3)}, 7: {"a": (3, 4)}}],
            id="TP 8 to 2, each head twice on prefill",
        ),
        pytest.param(
            engine(4, {"a": 2}),
            engine(8, {"a": 2}),
            [{0: {"a": (0, 1)}}, {1: {"a": (0, 1)}}, {6: {"a": (1, 2)}}, {7: {"a": (1, 2)}}],
            id="TP 8 to 4, each head four times on prefill, twice on decode",
        ),
        pytest.param(
            engine(8, {"a": 2}),
            engine(4, {"a": 2}),
            [
                {source: {"a": (rank // 4, rank // 4 + 1)}}
                for rank, source in enumerate([0, 1, 0, 1, 2, 3, 2, 3])
            ],
            id="TP 4 to 8, each head twice on prefill, four times on decode",
        ),
        pytest.param(
            engine(8, {"a": 4}),
            engine(2, {"a": 4}),
            [{rank // 4: {"a": (rank // 2, rank // 2 + 1)}} for rank in range(8)],
            id="TP 2 to 8, each head twice on decode",
        ),
        pytest.param(
            engine(1, LATENT),
            engine(4, LATENT),
            [{0: all_of("ab", 0, 1)}],
            id="a latent on all ranks, TP 4 to 1",
        ),
        pytest.param(
            engine(4, LATENT),
            engine(2, LATENT),
            [{rank % 2: all_of("ab", 0, 1)} for rank in range(4)],
            id="a latent on all ranks, TP 2 to 4",
        ),
        pytest.param(
            engine(1, AB),
            engine(1, AB, ["a", "b"]),
            [{0: {"a": (0, 4)}, 1: {"b": (0, 4)}}],
            id="PP 2 to 1",
        ),
        pytest.param(
            engine(1, AB, ["a", "b"]),
            engine(1, AB),
            [{0: {"a": (0, 4)}}, {0: {"b": (0, 4)}}],
            id="PP 1 to 2",
        ),
        pytest.param(
            engine(1, ABCD, ["ab", "c", "d"]),
            engine(1, ABCD, ["a", "bcd"]),
            [{0: {"a": (0, 4)}, 1: {"b": (0, 4)}}, {1: {"c": (0, 4)}}, {1: {"d": (0, 4)}}],
            id="PP 2 to 3",
        ),
        pytest.param(
            engine(4, AB),
            engine(2, AB, ["a", "b"]),
            [
                {rank // 2: {"a": (rank, rank + 1)}, 2 + rank // 2: {"b": (rank, rank + 1)}}
                for rank in range(4)
            ],
            id="PP 2 TP 2 to TP 4",
        ),
        pytest.param(
            engine(2, AB, ["a", "b"]),
            engine(4, AB),
            [
                {
                    2 * (rank % 2) + n: {layer: (2 * (rank % 2) + n, 2 * (rank % 2) + n + 1)}
                    for n in (0, 1)
                }
                for rank, layer in enumerate("aabb")
            ],
            id="TP 4 to PP 2 TP 2",
        ),
        pytest.param(
            engine(2, {"a": 2, "b": 2}, ["a", "b"]),
            engine(4, {"a": 2, "b": 2}),
            [{0: {"a": (0, 1)}}, {3: {"a": (1, 2)}}, {1: {"b": (0, 1)}}, {2: {"b": (1, 2)}}],
            id="TP 4 to PP 2 TP 2, each head twice on prefill: other stages take the other copy",
        ),
        pytest.param(
            engine(2, {"a": 1, "b": 4}),
            engine(4, {"a": 1, "b": 4}),
            [
                {0: {"a": (0, 1), "b": (0, 1)}, 1: {"b": (1, 2)}},
                {2: {"a": (0, 1), "b": (2, 3)}, 3: {"b": (3, 4)}},
            ],
            id="a latent before other layers: from who is read anyway",
        ),
        pytest.param(
            engine(2, {"a": 4, "b": 2, "c": 1}),
            engine(4, {"a": 4, "b": 2, "c": 1}),
            [
                {0: {"a": (0, 1), "b": (0, 1), "c": (0, 1)}, 1: {"a": (1, 2)}},
                {2: {"a": (2, 3), "c": (0, 1)}, 3: {"a": (3, 4), "b": (1, 2)}},
            ],
            id="layers of different heads: copies from who is read anyway",
        ),
        pytest.param(
            [{"a": (0, 4)}, {}], [{"a": (0, 4)}], [{0: {"a": (0, 4)}}, {}], id="a reader of nothing"
        ),
        pytest.param(
            [{"a": (0, 8)}],
            [{"a": (0, 3)}, {"a": (2, 5)}, {"a": (1, 6)}, {"a": (5, 8)}],
            [{0: {"a": (0, 3)}, 2: {"a": (3, 6)}, 3: {"a": (6, 8)}}],
            id="sources that overlap: who reaches farthest",
        ),
    ],
)
def test_who_reads_what_from_whom(
    decode: list[Holding], prefill: list[Holding], expected: list[Reading]
) -> None:
    assert assign(decode, prefill) == expected


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        pytest.param([], "no source holds KV head 2", id="no sources"),
        pytest.param([{"b": (0, 8)}], "no source holds KV head 2", id="another layer"),
        pytest.param([{"a": (0, 2)}, {"a": (3, 8)}], "no source holds KV head 2", id="the first"),
        pytest.param([{"a": (0, 3)}, {"a": (4, 8)}], "no source holds KV head 3", id="the second"),
        pytest.param([{"a": (0, 4)}], "no source holds KV head 4", id="the last"),
    ],
)
def test_heads_that_no_source_holds(sources: list[Holding], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        assign([{"a": (2, 5)}], sources)


# ------------------------------------------------------------------ any case


@st.composite
def engines(draw: st.DrawFn) -> tuple[list[dict[str, Heads]], list[dict[str, Heads]]]:
    """Two engines of one model."""
    tps = draw(st.tuples(*[st.sampled_from((1, 2, 3, 4, 6, 8))] * 2))
    heads = [h for h in (1, 2, 4, 8, 12) if all(h % tp == 0 or tp % h == 0 for tp in tps)]
    model = {name: draw(st.sampled_from(heads)) for name in "abcd"}
    made = []
    for tp in tps:
        edges = sorted(draw(st.sets(st.integers(1, 3), max_size=2)))
        stages = ["abcd"[a:b] for a, b in itertools.pairwise([0, *edges, 4])]
        made.append(engine(tp, model, stages))
    return made[0], made[1]


@settings(properties, max_examples=300)
@given(both=engines())
def test_each_head_is_read_once_from_one_that_holds_it(
    both: tuple[list[Holding], list[Holding]],
) -> None:
    readers, sources = both
    for held, shares in zip(readers, assign(readers, sources), strict=True):
        read = Counter(
            (layer, head)
            for share in shares.values()
            for layer, heads in share.items()
            for head in range(*heads)
        )
        wanted = [(layer, head) for layer, heads in held.items() for head in range(*heads)]
        assert read == Counter(wanted)
        for source, share in shares.items():
            for layer, (first, last) in share.items():
                there = sources[source][layer]
                assert there[0] <= first < last <= there[1]


@properties
@given(both=engines())
def test_all_readers_agree(both: tuple[list[Holding], list[Holding]]) -> None:
    """A source is told who reads it by each of its readers; one that nobody reads, by one."""
    readers, sources = both
    shares = assign(readers, sources)
    routed = [routes(Rank(reader), readers, sources) for reader in range(len(readers))]
    for reader, found in enumerate(routed):
        assert {r.source: r.share for r in found if r.readers} == shares[reader]
        assert [route.source for route in found] == sorted({route.source for route in found})
    for source in range(len(sources)):
        told = [
            (reader, route.readers)
            for reader, found in enumerate(routed)
            for route in found
            if route.source == source
        ]
        reading = tuple(reader for reader, share in enumerate(shares) if source in share)
        released = [(source % len(readers), ())]
        assert told == ([(reader, reading) for reader in reading] or released)


@settings(properties, max_examples=200)
@given(
    tps=st.tuples(*[st.sampled_from((1, 2, 3, 4, 6, 8))] * 2),
    heads=st.sampled_from((1, 2, 4, 8, 12)),
    stages=st.sampled_from((["ab"], ["a", "b"])),
)
def test_copies_are_used_evenly(tps: tuple[int, int], heads: int, stages: list[str]) -> None:
    """Readers of the same heads are spread over the sources that hold them, over all stages."""
    assume(all(heads % tp == 0 or tp % heads == 0 for tp in tps))
    model = {"a": heads, "b": heads}
    readers, sources = engine(tps[0], model, stages), engine(tps[1], model)
    count = Counter(source for share in assign(readers, sources) for source in share)
    copies: dict[Heads, list[int]] = {}
    for source, held in enumerate(sources):
        copies.setdefault(held["a"], []).append(count[Rank(source)])
    for counts in copies.values():
        assert max(counts) - min(counts) <= 1


def fewest_sources(held: Holding, sources: Sequence[Holding]) -> int:
    """By brute force: of how many sources a reader needs to hold all that it holds."""
    wanted = {(layer, head) for layer, heads in held.items() for head in range(*heads)}
    theirs = [
        {(layer, head) for layer, heads in source.items() for head in range(*heads)} & wanted
        for source in sources
    ]
    distinct = [set(found) for found in {frozenset(found) for found in theirs if found}]
    for count in range(len(distinct) + 1):
        if any(
            set().union(*chosen) == wanted for chosen in itertools.combinations(distinct, count)
        ):
            return count
    raise AssertionError


@properties
@given(both=engines())
def test_a_reader_goes_to_as_few_sources_as_it_can(
    both: tuple[list[Holding], list[Holding]],
) -> None:
    """Layers with copies, as of a latent, are read from who is read anyway."""
    readers, sources = both
    for held, shares in zip(readers, assign(readers, sources), strict=True):
        assert len(shares) == fewest_sources(held, sources)


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        pytest.param(
            0,
            [
                Route(Rank(0), (Rank(0),), {"a": (0, 1)}),
                Route(Rank(2), (Rank(0),), {"a": (1, 2)}),
                Route(Rank(4), ()),
                Route(Rank(6), ()),
            ],
            id="reads two, releases the even ones of the others",
        ),
        pytest.param(
            1,
            [
                Route(Rank(1), ()),
                Route(Rank(3), ()),
                Route(Rank(5), (Rank(1),), {"a": (2, 3)}),
                Route(Rank(7), (Rank(1),), {"a": (3, 4)}),
            ],
            id="the odd ones",
        ),
    ],
)
def test_copies_that_nobody_reads_are_released(reader: int, expected: list[Route]) -> None:
    found = routes(Rank(reader), engine(2, {"a": 4}), engine(8, {"a": 4}))
    assert list(found) == expected


def test_a_source_has_all_of_its_readers() -> None:
    found = routes(Rank(1), engine(4, {"a": 4}), engine(2, {"a": 4}))
    assert found == (Route(Rank(0), (Rank(0), Rank(1)), {"a": (1, 2)}),)
