"""When a load is late: by tables, and against an oracle that keeps every move and looks at all."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.ids import Claim, Endpoint, Rank, RequestId
from nixl_kv.protocol.events import (
    ChunksWanted,
    Failure,
    FailureKind,
    LoadEnded,
    Send,
    StartRead,
    StopRead,
    Tick,
)
from nixl_kv.protocol.load import DRAIN_S, MAX_TIMEOUTS
from nixl_kv.protocol.read_queue import MAX_BYTES
from support.records import (
    D1,
    D2,
    NONCE2,
    PEER,
    RANK_0,
    RIVAL,
    TIMEOUT_S,
    answered,
    at,
    cancel_load,
    fits,
    grant,
    hex32,
    prepare_load,
    read_done,
    read_failed,
    release,
    slot_read,
    start_load,
)
from support.scripts import (
    GRANT,
    PREPARED,
    READING,
    START,
    STOP,
    Script,
    after,
    decode_machine,
    each_of,
    loading,
    play,
)

LARGE = MAX_BYTES // 7
"""Bytes per token with which one load is all that may be under way."""
END = 110.0 + TIMEOUT_S
MOVES = ChunksWanted(D1, Rank(0), (), ())
LATE = LoadEnded(D1, 7, Failure(FailureKind.LATE, f"{TIMEOUT_S:g} s"), PEER)
SECOND = prepare_load(D2, RIVAL, nonce=NONCE2)
QUEUE_SECOND = (SECOND, answered(grant(claim=RIVAL, nonce=NONCE2, lease_s=3600.0)), start_load(D2))


def moving(count: int) -> Script:
    """The read has moved each time just before it would have been late."""
    return [(END - 1 + number * (TIMEOUT_S - 1), MOVES) for number in range(count)]


def stuck(since: float) -> Script:
    return [(since + TIMEOUT_S - 0.01, Tick()), (since + TIMEOUT_S, Tick(), STOP)]


MOVED_AT = moving(10)[-1][0]
TIMES: dict[str, Script] = {
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


@each_of(TIMES)
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
        has_slot = is_good and read.state == "posted"
        if has_slot:
            self.oracle.move(request, rank, self.now)
        if not is_good:
            self.oracle.fail(request)
        read.state = "ended"
        end = read_done if is_good else read_failed
        self.handle(end(rank=rank, request=request))
        if has_slot:
            self.handle(slot_read(rank=rank, request=request))

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
