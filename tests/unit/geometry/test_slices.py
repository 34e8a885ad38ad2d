"""Excerpts and strips: which tokens and heads are looked at, and where they stand on a rank."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from nixl_kv.geometry.blocks import ABSENT, block_ids
from nixl_kv.geometry.excerpts import BlockTable, Excerpt, excerpts, strips
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span

BASE = 1 << 20
SIZE = 1 << 16
BLOCK, PER_ENTRY, BLOCKS = 4, 2, 20


def region(layer: str, number: int = 0, parts: int = 2) -> Region:
    """Heads 2 to 5 of the model; each head's block is 4 tokens of 6 bytes, K before V."""
    lengths = [Part(2 * part, 2) for part in range(parts)] if parts > 1 else [Part(0, 6)]
    return Region(layer, BASE + number * 4096, 96, 24, 6, 2, 4, tuple(lengths))


def layout(*, windowed: bool = False) -> CacheLayout:
    """Layers a and b with all tokens, c (of one part) in a group of its own."""
    groups = (
        Group(BLOCK, BLOCKS, PER_ENTRY, (region("a"), region("b", 1))),
        Group(BLOCK, BLOCKS, 1, (region("c", 2, parts=1),), window=8 if windowed else 0),
    )
    return CacheLayout(groups, "uint8", "DRAM", 0, (Span(BASE, SIZE),))


def tables(full: Sequence[int], windowed: Sequence[int], first: int = 0) -> list[BlockTable]:
    return [
        BlockTable(block_ids(full), first),
        BlockTable(block_ids(windowed), first * PER_ENTRY),
    ]


# --- what a request reads


def test_all_tokens_of_what_is_shared_are_read() -> None:
    share = {"a": (2, 4), "c": (3, 4)}
    found = excerpts(layout(), share, tables([5, 3], [7, 8, 1, 2]))
    assert found == (Excerpt("a", 2, 4, 0), Excerpt("c", 3, 4, 0))


def test_a_prefix_hit_begins_where_the_table_does() -> None:
    found = excerpts(layout(), {"a": (2, 6), "c": (2, 6)}, tables([5], [7, 8], first=3))
    assert [excerpt.begin for excerpt in found] == [3 * BLOCK * PER_ENTRY, 6 * BLOCK]


def test_a_window_begins_behind_its_last_absent_entry() -> None:
    share = {"a": (2, 6), "c": (2, 6)}
    passed = [ABSENT, 4, ABSENT, ABSENT, 7, 8]
    found = excerpts(layout(windowed=True), share, tables([5, 3, 1], passed))
    assert found == (Excerpt("a", 2, 6, 0), Excerpt("c", 2, 6, 16))


def test_a_group_without_any_block_is_not_read() -> None:
    found = excerpts(layout(), {"a": (2, 6), "c": (2, 6)}, tables([5], [ABSENT, ABSENT]))
    assert found == (Excerpt("a", 2, 6, 0),)


def test_a_group_without_entries_is_not_read() -> None:
    assert excerpts(layout(), {"c": (2, 6)}, tables([5], [])) == ()


# --- where it stands


def test_a_strip_of_an_opaque_region_ends_with_a_block() -> None:
    """Only its own kernel knows which bytes of a block are the last token's."""
    known = layout()
    regions = (region("a"), replace(region("b", 1), opaque=True))
    mixed = replace(known, groups=(replace(known.groups[0], regions=regions), known.groups[1]))
    for end, stop in ((13, 16), (16, 16), (17, 20)):
        wanted = [Excerpt("a", 2, 3, 0), Excerpt("b", 2, 3, 8)]
        found = strips(mixed, wanted, tables([5, 3, 1], []), end=end)
        assert [strip.end for strip in found] == [end, end, stop, stop]
        assert {len(strip.ids) * BLOCK + strip.first_token for strip in found} == {stop}


def test_one_strip_for_each_part() -> None:
    wanted = [Excerpt("c", 3, 5, 4), Excerpt("a", 2, 6, 8)]
    found = strips(layout(), wanted, tables([5, 3], [7, 8, 1, 2]), end=14)
    assert [(strip.region.layer, strip.number) for strip in found] == [("c", 0), ("a", 0), ("a", 1)]
    assert [strip.ids.tolist() for strip in found] == [[8, 1, 2], [6, 7], [6, 7]]
    assert [strip.first_token for strip in found] == [4, 8, 8]
    assert [strip.num_heads for strip in found] == [2, 4, 4]
    assert [strip.num_bytes for strip in found] == [2 * 10 * 6, 4 * 6 * 2, 4 * 6 * 2]
    assert [strip.base - BASE for strip in found] == [2 * 4096 + 24, 0, 2]


def test_a_beginning_within_a_block_keeps_the_whole_block() -> None:
    (strip,) = strips(layout(), [Excerpt("c", 2, 3, 6)], tables([], [7, 8, 1, 2]), end=9)
    assert (strip.begin, strip.end, strip.first_token) == (6, 9, 4)
    assert strip.ids.tolist() == [8, 1]


