"""Scripts for the machines of the protocol: events, and the actions that are expected of each."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias, get_args

import msgspec
import pytest
from msgspec.structs import replace

from nixl_kv.ids import Endpoint, Rank, short
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.events import (
    OVER,
    Action,
    Failure,
    FailureKind,
    HandshakeDone,
    LoadEnded,
    LoadReady,
    OfferEnded,
    Record,
    Send,
    StartLoad,
    StartRead,
    StopRead,
    Tick,
    Transition,
)
from nixl_kv.protocol.load import LoadPart
from nixl_kv.protocol.messages import Landed, PrefillState, Reader, Ready
from support.records import (
    CLAIM,
    D1,
    D2,
    HINT_KEY,
    HOME,
    NONCE2,
    PEER,
    RANK_0,
    READER,
    RIVAL,
    TIMEOUT_S,
    answered,
    ask,
    at,
    deny,
    describe,
    fits,
    grant,
    no_record,
    pending,
    prepare_load,
    read_done,
    release,
    renewed,
    start_load,
)

Script: TypeAlias = Sequence[tuple[Any, ...]]
"""Each step is an event and, in order, the actions that are expected of it.

A number before the event is the second in which it comes; without one no time has passed. A
failure that is expected has some of the words of the real one: a rank, a time, a reason.
"""

MOST = 400  # characters of an event or an action in a failure


class Machine(Protocol):
    def handle(self, event: Any, now: float, /) -> list[Action]: ...


def play(machine: Machine, script: Script, now: float = 100.0) -> None:
    __tracebackhide__ = True  # a failure shows the line of the test
    before: Any = None
    for number, step in enumerate(script, 1):
        has_time = isinstance(step[0], float)
        now = step[0] if has_time else now
        event, *expected = step[1:] if has_time else step
        actions = machine.handle(event, now)
        actions = [*map(_reworded, actions, expected), *actions[len(expected) :]]
        if actions != expected:
            at = f"step {number} of {len(script)}, at {now}: {_cut(event)}\nafter {_cut(before)}"
            raise AssertionError("\n".join([at, *_differences(actions, expected)]))
        before = event


def _differences(actual: Any, expected: Any, where: str = "action") -> Iterator[str]:
    """A line for each field that differs."""
    if isinstance(actual, list):
        for index, both in enumerate(zip_longest(actual, expected, fillvalue="no action"), 1):
            yield from _differences(*both, f"{where} {index}")
    elif type(actual) is type(expected) and isinstance(actual, msgspec.Struct):
        for name in actual.__struct_fields__:
            both = getattr(actual, name), getattr(expected, name)
            yield from _differences(*both, f"{where}, {type(actual).__name__}.{name}")
    elif actual != expected:
        yield f"{where}: {_cut(actual)}\n    expected: {_cut(expected)}"


def _cut(value: Any) -> str:
    """Its `repr`, without fields that have their defaults; long ids and texts keep both ends."""
    text = re.sub(r"([0-9a-f]{4})[0-9a-f]{20,}([0-9a-f]{4})", r"\1..\2", _shown(value))
    return text if len(text) <= MOST else f"{text[: MOST // 2]} .. {text[-MOST // 2 :]}"


def _shown(value: Any) -> str:
    match value:
        case msgspec.Struct():
            given = {one.name: one.default for one in msgspec.structs.fields(value)}
        case _ if is_dataclass(value):
            given = {one.name: one.default for one in fields(value)}
        case tuple() | list():
            return f"[{', '.join(map(_shown, value))}]"
        case bytes() if len(set(value)) == 1 < len(value):
            return f"{value[:1]!r} * {len(value)}"
        case _:
            return repr(value)
    own = {name: getattr(value, name) for name in given}
    shown = [f"{name}={_shown(one)}" for name, one in own.items() if one != given[name]]
    return f"{type(value).__name__}({', '.join(shown)})"


def _reworded(action: Action, expected: Any) -> Action:
    """The action with the expected words for its failure, if it has these among its own.

    A script states no times of the ends of loads and offers. It may leave out cached tokens.
    """
    match action, expected:
        case LoadEnded(failure=mine), LoadEnded(failure=wanted):
            if mine is not None and wanted is not None and wanted.detail in mine.detail:
                mine = replace(mine, detail=wanted.detail, is_known=wanted.is_known)
            given = {name: getattr(expected, name) for name in ("waits", "ended_at")}
            if expected.num_cached is None:
                given["num_cached"] = None
            return replace(action, failure=mine, **given)
        case OfferEnded(), OfferEnded():
            return replace(action, reader=expected.reader, asked_at=expected.asked_at)
    return action


def after(state: Script, *steps: tuple[Any, ...]) -> Script:
    """The script that leads to a state, and what happens in it."""
    return [*state, *steps]


def each_of(cases: Mapping[str, Any], name: str = "script") -> pytest.MarkDecorator:
    """A test for each of them, named by its key."""
    return pytest.mark.parametrize(name, cases.values(), ids=cases.keys())


# --- the tables of transitions

Table: TypeAlias = Mapping[Any, Mapping[type, Sequence[Any]]]
"""For each state and event, the states that may follow; None: its end, or that it stays."""


def rows_of(table: Table, over: str = "") -> set[tuple[str, str, str]]:
    """(before, event, after) of each row; `over` names the end, if None is one."""
    return {
        (state.name, event.__name__, over if end is None else end.name)
        for state, moves in table.items()
        for event, ends in moves.items()
        for end in ends
        if end is not None or over
    }


def moves_of(recorded: Iterable[Transition]) -> set[tuple[str, str, str]]:
    """(before, event, after) of each that was recorded, but for begins and denials."""
    return {
        (move.before, move.cause.partition(":")[0], move.after)
        for move in recorded
        if move.before not in ("", move.after)
    }


def impossible(table: Table, state: Enum, event: object, *ends: None) -> Iterator[tuple[Any, str]]:
    """The states, or ends, that may not follow, and what the error says."""
    name = type(event).__name__
    for after in {*type(state), *ends}.difference(table[state].get(type(event), ())):
        to = OVER if after is None else after.name
        yield after, f"{name} leads from {state.name} to {to}; allowed: "


# --- a load on decode, which reads prefill's rank 0

GRANT = grant(lease_s=3600.0)
"""Nothing has to be renewed in the time of a script."""


def decode_machine(
    record: Record = no_record,
    *,
    reader: Reader = READER,
    timeout_s: float = TIMEOUT_S,
    wait_for_prefill_s: float = 1e9,
    heartbeat_interval_s: float = 1e9,
    bytes_per_token: int = 1,
    entry_size: int = 1,
    parts: Sequence[LoadPart] = (),
) -> DecodeMachine:
    return DecodeMachine(
        reader,
        record,
        timeout_s=timeout_s,
        wait_for_prefill_s=wait_for_prefill_s,
        heartbeat_interval_s=heartbeat_interval_s,
        bytes_per_token=bytes_per_token,
        entry_size=entry_size,
        parts=parts,
    )


def loading(script: Script, *parts: LoadPart) -> DecodeMachine:
    """A machine with these parts, after a script."""
    machine = decode_machine(parts=parts)
    play(machine, script)
    return machine


START = start_load()
STOP = StopRead(D1, Rank(0))
READ = StartRead(PEER, Rank(0), GRANT, START)
RELEASED, GIVEN_UP = Send(RANK_0, release()), Send(RANK_0, release(complete=False))
GOOD = LoadEnded(D1, 7, None, PEER, reads=(read_done(),))
SECOND, START_2 = prepare_load(D2, RIVAL, nonce=NONCE2), start_load(D2)
ASK_SECOND = Send(RANK_0, ask(nonce=NONCE2, claim=RIVAL, number=2))
GIVEN_UP_2 = Send(RANK_0, release(complete=False, nonce=NONCE2, claim=RIVAL))

PREPARED: Script = [(100.0, prepare_load(), Send(HOME, describe()))]
HANDSHAKING: Script = [*PREPARED, (fits(), Send(RANK_0, ask()))]
ASKING: Script = [*HANDSHAKING, (HandshakeDone(PEER),)]
"""The peer can be read, and prefill's answer is not here yet."""
GRANTED: Script = [*ASKING, (answered(GRANT),)]
READING: Script = [*GRANTED, (110.0, START, READ)]
TWO_ASKED: Script = after(
    PREPARED, (fits(2), Send(RANK_0, ask()), Send(at(1), ask(number=2))), (START,)
)
"""Two ranks of prefill have a part of the KV each."""
EMPTY = bytes(16)


