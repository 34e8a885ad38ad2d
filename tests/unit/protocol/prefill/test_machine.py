"""The prefill machine: what it answers, which slots it writes and clears, and when offers end."""

from collections.abc import Iterator
from typing import Any

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Generation, Incarnation, Nonce, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import (
    AskDenied,
    ClearSlot,
    DigestMade,
    MakeDigest,
    OfferEnd,
    OfferEnded,
    Tick,
    WithdrawOffer,
    WriteSlot,
)
from nixl_kv.protocol.messages import Ask, DigestRequest
from nixl_kv.protocol.prefill import offers
from nixl_kv.protocol.prefill.machine import PrefillMachine
from support.records import (
    CLAIM,
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
    prepare_offer,
    publish_offer,
    reader,
    release,
    renew,
    renewed,
    replied,
)

TTL_S = 10.0
FIRST_SLOT = 3
"""The slot that is granted first, of four."""
BOTH = (0, 1)
"""Two reader ranks under one claim."""
SECOND = reader(1)
OTHER_LIFE_OF_READER = reader(incarnation=OTHER_LIFE)
UNKNOWN = "no such offer: used, expired, or never made"
NOT_THIS_READER = "claimed by another, or ended for this reader"


def generation(number: int) -> Generation:
    return Generation(bytes([number]) * 16)


@pytest.fixture(autouse=True)
def counted_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1, 256))
    monkeypatch.setattr(offers, "new_generation", lambda: generation(next(numbers)))


def new_machine(
    life: Incarnation = RANK_LIFE, num_slots: int = 4, lease_s: float = LEASE_S
) -> PrefillMachine:
    return PrefillMachine(life, no_record, num_slots=num_slots, offer_ttl_s=TTL_S, lease_s=lease_s)


@pytest.fixture
def machine() -> Iterator[PrefillMachine]:
    machine = new_machine()
    yield machine
    machine.offers.validate()


@pytest.fixture
def offered(machine: PrefillMachine) -> PrefillMachine:
    """Its one offer was published at second 100."""
    assert machine.handle(prepare_offer(), 99.0) == []
    assert machine.handle(publish_offer(), 100.0) == []
    return machine


@pytest.fixture
def granted(offered: PrefillMachine) -> PrefillMachine:
    """Its offer is granted to the first reader alone, at second 100, by an ask numbered 1."""
    offered.handle(asked(ask()), 100.0)
    return offered


@pytest.fixture
def shared(offered: PrefillMachine) -> PrefillMachine:
    """Its offer is granted to two reader ranks, at second 100; the second has not asked."""
    offered.handle(asked(ask(readers=BOTH)), 100.0)
    return offered


WRITTEN = WriteSlot(FIRST_SLOT, generation(1))
GRANTED = replied(grant())
READ = [ClearSlot(FIRST_SLOT), OfferEnded(NONCE, P1, OfferEnd.READ)]
ABORTED = [ClearSlot(FIRST_SLOT), OfferEnded(NONCE, P1, OfferEnd.ABORTED)]
EXPIRED = [ClearSlot(FIRST_SLOT), OfferEnded(NONCE, P1, OfferEnd.EXPIRED)]


def denied(reason: str, **changed: Any) -> list[events.Action]:
    return [AskDenied(changed.get("nonce", NONCE), reason), replied(deny(**changed))]


# Grants


def test_the_slot_is_written_before_the_grant_is_sent(offered: PrefillMachine) -> None:
    assert offered.handle(asked(ask()), 100.0) == [WRITTEN, GRANTED]
    assert offered.handle(asked(release()), 100.1) == READ


def test_each_answer_goes_back_by_the_route_of_its_message(offered: PrefillMachine) -> None:
    assert offered.handle(asked(ask(), b"first"), 100.0)[-1] == replied(grant(), b"first")
    assert offered.handle(asked(ask(), b"second"), 100.1) == [replied(grant(), b"second")]
    renewal = asked(renew(2, CLAIM), b"third")
    assert offered.handle(renewal, 100.2) == [replied(renewed(), b"third")]
    wrong = asked(ask(claim=RIVAL), b"fourth")
    assert offered.handle(wrong, 100.3)[-1] == replied(deny(claim=RIVAL), b"fourth")


