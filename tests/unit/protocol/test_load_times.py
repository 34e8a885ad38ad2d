"""The times of loads: deadlines, also against an oracle, heartbeats, and turns in the queue."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import (
    Claim,
    Endpoint,
    Incarnation,
    Rank,
    RequestId,
)
from nixl_kv.protocol.decode import MIN_HEARTBEAT_INTERVAL_S
from nixl_kv.protocol.events import (
    AbandonRead,
    ChunksWanted,
    Failure,
    FailureKind,
    LinkBroken,
    LoadEnded,
    PeerFits,
    PeerKey,
    Send,
    StartRead,
    StopRead,
    Tick,
)
from nixl_kv.protocol.load import (
    ASK_AGAIN_S,
    DRAIN_S,
    MAX_TIMEOUTS,
    SILENCE_S,
    State,
)
from nixl_kv.protocol.read_queue import (
    MAX_BYTES,
)
from support.records import (
    CLAIM,
    D1,
    D2,
    HEARTBEAT_S,
    HOME,
    NONCE2,
    OTHER_LIFE,
    PEER,
    RANK_0,
    RIVAL,
    TIMEOUT_S,
    answered,
    ask,
    at,
    cancel_load,
    deny,
    describe,
    description,
    digest_reply,
    digest_request,
    fits,
    grant,
    hex32,
    lost,
    prepare_load,
    read_done,
    read_failed,
    recall,
    release,
    renew,
    renewed,
    routes,
    start_load,
)
from support.scripts import (
    ASKING,
    COMPARE,
    GRANT,
    GRANTED,
    PREPARED,
    READ,
    READING,
    START,
    STOP,
    VERIFYING,
    Script,
    after,
    decode_machine,
    each_of,
    loading,
    play,
)

GIVEN_UP = Send(RANK_0, release(complete=False))
LATE = LoadEnded(D1, 7, Failure(FailureKind.LATE, f"{TIMEOUT_S:g} s"), PEER)
SILENT = replace(LATE, failure=Failure(FailureKind.LATE, "silent"))
ABANDON = AbandonRead(D1, Rank(0))
ASK_AGAIN = Send(RANK_0, ask(number=2))
SECOND = prepare_load(D2, RIVAL, nonce=NONCE2)
END = 110.0 + TIMEOUT_S
BROKEN = LinkBroken(RANK_0)


def renewing(number: int, reading: int = 0) -> Send:
    """The renew of the one claim that is held."""
    return Send(RANK_0, renew(number, CLAIM, reading=reading))


SILENCE = lost(reason="no heartbeat")
IS_SILENT = 110.1 + SILENCE_S
TWO_ASKED: Script = after(PREPARED, (fits(2), Send(RANK_0, ask()), Send(at(1), ask(number=2))))

TIMES: dict[str, Script] = {
    "an unanswered ask is repeated": after(
        ASKING,
        (100.0 + ASK_AGAIN_S - 0.01, Tick()),
        (100.0 + ASK_AGAIN_S, Tick(), ASK_AGAIN),
        (101.5, Tick()),
        (102.0, Tick(), Send(RANK_0, ask(number=3))),
    ),
    "only the rank that did not answer is asked again": after(
        TWO_ASKED, (answered(GRANT),), (101.0, Tick(), Send(at(1), ask(number=3)))
    ),
    "after a broken link an ask is repeated at once": after(
        ASKING,
        (100.5, BROKEN, ASK_AGAIN, renewing(3)),
        (101.0, Tick()),
        (101.5, Tick(), Send(RANK_0, ask(number=4))),
    ),
    "after a broken link a grant is renewed at once, and stands": after(
        GRANTED, (100.5, BROKEN, renewing(2)), (START, READ)
    ),
    "after a broken link a digest is asked for at once": after(
        VERIFYING, (110.5, BROKEN, Send(RANK_0, digest_request()), renewing(2, reading=1))
    ),
    "after a broken link a description is asked for at once": after(
        PREPARED, (100.5, LinkBroken(HOME), Send(HOME, describe())), (fits(), Send(RANK_0, ask()))
    ),
    "a broken link on which nothing is held is nothing": after(READING, (LinkBroken(at(1)),)),
    "a read whose link broke is given up if its rank stays silent": after(
        READING,
        (110.1, BROKEN, renewing(2, reading=1)),
        (IS_SILENT - 0.01, Tick()),
        (IS_SILENT, Tick(), STOP),
    ),
    "a read whose link broke goes on if its rank answers": after(
        READING,
        (110.1, BROKEN, renewing(2, reading=1)),
        (answered(renewed()),),
        (IS_SILENT, Tick()),
        (read_done(), Send(RANK_0, release()), LoadEnded(D1, 7, None, PEER, reads=(read_done(),))),
    ),
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
    "a load that waits for one rank as well is late": after(
        TWO_ASKED,
        (answered(GRANT),),
        (100.0 + TIMEOUT_S, Tick(), GIVEN_UP, Send(at(1), release(complete=False))),
    ),
    "the time starts again with the blocks": after(
        READING, (END - 0.01, Tick()), (END, Tick(), STOP), (read_done(), GIVEN_UP, LATE)
    ),
    "and again with what comes of it": after(
        READING,
        (END - 1, ChunksWanted(D1, Rank(0), (), ())),
        (END, Tick()),
        (END - 1 + TIMEOUT_S - 0.01, Tick()),
        (END - 1 + TIMEOUT_S, Tick(), STOP),
        (read_done(), GIVEN_UP, LATE),
    ),
    "a late read that does not end by itself is abandoned once": after(
        READING,
        (END, Tick(), STOP),
        (END + DRAIN_S - 0.01, Tick()),
        (END + DRAIN_S, Tick(), ABANDON),
        (END + DRAIN_S + 1, Tick()),
        (read_failed("stopped"), GIVEN_UP, LATE),
    ),
    # It harms nobody, and ends by itself as a rule.
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
    "silence does not matter once nothing is read": after(
        VERIFYING, (answered(digest_reply()), COMPARE), (110.1, SILENCE), (IS_SILENT, Tick())
    ),
}
LOADED = LoadEnded(D1, 7, None, PEER, reads=(read_done(),))
HEARTBEAT_REPLY = Send(RANK_0, renew(2, CLAIM))
HEARTBEAT_REPLY_READING = Send(RANK_0, renew(2, CLAIM, reading=1))
OTHER_RANK_LIFE = Incarnation(hex32(0xB2))
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
            "verifying": VERIFYING,
            "draining": after(READING, (cancel_load(), STOP)),
        }.items()
    },
    "what was not asked yet is not renewed": after(PREPARED, (Tick(),)),
    "what was denied is not renewed": after(ASKING, (answered(deny()),), (Tick(),)),
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
    "a short lease at one rank does not hurry the others": after(
        TWO_ASKED,
        (answered(grant(lease_s=0.1), at(1)),),
        (100.0 + MIN_HEARTBEAT_INTERVAL_S, Tick(), Send(at(1), renew(3, CLAIM))),
        (
            100.0 + HEARTBEAT_S,
            Tick(),
            Send(at(1), renew(4, CLAIM)),
            Send(RANK_0, renew(5, CLAIM)),
        ),
    ),
    "each rank gets one of its own claims": after(
        TWO_ASKED,
        (answered(deny()), Send(at(1), release(complete=False))),
        (
            SECOND,
            *[Send(at(rank), ask(nonce=NONCE2, claim=RIVAL, number=3 + rank)) for rank in (0, 1)],
        ),
        (
            100.0 + HEARTBEAT_S,
            Tick(),
            Send(RANK_0, renew(5, RIVAL)),
            Send(at(1), renew(6, RIVAL)),
        ),
    ),
    "two lives at one endpoint get one each": after(
        READING,
        (lost(),),
        (prepare_load(D2, RIVAL, incarnation=OTHER_LIFE), Send(HOME, describe(OTHER_LIFE))),
        (
            PeerFits(
                PeerKey(PEER.engine, OTHER_LIFE, HOME),
                description(1, OTHER_LIFE, OTHER_RANK_LIFE),
                routes(0),
            ),
            Send(RANK_0, ask(claim=RIVAL, number=2, incarnation=OTHER_RANK_LIFE)),
        ),
        (
            100.0 + HEARTBEAT_S,
            Tick(),
            Send(RANK_0, renew(3, CLAIM, reading=1)),
            Send(RANK_0, renew(4, RIVAL, incarnation=OTHER_RANK_LIFE)),
        ),
    ),
}


@each_of(TIMES)
def test_time(script: Script) -> None:
    loading(script).validate()


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
START_2 = start_load(D2)
READ_2 = StartRead(PEER, Rank(0), grant(claim=RIVAL, nonce=NONCE2, lease_s=3600.0), START_2)
ASK_2 = Send(RANK_0, ask(nonce=NONCE2, claim=RIVAL, number=2))
GIVEN_UP_2 = Send(RANK_0, release(complete=False, nonce=NONCE2, claim=RIVAL))
LATE_2 = replace(LATE, request=D2)
QUEUED: Script = after(READING, (SECOND, ASK_2), (answered(READ_2.grant),), (111.0, START_2))
"""The second load waits until the first has been read."""
TURNS: dict[str, Script] = {
    "the next begins when one has landed": after(
        QUEUED, (read_done(), Send(RANK_0, release()), LOADED, READ_2)
    ),
    "or has failed": after(
        QUEUED,
        (
            read_failed("reset"),
            GIVEN_UP,
            replace(LATE, failure=Failure(FailureKind.BROKEN, "rank 0 failed: reset")),
            READ_2,
        ),
    ),
    "what waits for its turn is not late while others land": after(
        QUEUED,
        (END - 1, read_done(), Send(RANK_0, release()), LOADED, READ_2),
        (END - 1 + TIMEOUT_S - 0.01, Tick()),
        (END - 1 + TIMEOUT_S, Tick(), StopRead(D2, Rank(0))),
    ),
    "what waits is cancelled, not abandoned, with what is stuck before it": after(
        QUEUED,
        (END, Tick(), STOP),
        (111.0 + TIMEOUT_S, Tick(), ABANDON, GIVEN_UP_2, LATE_2),
    ),
    "what waits is given back for the asking, but for one that has blocks": after(
        QUEUED, (answered(recall()), Send(RANK_0, renew(3, CLAIM, RIVAL, reading=2)))
    ),
    "cancelled, it is released at once": after(
        QUEUED,
        (
            cancel_load(D2),
            GIVEN_UP_2,
            replace(LATE_2, failure=Failure(FailureKind.DROPPED, "dropped")),
        ),
    ),
}


@each_of(TURNS)
def test_turns(script: Script) -> None:
    machine = decode_machine(bytes_per_token=LARGE)
    play(machine, script)
    machine.validate()


def test_however_much_else_lands_a_stuck_read_is_late_in_the_end() -> None:
    machine = loading(READING)
    now, number = 110.0, 2
    while machine.loads[0].failure is None:
        now, number = now + TIMEOUT_S / 2, number + 1
        claim, request = Claim(hex32(number)), RequestId(f"other {number}")
        machine.handle(prepare_load(request, claim), now)
        machine.handle(answered(grant(claim=claim, lease_s=3600.0)), now)
        machine.handle(start_load(request), now)
        machine.handle(read_done(request=request), now)
        machine.handle(Tick(), now)
    assert now == 110.0 + MAX_TIMEOUTS * TIMEOUT_S


def test_a_late_read_is_abandoned_in_its_time_whatever_lands_beside_it() -> None:
    machine = loading(READING)
    for event in (prepare_load(D2, RIVAL), answered(READ_2.grant), START_2):
        machine.handle(event, END - 1)
    machine.handle(Tick(), END)
    machine.handle(read_done(request=D2), END + DRAIN_S / 2)
    assert machine.next_due is not None
    assert machine.next_due <= END + DRAIN_S
    assert ABANDON not in machine.handle(Tick(), END + DRAIN_S - 0.01)
    assert ABANDON in machine.handle(Tick(), END + DRAIN_S)


# What the book says of itself


def test_the_book_has_loads_whose_reads_are_in_states() -> None:
    machine = decode_machine()
    steps: list[Any] = [prepare_load(), fits(), prepare_load(D2, RIVAL), start_load(D2)]
    seen = []
    for step in (*steps, answered(grant(claim=RIVAL))):
        machine.handle(step, 100.0)
        reads = [[read.state for read in load.reads.values()] for load in machine.loads]
        seen.append((len(machine.loads), reads))
    assert seen == [
        (1, [[]]),
        (1, [[State.ASKING]]),
        (2, [[State.ASKING], [State.ASKING]]),
        (2, [[State.ASKING], [State.ASKING]]),
        (2, [[State.ASKING], [State.READING]]),
    ]


def test_a_peer_is_in_use_while_a_read_of_it_may_start_or_go_on() -> None:
    machine = loading(GRANTED)
    used = [machine._is_in_use(PEER)]
    for step in (START, cancel_load(), read_done()):
        machine.handle(step, 101.0)
        used.append(machine._is_in_use(PEER))
    assert used == [True, True, True, False]


def test_the_machine_checks_its_loads() -> None:
    machine = loading(ASKING)
    machine.validate()
    kept = dict(machine._unfinished)
    machine._unfinished.clear()
    with pytest.raises(LocalProtocolError, match="found by endpoint"):
        machine.validate()
    machine._unfinished |= kept
    machine._by_peer.clear()
    with pytest.raises(LocalProtocolError, match="by peer"):
        machine.validate()
    machine.loads[0].reads[Rank(0)].state = State.FAILED
    with pytest.raises(LocalProtocolError, match="FAILED without a reason"):
        machine.validate()


# When a load is late

MOVES = ChunksWanted(D1, Rank(0), (), ())
QUEUE_SECOND = (SECOND, answered(grant(claim=RIVAL, nonce=NONCE2, lease_s=3600.0)), start_load(D2))


def moving(count: int) -> Script:
    """The read has moved each time just before it would have been late."""
    return [(END - 1 + number * (TIMEOUT_S - 1), MOVES) for number in range(count)]


def stuck(since: float) -> Script:
    return [(since + TIMEOUT_S - 0.01, Tick()), (since + TIMEOUT_S, Tick(), STOP)]


MOVED_AT = moving(10)[-1][0]
MOVED: dict[str, Script] = {
    "a read that never moved": after(READING, *stuck(110.0)),
    "a read that moves is not late, however long it takes": after(
        READING, *moving(10), *stuck(MOVED_AT)
    ),
    "a read that moves while it drains is not abandoned": after(
        READING, (cancel_load(), STOP), *moving(10), (MOVED_AT + DRAIN_S, Tick())
    ),
    "what moves after its deadline does not save it": after(
        READING,
        (END, Tick(), STOP),
        (END + 0.1, MOVES),
        (END + 0.2, read_failed(), Send(RANK_0, release(complete=False)), LATE),
    ),
}


@each_of(MOVED)
def test_when_a_read_is_late(script: Script) -> None:
    loading(script).validate()


def test_a_queued_read_is_not_late_while_the_read_before_it_moves() -> None:
    machine = decode_machine(bytes_per_token=LARGE)
    play(machine, READING)
    for event in QUEUE_SECOND:
        machine.handle(event, 110.0)
    for now, event in moving(10):
        machine.handle(event, now)
        assert machine.handle(Tick(), now) == []
    ended = machine.handle(Tick(), MOVED_AT + TIMEOUT_S)
    late = [action.request for action in ended if isinstance(action, LoadEnded | StopRead)]
    assert sorted(late) == [D1, D2], "nothing has moved that either of them waits for"


def test_a_read_that_hangs_is_late_although_the_load_moves_elsewhere() -> None:
    machine = loading(PREPARED)
    granted = [answered(GRANT, at(rank)) for rank in range(2)]
    events: list[Any] = [fits(2), START, *granted]
    for event in events:
        machine.handle(event, 110.0)
    now = 110.0
    while machine.loads[0].failure is None:
        now += TIMEOUT_S / 2
        machine.handle(MOVES, now)
        machine.handle(Tick(), now)
    assert now == 110.0 + MAX_TIMEOUTS * TIMEOUT_S


# Against an oracle

RANKS, LOADS, T = 2, 4, 3.0


@dataclass
class _Read:
    lane: Endpoint
    state: str = "queued"  # queued, posted, draining, ended
    moves: list[float] = field(default_factory=list)


@dataclass
class _Oracle:
    """It knows what was sent to the machine, and which reads it has begun."""

    loads: dict[RequestId, dict[Rank, _Read]] = field(default_factory=dict)
    late: set[RequestId] = field(default_factory=set)
    lane_moves: dict[Endpoint, list[float]] = field(default_factory=dict)

    def reads(self, *states: str) -> list[tuple[RequestId, Rank, _Read]]:
        return [
            (request, rank, read)
            for request, reads in self.loads.items()
            for rank, read in reads.items()
            if read.state in states
        ]

    def add(self, request: RequestId, now: float) -> None:
        self.loads[request] = {Rank(rank): _Read(at(rank), moves=[now]) for rank in range(RANKS)}

    def begin(self, request: RequestId, rank: Rank, now: float) -> None:
        read = self.loads[request][rank]
        if not self._under_way(read.lane):
            self.lane_moves.setdefault(read.lane, []).append(now)
        read.state = "posted"
        read.moves.append(now)

    def move(self, request: RequestId, rank: Rank, now: float) -> None:
        read = self.loads[request][rank]
        read.moves.append(now)
        self.lane_moves.setdefault(read.lane, []).append(now)

    def fail(self, request: RequestId) -> None:
        for read in self.loads[request].values():
            read.state = {"posted": "draining", "queued": "ended"}.get(read.state, read.state)

    def look(self, now: float) -> None:
        for request, reads in self.loads.items():
            is_alive = all(read.state in ("queued", "posted", "ended") for read in reads.values())
            if is_alive and any(self._is_late(reads, read, now) for read in reads.values()):
                self.late.add(request)
        for request in self.late:
            self.fail(request)

    def _is_late(self, reads: dict[Rank, _Read], read: _Read, now: float) -> bool:
        lanes = self.lane_moves
        watched = [read.lane] if self._under_way(read.lane) else list(lanes)
        in_lane = [when for lane in watched for when in lanes.get(lane, [])]
        match read.state:
            case "queued":
                return not _any_within(T, [*read.moves, *in_lane], now)
            case "posted":
                of_load = [when for one in reads.values() for when in one.moves]
                has_company = _any_within(T, [*of_load, *in_lane], now)
                return not _any_within(T * MAX_TIMEOUTS if has_company else T, read.moves, now)
        return False

    def _under_way(self, lane: Endpoint) -> bool:
        return any(read.lane == lane for _, _, read in self.reads("posted", "draining"))


def _any_within(length_s: float, times: list[float], now: float) -> bool:
    return any(now - when < length_s for when in times)


STEPS = st.lists(
    st.one_of(
        st.just("load"),
        st.tuples(st.sampled_from(["move", "land", "fail"]), st.integers(0, 99)),
        st.integers(1, 5),
    ),
    max_size=50,
)


class _World:
    """A machine and the oracle, with the same events."""

    def __init__(self) -> None:
        self.machine = decode_machine(timeout_s=T, bytes_per_token=LARGE * 2 // 3)
        self.oracle = _Oracle()
        self.now = 1000.0
        self.num_loads = 0
        self.late: set[RequestId] = set()  # those that have ended

    def handle(self, event: Any) -> None:
        for action in self.machine.handle(event, self.now):
            match action:
                case StartRead():
                    self.oracle.begin(action.load.request, action.rank, self.now)
                case LoadEnded(failure=Failure(kind=FailureKind.LATE)):
                    self.late.add(action.request)

    def load(self) -> None:
        self.num_loads += 1
        request, claim = RequestId(f"d{self.num_loads}"), Claim(hex32(self.num_loads))
        self.handle(prepare_load(request, claim))
        if self.num_loads == 1:
            self.handle(fits(RANKS))
        for rank in range(RANKS):
            self.handle(answered(grant(claim=claim, lease_s=1e6), at(rank)))
        self.oracle.add(request, self.now)
        self.handle(start_load(request))

    def move(self, request: RequestId, rank: Rank) -> None:
        self.oracle.move(request, rank, self.now)
        self.handle(ChunksWanted(request, rank, (), ()))

    def end(self, request: RequestId, rank: Rank, *, is_good: bool) -> None:
        read = self.oracle.loads[request][rank]
        if is_good and read.state == "posted":
            self.oracle.move(request, rank, self.now)
        if not is_good:
            self.oracle.fail(request)
        read.state = "ended"
        end = read_done if is_good else read_failed
        self.handle(end(rank=rank, request=request))

    def wait(self) -> None:
        self.now += 1.0
        self.oracle.look(self.now)
        if self.machine.next_due is not None and self.machine.next_due <= self.now:
            self.handle(Tick())

    def check(self) -> None:
        self.machine.validate()
        late = {
            load.request
            for load in self.machine.loads
            if load.failure is not None and load.failure.kind is FailureKind.LATE
        }
        assert late | self.late == self.oracle.late


@given(STEPS)
def test_a_load_is_late_when_nothing_moves_that_it_waits_for(
    steps: list[str | tuple[str, int] | int],
) -> None:
    world = _World()
    for step in steps:
        match step:
            case "load":
                world.load()
            case (kind, int(which)) if reads := world.oracle.reads("posted", "draining"):
                request, rank, _ = reads[which % len(reads)]
                if kind == "move":
                    world.move(request, rank)
                else:
                    world.end(request, rank, is_good=kind == "land")
            case int():
                for _ in range(step):
                    world.wait()
        world.check()
