"""The book of loads: what is due when, what is renewed, and that every started load is reported."""

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Incarnation, Rank
from nixl_kv.protocol import events
from nixl_kv.protocol.decode.load import ASK_AGAIN_S, DRAIN_S, SILENCE_S, State
from nixl_kv.protocol.decode.loads import LoadBook
from nixl_kv.protocol.decode.machine import DecodeMachine
from nixl_kv.protocol.events import (
    AbandonRead,
    Failure,
    FailureKind,
    LoadEnded,
    PeerJoined,
    PeerKey,
    ReadSlot,
    Send,
    StartRead,
    Tick,
)
from nixl_kv.protocol.messages import Renew
from support.records import (
    CLAIM,
    D1,
    D2,
    HOME,
    NONCE2,
    OTHER_LIFE,
    PEER,
    RANK_LIFE,
    READER,
    RENEW_S,
    RIVAL,
    TIMEOUT_S,
    answered,
    ask,
    at,
    cancel_load,
    deny,
    description,
    digest_reply,
    grant,
    hex32,
    joined,
    lost,
    no_record,
    prepare_load,
    read_done,
    read_failed,
    release,
    renew,
    renewed,
    routes,
    slot_read,
    start_load,
)

THREE = (0, 1, 2)
"""Reader ranks."""
GIVEN_UP = Send(at(0), release(complete=False))
READ_SLOT = ReadSlot(PEER, Rank(0), D1, 3)
LATE = Failure(FailureKind.LATE, "no KV within 30 s")
SILENT = Failure(FailureKind.LATE, "prefill fell silent while it was read")


def failed(failure: Failure) -> LoadEnded:
    return LoadEnded(D1, 7, failure, PEER)


def second_load() -> events.PrepareLoad:
    return prepare_load(D2, RIVAL, nonce=NONCE2)


def tick(machine: DecodeMachine, now: float) -> list[events.Action]:
    """What a tick does, but for renewals."""
    return [action for action in machine.handle(Tick(), now) if not is_renewal(action)]


def is_renewal(action: events.Action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, Renew)


# What is asked again


def test_an_unanswered_ask_is_repeated(asking: DecodeMachine) -> None:
    """Asks and renewals share their numbers: some numbers here are those of renewals."""
    assert tick(asking, 100.0 + ASK_AGAIN_S - 0.01) == []
    assert tick(asking, 100.0 + ASK_AGAIN_S) == [Send(at(0), ask(number=3))]
    assert tick(asking, 101.5) == []
    assert tick(asking, 102.0) == [Send(at(0), ask(number=5))]


def test_only_the_rank_that_did_not_answer_is_asked_again(prepared: DecodeMachine) -> None:
    prepared.handle(joined(2, THREE), 100.0)
    prepared.handle(answered(grant()), 100.1)
    assert tick(prepared, 101.0) == [Send(at(1), ask(number=3, readers=THREE))]


# What is late


def test_a_load_without_an_answer_is_given_up(asking: DecodeMachine) -> None:
    tick(asking, 129.5)
    assert tick(asking, 100.0 + TIMEOUT_S - 0.01) == []
    assert tick(asking, 100.0 + TIMEOUT_S) == [GIVEN_UP]
    assert asking.handle(start_load(), 131.0) == [failed(LATE)]


def test_a_load_that_waits_for_blocks_alone_is_never_late(granted: DecodeMachine) -> None:
    assert granted.handle(Tick(), 100.0 + 10 * TIMEOUT_S) == [Send(at(0), renew(2, CLAIM))]
    assert granted.handle(start_load(), 500.0) == [StartRead(PEER, Rank(0), grant(), start_load())]


def test_a_load_that_waits_for_one_rank_as_well_is_late(prepared: DecodeMachine) -> None:
    prepared.handle(joined(2, THREE), 100.0)
    prepared.handle(answered(grant()), 100.1)
    assert tick(prepared, 100.0 + TIMEOUT_S) == [
        GIVEN_UP,
        Send(at(1), release(complete=False)),
    ]


