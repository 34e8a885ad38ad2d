"""The prefill side: offers, readers, leases and generation slots."""

from collections.abc import Iterator

import pytest
from protocol_records import (
    CLAIM,
    LEASE_S,
    NONCE,
    OTHER_LIFE,
    P1,
    RANK_LIFE,
    READER,
    RIVAL,
    STRANGER,
    SUMS,
    TABLES,
    abort,
    ask,
    deny,
    done,
    grant,
    hex32,
    prepare,
    proof,
    prove,
    renew,
    renewed,
)

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Generation, Nonce, Rank, RequestId
from nixl_kv.protocol import events, offers, sending
from nixl_kv.protocol.events import ClearSlot, Denied, How, Reply, Sent, Tick, WriteSlot
from nixl_kv.protocol.messages import Ask, Prove, Reader
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.proofs import Digest, Digested
from nixl_kv.protocol.sender import Sender
from nixl_kv.protocol.sending import TRANSITIONS, Binding, Cause, Offering, State

TTL_S = 10.0
TOP = 3
"""The slot that is granted first, of four."""
NONCE2 = Nonce(hex32(2))
P2 = RequestId("p2")
BOTH = (0, 1)
"""Two reader ranks under one claim."""
SECOND = Reader(READER.engine, READER.incarnation, 1)


def generation(number: int) -> Generation:
    return Generation(bytes([number]) * 16)


@pytest.fixture(autouse=True)
def counted_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1, 256))
    monkeypatch.setattr(offers, "new_generation", lambda: generation(next(numbers)))


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(RANK_LIFE, Offers(num_slots=4, offer_ttl_s=TTL_S, lease_s=LEASE_S))
    yield made
    made.offers.validate()


@pytest.fixture
def offered(sender: Sender) -> Sender:
    """A sender whose one offer went out at second 100."""
    assert sender.handle(prepare(), 99.0) == []
    assert sender.handle(events.Offer(NONCE, P1), 100.0) == []
    return sender


@pytest.fixture
def granted(offered: Sender) -> Sender:
    """Its offer is granted to the first reader alone, at second 100, by an ask numbered 1."""
    offered.handle(ask(), 100.0)
    return offered


@pytest.fixture
def shared(offered: Sender) -> Sender:
    """Its offer is granted to two reader ranks, at second 100; the second has not asked."""
    offered.handle(ask(readers=BOTH), 100.0)
    return offered


GRANT = Reply(grant())
RELEASED = [ClearSlot(TOP), Sent(P1, How.READ)]
ABORTED = [ClearSlot(TOP), Sent(P1, How.ABORTED)]
EXPIRED = [ClearSlot(TOP), Sent(P1, How.EXPIRED)]


def denied(detail: str, **changed: str) -> list[events.Action]:
    return [Denied(Nonce(changed.get("nonce", NONCE)), detail), Reply(deny(**changed))]


# Grants


def test_an_ask_is_granted_and_the_slot_is_written_first(offered: Sender) -> None:
    assert offered.handle(ask(), 100.0) == [WriteSlot(TOP, generation(1)), GRANT]
    assert offered.handle(done(), 100.1) == RELEASED


def test_whoever_has_the_nonce_has_the_ticket_so_an_ask_may_be_quicker_than_the_offer(
    sender: Sender,
) -> None:
    sender.handle(prepare(), 99.0)
    assert sender.handle(ask(), 99.5) == [WriteSlot(TOP, generation(1)), GRANT]
    assert sender.handle(events.Offer(NONCE, P1), 100.0) == []
    assert sender.handle(Tick(), 99.5 + LEASE_S - 0.1) == []
    assert sender.handle(done(), 101.4) == RELEASED


def test_a_reader_may_be_done_before_the_offer(sender: Sender) -> None:
    sender.handle(prepare(), 99.0)
    sender.handle(ask(), 99.5)
    assert sender.handle(done(), 99.6) == RELEASED
    assert sender.handle(events.Offer(NONCE, P1), 100.0) == []
    assert repr(sender.offers) == "<Offers: none>"


def test_an_ask_that_comes_again_gets_the_same_grant(granted: Sender) -> None:
    assert granted.handle(ask(number=2), 101.0) == [GRANT]


