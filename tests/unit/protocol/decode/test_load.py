"""One load: its reads and how they end, what is verified, what is recorded, what is reported."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Endpoint, Rank
from nixl_kv.protocol import events
from nixl_kv.protocol.decode.load import (
    ASK_AGAIN_S,
    HOLDING,
    POSTED,
    TRANSITIONS,
    Cancelled,
    Load,
    RankRead,
    State,
)
from nixl_kv.protocol.decode.machine import DecodeMachine
from nixl_kv.protocol.events import (
    Failure,
    FailureKind,
    LoadEnded,
    PeerJoined,
    PeerRefused,
    ReadSlot,
    Send,
    StartLoad,
    StartRead,
    Tick,
    Transition,
)
from nixl_kv.protocol.messages import Answer, Renew
from support.records import (
    CLAIM,
    D1,
    GENERATION,
    HOME,
    PEER,
    RANK_LIFE,
    READER,
    RENEW_S,
    RIVAL,
    STRANGER,
    TIMEOUT_S,
    answered,
    at,
    cancel_load,
    compare_digest,
    deny,
    description,
    digest_compared,
    digest_reply,
    digest_request,
    grant,
    joined,
    lost,
    no_record,
    prepare_load,
    read_done,
    read_failed,
    read_started,
    release,
    renewed,
    routes,
    slot_read,
    start_load,
    ticket,
)

RELEASED = Send(at(0), release())
GIVEN_UP = Send(at(0), release(complete=False))
GIVEN_UP_1 = Send(at(1), release(complete=False))
READ_SLOT = ReadSlot(PEER, Rank(0), D1, 3)
GOOD = LoadEnded(D1, 7, None, PEER, reads=(read_done(),))
VERIFIED = replace(GOOD, verified=True)
EMPTY = bytes(16)
OTHER_GENERATION = b"\2" * 16


def failed(kind: FailureKind, detail: str) -> LoadEnded:
    return LoadEnded(D1, 7, Failure(kind, detail), PEER)


FENCED = failed(FailureKind.FENCED, "prefill rank 0 took its blocks back while they were read")
BROKEN = failed(FailureKind.BROKEN, "reading prefill rank 0 failed: reset")
DROPPED = failed(FailureKind.DROPPED, "dropped")
DENIED = failed(FailureKind.DENIED, "prefill rank 0 denied")
DENIED_1 = failed(FailureKind.DENIED, "prefill rank 1 denied")
LOST_LEASE = failed(FailureKind.LEASE_LOST, "prefill rank 0 let the lease run out")
UNREACHABLE = failed(FailureKind.UNREACHABLE, "prefill rank 0 is unreachable: closed")
LATE = failed(FailureKind.LATE, "no KV within 30 s")
CORRUPT = failed(
    FailureKind.CORRUPT, "what was read from prefill rank 0 is not what it has: K of head 0"
)


def is_forgotten(machine: DecodeMachine) -> bool:
    return len(machine.loads) == 0


def tick(machine: DecodeMachine, now: float) -> list[events.Action]:
    """What a tick does, but for renewals."""
    return [
        action
        for action in machine.handle(Tick(), now)
        if not (isinstance(action, Send) and isinstance(action.message, Renew))
    ]


# The fence


@pytest.mark.parametrize(
    "generation",
    [pytest.param(EMPTY, id="cleared"), pytest.param(OTHER_GENERATION, id="another grant's")],
)
def test_data_is_good_only_while_its_generation_is_in_the_slot(
    checking: DecodeMachine, generation: bytes
) -> None:
    assert checking.handle(slot_read(generation), 110.6) == [GIVEN_UP, FENCED]
    assert is_forgotten(checking)


def test_an_error_of_the_data_read_fails_the_load(reading: DecodeMachine) -> None:
    assert reading.handle(read_failed(), 110.5) == [GIVEN_UP, BROKEN]
    assert is_forgotten(reading)


def test_an_error_of_the_slot_read_fails_the_load(checking: DecodeMachine) -> None:
    assert checking.handle(read_failed(), 110.6) == [GIVEN_UP, BROKEN]
    assert is_forgotten(checking)


# Verification


def test_a_verified_load_from_its_blocks_to_its_report(granted: DecodeMachine) -> None:
    start = start_load(verify=True)
    assert granted.handle(start, 110.0) == [StartRead(PEER, Rank(0), grant(), start)]
    assert granted.handle(read_started(), 110.1) == [Send(at(0), digest_request())]
    assert granted.handle(read_done(), 110.2) == [READ_SLOT]
    assert granted.handle(slot_read(), 110.3) == []
    assert not is_forgotten(granted)
    assert granted.handle(answered(digest_reply()), 110.4) == [compare_digest()]
    assert granted.handle(digest_compared(), 110.5) == [RELEASED, VERIFIED]
    assert is_forgotten(granted)


@pytest.mark.parametrize("while_checking", [False, True], ids=["while read", "while checked"])
def test_a_digest_that_comes_first_waits_for_the_slot(
    verified: DecodeMachine, *, while_checking: bool
) -> None:
    if while_checking:
        verified.handle(read_done(), 110.2)
    assert verified.handle(answered(digest_reply()), 110.3) == []
    if not while_checking:
        verified.handle(read_done(), 110.4)
    assert verified.handle(slot_read(), 110.5) == [compare_digest()]
    assert verified.handle(digest_compared(), 110.6) == [RELEASED, VERIFIED]


def test_only_the_tokens_that_are_loaded_are_compared(granted: DecodeMachine) -> None:
    """The tokens before them were here already."""
    start = StartLoad(D1, 4, 7, (b"\5\0\0\0",), verify=True)
    granted.handle(start, 110.0)
    granted.handle(read_started(), 110.1)
    granted.handle(read_done(), 110.2)
    granted.handle(slot_read(), 110.3)
    compared = replace(compare_digest(), load=start)
    assert granted.handle(answered(digest_reply()), 110.4) == [compared]
    assert granted.handle(digest_compared(), 110.5) == [
        RELEASED,
        replace(VERIFIED, num_tokens=3),
    ]


def test_bytes_that_differ_fail_the_load(verifying: DecodeMachine) -> None:
    verifying.handle(answered(digest_reply()), 110.7)
    assert verifying.handle(digest_compared("K of head 0"), 110.8) == [GIVEN_UP, CORRUPT]
    assert is_forgotten(verifying)


def test_bytes_that_cannot_be_compared_are_not_called_corrupt(verifying: DecodeMachine) -> None:
    verifying.handle(answered(digest_reply()), 110.7)
    event = replace(digest_compared(), refusal="no memory")
    detail = "what was read from prefill rank 0 cannot be verified: no memory"
    assert verifying.handle(event, 110.8) == [GIVEN_UP, failed(FailureKind.INTERNAL, detail)]
    assert is_forgotten(verifying)


LOSSES: dict[str, tuple[events.DecodeEvent, LoadEnded]] = {
    "connection": (lost(), UNREACHABLE),
    "lease": (answered(renewed(CLAIM)), LOST_LEASE),
    "denial": (answered(deny()), DENIED),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_comparison_needs_prefill_no_more(verifying: DecodeMachine, loss: str) -> None:
    """The bytes were held until they were here, and so was what they are compared with."""
    verifying.handle(answered(digest_reply()), 110.7)
    assert verifying.handle(LOSSES[loss][0], 110.8) == []
    assert verifying.handle(digest_compared(), 110.9) == [RELEASED, VERIFIED]


@pytest.mark.parametrize("loss", LOSSES)
def test_without_prefills_digest_a_loss_fails_the_load(verifying: DecodeMachine, loss: str) -> None:
    event, report = LOSSES[loss]
    assert verifying.handle(event, 110.8) == [report]
    assert is_forgotten(verifying)


def test_a_lost_connection_during_the_read_does_not_fail_it(verified: DecodeMachine) -> None:
    assert verified.handle(lost(), 110.1) == []
    verified.handle(read_done(), 110.2)
    assert verified.handle(slot_read(), 110.3) == []
    assert verified.handle(answered(digest_reply()), 110.4) == [compare_digest()]


def test_a_comparison_is_of_use_until_its_load_is_over(verifying: DecodeMachine) -> None:
    action = compare_digest()
    assert verifying.is_comparing(action)
    assert not verifying.is_comparing(replace(action, digest_reply=digest_reply(claim=RIVAL)))
    assert not verifying.is_comparing(replace(action, rank=Rank(1)))
    verifying.handle(cancel_load(), 110.8)
    assert not verifying.is_comparing(action)


@pytest.mark.parametrize("state", ["prepared", "reading"])
def test_before_its_data_is_here_no_comparison_is_of_use(
    state: str, request: pytest.FixtureRequest
) -> None:
    machine: DecodeMachine = request.getfixturevalue(state)
    assert not machine.is_comparing(compare_digest())


def test_a_repeated_digest_is_compared_once(verifying: DecodeMachine) -> None:
    assert verifying.handle(answered(digest_reply()), 110.7) == [compare_digest()]
    assert verifying.handle(answered(digest_reply(columns=bytes(8))), 110.8) == []
    assert verifying.handle(digest_compared(), 110.9) == [RELEASED, VERIFIED]
    assert verifying.handle(answered(digest_reply()), 111.0) == []


def test_of_two_digests_the_first_is_compared(verified: DecodeMachine) -> None:
    verified.handle(answered(digest_reply()), 110.1)
    verified.handle(answered(digest_reply(columns=bytes(8))), 110.2)
    verified.handle(read_done(), 110.3)
    assert verified.handle(slot_read(), 110.4) == [compare_digest()]


def test_a_digest_after_the_end_is_ignored(verified: DecodeMachine) -> None:
    verified.handle(read_failed(), 110.1)
    assert is_forgotten(verified)
    assert verified.handle(answered(digest_reply()), 110.2) == []


def test_a_digest_that_nobody_asked_for_is_ignored(reading: DecodeMachine) -> None:
    assert reading.handle(answered(digest_reply()), 110.1) == []
    assert reading.handle(read_done(), 110.2) == [READ_SLOT]
    assert reading.handle(slot_read(), 110.3) == [RELEASED, GOOD]


@pytest.mark.parametrize(
    ("message", "endpoint"),
    [
        pytest.param(digest_reply(claim=RIVAL), at(0), id="another claim"),
        pytest.param(digest_reply(reader=STRANGER), at(0), id="another reader"),
        pytest.param(digest_reply(), at(1), id="another rank"),
        pytest.param(digest_reply(), HOME, id="the engine"),
    ],
)
def test_a_digest_for_others_is_ignored(
    verifying: DecodeMachine, message: Answer, endpoint: Endpoint
) -> None:
    assert verifying.handle(answered(message, endpoint), 110.7) == []
    assert verifying.handle(answered(digest_reply()), 110.8) == [compare_digest()]


@pytest.mark.parametrize("has_digest", [False, True], ids=["without a digest", "with a digest"])
def test_what_is_fenced_is_not_compared(verified: DecodeMachine, *, has_digest: bool) -> None:
    if has_digest:
        verified.handle(answered(digest_reply()), 110.05)
    verified.handle(read_done(), 110.1)
    assert verified.handle(slot_read(EMPTY), 110.2) == [GIVEN_UP, FENCED]


@pytest.mark.parametrize("difference", [None, "K of head 0"], ids=["equal", "different"])
def test_a_comparison_that_ends_after_its_load_changes_nothing(
    verifying: DecodeMachine, difference: str | None
) -> None:
    verifying.handle(answered(digest_reply()), 110.7)
    assert verifying.handle(cancel_load(), 110.8) == [GIVEN_UP, DROPPED]
    assert verifying.handle(digest_compared(difference), 110.9) == []
    assert is_forgotten(verifying)


def test_a_comparison_of_an_earlier_attempt_shows_nothing(verifying: DecodeMachine) -> None:
    """It may end when the same request is loaded again."""
    assert verifying.handle(digest_compared(claim=RIVAL), 110.7) == []
    assert verifying.handle(digest_compared("K of head 0", claim=RIVAL), 110.7) == []
    assert verifying.handle(answered(digest_reply()), 110.8) == [compare_digest()]
    assert verifying.handle(digest_compared(), 110.9) == [RELEASED, VERIFIED]


def test_a_comparison_during_the_read_shows_nothing(verified: DecodeMachine) -> None:
    assert verified.handle(digest_compared(), 110.1) == []
    assert verified.handle(read_done(), 110.2) == [READ_SLOT]


def test_a_denied_digest_fails_the_load_as_soon_as_it_is_all_that_is_missing(
    verified: DecodeMachine,
) -> None:
    """The slot decides about a read under way; then the digest is asked for again, in vain."""
    assert verified.handle(answered(deny()), 110.1) == []
    assert verified.handle(read_done(), 110.2) == [READ_SLOT]
    assert verified.handle(answered(deny()), 110.3) == []
    assert verified.handle(slot_read(), 110.4) == []
    assert tick(verified, 110.0 + ASK_AGAIN_S) == [Send(at(0), digest_request())]
    assert verified.handle(answered(deny()), 111.1) == [DENIED]


@pytest.mark.parametrize("has_digest", [False, True], ids=["without a digest", "with a digest"])
def test_what_is_not_verified_in_time_is_late(
    verifying: DecodeMachine, *, has_digest: bool
) -> None:
    if has_digest:
        verifying.handle(answered(digest_reply()), 110.7)
    tick(verifying, 110.0 + TIMEOUT_S - 0.5)
    assert tick(verifying, 110.0 + TIMEOUT_S - 0.01) == []
    assert tick(verifying, 110.0 + TIMEOUT_S) == [GIVEN_UP, LATE]


def test_a_load_that_is_cancelled_while_it_is_verified_ends_at_once(
    verifying: DecodeMachine,
) -> None:
    """Nothing writes into its blocks any more."""
    assert verifying.handle(cancel_load(), 110.7) == [GIVEN_UP, DROPPED]
    assert is_forgotten(verifying)


@pytest.mark.parametrize("has_digest", [False, True], ids=["without a digest", "with a digest"])
def test_a_load_that_is_cancelled_while_its_slot_is_read_is_not_compared(
    verified: DecodeMachine, *, has_digest: bool
) -> None:
    if has_digest:
        verified.handle(answered(digest_reply()), 110.1)
    verified.handle(read_done(), 110.2)
    assert verified.handle(cancel_load(), 110.3) == []
    assert verified.handle(slot_read(), 110.4) == [GIVEN_UP, DROPPED]


def test_a_digest_does_not_save_a_cancelled_load(verified: DecodeMachine) -> None:
    verified.handle(cancel_load(), 110.1)
    assert verified.handle(answered(digest_reply()), 110.2) == []
    assert verified.handle(read_done(), 110.3) == [GIVEN_UP, DROPPED]


def test_the_digest_is_asked_for_again_only_when_it_is_all_that_is_missing(
    verified: DecodeMachine,
) -> None:
    assert tick(verified, 112.0) == []
    verified.handle(read_done(), 112.1)
    assert tick(verified, 112.2) == []
    verified.handle(slot_read(), 112.3)
    assert tick(verified, 112.4) == [Send(at(0), digest_request())]
    assert tick(verified, 112.4 + ASK_AGAIN_S - 0.01) == []
    assert tick(verified, 112.4 + ASK_AGAIN_S) == [Send(at(0), digest_request())]
    assert verified.handle(answered(digest_reply()), 113.5) == [compare_digest()]
    assert tick(verified, 120.0) == []


def test_a_verified_load_that_has_nothing_to_read_is_good(granted: DecodeMachine) -> None:
    """Then no read is started, and nothing is compared."""
    granted.handle(start_load(verify=True), 110.0)
    assert granted.handle(read_done(), 110.0) == [READ_SLOT]
    assert granted.handle(slot_read(), 110.1) == [RELEASED, VERIFIED]


def test_a_verified_load_that_reads_no_rank_is_good(prepared: DecodeMachine) -> None:
    prepared.handle(PeerJoined(PEER, description(1), routes(0, readers=())), 100.0)
    assert prepared.handle(start_load(verify=True), 100.1) == [replace(VERIFIED, reads=())]


def test_a_read_without_a_slice_to_compare_is_not_verified(granted: DecodeMachine) -> None:
    """Prefill makes no digest of nothing: the load is late, not good."""
    granted.handle(start_load(verify=True), 110.0)
    event = replace(read_started(), slices=())
    assert granted.handle(event, 110.0) == [Send(at(0), digest_request(slices=()))]
    granted.handle(read_done(), 110.1)
    assert granted.handle(slot_read(), 110.2) == []
    assert tick(granted, 110.0 + TIMEOUT_S)[-1] == LATE


def test_without_blocks_no_digest_is_asked_for() -> None:
    load = new_load(State.VERIFYING)
    assert load.ask_digest(load.rank_reads[0], 110.0) == []


@pytest.fixture
def two_verifying(prepared: DecodeMachine) -> DecodeMachine:
    """Two ranks are read and verified; both slots were valid."""
    prepared.handle(joined(2), 100.0)
    prepared.handle(start_load(verify=True), 100.0)
    for rank in (0, 1):
        prepared.handle(answered(grant(), at(rank)), 100.1)
        prepared.handle(read_started(rank), 100.1)
        prepared.handle(read_done(rank), 100.2)
        prepared.handle(slot_read(rank=rank), 100.3)
    return prepared


def test_each_rank_is_compared_with_its_own_digest(two_verifying: DecodeMachine) -> None:
    other = digest_reply(columns=bytes(8))
    assert two_verifying.handle(answered(other, at(1)), 100.4) == [compare_digest(1, reply=other)]
    assert two_verifying.handle(answered(digest_reply()), 100.5) == [compare_digest()]
    assert two_verifying.handle(digest_compared(rank=1), 100.6) == [Send(at(1), release())]
    assert two_verifying.handle(digest_compared(), 100.7) == [
        RELEASED,
        replace(VERIFIED, reads=(read_done(0), read_done(1))),
    ]


def test_one_corrupt_rank_fails_the_load_at_once(two_verifying: DecodeMachine) -> None:
    two_verifying.handle(answered(digest_reply()), 100.4)
    event = digest_compared("K of head 0")
    assert two_verifying.handle(event, 100.5) == [GIVEN_UP, GIVEN_UP_1, CORRUPT]


def test_a_verified_rank_does_not_save_a_corrupt_one(two_verifying: DecodeMachine) -> None:
    for rank in (0, 1):
        two_verifying.handle(answered(digest_reply(), at(rank)), 100.4)
    assert two_verifying.handle(digest_compared(rank=1), 100.5) == [Send(at(1), release())]
    assert two_verifying.handle(digest_compared("K of head 0"), 100.6) == [GIVEN_UP, CORRUPT]


def test_a_corrupt_rank_waits_for_the_reads_of_the_others(prepared: DecodeMachine) -> None:
    prepared.handle(joined(2), 100.0)
    prepared.handle(start_load(verify=True), 100.0)
    for rank in (0, 1):
        prepared.handle(answered(grant(), at(rank)), 100.1)
        prepared.handle(read_started(rank), 100.1)
    prepared.handle(read_done(), 100.2)
    prepared.handle(slot_read(), 100.3)
    prepared.handle(answered(digest_reply()), 100.4)
    assert prepared.handle(digest_compared("K of head 0"), 100.5) == [GIVEN_UP]
    assert prepared.handle(read_done(1), 100.6) == [GIVEN_UP_1, CORRUPT]


# No read may write any more when the report is made


def test_the_report_of_a_cancelled_load_waits_for_its_read(reading: DecodeMachine) -> None:
    assert reading.handle(cancel_load(), 110.5) == []
    assert reading.handle(read_done(), 110.6) == [GIVEN_UP, DROPPED]


@pytest.mark.parametrize("generation", [GENERATION, EMPTY], ids=["valid", "cleared"])
def test_the_report_of_a_cancelled_load_waits_for_its_slot_read(
    checking: DecodeMachine, generation: bytes
) -> None:
    assert checking.handle(cancel_load(), 110.6) == []
    assert checking.handle(slot_read(generation), 110.7) == [GIVEN_UP, DROPPED]


def test_a_drained_read_may_end_in_an_error(draining: DecodeMachine) -> None:
    assert draining.handle(read_failed(), 110.6) == [GIVEN_UP, DROPPED]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(cancel_load(), id="cancelled again"),
        pytest.param(Tick(), id="long after its deadline"),
        pytest.param(lost(), id="connection lost"),
        pytest.param(answered(deny()), id="denied"),
        pytest.param(answered(renewed(CLAIM)), id="lease lost"),
        pytest.param(answered(grant()), id="granted again"),
    ],
)
def test_only_the_end_of_its_read_ends_a_drained_load(
    draining: DecodeMachine, event: events.DecodeEvent
) -> None:
    draining.handle(event, 1000.0)
    assert not is_forgotten(draining)
    assert draining.handle(read_done(), 1000.1) == [GIVEN_UP, DROPPED]


@pytest.fixture
def two_asked(prepared: DecodeMachine) -> DecodeMachine:
    """A load that has blocks and has asked two ranks."""
    prepared.handle(joined(2), 100.0)
    prepared.handle(start_load(), 100.0)
    return prepared


def test_one_failure_cancels_the_rest_and_the_report_waits_for_it(
    two_asked: DecodeMachine,
) -> None:
    two_asked.handle(answered(grant()), 100.1)
    assert two_asked.handle(answered(deny(), at(1)), 100.2) == []
    assert two_asked.handle(read_done(), 100.3) == [GIVEN_UP, DENIED_1]


def test_one_failure_releases_at_once_what_is_not_read(two_asked: DecodeMachine) -> None:
    assert two_asked.handle(answered(deny()), 100.1) == [GIVEN_UP_1, DENIED]


def test_a_good_read_does_not_save_a_load(two_asked: DecodeMachine) -> None:
    two_asked.handle(answered(grant()), 100.1)
    two_asked.handle(read_done(), 100.2)
    assert two_asked.handle(slot_read(), 100.3) == [RELEASED]
    assert two_asked.handle(answered(deny(), at(1)), 100.4) == [DENIED_1]


def test_the_first_failure_is_the_one_that_is_reported(two_asked: DecodeMachine) -> None:
    for rank in (0, 1):
        two_asked.handle(answered(grant(), at(rank)), 100.1)
    assert two_asked.handle(read_failed(), 100.2) == [GIVEN_UP]
    assert two_asked.handle(read_failed("stuck", 1), 100.3) == [GIVEN_UP_1, BROKEN]


@pytest.mark.parametrize(
    "event",
    [read_started(), read_done(), slot_read(), read_failed(), digest_compared()],
    ids=lambda event: type(event).__name__,
)
def test_events_of_unknown_reads_are_ignored(
    machine: DecodeMachine, event: events.DataEvent
) -> None:
    assert machine.handle(event, 100.0) == []
    machine.handle(prepare_load(), 100.0)
    assert machine.handle(event, 100.0) == [], "its peer is not known"
    machine.handle(joined(), 100.0)
    of_another_rank: Any = event
    assert machine.handle(replace(of_another_rank, rank=Rank(1)), 100.0) == []


def test_the_end_of_a_read_that_was_never_started_is_our_own_mistake(
    granted: DecodeMachine,
) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        granted.handle(read_done(), 100.1)
    assert str(raised.value) == (
        "load 'd1', prefill rank 0: ReadDone leads from GRANTED to CHECKING; allowed: "
        "['StartLoad to READING', 'Deny to FAILED', 'Renewed to FAILED', "
        "'EndpointLost to FAILED', 'Cancelled to FAILED']"
    )
    assert granted.handle(start_load(), 100.2) == [StartRead(PEER, Rank(0), grant(), start_load())]


# The table

EVENTS: dict[str, object] = {
    "Grant": grant(),
    "Deny": deny(),
    "Renewed": renewed(),
    "EndpointLost": lost(),
    "Cancelled": Cancelled(Failure(FailureKind.DROPPED, "dropped")),
    "StartLoad": start_load(),
    "ReadStarted": read_started(),
    "ReadDone": read_done(num_bytes=4096),
    "ReadFailed": read_failed(),
    "SlotRead": slot_read(),
    "DigestReply": digest_reply(),
    "DigestCompared": digest_compared(),
}
TABLE: dict[tuple[str, str], set[str]] = {
    ("ASKING", "Grant"): {"GRANTED"},
    ("ASKING", "Deny"): {"FAILED"},
    ("ASKING", "EndpointLost"): {"FAILED"},
    ("ASKING", "Cancelled"): {"FAILED"},
    ("GRANTED", "StartLoad"): {"READING"},
    ("GRANTED", "Deny"): {"FAILED"},
    ("GRANTED", "Renewed"): {"FAILED"},
    ("GRANTED", "EndpointLost"): {"FAILED"},
    ("GRANTED", "Cancelled"): {"FAILED"},
    ("READING", "ReadDone"): {"CHECKING"},
    ("READING", "ReadFailed"): {"FAILED"},
    ("READING", "Cancelled"): {"DRAINING"},
    ("CHECKING", "SlotRead"): {"DONE", "VERIFYING", "FAILED"},
    ("CHECKING", "ReadFailed"): {"FAILED"},
    ("CHECKING", "Cancelled"): {"DRAINING"},
    ("VERIFYING", "DigestCompared"): {"DONE", "FAILED"},
    ("VERIFYING", "Deny"): {"FAILED"},
    ("VERIFYING", "Renewed"): {"FAILED"},
    ("VERIFYING", "EndpointLost"): {"FAILED"},
    ("VERIFYING", "Cancelled"): {"FAILED"},
    ("DRAINING", "ReadDone"): {"FAILED"},
    ("DRAINING", "SlotRead"): {"FAILED"},
    ("DRAINING", "ReadFailed"): {"FAILED"},
}


def new_load(
    *states: State, record: Callable[[Transition], None] = no_record, **changed: Any
) -> Load:
    """Reads prefill's ranks in these states."""
    reads = {
        Rank(rank): RankRead(Rank(rank), RANK_LIFE, at(rank), (), state)
        for rank, state in enumerate(states)
    }
    load = Load(READER, D1, ticket(), CLAIM, PEER, deadline=0.0, record=record, reads=reads)
    for name, value in changed.items():
        setattr(load, name, value)
    return load


