"""Asks that precede their offer: prefill answers, grants and forgets them."""

from unittest.mock import ANY

import pytest

from nixl_kv.early.asks import (
    MAX_ASKS,
    MAX_ASKS_OF_READER,
    REPEATED_S,
    UNKNOWN_S,
    EarlyAsks,
)
from nixl_kv.early.part import EarlyPart
from nixl_kv.ids import Nonce
from nixl_kv.protocol.events import (
    Action,
    ClearSlot,
    EarlyReleased,
    EarlySlotFree,
    ExpectOffer,
    OfferEnd,
    OfferEnded,
    Paused,
    Reply,
    Stepped,
    Tick,
    WithdrawOffer,
    WriteSlot,
)
from nixl_kv.protocol.messages import PAUSED_S
from nixl_kv.protocol.prefill import (
    END_REASONS,
    OTHER_PROMPT,
    WITHDRAWN,
    PrefillMachine,
)
from support.offers import (
    ASK,
    BOTH,
    DENIED_UNKNOWN,
    GRANT,
    LIFE_IN_SHORT,
    MARK,
    NOT_NEEDED,
    NOT_THIS_READER,
    NOTHING_LOST,
    PAIR_SLOT,
    PAIR_TOKEN,
    PREPARED,
    READ,
    RELEASE,
    RELEASE_INCOMPLETE,
    RELEASE_SECOND,
    SECOND,
    TTL_S,
    UNCLAIMED,
    WRITTEN,
    denied,
    fence_token,
    granted_pair,
    mark_pair,
    prefill_machine,
    prepare_pair,
)
from support.records import (
    CLAIM,
    CONTEXT,
    LEASE_S,
    NONCE,
    NONCE2,
    P1,
    P2,
    RIVAL,
    STRANGER,
    ask,
    asked,
    deny,
    grant,
    hex32,
    pending,
    prepare_offer,
    publish_offer,
    reader,
    release,
    renew,
    replied,
)
from support.scripts import Script, after, each_of, play

pytestmark = pytest.mark.usefixtures("counted_fence_tokens")


EARLY = asked(ask(is_early=True))
OTHER_CLAIM = {"claim": RIVAL, "reader": STRANGER}
EARLY_RIVAL = asked(ask(is_early=True, **OTHER_CLAIM))
EXPECT = ExpectOffer(NONCE, P1, CONTEXT)
QUEUED, COMPUTING = replied(pending("queued")), replied(pending("computing"))
STALLED = replied(pending("stalled"))
ASKED_EARLY: Script = [(90.0, EARLY, replied(pending("unknown")))]
AWAITED: Script = after(ASKED_EARLY, (91.0, EXPECT))
COMPUTED: Script = after(AWAITED, (92.0, prepare_offer(is_early=True), COMPUTING))
STALL_S = 10.0


def early_machine(script: Script = (), *, num_slots: int = 4) -> PrefillMachine:
    part = EarlyPart(STALL_S, lambda _slot: ANY)
    return prefill_machine(script, parts=(part,), num_slots=num_slots)


def asks_of(machine: PrefillMachine) -> EarlyAsks:
    (part,) = machine._parts
    assert isinstance(part, EarlyPart)
    return part.asks


def pair_ended(end: OfferEnd) -> list[Action]:
    return [ClearSlot(PAIR_SLOT), EarlySlotFree(PAIR_SLOT, PAIR_TOKEN), OfferEnded(NONCE, P1, end)]


