"""The prefill machine: its answers, the slots that it writes and clears, and the ends of offers."""

import math
from typing import Any

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Claim, Incarnation, Nonce, RequestId, short
from nixl_kv.protocol.events import (
    OVER,
    Action,
    ClearSlot,
    OfferEnd,
    OfferEnded,
    ReclaimBlocks,
    Reply,
    RevokeAll,
    RevokeOffer,
    Tick,
    Transition,
    WithdrawOffer,
    WriteSlot,
)
from nixl_kv.protocol.messages import Deny, DenyCause
from nixl_kv.protocol.prefill import (
    END_REASONS,
    OTHER_PROMPT,
    READING_S,
    READING_WANTED_S,
    RECALL_S,
    TRANSITIONS,
    WITHDRAWN,
    Offer,
    PrefillPart,
    State,
)
from support.features import features_of_a_rank
from support.offers import (
    ABORTED,
    ASK,
    ASK_AGAIN,
    ASK_SECOND,
    BOTH,
    BOTH_ASKED,
    DENIED_UNKNOWN,
    EXPIRED,
    FIRST_SLOT,
    GRANT,
    GRANTED,
    IN_PARTS,
    LIFE_IN_SHORT,
    MARK,
    NOT_NEEDED,
    NOT_THIS_READER,
    NOTHING_LOST,
    OFFER_2,
    OFFER_3,
    OFFERED,
    OTHER_LIFE_OF_READER,
    OTHERS,
    PAIR_SLOT,
    PAIR_TOKEN,
    PREPARED,
    READ,
    RECALL,
    RECALLED,
    RECLAIM,
    RELEASE,
    RELEASE_INCOMPLETE,
    RELEASE_SECOND,
    REVOKED,
    SECOND,
    SHARED,
    TAKEN_BACK,
    TTL_S,
    UNCLAIMED,
    UNKNOWN,
    UNWRITTEN,
    WANTED_BACK,
    WRITTEN,
    count_fence_tokens,
    denied,
    denied_as,
    ended,
    fence_token,
    granted_pair,
    granted_too,
    mark_pair,
    prefill_machine,
    prepare_pair,
    reads_on,
)
from support.records import (
    CLAIM,
    HOLD_S,
    LEASE_S,
    NONCE,
    NONCE2,
    OTHER_LIFE,
    P1,
    P2,
    RIVAL,
    STRANGER,
    ask,
    asked,
    grant,
    hex32,
    prepare_offer,
    publish_offer,
    reader,
    recall,
    release,
    renew,
    renewed,
    replied,
)
from support.scripts import Script, after, each_of, impossible, moves_of, play, rows_of

pytestmark = pytest.mark.usefixtures("counted_fence_tokens")