def test_an_ask_that_comes_again_renews_the_lease(granted: Sender) -> None:
    granted.handle(ask(number=2), 101.0)
    assert granted.handle(Tick(), 101.0 + LEASE_S - 0.01) == []
    assert granted.handle(Tick(), 101.0 + LEASE_S) == EXPIRED


def test_after_a_preemption_the_new_blocks_are_granted(sender: Sender) -> None:
    sender.handle(prepare(), 98.0)
    tables = (b"\1\0\0\0", b"\2\0\0\0")
    sender.handle(prepare(tables=tables, num_tokens=4), 99.0)
    assert sender.handle(ask(), 100.0) == [
        WriteSlot(TOP, generation(1)),
        Reply(grant(tables=tables, num_tokens=4)),
    ]


def test_each_offer_has_a_slot_and_a_generation_of_its_own(granted: Sender) -> None:
    granted.handle(prepare(nonce=NONCE2, request=P2), 100.0)
    assert granted.handle(ask(nonce=NONCE2, claim=RIVAL), 100.0) == [
        WriteSlot(2, generation(2)),
        Reply(grant(nonce=NONCE2, claim=RIVAL, slot=2, generation=generation(2))),
    ]


def test_a_slot_that_is_used_again_gets_a_fresh_generation(granted: Sender) -> None:
    granted.handle(done(), 100.1)
    granted.handle(prepare(nonce=NONCE2, request=P2), 100.2)
    assert granted.handle(ask(nonce=NONCE2), 100.3) == [
        WriteSlot(TOP, generation(2)),
        Reply(grant(nonce=NONCE2, slot=TOP, generation=generation(2))),
    ]


@pytest.mark.parametrize("seconds", [0.5, 3600.0])
def test_the_grant_says_how_long_the_lease_is(seconds: float) -> None:
    sender = Sender(RANK_LIFE, Offers(num_slots=4, offer_ttl_s=TTL_S, lease_s=seconds))
    sender.handle(prepare(), 100.0)
    assert sender.handle(ask(), 100.0)[1] == Reply(grant(lease_s=seconds))


# Denials


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(
            ask(nonce=NONCE2),
            denied("no such offer: used, expired, or never made", nonce=NONCE2),
            id="unknown nonce",
        ),
        pytest.param(ask(context=hex32(7)), denied("another prompt"), id="other prompt"),
        pytest.param(
            ask(incarnation=OTHER_LIFE),
            denied("meant for incarnation 00000000", reason="incarnation"),
            id="other life",
        ),
        pytest.param(
            ask(readers=(1, 2)),
            denied("rank 0 is not among its own readers"),
            id="reader that does not read",
        ),
    ],
)
def test_an_ask_is_denied_and_the_offer_stays(
    offered: Sender, asked: Ask, expected: list[events.Action]
) -> None:
    assert offered.handle(asked, 100.0) == expected
    assert offered.handle(ask(), 100.0) == [WriteSlot(TOP, generation(1)), GRANT]


def test_a_denial_of_this_life_names_it() -> None:
    sender = Sender(OTHER_LIFE, Offers(num_slots=1, offer_ttl_s=TTL_S, lease_s=LEASE_S))
    assert sender.handle(ask(), 100.0) == [
        Denied(NONCE, "meant for incarnation 00000000"),
        Reply(deny("incarnation", incarnation=OTHER_LIFE)),
    ]


def test_a_detail_shows_no_more_than_eight_digits() -> None:
    life = "abcdef01" + "2" * 24
    sender = Sender(RANK_LIFE, Offers(num_slots=1, offer_ttl_s=TTL_S, lease_s=LEASE_S))
    (report, _) = sender.handle(ask(incarnation=life), 100.0)
    assert report == Denied(NONCE, "meant for incarnation abcdef01")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(ask(claim=RIVAL), id="another claim"),
        pytest.param(ask(reader=STRANGER), id="another engine"),
        pytest.param(
            ask(reader=Reader(READER.engine, OTHER_LIFE, 0)), id="another life of the engine"
        ),
        pytest.param(ask(reader=SECOND, readers=BOTH), id="a rank that was not announced"),
    ],
)
def test_only_the_claim_that_was_first_is_granted(granted: Sender, asked: Ask) -> None:
    assert granted.handle(asked, 100.5) == denied(
        "claimed by another, or ended for this reader",
        claim=asked.claim,
        reader=asked.reader,
    )
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


