"""The remote engines that a decode rank knows, and the life of each.

How they end up where loads need them, `decode/test_machine.py` shows.
"""

from collections.abc import Callable
from typing import Final

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, Incarnation
from nixl_kv.protocol.events import (
    OVER,
    Action,
    Disconnect,
    DropPeer,
    Failure,
    FailureKind,
    JoinPeer,
    NotWarm,
    PeerFits,
    PeerJoined,
    PeerKey,
    PeerRefused,
    Send,
    Tick,
    Transition,
)
from nixl_kv.protocol.messages import Describe
from nixl_kv.protocol.peers import (
    BACKOFF_S,
    CONNECT_TIMEOUT_S,
    KEPT_S,
    LOOK_AGAIN_S,
    NOBODY,
    TRANSITIONS,
    WARM_AGAIN_S,
    WARM_LOOK_S,
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
    fits,
    lost,
    no_record,
    refusal,
)

NEXT_LIFE = PeerKey(PREFILL, OTHER_LIFE, HOME)
THIRD = PeerKey(EngineId("third"), ENGINE_LIFE, ELSEWHERE)
REFUSED = PeerRefused(PEER, "another dtype")
NOT_COMPATIBLE = Failure(FailureKind.INCOMPATIBLE, "another dtype")


@pytest.fixture
def unknown() -> PeerBook:
    return PeerBook(no_record)


@pytest.fixture
def connecting() -> PeerBook:
    """Knows one peer, wanted since second 100."""
    book = PeerBook(no_record)
    book.get_or_connect(PEER, 100.0)
    return book


@pytest.fixture
def ready(connecting: PeerBook) -> PeerBook:
    """Its peer has two ranks."""
    connecting.on_fits(fits(2))
    connecting.on_joined(PeerJoined(PEER), 100.0)
    return connecting


@pytest.fixture
def paused(connecting: PeerBook) -> PeerBook:
    """Its peer could not be used at second 101."""
    connecting.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 101.0)
    return connecting


@pytest.fixture
def gone(ready: PeerBook) -> PeerBook:
    ready.on_endpoint_lost(lost(at(0), "first"), 101.0)
    return ready


def test_a_peer_that_is_not_known_is_asked_who_it_is_once(unknown: PeerBook) -> None:
    peer, actions = unknown.get_or_connect(PEER, 100.0)
    assert actions == [Send(HOME, describe())]
    assert peer == Peer(PEER, 100.0)
    assert unknown.get_or_connect(PEER, 101.0) == (peer, [])
    assert unknown.next_due == 100.0 + CONNECT_TIMEOUT_S


def test_a_connection_stays_while_another_life_is_asked_for_there(connecting: PeerBook) -> None:
    connecting.get_or_connect(NEXT_LIFE, 100.0)
    assert connecting.on_description(description(), HOME, 100.0) == [JoinPeer(PEER, description())]
    assert connecting.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 100.1) == []
    event = PeerRefused(NEXT_LIFE, "another dtype")
    actions = connecting.on_unusable(NEXT_LIFE, event, NOT_COMPATIBLE, 100.2)
    assert actions == [Disconnect(HOME)]


@pytest.mark.parametrize(
    ("state", "life", "endpoint"),
    [
        ("unknown", ENGINE_LIFE, HOME),
        ("ready", ENGINE_LIFE, HOME),
        ("paused", ENGINE_LIFE, HOME),
        pytest.param("connecting", ENGINE_LIFE, ELSEWHERE, id="from elsewhere"),
        pytest.param("connecting", OTHER_LIFE, HOME, id="of another life"),
    ],
)
def test_a_description_that_was_not_asked_for_is_ignored(
    state: str, life: Incarnation, endpoint: Endpoint, request: pytest.FixtureRequest
) -> None:
    book: PeerBook = request.getfixturevalue(state)
    assert book.on_description(description(incarnation=life), endpoint, 100.0) == []


def test_a_peer_is_joined_once(connecting: PeerBook) -> None:
    for expected in ([JoinPeer(PEER, description()), Disconnect(HOME)], []):
        assert connecting.on_description(description(), HOME, 100.0) == expected


def test_a_peer_that_is_given_up_is_not_joined_any_more(connecting: PeerBook) -> None:
    connecting.on_description(description(), HOME, 100.0)
    late = Failure(FailureKind.UNREACHABLE, "late")
    actions = connecting.on_unusable(PEER, Tick(), late, 105.0)
    assert actions == [DropPeer(PEER), Disconnect(HOME)]


def test_a_peer_that_joined_is_ready(ready: PeerBook) -> None:
    peer, actions = ready.get_or_connect(PEER, 101.0)
    assert (peer.state, actions) == (State.READY, [])
    assert (peer.description, peer.routes) == (description(2), fits(2).routes)


