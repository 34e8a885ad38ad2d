"""One load: its reads and how they end, what is verified, what is recorded, what is reported."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import Table
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Rank
from nixl_kv.protocol.events import (
    Failure,
    FailureKind,
    LoadEnded,
    PeerFits,
    PeerRefused,
    Send,
    StartLoad,
    StartRead,
    StopRead,
    Tick,
    Transition,
)
from nixl_kv.protocol.load import (
    ASK_AGAIN_S,
    ENDED,
    POSTED,
    TRANSITIONS,
    Cancelled,
    Load,
    Numbers,
    RankRead,
    State,
)
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.protocol.read_queue import ReadQueue
from support.records import (
    CLAIM,
    D1,
    FENCE_TOKEN,
    HOME,
    PEER,
    RANK_0,
    RANK_LIFE,
    READER,
    RIVAL,
    SLICES,
    STRANGER,
    TIMEOUT_S,
    answered,
    ask,
    at,
    cancel_load,
    deny,
    description,
    digest_compared,
    digest_reply,
    digest_request,
    fits,
    grant,
    layout,
    lost,
    no_record,
    prepare_load,
    read_done,
    read_failed,
    recall,
    release,
    renew,
    renewed,
    routes,
    start_load,
    ticket,
)
from support.scripts import (
    ASKING,
    COMPARE,
    GRANT,
    GRANTED,
    LANDED_VERIFIED,
    PREPARED,
    READ,
    READ_VERIFIED,
    READING,
    START,
    START_VERIFIED,
    STOP,
    TO_DIGEST,
    VERIFIED,
    VERIFYING,
    Script,
    after,
    decode_machine,
    each_of,
    loading,
    play,
)

EMPTY = bytes(16)
RELEASED, GIVEN_UP = Send(RANK_0, release()), Send(RANK_0, release(complete=False))
RELEASED_1, GIVEN_UP_1 = Send(at(1), release()), Send(at(1), release(complete=False))
ASK_DIGEST = Send(RANK_0, digest_request())
OTHER_DIGEST = digest_reply(columns=bytes(8))
GOOD = LoadEnded(D1, 7, None, PEER, reads=(read_done(),))
GOOD_VERIFIED = replace(GOOD, verified=True)


def failed(kind: FailureKind, detail: str) -> LoadEnded:
    return LoadEnded(D1, 7, Failure(kind, detail), PEER)


NO_SLOT = replace(read_done(), fence_token=None)
FENCED = failed(FailureKind.FENCED, "rank 0")
BROKEN = failed(FailureKind.BROKEN, "rank 0 failed: reset")
DROPPED = failed(FailureKind.DROPPED, "dropped")
DENIED = failed(FailureKind.DENIED, "rank 0")
DENIED_1 = failed(FailureKind.DENIED, "rank 1")
LOST_LEASE = failed(FailureKind.LEASE_LOST, "rank 0")
RECALLED = failed(FailureKind.RECALLED, "rank 0")
UNREACHABLE = failed(FailureKind.UNREACHABLE, "closed")
LATE = failed(FailureKind.LATE, f"{TIMEOUT_S:g} s")
CORRUPT = failed(FailureKind.CORRUPT, "K of head 0")

DIGEST = (answered(digest_reply()),)
TO_COMPARE = (*DIGEST, COMPARE)
EQUAL = (digest_compared(), RELEASED, GOOD_VERIFIED)
CANCELLED = (cancel_load(),)
DRAINING: Script = after(READING, (*CANCELLED, STOP))
TWO_ASKED: Script = after(
    PREPARED, (fits(2), Send(RANK_0, ask()), Send(at(1), ask(number=2))), (start_load(),)
)
GRANTED_1 = StartRead(PEER, Rank(1), GRANT, START)

# No byte is good without its fence_token in the slot, and no report comes while a read may write.
READS: dict[str, Script] = {
    "a valid slot makes the load good": after(READING, (read_done(), RELEASED, GOOD)),
    "a cleared slot fails it": after(READING, (read_done(fence_token=EMPTY), GIVEN_UP, FENCED)),
    "the slot of another grant fails it": after(
        READING, (read_done(fence_token=b"\2" * 16), GIVEN_UP, FENCED)
    ),
    "an error of the data read fails it": after(READING, (read_failed(), GIVEN_UP, BROKEN)),
    "a read without its slot fails it": after(READING, (NO_SLOT, GIVEN_UP, FENCED)),
    "cancelled, it waits for its read": after(DRAINING, (read_done(), GIVEN_UP, DROPPED)),
    "cancelled, it waits for an error": after(DRAINING, (read_failed(), GIVEN_UP, DROPPED)),
    **{
        f"cancelled, it waits for its slot, {name}": after(
            DRAINING, (read_done(fence_token=fence_token), GIVEN_UP, DROPPED)
        )
        for name, fence_token in (("valid", FENCE_TOKEN), ("cleared", EMPTY))
    },
    **{
        f"cancelled, it does not end with {name}": after(
            DRAINING, (500.0, event, *actions), (500.1, read_done(), GIVEN_UP, DROPPED)
        )
        for name, event, *actions in (
            ("another cancellation", cancel_load()),
            ("its connection", lost()),
            ("a denial", answered(deny())),
            ("its lease", answered(renewed(CLAIM))),
            ("another grant", answered(grant())),
        )
    },
    "cancelled without a grant": after(ASKING, (START,), (cancel_load(), GIVEN_UP, DROPPED)),
    "cancelled with a grant": after(GRANTED, (cancel_load(), GIVEN_UP)),
    "an ask is denied": after(ASKING, (START,), (answered(deny()), DENIED)),
    "a grant is taken back": after(GRANTED, (answered(deny()),), (START, DENIED)),
    "a grant is recalled": after(
        GRANTED, (answered(recall()), GIVEN_UP), (START, RECALLED), (answered(recall()), GIVEN_UP)
    ),
    "a recall overtakes its grant": after(
        ASKING, (answered(recall()), GIVEN_UP), (START, RECALLED), (answered(GRANT), GIVEN_UP)
    ),
    **{
        f"what is {name} is not given back": after(
            script, (answered(recall()), Send(RANK_0, renew(number, CLAIM, reading=1)))
        )
        for name, script, number in (
            ("read", READING, 2),
            ("verified", VERIFYING, 2),
            ("drained", DRAINING, 2),
        )
    },
    "a claim is lost": after(GRANTED, (answered(renewed(CLAIM)),), (START, LOST_LEASE)),
    "a rank is lost before it grants": after(ASKING, (START,), (lost(), UNREACHABLE)),
    "a rank is lost before it is read": after(GRANTED, (lost(),), (START, UNREACHABLE)),
    "one failure cancels the rest, and the report waits for it": after(
        TWO_ASKED,
        (answered(GRANT), READ),
        (answered(deny(), at(1)), STOP),
        (read_done(), GIVEN_UP, DENIED_1),
    ),
    "one failure releases at once what is not read": after(
        TWO_ASKED, (answered(deny()), GIVEN_UP_1, DENIED)
    ),
    "a good read does not save a load": after(
        TWO_ASKED,
        (answered(GRANT), READ),
        (read_done(), RELEASED),
        (answered(deny(), at(1)), DENIED_1),
    ),
    "of two failures the first is reported": after(
        TWO_ASKED,
        (answered(GRANT), READ),
        (answered(GRANT, at(1)), GRANTED_1),
        (read_failed(), GIVEN_UP, StopRead(D1, Rank(1))),
        (read_failed("stuck", 1), GIVEN_UP_1, BROKEN),
    ),
}
LOSSES: dict[str, tuple[Any, LoadEnded]] = {
    "the connection": (lost(), UNREACHABLE),
    "the lease": (answered(renewed(CLAIM)), LOST_LEASE),
    "a denial": (answered(deny()), DENIED),
}
DIGESTS: dict[str, Script] = {"without a digest": [], "with a digest": [DIGEST]}
SOME_TOKENS = StartLoad(D1, 4, 7, (Table.of([5], first=1),), verify=True)
VERIFICATION: dict[str, Script] = {
    "prefill's digest comes last": after(VERIFYING, TO_COMPARE, EQUAL),
    "a digest that comes during the read waits for the slot": after(
        VERIFIED, DIGEST, (read_done(), COMPARE), EQUAL
    ),
    "a digest that comes after the slot is compared": after(
        VERIFIED, LANDED_VERIFIED, TO_COMPARE, EQUAL
    ),
    "only the tokens that are loaded are compared": after(
        GRANTED,
        (SOME_TOKENS, ASK_DIGEST, *(replace(one, load=SOME_TOKENS) for one in READ_VERIFIED)),
        (read_done(), replace(TO_DIGEST, load=SOME_TOKENS)),
        (*DIGEST, replace(COMPARE, load=SOME_TOKENS)),
        (digest_compared(), RELEASED, replace(GOOD_VERIFIED, num_tokens=3)),
    ),
    "bytes that differ fail the load": after(
        VERIFYING, TO_COMPARE, (digest_compared("K of head 0"), GIVEN_UP, CORRUPT)
    ),
    "bytes that cannot be compared are not called corrupt": after(
        VERIFYING,
        TO_COMPARE,
        (
            replace(digest_compared(), refusal="no memory"),
            GIVEN_UP,
            failed(FailureKind.INTERNAL, "no memory"),
        ),
    ),
    **{
        f"a comparison needs prefill no more: {name}": after(VERIFYING, TO_COMPARE, (event,), EQUAL)
        for name, (event, _) in LOSSES.items()
    },
    **{
        f"without prefill's digest the load fails with {name}": after(VERIFYING, (event, report))
        for name, (event, report) in LOSSES.items()
    },
    "a lost connection does not end the read": after(
        VERIFIED, (lost(),), LANDED_VERIFIED, TO_COMPARE
    ),
    "a repeated digest is compared once": after(
        VERIFYING, TO_COMPARE, (answered(OTHER_DIGEST),), EQUAL, DIGEST
    ),
    "of two digests the first is compared": after(
        VERIFIED, DIGEST, (answered(OTHER_DIGEST),), (read_done(), COMPARE)
    ),
    "a digest after the end is ignored": after(VERIFIED, (read_failed(), GIVEN_UP, BROKEN), DIGEST),
    "a digest that nobody asked for is ignored": after(
        READING, DIGEST, (read_done(), RELEASED, GOOD)
    ),
    **{
        f"a digest of {name} is ignored": after(VERIFYING, (event,), TO_COMPARE)
        for name, event in {
            "another claim": answered(digest_reply(claim=RIVAL)),
            "another reader": answered(digest_reply(reader=STRANGER)),
            "another rank": answered(digest_reply(), at(1)),
            "the engine": answered(digest_reply(), HOME),
        }.items()
    },
    **{
        f"what is fenced is not compared, {name}": after(
            VERIFIED, *digest, (read_done(fence_token=EMPTY), GIVEN_UP, FENCED)
        )
        for name, digest in DIGESTS.items()
    },
    **{
        f"a comparison that ends after its load changes nothing, {difference}": after(
            VERIFYING,
            TO_COMPARE,
            (cancel_load(), GIVEN_UP, DROPPED),
            (digest_compared(difference),),
        )
        for difference in (None, "K of head 0")
    },
    # It may end when the same request is loaded again.
    "a comparison of an earlier attempt shows nothing": after(
        VERIFYING,
        (digest_compared(claim=RIVAL),),
        (digest_compared("K of head 0", claim=RIVAL),),
        TO_COMPARE,
        EQUAL,
    ),
    "a comparison during the read shows nothing": after(
        VERIFIED, (digest_compared(),), LANDED_VERIFIED
    ),
    # The slot decides about a read under way; then the digest is asked for again, in vain.
    "a denied digest fails the load when it is all that is missing": after(
        VERIFIED,
        (answered(deny()),),
        LANDED_VERIFIED,
        (110.0 + ASK_AGAIN_S, Tick(), ASK_DIGEST),
        (answered(deny()), DENIED),
    ),
    **{
        f"what is not verified in time is late, {name}": after(
            VERIFYING, *steps, (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE)
        )
        for name, *steps in (
            ("without a digest", (139.5, Tick(), ASK_DIGEST), (139.99, Tick())),
            ("with a digest", TO_COMPARE, (139.99, Tick())),
        )
    },
    # Nothing writes into its blocks any more.
    "cancelled while it is verified, it ends at once": after(
        VERIFYING, (cancel_load(), GIVEN_UP, DROPPED)
    ),
    "a digest does not save a cancelled load": after(
        VERIFIED, (*CANCELLED, STOP), DIGEST, (read_done(), GIVEN_UP, DROPPED)
    ),
    "the digest is asked for again only when it is all that is missing": after(
        VERIFIED,
        (112.0, Tick()),
        LANDED_VERIFIED,
        (112.4, Tick(), ASK_DIGEST),
        (112.4 + ASK_AGAIN_S - 0.01, Tick()),
        (112.4 + ASK_AGAIN_S, Tick(), ASK_DIGEST),
        TO_COMPARE,
        (120.0, Tick()),
    ),
    "prefill's digest is asked for before it grants": after(
        ASKING,
        (110.0, START_VERIFIED, ASK_DIGEST),
        (answered(GRANT), *READ_VERIFIED),
        DIGEST,
        (read_done(), COMPARE),
        EQUAL,
    ),
    "prefill's digest is asked for as soon as it is known": after(
        PREPARED,
        (110.0, START_VERIFIED),
        (fits(), Send(RANK_0, ask(number=1)), ASK_DIGEST),
        (answered(GRANT), *READ_VERIFIED),
    ),
    "of what is denied no digest is asked for": after(
        GRANTED, (answered(deny()),), (START_VERIFIED, DENIED)
    ),
    "what is denied fails once": after(
        ASKING, (START_VERIFIED, ASK_DIGEST), (answered(deny()), DENIED), (answered(deny()),)
    ),
    "without a rank to read nothing is compared": after(
        PREPARED,
        (PeerFits(PEER, description(), routes(0, readers=())), RELEASED),
        (START_VERIFIED, replace(GOOD_VERIFIED, reads=())),
    ),
}
TWO_READING: Script = [
    *TWO_ASKED[:-1],
    (START_VERIFIED, *(Send(at(rank), digest_request()) for rank in (0, 1))),
    *[
        (answered(GRANT, at(rank)), *(replace(one, rank=Rank(rank)) for one in READ_VERIFIED))
        for rank in (0, 1)
    ],
    LANDED_VERIFIED,
]
"""Two ranks are read and verified; the slot of the first was valid."""
TWO_VERIFYING: Script = after(
    TWO_READING,
    (read_done(1), *(replace(action, rank=Rank(1)) for action in LANDED_VERIFIED[1:])),
)
COMPARE_OTHER = replace(COMPARE, rank=Rank(1), rows=OTHER_DIGEST.rows, columns=OTHER_DIGEST.columns)
SEVERAL_VERIFIED: dict[str, Script] = {
    "each rank is compared with its own digest": after(
        TWO_VERIFYING,
        (answered(OTHER_DIGEST, at(1)), COMPARE_OTHER),
        TO_COMPARE,
        (digest_compared(rank=1), RELEASED_1),
        (digest_compared(), RELEASED, replace(GOOD_VERIFIED, reads=(read_done(0), read_done(1)))),
    ),
    "one corrupt rank fails the load at once": after(
        TWO_VERIFYING, TO_COMPARE, (digest_compared("K of head 0"), GIVEN_UP, GIVEN_UP_1, CORRUPT)
    ),
    "a verified rank does not save a corrupt one": after(
        TWO_VERIFYING,
        TO_COMPARE,
        (answered(digest_reply(), at(1)), replace(COMPARE, rank=Rank(1))),
        (digest_compared(rank=1), RELEASED_1),
        (digest_compared("K of head 0"), GIVEN_UP, CORRUPT),
    ),
    "a corrupt rank waits for the reads of the others": after(
        TWO_READING,
        TO_COMPARE,
        (digest_compared("K of head 0"), GIVEN_UP, StopRead(D1, Rank(1))),
        (read_done(1), GIVEN_UP_1, CORRUPT),
    ),
}


@each_of(READS | VERIFICATION | SEVERAL_VERIFIED)
def test_how_a_load_ends(script: Script) -> None:
    machine = loading(script)
    machine.validate()
    is_reported = any(isinstance(action, LoadEnded) for step in script for action in step)
    is_cancelled = script[-1] == (cancel_load(), GIVEN_UP)
    assert (machine.load_of(D1) is None) == (is_reported or is_cancelled)


READ_UNNAMED = (START_VERIFIED, StartRead(PEER, Rank(0), GRANT, START_VERIFIED))
LANDED_UNNAMED = (read_done(num_bytes=4096),)


@each_of(
    {
        "nothing is to be compared where nothing is read": after(
            GRANTED,
            READ_UNNAMED,
            (read_done(), RELEASED, GOOD_VERIFIED),
        ),
        "what was read and has no name is late, not good": after(
            GRANTED,
            (110.0, *READ_UNNAMED),
            LANDED_UNNAMED,
            (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE),
        ),
    }
)
def test_a_load_of_which_nothing_is_named(script: Script) -> None:
    play(decode_machine(slices=()), script)


def test_a_load_that_cannot_be_named_fails() -> None:
    def refuse(*_: object) -> NoReturn:
        raise ValueError("block table: 2 groups")

    machine = loading(GRANTED)
    machine._name_slices = refuse
    failure = failed(FailureKind.INTERNAL, "block table: 2 groups")
    play(machine, [(START_VERIFIED, GIVEN_UP, failure)])


def test_without_digests_a_load_that_is_to_be_verified_fails() -> None:
    machine = loading(GRANTED)
    machine._name_slices = None
    released, end = machine.handle(START_VERIFIED, 100.5)
    assert released == GIVEN_UP
    assert isinstance(end, LoadEnded)
    assert end.failure is not None
    assert end.failure.kind is FailureKind.INTERNAL


def test_slices_are_named_by_what_is_known_of_the_rank() -> None:
    """The route to it, its layout and the load's block tables."""
    asked: list[tuple[object, ...]] = []

    def name(*arguments: object) -> tuple[KVSlice, ...]:
        asked.append(arguments)
        return SLICES

    machine = loading(GRANTED)
    machine._name_slices = name
    machine.handle(START_VERIFIED, 100.5)
    (route,) = routes(0)
    assert asked == [(route, description().ranks[0].layout, START_VERIFIED)]


