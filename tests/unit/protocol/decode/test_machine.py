"""The decode machine: loads from arrival to report, their peers, and whom it listens to."""

from typing import Any

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Endpoint, Incarnation, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.decode.machine import DecodeMachine
from nixl_kv.protocol.events import (
    Disconnect,
    DropPeer,
    Failure,
    FailureKind,
    JoinPeer,
    LoadEnded,
    PeerJoined,
    PeerKey,
    PeerRefused,
    ReadSlot,
    Send,
    StartRead,
    Tick,
)
from nixl_kv.protocol.messages import Answer
from nixl_kv.protocol.peers import BACKOFF_S, CONNECT_TIMEOUT_S
from support.records import (
    CLAIM,
    D1,
    D2,
    ELSEWHERE,
    HOME,
    NONCE2,
    OTHER_LIFE,
    PEER,
    RENEW_S,
    RIVAL,
    STRANGER,
    TIMEOUT_S,
    answered,
    ask,
    at,
    cancel_load,
    deny,
    describe,
    description,
    grant,
    joined,
    lost,
    no_record,
    prepare_load,
    read_done,
    reader,
    refusal,
    release,
    renew,
    renewed,
    routes,
    slot_read,
    start_load,
)

THREE = (0, 1, 2)
"""Reader ranks."""
RELEASED = Send(at(0), release())
GIVEN_UP = Send(at(0), release(complete=False))
STARTED = StartRead(PEER, Rank(0), grant(), start_load())
GOOD = LoadEnded(D1, 7, None, PEER, reads=(read_done(),))
DENIED = Failure(FailureKind.DENIED, "prefill rank 0 denied")
DROPPED = Failure(FailureKind.DROPPED, "dropped")
NOT_COMPATIBLE = Failure(FailureKind.INCOMPATIBLE, "another dtype")


def failed(failure: Failure, request: RequestId = D1, peer: PeerKey = PEER) -> LoadEnded:
    return LoadEnded(request, 7, failure, peer)


def unreachable(detail: str) -> Failure:
    return Failure(FailureKind.UNREACHABLE, detail)


def second_load(**changed: Any) -> events.PrepareLoad:
    return prepare_load(D2, RIVAL, nonce=NONCE2, **changed)


def is_forgotten(machine: DecodeMachine) -> bool:
    return len(machine.loads) == 0


# From arrival to report


def test_a_load_from_its_arrival_to_its_report(machine: DecodeMachine) -> None:
    theirs = description()
    assert machine.handle(prepare_load(), 100.0) == [Send(HOME, describe())]
    assert machine.handle(answered(theirs, HOME), 100.0) == [
        JoinPeer(PEER, theirs),
        Disconnect(HOME),
    ]
    assert machine.handle(joined(), 100.0) == [Send(at(0), ask())]
    assert machine.handle(answered(grant()), 100.1) == []
    assert machine.handle(start_load(), 100.2) == [STARTED]
    assert machine.handle(read_done(), 100.3) == [ReadSlot(PEER, Rank(0), D1, 3)]
    assert machine.handle(slot_read(), 100.4) == [RELEASED, GOOD]
    assert is_forgotten(machine)
    assert not machine.has_timers


def test_the_report_has_what_each_read_was_measured_to_be(prepared: DecodeMachine) -> None:
    reads = tuple(read_done(n, num_bytes=100 + n, num_runs=n, seconds=0.1) for n in range(2))
    prepared.handle(joined(2), 100.0)
    prepared.handle(start_load(), 100.0)
    for rank, read in enumerate(reads):
        prepared.handle(answered(grant(), at(rank)), 100.1)
        prepared.handle(read, 100.2)
    prepared.handle(slot_read(rank=1), 100.3)
    assert prepared.handle(slot_read(), 100.4)[-1] == LoadEnded(D1, 7, None, PEER, reads=reads)


def test_blocks_may_come_before_the_peer_and_before_the_grant(prepared: DecodeMachine) -> None:
    assert prepared.handle(start_load(), 100.0) == []
    assert prepared.handle(joined(), 100.1) == [Send(at(0), ask())]
    assert prepared.handle(answered(grant()), 100.2) == [STARTED]