def test_an_ask_after_the_end_is_denied(granted: Sender) -> None:
    granted.handle(done(), 100.1)
    assert granted.handle(ask(number=2), 100.2) == denied(
        "no such offer: used, expired, or never made"
    )


def test_without_a_free_slot_nothing_is_granted_until_one_is_cleared() -> None:
    sender = Sender(RANK_LIFE, Offers(num_slots=1, offer_ttl_s=TTL_S, lease_s=LEASE_S))
    sender.handle(prepare(), 100.0)
    sender.handle(prepare(nonce=NONCE2, request=P2), 100.0)
    assert sender.handle(ask(), 100.0)[0] == WriteSlot(0, generation(1))
    second = ask(nonce=NONCE2, claim=RIVAL)
    assert sender.handle(second, 100.0) == denied(
        "all generation slots are granted", nonce=NONCE2, claim=RIVAL
    )
    assert sender.handle(done(), 100.1) == [ClearSlot(0), Sent(P1, How.READ)]
    assert sender.handle(second, 100.2)[0] == WriteSlot(0, generation(2))
    sender.offers.validate()


# The ends of readers


def test_the_offer_is_released_when_each_reader_is_done(shared: Sender) -> None:
    assert shared.handle(ask(reader=SECOND, readers=BOTH), 100.5) == [Reply(grant(reader=SECOND))]
    assert shared.handle(done(), 101.0) == []
    assert shared.handle(done(reader=SECOND), 101.1) == RELEASED


def test_a_done_that_comes_twice_ends_one_reader(shared: Sender) -> None:
    assert shared.handle(done(), 100.5) == []
    assert shared.handle(done(), 100.6) == []
    assert shared.handle(abort(), 100.7) == []
    assert shared.handle(abort(reader=SECOND), 100.8) == ABORTED


def test_a_reader_that_has_ended_is_denied_while_others_read(shared: Sender) -> None:
    shared.handle(done(), 100.5)
    assert shared.handle(ask(number=2, readers=BOTH), 100.6) == denied(
        "claimed by another, or ended for this reader"
    )


def test_a_reader_may_end_before_it_has_asked(shared: Sender) -> None:
    assert shared.handle(abort(reader=SECOND), 100.5) == []
    assert shared.handle(done(), 100.6) == RELEASED


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(done(RIVAL), id="done of another claim"),
        pytest.param(abort(RIVAL), id="abort of another claim"),
        pytest.param(done(reader=STRANGER), id="done of a stranger"),
        pytest.param(abort(reader=STRANGER), id="abort of a stranger"),
        pytest.param(abort(reader=SECOND), id="abort of a rank that was not announced"),
        pytest.param(done(life=OTHER_LIFE), id="done for another life"),
        pytest.param(abort(life=OTHER_LIFE), id="abort for another life"),
        pytest.param(done(nonce=NONCE2), id="done of another offer"),
        pytest.param(abort(nonce=NONCE2), id="abort of another offer"),
    ],
)
def test_nobody_ends_what_another_reads(granted: Sender, message: events.Action) -> None:
    assert granted.handle(message, 100.5) == []
    assert granted.handle(done(), 100.6) == RELEASED


@pytest.mark.parametrize("message", [done(), abort()], ids=["done", "abort"])
def test_an_offer_ends_once(granted: Sender, message: events.Action) -> None:
    granted.handle(done(), 100.5)
    assert granted.handle(message, 100.6) == []
    assert granted.handle(Tick(), 1000.0) == []


def test_an_abort_before_any_grant_gives_the_offer_up(offered: Sender) -> None:
    assert offered.handle(abort(), 100.5) == [Sent(P1, How.NOT_NEEDED)]
    assert offered.handle(ask(), 100.6) == denied("no such offer: used, expired, or never made")
    assert offered.handle(Tick(), 1000.0) == []