def failed(kind: FailureKind, detail: str) -> LoadEnded:
    return LoadEnded(D1, 7, Failure(kind, detail), PEER)


FENCED = failed(FailureKind.FENCED, "rank 0")
DROPPED = failed(FailureKind.DROPPED, "dropped")
DENIED = failed(FailureKind.DENIED, "rank 0")
LOST_LEASE = failed(FailureKind.LEASE_LOST, "rank 0")
UNREACHABLE = failed(FailureKind.UNREACHABLE, "closed")
LATE = failed(FailureKind.LATE, f"{TIMEOUT_S:g} s")

# --- a load of a pair, whose parts are granted one after another

PENDING = {state: answered(pending(state)) for state in get_args(PrefillState)}
EARLY: Script = [
    (100.0, prepare_load(is_early=True), Send(HOME, describe())),
    (fits(), Send(RANK_0, ask(is_early=True))),
    (HandshakeDone(PEER),),
]
READY = LoadReady(D1)
PART, WHOLE = (grant(lease_s=3600.0, num_tokens=n) for n in (4, None))
AGAIN = Send(RANK_0, ask(is_early=True, number=2))
SUM = replace(
    read_done(),
    num_bytes=2 * read_done().num_bytes,
    num_runs=2 * read_done().num_runs,
    seconds=2 * read_done().seconds,
    post_seconds=2 * read_done().post_seconds,
)
GOOD_SUM = replace(GOOD, reads=(SUM,))
OTHER_TOKEN = b"\2" * 16
OTHER_WHOLE = replace(WHOLE, fence_token=OTHER_TOKEN)
OWN = Endpoint("tcp://10.0.0.2:5601")