def test_a_known_peer_is_asked_at_once(asking: DecodeMachine) -> None:
    assert asking.handle(second_load(), 101.0) == [
        Send(at(0), ask(nonce=NONCE2, claim=RIVAL, number=2))
    ]


def test_when_a_peer_joins_it_is_asked_for_all_that_wait_for_it(prepared: DecodeMachine) -> None:
    assert prepared.handle(second_load(), 100.0) == []
    assert prepared.handle(joined(), 100.1) == [
        Send(at(0), ask()),
        Send(at(0), ask(nonce=NONCE2, claim=RIVAL, number=2)),
    ]


def test_loads_of_another_peer_go_on_waiting(prepared: DecodeMachine) -> None:
    other = PeerKey(PEER.engine, OTHER_LIFE, HOME)
    assert prepared.handle(second_load(incarnation=OTHER_LIFE), 100.0) == [
        Send(HOME, describe(OTHER_LIFE))
    ]
    assert prepared.handle(joined(), 100.1) == [Send(at(0), ask())]
    prepared.handle(start_load(), 100.2)
    assert prepared.handle(PeerRefused(other, "another dtype"), 100.3) == [Disconnect(HOME)]
    assert prepared.handle(start_load(D2), 100.4) == [failed(NOT_COMPATIBLE, D2, other)]
    assert prepared.handle(answered(grant()), 100.5) == [STARTED]


