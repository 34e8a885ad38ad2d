"""The book of offers: states, slots, timers, and the transitions that it records."""

from collections.abc import Iterator

import pytest

from harness.local.offers import check_prefill, check_ring
from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Claim, FenceToken, Nonce, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import (
    OVER,
    OfferEnd,
    OfferEnded,
    ReclaimBlocks,
    Record,
    Tick,
    Transition,
)
from nixl_kv.protocol.prefill import Binding, PrefillMachine, RingBook, State
from support.records import (
    CLAIM,
    DECODE,
    HOLD_S,
    LEASE_S,
    NONCE,
    NONCE2,
    P1,
    P2,
    RANK_LIFE,
    READER,
    RIVAL,
    STRANGER,
    ask,
    asked,
    hex32,
    no_record,
    pack_request,
    prepare_offer,
    publish_offer,
    reader,
    recall,
    release,
    renew,
    replied,
)

TTL_S = 10.0


def new_machine(record: Record, num_slots: int) -> PrefillMachine:
    return PrefillMachine(
        RANK_LIFE,
        record,
        num_slots=num_slots,
        offer_ttl_s=TTL_S,
        lease_s=LEASE_S,
        hold_s=HOLD_S,
    )


@pytest.fixture
def recorded() -> list[Transition]:
    return []


@pytest.fixture
def machine(recorded: list[Transition]) -> Iterator[PrefillMachine]:
    machine = new_machine(recorded.append, num_slots=2)
    yield machine
    check_prefill(machine)


# What it says of itself


def test_the_book_has_offers_and_says_whether_time_matters(machine: PrefillMachine) -> None:
    seen: list[tuple[list[State], bool, bool]] = []
    for event in (None, prepare_offer(), publish_offer(), asked(ask()), asked(release())):
        if event is not None:
            machine.handle(event, 100.0)
        states = [offer.state for offer in machine.offers.values()]
        seen.append((states, machine.next_due is not None, machine.any_granted))
    assert seen == [
        ([], False, False),
        ([State.PREPARED], False, False),
        ([State.OFFERED], True, False),
        ([State.GRANTED], True, True),
        ([], False, False),
    ]


def test_an_ask_changes_the_state_of_its_offer_alone(machine: PrefillMachine) -> None:
    for number in (1, 2, 3):
        machine.handle(prepare_offer(nonce=Nonce(hex32(number)), request=P2), 100.0)
    machine.handle(asked(ask()), 100.0)
    states = {offer.nonce: offer.state for offer in machine.offers.values()}
    assert states.pop(NONCE) is State.GRANTED
    assert set(states.values()) == {State.PREPARED}


def test_an_offer_is_in_the_book_while_it_lives(machine: PrefillMachine) -> None:
    assert machine.offers.get(NONCE) is None
    machine.handle(prepare_offer(), 100.0)
    offer = machine.offers.get(NONCE)
    assert offer is not None
    assert (offer.request, offer.state) == (P1, State.PREPARED)
    assert list(machine.offers.values()) == [offer]
    machine.handle(asked(release()), 100.1)
    assert machine.offers.get(NONCE) is None
    assert list(machine.offers.values()) == []


def test_a_reader_holds_what_is_granted_to_it(machine: PrefillMachine) -> None:
    for nonce, request in ((NONCE, P1), (NONCE2, P2)):
        machine.handle(prepare_offer(nonce=nonce, request=request), 100.0)
    machine.handle(asked(ask(readers=(0, 1))), 100.0)
    held = {
        name: [offer.request for offer, _ in machine.held_by(who)]
        for name, who in (("first", READER), ("second", reader(1)), ("stranger", STRANGER))
    }
    assert held == {"first": [P1], "second": [P1], "stranger": []}
    machine.handle(asked(release()), 100.1)
    assert list(machine.held_by(READER)) == []


def test_settling_an_unclaimed_offer_does_nothing(machine: PrefillMachine) -> None:
    machine.handle(prepare_offer(), 100.0)
    offer = machine.offers.get(NONCE)
    assert offer is not None
    assert machine.settle(offer, release(), OfferEnd.READ) == []


# What it checks


def test_the_book_checks_its_offers() -> None:
    machine = new_machine(no_record, num_slots=2)
    machine.handle(prepare_offer(), 100.0)
    offer = machine.offers.get(NONCE)
    assert offer is not None
    check_prefill(machine)
    offer.ends_at = 1.0
    with pytest.raises(LocalProtocolError, match="PREPARED with an end"):
        check_prefill(machine)


