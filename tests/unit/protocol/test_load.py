"""One load: its reads and how they end, its records and its report."""

import random
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Claim, Rank, RequestId
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import (
    AbandonRead,
    Actions,
    Failure,
    FailureKind,
    LinkBroken,
    LoadEnded,
    LoadReady,
    PeerFits,
    ReadDone,
    ReadMoved,
    Send,
    StartLoad,
    StartRead,
    StopRead,
    Tick,
    Transition,
)
from nixl_kv.protocol.load import (
    ASK_AGAIN_S,
    DRAIN_S,
    MAX_LOST,
    MAX_TIMEOUTS,
    READ_TRANSITIONS,
    SILENCE_S,
    Load,
    LoadPart,
    RankRead,
    ReadState,
)
from nixl_kv.protocol.messages import Landed
from nixl_kv.protocol.read_queue import MAX_BYTES
from support.features import features_of_a_rank
from support.records import (
    CLAIM,
    D1,
    D2,
    HEARTBEAT_S,
    HINT_KEY,
    HOME,
    NONCE,
    NONCE2,
    OTHER_LIFE,
    PEER,
    RANK_0,
    READER,
    RIVAL,
    TIMEOUT_S,
    answered,
    ask,
    at,
    cancel_load,
    deny,
    description,
    fits,
    grant,
    hex32,
    landed,
    lost,
    prepare_load,
    read_done,
    read_failed,
    ready,
    recall,
    release,
    renew,
    renewed,
    routes,
    start_load,
)
from support.scripts import (
    AGAIN,
    ASK_SECOND,
    ASKING,
    DENIED,
    DROPPED,
    EARLY,
    EMPTY,
    FENCED,
    GIVEN_UP,
    GIVEN_UP_2,
    GOOD,
    GOOD_SUM,
    GRANT,
    GRANTED,
    LATE,
    LOST_LEASE,
    OTHER_TOKEN,
    OTHER_WHOLE,
    OWN,
    PART,
    PENDING,
    PREPARED,
    READ,
    READING,
    READY,
    RELEASED,
    SECOND,
    START,
    START_2,
    STOP,
    TWO_ASKED,
    UNREACHABLE,
    WHOLE,
    RecordedLoad,
    Script,
    after,
    decode_machine,
    each_of,
    expect_recorded,
    failed,
    loading,
    moves_of,
    play,
    rows_of,
    told,
)

RANK = Rank(0)
RELEASED_1, GIVEN_UP_1 = Send(at(1), release()), Send(at(1), release(complete=False))
NO_SLOT = replace(read_done(), fence_token=None)
BROKEN = failed(FailureKind.BROKEN, "rank 0 failed: reset")
DENIED_1 = failed(FailureKind.DENIED, "rank 1")
RECALLED = failed(FailureKind.RECALLED, "rank 0")
STALLED = failed(FailureKind.STALLED, "rank 0 hangs")
CANCELLED = (cancel_load(),)
DRAINING: Script = after(READING, (*CANCELLED, STOP))
GRANTED_1 = StartRead(PEER, Rank(1), GRANT, START)

READS: dict[str, Script] = {
    "a valid slot makes the load good": after(READING, (read_done(), RELEASED, GOOD)),
    "a cleared slot fails it": after(READING, (read_done(fence_token=EMPTY), GIVEN_UP, FENCED)),
    "the slot of another grant fails it": after(
        READING, (read_done(fence_token=b"\2" * 16), GIVEN_UP, FENCED)
    ),
    "an error of the data read fails it": after(READING, (read_failed(), GIVEN_UP, BROKEN)),
    "a read without its slot fails it": after(READING, (NO_SLOT, GIVEN_UP, FENCED)),
    "cancelled, it waits for an error": after(DRAINING, (read_failed(), GIVEN_UP, DROPPED)),
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
    "a rank is lost before it grants": after(ASKING, (START,), (lost(), UNREACHABLE)),
    "a rank is lost before it is read": after(GRANTED, (lost(),), (START, UNREACHABLE)),
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
        f"an offer that is {name} is not given back": after(
            script, (answered(recall()), Send(RANK_0, renew(number, CLAIM, reading=1)))
        )
        for name, script, number in (
            ("read", READING, 2),
            ("drained", DRAINING, 2),
        )
    },
    "a claim is lost": after(GRANTED, (answered(renewed(CLAIM)),), (START, LOST_LEASE)),
    "one failure cancels the rest, and the report waits for it": after(
        TWO_ASKED,
        (answered(GRANT), READ),
        (answered(deny(), at(1)), STOP),
        (read_done(), GIVEN_UP, DENIED_1),
    ),
    "of two failures the first is reported": after(
        TWO_ASKED,
        (answered(GRANT), READ),
        (answered(GRANT, at(1)), GRANTED_1),
        (read_failed(), GIVEN_UP, StopRead(D1, Rank(1))),
        (read_failed("stuck", 1), GIVEN_UP_1, BROKEN),
    ),
}


