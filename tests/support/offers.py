"""Scripts of offers for the prefill machine; the tests of features continue some of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from nixl_kv.ids import FenceToken, Nonce, RequestId
from nixl_kv.protocol import prefill
from nixl_kv.protocol.events import (
    Action,
    AskDenied,
    ClearSlot,
    EarlySlotFree,
    MarkWritten,
    OfferEnd,
    OfferEnded,
    PrepareOffer,
    ReclaimBlocks,
    Record,
    WriteSlot,
)
from nixl_kv.protocol.prefill import CAUSES, END_REASONS, PrefillMachine, PrefillPart
from support.records import (
    CLAIM,
    HOLD_S,
    LEASE_S,
    NONCE,
    NONCE2,
    OTHER_LIFE,
    P1,
    P2,
    RANK_LIFE,
    RIVAL,
    STRANGER,
    ask,
    asked,
    deny,
    grant,
    hex32,
    no_record,
    prepare_offer,
    publish_offer,
    reader,
    recall,
    release,
    renew,
    renewed,
    replied,
)
from support.scripts import Script, after, play

TTL_S = 10.0
FIRST_SLOT = 3
"""The slot that is granted first, of four."""
BOTH = (0, 1)
"""Two reader ranks under one claim."""
SECOND = reader(1)
OTHER_LIFE_OF_READER = reader(incarnation=OTHER_LIFE)
UNKNOWN = "no such offer: used, expired, or never made"
NOT_THIS_READER = "claimed by another, or ended for this reader"
LIFE_IN_SHORT = "meant for incarnation abcdef01"
WANTED_BACK = "its blocks were recalled"


def fence_token(number: int) -> FenceToken:
    return FenceToken(bytes([number]) * 16)


def count_fence_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines make the fence tokens 1, 2, and so on, from now on."""
    numbers = iter(range(1, 256))
    monkeypatch.setattr(prefill, "new_fence_token", lambda: fence_token(next(numbers)))


def prefill_machine(
    script: Script = (),
    record: Record = no_record,
    *,
    parts: Sequence[PrefillPart] = (),
    num_slots: int = 4,
    lease_s: float = LEASE_S,
) -> PrefillMachine:
    """A machine with these parts, after a script."""
    machine = PrefillMachine(
        RANK_LIFE,
        record,
        num_slots=num_slots,
        offer_ttl_s=TTL_S,
        lease_s=lease_s,
        hold_s=HOLD_S,
        parts=parts,
    )
    play(machine, script)
    return machine


def ended(end: OfferEnd) -> list[Action]:
    return [ClearSlot(FIRST_SLOT), OfferEnded(NONCE, P1, end)]


def denied(reason: str, **changed: Any) -> list[Action]:
    """Decode hears why only where its operator needs that."""
    cause = CAUSES.get(reason, "")
    return [AskDenied(changed.get("nonce", NONCE), reason), replied(deny(cause=cause, **changed))]


WRITTEN, GRANT = WriteSlot(FIRST_SLOT, fence_token(1)), replied(grant())
RELEASE, RELEASE_INCOMPLETE = asked(release()), asked(release(complete=False))
READ = (RELEASE, *ended(OfferEnd.READ))
"""Everybody has read it: only now it has ended."""
ABORTED, EXPIRED = ended(OfferEnd.ABORTED), ended(OfferEnd.EXPIRED)
UNCLAIMED, NOT_NEEDED, REVOKED = (
    OfferEnded(NONCE, P1, end)
    for end in (OfferEnd.UNCLAIMED, OfferEnd.NOT_NEEDED, OfferEnd.REVOKED)
)
ASK, ASK_SECOND = asked(ask()), asked(ask(reader=SECOND, readers=BOTH))
ASK_AGAIN = asked(ask(number=2, readers=BOTH))
DENIED_UNKNOWN = (ASK, *denied(UNKNOWN))


def denied_as(end: OfferEnd) -> tuple[Any, ...]:
    return (ASK, *denied(END_REASONS[end]))


