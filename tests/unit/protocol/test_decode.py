"""The decode machine: loads from arrival to report, their peers, and whom it listens to."""

from typing import Any

import pytest

from nixl_kv.ids import Claim, Endpoint, Incarnation, Nonce, Rank, RequestId
from nixl_kv.protocol import messages
from nixl_kv.protocol.decode import TOO_MANY
from nixl_kv.protocol.events import (
    OVER,
    Answered,
    Connect,
    Disconnect,
    DropPeer,
    Failure,
    FailureKind,
    HandshakeDone,
    Introduction,
    LinkBroken,
    LoadEnded,
    LoadReady,
    MeetPeer,
    PeerBroken,
    PeerFits,
    PeerKey,
    PeerRefused,
    PeerUnusable,
    PeerUsable,
    ReadFailed,
    Send,
    StartHandshake,
    Tick,
    Transition,
)
from nixl_kv.protocol.load import ASK_AGAIN_S, LOAD_TRANSITIONS
from nixl_kv.protocol.messages import VersionRefusal
from nixl_kv.protocol.peers import (
    CONNECT_TIMEOUT_S,
    INCOMPATIBLE_S,
    KEPT_S,
    LOOK_AGAIN_S,
    MAX_PAUSE_S,
    NO_DESCRIPTION,
    PAUSE_S,
    TRANSITIONS,
    UNREAD,
    PeerState,
)
from support.records import (
    CLAIM,
    D1,
    D2,
    ELSEWHERE,
    HOME,
    NONCE2,
    OTHER_LIFE,
    PEER,
    RANK_0,
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
    fits,
    grant,
    hex32,
    lost,
    pending,
    prepare_load,
    read_done,
    reader,
    recall,
    refusal,
    release,
    renew,
    renewed,
    routes,
    start_load,
)
from support.scripts import (
    ASK_SECOND,
    ASKING,
    GIVEN_UP,
    GIVEN_UP_2,
    GOOD,
    GRANT,
    GRANTED,
    HANDSHAKING,
    PREPARED,
    READ,
    READING,
    RELEASED,
    SECOND,
    START,
    START_2,
    STOP,
    Script,
    after,
    decode_machine,
    each_of,
    loading,
    moves_of,
    play,
    rows_of,
)

ASK = Send(RANK_0, ask())
# A rank on another machine lets this one in before NIXL connects.
HERE, THERE = "192.0.2.1", "192.0.2.2"
LIFE = description().ranks[0].incarnation
INTRODUCED = PeerFits(
    PEER, description(), routes(0), (Introduction(Rank(0), (HERE,), ("192.0.2.3",)),)
)
ADMIT = Send(
    RANK_0,
    messages.Admit(incarnation=LIFE, reader=reader(), sources=(HERE,), listens=("192.0.2.3",)),
)
LEAVE = Send(RANK_0, messages.Leave(incarnation=LIFE, reader=reader()))
DESCRIBE = Send(HOME, describe())
CLOSE_HOME = Disconnect(HOME)
NOT_PREPARED = LoadEnded(D1, 7, Failure(FailureKind.INTERNAL, "not prepared"))
REFUSED = PeerRefused(PEER, "another dtype")
NOT_ADMITTED = Failure(
    FailureKind.INCOMPATIBLE,
    f"prefill rank 0 lets none of this host's addresses ({HERE}) connect to UCX's ports; its log "
    "says why",
)
ANOTHER_LIFE = Failure(
    FailureKind.UNREACHABLE, "prefill rank 0 has restarted, slept or reset its cache since"
)
NOT_COMPATIBLE = Failure(FailureKind.INCOMPATIBLE, "another dtype")
NEXT_LIFE = PeerKey(PEER.engine, OTHER_LIFE, HOME)
FORGED = PeerKey(PEER.engine, PEER.incarnation, Endpoint("tcp://10.0.0.1:1"))
SECOND_OF_NEXT_LIFE = prepare_load(D2, RIVAL, nonce=NONCE2, incarnation=OTHER_LIFE)
PAUSED: Script = after(PREPARED, (REFUSED, CLOSE_HOME))


def failed(failure: Failure, request: RequestId = D1, peer: PeerKey = PEER) -> LoadEnded:
    return LoadEnded(request, 7, failure, peer)


def unreachable(detail: str) -> Failure:
    return Failure(FailureKind.UNREACHABLE, detail)


