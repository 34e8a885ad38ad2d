"""Does what strangers and clients may send kill an engine, or give a wrong answer?

Each case treats a prefill and a decode engine badly, and then sends an ordinary request, whose KV
must still come from prefill. Answers are compared with prefill's own. An engine that died, or a
pair that is of no use any more, is started anew for the next case.

A case is survived if every engine lives, no answer was wrong, none was missing, none failed with
a status of 500 or more, and the ordinary request was right with its KV loaded.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Connector
from harness.cluster.pair import Pair
from harness.cluster.processes import ProcessDiedError
from lab.results import Results, Verdict, say_on_stderr, verdict_of
from nixl_kv.errors import NixlKVError
from suites.demo import CONNECTORS
from suites.hostile import ports, tickets
from suites.hostile.victims import TIMEOUT_S, EngineGoneError, Tally, Victims, specs_of

LONGEST_TROUBLE: Final = 80


@dataclass(frozen=True)
class Case:
    """What is done to a pair. `fresh`: to engines that have not spoken with each other yet."""

    name: str
    act: Callable[[Victims, Tally], None]
    fresh: bool = False

    @property
    def about(self) -> str:
        """In words."""
        return (self.act.__doc__ or "").split("\n")[0]


@dataclass(frozen=True)
class Outcome:
    """What came of a case with one connector."""

    case: str
    sent: str
    connector: Connector
    survived: bool
    words: str
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """Whether it was survived, in all its words."""
        return verdict_of("" if self.survived else self.words, good=self.words)

    def cells(self) -> Mapping[str, str]:
        """See `lab.results.Result`."""
        return {
            "case": self.case,
            "what is sent": self.sent,
            "connector": self.connector,
            "s": f"{self.seconds:.0f}",
        }


CASES: Final[Sequence[Case]] = (
    Case("R1-port", ports.garbage, fresh=True),
    Case("R2-list", tickets.several_prompts),
    Case("R2-short", tickets.short_blocks),
    Case("R3-used", tickets.used_ticket),
    Case("R4-flag", tickets.lone_flag),
    Case("R5-engine", tickets.no_engine),
    Case("other-prompt", tickets.others_ticket),
    Case("late", tickets.late_tickets),
    Case("fields", tickets.bad_fields),
    Case("large", tickets.large_tickets),
    Case("foreign", tickets.foreign_host),
    Case("disconnect", tickets.disconnects),
    Case("answers", tickets.several_answers),
    Case("half-open", ports.half_open),
    Case("slow", ports.slow_senders),
    Case("flood", ports.flood),
)


def act(case: Case, victims: Victims) -> Tally:
    """Do it; what is raised on the way is part of what came of it."""
    tally = Tally()
    try:
        case.act(victims, tally)
    except EngineGoneError:
        pass  # seen below
    except (RuntimeError, httpx.HTTPError, NixlKVError) as error:
        tally.counts["failed"] += 1
        tally.notes.append(f"{type(error).__name__}: {error}"[:LONGEST_TROUBLE])
    return tally


class Runner:
    """Runs cases with one connector, and starts engines when they are needed."""

    def __init__(self, connector: Connector, cluster: Cluster) -> None:
        """Starts nothing."""
        self._connector = connector
        self._cluster = cluster
        self._victims: Victims | None = None
        self._untouched = False

    def run(self, case: Case) -> Outcome:
        """One case; trouble is part of the outcome."""
        victims = self._ready(fresh=case.fresh)
        self._untouched = False
        say_on_stderr(f"{self._connector}: {case.name}")
        begin = time.monotonic()
        tally = act(case, victims)
        dead = victims.dead()
        usable, afterwards = (False, "") if dead else victims.usable()
        dead = dead or victims.dead()
        lives = f"{' and '.join(dead)} DIED" if dead else "engines live"
        if dead or not usable:
            self.stop()
        words = "; ".join(filter(None, (lives, str(tally), afterwards)))
        survived = tally.good and usable and not dead
        seconds = time.monotonic() - begin
        return Outcome(case.name, case.about, self._connector, survived, words, seconds)

    def stop(self) -> None:
        """End the engines."""
        if self._victims is not None:
            self._victims.pair.close()
            self._cluster.end(*self._victims.pair.engines)
        self._victims = None

    def _ready(self, *, fresh: bool) -> Victims:
        """A pair that works; its engines load code at their first request."""
        if self._victims is None or (fresh and not self._untouched):
            self.stop()
            prefill, decode = self._cluster.start(*specs_of(self._connector))
            self._victims = Victims(self._connector, Pair(prefill, decode, timeout_s=TIMEOUT_S))
            self._untouched = True
            for engine in (prefill, decode):
                with Client(engine.url) as patient:
                    patient.complete(self._victims.prompt(20), 2)
        return self._victims


def run_all(connector: Connector, options: argparse.Namespace, cluster: Cluster) -> int:
    """All cases with one connector; what came of them is printed also if a signal ends it."""
    path: Path | None = options.json
    if path is not None and len(options.connectors) > 1:
        path = path.with_stem(f"{path.stem}-{connector}")
    title = f"what strangers and clients may send to {connector}"
    results, runner = Results(title, "cases survived", path), Runner(connector, cluster)
    status = 1
    try:
        for case in options.cases:
            results.add(runner.run(case))
    except ProcessDiedError as error:
        print(f"{connector}: {error}", file=sys.stderr)
    finally:
        runner.stop()
        status = results.print(len(options.cases))
    return status


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
        print("\n".join(f"{case.name:14}{case.about}" for case in CASES))
        return 0
    try:
        with Cluster(options.log_dir) as cluster:
            statuses = {one: run_all(one, options, cluster) for one in options.connectors}
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return statuses.get("nixl-kv", 0)


if __name__ == "__main__":
    sys.exit(main())
