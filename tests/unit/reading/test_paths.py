"""Direct reads are posted in slices: bounded work per turn, and progress after each slice."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from harness.local.caches import Sizes
from nixl_kv.errors import PeerLost
from nixl_kv.geometry.layout import Table
from nixl_kv.protocol.events import ReadMoved, StartLoad, StartRead
from nixl_kv.reading import paths
from nixl_kv.reading.paths import (
    MAX_SLICES,
    RUNS_PER_TURN,
    STOPPED,
    Budget,
    DirectOp,
    DirectPath,
    Read,
)
from support.agent_reading import R0, Reading
from support.records import D1, PEER, grant

BLOCKS = 60
SIZES = Sizes(blocks=BLOCKS)
RUNS = BLOCKS * SIZES.layers


class Sliced:
    """A read of many runs, in slices of ten."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_tcp: bool = False) -> None:
        monkeypatch.setattr(paths, "SLICE_RUNS", 10)
        self.reading = Reading(sizes=SIZES, memory="DRAM")
        self.fabric, self.transport = self.reading.fabric, self.reading.agent.transport
        self.fabric.polls = 0
        rank = self.reading.agent.ranks.find(PEER, R0)
        assert rank is not None
        assert rank.source is not None
        self.budget = Budget()
        source = replace(rank.source, is_tcp=is_tcp, budget=self.budget)
        self.ids = list(range(BLOCKS)), list(reversed(range(BLOCKS)))
        local, remote = ((Table.of(ids),) for ids in self.ids)
        load = StartLoad(D1, 0, BLOCKS * SIZES.tokens, local)
        pieces = source.plan.pieces(local, remote, range(load.end))
        action = StartRead(PEER, R0, grant(tables=remote), load)
        self.read = Read(action, source, pieces, source.plan.num_bytes(pieces), RUNS)
        self.reads = Mock(wraps=self.transport.read)
        monkeypatch.setattr(self.transport, "read", self.reads)

    @property
    def posted(self) -> list[int]:
        """How many runs each slice has."""
        return [len(call.args[2][0]) for call in self.reads.call_args_list]

    def start(self) -> DirectOp:
        path = DirectPath("DRAM")
        op = path.start(path.prepare(None, {}, self.read.source.plan), self.read)  # type: ignore[arg-type]
        assert isinstance(op, DirectOp)
        return op

    def finish(self, op: DirectOp) -> None:
        """Poll until all bytes are there; each poll is a turn."""
        while not op.has_ended:
            self.budget.runs = RUNS_PER_TURN
            op.poll()
        expected = self.reading.prefill.cache.blocks(self.ids[1])
        assert np.array_equal(self.reading.cache.blocks(self.ids[0]), expected)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Sliced:
    return Sliced(monkeypatch)


def test_all_slices_arrive_and_each_is_progress(reading: Sliced) -> None:
    op, news = reading.start(), []
    while not op.has_ended:
        assert len(op._posted) <= MAX_SLICES
        news.append(op.poll())
    reading.finish(op)
    assert (sum(reading.posted), set(reading.posted)) == (RUNS, {10})
    progress = [ReadMoved(D1, R0)]
    assert news == [progress] * (len(news) - 1) + [[]]
    assert op.failure is None


def test_a_turn_posts_reads_up_to_its_budget(reading: Sliced) -> None:
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
    reading.finish(op)


def test_a_short_read_waits_for_the_next_turn_if_the_budget_is_spent(
    reading: Sliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a turn that starts many of them would have no bound."""
    monkeypatch.setattr(paths, "SLICE_RUNS", RUNS)
    reading.budget.runs = 0
    first, second = reading.start(), reading.start()
    first.poll()
    assert reading.posted == []
    reading.budget.runs = 1
    first.poll()
    second.poll()
    assert reading.posted == [RUNS], "the budget was spent by the first one"
    reading.finish(second)
    assert reading.start().is_autonomous
    assert reading.posted == [RUNS] * 3, "with a budget it is posted at once"


def test_slices_are_bounded_in_bytes(reading: Sliced, monkeypatch: pytest.MonkeyPatch) -> None:
    run = reading.read.num_bytes // RUNS
    monkeypatch.setattr(paths, "SLICE_RUNS", RUNS)
    monkeypatch.setitem(paths.SLICE_BYTES, "DRAM", 7 * run)
    op = reading.start()
    reading.finish(op)
    assert max(reading.posted) == 7


def test_a_stopped_read_ends_after_its_parts_in_flight(reading: Sliced) -> None:
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


def test_a_slice_that_is_lost_ends_the_read(reading: Sliced) -> None:
    op = reading.start()
    reading.fabric.lost_peers.add(reading.reading.prefill.transport.name)
    op.poll()
    assert op.has_ended
    assert op.is_connection_lost
    assert op.failure is not None
    assert len(reading.posted) == 1


def test_a_slice_that_cannot_be_posted_waits_for_the_others(
    reading: Sliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading.fabric.polls = 1
    op = reading.start()
    refuse = Mock(side_effect=PeerLost("disconnected"))
    monkeypatch.setattr(reading.transport, "read", refuse)
    op.poll()
    assert not op.has_ended, "the first one is in flight"
    op.poll()
    assert (op.has_ended, op.failure, op.is_connection_lost) == (True, "disconnected", True)


def test_slices_are_shorter_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes longer there, and a read has to show progress."""
    reading = Sliced(monkeypatch, is_tcp=True)
    monkeypatch.setattr(paths, "TCP_SLICE_RUNS", 6)
    op = reading.start()
    reading.fabric.polls = 3
    op.poll()
    assert set(reading.posted) == {6}
    assert not op.is_autonomous, "paced reads need calls"
    reading.finish(op)
