"""The fault suite's table, and the same as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.markup import escape
from rich.table import Table

from pd.console import console
from pd.faults_scene import Report

WIDTH: Final = 170
HEADINGS: Final = (
    "fault",
    "requests",
    "right",
    "error",
    "wrong",
    "left",
    "read",
    "longest s",
    "deadline s",
    "leaked P/D",
    "serves after s",
    "verdict",
)


def print_reports(reports: Sequence[Report]) -> None:
    """A table, one row for each fault."""
    table = Table(title="real engines under faults, compared with a single engine")
    for heading in HEADINGS:
        right = heading in HEADINGS[1:-1]
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for report in reports:
        table.add_row(*_cells(report))
    console(WIDTH).print(table)


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """All reports with all their requests."""
    kept = [asdict(report) | {"verdict": report.verdict or "ok"} for report in reports]
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _cells(report: Report) -> list[str]:
    after = report.serves_after_s
    bad = report.verdict
    return [
        report.fault,
        str(len(report.ended)),
        str(report.count("right")),
        str(report.count("error")),
        str(report.count("wrong")),
        str(report.count("left")),
        str(report.loads),
        f"{report.longest_s:.1f}",
        f"{report.deadline_s:g}",
        "/".join(map(str, report.leaked)),
        "-" if after is None else f"{after:.1f}",
        f"[red]{escape(bad)}[/red]" if bad else "[green]ok[/green]",
    ]