GRANTS: dict[str, Script] = {
    "the slot is written before the grant is sent": after(OFFERED, (ASK, WRITTEN, GRANT), READ),
    # A peer that has the nonce has the ticket.
    "an ask that overtakes the publication is granted": after(
        PREPARED,
        (99.5, ASK, WRITTEN, GRANT),
        (100.0, publish_offer()),
        (99.5 + LEASE_S - 0.1, Tick()),
        READ,
    ),
    "a repeated ask gets the same grant and a new lease": after(
        GRANTED,
        (101.0, asked(ask(number=2)), GRANT),
        (101.0 + LEASE_S - 0.01, Tick()),
        (101.0 + LEASE_S, Tick(), *EXPIRED),
    ),
    "a slot that is used again gets a new fence_token": after(
        GRANTED,
        READ,
        (OFFER_2,),
        granted_too(FIRST_SLOT),
    ),
}
WRITES: dict[str, Script] = {
    "an unwritten offer is granted once it is written": after(
        UNWRITTEN, (ASK, WRITTEN), (MARK, GRANT), READ
    ),
    "a reader that asks several times gets one grant, by the latest route": after(
        UNWRITTEN,
        (asked(ask(), b"first"), WRITTEN),
        (asked(ask(number=2), b"second"),),
        (MARK, replied(grant(), b"second")),
        (MARK,),
    ),
    "an unknown offer is not marked": [(MARK,)],
}
DENIALS: dict[str, Script] = {
    **{
        f"an ask {name} leaves the offer as it was": after(
            OFFERED, (asked(ask(**changed)), *denied(reason, **shown)), (ASK, WRITTEN, GRANT)
        )
        for name, changed, reason, shown in (
            ("for an unknown nonce", {"nonce": NONCE2}, UNKNOWN, {"nonce": NONCE2}),
            ("of another prompt", {"context": hex32(7)}, OTHER_PROMPT, {}),
            ("for another life", {"incarnation": "abcdef01" + "2" * 24}, LIFE_IN_SHORT, {}),
            (
                "of a reader that does not read",
                {"readers": (1, 2)},
                "rank 0 is not among its own readers",
                {},
            ),
        )
    },
    **{
        f"only the first claim is granted, not {name}": after(
            GRANTED,
            (100.5, asked(ask(**{**shown, "readers": readers})), *denied(NOT_THIS_READER, **shown)),
            (100.0 + LEASE_S, Tick(), *EXPIRED),
        )
        for name, shown, readers in (
            ("another claim", {"claim": RIVAL}, (0,)),
            ("another engine", {"reader": STRANGER}, (0,)),
            ("another life of the engine", {"reader": OTHER_LIFE_OF_READER}, (0,)),
            ("a rank that was not announced", {"reader": SECOND}, BOTH),
        )
    },
    "an ask after the end": after(GRANTED, READ, denied_as(OfferEnd.READ)),
}
COMPLETE = {"complete": True, "incomplete": False}
READERS = [reader(rank, incarnation=Incarnation(hex32(0xD0 + rank))) for rank in BOTH]
IMPOSTOR = reader(1, incarnation=Incarnation(hex32(0xD9)))
RELEASES: dict[str, Script] = {
    "the offer ends when each reader has released it": after(
        BOTH_ASKED, (RELEASE,), (RELEASE_SECOND, *READ[1:])
    ),
    "a repeated one ends one reader": after(
        SHARED,
        (RELEASE,),
        (RELEASE,),
        (RELEASE_INCOMPLETE,),
        (asked(release(complete=False, reader=SECOND)), *ABORTED),
    ),
    # No rank has the third one.
    "ranks of one engine may have incarnations of their own": after(
        OFFERED,
        (asked(ask(reader=READERS[0], readers=BOTH)), WRITTEN, replied(grant(reader=READERS[0]))),
        (asked(ask(reader=READERS[1], readers=BOTH)), replied(grant(reader=READERS[1]))),
        (asked(release(reader=IMPOSTOR)),),
        (asked(release(reader=READERS[0])),),
        (asked(release(reader=READERS[1])), *READ[1:]),
    ),
    **{
        f"one of {who} does not end an offer that is read, {how}": after(
            GRANTED, (asked(release(complete=complete, **changed)),), READ
        )
        for who, changed in OTHERS.items()
        for how, complete in COMPLETE.items()
    },
    **{
        f"one of {who} does not end an unclaimed offer, {how}": after(
            OFFERED, (asked(release(complete=complete, **OTHERS[who])),), (ASK, WRITTEN, GRANT)
        )
        for who in ("another life of this rank", "another offer")
        for how, complete in COMPLETE.items()
    },
    # Complete where this rank has no reader; incomplete where the engine gives up.
    **{
        f"one of an unclaimed offer ends it, {how}": after(
            OFFERED,
            (asked(release(complete=complete)), NOT_NEEDED),
            denied_as(OfferEnd.NOT_NEEDED),
            (1000.0, Tick()),
        )
        for how, complete in COMPLETE.items()
    },
    "one may overtake the publication": after(
        PREPARED, (RELEASE_INCOMPLETE, NOT_NEEDED), (publish_offer(),)
    ),
}
TIMES: dict[str, Script] = {
    "an unclaimed offer ends after its time": after(
        OFFERED, (100.0 + TTL_S - 0.01, Tick()), (100.0 + TTL_S, Tick(), UNCLAIMED)
    ),
    "an offer has no end before it is published": after(
        PREPARED, (1000.0, Tick()), (publish_offer(),), (1000.0 + TTL_S, Tick(), UNCLAIMED)
    ),
    # Also that of one that never asks: its engine may be dead.
    "the first ask starts the lease of every expected reader": after(
        SHARED, (RELEASE,), (100.0 + LEASE_S - 0.01, Tick()), (100.0 + LEASE_S, Tick(), *EXPIRED)
    ),
    "leases run out one by one": after(
        SHARED,
        (101.0, ASK_SECOND, replied(grant(reader=SECOND))),
        (100.0 + LEASE_S, Tick()),
        (ASK_AGAIN, *denied(NOT_THIS_READER)),
        (101.0 + LEASE_S, Tick(), *EXPIRED),
    ),
    "in one tick each slot is cleared before its blocks are free": after(
        GRANTED,
        (OFFER_2,),
        granted_too(),
        (OFFER_3,),
        (90.0, publish_offer(OFFER_3.nonce, OFFER_3.request)),
        (
            102.0,
            Tick(),
            OfferEnded(OFFER_3.nonce, OFFER_3.request, OfferEnd.UNCLAIMED),
            *EXPIRED,
            ClearSlot(2),
            OfferEnded(NONCE2, P2, OfferEnd.EXPIRED),
        ),
    ),
}
HEARTBEATS: dict[str, Script] = {
    "one extends the lease": after(
        GRANTED,
        (101.5, asked(renew(2, CLAIM)), NOTHING_LOST),
        (101.5 + LEASE_S - 0.01, Tick()),
        (101.5 + LEASE_S, Tick(), *EXPIRED),
    ),
    "a claim that a newer one lacks is released": after(
        GRANTED, (asked(renew(2)), *ABORTED, NOTHING_LOST)
    ),
    **{
        f"a claim that one {name} lacks is kept": after(
            GRANTED, (asked(renew(number)), replied(renewed(number=number))), READ
        )
        for name, number in (("older than the ask", 0), ("numbered as the ask", 1))
    },
    # Its ask may be on its way, with a number that prefill does not know.
    "one of a reader that has not asked releases nothing": after(
        SHARED,
        (asked(renew(9, reader=SECOND)), replied(renewed(reader=SECOND, number=9))),
        (ASK_SECOND, replied(grant(reader=SECOND))),
    ),
    "the answer names the lost offer": after(
        GRANTED,
        (asked(renew(2, RIVAL, CLAIM, Claim(hex32(9)))), replied(renewed(RIVAL, Claim(hex32(9))))),
    ),
    **{
        f"a stranger renews and releases nothing: {len(claims)} claims": after(
            GRANTED,
            (
                101.0,
                asked(renew(9, *claims, reader=STRANGER)),
                replied(renewed(*claims, reader=STRANGER, number=9)),
            ),
            (100.0 + LEASE_S, Tick(), *EXPIRED),
        )
        for claims in ((), (CLAIM,))
    },
    # A restarted rank may have its port again, while reads of the old one are still stuck.
    **{
        f"to one for another life all is lost, and nothing changes: {len(claims)} claims": after(
            GRANTED,
            (101.0, asked(renew(2, *claims, incarnation=OTHER_LIFE)), replied(renewed(*claims))),
            (100.0 + LEASE_S - 0.01, Tick()),
            (100.0 + LEASE_S, Tick(), *EXPIRED),
        )
        for claims in ((RIVAL,), (RIVAL, CLAIM))
    },
}
HEARTBEAT_READING = asked(renew(2, CLAIM, reading=1))
READING: Script = after(GRANTED, (101.0, HEARTBEAT_READING, NOTHING_LOST))
HELD = 100.0 + HOLD_S
IS_HELD = (HELD - 0.5, asked(renew(2, CLAIM)), NOTHING_LOST)
"""The reader lives, and does not read."""
RECALLS: dict[str, Script] = {
    "an unread offer is recalled after a time, and then taken back": after(
        GRANTED,
        IS_HELD,
        (HELD, Tick(), RECALL),
        (HELD + RECALL_S - 0.01, Tick()),
        (HELD + RECALL_S, Tick(), *TAKEN_BACK),
        (HELD + 100, Tick()),
    ),
    "an offer that is read is not recalled": after(
        READING, IS_HELD, (HELD, Tick()), (RECLAIM,), READ
    ),
    "a read that has begun ends a recall": after(
        RECALLED, (HEARTBEAT_READING, NOTHING_LOST), (101.0 + RECALL_S, Tick()), READ
    ),
    "a reader releases an offer that it does not read": after(
        RECALLED, (RELEASE_INCOMPLETE, *TAKEN_BACK)
    ),
    "it may have given it up meanwhile": after(
        RECALLED, (asked(renew(2)), *ABORTED, replied(renewed()))
    ),
    "a recall is not repeated": after(RECALLED, (RECLAIM,), (101.5, Tick())),
    "a second ask is denied": after(RECALLED, (ASK, *denied(WANTED_BACK))),
    "each reader gets the recall, on its latest route": after(
        SHARED,
        (
            asked(ask(reader=SECOND, readers=BOTH), b"second"),
            replied(grant(reader=SECOND), b"second"),
        ),
        (asked(renew(2, CLAIM), b"first"), replied(renewed(), b"first")),
        (RECLAIM, replied(recall(), b"first"), replied(recall(reader=SECOND), b"second")),
        (asked(release(complete=False)),),
        (asked(release(complete=False, reader=SECOND)), *TAKEN_BACK),
    ),
    "one that reads for ever is believed for a while": after(
        READING,
        *reads_on(101.0, READING_S),
        (101.0 + READING_S - 0.01, Tick()),
        (101.0 + READING_S, Tick(), *ended(OfferEnd.OVERDUE)),
        (asked(renew(9999, CLAIM, reading=1)), replied(renewed(CLAIM, number=9999))),
        (ASK, *denied(END_REASONS[OfferEnd.OVERDUE])),
    ),
    "two readers have no more time than one": after(
        SHARED,
        (101.0, HEARTBEAT_READING, NOTHING_LOST),
        *reads_on(101.0, READING_S, BOTH),
        (101.0 + READING_S, Tick(), *ended(OfferEnd.OVERDUE)),
    ),
    "a recall that a heartbeat ends begins its time": after(
        RECALLED,
        (101.5, HEARTBEAT_READING, NOTHING_LOST),
        *reads_on(101.5, READING_S),
        (101.5 + READING_S, Tick(), *ended(OfferEnd.OVERDUE)),
    ),
    "a request that needs blocks takes them from one that reads for long": after(
        READING,
        *reads_on(101.0, READING_WANTED_S),
        (101.0 + READING_WANTED_S - 0.01, RECLAIM),
        (101.0 + READING_WANTED_S, RECLAIM, *ended(OfferEnd.OVERDUE)),
        (RECLAIM,),
    ),
    "only if those of others are too few": after(
        READING,
        *reads_on(101.0, READING_WANTED_S),
        (101.0 + READING_WANTED_S, OFFER_2),
        (publish_offer(NONCE2, P2),),
        (RECLAIM, OfferEnded(NONCE2, P2, OfferEnd.REVOKED)),
    ),
    "a reset takes back all offers, also those that are read": after(
        READING,
        (OFFER_2,),
        (publish_offer(NONCE2, P2),),
        (OFFER_3,),  # its ticket is not out: the scheduler withdraws it
        (RevokeAll(), RECALL, *TAKEN_BACK, OfferEnded(NONCE2, P2, OfferEnd.REVOKED)),
        (asked(renew(3, CLAIM, reading=1)), replied(renewed(CLAIM, number=3))),
        (RevokeAll(),),
        (ASK, *denied(END_REASONS[OfferEnd.REVOKED])),
    ),
    "and granted or recalled ones": after(GRANTED, (RevokeAll(), RECALL, *TAKEN_BACK)),
    "and those recalled before": after(RECALLED, (RevokeAll(), RECALL, *TAKEN_BACK)),
    "a reader that dies while it reads": after(READING, (101.0 + LEASE_S, Tick(), *EXPIRED)),
    "a reader that gives up while it reads": after(
        READING, (asked(renew(3)), *ABORTED, replied(renewed(number=3)))
    ),
    "unclaimed offers end first": after(
        GRANTED,
        (OFFER_2,),
        (publish_offer(NONCE2, P2),),
        (RECLAIM, OfferEnded(NONCE2, P2, OfferEnd.REVOKED)),
    ),
}
COMMANDS: dict[str, Script] = {
    "an unclaimed offer can be revoked": after(
        OFFERED, (RevokeOffer(NONCE), REVOKED), denied_as(OfferEnd.REVOKED), (RevokeOffer(NONCE),)
    ),
    "a granted offer cannot be revoked": after(
        GRANTED, (RevokeOffer(NONCE),), (asked(ask(number=2)), GRANT), READ
    ),
    "a withdrawn offer is forgotten": after(
        PREPARED, (WithdrawOffer(NONCE),), (ASK, *denied(WITHDRAWN))
    ),
    "withdrawing an unprepared offer does nothing": [(WithdrawOffer(NONCE),)],
}
ALL: dict[str, Script] = {
    f"{subject}: {name}": script
    for subject, scripts in {
        "grants": GRANTS,
        "writes": WRITES,
        "denials": DENIALS,
        "releases": RELEASES,
        "time": TIMES,
        "heartbeats": HEARTBEATS,
        "recalls": RECALLS,
        "commands": COMMANDS,
    }.items()
    for name, script in scripts.items()
}
PINNED = 95.0
PINNED_PARTS: Script = after(
    IN_PARTS, (prepare_pair(None),), (MARK, granted_pair(None)), (PINNED, publish_offer())
)
OTHER_FENCE = {"slot": 8, "fence_token": fence_token(0x78)}