def test_a_rank_asks_the_ranks_that_its_routes_name() -> None:
    second = reader(1)
    machine = DecodeMachine(second, no_record, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
    machine.handle(prepare_load(), 100.0)
    event = PeerJoined(PEER, description(2), routes(1, readers=[1]))
    assert machine.handle(event, 100.0) == [Send(at(1), ask(reader=second, readers=(1,)))]


def test_a_rank_without_readers_is_released_with_the_asks(prepared: DecodeMachine) -> None:
    event = PeerJoined(PEER, description(3), (*routes(0), *routes(2, readers=())))
    assert prepared.handle(event, 100.0) == [Send(at(2), release()), Send(at(0), ask())]
    prepared.handle(answered(grant()), 100.1)
    prepared.handle(start_load(), 100.2)
    prepared.handle(read_done(), 100.3)
    assert prepared.handle(slot_read(), 100.4) == [RELEASED, GOOD]


def test_a_rank_without_readers_is_released_for_a_cancelled_load(
    prepared: DecodeMachine,
) -> None:
    prepared.handle(cancel_load(), 100.0)
    event = PeerJoined(PEER, description(2), (*routes(0), *routes(1, readers=())))
    assert prepared.handle(event, 100.1) == [Send(at(1), release()), GIVEN_UP]
    assert is_forgotten(prepared)


def test_a_load_that_reads_no_rank_is_good_with_its_blocks(prepared: DecodeMachine) -> None:
    """As in a stage of a pipeline that has no layer with a cache."""
    event = PeerJoined(PEER, description(1), routes(0, readers=()))
    assert prepared.handle(event, 100.0) == [RELEASED]
    assert prepared.handle(Tick(), 100.0 + 2 * TIMEOUT_S) == []
    assert prepared.handle(start_load(), 190.0) == [LoadEnded(D1, 7, None, PEER)]
    assert is_forgotten(prepared)


def test_each_rank_is_read_as_soon_as_it_grants(prepared: DecodeMachine) -> None:
    first, second = grant(), grant(slot=5, generation=b"\2" * 16)
    assert prepared.handle(joined(2, THREE), 100.0) == [
        Send(at(0), ask(readers=THREE)),
        Send(at(1), ask(readers=THREE, number=2)),
    ]
    assert prepared.handle(answered(second, at(1)), 100.1) == []
    assert prepared.handle(start_load(), 100.2) == [StartRead(PEER, Rank(1), second, start_load())]
    assert prepared.handle(read_done(1), 100.3) == [ReadSlot(PEER, Rank(1), D1, 5)]
    assert prepared.handle(answered(first), 100.4) == [STARTED]
    assert prepared.handle(slot_read(b"\2" * 16, 1), 100.5) == [Send(at(1), release())]
    assert prepared.handle(read_done(0), 100.6) == [ReadSlot(PEER, Rank(0), D1, 3)]
    assert prepared.handle(slot_read(), 100.7) == [
        RELEASED,
        LoadEnded(D1, 7, None, PEER, reads=(read_done(0), read_done(1))),
    ]
    assert is_forgotten(prepared)


# Loads that are cancelled or were never prepared


@pytest.mark.parametrize("state", ["asking", "granted"])
def test_a_load_that_is_cancelled_before_it_starts_is_released_without_a_report(
    state: str, request: pytest.FixtureRequest
) -> None:
    machine: DecodeMachine = request.getfixturevalue(state)
    assert machine.handle(cancel_load(), 101.0) == [GIVEN_UP]
    assert is_forgotten(machine)


def test_the_release_waits_until_the_peer_is_known(prepared: DecodeMachine) -> None:
    assert prepared.handle(cancel_load(), 100.1) == []
    assert prepared.handle(joined(), 100.2) == [GIVEN_UP]
    assert is_forgotten(prepared)


def test_a_cancelled_load_whose_peer_cannot_be_used_is_forgotten(
    prepared: DecodeMachine,
) -> None:
    prepared.handle(cancel_load(), 100.1)
    assert prepared.handle(PeerRefused(PEER, "another dtype"), 100.2) == [Disconnect(HOME)]
    assert is_forgotten(prepared)


def test_a_started_load_without_a_peer_is_reported_though_cancelled(
    prepared: DecodeMachine,
) -> None:
    prepared.handle(start_load(), 100.1)
    assert prepared.handle(cancel_load(), 100.2) == []
    assert prepared.handle(joined(), 100.3) == [GIVEN_UP, failed(DROPPED)]
    assert is_forgotten(prepared)


def test_a_started_load_without_a_grant_is_reported_though_cancelled(
    asking: DecodeMachine,
) -> None:
    asking.handle(start_load(), 100.1)
    assert asking.handle(cancel_load(), 100.2) == [GIVEN_UP, failed(DROPPED)]
    assert is_forgotten(asking)


def test_a_failed_load_that_is_cancelled_is_forgotten(asking: DecodeMachine) -> None:
    assert asking.handle(answered(deny()), 100.1) == []
    assert asking.handle(cancel_load(), 100.2) == []
    assert is_forgotten(asking)


def test_a_failed_load_is_reported_as_soon_as_it_starts(asking: DecodeMachine) -> None:
    asking.handle(answered(deny()), 100.1)
    assert asking.handle(start_load(), 100.2) == [failed(DENIED)]
    assert is_forgotten(asking)


def test_cancelling_an_unknown_load_does_nothing(machine: DecodeMachine) -> None:
    assert machine.handle(cancel_load(), 100.0) == []


def test_a_load_that_was_never_prepared_is_reported(machine: DecodeMachine) -> None:
    failure = Failure(FailureKind.INTERNAL, "it was not prepared, or forgotten since")
    assert machine.handle(start_load(), 100.0) == [LoadEnded(D1, 7, failure)]


def test_a_request_cannot_be_prepared_twice(prepared: DecodeMachine) -> None:
    """The reads of its first load would be forgotten."""
    with pytest.raises(LocalProtocolError, match="request 'd1' has a load already"):
        prepared.handle(prepare_load(remote_port=1), 100.1)
    assert prepared.handle(joined(), 100.2) == [Send(at(0), ask())]


# Answers of prefill's ranks


@pytest.mark.parametrize(
    ("message", "endpoint"),
    [
        pytest.param(deny(reader=STRANGER), at(0), id="another reader"),
        pytest.param(deny(reader=reader(1)), at(0), id="another rank of this engine"),
        pytest.param(deny(claim=RIVAL), at(0), id="another claim"),
        pytest.param(deny(), at(1), id="from another rank"),
        pytest.param(grant(reader=STRANGER), at(0), id="another reader's grant"),
    ],
)
def test_answers_to_others_are_ignored(
    asking: DecodeMachine, message: Answer, endpoint: Endpoint
) -> None:
    assert asking.handle(answered(message, endpoint), 100.1) == []
    assert asking.handle(answered(grant()), 100.2) == []
    assert asking.handle(start_load(), 100.3) == [STARTED]


@pytest.mark.parametrize(
    ("claim", "endpoint"),
    [
        pytest.param(RIVAL, at(0), id="unknown claim"),
        pytest.param(CLAIM, at(1), id="a rank that was not asked"),
    ],
)
def test_a_grant_that_nobody_waits_for_is_released(
    asking: DecodeMachine, claim: Claim, endpoint: Endpoint
) -> None:
    names = {"claim": claim, "nonce": NONCE2, "incarnation": OTHER_LIFE}
    assert asking.handle(answered(grant(**names), endpoint), 100.1) == [
        Send(endpoint, release(complete=False, **names))
    ]


def test_a_grant_after_the_load_is_forgotten_is_released(asking: DecodeMachine) -> None:
    asking.handle(cancel_load(), 100.1)
    assert asking.handle(answered(grant()), 100.2) == [GIVEN_UP]


def test_a_grant_after_the_failure_is_released_each_time(asking: DecodeMachine) -> None:
    asking.handle(answered(deny()), 100.1)
    assert asking.handle(answered(grant()), 100.2) == [GIVEN_UP]
    assert asking.handle(answered(grant()), 100.3) == [GIVEN_UP]


def test_a_repeated_grant_changes_nothing(granted: DecodeMachine) -> None:
    again = answered(grant(slot=9))
    assert granted.handle(again, 100.1) == []
    assert granted.handle(start_load(), 100.2) == [STARTED]
    assert granted.handle(again, 100.3) == []
    assert granted.handle(read_done(), 100.4) == [ReadSlot(PEER, Rank(0), D1, 3)]
    assert granted.handle(again, 100.5) == []
    assert granted.handle(slot_read(), 100.6) == [RELEASED, GOOD]


def test_a_denial_fails_the_load(asking: DecodeMachine) -> None:
    asking.handle(start_load(), 100.0)
    assert asking.handle(answered(deny()), 100.1) == [failed(DENIED)]


@pytest.mark.parametrize("state", ["reading", "checking"])
@pytest.mark.parametrize(
    "message", [pytest.param(deny(), id="denied"), pytest.param(renewed(CLAIM), id="lost")]
)
def test_the_slot_alone_decides_about_a_read_under_way(
    state: str, message: Answer, request: pytest.FixtureRequest
) -> None:
    machine: DecodeMachine = request.getfixturevalue(state)
    assert machine.handle(answered(message), 110.6) == []
    if state == "reading":
        assert machine.handle(read_done(), 110.7) == [ReadSlot(PEER, Rank(0), D1, 3)]
    assert machine.handle(slot_read(), 110.8) == [RELEASED, GOOD]


def test_a_claim_that_is_lost_before_it_is_read_fails_the_load(granted: DecodeMachine) -> None:
    assert granted.handle(answered(renewed(RIVAL, CLAIM)), 101.0) == []
    failure = Failure(FailureKind.LEASE_LOST, "prefill rank 0 let the lease run out")
    assert granted.handle(start_load(), 101.1) == [failed(failure)]


def test_an_ask_on_its_way_is_not_lost(asking: DecodeMachine) -> None:
    assert asking.handle(answered(renewed(CLAIM)), 100.1) == []
    assert asking.handle(answered(grant()), 100.2) == []
    assert asking.handle(start_load(), 100.3) == [STARTED]


@pytest.mark.parametrize(
    ("message", "endpoint"),
    [
        pytest.param(renewed(), at(0), id="nothing lost"),
        pytest.param(renewed(RIVAL), at(0), id="another claim"),
        pytest.param(renewed(CLAIM), at(1), id="another rank"),
        pytest.param(renewed(CLAIM, reader=STRANGER), at(0), id="another reader"),
    ],
)
def test_a_claim_that_is_not_lost_stays(
    granted: DecodeMachine, message: Answer, endpoint: Endpoint
) -> None:
    assert granted.handle(answered(message, endpoint), 101.0) == []
    assert granted.handle(start_load(), 101.1) == [STARTED]


# Peers that cannot be used

NEW_LIFE = "it has begun another life since"


@pytest.mark.parametrize(
    ("event", "failure"),
    [
        pytest.param(PeerRefused(PEER, "another dtype"), NOT_COMPATIBLE, id="not compatible"),
        pytest.param(
            lost(HOME, "cannot connect"), unreachable(f"{HOME}: cannot connect"), id="lost"
        ),
        pytest.param(answered(refusal(NEW_LIFE), HOME), unreachable(NEW_LIFE), id="refused"),
    ],
)
def test_without_its_peer_every_load_that_waits_for_it_fails(
    prepared: DecodeMachine, event: events.DecodeEvent, failure: Failure
) -> None:
    prepared.handle(start_load(), 100.0)
    prepared.handle(second_load(), 100.0)
    assert prepared.handle(event, 100.1) == [Disconnect(HOME), failed(failure)]
    assert prepared.handle(start_load(D2), 100.2) == [failed(failure, D2)]
    assert is_forgotten(prepared)


@pytest.mark.parametrize(
    ("incarnation", "endpoint"),
    [
        pytest.param(OTHER_LIFE, HOME, id="another life"),
        pytest.param(PEER.incarnation, ELSEWHERE, id="from elsewhere"),
    ],
)
def test_a_refusal_of_another_peer_fails_nothing(
    prepared: DecodeMachine, incarnation: Incarnation, endpoint: Endpoint
) -> None:
    """A forged ticket may have made us ask there; it must not harm the loads of others."""
    prepared.handle(start_load(), 100.0)
    message = refusal(NEW_LIFE, incarnation)
    assert prepared.handle(answered(message, endpoint), 100.1) == []
    assert prepared.handle(joined(), 100.2) == [Send(at(0), ask())]


def test_a_refusal_after_the_description_is_ignored(granted: DecodeMachine) -> None:
    assert granted.handle(answered(refusal("late"), HOME), 100.1) == []
    assert granted.handle(PeerRefused(PEER, "late"), 100.1) == []
    assert granted.handle(start_load(), 100.2) == [STARTED]


def test_a_refusal_of_an_unknown_peer_is_ignored(machine: DecodeMachine) -> None:
    assert machine.handle(answered(refusal("no"), HOME), 100.0) == []
    assert machine.handle(prepare_load(), 100.1) == [Send(HOME, describe())]


def test_a_silent_peer_is_given_up(prepared: DecodeMachine) -> None:
    prepared.handle(start_load(), 100.0)
    assert prepared.handle(Tick(), 100.0 + CONNECT_TIMEOUT_S - 0.01) == []
    assert prepared.handle(Tick(), 100.0 + CONNECT_TIMEOUT_S) == [
        Disconnect(HOME),
        failed(unreachable("no description in time")),
    ]
    assert is_forgotten(prepared)


def test_during_the_pause_of_a_peer_loads_fail_at_once(prepared: DecodeMachine) -> None:
    prepared.handle(cancel_load(), 100.0)
    prepared.handle(PeerRefused(PEER, "another dtype"), 100.1)
    assert prepared.handle(prepare_load(D2, RIVAL), 100.2) == []
    assert prepared.handle(start_load(D2), 100.3) == [failed(NOT_COMPATIBLE, D2)]
    assert prepared.has_timers
    assert prepared.handle(Tick(), 100.1 + BACKOFF_S) == []
    assert not prepared.has_timers
    assert prepared.handle(prepare_load(), 101.2) == [Send(HOME, describe())]


def test_a_pause_is_not_prolonged(prepared: DecodeMachine) -> None:
    prepared.handle(PeerRefused(PEER, "another dtype"), 101.0)
    assert prepared.handle(PeerRefused(PEER, "late"), 101.9) == []
    prepared.handle(Tick(), 101.0 + BACKOFF_S)
    assert prepared.handle(second_load(), 102.1) == [Send(HOME, describe())]


def test_a_failed_load_is_released_when_its_peer_comes_back(prepared: DecodeMachine) -> None:
    """It is still to be reported, and reads nothing."""
    prepared.handle(PeerRefused(PEER, "another dtype"), 100.1)
    prepared.handle(Tick(), 100.1 + BACKOFF_S)
    prepared.handle(second_load(), 102.0)
    assert prepared.handle(joined(), 102.1) == [
        GIVEN_UP,
        Send(at(0), ask(nonce=NONCE2, claim=RIVAL)),
    ]
    assert prepared.handle(start_load(), 102.2) == [failed(NOT_COMPATIBLE)]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="unknown"),
        pytest.param([prepare_load(), PeerRefused(PEER, "no")], id="in its pause"),
        pytest.param([prepare_load(), joined()], id="joined already"),
    ],
)
def test_a_peer_that_joins_unasked_is_dropped(
    machine: DecodeMachine, before: list[events.DecodeEvent]
) -> None:
    for event in before:
        machine.handle(event, 100.0)
    assert machine.handle(joined(), 100.1) == [DropPeer(PEER)]


