"""Why two engines cannot exchange KV: every field that differs, with both values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span, Stripe
from nixl_kv.geometry.match import (
    Mismatch,
    extra_mismatches,
    layout_mismatches,
    model_mismatches,
)

SPAN = Span(1, 2**30)


def region(layer: str = "a", **changes: Any) -> Region:
    return replace(Region(layer, 4096, 1024, 256, 16, 0, 4, (Part(0, 8), Part(8, 8))), **changes)


def group(*regions: Region, **changes: Any) -> Group:
    return replace(Group(16, 10, 1, regions or (region("a"), region("b"))), **changes)


def cache(*groups: Group, **changes: Any) -> CacheLayout:
    return replace(CacheLayout(groups or (group(),), "DRAM", 0, (SPAN,)), **changes)


@pytest.mark.parametrize("mismatches", [model_mismatches, extra_mismatches])
@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        pytest.param({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, [], id="equal"),
        pytest.param({"a": "1"}, {"a": "2"}, ["a is '1' here and '2' there"], id="other value"),
        pytest.param(
            {"z": "1", "b": "2", "c": "3"},
            {"z": "0", "c": "3"},
            ["b is '2' here and None there", "z is '1' here and '0' there"],
            id="all of them, by name",
        ),
    ],
)
def test_facts_are_compared_by_name(
    mismatches: Callable[..., list[Mismatch]],
    local: dict[str, str],
    remote: dict[str, str],
    expected: list[str],
) -> None:
    assert list(map(str, mismatches(local, remote))) == expected


def test_what_only_the_remote_engine_has_besides_its_model_does_not_matter() -> None:
    assert model_mismatches({}, {"a": "1"}) == [Mismatch("a", None, "1")]
    assert extra_mismatches({}, {"a": "1"}) == []


def ranks(*layouts: CacheLayout) -> list[CacheLayout]:
    return list(layouts)


def tp(count: int, **changes: Any) -> list[CacheLayout]:
    """Four heads of two layers, divided among so many ranks, or copied."""
    num_heads = max(1, 4 // count)
    firsts = [rank * 4 // count for rank in range(count)]
    return [
        cache(group(*(region(n, first_head=f, num_heads=num_heads) for n in "ab"), **changes))
        for f in firsts
    ]


def pp(*stages: str) -> list[CacheLayout]:
    return [cache(Group(16, 10, 1, tuple(map(region, names)))) for names in stages]


@pytest.mark.parametrize(
    "remote",
    [
        pytest.param(ranks(cache(memory="VRAM", device=7)), id="memory"),
        pytest.param(tp(8), id="TP 8, each head twice"),
        pytest.param(pp("b", "", "a"), id="PP 3, a stage without layers"),
        pytest.param(ranks(cache(), cache()), id="all heads on both of two ranks"),
        pytest.param(
            ranks(cache(), cache(group(*(region(n, first_head=1, num_heads=2) for n in "ab")))),
            id="some heads once more",
        ),
    ],
)
def test_how_engines_are_divided_may_differ(remote: list[CacheLayout]) -> None:
    assert layout_mismatches(ranks(cache()), remote) == []
    assert layout_mismatches(remote, ranks(cache())) == []


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        pytest.param(
            ranks(cache(group(*(region(n, element="int8") for n in "ab")))),
            [Mismatch("KV cache dtype of a and 1 more", "uint8", "int8")],
            id="dtype",
        ),
        pytest.param(
            [*tp(2)[:1], cache(group(*(region(n, element="int8", first_head=2) for n in "ab")))],
            [
                Mismatch("KV cache dtype of a and 1 more", "uint8", "int8, uint8"),
                Mismatch("number of KV heads of a and 1 more", 4, 6),
            ],
            id="dtypes of several ranks",
        ),
        pytest.param(
            ranks(cache(group(region("a"), region("b", scales=("k 1, v 1",))))),
            [Mismatch("KV scales of b", "none (heads 0 to 3)", "k 1, v 1 (heads 0 to 3)")],
            id="scales on one side",
        ),
        pytest.param(
            pp("a"), [Mismatch("layer that one side lacks", "b", "nothing")], id="fewer layers"
        ),
        pytest.param(
            pp("ab", "b"),
            [Mismatch("layer that several pipeline stages have", "nothing", "b")],
            id="two layers of one name",
        ),
        pytest.param(
            ranks(cache(group(*(region(n, num_heads=8) for n in "ab")))),
            [Mismatch("number of KV heads of a and 1 more", 4, 8)],
            id="more heads",
        ),
        pytest.param(
            tp(4)[::3],
            [Mismatch("number of KV heads of a and 1 more", 4, ((0, 1), (3, 4)))],
            id="ranks missing in the middle",
        ),
        pytest.param(
            ranks(cache(group(region("a"), region("b", parts=(Part(0, 8), Part(8, 4)))))),
            [Mismatch("bytes per head of b", (8, 8), (8, 4))],
            id="other content",
        ),
        pytest.param(
            ranks(cache(group(region("a"), region("b", parts=(Part(0, 2, 3, 9), Part(9, 8)))))),
            [Mismatch("bytes per head of b", (8, 8), (6, 8))],
            id="fewer pieces of K",
        ),
        pytest.param(
            ranks(cache(group(block_size=1021))),
            [Mismatch("block size (makes more than 512 token segments) of a and 1 more", 16, 1021)],
            id="block sizes that have no divisor in common",
        ),
        pytest.param(
            ranks(cache(group(region("a", num_heads=2, parts=(Part(0, 4), Part(4, 4))))), *pp("c")),
            [
                Mismatch("layer that one side lacks", "b", "c"),
                Mismatch("bytes per head of a", (8, 8), (4, 4)),
                Mismatch("number of KV heads of a", 4, 2),
            ],
            id="several at once",
        ),
    ],
)
def test_every_other_difference_is_a_mismatch(
    remote: list[CacheLayout], expected: list[Mismatch]
) -> None:
    assert layout_mismatches(ranks(cache()), remote) == expected


def test_layers_that_only_the_remote_engine_has_are_not_read() -> None:
    """The other way round there is nothing to read them from."""
    local, remote = pp("ab"), pp("abc", "de")
    assert layout_mismatches(local, remote) == []
    assert layout_mismatches(remote, local) == [
        Mismatch("layer that one side lacks", "c and 2 more", "nothing")
    ]


def scaled(*scales: tuple[str, ...]) -> list[CacheLayout]:
    """Four heads of a layer, divided evenly among ranks with these scales."""
    held = 4 // len(scales)
    return [
        cache(group(region(first_head=rank * held, num_heads=held, scales=texts)))
        for rank, texts in enumerate(scales)
    ]


ONE, OTHER, EACH = ("1",), ("2",), ("1", "2", "3", "4")
ALL_1, ALL_2 = "1 (heads 0 to 3)", "2 (heads 0 to 3)"


@pytest.mark.parametrize(
    ("local", "remote", "values"),
    [
        pytest.param(scaled(ONE), scaled(ONE, ONE), [], id="one for all heads"),
        pytest.param(scaled(EACH), scaled(EACH[:2], EACH[2:]), [], id="one for each head"),
        pytest.param(
            scaled(EACH), scaled(*((text,) for text in EACH)), [], id="a rank for each head"
        ),
        pytest.param(scaled(ONE), scaled(OTHER), [ALL_1, ALL_2], id="all heads"),
        pytest.param(
            scaled(ONE),
            scaled(ONE, OTHER),
            [ALL_1, "1 (heads 0 to 1); 2 (heads 2 to 3)"],
            id="of one rank",
        ),
        pytest.param(
            scaled(ONE), [*scaled(ONE), *scaled(OTHER)], ["", ALL_2], id="ranks that contradict"
        ),
    ],
)
def test_scales_are_compared_head_by_head(
    local: list[CacheLayout], remote: list[CacheLayout], values: list[str]
) -> None:
    """However the ranks divide the heads."""
    for found, pair in (
        (layout_mismatches(local, remote), values),
        (layout_mismatches(remote, local), values[::-1]),
    ):
        assert found == ([Mismatch("KV scales of a", *pair)] if pair else [])


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        pytest.param(0, 0, [], id="no window on either side"),
        pytest.param(64, 64, [], id="equal"),
        pytest.param(32, 64, [], id="a shorter one on decode"),
        pytest.param(64, 0, [], id="none on prefill, which keeps all"),
        pytest.param(64, 32, [(64, 32)], id="a longer one on decode"),
        pytest.param(0, 32, [(None, 32)], id="none on decode"),
    ],
)
def test_prefill_s_window_must_keep_all_that_decode_s_window_needs(
    here: int, there: int, expected: list[tuple[int | None, int]]
) -> None:
    sides = [ranks(cache(group(window=window))) for window in (here, there)]
    assert layout_mismatches(*sides) == [
        Mismatch("sliding window of a and 1 more", *pair) for pair in expected
    ]


@pytest.mark.parametrize(
    ("here", "there", "fits"),
    [
        pytest.param({"block_size": 64}, {"block_size": 16}, True, id="a divisor of 256"),
        pytest.param({"block_size": 48}, {"block_size": 16}, False, id="48 to 16"),
        pytest.param({"block_size": 48}, {"block_size": 48}, True, id="equal"),
        pytest.param({"block_size": 48}, {"block_size": 96}, True, id="a divisor of prefill's"),
        pytest.param(
            {"block_size": 16, "blocks_per_entry": 3}, {"block_size": 16}, False, id="entries of 48"
        ),
        pytest.param(
            {"block_size": 48},
            {"block_size": 16, "blocks_per_entry": 3},
            True,
            id="to entries of 48",
        ),
    ],
)
def test_with_a_window_decode_s_block_size_divides_256_or_prefill_s(
    here: dict[str, int], there: dict[str, int], *, fits: bool
) -> None:
    """Prefill keeps a window from a multiple of 256 tokens on; decode needs whole blocks of it."""
    sides = [ranks(cache(group(window=64, **sizes))) for sizes in (here, there)]
    field = "block size (for a sliding window it must divide 256 or prefill's) of a and 1 more"
    assert [m.field for m in layout_mismatches(*sides)] == ([] if fits else [field])
    without_window = [ranks(cache(group(**sizes))) for sizes in (here, there)]
    assert layout_mismatches(*without_window) == []


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        pytest.param((256, 257), True, id="512 segments, neither size divides"),
        pytest.param((255, 259), False, id="513 segments, neither size divides"),
        pytest.param((16, 16 * 512), True, id="512 segments in each block"),
        pytest.param((16, 16 * 513), False, id="513 segments in each block"),
    ],
)
def test_block_sizes_may_make_512_token_segments(sizes: tuple[int, int], *, fits: bool) -> None:
    sides = [ranks(cache(group(block_size=size))) for size in sizes]
    assert (layout_mismatches(*sides) == []) == fits == (layout_mismatches(*sides[::-1]) == [])


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(
            group(region("a", first_head=2, num_heads=2, parts=(Part(0, 8),))), id="parts"
        ),
        pytest.param(group(region("a", first_head=2, num_heads=2), block_size=1021), id="blocks"),
        pytest.param(group(region("a", first_head=2, num_heads=2), window=8), id="window"),
    ],
)
def test_a_mismatch_of_a_single_rank_is_found(second: Group) -> None:
    """A peer's ranks may differ among themselves."""
    remote = ranks(cache(group(region("a", num_heads=2))), cache(second))
    assert layout_mismatches(ranks(cache(group(region("a")))), remote) != []