def pair_ended(end: OfferEnd) -> list[Action]:
    return [ClearSlot(PAIR_SLOT), OfferEnded(NONCE, P1, end)]


PAIR_READ = pair_ended(OfferEnd.READ)
CACHED = prepare_offer(is_cached=True, slot=PAIR_SLOT, fence_token=PAIR_TOKEN)
CACHED_GRANT = replied(grant(slot=PAIR_SLOT, fence_token=PAIR_TOKEN))
LONG_LEASE: Script = [
    (100.0, CACHED),
    (ASK, CACHED_GRANT),
    *[(100.0 + n, asked(renew(2 + n, CLAIM)), replied(renewed(number=2 + n))) for n in range(60)],
]
"""Cached blocks, which nothing pins; their reader has no blocks yet."""
PAIRS: dict[str, Script] = {
    "cached blocks are not reclaimed, but a reader may not keep their slot": after(
        LONG_LEASE,
        (RECLAIM,),
        (RevokeAll(),),
        (100.0 + HOLD_S, Tick(), RECALL),
        (RECLAIM,),
        (WithdrawOffer(NONCE), *denied(WITHDRAWN)),
    ),
    "a reader of cached blocks may not read for ever": after(
        [(100.0, CACHED), (ASK, CACHED_GRANT)],
        *reads_on(100.0, READING_S),
        (100.0 + READING_S, RECLAIM),
        # Its part clears the slot.
        (101.0 + READING_S, Tick(), OfferEnded(NONCE, P1, OfferEnd.OVERDUE)),
    ),
    "all of it is granted when all is written, and pinned later": after(
        IN_PARTS,
        (94.0, prepare_pair(None)),
        (MARK, granted_pair(None)),
        (publish_offer(),),
        (RELEASE, *PAIR_READ),
    ),
    "the pin may overtake the end of its last step": after(
        IN_PARTS,
        (94.0, prepare_pair(None)),
        (publish_offer(),),
        (asked(ask(number=2)),),
        (MARK, granted_pair(None)),
        (RELEASE, *PAIR_READ),
    ),
    "a reader that is done before the pin": after(
        IN_PARTS, (94.0, prepare_pair(None)), (MARK, granted_pair(None)), (RELEASE, *PAIR_READ)
    ),
    "an ask gets the part written by then": after(
        [(92.0, prepare_pair(4))],
        (ASK, *denied(UNKNOWN)),
        (mark_pair(4),),
        (ASK, granted_pair(4)),
        (asked(ask(number=2)), granted_pair(4)),
    ),
    "without a slot it waits for the pin": after(
        [(92.0, prepare_offer(is_early=True, is_written=False, computed=4))],
        (mark_pair(4),),
        (ASK, *denied(UNKNOWN)),
        (prepare_offer(is_early=True, is_written=False),),
        (MARK,),
        (publish_offer(),),
        (ASK, WRITTEN, GRANT),
    ),
    "it is held from its pin on, and not for ever": after(
        PINNED_PARTS,
        (PINNED + HOLD_S - 0.5, asked(renew(2, CLAIM)), NOTHING_LOST),
        (PINNED + HOLD_S, Tick(), RECALL),
        (PINNED + HOLD_S + RECALL_S, Tick(), *pair_ended(OfferEnd.REVOKED)),
    ),
    "before its pin it is held as long as prefill computes": after(
        IN_PARTS,
        (93.0 + 10 * HOLD_S, asked(renew(2, CLAIM)), NOTHING_LOST),
        (93.0 + 10 * HOLD_S, Tick()),
        (prepare_pair(None),),
        (MARK, granted_pair(None)),
    ),
    "its time to read begins with the pin": after(
        IN_PARTS,
        (94.0, asked(renew(2, CLAIM, reading=1)), NOTHING_LOST),
        *reads_on(94.0, READING_S + 99),
        (1100.0, prepare_pair(None)),
        (publish_offer(),),
        *reads_on(1100.0, READING_S),
        (1100.0 + READING_S, Tick(), *pair_ended(OfferEnd.OVERDUE)),
    ),
    "a recalled offer is not granted": after(
        IN_PARTS,
        (94.0, prepare_pair(None)),
        (publish_offer(),),
        (ReclaimBlocks(9), RECALL),
        (MARK,),
    ),
    "an offer still computed is not recalled": after(IN_PARTS, (ReclaimBlocks(9),), (93.9, Tick())),
    "blocks of a pair that is computed do not count as recalled": after(
        IN_PARTS,
        (94.0, OFFER_2),
        (publish_offer(NONCE2, P2),),
        (asked(ask(nonce=NONCE2, claim=RIVAL)), WRITTEN, replied(grant(nonce=NONCE2, claim=RIVAL))),
        (ReclaimBlocks(1), replied(recall(nonce=NONCE2, claim=RIVAL))),
    ),
    "a preemption between two parts: its reader has to ask again": after(
        IN_PARTS,
        (94.0, WithdrawOffer(NONCE, is_final=False), *denied(UNKNOWN)),
        (mark_pair(6),),  # of the step before it
        (prepare_pair(4, attempt=1, **OTHER_FENCE),),
        (mark_pair(6),),
        (ASK, *denied(UNKNOWN)),
        (mark_pair(4, attempt=1),),
        (ASK, replied(grant(num_tokens=4, **OTHER_FENCE))),
    ),
    "a request that ends while a part is read denies its readers": after(
        IN_PARTS,
        (93.5, asked(renew(2, CLAIM, reading=1)), NOTHING_LOST),
        (WithdrawOffer(NONCE), *denied(WITHDRAWN)),
        (ASK, *denied(WITHDRAWN)),
    ),
    "a reader that gives up between two parts": after(
        IN_PARTS, (RELEASE_INCOMPLETE, *pair_ended(OfferEnd.ABORTED))
    ),
    "a reader that dies between two parts": after(
        IN_PARTS, (93.0 + LEASE_S, Tick(), *pair_ended(OfferEnd.EXPIRED))
    ),
}
"""The machine alone: no part keeps asks until it can grant them."""


