"""Run the real transfer engines and schedulers under schedules of all that can happen.

By default: random schedules, by seed. Every promise is checked after every step and at the end of
each schedule, when the faults have ended. A schedule that breaks one is made as short as it gets
and printed, one step a line; sim/steps.py says what the words mean. Nothing of vLLM is needed.
"""

import argparse
import dataclasses
import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from sim.planted import PLANTED, Bug
from sim.random_schedules import PROFILES, RandomSchedule
from sim.schedule import Outcome, follow, read_schedule, replay
from sim.shrink import Shrinker

SHOWN: Final = 3  # failing schedules, for each check
SHRINK_RUNS: Final = 600  # for each planted bug


class Tally:
    """What came of many seeds."""

    def __init__(self) -> None:
        """Start with none."""
        self.checks: Counter[str] = Counter()
        self._worlds: set[str] = set()
        self._runs = self._good = self._verified = 0
        self._failed: Counter[str] = Counter()
        self._started_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the first."""
        return time.monotonic() - self._started_at

    def add(self, outcome: Outcome) -> bool:
        """One more; whether it is worth showing."""
        self._runs += 1
        self._worlds.add(outcome.lines[0])
        self._good += outcome.num_good
        self._verified += outcome.num_verified
        self._failed.update(each.failure.kind.value for each in outcome.failed)
        if outcome.violation is None:
            return False
        self.checks[outcome.violation.check] += 1
        return self.checks[outcome.violation.check] <= SHOWN

    def show(self, first: int) -> None:
        """All of it."""
        print(
            f"{self._runs} seeds from {first}, {len(self._worlds)} worlds: "
            f"{self.checks.total()} broke a promise; "
            f"{self.seconds:.0f} s, {self._runs / max(self.seconds, 1e-9):.0f} schedules/s"
        )
        reasons = ", ".join(f"{count} {why}" for why, count in self._failed.most_common())
        good = f"{self._good} good ({self._verified} verified)"
        print(f"loads: {good}; failed: {reasons or 'none'}")
        for check, count in self.checks.most_common():
            print(f"    {check}: {count}")


def random_runs(options: argparse.Namespace) -> int:
    """As many seeds as asked for, or as the time allows; the exit status."""
    tally = Tally()
    for seed in itertools.count(options.first):
        is_last = seed == options.first + options.seeds
        if tally.seconds >= 60 * options.minutes if options.minutes else is_last:
            break
        schedule = RandomSchedule.of(seed, options.only)
        outcome = follow(schedule.setting, schedule)
        if tally.add(outcome):
            _show(f"seed {seed} ({schedule.profile}, {schedule.setting.shape})", outcome)
    tally.show(options.first)
    return 1 if tally.checks else 0


def planted_runs(options: argparse.Namespace) -> int:
    """Each planted bug until it is caught; the exit status is 1 if one is not."""
    missed = 0
    print(f"{'bug':33} | {'caught by':38} | steps | seed")
    for name, bug in PLANTED.items():
        if options.only and not any(word in name for word in options.only):
            continue
        caught = _catch(bug, options)
        missed += caught is None
        print(f"{name:33} | {caught or 'NOT CAUGHT'}", flush=True)
    return 1 if missed else 0


def _catch(bug: Bug, options: argparse.Namespace) -> str | None:
    """By what, and how short the schedule is that shows it; None if none does."""

    def replay_with_bug(lines: Sequence[str]) -> Outcome:
        with bug.plant():
            outcome = replay(lines)
        if outcome.violation is not None and replay(outcome.lines).violation is not None:
            return dataclasses.replace(outcome, violation=None)  # not by this bug
        return outcome

    for seed in range(options.first, options.first + options.seeds):
        schedule = RandomSchedule.of(seed, bug.profiles)
        with bug.plant():
            outcome = follow(schedule.setting, schedule)
        if outcome.violation is not None and replay(outcome.lines).violation is None:
            best = Shrinker(outcome, runs=SHRINK_RUNS, replay=replay_with_bug).shrink()
            check = "" if best.violation is None else best.violation.check
            caught = f"{check:38} | {len(best.lines) - 1:5} | {seed}"
            return f"{caught}\n{_indented(best)}" if options.verbose else caught
    return None


def replay_text(text: str) -> int:
    """A schedule from a file, or as it is, with ';' between its steps; the exit status."""
    outcome = replay(read_schedule(text))
    print(f"{len(outcome.lines) - 1} steps, {outcome.num_good} good loads")
    for each in outcome.failed:
        print(f"    {each.request} failed: {each.failure}")
    print(outcome.violation or "no promise broken")
    return 1 if outcome.violation else 0


def _show(title: str, outcome: Outcome) -> None:
    best = Shrinker(outcome).shrink()
    print(f"{title}: {best.violation}\n{_indented(best)}", flush=True)


def _indented(outcome: Outcome) -> str:
    return "\n".join(f"    {line}" for line in outcome.lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, and run; the exit status."""
    parser = argparse.ArgumentParser(
        prog="simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--minutes", type=float, help="as many seeds as that takes instead")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--replay", metavar="SCHEDULE|FILE")
    parser.add_argument("--planted", action="store_true", help="bugs that have to be caught")
    parser.add_argument(
        "--only", nargs="+", default=[], help=f"profiles ({', '.join(PROFILES)}) or bugs"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="the code's log, the bugs' schedules"
    )
    options = parser.parse_args(arguments)
    if not (options.verbose and options.replay):
        logging.getLogger("nixl_kv").setLevel(logging.CRITICAL + 1)
    if options.replay is not None:
        return replay_text(options.replay)
    return planted_runs(options) if options.planted else random_runs(options)


if __name__ == "__main__":
    sys.exit(main())