def striped(count: int, width: int = 16, **changes: Any) -> list[CacheLayout]:
    """An engine whose ranks have the same heads, and divide the tokens."""
    stripes = [Stripe(count, place, width) for place in range(count)]
    return ranks(*(cache(group(stripe=stripe, **changes)) for stripe in stripes))


@pytest.mark.parametrize("here", [1, 2, 3])
@pytest.mark.parametrize("there", [1, 2, 4])
def test_tokens_may_be_divided_in_different_ways(here: int, there: int) -> None:
    assert layout_mismatches(*(striped(n, 16 if n > 1 else 1) for n in (here, there))) == []


SECOND_OF_2 = "tokens 16 to 31 of every 32"


@pytest.mark.parametrize(
    ("remote", "words"),
    [
        pytest.param(striped(2)[1:], SECOND_OF_2, id="a rank is missing"),
        pytest.param(
            [striped(4)[0], *striped(2)[1:]],
            f"tokens 0 to 15 of every 64, {SECOND_OF_2}",
            id="by 4 and by 2",
        ),
        pytest.param(
            [striped(2, 8)[0], *striped(2)[1:]],
            f"tokens 0 to 7 of every 16, {SECOND_OF_2}",
            id="by other widths",
        ),
        pytest.param(
            [cache(), *striped(2)[1:]],
            f"tokens 0 to 0 of every 1, {SECOND_OF_2}",
            id="all and some",
        ),
    ],
)
def test_tokens_that_no_rank_has_are_found(remote: list[CacheLayout], words: str) -> None:
    """They would be read by nobody."""
    field = "tokens that ranks hold of a and 1 more"
    assert layout_mismatches(ranks(cache()), remote) == [Mismatch(field, "complete", words)]
    assert layout_mismatches(remote, ranks(cache())) == [Mismatch(field, words, "complete")]


