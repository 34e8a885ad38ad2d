"""What came of a program's runs: a table, the same as JSON, and a last line that counts."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MAX_TEXT: Final = 80
"""Columns of a text in a table; a longer one has several lines."""

COLOURS: Final = {"good": "green", "bad": "red", "skipped": "yellow"}


def say_on_stderr(line: str) -> None:
    """Progress is no result: it goes to stderr."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Verdict:
    """Whether all is well, and why."""

    kind: Literal["good", "bad", "skipped"]
    words: str

    def __str__(self) -> str:
        """For one line."""
        return f"skipped: {self.words}" if self.kind == "skipped" else self.words


def verdict_of(*faults: str, good: str = "ok") -> Verdict:
    """Good, unless a fault is named; empty ones do not count."""
    named = [fault for fault in faults if fault]
    return Verdict("bad", "; ".join(named)) if named else Verdict("good", good)


def skipped(reason: str) -> Verdict:
    """Not run, which is neither good nor bad."""
    return Verdict("skipped", reason)


class Result(Protocol):
    """What came of one run. In JSON it is all its fields, if it is a dataclass, and its verdict."""

    @property
    def verdict(self) -> Verdict:
        """Whether all is well."""

    def cells(self) -> Mapping[str, str]:
        """The row of the table, by heading, without the verdict."""


@dataclass(frozen=True)
class Figures:
    """What was measured of one case, by heading; most often nothing judges it."""

    figures: Mapping[str, str | int | float]
    verdict: Verdict = Verdict("good", "")

    def cells(self) -> dict[str, str]:
        """Fractions with two digits after the point."""
        return {
            heading: f"{figure:.2f}" if isinstance(figure, float) else str(figure)
            for heading, figure in self.figures.items()
        }


@dataclass
class Results:
    """The results of a program, in order. `what` says what is counted, as in `20/20 WHAT`."""

    title: str
    what: str
    json_path: Path | None = None
    """Written after each result, so that a run which is cut short leaves its results."""
    all: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """One more; its verdict, or its cells if nothing judges it, go to stderr at once."""
        self.all.append(result)
        say_on_stderr(f"  {str(result.verdict) or ', '.join(result.cells().values())}")
        if self.json_path is not None:
            encoded = msgspec.json.encode([as_json(one) for one in self.all], enc_hook=str)
            self.json_path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

    def print(self, expected: int) -> int:
        """The table and the last line; the exit status, 0 if all that were expected are good.

        Those that were skipped are not expected, but one must have run.
        """
        verdicts = [one.verdict for one in self.all]
        print_table(self.title, [one.cells() for one in self.all], verdicts)
        kinds = [verdict.kind for verdict in verdicts]
        num_good, num_skipped = kinds.count("good"), kinds.count("skipped")
        wanted = expected - num_skipped
        skipped_too = f", {num_skipped} skipped" if num_skipped else ""
        print(f"{num_good}/{wanted} {self.what}{skipped_too}")
        return 0 if 0 < num_good == wanted else 1


def as_json(result: Result) -> dict[str, Any]:
    """All fields of a result, and its verdict."""
    is_record = dataclasses.is_dataclass(result)
    fields: Any = msgspec.to_builtins(result, enc_hook=str) if is_record else {}
    return {**dict(fields), "verdict": str(result.verdict)}


def print_table(
    title: str, rows: Sequence[Mapping[str, str]], verdicts: Sequence[Verdict] = ()
) -> None:
    """Rows by heading, numbers to the right; where a row lacks a heading, its cell is empty."""
    table = Table(title=title)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    for heading in headings:
        given = [row[heading] for row in rows if row.get(heading)]
        right = all(text.lstrip("+-")[:1].isdigit() or text == "--" for text in given)
        table.add_column(heading, justify="right" if right else "left", max_width=MAX_TEXT)
    if any(map(str, verdicts)):
        table.add_column("verdict", max_width=MAX_TEXT)
    for number, row in enumerate(rows):
        cells = [escape(row.get(heading, "")) for heading in headings]
        for verdict in verdicts[number : number + 1] if any(map(str, verdicts)) else ():
            colour = COLOURS[verdict.kind]
            cells.append(f"[{colour}]{escape(str(verdict))}[/{colour}]")
        table.add_row(*cells)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=10_000)).print(table)