class Needless(PrefillPart):
    """Its feature knows that no reader needs any offer."""

    def is_needless(self, offer: Offer) -> bool:
        return bool(offer.nonce)


UNNEEDED: Script = after(PREPARED, (publish_offer(), NOT_NEEDED))


@each_of(ALL | PAIRS)
def test_an_offer(script: Script) -> None:
    prefill_machine(script).check()


@each_of(ALL)
def test_the_parts_of_features_leave_other_offers_as_they_are(script: Script) -> None:
    with features_of_a_rank() as features:
        parts = [each.prefill for each in features if each.prefill is not None]
        prefill_machine(script, parts=parts).check()


def test_the_scripts_above_make_each_transition_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[Transition] = []
    for script in (ALL | PAIRS).values():
        count_fence_tokens(monkeypatch)
        prefill_machine(script, recorded.append)
    prefill_machine(UNNEEDED, recorded.append, parts=(Needless(),))
    assert moves_of(recorded) == rows_of(TRANSITIONS, OVER)
    assert {move.cause for move in recorded if move.after == OVER} == {
        *["Release: read", "Release: aborted", "Release: not_needed", "Heartbeat: aborted"],
        *["Tick: expired", "Tick: unclaimed", "RevokeOffer: revoked", "WithdrawOffer"],
        *["Tick: revoked", "Release: revoked", "ReclaimBlocks: revoked", "RevokeAll: revoked"],
        *["Tick: overdue", "ReclaimBlocks: overdue"],
        "PublishOffer: not_needed",
    }