HANGS = Failure(FailureKind.STALLED, "rank 0 hangs")
CANNOT_BE_READ = "engine 'prefill' answers but cannot be read: refused"
UNREADABLE = unreachable(CANNOT_BE_READ)
UNREAD_YET = unreachable(CANNOT_BE_READ + UNREAD)
RANK_LOST = unreachable("rank 0 is unreachable: closed")
READ_WELL: Script = [(START, READ), (read_done(), RELEASED, GOOD)]

LOADS: dict[str, Script] = {
    "from arrival to report": [
        (prepare_load(), DESCRIBE),
        (answered(description(), HOME), StartHandshake(PEER, description()), CLOSE_HOME),
        (fits(), ASK),
        (HandshakeDone(PEER),),
        (answered(GRANT),),
        *READ_WELL,
        (START, NOT_PREPARED),
    ],
    "blocks may come before the peer and the grant": after(
        PREPARED, (START,), (fits(), ASK), (answered(GRANT), READ)
    ),
    "a known peer is asked at once": after(ASKING, (SECOND, ASK_SECOND)),
    "a peer that joins is asked for all that wait for it": after(
        PREPARED, (SECOND,), (fits(), ASK, ASK_SECOND)
    ),
    "loads of another life of the engine go on waiting": after(
        PREPARED,
        (SECOND_OF_NEXT_LIFE, Send(HOME, describe(OTHER_LIFE))),
        (answered(description(), HOME), StartHandshake(PEER, description())),
        (fits(), ASK),
        (START,),
        (PeerRefused(NEXT_LIFE, "another dtype"), CLOSE_HOME),
        (START_2, failed(NOT_COMPATIBLE, D2, NEXT_LIFE)),
        (answered(GRANT), READ),
    ),
    "a rank without readers is released with the asks": after(
        PREPARED,
        (
            PeerFits(PEER, description(3), (*routes(0), *routes(2, readers=()))),
            Send(at(2), release()),
            ASK,
        ),
        (answered(GRANT),),
        *READ_WELL,
    ),
    # As in a stage of a pipeline that has no layer with a cache.
    "one that reads no rank is good with its blocks": after(
        PREPARED,
        (PeerFits(PEER, description(), routes(0, readers=())), RELEASED),
        (100.0 + 2 * TIMEOUT_S, Tick()),
        (START, LoadEnded(D1, 7, None, PEER)),
    ),
    "cancelled before it has blocks, it is not reported": after(
        GRANTED, (cancel_load(), GIVEN_UP), (START, NOT_PREPARED)
    ),
    "the release waits until the peer is known": after(
        PREPARED, (cancel_load(),), (fits(), GIVEN_UP), (START, NOT_PREPARED)
    ),
    "cancelling an unknown one does nothing": [(cancel_load(),)],
    "one that was never prepared is reported": [(START, NOT_PREPARED)],
}
NOT_OURS: dict[str, Any] = {
    "another reader's denial": answered(deny(reader=STRANGER)),
    "a denial for another rank of this engine": answered(deny(reader=reader(1))),
    "a denial of another claim": answered(deny(claim=RIVAL)),
    "a denial from another rank": answered(deny(), at(1)),
    "another reader's grant": answered(grant(reader=STRANGER)),
    "the loss of a claim on its way": answered(renewed(CLAIM)),
    "a connection that no load uses": lost(ELSEWHERE),
    "a refusal of our version from elsewhere": answered(VersionRefusal(speaks=13), ELSEWHERE),
}
NOT_LOST: dict[str, Any] = {
    "nothing": answered(renewed()),
    "another claim": answered(renewed(RIVAL)),
    "a claim of another rank": answered(renewed(CLAIM), at(1)),
    "another reader's claim": answered(renewed(CLAIM, reader=STRANGER)),
    "a claim that was granted since": answered(renewed(CLAIM, number=1)),
}
OTHER_CLAIM = {"claim": RIVAL, "nonce": NONCE2, "incarnation": OTHER_LIFE}
AGAIN = (answered(grant(slot=9)),)
ANSWERS: dict[str, Script] = {
    **{
        f"{name} changes nothing": after(ASKING, (event,), (answered(GRANT),), (START, READ))
        for name, event in NOT_OURS.items()
    },
    **{
        f"a loss of {name} changes nothing": after(GRANTED, (event,), (START, READ))
        for name, event in NOT_LOST.items()
    },
    "a grant of an unknown claim is released": after(
        ASKING,
        (answered(grant(**OTHER_CLAIM)), Send(RANK_0, release(complete=False, **OTHER_CLAIM))),
    ),
    "a recall of an unknown claim is answered by a release": [(answered(recall()), GIVEN_UP)],
    "a grant after the failure is released each time": after(
        ASKING, (answered(deny()),), (answered(GRANT), GIVEN_UP), (answered(GRANT), GIVEN_UP)
    ),
    "a repeated grant changes nothing": after(
        GRANTED, AGAIN, (START, READ), AGAIN, (read_done(), RELEASED, GOOD)
    ),
    **{
        f"the slot alone decides about a read under way: {name}": after(
            READING, (answered(message),), (read_done(), RELEASED, GOOD)
        )
        for name, message in (
            ("a denial while it is read", deny()),
            ("a loss while it is read", renewed(CLAIM)),
        )
    },
}
OTHER_VERSION = "it speaks wire version 13; this side speaks 12"
NEW_LIFE = "it has begun another life since"
UNUSABLE: dict[str, tuple[Any, Failure]] = {
    "not compatible": (REFUSED, NOT_COMPATIBLE),
    "lost": (lost(HOME, "cannot connect"), unreachable(f"{HOME}: cannot connect")),
    "refused": (answered(refusal(NEW_LIFE), HOME), unreachable(NEW_LIFE)),
    "of another version": (
        answered(VersionRefusal(speaks=13), HOME),
        unreachable(f"{HOME}: {OTHER_VERSION}"),
    ),
}