def test_the_table_has_these_transitions() -> None:
    transitions = {
        (state.name, event.__name__): {after.name for after in afters}
        for state, moves in TRANSITIONS.items()
        for event, afters in moves.items()
    }
    assert transitions == TABLE
    assert set(TRANSITIONS) == set(State)
    assert {name for _, name in TABLE} <= set(EVENTS)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("name", EVENTS)
def test_only_transitions_of_the_table_are_possible(state: State, name: str) -> None:
    for after in State:
        recorded: list[Transition] = []
        load = new_load(state, record=recorded.append)
        recorded.clear()
        (read,) = load.rank_reads
        if after.name in TABLE.get((state.name, name), ()):
            load._move(read, after, EVENTS[name])
            num_bytes = 4096 if name == "ReadDone" else 0
            peer = f"rank 0 at {at(0)}"
            cause = f"{name}: dropped" if name == "Cancelled" else name
            expected = Transition(D1, peer, state.name, after.name, cause, num_bytes)
            assert recorded == [expected]
            assert read.state is after
            continue
        words = f"load 'd1', prefill rank 0: {name} leads from {state.name} to {after.name}; allow"
        with pytest.raises(LocalProtocolError, match=words):
            load._move(read, after, EVENTS[name])
        assert recorded == []
        assert read.state is state


