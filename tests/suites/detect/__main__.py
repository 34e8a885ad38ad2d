"""Which faults the digest detects: each planted into loads between engines of each shape.

A fault is planted into decode's memory after a read has landed, before its end is known. It is
detected if the load is reported as failed since its bytes are corrupt. It is named if the reason
names the right layer, part and head, how many more, and tokens among which the fault is. Then come
clean loads, of which none may fail. The transfer engines, their sockets and NIXL are the real ones;
only vLLM is missing.

The exit status is 0 only if each planted fault was detected and no clean load failed.

`detect --answers` does the same to engines of vLLM, and looks at their answers: see its --help.
"""

import argparse
import logging
import sys
import time

from harness.local.engine import HOST_PATHS
from lab.results import say_on_stderr
from suites import damage
from suites.detect.cells import CELLS
from suites.detect.planting import FAULTS
from suites.detect.runs import TRANSPORTS, orders_of, run_cell
from suites.detect.tally import Tally, report

SEEDS = 10


def parse_arguments() -> argparse.Namespace:
    """The command line; `cells` are those chosen."""
    parser = argparse.ArgumentParser(
        prog="detect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="nixl")
    parser.add_argument("--path", choices=HOST_PATHS, default="direct")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="loads for each fault and shape")
    parser.add_argument("--clean", type=int, default=0, help="clean loads, over all shapes")
    parser.add_argument("--only", nargs="+", metavar="SHAPE", help="some shapes; see --list")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--list", action="store_true", help="name the shapes and faults, and end")
    options = parser.parse_args()
    known = {cell.name: cell for cell in CELLS}
    if unknown := set(options.only or ()) - known.keys():
        parser.error(f"no such shape: {', '.join(sorted(unknown))}")
    options.cells = [known[name] for name in options.only or known]
    return options


def main() -> int:
    """Run; the exit status."""
    if sys.argv[1:2] == ["--answers"]:
        return damage.main(sys.argv[2:])
    options = parse_arguments()
    if options.list:
        print("\n".join(cell.name for cell in CELLS))
        print("\n".join(f"{name}: {fault.__doc__}" for name, fault in FAULTS.items()))
        return 0
    logging.disable(logging.WARNING)  # each planted fault is a failed load, which is logged
    started_at = time.monotonic()
    tallies: dict[str, Tally] = {}
    for number, cell in enumerate(options.cells):
        each, more = divmod(options.clean, len(options.cells))
        orders = orders_of(options.faults, options.seeds, each + (number < more))
        cell_started_at = time.monotonic()
        make = TRANSPORTS[options.transport]()
        tallies[cell.name] = run_cell(cell, make, orders, seed=number, path=options.path)
        seconds = time.monotonic() - cell_started_at
        say_on_stderr(f"{cell.name}: {len(orders)} loads in {seconds:.1f} s")
    return 0 if report(options.faults, tallies, time.monotonic() - started_at) else 1


if __name__ == "__main__":
    sys.exit(main())
