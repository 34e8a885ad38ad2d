"""The staging ring in the protocol: which chunks prefill packs, and which decode asks for."""

import pytest

from nixl_kv.ids import Rank
from nixl_kv.protocol.events import (
    AskDenied,
    Chunk,
    ChunkPacked,
    ChunksWanted,
    FailureKind,
    LinkBroken,
    PackChunk,
    ReadFailed,
    Send,
    TellRead,
    Tick,
    WriteSlot,
)
from nixl_kv.protocol.load import ASK_AGAIN_S
from nixl_kv.protocol.messages import PackRequest
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.reading.staged.ring import ChunkPart, PackedChunk, RingPart
from support.offers import (
    ASK,
    BOTH_ASKED,
    FIRST_SLOT,
    GRANTED,
    IN_PARTS,
    OFFER_2,
    OFFERED,
    OTHER_LIFE_OF_READER,
    READ,
    SECOND,
    WRITTEN,
    denied,
    fence_token,
    granted_too,
    prefill_machine,
    prepare_pair,
)
from support.records import (
    CLAIM,
    D1,
    HINT_KEY,
    LAYERS,
    NONCE,
    NONCE2,
    RANK_0,
    READER,
    RIVAL,
    ROUTE,
    TABLES,
    TIMEOUT_S,
    answered,
    asked,
    cancel_load,
    deny,
    grant,
    lost,
    pack_reply,
    pack_request,
    prepare_offer,
    publish_offer,
    read_done,
    renew,
    replied,
)
from support.scripts import (
    DENIED,
    GIVEN_UP,
    GOOD,
    READING,
    RELEASED,
    STOP,
    UNREACHABLE,
    Script,
    after,
    each_of,
    failed,
    loading,
    play,
    told,
)

pytestmark = pytest.mark.usefixtures("counted_fence_tokens")


# --- prefill