def admitted(incarnation: str = LIFE, refused: tuple[str, ...] = ()) -> Answered:
    message = messages.Admitted(
        incarnation=Incarnation(incarnation), reader=reader(), sources=(THERE,), refused=refused
    )
    return answered(message)


ADMITTING: Script = after(PREPARED, (INTRODUCED, ADMIT, ASK))
ADMISSIONS: dict[str, Script] = {
    "one elsewhere lets this rank in before NIXL connects": after(
        ADMITTING,
        (answered(GRANT),),
        (admitted(), Connect(PEER, (THERE,))),
        (admitted(),),  # again
        (HandshakeDone(PEER),),
        (START, READ),
    ),
    "one that lets in none of this host's addresses is left alone for a while": after(
        ADMITTING,
        (admitted(refused=(HERE, "192.0.2.9")), GIVEN_UP),
        (START, failed(NOT_ADMITTED)),
        (Tick(), DropPeer(PEER, is_dead=True), LEAVE),
    ),
    "one of another life admits no rank": after(
        ADMITTING,
        (admitted(OTHER_LIFE), GIVEN_UP),
        (START, failed(ANOTHER_LIFE)),
        (Tick(), DropPeer(PEER, is_dead=True), LEAVE),
    ),
    "one that says nothing to that is given up": after(
        ADMITTING,
        (answered(GRANT),),
        (100.0 + CONNECT_TIMEOUT_S, Tick(), GIVEN_UP),
        (100.0 + CONNECT_TIMEOUT_S, START, failed(NO_DESCRIPTION)),
        (100.0 + CONNECT_TIMEOUT_S, Tick(), DropPeer(PEER, is_dead=True), LEAVE),
    ),
    "over a new link it is asked again": after(
        ADMITTING,
        (answered(GRANT),),
        (LinkBroken(RANK_0), ADMIT, Send(RANK_0, renew(2, CLAIM))),
        (admitted(), Connect(PEER, (THERE,))),
        (LinkBroken(RANK_0), Send(RANK_0, renew(3, CLAIM))),
    ),
    "one whose link ends meanwhile is dropped": after(
        ADMITTING,
        (lost(),),
        (START, failed(RANK_LOST)),
        (Tick(), DropPeer(PEER, is_dead=True), Disconnect(RANK_0)),
    ),
    "one that has admitted this rank hears when it is forgotten": after(
        ADMITTING,
        (admitted(), Connect(PEER, (THERE,))),
        (HandshakeDone(PEER),),
        (cancel_load(), GIVEN_UP),
        (100.0 + KEPT_S, Tick(), DropPeer(PEER, is_dead=True), LEAVE),
    ),
}

