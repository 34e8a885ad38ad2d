"""The remote engines that a decode rank knows, and the life of each.

`test_decode.py` has what follows for loads.
"""

import math

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Endpoint, Incarnation
from nixl_kv.protocol.events import (
    OVER,
    Action,
    Disconnect,
    DropPeer,
    HandshakeDone,
    PeerKey,
    PeerRefused,
    StartHandshake,
    Tick,
    Transition,
)
from nixl_kv.protocol.peers import (
    CONNECT_TIMEOUT_S,
    KEPT_S,
    LOOK_AGAIN_S,
    TRANSITIONS,
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
    description,
    fits,
    lost,
    no_record,
    refusal,
)

NEXT_LIFE = PeerKey(PREFILL, OTHER_LIFE, HOME)
REFUSED = PeerRefused(PEER, "another dtype")


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
    connecting.on_handshake_done(HandshakeDone(PEER), 100.0)
    return connecting


@pytest.fixture
def paused(connecting: PeerBook) -> PeerBook:
    """Its peer could not be used at second 101."""
    connecting.on_refused(PEER, REFUSED, 101.0)
    assert failed(connecting) == [PEER]
    return connecting


def test_a_connection_stays_while_another_life_is_asked_for_there(connecting: PeerBook) -> None:
    connecting.get_or_connect(NEXT_LIFE, 100.0)
    assert connecting.on_description(description(), HOME) == [StartHandshake(PEER, description())]
    assert connecting.on_refused(PEER, REFUSED, 100.1) == []
    event = PeerRefused(NEXT_LIFE, "another dtype")
    actions = connecting.on_refused(NEXT_LIFE, event, 100.2)
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
    assert book.on_description(description(incarnation=life), endpoint) == []


def on_tick(book: PeerBook, now: float, *in_use: PeerKey) -> list[Action]:
    return book.on_tick(Tick(), lambda peer: peer in in_use, now)


def failed(book: PeerBook) -> list[PeerKey]:
    """The peers that have become unusable since the last call."""
    keys = [peer.key for peer in book.failed]
    book.failed.clear()
    return keys


def test_a_peer_that_nobody_used_for_long_is_forgotten(ready: PeerBook) -> None:
    ready.get_or_connect(PEER, 200.0)
    for now, used in ((100.0 + KEPT_S, []), (200.0 + KEPT_S, [PEER])):
        assert ready.deadlines.next == now
        assert on_tick(ready, now, *used) == []
    assert ready.deadlines.next == 200.0 + KEPT_S + LOOK_AGAIN_S
    closed = [Disconnect(at(rank)) for rank in range(2)]
    assert on_tick(ready, 201.0 + KEPT_S) == [DropPeer(PEER), *closed]
    assert (list(ready.known.values()), ready.deadlines.next) == ([], math.inf)


def test_a_peer_that_has_described_itself_waits_for_this_side_alone(connecting: PeerBook) -> None:
    """Joining those before it may take long."""
    assert connecting.on_description(description(), HOME) == [
        StartHandshake(PEER, description()),
        Disconnect(HOME),
    ]
    connecting.on_fits(fits())
    assert connecting.deadlines.next == math.inf
    connecting.on_handshake_done(HandshakeDone(PEER), 100.0 + 10 * CONNECT_TIMEOUT_S)
    assert [peer.state for peer in connecting.known.values()] == [State.READY]


@pytest.mark.parametrize("before", State, ids=lambda state: state.name)
@pytest.mark.parametrize(
    "event",
    [fits(2), HandshakeDone(PEER), REFUSED, refusal("no"), lost(), Tick(), answered(refusal("no"))],
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
    assert (list(book.known.values()), peer.state, recorded) == ([peer], before, [])
    for after in allowed:
        book._move(peer, after, event)
        assert peer.state is (after or before)


def test_each_transition_of_a_peer_is_recorded_once() -> None:
    recorded: list[Transition] = []
    book = PeerBook(recorded.append)
    for _ in range(2):
        book.get_or_connect(PEER, 100.0)
    book.on_fits(fits(3))
    book.on_handshake_done(HandshakeDone(PEER), 100.0)
    for _ in range(2):
        book.on_endpoint_lost(lost(at(1)), 101.0)
    on_tick(book, 101.0, PEER)
    on_tick(book, 102.0)
    book.get_or_connect(PEER, 103.0)
    book.on_refused(PEER, REFUSED, 103.1)
    steps = [
        ("", "CONNECTING", "PrepareLoad"),
        ("CONNECTING", "HANDSHAKING", "PeerFits: 3 of 3 ranks"),
        ("HANDSHAKING", "READY", "HandshakeDone"),
        ("READY", "GONE", "EndpointLost: closed"),
        ("GONE", OVER, "Tick"),
        ("", "CONNECTING", "PrepareLoad"),
        ("CONNECTING", "BACKOFF", "PeerRefused: another dtype"),
    ]
    assert recorded == [Transition("", str(PEER), *step) for step in steps]
