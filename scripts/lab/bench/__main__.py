"""Measure what things cost; `bench WHAT --help` says more about each."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from lab.bench import digest, engines, events, idle, link, plan, reads, transfer, ttft
from lab.cluster.processes import ProcessDiedError


class Benchmark(NamedTuple):
    """What it answers, its options besides --json, and what measures, prints, gives the status."""

    about: str | None
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "ttft": Benchmark(ttft.__doc__, engines.add_options, ttft.run),
    "idle": Benchmark(idle.__doc__, engines.add_options, idle.run),
    "transfer": Benchmark(transfer.__doc__, transfer.add_options, transfer.run),
    "link": Benchmark(link.__doc__, link.add_options, link.run),
    "plan": Benchmark(plan.__doc__, plan.add_options, plan.run),
    "reads": Benchmark(reads.__doc__, plan.add_options, reads.run),
    "digest": Benchmark(digest.__doc__, digest.add_options, digest.run),
    "events": Benchmark(events.__doc__, events.add_options, events.run),
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; by default this process's."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, benchmark in BENCHMARKS.items():
        about = benchmark.about or ""
        command = commands.add_parser(
            name,
            help=about.partition("\n")[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
        benchmark.add_options(command)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; the exit status."""
    options = parse_arguments(arguments)
    try:
        return BENCHMARKS[options.what].run(options)
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
