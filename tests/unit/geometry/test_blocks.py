"""Arithmetic on tokens and block ids: entries, token segments, piece numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.geometry.layout import (
    ABSENT,
    BlockIds,
    Group,
    Stripe,
    Table,
    block_ids,
    entries,
    num_token_segments,
    token_segments,
)
from support.records import written_out

properties = settings(deadline=None, database=None, derandomize=True)


@properties
@given(hit=st.integers(0, 9), load=st.integers(0, 99), size=st.integers(1, 17))
def test_entries_are_exactly_those_that_contain_a_loaded_token(
    hit: int, load: int, size: int
) -> None:
    local = hit * size
    tokens = range(local, local + load)
    assert list(entries(local, load, size)) == sorted({token // size for token in tokens})


# --- tables


@pytest.mark.parametrize(
    ("ids", "first", "expected"),
    [
        pytest.param([], 0, (0, b""), id="nothing"),
        pytest.param([3, 256], 0, (0, b"\3\0\0\0\0\1\0\0"), id="little-endian"),
        pytest.param([ABSENT, ABSENT, 3], 0, (2, b"\3\0\0\0"), id="absent at first"),
        pytest.param([3, ABSENT], 0, (0, b"\3\0\0\0\xff\xff\xff\xff"), id="absent at last"),
        pytest.param([ABSENT] * 4, 2, (6, b""), id="all absent"),
        pytest.param([0], 0, (0, bytes(4)), id="block 0 is there"),
    ],
)
def test_a_table_begins_with_the_first_entry_that_is_present(
    ids: list[int], first: int, expected: tuple[int, bytes]
) -> None:
    made = Table.of(ids, first)
    assert (made.first, made.ids) == expected
    assert made == Table.of(np.array(ids, dtype=np.int64), first)


TABLES = st.builds(
    lambda absent, ids: [ABSENT] * absent + ids,
    st.integers(0, 50),
    st.lists(st.integers(ABSENT, 2**31 - 1), max_size=20),
)
"""Of some the first entries are absent, as a window leaves them."""


@properties
@given(ids=TABLES, begin=st.integers(0, 20))
def test_a_table_comes_back_whole(ids: list[int], begin: int) -> None:
    """Whether it was cut, and where."""
    made = Table.of(ids[begin:], min(begin, len(ids)))
    assert written_out(made)[begin:] == ids[begin:]
    assert len(written_out(made)) == len(ids)
    assert made.num_present == sum(block != ABSENT for block in ids[begin:])
    assert made.num_ids == len(made.block_ids)
    assert not made.num_ids or made.block_ids[0] != ABSENT
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Table) == made
    assert Table.of(written_out(made)) == made


# --- token segments


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Blocks of any size; of their tokens a rank may have a stripe."""
    size, per_entry = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    stripe = Stripe()
    if draw(st.booleans()):
        widths = [width for width in range(1, 25) if size * per_entry % width == 0]
        count = draw(st.integers(2, 4))
        stripe = Stripe(count, draw(st.integers(0, count - 1)), draw(st.sampled_from(widths)))
    return Group(size, 12, per_entry, (), stripe=stripe)


def is_kept(group: Group, token: int) -> bool:
    return token // group.stripe.width % group.stripe.count == group.stripe.place


def place_of(group: Group, token: int) -> tuple[int, int]:
    """(block, slot) of a token, by counting those before it that are kept."""
    kept = sum(is_kept(group, t) for t in range(token))
    return kept // group.block_size, kept % group.block_size


