"""What `nixl-kv status` prints of the answers of an engine's ranks."""

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from nixl_kv.cli.running import RankAnswer
from nixl_kv.cli.status_report import print_status, status_as_json
from nixl_kv.engine.directory import describe_engine
from nixl_kv.errors import NixlKVError, TransportError
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.geometry.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.ids import Endpoint, EngineId, Incarnation
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import (
    Description,
    EventRecord,
    LinkStatus,
    LoadStatus,
    OfferStatus,
    PeerStatus,
    RankDescription,
    Slots,
    Status,
)

T0: Final = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def description(num_ranks: int = 1) -> Description:
    shape = EngineShape(tp=num_ranks, num_blocks=1000)
    ranks = [
        RankDescription(
            incarnation=Incarnation(f"{number:032x}"),
            endpoint=Endpoint(f"tcp://10.0.0.1:{number + 1}"),
            agent=b"",
            slots=Slots(address=4096, count=8),
            layout=layout,
        )
        for number, layout in enumerate(build_layouts(ModelShape(2, 2, (8, 8), "bfloat16"), shape))
    ]
    return describe_engine(EngineId("E"), {"model": "m"}, ParallelShape(num_ranks, 1), ranks)


def rank_status(rank: int = 0, **fields: Any) -> Status:
    empty: dict[str, Any] = dict.fromkeys(("peers", "links", "offers", "loads", "story"), ())
    lists = {**empty, **fields}
    return Status(
        incarnation=Incarnation(f"{rank:032x}"),
        engine="E",
        rank=rank,
        roles="prefill and decode",
        uptime_s=3725.0,
        totals={name: len(lists[name]) for name in ("peers", "links", "offers", "loads")},
        events_since=lists.pop("events_since", T0),
        **lists,
    )


def event(seconds: float, request: str, after: str, **fields: Any) -> EventRecord:
    given = {"peer": "", "before": "", "cause": "", "num_bytes": 0, **fields}
    return EventRecord(time=T0 + seconds, request=request, after=after, **given)


def printed(
    capsys: pytest.CaptureFixture[str], *answers: Status | NixlKVError, request: str | None = None
) -> list[str]:
    """The lines that have words, without the spaces between columns."""
    described = description(len(answers))
    print_status(described, list(zip(described.ranks, answers, strict=True)), request)
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if any(c.isalnum() for c in line)]


LISTS: Final[dict[str, Any]] = {
    "peers": (
        PeerStatus(
            engine="P",
            incarnation="0123abcd",
            endpoint="tcp://10.0.0.2:5600",
            state="BACKOFF",
            detail="cannot connect",
        ),
    ),
    "links": (LinkStatus(endpoint="tcp://10.0.0.2:40", sent=1200, received=7, idle_s=0.25),),
    "offers": (
        OfferStatus(
            request="p1",
            nonce="89abcdef",
            state="PREPARED",
            num_tokens=16_384,
            waits_for="its ticket",
            ends_in_s=None,
        ),
        OfferStatus(
            request="p2",
            nonce="12345678",
            state="OFFERED",
            num_tokens=16,
            waits_for="somebody to ask",
            ends_in_s=9.5,
        ),
    ),
    "loads": (
        LoadStatus(
            request="d1",
            nonce="0f0f0f0f",
            peer="engine 'P' at tcp://10.0.0.2:5600",
            reads=((0, "READING"), (3, "DONE")),
            waits_for="data",
            late_in_s=-90.0,
        ),
    ),
}


def test_each_list_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, rank_status(**LISTS)) == [
        "engine E, TP1, PP1, 1,000 blocks of 16 tokens in VRAM",
        (
            "rank 0 at tcp://10.0.0.1:1: prefill and decode; up for 1 h 2 min; "
            "peers 1, links 1, offers 2, loads 1"
        ),
        "peer incarnation at state why",
        "P 0123abcd tcp://10.0.0.2:5600 BACKOFF cannot connect",
        "link to messages sent received idle for",
        "tcp://10.0.0.2:40 1,200 7 0.25 s",
        "offer of request nonce tokens state waits for ends in",
        "p1 89abcdef 16,384 PREPARED its ticket no limit",
        "p2 12345678 16 OFFERED somebody to ask 9.5 s",
        "load of request nonce from prefill ranks waits for late in",
        "d1 0f0f0f0f engine 'P' at tcp://10.0.0.2:5600 0 READING, 3 DONE data 1 min 30 s ago",
    ]


def test_idle_rank_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, rank_status())[1:] == [
        (
            "rank 0 at tcp://10.0.0.1:1: prefill and decode; up for 1 h 2 min; "
            "peers 0, links 0, offers 0, loads 0"
        )
    ]


def test_rank_without_status_is_named_between_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, rank_status(0), TransportError("cannot connect"), request="d")
    assert lines[2] == "rank 1 at tcp://10.0.0.1:2 gives no status: cannot connect"
    assert lines[3].startswith("0 events of requests")


def test_longer_lists_say_how_many_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_LISTED", 3)
    status = rank_status(links=LISTS["links"] * 3)
    status.totals["links"] = 1234
    assert printed(capsys, status)[-1] == "(the first 3 of 1,234 links)"


def test_story_is_in_time_order_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    first = rank_status(
        0,
        events_since=T0 - 20,
        story=(
            event(0, "d1", "PREPARED", peer="engine 'P' at x", cause="PrepareLoad"),
            event(0.5, "d1", "CHECKING", before="READING", cause="ReadDone", num_bytes=3 << 20),
        ),
    )
    second = rank_status(
        1, events_since=T0 - 10, story=(event(0.25, "", "GONE", before="READY", peer="x"),)
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
        "2023-11-14 22:13:20.500+00:00 0.250 s 0 d1 READING -> CHECKING ReadDone 3 MiB",
    ]


def test_story_without_events_says_where_else_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, rank_status(events_since=None), request="d\x1b")[2:] == [
        r"0 events of requests whose id contains 'd\x1b'",
        (
            "Either they are older, or no transfer was started: "
            "the engine's log says why a ticket was refused."
        ),
    ]


def test_no_rank_answers_and_no_story_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, TransportError("cannot connect"), request="d")
    assert lines[2:] == ["0 events of requests whose id contains 'd'"]


def test_ids_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    story = (event(0, "d\x1b[2J[red]:smile:\n", "PREPARED"),)
    lines = printed(capsys, rank_status(story=story), request="d")
    assert r"d\x1b[2J[red]:smile:\n" in lines[-1]


def test_json_has_all_fields_by_name() -> None:
    described = description(2)
    status = rank_status(0, **LISTS, story=(event(0, "d1", "PREPARED"),))
    answers: list[RankAnswer] = [
        (described.ranks[0], status),
        (described.ranks[1], TransportError("cannot connect")),
    ]
    record = json.loads(json.dumps(status_as_json(described, answers)))
    first, second = record.pop("ranks")
    assert record == {
        "engine": "E",
        "incarnation": described.incarnation,
        "model": {"model": "m"},
        "extras": {},
        "tp": 2,
        "pp": 1,
    }
    assert set(first) == {*Status.__struct_fields__, "endpoint"}
    for name, record_type in (
        ("peers", PeerStatus),
        ("links", LinkStatus),
        ("offers", OfferStatus),
        ("loads", LoadStatus),
        ("story", EventRecord),
    ):
        assert set(first[name][0]) == set(record_type.__struct_fields__)
    assert first["loads"][0]["reads"] == [[0, "READING"], [3, "DONE"]]
    assert second == {"rank": 1, "endpoint": "tcp://10.0.0.1:2", "error": "cannot connect"}