def told(
    scripts: Iterable[Script], make_parts: Callable[[], Sequence[LoadPart]] = tuple
) -> set[str]:
    """The strings in messages to prefill that look like keys; the scheduler hears its own key."""
    heard: set[str] = set()
    for script in scripts:
        machine = decode_machine(parts=make_parts())
        machine.set_engine(READER.engine, OWN)
        for step in script:
            has_time = isinstance(step[0], float)
            now = step[0] if has_time else 100.0
            for action in machine.handle(step[1] if has_time else step[0], now):
                if not isinstance(action, Send):
                    continue
                if isinstance(action.message, Ready | Landed):
                    assert (action.endpoint, action.message.hint_key) == (OWN, HINT_KEY)
                else:
                    heard |= set(re.findall("[0-9a-f]{32}", str(msgspec.to_builtins(action))))
    return heard


# --- records of a load


@dataclass
class RecordedLoad:
    """The load of `prepare_load` from one rank, and the beginnings of its transitions."""

    load: tuple[str, ...] = ("load", short(CLAIM), D1, str(PEER))
    peer: tuple[str, ...] = ("peer", str(PEER), "", str(PEER))
    rank: tuple[str, ...] = ("read", f"{short(CLAIM)}/0", D1, f"rank 0 at {RANK_0}")

    def until_it_reads(self, start: StartLoad) -> list[tuple[Any, ...]]:
        """Events, each with the transitions that it causes; the last ones cause none."""
        load, peer, rank = self.load, self.peer, self.rank
        return [
            (
                prepare_load(),
                (*load, "", "CONNECTING", "PrepareLoad: offer 00000000"),
                (*peer, "", "CONNECTING", "PrepareLoad"),
            ),
            (
                fits(),
                (*peer, "CONNECTING", "HANDSHAKING", "PeerFits: 1 of 1 ranks"),
                (*load, "CONNECTING", "ASKED", "PeerFits"),
                (*rank, "", "ASKING", "PeerFits"),
            ),
            (
                answered(grant()),
                (*load, "ASKED", "READY", "Grant"),
                (*rank, "ASKING", "GRANTED", "Grant"),
            ),
            (answered(grant()),),
            (
                start,
                (*load, "READY", "READY", "StartLoad: tokens 0 to 6"),
                (*rank, "GRANTED", "READING", "StartLoad"),
            ),
            (answered(deny()),),
            (answered(renewed(CLAIM)),),
            (Tick(),),
        ]


def expect_recorded(
    machine: DecodeMachine, recorded: list[Transition], steps: Iterable[tuple[Any, ...]]
) -> None:
    """Each event causes these transitions, and no others."""
    for event, *moves in steps:
        recorded.clear()
        machine.handle(event, 100.0)
        assert recorded == [Transition(*move) for move in moves], event