@pytest.mark.parametrize(
    ("free", "bound"),
    [
        pytest.param([0], [], id="lost"),
        pytest.param([0, 1, 1], [], id="free twice"),
        pytest.param([0, 1], [1], id="free and granted"),
        pytest.param([], [1, 1], id="granted twice"),
    ],
)
def test_the_book_checks_that_each_slot_is_granted_once_or_free(
    free: list[int], bound: list[int]
) -> None:
    machine = new_machine(no_record, num_slots=2)
    for number, slot in enumerate(bound):
        nonce = Nonce(hex32(number))
        machine.handle(prepare_offer(nonce=nonce), 100.0)
        offer = machine.offers.get(nonce)
        assert offer is not None
        offer.state = State.GRANTED
        leases = {Rank(0): 1.0}
        offer.binding = Binding(CLAIM, DECODE, slot, FenceToken(bytes(16)), leases, held_until=9.0)
    machine.free_slots = free
    with pytest.raises(LocalProtocolError) as raised:
        check_prefill(machine)
    assert str(raised.value) == f"slots {bound} granted, {free} free"


# What it records

PREPARED = Transition(P1, "", "", "PREPARED", "PrepareOffer: offer 00000000")
PUBLISHED = Transition(P1, "", "PREPARED", "OFFERED", "PublishOffer")
GRANTED = Transition(P1, "engine 'decode', rank 0", "OFFERED", "GRANTED", "Ask")


CLAIMED: list[events.PrefillEvent] = [prepare_offer(), publish_offer(), asked(ask())]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param(
            [*CLAIMED, asked(release())],
            [
                *[PREPARED, PUBLISHED, GRANTED],
                Transition(P1, "engine 'decode'", "GRANTED", OVER, "Release: read"),
            ],
            id="read",
        ),
        pytest.param(
            [prepare_offer(), asked(ask()), publish_offer()],
            [
                PREPARED,
                GRANTED._replace(before="PREPARED"),
            ],
            id="claimed before it is published",
        ),
    ],
)
def test_each_transition_of_an_offer_is_recorded_once(
    machine: PrefillMachine,
    recorded: list[Transition],
    steps: list[events.PrefillEvent],
    expected: list[Transition],
) -> None:
    for step in steps:
        machine.handle(step, 100.0)
    assert recorded == expected


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(asked(ask(number=2)), id="asked again"),
        pytest.param(asked(renew(2, CLAIM)), id="renewed"),
        pytest.param(asked(release(claim=RIVAL)), id="released by a stranger"),
        pytest.param(Tick(), id="nothing is due"),
    ],
)
def test_what_changes_no_state_is_not_recorded(
    machine: PrefillMachine, recorded: list[Transition], step: events.PrefillEvent
) -> None:
    for event in CLAIMED:
        machine.handle(event, 100.0)
    recorded.clear()
    machine.handle(step, 100.5)
    assert recorded == []


def test_a_denial_is_part_of_the_story_of_its_offer(
    machine: PrefillMachine, recorded: list[Transition]
) -> None:
    for event in CLAIMED:
        machine.handle(event, 100.0)
    recorded.clear()
    machine.handle(asked(ask(claim=RIVAL)), 100.5)
    cause = "Ask denied: claimed by another, or ended for this reader"
    assert recorded == [Transition(P1, "engine 'decode', rank 0", "GRANTED", "GRANTED", cause)]


def test_a_denial_of_an_unknown_offer_is_not_recorded(
    machine: PrefillMachine, recorded: list[Transition]
) -> None:
    machine.handle(asked(ask()), 100.0)
    assert recorded == []


# Which offers give their blocks back


def test_an_offer_is_recalled_once_from_an_engine_that_is_named(
    machine: PrefillMachine, recorded: list[Transition]
) -> None:
    for event in (prepare_offer(), publish_offer(), asked(ask())):
        machine.handle(event, 0.0)
    (offer,) = list(machine.offers.values())
    assert machine.recall(offer, Tick(), 1.0) == [replied(recall())]
    assert recorded[-1].peer == f"engine {DECODE!r}"
    assert machine.recall(offer, Tick(), 1.0) == []


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
    machine = new_machine(no_record, num_slots=8)
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


def test_no_chunk_waits_beside_free_slots_of_the_ring() -> None:
    ring = RingBook(2)
    assert ring.wait((NONCE, Rank(0)), b"route", pack_request())
    with pytest.raises(LocalProtocolError, match="waits beside 2 free slots"):
        check_ring(ring)
    assert [slot for _, slot in ring.pop_packable()] == [0]
    check_ring(ring)
