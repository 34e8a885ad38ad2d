"""Faults are counted per minute, by peer and reason, and forgotten after an hour."""

from typing import Any

import pytest

from nixl_kv.engine.history import MAX_DETAIL, MAX_KINDS, History
from support.stepped import Clock


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = 1_000_020.0
    return clock


@pytest.fixture
def history(clock: Clock) -> History:
    return History(clock)


def counts(history: History) -> list[tuple[Any, ...]]:
    names = ("peer", "reason", "num_last_10_min", "num_last_hour")
    return [tuple(record[name] for name in names) for record in history.listed()]


def test_faults_are_counted_by_peer_and_reason(history: History) -> None:
    for peer in ("P", "P", "Q"):
        history.count("late", peer=peer)
    history.count("denied", peer="P")
    late = [("P", "late", 2, 2), ("Q", "late", 1, 1)]
    assert counts(history) == [*late, ("P", "denied", 1, 1)]


def test_an_hour_is_kept(history: History, clock: Clock) -> None:
    history.count("late")
    clock.now += 50 * 60
    history.count("late", detail="the latest")
    clock.now += 5
    assert counts(history) == [("", "late", 1, 2)]
    (record,) = history.listed()
    assert (record["latest_ago_s"], record["detail"]) == (5, "the latest")
    clock.now += 10 * 60
    assert counts(history) == [("", "late", 0, 1)]
    clock.now += 60 * 60
    assert counts(history) == []


def test_memory_is_bounded(history: History, clock: Clock) -> None:
    for number in range(MAX_KINDS + 10):
        history.count("late", peer=f"P{number}")
    assert len(history.listed()) == MAX_KINDS
    assert ("P9", "late", 1, 1) not in counts(history)
    history = History(clock)
    for _ in range(200):
        history.count("late")
        clock.now += 60
    clock.now -= 60
    assert counts(history) == [("", "late", 10, 60)]


def test_a_detail_is_short_and_can_be_printed(history: History) -> None:
    history.count("late", detail="\x1b[2J" + "x" * 5000)
    detail = history.listed()[0]["detail"]
    assert detail.isprintable()
    assert len(detail) <= MAX_DETAIL


def test_a_clock_that_is_set_back_loses_nothing_recent(history: History, clock: Clock) -> None:
    history.count("late")
    clock.now -= 120
    history.count("late")
    assert counts(history) == [("", "late", 2, 2)]
    assert history.listed()[0]["latest_ago_s"] == 0
