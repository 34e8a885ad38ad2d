"""The remote engines that a decode rank knows, and the life of each."""

from typing import Any

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Endpoint, EngineId, Incarnation
from nixl_kv.protocol.events import (
    OVER,
    Disconnect,
    DropPeer,
    Failure,
    FailureKind,
    JoinPeer,
    PeerKey,
    PeerRefused,
    Send,
    Tick,
    Transition,
)
from nixl_kv.protocol.peers import (
    BACKOFF_S,
    CONNECT_TIMEOUT_S,
    TRANSITIONS,
    Peer,
    PeerBook,
    State,
)
from support.records import (
    ELSEWHERE,
    ENGINE_LIFE,
    HOME,
    OTHER_LIFE,
    PEER,
    PREFILL,
    answered,
    at,
    describe,
    description,
    joined,
    lost,
    no_record,
    refusal,
)

NEXT_LIFE = PeerKey(PREFILL, OTHER_LIFE, HOME)
THIRD = PeerKey(EngineId("third"), ENGINE_LIFE, ELSEWHERE)
REFUSED = PeerRefused(PEER, "another dtype")


def unreachable(detail: str) -> Failure:
    return Failure(FailureKind.UNREACHABLE, detail)


NOT_COMPATIBLE = Failure(FailureKind.INCOMPATIBLE, "another dtype")


@pytest.fixture
def book() -> PeerBook:
    return PeerBook(no_record)


@pytest.fixture
def connecting(book: PeerBook) -> PeerBook:
    """Knows one peer, wanted since second 100."""
    book.get_or_connect(PEER, 100.0)
    return book


@pytest.fixture
def ready(connecting: PeerBook) -> PeerBook:
    """Its peer has two ranks."""
    connecting.on_joined(joined(2))
    return connecting


@pytest.fixture
def paused(connecting: PeerBook) -> PeerBook:
    """Its peer could not be used at second 101."""
    connecting.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 101.0)
    return connecting


def state(book: PeerBook, key: PeerKey = PEER) -> State:
    (peer,) = (peer for peer in book.all() if peer.key == key)
    return peer.state


# Getting to know a peer


def test_a_peer_that_is_not_known_is_asked_who_it_is(book: PeerBook) -> None:
    peer, actions = book.get_or_connect(PEER, 100.0)
    assert actions == [Send(HOME, describe())]
    assert peer == Peer(PEER, 100.0 + CONNECT_TIMEOUT_S)
    assert book.get_or_connect(PEER, 101.0) == (peer, [])
    assert peer.until == 100.0 + CONNECT_TIMEOUT_S


def test_each_life_of_an_engine_is_a_peer_of_its_own(connecting: PeerBook) -> None:
    peer, actions = connecting.get_or_connect(NEXT_LIFE, 101.0)
    assert actions == [Send(HOME, describe(OTHER_LIFE))]
    assert peer.key == NEXT_LIFE


def test_a_description_is_checked_and_its_connection_closed(connecting: PeerBook) -> None:
    message = description()
    assert connecting.on_description(message, HOME) == [
        JoinPeer(PEER, message),
        Disconnect(HOME),
    ]
    assert state(connecting) is State.CONNECTING


def test_a_connection_stays_while_another_life_is_asked_for_there(connecting: PeerBook) -> None:
    connecting.get_or_connect(NEXT_LIFE, 100.0)
    assert connecting.on_description(description(), HOME) == [JoinPeer(PEER, description())]
    assert connecting.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 100.1) == []
    event = PeerRefused(NEXT_LIFE, "another dtype")
    actions = connecting.on_unusable(NEXT_LIFE, event, NOT_COMPATIBLE, 100.2)
    assert actions == [Disconnect(HOME)]


@pytest.mark.parametrize("state_of_book", ["book", "ready", "paused"])
def test_a_description_that_nobody_waits_for_is_ignored(
    state_of_book: str, request: pytest.FixtureRequest
) -> None:
    book: PeerBook = request.getfixturevalue(state_of_book)
    assert book.on_description(description(), HOME) == []


@pytest.mark.parametrize(
    ("incarnation", "endpoint"),
    [
        pytest.param(ENGINE_LIFE, ELSEWHERE, id="from elsewhere"),
        pytest.param(OTHER_LIFE, HOME, id="of another life"),
    ],
)
def test_a_description_that_was_not_asked_for_is_ignored(
    connecting: PeerBook, incarnation: Incarnation, endpoint: Endpoint
) -> None:
    assert connecting.on_description(description(incarnation=incarnation), endpoint) == []


def test_a_peer_that_joined_is_ready(connecting: PeerBook) -> None:
    connecting.on_joined(joined())
    peer, actions = connecting.get_or_connect(PEER, 101.0)
    assert (peer.state, actions) == (State.READY, [])
    assert peer.description == description()
    assert peer.routes == joined().routes


