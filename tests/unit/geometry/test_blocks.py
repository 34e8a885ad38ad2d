"""Block-id arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.geometry import blocks
from nixl_kv.geometry.blocks import (
    Stretch,
    Table,
    block_ids,
    entries,
    num_stretches,
    stretches,
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
        pytest.param(32, 31, 16, range(2, 4), id="the last prompt token is left to compute"),
        pytest.param(5, 3, 1, range(5, 8), id="blocks of one token"),
    ],
)
def test_entries(local: int, load: int, size: int, expected: range) -> None:
    assert list(entries(local, load, size)) == list(expected)


@properties
@given(hit=st.integers(0, 9), load=st.integers(0, 99), size=st.integers(1, 17))
def test_entries_are_those_of_the_tokens(hit: int, load: int, size: int) -> None:
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
        pytest.param(b"\xff\xff\xff\xff", [-1], id="minus one"),
    ],
)
def test_block_ids(table: list[int] | bytes, expected: list[int]) -> None:
    ids = block_ids(table)
    assert ids.tolist() == expected
    assert ids.dtype == np.int32
    assert ids.ndim == 1


def test_bytes_that_are_no_whole_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        block_ids(b"\x00\x00\x00")


@pytest.mark.parametrize("ids", [[], [0], [7, 1, 2**31 - 1, 256]], ids=str)
def test_wire_form(ids: list[int]) -> None:
    wire = blocks.to_bytes(block_ids(ids))
    assert wire == b"".join(number.to_bytes(4, "little") for number in ids)
    assert block_ids(wire).tolist() == ids


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
def test_stretches(local: int, remote: int, expected: list[tuple[int, int]]) -> None:
    found = stretches(local, remote)
    assert [(stretch.start, stretch.length) for stretch in found] == expected
    assert {stretch.period for stretch in found} == {math.lcm(local, remote)}
    assert num_stretches(local, remote) == len(expected)


@properties
@given(local=st.integers(1, 24), remote=st.integers(1, 24))
def test_a_stretch_lies_in_one_block_of_either_side(local: int, remote: int) -> None:
    """And cannot be longer: its tokens are all that have both blocks in common."""
    found = stretches(local, remote)
    pairs = [(token // local, token // remote) for token in range(math.lcm(local, remote))]
    by_pair = [(pairs.index(pair), pairs.count(pair)) for pair in dict.fromkeys(pairs)]
    assert [(stretch.start, stretch.length) for stretch in found] == by_pair
    assert num_stretches(local, remote) == len(found)


@pytest.mark.parametrize(
    ("stretch", "tokens", "expected"),
    [
        pytest.param(Stretch(0, 16, 16), range(48), [0, 16, 32], id="whole blocks"),
        pytest.param(Stretch(0, 16, 16), range(33), [0, 16, 32], id="the end cuts one"),
        pytest.param(Stretch(0, 16, 16), range(32), [0, 16], id="the end is an edge"),
        pytest.param(Stretch(16, 16, 64), range(48, 150), [80, 144], id="from the next period on"),
        pytest.param(Stretch(16, 16, 64), range(16, 80), [16], id="from its own start on"),
        pytest.param(Stretch(48, 16, 64), range(40), [], id="none as early as that"),
        pytest.param(Stretch(0, 16, 16), range(32, 32), [], id="no tokens"),
    ],
)
def test_starts(stretch: Stretch, tokens: range, expected: list[int]) -> None:
    assert list(stretch.starts(tokens)) == expected


@properties
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    first=st.integers(0, 5),
    n=st.integers(0, 40),
)
def test_stretches_cover_each_token_once(sizes: tuple[int, int], first: int, n: int) -> None:
    """But for the last of them, which may reach beyond the end."""
    tokens = range(first * sizes[0], first * sizes[0] + n)
    covered = [
        token + step
        for stretch in stretches(*sizes)
        for token in stretch.starts(tokens)
        for step in range(stretch.length)
    ]
    assert len(set(covered)) == len(covered)
    assert sorted(covered)[:n] == list(tokens)
    assert all(t // sizes[0] == (tokens.stop - 1) // sizes[0] for t in covered if t >= tokens.stop)


def group(block_size: int = 4, num_blocks: int = 12, blocks_per_entry: int = 1) -> Group:
    return Group(block_size, num_blocks, blocks_per_entry, ())


@pytest.mark.parametrize(
    ("table", "tokens", "expected"),
    [
        pytest.param(Table(block_ids([7, 3]), group()), range(0, 8, 4), [7, 3], id="by blocks"),
        pytest.param(Table(block_ids([7, 3]), group()), range(2, 8, 4), [7, 3], id="from slot 2"),
        pytest.param(Table(block_ids([7, 3]), group()), range(0, 8, 2), [7, 7, 3, 3], id="twice"),
        pytest.param(Table(block_ids([7, 1, 3]), group()), range(1, 12, 8), [7, 3], id="by two"),
        pytest.param(
            Table(block_ids([7, 1, 3]), group()), range(0, 12, 6), [7, 1], id="by one and a half"
        ),
        pytest.param(Table(block_ids([7, 3]), group()), range(4, 4), [], id="no tokens"),
        pytest.param(Table(block_ids([]), group()), range(0), [], id="no entries, no tokens"),
        pytest.param(
            Table(block_ids([7, 3]), group(), first=5), range(20, 28, 4), [7, 3], id="from entry 5"
        ),
        pytest.param(
            Table(block_ids([3, 1]), group(blocks_per_entry=3)),
            range(0, 24, 4),
            [9, 10, 11, 3, 4, 5],
            id="three blocks per entry",
        ),
        pytest.param(
            Table(block_ids([3, 1]), group(blocks_per_entry=3), first=1),
            range(16, 36, 8),
            [10, 3, 5],
            id="every second of them, from entry 1 on",
        ),
        pytest.param(
            Table(block_ids([3, 1]), group(blocks_per_entry=3)),
            range(8, 24, 12),
            [11, 5],
            id="the third of each entry",
        ),
        pytest.param(Table(block_ids([-1, 3]), group()), range(0, 8, 4), [-1, 3], id="absent"),
        pytest.param(
            Table(block_ids([11, 0]), group()), range(0, 8, 4), [11, 0], id="the last, the first"
        ),
    ],
)
def test_blocks_of_tokens(table: Table, tokens: range, expected: list[int]) -> None:
    found = table.pieces(tokens, 1)
    assert found.tolist() == expected
    assert found.dtype == np.int32


@pytest.mark.parametrize(
    ("table", "tokens", "per_block", "expected"),
    [
        pytest.param(Table(block_ids([5, 0]), group()), range(0, 8, 2), 2, [10, 11, 0, 1], id="2"),
        pytest.param(
            Table(block_ids([5, 0]), group()), range(2, 8, 4), 2, [11, 1], id="later half"
        ),
        pytest.param(Table(block_ids([5]), group()), range(4), 4, [20, 21, 22, 23], id="tokens"),
        pytest.param(
            Table(block_ids([2]), group(blocks_per_entry=3)),
            range(0, 12, 2),
            2,
            [12, 13, 14, 15, 16, 17],
            id="two for each of three blocks",
        ),
    ],
)
def test_pieces(table: Table, tokens: range, per_block: int, expected: list[int]) -> None:
    found = table.pieces(tokens, per_block)
    assert found.tolist() == expected
    assert found.dtype == np.int32


@pytest.mark.parametrize(
    ("table", "tokens", "message"),
    [
        pytest.param(
            Table(block_ids([1, 2]), group()),
            range(4, 12, 4),
            "block table has the entries 0 to 1; needed: 1 to 2",
            id="beyond the end",
        ),
        pytest.param(
            Table(block_ids([1, 2]), group(), first=3),
            range(8, 16, 4),
            "block table has the entries 3 to 4; needed: 2 to 3",
            id="before the first",
        ),
        pytest.param(
            Table(block_ids([1, 2]), group()),
            range(5, 12, 3),
            "block table has the entries 0 to 1; needed: 1 to 2",
            id="between edges",
        ),
        pytest.param(
            Table(block_ids([]), group()), range(1), "block table has the entries 0 to -1", id="no"
        ),
        pytest.param(
            Table(block_ids([12]), group()), range(1), "block id 12; allowed: 0 to 11", id="large"
        ),
        pytest.param(
            Table(block_ids([4]), group(blocks_per_entry=3)),
            range(1),
            "block id 4; allowed: 0 to 3",
            id="an id counts entries, not blocks",
        ),
        pytest.param(
            Table(block_ids([4]), group(num_blocks=14, blocks_per_entry=3)),
            range(1),
            "block id 4; allowed: 0 to 3",
            id="of an entry that is not complete",
        ),
        pytest.param(
            Table(block_ids([-2]), group()),
            range(1),
            "block id -2; allowed: 0 to 11",
            id="negative",
        ),
        pytest.param(
            Table(block_ids([3, 99, -2]), group()), range(0, 12, 4), "block id 99", id="the first"
        ),
    ],
)
def test_blocks_that_no_table_has(table: Table, tokens: range, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        table.pieces(tokens, 1)


def test_ids_that_are_not_needed_are_not_looked_at() -> None:
    table = Table(block_ids([99, 3, 99, 5, 99]), group())
    assert table.pieces(range(4, 16, 8), 1).tolist() == [3, 5]


@settings(properties, max_examples=300)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    ids=st.lists(st.integers(-1, 5), min_size=1, max_size=6),
    first=st.integers(0, 3),
    step=st.integers(1, 30),
    data=st.data(),
)
def test_every_token_has_its_piece(
    sizes: tuple[int, int, int], ids: list[int], first: int, step: int, data: st.DataObject
) -> None:
    """The table written out token by token; what is absent stays so in all of its pieces."""
    size, per_block, per_entry = sizes
    tokens_per_block = size * per_block
    table = Table(block_ids(ids), group(tokens_per_block, 6 * per_entry, per_entry), first)
    written_out = [
        -1 if entry < 0 else (entry * per_entry + block) * per_block + piece
        for entry in ids
        for block in range(per_entry)
        for piece in range(per_block)
        for _ in range(size)
    ]
    before = first * tokens_per_block * per_entry
    begin = data.draw(st.integers(before, before + len(written_out)))
    tokens = range(begin, data.draw(st.integers(begin, before + len(written_out))), step)
    found = table.pieces(tokens, per_block)
    assert np.maximum(found, -1).tolist() == [written_out[token - before] for token in tokens]


def test_inputs_are_left_alone() -> None:
    """They may be views of a message."""
    ids = block_ids(b"\x01\x00\x00\x00" * 3)
    Table(ids, group(4, 8, 2)).pieces(range(24), 4)
    assert ids.tolist() == [1, 1, 1]