def test_a_comparison_is_of_use_until_its_load_is_over() -> None:
    machine = loading([*VERIFYING, TO_COMPARE])
    assert machine.is_digest_wanted(COMPARE)
    assert not machine.is_digest_wanted(replace(COMPARE, claim=RIVAL))
    assert not machine.is_digest_wanted(replace(COMPARE, rank=Rank(1)))
    assert machine.is_digest_wanted(TO_DIGEST)
    machine.handle(cancel_load(), 110.8)
    assert not machine.is_digest_wanted(COMPARE)


def test_a_digest_is_prepared_while_its_bytes_travel() -> None:
    machine = loading(VERIFIED)
    assert machine.is_digest_wanted(TO_DIGEST)


@each_of({"no load": [], "no peer": PREPARED, "no blocks": GRANTED})
def test_before_its_read_no_comparison_is_of_use(script: Script) -> None:
    assert not loading(script).is_digest_wanted(COMPARE)


@pytest.mark.parametrize(
    "event",
    [read_done(), read_failed(), digest_compared()],
    ids=lambda event: type(event).__name__,
)
def test_events_of_unknown_reads_are_ignored(event: Any) -> None:
    of_another_rank = replace(event, rank=Rank(1))
    play(decode_machine(), [(event,), *PREPARED, (event,), *ASKING[1:], (of_another_rank,)])