def test_an_ask_that_overtakes_the_publication_is_granted(machine: PrefillMachine) -> None:
    """Whoever has the nonce has the ticket."""
    machine.handle(prepare_offer(), 99.0)
    assert machine.handle(asked(ask()), 99.5) == [WRITTEN, GRANTED]
    assert machine.handle(publish_offer(), 100.0) == []
    assert machine.handle(Tick(), 99.5 + LEASE_S - 0.1) == []
    assert machine.handle(asked(release()), 101.4) == READ


def test_a_reader_may_end_before_the_publication(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 99.0)
    machine.handle(asked(ask()), 99.5)
    assert machine.handle(asked(release()), 99.6) == READ
    assert machine.handle(publish_offer(), 100.0) == []
    assert len(machine.offers) == 0


def test_a_repeated_ask_gets_the_same_grant_and_a_new_lease(granted: PrefillMachine) -> None:
    assert granted.handle(asked(ask(number=2)), 101.0) == [GRANTED]
    assert granted.handle(Tick(), 101.0 + LEASE_S - 0.01) == []
    assert granted.handle(Tick(), 101.0 + LEASE_S) == EXPIRED


def test_after_a_preemption_the_new_blocks_are_granted(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 98.0)
    tables = (b"\1\0\0\0", b"\2\0\0\0")
    machine.handle(prepare_offer(tables=tables, num_tokens=4), 99.0)
    assert machine.handle(asked(ask()), 100.0) == [WRITTEN, replied(grant(tables=tables))]
    end = asked(digest_request(end=5))
    assert machine.handle(end, 100.1) == denied("a digest up to token 5 of 4")


def test_each_offer_has_a_slot_and_a_generation_of_its_own(granted: PrefillMachine) -> None:
    granted.handle(prepare_offer(nonce=NONCE2, request=P2), 100.0)
    assert granted.handle(asked(ask(nonce=NONCE2, claim=RIVAL)), 100.0) == [
        WriteSlot(2, generation(2)),
        replied(grant(nonce=NONCE2, claim=RIVAL, slot=2, generation=generation(2))),
    ]


def test_a_slot_that_is_used_again_gets_a_new_generation(granted: PrefillMachine) -> None:
    granted.handle(asked(release()), 100.1)
    granted.handle(prepare_offer(nonce=NONCE2, request=P2), 100.2)
    assert granted.handle(asked(ask(nonce=NONCE2)), 100.3) == [
        WriteSlot(FIRST_SLOT, generation(2)),
        replied(grant(nonce=NONCE2, slot=FIRST_SLOT, generation=generation(2))),
    ]


@pytest.mark.parametrize("seconds", [0.5, 3600.0])
def test_the_grant_says_how_long_the_lease_is(seconds: float) -> None:
    machine = new_machine(lease_s=seconds)
    machine.handle(prepare_offer(), 100.0)
    assert machine.handle(asked(ask()), 100.0)[1] == replied(grant(lease_s=seconds))


# Denials


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(ask(nonce=NONCE2), denied(UNKNOWN, nonce=NONCE2), id="unknown nonce"),
        pytest.param(ask(context=hex32(7)), denied("another prompt"), id="other prompt"),
        pytest.param(
            ask(incarnation=OTHER_LIFE), denied("meant for incarnation 00000000"), id="other life"
        ),
        pytest.param(
            ask(readers=(1, 2)),
            denied("rank 0 is not among its own readers"),
            id="reader that does not read",
        ),
    ],
)
def test_a_denied_ask_leaves_the_offer_as_it_was(
    offered: PrefillMachine, message: Ask, expected: list[events.Action]
) -> None:
    assert offered.handle(asked(message), 100.0) == expected
    assert offered.handle(asked(ask()), 100.0) == [WRITTEN, GRANTED]