def test_an_abort_may_be_quicker_than_the_offer(sender: Sender) -> None:
    sender.handle(prepare(), 99.0)
    assert sender.handle(abort(), 99.5) == [Sent(P1, How.NOT_NEEDED)]
    assert sender.handle(events.Offer(NONCE, P1), 100.0) == []


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(done(life=OTHER_LIFE), id="done for another life"),
        pytest.param(abort(life=OTHER_LIFE), id="abort for another life"),
        pytest.param(abort(nonce=NONCE2), id="abort of another offer"),
    ],
)
def test_an_offer_that_is_not_granted_stays(offered: Sender, message: events.Action) -> None:
    assert offered.handle(message, 100.5) == []
    assert offered.handle(ask(), 100.6) == [WriteSlot(TOP, generation(1)), GRANT]


def test_a_done_without_an_ask_releases_a_rank_that_nobody_reads(offered: Sender) -> None:
    assert offered.handle(done(), 100.5) == [Sent(P1, How.NOT_NEEDED)]
    assert offered.handle(ask(), 100.6)[1:] == [Reply(deny())]


# Time


def test_an_offer_that_nobody_claims_ends_by_itself(offered: Sender) -> None:
    assert offered.handle(Tick(), 100.0 + TTL_S - 0.01) == []
    assert offered.handle(Tick(), 100.0 + TTL_S) == [Sent(P1, How.UNCLAIMED)]


def test_an_offer_has_no_end_before_its_ticket_is_out(sender: Sender) -> None:
    sender.handle(prepare(), 0.0)
    assert sender.handle(Tick(), 1000.0) == []
    assert sender.handle(events.Offer(NONCE, P1), 1000.0) == []
    assert sender.handle(Tick(), 1000.0 + TTL_S) == [Sent(P1, How.UNCLAIMED)]


def test_a_claimed_offer_outlives_its_time(offered: Sender) -> None:
    offered.handle(ask(), 100.0 + TTL_S - 0.5)
    assert offered.handle(Tick(), 100.0 + TTL_S) == []


def test_a_lease_begins_for_every_expected_reader_with_the_first_ask(shared: Sender) -> None:
    """Also for one that never asks: its engine may be dead."""
    shared.handle(done(), 100.1)
    assert shared.handle(Tick(), 100.0 + LEASE_S - 0.01) == []
    assert shared.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


def test_leases_run_out_one_by_one(shared: Sender) -> None:
    shared.handle(ask(reader=SECOND, readers=BOTH), 101.0)
    assert shared.handle(Tick(), 100.0 + LEASE_S) == []
    assert shared.handle(ask(number=2, readers=BOTH), 102.5) == denied(
        "claimed by another, or ended for this reader"
    )
    assert shared.handle(Tick(), 101.0 + LEASE_S) == EXPIRED


def test_several_offers_end_in_one_tick_each_slot_before_its_blocks(granted: Sender) -> None:
    granted.handle(prepare(nonce=NONCE2, request=P2), 100.0)
    granted.handle(ask(nonce=NONCE2), 100.0)
    granted.handle(prepare(nonce=Nonce(hex32(3)), request=RequestId("p3")), 90.0)
    granted.handle(events.Offer(Nonce(hex32(3)), RequestId("p3")), 90.0)
    assert granted.handle(Tick(), 102.0) == [
        ClearSlot(3),
        Sent(P1, How.EXPIRED),
        ClearSlot(2),
        Sent(P2, How.EXPIRED),
        Sent(RequestId("p3"), How.UNCLAIMED),
    ]


# Proofs

ROWS, COLUMNS = SUMS * 4, SUMS


def digested(asked: Prove, refusal: str | None = None) -> Digested:
    return Digested(asked, refusal=refusal) if refusal else Digested(asked, ROWS, COLUMNS)


NOT_GRANTED = "nothing is granted to it that could be proven"
RELEASED_MEANWHILE = "it was released while it was proven"


def test_what_is_granted_is_digested_and_proven(granted: Sender) -> None:
    assert granted.handle(prove(), 100.5) == [Digest(prove(), TABLES)]
    assert granted.handle(digested(prove()), 100.6) == [Reply(proof())]


def test_all_that_was_offered_may_be_proven(granted: Sender) -> None:
    assert granted.handle(prove(end=8), 100.5) == [Digest(prove(end=8), TABLES)]


def test_what_was_not_offered_is_not_proven(granted: Sender) -> None:
    """Behind the prompt, its last block may hold what was another's."""
    assert granted.handle(prove(end=9), 100.5) == denied("proof up to token 9 of 8")


