"""A page of fence_token slots."""

import ctypes

import numpy as np
import pytest

from nixl_kv.geometry.layout import Span
from nixl_kv.ids import FenceToken
from nixl_kv.transport.base import SlotPage, slot_rows

CLEAR = bytes(16)


def fence_token(first: int) -> FenceToken:
    """A new one each time: what a page does to one is not done to what it is compared with."""
    return FenceToken(bytes(range(first, first + 16)))


def contents(page: SlotPage) -> list[bytes]:
    """What a peer reads."""
    memory = ctypes.string_at(page.span.address, page.span.length)
    return [memory[start : start + 16] for start in range(0, len(memory), 16)]


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257])
def test_all_slots_are_clear_at_first(count: int) -> None:
    page = SlotPage(count)
    assert contents(page) == [CLEAR] * count
    assert [page.read(slot) for slot in range(count)] == [CLEAR] * count


@pytest.mark.parametrize("count", [1, 300])
def test_the_page_begins_on_a_page_boundary_of_its_memory(count: int) -> None:
    for page in [SlotPage(count) for _ in range(20)]:
        first = page._memory.ctypes.data
        assert page.address % 4096 == 0
        assert first <= page.address
        assert page.address + 16 * count <= first + page._memory.nbytes
        assert page.span == Span(page.address, 16 * count)


def test_writing_and_clearing_a_slot_touches_no_other() -> None:
    page = SlotPage(4)
    for slot in range(4):
        page.write(slot, fence_token(101))
    page.write(2, fence_token(1))
    assert contents(page) == [fence_token(101), fence_token(101), fence_token(1), fence_token(101)]
    page.clear(1)
    assert contents(page) == [fence_token(101), CLEAR, fence_token(1), fence_token(101)]
    assert [page.read(slot) for slot in range(4)] == [
        fence_token(101),
        CLEAR,
        fence_token(1),
        fence_token(101),
    ]


@pytest.mark.parametrize("count", [1, 4])
def test_the_last_slot_is_inside_the_page(count: int) -> None:
    page = SlotPage(count)
    page.write(count - 1, fence_token(1))
    assert contents(page)[-1] == fence_token(1)


@pytest.mark.parametrize("length", [0, 15, 17])
def test_only_a_whole_generation_can_be_written(length: int) -> None:
    page = SlotPage(2)
    with pytest.raises(ValueError, match=f"^{length} bytes; allowed: 16$"):
        page.write(0, FenceToken(b"x" * length))
    assert contents(page) == [CLEAR] * 2


def test_all_slots_can_be_cleared_at_once() -> None:
    page = SlotPage(3)
    for slot in range(3):
        page.write(slot, fence_token(slot))
    page.clear_all()
    assert contents(page) == [CLEAR] * 3


@pytest.mark.parametrize("slot", [-1, 4, 2**40])
@pytest.mark.parametrize("action", ["write", "clear", "read"])
def test_a_slot_outside_of_the_page_is_an_error(slot: int, action: str) -> None:
    page = SlotPage(4)
    arguments = (slot, fence_token(1)) if action == "write" else (slot,)
    with pytest.raises(IndexError, match=f"^slot {slot}; allowed: 0 to 3$"):
        getattr(page, action)(*arguments)
    assert contents(page) == [CLEAR] * 4


def test_a_page_is_one_row_with_a_piece_for_each_slot() -> None:
    rows = slot_rows(4096, 7)
    assert rows.tolist() == [[4096, 16, 0, 16, 7]]
    assert rows.dtype == np.uint64
    page = SlotPage(3)
    assert page.rows().tolist() == [[page.address, 16, 0, 16, 3]]
    assert slot_rows(2**63, 1).tolist() == [[2**63, 16, 0, 16, 1]]
