"""Measure what things cost; `bench WHAT --help` says more about each."""

import argparse
import importlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lab.bench import record

BENCHMARKS: Final = (
    *("ttft", "load", "floor", "step", "idle"),  # engines of vLLM
    *("transfer", "connect", "link", "digest", "events", "scale"),  # NIXL is enough
    "gather",  # a GPU, or two
    "tcp",  # NIXL and root
    *("plan", "report"),
)
"""Modules beside this one, each with `add_options`, and `run`, which gives the exit status."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, by default this process's; `run` is what it asks for.

    Modules are imported only when they are asked for: not every machine has what others need.
    """
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write them there for `bench report`, with command, date, machine and versions",
    )
    parser.add_argument(
        "--commit", help="for the record, where this is a copy without the checkout's history"
    )
    module.add_options(parser)
    return parser.parse_args(chosen.rest, argparse.Namespace(run=module.run))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.record and not options.json:
            options.json = Path(folder) / "results.json"
        try:
            status: int = options.run(options)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        if options.record and options.json.exists():  # else nothing was measured
            record.save(options.record, arguments, options.json, commit=options.commit)
    return status


if __name__ == "__main__":
    sys.exit(main())
