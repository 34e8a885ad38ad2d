"""What came of an evaluation: the verdict, tables, and the same as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.table import Table

from pd.accuracy_models import Subject
from pd.accuracy_run import Part
from pd.accuracy_settings import Settings
from pd.console import console

WIDTH: Final = 120
ROUNDING: Final = 1e-9  # of a difference that lies on the edge
UNKNOWN: Final = "no accuracy is known; set EXPECTED_ACCURACY, or compare with --single"
NONE_WANTED: Final[Mapping[str, str]] = {
    "load_failures_total": "loads failed: what decode recomputes proves nothing",
    "tickets_refused_total": "tickets were refused, and their prompts computed on decode",
    "tickets_missing_total": "prompts came to decode without a ticket, and were computed there",
}
ALL_WANTED: Final = ("loads_total", "tokens_loaded_total", "bytes_read_total")
HEADINGS: Final = (
    "engines", "accuracy", "expected", "tolerance", "items", "errors", "start s", "eval s",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of one model. `trouble` is what kept it from its end."""

    subject: Subject
    settings: Settings
    pair: Part | None = None
    single: Part | None = None
    trouble: str = ""
    seconds: float = 0.0

    @property
    def differing(self) -> int | None:
        """How many answers of the pair are not the single engine's; None without one."""
        if self.pair is None or self.single is None:
            return None
        ours, theirs = self.pair.score.answers, self.single.score.answers
        return sum(ours.get(key) != theirs.get(key) for key in ours.keys() | theirs.keys())

    @property
    def verdict(self) -> str:
        """Empty if all is well, else what is not."""
        if self.trouble:
            return self.trouble
        if self.pair is None:
            return "nothing was evaluated"
        return "; ".join([*self._inaccurate(self.pair), *self._unproven(self.pair)])

    @property
    def compared(self) -> bool:
        """Whether there is an accuracy to compare with."""
        return self.subject.expected is not None or self.single is not None

    def _inaccurate(self, pair: Part) -> list[str]:
        """Whether P/D is near what is expected, and near the single engine."""
        single = None if self.single is None else self.single.score.accuracy
        references = {"expected": self.subject.expected, "the single engine": single}
        tolerance = self.subject.tolerance
        return [
            f"accuracy {pair.score.accuracy:.4f} is not within {tolerance:g} of {value:.4f}"
            f" ({name})"
            for name, value in references.items()
            if value is not None and abs(pair.score.accuracy - value) > tolerance + ROUNDING
        ]

    def _unproven(self, pair: Part) -> list[str]:
        """What was not read over NIXL says nothing about it, however right it is."""
        counters = pair.counters
        found = [
            f"{counters[name]:.0f} {words}"
            for name, words in NONE_WANTED.items()
            if counters.get(name)
        ]
        found += self._not_loaded(pair)
        loads = round(counters.get("loads_total", 0.0))
        verified = round(counters.get("loads_verified_total", 0.0))
        if self.settings.verify == "all" and verified < loads:
            found.append(f"only {verified} of {loads} loads were verified by a digest")
        if pair.score.errors:
            found.append(f"{pair.score.errors} requests failed and were sent again")
        return found

    def _not_loaded(self, pair: Part) -> list[str]:
        """Of each prompt decode computes the last token, and has or reads all others."""
        if not all(pair.counters.get(name) for name in ALL_WANTED):
            return ["nothing was loaded over NIXL: decode computed every prompt itself"]
        items = pair.score.items
        loads = round(pair.counters["loads_total"])
        wanted = items * self.settings.decode.tensor_parallel
        found = []
        if loads < wanted:
            found.append(f"only {loads} of {wanted} loads: decode computed the other prompts")
        if pair.computed > items:
            found.append(f"decode computed {pair.computed} tokens of {items} prompts itself")
        return found


def print_outcome(outcome: Outcome) -> None:
    """The tables of one model, and its verdict."""
    to = console(WIDTH)
    to.print(_scores(outcome))
    if outcome.pair is not None:
        to.print(_counters(outcome.pair))
        print(f"tokens of prompts that decode computed itself: {outcome.pair.computed}")
        if not outcome.compared:
            print(f"{outcome.pair.score.accuracy:.4f} was compared with NOTHING: {UNKNOWN}")
    if outcome.differing is not None and outcome.pair is not None:
        items = len(outcome.pair.score.answers)
        print(f"answers that differ from the single engine's: {outcome.differing} of {items}")
    if outcome.subject.instead_of:
        print(f"{outcome.subject.instead_of} was NOT evaluated: no hub, and no local copy")
    verdict = f"FAILED: {outcome.verdict}" if outcome.verdict else "ok"
    print(f"{outcome.subject.name}: {verdict} ({outcome.seconds:.0f} s in all)", flush=True)


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """All outcomes, for programs: a list of `summary`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([summary(outcome) for outcome in outcomes], indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def summary(outcome: Outcome) -> dict[str, object]:
    """One outcome without its answers."""
    subject = outcome.subject
    return {
        "model": subject.name,
        "instead_of": subject.instead_of,
        "task": subject.task,
        "accuracy": outcome.pair and outcome.pair.score.accuracy,
        "expected": subject.expected,
        "single": outcome.single and outcome.single.score.accuracy,
        "tolerance": subject.tolerance,
        "items": outcome.pair.score.items if outcome.pair else 0,
        "differing": outcome.differing,
        "computed": outcome.pair.computed if outcome.pair else 0,
        "counters": dict(outcome.pair.counters) if outcome.pair else {},
        "seconds": outcome.seconds,
        "verdict": outcome.verdict or "ok",
    }


def _scores(outcome: Outcome) -> Table:
    subject = outcome.subject
    table = Table(title=f"{subject.name}, {subject.task}: prefill and decode apart")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "engines" else "right")
    known = "-" if subject.expected is None else f"{subject.expected:.4f}"
    for name, part in (("P/D", outcome.pair), ("single", outcome.single)):
        if part is not None:
            score = part.score
            figures = (f"{score.accuracy:.4f}", known, f"{subject.tolerance:g}", str(score.items))
            times = (str(score.errors), f"{part.start_s:.0f}", f"{score.seconds:.0f}")
            table.add_row(name, *figures, *times)
    return table


def _counters(part: Part) -> Table:
    """Those that are not 0, and the names of the others."""
    zero = [name for name, value in sorted(part.counters.items()) if not value]
    table = Table(
        title="nixl_kv's counters, added up over the decode engines",
        caption=f"0: {', '.join(zero)}" if zero else None,
    )
    table.add_column("name", min_width=WIDTH // 2)
    table.add_column("value", justify="right", min_width=WIDTH // 4)
    for name, value in sorted(part.counters.items()):
        if value:
            table.add_row(name, f"{value:,.0f}" if value == round(value) else f"{value:,.3f}")
    return table
