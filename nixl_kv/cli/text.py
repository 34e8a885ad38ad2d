"""Plain tables and byte counts for a terminal, shared by `status` and `plan`."""

from collections.abc import Iterable
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Column, Table

from nixl_kv.errors import printable

MIN_WIDTH: Final = 200
"""Columns. On a narrower terminal lines wrap; rich would drop figures instead."""

KIB: Final = 1024
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def wide_console() -> Console:
    width = max(Console().width, MIN_WIDTH)
    return Console(highlight=False, markup=False, emoji=False, width=width)


def print_line(console: Console, text: str) -> None:
    """Print one line. Peers chose parts of the text, so control characters are escaped."""
    console.print(printable(text), soft_wrap=True)


def plain_table(headings: Iterable[str], rows: Iterable[Iterable[object]], **column: Any) -> Table:
    """A table without frames. `column` goes to each rich `Column`; cells are escaped."""
    table = Table(*(Column(h, **column) for h in headings), box=box.SIMPLE, pad_edge=False)
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    return table


def num_bytes_text(count: float) -> str:
    """Format bytes in the largest unit with a value of at least 1, with up to two decimals."""
    for unit in UNITS[:-1]:
        if count < KIB:
            return f"{count:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        count /= KIB
    return f"{count:,.2f} {UNITS[-1]}"
