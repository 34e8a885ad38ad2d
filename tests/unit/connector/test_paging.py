"""Which part of a block table a transfer is told of."""

import pytest

from nixl_kv.connector.paging import Paging, StatePaging, table_of
from nixl_kv.geometry.layout import Table

STATES = StatePaging(0, 16)


@pytest.mark.parametrize(
    ("paging", "num_tokens", "wanted"),
    [
        pytest.param(Paging(0, 4, 0), 20, range(5), id="all"),
        pytest.param(Paging(0, 4, 0), 21, range(6), id="all, and a begun block"),
        pytest.param(Paging(0, 4, 16), 60, range(15), id="a window, and all before it"),
        pytest.param(Paging(0, 64, 16), 300, range(4, 5), id="a window, from an edge on"),
        pytest.param(Paging(0, 64, 16), 513, range(4, 9), id="a window across an edge"),
        pytest.param(Paging(0, 64, 16), 528, range(8, 9), id="a window from the edge itself on"),
        pytest.param(Paging(0, 1024, 16), 2000, range(1, 2), id="one large block"),
        pytest.param(Paging(0, 4, 16), 3, range(1), id="a prompt shorter than the window"),
    ],
)
def test_decode_may_ask_for_the_blocks_of_the_window(
    paging: Paging, num_tokens: int, wanted: range
) -> None:
    """From a multiple of 256 tokens on: its own blocks may be as large."""
    assert paging.wanted(num_tokens) == wanted


def test_the_null_block_is_absent() -> None:
    assert table_of([0, 7, 0, 2], 0) == Table.of([7, -1, 2], first=1)
    assert table_of([7, 0], 3) == Table.of([7, -1], first=3)
    assert table_of([0, 0], 3) == Table.of([], first=5)
    assert table_of([], 0) == Table.of([])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(range(20), Table.of([11, 12, 13, 14, 15]), id="all"),
        pytest.param(range(19), Table.of([11, 12, 13, 14, 15]), id="a begun block"),
        pytest.param(range(8, 13), Table.of([13, 14], first=2), id="from a block's edge on"),
        pytest.param(range(24), Table.of([11, 12, 13, 14, 15]), id="more than it has"),
    ],
)
def test_of_a_group_with_tokens_the_entries_of_these(tokens: range, expected: Table) -> None:
    assert Paging(0, 4, 0).table([11, 12, 13, 14, 15], tokens) == expected


@pytest.mark.parametrize(
    ("table", "tokens", "expected"),
    [
        pytest.param([7], range(3), Table.of([7], first=2), id="one block for all"),
        pytest.param([7, 9], range(3), Table.of([7], first=2), id="a block for what is to come"),
        pytest.param(
            [0, 9], range(14, 17), Table.of([9], first=16), id="the second block's first token"
        ),
        pytest.param(
            [8, 9], range(14, 16), Table.of([8], first=15), id="the first block's last token"
        ),
        pytest.param([0, 0, 5], range(40), Table.of([5], first=39), id="earlier states are gone"),
        pytest.param(
            [0, 0], range(17), Table.of([], first=16), id="no state: too short to read by"
        ),
        pytest.param([3], range(17), Table.of([], first=16), id="a table without the entry"),
    ],
)
def test_of_a_group_with_states_the_last_one(
    table: list[int], tokens: range, expected: Table
) -> None:
    assert STATES.table(table, tokens) == expected


@pytest.mark.parametrize(
    ("paging", "num_tokens", "count"),
    [
        (Paging(0, 4, 0), 0, 0),
        (Paging(0, 4, 0), 5, 2),
        (STATES, 0, 0),
        (STATES, 1, 1),
        (STATES, 100, 1),
    ],
)
def test_how_many_blocks_tokens_take(paging: Paging, num_tokens: int, count: int) -> None:
    assert paging.count(num_tokens) == count
