"""Prints the status of a running engine, for people or as JSON.

A status is an open record (`protocol.messages.Status`): each of its lists becomes a table, and the
keys of the records become columns. A key that `engine/status.py` adds shows up here by itself.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final, TypeAlias

from rich.console import Console

from nixl_kv.cli.client import EngineAnswer
from nixl_kv.cli.tables import duration_text, num_bytes_text, print_line, print_table
from nixl_kv.errors import printable
from nixl_kv.protocol.messages import MAX_LISTED, Description, Status

Record: TypeAlias = Mapping[str, Any]

STORY: Final = "story"
"""The list with the events of the requests that were asked for."""

FAILURES: Final = "failures"
"""The list of a rank's loads that failed, by peer and reason."""

# vLLM generates such an engine id if the operator sets none.
UUID: Final = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
DETAIL: Final = "detail"
OF_ENGINES: Final = frozenset({"engine", "peer", "endpoint", "detail", "waits_for"})


def print_status(console: Console, answer: EngineAnswer, request: str | None) -> None:
    """Print the answers of an engine and its ranks.

    If `request`, a part of a request id, is not None, the matching events follow.
    """
    print_line(console, f"engine {engine_text(answer.description)}")
    for line in _state_lines(answer):
        print_line(console, line)
    failures, span_s = recent_failures(answer)
    if failures:
        print_line(console, f"loads that failed in the last {duration_text(span_s)}:")
        _print_records(console, failures)
    for number, (rank, status) in enumerate(answer.ranks):
        console.print()
        start = f"rank {number} at {rank.endpoint}"
        if not isinstance(status, Status):
            print_line(console, f"{start} gives no status: {status}")
            continue
        totals = ", ".join(f"{name} {count:,}" for name, count in status.totals.items())
        uptime = _cell_text("uptime_s", status.facts.get("uptime_s"))
        print_line(console, f"{start}: {status.facts.get('roles')}; up for {uptime}; {totals}")
        if process := "; ".join(_process_texts(status.facts)):
            print_line(console, process)
        _print_lists(console, status)
    if request is not None:
        console.print()
        _print_story(console, answer, request)


def status_as_json(answer: EngineAnswer) -> Record:
    """All fields. An engine or a rank that gave no status has the key `error` instead."""
    ranks: list[Record] = []
    for number, (rank, status) in enumerate(answer.ranks):
        if isinstance(status, Status):
            own = {"incarnation": status.incarnation, "totals": status.totals}
            fields = {**own, **status.facts, **status.lists}
        else:
            fields = {"error": str(status)}
        ranks.append({**fields, "rank": number, "endpoint": rank.endpoint})
    description, own_status = answer.description, answer.status
    state: Record = {"error": str(own_status)}
    if isinstance(own_status, Status):
        state = {**own_status.facts, **own_status.lists}
    return {
        "engine": description.engine,
        "incarnation": description.incarnation,
        "model": description.model,
        "extras": description.extras,
        "tp": description.shape.tp,
        "pp": description.shape.pp,
        "status": state,
        "ranks": ranks,
    }


def _state_lines(answer: EngineAnswer) -> Iterable[str]:
    status = answer.status
    if not isinstance(status, Status):
        yield f"the engine gives no status: {status}"
        return
    facts = status.facts
    weights = f"; weights {facts.get('weights')!r}" if facts.get("weights") else ""
    uptime = _cell_text("uptime_s", facts.get("uptime_s"))
    yield f"nixl_kv {facts.get('version')}; up for {uptime}{weights}"
    draining_s = facts.get("draining_s")
    if draining_s is not None:
        yield (
            f"DRAINING for {_cell_text('draining_s', draining_s)}: it offers no new request, so "
            f"decode computes them; {facts.get('num_awaited')} earlier requests are not offered "
            "yet; `nixl-kv drain --undo` ends this"
        )
    if UUID.fullmatch(answer.description.engine):
        yield "to give it a name, set engine_id in its --kv-transfer-config"


def _process_texts(facts: Record) -> Iterable[str]:
    """Limits and settings of a rank's process."""
    if "num_descriptors" in facts:
        most = facts.get("max_descriptors")
        limit = "without a limit" if most is None else f"of {most:,}"
        yield f"file descriptors: {facts['num_descriptors']:,} {limit}"
        yield str(facts.get("ucx_settings") or "no UCX_ variables")
    if facts.get("unreadable"):
        yield f"{facts['unreadable']}"
    if facts.get("blocks_waited_s"):
        waited = _cell_text("blocks_waited_s", facts["blocks_waited_s"])
        yield f"a load has waited {waited} for local blocks"


def recent_failures(answer: EngineAnswer) -> tuple[list[Record], float]:
    """An engine's loads that failed, most frequent kind first, and of how many last seconds.

    Each rank has a share of each load, so the ranks' counts do not add up: the largest counts.
    """
    found: dict[tuple[str, str], Record] = {}
    statuses = [status for _, status in answer.ranks if isinstance(status, Status)]
    for record in itertools.chain(*(status.lists.get(FAILURES, ()) for status in statuses)):
        kind = str(record.get("peer")), str(record.get("reason"))
        if kind not in found or _number(found[kind]) < _number(record):
            found[kind] = record
    span_s = min((_number(each.facts, "failures_span_s") for each in statuses), default=0.0)
    return sorted(found.values(), key=_number, reverse=True), span_s