def test_the_time_starts_again_with_the_blocks(reading: DecodeMachine) -> None:
    assert tick(reading, 110.0 + TIMEOUT_S - 0.01) == []
    assert reading.handle(read_done(), 139.995) == [READ_SLOT]
    assert tick(reading, 110.0 + TIMEOUT_S) == []
    assert reading.handle(slot_read(), 140.1) == [GIVEN_UP, failed(LATE)]


def test_a_peer_that_connects_does_not_extend_the_time_of_a_load() -> None:
    machine = DecodeMachine(READER, no_record, timeout_s=0.5, renew_interval_s=RENEW_S)
    machine.handle(prepare_load(), 100.0)
    machine.handle(start_load(), 100.25)
    assert machine.handle(Tick(), 100.7) == []
    late = Failure(FailureKind.LATE, "no KV within 0.5 s")
    assert machine.handle(Tick(), 100.75) == [failed(late)]
    assert machine.handle(joined(), 100.8) == []


def test_a_late_read_that_does_not_end_by_itself_is_abandoned_once(
    reading: DecodeMachine,
) -> None:
    late = 110.0 + TIMEOUT_S
    assert tick(reading, late) == []
    assert tick(reading, late + DRAIN_S - 0.01) == []
    assert tick(reading, late + DRAIN_S) == [AbandonRead(D1, Rank(0))]
    assert tick(reading, late + DRAIN_S + 1) == []
    assert reading.handle(read_failed("stopped"), 150.0) == [GIVEN_UP, failed(LATE)]


def test_a_read_of_a_cancelled_load_has_until_its_deadline(reading: DecodeMachine) -> None:
    """It harms nobody, and ends by itself as a rule."""
    reading.handle(cancel_load(), 110.1)
    assert tick(reading, 110.0 + TIMEOUT_S - 0.01) == []
    assert tick(reading, 110.0 + TIMEOUT_S) == []
    assert tick(reading, 110.0 + TIMEOUT_S + DRAIN_S) == [AbandonRead(D1, Rank(0))]


def test_a_read_from_a_silent_rank_is_given_up(reading: DecodeMachine) -> None:
    """Its process may be stopped, and its host cut off; neither ends a read."""
    reading.handle(lost(reason="no heartbeat"), 110.1)
    reading.handle(lost(reason="no heartbeat"), 111.1)
    assert tick(reading, 110.1 + SILENCE_S - 0.01) == []
    assert tick(reading, 110.1 + SILENCE_S) == []
    end = 110.1 + SILENCE_S + DRAIN_S
    assert tick(reading, end) == [AbandonRead(D1, Rank(0))]
    assert reading.handle(read_failed("stopped"), end) == [GIVEN_UP, failed(SILENT)]


def test_silence_does_not_matter_once_nothing_is_read(verifying: DecodeMachine) -> None:
    verifying.handle(answered(digest_reply()), 110.7)
    verifying.handle(lost(reason="no heartbeat"), 110.8)
    assert tick(verifying, 110.8 + SILENCE_S) == []


@pytest.mark.parametrize(
    ("incarnation", "is_heard"), [(RANK_LIFE, True), (OTHER_LIFE, False)], ids=["same", "other"]
)
def test_an_answer_of_the_same_life_ends_the_silence(
    reading: DecodeMachine, incarnation: Incarnation, *, is_heard: bool
) -> None:
    reading.handle(lost(reason="no heartbeat"), 110.1)
    reading.handle(answered(renewed(incarnation=incarnation)), 110.2)
    reading.handle(Tick(), 110.1 + SILENCE_S)
    assert (reading.handle(read_done(), 113.0) == [READ_SLOT]) is is_heard


# Renewals


@pytest.mark.parametrize(
    "state", ["asking", "granted", "reading", "checking", "verifying", "draining"]
)
def test_whatever_prefill_may_hold_is_renewed(state: str, request: pytest.FixtureRequest) -> None:
    machine: DecodeMachine = request.getfixturevalue(state)
    load = machine.loads.get(D1)
    assert load is not None
    load.rank_reads[0].ask_again_at = 1000.0
    assert machine.handle(Tick(), 111.0) == [Send(at(0), renew(2, CLAIM))]


