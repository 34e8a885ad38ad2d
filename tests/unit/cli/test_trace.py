"""`nixl-kv trace` turns event logs into Chrome trace events."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from harness.local.model_layouts import EngineShape
from nixl_kv.cli import client
from nixl_kv.cli.trace import subjects, trace_events
from nixl_kv.engine.event_log import EVERY_REQUEST, EventLog
from nixl_kv.errors import TransportError
from nixl_kv.ids import Incarnation
from nixl_kv.protocol.events import Transition
from nixl_kv.protocol.messages import Status
from support.nixl_kv_command import described, nixl_kv
from support.records import read_done
from support.scripts import READING, decode_machine, play

Event = dict[str, Any]

ENGINE, RANK = "engine 'P' at tcp://10.0.0.2:5600", "rank 0 at tcp://10.0.0.2:7000"
READER = "engine 'D', rank 0"


def story(*transitions: tuple[str, str, str, str]) -> list[Event]:
    """Transitions of (request, peer, before, after), one second apart."""
    return [
        {
            "time": 100.0 + second,
            **Transition("", "", *transition, cause=f"cause {second}")._asdict(),
        }
        for second, transition in enumerate(transitions)
    ]


LOAD = story(
    ("", ENGINE, "", "CONNECTING"),
    ("d1", ENGINE, "", "PREPARED"),
    ("d1", RANK, "", "ASKING"),
    ("", ENGINE, "CONNECTING", "READY"),
    ("d1", RANK, "ASKING", "GRANTED"),
    ("d1", ENGINE, "PREPARED", "STARTED"),
    ("d1", RANK, "GRANTED", "DONE"),
    ("d1", ENGINE, "STARTED", "LOADED"),
)


def traced(*stories: list[Event]) -> list[tuple[str, str, str, float, float | None]]:
    """Process, track, name, begin and duration (None: an instant), in seconds after 100."""
    events = list(trace_events({f"rank {n}": story for n, story in enumerate(stories)}))
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    return [
        (
            names["process_name", event["pid"], None],
            names["thread_name", event["pid"], event["tid"]],
            event["name"],
            event["ts"] / 1e6 - 100,
            event["dur"] / 1e6 if event["ph"] == "X" else None,
        )
        for event in events
        if event["ph"] != "M"
    ]


def test_each_peer_and_each_rank_is_a_track_and_each_state_a_slice() -> None:
    """A state that goes on lasts until the last event of the file."""
    assert traced(LOAD) == [
        ("rank 0", ENGINE, "CONNECTING", 0, 3),
        ("rank 0", ENGINE, "READY", 3, 4),
        ("rank 0", ENGINE, "PREPARED", 1, 4),
        ("rank 0", ENGINE, "STARTED", 5, 2),
        ("rank 0", ENGINE, "LOADED", 7, None),
        ("rank 0", RANK, "ASKING", 2, 2),
        ("rank 0", RANK, "GRANTED", 4, 2),
        ("rank 0", RANK, "DONE", 6, None),
    ]


def test_an_offer_stays_on_its_track_when_a_reader_is_named() -> None:
    offer = story(
        ("p1", "", "", "PREPARED"),
        ("p1", "", "PREPARED", "OFFERED"),
        ("p1", READER, "OFFERED", "GRANTED"),
        ("p1", "", "GRANTED", "READING"),
        ("p1", "engine 'D'", "READING", "OVER"),
    )
    assert [(track, name) for _, track, name, _, _ in traced(offer)] == [
        ("offers", name) for name in ("PREPARED", "OFFERED", "GRANTED", "READING", "OVER")
    ]


def test_slices_of_one_thread_never_overlap() -> None:
    """Perfetto drops such slices. A thread whose request has ended is used again."""
    names = ("d1", "d2", "d3")
    overlapping = story(
        ("d1", RANK, "", "ASKING"),
        ("d2", RANK, "", "ASKING"),
        ("d1", RANK, "ASKING", "DONE"),
        ("d3", RANK, "", "ASKING"),
        *[(name, RANK, "ASKING", "DONE") for name in names[1:]],
    )
    events = trace_events({"rank 0": overlapping})
    assert [event["tid"] for event in events if event["ph"] != "M"] == [1, 1, 2, 2, 1, 1]


def test_a_log_that_begins_in_the_middle_is_shown_from_there_on() -> None:
    assert [name for _, _, name, _, _ in traced(LOAD[4:])] == [
        "GRANTED",
        "DONE",
        "STARTED",
        "LOADED",
    ]


def test_ranks_share_one_time() -> None:
    late = [{**event, "time": event["time"] + 10} for event in LOAD]
    ready = [row for row in traced(LOAD, late) if row[2] == "READY"]
    assert ready == [("rank 0", ENGINE, "READY", 3, 14), ("rank 1", ENGINE, "READY", 13, 4)]


def test_a_load_of_the_machine_is_three_subjects() -> None:
    log = EventLog(itertools.count(100.0).__next__)
    machine = decode_machine(log.record)
    play(machine, READING)
    machine.handle(read_done(), 111.0)
    own = [{"time": time, **event._asdict()} for time, event in log.story(EVERY_REQUEST)]
    assert [[event["after"] for event in subject] for subject in subjects(own)] == [
        ["PREPARED", "STARTED", "LOADED"],
        ["CONNECTING", "HANDSHAKING", "READY"],
        ["ASKING", "GRANTED", "READING", "DONE"],
    ]


def test_every_request_means_the_last_events_of_all_subjects() -> None:
    log = EventLog()
    transitions = [
        Transition("", "", request, peer, "", "A", "")
        for request, peer in (("", ENGINE), ("d1", RANK), ("d2", RANK))
    ]
    for transition in transitions:
        log.record(transition)
    assert [event for _, event in log.story(EVERY_REQUEST)] == transitions
    assert [event for _, event in log.story(EVERY_REQUEST, limit=2)] == transitions[1:]


# --- the command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that ranks are asked for; the second rank is silent for one of them."""
    requests: list[str] = []
    engine = described(EngineShape(tp=2, num_blocks=9), name="E")
    nothing: dict[str, Any] = {"incarnation": Incarnation("0" * 32), "facts": {}, "totals": {}}
    status = Status(**nothing, lists={"story": LOAD})

    def statuses(_engine: object, _keys: object, request: str) -> list[Any]:
        requests.append(request)
        answers = [status, TransportError("no answer")] if request == "silent" else [status]
        return list(zip(engine.ranks, answers, strict=False))

    monkeypatch.setattr(client, "describe_at", lambda *_: engine)
    monkeypatch.setattr(client, "rank_statuses", statuses)
    return requests


def test_the_events_of_all_requests_are_written(asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = nixl_kv(f"trace --insecure --at 10.0.0.1:5600 --out {out}")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"{out} has 8 events of 1 ranks (up to 1,000 each); open it at https://ui.perfetto.dev\n"
    )
    assert asked == ["*"]
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    assert events == json.loads(json.dumps(list(trace_events({"engine E, rank 0": LOAD}))))


def test_a_silent_rank_costs_its_events_alone(asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = nixl_kv(f"trace --insecure --at 10.0.0.1:5600 --request silent --out {out}")
    assert result.exit_code == 1
    assert result.stderr == "engine E, rank 1 at 10.0.0.1:5600 gives no events: no answer\n"
    assert asked == ["silent"]
    assert out.exists()


@pytest.mark.usefixtures("asked")
def test_a_file_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "trace.json"
    result = nixl_kv(f"trace --insecure --at 10.0.0.1:5600 --out {out}")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: --out is '{out}': No such file or directory; allowed: a new file\n"
    )
