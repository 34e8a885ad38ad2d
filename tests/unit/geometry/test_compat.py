"""Why two engines do not fit, in words."""

from dataclasses import replace
from typing import Any

import pytest

from nixl_kv.geometry.compat import Mismatch, mismatches, model_mismatches
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span

SPAN = Span(1, 2**30)


def region(layer: str = "a", **changes: Any) -> Region:
    made = Region(layer, 4096, 1024, 256, 16, 0, 4, (Part(0, 8), Part(8, 8)))
    return replace(made, **changes)


def group(*regions: Region, **changes: Any) -> Group:
    return replace(Group(16, 10, 1, regions or (region("a"), region("b"))), **changes)


def cache(*groups: Group, **changes: Any) -> CacheLayout:
    made = CacheLayout(groups or (group(),), "bfloat16", "DRAM", 0, (SPAN,))
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("mismatch", "words"),
    [
        pytest.param(Mismatch("dtype", "a", "b"), "dtype is 'a' here and 'b' there", id="text"),
        pytest.param(Mismatch("layers", 1, None), "layers is 1 here and None there", id="missing"),
    ],
)
def test_words(mismatch: Mismatch, words: str) -> None:
    assert str(mismatch) == words


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        pytest.param({}, {}, [], id="nothing known"),
        pytest.param({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, [], id="equal"),
        pytest.param({"a": "1"}, {"a": "2"}, [Mismatch("a", "1", "2")], id="other value"),
        pytest.param({"a": "1"}, {}, [Mismatch("a", "1", None)], id="missing there"),
        pytest.param({}, {"a": "1"}, [Mismatch("a", None, "1")], id="missing here"),
        pytest.param(
            {"z": "1", "b": "2", "c": "3"},
            {"z": "0", "a": "2", "c": "3"},
            [Mismatch("a", None, "2"), Mismatch("b", "2", None), Mismatch("z", "1", "0")],
            id="all of them, by name",
        ),
    ],
)
def test_models(local: dict[str, str], remote: dict[str, str], expected: list[Mismatch]) -> None:
    assert model_mismatches(local, remote) == expected


def ranks(*layouts: CacheLayout) -> list[CacheLayout]:
    return list(layouts)