def on_tick(book: PeerBook, now: float, *in_use: PeerKey) -> list[Action]:
    """What a tick does for peers that are not overdue; none is."""
    overdue, actions = book.on_tick(Tick(), lambda peer: peer in in_use, now)
    assert overdue == []
    return actions


def test_a_peer_that_cannot_be_used_is_left_alone_for_a_while(paused: PeerBook) -> None:
    peer, actions = paused.get_or_connect(PEER, 101.5)
    assert (peer.state, peer.failure, actions) == (State.BACKOFF, NOT_COMPATIBLE, [])
    assert paused.on_endpoint_lost(lost(HOME), 101.0) == []
    assert on_tick(paused, 101.0 + BACKOFF_S - 0.01) == []
    assert paused.all() == [peer]
    assert on_tick(paused, 101.0 + BACKOFF_S) == []
    assert paused.all() == []


def test_a_lost_connection_makes_connecting_peers_unreachable(connecting: PeerBook) -> None:
    connecting.get_or_connect(NEXT_LIFE, 100.0)
    connecting.get_or_connect(THIRD, 100.0)
    assert connecting.on_endpoint_lost(lost(HOME), 101.0) == [PEER, NEXT_LIFE]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_is_gone_with_the_first_of_its_ranks(ready: PeerBook, rank: int) -> None:
    for endpoint, reason in ((at(rank), "first"), (at(1 - rank), "second")):
        assert ready.on_endpoint_lost(lost(endpoint, reason), 101.0) == []
    peer, actions = ready.get_or_connect(PEER, 101.0)
    assert (peer.state, actions) == (State.GONE, [])
    assert peer.failure == Failure(FailureKind.UNREACHABLE, f"{at(rank)}: first")


@pytest.mark.parametrize("endpoint", [HOME, at(2), ELSEWHERE], ids=["home", "no rank", "other"])
def test_other_losses_do_not_matter_to_a_ready_peer(ready: PeerBook, endpoint: Endpoint) -> None:
    assert ready.on_endpoint_lost(lost(endpoint), 101.0) == []
    assert on_tick(ready, 100.0 + KEPT_S / 2) == []
    assert ready.all()[0].state is State.READY


def test_a_gone_peer_is_forgotten_when_nothing_reads_it(gone: PeerBook) -> None:
    now = 102.0
    assert on_tick(gone, now, PEER) == []
    assert gone.all()[0].state is State.GONE
    assert gone.next_due == now + LOOK_AGAIN_S
    closed = [Disconnect(at(rank)) for rank in range(2)]
    dropped = DropPeer(PEER, is_dead=True)
    assert on_tick(gone, now + LOOK_AGAIN_S, NEXT_LIFE) == [dropped, *closed]
    assert gone.all() == []


def test_a_peer_that_nobody_used_for_long_is_forgotten(ready: PeerBook) -> None:
    ready.get_or_connect(PEER, 200.0)
    for now, used in ((100.0 + KEPT_S, []), (200.0 + KEPT_S, [PEER])):
        assert ready.next_due == now
        assert on_tick(ready, now, *used) == []
    assert ready.next_due == 200.0 + KEPT_S + LOOK_AGAIN_S
    closed = [Disconnect(at(rank)) for rank in range(2)]
    assert on_tick(ready, 201.0 + KEPT_S) == [DropPeer(PEER), *closed]
    assert (ready.all(), ready.next_due) == ([], None)


def test_a_peer_that_does_not_describe_itself_is_overdue(connecting: PeerBook) -> None:
    connecting.get_or_connect(NEXT_LIFE, 100.5)
    for now, expected in (
        (100.0 + CONNECT_TIMEOUT_S - 0.01, []),
        (100.0 + CONNECT_TIMEOUT_S, [PEER]),
        (100.5 + CONNECT_TIMEOUT_S, [NEXT_LIFE]),
    ):
        assert connecting.on_tick(Tick(), lambda _: False, now) == (expected, [])


def test_a_peer_that_has_described_itself_waits_for_this_side_alone(connecting: PeerBook) -> None:
    """Joining those before it may take long."""
    assert connecting.on_description(description(), HOME, 100.0) == [
        JoinPeer(PEER, description()),
        Disconnect(HOME),
    ]
    connecting.on_fits(fits())
    assert connecting.next_due is None
    connecting.on_joined(PeerJoined(PEER), 100.0 + 10 * CONNECT_TIMEOUT_S)
    assert [peer.state for peer in connecting.all()] == [State.READY]


# --- engines that are to be known before a request needs them

ANY = Send(HOME, Describe(incarnation=ANY_INCARNATION, engine=EngineId("any")))


@pytest.fixture
def warming() -> PeerBook:
    """Has asked one engine, in second 100."""
    book = PeerBook(no_record, [HOME])
    assert book.next_due is None
    book.warm_up()
    assert on_tick(book, 100.0) == [ANY]
    return book