def test_a_denial_names_the_life_that_denies() -> None:
    assert new_machine(OTHER_LIFE).handle(asked(ask()), 100.0) == [
        AskDenied(NONCE, "meant for incarnation 00000000"),
        replied(deny(incarnation=OTHER_LIFE)),
    ]


def test_a_reason_shows_at_most_eight_digits_of_an_incarnation() -> None:
    life = "abcdef01" + "2" * 24
    report, _ = new_machine().handle(asked(ask(incarnation=life)), 100.0)
    assert report == AskDenied(NONCE, "meant for incarnation abcdef01")


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(ask(claim=RIVAL), id="another claim"),
        pytest.param(ask(reader=STRANGER), id="another engine"),
        pytest.param(ask(reader=OTHER_LIFE_OF_READER), id="another life of the engine"),
        pytest.param(ask(reader=SECOND, readers=BOTH), id="a rank that was not announced"),
    ],
)
def test_only_the_first_claim_is_granted(granted: PrefillMachine, message: Ask) -> None:
    assert granted.handle(asked(message), 100.5) == denied(
        NOT_THIS_READER, claim=message.claim, reader=message.reader
    )
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


def test_an_ask_after_the_end_is_denied(granted: PrefillMachine) -> None:
    granted.handle(asked(release()), 100.1)
    assert granted.handle(asked(ask(number=2)), 100.2) == denied(UNKNOWN)


def test_without_a_free_slot_an_ask_is_denied_until_one_is_cleared() -> None:
    machine = new_machine(num_slots=1)
    machine.handle(prepare_offer(), 100.0)
    machine.handle(prepare_offer(nonce=NONCE2, request=P2), 100.0)
    assert machine.handle(asked(ask()), 100.0)[0] == WriteSlot(0, generation(1))
    second = asked(ask(nonce=NONCE2, claim=RIVAL))
    assert machine.handle(second, 100.0) == denied(
        "all generation slots are granted", nonce=NONCE2, claim=RIVAL
    )
    assert machine.handle(asked(release()), 100.1) == [
        ClearSlot(0),
        OfferEnded(NONCE, P1, OfferEnd.READ),
    ]
    assert machine.handle(second, 100.2)[0] == WriteSlot(0, generation(2))
    machine.offers.validate()


# Releases


def test_the_offer_ends_when_each_reader_has_released_it(shared: PrefillMachine) -> None:
    second = asked(ask(reader=SECOND, readers=BOTH))
    assert shared.handle(second, 100.5) == [replied(grant(reader=SECOND))]
    assert shared.handle(asked(release()), 101.0) == []
    assert shared.handle(asked(release(reader=SECOND)), 101.1) == READ


def test_a_repeated_release_ends_one_reader(shared: PrefillMachine) -> None:
    assert shared.handle(asked(release()), 100.5) == []
    assert shared.handle(asked(release()), 100.6) == []
    assert shared.handle(asked(release(complete=False)), 100.7) == []
    assert shared.handle(asked(release(complete=False, reader=SECOND)), 100.8) == ABORTED


def test_a_reader_that_has_ended_is_denied_while_others_read(shared: PrefillMachine) -> None:
    shared.handle(asked(release()), 100.5)
    assert shared.handle(asked(ask(number=2, readers=BOTH)), 100.6) == denied(NOT_THIS_READER)


def test_a_reader_may_release_before_it_has_asked(shared: PrefillMachine) -> None:
    assert shared.handle(asked(release(complete=False, reader=SECOND)), 100.5) == []
    assert shared.handle(asked(release()), 100.6) == READ


