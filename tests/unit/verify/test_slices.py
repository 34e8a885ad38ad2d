"""Slices name heads and tokens of a load; a rank finds them in its cache."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from nixl_kv.geometry.layout import (
    ABSENT,
    CacheLayout,
    Group,
    Part,
    Region,
    Span,
    Stripe,
    Table,
    block_ids,
)
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Rank
from nixl_kv.protocol.events import StartLoad
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.verify.slices import find_slices, name_slices, part_name
from support.records import D1

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
    return CacheLayout(groups, "DRAM", 0, (Span(BASE, SIZE),))


FULL = layout().groups[0]
A = KVSlice("a", 2, 3, 0)


def named(
    cache: CacheLayout, share: dict[str, tuple[int, int]], tables: Sequence[Table]
) -> tuple[KVSlice, ...]:
    """The slices of a load with these tables from a rank with the same layers."""
    route = Route(Rank(0), (Rank(0),), share)
    return name_slices(cache, route, layout(), StartLoad(D1, 0, 1, tuple(tables)))


def table(ids: Sequence[int], first: int = 0) -> Table:
    """Absent ids in front are not left out."""
    return Table(first, block_ids(ids).tobytes())


def tables(full: Sequence[int], windowed: Sequence[int], first: int = 0) -> list[Table]:
    return [table(full, first), table(windowed, first * PER_ENTRY)]


# --- naming the slices of a load


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        pytest.param(tables([5, 3], [7, 8, 1, 2]), [0, 0], id="all tokens"),
        pytest.param(tables([5], [7, 8], first=3), [24, 24], id="after a prefix hit"),
        pytest.param(
            tables([5, 3, 1], [ABSENT, 4, ABSENT, ABSENT, 7, 8]), [0, 16], id="a window has passed"
        ),
        pytest.param(tables([5], [ABSENT, ABSENT]), [0], id="a window has passed all"),
        pytest.param(tables([5], []), [0], id="a group without blocks"),
    ],
)
def test_slices_have_the_shared_heads_from_the_first_token_that_is_read_on(
    read: list[Table], expected: list[int]
) -> None:
    """A window is read from after its last absent entry."""
    slices = named(layout(windowed=True), {"a": (2, 4), "c": (3, 4)}, read)
    both = (KVSlice("a", 2, 4, 0), KVSlice("c", 3, 4, 0))
    assert slices == tuple(replace(kv, begin=n) for kv, n in zip(both, expected, strict=False))


# --- where it is


def test_tables_that_do_not_fit_the_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        named(layout(), {"a": (2, 6)}, tables([5], [7])[:1])


def test_a_slice_of_an_opaque_region_ends_with_a_block() -> None:
    """Only the layer's own kernel knows which bytes of a block belong to the last token."""
    plain = layout()
    regions = (region("a"), replace(region("b", 1), opaque=True))
    mixed = replace(plain, groups=(replace(plain.groups[0], regions=regions), plain.groups[1]))
    for end, stop in ((13, 16), (16, 16), (17, 20)):
        wanted = [KVSlice("a", 2, 3, 0), KVSlice("b", 2, 3, 8)]
        slices = find_slices(mixed, wanted, tables([5, 3, 1], []), end=end)
        assert [kv.end for kv in slices] == [end, end, stop, stop]
        assert {len(kv.ids) * BLOCK + kv.first_position for kv in slices} == {stop}


@pytest.mark.parametrize(
    ("place", "end", "last"),
    [
        pytest.param(0, 2, 6, id="one block of it, of which it has the first token"),
        pytest.param(0, 13, 14, id="two blocks"),
        pytest.param(1, 2, 2, id="none, before its first token"),
        pytest.param(1, 13, 16, id="one block, tokens 4 to 7 and 12 to 15"),
    ],
)
def test_of_divided_tokens_an_opaque_slice_ends_with_a_block_of_the_rank(
    place: int, end: int, last: int
) -> None:
    """Blocks of four tokens, of which the rank has four of every eight, two and two."""
    regions = (replace(region("b", 1), opaque=True),)
    group = Group(BLOCK, 64, 1, regions, stripe=Stripe(2, place, 4 if place else 2))
    cache = replace(layout(), groups=(group,))
    kv, _ = find_slices(cache, [KVSlice("b", 2, 3, 0)], [table([5, 3, 1])], end=end)
    assert kv.end == last
    assert len(kv.positions) == len(kv.ids) * BLOCK


@pytest.mark.parametrize(
    ("count", "names", "state_names"),
    [(1, ["KV"], ["content"]), (2, ["K", "V"], ["row 0", "row 1"]), (3, ["part"] * 3, [])],
)
def test_each_head_has_a_name(count: int, names: list[str], state_names: list[str]) -> None:
    """Parts of a state are not named like those of KV."""
    one = region("x", parts=count)
    cache = replace(layout(), groups=(replace(FULL, regions=(one,)),))
    slices = find_slices(cache, [KVSlice("x", 3, 5, 0)], [table([1])], end=8)
    assert [kv.names for kv in slices] == [
        [f"{name} of head {head} of layer x" for head in (3, 4)] for name in names
    ]
    state = Group(1, BLOCKS, 1, (one,), window=1)
    assert [part_name(state, one, n) for n in range(len(state_names))] == state_names


def test_layers_that_begin_with_the_same_token_share_an_array_of_blocks() -> None:
    wanted = [KVSlice("a", 2, 3, 0), KVSlice("b", 2, 6, 0)]
    slices = find_slices(layout(), wanted, tables([5, 3], []), end=9)
    assert len({id(kv.ids) for kv in slices}) == 1
    assert np.array_equal(slices[0].ids, [10, 11, 6])


def test_a_state_is_not_divided() -> None:
    cache = replace(layout(), groups=(replace(FULL, window=1),))
    with pytest.raises(ValueError, match=r"'a' has 1 stripes .* this rank's; allowed: 0$"):
        find_slices(cache, [replace(A, stripes=(Stripe(2),))], [table([5])], end=4)


# --- requests of peers


TWICE = "a layer occurs twice among the slices; allowed: once"


@pytest.mark.parametrize(
    ("wanted", "end", "message"),
    [
        ([replace(A, layer="z")], 4, "layer 'z' is not on this rank"),
        ([replace(A, first_head=1)], 4, "heads of 'a' are 1 to 3; allowed: within 2 to 6"),
        ([replace(A, end_head=7)], 4, "heads of 'a' are 2 to 7; allowed: within 2 to 6"),
        ([replace(A, begin=4)], 4, "begin of 'a' is 4; allowed: below 4"),
        ([A, A], 4, TWICE),
        ([A, KVSlice("a", 3, 4, 0)], 4, TWICE),
        (
            [replace(A, stripes=(Stripe(2), Stripe(4)))],
            4,
            "'a' has 2 stripes that are not this rank's; allowed: 1",
        ),
        ([A], 17, "block table has 2 entries; needed: 3"),
        ([replace(A, layer="c")], 12, "the block of token 4 is absent"),
    ],
)
def test_slices_that_are_not_on_this_rank_are_refused(
    wanted: list[KVSlice], end: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        find_slices(layout(windowed=True), wanted, tables([5, 3], [7, ABSENT, 8]), end=end)


def test_blocks_that_the_cache_or_the_table_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="the block of token 0 is absent"):
        find_slices(layout(), [A], tables([5, 3], [], first=2), end=4)
    with pytest.raises(ValueError, match="block id 10; allowed: 0 to 9"):
        find_slices(layout(), [A], tables([10], []), end=4)
