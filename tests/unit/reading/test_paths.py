"""Direct reads are posted in slices: bounded work per turn, and progress after each slice."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.local.caches import Cache, Sizes
from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.errors import PeerLost
from nixl_kv.geometry.layout import Table
from nixl_kv.geometry.plan import plan
from nixl_kv.ids import Rank
from nixl_kv.protocol.events import ChunksWanted, StartLoad, StartRead
from nixl_kv.reading import paths
from nixl_kv.reading.paths import (
    MAX_SLICES,
    RUNS_PER_TURN,
    STOPPED,
    Budget,
    DirectOp,
    DirectPath,
    Read,
    Source,
)
from support.readable import ReadableRank, engine_of
from support.records import D1, PEER, grant

SIZES = Sizes(blocks=64)
BLOCKS = 60
RUNS = BLOCKS * SIZES.layers


class Reading:
    """A read of many runs, in slices of ten."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_tcp: bool = False) -> None:
        monkeypatch.setattr(paths, "SLICE_RUNS", 10)
        self.fabric = Fabric(polls=0)
        self.prefill, self.cache = ReadableRank(self.fabric, SIZES), Cache(SIZES).fill(2)
        layout, description = self.cache.layout(), engine_of(self.prefill).ranks[0]
        self.transport = MemoryTransport(self.fabric)
        for span in layout.spans:
            self.transport.register(span, "DRAM", 0)
        name = self.transport.add_peer(description.agent)
        planned = plan(layout, description.layout)
        self.budget = Budget()
        self.ids = list(range(BLOCKS)), list(reversed(range(BLOCKS)))
        local, remote = ((Table.of(ids),) for ids in self.ids)
        load = StartLoad(D1, 0, BLOCKS * 4, local)
        pieces = planned.pieces(local, remote, range(load.end))
        source = Source(
            transport=self.transport,
            name=name,
            description=description,
            plan=planned,
            local=self.transport.prepare(planned.local, "DRAM", None),
            remote=self.transport.prepare(planned.remote, "DRAM", name),
            is_tcp=is_tcp,
            budget=self.budget,
        )
        action = StartRead(PEER, Rank(0), grant(tables=remote), load)
        self.read = Read(action, source, pieces, planned.num_bytes(pieces), RUNS)
        self.posted: list[int] = []
        read = self.transport.read

        def note(local: Any, remote: Any, indices: Any) -> Any:
            self.posted.append(len(indices[0]))
            return read(local, remote, indices)

        monkeypatch.setattr(self.transport, "read", note)

    def start(self) -> DirectOp:
        path = DirectPath("DRAM")
        op = path.start(path.prepare(None, {}, self.read.source.plan), self.read)  # type: ignore[arg-type]
        assert isinstance(op, DirectOp)
        return op

    def check(self) -> None:
        expected = self.prefill.cache.blocks(self.ids[1])
        assert np.array_equal(self.cache.blocks(self.ids[0]), expected)


MakeReading = Callable[..., Reading]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeReading:
    return lambda **options: Reading(monkeypatch, **options)


def test_all_slices_arrive_and_each_is_progress(make: MakeReading) -> None:
    reading = make()
    op, news = reading.start(), []
    while not op.has_ended:
        assert len(op._posted) <= MAX_SLICES
        news.append(op.poll())
    reading.check()
    assert (sum(reading.posted), set(reading.posted)) == (RUNS, {10})
    progress = [ChunksWanted(D1, Rank(0), (), ())]
    assert news == [progress] * (len(news) - 1) + [[]]
    assert op.failure is None


def test_a_turn_posts_what_its_budget_allows(make: MakeReading) -> None:
    reading = make()
    reading.budget.runs = 15
    op = reading.start()
    op.poll()
    assert reading.posted == [10, 10], "the last one may exceed it"
    for _ in range(3):
        op.poll()
    assert len(reading.posted) == 2
    reading.budget.runs = 1
    op.poll()
    assert len(reading.posted) == 3
    assert not op.is_autonomous, "it needs further turns"
    while not op.has_ended:
        reading.budget.runs = RUNS_PER_TURN
        op.poll()
    reading.check()


def test_a_short_read_waits_for_the_next_turn_if_the_budget_is_spent(
    make: MakeReading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a turn that starts many of them would have no bound."""
    reading = make()
    monkeypatch.setattr(paths, "SLICE_RUNS", RUNS)
    reading.budget.runs = 0
    first, second = reading.start(), reading.start()
    first.poll()
    assert reading.posted == []
    reading.budget.runs = 1
    first.poll()
    second.poll()
    assert reading.posted == [RUNS], "the budget was spent by the first one"
    reading.budget.runs = RUNS_PER_TURN
    while not second.has_ended:
        second.poll()
    reading.check()


def test_a_short_read_is_posted_at_once(make: MakeReading, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = make()
    monkeypatch.setattr(paths, "SLICE_RUNS", RUNS)
    assert reading.start().is_autonomous
    assert reading.posted == [RUNS]


def test_slices_are_bounded_in_bytes(make: MakeReading, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = make()
    run = reading.read.num_bytes // RUNS
    monkeypatch.setattr(paths, "SLICE_RUNS", RUNS)
    monkeypatch.setitem(paths.SLICE_BYTES, "DRAM", 7 * run)
    op = reading.start()
    while not op.has_ended:
        op.poll()
    assert max(reading.posted) == 7


def test_a_read_that_is_stopped_ends_after_what_is_in_flight(make: MakeReading) -> None:
    reading = make()
    reading.fabric.polls = 2
    op = reading.start()
    op.poll()
    op.stop()
    op.stop()
    polls = 0
    while not op.has_ended:
        polls += 1
        op.poll()
    assert (polls, len(reading.posted), op.failure) == (3, MAX_SLICES, STOPPED)


def test_a_slice_that_is_lost_ends_the_read(make: MakeReading) -> None:
    reading = make()
    op = reading.start()
    reading.fabric.lost_peers.add(reading.prefill.transport.name)
    op.poll()
    assert op.has_ended
    assert op.is_connection_lost
    assert op.failure is not None
    assert len(reading.posted) == 1


def test_a_slice_that_cannot_be_posted_waits_for_the_others(
    make: MakeReading, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = make()
    reading.fabric.polls = 1
    op = reading.start()

    def refuse(*_: object) -> None:
        raise PeerLost("disconnected")

    monkeypatch.setattr(reading.transport, "read", refuse)
    op.poll()
    assert not op.has_ended, "the first one is in flight"
    op.poll()
    assert (op.has_ended, op.failure, op.is_connection_lost) == (True, "disconnected", True)


def test_nothing_is_in_flight_if_the_start_raises(
    make: MakeReading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent then says that the read has failed, and its blocks are used again."""
    reading = make()
    read, calls = reading.transport.read, []

    def refuse_later(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            raise PeerLost("disconnected")
        return read(*arguments)

    monkeypatch.setattr(reading.transport, "read", refuse_later)
    op = reading.start()
    assert len(calls) == 1
    while not op.has_ended:
        op.poll()
    assert op.failure == "disconnected"


def test_slices_are_shorter_over_tcp(make: MakeReading, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes longer there, and a read has to show progress."""
    reading = make(is_tcp=True)
    monkeypatch.setattr(paths, "TCP_SLICE_RUNS", 6)
    op = reading.start()
    reading.fabric.polls = 3
    op.poll()
    assert set(reading.posted) == {6}
    assert not op.is_autonomous, "paced reads need calls"
    while not op.has_ended:
        op.poll()
    reading.check()
