"""`nixl-kv status` prints the answers of an engine's ranks."""

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from harness.local.model_layouts import EngineShape
from nixl_kv.cli import status as status_module
from nixl_kv.cli.client import RankAnswer
from nixl_kv.cli.status import (
    duration_text,
    num_bytes_text,
    print_status,
    status_as_json,
    time_text,
)
from nixl_kv.errors import NixlKVError, TransportError
from nixl_kv.ids import Incarnation
from nixl_kv.protocol.messages import Description, Status
from support.nixl_kv_command import described

T0: Final = 1_700_000_000.0


@pytest.fixture(autouse=True, params=["UTC"])
def _time_zone(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


def description(num_ranks: int = 1) -> Description:
    return described(EngineShape(tp=num_ranks, num_blocks=1000), facts={"model": "m"})


def rank_status(rank: int = 0, events_since: float | None = T0, **lists: Any) -> Status:
    lists = {"peers": [], "links": [], "offers": [], "loads": [], "story": [], **lists}
    return Status(
        incarnation=Incarnation(f"{rank:032x}"),
        facts={
            "engine": "E",
            "rank": rank,
            "roles": "prefill and decode",
            "uptime_s": 3725.0,
            "events_since": events_since,
        },
        totals={name: len(lists[name]) for name in ("peers", "links", "offers", "loads")},
        lists=lists,
    )


def event(seconds: float, request: str, after: str, **fields: Any) -> dict[str, Any]:
    given = {"peer": "", "before": "", "cause": "", "num_bytes": 0, **fields}
    return {"time": T0 + seconds, "request": request, "after": after, **given}


def printed(
    capsys: pytest.CaptureFixture[str], *answers: Status | NixlKVError, request: str | None = None
) -> list[str]:
    """The lines with text, without the spaces between columns."""
    engine = description(len(answers))
    print_status(engine, list(zip(engine.ranks, answers, strict=True)), request)
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if any(c.isalnum() for c in line)]


LISTS: Final[dict[str, Any]] = {
    "peers": [
        {
            "engine": "P",
            "incarnation": "0123abcd",
            "endpoint": "tcp://10.0.0.2:5600",
            "state": "BACKOFF",
            "detail": "cannot connect",
        },
    ],
    "links": [{"endpoint": "tcp://10.0.0.2:40", "sent": 1200, "received": 7, "idle_s": 0.25}],
    "offers": [
        {
            "request": "p1",
            "nonce": "89abcdef",
            "num_tokens": 16_384,
            "state": "PREPARED",
            "waits_for": "its ticket",
            "ends_in_s": None,
        },
        {
            "request": "p2",
            "nonce": "12345678",
            "num_tokens": 16,
            "state": "OFFERED",
            "waits_for": "somebody to ask",
            "ends_in_s": 9.5,
        },
    ],
    "loads": [
        {
            "request": "d1",
            "nonce": "0f0f0f0f",
            "peer": "engine 'P' at tcp://10.0.0.2:5600",
            "reads": [[0, "READING"], [3, "DONE"]],
            "waits_for": "data",
            "late_in_s": -90.0,
        },
    ],
}


def test_each_list_is_a_table_of_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, rank_status(**LISTS)) == [
        "engine E, TP1, PP1, 1,000 blocks of 16 tokens in VRAM",
        (
            "rank 0 at tcp://10.0.0.1:1: prefill and decode; up for 1 h 2 min; "
            "peers 1, links 1, offers 2, loads 1"
        ),
        "peers:",
        "engine incarnation endpoint state detail",
        "P 0123abcd tcp://10.0.0.2:5600 BACKOFF cannot connect",
        "links:",
        "endpoint sent received idle",
        "tcp://10.0.0.2:40 1,200 7 0.25 s",
        "offers:",
        "request nonce tokens state waits for ends in",
        "p1 89abcdef 16,384 PREPARED its ticket no limit",
        "p2 12345678 16 OFFERED somebody to ask 9.5 s",
        "loads:",
        "request nonce peer reads waits for late in",
        "d1 0f0f0f0f engine 'P' at tcp://10.0.0.2:5600 0 READING, 3 DONE data 1 min 30 s ago",
    ]