def ring_machine(script: Script, num_slots: int = 4) -> PrefillMachine:
    return prefill_machine(script, parts=(RingPart(num_slots, list),))


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
PACKS: dict[str, Script] = {
    "a granted chunk is packed, and the slot then has its token": PACKED,
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
    "a slot that a reader no longer names is free": after(
        PACKED,
        (asked(CHUNK_1), pack(CHUNK_1, 1)),
        (asked(LATER_2), pack(LATER_2, 0)),
        (
            asked(pack_request(3, number=4, holds=(2, 3))),
            pack(pack_request(3, number=4, holds=(2, 3)), 2),
        ),
        (packed(CHUNK_1, 1),),
    ),
    # Its slots are outdated.
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
    "a slot that is still written serves no reader, and then is free": after(
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
PACKS_OF_PAIRS: dict[str, Script] = {
    "a chunk of unwritten blocks is denied": after(
        IN_PARTS,
        (
            asked(pack_request(end=7)),
            AskDenied(NONCE, "a chunk up to token 7 of 6"),
            replied(deny()),
        ),
    ),
    "a chunk of a part is packed although the rest is pinned and not yet written": after(
        IN_PARTS,
        (prepare_pair(None),),
        (publish_offer(),),
        (asked(pack_request(end=6)), pack(pack_request(end=6))),
    ),
}


@each_of(PACKS | PACKS_OF_PAIRS)
def test_an_offer_in_chunks(script: Script) -> None:
    ring_machine(script).check()


OTHER_CHUNK = pack_request(nonce=NONCE2, claim=RIVAL)
ONE_SLOT: Script = after(
    PACKED,
    (OFFER_2,),
    granted_too(claim=RIVAL),
    (asked(OTHER_CHUNK),),
    (*READ, pack(OTHER_CHUNK)),
)


def test_the_only_slot_of_a_ring_goes_to_the_next_reader_with_the_end_of_its_offer() -> None:
    ring_machine(ONE_SLOT, num_slots=1).check()


def test_a_rank_without_a_ring_packs_nothing() -> None:
    in_vain = (asked(CHUNK_0), replied(pack_reply(slot=None)))
    play(ring_machine(GRANTED, num_slots=0), [in_vain])


def test_after_a_restart_only_slots_that_are_written_are_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = ring_machine(after(PACKED, (asked(CHUNK_1), pack(CHUNK_1, 1))))
    (part,) = machine._parts
    monkeypatch.setattr(part, "_writing", lambda: [1])
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


# --- decode: chunks that a load asks for, again, and no longer

BOTH_CHUNKS, LAST = (0, 1), (1, 2)


def chunk(number: int) -> Chunk:
    return Chunk(number, 0, 4 + number, LAYERS)


def wanted(*numbers: int, holds: tuple[int, ...] = BOTH_CHUNKS) -> ChunksWanted:
    return ChunksWanted(D1, Rank(0), tuple(map(chunk, numbers)), holds)


def asks(*numbers: int, number: int = 2, holds: tuple[int, ...] = BOTH_CHUNKS) -> list[Send]:
    return [
        Send(RANK_0, pack_request(each, number=number, end=4 + each, holds=holds))
        for each in numbers
    ]


def to_read(number: int, slot: int | None = 0) -> TellRead:
    return TellRead(D1, Rank(0), PackedChunk(number, slot))


STOPPED = ReadFailed(D1, Rank(0), "decode no longer wants it")
CHUNKS_ASKED: Script = after(READING, (wanted(0, 1), *asks(0, 1)))
BOTH_PACKED: Script = after(
    CHUNKS_ASKED,
    (answered(pack_reply(0, slot=5)), to_read(0, 5)),
    (answered(pack_reply(1)), to_read(1)),
)

CHUNKS: dict[str, Script] = {
    "a packed chunk is read, and the slot proves it as ever": after(
        BOTH_PACKED,
        (wanted(2, holds=LAST), *asks(2, number=3, holds=LAST)),
        (answered(pack_reply(2)), to_read(2)),
        (read_done(), RELEASED, GOOD),
    ),
    "what prefill does not pack is known at once": after(
        CHUNKS_ASKED, (answered(pack_reply(0, slot=None)), to_read(0, None))
    ),
    "an answer that comes again changes nothing": after(
        BOTH_PACKED, (answered(pack_reply(0, slot=5)),), (answered(pack_reply(0, slot=None)),)
    ),
    "decode asks again for a chunk without an answer": after(
        CHUNKS_ASKED,
        (answered(pack_reply(0)), to_read(0)),
        (110.0 + ASK_AGAIN_S - 0.01, Tick()),
        (110.0 + ASK_AGAIN_S, Tick(), *asks(1, number=3)),
        (110.0 + 2 * ASK_AGAIN_S, Tick(), *asks(1, number=4)),
    ),
    "also while the read moves": after(
        CHUNKS_ASKED,
        (110.0 + ASK_AGAIN_S / 2, wanted()),
        (110.0 + ASK_AGAIN_S, Tick(), *asks(0, 1, number=3)),
    ),
    "a link that broke may have lost it": after(
        CHUNKS_ASKED,
        (
            LinkBroken(RANK_0),
            *asks(0, 1, number=3),
            Send(RANK_0, renew(4, CLAIM, reading=1)),
        ),
    ),
    "cancelled, it is stopped": after(
        CHUNKS_ASKED,
        (cancel_load(), STOP),
        (STOPPED, GIVEN_UP, failed(FailureKind.DROPPED, "dropped")),
    ),
    "cancelled, it asks for no more": after(
        CHUNKS_ASKED, (cancel_load(), STOP), (wanted(2), STOP), (answered(pack_reply(0)),)
    ),
    "denied, it waits for no chunk": after(
        CHUNKS_ASKED, (answered(deny()), STOP), (STOPPED, GIVEN_UP, DENIED)
    ),
    "denied when all chunks have come, it goes on": after(
        BOTH_PACKED, (answered(deny()),), (read_done(), RELEASED, GOOD)
    ),
    "a rank that is gone packs no chunk": after(
        CHUNKS_ASKED, (lost(), STOP), (STOPPED, GIVEN_UP, UNREACHABLE)
    ),
    "a read that gets chunks is not late": after(
        CHUNKS_ASKED,
        (110.0 + TIMEOUT_S - 0.5, answered(pack_reply(0)), to_read(0)),
        (110.0 + TIMEOUT_S, Tick(), *asks(1, number=3)),
    ),
}


@each_of(CHUNKS)
def test_a_read_by_chunks(script: Script) -> None:
    loading(script, ChunkPart()).check()


def test_prefill_never_hears_what_the_scheduler_believes() -> None:
    heard = told(CHUNKS.values(), lambda: (ChunkPart(),))
    assert heard >= {CLAIM, NONCE, READER.incarnation}
    assert HINT_KEY not in heard
