"""Which faults the digest detects: each planted into loads between engines of each shape.

A fault is planted into decode's memory after a read has landed and before anyone is told. It is
detected if the load is reported as failed since its bytes are corrupt, and named if the reason
names the right layer, part and head, how many more, and tokens among which the place is. Then come
clean loads, of which none may fail. The threads, sockets, state machines and NIXL are the real
ones; only vLLM is missing.

The exit status is 0 only if each planted fault was detected and no clean load failed.
"""

import argparse
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.table import Table

from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import Loaded, Why
from nixl_kv.transport.base import Transport
from nixl_kv.transport.memory import Fabric, MemoryTransport
from pd.cluster import say_on_stderr
from pd.console import console
from pd.detect_cells import CELLS, Cell
from pd.detect_planting import FAULTS, Planted
from pd.detect_world import MakeTransport, Order, Outcome, World

SEEDS: Final = 10
WAVE: Final = 64
WIDTH: Final = 150

TOLD: Final = re.compile(
    r"what was read from prefill rank \d+ is not what it has: "
    r"(?P<part>\w+) of head (?P<head>\d+) of layer (?P<layer>\S+)"
    r"( and (?P<more>\d+) more heads)? "
    r"differs in tokens (?P<first>\d+) to (?P<last>\d+) .*"
)


@dataclass
class Tally:
    """What came of the loads of one cell."""

    planted: Counter[str] = field(default_factory=Counter)
    detected: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    clean: int = 0
    alarms: list[str] = field(default_factory=list)
    """Loads that failed, or were not verified, although nothing was planted there."""
    missed: list[str] = field(default_factory=list)
    """What became of planted ones that were not detected."""

    def add(self, outcome: Outcome) -> None:
        """Count one."""
        for rank, loaded in enumerate(outcome.loaded):
            if outcome.planted is not None and rank == outcome.rank:
                self._expect_corrupt(loaded, outcome.planted)
            else:
                self._expect_good(outcome, rank)
        if outcome.order.fault is None:
            self.clean += 1

    def _expect_corrupt(self, loaded: Loaded, planted: Planted) -> None:
        self.planted[planted.fault] += 1
        failure = loaded.failure
        if failure is not None and failure.why is Why.CORRUPT:
            self.detected[planted.fault] += 1
            self.named[planted.fault] += names(failure.detail, planted)
            return
        told = f"{failure.why.value}: {failure}" if failure else "good"
        self.missed.append(f"{loaded.request}: {told}")

    def _expect_good(self, outcome: Outcome, rank: int) -> None:
        loaded = outcome.loaded[rank]
        if loaded.failure is not None:
            self.alarms.append(f"{loaded.request} on rank {rank}: {loaded.failure}")
        elif not loaded.verified:
            self.alarms.append(f"{loaded.request} on rank {rank}: not verified")
        elif outcome.planted is None and not outcome.right:
            self.alarms.append(f"{loaded.request} on rank {rank}: wrong bytes, and nobody saw it")


def names(detail: str, planted: Planted) -> bool:
    """Whether a reason names what was planted."""
    told = TOLD.fullmatch(detail)
    if told is None:
        return False
    row = told["layer"], told["part"], int(told["head"])
    rows = row == planted.rows[0] and int(told["more"] or 0) == len(planted.rows) - 1
    return rows and int(told["first"]) <= planted.first and planted.last <= int(told["last"])


def orders_of(faults: Sequence[str], seeds: int, clean: int) -> list[Order]:
    """The loads of one cell."""
    planted = [
        Order(RequestId(f"{fault}-{seed}"), fault) for seed in range(seeds) for fault in faults
    ]
    return planted + [Order(RequestId(f"clean-{number}")) for number in range(clean)]


def run_cell(cell: Cell, make: MakeTransport, orders: Sequence[Order], *, seed: int = 0) -> Tally:
    """Make all loads between the two engines of a cell."""
    tally, world = Tally(), World(cell, make, wave=min(WAVE, len(orders)), seed=seed)
    try:
        for outcome in world.run(orders):
            tally.add(outcome)
    finally:
        world.close()
    return tally


