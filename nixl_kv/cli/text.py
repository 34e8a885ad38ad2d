"""Numbers and names in words, and where they are printed."""

import itertools
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Column, Table

WIDE: Final = 200
"""Columns at the least: a narrow terminal breaks lines, where rich would leave figures out."""

SHOWN_RANGES: Final = 3
MINUTE_S: Final = 60
KIB: Final = 1024
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def wide_console() -> Console:
    """Standard output, as wide as tables need it."""
    width = max(Console().width, WIDE)
    return Console(highlight=False, markup=False, emoji=False, width=width)


def plain_table(headings: Iterable[str], **column: Any) -> Table:
    """A table without frames; `column` is what rich is to know of each of its columns."""
    columns = [Column(heading, **column) for heading in headings]
    return Table(*columns, box=box.SIMPLE, pad_edge=False)


def num_bytes_text(count: float) -> str:
    """Bytes, in the largest unit that leaves a number of 1 or more, with up to two decimals."""
    for unit in UNITS[:-1]:
        if count < KIB:
            return f"{count:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        count /= KIB
    return f"{count:,.2f} {UNITS[-1]}"


def duration_text(seconds: float) -> str:
    """Such as "0.25 s", "12 min 5 s" or "3 h 7 min"."""
    if round(seconds) < MINUTE_S:
        return f"{round(seconds, 3 if seconds < 1 else 1):g} s"
    minutes, rest_s = divmod(round(seconds), MINUTE_S)
    if minutes < MINUTE_S:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // MINUTE_S:,} h {minutes % MINUTE_S} min"


def time_text(time: float) -> str:
    """Local time to the millisecond, and how far it is from UTC."""
    return datetime.fromtimestamp(time, timezone.utc).astimezone().isoformat(" ", "milliseconds")


def ranges_text(numbers: Iterable[int]) -> str:
    """Such as "0-17, 20"; if there are too many ranges, how many numbers there are."""
    numbers = sorted(numbers)
    groups = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    if len(runs) > SHOWN_RANGES:
        return f"{len(numbers)} of {numbers[0]}-{numbers[-1]}"
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
