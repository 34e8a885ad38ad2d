"""Block tables of a prompt, and pins on blocks of sliding windows. It needs no vLLM."""

import pytest

from nixl_kv.connector.block_pinning import PinnedBlocks
from nixl_kv.connector.paging import Paging, StatePaging
from nixl_kv.geometry.layout import Table
from support.cache_manager import CacheManager
from support.records import P1, P2
from support.tables import written_out

FULL, WINDOW = Paging(0, 4, 0), Paging(1, 4, 8)


def blocks_of(manager: CacheManager, *pagings: Paging) -> PinnedBlocks:
    return PinnedBlocks(pagings or (FULL, WINDOW), manager)


def tables_of(blocks: PinnedBlocks, num_tokens: int = 20) -> list[list[int]]:
    return [written_out(table) for table in blocks.tables(P1, num_tokens, blocks.current(P1))]


def test_blocks_of_a_window_are_pinned_once_while_the_prompt_grows() -> None:
    manager = CacheManager({P1: ([1, 2], [6, 7])})
    blocks = blocks_of(manager)
    blocks.pin(P1, 20)
    assert manager.block_pool.touched == {6: 1, 7: 1}
    manager.tables[P1] = ([1, 2, 3, 4], [0, 7, 8, 9])
    blocks.pin(P1, 20)
    blocks.pin(P1, 20)
    assert manager.block_pool.touched == {6: 1, 7: 1, 8: 1, 9: 1}
    manager.tables[P1] = ([1, 2, 3, 4, 5], [0, 0, 0, 9, 10])
    blocks.pin(P1, 20)
    assert manager.block_pool.touched == {6: 1, 7: 1, 8: 1, 9: 1, 10: 1}
    assert repr(blocks) == "<PinnedBlocks: 5 for 1 requests>"
    assert tables_of(blocks) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_blocks_before_the_window_are_not_pinned() -> None:
    manager = CacheManager({P1: ([1, 2, 3, 4, 5],)})
    blocks = blocks_of(manager, Paging(0, 64, 16))
    blocks.pin(P1, 300)
    assert manager.block_pool.touched == {5: 1}
    assert tables_of(blocks, 300) == [[-1, -1, -1, -1, 5]]


def test_only_pinned_blocks_of_a_window_are_offered() -> None:
    """What is not pinned may be another request's by the time that it is read."""
    blocks = blocks_of(CacheManager({P1: ([1, 2, 3, 4, 5], [0, 7, 8, 9, 10])}))
    assert tables_of(blocks) == [[1, 2, 3, 4, 5], [-1, -1, -1, -1, -1]]


def test_blocks_beyond_the_prompt_are_not_offered() -> None:
    """vLLM allocates for speculative tokens too."""
    blocks = blocks_of(CacheManager({P1: ([1, 2, 3, 4, 5, 6], [0] * 6)}))
    assert tables_of(blocks)[0] == [1, 2, 3, 4, 5]


def test_groups_are_those_that_are_transferred() -> None:
    manager = CacheManager({P1: ([1, 2], [3, 4], [5, 6])})
    assert tables_of(blocks_of(manager, Paging(2, 4, 0)), 8) == [[5, 6]]


def test_without_windows_nothing_is_pinned() -> None:
    manager = CacheManager({P1: ([1, 2, 3, 4, 5],)})
    blocks = blocks_of(manager, FULL)
    blocks.pin(P1, 20)
    assert manager.block_pool.touched == {}
    assert repr(blocks) == "<PinnedBlocks: 0 for 0 requests>"


def test_the_last_blocks_are_given_back_first() -> None:
    """A prefix is of use for longer than what follows it."""
    manager = CacheManager({P1: ([1, 2, 3, 4, 5], [0, 0, 8, 9, 10])})
    blocks = blocks_of(manager)
    blocks.pin(P1, 20)
    blocks.unpin([P2, P1])
    assert manager.block_pool.freed == [10, 9, 8]
    blocks.unpin([P1])
    assert manager.block_pool.freed == [10, 9, 8]
    assert repr(blocks) == "<PinnedBlocks: 0 for 0 requests>"


class Request:
    request_id = P1


def test_who_pins_hears_when_the_blocks_are_freed() -> None:
    manager, freed = CacheManager({P1: ([1, 2],)}), list[str]()
    blocks = blocks_of(manager)
    blocks.bind(manager, freed.append)
    manager.free(Request())
    assert (freed, manager.tables) == ([P1], {})
    manager.pop_blocks_for_free(Request())
    assert freed == [P1, P1]


@pytest.mark.parametrize(
    ("tables", "have_changed"),
    [
        pytest.param(([1, 2, 3, 4, 5], [0, 0, 8, 9, 10]), False, id="the same"),
        pytest.param(([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 10, 11]), False, id="more tokens"),
        pytest.param(([1, 2, 3, 4, 7], [0, 0, 8, 9, 10]), True, id="another block"),
        pytest.param(([1, 2, 3, 4], [0, 0, 8, 9]), True, id="fewer blocks"),
        pytest.param(([0, 2, 3, 4, 5], [0, 0, 8, 9, 10]), True, id="a null block"),
    ],
)
def test_tables_have_changed_if_blocks_are_others(
    tables: tuple[list[int], ...], *, have_changed: bool
) -> None:
    """Of a window they may leave the table: they are pinned."""
    blocks = blocks_of(CacheManager({P1: ([1, 2, 3, 4, 5], [0, 0, 8, 9, 10])}))
    blocks.pin(P1, 20)
    prepared = blocks.tables(P1, 20, blocks.current(P1))
    assert (blocks.tables(P1, 20, tables) != prepared) is have_changed


def test_of_states_the_last_one_is_offered_and_nothing_is_pinned() -> None:
    manager = CacheManager({P1: ([0, 7],)})
    blocks = PinnedBlocks([StatePaging(0, 16)], manager)
    blocks.pin(P1, 20)
    prepared = blocks.tables(P1, 20, blocks.current(P1))
    assert prepared == (Table.of([7], first=19),)
    assert manager.block_pool.freed == []
    assert blocks.tables(P1, 20, [[0, 7]]) == prepared
    for others in ([7, 8], [7]):
        assert blocks.tables(P1, 20, [others]) != prepared
    assert blocks.count(20) == 1