def test_only_the_end_of_a_posted_read_leads_out_of_the_posted_states() -> None:
    ends = {"ReadDone", "SlotRead", "ReadFailed"}
    leading_out = {
        event.__name__
        for state in POSTED
        for event, afters in TRANSITIONS[state].items()
        if not POSTED.issuperset(afters)
    }
    assert leading_out == ends
    assert {State.READING, State.CHECKING, State.DRAINING} == POSTED
    assert set(State) - {State.DONE, State.FAILED} == HOLDING


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_a_read_has_ended_when_nothing_leads_on(state: State) -> None:
    (read,) = new_load(state).rank_reads
    assert read.has_ended == (not TRANSITIONS[state])


# What it says of itself


@pytest.mark.parametrize(
    ("load", "waits_for"),
    [
        pytest.param(
            new_load(reads=None), f"the description of engine 'prefill' at {HOME}", id="no peer"
        ),
        pytest.param(new_load(State.ASKING), "a grant", id="asking"),
        pytest.param(new_load(State.GRANTED), "blocks of its own", id="granted"),
        pytest.param(new_load(State.READING), "data", id="reading"),
        pytest.param(new_load(State.CHECKING), "the generation slot", id="checking"),
        pytest.param(new_load(State.VERIFYING), "a digest", id="verifying"),
        pytest.param(
            new_load(State.DRAINING, State.FAILED),
            "the end of a read that is no longer wanted",
            id="draining",
        ),
        pytest.param(
            new_load(State.READING, State.ASKING, State.DONE, State.READING),
            "data, a grant",
            id="several",
        ),
        pytest.param(
            new_load(State.DONE, State.FAILED), "its caller, to start or to cancel it", id="over"
        ),
    ],
)
def test_a_load_says_what_it_waits_for(load: Load, waits_for: str) -> None:
    assert load.waits_for == waits_for


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param(new_load(reads=None), False, id="no peer"),
        pytest.param(new_load(), True, id="no rank to read"),
        pytest.param(new_load(State.GRANTED, State.GRANTED), True, id="granted by all"),
        pytest.param(new_load(State.GRANTED, State.ASKING), False, id="granted by one"),
        pytest.param(new_load(State.GRANTED, start=start_load()), False, id="has blocks"),
        pytest.param(new_load(State.FAILED), False, id="failed"),
    ],
)
def test_whether_a_load_lacks_blocks_alone(load: Load, *, expected: bool) -> None:
    assert load.lacks_only_blocks is expected