@pytest.mark.parametrize(
    ("script", "ask_or_tick", "cause"),
    [
        pytest.param(
            after(OFFERED, (100.0 + TTL_S, Tick(), UNCLAIMED)), (999.0, ASK), "unclaimed", id="late"
        ),
        pytest.param(after(GRANTED, READ), (101.0, ASK), "", id="used"),
        pytest.param(after(OFFERED, (RevokeOffer(NONCE), REVOKED)), (101.0, ASK), "", id="revoked"),
        pytest.param([], (101.0, ASK), "", id="unknown"),
        pytest.param(OFFERED, (101.0, asked(ask(context=hex32(9)))), "", id="another prompt"),
    ],
)
def test_decode_hears_why_only_where_its_operator_looks_elsewhere(
    script: Script, ask_or_tick: tuple[float, Any], cause: DenyCause
) -> None:
    now, event = ask_or_tick
    denials = [
        action.message
        for action in prefill_machine(script).handle(event, now)
        if isinstance(action, Reply) and isinstance(action.message, Deny)
    ]
    assert [denial.cause for denial in denials] == [cause]


@pytest.mark.parametrize("seconds", [0.5, 3600.0])
def test_the_grant_says_how_long_the_lease_is(seconds: float) -> None:
    machine = prefill_machine(PREPARED, lease_s=seconds)
    play(machine, [(ASK, WRITTEN, replied(grant(lease_s=seconds)))])


