"""What happens to requests when engines are killed, stopped, cut off and crowded out?

Real engines on CPU, real NIXL. Each fault happens to a pair of engines that serves. Every request
must end in time, with the answer of a single engine or with an explicit error; then no block may be
held any more, and both engines must serve again, with KV that is read.

The columns: requests, and how they ended ("left" by a client that hung up); of how many decode read
the KV; the longest of them, and what each was allowed beside the time that a single engine took for
it; blocks that prefill and decode still held at the end; how long it took, once the fault was over,
until one was answered from KV that was read.

Faults of the network, and those that must hit a transfer halfway, happen between two network
namespaces, for which this must run as root.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import ProcessDiedError
from lab.results import Results, say_on_stderr
from suites.faults.faults import FAULTS
from suites.faults.questions import Questions
from suites.faults.scene import Fault, Where, run_fault
from suites.faults.stages import KV_CACHE_BYTES, stage_at


def run_all(faults: Sequence[Fault], cluster: Cluster, results: Results) -> None:
    """Run them, where they happen; results are added as they come."""
    model = ensure_tiny_model()
    (single,) = cluster.start(EngineSpec("single", model, kv_cache_bytes=KV_CACHE_BYTES))
    with Client(single.url) as client:
        questions = Questions(client)
        for where in get_args(Where):
            here = [fault for fault in faults if fault.where == where]
            if here:
                with stage_at(where, cluster, model) as stage:
                    for fault in here:
                        say_on_stderr(f"{fault.name}: {fault.about}")
                        results.add(run_fault(fault, stage, questions))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all requests' ends there")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    return parser.parse_args()


def main() -> int:
    """Run; 0 only if all is well under every fault."""
    options = parse_arguments()
    faults = [fault for fault in FAULTS if fault.name in options.only]
    if options.list:
        print("\n".join(f"{fault.name:18} {fault.where:8} {fault.about}" for fault in faults))
        return 0
    if os.geteuid() and any(fault.where == "network" for fault in faults):
        print("network namespaces need root; --list says which faults do", file=sys.stderr)
        return 2
    title = "real engines under faults, compared with a single engine"
    results = Results(title, "faults are survived", options.json)
    status = 1
    try:
        with contextlib.suppress(KeyboardInterrupt), Cluster(options.log_dir) as cluster:
            run_all(faults, cluster, results)
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
    finally:
        status = results.print(len(faults))
    return status


if __name__ == "__main__":
    sys.exit(main())