@pytest.mark.parametrize(
    ("state_of_book", "is_connecting"),
    [("book", False), ("connecting", True), ("ready", False), ("paused", False)],
)
def test_whether_a_peer_is_connecting(
    state_of_book: str, request: pytest.FixtureRequest, *, is_connecting: bool
) -> None:
    book: PeerBook = request.getfixturevalue(state_of_book)
    assert book.is_connecting(PEER) is is_connecting
    assert not book.is_connecting(NEXT_LIFE)


# Pauses


def test_a_peer_that_cannot_be_used_is_left_alone_for_a_while(paused: PeerBook) -> None:
    peer, actions = paused.get_or_connect(PEER, 101.5)
    assert (peer.state, peer.failure, actions) == (State.BACKOFF, NOT_COMPATIBLE, [])
    assert paused.forget(Tick(), set(), 101.0 + BACKOFF_S - 0.01) == []
    assert state(paused) is State.BACKOFF
    assert paused.forget(Tick(), set(), 101.0 + BACKOFF_S) == []
    assert paused.get_or_connect(PEER, 103.0)[1] == [Send(HOME, describe())]


def test_a_pause_is_not_prolonged(paused: PeerBook) -> None:
    with pytest.raises(LocalProtocolError, match="got PeerRefused in state BACKOFF"):
        paused.on_unusable(PEER, REFUSED, unreachable("second"), 101.9)
    paused.forget(Tick(), set(), 101.0 + BACKOFF_S)
    assert paused.all() == []


def test_a_pause_of_one_life_is_not_one_of_the_next(paused: PeerBook) -> None:
    assert paused.get_or_connect(NEXT_LIFE, 101.0)[1] == [Send(HOME, describe(OTHER_LIFE))]


# Losses


def test_a_lost_connection_makes_connecting_peers_unreachable(connecting: PeerBook) -> None:
    connecting.get_or_connect(NEXT_LIFE, 100.0)
    connecting.get_or_connect(THIRD, 100.0)
    assert connecting.on_endpoint_lost(lost(HOME)) == [PEER, NEXT_LIFE]
    assert state(connecting) is State.CONNECTING


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_is_gone_with_any_of_its_ranks(ready: PeerBook, rank: int) -> None:
    assert ready.on_endpoint_lost(lost(at(rank))) == []
    peer, actions = ready.get_or_connect(PEER, 101.0)
    assert (peer.state, actions) == (State.GONE, [])
    assert peer.failure == unreachable(f"{at(rank)}: closed")


@pytest.mark.parametrize("endpoint", [HOME, at(2), ELSEWHERE], ids=["home", "no rank", "other"])
def test_other_losses_do_not_matter_to_a_ready_peer(ready: PeerBook, endpoint: Endpoint) -> None:
    assert ready.on_endpoint_lost(lost(endpoint)) == []
    assert state(ready) is State.READY


def test_of_two_losses_the_first_counts(ready: PeerBook) -> None:
    ready.on_endpoint_lost(lost(at(0), "first"))
    assert ready.on_endpoint_lost(lost(at(1), "second")) == []
    assert ready.all()[0].failure == unreachable(f"{at(0)}: first")


def test_a_loss_during_a_pause_does_not_matter(paused: PeerBook) -> None:
    assert paused.on_endpoint_lost(lost(HOME)) == []
    assert paused.all()[0].failure == NOT_COMPATIBLE


def test_a_gone_peer_is_forgotten_when_nothing_reads_it(ready: PeerBook) -> None:
    ready.on_endpoint_lost(lost(at(0)))
    assert ready.forget(Tick(), {PEER}, 1000.0) == []
    assert state(ready) is State.GONE
    closed = [Disconnect(at(rank)) for rank in range(2)]
    assert ready.forget(Tick(), {NEXT_LIFE}, 1000.0) == [DropPeer(PEER), *closed]
    assert ready.all() == []


def test_a_ready_peer_is_not_forgotten(ready: PeerBook) -> None:
    assert ready.forget(Tick(), set(), 1e9) == []
    assert state(ready) is State.READY


# Time


def test_a_peer_that_does_not_describe_itself_is_overdue(connecting: PeerBook) -> None:
    connecting.get_or_connect(NEXT_LIFE, 100.5)
    assert connecting.overdue(100.0 + CONNECT_TIMEOUT_S - 0.01) == []
    assert connecting.overdue(100.0 + CONNECT_TIMEOUT_S) == [PEER]
    assert connecting.overdue(100.5 + CONNECT_TIMEOUT_S) == [PEER, NEXT_LIFE]


@pytest.mark.parametrize("state_of_book", ["ready", "paused"])
def test_only_a_connecting_peer_is_overdue(
    state_of_book: str, request: pytest.FixtureRequest
) -> None:
    book: PeerBook = request.getfixturevalue(state_of_book)
    assert book.overdue(1e9) == []


