"""Make docs/benchmarks.md of its template, and of the JSON of runs that stands beside it.

A run is written with `bench WHAT ... --record docs/benchmarks/NAME.json`. In the template:

    {{about NAME}}                            when, where and with what it ran, and its command
    {{table NAME | COLUMN, COLUMN AS HEADING | COLUMN=VALUE, ...}}
                                              its rows; all columns and rows where none is named
    {{plot NAME | X | Y | BY, BY | COLUMN=VALUE, ...}}
                                              a line of Y against X for each value of BY
    {{if NAME}} ... {{end}}                   what is left out where there is no such run

With --check nothing is written: the exit status says whether the page is what would be written.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.bench.checkouts import REPO
from lab.bench.record import Record
from lab.results import Figures

PAGE: Final = REPO / "docs" / "benchmarks.md"
RECORDS: Final = REPO / "docs" / "benchmarks"
TEMPLATE: Final = RECORDS / "template.md"
MADE: Final = (
    "<!-- Made by `scripts/bench report` of docs/benchmarks/template.md and the JSON beside it. -->"
)
SECTION: Final = re.compile(r"\{\{if ([\w-]+)\}\}\n(.*?)\{\{end\}\}\n", re.DOTALL)
DIRECTIVE: Final = re.compile(r"\{\{(\w+) ([\w-]+)([^}]*)\}\}")
PLOT_STYLE: Final[Any] = {"svg.fonttype": "none", "svg.hashsalt": "nixl_kv"}

Row = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Write, or only look."""
    parser.add_argument("--check", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Write the page and its plots; 1 if one differs, with --check."""
    files = build(TEMPLATE.read_text(encoding="utf-8"), RECORDS)
    if options.check:
        differing = [name for name, text in files.items() if _differs(PAGE.parent / name, text)]
        for name in differing:
            print(f"docs/{name} is not what its template and records make: scripts/bench report")
        return 1 if differing else 0
    for name, text in files.items():
        (PAGE.parent / name).write_text(text, encoding="utf-8")
        print(f"docs/{name}", file=sys.stderr)
    return 0


def build(template: str, records: Path) -> dict[str, str]:
    """The page and its plots, by their paths from the page's folder.

    Raises:
        ValueError: if the template asks for what is unknown.
    """
    known = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Record)
        for path in sorted(records.glob("*.json"))
    }
    plots: dict[str, str] = {}

    def insert(found: re.Match[str]) -> str:
        kind, name, rest = found.groups()
        if name not in known:
            raise ValueError(f"{found.group()}: no run of that name; allowed: {', '.join(known)}")
        parts = [part.strip() for part in rest.split("|")[1:]]
        if kind == "about":
            return about(known[name])
        if kind == "table":
            return table(known[name], *parts)
        if kind == "plot":
            path = f"benchmarks/{name}-{len(plots)}.svg"
            plots[path] = plot(known[name], *parts)
            return f"![{parts[1]} against {parts[0]}]({path})"
        raise ValueError(f"{found.group()}; allowed: about, table and plot")

    kept = SECTION.sub(lambda found: found.group(2) if found.group(1) in known else "", template)
    unused = [name for name in known if not re.search(rf"\{{\{{table {name}[ }}|]", kept)]
    if unused:
        raise ValueError(f"no table of the template is of {', '.join(unused)}")
    text = DIRECTIVE.sub(insert, kept)
    return {"benchmarks.md": f"{MADE}\n{text}", **plots}


def about(record: Record) -> str:
    """When, where and with what, and how to run it again."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    where = f"{record.date}, {record.hardware}; {versions}; commit {record.commit}"
    return f"{where}:\n\n    {record.command}"


def table(record: Record, columns: str = "", only: str = "") -> str:
    """Rows in Markdown; numbers stand right."""
    rows = _rows(record, only)
    every = dict.fromkeys(heading for row in rows for heading in row)
    chosen = _columns(columns) if columns else {heading: heading for heading in every}
    unknown = [column for column in chosen if column not in every]
    if unknown:
        raise ValueError(f"no column {unknown[0]!r}; allowed: {', '.join(every)}")
    shown = [Figures(row).cells() for row in rows]
    are_numbers = {
        column: all(isinstance(row.get(column, 0), int | float) for row in rows)
        for column in chosen
    }
    lines = [
        [heading.replace("\n", " ") for heading in chosen.values()],
        ["---:" if are_numbers[column] else "---" for column in chosen],
        *([cells.get(column, "") for column in chosen] for cells in shown),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(record: Record, x: str, y: str, by: str = "", only: str = "") -> str:
    """Lines as SVG, equal for equal figures."""
    from io import StringIO  # noqa: PLC0415 - with the plots alone

    from matplotlib import rc_context  # noqa: PLC0415 - only who wants a plot needs it
    from matplotlib.figure import Figure  # noqa: PLC0415 - likewise

    rows = _rows(record, only)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        label = ", ".join(str(row[column]) for column in _columns(by))
        lines.setdefault(label, []).append(row)
    file = StringIO()
    with rc_context(PLOT_STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for label, of_label in lines.items():
            places = [str(row[x]) for row in of_label]
            axes.plot(places, [row[y] for row in of_label], marker="o", label=label)
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if by:
            axes.legend()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _columns(text: str) -> dict[str, str]:
    """Columns, each with the heading that it has on the page."""
    pairs = [part.strip().partition(" AS ") for part in text.split(",") if part.strip()]
    return {column: heading or column for column, _, heading in pairs}


def _rows(record: Record, only: str) -> Sequence[Row]:
    conditions = [part.strip().partition("=") for part in only.split(",") if part.strip()]
    return [
        row
        for row in record.rows
        if all(str(row.get(column)) == value for column, _, value in conditions)
    ]


def _differs(path: Path, text: str) -> bool:
    if path.suffix == ".svg":  # another matplotlib draws the same with other words
        return not path.exists()
    return not path.exists() or path.read_text(encoding="utf-8") != text
