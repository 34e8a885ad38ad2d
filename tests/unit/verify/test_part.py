"""Digests in the protocol: which prefill makes, and how decode verifies a load."""

from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Nonce, Rank
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.events import (
    Chunk,
    ChunksWanted,
    CompareDigest,
    DigestMade,
    FailureKind,
    LinkBroken,
    LoadEnded,
    MakeDigest,
    Record,
    Send,
    StartLoad,
    StartRead,
    TellRead,
    Tick,
)
from nixl_kv.protocol.load import ASK_AGAIN_S
from nixl_kv.protocol.messages import DigestRequest
from nixl_kv.protocol.prefill import PrefillMachine, PrefillPart
from nixl_kv.verify.part import DigestPart, ProofPart
from support import offers
from support.offers import (
    ABORTED,
    ASK,
    BOTH_ASKED,
    EXPIRED,
    MARK,
    OFFERED,
    OTHERS,
    RECALL,
    RECLAIM,
    RELEASE,
    RELEASE_INCOMPLETE,
    SHARED,
    TAKEN_BACK,
    UNWRITTEN,
    WANTED_BACK,
    WRITTEN,
    denied,
    granted_pair,
    prefill_machine,
    prepare_pair,
)
from support.records import (
    CLAIM,
    D1,
    HEARTBEAT_S,
    HINT_KEY,
    HOME,
    LAYERS,
    LEASE_S,
    NONCE,
    NONCE2,
    OTHER_LIFE,
    PEER,
    RANK_0,
    READER,
    RIVAL,
    ROUTE,
    SLICES,
    STRANGER,
    SUMS,
    TABLES,
    TIMEOUT_S,
    answered,
    ask,
    asked,
    at,
    cancel_load,
    deny,
    digest_compared,
    digest_reply,
    digest_request,
    fits,
    grant,
    lost,
    no_record,
    pack_reply,
    pack_request,
    read_done,
    reader,
    recall,
    release,
    renew,
    renewed,
    replied,
    start_load,
)
from support.scripts import (
    AGAIN,
    DENIED,
    DROPPED,
    EARLY,
    EMPTY,
    FENCED,
    GIVEN_UP,
    GOOD,
    GOOD_SUM,
    GRANT,
    GRANTED,
    LATE,
    LOST_LEASE,
    OTHER_TOKEN,
    OTHER_WHOLE,
    PART,
    PENDING,
    PREPARED,
    READY,
    RELEASED,
    TWO_ASKED,
    UNREACHABLE,
    WHOLE,
    Script,
    after,
    decode_machine,
    each_of,
    failed,
    play,
    told,
)

pytestmark = pytest.mark.usefixtures("counted_fence_tokens")


# --- prefill

NOT_GRANTED = "a digest of blocks that are not granted to it"


def digest_machine(script: Script, *more: PrefillPart) -> PrefillMachine:
    return prefill_machine(script, parts=(DigestPart(), *more))


def made(request: DigestRequest, route: bytes = ROUTE, refusal: str | None = None) -> DigestMade:
    if refusal is not None:
        return DigestMade(route, request, refusal=refusal)
    return DigestMade(route, request, rows=SUMS * 4, columns=SUMS)