def test_an_engine_to_be_known_is_asked_until_it_describes_itself(warming: PeerBook) -> None:
    warming.warm_up()
    for number, told in ((1, [NotWarm(HOME, NOBODY)]), (2, []), (3, [])):
        again = 100.0 + number * WARM_AGAIN_S
        assert warming.next_due == again
        assert on_tick(warming, again - 0.01) == []
        assert on_tick(warming, again) == [*told, ANY]
    for expected in ([JoinPeer(PEER, description()), Disconnect(HOME)], []):
        assert warming.on_description(description(), HOME, 120.0) == expected
    warming.on_fits(fits())
    warming.on_joined(PeerJoined(PEER), 120.0)
    assert [(peer.key, peer.state) for peer in warming.all()] == [(PEER, State.READY)]


@pytest.fixture
def warm(warming: PeerBook) -> PeerBook:
    """It has joined the engine, in second 101."""
    warming.on_description(description(), HOME, 101.0)
    warming.on_fits(fits())
    warming.on_joined(PeerJoined(PEER), 101.0)
    return warming


def test_an_engine_that_is_to_be_known_is_kept_and_asked_each_minute(warm: PeerBook) -> None:
    for number in range(1, 20):
        now = 101.0 + number * WARM_LOOK_S
        assert warm.next_due == now
        assert on_tick(warm, now) == [ANY]
        assert warm.on_description(description(), HOME, now) == []
    assert 20 * WARM_LOOK_S > KEPT_S
    assert [peer.state for peer in warm.all()] == [State.READY]


def test_an_engine_to_be_known_that_is_gone_is_asked_for_anew(warm: PeerBook) -> None:
    warm.on_endpoint_lost(lost(at(0)), 140.0)
    forgotten = on_tick(warm, 140.0)
    assert DropPeer(PEER, is_dead=True) in forgotten
    assert ANY not in forgotten
    assert warm.next_due == 140.0 + WARM_AGAIN_S
    assert on_tick(warm, 140.0 + WARM_AGAIN_S) == [ANY]
    assert on_tick(warm, 140.0 + 2 * WARM_AGAIN_S) == [NotWarm(HOME, NOBODY), ANY]
    successor = description(incarnation=OTHER_LIFE)
    expected = [JoinPeer(NEXT_LIFE, successor), Disconnect(HOME)]
    assert warm.on_description(successor, HOME, 151.0) == expected


def test_another_life_of_it_is_found_without_a_link_to_the_former(warm: PeerBook) -> None:
    on_tick(warm, 101.0 + WARM_LOOK_S)
    successor = description(incarnation=OTHER_LIFE)
    assert JoinPeer(NEXT_LIFE, successor) in warm.on_description(successor, HOME, 170.0)
    warm.on_fits(PeerFits(NEXT_LIFE, successor, fits().routes))
    warm.on_joined(PeerJoined(NEXT_LIFE), 170.0)
    now = 170.0
    while now < 101.0 + KEPT_S + WARM_LOOK_S:
        assert warm.next_due is not None
        now = max(now, warm.next_due)
        forgotten = on_tick(warm, now)
        if ANY in forgotten:
            warm.on_description(successor, HOME, now)
    assert [peer.key for peer in warm.all()] == [NEXT_LIFE]


def test_who_asks_for_a_former_life_of_it_changes_nothing(warm: PeerBook) -> None:
    """By a ticket of before its restart."""
    warm.get_or_connect(NEXT_LIFE, 110.0)
    told = warm.on_unusable(NEXT_LIFE, refusal("another life"), NOT_COMPATIBLE, 110.1)
    assert told == [Disconnect(HOME)]
    asked = [on_tick(warm, 200.0 + n * WARM_AGAIN_S) for n in range(4)]
    assert sum(actions.count(NotWarm(HOME, NOBODY)) for actions in asked) == 1


def test_an_engine_to_be_known_that_does_not_fit_is_asked_for_again(warming: PeerBook) -> None:
    warming.on_description(description(), HOME, 101.0)
    told = warming.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 101.0)
    assert told == [NotWarm(HOME, NOT_COMPATIBLE.detail), Disconnect(HOME)]
    assert on_tick(warming, 101.0 + BACKOFF_S) == []
    assert on_tick(warming, 101.0 + BACKOFF_S + WARM_AGAIN_S) == [ANY]
    warming.on_description(description(), HOME, 108.0)
    assert warming.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 108.0) == [Disconnect(HOME)]


def test_a_request_may_come_before_the_description(warming: PeerBook) -> None:
    warming.get_or_connect(PEER, 100.5)
    expected = [JoinPeer(PEER, description()), Disconnect(HOME)]
    assert warming.on_description(description(), HOME, 101.0) == expected
    assert on_tick(warming, 100.0 + CONNECT_TIMEOUT_S - 0.01) == []


