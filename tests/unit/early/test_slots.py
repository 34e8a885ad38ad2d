"""The fence slots of offers in progress, which the step thread writes and clears itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.early.slots import EarlySlots
from nixl_kv.ids import FenceToken, Nonce
from nixl_kv.protocol.events import EarlySlotFree, PrepareOffer
from nixl_kv.transport.base import SlotPage
from support.records import NONCE, NONCE2, hex32, prepare_offer

FIRST, COUNT = 3, 2
CLEAR = FenceToken(bytes(16))


@pytest.fixture
def page() -> SlotPage:
    return SlotPage(FIRST + COUNT)


@pytest.fixture
def slots(page: SlotPage) -> EarlySlots:
    slots = EarlySlots(COUNT)
    slots.bind(page, FIRST)
    return slots


def free(offer: PrepareOffer) -> EarlySlotFree:
    return EarlySlotFree(offer.slot, offer.fence_token)


def offer(nonce: Nonce = NONCE) -> PrepareOffer:
    return prepare_offer(nonce=nonce, is_early=True, in_parts=True)


def test_an_offer_keeps_its_slot_and_token_until_it_is_withdrawn(
    slots: EarlySlots, page: SlotPage
) -> None:
    first = slots.prepare(offer())
    assert first.slot is not None
    assert page.read(first.slot) == first.fence_token != CLEAR
    assert slots.prepare(offer()) == first
    slots.clear(NONCE)
    assert page.read(first.slot) == CLEAR
    second = slots.prepare(offer())
    assert second.slot != first.slot, "the transfer thread has not freed the first"
    assert second.fence_token != first.fence_token
    slots.free(free(first))


def test_the_transfer_thread_clears_a_published_slot(slots: EarlySlots, page: SlotPage) -> None:
    prepared = slots.prepare(offer())
    slots.publish(NONCE)
    slots.clear(NONCE)  # of another life
    assert prepared.slot is not None
    assert page.read(prepared.slot) == prepared.fence_token


def test_a_slot_that_is_freed_early_is_not_given_again_to_its_offer(slots: EarlySlots) -> None:
    """Its readers have ended before the prompt was computed, and the rank forgets later steps."""
    prepared = slots.prepare(offer())
    assert prepared.slot is not None
    slots.free(free(prepared))
    assert slots.prepare(offer()).slot is None
    assert slots.prepare(offer(NONCE2)).slot is not None
    slots.clear(NONCE)
    assert slots.prepare(offer()).slot is not None


def test_a_late_report_of_a_restart_frees_no_slot_that_was_written_since(
    slots: EarlySlots, page: SlotPage
) -> None:
    old = slots.prepare(offer())
    page.clear_all()  # the transfer thread restarts, and then reports it
    new = slots.prepare(offer(NONCE2))
    slots.free(EarlySlotFree(None))
    assert new.slot is not None
    assert page.read(new.slot) == new.fence_token
    other = slots.prepare(offer(Nonce(hex32(7))))
    assert other.slot == old.slot != new.slot


@given(st.lists(st.tuples(st.sampled_from("pcufsrl"), st.integers(0, 4)), max_size=60))
def test_no_slot_is_given_twice_and_a_cleared_one_has_no_token(  # noqa: C901 - a case per move
    moves: list[tuple[str, int]],
) -> None:
    """P(repare), c(lear), (p)u(blish), f(ree), a s(tale) report, a r(estart), its l(ate) report."""
    page = SlotPage(FIRST + COUNT)
    slots = EarlySlots(COUNT)
    slots.bind(page, FIRST)
    of_offer: dict[Nonce, int] = {}  # while the caller may clear it
    in_use: dict[int, FenceToken] = {}
    cleared: set[int] = set()  # of these, by a restart whose report has not come
    for move, number in moves:
        nonce = Nonce(hex32(number))
        match move:
            case "p":
                prepared = slots.prepare(offer(nonce))
                slot = prepared.slot
                if slot is not None:
                    assert FIRST <= slot < FIRST + COUNT
                    assert (slot in in_use) == (of_offer.get(nonce) == slot)
                    of_offer[nonce] = slot
                    in_use[slot] = prepared.fence_token
                    assert slot in cleared or page.read(slot) == prepared.fence_token
                    assert prepared.fence_token != CLEAR
            case "c":
                slots.clear(nonce)
                if nonce in of_offer:
                    assert page.read(of_offer.pop(nonce)) == CLEAR
            case "u":
                slots.publish(nonce)
                of_offer.pop(nonce, None)
            case "f" if in_use:
                slot = sorted(in_use)[number % len(in_use)]
                slots.free(EarlySlotFree(slot, in_use.pop(slot)))
                cleared.discard(slot)
                of_offer = {n: s for n, s in of_offer.items() if s != slot}
            case "s" if in_use:
                slots.free(EarlySlotFree(min(in_use), FenceToken(b"9" * 16)))
            case "r":
                page.clear_all()
                cleared = set(in_use)
            case "l":
                slots.free(EarlySlotFree(None))
                gone = {slot for slot in in_use if page.read(slot) == CLEAR}
                assert cleared <= gone
                in_use = {slot: token for slot, token in in_use.items() if slot not in gone}
                of_offer = {n: s for n, s in of_offer.items() if s in in_use}
                cleared.clear()
    assert len(slots) == COUNT - len(in_use)
    assert all(page.read(slot) == CLEAR for slot in range(FIRST))