PARTS: Script = after(
    AWAITED,
    (92.0, prepare_pair(4), COMPUTING),
    (mark_pair(4), granted_pair(4)),
    (prepare_pair(6),),
    (93.0, mark_pair(6), granted_pair(6)),
)
NO_REQUEST = "its request did not arrive"
GIVEN_UP = EarlyReleased(NONCE, P1)
PAIRS: dict[str, Script] = {
    "an early ask is granted when the offer is pinned": after(
        COMPUTED, (93.0, publish_offer(), WRITTEN, GRANT), READ
    ),
    "an ask between arrival and pin waits as well": after(
        [(90.0, EXPECT)],
        (EARLY, QUEUED),
        (prepare_offer(is_early=True), COMPUTING),
        (asked(ask()), COMPUTING),
        (publish_offer(), WRITTEN, GRANT),
    ),
    "it is granted only when it is written as well": after(
        AWAITED,
        (92.0, prepare_offer(is_early=True, is_written=False), COMPUTING),
        (publish_offer(),),
        (MARK, WRITTEN, GRANT),
    ),
    "written before it is pinned": after(
        AWAITED,
        (92.0, prepare_offer(is_early=True, is_written=False), COMPUTING),
        (MARK,),
        (publish_offer(), WRITTEN, GRANT),
    ),
    "a preempted request is computed again, under the same nonce": after(
        COMPUTED,
        (92.5, WithdrawOffer(NONCE, is_final=False), QUEUED),
        (93.0, prepare_offer(is_early=True), COMPUTING),
        (94.0, publish_offer(), WRITTEN, GRANT),
    ),
    "each early ask of the claim is granted, and the rival denied": after(
        [(90.0, EXPECT)],
        (asked(ask(is_early=True, readers=BOTH)), QUEUED),
        (EARLY_RIVAL, replied(pending("queued", **OTHER_CLAIM))),
        (
            asked(ask(is_early=True, reader=SECOND, readers=BOTH)),
            replied(pending("queued", reader=SECOND)),
        ),
        (
            prepare_offer(is_early=True),
            COMPUTING,
            replied(pending("computing", **OTHER_CLAIM)),
            replied(pending("computing", reader=SECOND)),
        ),
        (
            *(publish_offer(), WRITTEN, GRANT),
            *denied(NOT_THIS_READER, **OTHER_CLAIM),
            replied(grant(reader=SECOND)),
        ),
    ),
    "without an ask the offer waits for its time": after(
        [(99.0, EXPECT)],
        (prepare_offer(is_early=True),),
        (100.0, publish_offer()),
        (100.0 + TTL_S, Tick(), UNCLAIMED),
        (asked(ask(is_early=True)), *denied(END_REASONS[OfferEnd.UNCLAIMED])),
    ),
    "a request that never arrives": after(
        ASKED_EARLY,
        (94.0, EARLY, replied(pending("unknown"))),
        (98.0, EARLY, replied(pending("unknown"))),
        (90.0 + UNKNOWN_S - 0.1, Tick()),
        (90.0 + UNKNOWN_S, Tick(), *denied(NO_REQUEST)),
    ),
    "an ask that is not repeated is forgotten": after(
        AWAITED,
        (90.0 + REPEATED_S, Tick()),
        (prepare_offer(is_early=True),),
        (96.0, publish_offer()),
        (EARLY, WRITTEN, GRANT),
    ),
    "an unknown request whose ask is not repeated is forgotten": after(
        ASKED_EARLY, (90.0 + REPEATED_S, Tick()), (90.0 + UNKNOWN_S, Tick())
    ),
    "an ask for another prompt, before the request": after(
        [(90.0, asked(ask(is_early=True, context=hex32(7))), replied(pending("unknown")))],
        (EXPECT, *denied(OTHER_PROMPT)),
    ),
    "an ask for another prompt, after it": [
        (90.0, EXPECT),
        (asked(ask(is_early=True, context=hex32(7))), *denied(OTHER_PROMPT)),
    ],
    "a request that ends without an offer": after(
        AWAITED, (WithdrawOffer(NONCE), GIVEN_UP, *denied(WITHDRAWN)), (EARLY, *denied(WITHDRAWN))
    ),
    "a computed request that ends without an offer": after(
        COMPUTED, (WithdrawOffer(NONCE), GIVEN_UP, *denied(WITHDRAWN)), (EARLY, *denied(WITHDRAWN))
    ),
    "a request that prefill does not offer, and its ask": [
        (90.0, WithdrawOffer(NONCE)),
        (EARLY, *denied(WITHDRAWN)),
    ],
    "decode gives up while the request is queued": after(
        AWAITED,
        (RELEASE_INCOMPLETE, GIVEN_UP),
        (RELEASE_INCOMPLETE,),
        (prepare_offer(is_early=True),),
        (publish_offer(), NOT_NEEDED),
    ),
    "decode gives up before the request arrives": after(
        ASKED_EARLY, (RELEASE_INCOMPLETE,), (91.0, EXPECT, GIVEN_UP), (RELEASE_SECOND,)
    ),
    "decode gives up, and the request never arrives": after(
        ASKED_EARLY, (RELEASE_INCOMPLETE,), (100.0, Tick())
    ),
    "decode gives up while it is computed": after(
        COMPUTED, (RELEASE_INCOMPLETE, GIVEN_UP), (publish_offer(), NOT_NEEDED)
    ),
    "one of two readers gives up, and then the other": after(
        [(90.0, EXPECT)],
        (asked(ask(is_early=True, readers=BOTH)), QUEUED),
        (
            asked(ask(is_early=True, reader=SECOND, readers=BOTH)),
            replied(pending("queued", reader=SECOND)),
        ),
        (RELEASE_INCOMPLETE,),
        (asked(release(complete=False, reader=SECOND)), GIVEN_UP),
    ),
    "one of two claims gives up, and the other is granted": after(
        AWAITED,
        (EARLY_RIVAL, replied(pending("queued", **OTHER_CLAIM))),
        (asked(release(complete=False, **OTHER_CLAIM)),),
        (92.0, prepare_offer(is_early=True), COMPUTING),
        (93.0, publish_offer(), WRITTEN, GRANT),
    ),
    "the engine hangs while a request waits": after(
        AWAITED,
        (Stepped(),),
        (91.0 + STALL_S, EARLY, QUEUED),
        (91.1 + STALL_S, EARLY, STALLED),
        (Stepped(),),
        (EARLY, QUEUED),
    ),
    "and while it computes it": after(
        COMPUTED, (Stepped(),), (92.1 + STALL_S, EARLY, STALLED), (publish_offer(), WRITTEN, GRANT)
    ),
    "and between two parts": after(
        PARTS, (Stepped(),), (93.1 + STALL_S, EARLY, STALLED), (mark_pair(8), granted_pair(None))
    ),
    "a request that has just arrived does not wait for long": after(
        [(10.0, Stepped())], *AWAITED, (91.0 + STALL_S, EARLY, QUEUED)
    ),
    "an engine whose first step goes on does not hang": after(AWAITED, (900.0, EARLY, QUEUED)),
    "nor does one that is paused": after(
        AWAITED,
        (Stepped(),),
        (92.0, Paused(2, is_paused=True)),
        (Paused(1, is_paused=False),),
        (92.0 + PAUSED_S + STALL_S, EARLY, QUEUED),
        (Paused(3, is_paused=True),),
        (901.0, Paused(4, is_paused=False)),
        (901.0 + STALL_S, EARLY, QUEUED),
        (901.1 + STALL_S, EARLY, STALLED),
    ),
    "a pause that is not repeated ends": after(
        AWAITED,
        (Stepped(),),
        (92.0, Paused(1, is_paused=True)),
        (92.1 + PAUSED_S + STALL_S, EARLY, STALLED),
    ),
    "an engine without a known request may be idle": after(
        [(10.0, Stepped())], (90.0, EARLY, replied(pending("unknown")))
    ),
    "decode reads another rank's copy": after(
        [(90.0, EXPECT)],
        (RELEASE,),
        (prepare_offer(is_early=True),),
        (publish_offer(), NOT_NEEDED),
    ),
    "without the flag an unknown nonce is denied": [DENIED_UNKNOWN],
    "the written part is granted, and more once more is written": PARTS,
    "nothing is granted before the first part is written": after(
        AWAITED,
        (92.0, prepare_pair(4), COMPUTING),
        (92.5, EARLY, COMPUTING),
        (93.0, mark_pair(4), granted_pair(4)),
    ),
    "a preemption between two parts": after(
        PARTS,
        (94.0, WithdrawOffer(NONCE, is_final=False), EarlySlotFree(PAIR_SLOT, PAIR_TOKEN), QUEUED),
        (mark_pair(6),),  # of the step before it
        (prepare_pair(4, attempt=1, slot=8, fence_token=fence_token(0x78)), COMPUTING),
        (mark_pair(6),),
        (
            mark_pair(4, attempt=1),
            replied(grant(slot=8, fence_token=fence_token(0x78), num_tokens=4)),
        ),
    ),
    "a request that ends between two parts": after(
        PARTS,
        (
            *(94.0, WithdrawOffer(NONCE), EarlySlotFree(PAIR_SLOT, PAIR_TOKEN)),
            *(GIVEN_UP, *denied(WITHDRAWN)),
        ),
        (EARLY, *denied(WITHDRAWN)),
    ),
    "a preemption while a part is read": after(
        PARTS,
        (94.0, asked(renew(2, CLAIM, reading=1)), NOTHING_LOST),
        (WithdrawOffer(NONCE, is_final=False), EarlySlotFree(PAIR_SLOT, PAIR_TOKEN), QUEUED),
    ),
    "a reader that gives up between two parts": after(
        PARTS, (RELEASE_INCOMPLETE, *pair_ended(OfferEnd.ABORTED), GIVEN_UP)
    ),
    "a reader that dies between two parts": after(
        PARTS, (93.0 + LEASE_S, Tick(), *pair_ended(OfferEnd.EXPIRED), GIVEN_UP)
    ),
    "a reader that is done before the pin": after(
        PARTS,
        (94.0, prepare_pair(None)),
        (MARK, granted_pair(None)),
        (RELEASE, *pair_ended(OfferEnd.READ)),
    ),
    "without a slot it waits for the pin": after(
        AWAITED,
        (92.0, prepare_offer(is_early=True, is_written=False, computed=4), COMPUTING),
        (mark_pair(4),),
        (prepare_offer(is_early=True, is_written=False),),
        (MARK,),
        (publish_offer(), WRITTEN, GRANT),
    ),
    "decode gives up before the pin, with a slot": after(
        [(91.0, EXPECT)],
        (prepare_pair(4),),
        (RELEASE_INCOMPLETE, GIVEN_UP),
        (prepare_pair(None),),
        (publish_offer(), ClearSlot(PAIR_SLOT), EarlySlotFree(PAIR_SLOT, PAIR_TOKEN), NOT_NEEDED),
    ),
    "a release that is earlier than the request": [
        (90.0, RELEASE),
        (91.0, EXPECT),
        (92.0, prepare_pair(None)),
        (publish_offer(), ClearSlot(PAIR_SLOT), EarlySlotFree(PAIR_SLOT, PAIR_TOKEN), NOT_NEEDED),
    ],
    "an early ask for another life": [
        (
            90.0,
            asked(ask(is_early=True, incarnation="abcdef01" + "2" * 24)),
            *denied(LIFE_IN_SHORT),
        )
    ],
}