@dataclass(frozen=True)
class Heard:
    """Prefill has sent what the proof needs."""

    request: RequestId = D1
    rank: Rank = RANK


@dataclass(frozen=True)
class Proved:
    """The proof has ended."""

    failure: Failure | None = None
    request: RequestId = D1
    rank: Rank = RANK


class Prover(LoadPart):
    """Has to prove the reads of a load with `verify`, and needs an answer of prefill for it."""

    def __init__(self) -> None:
        self.handlers = {Heard: self._on_heard, Proved: self._on_proved}

    def compares(self, load: Load) -> bool:
        return load.start is not None and load.start.verify

    def on_new_grant(self, read: RankRead) -> None:
        read.kept.pop(self, None)

    def must_prove(self, load: Load, read: RankRead, event: ReadDone) -> bool:
        return self.compares(load) and read.rank == event.rank

    def is_awaiting(self, read: RankRead) -> bool:
        return read.state is ReadState.VERIFYING and self not in read.kept

    def _on_heard(self, _load: Load, read: RankRead, event: Heard, _now: float) -> Actions:
        read.kept[self] = event
        return []

    def _on_proved(self, load: Load, read: RankRead, event: Proved, now: float) -> Actions:
        return load.end_proof(read, event.failure, now)


PROVING_START = start_load(verify=True)
PROVING: Script = after(
    GRANTED, (110.0, PROVING_START, replace(READ, load=PROVING_START)), (read_done(),)
)
"""The slot was valid, and the part has to prove the bytes."""
GOOD_PROVED = replace(GOOD, verified=True)
PROVING_ALL: Script = after(
    EARLY,
    (answered(WHOLE), READY),
    (110.0, PROVING_START, StartRead(PEER, RANK, WHOLE, PROVING_START)),
)
"""An early load, all of whose tokens are written."""
PROVING_PART: Script = after(
    EARLY,
    (answered(PART), READY),
    (110.0, PROVING_START, StartRead(PEER, RANK, PART, replace(PROVING_START, end=4))),
)
"""Its first tokens alone."""
LOSSES: dict[str, tuple[Any, LoadEnded]] = {
    "the connection": (lost(), UNREACHABLE),
    "the lease": (answered(renewed(CLAIM)), LOST_LEASE),
    "a denial": (answered(deny()), DENIED),
}
PROOFS: dict[str, Script] = {
    "a proven load is good": after(PROVING, (Heard(),), (Proved(), RELEASED, GOOD_PROVED)),
    "a refuted load is not": after(
        PROVING,
        (Heard(),),
        (
            Proved(Failure(FailureKind.CORRUPT, "refuted")),
            GIVEN_UP,
            failed(FailureKind.CORRUPT, "refuted"),
        ),
    ),
    "a fenced load is not proven": after(
        PROVING[:-1], (read_done(fence_token=EMPTY), GIVEN_UP, FENCED)
    ),
    **{
        f"without prefill's answer it fails with {name}": after(PROVING, (event, report))
        for name, (event, report) in LOSSES.items()
    },
    **{
        f"with the answer it goes on after {name}": after(
            PROVING, (Heard(),), (event,), (Proved(), RELEASED, GOOD_PROVED)
        )
        for name, (event, _) in LOSSES.items()
    },
    "an offer is not given back during the proof": after(
        PROVING, (answered(recall()), Send(RANK_0, renew(2, CLAIM, reading=1)))
    ),
    "cancelled, it ends at once": after(PROVING, (cancel_load(), GIVEN_UP, DROPPED)),
    "a load that is not proven in time is late": after(
        PROVING, (Heard(),), (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE)
    ),
    "a preemption before the answer: all is read again": after(
        PROVING_ALL,
        (read_done(),),
        (answered(renewed(CLAIM, number=2)), AGAIN),
        (answered(OTHER_WHOLE), StartRead(PEER, RANK, OTHER_WHOLE, PROVING_START)),
    ),
    "also if a part that the former grant proves lands after another grant": after(
        PROVING_PART,
        (answered(OTHER_WHOLE),),
        (read_done(), AGAIN),
        (answered(OTHER_WHOLE), StartRead(PEER, RANK, OTHER_WHOLE, PROVING_START)),
    ),
    "blocks read under a former grant are read again": after(
        PROVING_PART,
        (read_done(),),
        (answered(OTHER_WHOLE), StartRead(PEER, RANK, OTHER_WHOLE, PROVING_START)),
    ),
    "a preemption while it is read: all is read again": after(
        PROVING_ALL,
        (read_done(fence_token=OTHER_TOKEN), AGAIN),
        (answered(OTHER_WHOLE), StartRead(PEER, RANK, OTHER_WHOLE, PROVING_START)),
    ),
}


