"""What came of each cell of the matrix, and the table of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.markup import escape
from rich.table import Table

from pd.cells import Cell, Model
from pd.client import Counters
from pd.console import console

MIB = 2**20
WIDTH = 170
REASON_WIDTH = 150
HEADINGS: Final = (
    "model",
    "cell",
    "prefill",
    "decode",
    "answers",
    "loads",
    "failed",
    "computed",
    "MiB",
    "pieces",
    "s",
    "verdict",
)
COUNTED: Final = (
    "vllm:nixl_kv_loads_total",
    "vllm:nixl_kv_load_failures_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:nixl_kv_bytes_read_total",
    "vllm:nixl_kv_descriptors_total",
)
"""The counters of Figures, in its order."""


@dataclass(frozen=True)
class Figures:
    """What decode counted during a cell, over all its ranks."""

    loads: int = 0
    failures: int = 0
    prompts: int = 0  # in tokens
    cached: int = 0  # of these, by decode itself or by what it read
    nbytes: int = 0
    pieces: int = 0

    @classmethod
    def from_counters(cls, changed: Counters) -> "Figures":
        """Out of all that changed."""
        return cls(*(round(changed.get(name, 0.0)) for name in COUNTED))

    @property
    def computed(self) -> int:
        """How many tokens of the prompts were neither cached on decode nor read by it."""
        return self.prompts - self.cached


NOTHING: Final = Figures()


@dataclass(frozen=True)
class Outcome:
    """The answers and decode's figures of one cell.

    `trouble` is what kept it from its end, `reasons` is why decode did not load, in its own words.
    """

    model: Model
    cell: Cell
    trouble: str = ""
    total: int = 0
    same: int = 0
    ties: int = 0
    reasons: tuple[str, ...] = ()
    figures: Figures = NOTHING
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """Empty if all is well, else what is not."""
        if self.trouble:
            return self.trouble[:REASON_WIDTH]
        wrong = self.total - self.same - self.ties
        found = [f"{wrong} of {self.total} answers differ"] if wrong else []
        found += self._not_loaded() if self.cell.refused is None else self._not_refused()
        return "; ".join(found)

    def _not_loaded(self) -> list[str]:
        figures, wanted = self.figures, self.total * self.cell.decode.ranks
        found = [f"{figures.failures} loads failed"] if figures.failures else []
        found += self.reasons
        if figures.loads < wanted:
            found.append(f"{figures.loads} of {wanted} loads")
        if figures.computed > self.total:
            found.append(f"decode computed {figures.computed} tokens of its prompts")
        return found

    def _not_refused(self) -> list[str]:
        found = [f"{self.figures.loads} loads in spite of all"] if self.figures.loads else []
        found += [] if self.reasons else ["decode did not say why"]
        if not all(re.search(self.cell.refused or "", reason) for reason in self.reasons):
            found.append(f"not for {self.cell.refused!r}: {'; '.join(self.reasons)}")
        return found


def reasons_in(log: str) -> tuple[str, ...]:
    """Why loads failed, each reason once, cut to what a table can hold."""
    found = re.findall(r"KV not loaded: (.+)", log)
    return tuple(dict.fromkeys(reason[:REASON_WIDTH] for reason in found))


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """A table, one row for each cell."""
    table = Table(title="prefill and decode of different shapes, compared with a single engine")
    for heading in HEADINGS:
        right = heading in HEADINGS[4:-1]
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console(WIDTH).print(table)


def _cells(outcome: Outcome) -> list[str]:
    cell, figures = outcome.cell, outcome.figures
    ties = f" +{outcome.ties} ties" if outcome.ties else ""
    good = "refused" if cell.refused else "ok"
    return [
        outcome.model.name,
        cell.name,
        str(cell.prefill),
        str(cell.decode),
        f"{outcome.same}/{outcome.total}{ties}",
        str(figures.loads),
        str(figures.failures),
        str(figures.computed),
        f"{figures.nbytes / MIB:.2f}",
        str(figures.pieces),
        f"{outcome.seconds:.0f}",
        f"[red]{escape(outcome.verdict)}[/red]" if outcome.verdict else f"[green]{good}[/green]",
    ]
