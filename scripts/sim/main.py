"""Run the protocol's real code under schedules of everything that can happen, and check it.

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
from pathlib import Path
from typing import Final

from sim import standins

standins.install()

from sim.dice import PROFILES, Dice  # noqa: E402 - nixl_kv may be imported from here on
from sim.exhaustive import Explorer, shortest  # noqa: E402
from sim.planted import PLANTED, Bug  # noqa: E402
from sim.run import Outcome, follow, joined, replay  # noqa: E402
from sim.scenes import SCENES  # noqa: E402
from sim.shrink import Shrinker  # noqa: E402

SHOWN: Final = 3  # failing schedules
SHRINK_RUNS: Final = 600  # for each planted bug


class Tally:
    """What came of many seeds."""

    def __init__(self) -> None:
        """Begin with none."""
        self.runs = 0
        self.good = self.verified = 0
        self.checks: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._began = time.monotonic()

    def count(self, outcome: Outcome) -> bool:
        """One more; whether it is worth showing."""
        self.runs += 1
        self.good += outcome.good
        self.verified += outcome.verified
        self.failed.update(failed.why.value for failed in outcome.failed)
        if outcome.violation is None:
            return False
        self.checks[outcome.violation.check] += 1
        return self.checks[outcome.violation.check] <= SHOWN

    def show(self, first: int) -> None:
        """All of it."""
        seconds = time.monotonic() - self._began
        print(
            f"{self.runs} seeds from {first}: {self.checks.total()} broke a promise; "
            f"{seconds:.0f} s, {self.runs / max(seconds, 1e-9):.0f} schedules/s"
        )
        reasons = ", ".join(f"{count} {why}" for why, count in self.failed.most_common())
        good = f"{self.good} good ({self.verified} verified)"
        print(f"loads: {good}; failed: {reasons or 'none'}")
        for check, count in self.checks.most_common():
            print(f"    {check}: {count}")


def random_runs(options: argparse.Namespace) -> int:
    """Many seeds; the exit status."""
    tally = Tally()
    for seed in range(options.first, options.first + options.seeds):
        dice = Dice.of(seed)
        if options.only and dice.profile not in options.only:
            continue
        outcome = follow(dice.setting, dice)
        if tally.count(outcome):
            _show(f"seed {seed} ({dice.profile}, {dice.setting.shape})", outcome)
    tally.show(options.first)
    return 1 if tally.checks else 0


def exhaustive_runs(options: argparse.Namespace) -> int:
    """All scenes, to a depth; the exit status."""
    broken = 0
    for scene in SCENES:
        if options.only and not any(word in scene.name for word in options.only):
            continue
        began = time.monotonic()
        found = Explorer(scene).explore(options.depth, most=options.most)
        broken += len(found.violations)
        print(
            f"{scene.name}: depth {found.depth}, alphabet {len(scene.alphabet)}: "
            f"{found.schedules} schedules run, {found.states} states, {found.pruned} led to a "
            f"known one, {len(found.violations)} broke a promise; "
            f"{time.monotonic() - began:.0f} s"
            + (" (cut off)" if found.schedules >= options.most else ""),
            flush=True,
        )
        outcome = shortest(found)
        if outcome is not None:
            _show(scene.name, outcome)
    return 1 if broken else 0


def planted_runs(options: argparse.Namespace) -> int:
    """Each planted bug until it is caught; the exit status is 1 if one is not."""
    missed = 0
    print(f"{'bug':34} {'caught by':36} {'seed':>6} {'steps':>6}")
    for name, bug in PLANTED.items():
        if options.only and not any(word in name for word in options.only):
            continue
        try:
            caught = _catch(bug, options)
        except AttributeError as error:  # the code has moved on
            caught = None
            print(f"{name:34} cannot be planted: {error}", flush=True)
        missed += caught is None
        print(f"{name:34} {'NOT CAUGHT' if caught is None else caught}", flush=True)
    return 1 if missed else 0


def _catch(bug: Bug, options: argparse.Namespace) -> str | None:
    """By what, by which seed, and how short the schedule is that shows it."""

    def again(lines: Sequence[str]) -> Outcome:
        with bug.plant():
            outcome = replay(lines)
        if outcome.violation is not None and replay(outcome.lines).violation is not None:
            return dataclasses.replace(outcome, violation=None)  # not by this bug
        return outcome

    dices = (Dice.of(seed) for seed in itertools.count(options.first))
    chosen = (dice for dice in dices if not bug.profiles or dice.profile in bug.profiles)
    for dice in itertools.islice(chosen, options.seeds):
        with bug.plant():
            outcome = follow(dice.setting, dice)
        if outcome.violation is not None and replay(outcome.lines).violation is None:
            best = Shrinker(outcome, runs=SHRINK_RUNS, again=again).shrink()
            check = "" if best.violation is None else best.violation.check
            found = f"{check:36} {dice.seed:6} {len(best.lines) - 1:6}"
            return f"{found}\n{_indented(best)}" if options.verbose else found
    return None


def replayed(schedule: str) -> int:
    """A schedule from a file, or as it is, with ';' between its steps."""
    path = Path(schedule)
    text = path.read_text(encoding="utf-8") if path.is_file() else schedule.replace(";", "\n")
    lines = [line.strip() for line in text.splitlines()]
    outcome = replay([line for line in lines if line and not line.startswith("#")])
    print(f"{len(outcome.lines) - 1} steps, {outcome.good} good loads")
    for failed in outcome.failed:
        print(f"    {failed.request} failed: {failed.detail}")
    print(outcome.violation or "no promise broken")
    return 1 if outcome.violation else 0


def _show(title: str, outcome: Outcome) -> None:
    best = Shrinker(outcome).shrink()
    print(f"{title}: {best.violation}\n{_indented(best)}", flush=True)


def _indented(outcome: Outcome) -> str:
    return joined(f"    {line}" for line in outcome.lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, and run; the exit status."""
    parser = argparse.ArgumentParser(
        prog="simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--depth", type=int, help="all schedules of this many steps instead")
    parser.add_argument("--most", type=int, default=10**9, help="schedules per scene, with --depth")
    parser.add_argument("--replay", metavar="SCHEDULE|FILE")
    parser.add_argument("--planted", action="store_true", help="bugs that have to be found")
    parser.add_argument(
        "--only", nargs="+", default=[], help=f"profiles ({', '.join(PROFILES)}), scenes or bugs"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="the code's log, the bugs' schedules"
    )
    options = parser.parse_args(arguments)
    if not (options.verbose and options.replay):
        logging.getLogger("nixl_kv").setLevel(logging.CRITICAL + 1)
    if options.replay is not None:
        return replayed(options.replay)
    if options.depth is not None:
        return exhaustive_runs(options)
    return planted_runs(options) if options.planted else random_runs(options)


if __name__ == "__main__":
    sys.exit(main())
