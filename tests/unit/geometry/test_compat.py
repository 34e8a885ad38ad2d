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


def both(**changes: Any) -> tuple[Region, Region]:
    return region("a", **changes), region("b", **changes)


def group(*regions: Region, **changes: Any) -> Group:
    return replace(Group(16, 10, 1, regions or both()), **changes)


def cache(*groups: Group, **changes: Any) -> CacheLayout:
    return replace(CacheLayout(groups or (group(),), "DRAM", 0, (SPAN,)), **changes)


@pytest.mark.parametrize("mismatches", [model_mismatches, extra_mismatches])
def test_facts_are_compared_by_name(mismatches: Callable[..., list[Mismatch]]) -> None:
    assert mismatches({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == []
    found = mismatches({"z": "1", "b": "2", "c": "3"}, {"z": "0", "c": "3"})
    assert list(map(str, found)) == ["b is '2' here and None there", "z is '1' here and '0' there"]


def test_facts_that_only_the_remote_engine_has_beside_its_model_do_not_matter() -> None:
    assert model_mismatches({}, {"a": "1"}) == [Mismatch("a", None, "1")]
    assert extra_mismatches({}, {"a": "1"}) == []


def ranks(*layouts: CacheLayout) -> list[CacheLayout]:
    return list(layouts)


def tp(count: int, **changes: Any) -> list[CacheLayout]:
    """Four heads of two layers, divided among ranks, or copied."""
    num_heads = max(1, 4 // count)
    firsts = [rank * 4 // count for rank in range(count)]
    return [cache(group(*both(first_head=f, num_heads=num_heads), **changes)) for f in firsts]


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
            ranks(cache(), cache(group(*both(first_head=1, num_heads=2)))),
            id="some heads once more",
        ),
    ],
)
def test_how_engines_are_divided_may_differ(remote: list[CacheLayout]) -> None:
    assert layout_mismatches(ranks(cache()), remote) == []
    assert layout_mismatches(remote, ranks(cache())) == []


DIFFERENCES: dict[str, tuple[list[CacheLayout], tuple[str, object, object]]] = {
    "dtype": (
        ranks(cache(group(*both(element="int8")))),
        ("KV cache dtype of a and 1 more", "uint8", "int8"),
    ),
    "dtypes of several ranks": (
        [*tp(2)[:1], cache(group(*both(element="int8", first_head=2, num_heads=2)))],
        ("KV cache dtype of a and 1 more", "uint8", "int8, uint8"),
    ),
    "scales on one side": (
        ranks(cache(group(region("a"), region("b", scales=("k 1, v 1",))))),
        ("KV scales of b", "none (heads 0 to 3)", "k 1, v 1 (heads 0 to 3)"),
    ),
    "fewer layers": (pp("a"), ("layer that one side lacks", "b", "nothing")),
    "two layers of one name": (
        pp("ab", "b"),
        ("layer that several pipeline stages have", "nothing", "b"),
    ),
    "more heads": (
        ranks(cache(group(*both(num_heads=6)))),
        ("number of KV heads of a and 1 more", 4, 6),
    ),
    "ranks missing in the middle": (
        tp(4)[::3],
        ("number of KV heads of a and 1 more", 4, ((0, 1), (3, 4))),
    ),
    "other content": (
        ranks(cache(group(region("a"), region("b", parts=(Part(0, 2, 3, 9), Part(9, 8)))))),
        ("bytes per head of b", (8, 8), (6, 8)),
    ),
    "block sizes that have no divisor in common": (
        ranks(cache(group(block_size=1021))),
        ("block size (makes more than 512 token segments) of a and 1 more", 16, 1021),
    ),
}


@pytest.mark.parametrize(("remote", "expected"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_every_other_difference_is_a_mismatch(
    remote: list[CacheLayout], expected: tuple[str, object, object]
) -> None:
    assert layout_mismatches(ranks(cache()), remote) == [Mismatch(*expected)]


def test_several_differences_are_several_mismatches() -> None:
    fewer = group(region("a", num_heads=2, parts=(Part(0, 4), Part(4, 4))))
    assert layout_mismatches(ranks(cache()), ranks(cache(fewer), *pp("c"))) == [
        Mismatch("layer that one side lacks", "b", "c"),
        Mismatch("bytes per head of a", (8, 8), (4, 4)),
        Mismatch("number of KV heads of a", 4, 2),
    ]


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


WINDOW = "sliding window of a and 1 more"
EDGE = "block size (for a sliding window it must divide 256 or prefill's) of a and 1 more"
SEGMENTS = "block size (makes more than 512 token segments) of a and 1 more"


def windowed(block_size: int, blocks_per_entry: int = 1) -> dict[str, int]:
    return {"window": 64, "block_size": block_size, "blocks_per_entry": blocks_per_entry}


def blocks(block_size: int) -> dict[str, int]:
    return {"block_size": block_size}


GROUPS: dict[str, tuple[dict[str, int], dict[str, int], tuple[str, object, object] | None]] = {
    "equal windows": ({"window": 64}, {"window": 64}, None),
    "a shorter window on decode": ({"window": 32}, {"window": 64}, None),
    "no window on prefill, which keeps all": ({"window": 64}, {}, None),
    "a longer window on decode": ({"window": 64}, {"window": 32}, (WINDOW, 64, 32)),
    "no window on decode": ({}, {"window": 32}, (WINDOW, None, 32)),
    "with a window, a divisor of 256": (windowed(64), windowed(16), None),
    "with a window, 48 to 16": (windowed(48), windowed(16), (EDGE, 48, 16)),
    "with a window, a divisor of prefill's": (windowed(48), windowed(96), None),
    "with a window, entries of 48": (windowed(16, 3), windowed(16), (EDGE, 48, 16)),
    "with a window, to entries of 48": (windowed(48), windowed(16, 3), None),
    "without a window, 48 to 16": (blocks(48), blocks(16), None),
    "512 segments, neither size divides": (blocks(256), blocks(257), None),
    "513 segments, neither size divides": (blocks(255), blocks(259), (SEGMENTS, 255, 259)),
    "512 segments in each block": (blocks(16), blocks(16 * 512), None),
    "513 segments in each block": (blocks(16), blocks(16 * 513), (SEGMENTS, 16, 16 * 513)),
}


@pytest.mark.parametrize(("here", "there", "expected"), GROUPS.values(), ids=GROUPS)
def test_which_windows_and_block_sizes_fit(
    here: dict[str, int], there: dict[str, int], expected: tuple[str, object, object] | None
) -> None:
    """Prefill keeps a window from a multiple of 256 tokens on; decode needs whole blocks of it."""
    sides = [ranks(cache(group(**changes))) for changes in (here, there)]
    assert layout_mismatches(*sides) == ([Mismatch(*expected)] if expected else [])


@pytest.mark.parametrize(
    ("region_changes", "changes"),
    [({"parts": (Part(0, 8),)}, {}), ({}, {"block_size": 1021}), ({}, {"window": 8})],
    ids=["parts", "blocks", "window"],
)
def test_a_mismatch_of_a_single_rank_is_found(
    region_changes: dict[str, Any], changes: dict[str, Any]
) -> None:
    """A peer's ranks may differ among themselves."""
    second = group(region("a", first_head=2, num_heads=2, **region_changes), **changes)
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


@pytest.mark.parametrize(
    ("first", "words"),
    [
        pytest.param([], "", id="a rank is missing"),
        pytest.param(striped(4)[:1], "tokens 0 to 15 of every 64, ", id="by 4 and by 2"),
        pytest.param(striped(2, 8)[:1], "tokens 0 to 7 of every 16, ", id="by other widths"),
        pytest.param([cache()], "tokens 0 to 0 of every 1, ", id="all and some"),
    ],
)
def test_tokens_that_no_rank_has_are_found(first: list[CacheLayout], words: str) -> None:
    """No rank would read them."""
    remote, words = [*first, *striped(2)[1:]], f"{words}tokens 16 to 31 of every 32"
    field = "tokens that ranks hold of a and 1 more"
    assert layout_mismatches(ranks(cache()), remote) == [Mismatch(field, "complete", words)]
    assert layout_mismatches(remote, ranks(cache())) == [Mismatch(field, words, "complete")]


def test_each_stripe_of_tokens_has_all_heads() -> None:
    halves = [region("a", num_heads=2), region("a", num_heads=2, first_head=2)]
    remote = [cache(group(half, stripe=Stripe(2, place, 16))) for place, half in enumerate(halves)]
    words = "of different heads, [((0, 2, ''),), ((2, 4, ''),)]"
    expected = [Mismatch("tokens that ranks hold of a", "complete", words)]
    assert layout_mismatches(ranks(cache(group(region("a")))), remote) == expected


@pytest.mark.parametrize(("size", "fits"), [(4096, True), (4097, False)])
def test_divided_tokens_may_make_4096_segments(size: int, *, fits: bool) -> None:
    mismatches = layout_mismatches(
        ranks(cache(group(block_size=size))), striped(2, 1, block_size=size)
    )
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
    parts = Part(0, 4), Part(4, 4)
    for first, second in [(f"layer.{n}", f"layer.{n + 1}") for n in range(0, 80, 2)]:
        local = ranks(cache(group(region(first), region(second))))
        fewer = group(region(first, num_heads=2, parts=parts), region(second, num_heads=2))
        assert [each.field for each in layout_mismatches(local, ranks(cache(fewer)))] == [
            f"bytes per head of {first}",
            f"number of KV heads of {first} and 1 more",
        ]