def test_a_forged_ticket_does_not_redirect_the_true_ones(machine: DecodeMachine) -> None:
    """It names a known engine and life, at somebody else's address."""
    elsewhere = Endpoint("tcp://10.0.0.1:1")
    forged = prepare_load(D2, RIVAL, remote_port=1)
    assert machine.handle(forged, 100.0) == [Send(elsewhere, describe())]
    assert machine.handle(prepare_load(), 100.1) == [Send(HOME, describe())]
    theirs = description()
    assert machine.handle(answered(theirs, elsewhere), 100.2) == [
        JoinPeer(PeerKey(PEER.engine, PEER.incarnation, elsewhere), theirs),
        Disconnect(elsewhere),
    ]
    assert machine.handle(joined(), 100.3) == [Send(at(0), ask())]


# Connections that break


def test_with_the_connection_every_load_that_is_not_read_fails(granted: DecodeMachine) -> None:
    granted.handle(second_load(), 100.0)
    granted.handle(start_load(D2), 100.0)
    failure = unreachable("prefill rank 0 is unreachable: closed")
    assert granted.handle(lost(), 100.5) == [failed(failure, D2)]
    assert granted.handle(start_load(), 100.6) == [failed(failure)]


def test_without_the_connection_a_read_goes_on_and_its_peer_is_kept(
    reading: DecodeMachine,
) -> None:
    assert reading.handle(lost(), 110.1) == []
    assert reading.handle(Tick(), 110.2) == [Send(at(0), renew(2, CLAIM))]
    assert reading.handle(read_done(), 110.3) == [ReadSlot(PEER, Rank(0), D1, 3)]
    assert reading.handle(Tick(), 110.4) == []
    assert reading.handle(slot_read(), 110.5) == [RELEASED, GOOD]
    assert reading.has_timers
    assert reading.handle(Tick(), 110.6) == [DropPeer(PEER), Disconnect(at(0))]
    assert not reading.has_timers


