"""The verdicts of all checks, for people or as JSON."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nixl_kv.cli.tables import print_line
from nixl_kv.errors import printable

# A warning: it works, but slower, less safe or untested. An error: engines do not start, or move
# no KV.
STYLES: Final = {"ok": "green", "skipped": "dim", "warning": "yellow", "error": "bold red"}
"""The verdicts, the worst last."""

STATUS: Final = {"warning": 1, "error": 2}
"""The exit statuses of the worst verdict."""


class Check(NamedTuple):
    name: str
    verdict: str
    detail: str
    fix: str | None = None  # of a warning or an error


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def skipped(name: str, detail: str) -> Check:
    return Check(name, "skipped", detail)


def warning(name: str, detail: str, fix: str) -> Check:
    return Check(name, "warning", detail, fix)


def error(name: str, detail: str, fix: str) -> Check:
    return Check(name, "error", detail, fix)


Group = tuple[str, Sequence[Check]]


def run(title: str, checks: Callable[[], Iterable[Check]]) -> Group:
    """Run a group of checks. A bug in one must not hide what the others find."""
    done: list[Check] = []
    try:
        done.extend(checks())
    except Exception as bug:  # noqa: BLE001 - reported as a check
        about = f"a check failed: {type(bug).__name__}: {bug}"
        done.append(warning(title, about, "report this line as a bug of nixl-kv"))
    return title, done


def _counts(groups: Iterable[Group]) -> dict[str, int]:
    """The number of checks with each verdict."""
    found = Counter(check.verdict for _, checks in groups for check in checks)
    return {verdict: found[verdict] for verdict in STYLES}


def exit_status(groups: Iterable[Group]) -> int:
    counts = _counts(groups)
    return max((status for verdict, status in STATUS.items() if counts[verdict]), default=0)


def as_json(groups: Sequence[Group]) -> Mapping[str, Any]:
    checks = [{"group": title, **check._asdict()} for title, found in groups for check in found]
    return {**_counts(groups), "checks": checks}


def print_group(console: Console, group: Group) -> None:
    """Print each check as soon as its group is done. Long lines wrap below their beginning."""
    title, checks = group
    print_line(console, title)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, style=STYLES[check.verdict])
        table.add_row(" ", verdict, Text(printable(f"{check.name}: {check.detail}")))
        if check.fix:
            table.add_row("", Text("fix", style="dim"), Text(printable(check.fix)))
    console.print(table)


def print_summary(console: Console, groups: Iterable[Group]) -> None:
    counts = [
        f"{count} {verdict}{'s' if verdict in STATUS and count != 1 else ''}"
        for verdict, count in _counts(groups).items()
    ]
    print_line(console, ", ".join(reversed(counts)))
