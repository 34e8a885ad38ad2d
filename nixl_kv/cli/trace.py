"""`nixl-kv trace`: the event logs of running engines as Chrome trace events, which Perfetto shows.

A rank is a process of the trace, a peer is a track of it, and a state is a slice. Requests that
overlap get tracks of their own.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from nixl_kv.cli import client
from nixl_kv.cli.options import FAILED, Insecure, KeyFile, errors_exit
from nixl_kv.engine.event_log import EVERY_REQUEST
from nixl_kv.errors import printable
from nixl_kv.protocol.events import OVER
from nixl_kv.protocol.messages import MAX_LISTED, Status

ENDS: Final = frozenset({OVER, "DONE", "FAILED", "LOADED"})
OFFERS: Final = "offers"  # the track of an offer, whose first transition names no peer

_Record: TypeAlias = Mapping[str, Any]
_Story: TypeAlias = Sequence[_Record]


@errors_exit()
def trace(
    at: Annotated[
        list[str], typer.Option(metavar="HOST:PORT", help="An engine's directory; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")],
    request: Annotated[
        str, typer.Option(metavar="ID", help="Only requests whose id contains this.")
    ] = EVERY_REQUEST,
    key_file: KeyFile = None,
    *,
    insecure: Insecure = False,
) -> None:
    """Write the latest events of engines to a file for https://ui.perfetto.dev."""
    keys, stories, is_complete = client.read_keys(key_file, insecure=insecure), {}, True
    for where in at:
        engine = client.describe_at(where, keys)
        for rank, (_, answer) in enumerate(client.rank_statuses(engine, keys, request)):
            name = f"engine {engine.engine}, rank {rank}"
            if isinstance(answer, Status):
                stories[name] = answer.lists.get("story", [])
            else:
                is_complete = False
                typer.echo(printable(f"{name} at {where} gives no events: {answer}"), err=True)
    try:
        out.write_text(json.dumps({"traceEvents": list(trace_events(stories))}), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out is {str(out)!r}: {error.strerror}; allowed: a new file") from error
    count = f"{sum(map(len, stories.values())):,} events of {len(stories)} ranks"
    typer.echo(f"{out} has {count} (up to {MAX_LISTED:,} each); open it at https://ui.perfetto.dev")
    raise typer.Exit(0 if is_complete else FAILED)


def trace_events(stories: Mapping[str, _Story]) -> Iterator[_Record]:
    """`stories` has the events of each rank in order. An open state lasts until the last event."""
    until = max((event["time"] for story in stories.values() for event in story), default=0.0)
    for pid, (rank, story) in enumerate(stories.items(), start=1):
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": rank}}
        used: list[tuple[str, float]] = []  # the track of each thread, and until when it is used
        for events in subjects(story):
            track, begin = events[0]["peer"] or OFFERS, events[0]["time"]
            free = (n for n, (name, end) in enumerate(used) if name == track and end <= begin)
            tid = next(free, len(used))
            used[tid : tid + 1] = [(track, events[-1]["time"] if _is_over(events) else until)]
            about = {"pid": pid, "tid": tid + 1}
            yield {"name": "thread_name", "ph": "M", **about, "args": {"name": track}}
            for event, following in itertools.zip_longest(events, events[1:]):
                time_us, args = round(event["time"] * 1e6), {"request": events[0]["request"]}
                kind: _Record = {"ph": "i", "s": "t"}  # the end of a subject
                if event["after"] not in ENDS:
                    end_us = round((following["time"] if following else until) * 1e6)
                    kind = {"ph": "X", "dur": end_us - time_us}
                args |= {key: event[key] for key in ("peer", "cause", "num_bytes") if event[key]}
                yield {"name": event["after"], "ts": time_us, **kind, **about, "args": args}


def subjects(story: _Story) -> list[list[_Record]]:
    """The transitions of each offer, load, read of a rank, and peer; in order of their begin."""
    found: list[list[_Record]] = []
    for event in story:
        open_ones = [one for one in found if event["before"] and not _is_over(one)]
        same = [one for one in open_ones if one[0]["request"] == event["request"]]
        own = [one for one in same if one[0]["peer"] == event["peer"]]
        if event["request"] and not own:  # some transitions of an offer name its reader
            own = [one for one in same if one[-1]["after"] == event["before"]]
        if not own:
            found.append([])
        (own or found)[-1].append(event)
    return found


def _is_over(events: _Story) -> bool:
    return events[-1]["after"] in ENDS