PEERS: dict[str, Script] = {
    **{
        f"without its peer every load that waits for it fails: {name}": after(
            PREPARED,
            (START,),
            (SECOND,),
            (event, CLOSE_HOME, failed(failure)),
            (START_2, failed(failure, D2)),
        )
        for name, (event, failure) in UNUSABLE.items()
    },
    # A forged ticket may have made us ask there; it must not harm the loads of others.
    **{
        f"a refusal {name} fails nothing": after(
            PREPARED, (START,), (answered(*answer),), (fits(), ASK)
        )
        for name, answer in {
            "of another life": (refusal(NEW_LIFE, OTHER_LIFE), HOME),
            "from elsewhere": (refusal(NEW_LIFE), ELSEWHERE),
        }.items()
    },
    "a refusal after the description is ignored": after(
        GRANTED, (answered(refusal("late"), HOME),), (PeerRefused(PEER, "late"),), (START, READ)
    ),
    "one that cannot be read is left alone for a while": after(
        HANDSHAKING,
        (SECOND, ASK_SECOND),
        (answered(GRANT),),
        (START, READ),
        (
            103.0,
            REFUSED,
            STOP,
            GIVEN_UP_2,
        ),
        (ReadFailed(D1, Rank(0), "another dtype"), GIVEN_UP, failed(NOT_COMPATIBLE)),
        (START_2, failed(NOT_COMPATIBLE, D2)),
        (103.0, Tick(), DropPeer(PEER), Disconnect(RANK_0)),
        (103.0 + INCOMPATIBLE_S, Tick()),
        (prepare_load(), DESCRIBE),
    ),
    "one that is lost while it is joined is dropped": after(
        HANDSHAKING,
        (START,),
        (103.0, lost(), failed(RANK_LOST)),
        (HandshakeDone(PEER),),
        (103.0, Tick(), DropPeer(PEER, is_dead=True), Disconnect(RANK_0)),
        (PeerRefused(PEER, "late"),),
    ),
    "one that hangs is left alone: its next load fails at once": [
        (100.0, prepare_load(is_early=True), DESCRIBE),
        (fits(), Send(RANK_0, ask(is_early=True))),
        (HandshakeDone(PEER),),
        (answered(pending("stalled")), GIVEN_UP, LoadReady(D1)),
        (START, failed(HANGS)),
        (SECOND,),
        (START_2, failed(HANGS, D2)),
    ],
    "one that hangs while it is joined": [
        (100.0, prepare_load(is_early=True), DESCRIBE),
        (fits(), Send(RANK_0, ask(is_early=True))),
        (answered(pending("stalled")), GIVEN_UP, LoadReady(D1)),
        (HandshakeDone(PEER),),
        (START, failed(HANGS)),
    ],
    "a refusal of an unknown peer is ignored": [(answered(refusal("no"), HOME),), *PREPARED],
    "a silent one is given up": after(
        PREPARED,
        (START,),
        (100.0 + CONNECT_TIMEOUT_S - 0.01, Tick()),
        (
            100.0 + CONNECT_TIMEOUT_S,
            Tick(),
            CLOSE_HOME,
            failed(unreachable("no answer in 5 s")),
        ),
    ),
    "during its pause loads fail at once": after(
        PREPARED,
        (cancel_load(),),
        (100.1, REFUSED, CLOSE_HOME),
        (prepare_load(D2, RIVAL),),
        (START_2, failed(NOT_COMPATIBLE, D2)),
        (100.1 + INCOMPATIBLE_S, Tick(), DESCRIBE),
    ),
    "one that no load wanted in its pause is asked by the next load": after(
        PREPARED,
        (100.1, lost(HOME, "cannot connect"), CLOSE_HOME),
        (100.1 + PAUSE_S, Tick()),
        (prepare_load(D2, RIVAL), DESCRIBE),
    ),
    "one that no load wants is forgotten": after(
        PREPARED,
        (cancel_load(),),
        (100.1, lost(HOME, "cannot connect"), CLOSE_HOME),
        (100.0 + KEPT_S - 0.1, Tick()),
        (100.0 + KEPT_S, Tick()),
    ),
    "a ticket of its own is an attempt, one at a time": after(
        PREPARED,
        (100.1, lost(HOME, "cannot connect"), CLOSE_HOME),
        (100.2, SECOND, DESCRIBE),
        (100.3, prepare_load(RequestId("d3"), Claim(hex32(3)), nonce=Nonce(hex32(3)))),
    ),
    # It is still to be reported, and reads nothing.
    "a failed load is released when its peer comes back": after(
        PAUSED,
        (100.0 + INCOMPATIBLE_S, SECOND, DESCRIBE),
        (fits(), Send(RANK_0, ask(nonce=NONCE2, claim=RIVAL)), GIVEN_UP),
        (START, failed(NOT_COMPATIBLE)),
    ),
    **{
        f"one that joins {name} is dropped": after(script, (fits(), DropPeer(PEER)))
        for name, script in {"unknown": [], "in its pause": PAUSED, "again": ASKING}.items()
    },
    "one that was idle for long is forgotten": after(
        ASKING,
        (cancel_load(), GIVEN_UP),
        (200.0, SECOND, ASK_SECOND),
        (cancel_load(D2), GIVEN_UP_2),
        (100.0 + KEPT_S, Tick()),
        (200.0 + KEPT_S, Tick(), DropPeer(PEER), Disconnect(RANK_0)),
    ),
    **{
        f"a description {name} is ignored": after(script, (answered(message, endpoint),))
        for name, script, message, endpoint in (
            ("of an unknown one", [], description(), HOME),
            ("of one that is ready", ASKING, description(), HOME),
            ("of one in its pause", PAUSED, description(), HOME),
            ("from elsewhere", PREPARED, description(), ELSEWHERE),
            ("of another life", PREPARED, description(incarnation=OTHER_LIFE), HOME),
        )
    },
    # It names a known engine and life, at the address of another.
    "a forged ticket does not redirect the true ones": [
        (prepare_load(D2, RIVAL, port=1), Send(FORGED.endpoint, describe())),
        *PREPARED,
        (
            answered(description(), FORGED.endpoint),
            StartHandshake(FORGED, description()),
            Disconnect(FORGED.endpoint),
        ),
        (fits(), ASK),
    ],
    "with its connection every load that is not read fails": after(
        GRANTED,
        (SECOND, ASK_SECOND),
        (START_2,),
        (lost(), failed(RANK_LOST, D2)),
        (START, failed(RANK_LOST)),
    ),
    "without its connection a read goes on, and it is kept until then": after(
        READING,
        (lost(),),
        (110.2, Tick()),
        (110.4, Tick()),
        (read_done(), RELEASED, GOOD),
        (110.6, Tick(), DropPeer(PEER, is_dead=True), Disconnect(RANK_0)),
    ),
    "one whose connections break again and again is left alone for a while": after(
        READING,
        (PeerBroken(PEER, "reset"), Connect(PEER, ())),
        (SECOND, ASK_SECOND),
        (START_2,),
        (HandshakeDone(PEER),),
        (
            110.2,
            PeerBroken(PEER, "refused"),
            PeerUnusable(PEER, CANNOT_BE_READ),
            STOP,
            GIVEN_UP_2,
            failed(UNREADABLE, D2),
        ),
        (ReadFailed(D1, Rank(0), "refused"), GIVEN_UP, failed(UNREADABLE)),
        # A ticket says nothing of its memory.
        (110.3, prepare_load(D2, RIVAL)),
        (START_2, failed(UNREADABLE, D2)),
        (110.3, Tick(), DropPeer(PEER, is_dead=True), Disconnect(RANK_0)),
        (110.2 + 2 * PAUSE_S, Tick(), DESCRIBE),
        (prepare_load(D2, RIVAL),),
        (START_2, failed(UNREADABLE, D2)),
        (answered(description(), HOME), StartHandshake(PEER, description()), CLOSE_HOME),
        (fits(),),
        (prepare_load(D2, RIVAL), Send(RANK_0, ask(number=3, claim=RIVAL))),
    ),
    "one whose first read fails is given up at once": after(
        HANDSHAKING,
        (SECOND, ASK_SECOND),
        (answered(GRANT),),
        (START, READ),
        (START_2,),
        (110.2, PeerBroken(PEER, "refused"), STOP, GIVEN_UP_2, failed(UNREAD_YET, D2)),
        (ReadFailed(D1, Rank(0), "refused"), GIVEN_UP, failed(UNREAD_YET)),
        (HandshakeDone(PEER),),
        (110.2, Tick(), DropPeer(PEER, is_dead=True), Disconnect(RANK_0)),
    ),
    "a tool that asks for one tries it at once": after(
        PREPARED,
        (cancel_load(),),
        (100.1, lost(HOME, "cannot connect"), CLOSE_HOME),
        (100.2, MeetPeer(PEER), DESCRIBE),
        (answered(description(), HOME), StartHandshake(PEER, description()), CLOSE_HOME),
        (fits(),),
        (HandshakeDone(PEER),),
        (MeetPeer(PEER),),
    ),
    "a link that ends in its pause changes nothing": after(
        ASKING,
        (cancel_load(), GIVEN_UP),
        (PeerBroken(PEER, "reset"), Connect(PEER, ())),
        (HandshakeDone(PEER),),
        (PeerBroken(PEER, "refused"), PeerUnusable(PEER, CANNOT_BE_READ)),
        (lost(),),
        (Tick(), DropPeer(PEER, is_dead=True), Disconnect(RANK_0)),
    ),
    **ADMISSIONS,
    "a load that is cancelled meanwhile is released": after(
        PREPARED,
        (cancel_load(),),
        (answered(description(), HOME), StartHandshake(PEER, description()), CLOSE_HOME),
        (fits(), GIVEN_UP),
    ),
    # Another version listens where the one did that was described.
    "a rank of another version is not waited for": after(
        ASKING,
        (answered(VersionRefusal(speaks=13)),),
        (START, failed(unreachable(f"prefill rank 0 is unreachable: {OTHER_VERSION}"))),
    ),
}