@pytest.mark.parametrize("state", POSTED, ids=lambda state: state.name)
@pytest.mark.parametrize("start", [None, start_load()], ids=["no blocks", "blocks"])
@pytest.mark.parametrize("granted", [None, grant()], ids=["no grant", "grant"])
def test_a_posted_read_needs_blocks_and_a_grant(
    state: State, start: StartLoad | None, granted: Any
) -> None:
    load = new_load(state, start=start)
    load.rank_reads[0].grant = granted
    if start is not None and granted is not None:
        load.validate()
        return
    with pytest.raises(LocalProtocolError, match=f"{state.name} without blocks or grant"):
        load.validate()


def test_a_failed_read_needs_a_failure() -> None:
    load = new_load(State.DONE, State.FAILED)
    with pytest.raises(LocalProtocolError, match="FAILED without a reason"):
        load.validate()
    load.failure = Failure(FailureKind.DENIED, "no")
    load.validate()


# What it records

RANK_0 = f"rank 0 at {at(0)}"


def moved(before: str, after: str, cause: str, num_bytes: int = 0) -> Transition:
    return Transition(D1, RANK_0, before, after, cause, num_bytes)


def of_load(before: str, after: str, cause: str) -> Transition:
    return Transition(D1, f"engine 'prefill' at {HOME}", before, after, cause)


