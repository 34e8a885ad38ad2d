"""The decode side: what is asked, read, checked, given up and reported."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from protocol_records import (
    CLAIM,
    D1,
    D2,
    GENERATION,
    HOME,
    OTHER_LIFE,
    PEER,
    RANK_LIFE,
    READER,
    RIVAL,
    STRANGER,
    abort,
    ask,
    at,
    deny,
    describe,
    description,
    done,
    drop,
    fetch,
    grant,
    hex32,
    joined,
    load,
    proof,
    prove,
    read_begun,
    read_done,
    read_failed,
    refusal,
    renew,
    renewed,
    routes,
    slot_read,
    ticket,
    verified,
    verify,
)

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Incarnation, Rank, RequestId
from nixl_kv.protocol import events, proofs
from nixl_kv.protocol.events import (
    Abandon,
    AddPeer,
    CheckSlot,
    Disconnect,
    DropPeer,
    EndpointLost,
    Failure,
    Loaded,
    PeerRefused,
    Send,
    StartRead,
    Tick,
    Why,
)
from nixl_kv.protocol.lateness import DRAIN_S, SILENCE_S
from nixl_kv.protocol.messages import Message, Reader
from nixl_kv.protocol.peers import BACKOFF_S, CONNECT_TIMEOUT_S
from nixl_kv.protocol.proving import is_awaited
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.receiving import HOLDING, POSTED, TRANSITIONS, Cause, Source, State
from nixl_kv.protocol.request import ASK_AGAIN_S, Request, Time
from nixl_kv.protocol.requests import Requests

TIMEOUT_S = 30.0
RENEW_S = 0.4
NOTHING = bytes(16)
ELSEWHERE = "tcp://10.9.9.9:5600"
NONCE2 = hex32(2)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    requests = Requests(READER, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
    made = Receiver(READER, requests)
    yield made
    made.requests.validate()


EVERYBODY = (0, 1, 2)


@pytest.fixture
def fetched(receiver: Receiver) -> Receiver:
    """A request came at second 100; its peer is not known yet."""
    receiver.handle(fetch(), 100.0)
    return receiver


@pytest.fixture
def asking(fetched: Receiver) -> Receiver:
    """Its peer is known, and asked with number 1 at second 100."""
    fetched.handle(joined(), 100.0)
    return fetched


@pytest.fixture
def granted(asking: Receiver) -> Receiver:
    """It is granted; it has no blocks."""
    asking.answered(grant(), at(0), 100.0)
    return asking


@pytest.fixture
def reading(granted: Receiver) -> Receiver:
    """Its blocks came at second 110."""
    granted.handle(load(), 110.0)
    return granted


@pytest.fixture
def checking(reading: Receiver) -> Receiver:
    """All its data has landed."""
    reading.handle(read_done(), 110.5)
    return reading


@pytest.fixture
def verifying(granted: Receiver) -> Receiver:
    """Its blocks came at second 110, with a load to be verified; its proof is asked for then."""
    granted.handle(load(verify=True), 110.0)
    granted.handle(read_begun(), 110.0)
    return granted


@pytest.fixture
def proving(verifying: Receiver) -> Receiver:
    """Its data landed, and its slot stood, before the proof came."""
    verifying.handle(read_done(), 110.5)
    verifying.handle(slot_read(), 110.6)
    return verifying


@pytest.fixture
def draining(reading: Receiver) -> Receiver:
    """It was dropped while its data was landing."""
    reading.handle(drop(), 110.5)
    return reading


def is_forgotten(receiver: Receiver) -> bool:
    return len(receiver.requests) == 0


GOOD = Loaded(D1, 7, None, PEER)
PROVEN = Loaded(D1, 7, None, PEER, verified=True)
CORRUPT = "what was read from prefill rank 0 is not what it has: K of head 0"

WHY = {
    "took its blocks back": Why.FENCED,
    "reading prefill rank": Why.BROKEN,
    "denied": Why.DENIED,
    "lease": Why.LEASE_LOST,
    "dropped": Why.DROPPED,
    "no KV within": Why.LATE,
    "silent": Why.LATE,
    "another dtype": Why.INCOMPATIBLE,
    "is not what it has": Why.CORRUPT,
}


def failed(reason: str, request: RequestId = D1, peer: events.PeerKey = PEER) -> Loaded:
    why = next((why for text, why in WHY.items() if text in reason), Why.UNREACHABLE)
    return Loaded(request, 7, Failure(why, reason), peer)


# One request from its arrival to its report


def test_a_request_from_its_arrival_to_its_report(receiver: Receiver) -> None:
    told = description()
    assert receiver.handle(fetch(), 100.0) == [Send(HOME, describe())]
    assert receiver.answered(told, HOME, 100.0) == [AddPeer(PEER, told), Disconnect(HOME)]
    assert receiver.handle(joined(), 100.0) == [Send(at(0), ask())]
    assert receiver.answered(grant(), at(0), 100.1) == []
    assert receiver.handle(load(), 100.2) == [StartRead(PEER, Rank(0), grant(), load())]
    assert receiver.handle(read_done(), 100.3) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert receiver.handle(slot_read(), 100.4) == [Send(at(0), done()), GOOD]
    assert is_forgotten(receiver)
    assert not receiver.busy


def test_blocks_may_come_before_the_peer_and_before_the_grant(fetched: Receiver) -> None:
    assert fetched.handle(load(), 100.0) == []
    assert fetched.handle(joined(), 100.1) == [Send(at(0), ask())]
    assert fetched.answered(grant(), at(0), 100.2) == [StartRead(PEER, Rank(0), grant(), load())]


def test_a_peer_that_is_known_is_asked_at_once(asking: Receiver) -> None:
    assert asking.handle(fetch(D2, RIVAL, nonce=NONCE2), 101.0) == [
        Send(at(0), ask(nonce=NONCE2, claim=RIVAL, number=2))
    ]


def test_a_peer_that_is_being_connected_is_asked_for_all_that_wait(fetched: Receiver) -> None:
    assert fetched.handle(fetch(D2, RIVAL, nonce=NONCE2), 100.0) == []
    assert fetched.handle(joined(), 100.1) == [
        Send(at(0), ask()),
        Send(at(0), ask(nonce=NONCE2, claim=RIVAL, number=2)),
    ]


def test_those_that_wait_for_another_peer_go_on_waiting(fetched: Receiver) -> None:
    other = events.PeerKey(PEER.engine, OTHER_LIFE, HOME)
    assert fetched.handle(fetch(D2, RIVAL, incarnation=OTHER_LIFE), 100.0) == [
        Send(HOME, describe(OTHER_LIFE))
    ]
    assert fetched.handle(joined(), 100.1) == [Send(at(0), ask())]
    fetched.handle(load(), 100.2)
    assert fetched.handle(PeerRefused(other, "another dtype"), 100.3) == [Disconnect(HOME)]
    assert fetched.handle(load(D2), 100.4) == [failed("another dtype", D2, other)]
    assert fetched.answered(grant(), at(0), 100.5) == [StartRead(PEER, Rank(0), grant(), load())]


def test_a_rank_asks_those_that_its_routes_name() -> None:
    reader = Reader(READER.engine, READER.incarnation, 1)
    requests = Requests(reader, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
    receiver = Receiver(reader, requests)
    receiver.handle(fetch(), 100.0)
    event = events.PeerJoined(PEER, description(2), routes(1, readers=[1]))
    assert receiver.handle(event, 100.0) == [Send(at(1), ask(reader=reader, readers=(1,)))]


def test_a_rank_that_nobody_reads_is_released_with_the_asks(fetched: Receiver) -> None:
    event = events.PeerJoined(PEER, description(3), (*routes(0), *routes(2, readers=())))
    assert fetched.handle(event, 100.0) == [Send(at(2), done()), Send(at(0), ask())]
    fetched.answered(grant(), at(0), 100.1)
    fetched.handle(load(), 100.2)
    fetched.handle(read_done(), 100.3)
    assert fetched.handle(slot_read(), 100.4) == [Send(at(0), done()), GOOD]


def test_a_rank_that_nobody_reads_is_released_for_a_request_that_is_over(
    fetched: Receiver,
) -> None:
    fetched.handle(drop(), 100.0)
    event = events.PeerJoined(PEER, description(2), (*routes(0), *routes(1, readers=())))
    assert fetched.handle(event, 100.1) == [Send(at(1), done()), Send(at(0), abort())]
    assert is_forgotten(fetched)


def test_a_rank_that_reads_nothing_is_done_with_its_blocks(fetched: Receiver) -> None:
    """As one stage of a pipeline might be, which has no layer with a cache."""
    event = events.PeerJoined(PEER, description(1), routes(0, readers=()))
    assert fetched.handle(event, 100.0) == [Send(at(0), done())]
    assert fetched.handle(Tick(), 100.0 + 2 * TIMEOUT_S) == []
    assert fetched.handle(load(), 190.0) == [GOOD]
    assert is_forgotten(fetched)


def test_data_is_read_from_each_rank_as_it_grants(fetched: Receiver) -> None:
    first, second = grant(), grant(slot=5, generation=b"\2" * 16)
    assert fetched.handle(joined(2, EVERYBODY), 100.0) == [
        Send(at(0), ask(readers=EVERYBODY)),
        Send(at(1), ask(readers=EVERYBODY, number=2)),
    ]
    assert fetched.answered(second, at(1), 100.1) == []
    assert fetched.handle(load(), 100.2) == [StartRead(PEER, Rank(1), second, load())]
    assert fetched.handle(read_done(1), 100.3) == [CheckSlot(PEER, Rank(1), D1, 5)]
    assert fetched.answered(first, at(0), 100.4) == [StartRead(PEER, Rank(0), first, load())]
    assert fetched.handle(slot_read(b"\2" * 16, 1), 100.5) == [Send(at(1), done())]
    assert fetched.handle(read_done(0), 100.6) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert fetched.handle(slot_read(), 100.7) == [Send(at(0), done()), GOOD]
    assert is_forgotten(fetched)


# The fence


@pytest.mark.parametrize(
    "found", [pytest.param(NOTHING, id="cleared"), pytest.param(b"\2" * 16, id="another grant's")]
)
def test_data_is_good_only_if_the_generation_still_stood(checking: Receiver, found: bytes) -> None:
    assert checking.handle(slot_read(found), 110.6) == [
        Send(at(0), abort()),
        failed("prefill rank 0 took its blocks back while they were read"),
    ]
    assert is_forgotten(checking)


def test_a_data_read_that_ends_in_an_error_fails_the_load(reading: Receiver) -> None:
    assert reading.handle(read_failed("reset"), 110.5) == [
        Send(at(0), abort()),
        failed("reading prefill rank 0 failed: reset"),
    ]
    assert is_forgotten(reading)


def test_a_slot_read_that_ends_in_an_error_fails_the_load(checking: Receiver) -> None:
    assert checking.handle(read_failed("reset"), 110.6) == [
        Send(at(0), abort()),
        failed("reading prefill rank 0 failed: reset"),
    ]


# Whether the bytes are prefill's


def test_a_load_that_is_verified_from_its_blocks_to_its_report(granted: Receiver) -> None:
    wanted = load(verify=True)
    assert granted.handle(wanted, 110.0) == [StartRead(PEER, Rank(0), grant(), wanted)]
    assert granted.handle(read_begun(), 110.1) == [Send(at(0), prove())]
    assert granted.handle(read_done(), 110.2) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert granted.handle(slot_read(), 110.3) == []
    assert not is_forgotten(granted)
    assert granted.answered(proof(), at(0), 110.4) == [verify()]
    assert granted.handle(verified(), 110.5) == [Send(at(0), done()), PROVEN]
    assert is_forgotten(granted)


Events = list[Callable[[Receiver], list[events.Action]]]
BEFORE: dict[str, Events] = {
    "while it is read": [],
    "while its slot is read": [lambda r: r.handle(read_done(), 110.2)],
}


@pytest.mark.parametrize("before", BEFORE)
def test_a_proof_that_comes_first_waits_for_the_slot(verifying: Receiver, before: str) -> None:
    for step in BEFORE[before]:
        step(verifying)
    assert verifying.answered(proof(), at(0), 110.3) == []
    if not BEFORE[before]:
        verifying.handle(read_done(), 110.4)
    assert verifying.handle(slot_read(), 110.5) == [verify()]
    assert verifying.handle(verified(), 110.6) == [Send(at(0), done()), PROVEN]


def test_only_what_is_loaded_is_compared(granted: Receiver) -> None:
    """The tokens before it were here already."""
    wanted = events.Load(D1, 4, 7, (b"\5\0\0\0",), verify=True)
    granted.handle(wanted, 110.0)
    granted.handle(read_begun(), 110.1)
    granted.handle(read_done(), 110.2)
    granted.handle(slot_read(), 110.3)
    expected = replace(verify(), begin=4, tables=wanted.tables)
    assert granted.answered(proof(), at(0), 110.4) == [expected]
    assert granted.handle(verified(), 110.5) == [
        Send(at(0), done()),
        Loaded(D1, 3, None, PEER, verified=True),
    ]


def test_what_differs_is_a_failure(proving: Receiver) -> None:
    proving.answered(proof(), at(0), 110.7)
    assert proving.handle(verified("K of head 0"), 110.8) == [Send(at(0), abort()), failed(CORRUPT)]
    assert is_forgotten(proving)


def test_what_cannot_be_compared_is_a_failure_of_another_kind(proving: Receiver) -> None:
    """Nothing says that the bytes are wrong."""
    proving.answered(proof(), at(0), 110.7)
    event = replace(verified(), refusal="no memory")
    ((sent, loaded),) = [proving.handle(event, 110.8)]
    assert sent == Send(at(0), abort())
    told = "what was read from prefill rank 0 cannot be verified: no memory"
    assert isinstance(loaded, Loaded)
    assert loaded.failure == Failure(Why.INTERNAL, told)
    assert is_forgotten(proving)


LOSSES: dict[str, Callable[[Receiver], list[events.Action]]] = {
    "connection": lambda r: r.handle(EndpointLost(at(0), "gone"), 110.8),
    "lease": lambda r: r.answered(renewed(1, CLAIM), at(0), 110.8),
    "denial": lambda r: r.answered(deny(), at(0), 110.8),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_comparison_needs_prefill_no_more(proving: Receiver, loss: str) -> None:
    """What is compared was held until it was here, and so was what it is compared with."""
    proving.answered(proof(), at(0), 110.7)
    assert LOSSES[loss](proving) == []
    assert proving.handle(verified(), 110.9) == [Send(at(0), done()), PROVEN]


@pytest.mark.parametrize("loss", LOSSES)
def test_without_a_proof_what_is_lost_stays_unproven(proving: Receiver, loss: str) -> None:
    assert LOSSES[loss](proving) != []
    assert is_forgotten(proving)


def test_a_comparison_is_awaited_until_its_load_is_over(proving: Receiver) -> None:
    wanted = verify()
    assert is_awaited(proving.requests.get(wanted.request), wanted)
    another = replace(wanted, proof=proof(claim=RIVAL))
    assert not is_awaited(proving.requests.get(wanted.request), another)
    proving.handle(drop(), 110.8)
    assert not is_awaited(proving.requests.get(wanted.request), wanted)


def test_a_proof_that_comes_twice_is_compared_once(proving: Receiver) -> None:
    assert proving.answered(proof(), at(0), 110.7) == [verify()]
    assert proving.answered(proof(columns=bytes(8)), at(0), 110.8) == []
    assert proving.handle(verified(), 110.9) == [Send(at(0), done()), PROVEN]
    assert proving.answered(proof(), at(0), 111.0) == []


def test_of_two_proofs_the_first_is_compared(verifying: Receiver) -> None:
    verifying.answered(proof(), at(0), 110.1)
    verifying.answered(proof(columns=bytes(8)), at(0), 110.2)
    verifying.handle(read_done(), 110.3)
    assert verifying.handle(slot_read(), 110.4) == [verify()]


def test_a_proof_after_the_end_is_nothing(verifying: Receiver) -> None:
    verifying.handle(read_failed("reset"), 110.1)
    assert is_forgotten(verifying)
    assert verifying.answered(proof(), at(0), 110.2) == []


def test_a_proof_of_what_is_drained_does_not_save_it(verifying: Receiver) -> None:
    verifying.handle(drop(), 110.1)
    assert verifying.answered(proof(), at(0), 110.2) == []
    assert verifying.handle(read_done(), 110.3) == [Send(at(0), abort()), failed(REASON)]


@pytest.mark.parametrize("early", [False, True], ids=["without a proof", "with its proof"])
def test_what_is_dropped_while_its_slot_is_read_is_not_proven(
    verifying: Receiver, *, early: bool
) -> None:
    if early:
        verifying.answered(proof(), at(0), 110.1)
    verifying.handle(read_done(), 110.2)
    assert verifying.handle(drop(), 110.3) == []
    assert verifying.handle(slot_read(), 110.4) == [Send(at(0), abort()), failed(REASON)]


def test_a_proof_that_nobody_asked_for_is_nothing(reading: Receiver) -> None:
    assert reading.answered(proof(), at(0), 110.1) == []
    assert reading.handle(read_done(), 110.2) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert reading.handle(slot_read(), 110.3) == [Send(at(0), done()), GOOD]


@pytest.mark.parametrize(
    ("message", "endpoint"),
    [
        pytest.param(proof(claim=RIVAL), at(0), id="another claim"),
        pytest.param(proof(reader=STRANGER), at(0), id="another reader"),
        pytest.param(proof(), at(1), id="another rank"),
        pytest.param(proof(), HOME, id="the engine"),
    ],
)
def test_a_proof_for_others_is_not_heard(
    proving: Receiver, message: Message, endpoint: str
) -> None:
    assert proving.answered(message, endpoint, 110.7) == []
    assert proving.answered(proof(), at(0), 110.8) == [verify()]


def test_without_a_proof_what_fell_is_fenced(verifying: Receiver) -> None:
    verifying.handle(read_done(), 110.1)
    assert verifying.handle(slot_read(NOTHING), 110.2) == [
        Send(at(0), abort()),
        failed("prefill rank 0 took its blocks back while they were read"),
    ]


def test_with_a_proof_what_fell_is_fenced_and_not_compared(verifying: Receiver) -> None:
    verifying.answered(proof(), at(0), 110.05)
    verifying.handle(read_done(), 110.1)
    assert verifying.handle(slot_read(NOTHING), 110.2) == [
        Send(at(0), abort()),
        failed("prefill rank 0 took its blocks back while they were read"),
    ]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(verified(), id="good"),
        pytest.param(verified("K of head 0"), id="bad"),
    ],
)
def test_a_comparison_whose_load_is_over_changes_nothing(
    proving: Receiver, event: proofs.Verified
) -> None:
    proving.answered(proof(), at(0), 110.7)
    assert proving.handle(drop(), 110.8) == [Send(at(0), abort()), failed(REASON)]
    assert proving.handle(event, 110.9) == []
    assert is_forgotten(proving)


def test_a_comparison_of_an_earlier_attempt_proves_nothing(proving: Receiver) -> None:
    """It may end when the same request is loaded anew."""
    assert proving.handle(verified(claim=RIVAL), 110.7) == []
    assert proving.handle(verified("K of head 0", claim=RIVAL), 110.7) == []
    assert proving.answered(proof(), at(0), 110.8) == [verify()]
    assert proving.handle(verified(), 110.9) == [Send(at(0), done()), PROVEN]


def test_a_comparison_while_it_is_read_is_nothing(verifying: Receiver) -> None:
    assert verifying.handle(verified(), 110.1) == []
    assert verifying.handle(read_done(), 110.2) == [CheckSlot(PEER, Rank(0), D1, 3)]


def test_what_cannot_be_proven_fails_as_soon_as_it_matters(verifying: Receiver) -> None:
    """A read under way is decided by the slot; then it is asked again, in vain."""
    verifying.requests._renewed_at = 1000.0
    assert verifying.answered(deny(), at(0), 110.1) == []
    assert verifying.handle(read_done(), 110.2) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert verifying.answered(deny(), at(0), 110.3) == []
    assert verifying.handle(slot_read(), 110.4) == []
    assert verifying.handle(Tick(), 110.0 + ASK_AGAIN_S) == [Send(at(0), prove())]
    assert verifying.answered(deny(), at(0), 111.1) == [failed("prefill rank 0 denied: gone")]


def test_what_is_denied_while_it_is_proven_fails(proving: Receiver) -> None:
    assert proving.answered(deny(), at(0), 110.7) == [failed("prefill rank 0 denied: gone")]


def test_a_lease_that_runs_out_while_it_is_proven_fails_it(proving: Receiver) -> None:
    assert proving.answered(renewed(2, CLAIM), at(0), 110.7) == [
        failed("prefill rank 0 let the lease run out")
    ]


def test_a_connection_that_breaks_while_it_is_proven_fails_it(proving: Receiver) -> None:
    assert proving.handle(EndpointLost(at(0), "closed"), 110.7) == [
        failed("prefill rank 0 is unreachable: closed")
    ]


def test_a_connection_that_breaks_while_it_is_read_does_not(verifying: Receiver) -> None:
    assert verifying.handle(EndpointLost(at(0), "closed"), 110.1) == []
    verifying.handle(read_done(), 110.2)
    assert verifying.handle(slot_read(), 110.3) == []
    assert verifying.answered(proof(), at(0), 110.4) == [verify()]


def test_what_is_not_proven_in_time_is_late(proving: Receiver) -> None:
    proving.requests._renewed_at = 1000.0
    proving.handle(Tick(), 110.0 + TIMEOUT_S - 0.5)
    assert proving.handle(Tick(), 110.0 + TIMEOUT_S - 0.01) == []
    assert proving.handle(Tick(), 110.0 + TIMEOUT_S) == [Send(at(0), abort()), failed(LATE)]


def test_what_is_not_compared_in_time_is_late(proving: Receiver) -> None:
    proving.requests._renewed_at = 1000.0
    proving.answered(proof(), at(0), 110.7)
    assert proving.handle(Tick(), 110.0 + TIMEOUT_S) == [Send(at(0), abort()), failed(LATE)]


def test_what_is_dropped_while_it_is_proven_ends_at_once(proving: Receiver) -> None:
    """Nothing writes into its blocks any more."""
    assert proving.handle(drop(), 110.7) == [Send(at(0), abort()), failed(REASON)]
    assert is_forgotten(proving)


def test_a_proof_is_asked_for_again_once_it_is_all_that_lacks(verifying: Receiver) -> None:
    verifying.requests._renewed_at = 1000.0
    assert verifying.handle(Tick(), 112.0) == []
    verifying.handle(read_done(), 112.1)
    assert verifying.handle(Tick(), 112.2) == []
    verifying.handle(slot_read(), 112.3)
    assert verifying.handle(Tick(), 112.4) == [Send(at(0), prove())]
    assert verifying.handle(Tick(), 112.4 + ASK_AGAIN_S - 0.01) == []
    assert verifying.handle(Tick(), 112.4 + ASK_AGAIN_S) == [Send(at(0), prove())]
    assert verifying.answered(proof(), at(0), 113.5) == [verify()]
    assert verifying.handle(Tick(), 120.0) == []


def test_a_load_that_is_verified_with_nothing_to_read_is_good(granted: Receiver) -> None:
    """Then there is no ReadBegun."""
    granted.handle(load(verify=True), 110.0)
    assert granted.handle(read_done(), 110.0) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert granted.handle(slot_read(), 110.1) == [Send(at(0), done()), PROVEN]


def test_a_load_that_is_verified_and_reads_no_rank_is_good(fetched: Receiver) -> None:
    fetched.handle(events.PeerJoined(PEER, description(1), routes(0, readers=())), 100.0)
    assert fetched.handle(load(verify=True), 100.1) == [PROVEN]


@pytest.fixture
def twice(fetched: Receiver) -> Receiver:
    """Two ranks are read and to be verified; both slots stood."""
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.handle(load(verify=True), 100.0)
    for rank in (0, 1):
        fetched.answered(grant(), at(rank), 100.1)
        fetched.handle(read_begun(rank), 100.1)
        fetched.handle(read_done(rank), 100.2)
        fetched.handle(slot_read(source=rank), 100.3)
    return fetched


def test_each_rank_is_asked_for_its_own_proof_and_compared_with_it(twice: Receiver) -> None:
    other = proof(columns=bytes(8))
    assert twice.answered(other, at(1), 100.4) == [verify(1, given=other)]
    assert twice.answered(proof(), at(0), 100.5) == [verify()]
    assert twice.handle(verified(source=1), 100.6) == [Send(at(1), done())]
    assert twice.handle(verified(), 100.7) == [Send(at(0), done()), PROVEN]


def test_one_rank_that_is_corrupt_fails_the_load_at_once(twice: Receiver) -> None:
    twice.answered(proof(), at(0), 100.4)
    assert twice.handle(verified("K of head 0"), 100.5) == [
        Send(at(0), abort()),
        Send(at(1), abort()),
        failed(CORRUPT),
    ]


def test_a_rank_that_was_proven_does_not_save_one_that_is_corrupt(twice: Receiver) -> None:
    for rank in (0, 1):
        twice.answered(proof(), at(rank), 100.4)
    assert twice.handle(verified(source=1), 100.5) == [Send(at(1), done())]
    assert twice.handle(verified("K of head 0"), 100.6) == [Send(at(0), abort()), failed(CORRUPT)]


def test_a_corrupt_rank_waits_for_the_reads_of_the_others(fetched: Receiver) -> None:
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.handle(load(verify=True), 100.0)
    for rank in (0, 1):
        fetched.answered(grant(), at(rank), 100.1)
        fetched.handle(read_begun(rank), 100.1)
    fetched.handle(read_done(), 100.2)
    fetched.handle(slot_read(), 100.3)
    fetched.answered(proof(), at(0), 100.4)
    assert fetched.handle(verified("K of head 0"), 100.5) == [Send(at(0), abort())]
    assert fetched.handle(read_done(1), 100.6) == [Send(at(1), abort()), failed(CORRUPT)]


def test_a_read_that_begins_after_its_request_is_over_asks_for_nothing(receiver: Receiver) -> None:
    assert receiver.handle(read_begun(), 100.0) == []


# No read may write any more when the report is made


REASON = "dropped"


def test_a_read_that_is_not_wanted_any_more_is_waited_for(reading: Receiver) -> None:
    assert reading.handle(drop(), 110.5) == []
    assert reading.handle(read_done(), 110.6) == [Send(at(0), abort()), failed(REASON)]


@pytest.mark.parametrize(
    "found", [pytest.param(GENERATION, id="stands"), pytest.param(NOTHING, id="fell")]
)
def test_a_slot_read_that_is_not_wanted_any_more_is_waited_for(
    checking: Receiver, found: bytes
) -> None:
    assert checking.handle(drop(), 110.6) == []
    assert checking.handle(slot_read(found), 110.7) == [Send(at(0), abort()), failed(REASON)]


def test_a_drained_read_may_end_in_an_error(draining: Receiver) -> None:
    assert draining.handle(read_failed("reset"), 110.6) == [
        Send(at(0), abort()),
        failed(REASON),
    ]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(drop(), id="dropped again"),
        pytest.param(Tick(), id="long after its deadline"),
        pytest.param(EndpointLost(at(0), "closed"), id="connection lost"),
    ],
)
def test_nothing_but_its_end_ends_a_drain(
    draining: Receiver, event: events.Drop | events.Tick | events.EndpointLost
) -> None:
    draining.handle(event, 1000.0)
    assert not is_forgotten(draining)
    assert draining.handle(read_done(), 1000.1) == [Send(at(0), abort()), failed(REASON)]


def test_one_failure_cancels_the_rest_and_the_report_waits_for_it(fetched: Receiver) -> None:
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.handle(load(), 100.0)
    fetched.answered(grant(), at(0), 100.1)
    assert fetched.answered(deny(), at(1), 100.2) == []
    assert fetched.handle(read_done(), 100.3) == [
        Send(at(0), abort()),
        failed("prefill rank 1 denied: gone"),
    ]


def test_one_failure_aborts_what_is_not_read_at_once(fetched: Receiver) -> None:
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.handle(load(), 100.0)
    assert fetched.answered(deny(), at(0), 100.1) == [
        Send(at(1), abort()),
        failed("prefill rank 0 denied: gone"),
    ]


def test_a_source_that_was_good_does_not_save_a_load(fetched: Receiver) -> None:
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.handle(load(), 100.0)
    fetched.answered(grant(), at(0), 100.1)
    fetched.handle(read_done(), 100.2)
    assert fetched.handle(slot_read(), 100.3) == [Send(at(0), done())]
    assert fetched.answered(deny(), at(1), 100.4) == [failed("prefill rank 1 denied: gone")]


def test_the_first_reason_is_the_one_that_is_told(fetched: Receiver) -> None:
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.handle(load(), 100.0)
    fetched.answered(grant(), at(0), 100.1)
    fetched.answered(grant(), at(1), 100.1)
    assert fetched.handle(read_failed("reset"), 100.2) == [Send(at(0), abort())]
    assert fetched.handle(read_failed("stuck", 1), 100.3) == [
        Send(at(1), abort()),
        failed("reading prefill rank 0 failed: reset"),
    ]


# Requests that need nothing


def test_a_granted_request_that_needs_nothing_is_aborted_and_forgotten(granted: Receiver) -> None:
    assert granted.handle(drop(), 101.0) == [Send(at(0), abort())]
    assert is_forgotten(granted)


def test_an_asking_request_that_needs_nothing_is_aborted_and_forgotten(asking: Receiver) -> None:
    assert asking.handle(drop(), 100.1) == [Send(at(0), abort())]
    assert is_forgotten(asking)
    assert asking.answered(grant(), at(0), 100.2) == [Send(at(0), abort())]


def test_the_abort_waits_until_there_is_somebody_to_send_it_to(fetched: Receiver) -> None:
    assert fetched.handle(drop(), 100.1) == []
    assert fetched.handle(joined(), 100.2) == [Send(at(0), abort())]
    assert is_forgotten(fetched)


def test_what_waits_to_be_aborted_is_forgotten_with_its_peer(fetched: Receiver) -> None:
    fetched.handle(drop(), 100.1)
    assert fetched.handle(PeerRefused(PEER, "another dtype"), 100.2) == [Disconnect(HOME)]
    assert is_forgotten(fetched)


def test_a_load_without_a_peer_is_reported_though_dropped(fetched: Receiver) -> None:
    fetched.handle(load(), 100.1)
    assert fetched.handle(drop(), 100.2) == []
    assert fetched.handle(joined(), 100.3) == [Send(at(0), abort()), failed("dropped")]
    assert is_forgotten(fetched)


def test_a_load_without_a_grant_is_reported_though_dropped(asking: Receiver) -> None:
    asking.handle(load(), 100.1)
    assert asking.handle(drop(), 100.2) == [Send(at(0), abort()), failed("dropped")]
    assert is_forgotten(asking)


def test_a_request_that_failed_and_needs_nothing_is_forgotten(asking: Receiver) -> None:
    assert asking.answered(deny(), at(0), 100.1) == []
    assert asking.handle(drop(), 100.2) == []
    assert is_forgotten(asking)


def test_an_unknown_request_needs_nothing(receiver: Receiver) -> None:
    assert receiver.handle(drop(), 100.0) == []


def test_a_load_that_was_never_fetched_is_reported(receiver: Receiver) -> None:
    assert receiver.handle(load(), 100.0) == [
        Loaded(D1, 7, Failure(Why.INTERNAL, "it was not asked for, or forgotten since"))
    ]


def test_a_load_after_a_failure_is_reported_at_once(asking: Receiver) -> None:
    asking.answered(deny(), at(0), 100.1)
    assert asking.handle(load(), 100.2) == [failed("prefill rank 0 denied: gone")]
    assert is_forgotten(asking)


# What prefill answers


@pytest.mark.parametrize(
    ("message", "endpoint"),
    [
        pytest.param(deny(reader=STRANGER), at(0), id="another reader"),
        pytest.param(deny(claim=RIVAL), at(0), id="another claim"),
        pytest.param(deny(), at(1), id="another rank"),
        pytest.param(grant(reader=STRANGER), at(0), id="another reader's grant"),
    ],
)
def test_answers_to_others_are_not_heard(asking: Receiver, message: Message, endpoint: str) -> None:
    assert asking.answered(message, endpoint, 100.1) == []
    assert asking.answered(grant(), at(0), 100.2) == []
    assert asking.handle(load(), 100.3) == [StartRead(PEER, Rank(0), grant(), load())]


@pytest.mark.parametrize(
    ("claim", "endpoint"),
    [
        pytest.param(RIVAL, at(0), id="unknown claim"),
        pytest.param(CLAIM, at(1), id="a rank that was not asked"),
    ],
)
def test_a_grant_that_nobody_wants_is_aborted(
    asking: Receiver, claim: Claim, endpoint: str
) -> None:
    message = grant(claim=claim, nonce=NONCE2, incarnation=OTHER_LIFE)
    assert asking.answered(message, endpoint, 100.1) == [
        Send(endpoint, abort(claim, nonce=NONCE2, life=OTHER_LIFE))
    ]


def test_a_grant_that_comes_twice_changes_nothing(granted: Receiver) -> None:
    again = grant(slot=9)
    assert granted.answered(again, at(0), 100.1) == []
    assert granted.handle(load(), 100.2) == [StartRead(PEER, Rank(0), grant(), load())]
    assert granted.answered(again, at(0), 100.3) == []
    assert granted.handle(read_done(), 100.4) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert granted.answered(again, at(0), 100.5) == []
    assert granted.handle(slot_read(), 100.6) == [Send(at(0), done()), GOOD]


def test_a_grant_after_the_failure_is_aborted(asking: Receiver) -> None:
    asking.answered(deny(), at(0), 100.1)
    assert asking.answered(grant(), at(0), 100.2) == [Send(at(0), abort())]
    assert asking.answered(grant(), at(0), 100.3) == [Send(at(0), abort())]


@pytest.mark.parametrize("reason", ["gone", "incarnation"])
def test_a_denial_is_the_reason_of_the_failure(asking: Receiver, reason: str) -> None:
    asking.handle(load(), 100.0)
    assert asking.answered(deny(reason), at(0), 100.1) == [
        failed(f"prefill rank 0 denied: {reason}")
    ]


@pytest.mark.parametrize("state", ["reading", "checking"])
@pytest.mark.parametrize(
    ("message", "endpoint"),
    [
        pytest.param(deny(), at(0), id="denied"),
        pytest.param(renewed(2, CLAIM), at(0), id="lost"),
    ],
)
def test_a_read_under_way_is_decided_by_the_slot_alone(
    state: str, message: Message, endpoint: str, request: pytest.FixtureRequest
) -> None:
    receiver: Receiver = request.getfixturevalue(state)
    assert receiver.answered(message, endpoint, 110.6) == []
    assert receiver.requests.get(D1) is not None
    if state == "reading":
        assert receiver.handle(read_done(), 110.7) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert receiver.handle(slot_read(), 110.8) == [Send(at(0), done()), GOOD]


def test_a_claim_that_is_lost_fails_before_it_is_read(granted: Receiver) -> None:
    assert granted.answered(renewed(2, RIVAL, CLAIM), at(0), 101.0) == []
    assert granted.handle(load(), 101.1) == [failed("prefill rank 0 let the lease run out")]


def test_an_ask_on_its_way_is_not_lost(asking: Receiver) -> None:
    assert asking.answered(renewed(2, CLAIM), at(0), 100.1) == []
    assert asking.answered(grant(), at(0), 100.2) == []
    assert asking.handle(load(), 100.3) == [StartRead(PEER, Rank(0), grant(), load())]


@pytest.mark.parametrize(
    ("message", "endpoint"),
    [
        pytest.param(renewed(2), at(0), id="nothing lost"),
        pytest.param(renewed(2, RIVAL), at(0), id="another claim"),
        pytest.param(renewed(2, CLAIM), at(1), id="another rank"),
        pytest.param(renewed(2, CLAIM, reader=STRANGER), at(0), id="another reader"),
    ],
)
def test_a_claim_that_is_not_lost_stays(granted: Receiver, message: Message, endpoint: str) -> None:
    assert granted.answered(message, endpoint, 101.0) == []
    assert granted.handle(load(), 101.1) == [StartRead(PEER, Rank(0), grant(), load())]


# Peers that cannot be used


NEW_REASON = "it has begun another life since"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        pytest.param(PeerRefused(PEER, "another dtype"), "another dtype", id="does not fit"),
        pytest.param(EndpointLost(HOME, "cannot connect"), f"{HOME}: cannot connect", id="lost"),
    ],
)
def test_without_a_peer_all_that_wait_for_it_fail(
    fetched: Receiver, event: events.PeerRefused | events.EndpointLost, reason: str
) -> None:
    fetched.handle(load(), 100.0)
    fetched.handle(fetch(D2, RIVAL, nonce=NONCE2), 100.0)
    assert fetched.handle(event, 100.1) == [Disconnect(HOME), failed(reason)]
    assert fetched.handle(load(D2), 100.2) == [failed(reason, D2)]
    assert is_forgotten(fetched)


def test_a_refusal_fails_all_that_wait(fetched: Receiver) -> None:
    fetched.handle(load(), 100.0)
    assert fetched.answered(refusal(NEW_REASON), HOME, 100.1) == [
        Disconnect(HOME),
        failed(NEW_REASON),
    ]


def test_a_refusal_of_another_life_fails_nothing(fetched: Receiver) -> None:
    fetched.handle(load(), 100.0)
    assert fetched.answered(refusal(NEW_REASON, OTHER_LIFE), HOME, 100.1) == []
    assert fetched.handle(joined(), 100.2) == [Send(at(0), ask())]


def test_a_refusal_from_elsewhere_is_not_heard(fetched: Receiver) -> None:
    """A forged ticket may have made us ask there; it must not harm the requests of others."""
    fetched.handle(load(), 100.0)
    assert fetched.answered(refusal("no"), ELSEWHERE, 100.1) == []
    assert fetched.handle(joined(), 100.2) == [Send(at(0), ask())]


def test_a_refusal_after_the_description_is_not_heard(granted: Receiver) -> None:
    assert granted.answered(refusal("late"), HOME, 100.1) == []
    assert granted.handle(load(), 100.2) == [StartRead(PEER, Rank(0), grant(), load())]


def test_a_peer_that_is_silent_is_given_up(fetched: Receiver) -> None:
    fetched.handle(load(), 100.0)
    assert fetched.handle(Tick(), 100.0 + CONNECT_TIMEOUT_S - 0.01) == []
    assert fetched.handle(Tick(), 100.0 + CONNECT_TIMEOUT_S) == [
        Disconnect(HOME),
        failed("no description in time"),
    ]
    assert is_forgotten(fetched)


def test_during_the_pause_requests_fail_at_once(fetched: Receiver) -> None:
    fetched.handle(drop(), 100.0)
    fetched.handle(PeerRefused(PEER, "another dtype"), 100.1)
    assert fetched.handle(fetch(D2, RIVAL), 100.2) == []
    assert fetched.handle(load(D2), 100.3) == [failed("another dtype", D2)]
    assert fetched.busy
    assert fetched.handle(Tick(), 100.1 + BACKOFF_S) == []
    assert not fetched.busy
    assert fetched.handle(fetch(), 101.2) == [Send(HOME, describe())]


def test_a_failed_request_is_not_read_though_its_peer_comes_back(fetched: Receiver) -> None:
    """It is still to be reported; whatever it does about its offer, it ends with an abort."""
    fetched.handle(PeerRefused(PEER, "another dtype"), 100.1)
    fetched.handle(Tick(), 100.1 + BACKOFF_S)
    fetched.handle(fetch(D2, RIVAL, nonce=NONCE2), 102.0)
    actions = fetched.handle(joined(), 102.1)
    assert [action for action in actions if action.message.claim == CLAIM][-1] == Send(
        at(0), abort()
    )
    assert fetched.handle(load(), 102.2) == [failed("another dtype")]


# Connections that break


def test_with_the_connection_all_that_is_not_read_fails(granted: Receiver) -> None:
    granted.handle(fetch(D2, RIVAL, nonce=NONCE2), 100.0)
    granted.handle(load(D2), 100.0)
    assert granted.handle(EndpointLost(at(0), "closed"), 100.5) == [
        failed("prefill rank 0 is unreachable: closed", D2)
    ]
    assert granted.handle(load(), 100.6) == [failed("prefill rank 0 is unreachable: closed")]


def test_without_the_connection_a_read_goes_on_and_its_peer_is_kept(reading: Receiver) -> None:
    assert reading.handle(EndpointLost(at(0), "closed"), 110.1) == []
    assert reading.handle(Tick(), 110.2) == [Send(at(0), renew(2, CLAIM))]
    assert reading.handle(read_done(), 110.3) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert reading.handle(Tick(), 110.4) == []
    assert reading.handle(slot_read(), 110.5) == [Send(at(0), done()), GOOD]
    assert reading.busy
    assert reading.handle(Tick(), 110.6) == [DropPeer(PEER), Disconnect(at(0))]
    assert not reading.busy


def test_new_requests_fail_while_a_lost_peer_is_still_read(reading: Receiver) -> None:
    reading.handle(EndpointLost(at(0), "closed"), 110.1)
    assert reading.handle(fetch(D2, RIVAL), 110.2) == []
    assert reading.handle(load(D2), 110.3) == [failed(f"{at(0)}: closed", D2)]


def test_a_connection_that_nobody_uses_may_break(asking: Receiver) -> None:
    assert asking.handle(EndpointLost(ELSEWHERE, "closed"), 100.1) == []
    assert asking.answered(grant(), at(0), 100.2) == []
    assert asking.handle(load(), 100.3) == [StartRead(PEER, Rank(0), grant(), load())]


def test_one_broken_connection_aborts_at_the_other_rank(fetched: Receiver) -> None:
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.handle(load(), 100.0)
    assert fetched.handle(EndpointLost(at(1), "closed"), 100.5) == [
        Send(at(0), abort()),
        failed("prefill rank 1 is unreachable: closed"),
    ]


# Time


LATE = "no KV within 30 s"


def test_an_ask_without_an_answer_is_asked_again(asking: Receiver) -> None:
    asking.requests._renewed_at = 1000.0
    assert asking.handle(Tick(), 100.0 + ASK_AGAIN_S - 0.01) == []
    assert asking.handle(Tick(), 100.0 + ASK_AGAIN_S) == [Send(at(0), ask(number=2))]
    assert asking.handle(Tick(), 101.5) == []
    assert asking.handle(Tick(), 102.0) == [Send(at(0), ask(number=3))]


def test_only_the_rank_that_did_not_answer_is_asked_again(fetched: Receiver) -> None:
    fetched.requests._renewed_at = 1000.0
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.answered(grant(), at(0), 100.1)
    assert fetched.handle(Tick(), 101.0) == [Send(at(1), ask(number=3, readers=EVERYBODY))]


def test_who_gets_no_answer_is_given_up(asking: Receiver) -> None:
    asking.requests._renewed_at = 1000.0
    asking.handle(Tick(), 129.5)
    assert asking.handle(Tick(), 100.0 + TIMEOUT_S - 0.01) == []
    assert asking.handle(Tick(), 100.0 + TIMEOUT_S) == [Send(at(0), abort())]
    assert asking.handle(load(), 131.0) == [failed(LATE)]


def test_who_waits_for_blocks_alone_may_wait(granted: Receiver) -> None:
    assert granted.handle(Tick(), 100.0 + 10 * TIMEOUT_S) == [Send(at(0), renew(2, CLAIM))]
    assert granted.handle(load(), 500.0) == [StartRead(PEER, Rank(0), grant(), load())]


def test_who_waits_for_one_rank_as_well_may_not(fetched: Receiver) -> None:
    fetched.requests._renewed_at = 1000.0
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.answered(grant(), at(0), 100.1)
    assert fetched.handle(Tick(), 100.0 + TIMEOUT_S) == [
        Send(at(0), abort()),
        Send(at(1), abort()),
    ]


def test_the_time_runs_anew_from_the_blocks_on(reading: Receiver) -> None:
    reading.requests._renewed_at = 1000.0
    assert reading.handle(Tick(), 110.0 + TIMEOUT_S - 0.01) == []
    assert reading.handle(read_done(), 139.995) == [CheckSlot(PEER, Rank(0), D1, 3)]
    assert reading.handle(Tick(), 110.0 + TIMEOUT_S) == []
    assert reading.handle(slot_read(), 140.1) == [Send(at(0), abort()), failed(LATE)]


def test_a_read_that_does_not_end_after_its_time_is_stopped(reading: Receiver) -> None:
    reading.requests._renewed_at = 1000.0
    late = 110.0 + TIMEOUT_S
    assert reading.handle(Tick(), late) == []
    assert reading.handle(Tick(), late + DRAIN_S - 0.01) == []
    assert reading.handle(Tick(), late + DRAIN_S) == [Abandon(D1, Rank(0))]
    assert reading.handle(Tick(), late + DRAIN_S + 1) == []
    assert reading.handle(read_failed("stopped"), 150.0) == [Send(at(0), abort()), failed(LATE)]


def test_a_read_whose_request_is_over_may_take_its_time(reading: Receiver) -> None:
    """It harms nobody, and ends by itself as a rule."""
    reading.requests._renewed_at = 1000.0
    reading.handle(drop(), 110.1)
    assert reading.handle(Tick(), 110.0 + TIMEOUT_S - 0.01) == []
    assert reading.handle(Tick(), 110.0 + TIMEOUT_S) == []
    assert reading.handle(Tick(), 110.0 + TIMEOUT_S + DRAIN_S) == [Abandon(D1, Rank(0))]


def test_a_read_from_a_rank_that_fell_silent_is_given_up(reading: Receiver) -> None:
    """Its process may be stopped, and its host cut off; neither ends a read."""
    reading.requests._renewed_at = 1000.0
    reading.handle(EndpointLost(at(0), "no heartbeat"), 110.1)
    assert reading.handle(Tick(), 110.1 + SILENCE_S - 0.01) == []
    assert reading.handle(Tick(), 110.1 + SILENCE_S) == []
    given_up = 110.1 + SILENCE_S + DRAIN_S
    assert reading.handle(Tick(), given_up) == [Abandon(D1, Rank(0))]
    assert reading.handle(read_failed("stopped"), given_up) == [
        Send(at(0), abort()),
        failed("prefill fell silent while it was read"),
    ]


@pytest.mark.parametrize(("life", "heard"), [(RANK_LIFE, True), (OTHER_LIFE, False)])
def test_a_rank_that_speaks_again_in_the_same_life_is_not_silent(
    reading: Receiver, life: str, *, heard: bool
) -> None:
    reading.handle(EndpointLost(at(0), "no heartbeat"), 110.1)
    reading.answered(renewed(2, life=life), at(0), 110.2)
    reading.handle(Tick(), 110.1 + SILENCE_S)
    landed = reading.handle(read_done(), 113.0)
    assert (landed == [CheckSlot(PEER, Rank(0), D1, 3)]) is heard


def test_a_machine_that_begins_anew_knows_nothing(reading: Receiver) -> None:
    reading.requests.clear()
    reading.directory.clear()
    assert not reading.busy
    assert reading.handle(read_done(), 110.2) == []
    assert reading.handle(fetch(), 110.3) == [Send(HOME, describe())]


def test_a_peer_that_connects_takes_no_more_than_the_requests_time() -> None:
    requests = Requests(READER, timeout_s=0.5, renew_interval_s=RENEW_S)
    receiver = Receiver(READER, requests)
    receiver.handle(fetch(), 100.0)
    receiver.handle(load(), 100.25)
    assert receiver.handle(Tick(), 100.7) == []
    assert receiver.handle(Tick(), 100.75) == [failed("no KV within 0.5 s")]
    assert receiver.handle(joined(), 100.8) == []


# Renewals


@pytest.mark.parametrize(
    "state", ["asking", "granted", "reading", "checking", "proving", "draining"]
)
def test_whatever_prefill_may_hold_is_renewed(state: str, request: pytest.FixtureRequest) -> None:
    receiver: Receiver = request.getfixturevalue(state)
    receiver.requests.get(D1).sources[Rank(0)].ask_again_at = 1000.0
    assert receiver.handle(Tick(), 111.0) == [Send(at(0), renew(2, CLAIM))]


def test_what_has_ended_is_not_renewed(asking: Receiver) -> None:
    asking.answered(deny(), at(0), 100.1)
    assert asking.handle(Tick(), 100.5) == []


def test_what_is_not_asked_yet_is_not_renewed(fetched: Receiver) -> None:
    assert fetched.handle(Tick(), 100.5) == []


def test_renewals_have_their_interval_and_the_numbers_of_the_asks(granted: Receiver) -> None:
    assert granted.handle(Tick(), 100.0) == [Send(at(0), renew(2, CLAIM))]
    assert granted.handle(Tick(), 100.0 + RENEW_S - 0.01) == []
    assert granted.handle(fetch(D2, RIVAL, nonce=NONCE2), 100.395) == [
        Send(at(0), ask(nonce=NONCE2, claim=RIVAL, number=3))
    ]
    assert granted.handle(Tick(), 100.0 + RENEW_S) == [Send(at(0), renew(4, CLAIM, RIVAL))]


def test_each_rank_gets_a_renewal_of_its_own_claims(fetched: Receiver) -> None:
    fetched.handle(joined(2, EVERYBODY), 100.0)
    fetched.answered(deny(), at(0), 100.0)
    fetched.handle(fetch(D2, RIVAL, nonce=NONCE2), 100.0)
    assert fetched.handle(Tick(), 100.1) == [
        Send(at(0), renew(5, RIVAL)),
        Send(at(1), renew(6, RIVAL)),
    ]


def test_lives_are_renewed_apart_though_they_have_one_endpoint(reading: Receiver) -> None:
    reading.handle(EndpointLost(at(0), "closed"), 110.1)
    reading.handle(fetch(D2, RIVAL, incarnation=OTHER_LIFE), 110.2)
    key = events.PeerKey(PEER.engine, OTHER_LIFE, HOME)
    again = description(life=OTHER_LIFE, rank_life=hex32(0xB2))
    reading.handle(events.PeerJoined(key, again, routes(0)), 110.2)
    assert reading.handle(Tick(), 110.3) == [
        Send(at(0), renew(3, CLAIM)),
        Send(at(0), renew(4, RIVAL, life=hex32(0xB2))),
    ]


# Ends of reads that concern nobody


@pytest.mark.parametrize(
    "event",
    [read_done(), slot_read(), read_failed("reset"), verified()],
    ids=["data", "slot", "error", "comparison"],
)
def test_the_end_of_an_unknown_requests_read_is_nothing(
    receiver: Receiver, event: events.DataEvent
) -> None:
    assert receiver.handle(event, 100.0) == []


def test_the_end_of_a_read_that_never_began_is_our_own_mistake(granted: Receiver) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        granted.handle(read_done(), 100.1)
    assert str(raised.value) == (
        "source 0 cannot be LANDED in state GRANTED; allowed: ['BLOCKS', 'REFUSED', 'UNWANTED']"
    )


# The book


def test_the_book_says_what_is_going_on(receiver: Receiver) -> None:
    seen = [(repr(receiver.requests), receiver.busy)]
    for step in (fetch(), joined(), fetch(D2, RIVAL), load(D2)):
        receiver.handle(step, 100.0)
        seen.append((repr(receiver.requests), receiver.busy))
    receiver.answered(grant(claim=RIVAL), at(0), 100.0)
    seen.append((repr(receiver.requests), receiver.busy))
    assert seen == [
        ("<Requests: 0; sources: none>", False),
        ("<Requests: 1; sources: none>", True),
        ("<Requests: 1; sources: 1 ASKING>", True),
        ("<Requests: 2; sources: 2 ASKING>", True),
        ("<Requests: 2; sources: 2 ASKING>", True),
        ("<Requests: 2; sources: 1 ASKING, 1 READING>", True),
    ]


def test_memory_is_in_use_while_a_read_may_be_reading_or_begun(granted: Receiver) -> None:
    used = [granted.requests.in_use()]
    for step in (load(), read_done(), drop(), slot_read()):
        granted.handle(step, 101.0)
        used.append(granted.requests.in_use())
    assert used == [{PEER}, {PEER}, {PEER}, {PEER}, set()]


def a_request(*states: State) -> Request:
    sources = {
        Rank(rank): Source(Rank(rank), Incarnation(RANK_LIFE), at(rank), (), state)
        for rank, state in enumerate(states)
    }
    return Request(READER, D1, ticket(), CLAIM, PEER, Time(0.0), sources)


@pytest.mark.parametrize("state", POSTED, ids=lambda state: state.name)
def test_a_read_without_blocks_or_grant_is_found(state: State) -> None:
    request = a_request(state)
    with pytest.raises(LocalProtocolError, match=f"{state.name} without blocks or grant"):
        request.validate()
    request.load = load()
    with pytest.raises(LocalProtocolError, match=f"{state.name} without blocks or grant"):
        request.validate()
    request.load, request.sources[Rank(0)].grant = None, grant()
    with pytest.raises(LocalProtocolError, match=f"{state.name} without blocks or grant"):
        request.validate()
    request.load = load()
    request.validate()


def test_a_failure_without_a_reason_is_found() -> None:
    request = a_request(State.DONE, State.FAILED)
    with pytest.raises(LocalProtocolError, match="FAILED without a reason"):
        request.validate()
    request.failure = Failure(Why.DENIED, "gone")
    request.validate()


def test_the_book_checks_its_requests(receiver: Receiver) -> None:
    receiver.requests._requests[RequestId("bad")] = a_request(State.FAILED)
    with pytest.raises(LocalProtocolError, match="FAILED without a reason"):
        receiver.requests.validate()
    receiver.requests._requests.clear()


def test_the_table_of_a_sources_life() -> None:
    moves = {
        (state.name, cause.name): following.name
        for state, causes in TRANSITIONS.items()
        for cause, following in causes.items()
    }
    assert moves == {
        ("ASKING", "GRANT"): "GRANTED",
        ("ASKING", "REFUSED"): "FAILED",
        ("ASKING", "UNWANTED"): "FAILED",
        ("GRANTED", "BLOCKS"): "READING",
        ("GRANTED", "REFUSED"): "FAILED",
        ("GRANTED", "UNWANTED"): "FAILED",
        ("READING", "LANDED"): "CHECKING",
        ("READING", "BROKEN"): "FAILED",
        ("READING", "UNWANTED"): "DRAINING",
        ("CHECKING", "STANDS"): "DONE",
        ("CHECKING", "UNPROVEN"): "PROVING",
        ("CHECKING", "FELL"): "FAILED",
        ("CHECKING", "BROKEN"): "FAILED",
        ("CHECKING", "UNWANTED"): "DRAINING",
        ("PROVING", "PROVEN"): "DONE",
        ("PROVING", "CORRUPT"): "FAILED",
        ("PROVING", "REFUSED"): "FAILED",
        ("PROVING", "UNWANTED"): "FAILED",
        ("DRAINING", "LANDED"): "FAILED",
        ("DRAINING", "STANDS"): "FAILED",
        ("DRAINING", "FELL"): "FAILED",
        ("DRAINING", "BROKEN"): "FAILED",
        ("DRAINING", "UNWANTED"): "DRAINING",
        ("DONE", "UNWANTED"): "DONE",
        ("FAILED", "UNWANTED"): "FAILED",
    }
    assert set(TRANSITIONS) == set(State)


def test_the_only_way_out_of_a_posted_read_is_its_end() -> None:
    ends = {Cause.LANDED, Cause.STANDS, Cause.UNPROVEN, Cause.FELL, Cause.BROKEN}
    leaving = {
        cause
        for state in POSTED
        for cause, following in TRANSITIONS[state].items()
        if following not in POSTED
    }
    assert leaving <= ends
    assert {State.READING, State.CHECKING, State.DRAINING} == POSTED
    assert set(State) - {State.DONE, State.FAILED} == HOLDING


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.name)
def test_no_move_but_those_of_the_table(state: State, cause: Cause) -> None:
    source = Source(Rank(0), Incarnation(RANK_LIFE), at(0), (), state)
    following = TRANSITIONS[state].get(cause)
    if following is None:
        with pytest.raises(LocalProtocolError, match=f"{cause.name} in state {state.name}"):
            source.move(cause)
        following = state
    else:
        source.move(cause)
    assert source.state is following
    assert source.ended == (following in {State.DONE, State.FAILED})


# What others could spoil


def test_a_forged_ticket_does_not_redirect_the_true_ones(receiver: Receiver) -> None:
    """It names a known engine and life, at an address of somebody else's."""
    forged = fetch(D2, RIVAL, remote_port=1)
    assert receiver.handle(forged, 100.0) == [Send("tcp://10.0.0.1:1", describe())]
    assert receiver.handle(fetch(), 100.1) == [Send(HOME, describe())]
    assert receiver.answered(description(), "tcp://10.0.0.1:1", 100.2)[0] != AddPeer(
        PEER, description()
    )
    assert receiver.handle(joined(), 100.3) == [Send(at(0), ask())]


def test_a_second_fetch_of_one_request_is_refused(fetched: Receiver) -> None:
    with pytest.raises(LocalProtocolError, match="'d1' was fetched before"):
        fetched.handle(fetch(), 100.1)


def test_a_peer_that_joins_unasked_is_dropped(receiver: Receiver) -> None:
    assert receiver.handle(joined(), 100.0) == [DropPeer(PEER)]


def test_renewals_heed_the_shortest_lease(asking: Receiver) -> None:
    """Prefill's configuration counts, not ours."""
    asking.handle(Tick(), 100.0)
    asking.answered(grant(lease_s=0.5), at(0), 100.05)
    assert asking.handle(Tick(), 100.09) == []
    assert asking.handle(Tick(), 100.11) == [Send(at(0), renew(3, CLAIM))]
