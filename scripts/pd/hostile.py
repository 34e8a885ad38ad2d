"""Does what strangers and clients may send kill an engine, or give a wrong answer?

Each case treats a prefill and a decode engine badly, and then sends an ordinary request, whose KV
must still come from prefill. Answers are compared with prefill's own. An engine that died, or a
pair that is of no use any more, is started anew for the next case.

A case is survived if every engine lives, no answer was wrong, none was missing, none failed with
a status of 500 or more, and the ordinary request was right with its KV loaded.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx
from rich.markup import escape
from rich.table import Table

from nixl_kv.errors import NixlKVError
from pd import hostile_ports, hostile_tickets
from pd.client import Client
from pd.cluster import Cluster, say_on_stderr
from pd.console import console
from pd.demo import CONNECTORS
from pd.engines import Connector
from pd.hostile_pair import EngineGoneError, Pair, Tally, cluster_of
from pd.processes import ProcessDiedError

WIDTH = 170
SHOWN_TROUBLE = 80  # characters


@dataclass(frozen=True)
class Case:
    """What is done to a pair. `fresh`: to engines that have not spoken with each other yet."""

    name: str
    act: Callable[[Pair, Tally], None]
    fresh: bool = False

    @property
    def sent(self) -> str:
        """In words."""
        return (self.act.__doc__ or "").split("\n")[0]


@dataclass(frozen=True)
class Outcome:
    """What came of a case with one connector."""

    case: str
    connector: Connector
    survived: bool
    words: str
    seconds: float


CASES: Final[Sequence[Case]] = (
    Case("R1-port", hostile_ports.garbage, fresh=True),
    Case("R2-list", hostile_tickets.several_prompts),
    Case("R2-short", hostile_tickets.short_blocks),
    Case("R3-used", hostile_tickets.used_ticket),
    Case("R4-flag", hostile_tickets.lone_flag),
    Case("R5-engine", hostile_tickets.no_engine),
    Case("other-prompt", hostile_tickets.others_ticket),
    Case("late", hostile_tickets.late_tickets),
    Case("fields", hostile_tickets.bad_fields),
    Case("large", hostile_tickets.large_tickets),
    Case("foreign", hostile_tickets.foreign_host),
    Case("disconnect", hostile_tickets.disconnects),
    Case("answers", hostile_tickets.several_answers),
    Case("half-open", hostile_ports.half_open),
    Case("slow", hostile_ports.slow_senders),
    Case("flood", hostile_ports.flood),
)


def act(case: Case, pair: Pair) -> Tally:
    """Do it; what is raised on the way is part of what came of it."""
    tally = Tally()
    try:
        case.act(pair, tally)
    except EngineGoneError:
        pass  # seen below
    except (RuntimeError, httpx.HTTPError, NixlKVError) as error:
        tally.counts["failed"] += 1
        tally.notes.append(f"{type(error).__name__}: {error}"[:SHOWN_TROUBLE])
    return tally


class Runner:
    """Runs cases with one connector, and starts engines when they are needed."""

    def __init__(self, connector: Connector, log_dir: Path) -> None:
        """Starts nothing."""
        self._connector = connector
        self._log_dir = log_dir
        self._cluster: Cluster | None = None
        self._pair: Pair | None = None
        self._untouched = False

    def run(self, case: Case) -> Outcome:
        """One case; trouble is part of the outcome."""
        pair = self._ready(fresh=case.fresh)
        self._untouched = False
        say_on_stderr(f"{self._connector}: {case.name}")
        begin = time.monotonic()
        tally = act(case, pair)
        dead = pair.dead()
        usable, afterwards = (False, "") if dead else pair.usable()
        dead = dead or pair.dead()
        lives = f"{' and '.join(dead)} DIED" if dead else "engines live"
        if dead or not usable:
            self.stop()
        words = "; ".join(filter(None, (lives, str(tally), afterwards)))
        say_on_stderr(f"  {words}")
        survived = tally.good and usable and not dead
        return Outcome(case.name, self._connector, survived, words, time.monotonic() - begin)

    def stop(self) -> None:
        """End the engines."""
        if self._pair is not None:
            self._pair.close()
        if self._cluster is not None:
            self._cluster.stop()
        self._pair = self._cluster = None

    def _ready(self, *, fresh: bool) -> Pair:
        """A pair that works; its engines load code at their first request."""
        if self._pair is None or (fresh and not self._untouched):
            self.stop()
            log_dir = self._log_dir / f"{self._connector}-{time.monotonic_ns()}"
            self._cluster = cluster_of(self._connector, log_dir)
            self._cluster.__enter__()
            self._pair = Pair(self._connector, self._cluster)
            self._untouched = True
            for engine in self._cluster.engines:
                with Client(engine.url) as patient:
                    patient.complete(self._pair.prompt(20), 2)
        return self._pair


def print_outcomes(outcomes: Sequence[Outcome], connectors: Sequence[Connector]) -> None:
    """One row for each case, the connectors side by side."""
    table = Table(title="what strangers and clients may send", show_lines=True)
    for heading in ("case", "what is sent", *connectors):
        table.add_column(heading)
    found = {(outcome.case, outcome.connector): outcome for outcome in outcomes}
    for case in CASES:
        cells = [_cell(found.get((case.name, connector))) for connector in connectors]
        if any(cells):
            table.add_row(case.name, case.sent, *cells)
    console(WIDTH).print(table)
    for connector in connectors:
        mine = [outcome for outcome in outcomes if outcome.connector == connector]
        print(f"{connector}: {sum(o.survived for o in mine)}/{len(mine)} cases survived")


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    colour = "green" if outcome.survived else "red"
    return f"[{colour}]{escape(outcome.words)}[/{colour}] ({outcome.seconds:.0f} s)"


def run_all(options: argparse.Namespace, log_dir: Path, outcomes: list[Outcome]) -> None:
    """All cases with each connector, added to the outcomes one by one."""
    for connector in options.connectors:
        runner = Runner(connector, log_dir)
        try:
            for case in options.cases:
                outcomes.append(runner.run(case))
                write_json(options.json, outcomes)
        except ProcessDiedError as error:
            print(f"{connector}: {error}", file=sys.stderr)
        finally:
            runner.stop()


def write_json(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    """What is known by now, if it is wanted."""
    if path is not None:
        path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


def parse_arguments() -> argparse.Namespace:
    """The command line; `connectors` are those chosen."""
    names: Mapping[str, Case] = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(
        prog="hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connector", choices=[*CONNECTORS, "both"], default="nixl-kv")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    options = parser.parse_args()
    options.connectors = CONNECTORS if options.connector == "both" else (options.connector,)
    options.cases = [names[name] for name in options.only]
    return options


def main() -> int:
    """Run; 0 only if nixl-kv, where it was asked for, survived everything."""
    options = parse_arguments()
    if options.list:
        print("\n".join(f"{case.name:14}{case.sent}" for case in CASES))
        return 0
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-hostile-"))
    say_on_stderr(f"logs in {log_dir}")
    outcomes: list[Outcome] = []
    try:
        run_all(options, log_dir, outcomes)
    except KeyboardInterrupt:
        say_on_stderr("interrupted")
    finally:  # also when a signal ends it
        print_outcomes(outcomes, options.connectors)
    ours = [outcome for outcome in outcomes if outcome.connector == "nixl-kv"]
    complete = "nixl-kv" not in options.connectors or len(ours) == len(options.cases)
    return 0 if complete and all(outcome.survived for outcome in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
