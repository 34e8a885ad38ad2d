"""Why two engines do not fit, in words."""

from dataclasses import replace
from typing import Any

import pytest

from nixl_kv.geometry.compat import Mismatch, mismatches, model_mismatches, shape_mismatches
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.ranks import Shape

SPAN = Span(1, 2**30)
ENTRY = "tokens per block table entry"


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


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        pytest.param(Shape(2, 3), Shape(2, 3), [], id="equal"),
        pytest.param(
            Shape(2, 1), Shape(4, 1), [Mismatch("tensor_parallel_size", 2, 4)], id="tensor parallel"
        ),
        pytest.param(
            Shape(2, 1), Shape(2, 2), [Mismatch("pipeline_parallel_size", 1, 2)], id="pipeline"
        ),
        pytest.param(
            Shape(2, 3),
            Shape(3, 2),
            [Mismatch("tensor_parallel_size", 2, 3), Mismatch("pipeline_parallel_size", 3, 2)],
            id="both, of equal size",
        ),
    ],
)
def test_shapes(local: Shape, remote: Shape, expected: list[Mismatch]) -> None:
    assert shape_mismatches(local, remote) == expected


@pytest.mark.parametrize(
    "remote",
    [
        pytest.param(cache(), id="equal"),
        pytest.param(cache(group(num_blocks=99)), id="number of blocks"),
        pytest.param(cache(memory="VRAM", device=7), id="memory"),
        pytest.param(cache(group(region("b"), region("a"))), id="order of the layers"),
        pytest.param(
            cache(group(*(region(n, base=64, block_stride=9999, head_stride=32) for n in "ab"))),
            id="where the bytes stand",
        ),
        pytest.param(
            cache(group(*(region(n, parts=(Part(0, 8), Part(5000, 8))) for n in "ab"))),
            id="K and V apart",
        ),
    ],
)
def test_what_may_differ(remote: CacheLayout) -> None:
    assert mismatches(cache(), remote) == []
    assert mismatches(remote, cache()) == []


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        pytest.param(
            cache(element="uint8"), [Mismatch("KV cache dtype", "bfloat16", "uint8")], id="dtype"
        ),
        pytest.param(
            cache(group(region("a")), group(region("b"))),
            [Mismatch("number of cache groups", 1, 2)],
            id="groups",
        ),
        pytest.param(
            cache(group(region("a"))), [Mismatch("number of layers", 2, 1)], id="number of layers"
        ),
        pytest.param(
            cache(group(region("a")), group(region("b")), group(region("c")), element="uint8"),
            [
                Mismatch("KV cache dtype", "bfloat16", "uint8"),
                Mismatch("number of cache groups", 1, 3),
                Mismatch("number of layers", 2, 3),
            ],
            id="what explains most, alone",
        ),
        pytest.param(
            cache(group(block_size=32)),
            [Mismatch("block_size", 16, 32), Mismatch(ENTRY, 16, 32)],
            id="block size",
        ),
        pytest.param(
            cache(group(blocks_per_entry=2)), [Mismatch(ENTRY, 16, 32)], id="blocks per entry"
        ),
        pytest.param(
            cache(group(block_size=8, blocks_per_entry=2)),
            [Mismatch("block_size", 16, 8)],
            id="entries alike, cut into other blocks",
        ),
        pytest.param(
            cache(group(region("a"), region("c"), block_size=32)),
            [
                Mismatch("block_size", 16, 32),
                Mismatch(ENTRY, 16, 32),
                Mismatch("layers", ["a", "b"], ["a", "c"]),
            ],
            id="block size and layers",
        ),
        pytest.param(
            cache(group(region("b", first_head=4), region("a"))),
            [Mismatch("KV heads of b", (0, 4), (4, 8))],
            id="other heads",
        ),
        pytest.param(
            cache(group(region("a", num_heads=2), region("b"))),
            [Mismatch("KV heads of a", (0, 4), (0, 2))],
            id="fewer heads",
        ),
        pytest.param(
            cache(group(region("a"), region("b", parts=(Part(0, 8), Part(8, 4))))),
            [Mismatch("bytes per head of b", (8, 8), (8, 4))],
            id="other content",
        ),
        pytest.param(
            cache(group(region("a"), region("b", parts=(Part(0, 16),)))),
            [Mismatch("bytes per head of b", (8, 8), (16,))],
            id="other parts",
        ),
        pytest.param(
            cache(
                group(
                    region("a", num_heads=2, parts=(Part(0, 4), Part(4, 4))),
                    region("b", first_head=1),
                )
            ),
            [
                Mismatch("KV heads of a", (0, 4), (0, 2)),
                Mismatch("bytes per head of a", (8, 8), (4, 4)),
                Mismatch("KV heads of b", (0, 4), (1, 5)),
            ],
            id="all regions",
        ),
    ],
)
def test_what_must_not_differ(remote: CacheLayout, expected: list[Mismatch]) -> None:
    assert mismatches(cache(), remote) == expected


def test_every_group_is_compared() -> None:
    local = cache(group(region("a")), group(region("b")), group(region("c")))
    remote = cache(group(region("a"), block_size=8), group(region("x")), group(region("c")))
    assert mismatches(local, remote) == [
        Mismatch("block_size", 16, 8),
        Mismatch(ENTRY, 16, 8),
        Mismatch("layers", ["b"], ["x"]),
    ]