def test_the_end_of_a_read_that_was_never_started_is_our_own_mistake() -> None:
    machine = loading(GRANTED)
    with pytest.raises(LocalProtocolError, match="ReadDone leads from GRANTED to DONE"):
        machine.handle(read_done(), 100.1)
    play(machine, READING[-1:])


# The table


def test_the_scripts_above_make_each_transition_of_the_table() -> None:
    recorded: list[Transition] = []
    for script in (READS | VERIFICATION | SEVERAL_VERIFIED).values():
        play(decode_machine(recorded.append), script)
    assert {
        (move.before, move.cause.partition(":")[0], move.after)
        for move in recorded
        if move.before and move.peer.startswith("rank")
    } == {
        (state.name, event.__name__, after.name)
        for state, moves in TRANSITIONS.items()
        for event, afters in moves.items()
        for after in afters
        if after is not None
    }


def new_load(*states: State, **changed: Any) -> Load:
    """Reads prefill's ranks in these states."""
    reads = {
        Rank(rank): RankRead(Route(Rank(rank), ()), at(rank), RANK_LIFE, layout(), state)
        for rank, state in enumerate(states)
    }
    load = Load(
        reader=READER,
        request=D1,
        ticket=ticket(),
        claim=CLAIM,
        peer=PEER,
        timeout_s=TIMEOUT_S,
        since=0.0,
        record=no_record,
        queue=ReadQueue(),
        numbers=Numbers(),
        is_open=True,
        reads=reads,
    )
    for name, value in changed.items():
        setattr(load, name, value)
    return load


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize(
    "event",
    [
        *[grant(), deny(), renewed(), lost(), start_load(), read_done()],
        *[read_failed(), digest_reply(), digest_compared(), recall()],
        Cancelled(Failure(FailureKind.DROPPED, "dropped")),
    ],
    ids=lambda event: type(event).__name__,
)
def test_nothing_else_changes_the_state_of_a_read(state: State, event: object) -> None:
    recorded: list[Transition] = []
    load = new_load(state, record=recorded.append)
    (read,) = load.reads.values()
    for other in set(State).difference(TRANSITIONS[state].get(type(event), ())):
        words = f"{type(event).__name__} leads from {state.name} to {other.name}; allowed: "
        with pytest.raises(LocalProtocolError, match=f"'d1', peer 'rank 0 .*: {words}"):
            load._move(read, other, event, 100.0)
    assert (read.state, recorded) == (state, [])


