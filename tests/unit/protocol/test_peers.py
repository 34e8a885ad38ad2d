"""The engines that a decode rank knows, and the life of each."""

import pytest
from protocol_records import (
    ENGINE_LIFE,
    HOME,
    OTHER_LIFE,
    PEER,
    PREFILL,
    at,
    describe,
    description,
    joined,
)

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import EngineId
from nixl_kv.protocol.directory import Directory
from nixl_kv.protocol.events import (
    AddPeer,
    Disconnect,
    DropPeer,
    Failure,
    PeerKey,
    Send,
    Why,
)
from nixl_kv.protocol.peers import (
    BACKOFF_S,
    CONNECT_TIMEOUT_S,
    TRANSITIONS,
    Cause,
    Peer,
    State,
)

NEXT_LIFE = PeerKey(PREFILL, OTHER_LIFE, HOME)
ELSEWHERE = "tcp://10.9.9.9:5600"


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def connecting(directory: Directory) -> Directory:
    """Knows one peer, wanted at second 100."""
    directory.want(PEER, 100.0)
    return directory


@pytest.fixture
def ready(connecting: Directory) -> Directory:
    connecting.joined(joined(2))
    return connecting


def told(reason: str) -> Failure:
    return Failure(Why.UNREACHABLE, reason)


def state(directory: Directory, key: PeerKey = PEER) -> State:
    return directory._peers[key].state


# Getting to know a peer


def test_the_first_to_want_a_peer_makes_it_connect(directory: Directory) -> None:
    peer, actions = directory.want(PEER, 100.0)
    assert actions == [Send(HOME, describe())]
    assert peer == Peer(PEER, 100.0 + CONNECT_TIMEOUT_S, State.CONNECTING)
    assert directory.want(PEER, 101.0) == (peer, [])
    assert peer.until == 100.0 + CONNECT_TIMEOUT_S


def test_each_life_of_an_engine_is_a_peer_of_its_own(connecting: Directory) -> None:
    peer, actions = connecting.want(NEXT_LIFE, 101.0)
    assert actions == [Send(HOME, describe(OTHER_LIFE))]
    assert peer.key == NEXT_LIFE


def test_a_description_is_checked_and_the_connection_closed(connecting: Directory) -> None:
    message = description()
    assert connecting.described(message, HOME) == [AddPeer(PEER, message), Disconnect(HOME)]
    assert state(connecting) is State.CONNECTING


def test_who_describes_itself_unasked_is_not_heard(directory: Directory) -> None:
    assert directory.described(description(), HOME) == []
    assert repr(directory) == "<Directory empty>"


@pytest.mark.parametrize(
    ("life", "endpoint"),
    [
        pytest.param(ENGINE_LIFE, ELSEWHERE, id="from elsewhere"),
        pytest.param(OTHER_LIFE, HOME, id="another life"),
    ],
)
def test_a_description_that_was_not_asked_for_is_not_heard(
    connecting: Directory, life: str, endpoint: str
) -> None:
    assert connecting.described(description(life=life), endpoint) == []


def test_a_description_that_comes_again_is_not_heard(ready: Directory) -> None:
    assert ready.described(description(), HOME) == []


def test_a_peer_that_joined_is_ready(connecting: Directory) -> None:
    connecting.joined(joined())
    peer, actions = connecting.want(PEER, 101.0)
    assert (peer.state, actions) == (State.READY, [])
    assert peer.description == description()


def test_who_joins_unknown_is_no_peer(directory: Directory) -> None:
    directory.joined(joined())
    assert repr(directory) == "<Directory empty>"


def test_joining_again_changes_nothing(ready: Directory) -> None:
    ready.joined(joined(1))
    assert ready._peers[PEER].description == description(2)


# Pauses


def test_a_peer_that_cannot_be_used_is_left_alone_for_a_while(connecting: Directory) -> None:
    connecting.unusable(PEER, told("another dtype"), 101.0)
    peer, actions = connecting.want(PEER, 101.5)
    assert (peer.state, peer.failure, actions) == (State.BACKOFF, told("another dtype"), [])
    assert connecting.forget(set(), 101.0 + BACKOFF_S - 0.01) == []
    assert state(connecting) is State.BACKOFF
    assert connecting.forget(set(), 101.0 + BACKOFF_S) == []
    assert connecting.want(PEER, 103.0)[1] == [Send(HOME, describe())]


def test_a_pause_is_not_prolonged(connecting: Directory) -> None:
    connecting.unusable(PEER, told("first"), 101.0)
    connecting.unusable(PEER, told("second"), 101.9)
    assert connecting._peers[PEER].failure == told("first")
    connecting.forget(set(), 101.0 + BACKOFF_S)
    assert repr(connecting) == "<Directory empty>"


def test_who_joins_during_the_pause_is_too_late(connecting: Directory) -> None:
    connecting.unusable(PEER, told("no description in time"), 105.0)
    connecting.joined(joined())
    assert state(connecting) is State.BACKOFF


def test_a_ready_peer_is_not_made_unusable(ready: Directory) -> None:
    ready.unusable(PEER, told("late refusal"), 101.0)
    assert state(ready) is State.READY
    assert ready._peers[PEER].failure is None


def test_an_unknown_peer_cannot_be_made_unusable(directory: Directory) -> None:
    directory.unusable(PEER, told("refusal"), 101.0)
    assert repr(directory) == "<Directory empty>"


def test_the_pause_of_one_life_is_not_that_of_the_next(connecting: Directory) -> None:
    connecting.unusable(PEER, told("gone"), 101.0)
    assert connecting.want(NEXT_LIFE, 101.0)[1] == [Send(HOME, describe(OTHER_LIFE))]


