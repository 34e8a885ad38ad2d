"""Arithmetic on tokens and block ids: entries, token segments, piece numbers."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.geometry.blocks import (
    ABSENT,
    BlockTable,
    block_ids,
    count_present,
    entries,
    num_token_segments,
    to_bytes,
    token_segments,
)
from nixl_kv.geometry.layout import Group

properties = settings(deadline=None, database=None, derandomize=True)


@properties
@given(hit=st.integers(0, 9), load=st.integers(0, 99), size=st.integers(1, 17))
def test_entries_are_exactly_those_that_contain_a_loaded_token(
    hit: int, load: int, size: int
) -> None:
    local = hit * size
    tokens = range(local, local + load)
    assert list(entries(local, load, size)) == sorted({token // size for token in tokens})


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        pytest.param([], [], id="empty list"),
        pytest.param(b"", [], id="empty bytes"),
        pytest.param([3, 1, 2], [3, 1, 2], id="list"),
        pytest.param((3, 1, 2), [3, 1, 2], id="tuple"),
        pytest.param(b"\x03\x00\x00\x00\x00\x01\x00\x00", [3, 256], id="little-endian bytes"),
        pytest.param([2**31 - 1], [2**31 - 1], id="largest"),
        pytest.param(b"\xff\xff\xff\xff", [ABSENT], id="absent"),
    ],
)
def test_block_ids_of_lists_and_bytes(table: list[int] | bytes, expected: list[int]) -> None:
    ids = block_ids(table)
    assert ids.tolist() == expected
    assert ids.dtype == np.int32
    assert ids.ndim == 1


def test_what_is_absent_does_not_count() -> None:
    assert count_present([3, ABSENT, 0, ABSENT]) == 2
    assert count_present(to_bytes(block_ids([ABSENT, 7]))) == 1


def test_bytes_that_end_within_an_id_are_refused() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        block_ids(b"\x00\x00\x00")


@pytest.mark.parametrize("ids", [[], [0], [7, 1, 2**31 - 1, 256]], ids=str)
def test_the_wire_form_is_little_endian_and_reversible(ids: list[int]) -> None:
    wire = to_bytes(block_ids(ids))
    assert wire == b"".join(number.to_bytes(4, "little") for number in ids)
    assert block_ids(wire).tolist() == ids


# --- token segments


@properties
@given(local=st.integers(1, 24), remote=st.integers(1, 24))
def test_a_segment_is_all_tokens_that_have_both_blocks_in_common(local: int, remote: int) -> None:
    segments = token_segments(local, remote)
    pairs = [(token // local, token // remote) for token in range(math.lcm(local, remote))]
    by_pair = [(pairs.index(pair), pairs.count(pair)) for pair in dict.fromkeys(pairs)]
    assert [(segment.start, segment.length) for segment in segments] == by_pair
    assert {segment.period for segment in segments} == {math.lcm(local, remote)}
    assert num_token_segments(local, remote) == len(segments)


@properties
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    first=st.integers(0, 5),
    n=st.integers(0, 40),
)
def test_segments_cover_each_token_once(sizes: tuple[int, int], first: int, n: int) -> None:
    """Only the last segment may reach beyond the end, but not beyond the last local block."""
    tokens = range(first * sizes[0], first * sizes[0] + n)
    covered = [
        token + step
        for segment in token_segments(*sizes)
        for token in segment.starts(tokens)
        for step in range(segment.length)
    ]
    assert len(set(covered)) == len(covered)
    assert sorted(covered)[:n] == list(tokens)
    assert all(t // sizes[0] == (tokens.stop - 1) // sizes[0] for t in covered if t >= tokens.stop)


# --- piece numbers


def table(ids: list[int], *, first: int = 0, **changes: Any) -> BlockTable:
    """A table of a cache of 12 blocks of four tokens."""
    sizes = {"block_size": 4, "num_blocks": 12, "blocks_per_entry": 1} | changes
    return BlockTable(block_ids(ids), Group(**sizes, regions=()), first)


@pytest.mark.parametrize(
    ("table", "tokens", "message"),
    [
        pytest.param(
            table([1, 2]),
            range(4, 12, 4),
            "block table has the entries 0 to 1; needed: 1 to 2",
            id="beyond the end",
        ),
        pytest.param(
            table([1, 2], first=3),
            range(8, 16, 4),
            "block table has the entries 3 to 4; needed: 2 to 3",
            id="before the first",
        ),
        pytest.param(
            table([1, 2]),
            range(5, 12, 3),
            "block table has the entries 0 to 1; needed: 1 to 2",
            id="beyond the end, not at a block's edge",
        ),
        pytest.param(
            table([]), range(1), "block table has the entries 0 to -1", id="an empty table"
        ),
        pytest.param(table([12]), range(1), "block id 12; allowed: 0 to 11", id="large id"),
        pytest.param(
            table([4], blocks_per_entry=3),
            range(1),
            "block id 4; allowed: 0 to 3",
            id="an id counts entries, not blocks",
        ),
        pytest.param(
            table([4], num_blocks=14, blocks_per_entry=3),
            range(1),
            "block id 4; allowed: 0 to 3",
            id="an entry of too few blocks",
        ),
        pytest.param(table([-2]), range(1), "block id -2; allowed: 0 to 11", id="negative id"),
        pytest.param(
            table([3, 99, -2]), range(0, 12, 4), "block id 99", id="the first of two wrong ids"
        ),
    ],
)
def test_tokens_without_a_valid_entry_are_refused(
    table: BlockTable, tokens: range, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        table.piece_numbers(tokens, 1)


def test_ids_of_other_tokens_are_not_checked() -> None:
    assert table([99, 3, 99, 5, 99]).piece_numbers(range(4, 16, 8), 1).tolist() == [3, 5]


@settings(properties, max_examples=150)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    ids=st.lists(st.integers(ABSENT, 5), min_size=1, max_size=6),
    first=st.integers(0, 3),
    step=st.integers(1, 30),
    data=st.data(),
)
def test_each_token_has_the_piece_of_a_table_written_out(
    sizes: tuple[int, int, int], ids: list[int], first: int, step: int, data: st.DataObject
) -> None:
    """All pieces of an absent entry have negative numbers."""
    size, per_block, per_entry = sizes
    written_out = [
        ABSENT if entry < 0 else (entry * per_entry + block) * per_block + piece
        for entry in ids
        for block in range(per_entry)
        for piece in range(per_block)
        for _ in range(size)
    ]
    before = first * size * per_block * per_entry
    begin = data.draw(st.integers(before, before + len(written_out)))
    tokens = range(begin, data.draw(st.integers(begin, before + len(written_out))), step)
    numbers = table(
        ids,
        first=first,
        block_size=size * per_block,
        num_blocks=6 * per_entry,
        blocks_per_entry=per_entry,
    ).piece_numbers(tokens, per_block)
    expected = [written_out[token - before] for token in tokens]
    assert np.maximum(numbers, ABSENT).tolist() == expected
    assert numbers.dtype == np.int32


def test_piece_numbers_do_not_change_the_table() -> None:
    """The ids may be a view of a message."""
    ids = block_ids(b"\x01\x00\x00\x00" * 3)
    BlockTable(ids, Group(4, 8, 2, ())).piece_numbers(range(24), 4)
    assert ids.tolist() == [1, 1, 1]
