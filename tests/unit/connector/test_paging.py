"""Block tables of a prompt, and pins on blocks of sliding windows. It needs no vLLM."""

from types import SimpleNamespace

import pytest

from nixl_kv.connector.paging import (
    Paging,
    Pins,
    RequestBlocks,
    StatePaging,
    WholePaging,
    table_of,
)
from nixl_kv.geometry.layout import Table
from support.cache_manager import CacheManager
from support.records import P1, written_out

STATES = StatePaging(0, 16)
FULL, WINDOW = Paging(0, 4, 0), Paging(1, 4, 8)


@pytest.mark.parametrize(
    ("paging", "num_tokens", "wanted"),
    [
        pytest.param(Paging(0, 4, 0), 20, range(5), id="all"),
        pytest.param(Paging(0, 4, 16), 60, range(15), id="a window, and all before it"),
        pytest.param(Paging(0, 64, 16), 513, range(4, 9), id="a window across an edge"),
        pytest.param(Paging(0, 64, 16), 528, range(8, 9), id="a window from the edge itself on"),
        pytest.param(Paging(0, 4, 16), 3, range(1), id="a prompt shorter than the window"),
        pytest.param(WholePaging(0, 256, 0), 513, range(3), id="all whole blocks"),
        pytest.param(WholePaging(0, 4, 8), 20, range(3, 5), id="the window is two blocks"),
        pytest.param(WholePaging(0, 4, 8), 21, range(3, 6), id="or three"),
        pytest.param(WholePaging(0, 8, 128), 300, range(21, 38), id="or 17, but not 38"),
        pytest.param(WholePaging(0, 4, 8), 3, range(1), id="whole blocks of a short prompt"),
    ],
)
def test_decode_may_ask_for_the_blocks_of_the_window(
    paging: Paging, num_tokens: int, wanted: range
) -> None:
    """From a multiple of 256 tokens on: its own may be as large. Whole blocks have one size."""
    assert paging.wanted(num_tokens) == wanted


def test_the_null_block_is_absent() -> None:
    assert table_of([0, 7, 0, 2], 0) == Table.of([7, -1, 2], first=1)
    assert table_of([7, 0], 3) == Table.of([7, -1], first=3)
    assert table_of([0, 0], 3) == Table.of([], first=5)
    assert table_of([], 0) == Table.of([])


@pytest.mark.parametrize(
    ("paging", "table", "tokens", "expected"),
    [
        pytest.param(FULL, [1, 2, 3], range(12), Table.of([1, 2, 3]), id="all"),
        pytest.param(FULL, [1, 2, 3], range(4, 7), Table.of([2], first=1), id="from an edge on"),
        pytest.param(FULL, [1, 2, 3], range(16), Table.of([1, 2, 3]), id="more than it has"),
        pytest.param(STATES, [7], range(3), Table.of([7], first=2), id="one state for all"),
        pytest.param(STATES, [7, 9], range(3), Table.of([7], first=2), id="a block for later"),
        pytest.param(STATES, [8, 9], range(14, 16), Table.of([8], first=15), id="a block's end"),
        pytest.param(STATES, [0, 0, 5], range(40), Table.of([5], first=39), id="the last state"),
        pytest.param(STATES, [0, 0], range(17), Table.of([], first=16), id="no state"),
        pytest.param(STATES, [3], range(17), Table.of([], first=16), id="a short table"),
    ],
)
def test_a_group_has_the_entries_of_the_tokens_or_the_last_state(
    paging: Paging, table: list[int], tokens: range, expected: Table
) -> None:
    assert paging.table(table, tokens) == expected


@pytest.mark.parametrize(
    ("paging", "num_tokens", "count"),
    [
        *[(FULL, 0, 0), (FULL, 5, 2), (STATES, 0, 0), (STATES, 1, 1), (STATES, 100, 1)],
        *[(WholePaging(0, 4, 8, most=9), count, blocks) for count, blocks in ((5, 2), (100, 9))],
    ],
)
def test_how_many_blocks_tokens_take(paging: Paging, num_tokens: int, count: int) -> None:
    assert paging.count(num_tokens) == count


# --- requests


def blocks_of(manager: CacheManager, *pagings: Paging) -> RequestBlocks:
    return RequestBlocks(pagings or (FULL, WINDOW), 100, manager)


def tables_of(blocks: RequestBlocks, pins: Pins, num_tokens: int = 20) -> list[list[int]]:
    tables = blocks.tables(num_tokens, blocks.current(P1), pins)
    return [written_out(table) for table in tables]


