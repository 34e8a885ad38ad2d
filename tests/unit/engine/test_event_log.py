"""Which events are kept, and how a request's story is put together."""

import itertools
import logging

import pytest

from nixl_kv.engine.event_log import (
    EVERY_REQUEST,
    KEPT,
    MAX_CAUSE,
    MAX_REQUESTS,
    RECENT_S,
    EventLog,
    describe,
)
from nixl_kv.errors import MAX_ID
from nixl_kv.protocol.events import OVER, Transition
from nixl_kv.protocol.messages import MAX_LISTED
from support.stepped import Clock

CLAIM = "00000003"
ENGINE, RANK = "engine 'prefill' at tcp://10.0.0.1:5600", "rank 0 at tcp://10.0.0.1:7000"
CONNECTING = Transition("peer", ENGINE, "", ENGINE, "", "CONNECTING", "PrepareLoad")
READY = Transition("peer", ENGINE, "", ENGINE, "CONNECTING", "READY", "HandshakeDone")
LOST = Transition("peer", ENGINE, "", ENGINE, "READY", "UNUSABLE", "EndpointLost")


def prepared(request: str) -> Transition:
    return Transition("load", CLAIM, request, ENGINE, "", "CONNECTING", "PrepareLoad")


def moved(request: str, before: str, after: str) -> Transition:
    return Transition("read", f"{CLAIM}/0", request, RANK, before, after, "")


def ended(request: str, after: str = "LOADED", before: str = "READY") -> Transition:
    return Transition("load", CLAIM, request, ENGINE, before, after, "", is_last=True)


def log_of(*transitions: Transition, kept: int = KEPT) -> EventLog:
    """Events one second apart, from 100 s on."""
    log = EventLog(itertools.count(100.0).__next__, kept)
    for transition in transitions:
        log.record(transition)
    return log


def transitions_of(story: list[tuple[float, Transition]]) -> list[Transition]:
    return [transition for _, transition in story]


OTHER = "engine 'other' at tcp://10.0.0.2:5600"
OF_OTHER = Transition("peer", OTHER, "", OTHER, "", "CONNECTING", "")
ONE, TWO, XYZ = (prepared(f"cmpl-{name}") for name in ("abc-0", "abc-1", "xyz-0"))
READING, READ = moved("d1", "GRANTED", "READING"), moved("d1", "READING", "FAILED")
READ_LOADED = READ._replace(after="LOADED", is_last=True)
PAIR = prepared("d-1"), prepared("d-2"), ended("d-2", "FAILED", before="ASKED"), LOST
GRANTED = Transition("offer", "n", "p1", ENGINE, "OFFERED", "GRANTED", "Ask")
RELEASED = Transition("offer", "n", "p1", ENGINE, "GRANTED", OVER, "Release: read", is_last=True)
MET = CONNECTING, prepared("d1"), OF_OTHER, READY, ended("d1"), LOST