def test_each_stripe_of_tokens_has_all_heads() -> None:
    halves = [region("a", num_heads=2), region("a", num_heads=2, first_head=2)]
    remote = [cache(group(half, stripe=Stripe(2, place, 16))) for place, half in enumerate(halves)]
    words = "of different heads, [((0, 2, ''),), ((2, 4, ''),)]"
    expected = [Mismatch("tokens that ranks hold of a", "complete", words)]
    assert layout_mismatches(ranks(cache(group(region("a")))), remote) == expected


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        pytest.param((4096, 4096), True, id="a segment for each token of 4096"),
        pytest.param((4097, 4097), False, id="4097"),
    ],
)
def test_divided_tokens_may_make_4096_segments(sizes: tuple[int, int], *, fits: bool) -> None:
    local = ranks(cache(group(block_size=sizes[0])))
    mismatches = layout_mismatches(local, striped(2, 1, block_size=sizes[1]))
    field = "block size or interleave (makes more than 4096 token segments) of a and 1 more"
    there = "4097, of tokens 0 to 0 of every 2"
    assert mismatches == ([] if fits else [Mismatch(field, 4097, there)])


def test_ranks_of_many_kinds_cost_no_time() -> None:
    """A peer's description may name anything; to compare all with all would take seconds."""
    kinds = [cache(group(stripe=Stripe(2, 0, 1), block_size=2047 - 2 * n)) for n in range(60)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(match, "num_token_segments")
        assert layout_mismatches(ranks(cache()), kinds) != []


def test_a_layer_is_compared_by_the_window_of_its_own_group() -> None:
    local = ranks(cache(group(region("a"), window=4), group(region("b"))))
    remote = ranks(cache(group(region("b"), region("a"), window=8)))
    assert layout_mismatches(local, remote) == [Mismatch("sliding window of b", None, 8)]


def test_mismatches_of_a_layer_always_come_in_the_same_order() -> None:
    """The one that explains most comes first."""
    for first, second in [(f"layer.{n}", f"layer.{n + 1}") for n in range(0, 80, 2)]:
        local = ranks(cache(group(region(first), region(second))))
        fewer = region(first, num_heads=2, parts=(Part(0, 4), Part(4, 4)))
        remote = ranks(cache(group(fewer, region(second, num_heads=2))))
        assert [mismatch.field for mismatch in layout_mismatches(local, remote)] == [
            f"bytes per head of {first}",
            f"number of KV heads of {first} and 1 more",
        ]
