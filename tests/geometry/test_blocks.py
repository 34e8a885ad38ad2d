"""Block-id arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.geometry import blocks
from nixl_kv.geometry.blocks import block_ids, entries, expand, pair


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


@settings(deadline=None, database=None)
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
    ("ids", "per_entry", "expected"),
    [
        pytest.param([], 1, [], id="nothing"),
        pytest.param([], 4, [], id="nothing, four per entry"),
        pytest.param([5, 0, 7], 1, [5, 0, 7], id="one per entry"),
        pytest.param([5, 0, 7], 2, [10, 11, 0, 1, 14, 15], id="two per entry"),
        pytest.param([1, 3], 4, [4, 5, 6, 7, 12, 13, 14, 15], id="four per entry"),
    ],
)
def test_expand(ids: list[int], per_entry: int, expected: list[int]) -> None:
    expanded = expand(block_ids(ids), per_entry)
    assert expanded.tolist() == expected
    assert expanded.dtype == np.int32


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        pytest.param([], [], ([], []), id="nothing"),
        pytest.param([4], [9], ([4], [9]), id="one"),
        pytest.param([4, 5, 6], [7, 8, 9], ([4, 5, 6], [7, 8, 9]), id="ascending"),
        pytest.param([6, 5, 4], [9, 8, 7], ([4, 5, 6], [7, 8, 9]), id="backwards"),
        pytest.param([6, 2, 4], [7, 9, 8], ([2, 4, 6], [9, 8, 7]), id="local decides the order"),
        pytest.param([0, 0, 4, 3], [5, 6, 7, 8], ([3, 4], [8, 7]), id="outside of the window here"),
        pytest.param([0, 0, 4, 3], [0, 6, 7, 8], ([3, 4], [8, 7]), id="outside on both sides"),
        pytest.param([0, 0], [0, 3], ([], []), id="all outside of the window"),
    ],
)
def test_pair(local: list[int], remote: list[int], expected: tuple[list[int], list[int]]) -> None:
    paired = pair(block_ids(local), block_ids(remote), absent=0)
    assert tuple(ids.tolist() for ids in paired) == expected
    assert [ids.dtype for ids in paired] == [np.int32, np.int32]


def test_what_is_absent_is_for_the_caller_to_say() -> None:
    local, remote = pair(block_ids([0, -1]), block_ids([0, 4]), absent=-1)
    assert (local.tolist(), remote.tolist()) == ([0], [0])


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        pytest.param([1, 2], [1], "1 remote blocks; allowed: 2", id="too few"),
        pytest.param([1], [1, 2], "2 remote blocks; allowed: 1", id="too many"),
        pytest.param([], [1], "1 remote blocks; allowed: 0", id="none wanted"),
        pytest.param([3, 4, 5], [6, 0, 0], "remote block 1 is absent", id="absent there"),
    ],
)
def test_blocks_that_do_not_pair(local: list[int], remote: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair(block_ids(local), block_ids(remote), absent=0)


def test_inputs_are_left_alone() -> None:
    """They may be views of a message."""
    local, remote = block_ids([6, 0, 4]), block_ids(b"\x01\x00\x00\x00" * 3)
    pair(local, remote, absent=0)
    expand(remote, 3)
    assert (local.tolist(), remote.tolist()) == ([6, 0, 4], [1, 1, 1])
