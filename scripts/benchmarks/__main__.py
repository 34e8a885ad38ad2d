"""Measure transfers and engines: scripts/bench [--record FILE] WHAT [OPTION ...].

`scripts/bench WHAT --help` says what each benchmark measures. Rows appear as they are measured, and
as a Markdown table at the end. A record is JSON: the rows with command, hardware and versions.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import records
from benchmarks.shapes import Row

BENCHMARKS: Final = (
    "transfer",  # needs NIXL
    "tcp",  # needs NIXL and root
    "gather",  # needs Triton, and a GPU or two
    *("floor", "added", "load", "goodput", "steps", "finds", "contacts"),  # need vLLM
    "conversations",  # needs vLLM
    *("overlap", "containers"),  # need vLLM and root
)
"""Modules beside this one. `add_options` adds their options, `measure` yields their rows.

One whose `ACCUMULATES` is true adds to the record by itself, as it measures.
"""

FAULT: Final = "fault"
"""The column of a row that must not count."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of one benchmark. Import no other: this machine may lack its packages."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--commit", help="for the record, if the checkout has no git history")
    parser.add_argument("what", choices=BENCHMARKS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...")
    options = parser.parse_args(arguments)
    module: Any = importlib.import_module(f"benchmarks.{options.what}")
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {options.what}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    options.measure = module.measure
    options.accumulates = getattr(module, "ACCUMULATES", False)
    options.command = shlex.join(["scripts/bench", options.what, *options.rest])
    return parser.parse_args(options.rest, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of all rows. The exit status is 0 only if there are rows, all without fault."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    rows: list[Row] = []
    try:
        for row in options.measure(options):
            # Five digits, in the table as in the record.
            kept = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
            rows.append(kept)
            said = ", ".join(f"{name} {shown(figure)}" for name, figure in kept.items())
            print(said, file=sys.stderr, flush=True)
    finally:
        if options.record and rows and not options.accumulates:
            head = records.head(options.command, options.commit)
            records.write(options.record, head, {"rows": rows})
    print(markdown(rows))
    return int(not rows or any(FAULT in row for row in rows))


def shown(figure: str | float) -> str:
    """Fractions with two digits after the point, or two that count."""
    if isinstance(figure, float):
        return f"{figure:.2f}" if round(figure, 1) else f"{figure:.2g}"
    return f"{figure:,}" if isinstance(figure, int) else figure


def markdown(rows: Sequence[Row]) -> str:
    """A table. A cell is empty where a row lacks the heading."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [headings, *([shown(row.get(heading, "")) for heading in headings] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (map(str.rjust, line, widths) for line in cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