def test_ranks_of_one_engine_may_have_different_incarnations(offered: PrefillMachine) -> None:
    """Two readers of one claim, each with its own; a third is nobody's."""
    readers = [reader(rank, incarnation=Incarnation(hex32(0xD0 + rank))) for rank in range(2)]
    for each in readers:
        actions = offered.handle(asked(ask(reader=each, readers=BOTH)), 100.1)
        assert actions[-1] == replied(grant(reader=each))
    impostor = reader(1, incarnation=Incarnation(hex32(0xD9)))
    assert offered.handle(asked(release(reader=impostor)), 100.2) == []
    assert offered.handle(asked(release(reader=readers[0])), 100.3) == []
    assert offered.handle(asked(release(reader=readers[1])), 100.4) == READ


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "incomplete"])
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"claim": RIVAL}, id="of another claim"),
        pytest.param({"reader": STRANGER}, id="of a stranger"),
        pytest.param({"reader": OTHER_LIFE_OF_READER}, id="of another life of the reader"),
        pytest.param({"reader": SECOND}, id="of a rank that was not announced"),
        pytest.param({"incarnation": OTHER_LIFE}, id="for another life"),
        pytest.param({"nonce": NONCE2}, id="of another offer"),
    ],
)
def test_nobody_else_ends_what_a_reader_reads(
    granted: PrefillMachine, changed: dict[str, Any], *, complete: bool
) -> None:
    assert granted.handle(asked(release(complete=complete, **changed)), 100.5) == []
    assert granted.handle(asked(release()), 100.6) == READ


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "incomplete"])
def test_an_offer_ends_once(granted: PrefillMachine, *, complete: bool) -> None:
    granted.handle(asked(release()), 100.5)
    assert granted.handle(asked(release(complete=complete)), 100.6) == []
    assert granted.handle(Tick(), 1000.0) == []


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "incomplete"])
def test_a_release_of_an_unclaimed_offer_ends_it(
    offered: PrefillMachine, *, complete: bool
) -> None:
    """Complete where this rank has no reader; incomplete where the engine gives up."""
    assert offered.handle(asked(release(complete=complete)), 100.5) == [
        OfferEnded(NONCE, P1, OfferEnd.NOT_NEEDED)
    ]
    assert offered.handle(asked(ask()), 100.6) == denied(UNKNOWN)
    assert offered.handle(Tick(), 1000.0) == []


def test_a_release_may_overtake_the_publication(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 99.0)
    assert machine.handle(asked(release(complete=False)), 99.5) == [
        OfferEnded(NONCE, P1, OfferEnd.NOT_NEEDED)
    ]
    assert machine.handle(publish_offer(), 100.0) == []


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "incomplete"])
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"incarnation": OTHER_LIFE}, id="for another life"),
        pytest.param({"nonce": NONCE2}, id="of another offer"),
    ],
)
def test_a_release_of_something_else_leaves_an_unclaimed_offer(
    offered: PrefillMachine, changed: dict[str, Any], *, complete: bool
) -> None:
    assert offered.handle(asked(release(complete=complete, **changed)), 100.5) == []
    assert offered.handle(asked(ask()), 100.6) == [WRITTEN, GRANTED]


# Time


def test_an_unclaimed_offer_ends_after_its_time(offered: PrefillMachine) -> None:
    assert offered.handle(Tick(), 100.0 + TTL_S - 0.01) == []
    assert offered.handle(Tick(), 100.0 + TTL_S) == [OfferEnded(NONCE, P1, OfferEnd.UNCLAIMED)]


def test_an_offer_has_no_end_before_it_is_published(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 0.0)
    assert machine.handle(Tick(), 1000.0) == []
    assert machine.handle(publish_offer(), 1000.0) == []
    assert machine.handle(Tick(), 1000.0 + TTL_S) == [OfferEnded(NONCE, P1, OfferEnd.UNCLAIMED)]


def test_a_claimed_offer_outlives_its_time(offered: PrefillMachine) -> None:
    offered.handle(asked(ask()), 100.0 + TTL_S - 0.5)
    assert offered.handle(Tick(), 100.0 + TTL_S) == []


def test_the_first_ask_starts_the_lease_of_every_expected_reader(shared: PrefillMachine) -> None:
    """Also of one that never asks: its engine may be dead."""
    shared.handle(asked(release()), 100.1)
    assert shared.handle(Tick(), 100.0 + LEASE_S - 0.01) == []
    assert shared.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