def transport_of(kind: str) -> Callable[[], MakeTransport]:
    """For each cell, what makes its agents."""
    if kind == "memory":

        def in_memory() -> MakeTransport:
            fabric = Fabric()
            return lambda: MemoryTransport(fabric)

        return in_memory
    return lambda: _nixl


def _nixl() -> Transport:
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where it is used

    return NixlTransport()


def table_of(faults: Sequence[str], tallies: dict[str, Tally]) -> Table:
    """One row for each shape."""
    table = Table(title="detected / planted, and how many of these were named rightly")
    table.add_column("shape")
    for fault in faults:
        table.add_column(fault, justify="right")
    table.add_column("clean", justify="right")
    table.add_column("false\nalarms", justify="right")
    for name, tally in tallies.items():
        table.add_row(name, *(_cell(tally, fault) for fault in faults), *_clean(tally))
    table.add_section()
    total = total_of(tallies)
    table.add_row("all", *(_cell(total, fault) for fault in faults), *_clean(total))
    return table


def total_of(tallies: dict[str, Tally]) -> Tally:
    """Of all cells."""
    total = Tally()
    for tally in tallies.values():
        total.planted += tally.planted
        total.detected += tally.detected
        total.named += tally.named
        total.clean += tally.clean
        total.alarms += tally.alarms
        total.missed += tally.missed
    return total


def _cell(tally: Tally, fault: str) -> str:
    """A fault that a shape cannot have, such as a neighbour's head where there is one, is -."""
    planted, detected, named = (
        counts[fault] for counts in (tally.planted, tally.detected, tally.named)
    )
    if not planted:
        return "-"
    shown = f"{detected}/{planted} {named}"
    return shown if detected == named == planted else f"[red]{shown}[/red]"


def _clean(tally: Tally) -> tuple[str, str]:
    return str(tally.clean), str(len(tally.alarms))


def parse_arguments() -> argparse.Namespace:
    """The command line; `cells` are those chosen."""
    parser = argparse.ArgumentParser(
        prog="detect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=["nixl", "memory"], default="nixl")
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


def report(options: argparse.Namespace, tallies: dict[str, Tally], seconds: float) -> bool:
    """Print the table, what was wrong, and as the last line the sums; True if all is well."""
    console(WIDTH).print(table_of(options.faults, tallies))
    total = total_of(tallies)
    for name, tally in tallies.items():
        for line in (*tally.missed, *tally.alarms):
            print(f"{name}: {line}")
    planted, detected, named = (
        sum(counts.values()) for counts in (total.planted, total.detected, total.named)
    )
    print(
        f"{detected}/{planted} planted faults detected, {named}/{planted} named; "
        f"{len(total.alarms)} false alarms in {total.clean} clean loads; {seconds:.0f} s"
    )
    return detected == planted and not total.alarms


def main() -> int:
    """Run; the exit status."""
    options = parse_arguments()
    if options.list:
        print("\n".join(cell.name for cell in CELLS))
        print("\n".join(f"{name}: {fault.__doc__}" for name, fault in FAULTS.items()))
        return 0
    logging.disable(logging.INFO)  # of NIXL, for each agent
    begun_at, transport = time.monotonic(), transport_of(options.transport)
    tallies: dict[str, Tally] = {}
    for number, cell in enumerate(options.cells):
        each, more = divmod(options.clean, len(options.cells))
        orders = orders_of(options.faults, options.seeds, each + (number < more))
        since = time.monotonic()
        tallies[cell.name] = run_cell(cell, transport(), orders, seed=number)
        say_on_stderr(f"{cell.name}: {len(orders)} loads in {time.monotonic() - since:.1f} s")
    return 0 if report(options, tallies, time.monotonic() - begun_at) else 1


if __name__ == "__main__":
    sys.exit(main())