@pytest.mark.parametrize("ended", [False, True], ids=["not asked yet", "denied"])
def test_what_prefill_cannot_hold_is_not_renewed(prepared: DecodeMachine, *, ended: bool) -> None:
    if ended:
        prepared.handle(joined(), 100.0)
        prepared.handle(answered(deny()), 100.1)
    assert prepared.handle(Tick(), 100.5) == []


def test_renewals_have_an_interval_and_share_their_numbers_with_asks(
    granted: DecodeMachine,
) -> None:
    assert granted.handle(Tick(), 100.0) == [Send(at(0), renew(2, CLAIM))]
    assert granted.handle(Tick(), 100.0 + RENEW_S - 0.01) == []
    assert granted.handle(second_load(), 100.395) == [
        Send(at(0), ask(nonce=NONCE2, claim=RIVAL, number=3))
    ]
    assert granted.handle(Tick(), 100.0 + RENEW_S) == [Send(at(0), renew(4, CLAIM, RIVAL))]


def test_the_shortest_lease_sets_the_interval(asking: DecodeMachine) -> None:
    """Prefill's configuration counts, not ours."""
    asking.handle(Tick(), 100.0)
    asking.handle(answered(grant(lease_s=0.5)), 100.05)
    assert asking.handle(Tick(), 100.09) == []
    assert asking.handle(Tick(), 100.11) == [Send(at(0), renew(3, CLAIM))]


def test_each_rank_gets_a_renewal_of_its_own_claims(prepared: DecodeMachine) -> None:
    prepared.handle(joined(2, THREE), 100.0)
    prepared.handle(answered(deny()), 100.0)
    prepared.handle(second_load(), 100.0)
    assert prepared.handle(Tick(), 100.1) == [
        Send(at(0), renew(5, RIVAL)),
        Send(at(1), renew(6, RIVAL)),
    ]


def test_two_lives_at_one_endpoint_are_renewed_apart(reading: DecodeMachine) -> None:
    life = Incarnation(hex32(0xB2))
    reading.handle(lost(), 110.1)
    reading.handle(prepare_load(D2, RIVAL, incarnation=OTHER_LIFE), 110.2)
    key = PeerKey(PEER.engine, OTHER_LIFE, HOME)
    reading.handle(PeerJoined(key, description(1, OTHER_LIFE, life), routes(0)), 110.2)
    assert reading.handle(Tick(), 110.3) == [
        Send(at(0), renew(3, CLAIM)),
        Send(at(0), renew(4, RIVAL, incarnation=life)),
    ]


# What the book says of itself


def test_the_book_shows_how_many_reads_are_in_which_state(machine: DecodeMachine) -> None:
    seen = [(repr(machine.loads), machine.has_timers)]
    for step in (prepare_load(), joined(), prepare_load(D2, RIVAL), start_load(D2)):
        machine.handle(step, 100.0)
        seen.append((repr(machine.loads), machine.has_timers))
    machine.handle(answered(grant(claim=RIVAL)), 100.0)
    seen.append((repr(machine.loads), machine.has_timers))
    assert seen == [
        ("<LoadBook: 0; reads: none>", False),
        ("<LoadBook: 1; reads: none>", True),
        ("<LoadBook: 1; reads: 1 ASKING>", True),
        ("<LoadBook: 2; reads: 2 ASKING>", True),
        ("<LoadBook: 2; reads: 2 ASKING>", True),
        ("<LoadBook: 2; reads: 1 ASKING, 1 READING>", True),
    ]


def test_a_peer_is_in_use_while_a_read_of_it_may_start_or_go_on(granted: DecodeMachine) -> None:
    used = [granted.loads.peers_in_use()]
    for step in (start_load(), read_done(), cancel_load(), slot_read()):
        granted.handle(step, 101.0)
        used.append(granted.loads.peers_in_use())
    assert used == [{PEER}, {PEER}, {PEER}, {PEER}, set()]


def test_the_book_checks_its_loads() -> None:
    book = LoadBook(READER, no_record, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
    load = book.add(prepare_load(), PEER, 100.0)
    load.open(description(), routes(0), joined())
    book.validate()
    load.rank_reads[0].state = State.FAILED
    with pytest.raises(LocalProtocolError, match="FAILED without a reason"):
        book.validate()