def test_leases_run_out_one_by_one(shared: PrefillMachine) -> None:
    shared.handle(asked(ask(reader=SECOND, readers=BOTH)), 101.0)
    assert shared.handle(Tick(), 100.0 + LEASE_S) == []
    assert shared.handle(asked(ask(number=2, readers=BOTH)), 102.5) == denied(NOT_THIS_READER)
    assert shared.handle(Tick(), 101.0 + LEASE_S) == EXPIRED


def test_several_offers_end_in_one_tick_each_slot_before_its_blocks(
    granted: PrefillMachine,
) -> None:
    nonce3, request3 = Nonce(hex32(3)), RequestId("p3")
    granted.handle(prepare_offer(nonce=NONCE2, request=P2), 100.0)
    granted.handle(asked(ask(nonce=NONCE2)), 100.0)
    granted.handle(prepare_offer(nonce=nonce3, request=request3), 90.0)
    granted.handle(publish_offer(nonce3, request3), 90.0)
    assert granted.handle(Tick(), 102.0) == [
        ClearSlot(3),
        OfferEnded(NONCE, P1, OfferEnd.EXPIRED),
        ClearSlot(2),
        OfferEnded(NONCE2, P2, OfferEnd.EXPIRED),
        OfferEnded(nonce3, request3, OfferEnd.UNCLAIMED),
    ]


# Digests

NOT_GRANTED = "a digest of what is not granted to it"
RELEASED_MEANWHILE = "it was released while it was digested"


def digest_made(request: DigestRequest, refusal: str | None = None) -> DigestMade:
    if refusal is not None:
        return DigestMade(ROUTE, request, refusal=refusal)
    return DigestMade(ROUTE, request, rows=SUMS * 4, columns=SUMS)


def test_what_is_granted_is_digested(granted: PrefillMachine) -> None:
    request = digest_request()
    assert granted.handle(asked(request), 100.5) == [MakeDigest(ROUTE, request, TABLES)]
    assert granted.is_digest_wanted(request)
    assert granted.handle(digest_made(request), 100.6) == [replied(digest_reply())]


def test_a_digest_goes_back_by_the_route_of_its_request(granted: PrefillMachine) -> None:
    request = digest_request()
    granted.handle(asked(ask(), b"later"), 100.4)
    assert granted.handle(asked(request, b"first"), 100.5) == [
        MakeDigest(b"first", request, TABLES)
    ]
    event = DigestMade(b"first", request, rows=SUMS * 4, columns=SUMS)
    assert granted.handle(event, 100.6) == [replied(digest_reply(), b"first")]


def test_all_tokens_of_the_prompt_may_be_digested(granted: PrefillMachine) -> None:
    request = digest_request(end=8)
    assert granted.handle(asked(request), 100.5) == [MakeDigest(ROUTE, request, TABLES)]


def test_tokens_behind_the_prompt_are_not_digested(granted: PrefillMachine) -> None:
    """There the last block may hold what belongs to another prompt."""
    request = asked(digest_request(end=9))
    assert granted.handle(request, 100.5) == denied("a digest up to token 9 of 8")


def test_a_repeated_request_is_digested_again(granted: PrefillMachine) -> None:
    """Whether that is under way already is for the data plane to know."""
    request = digest_request()
    for _ in range(2):
        assert granted.handle(asked(request), 100.5) == [MakeDigest(ROUTE, request, TABLES)]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(digest_request(claim=RIVAL), id="another claim"),
        pytest.param(digest_request(reader=STRANGER), id="another engine"),
        pytest.param(digest_request(reader=OTHER_LIFE_OF_READER), id="another life of the reader"),
        pytest.param(digest_request(reader=SECOND), id="a rank that was not announced"),
        pytest.param(digest_request(nonce=NONCE2), id="another offer"),
        pytest.param(digest_request(incarnation=OTHER_LIFE), id="another life of this rank"),
    ],
)
def test_nobody_else_gets_a_digest(granted: PrefillMachine, request_: DigestRequest) -> None:
    changed = {"nonce": request_.nonce, "claim": request_.claim, "reader": request_.reader}
    assert granted.handle(asked(request_), 100.5) == denied(NOT_GRANTED, **changed)
    assert not granted.is_digest_wanted(request_)
    assert granted.handle(digest_made(request_), 100.6) == denied(RELEASED_MEANWHILE, **changed)