def test_each_time_that_it_is_asked_it_is_digested(granted: Sender) -> None:
    """Whether that is under way already is for the data plane to know."""
    for _ in range(2):
        assert granted.handle(prove(), 100.5) == [Digest(prove(), TABLES)]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(prove(claim=RIVAL), id="another claim"),
        pytest.param(prove(reader=STRANGER), id="another engine"),
        pytest.param(
            prove(reader=Reader(READER.engine, OTHER_LIFE, 0)), id="another life of the engine"
        ),
        pytest.param(prove(reader=SECOND), id="a rank that was not announced"),
        pytest.param(prove(nonce=NONCE2), id="another offer"),
        pytest.param(prove(incarnation=OTHER_LIFE), id="another life of this rank"),
    ],
)
def test_nothing_is_proven_to_whom_it_is_not_granted(granted: Sender, asked: Prove) -> None:
    expected = denied(NOT_GRANTED, nonce=asked.nonce, claim=asked.claim, reader=asked.reader)
    assert granted.handle(asked, 100.5) == expected
    assert granted.handle(digested(asked), 100.6) == [
        Denied(Nonce(asked.nonce), RELEASED_MEANWHILE),
        expected[1],
    ]


def test_who_has_not_asked_gets_no_proof(shared: Sender) -> None:
    """Or else it could ask as any number of lives, each of them for a digest of its own."""
    theirs = prove(reader=SECOND)
    assert shared.handle(theirs, 100.5) == denied(NOT_GRANTED, reader=SECOND)
    assert not shared.awaits(theirs)
    shared.handle(ask(reader=SECOND, readers=BOTH), 100.6)
    assert shared.handle(theirs, 100.7) == [Digest(theirs, TABLES)]
    assert shared.awaits(theirs)
    life = prove(reader=Reader(SECOND.engine, OTHER_LIFE, SECOND.rank))
    assert not shared.awaits(life)


def test_nothing_is_proven_before_it_is_granted(offered: Sender) -> None:
    assert offered.handle(prove(), 100.5) == denied(NOT_GRANTED)


def test_after_a_preemption_the_new_blocks_are_digested(sender: Sender) -> None:
    sender.handle(prepare(), 98.0)
    tables = (b"\1\0\0\0", b"\2\0\0\0")
    sender.handle(prepare(tables=tables), 99.0)
    sender.handle(ask(), 100.0)
    assert sender.handle(prove(), 100.5) == [Digest(prove(), tables)]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(done(), id="done"),
        pytest.param(abort(), id="aborted"),
        pytest.param(renew(2), id="no longer renewed"),
        pytest.param(Tick(), id="lease run out"),
    ],
)
def test_what_is_released_while_it_is_digested_is_not_proven(
    granted: Sender, event: events.Action
) -> None:
    """Its blocks may have been written meanwhile: the digest may be of anything."""
    granted.handle(prove(), 100.5)
    granted.handle(event, 100.0 + LEASE_S)
    assert granted.handle(digested(prove()), 103.0) == denied(RELEASED_MEANWHILE)


def test_who_has_ended_gets_no_proof_though_others_read_on(shared: Sender) -> None:
    shared.handle(prove(), 100.5)
    shared.handle(done(), 100.6)
    assert shared.handle(digested(prove()), 100.7) == denied(RELEASED_MEANWHILE)
    assert shared.handle(prove(), 100.8) == denied(NOT_GRANTED)


def test_each_reader_gets_a_proof_of_its_own(shared: Sender) -> None:
    shared.handle(ask(reader=SECOND, readers=BOTH), 100.5)
    theirs = prove(reader=SECOND)
    shared.handle(prove(), 100.6)
    shared.handle(theirs, 100.6)
    assert shared.handle(digested(theirs), 100.7) == [Reply(proof(reader=SECOND))]
    assert shared.handle(digested(prove()), 100.8) == [Reply(proof())]


def test_what_cannot_be_digested_is_denied_and_the_reason_stays_here(granted: Sender) -> None:
    granted.handle(prove(), 100.5)
    refused = digested(prove(), "layer 'layer.9' is not on this rank")
    assert granted.handle(refused, 100.6) == denied("layer 'layer.9' is not on this rank")
    assert granted.handle(done(), 100.7) == RELEASED