@each_of(READS | PROOFS)
def test_how_a_load_ends(script: Script) -> None:
    machine = loading(script, Prover())
    machine.check()
    is_reported = any(isinstance(action, LoadEnded) for step in script for action in step)
    is_cancelled = script[-1] == (cancel_load(), GIVEN_UP)
    assert (machine._by_request.get(D1) is None) == (is_reported or is_cancelled)


@each_of(READS)
def test_the_parts_of_features_leave_other_loads_as_they_are(script: Script) -> None:
    with features_of_a_rank() as features:
        loading(script, *(each.load for each in features if each.load is not None)).check()


@pytest.mark.parametrize("event", [read_done(), read_failed()])
def test_events_of_unknown_reads_are_ignored(event: Any) -> None:
    of_another_rank = replace(event, rank=Rank(1))
    play(decode_machine(), [(event,), *PREPARED, (event,), *ASKING[1:], (of_another_rank,)])


def test_the_end_of_a_read_that_was_never_started_is_our_own_mistake() -> None:
    machine = loading(GRANTED)
    with pytest.raises(LocalProtocolError, match="ReadDone leads from GRANTED to DONE"):
        machine.handle(read_done(), 100.1)
    play(machine, READING[-1:])


# The table


def test_the_scripts_above_make_each_transition_of_a_read() -> None:
    recorded: list[Transition] = []
    for script in (READS | PROOFS | PARTS | TIMES).values():
        play(decode_machine(recorded.append, parts=[Prover()]), script)
    of_reads = [move for move in recorded if move.machine == "read"]
    assert moves_of(of_reads) == rows_of(READ_TRANSITIONS)


# Records


def test_each_transition_of_a_load_is_recorded_once() -> None:
    recorded: list[Transition] = []
    machine = decode_machine(recorded.append)
    of = RecordedLoad()
    steps = [
        *of.until_it_reads(START),
        (
            read_done(num_bytes=4096),
            (*of.rank, "READING", "DONE", "ReadDone", 4096, "", True),
            (*of.load, "READY", "LOADED", "Settled", 0, "", True),
        ),
    ]
    expect_recorded(machine, recorded, steps)


# Times: deadlines, heartbeats, and turns in the queue

SILENT = replace(LATE, failure=Failure(FailureKind.LATE, "silent"))
ABANDON = AbandonRead(D1, Rank(0))
ASK_AGAIN = Send(RANK_0, ask(number=2))
END = 110.0 + TIMEOUT_S
LINK_BROKEN = LinkBroken(RANK_0)
MOVES = ReadMoved(D1, Rank(0))
MOVING: Script = [
    (END - 1 + number * (TIMEOUT_S - 1), event) for number in range(10) for event in (MOVES, Tick())
]
"""The read moves each time just before it would be late."""
MOVED_AT = MOVING[-1][0]


def renewing(number: int, reading: int = 0) -> Send:
    """The renew of the one claim that is held."""
    return Send(RANK_0, renew(number, CLAIM, reading=reading))


SILENCE = lost(reason="no heartbeat")
IS_SILENT = 110.1 + SILENCE_S