def test_a_reader_that_has_not_asked_gets_no_digest(shared: PrefillMachine) -> None:
    """Or else it could ask as any number of lives, each of them for a digest of its own."""
    request = digest_request(reader=SECOND)
    assert shared.handle(asked(request), 100.5) == denied(NOT_GRANTED, reader=SECOND)
    assert not shared.is_digest_wanted(request)
    shared.handle(asked(ask(reader=SECOND, readers=BOTH)), 100.6)
    assert shared.handle(asked(request), 100.7) == [MakeDigest(ROUTE, request, TABLES)]
    assert shared.is_digest_wanted(request)
    assert not shared.is_digest_wanted(digest_request(reader=reader(1, incarnation=OTHER_LIFE)))


def test_nothing_is_digested_before_it_is_granted(offered: PrefillMachine) -> None:
    assert offered.handle(asked(digest_request()), 100.5) == denied(NOT_GRANTED)


def test_after_a_preemption_the_new_blocks_are_digested(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 98.0)
    tables = (b"\1\0\0\0", b"\2\0\0\0")
    machine.handle(prepare_offer(tables=tables), 99.0)
    machine.handle(asked(ask()), 100.0)
    request = digest_request()
    assert machine.handle(asked(request), 100.5) == [MakeDigest(ROUTE, request, tables)]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(asked(release()), id="released, complete"),
        pytest.param(asked(release(complete=False)), id="released, incomplete"),
        pytest.param(asked(renew(2)), id="no longer renewed"),
        pytest.param(Tick(), id="lease run out"),
    ],
)
def test_a_digest_of_released_blocks_is_not_sent(
    granted: PrefillMachine, event: events.PrefillEvent
) -> None:
    """They may have been written meanwhile: the digest may be of anything."""
    granted.handle(asked(digest_request()), 100.5)
    granted.handle(event, 100.0 + LEASE_S)
    assert granted.handle(digest_made(digest_request()), 103.0) == denied(RELEASED_MEANWHILE)


def test_a_reader_that_has_ended_gets_no_digest_while_others_read(
    shared: PrefillMachine,
) -> None:
    shared.handle(asked(digest_request()), 100.5)
    shared.handle(asked(release()), 100.6)
    assert shared.handle(digest_made(digest_request()), 100.7) == denied(RELEASED_MEANWHILE)
    assert shared.handle(asked(digest_request()), 100.8) == denied(NOT_GRANTED)


def test_each_reader_gets_a_digest_of_its_own(shared: PrefillMachine) -> None:
    shared.handle(asked(ask(reader=SECOND, readers=BOTH)), 100.5)
    second = digest_request(reader=SECOND)
    shared.handle(asked(digest_request()), 100.6)
    shared.handle(asked(second), 100.6)
    assert shared.handle(digest_made(second), 100.7) == [replied(digest_reply(reader=SECOND))]
    assert shared.handle(digest_made(digest_request()), 100.8) == [replied(digest_reply())]


def test_why_something_cannot_be_digested_stays_on_this_side(granted: PrefillMachine) -> None:
    granted.handle(asked(digest_request()), 100.5)
    reason = "layer 'layer.9' is not on this rank"
    assert granted.handle(digest_made(digest_request(), reason), 100.6) == denied(reason)
    assert granted.handle(asked(release()), 100.7) == READ


def test_a_digest_does_not_extend_the_lease(granted: PrefillMachine) -> None:
    """The reader renews all the same."""
    granted.handle(asked(digest_request()), 101.0)
    granted.handle(digest_made(digest_request()), 101.5)
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


# Renewals


def test_a_renewal_extends_the_lease(granted: PrefillMachine) -> None:
    assert granted.handle(asked(renew(2, CLAIM)), 101.5) == [replied(renewed())]
    assert granted.handle(Tick(), 101.5 + LEASE_S - 0.01) == []
    assert granted.handle(Tick(), 101.5 + LEASE_S) == EXPIRED