RELEASE_SECOND = asked(release(reader=SECOND))
OFFER_2 = prepare_offer(nonce=NONCE2, request=P2)
OFFER_3 = prepare_offer(nonce=Nonce(hex32(3)), request=RequestId("p3"))


def granted_too(slot: int = 2, **changed: Any) -> tuple[Any, ...]:
    """The ask for the second offer, and its grant."""
    token = fence_token(2)
    return (
        asked(ask(nonce=NONCE2, **changed)),
        WriteSlot(slot, token),
        replied(grant(nonce=NONCE2, slot=slot, fence_token=token, **changed)),
    )


PREPARED: Script = [(99.0, prepare_offer())]
OFFERED: Script = after(PREPARED, (100.0, publish_offer()))
GRANTED: Script = after(OFFERED, (ASK, WRITTEN, GRANT))
"""To the first reader alone, by an ask numbered 1."""
SHARED: Script = after(OFFERED, (asked(ask(readers=BOTH)), WRITTEN, GRANT))
"""Granted to two reader ranks; the second has not asked."""
BOTH_ASKED: Script = after(SHARED, (ASK_SECOND, replied(grant(reader=SECOND))))
UNWRITTEN: Script = [(99.0, prepare_offer(is_written=False)), (99.5, publish_offer())]
"""Its ticket left before its last KV was written."""
MARK = MarkWritten(NONCE)
OTHERS: dict[str, dict[str, Any]] = {
    "another claim": {"claim": RIVAL},
    "a stranger": {"reader": STRANGER},
    "another life of the reader": {"reader": OTHER_LIFE_OF_READER},
    "a rank that was not announced": {"reader": SECOND},
    "another life of this rank": {"incarnation": OTHER_LIFE},
    "another offer": {"nonce": NONCE2},
}
NOTHING_LOST = replied(renewed())
RECALL, RECLAIM = replied(recall()), ReclaimBlocks(2)
RECALLED: Script = after(GRANTED, (101.0, RECLAIM, RECALL))
TAKEN_BACK = ended(OfferEnd.REVOKED)


def reads_on(begin: float, seconds: float, ranks: Sequence[int] = (0,)) -> Script:
    """Heartbeats of readers that say that they read, until shortly before that time."""
    steps = []
    for number in range(3, 3 + int(seconds / (LEASE_S / 2))):
        now = min(begin + (number - 2) * LEASE_S / 2, begin + seconds - 0.1)
        for rank in ranks:
            by = {"reader": reader(rank), "number": number}
            heartbeat = asked(renew(number, CLAIM, reading=1, reader=reader(rank)))
            steps.append((now, heartbeat, replied(renewed(**by))))
    return steps


# --- a pair: an offer that decode may read while prefill computes it

PAIR_SLOT, PAIR_TOKEN = 9, fence_token(0x77)


def prepare_pair(computed: int | None, **changed: Any) -> PrepareOffer:
    values = {"is_early": True, "is_written": False, "computed": computed}
    slot = {"slot": PAIR_SLOT, "fence_token": PAIR_TOKEN}
    return prepare_offer(**{**values, **slot, **changed})


def mark_pair(num_tokens: int, attempt: int = 0) -> MarkWritten:
    return MarkWritten(NONCE, num_tokens, attempt)


def granted_pair(num_tokens: int | None) -> Action:
    return replied(grant(slot=PAIR_SLOT, fence_token=PAIR_TOKEN, num_tokens=num_tokens))


def pair_ended(end: OfferEnd) -> list[Action]:
    return [ClearSlot(PAIR_SLOT), EarlySlotFree(PAIR_SLOT, PAIR_TOKEN), OfferEnded(NONCE, P1, end)]


IN_PARTS: Script = [
    (92.0, prepare_pair(4)),
    (mark_pair(4),),
    (asked(ask(is_early=True)), granted_pair(4)),
    (prepare_pair(6),),
    (93.0, mark_pair(6), granted_pair(6)),
]
"""Two parts of a pair are written and granted; its last two tokens are not."""