TIMES: dict[str, Script] = {
    "an unanswered ask is repeated": after(
        ASKING,
        (100.0 + ASK_AGAIN_S - 0.01, Tick()),
        (100.0 + ASK_AGAIN_S, Tick(), ASK_AGAIN),
        (101.5, Tick()),
        (102.0, Tick(), Send(RANK_0, ask(number=3))),
    ),
    "after a broken link a grant is renewed at once, and stands": after(
        GRANTED, (100.5, LINK_BROKEN, renewing(2)), (START, READ)
    ),
    "a broken link on which nothing is held is nothing": after(READING, (LinkBroken(at(1)),)),
    "a load without an answer is given up": after(
        ASKING,
        (129.5, Tick(), ASK_AGAIN),
        (100.0 + TIMEOUT_S - 0.01, Tick()),
        (100.0 + TIMEOUT_S, Tick(), GIVEN_UP),
        (START, LATE),
    ),
    "a load that waits for blocks alone is never late": after(
        GRANTED, (500.0, Tick()), (START, READ)
    ),
    "the time starts again with the blocks": after(
        READING, (END - 0.01, Tick()), (END, Tick(), STOP), (read_done(), GIVEN_UP, LATE)
    ),
    "a read that moves is not late, however long it takes": after(
        READING,
        *MOVING,
        (MOVED_AT + TIMEOUT_S - 0.01, Tick()),
        (MOVED_AT + TIMEOUT_S, Tick(), STOP),
    ),
    "a late read that does not end by itself is abandoned once": after(
        READING,
        (END, Tick(), STOP),
        (END + DRAIN_S - 0.01, Tick()),
        (END + DRAIN_S, Tick(), ABANDON),
        (END + DRAIN_S + 1, Tick()),
        (read_failed("stopped"), GIVEN_UP, LATE),
    ),
    "an abandoned read that ends after all is not used": after(
        READING,
        (END, Tick(), STOP),
        (END + DRAIN_S, Tick(), ABANDON),
        (read_done(), GIVEN_UP, LATE),
    ),
    "what moves after its deadline does not save it": after(
        READING,
        (END, Tick(), STOP),
        (END + 0.1, MOVES),
        (END + 0.2, read_failed("stopped"), GIVEN_UP, LATE),
    ),
    # It does no harm, and ends by itself as a rule.
    "a read of a cancelled load has until its deadline": after(
        READING,
        (cancel_load(), STOP),
        (END - 0.01, Tick()),
        (END, Tick()),
        (END + DRAIN_S, Tick(), ABANDON),
    ),
    # Its process may be stopped, and its host cut off; neither ends a read.
    "a read from a silent rank is given up": after(
        READING,
        (110.1, SILENCE),
        (111.1, SILENCE),
        (IS_SILENT - 0.01, Tick()),
        (IS_SILENT, Tick(), STOP),
        (IS_SILENT + DRAIN_S, Tick(), ABANDON),
        (read_failed("stopped"), GIVEN_UP, SILENT),
    ),
    "an answer of the same life ends the silence": after(
        READING, (110.1, SILENCE), (answered(renewed()),), (IS_SILENT, Tick())
    ),
    "an answer of another life does not end the silence": after(
        READING,
        (110.1, SILENCE),
        (answered(renewed(incarnation=OTHER_LIFE)),),
        (IS_SILENT, Tick(), STOP),
        (read_done(), GIVEN_UP, SILENT),
    ),
}
QUEUED_LONG: Script = after(
    EARLY,
    *(
        step
        for number in range(2, 12)
        for step in (
            (80.0 + 20.0 * number, PENDING["queued"]),
            (Tick(), Send(RANK_0, ask(is_early=True, number=number))),
        )
    ),
)
EARLY_LOADS: dict[str, Script] = {
    "it is ready when prefill computes, and reads when prefill grants": after(
        EARLY,
        (PENDING["unknown"],),
        (PENDING["queued"],),
        (PENDING["computing"], READY),
        (PENDING["computing"],),
        (110.0, START),
        (answered(GRANT), READ),
        (read_done(), RELEASED, GOOD),
    ),
    "a grant makes it ready": after(EARLY, (answered(GRANT), READY), (START, READ)),
    "a preempted request stays ready": after(
        EARLY, (PENDING["computing"], READY), (PENDING["queued"],), (PENDING["computing"],)
    ),
    "a denial makes it ready, to fail": after(EARLY, (answered(deny()), READY), (START, DENIED)),
    "a lost peer makes it ready, to fail": after(EARLY, (lost(), READY), (START, UNREACHABLE)),
    "an unknown request is late in time": after(
        EARLY,
        (129.9, PENDING["unknown"]),
        (100.0 + TIMEOUT_S, Tick(), GIVEN_UP, READY),
        (START, LATE),
    ),
    "a queued request is never late while prefill answers": QUEUED_LONG,
    "when it has blocks, an answer is not progress": after(
        EARLY,
        (PENDING["computing"], READY),
        (START,),
        (125.0, PENDING["computing"]),
        (129.9, Tick(), Send(RANK_0, ask(is_early=True, number=2))),
        (100.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE),
    ),
    "the engine hangs": after(EARLY, (PENDING["stalled"], GIVEN_UP, READY), (START, STALLED)),
    "the engine hangs, and it has blocks": after(
        EARLY,
        (PENDING["computing"], READY),
        (START,),
        (PENDING["stalled"], GIVEN_UP, STALLED),
    ),
    "the engine hung, but has granted meanwhile": after(
        EARLY,
        (answered(GRANT), READY),
        (START, READ),
        (PENDING["stalled"],),
        (read_done(), RELEASED, GOOD),
    ),
    # Its own blocks are due to another rank of this engine, whose part has failed.
    "with blocks before prefill computes, it is late in time": after(
        EARLY,
        (PENDING["queued"],),
        (110.0, START),
        (139.9, PENDING["queued"]),
        (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, READY, LATE),
    ),
    "preempted, it is late in time": after(
        EARLY,
        (PENDING["computing"], READY),
        (110.0, START),
        (125.0, PENDING["queued"]),
        (139.9, Tick(), Send(RANK_0, ask(is_early=True, number=2))),
        (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE),
    ),
    "cancelled before it is granted": after(EARLY, (cancel_load(), GIVEN_UP)),
    "an answer after its end": after(
        EARLY, (answered(deny()), READY), (PENDING["queued"],), (START, DENIED)
    ),
}


