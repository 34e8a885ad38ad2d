"""What happens to requests when engines are killed, stopped, cut off and crowded out?

Real engines on CPU, real NIXL. Each fault happens to a pair of engines that serves. Every request
must end in time, with the answer of a single engine or with an explicit error; then no block may be
held any more, and both engines must serve again, with KV that is read.

The columns: requests, and how they ended ("left" by a client that hung up); of how many decode read
the KV; the longest of them and what it was allowed; blocks that prefill and decode still held at
the end; how long it took, once the fault was over, until one was answered from KV that was read.

Faults of the network, and those that must hit a transfer halfway, happen between two network
namespaces, for which this must run as root.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import httpx

from pd.cluster import say_on_stderr
from pd.faults_clients import CLIENT_FAULTS
from pd.faults_deck import KINDS, Deck, load_answers
from pd.faults_network import NETWORK_FAULTS
from pd.faults_pair import Pair
from pd.faults_processes import PROCESS_FAULTS
from pd.faults_report import print_reports, write_json
from pd.faults_scene import Fault, Report, Where, run_fault
from pd.faults_stages import Place, pair_at, single_engine
from pd.faults_tickets import TICKET_FAULTS
from pd.processes import ProcessDiedError
from pd.tiny_model import ensure_tiny_model

FAULTS: Final = (*CLIENT_FAULTS, *TICKET_FAULTS, *PROCESS_FAULTS, *NETWORK_FAULTS)


def run_all(faults: Sequence[Fault], place: Place, reports: list[Report]) -> None:
    """Run them, where they happen; reports are added as they come."""
    deck = make_deck(place)
    for where in get_args(Where):
        here = [fault for fault in faults if fault.where == where]
        if here:
            with pair_at(where, place) as pair:
                reports += (run_one(fault, pair, deck) for fault in here)


def make_deck(place: Place) -> Deck:
    """The questions, with answers that are asked now if no earlier run has kept them."""
    path = place.model.with_suffix(".answers.json")
    return Deck(load_answers(path, KINDS, lambda: single_engine(place)))


def run_one(fault: Fault, pair: Pair, deck: Deck) -> Report:
    """Trouble is part of the report."""
    say_on_stderr(f"{fault.name}: {fault.about}")
    try:
        report = run_fault(fault, pair, deck)
    except (RuntimeError, httpx.HTTPError) as error:
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        report = Report(fault.name, fault.deadline_s, found=(first_line,))
    say_on_stderr(f"  {report.verdict or 'ok'}")
    return report


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
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-faults-"))
    say_on_stderr(f"logs in {log_dir}")
    reports: list[Report] = []
    try:
        with contextlib.suppress(KeyboardInterrupt):
            run_all(faults, Place(ensure_tiny_model(), log_dir), reports)
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
    finally:
        tell(reports, options.json)
    good = sum(not report.verdict for report in reports)
    print(f"{good}/{len(faults)} faults are survived")
    return 0 if good == len(faults) else 1


def tell(reports: Sequence[Report], path: Path | None) -> None:
    """What there is, also if it was cut short."""
    print_reports(reports)
    if path is not None:
        write_json(path, reports)


if __name__ == "__main__":
    sys.exit(main())
