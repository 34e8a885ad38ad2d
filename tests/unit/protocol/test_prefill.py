"""The prefill machine: what it answers, which slots it writes and clears, and when offers end."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar
from unittest.mock import ANY

import pytest

from nixl_kv.early.asks import MAX_ASKS, MAX_ASKS_OF_READER, PAUSED_S, REPEATED_S, UNKNOWN_S
from nixl_kv.early.part import EarlyPart
from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Claim, FenceToken, Incarnation, Nonce, RequestId, short
from nixl_kv.protocol import prefill
from nixl_kv.protocol.events import (
    OVER,
    Action,
    AskDenied,
    ChunkPacked,
    ClearSlot,
    DigestMade,
    ExpectOffer,
    MakeDigest,
    MarkWritten,
    OfferEnd,
    OfferEnded,
    PackChunk,
    PairReleased,
    PairSlotFree,
    Paused,
    PrepareOffer,
    ReclaimBlocks,
    Record,
    Reply,
    RevokeAll,
    RevokeOffer,
    Stepped,
    Tick,
    Transition,
    WithdrawOffer,
    WriteSlot,
)
from nixl_kv.protocol.messages import Deny, DenyCause, DigestRequest, PackRequest
from nixl_kv.protocol.prefill import (
    CAUSES,
    ENDED,
    OTHER_PROMPT,
    READING_S,
    READING_WANTED_S,
    RECALL_S,
    TRANSITIONS,
    WITHDRAWN,
    Offer,
    PrefillMachine,
    State,
)
from nixl_kv.reading.staged.ring import RingPart
from nixl_kv.verify.part import DigestPart
from support.records import (
    CLAIM,
    CONTEXT,
    HOLD_S,
    LEASE_S,
    NONCE,
    NONCE2,
    OTHER_LIFE,
    P1,
    P2,
    RANK_LIFE,
    RIVAL,
    ROUTE,
    STRANGER,
    SUMS,
    TABLES,
    ask,
    asked,
    deny,
    digest_reply,
    digest_request,
    grant,
    hex32,
    no_record,
    pack_reply,
    pack_request,
    pending,
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

TTL_S = 10.0
FIRST_SLOT = 3
"""The slot that is granted first, of four."""
BOTH = (0, 1)
"""Two reader ranks under one claim."""
SECOND = reader(1)
OTHER_LIFE_OF_READER = reader(incarnation=OTHER_LIFE)
UNKNOWN = "no such offer: used, expired, or never made"
NOT_THIS_READER = "claimed by another, or ended for this reader"
NOT_GRANTED = "a digest of blocks that are not granted to it"


Part = TypeVar("Part")


def fence_token(number: int) -> FenceToken:
    return FenceToken(bytes([number]) * 16)


@pytest.fixture(autouse=True)
def counted_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1, 256))
    monkeypatch.setattr(prefill, "new_fence_token", lambda: fence_token(next(numbers)))


def part_of(machine: PrefillMachine, kind: type[Part]) -> Part:
    (part,) = [part for part in machine._parts if isinstance(part, kind)]
    return part


def new_machine(
    script: Script = (),
    record: Record = no_record,
    num_slots: int = 4,
    lease_s: float = LEASE_S,
    num_ring_slots: int = 4,
) -> PrefillMachine:
    machine = PrefillMachine(
        RANK_LIFE,
        record,
        num_slots=num_slots,
        offer_ttl_s=TTL_S,
        lease_s=lease_s,
        hold_s=HOLD_S,
        parts=(
            RingPart(num_ring_slots, list),
            DigestPart(),
            EarlyPart(STALL_S, lambda _slot: ANY),
        ),
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
    return (ASK, *denied(ENDED[end]))


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

GRANTS: dict[str, Script] = {
    "the slot is written before the grant is sent": after(OFFERED, (ASK, WRITTEN, GRANT), READ),
    # Whoever has the nonce has the ticket.
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
UNWRITTEN: Script = [(99.0, prepare_offer(is_written=False)), (99.5, publish_offer())]
"""Its ticket left before its last KV was written."""
MARK = MarkWritten(NONCE)
WRITES: dict[str, Script] = {
    "what is not written yet is granted when it is": after(
        UNWRITTEN, (ASK, WRITTEN), (MARK, GRANT), READ
    ),
    "who asks several times gets one grant, by the latest route": after(
        UNWRITTEN,
        (asked(ask(), b"first"), WRITTEN),
        (asked(ask(number=2), b"second"),),
        (MARK, replied(grant(), b"second")),
        (MARK,),
    ),
    "what nobody knows is not marked": [(MARK,)],
}
LIFE_IN_SHORT = "meant for incarnation abcdef01"
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
OTHERS: dict[str, dict[str, Any]] = {
    "another claim": {"claim": RIVAL},
    "a stranger": {"reader": STRANGER},
    "another life of the reader": {"reader": OTHER_LIFE_OF_READER},
    "a rank that was not announced": {"reader": SECOND},
    "another life of this rank": {"incarnation": OTHER_LIFE},
    "another offer": {"nonce": NONCE2},
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
    # A third is nobody's.
    "ranks of one engine may have incarnations of their own": after(
        OFFERED,
        (asked(ask(reader=READERS[0], readers=BOTH)), WRITTEN, replied(grant(reader=READERS[0]))),
        (asked(ask(reader=READERS[1], readers=BOTH)), replied(grant(reader=READERS[1]))),
        (asked(release(reader=IMPOSTOR)),),
        (asked(release(reader=READERS[0])),),
        (asked(release(reader=READERS[1])), *READ[1:]),
    ),
    **{
        f"one of {who} does not end what is read, {how}": after(
            GRANTED, (asked(release(complete=complete, **changed)),), READ
        )
        for who, changed in OTHERS.items()
        for how, complete in COMPLETE.items()
    },
    **{
        f"one of {who} does not end what is unclaimed, {how}": after(
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


def pack(request: PackRequest, slot: int = 0, route: bytes = ROUTE) -> PackChunk:
    return PackChunk(route, request, TABLES, slot)


def packed(request: PackRequest, slot: int = 0, refusal: str | None = None) -> ChunkPacked:
    return ChunkPacked(ROUTE, request, slot, refusal)


NO_CHUNK = "a chunk of blocks that are not granted to it"
CHUNK_0, CHUNK_1 = pack_request(0), pack_request(1, holds=(0, 1))
CHUNK_2, LATER_2 = pack_request(2, holds=(0, 1, 2)), pack_request(2, number=3)
CHUNK_3 = pack_request(3, holds=(0, 1, 2, 3))
CHUNK_OF_SECOND = pack_request(0, reader=SECOND)
TO_PACK = (asked(CHUNK_0), pack(CHUNK_0))
PACKED: Script = after(GRANTED, TO_PACK, (packed(CHUNK_0), replied(pack_reply())))
CHUNK_4 = pack_request(4, holds=(0, 1, 2, 3, 4))
NEXT_OF_SECOND = pack_request(1, reader=SECOND, holds=(0, 1))
ALONE: Script = after(
    PACKED,
    (asked(CHUNK_1), pack(CHUNK_1, 1)),
    (asked(CHUNK_2), pack(CHUNK_2, 2)),
    (asked(CHUNK_3),),
)
CHUNKS: dict[str, Script] = {
    "what is granted is packed, and the slot is told when it is": PACKED,
    "a request that comes again is answered again": after(
        PACKED, (asked(CHUNK_0, b"again"), replied(pack_reply(), b"again"))
    ),
    "a reader that is alone leaves a quarter of the ring": ALONE,
    "a chunk that has been read leaves its slot to one that waits": after(
        ALONE, (asked(pack_request(0, number=5, holds=(1, 2, 3))), pack(CHUNK_3, 0))
    ),
    "a chunk that its reader gives up waits no longer": after(
        ALONE,
        (asked(pack_request(2, number=5, holds=(0, 1, 2))),),
        (asked(pack_request(0, number=6, holds=(1, 2))),),
    ),
    "an answer of a former life is forgotten": after(GRANTED, (packed(CHUNK_0, 3),)),
    "chunks of several readers wait in order": after(
        BOTH_ASKED,
        TO_PACK,
        (asked(CHUNK_1), pack(CHUNK_1, 1)),
        (asked(CHUNK_2), pack(CHUNK_2, 2)),
        (asked(CHUNK_3),),
        (asked(CHUNK_OF_SECOND), pack(CHUNK_OF_SECOND, 3)),
        (asked(NEXT_OF_SECOND),),
        (packed(CHUNK_0), replied(pack_reply())),
        (packed(CHUNK_1, 1), replied(pack_reply(1, slot=1))),
        (asked(pack_request(0, number=5, holds=(2, 3))), pack(CHUNK_3, 0), pack(NEXT_OF_SECOND, 1)),
    ),
    "a reader that asks for more than a ring has is refused": after(
        ALONE, (asked(CHUNK_4), replied(pack_reply(4, slot=None)))
    ),
    "what a reader does not name any more is free": after(
        PACKED,
        (asked(CHUNK_1), pack(CHUNK_1, 1)),
        (asked(LATER_2), pack(LATER_2, 0)),
        (
            asked(pack_request(3, number=4, holds=(2, 3))),
            pack(pack_request(3, number=4, holds=(2, 3)), 2),
        ),
        (packed(CHUNK_1, 1),),
    ),
    # What it says of slots is no longer true.
    "a request that was overtaken means nothing": after(
        GRANTED,
        (asked(LATER_2), pack(LATER_2)),
        (asked(CHUNK_0),),
        (packed(LATER_2), replied(pack_reply(2))),
    ),
    "who is not granted it gets no chunk": after(
        GRANTED,
        (asked(CHUNK_OF_SECOND), *denied(NO_CHUNK, reader=SECOND)),
        (asked(pack_request(claim=RIVAL)), *denied(NO_CHUNK, claim=RIVAL)),
        (
            asked(pack_request(reader=OTHER_LIFE_OF_READER)),
            *denied(NO_CHUNK, reader=OTHER_LIFE_OF_READER),
        ),
        (asked(pack_request(nonce=NONCE2)), *denied(NO_CHUNK, nonce=NONCE2)),
    ),
    # The blocks have what belonged to another prompt.
    "nothing is packed before it is written": after(
        [(99.0, prepare_offer(is_written=False))],
        (ASK, WRITTEN),
        (asked(CHUNK_0), *denied(NO_CHUNK)),
    ),
    "tokens behind the prompt are not packed": after(
        GRANTED, (asked(pack_request(end=9)), *denied("a chunk up to token 9 of 8"))
    ),
    "what cannot be packed leaves its slot, and why stays here": after(
        GRANTED,
        TO_PACK,
        (packed(CHUNK_0, 0, "no kernel"), replied(pack_reply(slot=None))),
        (asked(CHUNK_1), pack(CHUNK_1, 0)),
        (asked(CHUNK_2), pack(CHUNK_2, 1)),
    ),
    "a slot that is still written is nobody's, and then free": after(
        GRANTED,
        TO_PACK,
        READ,
        (OFFER_2,),
        granted_too(FIRST_SLOT),
        (asked(pack_request(nonce=NONCE2)), pack(pack_request(nonce=NONCE2), 1)),
        (packed(CHUNK_0),),
        (packed(pack_request(nonce=NONCE2), 1), replied(pack_reply(nonce=NONCE2, slot=1))),
    ),
}

OTHER_CHUNK = pack_request(nonce=NONCE2, claim=RIVAL)
ONE_SLOT: Script = after(
    PACKED,
    (OFFER_2,),
    granted_too(claim=RIVAL),
    (asked(OTHER_CHUNK),),
    (*READ, pack(OTHER_CHUNK)),
)


def test_the_only_slot_of_a_ring_goes_to_the_next_reader_with_the_end_of_its_offer() -> None:
    new_machine(ONE_SLOT, num_ring_slots=1).check()


def test_a_rank_without_a_ring_packs_nothing() -> None:
    in_vain = (asked(CHUNK_0), replied(pack_reply(slot=None)))
    play(new_machine(GRANTED, num_ring_slots=0), [in_vain])


def test_after_a_restart_only_slots_that_are_written_are_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = new_machine(after(PACKED, (asked(CHUNK_1), pack(CHUNK_1, 1))))
    monkeypatch.setattr(part_of(machine, RingPart), "_writing", lambda: [1])
    machine.clear()
    play(machine, GRANTED_ANEW)
    play(machine, [(asked(CHUNK_0), pack(CHUNK_0, 0)), (asked(CHUNK_1), pack(CHUNK_1, 2))])
    machine.check()
    play(machine, [(packed(CHUNK_1, 1),)])
    machine.check()


GRANTED_ANEW: Script = after(
    OFFERED,
    (ASK, WriteSlot(FIRST_SLOT, fence_token(2)), replied(grant(fence_token=fence_token(2)))),
)


def made(request: DigestRequest, route: bytes = ROUTE, refusal: str | None = None) -> DigestMade:
    if refusal is not None:
        return DigestMade(route, request, refusal=refusal)
    return DigestMade(route, request, rows=SUMS * 4, columns=SUMS)


REQUEST, REQUEST_SECOND = digest_request(), digest_request(reader=SECOND)
TO_DIGEST = (asked(REQUEST), MakeDigest(ROUTE, REQUEST, TABLES))
NO_LAYER = "layer 'layer.9' is not on this rank"
DIGESTS: dict[str, Script] = {
    "what is granted is digested": after(
        GRANTED, TO_DIGEST, (made(REQUEST), replied(digest_reply()))
    ),
    "all tokens of the prompt may be digested": after(
        GRANTED, (asked(digest_request(end=8)), MakeDigest(ROUTE, digest_request(end=8), TABLES))
    ),
    # There the last block may hold what belongs to another prompt.
    "tokens behind the prompt are not digested": after(
        GRANTED, (asked(digest_request(end=9)), *denied("a digest up to token 9 of 8"))
    ),
    # Whether that is under way already is for the data plane to know.
    "a repeated request is digested again": after(GRANTED, TO_DIGEST, TO_DIGEST),
    **{
        f"{who} gets none": after(
            GRANTED,
            (asked(digest_request(**changed)), *denied(NOT_GRANTED, **shown)),
            (made(digest_request(**changed)), replied(deny(**shown))),
        )
        for who, changed in OTHERS.items()
        if "nonce" not in changed
        for shown in [{} if "incarnation" in changed else changed]
    },
    # Or else it could ask as any number of lives, each of them for a digest of its own.
    "a reader that has not asked yet gets no answer": after(
        SHARED,
        (asked(REQUEST_SECOND),),
        (ASK_SECOND, replied(grant(reader=SECOND))),
        (asked(REQUEST_SECOND), MakeDigest(ROUTE, REQUEST_SECOND, TABLES)),
    ),
    # It asked for its blocks before: that was denied, and people were told.
    "of an offer that is not there nobody gets one": after(
        GRANTED, (asked(digest_request(nonce=NONCE2)), replied(deny(nonce=NONCE2)))
    ),
    "what is not written yet is digested when it is": after(
        UNWRITTEN, (ASK, WRITTEN), (asked(REQUEST),), (MARK, GRANT, TO_DIGEST[1])
    ),
    "who asks for one before anybody has asked for blocks gets no answer": after(
        OFFERED, (asked(REQUEST),), (ASK, WRITTEN, GRANT), TO_DIGEST
    ),
    # The blocks may have been written meanwhile: the digest may be of anything.
    **{
        f"it is not sent after {name}": after(
            GRANTED, TO_DIGEST, step, (made(REQUEST), replied(deny()))
        )
        for name, step in {
            "a complete release": READ,
            "an incomplete release": (RELEASE_INCOMPLETE, *ABORTED),
            "a heartbeat without the claim": (asked(renew(2)), *ABORTED, replied(renewed())),
            "the lease": (100.0 + LEASE_S, Tick(), *EXPIRED),
        }.items()
    },
    "why something cannot be digested stays on this side": after(
        GRANTED, TO_DIGEST, (made(REQUEST, refusal=NO_LAYER), *denied(NO_LAYER)), READ
    ),
}
NOTHING_LOST = replied(renewed())
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
    "the answer names what is lost": after(
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
RECALL, RECLAIM = replied(recall()), ReclaimBlocks(2)
RECALLED: Script = after(GRANTED, (101.0, RECLAIM, RECALL))
HEARTBEAT_READING = asked(renew(2, CLAIM, reading=1))
READING: Script = after(GRANTED, (101.0, HEARTBEAT_READING, NOTHING_LOST))
TAKEN_BACK = ended(OfferEnd.REVOKED)
HELD = 100.0 + HOLD_S
IS_HELD = (HELD - 0.5, asked(renew(2, CLAIM)), NOTHING_LOST)
"""The reader lives, and does not read."""
WANTED_BACK = "its blocks were recalled"


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


RECALLS: dict[str, Script] = {
    "what nobody reads is recalled after a time, and then taken back": after(
        GRANTED,
        IS_HELD,
        (HELD, Tick(), RECALL),
        (HELD + RECALL_S - 0.01, Tick()),
        (HELD + RECALL_S, Tick(), *TAKEN_BACK),
        (HELD + 100, Tick()),
    ),
    "what is read is not recalled": after(READING, IS_HELD, (HELD, Tick()), (RECLAIM,), READ),
    "a read that has begun ends a recall": after(
        RECALLED, (HEARTBEAT_READING, NOTHING_LOST), (101.0 + RECALL_S, Tick()), READ
    ),
    "a reader releases what it does not read": after(RECALLED, (RELEASE_INCOMPLETE, *TAKEN_BACK)),
    "it may have given it up meanwhile": after(
        RECALLED, (asked(renew(2)), *ABORTED, replied(renewed()))
    ),
    "a recall is not repeated": after(RECALLED, (RECLAIM,), (101.5, Tick())),
    "who asks again is denied": after(RECALLED, (ASK, *denied(WANTED_BACK))),
    "a reader without a grant gets no digest either": after(
        UNWRITTEN,
        (ASK, WRITTEN),
        (asked(digest_request(end=8)),),
        (RECLAIM, RECALL),
        (asked(digest_request(end=8)),),
        (MARK,),
        (asked(digest_request(end=8)),),
        (ASK, *denied(WANTED_BACK)),
        (RELEASE_INCOMPLETE, *TAKEN_BACK),
    ),
    "each reader is told, on its latest route": after(
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
        (ASK, *denied(ENDED[OfferEnd.OVERDUE])),
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
    "a reset takes back all that is out, also what is read": after(
        READING,
        (OFFER_2,),
        (publish_offer(NONCE2, P2),),
        (OFFER_3,),  # its ticket is not out: the scheduler withdraws it
        (RevokeAll(), RECALL, *TAKEN_BACK, OfferEnded(NONCE2, P2, OfferEnd.REVOKED)),
        (asked(renew(3, CLAIM, reading=1)), replied(renewed(CLAIM, number=3))),
        (RevokeAll(),),
        (ASK, *denied(ENDED[OfferEnd.REVOKED])),
    ),
    "and what is granted, or recalled": after(GRANTED, (RevokeAll(), RECALL, *TAKEN_BACK)),
    "and what was recalled before": after(RECALLED, (RevokeAll(), RECALL, *TAKEN_BACK)),
    "a reader that dies while it reads": after(READING, (101.0 + LEASE_S, Tick(), *EXPIRED)),
    "a reader that gives up while it reads": after(
        READING, (asked(renew(3)), *ABORTED, replied(renewed(number=3)))
    ),
    "what is unclaimed ends first": after(
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
    "withdrawing what was never prepared does nothing": [(WithdrawOffer(NONCE),)],
}
EARLY = asked(ask(is_early=True))
OTHER_CLAIM = {"claim": RIVAL, "reader": STRANGER}
EARLY_RIVAL = asked(ask(is_early=True, **OTHER_CLAIM))
EXPECT = ExpectOffer(NONCE, P1, CONTEXT)
QUEUED, COMPUTING = replied(pending("queued")), replied(pending("computing"))
STALLED = replied(pending("stalled"))
ASKED_EARLY: Script = [(90.0, EARLY, replied(pending("unknown")))]
AWAITED: Script = after(ASKED_EARLY, (91.0, EXPECT))
COMPUTED: Script = after(AWAITED, (92.0, prepare_offer(is_pair=True), COMPUTING))
STALL_S = 10.0
PAIR_SLOT, PAIR_TOKEN = 9, fence_token(0x77)


def prepare_pair(computed: int | None, **changed: Any) -> PrepareOffer:
    values = {"is_pair": True, "is_written": False, "computed": computed}
    slot = {"slot": PAIR_SLOT, "fence_token": PAIR_TOKEN}
    return prepare_offer(**{**values, **slot, **changed})


def mark_pair(num_tokens: int, attempt: int = 0) -> MarkWritten:
    return MarkWritten(NONCE, num_tokens, attempt)


def granted_pair(num_tokens: int | None) -> Action:
    return replied(grant(slot=PAIR_SLOT, fence_token=PAIR_TOKEN, num_tokens=num_tokens))


def pair_ended(end: OfferEnd) -> list[Action]:
    return [ClearSlot(PAIR_SLOT), PairSlotFree(PAIR_SLOT, PAIR_TOKEN), OfferEnded(NONCE, P1, end)]


PAIR_READ = pair_ended(OfferEnd.READ)
PARTS: Script = after(
    AWAITED,
    (92.0, prepare_pair(4), COMPUTING),
    (mark_pair(4), granted_pair(4)),
    (prepare_pair(6),),
    (93.0, mark_pair(6), granted_pair(6)),
)
NO_REQUEST = "its request did not arrive"
GIVEN_UP = PairReleased(NONCE, P1)
PINNED = 95.0
PINNED_PARTS: Script = after(
    PARTS, (prepare_pair(None),), (mark_pair(8), granted_pair(None)), (PINNED, publish_offer())
)
PAIRS: dict[str, Script] = {
    "a pair that no reader begins to read is held from its pin on, and not for ever": after(
        PINNED_PARTS,
        (PINNED + HOLD_S - 0.5, asked(renew(2, CLAIM)), NOTHING_LOST),
        (PINNED + HOLD_S, Tick(), RECALL),
        (PINNED + HOLD_S + RECALL_S, Tick(), *pair_ended(OfferEnd.REVOKED)),
    ),
    "before its pin it is held as long as prefill computes": after(
        PARTS,
        (93.0 + 10 * HOLD_S, asked(renew(2, CLAIM)), NOTHING_LOST),
        (93.0 + 10 * HOLD_S, Tick()),
        (prepare_pair(None),),
        (mark_pair(8), granted_pair(None)),
    ),
    "an early ask is granted when the offer is pinned": after(
        COMPUTED, (93.0, publish_offer(), WRITTEN, GRANT), READ
    ),
    "an ask between arrival and pin waits as well": after(
        [(90.0, EXPECT)],
        (EARLY, QUEUED),
        (prepare_offer(is_pair=True), COMPUTING),
        (asked(ask()), COMPUTING),
        (publish_offer(), WRITTEN, GRANT),
    ),
    "it is granted only when it is written as well": after(
        AWAITED,
        (92.0, prepare_offer(is_pair=True, is_written=False), COMPUTING),
        (publish_offer(),),
        (MARK, WRITTEN, GRANT),
    ),
    "written before it is pinned": after(
        AWAITED,
        (92.0, prepare_offer(is_pair=True, is_written=False), COMPUTING),
        (MARK,),
        (publish_offer(), WRITTEN, GRANT),
    ),
    "a preempted request is computed again, under the same nonce": after(
        COMPUTED,
        (92.5, WithdrawOffer(NONCE, is_final=False), QUEUED),
        (93.0, prepare_offer(is_pair=True), COMPUTING),
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
            prepare_offer(is_pair=True),
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
    "nobody asked: the offer waits for its time": after(
        [(99.0, EXPECT)],
        (prepare_offer(is_pair=True),),
        (100.0, publish_offer()),
        (100.0 + TTL_S, Tick(), UNCLAIMED),
        (asked(ask(is_early=True)), *denied(ENDED[OfferEnd.UNCLAIMED])),
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
        (prepare_offer(is_pair=True),),
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
        (prepare_offer(is_pair=True),),
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
        (92.0, prepare_offer(is_pair=True), COMPUTING),
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
    "a pause that nobody repeats is over": after(
        AWAITED,
        (Stepped(),),
        (92.0, Paused(1, is_paused=True)),
        (92.1 + PAUSED_S + STALL_S, EARLY, STALLED),
    ),
    "an engine of which nobody knows a request may be idle": after(
        [(10.0, Stepped())], (90.0, EARLY, replied(pending("unknown")))
    ),
    "decode reads another rank's copy": after(
        [(90.0, EXPECT)],
        (RELEASE,),
        (prepare_offer(is_pair=True),),
        (publish_offer(), NOT_NEEDED),
    ),
    "without the flag an unknown nonce is denied": [DENIED_UNKNOWN],
    "what is written is granted, and more of it when more is": PARTS,
    "nothing is granted before the first part is written": after(
        AWAITED,
        (92.0, prepare_pair(4), COMPUTING),
        (92.5, EARLY, COMPUTING),
        (93.0, mark_pair(4), granted_pair(4)),
    ),
    "all of it is granted when all is written, and pinned later": after(
        PARTS,
        (94.0, prepare_pair(None)),
        (MARK, granted_pair(None)),
        (publish_offer(),),
        (93.0 + LEASE_S, asked(renew(2, CLAIM, reading=1)), NOTHING_LOST),
        (RELEASE, *PAIR_READ),
    ),
    "the pin may overtake the end of its last step": after(
        PARTS,
        (94.0, prepare_pair(None)),
        (publish_offer(),),
        (MARK, granted_pair(None)),
        (RELEASE, *PAIR_READ),
    ),
    "one of its readers may ask between the pin and that end": after(
        PARTS,
        (94.0, prepare_pair(None)),
        (publish_offer(),),
        (asked(ask(is_early=True, number=2)),),
        (MARK, granted_pair(None)),
    ),
    "what is recalled is not granted": after(
        PARTS, (94.0, prepare_pair(None)), (publish_offer(),), (ReclaimBlocks(9), RECALL), (MARK,)
    ),
    "blocks of a pair that is computed do not count as recalled": after(
        PARTS,
        (94.0, prepare_offer(nonce=NONCE2, request=P2)),
        (publish_offer(NONCE2, P2),),
        (asked(ask(nonce=NONCE2, claim=RIVAL)), WRITTEN, replied(grant(nonce=NONCE2, claim=RIVAL))),
        (ReclaimBlocks(1), replied(recall(nonce=NONCE2, claim=RIVAL))),
    ),
    "an ask gets what is written by then": after(
        [(91.0, EXPECT)],
        (prepare_pair(4),),
        (mark_pair(4),),
        (asked(ask(is_early=True)), granted_pair(4)),
        (asked(ask(is_early=True, number=2)), granted_pair(4)),
    ),
    "a preemption between two parts": after(
        PARTS,
        (94.0, WithdrawOffer(NONCE, is_final=False), PairSlotFree(PAIR_SLOT, PAIR_TOKEN), QUEUED),
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
            *(94.0, WithdrawOffer(NONCE), PairSlotFree(PAIR_SLOT, PAIR_TOKEN)),
            *(GIVEN_UP, *denied(WITHDRAWN)),
        ),
        (EARLY, *denied(WITHDRAWN)),
    ),
    "a preemption while a part is read": after(
        PARTS,
        (94.0, asked(renew(2, CLAIM, reading=1)), NOTHING_LOST),
        (WithdrawOffer(NONCE, is_final=False), PairSlotFree(PAIR_SLOT, PAIR_TOKEN), QUEUED),
    ),
    "a reader that gives up between two parts": after(
        PARTS, (RELEASE_INCOMPLETE, *pair_ended(OfferEnd.ABORTED), GIVEN_UP)
    ),
    "a reader that dies between two parts": after(
        PARTS, (93.0 + LEASE_S, Tick(), *pair_ended(OfferEnd.EXPIRED), GIVEN_UP)
    ),
    "a reader that is done before the pin": after(
        PARTS, (94.0, prepare_pair(None)), (MARK, granted_pair(None)), (RELEASE, *PAIR_READ)
    ),
    "its time to read begins with the pin": after(
        PARTS,
        (94.0, asked(renew(2, CLAIM, reading=1)), NOTHING_LOST),
        *reads_on(94.0, READING_S + 99),
        (1100.0, prepare_pair(None)),
        (publish_offer(),),
        *reads_on(1100.0, READING_S),
        (1100.0 + READING_S, Tick(), *pair_ended(OfferEnd.OVERDUE)),
    ),
    "what is computed is not recalled": after(PARTS, (ReclaimBlocks(9),), (93.9, Tick())),
    "a digest waits for all of its tokens": after(
        PARTS,
        (asked(digest_request(end=8)),),
        (94.0, prepare_pair(None)),
        (MARK, granted_pair(None), MakeDigest(ROUTE, digest_request(end=8), TABLES)),
    ),
    "a chunk of what is not written is denied": after(
        PARTS,
        (
            asked(pack_request(end=7)),
            AskDenied(NONCE, "a chunk up to token 7 of 6"),
            replied(deny()),
        ),
    ),
    "a chunk of a part is packed although the rest is pinned and not yet written": after(
        PARTS,
        (prepare_pair(None),),
        (publish_offer(),),
        (asked(pack_request(end=6)), pack(pack_request(end=6))),
    ),
    "without a slot it waits for the pin": after(
        AWAITED,
        (92.0, prepare_offer(is_pair=True, is_written=False, computed=4), COMPUTING),
        (mark_pair(4),),
        (prepare_offer(is_pair=True, is_written=False),),
        (MARK,),
        (publish_offer(), WRITTEN, GRANT),
    ),
    "decode gives up before the pin, with a slot": after(
        [(91.0, EXPECT)],
        (prepare_pair(4),),
        (RELEASE_INCOMPLETE, GIVEN_UP),
        (prepare_pair(None),),
        (publish_offer(), ClearSlot(PAIR_SLOT), PairSlotFree(PAIR_SLOT, PAIR_TOKEN), NOT_NEEDED),
    ),
    "a release that is earlier than the request": [
        (90.0, RELEASE),
        (91.0, EXPECT),
        (92.0, prepare_pair(None)),
        (publish_offer(), ClearSlot(PAIR_SLOT), PairSlotFree(PAIR_SLOT, PAIR_TOKEN), NOT_NEEDED),
    ],
    "an early ask for another life": [
        (
            90.0,
            asked(ask(is_early=True, incarnation="abcdef01" + "2" * 24)),
            *denied(LIFE_IN_SHORT),
        )
    ],
}
ALL: dict[str, Script] = {
    f"{subject}: {name}": script
    for subject, scripts in {
        "grants": GRANTS,
        "writes": WRITES,
        "denials": DENIALS,
        "releases": RELEASES,
        "time": TIMES,
        "digests": DIGESTS,
        "chunks": CHUNKS,
        "heartbeats": HEARTBEATS,
        "recalls": RECALLS,
        "commands": COMMANDS,
        "pairs": PAIRS,
    }.items()
    for name, script in scripts.items()
}


@each_of(ALL)
def test_an_offer(script: Script) -> None:
    new_machine(script).check()


def test_the_scripts_above_make_each_transition_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[Transition] = []
    for script in ALL.values():
        numbers = iter(range(1, 256))
        monkeypatch.setattr(
            prefill, "new_fence_token", lambda numbers=numbers: fence_token(next(numbers))
        )
        new_machine(script, recorded.append)
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
        pytest.param(ASKED_EARLY, (90.0 + UNKNOWN_S, Tick()), "not_arrived", id="never heard of"),
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
        for action in new_machine(script).handle(event, now)
        if isinstance(action, Reply) and isinstance(action.message, Deny)
    ]
    assert [denial.cause for denial in denials] == [cause]


def test_early_asks_are_bounded_in_total_and_for_each_reader() -> None:
    machine = new_machine()

    def is_remembered(number: int, engine: str) -> bool:
        by = {"reader": reader(engine=engine), "nonce": Nonce(hex32(number))}
        actions = machine.handle(asked(ask(is_early=True, **by)), 90.0)
        return replied(pending("unknown", **by)) in actions

    for begin, engine in ((0, "a"), (MAX_ASKS_OF_READER, "b")):
        numbers = range(begin, begin + MAX_ASKS_OF_READER)
        assert all(is_remembered(number, engine) for number in numbers)
        assert is_remembered(begin, engine)  # a repetition needs no room
        assert not is_remembered(10 * MAX_ASKS, engine)
    assert part_of(machine, EarlyPart).asks.num_asks == MAX_ASKS == 2 * MAX_ASKS_OF_READER
    assert not is_remembered(20 * MAX_ASKS, "c")
    machine.handle(asked(release(nonce=Nonce(hex32(0)), reader=reader(engine="a"))), 90.0)
    assert is_remembered(20 * MAX_ASKS, "c")
    machine.handle(Tick(), 90.0 + REPEATED_S)
    assert (part_of(machine, EarlyPart).asks.num_asks, machine.next_due) == (0, 90.0 + UNKNOWN_S)
    machine.handle(Tick(), 90.0 + UNKNOWN_S)  # the released pair is forgotten last
    assert machine.next_due is None
    machine.check()


@pytest.mark.parametrize("seconds", [0.5, 3600.0])
def test_the_grant_says_how_long_the_lease_is(seconds: float) -> None:
    machine = new_machine(PREPARED, lease_s=seconds)
    play(machine, [(ASK, WRITTEN, replied(grant(lease_s=seconds)))])


def test_without_a_free_slot_an_ask_is_denied_until_one_is_cleared() -> None:
    second = asked(ask(nonce=NONCE2, claim=RIVAL))
    full = denied("all fence slots are granted", nonce=NONCE2, claim=RIVAL)
    machine = new_machine(num_slots=1)
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


def test_a_pair_that_is_not_pinned_yet_waits_for_a_slot() -> None:
    second = prepare_offer(nonce=NONCE2, request=P2, is_pair=True, is_written=False)
    expect = ExpectOffer(NONCE2, P2, CONTEXT)
    waits = replied(pending("computing", nonce=NONCE2, claim=RIVAL))
    machine = new_machine(num_slots=1)
    granted = ASK, WriteSlot(0, fence_token(1)), replied(grant(slot=0))
    steps = granted, (expect,), (second,)
    play(
        machine, [*PREPARED, *steps, (asked(ask(nonce=NONCE2, claim=RIVAL, is_early=True)), waits)]
    )


def test_whose_digest_is_wanted() -> None:
    machine = new_machine(SHARED)

    def is_wanted(request: DigestRequest) -> bool:
        return part_of(machine, DigestPart).is_wanted(MakeDigest(ROUTE, request, TABLES))

    assert is_wanted(REQUEST)
    assert not is_wanted(REQUEST_SECOND)
    play(machine, BOTH_ASKED[-1:])
    assert is_wanted(REQUEST_SECOND)
    assert not is_wanted(digest_request(reader=reader(1, incarnation=OTHER_LIFE)))
    play(machine, [(RELEASE,)])
    assert not is_wanted(REQUEST)


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
    machine = new_machine(before)
    with pytest.raises(LocalProtocolError, match=error):
        machine.handle(event, 101.0)
    assert machine.handle(asked(ask(number=2)), 101.0)[-1] == GRANT
    play(machine, [READ])


def test_a_cleared_machine_has_no_offer_and_all_slots() -> None:
    machine = new_machine(SHARED)
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
    (offer,) = new_machine(script).offers.values()
    assert (offer.waits_for, offer.due_at(max)) == (waits_for, expires_at)


def test_each_transition_and_denial_of_an_offer_is_recorded_once() -> None:
    recorded: list[Transition] = []
    machine = new_machine(record=recorded.append)
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
    machine = new_machine()
    seen = []
    for event in (prepare_offer(), publish_offer(), ASK, RELEASE):
        machine.handle(event, 100.0)
        seen.append((machine.next_due is not None, machine.any_granted))
    assert seen == [(False, False), (True, False), (True, True), (False, False)]


# Which offers give their blocks back


RECLAIMS = {
    "nothing": ("", 3, ""),
    "the oldest that nobody claimed": ("-2 -2 -2", 3, "0 1"),
    "the unclaimed first": ("a9 -2", 2, "1"),
    "what is granted after what is not": ("-1 a2", 3, "0 1"),
    "the unclaimed first, then the oldest": ("a3 -2 a3", 3, "1 0"),
    "the oldest of any engine": ("b3 a2 a2", 4, "0 1"),
    "what is read stays": ("a9r", 5, ""),
    "what is recalled already counts": ("a3 b2c", 2, ""),
    "what is recalled is not enough": ("a3 b2c", 3, "0"),
    "all, and still too few": ("a1 -1", 9, "1 0"),
}
"""Offers, the oldest first: the engine that was granted it (or -), its blocks, and whether it is
read (r) or recalled (c); how many blocks are needed; who gives them, in order."""


@pytest.mark.parametrize(("offers", "needed", "chosen"), RECLAIMS.values(), ids=RECLAIMS)
def test_offers_that_give_their_blocks_back(offers: str, needed: int, chosen: str) -> None:
    machine = new_machine(num_slots=8)
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