# The states of a load: each combination of its peer, its blocks, and its end

IS_LATE = 100.0 + TIMEOUT_S
STATES: dict[str, Script] = {
    "dropped while prefill computes it": after(ASKING, (cancel_load(), GIVEN_UP)),
    "dropped after its ranks have denied it": after(ASKING, (answered(deny()),), (cancel_load(),)),
    "dropped after its peer has refused": after(PAUSED, (cancel_load(),)),
    "dropped, and its peer refuses": after(PREPARED, (cancel_load(),), (REFUSED, CLOSE_HOME)),
    "late without blocks, then dropped": after(
        ASKING, (IS_LATE, Tick(), GIVEN_UP), (cancel_load(),)
    ),
    "overdue until its read has drained": after(
        READING,
        (cancel_load(), STOP),
        (110.0 + TIMEOUT_S, Tick()),
        (read_done(), GIVEN_UP, failed(Failure(FailureKind.DROPPED, "dropped"))),
    ),
    "prefill has begun to compute it": after(
        ASKING, (answered(pending("computing")),), (answered(GRANT),), *READ_WELL
    ),
}


@each_of(LOADS | ANSWERS | PEERS | STATES)
def test_the_machine(script: Script) -> None:
    loading(script).check()


def test_the_scripts_of_peers_make_each_transition_of_their_table() -> None:
    recorded: list[Transition] = []
    for script in PEERS.values():
        play(decode_machine(recorded.append), script)
    assert moves_of(move for move in recorded if move.machine == "peer") == rows_of(
        TRANSITIONS, OVER
    )