def test_a_renewal_extends_the_lease_of_its_reader_alone(shared: PrefillMachine) -> None:
    assert shared.handle(asked(renew(2, CLAIM)), 101.5) == [replied(renewed())]
    shared.handle(Tick(), 100.0 + LEASE_S)
    assert shared.handle(asked(renew(2, CLAIM, reader=SECOND)), 102.1) == [
        replied(renewed(CLAIM, reader=SECOND))
    ]
    assert shared.handle(asked(release()), 102.2) == READ


def test_a_claim_that_a_newer_renewal_lacks_is_released(granted: PrefillMachine) -> None:
    assert granted.handle(asked(renew(2)), 100.5) == [*ABORTED, replied(renewed())]


@pytest.mark.parametrize(
    "number", [pytest.param(0, id="older than the ask"), pytest.param(1, id="numbered as the ask")]
)
def test_a_claim_that_an_older_renewal_lacks_is_kept(granted: PrefillMachine, number: int) -> None:
    assert granted.handle(asked(renew(number)), 100.5) == [replied(renewed())]
    assert granted.handle(asked(release()), 100.6) == READ


def test_a_repeated_ask_outdates_the_renewals_before_it(granted: PrefillMachine) -> None:
    granted.handle(asked(ask(number=5)), 100.5)
    assert granted.handle(asked(renew(4)), 100.6) == [replied(renewed())]
    granted.handle(asked(ask(number=2)), 100.7)
    assert granted.handle(asked(renew(4)), 100.8) == [replied(renewed())]
    assert granted.handle(asked(renew(6)), 100.9) == [*ABORTED, replied(renewed())]


def test_a_renewal_of_a_reader_that_has_not_asked_releases_nothing(
    shared: PrefillMachine,
) -> None:
    """Its ask may be on its way, with a number that prefill does not know."""
    renewal = asked(renew(9, reader=SECOND))
    assert shared.handle(renewal, 100.5) == [replied(renewed(reader=SECOND))]
    second = asked(ask(reader=SECOND, readers=BOTH))
    assert shared.handle(second, 100.6) == [replied(grant(reader=SECOND))]


def test_one_reader_gives_up_and_the_other_reads_on(shared: PrefillMachine) -> None:
    assert shared.handle(asked(renew(2)), 100.5) == [replied(renewed())]
    assert shared.handle(asked(release(reader=SECOND)), 100.6) == READ


def test_the_answer_to_a_renewal_names_what_is_lost(granted: PrefillMachine) -> None:
    unknown = Claim(hex32(9))
    assert granted.handle(asked(renew(2, RIVAL, CLAIM, unknown)), 100.5) == [
        replied(renewed(RIVAL, unknown))
    ]


def test_a_claim_that_has_ended_is_lost(granted: PrefillMachine) -> None:
    granted.handle(Tick(), 100.0 + LEASE_S)
    assert granted.handle(asked(renew(2, CLAIM)), 102.5) == [replied(renewed(CLAIM))]


def test_a_renewal_before_the_tick_saves_a_lease_that_has_run_out(
    granted: PrefillMachine,
) -> None:
    """The slot is still valid, so nothing was given away."""
    assert granted.handle(asked(renew(2, CLAIM)), 105.0) == [replied(renewed())]
    assert granted.handle(Tick(), 105.0) == []


@pytest.mark.parametrize("claims", [(), (CLAIM,)], ids=["without the claim", "with the claim"])
def test_a_stranger_renews_and_releases_nothing(
    granted: PrefillMachine, claims: tuple[Claim, ...]
) -> None:
    message = renew(9, *claims, reader=STRANGER)
    assert granted.handle(asked(message), 101.0) == [replied(renewed(*claims, reader=STRANGER))]
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


def test_renewals_do_not_touch_an_unclaimed_offer(offered: PrefillMachine) -> None:
    assert offered.handle(asked(renew(9, CLAIM)), 100.5) == [replied(renewed(CLAIM))]
    assert offered.handle(asked(ask()), 100.6) == [WRITTEN, GRANTED]


