"""Reads by chunks, as the decode machine sees them: what it asks for, again, and no longer."""

import pytest

from nixl_kv.geometry.match import Rank
from nixl_kv.protocol.events import (
    AbandonRead,
    Chunk,
    ChunksWanted,
    Failure,
    FailureKind,
    LinkBroken,
    LoadEnded,
    ReadChunk,
    ReadFailed,
    Send,
    StopRead,
    Tick,
)
from nixl_kv.protocol.load import ASK_AGAIN_S, DRAIN_S
from support.records import (
    CLAIM,
    D1,
    LAYERS,
    PEER,
    RANK_0,
    TIMEOUT_S,
    answered,
    cancel_load,
    deny,
    digest_request,
    lost,
    pack_reply,
    pack_request,
    read_done,
    release,
    renew,
    renewed,
)
from support.scripts import READING, VERIFIED, Script, after, each_of, loading

BOTH, LAST = (0, 1), (1, 2)


def chunk(number: int) -> Chunk:
    return Chunk(number, 0, 4 + number, LAYERS)


def wanted(*numbers: int, holds: tuple[int, ...] = BOTH) -> ChunksWanted:
    return ChunksWanted(D1, Rank(0), tuple(map(chunk, numbers)), holds)


def asks(*numbers: int, number: int = 2, holds: tuple[int, ...] = BOTH) -> list[Send]:
    return [
        Send(RANK_0, pack_request(each, number=number, end=4 + each, holds=holds))
        for each in numbers
    ]


def to_read(number: int, slot: int | None = 0) -> ReadChunk:
    return ReadChunk(D1, Rank(0), number, slot)


def failed(kind: FailureKind, detail: str) -> LoadEnded:
    return LoadEnded(D1, 7, Failure(kind, detail), PEER)


STOP, STOPPED = StopRead(D1, Rank(0)), ReadFailed(D1, Rank(0), "it is not wanted any more")
GIVEN_UP = Send(RANK_0, release(complete=False))
ASKED: Script = after(READING, (wanted(0, 1), *asks(0, 1)))
ANSWERED: Script = after(
    ASKED, (answered(pack_reply(0, slot=5)), to_read(0, 5)), (answered(pack_reply(1)), to_read(1))
)
GOOD = LoadEnded(D1, 7, None, PEER, reads=(read_done(),))
DENIED = failed(FailureKind.DENIED, "rank 0")
LOST_LEASE = failed(FailureKind.LEASE_LOST, "rank 0")
UNREACHABLE = failed(FailureKind.UNREACHABLE, "closed")
LATE = failed(FailureKind.LATE, f"{TIMEOUT_S:g} s")

SCRIPTS: dict[str, Script] = {
    "what is packed is read, and the slot proves it as ever": after(
        ANSWERED,
        (wanted(2, holds=LAST), *asks(2, number=3, holds=LAST)),
        (answered(pack_reply(2)), to_read(2)),
        (read_done(), Send(RANK_0, release()), GOOD),
    ),
    "what prefill does not pack is known at once": after(
        ASKED, (answered(pack_reply(0, slot=None)), to_read(0, None))
    ),
    "an answer that comes again changes nothing": after(
        ANSWERED, (answered(pack_reply(0, slot=5)),), (answered(pack_reply(0, slot=None)),)
    ),
    "an answer to somebody else changes nothing": after(
        ASKED, (answered(pack_reply(0, claim="0" * 32)),), (answered(pack_reply(9)),)
    ),
    "what has no answer is asked for again": after(
        ASKED,
        (answered(pack_reply(0)), to_read(0)),
        (110.0 + ASK_AGAIN_S - 0.01, Tick()),
        (110.0 + ASK_AGAIN_S, Tick(), *asks(1, number=3)),
        (110.0 + 2 * ASK_AGAIN_S, Tick(), *asks(1, number=4)),
    ),
    "a link that broke may have lost it": after(
        ASKED,
        (
            LinkBroken(RANK_0),
            *asks(0, 1, number=3),
            Send(RANK_0, renew(4, CLAIM, reading=1)),
        ),
    ),
    "a digest has been asked for too, and is not again while it is read": after(
        VERIFIED,
        (wanted(0, holds=(0,)), *asks(0, holds=(0,))),
        (answered(pack_reply(0)), to_read(0)),
        (110.0 + ASK_AGAIN_S, Tick()),
    ),
    "cancelled, it is stopped": after(
        ASKED, (cancel_load(), STOP), (STOPPED, GIVEN_UP, failed(FailureKind.DROPPED, "dropped"))
    ),
    "cancelled, it asks for no more": after(
        ASKED, (cancel_load(), STOP), (wanted(2), STOP), (answered(pack_reply(0)),)
    ),
    "denied, it waits for no chunk": after(
        ASKED, (answered(deny()), STOP), (STOPPED, GIVEN_UP, DENIED)
    ),
    "denied when all chunks have come, it goes on": after(
        ANSWERED, (answered(deny()),), (read_done(), Send(RANK_0, release()), GOOD)
    ),
    "a claim that prefill has lost gets no chunk": after(
        ASKED, (answered(renewed(CLAIM, number=9)), STOP), (STOPPED, GIVEN_UP, LOST_LEASE)
    ),
    "a rank that is gone packs no chunk": after(
        ASKED, (lost(), STOP), (STOPPED, GIVEN_UP, UNREACHABLE)
    ),
    "a read that gets chunks is not late": after(
        ASKED,
        (110.0 + TIMEOUT_S - 0.5, answered(pack_reply(0)), to_read(0)),
        (110.0 + TIMEOUT_S, Tick(), *asks(1, number=3)),
    ),
    "one that gets none is late, and then abandoned": after(
        ASKED,
        (110.0 + TIMEOUT_S, Tick(), STOP),
        (110.0 + TIMEOUT_S + DRAIN_S, Tick(), AbandonRead(D1, Rank(0))),
        (STOPPED, GIVEN_UP, LATE),
    ),
}


@each_of(SCRIPTS)
def test_a_read_by_chunks(script: Script) -> None:
    loading(script).validate()


def test_a_broken_link_asks_for_the_digest_when_all_chunks_are_there() -> None:
    script = after(
        VERIFIED,
        (wanted(0, holds=(0,)), *asks(0, holds=(0,))),
        (answered(pack_reply(0)), to_read(0)),
    )
    machine = loading(script)
    assert machine.handle(LinkBroken(RANK_0), 110.5) == [Send(RANK_0, renew(3, CLAIM, reading=1))]
    machine.handle(read_done(), 110.6)
    assert Send(RANK_0, digest_request()) in machine.handle(LinkBroken(RANK_0), 110.8)


@pytest.mark.parametrize("states", [ASKED, ANSWERED])
def test_who_reads_by_chunks_is_known_to_read(states: Script) -> None:
    machine = loading(states)
    assert machine._send_heartbeat(RANK_0, 111.0) == [
        Send(RANK_0, renew(machine.numbers.last, CLAIM, reading=1))
    ]