def test_entries_are_cut_into_blocks() -> None:
    """A table counts blocks of 8 tokens, which are two of the region's."""
    strip = strips(layout(), [Excerpt("a", 2, 3, 0)], tables([5, 3, 9], []), end=18)[0]
    assert strip.ids.tolist() == [10, 11, 6, 7, 18]


def test_a_part_may_have_a_token_stride_of_its_own() -> None:
    (group, other), parts = layout().groups, (Part(0, 1, 2, 4, 1), Part(8, 2))
    transposed = replace(group, regions=(replace(group.regions[0], parts=parts),))
    found = strips(
        replace(layout(), groups=(transposed, other)),
        [Excerpt("a", 2, 3, 0)],
        tables([5], []),
        end=4,
    )
    assert [strip.token_stride for strip in found] == [1, 6]
    assert [strip.part.content for strip in found] == [2, 2]


@pytest.mark.parametrize(
    ("count", "names"), [(1, ["KV"]), (2, ["K", "V"]), (3, ["part", "part", "part"])]
)
def test_rows_have_names(count: int, names: list[str]) -> None:
    group = replace(layout().groups[0], regions=(region("x", parts=count),))
    found = strips(
        replace(layout(), groups=(group,)),
        [Excerpt("x", 3, 5, 0)],
        [BlockTable(block_ids([1]))],
        end=8,
    )
    assert [strip.names for strip in found] == [
        [f"{name} of head 3 of layer x", f"{name} of head 4 of layer x"] for name in names
    ]


# --- what a peer may say


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((-1, 1, 0), "heads of 'a' are -1 to 1; allowed: a half-open range"),
        ((1, 1, 0), "heads of 'a' are 1 to 1; allowed: a half-open range"),
        ((2, 1, 0), "heads of 'a' are 2 to 1; allowed: a half-open range"),
        ((0, (1 << 17) + 1, 0), "heads of 'a' are 0 to 131073; allowed: a half-open range"),
        ((0, 1, -1), "begin of 'a' is -1; allowed: a token"),
        ((0, 1, 1 << 31), "begin of 'a' is 2147483648; allowed: a token"),
    ],
)
def test_bad_numbers_are_refused_in_words(numbers: tuple[int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        Excerpt("a", *numbers)


def test_the_edges_of_what_is_allowed() -> None:
    assert Excerpt("a", 0, 1 << 17, (1 << 31) - 1)


@pytest.mark.parametrize(
    ("wanted", "end", "told"),
    [
        ([Excerpt("z", 2, 3, 0)], 4, "layer 'z' is not on this rank"),
        ([Excerpt("a", 1, 3, 0)], 4, "heads of 'a' are 1 to 3; allowed: within 2 to 6"),
        ([Excerpt("a", 5, 7, 0)], 4, "heads of 'a' are 5 to 7; allowed: within 2 to 6"),
        ([Excerpt("a", 2, 3, 4)], 4, "begin of 'a' is 4; allowed: below 4"),
        ([Excerpt("a", 2, 3, 0)] * 2, 4, "a layer stands twice among the excerpts; allowed: once"),
        (
            [Excerpt("a", 2, 3, 0), Excerpt("a", 3, 4, 0)],
            4,
            "a layer stands twice among the excerpts; allowed: once",
        ),
        (
            [Excerpt("a", 2, 3, 0)],
            17,
            "block table has the entries 0 to 1; needed: 0 to 2",
        ),
        ([Excerpt("c", 2, 3, 0)], 12, "the block of token 4 is absent"),
    ],
)
def test_what_is_not_here_is_refused_in_words(wanted: list[Excerpt], end: int, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        strips(layout(windowed=True), wanted, tables([5, 3], [7, ABSENT, 8]), end=end)


def test_a_token_before_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="block table has the entries 2 to 3; needed: 0 to 0"):
        strips(layout(), [Excerpt("a", 2, 3, 0)], tables([5, 3], [], first=2), end=4)


def test_a_block_that_the_cache_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="block id 10; allowed: 0 to 9"):
        strips(layout(), [Excerpt("a", 2, 3, 0)], tables([10], []), end=4)


def test_nothing_wanted_is_nowhere() -> None:
    assert strips(layout(), [], tables([5], []), end=4) == []


def test_layers_with_one_beginning_share_their_blocks() -> None:
    wanted = [Excerpt("a", 2, 3, 0), Excerpt("b", 2, 6, 0)]
    found = strips(layout(), wanted, tables([5, 3], []), end=9)
    assert len({id(strip.ids) for strip in found}) == 1
    assert np.array_equal(found[0].ids, [10, 11, 6])


def test_layers_with_other_beginnings_have_blocks_of_their_own() -> None:
    wanted = [Excerpt("a", 2, 3, 0), Excerpt("b", 2, 6, 8)]
    found = strips(layout(), wanted, tables([5, 3], []), end=14)
    assert [strip.ids.tolist() for strip in found] == [[10, 11, 6, 7]] * 2 + [[6, 7]] * 2
