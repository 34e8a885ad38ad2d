"""The fence slots of cached blocks: what each thread does, one after the other."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.conversations.runs import Run
from nixl_kv.conversations.slots import ContentSlots, Fence
from nixl_kv.ids import FenceToken, Nonce
from nixl_kv.protocol.events import BlocksTaken, CancelLoad, Command, WithdrawOffer
from nixl_kv.transport.base import SlotPage
from support.records import D1, NONCE, NONCE2, hex32

FIRST, COUNT, BLOCKS = 3, 2, 10
CLEAR = FenceToken(bytes(16))


def packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def run_of(*ids: int, steps: int = 1, need: int = 1, epoch: int = 0) -> Run:
    return Run(first_block=0, ids=packed(ids), steps=steps, need=need, epoch=epoch)


def taken(step: int, *ids: int, epoch: int = 0) -> BlocksTaken:
    return BlocksTaken(step, packed(ids), epoch)


@pytest.fixture
def page() -> SlotPage:
    return SlotPage(FIRST + COUNT)


@pytest.fixture
def slots(page: SlotPage) -> ContentSlots:
    """One step has ended."""
    slots = ContentSlots(BLOCKS, COUNT)
    slots.bind(page, FIRST)
    step(slots, taken(1))
    return slots


def step(slots: ContentSlots, *commands: Command) -> list[Command]:
    left = slots.before_step(commands)
    slots.end_step(None)
    return left


def opened(slots: ContentSlots, run: Run, offer: Nonce = NONCE) -> Fence:
    fence = slots.open(run, offer)
    assert fence is not None
    return fence


def test_a_slot_is_valid_until_a_step_takes_one_of_its_blocks(
    slots: ContentSlots, page: SlotPage
) -> None:
    fence, other = opened(slots, run_of(1, 2)), opened(slots, run_of(3), NONCE2)
    assert page.read(fence.slot) == fence.token != CLEAR
    cancel = CancelLoad(D1)
    assert step(slots, taken(2, 4), cancel) == [cancel]
    assert page.read(fence.slot) == fence.token
    assert step(slots, taken(3, 5, 2), cancel) == [WithdrawOffer(NONCE), cancel]
    assert page.read(fence.slot) == CLEAR
    assert page.read(other.slot) == other.token


def test_a_block_that_was_reused_after_the_answer_is_not_granted(
    slots: ContentSlots, page: SlotPage
) -> None:
    step(slots, taken(2, 4))
    assert slots.open(run_of(3, 4, steps=1), NONCE) is None
    assert slots.is_stale(run_of(3, 4, steps=1))
    assert len(slots) == 0
    assert page.read(FIRST) == page.read(FIRST + 1) == CLEAR
    assert not slots.is_stale(run_of(3, 4, steps=2))
    opened(slots, run_of(3, 4, steps=2))


def test_blocks_are_written_once_their_step_has_ended_on_the_gpu(slots: ContentSlots) -> None:
    is_done = False
    slots.before_step([taken(2)])
    assert slots.is_in_step
    assert slots.is_written(run_of(1, need=1))
    assert not slots.is_written(run_of(1, need=2)), "its step runs"
    slots.end_step(lambda: is_done)
    assert not slots.is_in_step
    assert not slots.is_written(run_of(1, need=2)), "its work is on the stream"
    is_done = True
    assert slots.is_written(run_of(1, need=2))
    assert not slots.is_written(run_of(1, need=3))
    is_done = False
    for number in range(3, 100):
        slots.before_step([taken(number)])
        slots.end_step(lambda: is_done)
    assert not slots.is_written(run_of(1, need=90)), "a hung GPU has written nothing"
    is_done = True
    assert slots.is_written(run_of(1, need=3)), "a later step ends after it"


def test_after_a_reset_no_slot_is_valid_and_no_earlier_answer_is_granted(
    slots: ContentSlots, page: SlotPage
) -> None:
    fence = opened(slots, run_of(1))
    assert step(slots, taken(2, epoch=1)) == [WithdrawOffer(NONCE)]
    assert page.read(fence.slot) == CLEAR
    assert slots.is_stale(run_of(1, steps=2))
    assert slots.open(run_of(1, steps=2), NONCE2) is None
    assert slots.open(run_of(1, steps=2, epoch=2), NONCE2) is None, "a step has not told it yet"
    opened(slots, run_of(1, steps=2, epoch=1), NONCE2)


def test_a_rank_that_missed_steps_does_not_know_what_they_reused(
    slots: ContentSlots, page: SlotPage
) -> None:
    """So it is after a start, too: the scheduler counts on."""
    fence = opened(slots, run_of(1))
    assert step(slots, taken(7)) == [WithdrawOffer(NONCE)]
    assert page.read(fence.slot) == CLEAR
    assert slots.open(run_of(1, steps=5), NONCE2) is None
    opened(slots, run_of(1, steps=6), NONCE2)


def test_without_a_free_slot_nothing_is_granted(slots: ContentSlots) -> None:
    fences = [opened(slots, run_of(1), Nonce(hex32(number))) for number in range(COUNT)]
    assert len({fence.slot for fence in fences}) == COUNT == len(slots)
    assert slots.open(run_of(1), NONCE) is None
    slots.close(fences[0].slot)
    again = opened(slots, run_of(1))
    assert again.slot == fences[0].slot
    assert again.token != fences[0].token


def test_a_closed_slot_is_not_withdrawn_and_a_restart_closes_all(
    slots: ContentSlots, page: SlotPage
) -> None:
    one, two = opened(slots, run_of(1)), opened(slots, run_of(1), NONCE2)
    slots.close(one.slot)
    assert page.read(one.slot) == CLEAR
    assert step(slots, taken(2, 1)) == [WithdrawOffer(NONCE2)]
    slots.close_all()
    assert page.read(two.slot) == CLEAR
    assert step(slots, taken(3, 1)) == []
    assert len(slots) == 0
    assert slots.check([]) == []


def test_many_slots_hold_one_block() -> None:
    slots, page = ContentSlots(BLOCKS, 200), SlotPage(200)
    slots.bind(page, 0)
    step(slots, taken(1))
    offers = [Nonce(hex32(number)) for number in range(200)]
    fences = [opened(slots, run_of(1, 2 + number % 8), offers[number]) for number in range(200)]
    assert step(slots, taken(2, 3)) == [WithdrawOffer(offer) for offer in offers[1::8]]
    assert [page.read(fence.slot) == CLEAR for fence in fences] == [n % 8 == 1 for n in range(200)]
    assert step(slots, taken(3, 1)) == [WithdrawOffer(offer) for offer in offers], "told again"


def test_a_slot_that_another_thread_gives_to_another_offer_is_withdrawn_as_that(
    slots: ContentSlots, page: SlotPage
) -> None:
    fence, clear = opened(slots, run_of(1)), page.clear

    def reopen_first(slot: int) -> None:
        page.clear = clear  # type: ignore[method-assign]
        slots.close(fence.slot)
        slots._free.rotate(1)
        assert opened(slots, run_of(5), NONCE2).slot == slot
        clear(slot)

    page.clear = reopen_first  # type: ignore[method-assign]
    assert step(slots, taken(2, 1)) == [WithdrawOffer(NONCE2)]
    assert page.read(fence.slot) == CLEAR


MOVES = st.tuples(
    st.sampled_from("oocctttegx"), st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3)
)


@settings(max_examples=300)
@given(st.lists(MOVES, max_size=60), st.integers(0, 3))
def test_a_valid_slot_has_blocks_as_they_were_found(  # noqa: C901 - a case per move
    moves: list[tuple[str, list[int]]], age: int
) -> None:
    """O(pen), c(lose), t(ake), an e(poch), a g(ap), a restart (x)."""
    page = SlotPage(FIRST + COUNT)
    slots = ContentSlots(BLOCKS, COUNT)
    slots.bind(page, FIRST)
    at, epoch = 1, 0
    step(slots, taken(at))
    written = [0] * BLOCKS  # the latest step that may have written each block
    valid: dict[int, tuple[Fence, list[int], int]] = {}  # with the steps of its answer
    number = 0
    for move, ids in moves:
        match move:
            case "o":
                run = run_of(*ids, steps=max(0, at - age), epoch=epoch)
                fence = slots.open(run, Nonce(hex32(number := number + 1)))
                if fence is not None:
                    assert fence.slot not in valid
                    valid[fence.slot] = fence, ids, run.steps
            case "c" if valid:
                slots.close(slot := sorted(valid)[ids[0] % len(valid)])
                del valid[slot]
            case "t" | "e" | "g":
                at, epoch = at + 1 + (move == "g"), epoch + (move == "e")
                withdrawn = step(slots, taken(at, *ids, epoch=epoch))
                assert len(withdrawn) <= COUNT
                if move == "g":
                    written = [at - 1] * BLOCKS
                if move != "t":
                    assert all(page.read(slot) == CLEAR for slot in valid)
                for block in ids:
                    written[block] = at
            case "x":
                page.clear_all()
                slots.close_all()
                valid.clear()
        for fence, blocks, steps in valid.values():
            if page.read(fence.slot) == fence.token:
                assert all(written[block] <= steps for block in blocks)
        held = [(offer, FIRST + slot) for slot, offer in enumerate(slots._offers) if offer]
        assert slots.check(held) == []