# Losses


def test_a_connection_that_breaks_makes_the_peer_unreachable(connecting: Directory) -> None:
    connecting.want(NEXT_LIFE, 100.0)
    connecting.want(PeerKey(EngineId("third"), ENGINE_LIFE, ELSEWHERE), 100.0)
    assert connecting.lost(HOME, told("connection closed")) == [PEER, NEXT_LIFE]
    assert state(connecting) is State.CONNECTING


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_is_gone_with_any_of_its_ranks(ready: Directory, rank: int) -> None:
    assert ready.lost(at(rank), told("connection closed")) == []
    peer, actions = ready.want(PEER, 101.0)
    assert (peer.state, peer.failure, actions) == (State.GONE, told("connection closed"), [])


@pytest.mark.parametrize("endpoint", [HOME, at(2), ELSEWHERE], ids=["home", "no rank", "other"])
def test_other_losses_do_not_matter_to_a_ready_peer(ready: Directory, endpoint: str) -> None:
    assert ready.lost(endpoint, told("connection closed")) == []
    assert state(ready) is State.READY


def test_a_loss_that_is_told_twice_is_one(ready: Directory) -> None:
    ready.lost(at(0), told("first"))
    assert ready.lost(at(1), told("second")) == []
    assert ready._peers[PEER].failure == told("first")


def test_a_loss_during_a_pause_is_none(connecting: Directory) -> None:
    connecting.unusable(PEER, told("refused"), 101.0)
    assert connecting.lost(HOME, told("connection closed")) == []
    assert connecting._peers[PEER].failure == told("refused")


def test_a_gone_peer_is_forgotten_when_no_read_of_it_is_under_way(ready: Directory) -> None:
    ready.lost(at(0), told("connection closed"))
    assert ready.forget({PEER}, 1000.0) == []
    assert state(ready) is State.GONE
    closed = [Disconnect(at(rank)) for rank in range(2)]
    assert ready.forget({NEXT_LIFE}, 1000.0) == [DropPeer(PEER), *closed]
    assert repr(ready) == "<Directory empty>"


def test_a_ready_peer_stays(ready: Directory) -> None:
    assert ready.forget(set(), 1e9) == []
    assert state(ready) is State.READY


# Time


def test_a_peer_that_does_not_describe_itself_is_late(connecting: Directory) -> None:
    connecting.want(NEXT_LIFE, 100.5)
    assert connecting.late(100.0 + CONNECT_TIMEOUT_S - 0.01) == []
    assert connecting.late(100.0 + CONNECT_TIMEOUT_S) == [PEER]
    assert connecting.late(100.5 + CONNECT_TIMEOUT_S) == [PEER, NEXT_LIFE]


def test_who_is_ready_or_pauses_is_not_late(ready: Directory) -> None:
    ready.want(NEXT_LIFE, 100.0)
    ready.unusable(NEXT_LIFE, told("refused"), 100.0)
    assert ready.late(1e9) == []


# What it shows


def test_it_is_busy_while_something_is_to_be_waited_for(directory: Directory) -> None:
    seen = [(repr(directory), directory.busy)]
    directory.want(PEER, 100.0)
    seen.append((repr(directory), directory.busy))
    directory.joined(joined())
    seen.append((repr(directory), directory.busy))
    directory.lost(at(0), told("connection closed"))
    directory.want(PeerKey(EngineId("second"), ENGINE_LIFE, ELSEWHERE), 100.0)
    seen.append((repr(directory), directory.busy))
    assert seen == [
        ("<Directory empty>", False),
        ("<Directory prefill: CONNECTING>", True),
        ("<Directory prefill: READY>", False),
        ("<Directory prefill: GONE, second: CONNECTING>", True),
    ]


# One peer


def test_a_peer_that_is_not_described_has_no_ranks() -> None:
    assert Peer(PEER, state=State.CONNECTING).endpoints == []


def test_a_peer_serves_at_the_endpoints_of_its_ranks() -> None:
    assert Peer(PEER, description=description(2)).endpoints == [at(0), at(1)]


def test_the_table_of_a_peers_life() -> None:
    moves = {
        (state.name, cause.name): following.name
        for state, causes in TRANSITIONS.items()
        for cause, following in causes.items()
    }
    assert moves == {
        ("UNKNOWN", "WANTED"): "CONNECTING",
        ("CONNECTING", "JOINED"): "READY",
        ("CONNECTING", "UNUSABLE"): "BACKOFF",
        ("READY", "LOST"): "GONE",
        ("BACKOFF", "PAUSE_OVER"): "UNKNOWN",
        ("GONE", "FORGOTTEN"): "UNKNOWN",
    }
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.name)
def test_no_move_but_those_of_the_table(state: State, cause: Cause) -> None:
    peer = Peer(PEER, HOME, state=state)
    following = TRANSITIONS[state].get(cause)
    if following is None:
        with pytest.raises(LocalProtocolError, match=f"cannot be {cause.name} in state"):
            peer.move(cause)
        following = state
    else:
        peer.move(cause)
    assert peer.state is following


def test_a_move_that_is_not_allowed_says_what_is() -> None:
    with pytest.raises(LocalProtocolError) as raised:
        Peer(PEER, HOME, state=State.CONNECTING).move(Cause.LOST)
    assert str(raised.value) == (
        "peer 'prefill' cannot be LOST in state CONNECTING; allowed: ['JOINED', 'UNUSABLE']"
    )