def test_the_scripts_make_each_transition_of_a_load() -> None:
    recorded: list[Transition] = []
    for script in (LOADS | ANSWERS | PEERS | STATES).values():
        play(decode_machine(recorded.append), script)
    of_loads = [move for move in recorded if move.machine == "load"]
    changes = {row for row in rows_of(LOAD_TRANSITIONS) if row[0] != row[2]}
    assert moves_of(of_loads) == changes


def test_a_rank_asks_the_ranks_that_its_routes_name() -> None:
    second = reader(1)
    machine = decode_machine(reader=second)
    event = PeerFits(PEER, description(2), routes(1, readers=[1]))
    play(machine, [*PREPARED, (event, Send(at(1), ask(reader=second, readers=(1,))))])


ANOTHER = prepare_load(claim=RIVAL, nonce=NONCE2)
OTHER_FAILURE = Failure(FailureKind.INTERNAL, "same id")


@each_of(
    {
        "one whose load still waits": (
            [*GRANTED, (ANOTHER, GIVEN_UP)],
            (START, LoadEnded(D1, 7, OTHER_FAILURE, PEER)),
        ),
        "one whose load is read": (
            [*READING, (ANOTHER, STOP), (START,)],
            (read_done(), GIVEN_UP, LoadEnded(D1, 7, OTHER_FAILURE, PEER)),
        ),
    },
    "case",
)
def test_a_second_request_with_an_id_costs_both_their_loads(
    case: tuple[Script, tuple[Any, ...]],
) -> None:
    """Which of them is meant from then on cannot be told; each is reported once."""
    before, end = case
    machine = loading(before)
    machine.check()
    play(machine, [end])
    assert len(machine.loads) == 0


def test_an_id_may_come_again_when_its_load_is_cancelled() -> None:
    """A client that tries again, while the peer is still asked who it is."""
    machine = loading([*PREPARED, (cancel_load(),), (ANOTHER,)])
    actions = machine.handle(fits(), 100.1)
    assert actions == [
        Send(RANK_0, ask(claim=RIVAL, nonce=NONCE2)),
        GIVEN_UP,
    ]
    machine.check()
    again = machine._by_request.get(D1)
    assert again is not None
    assert again.claim == RIVAL


def test_too_many_loads_from_one_rank_fail_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_CLAIMS", 1)
    machine = loading(ASKING)
    machine.handle(prepare_load(D2, RIVAL, nonce=NONCE2), 100.1)
    (end,) = machine.handle(start_load(D2), 100.2)
    assert isinstance(end, LoadEnded)
    assert end.failure == TOO_MANY