def landed_with(num_cached: int | None) -> Landed:
    return landed(reader=READER, num_cached=num_cached)


LANDED = landed_with(0)
TOLD: dict[str, Script] = {
    "it is ready, and has landed": after(
        EARLY,
        (PENDING["computing"], READY, Send(OWN, ready(reader=READER))),
        (PENDING["computing"],),
        (answered(GRANT),),
        (110.0, START, READ),
        (read_done(), RELEASED, GOOD, Send(OWN, LANDED)),
    ),
    "it is not early": after(READING, (read_done(), RELEASED, GOOD, Send(OWN, LANDED))),
    "how much was cached on prefill": after(
        PREPARED,
        (fits(), Send(RANK_0, ask())),
        (answered(grant(num_cached=4)),),
        (START, StartRead(PEER, Rank(0), grant(num_cached=4), start_load())),
        (read_done(), RELEASED, replace(GOOD, num_cached=4), Send(OWN, landed_with(4))),
    ),
    "no part of the KV is for this rank": after(
        PREPARED,
        (PeerFits(PEER, description(), routes(0, readers=())), RELEASED),
        (START, LoadEnded(D1, 7, None, PEER), Send(OWN, landed_with(None))),
    ),
    "it fails": after(
        EARLY, (answered(deny()), READY, Send(OWN, ready(reader=READER))), (START, DENIED)
    ),
    "it is cancelled": after(READING, (cancel_load(), STOP), (read_done(), GIVEN_UP, DROPPED)),
}


@each_of(TOLD)
def test_the_scheduler_is_told_after_the_caller(script: Script) -> None:
    machine = decode_machine()
    machine.set_engine(READER.engine, OWN)
    play(machine, script)


