"""What came of a program's runs: a table, the same as JSON, and a last line that counts."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

UNLIMITED: Final = 10_000
MAX_TEXT: Final = 80
"""Columns of a text in a table; a longer one has several lines."""
VERDICT: Final = "verdict"

Kind = Literal["good", "bad", "skipped"]
COLOURS: Final[Mapping[Kind, str]] = {"good": "green", "bad": "red", "skipped": "yellow"}


@dataclass(frozen=True)
class Verdict:
    """Whether all is well, in words."""

    kind: Kind
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
        """All of them; fractions with two digits after the point, or two that count."""
        return {heading: _shown(figure) for heading, figure in self.figures.items()}


@dataclass
class Results:
    """The results of a program, in order. `what` says what is counted, as in `20/20 WHAT`."""

    title: str
    what: str
    json_path: Path | None = None
    """Written after each result, so that a run which is cut short leaves what there is."""
    all: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """One more; its verdict, or its cells if nothing judges it, go to stderr at once."""
        self.all.append(result)
        say_on_stderr(f"  {str(result.verdict) or ', '.join(result.cells().values())}")
        if self.json_path is not None:
            write_json(self.json_path, [as_json(one) for one in self.all])

    def count(self, kind: Kind) -> int:
        """How many have a verdict of that kind."""
        return sum(one.verdict.kind == kind for one in self.all)

    def print(self, expected: int) -> int:
        """The table and the last line; the exit status, 0 if all that were expected are good.

        Those that were skipped are not expected, but one must have run.
        """
        verdicts = [one.verdict for one in self.all]
        is_judged = any(map(str, verdicts))
        print_table(self.title, [o.cells() for o in self.all], verdicts if is_judged else ())
        num_good, num_skipped = self.count("good"), self.count("skipped")
        wanted = expected - num_skipped
        skipped_too = f", {num_skipped} skipped" if num_skipped else ""
        print(f"{num_good}/{wanted} {self.what}{skipped_too}")
        return 0 if 0 < num_good == wanted else 1


def say_on_stderr(line: str) -> None:
    """Progress is no result: it goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_table(
    title: str, rows: Sequence[Mapping[str, str]], verdicts: Sequence[Verdict] = ()
) -> None:
    """Rows by heading, numbers to the right; where a row lacks a heading, its cell is empty."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    table = Table(title=title)
    for heading in headings:
        right = all(_is_number(row[heading]) for row in rows if row.get(heading))
        words = [word for row in rows for word in row.get(heading, "").split()]
        table.add_column(
            heading,
            justify="right" if right else "left",
            no_wrap=right,
            # Where there is no room, what a row is about is left, and a heading is cut.
            min_width=min(MAX_TEXT, max(map(len, words), default=0)),
            max_width=MAX_TEXT,
        )
    if verdicts:
        table.add_column(VERDICT, max_width=MAX_TEXT)
    cells = [[escape(row.get(heading, "")) for heading in headings] for row in rows]
    for row_cells, verdict in zip(cells, _coloured(verdicts, len(rows)), strict=True):
        table.add_row(*row_cells, *verdict)
    console().print(table)


def console() -> Console:
    """Of the terminal's width; where there is none, such as in a log, a table has its own."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=UNLIMITED)


def as_json(result: Result) -> dict[str, Any]:
    """All fields of a result, and its verdict in words."""
    fields: Any = (
        msgspec.to_builtins(result, enc_hook=str) if dataclasses.is_dataclass(result) else {}
    )
    return {**dict(fields), VERDICT: str(result.verdict)}


def write_json(path: Path, value: object) -> None:
    """As people read it; whole or not at all."""
    scratch = path.with_name(f".{path.name}.new")
    encoded = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    scratch.write_bytes(encoded + b"\n")
    scratch.replace(path)


def _coloured(verdicts: Sequence[Verdict], rows: int) -> Iterator[list[str]]:
    if not verdicts:
        yield from [[]] * rows
    for verdict in verdicts:
        colour = COLOURS[verdict.kind]
        yield [f"[{colour}]{escape(str(verdict))}[/{colour}]"]


def _shown(figure: str | float) -> str:
    if isinstance(figure, float):
        return f"{figure:.2f}" if round(figure, 1) else f"{figure:.2g}"
    return f"{figure:,}" if isinstance(figure, int) else figure


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or (text[:1] in "+-" and (text[1:2].isdigit() or text == "-"))