def test_only_the_end_of_a_posted_read_leads_out_of_the_posted_states() -> None:
    leading_out = {
        event.__name__
        for state in POSTED
        for event, afters in TRANSITIONS[state].items()
        if not POSTED.issuperset(afters)
    }
    assert leading_out == {"ReadDone", "ReadFailed"}
    assert {State.READING, State.DRAINING} == POSTED


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_a_read_has_ended_when_nothing_leads_on(state: State) -> None:
    assert (state in ENDED) == (not TRANSITIONS[state])


# What it says of itself


@pytest.mark.parametrize(
    ("load", "waits_for"),
    [
        (new_load(is_open=False), f"the description of engine 'prefill' at {HOME}"),
        (new_load(State.ASKING), "a grant"),
        (new_load(State.GRANTED), "local blocks"),
        (new_load(State.GRANTED, start=START), "its turn in the read queue"),
        (new_load(State.READING), "data"),
        (new_load(State.VERIFYING), "a digest"),
        (new_load(State.DRAINING, State.FAILED), "the end of a cancelled read"),
        (new_load(State.READING, State.ASKING, State.DONE, State.READING), "data, a grant"),
        (new_load(State.DONE, State.FAILED), "the scheduler, to start or cancel it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_load_says_what_it_waits_for(load: Load, waits_for: str) -> None:
    assert load.waits_for == waits_for


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param(new_load(is_open=False), False, id="no peer"),
        pytest.param(new_load(), True, id="no rank to read"),
        pytest.param(new_load(State.GRANTED, State.GRANTED), True, id="granted by all"),
        pytest.param(new_load(State.GRANTED, State.ASKING), False, id="granted by one"),
        pytest.param(new_load(State.GRANTED, start=START), False, id="has blocks"),
        pytest.param(new_load(State.FAILED), False, id="failed"),
    ],
)
def test_whether_a_load_lacks_blocks_alone(load: Load, *, expected: bool) -> None:
    assert load.lacks_only_blocks is expected


@pytest.mark.parametrize(
    "state", [state for state in State if state in POSTED], ids=lambda s: s.name
)
def test_a_posted_read_needs_blocks_and_a_grant(state: State) -> None:
    for start, granted in ((None, None), (None, GRANT), (START, None)):
        load = new_load(state, start=start)
        load.reads[Rank(0)].grant = granted
        with pytest.raises(LocalProtocolError, match=f"{state.name} without blocks or grant"):
            load.validate()
    load = new_load(state, start=START)
    load.reads[Rank(0)].grant = GRANT
    load.validate()


def test_a_failed_read_needs_a_failure() -> None:
    load = new_load(State.DONE, State.FAILED)
    with pytest.raises(LocalProtocolError, match="FAILED without a reason"):
        load.validate()
    load.failure = DENIED.failure
    load.validate()


def test_without_blocks_no_digest_is_asked_for() -> None:
    load = new_load(State.VERIFYING)
    assert load.ask_digest(load.reads[Rank(0)], 110.0) == []


# What it records


def moved(before: str, after: str, cause: str, num_bytes: int = 0) -> Transition:
    return Transition(D1, f"rank 0 at {RANK_0}", before, after, cause, num_bytes)


def of_load(before: str, after: str, cause: str) -> Transition:
    return Transition(D1, str(PEER), before, after, cause)


def of_peer(before: str, after: str, cause: str) -> Transition:
    return Transition("", str(PEER), before, after, cause)


IS_PREPARED = [
    of_load("", "PREPARED", "PrepareLoad: offer 00000000"),
    of_peer("", "CONNECTING", "PrepareLoad"),
]
STARTED = of_load("PREPARED", "STARTED", "StartLoad: tokens 0 to 6")
IS_ASKING = [
    *IS_PREPARED,
    of_peer("CONNECTING", "HANDSHAKING", "PeerFits: 1 of 1 ranks"),
    moved("", "ASKING", "PeerFits"),
]
IS_READING = [
    *IS_ASKING,
    moved("ASKING", "GRANTED", "Grant"),
    STARTED,
    moved("GRANTED", "READING", "StartLoad"),
]
READ_4096 = read_done(num_bytes=4096)
TO_READING = [prepare_load(), fits(), answered(grant()), start_load()]
RECORDS: dict[str, tuple[list[Any], list[Transition]]] = {
    "verified": (
        [
            *TO_READING[:3],
            *[START_VERIFIED, READ_4096],
            *[answered(digest_reply()), digest_compared()],
        ],
        [
            *IS_READING,
            moved("READING", "VERIFYING", "ReadDone", 4096),
            moved("VERIFYING", "DONE", "DigestCompared"),
            of_load("STARTED", "LOADED", ""),
        ],
    ),
    "cancelled while it is read": (
        [*TO_READING, cancel_load(), READ_4096],
        [
            *IS_READING,
            moved("READING", "DRAINING", "Cancelled: dropped"),
            moved("DRAINING", "FAILED", "ReadDone", 4096),
            of_load("STARTED", "FAILED", "dropped (dropped)"),
        ],
    ),
    "not compatible": (
        [prepare_load(), PeerRefused(PEER, "another dtype"), start_load()],
        [
            *IS_PREPARED,
            of_peer("CONNECTING", "BACKOFF", "PeerRefused: another dtype"),
            STARTED,
            of_load("STARTED", "FAILED", "another dtype (incompatible)"),
        ],
    ),
}


def recording(steps: list[Any]) -> tuple[Callable[[Any], Any], list[Transition]]:
    recorded: list[Transition] = []
    machine = decode_machine(recorded.append)
    for step in steps:
        machine.handle(step, 100.0)
    return lambda event: machine.handle(event, 100.1), recorded


@pytest.mark.parametrize(("steps", "expected"), RECORDS.values(), ids=RECORDS)
def test_each_transition_of_a_load_is_recorded_once(
    steps: list[Any], expected: list[Transition]
) -> None:
    assert recording(steps)[1] == expected


@each_of(
    {
        "granted again": answered(grant()),
        "denied while it is read": answered(deny()),
        "lost while it is read": answered(renewed(CLAIM)),
        "a digest that is not wanted": answered(digest_reply()),
        "nothing is due": Tick(),
    },
    "event",
)
def test_what_changes_no_state_is_not_recorded(event: Any) -> None:
    handle, recorded = recording(TO_READING)
    handle(event)
    assert recorded == IS_READING