# What it says of itself


def test_the_book_shows_its_peers_and_whether_time_matters(book: PeerBook) -> None:
    seen = [(repr(book), book.has_timers)]
    book.get_or_connect(PEER, 100.0)
    seen.append((repr(book), book.has_timers))
    book.on_joined(joined())
    seen.append((repr(book), book.has_timers))
    book.on_endpoint_lost(lost(at(0)))
    book.get_or_connect(THIRD, 100.0)
    seen.append((repr(book), book.has_timers))
    book.clear()
    seen.append((repr(book), book.has_timers))
    assert seen == [
        ("<PeerBook: empty>", False),
        ("<PeerBook: prefill: CONNECTING>", True),
        ("<PeerBook: prefill: READY>", False),
        ("<PeerBook: prefill: GONE, third: CONNECTING>", True),
        ("<PeerBook: empty>", False),
    ]


def test_a_peer_is_shown_by_its_engine_and_endpoint() -> None:
    assert str(PEER) == f"engine 'prefill' at {HOME}"


def test_a_peer_that_is_not_described_has_no_endpoints() -> None:
    assert Peer(PEER, 0.0).endpoints == []


def test_a_described_peer_has_the_endpoints_of_its_ranks() -> None:
    assert Peer(PEER, 0.0, description=description(2)).endpoints == [at(0), at(1)]


# Transitions

EVENTS: dict[str, Any] = {
    "PeerJoined": joined(2),
    "PeerRefused": REFUSED,
    "Refusal": refusal("no"),
    "EndpointLost": lost(),
    "Tick": Tick(),
    "Answered": answered(refusal("no")),
}
TABLE = {
    ("CONNECTING", "PeerJoined"): "READY",
    ("CONNECTING", "PeerRefused"): "BACKOFF",
    ("CONNECTING", "Refusal"): "BACKOFF",
    ("CONNECTING", "EndpointLost"): "BACKOFF",
    ("CONNECTING", "Tick"): "BACKOFF",
    ("READY", "EndpointLost"): "GONE",
    ("BACKOFF", "Tick"): OVER,
    ("GONE", "Tick"): OVER,
}


def test_the_table_has_these_transitions() -> None:
    transitions = {
        (state.name, event.__name__): OVER if after is None else after.name
        for state, moves in TRANSITIONS.items()
        for event, after in moves.items()
    }
    assert transitions == TABLE
    assert set(TRANSITIONS) == set(State)
    assert {name for _, name in TABLE} <= set(EVENTS)


@pytest.mark.parametrize("before", State, ids=lambda state: state.name)
@pytest.mark.parametrize("name", EVENTS)
def test_only_transitions_of_the_table_are_possible(before: State, name: str) -> None:
    recorded: list[Transition] = []
    book = PeerBook(recorded.append)
    peer, _ = book.get_or_connect(PEER, 100.0)
    peer.state = before
    recorded.clear()
    after = TABLE.get((before.name, name))
    if after is None:
        words = f"^peer 'prefill' got {name} in state {before.name}; allowed: "
        with pytest.raises(LocalProtocolError, match=words):
            book._move(peer, EVENTS[name])
        assert recorded == []
        assert book.all() == [peer]
        assert peer.state is before
        return
    book._move(peer, EVENTS[name])
    assert recorded == [Transition("", str(PEER), before.name, after, name)]
    if after == OVER:
        assert book.all() == []
    else:
        assert peer.state.name == after


def test_an_error_says_what_is_allowed(ready: PeerBook) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        ready.on_joined(joined())
    assert str(raised.value) == (
        "peer 'prefill' got PeerJoined in state READY; allowed: ['EndpointLost']"
    )


def test_each_transition_of_a_peer_is_recorded_once() -> None:
    recorded: list[Transition] = []
    book = PeerBook(recorded.append)
    for _ in range(2):
        book.get_or_connect(PEER, 100.0)
    book.on_joined(joined(3))
    for _ in range(2):
        book.on_endpoint_lost(lost(at(1)))
    book.forget(Tick(), {PEER}, 101.0)
    book.forget(Tick(), set(), 102.0)
    book.get_or_connect(PEER, 103.0)
    book.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 103.1)
    steps = [
        ("", "CONNECTING", "PrepareLoad"),
        ("CONNECTING", "READY", "PeerJoined: 3 of 3 ranks"),
        ("READY", "GONE", "EndpointLost: closed"),
        ("GONE", OVER, "Tick"),
        ("", "CONNECTING", "PrepareLoad"),
        ("CONNECTING", "BACKOFF", "PeerRefused: another dtype"),
    ]
    assert recorded == [Transition("", str(PEER), *step) for step in steps]