def test_without_a_free_slot_an_ask_is_denied_until_one_is_cleared() -> None:
    second = asked(ask(nonce=NONCE2, claim=RIVAL))
    full = denied("all fence slots are granted", nonce=NONCE2, claim=RIVAL)
    machine = prefill_machine(num_slots=1)
    play(
        machine,
        [
            *PREPARED,
            (OFFER_2,),
            (ASK, WriteSlot(0, fence_token(1)), replied(grant(slot=0))),
            (second, *full),
            (RELEASE, ClearSlot(0), OfferEnded(NONCE, P1, OfferEnd.READ)),
        ],
    )
    assert machine.handle(second, 100.2)[0] == WriteSlot(0, fence_token(2))
    machine.check()


@pytest.mark.parametrize(
    ("before", "event", "error"),
    [
        *[
            pytest.param(before, prepare_offer(), "offer of request 'p1' exists already", id=name)
            for name, before in (("PREPARED", PREPARED), ("OFFERED", OFFERED), ("GRANTED", GRANTED))
        ],
        pytest.param(OFFERED, WithdrawOffer(NONCE), "WithdrawOffer leads from OFFERED", id="out"),
        pytest.param(GRANTED, WithdrawOffer(NONCE), "is granted and pinned", id="asked"),
        pytest.param(
            OFFERED,
            publish_offer(),
            r"offer \(request 'p1', peer ''\): PublishOffer leads from OFFERED to OFFERED; "
            "allowed: the transitions in docs/protocol.md",
            id="twice",
        ),
    ],
)
def test_a_command_that_comes_out_of_order_changes_nothing(
    before: Script, event: Any, error: str
) -> None:
    machine = prefill_machine(before)
    with pytest.raises(LocalProtocolError, match=error):
        machine.handle(event, 101.0)
    assert machine.handle(asked(ask(number=2)), 101.0)[-1] == GRANT
    play(machine, [READ])


