"""Prints the status of a running engine, for people or as JSON.

A status is an open record (`protocol.messages.Status`): each of its lists becomes a table, and the
keys of the records become columns. A key that `engine/engine.py` adds shows up here by itself. All
texts may come from clients and peers, so control characters are escaped.

`nixl-kv plan` prints its tables with the functions at the end of this file.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Column, Table

from nixl_kv.cli.client import RankAnswer
from nixl_kv.errors import printable
from nixl_kv.protocol.messages import MAX_LISTED, Description, Status

Record: TypeAlias = Mapping[str, Any]

STORY: Final = "story"
"""The list with the events of the requests that were asked for."""

MINUTE_S: Final = 60
KIB: Final = 1024

MIN_WIDTH: Final = 200
"""Columns. On a narrower terminal lines wrap; rich would drop figures instead."""


def print_status(
    description: Description, answers: Sequence[RankAnswer], request: str | None
) -> None:
    """Print the answers of an engine's ranks, which are in rank order.

    If `request`, a part of a request id, is not None, the matching events follow.
    """
    console = wide_console()
    print_line(console, f"engine {engine_text(description)}")
    for number, (rank, answer) in enumerate(answers):
        console.print()
        start = f"rank {number} at {rank.endpoint}"
        if not isinstance(answer, Status):
            print_line(console, f"{start} gives no status: {answer}")
            continue
        totals = ", ".join(f"{name} {count:,}" for name, count in answer.totals.items())
        uptime = _cell_text("uptime_s", answer.facts.get("uptime_s"))
        print_line(console, f"{start}: {answer.facts.get('roles')}; up for {uptime}; {totals}")
        _print_lists(console, answer)
    if request is not None:
        console.print()
        _print_story(console, answers, request)


def status_as_json(description: Description, answers: Sequence[RankAnswer]) -> Record:
    """All fields. A rank that gave no status has the key `error` instead."""
    ranks: list[Record] = []
    for number, (rank, answer) in enumerate(answers):
        if isinstance(answer, Status):
            own = {"incarnation": answer.incarnation, "totals": answer.totals}
            fields = {**own, **answer.facts, **answer.lists}
        else:
            fields = {"error": str(answer)}
        ranks.append({**fields, "rank": number, "endpoint": rank.endpoint})
    return {
        "engine": description.engine,
        "incarnation": description.incarnation,
        "model": description.model,
        "extras": description.extras,
        "tp": description.shape.tp,
        "pp": description.shape.pp,
        "ranks": ranks,
    }


def _print_lists(console: Console, status: Status) -> None:
    for name, records in status.lists.items():
        if name == STORY or not records:
            continue
        total = status.totals.get(name, 0)
        bound = f" (the first {MAX_LISTED:,} of {total:,})" if total > MAX_LISTED else ""
        print_line(console, f"{name}{bound}:")
        keys = list(dict.fromkeys(key for record in records for key in record))
        rows = ([_cell_text(key, record.get(key)) for key in keys] for record in records)
        console.print(plain_table(map(_heading, keys), rows, overflow="fold"))


def _print_story(console: Console, answers: Sequence[RankAnswer], request: str) -> None:
    statuses = [answer for _, answer in answers if isinstance(answer, Status)]
    events = [
        {**event, "rank": status.facts.get("rank")}
        for status in statuses
        for event in status.lists.get(STORY, ())
    ]
    events.sort(key=_time)
    kept_since = max((_time(status.facts, "events_since") for status in statuses), default=0.0)
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
    if events:
        headings = ("time", "after", "rank", "request", "peer", "states", "cause", "bytes")
        pairs = zip(events, [events[0], *events], strict=False)
        rows = (_event_row(event, _time(previous)) for event, previous in pairs)
        console.print(plain_table(headings, rows, overflow="fold"))


def _event_row(event: Record, previous: float) -> Sequence[str]:
    before, after = event.get("before"), event.get("after")
    return (
        time_text(_time(event)),
        f"{_time(event) - previous:.3f} s",
        f"{event.get('rank')}",
        f"{event.get('request')}",
        f"{event.get('peer')}",
        f"{before} -> {after}" if before else f"{after}",
        f"{event.get('cause')}",
        _cell_text("num_bytes", event.get("num_bytes") or None),
    )


def _time(record: Record, key: str = "time") -> float:
    time = record.get(key)
    return float(time) if isinstance(time, int | float) else 0.0


def _heading(key: str) -> str:
    """The column heading of a key, without the unit that the cells show."""
    return printable(key.removeprefix("num_").removesuffix("_s").replace("_", " "))


def _cell_text(key: str, value: object) -> str:
    """Format one value. The key's affixes say what the value counts."""
    if value is None:
        return "no limit" if key.endswith("_in_s") else ""
    if isinstance(value, list):
        return ", ".join(" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in value)
    if not isinstance(value, int | float):
        return str(value)
    if key == "num_bytes":
        return num_bytes_text(value)
    if key.endswith("_s"):
        return duration_text(value) if value >= 0 else f"{duration_text(-value)} ago"
    return f"{value:,}"


def duration_text(seconds: float) -> str:
    """Such as "0.25 s", "12 min 5 s" or "3 h 7 min"."""
    if round(seconds) < MINUTE_S:
        return f"{round(seconds, 3 if seconds < 1 else 1):g} s"
    minutes, rest_s = divmod(round(seconds), MINUTE_S)
    if minutes < MINUTE_S:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // MINUTE_S:,} h {minutes % MINUTE_S} min"


def time_text(time: float) -> str:
    """Local time with milliseconds and the UTC offset. `time` is in seconds since the epoch."""
    return datetime.fromtimestamp(time, timezone.utc).astimezone().isoformat(" ", "milliseconds")


# --- also used by `nixl-kv plan`


def wide_console() -> Console:
    width = max(Console().width, MIN_WIDTH)
    return Console(highlight=False, markup=False, emoji=False, width=width)


def print_line(console: Console, text: str) -> None:
    # Peers chose parts of the text, so escape control characters.
    console.print(printable(text), soft_wrap=True)


def plain_table(headings: Iterable[str], rows: Iterable[Iterable[object]], **column: Any) -> Table:
    """A table without frames. `column` goes to each rich `Column`; cells are escaped."""
    table = Table(*(Column(h, **column) for h in headings), box=box.SIMPLE, pad_edge=False)
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    return table


def num_bytes_text(count: float) -> str:
    """Format bytes in the largest unit with a value of at least 1, with up to two decimals."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < KIB:
            return f"{count:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        count /= KIB
    return f"{count:,.2f} TiB"


def engine_text(engine: Description) -> str:
    """One line about an engine: its name, its parallel shape, and the cache of its first rank."""
    layout = engine.ranks[0].layout
    groups = [group for group in layout.groups if not group.keeps_states] or layout.groups
    blocks = sorted({(group.entry_size, group.num_entries) for group in groups})
    text = " and ".join(f"{count:,} blocks of {size} tokens" for size, count in blocks)
    return f"{engine.engine}, TP{engine.shape.tp}, PP{engine.shape.pp}, {text} in {layout.memory}"
