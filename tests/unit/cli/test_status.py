"""`nixl-kv status` prints the answers of an engine's ranks."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pytest

from harness.local.model_layouts import EngineShape
from nixl_kv.cli import status as status_module
from nixl_kv.cli.client import EngineAnswer
from nixl_kv.cli.status import print_status, status_as_json
from nixl_kv.cli.tables import duration_text, num_bytes_text, open_console
from nixl_kv.errors import NixlKVError, TransportError
from nixl_kv.ids import Incarnation
from nixl_kv.protocol.messages import Description, Status
from support.nixl_kv_command import described

T0: Final = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _time_zone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "CET-1")
        patch.delenv("COLUMNS", raising=False)
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
            "failures_span_s": 300.0 - rank,
        },
        totals={name: len(lists[name]) for name in ("peers", "links", "offers", "loads")},
        lists=lists,
    )


def engine_status(
    draining_s: float | None = None, weights: str = "", **lists: list[dict[str, Any]]
) -> Status:
    facts: dict[str, Any] = {"engine": "E", "version": "0.1.0", "uptime_s": 60.0}
    return Status(
        incarnation=Incarnation("0" * 32),
        facts={**facts, "draining_s": draining_s, "num_awaited": 2, "weights": weights},
        totals={"ranks": 1},
        lists=lists,
    )


def answered(
    *answers: Status | NixlKVError, engine: Status | NixlKVError | None = None, name: str = "E"
) -> EngineAnswer:
    described_as = msgspec.structs.replace(description(len(answers)), engine=name)
    ranks = list(zip(described_as.ranks, answers, strict=True))
    return EngineAnswer("10.0.0.1:5600", described_as, engine or engine_status(), ranks)


def failure(peer: str, reason: str, num_loads: int) -> dict[str, Any]:
    latest = {"latest_ago_s": 70.0, "requests": ["d2", "d1"], "detail": "why"}
    return {"peer": peer, "reason": reason, "num_loads": num_loads, **latest}


def event(seconds: float, request: str, after: str, **fields: Any) -> dict[str, Any]:
    given = {"peer": "", "before": "", "cause": "", "num_bytes": 0, **fields}
    return {"time": T0 + seconds, "request": request, "after": after, **given}


def printed(
    capsys: pytest.CaptureFixture[str],
    *answers: Status | NixlKVError,
    request: str | None = None,
    **engine: Any,
) -> list[str]:
    """The lines with text, without the spaces between columns."""
    print_status(open_console(), answered(*answers, **engine), request)
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if any(c.isalnum() for c in line)]


def records(names: str, *rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


PEER: Final = "tcp://10.0.0.2:5600"
LISTS: Final[dict[str, Any]] = {
    "peers": records(
        "engine incarnation endpoint state detail",
        ("P", "0123abcd", PEER, "UNUSABLE", "cannot connect"),
    ),
    "links": records(
        "endpoint sent received idle_s",
        ("tcp://10.0.0.2:40", 1200, 7, 0.25),
    ),
    "offers": records(
        "request nonce num_tokens state waits_for ends_in_s",
        ("p1", "89abcdef", 16_384, "PREPARED", "its ticket", None),
        ("p2", "12345678", 16, "OFFERED", "a reader to ask", 9.5),
    ),
    "loads": records(
        "request nonce peer reads waits_for late_in_s",
        ("d1", "0f0f0f0f", f"engine 'P' at {PEER}", [[0, "READING"], [3, "DONE"]], "data", -90.0),
    ),
}


UP = "nixl_kv 0.1.0; up for 1 min 0 s"
RANK_0 = "rank 0 at tcp://10.0.0.1:1: prefill and decode; up for 1 h 2 min; "


def test_each_list_is_a_table_of_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, rank_status(**LISTS)) == [
        "engine E, TP1, PP1, 1,000 blocks of 16 tokens in VRAM",
        UP,
        f"{RANK_0}peers 1, links 1, offers 2, loads 1",
        "peers:",
        "engine incarnation endpoint state",
        "P 0123abcd 10.0.0.2:5600 UNUSABLE",
        "P: cannot connect",
        "links:",
        "endpoint sent received idle",
        "10.0.0.2:40 1,200 7 0.25 s",
        "offers:",
        "request nonce tokens state waits for ends in",
        "p1 89abcdef 16,384 PREPARED its ticket no limit",
        "p2 12345678 16 OFFERED a reader to ask 9.5 s",
        "loads:",
        "request nonce peer reads waits for late in",
        "d1 0f0f0f0f engine 'P' at 10.0.0.2:5600 0 READING, 3 DONE data 1 min 30 s ago",
    ]


def test_a_drained_engine_looks_drained_and_one_without_a_status_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, rank_status(), engine=engine_status(75.0, "step 8"))
    assert lines[1] == f"{UP}; weights 'step 8'"
    assert lines[2].startswith("DRAINING for 1 min 15 s: it offers no new request, ")
    assert "; 2 earlier requests are not offered yet; " in lines[2]
    lines = printed(capsys, rank_status(), engine=TransportError("no answer within 5 s"))
    assert lines[1] == "the engine gives no status: no answer within 5 s"


def test_failures_of_all_ranks_are_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has a share of each load. One of them sees less of the past."""
    ranks = [rank_status(n, failures=[failure("P", "late", 3 + n)]) for n in range(2)]
    ranks[0].lists["failures"].append(failure("P", "denied", 9))
    assert printed(capsys, *ranks)[2:8] == [
        "loads that failed in the last 4 min 59 s:",
        "peer reason loads latest requests",
        "P denied 9 1 min 10 s ago d2, d1",
        "P late 4 1 min 10 s ago d2, d1",
        "P, denied: why",
        "P, late: why",
    ]