def test_a_proof_does_not_extend_the_lease(granted: Sender) -> None:
    """The reader renews all the same."""
    granted.handle(prove(), 101.0)
    granted.handle(digested(prove()), 101.5)
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


# Renewals


def test_a_renewal_extends_the_lease(granted: Sender) -> None:
    assert granted.handle(renew(2, CLAIM), 101.5) == [Reply(renewed(2))]
    assert granted.handle(Tick(), 101.5 + LEASE_S - 0.01) == []
    assert granted.handle(Tick(), 101.5 + LEASE_S) == EXPIRED


def test_a_renewal_extends_the_lease_of_its_reader_alone(shared: Sender) -> None:
    assert shared.handle(renew(2, CLAIM), 101.5) == [Reply(renewed(2))]
    shared.handle(Tick(), 100.0 + LEASE_S)
    assert shared.handle(renew(2, CLAIM, reader=SECOND), 102.1) == [
        Reply(renewed(2, CLAIM, reader=SECOND))
    ]
    assert shared.handle(done(), 102.2) == RELEASED


def test_a_claim_that_a_newer_renewal_lacks_is_released(granted: Sender) -> None:
    assert granted.handle(renew(2), 100.5) == [*ABORTED, Reply(renewed(2))]


@pytest.mark.parametrize(
    "number", [pytest.param(0, id="older than the ask"), pytest.param(1, id="numbered as the ask")]
)
def test_a_claim_that_an_older_renewal_lacks_is_kept(granted: Sender, number: int) -> None:
    assert granted.handle(renew(number), 100.5) == [Reply(renewed(number))]
    assert granted.handle(done(), 100.6) == RELEASED


def test_an_ask_that_comes_again_outdates_the_renewals_before_it(granted: Sender) -> None:
    granted.handle(ask(number=5), 100.5)
    assert granted.handle(renew(4), 100.6) == [Reply(renewed(4))]
    granted.handle(ask(number=2), 100.7)
    assert granted.handle(renew(4), 100.8) == [Reply(renewed(4))]
    assert granted.handle(renew(6), 100.9) == [*ABORTED, Reply(renewed(6))]


def test_a_reader_that_has_not_asked_yet_gives_nothing_up(shared: Sender) -> None:
    """Its ask may be on its way, with a number that prefill does not know."""
    assert shared.handle(renew(9, reader=SECOND), 100.5) == [Reply(renewed(9, reader=SECOND))]
    assert shared.handle(ask(reader=SECOND, readers=BOTH), 100.6) == [Reply(grant(reader=SECOND))]


def test_one_reader_gives_up_and_the_other_reads_on(shared: Sender) -> None:
    assert shared.handle(renew(2), 100.5) == [Reply(renewed(2))]
    assert shared.handle(done(reader=SECOND), 100.6) == RELEASED


def test_a_renewal_names_what_is_lost(granted: Sender) -> None:
    claims = (RIVAL, CLAIM, hex32(9))
    assert granted.handle(renew(2, *claims), 100.5) == [Reply(renewed(2, RIVAL, hex32(9)))]


def test_a_claim_that_has_ended_is_lost(granted: Sender) -> None:
    granted.handle(Tick(), 100.0 + LEASE_S)
    assert granted.handle(renew(2, CLAIM), 102.5) == [Reply(renewed(2, CLAIM))]


def test_a_renewal_before_the_tick_saves_a_lease_that_has_run_out(granted: Sender) -> None:
    """The slot still stands, so nothing was given away."""
    assert granted.handle(renew(2, CLAIM), 105.0) == [Reply(renewed(2))]
    assert granted.handle(Tick(), 105.0) == []


@pytest.mark.parametrize("claims", [(), (CLAIM,)], ids=["without the claim", "with the claim"])
def test_a_stranger_renews_and_releases_nothing(granted: Sender, claims: tuple[str, ...]) -> None:
    message = renew(9, *claims, reader=STRANGER)
    assert granted.handle(message, 101.0) == [Reply(renewed(9, *claims, reader=STRANGER))]
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


def test_an_offer_that_nobody_claims_is_not_touched_by_renewals(offered: Sender) -> None:
    assert offered.handle(renew(9, CLAIM), 100.5) == [Reply(renewed(9, CLAIM))]
    assert offered.handle(ask(), 100.6) == [WriteSlot(TOP, generation(1)), GRANT]