def test_the_link_of_another_incarnation_stays_open() -> None:
    """Its ranks may have the same ports (`rank_port`)."""
    machine = loading(ASKING)
    machine.handle(cancel_load(), 100.0)
    life, now = OTHER_LIFE, 100.0 + KEPT_S
    machine.handle(prepare_load(D2, RIVAL, nonce=NONCE2, incarnation=life), now - 1)
    new = description(incarnation=life, rank_incarnation=OTHER_LIFE)
    machine.handle(answered(new, HOME), now - 1)
    peer = PeerKey(PEER.engine, life, HOME)
    machine.handle(PeerFits(peer, new, routes(0)), now - 1)
    actions = machine.handle(Tick(), now)
    assert DropPeer(PEER) in actions
    assert Disconnect(RANK_0) not in actions


@each_of(
    {
        "a peer that is asked who it is": (PREPARED, 100.0 + CONNECT_TIMEOUT_S),
        "a peer that is joined": ([*HANDSHAKING, (cancel_load(), GIVEN_UP)], None),
        "a rank that is asked": (ASKING, 100.0 + ASK_AGAIN_S),
        "a load that was reported": (LOADS["from arrival to report"], 100.0 + KEPT_S),
        "a pause": ([*PAUSED, (cancel_load(),)], 100.0 + INCOMPATIBLE_S),
        "the end of a pause": ([*PAUSED, (cancel_load(),), (100.0 + INCOMPATIBLE_S, Tick())], None),
        "a lost peer": ([*READING, (lost(),)], 110.0),
        "a lost peer that is still read": ([*READING, (lost(),), (Tick(),)], 110.0 + LOOK_AGAIN_S),
        "a lost peer that is dropped": (PEERS[next(n for n in PEERS if "kept until" in n)], None),
    },
    "case",
)
def test_when_time_matters(case: tuple[Script, float | None]) -> None:
    script, due = case
    assert loading(script).next_due == due


def test_a_cleared_machine_has_no_load_and_no_peer() -> None:
    machine = loading(READING)
    machine.clear()
    assert machine.next_due is None
    play(machine, [(read_done(),), *PREPARED])


def test_a_link_is_used_while_something_is_asked_for_or_held_over_it() -> None:
    machine = loading(PREPARED)
    used = [(machine.is_using(HOME), machine.is_using(RANK_0))]
    for step in (fits(), cancel_load()):
        machine.handle(step, 100.0)
        used.append((machine.is_using(HOME), machine.is_using(RANK_0)))
    assert used == [(True, False), (False, True), (False, False)]