def test_blocks_of_a_window_are_pinned_once_while_the_prompt_grows() -> None:
    pins: Pins = {}
    manager = CacheManager({P1: ([1, 2], [6, 7])})
    blocks = blocks_of(manager)
    blocks.pin(P1, 20, pins)
    assert manager.block_pool.touched == {6: 1, 7: 1}
    manager.tables[P1] = ([1, 2, 3, 4], [0, 7, 8, 9])
    blocks.pin(P1, 20, pins)
    blocks.pin(P1, 20, pins)
    assert manager.block_pool.touched == {6: 1, 7: 1, 8: 1, 9: 1}
    manager.tables[P1] = ([1, 2, 3, 4, 5], [0, 0, 0, 9, 10])
    blocks.pin(P1, 20, pins)
    assert manager.block_pool.touched == {6: 1, 7: 1, 8: 1, 9: 1, 10: 1}
    assert len(pins) == 5
    assert tables_of(blocks, pins) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    pins, blocks = {}, blocks_of(manager, Paging(0, 64, 16))
    blocks.pin(P1, 300, pins)
    assert len(pins) == 1, "none before the window"
    assert tables_of(blocks, pins, 300) == [[-1, -1, -1, -1, 5]]


@pytest.mark.parametrize(
    ("pagings", "tables", "num_tokens", "expected"),
    [
        pytest.param(
            (FULL, WINDOW),
            ([1, 2, 3, 4, 5], [0, 7, 8, 9, 10]),
            20,
            [[1, 2, 3, 4, 5], [-1] * 5],
            id="of a window, pinned blocks: another request may own any other one",
        ),
        pytest.param(
            (FULL,), ([1, 2, 3],), 8, [[1, 2]], id="none for speculative tokens behind the prompt"
        ),
        pytest.param(
            (Paging(2, 4, 0),), ([1, 2], [3, 4], [5, 6]), 8, [[5, 6]], id="of transferred groups"
        ),
    ],
)
def test_blocks_that_are_offered(
    pagings: tuple[Paging, ...],
    tables: tuple[list[int], ...],
    num_tokens: int,
    expected: list[list[int]],
) -> None:
    assert tables_of(blocks_of(CacheManager({P1: tables}), *pagings), {}, num_tokens) == expected


def test_the_last_blocks_are_given_back_first() -> None:
    """A prefix is of use for longer than what follows it."""
    pins: Pins = {}
    manager = CacheManager({P1: ([1, 2, 3, 4, 5], [0, 0, 8, 9, 10])})
    blocks = blocks_of(manager)
    blocks.pin(P1, 20, pins)
    blocks.unpin(pins)
    assert manager.block_pool.freed == [10, 9, 8]
    blocks.unpin(pins)
    assert manager.block_pool.freed == [10, 9, 8]
    assert pins == {}


def test_the_owner_of_pins_hears_when_vllm_frees_the_blocks() -> None:
    manager, freed = CacheManager({P1: ([1, 2],)}), list[str]()
    blocks = blocks_of(manager)
    blocks.bind(manager, freed.append)
    manager.free(SimpleNamespace(request_id=P1))
    assert (freed, manager.tables) == ([P1], {})
    manager.pop_blocks_for_free(SimpleNamespace(request_id=P1))
    assert freed == [P1, P1]


def test_of_states_the_last_one_is_offered_and_nothing_is_pinned() -> None:
    pins: Pins = {}
    manager = CacheManager({P1: ([0, 7],)})
    blocks = blocks_of(manager, StatePaging(0, 16))
    blocks.pin(P1, 20, pins)
    assert manager.block_pool.touched == {}
    assert blocks.tables(20, blocks.current(P1), pins) == (Table.of([7], first=19),)
    assert blocks.count(20) == 1


def test_of_whole_blocks_those_before_the_window_are_not_pinned() -> None:
    """Each takes a whole block of the pool, however few tokens it has."""
    pins: Pins = {}
    manager = CacheManager({P1: ([1, 2], list(range(3, 78)))})
    blocks = blocks_of(manager, WholePaging(0, 256, 0), WholePaging(1, 4, 8))
    blocks.pin(P1, 300, pins)
    assert manager.block_pool.pinned == {76, 77}
    full, window = blocks.tables(300, blocks.current(P1), pins)
    assert (written_out(full), window) == ([1, 2], Table.of([76, 77], first=73))
    assert not blocks.are_kept