FIRST, REST = (replace(START, begin=begin, end=end) for begin, end in ((0, 4), (4, 7)))
READ_FIRST = StartRead(PEER, Rank(0), PART, FIRST)
READ_REST = StartRead(PEER, Rank(0), WHOLE, REST)
IN_PARTS: Script = after(EARLY, (110.0, answered(PART), READY), (START, READ_FIRST))
READ_MIDDLE = StartRead(PEER, Rank(0), replace(WHOLE, num_tokens=6), replace(START, begin=4, end=6))
PARTS: dict[str, Script] = {
    "the rest is read when it is granted": after(
        IN_PARTS, (read_done(),), (answered(WHOLE), READ_REST), (read_done(), RELEASED, GOOD_SUM)
    ),
    "more is granted while the first part is read": after(
        IN_PARTS, (answered(WHOLE),), (read_done(), READ_REST), (read_done(), RELEASED, GOOD_SUM)
    ),
    "no more than is granted is read": after(
        IN_PARTS, (read_done(),), (answered(PART),), (110.1, answered(PART))
    ),
    "all is granted before there are blocks": after(
        EARLY,
        (answered(PART), READY),
        (answered(WHOLE),),
        (110.0, START, replace(READ, grant=WHOLE)),
    ),
    "it asks for the rest; the same answer again is not progress": after(
        IN_PARTS,
        (read_done(),),
        (111.5, Tick(), AGAIN),
        (139.0, answered(PART)),
        (110.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE),
    ),
    "the engine hangs between two parts": after(
        IN_PARTS, (read_done(),), (PENDING["stalled"], GIVEN_UP, STALLED)
    ),
    "prefill preempts the request: the part is asked for again": after(
        IN_PARTS,
        (read_done(fence_token=OTHER_TOKEN), AGAIN),
        (answered(PART), READ_FIRST),
        (read_done(),),
    ),
    "a part that was proven is kept": after(
        IN_PARTS,
        (read_done(),),
        (answered(replace(WHOLE, num_tokens=6)), READ_MIDDLE),
        (read_done(fence_token=OTHER_TOKEN), AGAIN),
        (answered(WHOLE), READ_REST),
        (read_done(), RELEASED, GOOD_SUM),
    ),
    "prefill preempts the request during the last part": after(
        IN_PARTS,
        (read_done(),),
        (answered(WHOLE), READ_REST),
        (read_done(fence_token=OTHER_TOKEN), AGAIN),
        (answered(WHOLE), READ_REST),
        (read_done(), RELEASED, GOOD_SUM),
    ),
    "prefill ends the offer during the last part": after(
        IN_PARTS,
        (read_done(),),
        (answered(WHOLE), READ_REST),
        (read_done(fence_token=OTHER_TOKEN), AGAIN),
        (answered(deny()), DENIED),
    ),
    "prefill says that it has preempted the request": after(
        IN_PARTS, (read_done(),), (PENDING["queued"],), (answered(WHOLE), READ_REST)
    ),
    "between two parts, a preempted request has its time once more": after(
        IN_PARTS,
        (read_done(),),
        (125.0, PENDING["queued"]),
        (150.0, Tick(), AGAIN),
        (154.9, PENDING["queued"]),
        (125.0 + TIMEOUT_S, Tick(), GIVEN_UP, LATE),
    ),
    "prefill forgot the claim between two parts": after(
        IN_PARTS,
        (read_done(),),
        (answered(renewed(CLAIM, number=2)), AGAIN),
        (answered(WHOLE), READ_REST),
    ),
    "prefill preempts the request again and again": after(
        IN_PARTS,
        *(
            step
            for number in range(2, MAX_LOST + 2)
            for step in (
                (
                    read_done(fence_token=OTHER_TOKEN),
                    Send(RANK_0, ask(is_early=True, number=number)),
                ),
                (answered(PART), READ_FIRST),
            )
        ),
        (
            read_done(fence_token=OTHER_TOKEN),
            Send(RANK_0, ask(is_early=True, number=MAX_LOST + 2)),
            GIVEN_UP,
            failed(FailureKind.FENCED, f"{MAX_LOST + 1} times"),
        ),
    ),
    "it is cancelled between two parts": after(
        IN_PARTS, (read_done(),), (cancel_load(), GIVEN_UP, DROPPED)
    ),
    "it is cancelled in a part": after(
        IN_PARTS, (cancel_load(), STOP), (read_done(), GIVEN_UP, DROPPED)
    ),
    "prefill ends the request between two parts": after(
        IN_PARTS, (read_done(),), (answered(deny()), DENIED)
    ),
    "prefill dies between two parts": after(IN_PARTS, (read_done(),), (lost(), UNREACHABLE)),
    "a part fails": after(IN_PARTS, (read_failed(), GIVEN_UP, BROKEN)),
    "prefill has preempted the request, and that message is lost": after(
        IN_PARTS, (read_done(),), (answered(OTHER_WHOLE), replace(READ_REST, grant=OTHER_WHOLE))
    ),
}
ENTRY = 4
MEASURED = {name for name, kind in get_type_hints(ReadDone).items() if kind in (int, float)}


def measured(read: ReadDone) -> dict[str, float]:
    return {name: getattr(read, name) for name in MEASURED}


