"""The circuit breaker: when loads fail at once, and when they are tried again."""

from collections.abc import Callable

import pytest

from nixl_kv.ids import Endpoint
from nixl_kv.protocol import breaker, events, messages
from nixl_kv.protocol.breaker import (
    KEPT_S,
    MAX_CIRCUITS,
    MAX_PAUSE_S,
    PAUSE_S,
    PROBE_S,
    TRANSITIONS,
    Breaker,
    State,
)
from nixl_kv.protocol.events import Failure, FailureKind, PeerKey, Transition
from nixl_kv.protocol.peers import unnamed
from support.records import (
    HOME,
    OTHER_LIFE,
    PEER,
    at,
    describe,
    description,
    read_done,
    refusal,
    renewed,
)

SILENT = Failure(FailureKind.UNREACHABLE, "no answer in 5 s")
TICK = events.Tick()
RANKS = 2


class Subject:
    """A breaker, the time, and the transitions that it recorded."""

    def __init__(self) -> None:
        self.recorded: list[Transition] = []
        self.now = 100.0
        self.breaker = Breaker(
            self.recorded.append, lambda ranks: [events.Disconnect(rank.endpoint) for rank in ranks]
        )

    @property
    def state(self) -> State | None:
        circuit = self.breaker.circuits.get(PEER)
        return None if circuit is None else circuit.state

    def fail(self, times: int = 1, key: PeerKey = PEER) -> events.Actions:
        actions: events.Actions = []
        for _ in range(times):
            actions += self.breaker.on_failure(key, SILENT, self.now)
        return actions

    def tick_after(self, seconds: float, room: int = 64) -> events.Actions:
        self.now += seconds
        return self.breaker.on_tick(TICK, self.now, room)

    def describe(self) -> events.Actions:
        return self.breaker.on_description(description(RANKS), HOME)

    def reply(self, rank: int) -> events.Actions:
        return self.breaker.on_reply(renewed(), at(rank))


@pytest.fixture
def subject() -> Subject:
    return Subject()


@pytest.fixture
def probed(subject: Subject) -> Subject:
    subject.fail(2)
    assert subject.tick_after(PAUSE_S) == [events.Send(HOME, describe())]
    return subject


def test_one_failure_happens_by_itself_and_the_second_opens_the_circuit(subject: Subject) -> None:
    assert subject.fail() == []
    assert subject.breaker.check(PEER, subject.now) is None
    assert subject.fail() == [events.PeerUnreachable(PEER, SILENT.detail)]
    failure = subject.breaker.check(PEER, subject.now)
    assert failure is not None
    assert failure.is_known
    assert failure.detail == SILENT.detail
    assert subject.fail() == [], "it is reported once"


def test_a_restarted_engine_is_tried_at_once(subject: Subject) -> None:
    subject.fail(2)
    restarted = PeerKey(PEER.engine, OTHER_LIFE, PEER.endpoint)
    assert subject.breaker.check(restarted, subject.now) is None


def test_a_probe_ends_well_when_the_directory_and_all_ranks_have_answered(probed: Subject) -> None:
    assert probed.describe() == [events.Disconnect(at(rank)) for rank in range(RANKS)]
    assert probed.describe() == [], "a second description changes nothing"
    assert probed.reply(0) == []
    assert probed.breaker.check(PEER, probed.now) is not None
    assert probed.reply(1) == [events.PeerReachable(PEER)]
    assert probed.breaker.check(PEER, probed.now) is None
    assert probed.breaker.deadlines.next == float("inf")


def test_an_answer_that_no_probe_awaits_changes_nothing(subject: Subject) -> None:
    subject.fail(2)
    assert subject.describe() == subject.reply(0) == []
    subject.breaker.on_endpoint_lost(events.EndpointLost(HOME, "refused"), subject.now)
    subject.breaker.on_refusal(refusal("restarted"), PEER)
    assert subject.state is State.OPEN


def lose(endpoint: Endpoint) -> Callable[[Subject], None]:
    lost = events.EndpointLost(endpoint, "refused")
    return lambda subject: subject.breaker.on_endpoint_lost(lost, subject.now)


def describe_and_lose(subject: Subject) -> None:
    subject.describe()
    lose(at(1))(subject)


def stay_silent(subject: Subject) -> None:
    assert subject.tick_after(PROBE_S) == []


@pytest.mark.parametrize("fail", [lose(HOME), describe_and_lose, stay_silent])
def test_after_a_failed_probe_the_pause_doubles(
    probed: Subject, fail: Callable[[Subject], None]
) -> None:
    pauses = []
    for _ in range(9):
        fail(probed)
        assert probed.state is State.OPEN
        pauses.append(probed.breaker.deadlines.next - probed.now)
        assert probed.tick_after(pauses[-1]) == [events.Send(HOME, describe())]
        probed.breaker.check(PEER, probed.now)  # a load wants it
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64, MAX_PAUSE_S]


