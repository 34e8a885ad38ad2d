"""Write the tables and plots of docs/benchmarks.md from the records in docs/benchmarks.

    scripts/lab/run.sh lab.bench.page

The page says what to show. The lines between a marker and the next `<!-- end -->` are written:

    <!-- table RECORD + RECORD | COLUMN, COLUMN AS HEADING | COLUMN=VALUE or VALUE, ... -->
    <!-- plot RECORD | LABEL, LABEL | COLUMN AS NAME, ... | COLUMN=VALUE, ... -->

The last part chooses rows. Hardware, versions and command of each record stand above a table. A
plot has a group of bars for each row, and a bar for each column.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from lab.bench import record
from lab.bench.record import REPO, Record
from lab.results import Figures

PAGE: Final = REPO / "docs" / "benchmarks.md"
RECORDS: Final = PAGE.with_suffix("")
BLOCK: Final = re.compile(r"(<!-- (table|plot) ([^|]+)\|(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)

WIDTH, LABELS, BAR, GAP = 760, 240, 13, 9
"""Pixels: a plot, its labels, the height of a bar, and the gap between groups."""
COLOURS: Final = ("#1f6fb4", "#e0872f", "#4c9f50")
GREY: Final = "#9a9a9a"
"""The last bar, which is the link."""

Row = Mapping[str, Any]


def rewrite(text: str, records: Path = RECORDS) -> dict[str, str]:
    """The page and its plots, by their names in the page's folder.

    Raises:
        ValueError: if the page names a column that no row has.
    """
    files: dict[str, str] = {}

    def fill(found: re.Match[str]) -> str:
        head, kind, names, arguments, end = found.groups()
        kept = [record.load(records / f"{name.strip()}.json") for name in names.split("+")]
        parts = [part.strip() for part in arguments.split("|")]
        if kind == "table":
            return f"{head}{about(kept)}\n\n{table(kept, *parts)}\n{end}"
        path = f"{records.name}/{names.strip()}.svg"
        files[path] = plot(kept, *parts)
        return f"{head}![{', '.join(columns(parts[1]).values())}]({path})\n{end}"

    return {PAGE.name: BLOCK.sub(fill, text), **files}


def about(records: Sequence[Record]) -> str:
    """Hardware and versions, and the commands that measure the rows again."""
    settings = dict.fromkeys(
        f"{one.hardware}; {', '.join(map(' '.join, one.versions.items()))}:" for one in records
    )
    return "\n".join([*settings, "", *(f"    {one.command}" for one in records)])


def table(records: Sequence[Record], shown: str, only: str = "") -> str:
    """Rows in Markdown, with numbers on the right."""
    rows, chosen = rows_of(records, only), columns(shown)
    unknown = set(chosen).difference(*rows)
    if unknown or not rows:
        raise ValueError(f"{len(rows)} rows; no row has {', '.join(sorted(unknown))}")
    numeric = {
        column: all(isinstance(row.get(column, 0), int | float) for row in rows)
        for column in chosen
    }
    cells = [Figures(row).cells() for row in rows]
    lines = [
        list(chosen.values()),
        ["---:" if numeric[column] else "---" for column in chosen],
        *([each.get(column, "") for column in chosen] for each in cells),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(records: Sequence[Record], labels: str, shown: str, only: str = "") -> str:
    """Horizontal bars as SVG."""
    rows = rows_of(records, only)
    bars = columns(shown)
    colours = [*COLOURS[: len(bars) - 1], GREY]
    most = max(row[column] for row in rows for column in bars)
    height = 30 + len(rows) * (len(bars) * BAR + GAP)
    font = 'font-family="sans-serif" font-size="11"'
    title = escape(", ".join(columns(labels).values()))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {font}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LABELS - 8}" y="15" text-anchor="end">{title}</text>',
    ]
    for number, name in enumerate(bars.values()):
        x, colour = LABELS + number * 150, colours[number]
        lines.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 15}" y="15">{escape(name)}</text>')
    for group, row in enumerate(rows):
        top = 28 + group * (len(bars) * BAR + GAP)
        label = ", ".join(str(row[column]) for column in columns(labels))
        middle = top + len(bars) * BAR / 2 + 4
        lines.append(
            f'<text x="{LABELS - 8}" y="{middle:g}" text-anchor="end">{escape(label)}</text>'
        )
        for number, column in enumerate(bars):
            y, width = top + number * BAR, row[column] / most * (WIDTH - LABELS - 60)
            place = f'x="{LABELS}" y="{y}" width="{width:.0f}" height="{BAR - 2}"'
            lines.append(f'<rect {place} fill="{colours[number]}"/>')
            lines.append(f'<text x="{LABELS + 5 + width:.0f}" y="{y + 9}">{row[column]:.3g}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def columns(text: str) -> dict[str, str]:
    """Columns, each with its heading on the page."""
    pairs = [part.strip().partition(" AS ") for part in text.split(",")]
    return {column: heading or column for column, _, heading in pairs}


def rows_of(records: Sequence[Record], only: str) -> list[Row]:
    """The rows whose columns have one of these values."""
    pairs = [part.strip().partition("=") for part in only.split(",") if part.strip()]
    wanted = {column: values.split(" or ") for column, _, values in pairs}
    return [
        {"hardware": one.hardware, **row}
        for one in records
        for row in one.rows
        if all(str(row.get(column)) in values for column, values in wanted.items())
    ]


def main() -> None:
    """Write the page and its plots."""
    for name, text in rewrite(PAGE.read_text(encoding="utf-8")).items():
        (PAGE.parent / name).write_text(text, encoding="utf-8")
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