@given(
    grants=st.lists(st.integers(1, 36), min_size=1, max_size=8).map(sorted),
    begin=st.integers(0, 4).map(lambda entries: entries * ENTRY),
    num_tokens=st.integers(1, 20),
    numbers=st.randoms(use_true_random=False),
)
def test_parts_follow_each_other_and_end_with_an_entry(
    grants: list[int], begin: int, num_tokens: int, numbers: random.Random
) -> None:
    """Prefill may have written part of a block, whose entry decode reads whole."""
    machine, end = decode_machine(entry_size=ENTRY), begin + num_tokens
    play(machine, EARLY)
    load = StartLoad(D1, begin, end, (Table.of(range(-(-end // ENTRY))),), verify=False)
    actions = machine.handle(answered(grant(lease_s=3600.0, num_tokens=grants[0])), 105.0)
    parts, done = list[ReadDone](), begin
    actions += machine.handle(load, 110.0)
    for written in [*grants, None]:
        actions += machine.handle(answered(grant(lease_s=3600.0, num_tokens=written)), 110.0)
        for read in [each for each in actions if isinstance(each, StartRead)]:
            part = read.load
            assert part.begin == done
            assert part.end == end or part.end % ENTRY == 0
            assert part.begin < part.end <= (end if written is None else written)
            numbers_of: dict[str, Any] = {name: numbers.randint(0, 99) for name in MEASURED}
            parts.append(read_done(**numbers_of))
            actions, done = machine.handle(parts[-1], 110.0), part.end
    assert done == end
    (ended,) = [each for each in actions if isinstance(each, LoadEnded)]
    (total,) = ended.reads
    sums = {name: sum(getattr(each, name) for each in parts) for name in MEASURED}
    assert (ended.failure, measured(total)) == (None, sums)


HEARTBEAT_REPLY = Send(RANK_0, renew(2, CLAIM))
HEARTBEAT_REPLY_READING = Send(RANK_0, renew(2, CLAIM, reading=1))
HEARTBEATS: dict[str, Script] = {
    **{
        f"a load that is {name} is renewed": after(
            script, (100.0 + HEARTBEAT_S, Tick(), HEARTBEAT_REPLY)
        )
        for name, script in {"asking": ASKING, "granted": GRANTED}.items()
    },
    **{
        f"that a load is {name} is said": after(
            script, (100.0 + HEARTBEAT_S, Tick(), HEARTBEAT_REPLY_READING)
        )
        for name, script in {
            "reading": READING,
            "draining": after(READING, (cancel_load(), STOP)),
        }.items()
    },
    "they have an interval and share their numbers with asks": after(
        GRANTED,
        (100.0 + HEARTBEAT_S - 0.01, Tick()),
        (100.0 + HEARTBEAT_S, Tick(), HEARTBEAT_REPLY),
        (SECOND, Send(RANK_0, ask(nonce=NONCE2, claim=RIVAL, number=3))),
        (100.0 + HEARTBEAT_S + HEARTBEAT_S, Tick(), Send(RANK_0, renew(4, CLAIM, RIVAL))),
    ),
    # Prefill's configuration counts, not ours.
    "the shortest lease sets their interval": after(
        ASKING,
        (answered(grant(lease_s=0.5)),),
        (100.09, Tick()),
        (100.11, Tick(), HEARTBEAT_REPLY),
        (100.20, Tick()),
        (100.21, Tick(), Send(RANK_0, renew(3, CLAIM))),
    ),
}


def test_the_wait_for_prefill_has_an_end() -> None:
    machine = decode_machine(wait_for_prefill_s=50.0)
    play(machine, [*EARLY, (125.0, PENDING["queued"])])
    late = replace(LATE, failure=Failure(FailureKind.LATE, "within 50 s"))
    play(machine, [(149.9, PENDING["queued"]), (150.0, Tick(), GIVEN_UP, READY), (START, late)])


@each_of(EARLY_LOADS)
def test_a_load_by_a_pair_ticket(script: Script) -> None:
    loading(script).check()


@each_of(PARTS)
def test_a_load_in_parts(script: Script) -> None:
    loading(script).check()


@each_of(TIMES)
def test_time(script: Script) -> None:
    loading(script).check()


@each_of(HEARTBEATS)
def test_renewals(script: Script) -> None:
    play(decode_machine(heartbeat_interval_s=HEARTBEAT_S), script)


def test_a_peer_that_connects_does_not_extend_the_time_of_a_load() -> None:
    late = replace(LATE, failure=Failure(FailureKind.LATE, "0.5 s"))
    steps: Script = [(100.25, START), (100.7, Tick()), (100.75, Tick(), late), (100.8, fits())]
    play(decode_machine(timeout_s=0.5), [*PREPARED, *steps])


# Turns

LARGE = MAX_BYTES // 7
"""Bytes per token with which one load is all that may be under way."""
READ_2 = StartRead(PEER, Rank(0), grant(claim=RIVAL, nonce=NONCE2, lease_s=3600.0), START_2)
LATE_2 = replace(LATE, request=D2)
QUEUED: Script = after(READING, (SECOND, ASK_SECOND), (answered(READ_2.grant),), (111.0, START_2))
"""The second load waits until the first has been read."""
TURNS: dict[str, Script] = {
    "the next begins when one has landed": after(QUEUED, (read_done(), RELEASED, GOOD, READ_2)),
    "what waits for its turn is not late while others land": after(
        QUEUED,
        (END - 1, read_done(), RELEASED, GOOD, READ_2),
        (END - 1 + TIMEOUT_S - 0.01, Tick()),
        (END - 1 + TIMEOUT_S, Tick(), StopRead(D2, Rank(0))),
    ),
    "a waiting read is not late while the reads before it move": after(QUEUED, *MOVING),
    "a read that waits behind a stuck one is cancelled, not abandoned": after(
        QUEUED,
        (END, Tick(), STOP),
        (111.0 + TIMEOUT_S, Tick(), ABANDON, GIVEN_UP_2, LATE_2),
    ),
    "what waits is given back for the asking, but for one that has blocks": after(
        QUEUED, (answered(recall()), Send(RANK_0, renew(3, CLAIM, RIVAL, reading=2)))
    ),
}


@each_of(TURNS)
def test_turns(script: Script) -> None:
    machine = decode_machine(bytes_per_token=LARGE)
    play(machine, script)
    machine.check()


@pytest.mark.parametrize(
    ("script", "waits_for"),
    [
        (PREPARED, f"the description of engine 'prefill' at {HOME}"),
        (ASKING, "a grant"),
        (GRANTED, "local blocks"),
        (QUEUED, "its turn in the read queue"),
        (READING, "data"),
        (DRAINING, "the end of a cancelled read"),
        (after(TWO_ASKED, (answered(GRANT), READ)), "data, a grant"),
        (after(ASKING, (answered(deny()),)), "the scheduler, to start or cancel it"),
    ],
)
def test_a_load_says_what_it_waits_for(script: Script, waits_for: str) -> None:
    machine = decode_machine(bytes_per_token=LARGE)
    play(machine, script)
    assert machine.loads[-1].waits_for == waits_for


def test_however_much_else_lands_a_stuck_read_is_late_in_the_end() -> None:
    begun = 125.0  # some time after its load has blocks
    machine = loading(after(ASKING, (110.0, START), (begun, answered(GRANT), READ)))
    now, number = begun, 2
    while machine.loads[0].failure is None:
        now, number = now + TIMEOUT_S / 2, number + 1
        claim, request = Claim(hex32(number)), RequestId(f"other {number}")
        machine.handle(prepare_load(request, claim), now)
        machine.handle(answered(grant(claim=claim, lease_s=3600.0)), now)
        machine.handle(start_load(request), now)
        machine.handle(read_done(request=request), now)
        machine.handle(Tick(), now)
    assert now == begun + MAX_TIMEOUTS * TIMEOUT_S


def test_the_machine_checks_its_loads() -> None:
    machine = loading(ASKING)
    machine.check()
    (kept,) = machine._unfinished.values()
    found = dict(kept)
    kept.clear()
    with pytest.raises(LocalProtocolError, match="found by endpoint"):
        machine.check()
    kept |= found
    by_peer = dict(machine._by_peer)
    machine._by_peer.clear()
    with pytest.raises(LocalProtocolError, match="by peer"):
        machine.check()
    machine._by_peer |= by_peer
    machine.loads[0].reads[Rank(0)].state = ReadState.READING
    with pytest.raises(LocalProtocolError, match="READING without blocks or grant"):
        machine.check()


def test_an_early_load_with_the_id_of_another_is_ready_to_fail() -> None:
    """The request would wait for ever, because the other load is not early."""
    machine = decode_machine()
    machine.handle(prepare_load(), 100.0)
    second = prepare_load(is_early=True, claim=RIVAL)
    assert LoadReady(D1) in machine.handle(second, 101.0)


# --- what decode believes, and what prefill knows


def test_prefill_never_hears_what_the_scheduler_believes() -> None:
    """No field of any message to a peer would be taken for the key of a hint."""
    scripts = {**READS, **EARLY_LOADS, **PARTS}
    heard = told(scripts.values())
    assert heard >= {CLAIM, NONCE, READER.incarnation}
    assert HINT_KEY not in heard


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        ("", FailureKind.DENIED, "denied the ask: the offer was used, expired or revoked"),
        ("unclaimed", FailureKind.DENIED, "expired before decode asked (offer_ttl_s of prefill)"),
        ("not_arrived", FailureKind.NOT_ARRIVED, "prefill rank 0 never heard of this request"),
    ],
)
def test_a_denial_says_where_to_look(
    cause: messages.DenyCause, kind: FailureKind, words: str
) -> None:
    machine = decode_machine()
    play(machine, EARLY)
    machine.handle(answered(deny(cause=cause)), 101.0)
    (ended,) = [each for each in machine.handle(START, 102.0) if isinstance(each, LoadEnded)]
    assert ended.failure is not None
    assert ended.failure.kind is kind
    assert words in ended.failure.detail
