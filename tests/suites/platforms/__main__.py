"""Does KV move, and are answers right, on the platforms that send requests to prefill and decode?

The platforms are the real ones, each with its own quick start and what the last column says; Ray
and Dynamo in environments of their own, which are made in .environments at the first run. Each
answer is compared with that of a single engine, the tokens that decode has loaded are counted, and
every engine must have offered or loaded something. What other platforms do to requests is replayed
in tests/e2e/test_platforms.py.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import httpx

from harness.cluster.client import Client, RefusedError
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import ProcessDiedError
from lab.results import Results
from suites.platforms import dynamo, ray_serve, router
from suites.platforms.asking import Outcome

Run = Callable[[Cluster, Client], Iterator[Outcome]]
"""Runs a platform, perhaps in several ways; the client is a single engine's."""

RUNS: Final[Mapping[str, Run]] = {"router": router.run, "ray": ray_serve.run, "dynamo": dynamo.run}


def main() -> int:
    """Run what the command line says; the exit status."""
    parser = argparse.ArgumentParser(
        prog="platforms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    options = parser.parse_args()
    results = Results("platforms", "are good", options.json)
    try:
        with Cluster(options.log_dir) as cluster:
            (single,) = cluster.start(EngineSpec("single", ensure_tiny_model()))
            with Client(single.url) as client:
                for name in options.only:
                    add_all(name, RUNS[name](cluster, client), results)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return results.print(len(results.all))


def add_all(name: str, outcomes: Iterator[Outcome], results: Results) -> None:
    """What comes of one platform; also that it does not start, or ends."""
    try:
        for outcome in outcomes:
            results.add(outcome)
    except (ProcessDiedError, RefusedError, TimeoutError, httpx.TransportError) as error:
        print(error, file=sys.stderr)
        results.add(Outcome(name, "", "", trouble=str(error).partition("\n")[0]))


if __name__ == "__main__":
    sys.exit(main())