def test_losses_of_an_engine_that_is_not_up_yet_change_nothing(warming: PeerBook) -> None:
    assert warming.on_endpoint_lost(lost(HOME), 101.0) == []
    assert not warming.is_describing(HOME)
    assert warming.ask_again(HOME) == []
    assert warming.all() == []


def test_a_book_that_is_cleared_asks_again(warming: PeerBook) -> None:
    warming.on_description(description(), HOME, 101.0)
    warming.clear()
    assert on_tick(warming, 102.0) == [ANY]
    unasked = PeerBook(no_record, [HOME])
    unasked.clear()
    assert unasked.next_due is None


@pytest.mark.parametrize("state", ["ready", "paused", "gone"])
def test_only_a_connecting_peer_is_overdue(state: str, request: pytest.FixtureRequest) -> None:
    book: PeerBook = request.getfixturevalue(state)
    on_tick(book, 1e9)


STEPS: Final[list[tuple[Callable[[PeerBook], object], dict[PeerKey, State]]]] = [
    (lambda book: book.get_or_connect(PEER, 100.0), {PEER: State.CONNECTING}),
    (lambda book: book.on_fits(fits()), {PEER: State.JOINING}),
    (lambda book: book.on_joined(PeerJoined(PEER), 100.0), {PEER: State.READY}),
    (lambda book: book.on_endpoint_lost(lost(at(0)), 101.0), {PEER: State.GONE}),
    (
        lambda book: book.get_or_connect(THIRD, 100.0),
        {PEER: State.GONE, THIRD: State.CONNECTING},
    ),
    (lambda book: book.clear(), {}),
]


def test_the_book_has_its_peers_and_says_whether_time_matters(unknown: PeerBook) -> None:
    assert (unknown.all(), unknown.next_due) == ([], None)
    for step, expected in STEPS:
        step(unknown)
        assert {peer.key: peer.state for peer in unknown.all()} == expected
        waits_for_time = bool(expected) and State.JOINING not in expected.values()
        assert (unknown.next_due is not None) == waits_for_time


def test_a_peer_is_shown_by_its_engine_and_endpoint() -> None:
    assert str(PEER) == f"engine 'prefill' at {HOME}"


def test_a_peer_has_the_endpoints_of_its_ranks_once_they_are_described() -> None:
    assert Peer(PEER, 0.0).endpoints == [HOME]
    assert Peer(PEER, 0.0, description=description(2)).endpoints == [at(0), at(1)]


@pytest.mark.parametrize("before", State, ids=lambda state: state.name)
@pytest.mark.parametrize(
    "event",
    [fits(2), PeerJoined(PEER), REFUSED, refusal("no"), lost(), Tick(), answered(refusal("no"))],
    ids=lambda event: type(event).__name__,
)
def test_only_transitions_of_the_table_are_possible(before: State, event: object) -> None:
    recorded: list[Transition] = []
    book = PeerBook(recorded.append)
    peer, _ = book.get_or_connect(PEER, 100.0)
    peer.state = before
    recorded.clear()
    allowed = TRANSITIONS[before].get(type(event), ())
    for after in {*State, None}.difference(allowed):
        to = after.name if after else OVER
        words = f"{type(event).__name__} leads from {before.name} to {to}; allowed: "
        with pytest.raises(LocalProtocolError, match=words):
            book._move(peer, after, event)
    assert (book.all(), peer.state, recorded) == ([peer], before, [])
    for after in allowed:
        book._move(peer, after, event)
        assert peer.state is (after or before)


def test_each_transition_of_a_peer_is_recorded_once() -> None:
    recorded: list[Transition] = []
    book = PeerBook(recorded.append)
    for _ in range(2):
        book.get_or_connect(PEER, 100.0)
    book.on_fits(fits(3))
    book.on_joined(PeerJoined(PEER), 100.0)
    for _ in range(2):
        book.on_endpoint_lost(lost(at(1)), 101.0)
    on_tick(book, 101.0, PEER)
    on_tick(book, 102.0)
    book.get_or_connect(PEER, 103.0)
    book.on_unusable(PEER, REFUSED, NOT_COMPATIBLE, 103.1)
    steps = [
        ("", "CONNECTING", "PrepareLoad"),
        ("CONNECTING", "JOINING", "PeerFits: 3 of 3 ranks"),
        ("JOINING", "READY", "PeerJoined"),
        ("READY", "GONE", "EndpointLost: closed"),
        ("GONE", OVER, "Tick"),
        ("", "CONNECTING", "PrepareLoad"),
        ("CONNECTING", "BACKOFF", "PeerRefused: another dtype"),
    ]
    assert recorded == [Transition("", str(PEER), *step) for step in steps]