@each_of(PAIRS)
def test_a_pair(script: Script) -> None:
    early_machine(script).check()


def test_early_asks_are_bounded_in_total_and_for_each_reader() -> None:
    machine = early_machine()

    def is_remembered(number: int, engine: str) -> bool:
        by = {"reader": reader(engine=engine), "nonce": Nonce(hex32(number))}
        actions = machine.handle(asked(ask(is_early=True, **by)), 90.0)
        return replied(pending("unknown", **by)) in actions

    for begin, engine in ((0, "a"), (MAX_ASKS_OF_READER, "b")):
        numbers = range(begin, begin + MAX_ASKS_OF_READER)
        assert all(is_remembered(number, engine) for number in numbers)
        assert is_remembered(begin, engine)  # a repetition needs no room
        assert not is_remembered(10 * MAX_ASKS, engine)
    assert asks_of(machine).num_asks == MAX_ASKS == 2 * MAX_ASKS_OF_READER
    assert not is_remembered(20 * MAX_ASKS, "c")
    machine.handle(asked(release(nonce=Nonce(hex32(0)), reader=reader(engine="a"))), 90.0)
    assert is_remembered(20 * MAX_ASKS, "c")
    machine.handle(Tick(), 90.0 + REPEATED_S)
    assert (asks_of(machine).num_asks, machine.next_due) == (0, 90.0 + UNKNOWN_S)
    machine.handle(Tick(), 90.0 + UNKNOWN_S)  # the released pair is forgotten last
    assert machine.next_due is None
    machine.check()


def test_a_pair_that_is_not_pinned_yet_waits_for_a_slot() -> None:
    second = prepare_offer(nonce=NONCE2, request=P2, is_early=True, is_written=False)
    expect = ExpectOffer(NONCE2, P2, CONTEXT)
    waits = replied(pending("computing", nonce=NONCE2, claim=RIVAL))
    machine = early_machine(num_slots=1)
    granted = ASK, WriteSlot(0, fence_token(1)), replied(grant(slot=0))
    steps = granted, (expect,), (second,)
    play(
        machine, [*PREPARED, *steps, (asked(ask(nonce=NONCE2, claim=RIVAL, is_early=True)), waits)]
    )


def test_decode_hears_that_a_request_never_arrived() -> None:
    actions = early_machine(ASKED_EARLY).handle(Tick(), 90.0 + UNKNOWN_S)
    denials = [each.message for each in actions if isinstance(each, Reply)]
    assert denials == [deny(cause="not_arrived")]