def of_peer(before: str, after: str, cause: str) -> Transition:
    return Transition("", f"engine 'prefill' at {HOME}", before, after, cause)


PREPARED = [
    of_load("", "PREPARED", "PrepareLoad: offer 00000000"),
    of_peer("", "CONNECTING", "PrepareLoad"),
]
STARTED = of_load("PREPARED", "STARTED", "StartLoad: tokens 0 to 6")
ASKING = [
    *PREPARED,
    of_peer("CONNECTING", "READY", "PeerJoined: 1 of 1 ranks"),
    moved("", "ASKING", "PeerJoined"),
]
READING = [
    *ASKING,
    moved("ASKING", "GRANTED", "Grant"),
    STARTED,
    moved("GRANTED", "READING", "StartLoad"),
]
CHECKING = [*READING, moved("READING", "CHECKING", "ReadDone", 4096)]
TO_READING: list[events.DecodeEvent] = [prepare_load(), joined(), answered(grant()), start_load()]
TO_CHECKING: list[events.DecodeEvent] = [*TO_READING, read_done(num_bytes=4096)]
TO_VERIFIED: list[events.DecodeEvent] = [
    *TO_READING[:3],
    start_load(verify=True),
    read_started(),
    read_done(num_bytes=4096),
]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param(
            [*TO_CHECKING, slot_read()],
            [*CHECKING, moved("CHECKING", "DONE", "SlotRead"), of_load("STARTED", "LOADED", "")],
            id="good",
        ),
        pytest.param(
            [*TO_CHECKING, slot_read(EMPTY)],
            [
                *CHECKING,
                moved("CHECKING", "FAILED", "SlotRead"),
                of_load("STARTED", "FAILED", str(FENCED.failure)),
            ],
            id="fenced",
        ),
        pytest.param(
            [*TO_VERIFIED, slot_read(), answered(digest_reply()), digest_compared()],
            [
                *CHECKING,
                moved("CHECKING", "VERIFYING", "SlotRead"),
                moved("VERIFYING", "DONE", "DigestCompared"),
                of_load("STARTED", "LOADED", ""),
            ],
            id="verified",
        ),
        pytest.param(
            [*TO_READING, cancel_load(), read_done(num_bytes=4096)],
            [
                *READING,
                moved("READING", "DRAINING", "Cancelled: dropped"),
                moved("DRAINING", "FAILED", "ReadDone", 4096),
                of_load("STARTED", "FAILED", "dropped (dropped)"),
            ],
            id="cancelled while it is read",
        ),
        pytest.param(
            [prepare_load(), joined(), answered(deny()), start_load()],
            [
                *ASKING,
                moved("ASKING", "FAILED", "Deny"),
                STARTED,
                of_load("STARTED", "FAILED", "prefill rank 0 denied (denied)"),
            ],
            id="denied",
        ),
        pytest.param(
            [prepare_load(), joined(), cancel_load()],
            [
                *ASKING,
                moved("ASKING", "FAILED", "Cancelled: dropped"),
                of_load("PREPARED", "FAILED", "dropped (dropped)"),
            ],
            id="cancelled before it starts",
        ),
        pytest.param(
            [prepare_load(), PeerRefused(PEER, "another dtype"), start_load()],
            [
                *PREPARED,
                of_peer("CONNECTING", "BACKOFF", "PeerRefused: another dtype"),
                STARTED,
                of_load("STARTED", "FAILED", "another dtype (incompatible)"),
            ],
            id="not compatible",
        ),
    ],
)
def test_each_transition_of_a_load_is_recorded_once(
    steps: list[events.DecodeEvent], expected: list[Transition]
) -> None:
    recorded: list[Transition] = []
    machine = DecodeMachine(READER, recorded.append, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
    for step in steps:
        machine.handle(step, 100.0)
    assert recorded == expected
    assert is_forgotten(machine)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(answered(grant()), id="granted again"),
        pytest.param(answered(deny()), id="denied while it is read"),
        pytest.param(answered(renewed(CLAIM)), id="lost while it is read"),
        pytest.param(read_started(), id="its slices are known"),
        pytest.param(answered(digest_reply()), id="a digest that is not wanted"),
        pytest.param(Tick(), id="nothing is due"),
    ],
)
def test_what_changes_no_state_is_not_recorded(step: events.DecodeEvent) -> None:
    recorded: list[Transition] = []
    machine = DecodeMachine(READER, recorded.append, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
    for event in TO_READING:
        machine.handle(event, 100.0)
    recorded.clear()
    machine.handle(step, 100.1)
    assert recorded == []