@properties
@given(mine=groups(), theirs=groups(), first=st.integers(0, 2), n=st.integers(0, 40))
def test_segments_cover_each_common_token_once(
    mine: Group, theirs: Group, first: int, n: int
) -> None:
    """Each in one block on both sides, where their slots follow each other.

    Only the last segments may reach beyond the end, but not beyond their blocks.
    """
    start = first * mine.entry_size
    tokens = range(start, start + n)
    common = [t for t in tokens if is_kept(mine, t) and is_kept(theirs, t)]
    expected = {(place_of(mine, t), place_of(theirs, t)) for t in common}
    covered = []
    for segment in token_segments(mine, theirs):
        for token in segment.starts(tokens):
            (block, slot), (other, other_slot) = place_of(mine, token), place_of(theirs, token)
            covered += [((block, slot + n), (other, other_slot + n)) for n in range(segment.length)]
    assert len(set(covered)) == len(covered)
    assert expected <= set(covered)
    blocks = {(here[0], there[0]) for here, there in expected}
    for here, there in covered:
        assert (here[0], there[0]) in blocks
        assert here[1] < mine.block_size
        assert there[1] < theirs.block_size


@pytest.mark.parametrize(
    ("mine", "theirs", "number"),
    [
        pytest.param(Stripe(), Stripe(2, 1, 1), 16, id="one by one: each token is a segment"),
        pytest.param(Stripe(4, 2, 8), Stripe(4, 2, 8), 1, id="alike: as without"),
        pytest.param(Stripe(2, 0, 4), Stripe(4, 1, 2), 8, id="unlike"),
    ],
)
def test_how_many_segments_stripes_make(mine: Stripe, theirs: Stripe, number: int) -> None:
    both = [Group(16, 12, 1, (), stripe=stripe) for stripe in (mine, theirs)]
    assert num_token_segments(*both) == len(token_segments(*both)) == number


def test_segments_of_a_long_period_are_not_listed() -> None:
    mine = Group(1 << 19, 12, 1, (), stripe=Stripe(2, 0, 1))
    assert num_token_segments(mine, Group(16, 12, 1, ())) == 1 << 20


# --- piece numbers


def table(ids: list[int], **changes: Any) -> Callable[[range, int], BlockIds]:
    """The piece numbers of a table of a cache of 12 blocks of four tokens."""
    sizes = {"block_size": 4, "num_blocks": 12, "blocks_per_entry": 1} | changes
    kept = Table(0, block_ids(ids).tobytes())
    return partial(kept.piece_numbers, Group(**sizes, regions=()))


@pytest.mark.parametrize(
    ("table", "tokens", "message"),
    [
        (table([1, 2]), range(4, 12, 4), "block table has 2 entries; needed: 3"),
        (table([12]), range(1), "block id 12; allowed: 0 to 11"),
        (table([4], blocks_per_entry=3), range(1), "block id 4; allowed: 0 to 3"),
        (table([3, 99, -2]), range(0, 12, 4), "block id 99"),
    ],
)
def test_tokens_without_a_valid_entry_are_refused(
    table: Callable[[range, int], BlockIds], tokens: range, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        table(tokens, 1)


def test_ids_of_other_tokens_are_not_checked() -> None:
    assert table([99, 3, 99, 5, 99])(range(4, 16, 8), 1).tolist() == [3, 5]


@settings(properties, max_examples=150)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    ids=st.lists(st.integers(ABSENT, 5), max_size=6),
    first=st.integers(0, 3),
    step=st.integers(1, 30),
    data=st.data(),
)
def test_each_token_has_the_piece_of_a_table_written_out(
    sizes: tuple[int, int, int], ids: list[int], first: int, step: int, data: st.DataObject
) -> None:
    """All pieces of an absent entry have negative numbers; before the first all are absent."""
    size, per_block, per_entry = sizes
    numbers = [ABSENT] * (first * size * per_block * per_entry) + [
        ABSENT if entry < 0 else (entry * per_entry + block) * per_block + piece
        for entry in ids
        for block in range(per_entry)
        for piece in range(per_block)
        for _ in range(size)
    ]
    begin = data.draw(st.integers(0, len(numbers)))
    tokens = range(begin, data.draw(st.integers(begin, len(numbers))), step)
    group = Group(size * per_block, 6 * per_entry, per_entry, ())
    found = Table(first, block_ids(ids).tobytes()).piece_numbers(group, tokens, per_block)
    assert np.maximum(found, ABSENT).tolist() == [numbers[token] for token in tokens]
    assert found.dtype == np.int32