class Failing:
    """Loads of one peer, one after the other."""

    def __init__(self) -> None:
        self.machine, self.now, self.number = decode_machine(), 100.0, 100

    @property
    def peer(self) -> Any:
        return self.machine.peers.known[PEER]

    def load(self, *, is_early: bool = False) -> tuple[list[Any], Failure | None]:
        """The messages of the next load, and the reason if it failed at once."""
        self.number += 1
        request, value = RequestId(f"x{self.number}"), hex32(self.number)
        load = prepare_load(request, Claim(value), nonce=Nonce(value), is_early=is_early)
        actions = self.machine.handle(load, self.now)
        sent = [each.message for each in actions if isinstance(each, Send)]
        return sent, self.machine._by_request[request].failure

    def do(self, event: Any) -> list[Any]:
        return self.machine.handle(event, self.now)

    def tick_after(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.do(Tick())

    def fail(self) -> list[Any]:
        return self.do(lost(HOME, "cannot connect"))


def test_two_loads_wait_for_a_silent_engine_and_later_ones_fail_at_once() -> None:
    loads = Failing()
    assert loads.load() == ([describe()], None)
    assert PeerUnusable(PEER, f"{HOME}: cannot connect") not in loads.fail()
    assert loads.load() == ([describe()], None), "its own ticket is an attempt"
    assert PeerUnusable(PEER, f"{HOME}: cannot connect") in loads.fail(), "it is reported once"
    for _ in range(5):
        sent, failure = loads.load()
        assert sent == [describe()], "the ticket shows that the engine may be back"
        assert failure is not None
        assert failure.is_known
        assert loads.load()[0] == [], "one attempt at a time"
        assert not any(isinstance(each, PeerUnusable) for each in loads.fail())


def test_a_load_of_an_early_ticket_waits_for_the_end_of_the_pause() -> None:
    """The API server of an engine that hangs still makes such tickets."""
    loads = Failing()
    loads.load()
    loads.fail()
    pauses = []
    for _ in range(8):
        sent, failure = loads.load(is_early=True)
        assert sent == []
        assert failure is not None
        due = loads.machine.next_due
        assert due is not None
        pauses.append(due - loads.now)
        assert DESCRIBE in loads.tick_after(pauses[-1])
        loads.fail()
    assert pauses == [1, 2, 4, 8, 16, 32, 64, MAX_PAUSE_S]


def test_a_silent_peer_that_answers_again_takes_one_load_until_its_rank_answers() -> None:
    loads = Failing()
    for _ in range(2):
        loads.load()
        loads.fail()
    loads.load()
    loads.do(answered(description(), HOME))
    loads.do(fits())
    assert loads.load()[1] is None
    assert loads.load()[1] is not None, "the rank has not answered the first one"
    value = hex32(loads.number - 1)
    loads.do(answered(grant(claim=Claim(value), nonce=Nonce(value))))
    assert loads.load()[1] is None


def test_closed_ports_of_ranks_cost_one_load_per_pause() -> None:
    """Tickets of such an engine say nothing of these ports."""
    loads, tried = Failing(), 0
    for _ in range(1000):
        _, failure = loads.load()
        tried += failure is None
        if loads.peer.state is PeerState.CONNECTING:
            loads.do(answered(description(), HOME))
            loads.do(fits())
        if failure is None:
            loads.do(lost())
        loads.tick_after(0.1)
    assert 5 <= tried <= 10
    assert loads.peer.failures == tried


def test_a_good_read_ends_the_count_of_failures() -> None:
    machine = loading(READING)
    peer = machine.peers.known[PEER]
    machine.handle(PeerBroken(PEER, "reset"), 110.0)
    assert peer.failures == 1
    machine.handle(read_done(), 110.1)
    assert (peer.failures, peer.failure) == (0, None)
    machine.handle(HandshakeDone(PEER), 110.1)
    assert machine.handle(PeerBroken(PEER, "reset"), 110.2) == [Connect(PEER, ())]
    assert peer.state is PeerState.HANDSHAKING, "it counts from the beginning"


def test_a_link_that_ends_without_a_load_does_not_count_as_a_failure() -> None:
    """A drained engine stops like this: nothing is remembered; the next load asks at once."""
    machine = loading([*ASKING, (cancel_load(), GIVEN_UP)])
    machine.handle(lost(), 110.0)
    for _ in range(2):
        machine.handle(Tick(), 110.0)
    assert (list(machine.peers.known), machine.next_due) == ([], None)


def test_a_good_read_of_an_unusable_peer_is_reported_and_ends_its_pause() -> None:
    """The link to its rank ended while the data was on its way."""
    machine = loading(READING)
    machine.handle(PeerBroken(PEER, "reset"), 110.0)
    machine.handle(SECOND, 110.0)
    assert PeerUnusable(PEER, f"{RANK_0}: closed") in machine.handle(lost(), 110.1)
    assert PeerUsable(PEER) in machine.handle(read_done(), 110.2)
    machine.handle(Tick(), 110.3)
    value = hex32(3)
    load = prepare_load(RequestId("d3"), Claim(value), nonce=Nonce(value), is_early=True)
    assert DESCRIBE in machine.handle(load, 110.4)
    assert machine.peers.known[PEER].state is PeerState.CONNECTING


def test_a_restarted_engine_is_tried_at_once() -> None:
    loads = Failing()
    for _ in range(2):
        loads.load()
        loads.fail()
    assert Send(HOME, describe(OTHER_LIFE)) in loads.do(SECOND_OF_NEXT_LIFE)
    assert loads.machine._by_request[D2].failure is None


def test_only_a_good_read_ends_the_count_of_failures() -> None:
    """An engine that connects but cannot be read costs one load per pause."""
    loads, pauses = Failing(), []
    for is_first in (True, False, False):
        loads.load()
        for event in (answered(description(), HOME), fits()):
            loads.do(event)
        for _ in range(1 + is_first):
            loads.do(HandshakeDone(PEER))
            assert loads.peer.state is PeerState.READY
            loads.do(PeerBroken(PEER, "refused"))
        assert loads.peer.state is PeerState.UNUSABLE
        pauses.append(loads.peer.pause_ends_at - loads.now)
        for request in list(loads.machine._by_request):
            loads.do(cancel_load(request))
        loads.tick_after(pauses[-1])
    assert pauses == [2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S]