def test_a_generated_engine_id_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that the operator chose stays; a request id is never cut."""
    uuid = "f746cb10-9c5e-4b55-9a39-0d4e4f0c8a11"
    lists: dict[str, Any] = {
        "peers": [{"engine": uuid}, {"engine": "prefill-0"}],
        "offers": [{"request": uuid}],
    }
    lines = printed(capsys, rank_status(**lists), name=uuid)
    assert lines[0].startswith(f"engine {uuid}, ")
    assert lines[2] == "to give it a name, set engine_id in its --kv-transfer-config"
    assert (lines[6:8], lines[-1]) == (["f746cb10", "prefill-0"], uuid)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Cells are cut, but no figure is lost, and each record stays one line or one column."""
    monkeypatch.setenv("COLUMNS", str(columns))
    peer = {"engine": "prefill-0-of-the-second-pool" * 4}
    lists = {**LISTS, "peers": [{**LISTS["peers"][0], **peer}]}
    story = [event(0, "d" * 90, "READING", before="GRANTED", peer="x" * 90, cause="y" * 90)]
    print_status(open_console(), answered(rank_status(**lists, story=story)), "d")
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if line.startswith(" ") and line != "  " + line.lstrip()]
    assert max(map(len, tables)) <= columns
    assert sum("…" in line for line in tables) >= 2
    shown = "\n".join(lines)
    for whole in ("16,384", "1,200", "9.5 s", "UNUSABLE", "GRANTED -> READING"):
        assert whole in shown


def test_fields_unknown_to_this_release_are_shown_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The record is open: a newer engine may send other keys and lists. Pipes have no width."""
    detail = "cannot connect " * 30
    lists: dict[str, Any] = {
        "peers": [{"engine": "P", "detail": detail}],
        "ring": [{"slot": 3, "held_s": 0.5}, {"slot": 4, "by": "d1"}],
        "story": [{}, {"time": "noon", "num_bytes": "many"}],
    }
    status = msgspec.structs.replace(rank_status(), facts={}, totals={}, lists=lists)
    assert printed(capsys, status)[3:] == [
        *("peers:", "engine", "P", f"P: {detail}".strip()),
        *("ring:", "slot held by", "3 0.5 s", "4 d1"),
    ]
    lines = printed(capsys, status, request="d")
    assert "2 events of requests whose id contains 'd'" in lines


def test_rank_without_status_is_named_between_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, rank_status(0), TransportError("cannot connect"), request="d")
    assert lines[3] == "rank 1 at tcp://10.0.0.1:2 gives no status: cannot connect"
    assert lines[4].startswith("0 events of requests")


def test_longer_lists_say_how_many_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "MAX_LISTED", 3)
    status = rank_status(links=LISTS["links"] * 3)
    status.totals["links"] = 1234
    assert printed(capsys, status)[3] == "links (the first 3 of 1,234):"


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
        1, events_since=T0 - 10, story=[event(0.25, "", "UNUSABLE", before="READY", peer="x")]
    )
    lines = printed(capsys, first, second, request="d")
    assert lines[4:] == [
        (
            "3 events of requests whose id contains 'd'; "
            "events are kept since 2023-11-14 23:13:10.000+01:00"
        ),
        "request d1",
        "on 2023-11-14, in local time:",
        "time after rank states cause peer",
        "23:13:20.000 0.000 s 0 PREPARED PrepareLoad engine 'P' at x",
        "23:13:20.250 0.250 s 1 READY -> UNUSABLE x",
        "23:13:20.500 0.250 s 0 READING -> DONE ReadDone, 3 MiB",
    ]


def test_story_without_events_says_where_else_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, rank_status(events_since=None), request="d\x1b")[3:] == [
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
    lists["failures"] = [failure("\x1b", "\x1b", 1)]
    engine = engine_status(weights="\x1b")
    print_status(open_console(), answered(status, engine=engine), None)
    assert "\x1b" not in capsys.readouterr().out
    story = [event(n, f"d\x1b[2J[red]:smile:\n{n}", "PREPARED") for n in range(2)]
    shown = printed(capsys, rank_status(story=story), request="d")
    assert r"d\x1b[2J[red]:smile:\n" in shown[-1]


def test_json_has_all_keys() -> None:
    status = rank_status(0, **LISTS, story=[event(0, "d1", "PREPARED")])
    answer = answered(status, TransportError("cannot connect"), engine=engine_status(5.0))
    record = json.loads(json.dumps(status_as_json(answer)))
    first, second = record.pop("ranks")
    assert record == {
        "engine": "E",
        "incarnation": answer.description.incarnation,
        "model": {"model": "m"},
        "extras": {},
        "tp": 2,
        "pp": 1,
        "status": engine_status(5.0).facts,
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
