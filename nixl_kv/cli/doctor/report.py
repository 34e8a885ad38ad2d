"""The verdicts of all checks, for people or as JSON."""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nixl_kv.cli.tables import print_line
from nixl_kv.errors import printable


class Verdict(enum.Enum):
    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"  # works, but slower, less safe or untested
    ERROR = "error"  # engines do not start, or move no KV


STATUS: Final = {Verdict.WARNING: 1, Verdict.ERROR: 2}
"""The exit statuses of the worst verdict."""

STYLES: Final = {
    Verdict.OK: "green",
    Verdict.SKIPPED: "dim",
    Verdict.WARNING: "yellow",
    Verdict.ERROR: "bold red",
}


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Verdict
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Check:
    return Check(name, Verdict.OK, detail)


def skipped(name: str, detail: str) -> Check:
    return Check(name, Verdict.SKIPPED, detail)


def warning(name: str, detail: str, fix: str) -> Check:
    return Check(name, Verdict.WARNING, detail, fix)


def error(name: str, detail: str, fix: str) -> Check:
    return Check(name, Verdict.ERROR, detail, fix)


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


def exit_status(groups: Iterable[Group]) -> int:
    return max(
        (STATUS.get(check.verdict, 0) for _, checks in groups for check in checks), default=0
    )


def as_json(groups: Iterable[Group]) -> Mapping[str, Any]:
    checks = [
        {
            "group": title,
            "name": check.name,
            "verdict": check.verdict.value,
            "detail": check.detail,
            "fix": check.fix or None,
        }
        for title, checks in groups
        for check in checks
    ]
    counts = Counter(check["verdict"] for check in checks)
    return {**{verdict.value: counts[verdict.value] for verdict in Verdict}, "checks": checks}


def print_group(console: Console, group: Group) -> None:
    """Print each check as soon as its group is done. Long lines wrap below their beginning."""
    title, checks = group
    print_line(console, title)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        verdict = Text(check.verdict.value, style=STYLES[check.verdict])
        table.add_row(" ", verdict, Text(printable(f"{check.name}: {check.detail}")))
        if check.fix:
            table.add_row("", Text("fix", style="dim"), Text(printable(check.fix)))
    console.print(table)


def print_summary(console: Console, groups: Sequence[Group]) -> None:
    print_line(console, ", ".join(_summary(groups)))


def _summary(groups: Sequence[Group]) -> Iterator[str]:
    counts = Counter(check.verdict for _, checks in groups for check in checks)
    for verdict in reversed(Verdict):
        plural = "s" if verdict in STATUS and counts[verdict] != 1 else ""
        yield f"{counts[verdict]} {verdict.value}{plural}"