def test_a_cleared_machine_has_no_offer_and_all_slots() -> None:
    machine = prefill_machine(SHARED)
    machine.clear()
    machine.check()
    assert len(list(machine.offers.values())) == 0
    play(machine, [DENIED_UNKNOWN])


# One offer


EVENTS = [
    *[prepare_offer(), publish_offer(), WithdrawOffer(NONCE), RevokeOffer(NONCE)],
    *[ask(), release(), renew(1), Tick(), ReclaimBlocks(1), RevokeAll()],
]


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_only_transitions_of_the_table_are_possible(state: State, event: object) -> None:
    recorded: list[Transition] = []
    offer = Offer(prepare_offer(), recorded.append)
    offer.state = state
    recorded.clear()
    for end, words in impossible(TRANSITIONS, state, event, None):
        with pytest.raises(LocalProtocolError, match=f"^offer .request 'p1', peer ''.: {words}"):
            offer.move(end, event)
    assert (offer.state, recorded) == (state, [])


@pytest.mark.parametrize(
    ("script", "waits_for", "expires_at"),
    [
        pytest.param(PREPARED, "its ticket", math.inf, id="prepared"),
        pytest.param(OFFERED, "a reader's ask", 100.0 + TTL_S, id="offered"),
        pytest.param(
            SHARED, "engine 'decode', ranks 0, 1", 100.0 + LEASE_S, id="granted to two ranks"
        ),
        pytest.param(
            after(SHARED, (RELEASE,)), "engine 'decode', ranks 1", 100.0 + LEASE_S, id="read by one"
        ),
    ],
)
def test_an_offer_says_what_it_waits_for_and_until_when(
    script: Script, waits_for: str, expires_at: float
) -> None:
    (offer,) = prefill_machine(script).offers.values()
    assert (offer.waits_for, offer.due_at(max)) == (waits_for, expires_at)


