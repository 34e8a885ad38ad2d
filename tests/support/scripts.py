"""Scripts for the machines of the protocol: events, and the actions that are expected of each."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import pytest
from msgspec.structs import replace

from nixl_kv.ids import Rank
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.events import (
    Action,
    CompareDigest,
    HandshakeDone,
    LoadEnded,
    OfferEnded,
    Record,
    Send,
    StartRead,
    StopRead,
)
from nixl_kv.protocol.messages import KVSlice, Reader
from support.records import (
    CLAIM,
    D1,
    HOME,
    PEER,
    RANK_0,
    READER,
    SLICES,
    TIMEOUT_S,
    answered,
    ask,
    describe,
    digest_reply,
    digest_request,
    fits,
    grant,
    no_record,
    prepare_load,
    read_done,
    start_load,
)

Script: TypeAlias = Sequence[tuple[Any, ...]]
"""Each step is an event and, in order, the actions that are expected of it.

A number before the event is the second in which it comes; without one no time has passed. A
failure that is expected has some of the words of the real one: a rank, a time, a reason.
"""


class Machine(Protocol):
    def handle(self, event: Any, now: float, /) -> list[Action]: ...


def play(machine: Machine, script: Script, now: float = 100.0) -> None:
    for step in script:
        has_time = isinstance(step[0], float)
        now = step[0] if has_time else now
        event, *expected = step[1:] if has_time else step
        actions = machine.handle(event, now)
        assert [*map(_reworded, actions, expected), *actions[len(expected) :]] == expected, (
            f"at {now}: {event}"
        )


def _reworded(action: Action, expected: Any) -> Action:
    """The action with the expected words for its failure, if it has these among its own.

    A script states no times of the ends of loads and offers.
    """
    match action, expected:
        case LoadEnded(failure=mine), LoadEnded(failure=wanted):
            if mine and wanted and wanted.detail in mine.detail:
                mine = replace(mine, detail=wanted.detail)
            times = {"waits": expected.waits, "ended_at": expected.ended_at}
            return replace(action, failure=mine, **times)
        case OfferEnded(), OfferEnded():
            return replace(action, reader=expected.reader, asked_at=expected.asked_at)
    return action


def after(state: Script, *steps: tuple[Any, ...]) -> Script:
    """The script that leads to a state, and what happens in it."""
    return [*state, *steps]


def each_of(cases: Mapping[str, Any], name: str = "script") -> pytest.MarkDecorator:
    """A test for each of them; its key says what is shown."""
    return pytest.mark.parametrize(name, cases.values(), ids=cases.keys())


# --- a load on decode, which reads prefill's rank 0

GRANT = grant(lease_s=3600.0)
"""Nothing has to be renewed in the time of a script."""


def decode_machine(
    record: Record = no_record,
    *,
    reader: Reader = READER,
    timeout_s: float = TIMEOUT_S,
    heartbeat_interval_s: float = 1e9,
    bytes_per_token: int = 1,
    slices: tuple[KVSlice, ...] = SLICES,
) -> DecodeMachine:
    """Each load reads the same slices of each rank."""
    return DecodeMachine(
        reader,
        record,
        lambda *_: slices,
        timeout_s=timeout_s,
        heartbeat_interval_s=heartbeat_interval_s,
        bytes_per_token=bytes_per_token,
    )


def loading(script: Script) -> DecodeMachine:
    """A machine after a script."""
    machine = decode_machine()
    play(machine, script)
    return machine


START, START_VERIFIED = start_load(), start_load(verify=True)
STOP = StopRead(D1, Rank(0))
READ = StartRead(PEER, Rank(0), GRANT, START)

PREPARED: Script = [(100.0, prepare_load(), Send(HOME, describe()))]
HANDSHAKING: Script = [*PREPARED, (fits(), Send(RANK_0, ask()))]
ASKING: Script = [*HANDSHAKING, (HandshakeDone(PEER),)]
"""The peer can be read, and prefill's answer is not here yet."""
GRANTED: Script = [*ASKING, (answered(GRANT),)]
READING: Script = [*GRANTED, (110.0, START, READ)]
TO_DIGEST = CompareDigest(Rank(0), SLICES, START_VERIFIED, CLAIM)
READ_VERIFIED = (
    StartRead(PEER, Rank(0), GRANT, START_VERIFIED),
    replace(TO_DIGEST, has_landed=False),
)
VERIFIED: Script = [
    *GRANTED,
    (110.0, START_VERIFIED, Send(RANK_0, digest_request()), *READ_VERIFIED),
]
"""Prefill's digest was asked for when there were blocks."""
LANDED_VERIFIED = (read_done(), TO_DIGEST)
VERIFYING: Script = [*VERIFIED, LANDED_VERIFIED]
"""The slot was valid; prefill's digest is not here yet."""
COMPARE = CompareDigest(
    *(Rank(0), SLICES, START_VERIFIED, CLAIM), digest_reply().rows, digest_reply().columns
)
"""What follows when it comes."""
