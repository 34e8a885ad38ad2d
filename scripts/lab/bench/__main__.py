"""Measure transfers and engines; `bench WHAT --help` says what each benchmark measures."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lab.bench import record
from lab.results import Results

BENCHMARKS: Final = (
    *("transfer", "connect"),  # need NIXL
    "tcp",  # needs NIXL and root
    "gather",  # needs Triton, and a GPU or two
    *("floor", "load", "idle"),  # need vLLM
)
"""Modules beside this one. `add_options` adds their options, `measure` yields their rows."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of one benchmark. Import no other: this machine may lack its packages."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("what", choices=BENCHMARKS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...")
    chosen = parser.parse_args(arguments)
    module: Any = importlib.import_module(f"lab.bench.{chosen.what}")
    parser = argparse.ArgumentParser(
        prog=f"bench {chosen.what}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the rows to this JSON file, with command, hardware and versions",
    )
    parser.add_argument("--commit", help="for the record, if the checkout has no git history")
    module.add_options(parser)
    return parser.parse_args(chosen.rest, argparse.Namespace(measure=module.measure))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of all rows. The exit status is 0 only if all rows are good."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    results = Results(shlex.join(["bench", *arguments]), "rows are good")
    try:
        for row in options.measure(options):
            results.add(row)
    finally:
        if options.record and results.all:
            record.save(options.record, arguments, results.all, options.commit)
    return results.print(len(results.all))


if __name__ == "__main__":
    sys.exit(main())