@pytest.mark.parametrize(
    ("events", "request_id", "exact", "story"),
    [
        pytest.param((READY, ONE, TWO, XYZ), "abc", False, [1, 2], id="a part of an id"),
        pytest.param((ONE, TWO), "abc", True, [], id="a part is not the id"),
        pytest.param((ONE, TWO), "cmpl-abc-1", True, [1], id="a whole id"),
        pytest.param((ONE,), "", False, [], id="no id"),
        pytest.param((READY, ONE, TWO), EVERY_REQUEST, False, [0, 1, 2], id="every request"),
        pytest.param(MET, "d1", False, [1, 3, 4], id="its peer's events while it lives"),
        pytest.param((prepared("d1"), READING, LOST), "d1", False, [0, 1, 2], id="it reads"),
        pytest.param((prepared("d1"), READ, LOST), "d1", False, [0, 1, 2], id="a read failed"),
        pytest.param(
            (prepared("d1"), READ_LOADED, LOST), "d1", False, [0, 1, 2], id="a read ended"
        ),
        pytest.param(PAIR, "d-", False, [0, 1, 2, 3], id="one of two lives"),
        pytest.param(PAIR, "d-2", False, [1, 2], id="the other one has ended"),
        pytest.param((GRANTED, RELEASED, LOST), "p1", False, [0, 1], id="an offer has ended"),
    ],
)
def test_a_story_has_the_events_of_requests_and_of_their_peers_meanwhile(
    events: tuple[Transition, ...],
    request_id: str,
    story: list[int],
    exact: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """Each event comes one second after the one before."""
    found = log_of(*events).story(request_id, exact=exact)
    assert found == [(100.0 + place, events[place]) for place in story]


def test_only_the_last_events_are_kept() -> None:
    log = log_of(*(moved(f"d{number}", "A", "B") for number in range(10)), kept=4)
    assert len(log) == 4
    assert log.since == 106.0
    assert log.story("d5", exact=True) == []
    assert len(log.story("d6", exact=True)) == 1
    assert len(log.story(EVERY_REQUEST, limit=2)) == 2
    assert [event.request for _, event in log.story("d", limit=2)] == ["d8", "d9"]


def test_a_cause_is_short_and_can_be_printed() -> None:
    """A part of it may be a peer's text."""
    log = log_of(Transition("load", CLAIM, "d1", ENGINE, "", "FAILED", "one\x1b[2J\n" + "x" * 5000))
    ((_, event),) = log.story("d1")
    assert event.cause.startswith(r"one\x1b[2J\nxxx")
    assert event.cause.isprintable()
    assert len(event.cause) < MAX_CAUSE + 10


def test_without_events_there_is_no_story() -> None:
    log = EventLog()
    assert (len(log), log.since, log.story("d1"), log.story_lines("d1", 9)) == (0, None, [], [])


@pytest.mark.parametrize("limit", [3, 10, 11, 12])
def test_a_long_story_is_cut_at_its_begin(limit: int) -> None:
    log = log_of(*(moved("d1", f"{number}", f"{number + 1}") for number in range(11)))
    whole = [f"{number:5}.000 s  d1 {RANK}: {number} -> {number + 1}" for number in range(11)]
    cut = [f"({12 - limit} earlier events)", *whole[12 - limit :]]
    assert log.story_lines("d1", limit) == (cut if limit < 11 else whole)


@pytest.mark.parametrize(
    ("transition", "words"),
    [
        (prepared("d1"), f"d1 {ENGINE}: CONNECTING (PrepareLoad)"),
        (READY, f"{ENGINE}: CONNECTING -> READY (HandshakeDone)"),
        (
            Transition("read", f"{CLAIM}/0", "d1", RANK, "READING", "DONE", "ReadDone", 4096),
            f"d1 {RANK}: READING -> DONE (ReadDone), 4096 bytes",
        ),
        (Transition("offer", "n", "p1", "", "A", "B", ""), "p1: A -> B"),
    ],
    ids=["begin", "peer", "bytes", "nothing else"],
)
def test_a_transition_in_words(transition: Transition, words: str) -> None:
    assert describe(transition) == words


@pytest.mark.parametrize(("level", "count"), [(logging.DEBUG, 1), (logging.INFO, 0)])
def test_each_transition_is_logged_at_debug(
    caplog: pytest.LogCaptureFixture, level: int, count: int
) -> None:
    with caplog.at_level(level, logger="nixl_kv.engine.event_log"):
        log_of(READY)
    assert [record.getMessage() for record in caplog.records] == [describe(READY)] * count


def test_long_ids_are_cut_and_still_found() -> None:
    """A client chooses them, and 10,000 events have one each."""
    first, second = ("cmpl-" + "x" * 60_000 + end for end in ("-0-0123abcd", "-0-4567abcd"))
    log = log_of(prepared(first), prepared(second), ended(first), ended(second))
    assert all(len(event.request) == MAX_ID for _, event in log.story(EVERY_REQUEST))
    for name, end in ((first, "0123abcd"), (second, "4567abcd")):
        story = transitions_of(log.story(name, exact=True))
        assert [event.after for event in story] == ["CONNECTING", "LOADED"]
        assert all(event.request.endswith(end) for event in story)
        assert len(log.story_lines(name, 10)) == 2
    for part in ("x" * 300, "x" * MAX_ID, first[:200], "cmpl-x", "0123abcd"):
        assert log.story(part)
    assert log.story("y" * 300) == []
    hostile = "\n\x1b[31m" * 30
    log.record(prepared(hostile))
    assert len(log.story(hostile, exact=True)) == 1
    assert describe(log.story(hostile, exact=True)[0][1]).isprintable()


# --- the loads that failed


def failed(request: str, reason: str, peer: str = ENGINE) -> Transition:
    cause = f"cause of {request} ({reason})"
    states = ("READY", "FAILED")
    return Transition("load", CLAIM, request, peer, *states, cause, reason=reason, is_last=True)


def test_failed_loads_are_counted_by_peer_and_reason() -> None:
    clock = Clock()
    log = EventLog(clock)
    for number in range(5):
        log.record(prepared(f"d{number}"))
        log.record(moved(f"d{number}", "READING", "FAILED"))
        log.record(failed(f"d{number}", "late"))
    log.record(failed("d5", "denied"))
    log.record(failed("d6", "dropped"))
    log.record(ended("d7"))
    clock.now += 2.5
    first, second = log.failures()
    assert first == {
        "peer": ENGINE,
        "reason": "late",
        "num_loads": 5,
        "latest_ago_s": 2.5,
        "requests": ["d4", "d3", "d2"][:MAX_REQUESTS],
        "detail": "cause of d4 (late)",
    }
    assert (second["reason"], second["requests"]) == ("denied", ["d5"])


def test_older_failures_are_forgotten() -> None:
    clock = Clock()
    log = EventLog(clock)
    log.record(failed("d1", "late"))
    clock.now += RECENT_S - 1
    log.record(failed("d2", "late"))
    assert [each["requests"] for each in log.failures()] == [["d2", "d1"]]
    clock.now += 1
    assert [each["requests"] for each in log.failures()] == [["d2"]]
    clock.now += RECENT_S
    assert log.failures() == []
    assert log.failures_span_s == RECENT_S


def test_a_clock_that_is_set_back_hides_no_failure() -> None:
    clock = Clock()
    log = EventLog(clock)
    log.record(failed("d1", "late"))
    clock.now -= 500
    (failure,) = log.failures()
    assert failure["latest_ago_s"] == 0


def test_a_full_log_says_how_far_back_it_sees() -> None:
    clock = Clock()
    log = EventLog(clock, kept=3)
    for number in range(4):
        log.record(prepared(f"d{number}"))
        clock.now += 10
    assert log.failures_span_s == 30
    clock.now += RECENT_S
    assert log.failures_span_s == RECENT_S


def test_a_list_of_failures_is_bounded() -> None:
    """A client may invent peers."""
    log = EventLog()
    for number in range(MAX_LISTED + 5):
        log.record(failed("d", "late", peer=f"engine {number}"))
    assert len(log.failures()) == MAX_LISTED