def test_a_list_and_a_key_that_this_release_does_not_know_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The record is open: a newer engine may send more keys than this tool knows."""
    lists: dict[str, Any] = {"ring": [{"slot": 3, "held_s": 0.5}, {"slot": 4, "by": "d1"}]}
    assert printed(capsys, rank_status(**lists))[2:] == [
        "ring:",
        "slot held by",
        "3 0.5 s",
        "4 d1",
    ]


def test_a_record_without_the_known_keys_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    story = [{}, {"time": "noon", "num_bytes": "many"}]
    status = msgspec.structs.replace(rank_status(), facts={}, totals={}, lists={"story": story})
    lines = printed(capsys, status, request="d")
    assert lines[2] == "2 events of requests whose id contains 'd'"


def test_rank_without_status_is_named_between_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, rank_status(0), TransportError("cannot connect"), request="d")
    assert lines[2] == "rank 1 at tcp://10.0.0.1:2 gives no status: cannot connect"
    assert lines[3].startswith("0 events of requests")


def test_longer_lists_say_how_many_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "MAX_LISTED", 3)
    status = rank_status(links=LISTS["links"] * 3)
    status.totals["links"] = 1234
    assert printed(capsys, status)[2] == "links (the first 3 of 1,234):"


def test_story_is_in_time_order_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    first = rank_status(
        0,
        events_since=T0 - 20,
        story=[
            event(0, "d1", "PREPARED", peer="engine 'P' at x", cause="PrepareLoad"),
            event(0.5, "d1", "DONE", before="READING", cause="ReadDone", num_bytes=3 << 20),
        ],
    )
    second = rank_status(
        1, events_since=T0 - 10, story=[event(0.25, "", "GONE", before="READY", peer="x")]
    )
    lines = printed(capsys, first, second, request="d")
    assert lines[3:] == [
        (
            "3 events of requests whose id contains 'd'; "
            "events are kept since 2023-11-14 22:13:10.000+00:00"
        ),
        "time after rank request peer states cause bytes",
        "2023-11-14 22:13:20.000+00:00 0.000 s 0 d1 engine 'P' at x PREPARED PrepareLoad",
        "2023-11-14 22:13:20.250+00:00 0.250 s 1 x READY -> GONE",
        "2023-11-14 22:13:20.500+00:00 0.250 s 0 d1 READING -> DONE ReadDone 3 MiB",
    ]


def test_story_without_events_says_where_else_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, rank_status(events_since=None), request="d\x1b")[2:] == [
        r"0 events of requests whose id contains 'd\x1b'",
        (
            "Either the events were dropped as too old, or the engine started no transfer: then "
            "its log says why it refused the ticket."
        ),
    ]


def test_no_text_can_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of lists, keys, ids, and values of any type are escaped."""
    lists: dict[str, Any] = {"li\x1bst": [{"ke\x1by": "te\x1bxt", "more": [["\x1b"]]}]}
    status = msgspec.structs.replace(rank_status(), facts={"roles": "\x1b"}, lists=lists)
    print_status(description(), [(description().ranks[0], status)], None)
    assert "\x1b" not in capsys.readouterr().out
    story = [event(0, "d\x1b[2J[red]:smile:\n", "PREPARED")]
    shown = printed(capsys, rank_status(story=story), request="d")
    assert r"d\x1b[2J[red]:smile:\n" in shown[-1]


def test_json_has_all_keys() -> None:
    engine = description(2)
    status = rank_status(0, **LISTS, story=[event(0, "d1", "PREPARED")])
    answers: list[RankAnswer] = [
        (engine.ranks[0], status),
        (engine.ranks[1], TransportError("cannot connect")),
    ]
    record = json.loads(json.dumps(status_as_json(engine, answers)))
    first, second = record.pop("ranks")
    assert record == {
        "engine": "E",
        "incarnation": engine.incarnation,
        "model": {"model": "m"},
        "extras": {},
        "tp": 2,
        "pp": 1,
    }
    assert first == {
        "rank": 0,
        "endpoint": "tcp://10.0.0.1:1",
        "incarnation": "0" * 32,
        "totals": {"peers": 1, "links": 1, "offers": 2, "loads": 1},
        **status.facts,
        **LISTS,
        "story": [event(0, "d1", "PREPARED")],
    }
    assert second == {"rank": 1, "endpoint": "tcp://10.0.0.1:2", "error": "cannot connect"}


def test_durations_and_bytes_are_short() -> None:
    seconds = (0.00001, 0.0125, 12.345, 59.4, 59.6, 125, 3600, 4_000_000)
    assert [duration_text(each) for each in seconds] == [
        *("0 s", "0.013 s", "12.3 s", "59.4 s"),
        *("1 min 0 s", "2 min 5 s", "1 h 0 min", "1,111 h 6 min"),
    ]
    counts = (0, 0.5, 1023, 1024, 1536, 1179648, 2**30, 2**50)
    assert [num_bytes_text(each) for each in counts] == [
        *("0 B", "0.5 B", "1023 B", "1 KiB"),
        *("1.5 KiB", "1.12 MiB", "1 GiB", "1,024.00 TiB"),
    ]


@pytest.mark.parametrize("_time_zone", ["CET-1"], indirect=True)
def test_time_is_local_and_has_milliseconds() -> None:
    assert time_text(1_700_000_000.1234) == "2023-11-14 23:13:20.123+01:00"