def test_new_loads_fail_while_a_lost_peer_is_still_read(reading: DecodeMachine) -> None:
    reading.handle(lost(), 110.1)
    assert reading.handle(prepare_load(D2, RIVAL), 110.2) == []
    assert reading.handle(start_load(D2), 110.3) == [failed(unreachable(f"{at(0)}: closed"), D2)]


def test_a_connection_that_no_load_uses_may_break(asking: DecodeMachine) -> None:
    assert asking.handle(lost(ELSEWHERE), 100.1) == []
    assert asking.handle(answered(grant()), 100.2) == []
    assert asking.handle(start_load(), 100.3) == [STARTED]


def test_when_one_rank_is_lost_the_others_are_released(prepared: DecodeMachine) -> None:
    prepared.handle(joined(2, THREE), 100.0)
    prepared.handle(start_load(), 100.0)
    assert prepared.handle(lost(at(1)), 100.5) == [
        GIVEN_UP,
        failed(unreachable("prefill rank 1 is unreachable: closed")),
    ]


# The machine itself


def test_a_cleared_machine_has_no_load_and_no_peer(reading: DecodeMachine) -> None:
    reading.clear()
    assert not reading.has_timers
    assert reading.handle(read_done(), 110.2) == []
    assert reading.handle(prepare_load(), 110.3) == [Send(HOME, describe())]
