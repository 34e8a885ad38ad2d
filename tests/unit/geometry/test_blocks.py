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
    TokenSegment,
    block_ids,
    entries,
    num_token_segments,
    to_bytes,
    token_segments,
)
from nixl_kv.geometry.layout import Group

properties = settings(deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize(
    ("local", "load", "size", "expected"),
    [
        pytest.param(0, 0, 16, range(0), id="nothing of nothing"),
        pytest.param(32, 0, 16, range(2, 2), id="nothing after a hit"),
        pytest.param(0, 1, 16, range(1), id="one token"),
        pytest.param(0, 15, 16, range(1), id="one less than a block"),
        pytest.param(0, 16, 16, range(1), id="one block"),
        pytest.param(0, 17, 16, range(2), id="one more than a block"),
        pytest.param(32, 16, 16, range(2, 3), id="one block after a hit"),
        pytest.param(32, 17, 16, range(2, 4), id="one block and a token after a hit"),
        pytest.param(32, 31, 16, range(2, 4), id="all but the last token of a block"),
        pytest.param(5, 3, 1, range(5, 8), id="blocks of one token"),
    ],
)
def test_entries_of_a_load(local: int, load: int, size: int, expected: range) -> None:
    assert list(entries(local, load, size)) == list(expected)


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


def test_bytes_that_end_within_an_id_are_refused() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        block_ids(b"\x00\x00\x00")


@pytest.mark.parametrize("ids", [[], [0], [7, 1, 2**31 - 1, 256]], ids=str)
def test_the_wire_form_is_little_endian_and_reversible(ids: list[int]) -> None:
    wire = to_bytes(block_ids(ids))
    assert wire == b"".join(number.to_bytes(4, "little") for number in ids)
    assert block_ids(wire).tolist() == ids


# --- token segments


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        pytest.param(16, 16, [(0, 16)], id="equal"),
        pytest.param(1, 1, [(0, 1)], id="one token each"),
        pytest.param(64, 16, [(0, 16), (16, 16), (32, 16), (48, 16)], id="4:1"),
        pytest.param(16, 64, [(0, 16), (16, 16), (32, 16), (48, 16)], id="1:4"),
        pytest.param(48, 16, [(0, 16), (16, 16), (32, 16)], id="3:1"),
        pytest.param(48, 32, [(0, 32), (32, 16), (48, 16), (64, 32)], id="3:2"),
        pytest.param(2, 3, [(0, 2), (2, 1), (3, 1), (4, 2)], id="2:3"),
        pytest.param(4, 6, [(0, 4), (4, 2), (6, 2), (8, 4)], id="4:6"),
    ],
)
def test_token_segments_of_two_block_sizes(
    local: int, remote: int, expected: list[tuple[int, int]]
) -> None:
    segments = token_segments(local, remote)
    assert [(segment.start, segment.length) for segment in segments] == expected
    assert {segment.period for segment in segments} == {math.lcm(local, remote)}


@properties
@given(local=st.integers(1, 24), remote=st.integers(1, 24))
def test_a_segment_is_all_tokens_that_have_both_blocks_in_common(local: int, remote: int) -> None:
    segments = token_segments(local, remote)
    pairs = [(token // local, token // remote) for token in range(math.lcm(local, remote))]
    by_pair = [(pairs.index(pair), pairs.count(pair)) for pair in dict.fromkeys(pairs)]
    assert [(segment.start, segment.length) for segment in segments] == by_pair
    assert num_token_segments(local, remote) == len(segments)


@pytest.mark.parametrize(
    ("segment", "tokens", "expected"),
    [
        pytest.param((0, 16, 16), range(48), [0, 16, 32], id="whole blocks"),
        pytest.param((0, 16, 16), range(33), [0, 16, 32], id="the end is inside one"),
        pytest.param((0, 16, 16), range(32), [0, 16], id="the end is an edge"),
        pytest.param((16, 16, 64), range(48, 150), [80, 144], id="from the next period on"),
        pytest.param((16, 16, 64), range(16, 80), [16], id="from its own start on"),
        pytest.param((48, 16, 64), range(40), [], id="none so early"),
        pytest.param((0, 16, 16), range(32, 32), [], id="no tokens"),
    ],
)
def test_a_segment_starts_once_per_period(
    segment: tuple[int, int, int], tokens: range, expected: list[int]
) -> None:
    assert list(TokenSegment(*segment).starts(tokens)) == expected


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
    ("table", "tokens", "expected"),
    [
        pytest.param(table([7, 3]), range(0, 8, 4), [7, 3], id="a token of each block"),
        pytest.param(table([7, 3]), range(2, 8, 4), [7, 3], id="from slot 2 on"),
        pytest.param(table([7, 3]), range(0, 8, 2), [7, 7, 3, 3], id="two tokens of each block"),
        pytest.param(table([7, 1, 3]), range(1, 12, 8), [7, 3], id="each second block"),
        pytest.param(table([7, 1, 3]), range(0, 12, 6), [7, 1], id="steps of one and a half"),
        pytest.param(table([7, 3]), range(4, 4), [], id="no tokens"),
        pytest.param(table([]), range(0), [], id="no entries, no tokens"),
        pytest.param(table([7, 3], first=5), range(20, 28, 4), [7, 3], id="from entry 5 on"),
        pytest.param(
            table([3, 1], blocks_per_entry=3),
            range(0, 24, 4),
            [9, 10, 11, 3, 4, 5],
            id="three blocks per entry",
        ),
        pytest.param(
            table([3, 1], blocks_per_entry=3, first=1),
            range(16, 36, 8),
            [10, 3, 5],
            id="three per entry, each second one, from entry 1 on",
        ),
        pytest.param(
            table([3, 1], blocks_per_entry=3),
            range(8, 24, 12),
            [11, 5],
            id="three per entry, the last one of each",
        ),
        pytest.param(table([ABSENT, 3]), range(0, 8, 4), [ABSENT, 3], id="an absent entry"),
        pytest.param(table([11, 0]), range(0, 8, 4), [11, 0], id="the last and the first block"),
    ],
)
def test_with_one_piece_per_block_pieces_are_blocks(
    table: BlockTable, tokens: range, expected: list[int]
) -> None:
    numbers = table.piece_numbers(tokens, 1)
    assert numbers.tolist() == expected
    assert numbers.dtype == np.int32


@pytest.mark.parametrize(
    ("table", "tokens", "per_block", "expected"),
    [
        pytest.param(table([5, 0]), range(0, 8, 2), 2, [10, 11, 0, 1], id="two per block"),
        pytest.param(table([5, 0]), range(2, 8, 4), 2, [11, 1], id="the second of two"),
        pytest.param(table([5]), range(4), 4, [20, 21, 22, 23], id="one per token"),
        pytest.param(
            table([2], blocks_per_entry=3),
            range(0, 12, 2),
            2,
            [12, 13, 14, 15, 16, 17],
            id="two for each of three blocks per entry",
        ),
    ],
)
def test_pieces_are_numbered_through_all_blocks(
    table: BlockTable, tokens: range, per_block: int, expected: list[int]
) -> None:
    numbers = table.piece_numbers(tokens, per_block)
    assert numbers.tolist() == expected
    assert numbers.dtype == np.int32


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


def test_piece_numbers_do_not_change_the_table() -> None:
    """The ids may be a view of a message."""
    ids = block_ids(b"\x01\x00\x00\x00" * 3)
    BlockTable(ids, Group(4, 8, 2, ())).piece_numbers(range(24), 4)
    assert ids.tolist() == [1, 1, 1]
