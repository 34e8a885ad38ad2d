"""The early answer on a rank: its knowledge of its engine, and its slots after a restart."""

import pytest
from msgspec import structs

from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Incarnation, Nonce, RequestId
from nixl_kv.protocol.events import (
    EarlySlotFree,
    ExpectOffer,
    MarkWritten,
    OfferEnd,
    OfferEnded,
    PrepareOffer,
    PublishOffer,
)
from nixl_kv.protocol.messages import Grant, Paused, Pending, decode_answer, encode
from support.records import CONTEXT, NONCE, hex32
from support.stepped import World
from unit.engine.test_loop import TABLE, Stranger


def state_told(stranger: Stranger, nonce: str) -> str:
    answer = stranger.ask(nonce=nonce, is_early=True)
    assert isinstance(answer, Pending)
    return answer.state


def test_a_rank_knows_whether_its_engine_steps_or_is_paused(world: World) -> None:
    rank, stranger = world.prefill, Stranger(world, world.prefill)
    stall_s = world.config.stall_s
    rank.submit(ExpectOffer(Nonce(NONCE), RequestId("p1"), CONTEXT))
    rank.engine.note_step()
    world.clock.now += 2 * stall_s
    assert state_told(stranger, NONCE) == "queued", "the first step may compile"
    rank.engine.note_step(has_computed=True)
    assert state_told(stranger, NONCE) == "queued"
    world.clock.now += 1.1 * stall_s
    assert state_told(stranger, NONCE) == "stalled"
    paused = Paused(incarnation=Incarnation(hex32(99)), number=1, is_paused=True)
    stranger.send(encode(paused))
    assert state_told(stranger, NONCE) == "stalled", "that was a former life"
    stranger.send(encode(structs.replace(paused, incarnation=rank.parts.description.incarnation)))
    assert state_told(stranger, NONCE) == "queued"


@pytest.mark.parametrize("is_known", [False, True], ids=["first part", "second part"])
def test_after_a_restart_a_part_is_granted_in_no_slot_that_was_cleared(
    world: World, *, is_known: bool
) -> None:
    """The step thread wrote the slot before, and has not heard of the restart yet."""
    rank = world.prefill
    nonce, request = Nonce(hex32(1)), RequestId("p1")
    offer = PrepareOffer(
        nonce, request, CONTEXT, 11, (Table.of(TABLE),), is_early=True, is_written=False
    )
    part = structs.replace(offer, computed=4, in_parts=True)
    rank.submit(ExpectOffer(nonce, request, CONTEXT))
    (first,) = rank.engine.before_step([part])
    if is_known:
        rank.submit(first)
        rank.turn()
        (first,) = rank.engine.before_step([structs.replace(part, computed=8)])
    assert isinstance(first, PrepareOffer)
    assert first.slot is not None
    rank.loop.restart()
    rank.submit(ExpectOffer(nonce, request, CONTEXT), first, MarkWritten(nonce, first.computed))
    rank.turn()
    stranger = Stranger(world, rank)
    answer = stranger.ask(nonce=nonce, context=CONTEXT, is_early=True)
    assert isinstance(answer, Pending), "a part needs a slot that the step thread can clear"
    rank.submit(offer, MarkWritten(nonce), PublishOffer(nonce, request))
    rank.turn()
    results = rank.engine.pop_results()
    freed = [each for each in results if isinstance(each, EarlySlotFree)]
    assert freed == [EarlySlotFree(None), EarlySlotFree(first.slot, first.fence_token)]
    ends = [each.end for each in results if isinstance(each, OfferEnded)]
    if is_known:  # the restart ended the offer
        assert ends == [OfferEnd.LOST]
        return
    answer = decode_answer(stranger.answer())
    assert isinstance(answer, Grant)
    assert rank.parts.slots.read(answer.slot) == answer.fence_token != bytes(16)
    assert ends == []