def tp(count: int, **changes: Any) -> list[CacheLayout]:
    """Four heads of two layers, cut for so many ranks, or copied."""
    most = max(1, 4 // count)
    firsts = [rank * 4 // count for rank in range(count)]
    return [
        cache(group(*(region(n, first_head=f, num_heads=most) for n in "ab"), **changes))
        for f in firsts
    ]


def pp(*stages: str) -> list[CacheLayout]:
    return [cache(group(*map(region, names))) for names in stages]


@pytest.mark.parametrize(
    "remote",
    [
        pytest.param(ranks(cache()), id="equal"),
        pytest.param(ranks(cache(group(num_blocks=99))), id="number of blocks"),
        pytest.param(ranks(cache(memory="VRAM", device=7)), id="memory"),
        pytest.param(ranks(cache(group(region("b"), region("a")))), id="order of the layers"),
        pytest.param(
            ranks(cache(group(*(region(n, base=64, block_stride=9999) for n in "ab")))),
            id="where the bytes stand",
        ),
        pytest.param(
            ranks(cache(group(*(region(n, parts=(Part(0, 8), Part(5000, 8))) for n in "ab")))),
            id="K and V apart",
        ),
        pytest.param(
            ranks(
                cache(group(*(region(n, parts=(Part(0, 2, 4, 9, 2), Part(64, 8))) for n in "ab")))
            ),
            id="K transposed",
        ),
        pytest.param(ranks(cache(group(block_size=64))), id="block size"),
        pytest.param(ranks(cache(group(block_size=24))), id="block size that does not divide"),
        pytest.param(ranks(cache(group(blocks_per_entry=5))), id="blocks per entry"),
        pytest.param(ranks(cache(group(region("a")), group(region("b")))), id="groups"),
        pytest.param(tp(2), id="TP 2"),
        pytest.param(tp(4), id="TP 4"),
        pytest.param(tp(8), id="TP 8, each head twice"),
        pytest.param(pp("a", "b"), id="PP 2"),
        pytest.param(pp("b", "", "a"), id="PP 3, a stage without layers"),
        pytest.param(ranks(cache(), cache()), id="all heads on both of two ranks"),
        pytest.param(
            ranks(cache(), cache(group(*(region(n, first_head=1, num_heads=2) for n in "ab")))),
            id="some heads once more",
        ),
    ],
)
def test_how_engines_are_cut_may_differ(remote: list[CacheLayout]) -> None:
    assert mismatches(ranks(cache()), remote) == []
    assert mismatches(remote, ranks(cache())) == []


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        pytest.param(
            ranks(cache(element="uint8")),
            [Mismatch("KV cache dtype", "bfloat16", "uint8")],
            id="dtype",
        ),
        pytest.param(
            ranks(cache(element="bfloat16, uint8"), cache()),
            [Mismatch("KV cache dtype", "bfloat16", "bfloat16, uint8")],
            id="dtypes of several ranks",
        ),
        pytest.param(
            pp("a"),
            [Mismatch("what only one side has of the layers", "b", "nothing")],
            id="fewer layers",
        ),
        pytest.param(
            pp("abcde"),
            [Mismatch("what only one side has of the layers", "nothing", "c and 2 more")],
            id="more layers",
        ),
        pytest.param(
            pp("ax", "y"),
            [Mismatch("what only one side has of the layers", "b", "x and 1 more")],
            id="other layers",
        ),
        pytest.param(
            ranks(cache(group(*(region(n, num_heads=8) for n in "ab")))),
            [Mismatch("number of KV heads of a and 1 more", 4, 8)],
            id="more heads",
        ),
        pytest.param(
            ranks(cache(group(region("a", num_heads=2), region("b")))),
            [Mismatch("number of KV heads of a", 4, 2)],
            id="fewer heads in one layer",
        ),
        pytest.param(
            tp(2)[:1],
            [Mismatch("number of KV heads of a and 1 more", 4, 2)],
            id="half of the ranks",
        ),
        pytest.param(
            tp(4)[::3],
            [Mismatch("number of KV heads of a and 1 more", 4, ((0, 1), (3, 4)))],
            id="ranks missing in the middle",
        ),
        pytest.param(
            tp(2)[1:],
            [Mismatch("number of KV heads of a and 1 more", 4, ((2, 4),))],
            id="the first rank is missing",
        ),
        pytest.param(
            ranks(cache(group(region("a"), region("b", parts=(Part(0, 8), Part(8, 4)))))),
            [Mismatch("bytes per head of b", (8, 8), (8, 4))],
            id="other content",
        ),
        pytest.param(
            ranks(cache(group(region("a"), region("b", parts=(Part(0, 16),))))),
            [Mismatch("bytes per head of b", (8, 8), (16,))],
            id="other parts",
        ),
        pytest.param(
            ranks(cache(group(region("a"), region("b", parts=(Part(0, 2, 3, 9), Part(9, 8)))))),
            [Mismatch("bytes per head of b", (8, 8), (6, 8))],
            id="fewer pieces of K",
        ),
        pytest.param(
            ranks(cache(group(block_size=1021))),
            [Mismatch("block size, whose edges hardly ever meet, of a and 1 more", 16, 1021)],
            id="block sizes that have no divisor in common",
        ),
        pytest.param(
            ranks(cache(group(region("a", num_heads=2, parts=(Part(0, 4), Part(4, 4))))), *pp("c")),
            [
                Mismatch("what only one side has of the layers", "b", "c"),
                Mismatch("bytes per head of a", (8, 8), (4, 4)),
                Mismatch("number of KV heads of a", 4, 2),
            ],
            id="all of them",
        ),
    ],
)
def test_what_must_not_differ(remote: list[CacheLayout], expected: list[Mismatch]) -> None:
    assert mismatches(ranks(cache()), remote) == expected


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        pytest.param(0, 0, [], id="full on both"),
        pytest.param(64, 64, [], id="equal"),
        pytest.param(32, 64, [], id="a shorter one here"),
        pytest.param(64, 0, [], id="full there, which keeps all"),
        pytest.param(64, 32, [(64, 32)], id="a longer one here"),
        pytest.param(0, 32, [(None, 32)], id="full here"),
    ],
)
def test_windows(here: int, there: int, expected: list[tuple[int | None, int]]) -> None:
    """Of what decode looks at, prefill must have kept all."""
    found = mismatches(ranks(cache(group(window=here))), ranks(cache(group(window=there))))
    assert found == [Mismatch("sliding window of a and 1 more", *pair) for pair in expected]