def test_a_renewal_for_another_life_names_all_as_lost(offered: Sender) -> None:
    message = renew(2, RIVAL, CLAIM, life=OTHER_LIFE)
    assert offered.handle(message, 100.5) == [Reply(renewed(2, RIVAL, CLAIM))]


def test_a_renewal_for_another_life_renews_nothing(granted: Sender) -> None:
    granted.handle(renew(1, CLAIM, life=OTHER_LIFE), 101.0)
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


def test_a_renewal_for_another_life_releases_nothing(granted: Sender) -> None:
    """A restarted rank may have its port again, while reads of the old one are still stuck."""
    message = renew(2, RIVAL, life=OTHER_LIFE)
    assert granted.handle(message, 100.5) == [Reply(renewed(2, RIVAL))]
    assert granted.handle(done(), 100.6) == RELEASED


# Commands that do not fit


def test_what_got_no_ticket_is_forgotten(sender: Sender) -> None:
    sender.handle(prepare(), 99.0)
    assert sender.handle(events.Withdraw(NONCE), 100.0) == []
    assert sender.handle(ask(), 100.1) == denied("no such offer: used, expired, or never made")


def test_what_was_never_prepared_cannot_be_withdrawn_and_need_not(sender: Sender) -> None:
    assert sender.handle(events.Withdraw(NONCE), 100.0) == []


def test_an_offer_that_is_out_cannot_be_prepared_again(offered: Sender) -> None:
    with pytest.raises(LocalProtocolError, match="request 'p1' is OFFERED already"):
        offered.handle(prepare(), 101.0)


def test_an_offer_that_is_out_cannot_go_out_again(offered: Sender) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        offered.handle(events.Offer(NONCE, P1), 101.0)
    assert str(raised.value) == (
        "offer of request 'p1' cannot be TICKET_OUT in state OFFERED; "
        "allowed: ['CLAIMED', 'GIVEN_UP', 'UNCLAIMED', 'REVOKED']"
    )
    assert offered.handle(Tick(), 100.0 + TTL_S) == [Sent(P1, How.UNCLAIMED)]


@pytest.mark.parametrize("state", ["offered", "granted"])
def test_an_offer_that_is_out_cannot_be_withdrawn(
    state: str, request: pytest.FixtureRequest
) -> None:
    """And is as it was after the attempt."""
    sender: Sender = request.getfixturevalue(state)
    with pytest.raises(LocalProtocolError, match=f"cannot be NO_TICKET in state {state.upper()}"):
        sender.handle(events.Withdraw(NONCE), 101.0)
    assert len(sender.handle(ask(number=2), 101.0)) > 0
    assert sender.handle(done(), 101.1) == RELEASED


# The book


def test_the_book_says_what_is_going_on(sender: Sender) -> None:
    seen = [(repr(sender.offers), sender.offers.timed, sender.offers.granted)]
    for event in (prepare(), events.Offer(NONCE, P1), ask(), done()):
        sender.handle(event, 100.0)
        seen.append((repr(sender.offers), sender.offers.timed, sender.offers.granted))
    assert seen == [
        ("<Offers: none>", False, False),
        ("<Offers: 1 PREPARED>", False, False),
        ("<Offers: 1 OFFERED>", True, False),
        ("<Offers: 1 GRANTED>", True, True),
        ("<Offers: none>", False, False),
    ]


def test_the_book_counts_states(granted: Sender) -> None:
    for number in (2, 3):
        granted.handle(prepare(nonce=Nonce(hex32(number)), request=P2), 100.0)
    assert repr(granted.offers) == "<Offers: 1 GRANTED, 2 PREPARED>"
    assert granted.offers.timed
    assert granted.offers.granted


def test_an_offer_is_found_while_it_lives(granted: Sender) -> None:
    offer = granted.offers.get(NONCE)
    assert offer is not None
    assert (offer.request, offer.state) == (P1, State.GRANTED)
    granted.handle(done(), 100.1)
    assert granted.offers.get(NONCE) is None
    assert offer.state is State.RELEASED


def test_settling_what_was_never_granted_does_nothing(offered: Sender) -> None:
    offer = offered.offers.get(NONCE)
    assert offer is not None
    assert offered.offers.settle(offer, How.READ) == []