def _number(record: Record, key: str = "num_loads") -> float:
    number = record.get(key)
    return float(number) if isinstance(number, int | float) else 0.0


def _print_lists(console: Console, status: Status) -> None:
    for name, records in status.lists.items():
        if name in (STORY, FAILURES) or not records:
            continue
        total = status.totals.get(name, 0)
        bound = f" (the first {MAX_LISTED:,} of {total:,})" if total > MAX_LISTED else ""
        print_line(console, f"{name}{bound}:")
        _print_records(console, records)


def _print_records(console: Console, records: Sequence[Record]) -> None:
    """A table, and below it the records' details, which are too long for a column."""
    keys = list(dict.fromkeys(key for record in records for key in record if key != DETAIL))
    rows = ([_cell_text(key, record.get(key)) for key in keys] for record in records)
    print_table(console, map(_heading, keys), rows)
    for record in records:
        if detail := _cell_text(DETAIL, record.get(DETAIL)):
            names = (_cell_text(key, record.get(key)) for key in ("engine", "peer", "reason"))
            print_line(console, f"  {', '.join(filter(None, names))}: {detail}")


def _print_story(console: Console, answer: EngineAnswer, request: str) -> None:
    statuses = [status for _, status in answer.ranks if isinstance(status, Status)]
    events = [
        {**event, "rank": status.facts.get("rank")}
        for status in statuses
        for event in status.lists.get(STORY, ())
    ]
    events.sort(key=_time)
    kept_since = max((_number(status.facts, "events_since") for status in statuses), default=0.0)
    line = f"{len(events):,} events of requests whose id contains {request!r}"
    if kept_since:
        line += f"; events are kept since {time_text(kept_since)}"
    print_line(console, line)
    if statuses and not events:
        print_line(
            console,
            "Either the events were dropped as too old, or the engine started no transfer: then "
            "its log says why it refused the ticket.",
        )
    requests = {str(event.get("request")) for event in events} - {""}
    if events:
        days = {time_text(_time(event))[:10] for event in events}
        pairs = zip(events, [events[0], *events], strict=False)
        rows = [_event_row(event, _time(before), is_long=len(days) > 1) for event, before in pairs]
        left_out = {name for name in ("rank",) if len({row[name] for row in rows}) == 1}
        if len(requests) == 1:
            print_line(console, f"request {requests.pop()}")
            left_out.add("request")
        if len(days) == 1:
            print_line(console, f"on {days.pop()}, in local time:")
        names = [name for name in rows[0] if name not in left_out]
        cells = ([row[name] for name in names] for row in rows)
        print_table(console, names, cells, whole=("time", "states"))


def _event_row(event: Record, previous: float, *, is_long: bool) -> Mapping[str, str]:
    before, after = event.get("before"), event.get("after")
    time, num_bytes = time_text(_time(event)), event.get("num_bytes") or None
    details = f"{event.get('cause')}", _cell_text("num_bytes", num_bytes)
    return {
        "time": time if is_long else time[11:23],
        "after": f"{_time(event) - previous:.3f} s",
        "rank": f"{event.get('rank')}",
        "request": f"{event.get('request')}",
        "states": f"{before} -> {after}" if before else f"{after}",
        "cause": ", ".join(filter(None, details)),
        "peer": _cell_text("peer", f"{event.get('peer')}"),
    }


def _time(record: Record) -> float:
    return _number(record, "time")


def _heading(key: str) -> str:
    """The column heading of a key, without the unit that the cells show."""
    key = {"bytes_per_second": "speed"}.get(key, key)
    name = key.removeprefix("num_").removesuffix("_s").removesuffix("_ago")
    return printable(name.replace("_", " "))


def _cell_text(key: str, value: object) -> str:
    """Format one value. The key's affixes say what the value counts."""
    if value is None:
        return "no limit" if key in ("ends_in_s", "late_in_s") else ""
    if isinstance(value, list):
        return ", ".join(" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in value)
    if not isinstance(value, int | float):
        text = str(value)
        return UUID.sub(r"\1", text).replace("tcp://", "") if key in OF_ENGINES else text
    if key == "num_bytes":
        return num_bytes_text(value)
    if key == "bytes_per_second":
        return f"{value / 1e6:,.1f} MB/s"
    if key.endswith("_ago_s"):
        return f"{duration_text(value)} ago"
    if key.endswith("_s"):
        return duration_text(value) if value >= 0 else f"{duration_text(-value)} ago"
    return f"{value:,}"


def time_text(time: float) -> str:
    """Local time with milliseconds and the UTC offset. `time` is in seconds since the epoch."""
    return datetime.fromtimestamp(time, timezone.utc).astimezone().isoformat(" ", "milliseconds")


def engine_text(engine: Description) -> str:
    """One line about an engine: its name, its parallel shape, and the cache of its first rank."""
    layout = engine.ranks[0].layout
    groups = [group for group in layout.groups if not group.keeps_states] or layout.groups
    blocks = sorted({(group.entry_size, group.num_entries) for group in groups})
    text = " and ".join(f"{count:,} blocks of {size} tokens" for size, count in blocks)
    return f"{engine.engine}, TP{engine.shape.tp}, PP{engine.shape.pp}, {text} in {layout.memory}"