def test_to_a_renewal_for_another_life_all_claims_are_lost(granted: PrefillMachine) -> None:
    message = renew(2, RIVAL, CLAIM, incarnation=OTHER_LIFE)
    assert granted.handle(asked(message), 100.5) == [replied(renewed(RIVAL, CLAIM))]


@pytest.mark.parametrize("claim", [CLAIM, RIVAL], ids=["with the claim", "without the claim"])
def test_a_renewal_for_another_life_renews_and_releases_nothing(
    granted: PrefillMachine, claim: Claim
) -> None:
    """A restarted rank may have its port again, while reads of the old one are still stuck."""
    granted.handle(asked(renew(2, claim, incarnation=OTHER_LIFE)), 101.0)
    assert granted.handle(Tick(), 100.0 + LEASE_S - 0.01) == []
    assert granted.handle(Tick(), 100.0 + LEASE_S) == EXPIRED


# Commands


def test_an_unclaimed_offer_can_be_revoked(offered: PrefillMachine) -> None:
    revoke = events.RevokeOffer(NONCE)
    assert offered.handle(revoke, 100.5) == [OfferEnded(NONCE, P1, OfferEnd.REVOKED)]
    assert offered.handle(asked(ask()), 100.6) == denied(UNKNOWN)
    assert offered.handle(revoke, 100.7) == []


def test_a_granted_offer_cannot_be_revoked(granted: PrefillMachine) -> None:
    assert granted.handle(events.RevokeOffer(NONCE), 100.5) == []
    assert granted.handle(asked(ask(number=2)), 100.6) == [GRANTED]
    assert granted.handle(asked(release()), 100.7) == READ


def test_an_offer_without_a_ticket_cannot_be_revoked(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 99.0)
    with pytest.raises(LocalProtocolError, match="RevokeOffer leads from PREPARED to OVER"):
        machine.handle(events.RevokeOffer(NONCE), 99.5)
    assert machine.handle(publish_offer(), 100.0) == []


def test_a_withdrawn_offer_is_forgotten(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 99.0)
    assert machine.handle(WithdrawOffer(NONCE), 100.0) == []
    assert machine.handle(asked(ask()), 100.1) == denied(UNKNOWN)


def test_withdrawing_what_was_never_prepared_does_nothing(machine: PrefillMachine) -> None:
    assert machine.handle(WithdrawOffer(NONCE), 100.0) == []


@pytest.mark.parametrize("state", ["offered", "granted"])
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(prepare_offer(tables=(b"\1\0\0\0",)), id="prepared again"),
        pytest.param(WithdrawOffer(NONCE), id="withdrawn"),
    ],
)
def test_an_offer_whose_ticket_is_out_stays_as_it_is(
    state: str, command: events.PrefillCommand, request: pytest.FixtureRequest
) -> None:
    machine: PrefillMachine = request.getfixturevalue(state)
    words = f"{type(command).__name__} leads from {state.upper()} to "
    with pytest.raises(LocalProtocolError, match=words):
        machine.handle(command, 101.0)
    assert machine.handle(asked(ask(number=2)), 101.0)[-1] == GRANTED
    assert machine.handle(asked(release()), 101.1) == READ


def test_an_offer_cannot_be_published_twice(offered: PrefillMachine) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        offered.handle(publish_offer(), 101.0)
    assert str(raised.value) == (
        "offer of request 'p1': PublishOffer leads from OFFERED to OFFERED; "
        "allowed: ['Ask to GRANTED', 'Release to OVER', 'Tick to OVER', 'RevokeOffer to OVER']"
    )
    assert offered.handle(Tick(), 100.0 + TTL_S) == [OfferEnded(NONCE, P1, OfferEnd.UNCLAIMED)]


def test_a_cleared_machine_has_no_offer_and_all_slots(shared: PrefillMachine) -> None:
    shared.clear()
    shared.offers.validate()
    assert len(shared.offers) == 0
    assert shared.handle(asked(ask()), 101.0) == denied(UNKNOWN)