@pytest.mark.parametrize(
    ("here", "there", "fits"),
    [
        pytest.param({"block_size": 64}, {"block_size": 16}, True, id="a divisor of 256"),
        pytest.param({"block_size": 256}, {"block_size": 16}, True, id="256"),
        pytest.param({"block_size": 48}, {"block_size": 16}, False, id="48 to 16"),
        pytest.param({"block_size": 512}, {"block_size": 16}, False, id="512 to 16"),
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
def test_block_sizes_for_windows(
    here: dict[str, int], there: dict[str, int], *, fits: bool
) -> None:
    """Prefill keeps what a window needs from a multiple of 256 tokens on; decode fills blocks."""
    sides = [ranks(cache(group(window=64, **sizes))) for sizes in (here, there)]
    expected = (
        [] if fits else ["block size, which must divide 256 or prefill's for a sliding window"]
    )
    assert [m.field.partition(", of ")[0] for m in mismatches(*sides)] == expected
    full = [ranks(cache(group(**sizes))) for sizes in (here, there)]
    assert mismatches(*full) == []


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        pytest.param((256, 257), True, id="512 stretches of both"),
        pytest.param((255, 259), False, id="513 of both"),
        pytest.param((16, 16 * 512), True, id="512 stretches in each block"),
        pytest.param((16, 16 * 513), False, id="513"),
    ],
)
def test_into_how_many_stretches_blocks_may_be_cut(sizes: tuple[int, int], *, fits: bool) -> None:
    sides = [ranks(cache(group(block_size=size))) for size in sizes]
    assert (mismatches(*sides) == []) == fits == (mismatches(*sides[::-1]) == [])


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
def test_every_rank_is_compared(second: Group) -> None:
    """A peer's ranks need not agree among themselves."""
    remote = ranks(cache(group(region("a", num_heads=2))), cache(second))
    assert mismatches(ranks(cache(group(region("a")))), remote) != []


def test_each_layer_is_held_against_its_own_group() -> None:
    local = ranks(cache(group(region("a"), window=4), group(region("b"))))
    remote = ranks(cache(group(region("b"), region("a"), window=8)))
    assert mismatches(local, remote) == [Mismatch("sliding window of b", None, 8)]


def test_the_order_is_always_the_same() -> None:
    """Of what begins with the same layer, what explains most comes first."""
    for first, second in [(f"layer.{n}", f"layer.{n + 1}") for n in range(0, 80, 2)]:
        local = ranks(cache(group(region(first), region(second))))
        fewer = region(first, num_heads=2, parts=(Part(0, 4), Part(4, 4)))
        remote = ranks(cache(group(fewer, region(second, num_heads=2))))
        assert [mismatch.field for mismatch in mismatches(local, remote)] == [
            f"bytes per head of {first}",
            f"number of KV heads of {first} and 1 more",
        ]


def test_layers_that_differ_alike_share_a_line() -> None:
    names = [f"layer.{number}" for number in range(10)]
    local, remote = (
        ranks(cache(group(*(region(n, num_heads=heads) for n in reversed(names)))))
        for heads in (4, 8)
    )
    assert list(map(str, mismatches(local, remote))) == [
        "number of KV heads of layer.0 and 9 more is 4 here and 8 there"
    ]
