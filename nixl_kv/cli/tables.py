"""Prints tables and lines that fit the terminal.

A table that is too wide loses the ends of its longest cells. If that is not enough, it is printed
with a row per heading instead. Into a pipe or a file, tables are as wide as they need to be. All
texts may come from clients and peers, so control characters are escaped.
"""

import os
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from nixl_kv.errors import printable

PIPE_WIDTH: Final = 1 << 14
SHORTEST: Final = 10  # columns to which a cell may be cut
PADDING: Final = (0, 1, 0, 0)
GAP: Final = 2  # columns between two cells: the padding, and rich's edge of a column

MINUTE: Final = 60  # seconds; an hour has as many minutes
KIB: Final = 1024


def open_console() -> Console:
    width = None if Console().is_terminal or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def print_line(console: Console, text: str) -> None:
    console.print(printable(text), soft_wrap=True)


def print_table(
    console: Console,
    headings: Iterable[str],
    rows: Iterable[Iterable[object]],
    *,
    whole: Container[str] = (),
    **column: Any,
) -> None:
    """Print a table without frames. `column` goes to each rich `Column`.

    Cells may be cut to SHORTEST, except below the headings in `whole`.
    """
    headings, cells = list(headings), [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, texts)) for texts in zip(headings, *cells, strict=True)]
    shortest = [
        width if heading in whole else min(width, SHORTEST)
        for heading, width in zip(headings, widths, strict=True)
    ]
    if sum(shortest) + GAP * len(shortest) > console.width:  # the edges have one column each
        _print_transposed(console, headings, cells)
        return
    # Rich takes from the widest column that may wrap; its cells then end with an ellipsis.
    columns = [
        Column(heading, no_wrap=width == least, **column)
        for heading, width, least in zip(headings, widths, shortest, strict=True)
    ]
    table = Table(*columns, box=box.SIMPLE, padding=PADDING, pad_edge=False)
    for row in cells:
        table.add_row(*map(_cell, row))
    console.print(table)


def _print_transposed(console: Console, headings: list[str], cells: Sequence[list[str]]) -> None:
    room = console.width - max(map(cell_len, headings)) - GAP
    widest = max((cell_len(cell) for row in cells for cell in row), default=1)
    per_table = max(1, room // (widest + GAP))
    for begin in range(0, len(cells), per_table):
        table = Table(box=box.SIMPLE, show_header=False, padding=PADDING, pad_edge=False)
        table.add_column(no_wrap=True)
        for name, *values in zip(headings, *cells[begin : begin + per_table], strict=True):
            table.add_row(name, *map(_cell, values))
        console.print(table)


def _cell(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def duration_text(seconds: float) -> str:
    """Such as "0.25 s", "12 min 5 s" or "3 h 7 min"."""
    if round(seconds) < MINUTE:
        return f"{round(seconds, 3 if seconds < 1 else 1):g} s"
    minutes, rest_s = divmod(round(seconds), MINUTE)
    if minutes < MINUTE:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // MINUTE:,} h {minutes % MINUTE} min"


def num_bytes_text(count: float) -> str:
    """Format bytes in the largest unit with a value of at least 1, with up to two decimals."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < KIB:
            return f"{count:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        count /= KIB
    return f"{count:,.2f} TiB"