def test_no_ticket_names_an_incarnation_that_is_gone(probed: Subject) -> None:
    probed.breaker.on_refusal(refusal("restarted"), PEER)
    assert probed.state is None


@pytest.mark.parametrize("failures", [1, 2])
def test_a_good_read_closes_the_circuit(subject: Subject, failures: int) -> None:
    subject.fail(failures)
    expected = [events.PeerReachable(PEER)] if failures == 2 else []
    assert subject.breaker.on_read(PEER, read_done(0)) == expected
    subject.fail()
    assert subject.state is State.CLOSED, "it counts from the beginning"


def test_an_engine_that_no_load_wants_is_probed_no_longer(probed: Subject) -> None:
    stay_silent(probed)
    assert probed.tick_after(KEPT_S) == []
    assert probed.state is None


def test_an_engine_that_loads_always_want_is_probed_as_long(probed: Subject) -> None:
    """Else its circuit would be forgotten, and two loads would wait for their timeout again."""
    ends_at = probed.now + 3 * KEPT_S
    probes = 0
    while probed.now < ends_at:
        probes += probed.tick_after(1.0) == [events.Send(HOME, describe())]
        failure = probed.breaker.check(PEER, probed.now)
        assert failure is not None, "a load would wait"
        assert failure.is_known
    assert probes >= 3 * KEPT_S // (MAX_PAUSE_S + PROBE_S) - 1


def test_the_number_of_circuits_is_bounded(subject: Subject) -> None:
    for number in range(MAX_CIRCUITS + 10):
        subject.fail(2, unnamed(at(number)))
    assert len(subject.breaker.circuits) == MAX_CIRCUITS
    subject.tick_after(PAUSE_S, room=MAX_CIRCUITS)
    subject.fail()
    assert subject.breaker.num_searched == MAX_CIRCUITS - 1, "it still probes the oldest one"
    subject.breaker.clear()
    assert subject.breaker.num_searched == 0
    assert subject.breaker.deadlines.next == float("inf")


EVENTS = (
    *(TICK, SILENT, read_done(0), renewed(), refusal("restarted")),
    events.EndpointLost(HOME, "refused"),
)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_each_state_follows_its_table(state: State, event: object) -> None:
    """The tests above make each of these transitions."""
    subject = Subject()
    subject.fail(1 if state is State.CLOSED else 2)
    if state is State.HALF_OPEN:
        subject.tick_after(PAUSE_S)
        subject.describe()
        subject.reply(0)
    before, subject.now = len(subject.recorded), subject.now + KEPT_S
    match event:
        case events.Tick():
            subject.breaker.on_tick(event, subject.now, 64)
        case Failure():
            subject.breaker.on_failure(PEER, event, subject.now)
        case events.ReadDone():
            subject.breaker.on_read(PEER, event)
        case messages.HeartbeatReply():
            subject.breaker.on_reply(event, at(1))
        case messages.Refusal():
            subject.breaker.on_refusal(event, PEER)
        case events.EndpointLost():
            subject.breaker.on_endpoint_lost(events.EndpointLost(at(1), "refused"), subject.now)
    moves = {move.after for move in subject.recorded[before:]}
    allowed = TRANSITIONS[state].get(type(event), ())
    names = {events.OVER if after is None else after.name for after in allowed}
    assert moves <= names
    assert bool(moves) == bool(names)
    assert breaker.MACHINE.table is TRANSITIONS


def test_an_engine_of_which_only_the_endpoint_is_known_is_probed_too(subject: Subject) -> None:
    """Loads by ids of routers do not know more, and its answer names the engine."""
    key = unnamed(HOME)
    subject.fail(2, key)
    subject.tick_after(PAUSE_S)
    assert len(subject.describe()) == RANKS
    assert subject.reply(0) + subject.reply(1) == [events.PeerReachable(key)]
    subject.fail(1, key)
    assert subject.breaker.on_read(PEER, read_done()) == []
    assert key not in subject.breaker.circuits


def test_few_endpoints_of_which_nothing_else_is_known_are_probed_at_a_time(
    subject: Subject,
) -> None:
    """Clients may invent them; each has its turn. An engine that a ticket names needs none."""
    invented = [unnamed(at(number)) for number in range(10)]
    for key in (*invented, PEER):
        subject.fail(2, key)
    probed: list[Endpoint] = []
    for _ in range(100):
        sent = subject.tick_after(PAUSE_S, room=3)
        probed += [each.endpoint for each in sent if isinstance(each, events.Send)]
        assert subject.breaker.num_searched <= 3
    assert set(probed) == {key.endpoint for key in (*invented, PEER)}
    assert probed.index(HOME) <= 3
