"""What a running engine is doing, for people and as JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from rich.console import Console

from nixl_kv.cli.engines import engine_from_description
from nixl_kv.cli.running import RankAnswer
from nixl_kv.cli.text import duration_text, num_bytes_text, plain_table, time_text, wide_console
from nixl_kv.errors import printable
from nixl_kv.protocol import messages

Row: TypeAlias = tuple[object, ...]

PEERS: Final = ("peer", "incarnation", "at", "state", "why")
LINKS: Final = ("link to", "messages sent", "received", "idle for")
OFFERS: Final = ("offer of request", "nonce", "tokens", "state", "waits for", "ends in")
LOADS: Final = ("load of request", "nonce", "from", "prefill ranks", "waits for", "late in")
STORY: Final = ("time", "after", "rank", "request", "peer", "states", "cause", "bytes")


def print_status(
    description: messages.Description, answers: Sequence[RankAnswer], request: str | None
) -> None:
    """What each rank does, and the story of a request.

    Args:
        description: the engine's.
        answers: of its ranks, in rank order.
        request: whose story was asked for: a part of its id; None for no story.
    """
    console = wide_console()
    _print_line(console, f"engine {engine_from_description(description).words}")
    for number, (rank, answer) in enumerate(answers):
        console.print()
        if isinstance(answer, messages.Status):
            _print_line(console, f"rank {number} at {rank.endpoint}: {_summary(answer)}")
            _print_lists(console, answer)
        else:
            _print_line(console, f"rank {number} at {rank.endpoint} gives no status: {answer}")
    if request is not None:
        console.print()
        _print_story(console, answers, request)


def status_as_json(
    description: messages.Description, answers: Sequence[RankAnswer]
) -> Mapping[str, Any]:
    """All fields; of a rank that gave no status, why not."""
    return {
        "engine": description.engine,
        "incarnation": description.incarnation,
        "model": description.model,
        "extras": description.extras,
        "tp": description.shape.tp,
        "pp": description.shape.pp,
        "ranks": [
            _fields(answer) | {"endpoint": rank.endpoint}
            if isinstance(answer, messages.Status)
            else {"rank": number, "endpoint": rank.endpoint, "error": str(answer)}
            for number, (rank, answer) in enumerate(answers)
        ],
    }


def _fields(item: Any) -> Any:
    """Records by name, which are arrays on the wire."""
    if isinstance(item, msgspec.Struct):
        return {name: _fields(value) for name, value in msgspec.structs.asdict(item).items()}
    return [_fields(element) for element in item] if isinstance(item, tuple) else item


def _print_line(console: Console, text: str) -> None:
    console.print(printable(text), soft_wrap=True)


def _summary(status: messages.Status) -> str:
    totals = ", ".join(f"{name} {count:,}" for name, count in status.totals.items())
    return f"{status.roles}; up for {duration_text(status.uptime_s)}; {totals}"


def _print_lists(console: Console, status: messages.Status) -> None:
    """What is empty is left out: the totals say so."""
    for name, headings, rows in (
        ("peers", PEERS, map(_peer, status.peers)),
        ("links", LINKS, map(_link, status.links)),
        ("offers", OFFERS, map(_offer, status.offers)),
        ("loads", LOADS, map(_load, status.loads)),
    ):
        _print_table(console, headings, rows)
        if status.totals.get(name, 0) > messages.MAX_LISTED:
            _print_line(
                console, f"(the first {messages.MAX_LISTED:,} of {status.totals[name]:,} {name})"
            )


def _print_table(console: Console, headings: Sequence[str], rows: Iterable[Row]) -> None:
    table = plain_table(headings, overflow="fold")
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    if table.row_count:
        console.print(table)


def _peer(peer: messages.PeerStatus) -> Row:
    return peer.engine, peer.incarnation, peer.endpoint, peer.state, peer.detail


def _link(link: messages.LinkStatus) -> Row:
    return link.endpoint, f"{link.sent:,}", f"{link.received:,}", duration_text(link.idle_s)


def _offer(offer: messages.OfferStatus) -> Row:
    tokens, left = f"{offer.num_tokens:,}", _left_text(offer.ends_in_s)
    return offer.request, offer.nonce, tokens, offer.state, offer.waits_for, left


def _load(load: messages.LoadStatus) -> Row:
    reads = ", ".join(f"{rank} {state}" for rank, state in load.reads)
    left = _left_text(load.late_in_s)
    return load.request, load.nonce, load.peer, reads, load.waits_for, left


def _left_text(seconds: float | None) -> str:
    if seconds is None:
        return "no limit"
    return duration_text(seconds) if seconds >= 0 else f"{duration_text(-seconds)} ago"


def _print_story(console: Console, answers: Sequence[RankAnswer], request: str) -> None:
    """In time order over all ranks."""
    statuses = [answer for _, answer in answers if isinstance(answer, messages.Status)]
    story = sorted(
        ((event, status.rank) for status in statuses for event in status.story),
        key=lambda item: item[0].time,
    )
    since = [status.events_since for status in statuses if status.events_since is not None]
    _print_line(
        console,
        f"{len(story):,} events of requests whose id contains {request!r}"
        + (f"; events are kept since {time_text(max(since))}" if since else ""),
    )
    if not story and statuses:
        _print_line(
            console,
            "Either they are older, or no transfer was started: "
            "the engine's log says why a ticket was refused.",
        )
    _print_table(console, STORY, _story_rows(story))


def _story_rows(story: Sequence[tuple[messages.EventRecord, int]]) -> Iterator[Row]:
    before = story[0][0].time if story else 0.0
    for event, rank in story:
        yield (
            time_text(event.time),
            f"{event.time - before:.3f} s",
            rank,
            event.request,
            event.peer,
            f"{event.before} -> {event.after}" if event.before else event.after,
            event.cause,
            num_bytes_text(event.num_bytes) if event.num_bytes else "",
        )
        before = event.time