def test_each_transition_and_denial_of_an_offer_is_recorded_once() -> None:
    recorded: list[Transition] = []
    machine = prefill_machine(record=recorded.append)
    by_rank, by_engine = "engine 'decode', rank 0", "engine 'decode'"
    for event, *moves in (
        (ASK,),  # unknown
        (prepare_offer(), ("", "", "PREPARED", "PrepareOffer: offer 00000000")),
        (publish_offer(), ("", "PREPARED", "OFFERED", "PublishOffer")),
        (ASK, (by_rank, "OFFERED", "GRANTED", "Ask")),
        (asked(ask(number=2)),),
        (asked(renew(3, CLAIM)),),
        (asked(release(claim=RIVAL)),),
        (Tick(),),
        (asked(ask(claim=RIVAL)), (by_rank, *2 * ("GRANTED",), f"Ask denied: {NOT_THIS_READER}")),
        (RELEASE, (by_engine, "GRANTED", OVER, "Release: read", 0, "", True)),
    ):
        recorded.clear()
        machine.handle(event, 100.0)
        about = ("offer", short(NONCE), P1)
        assert recorded == [Transition(*about, *move) for move in moves], event


def test_the_machine_says_whether_time_matters_and_anything_is_granted() -> None:
    machine = prefill_machine()
    seen = []
    for event in (prepare_offer(), publish_offer(), ASK, RELEASE):
        machine.handle(event, 100.0)
        seen.append((machine.next_due is not None, machine.any_granted))
    assert seen == [(False, False), (True, False), (True, True), (False, False)]


# Which offers give their blocks back


RECLAIMS = {
    "nothing": ("", 3, ""),
    "the oldest unclaimed": ("-2 -2 -2", 3, "0 1"),
    "the unclaimed first": ("a9 -2", 2, "1"),
    "granted ones after the others": ("-1 a2", 3, "0 1"),
    "the unclaimed first, then the oldest": ("a3 -2 a3", 3, "1 0"),
    "the oldest of any engine": ("b3 a2 a2", 4, "0 1"),
    "those that are read stay": ("a9r", 5, ""),
    "recalled ones already count": ("a3 b2c", 2, ""),
    "recalled ones are not enough": ("a3 b2c", 3, "0"),
    "all, and still too few": ("a1 -1", 9, "1 0"),
}
"""Offers, the oldest first: the engine that was granted it (or -), its blocks, and whether it is
read (r) or recalled (c); how many blocks are needed; who gives them, in order."""


@pytest.mark.parametrize(("offers", "needed", "chosen"), RECLAIMS.values(), ids=RECLAIMS)
def test_offers_that_give_their_blocks_back(offers: str, needed: int, chosen: str) -> None:
    machine = prefill_machine(num_slots=8)
    claims: dict[str, list[Claim]] = {}
    for number, word in enumerate(offers.split()):
        engine, size, state = word[0], word[1], word[2:]
        nonce, claim, request = Nonce(hex32(number)), Claim(hex32(number)), RequestId(str(number))
        blocks = Table.of(range(10 * number + 1, 10 * number + 1 + int(size)))
        machine.handle(prepare_offer(nonce=nonce, request=request, tables=(blocks,)), 0.0)
        machine.handle(publish_offer(nonce, request), 0.0)
        if engine == "-":
            continue
        by, others = reader(engine=engine), claims.setdefault(engine, [])
        machine.handle(asked(ask(nonce=nonce, claim=claim, reader=by)), 0.0)
        offer = machine.offers.get(nonce)
        assert offer is not None
        if state == "r":
            machine.handle(asked(renew(number, claim, *others, reading=1, reader=by)), 0.0)
        if state == "c":
            machine.recall(offer, Tick(), 0.0)
        others.append(claim)
    before = {offer.request: offer.state for offer in machine.offers.values()}
    actions = machine.handle(ReclaimBlocks(needed), 0.0)
    ended = [each.request for each in actions if isinstance(each, OfferEnded)]
    recalled = [o.request for o in machine.offers.values() if o.state is not before[o.request]]
    assert " ".join([*ended, *recalled]) == chosen