def offering(**changed: object) -> Offering:
    made = Offering(NONCE, P1, hex32(0), 1, ())
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def binding(ended: set[Rank] | None = None, slot: int = 0) -> Binding:
    engine = (READER.engine, READER.incarnation)
    return Binding(CLAIM, engine, slot, generation(1), {Rank(0): 1.0}, ended=ended or set())


@pytest.mark.parametrize(
    ("offer", "error"),
    [
        pytest.param(offering(state=State.GRANTED), "GRANTED with binding None", id="unbound"),
        pytest.param(offering(binding=binding()), "PREPARED with binding", id="bound"),
        pytest.param(offering(state=State.OFFERED), "OFFERED with an end at None", id="endless"),
        pytest.param(offering(ends_at=1.0), "PREPARED with an end at 1.0", id="ends early"),
        pytest.param(
            offering(state=State.GRANTED, binding=binding({Rank(0)})),
            "GRANTED, but all readers have ended",
            id="not released",
        ),
    ],
)
def test_an_offer_that_contradicts_itself_is_found(offer: Offering, error: str) -> None:
    with pytest.raises(LocalProtocolError, match=error):
        offer.validate()


def test_the_book_checks_its_offers(sender: Sender) -> None:
    sender.offers._offers[NONCE] = offering(ends_at=1.0)
    with pytest.raises(LocalProtocolError, match="PREPARED with an end"):
        sender.offers.validate()
    sender.offers._offers.clear()


@pytest.mark.parametrize(
    "free", [pytest.param([0, 1, 2], id="lost"), pytest.param([0, 1, 2, 3, 3], id="freed twice")]
)
def test_a_slot_that_is_lost_is_found(sender: Sender, free: list[int]) -> None:
    sender.offers._free_slots = free
    with pytest.raises(LocalProtocolError, match=r"slots \[\] granted, \[0, 1, 2"):
        sender.offers.validate()
    sender.offers._free_slots = [0, 1, 2, 3]


def test_the_table_of_an_offers_life() -> None:
    moves = {
        (state.name, cause.name): following.name
        for state, causes in TRANSITIONS.items()
        for cause, following in causes.items()
    }
    assert moves == {
        ("PREPARED", "TICKET_OUT"): "OFFERED",
        ("PREPARED", "CLAIMED"): "GRANTED",
        ("PREPARED", "GIVEN_UP"): "RELEASED",
        ("PREPARED", "NO_TICKET"): "WITHDRAWN",
        ("OFFERED", "CLAIMED"): "GRANTED",
        ("OFFERED", "GIVEN_UP"): "RELEASED",
        ("OFFERED", "UNCLAIMED"): "EXPIRED",
        ("OFFERED", "REVOKED"): "EXPIRED",
        ("GRANTED", "TICKET_OUT"): "GRANTED",
        ("GRANTED", "REVOKED"): "GRANTED",
        ("GRANTED", "ALL_ENDED"): "RELEASED",
    }
    assert set(TRANSITIONS) == set(State)
    assert {State.RELEASED, State.EXPIRED, State.WITHDRAWN} == sending.TERMINAL


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.name)
def test_no_move_but_those_of_the_table(state: State, cause: Cause) -> None:
    offer = offering(state=state)
    following = TRANSITIONS[state].get(cause)
    if following is None:
        with pytest.raises(LocalProtocolError, match=f"{cause.name} in state {state.name}"):
            offer.move(cause)
        following = state
    else:
        offer.move(cause)
    assert offer.state is following


def test_ranks_of_one_engine_have_lives_of_their_own(offered: Sender) -> None:
    """Two readers of one claim, each with its own incarnation; a third life is nobody's."""
    readers = [Reader(READER.engine, hex32(0xD0 + rank), rank) for rank in range(2)]
    for reader in readers:
        actions = offered.handle(ask(reader=reader, readers=(0, 1)), 100.1)
        assert any(isinstance(action, Reply) for action in actions)
        assert not any(isinstance(action, events.Denied) for action in actions)
    impostor = Reader(READER.engine, hex32(0xD9), 1)
    assert offered.handle(done(reader=impostor), 100.2) == []
    assert offered.handle(done(reader=readers[0]), 100.3) == []
    assert offered.handle(done(reader=readers[1]), 100.4) == RELEASED
