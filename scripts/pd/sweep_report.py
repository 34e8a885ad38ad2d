"""What came of each case of a sweep, and the table of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from pd.console import console
from pd.sweep_cases import Case

WIDTH: Final = 150
GB: Final = 1e9
HEADINGS: Final = (
    "case",
    "accuracy P/D",
    "expected",
    "single",
    "tolerance",
    "loads",
    "failed",
    "tokens loaded",
    "GB moved",
    "wall s",
    "verdict",
)


@dataclass(frozen=True)
class Row:
    """One model of one case. Without a result it was skipped, or did not come so far."""

    case: Case
    verdict: str  # "ok", or what is not
    skipped: bool = False
    seconds: float = 0.0
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Neither good nor skipped."""
        return not self.skipped and self.verdict != "ok"


def rows(case: Case, path: Path, *, exit_code: int | None, seconds: float) -> list[Row]:
    """What the launcher left, one row for each model; its exit status has the last word."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    found = [Row(case, one["verdict"], seconds=one["seconds"], result=one) for one in results]
    if exit_code == 0 and found:
        return found
    if any(row.failed for row in found):
        return found
    return [*found, Row(case, f"the launcher ended with status {exit_code}", seconds=seconds)]


def print_rows(found: Sequence[Row]) -> None:
    """A table, one row for each model of each case."""
    table = Table(title="accuracy of prefill and decode apart")
    for heading in HEADINGS:
        right = heading in HEADINGS[1:-1]
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for row in found:
        table.add_row(row.case.name, *_figures(row), _verdict(row))
    console(WIDTH).print(table)


def write_json(path: Path, found: Sequence[Row]) -> None:
    """All rows, for programs."""
    kept = [
        {"case": row.case.name, "verdict": row.verdict, "skipped": row.skipped} | dict(row.result)
        for row in found
    ]
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _figures(row: Row) -> list[str]:
    result = row.result
    if not result:
        return [*["-"] * (len(HEADINGS) - 3), f"{row.seconds:.0f}"]
    counters = result["counters"]
    return [
        *(_share(result[name]) for name in ("accuracy", "expected", "single")),
        f"{result['tolerance']:g}",
        f"{counters.get('loads_total', 0):.0f}",
        f"{counters.get('load_failures_total', 0):.0f}",
        f"{counters.get('tokens_loaded_total', 0):.0f}",
        f"{counters.get('bytes_read_total', 0) / GB:.3f}",
        f"{row.seconds:.0f}",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _verdict(row: Row) -> str:
    if row.skipped:
        return f"[yellow]skipped: {escape(row.verdict)}[/yellow]"
    return f"[red]{escape(row.verdict)}[/red]" if row.failed else "[green]ok[/green]"