REQUEST, REQUEST_SECOND = digest_request(), digest_request(reader=offers.SECOND)
TO_MAKE = (asked(REQUEST), MakeDigest(ROUTE, REQUEST, TABLES))
NO_LAYER = "layer 'layer.9' is not on this rank"
DIGESTS: dict[str, Script] = {
    "granted blocks are digested": after(
        offers.GRANTED, TO_MAKE, (made(REQUEST), replied(digest_reply()))
    ),
    "all tokens of the prompt may be digested": after(
        offers.GRANTED,
        (asked(digest_request(end=8)), MakeDigest(ROUTE, digest_request(end=8), TABLES)),
    ),
    # There the last block may hold what belongs to another prompt.
    "tokens behind the prompt are not digested": after(
        offers.GRANTED, (asked(digest_request(end=9)), *denied("a digest up to token 9 of 8"))
    ),
    # Whether that is under way already is for the data plane to know.
    "a repeated request is digested again": after(offers.GRANTED, TO_MAKE, TO_MAKE),
    **{
        f"{who} gets none": after(
            offers.GRANTED,
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
        (offers.ASK_SECOND, replied(grant(reader=offers.SECOND))),
        (asked(REQUEST_SECOND), MakeDigest(ROUTE, REQUEST_SECOND, TABLES)),
    ),
    # It asked for its blocks before: that was denied, and people were told.
    "an absent offer gets no digest": after(
        offers.GRANTED, (asked(digest_request(nonce=NONCE2)), replied(deny(nonce=NONCE2)))
    ),
    "an unwritten offer is digested once it is written": after(
        UNWRITTEN, (ASK, WRITTEN), (asked(REQUEST),), (MARK, offers.GRANT, TO_MAKE[1])
    ),
    "a request for a digest before any ask for blocks gets no answer": after(
        OFFERED, (asked(REQUEST),), (ASK, WRITTEN, offers.GRANT), TO_MAKE
    ),
    # The blocks may have been written meanwhile: the digest may be of anything.
    **{
        f"it is not sent after {name}": after(
            offers.GRANTED, TO_MAKE, step, (made(REQUEST), replied(deny()))
        )
        for name, step in {
            "a complete release": offers.READ,
            "an incomplete release": (RELEASE_INCOMPLETE, *ABORTED),
            "a heartbeat without the claim": (asked(renew(2)), *ABORTED, replied(renewed())),
            "the lease": (100.0 + LEASE_S, Tick(), *EXPIRED),
        }.items()
    },
    "why something cannot be digested stays on this side": after(
        offers.GRANTED, TO_MAKE, (made(REQUEST, refusal=NO_LAYER), *denied(NO_LAYER)), offers.READ
    ),
    "a reader without a grant gets none": after(
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
    "one of a pair waits for all of its tokens": after(
        offers.IN_PARTS,
        (asked(digest_request(end=8)),),
        (94.0, prepare_pair(None)),
        (MARK, granted_pair(None), MakeDigest(ROUTE, digest_request(end=8), TABLES)),
    ),
}


@each_of(DIGESTS)
def test_a_digest_of_an_offer(script: Script) -> None:
    digest_machine(script).check()


class Expecting(PrefillPart):
    """Expects every offer."""

    def expects(self, nonce: Nonce) -> bool:
        return bool(nonce)


def test_a_reader_repeats_its_request_until_the_offer_that_is_expected_has_come() -> None:
    play(digest_machine([], Expecting()), [(asked(digest_request()),)])
    play(digest_machine([]), [(asked(digest_request()), replied(deny()))])


def test_only_readers_that_asked_want_a_digest() -> None:
    part = DigestPart()
    machine = prefill_machine(SHARED, parts=(part,))

    def is_wanted(request: DigestRequest) -> bool:
        return part.is_wanted(MakeDigest(ROUTE, request, TABLES))

    assert is_wanted(REQUEST)
    assert not is_wanted(REQUEST_SECOND)
    play(machine, BOTH_ASKED[-1:])
    assert is_wanted(REQUEST_SECOND)
    assert not is_wanted(digest_request(reader=reader(1, incarnation=OTHER_LIFE)))
    play(machine, [(RELEASE,)])
    assert not is_wanted(REQUEST)


# --- decode

RELEASED_1 = Send(at(1), release())
ASK_DIGEST = Send(RANK_0, digest_request())
OTHER_DIGEST = digest_reply(columns=bytes(8))
GOOD_VERIFIED = replace(GOOD, verified=True)
CORRUPT = failed(FailureKind.CORRUPT, "K of head 0")
START_VERIFIED = start_load(verify=True)
TO_DIGEST = CompareDigest(Rank(0), SLICES, START_VERIFIED, CLAIM)
READ_VERIFIED = (
    StartRead(PEER, Rank(0), GRANT, START_VERIFIED),
    replace(TO_DIGEST, has_landed=False),
)
VERIFIED: Script = [
    *GRANTED,
    (110.0, START_VERIFIED, Send(RANK_0, digest_request()), *READ_VERIFIED),
]
"""Prefill's digest was asked for when there were blocks."""
LANDED_VERIFIED = (read_done(), TO_DIGEST)
VERIFYING: Script = [*VERIFIED, LANDED_VERIFIED]
"""The slot was valid; prefill's digest is not here yet."""
COMPARE = CompareDigest(
    *(Rank(0), SLICES, START_VERIFIED, CLAIM), digest_reply().rows, digest_reply().columns
)
"""The action that follows when it comes."""


def new_part() -> ProofPart:
    """Each load reads the same slices of each rank."""
    return ProofPart(lambda *_: SLICES)


def verifying_machine(record: Record = no_record) -> DecodeMachine:
    return decode_machine(record, parts=(new_part(),))


def verifying(script: Script) -> DecodeMachine:
    machine = verifying_machine()
    play(machine, script)
    return machine


DIGEST = (answered(digest_reply()),)
TO_COMPARE = (*DIGEST, COMPARE)
EQUAL = (digest_compared(), RELEASED, GOOD_VERIFIED)
LOSSES: dict[str, tuple[Any, LoadEnded]] = {
    "the connection": (lost(), UNREACHABLE),
    "the lease": (answered(renewed(CLAIM)), LOST_LEASE),
    "a denial": (answered(deny()), DENIED),
}
WHEN_FENCED: dict[str, Script] = {"without a digest": [], "with a digest": [DIGEST]}
SOME_TOKENS = StartLoad(D1, 4, 7, (Table.of([5], first=1),), verify=True)
VERIFICATION: dict[str, Script] = {
    "prefill's digest comes last": after(VERIFYING, TO_COMPARE, EQUAL),
    "a digest that comes during the read waits for the slot": after(
        VERIFIED, DIGEST, (read_done(), COMPARE), EQUAL
    ),
    "only the tokens that are loaded are compared": after(
        GRANTED,
        (SOME_TOKENS, ASK_DIGEST, *(replace(one, load=SOME_TOKENS) for one in READ_VERIFIED)),
        (read_done(), replace(TO_DIGEST, load=SOME_TOKENS)),
        (*DIGEST, replace(COMPARE, load=SOME_TOKENS)),
        (digest_compared(), RELEASED, replace(GOOD_VERIFIED, num_tokens=3)),
    ),
    "bytes that differ fail the load": after(
        VERIFYING, TO_COMPARE, (digest_compared("K of head 0"), GIVEN_UP, CORRUPT)
    ),
    "bytes that cannot be compared are not called corrupt": after(
        VERIFYING,
        TO_COMPARE,
        (
            replace(digest_compared(), refusal="no memory"),
            GIVEN_UP,
            failed(FailureKind.INTERNAL, "no memory"),
        ),
    ),
    **{
        f"a comparison needs prefill no more: {name}": after(VERIFYING, TO_COMPARE, (event,), EQUAL)
        for name, (event, _) in LOSSES.items()
    },
    **{
        f"without prefill's digest the load fails with {name}": after(VERIFYING, (event, report))
        for name, (event, report) in LOSSES.items()
    },
    "a repeated digest is compared once": after(
        VERIFYING, TO_COMPARE, (answered(OTHER_DIGEST),), EQUAL, DIGEST
    ),
    **{
        f"a digest of {name} is ignored": after(VERIFYING, (event,), TO_COMPARE)
        for name, event in {
            "another claim": answered(digest_reply(claim=RIVAL)),
            "another reader": answered(digest_reply(reader=STRANGER)),
            "another rank": answered(digest_reply(), at(1)),
            "the engine": answered(digest_reply(), HOME),
        }.items()
    },
    **{
        f"a fenced load is not compared, {name}": after(
            VERIFIED, *digest, (read_done(fence_token=EMPTY), GIVEN_UP, FENCED)
        )
        for name, digest in WHEN_FENCED.items()
    },
    **{
        f"a comparison that ends after its load changes nothing, {difference}": after(
            VERIFYING,
            TO_COMPARE,
            (cancel_load(), GIVEN_UP, DROPPED),
            (digest_compared(difference),),
        )
        for difference in (None, "K of head 0")
    },
    # It may end when the same request is loaded again.
    "a comparison of an earlier attempt shows nothing": after(
        VERIFYING,
        (digest_compared(claim=RIVAL),),
        (digest_compared("K of head 0", claim=RIVAL),),
        TO_COMPARE,
        EQUAL,
    ),
    # The slot decides about a read under way; then the digest is asked for again, in vain.
    "a denied digest fails the load when it is all that is missing": after(
        VERIFIED,
        (answered(deny()),),
        LANDED_VERIFIED,
        (110.0 + ASK_AGAIN_S, Tick(), ASK_DIGEST),
        (answered(deny()), DENIED),
    ),
    **{
        f"a load that is not verified in time is late, {name}": after(
            VERIFYING, *steps, (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE)
        )
        for name, *steps in (
            ("without a digest", (139.5, Tick(), ASK_DIGEST), (139.99, Tick())),
            ("with a digest", TO_COMPARE, (139.99, Tick())),
        )
    },
    # Nothing writes into its blocks now.
    "cancelled while it is verified, it ends at once": after(
        VERIFYING, (cancel_load(), GIVEN_UP, DROPPED)
    ),
    "the digest is asked for again only when it is all that is missing": after(
        VERIFIED,
        (112.0, Tick()),
        LANDED_VERIFIED,
        (112.4, Tick(), ASK_DIGEST),
        (112.4 + ASK_AGAIN_S - 0.01, Tick()),
        (112.4 + ASK_AGAIN_S, Tick(), ASK_DIGEST),
        TO_COMPARE,
        (120.0, Tick()),
    ),
    "prefill's digest is asked for as soon as it is known": after(
        PREPARED,
        (110.0, START_VERIFIED),
        (fits(), Send(RANK_0, ask(number=1)), ASK_DIGEST),
        (answered(GRANT), *READ_VERIFIED),
    ),
    "decode asks for no digest of a denied load": after(
        GRANTED, (answered(deny()),), (START_VERIFIED, DENIED)
    ),
    "it is not given back": after(
        VERIFYING, (answered(recall()), Send(RANK_0, renew(2, CLAIM, reading=1)))
    ),
    "after a broken link its digest is asked for at once": after(
        VERIFYING,
        (110.5, LinkBroken(RANK_0), ASK_DIGEST, Send(RANK_0, renew(2, CLAIM, reading=1))),
    ),
}
TWO_READING: Script = [
    *TWO_ASKED[:-1],
    (START_VERIFIED, *(Send(at(rank), digest_request()) for rank in (0, 1))),
    *[
        (answered(GRANT, at(rank)), *(replace(one, rank=Rank(rank)) for one in READ_VERIFIED))
        for rank in (0, 1)
    ],
    LANDED_VERIFIED,
]
"""Two ranks are read and verified; the slot of the first was valid."""
TWO_VERIFYING: Script = after(
    TWO_READING,
    (read_done(1), *(replace(action, rank=Rank(1)) for action in LANDED_VERIFIED[1:])),
)
COMPARE_OTHER = replace(COMPARE, rank=Rank(1), rows=OTHER_DIGEST.rows, columns=OTHER_DIGEST.columns)
SEVERAL_VERIFIED: dict[str, Script] = {
    "each rank is compared with its own digest": after(
        TWO_VERIFYING,
        (answered(OTHER_DIGEST, at(1)), COMPARE_OTHER),
        TO_COMPARE,
        (digest_compared(rank=1), RELEASED_1),
        (digest_compared(), RELEASED, replace(GOOD_VERIFIED, reads=(read_done(0), read_done(1)))),
    ),
}


def refuse(*_: object) -> NoReturn:
    raise ValueError("block table: 2 groups")


def part_of(machine: DecodeMachine) -> ProofPart:
    (part,) = [part for part in machine._parts if isinstance(part, ProofPart)]
    return part


UNNAMED: dict[str, tuple[Any, Script]] = {
    "its tables cannot be named": (
        refuse,
        [(START_VERIFIED, GIVEN_UP, failed(FailureKind.INTERNAL, "block table: 2 groups"))],
    ),
    "nothing is read": (
        lambda *_: (),
        [(START_VERIFIED, READ_VERIFIED[0]), (read_done(), RELEASED, GOOD_VERIFIED)],
    ),
    "a finished read is late, not good": (
        lambda *_: (),
        [
            (110.0, START_VERIFIED, READ_VERIFIED[0]),
            (read_done(num_bytes=4096),),
            (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE),
        ],
    ),
}


@each_of(UNNAMED, "case")
def test_a_load_of_which_nothing_is_named(case: tuple[Any, Script]) -> None:
    machine = verifying(GRANTED)
    proofs = part_of(machine)
    proofs._name_slices, script = case
    play(machine, script)


@pytest.mark.parametrize(
    ("script", "comparison", "is_wanted"),
    [
        ([], COMPARE, False),
        (PREPARED, COMPARE, False),
        (GRANTED, COMPARE, False),
        (VERIFIED, TO_DIGEST, True),
        ([*VERIFYING, TO_COMPARE], COMPARE, True),
        ([*VERIFYING, TO_COMPARE], TO_DIGEST, True),
        ([*VERIFYING, TO_COMPARE], replace(COMPARE, claim=RIVAL), False),
        ([*VERIFYING, TO_COMPARE], replace(COMPARE, rank=Rank(1)), False),
        ([*VERIFYING, TO_COMPARE, (cancel_load(), GIVEN_UP, DROPPED)], COMPARE, False),
    ],
)
def test_a_comparison_is_of_use_from_the_read_to_the_end_of_its_load(
    script: Script, comparison: CompareDigest, *, is_wanted: bool
) -> None:
    assert part_of(verifying(script)).is_wanted(comparison) is is_wanted


VERIFIED_PART: Script = after(
    EARLY,
    (answered(PART), READY),
    (
        110.0,
        START_VERIFIED,
        StartRead(PEER, Rank(0), PART, replace(START_VERIFIED, end=4)),
    ),
    (read_done(),),
)
PARTS: dict[str, Script] = {
    "then all is read again, to be verified": after(
        VERIFIED_PART,
        (
            answered(OTHER_WHOLE),
            StartRead(PEER, Rank(0), OTHER_WHOLE, START_VERIFIED),
            replace(TO_DIGEST, has_landed=False),
        ),
    ),
    "also if a part that the former grant proves lands after it": after(
        VERIFIED_PART[:-1],
        (answered(OTHER_WHOLE),),
        (read_done(), AGAIN),
        (
            answered(OTHER_WHOLE),
            StartRead(PEER, Rank(0), OTHER_WHOLE, START_VERIFIED),
            replace(TO_DIGEST, has_landed=False),
        ),
    ),
    "the last part digests ahead, and prefill is asked once all has landed": after(
        VERIFIED_PART,
        (
            answered(WHOLE),
            StartRead(PEER, Rank(0), WHOLE, replace(START_VERIFIED, begin=4)),
            replace(TO_DIGEST, has_landed=False),
        ),
        (read_done(), ASK_DIGEST, TO_DIGEST),
        TO_COMPARE,
        (digest_compared(), RELEASED, replace(GOOD_SUM, verified=True)),
    ),
    "prefill preempts the request before its digest comes": after(
        VERIFIED_PART,
        (
            answered(WHOLE),
            StartRead(PEER, Rank(0), WHOLE, replace(START_VERIFIED, begin=4)),
            replace(TO_DIGEST, has_landed=False),
        ),
        (read_done(), ASK_DIGEST, TO_DIGEST),
        (answered(renewed(CLAIM, number=2)), AGAIN),
        (
            answered(OTHER_WHOLE),
            StartRead(PEER, Rank(0), OTHER_WHOLE, START_VERIFIED),
            replace(TO_DIGEST, has_landed=False),
        ),
    ),
    "to be verified, all is read again after a preemption": after(
        VERIFIED_PART,
        (
            answered(replace(WHOLE, num_tokens=6)),
            StartRead(
                PEER, Rank(0), replace(WHOLE, num_tokens=6), replace(START_VERIFIED, begin=4, end=6)
            ),
        ),
        (read_done(fence_token=OTHER_TOKEN), AGAIN),
        (
            answered(WHOLE),
            StartRead(PEER, Rank(0), WHOLE, START_VERIFIED),
            replace(TO_DIGEST, has_landed=False),
        ),
    ),
}


@each_of(VERIFICATION | SEVERAL_VERIFIED | PARTS)
def test_a_verified_load(script: Script) -> None:
    machine = verifying(script)
    machine.check()
    is_reported = any(isinstance(action, LoadEnded) for step in script for action in step)
    assert (machine._by_request.get(D1) is None) == is_reported


def test_a_load_says_that_it_waits_for_a_digest() -> None:
    assert verifying(VERIFYING).loads[-1].waits_for == "a digest"


def test_that_a_load_is_verified_is_said_in_heartbeats() -> None:
    machine = decode_machine(heartbeat_interval_s=HEARTBEAT_S, parts=(new_part(),))
    said = Send(RANK_0, renew(2, CLAIM, reading=1))
    play(machine, after(VERIFYING, (100.0 + HEARTBEAT_S, Tick(), said)))


def test_prefill_never_hears_what_the_scheduler_believes() -> None:
    heard = told((SEVERAL_VERIFIED | PARTS).values(), lambda: (new_part(),))
    assert heard >= {CLAIM, NONCE, READER.incarnation}
    assert HINT_KEY not in heard


def test_a_digest_from_before_a_preemption_is_forgotten() -> None:
    machine = verifying_machine()
    play(machine, after(EARLY, (110.0, answered(PART), READY)))
    (load,) = machine.loads
    (read,) = load.reads.values()
    proof = part_of(machine)._of(read)
    proof.digest = digest_reply()
    machine.handle(PENDING["queued"], 111.0)
    machine.handle(answered(WHOLE), 112.0)
    assert proof.digest is None


def test_a_broken_link_asks_for_the_digest_when_all_chunks_are_there() -> None:
    ring = pytest.importorskip("nixl_kv.reading.staged.ring", reason="without that folder")
    asked_for = ChunksWanted(D1, Rank(0), (Chunk(0, 0, 4, LAYERS),), (0,))
    script = after(
        VERIFIED,
        (asked_for, Send(RANK_0, pack_request(0, number=2, end=4, holds=(0,)))),
        (answered(pack_reply(0)), TellRead(D1, Rank(0), ring.PackedChunk(0, 0))),
    )
    machine = decode_machine(parts=(ring.ChunkPart(), new_part()))
    play(machine, script)
    assert machine.handle(LinkBroken(RANK_0), 110.5) == [Send(RANK_0, renew(3, CLAIM, reading=1))]
    machine.handle(read_done(), 110.6)
    assert Send(RANK_0, digest_request()) in machine.handle(LinkBroken(RANK_0), 110.8)
