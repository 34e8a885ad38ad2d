"""What the loads of one cell ended in, counted and shown."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lab.results import print_table
from nixl_kv.protocol.events import FailureKind, LoadEnded
from suites.detect.planting import Planted
from suites.detect.world import Outcome

REASON: Final = re.compile(
    r"the bytes from prefill rank \d+ are wrong: "
    r"(?P<part>.+?) of head (?P<head>\d+) of layer (?P<layer>.+?)"
    r"( and (?P<more>\d+) more heads)? "
    r"differs in tokens (?P<first>\d+) to (?P<last>\d+) .*"
)
"""Why a load is corrupt, in the words of `verify.digest` and `protocol.decode`."""


@dataclass
class Tally:
    """Of one cell, or of all."""

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
        for rank, report in enumerate(outcome.reports):
            if outcome.planted is not None and rank == outcome.rank:
                self._expect_corrupt(report, outcome.planted)
            else:
                self._expect_good(report, rank, outcome)
        if outcome.order.fault is None:
            self.clean += 1

    def _expect_corrupt(self, report: LoadEnded, planted: Planted) -> None:
        self.planted[planted.fault] += 1
        failure = report.failure
        if failure is not None and failure.kind is FailureKind.CORRUPT:
            self.detected[planted.fault] += 1
            self.named[planted.fault] += is_named(planted, failure.detail)
        else:
            self.missed.append(f"{report.request}: {failure or 'good'}")

    def _expect_good(self, report: LoadEnded, rank: int, outcome: Outcome) -> None:
        alarm = ""
        if report.failure is not None:
            alarm = str(report.failure)
        elif not report.verified:
            alarm = "not verified"
        elif outcome.planted is None and not outcome.is_right:
            alarm = "wrong bytes, and nothing detected them"
        if alarm:
            self.alarms.append(f"{report.request} on rank {rank}: {alarm}")


def is_named(planted: Planted, detail: str) -> bool:
    """Whether a reason names what was planted.

    That is: the first row, how many more rows, and tokens among which the planted ones are.
    """
    reason = REASON.fullmatch(detail)
    if reason is None:
        return False
    row = reason["layer"], reason["part"], int(reason["head"])
    rows_right = row == planted.rows[0] and int(reason["more"] or 0) == len(planted.rows) - 1
    tokens = range(int(reason["first"]), int(reason["last"]) + 1)
    return rows_right and planted.first in tokens and planted.last in tokens


def sum_of(tallies: Iterable[Tally]) -> Tally:
    """Of all cells."""
    total = Tally()
    for tally in tallies:
        total.planted += tally.planted
        total.detected += tally.detected
        total.named += tally.named
        total.clean += tally.clean
        total.alarms += tally.alarms
        total.missed += tally.missed
    return total


def report(faults: Sequence[str], tallies: Mapping[str, Tally], seconds: float) -> bool:
    """Print the table, what was wrong, and as the last line the sums; True if all is well."""
    total = sum_of(tallies.values())
    rows = [_row(name, tally, faults) for name, tally in (*tallies.items(), ("all", total))]
    print_table("detected / planted, and how many of these were named rightly", rows)
    for name, tally in tallies.items():
        for line in (*tally.missed, *tally.alarms):
            print(f"{name}: {line}")
    planted, detected, named = (
        counts.total() for counts in (total.planted, total.detected, total.named)
    )
    print(
        f"{detected}/{planted} planted faults detected, {named}/{planted} named; "
        f"{len(total.alarms)} false alarms in {total.clean} clean loads; {seconds:.0f} s"
    )
    return detected == planted and not total.alarms


def _row(name: str, tally: Tally, faults: Sequence[str]) -> dict[str, str]:
    """A fault that a shape cannot have, such as a neighbour's head where there is one, is -."""
    counts = {
        fault: f"{tally.detected[fault]}/{tally.planted[fault]} {tally.named[fault]}"
        if tally.planted[fault]
        else "-"
        for fault in faults
    }
    ends = {"clean": str(tally.clean), "false alarms": str(len(tally.alarms))}
    return {"shape": name, **counts, **ends}
