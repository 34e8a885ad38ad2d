"""The demo's table."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from pd.client import Answer
from pd.console import console
from pd.measure import Measured

MIB = 2**20
WIDTH_OF_A_RUN = 60
Runs = Mapping[str, Sequence[Measured]]


def print_table(reference: Sequence[Answer], runs: Runs) -> None:
    """One row per prompt; the runs of several connectors side by side."""
    console(20 + WIDTH_OF_A_RUN * len(runs)).print(_table(reference, runs))


def matches(reference: Sequence[Answer], run: Sequence[Measured]) -> int:
    """How many answers of a run are token for token those of the single engine."""
    return sum(
        expected.tokens == measured.answer.tokens
        for expected, measured in zip(reference, run, strict=True)
    )


def _table(reference: Sequence[Answer], runs: Runs) -> Table:
    table = Table(title="prefill and decode apart, compared with a single engine")
    table.add_column("#", justify="right")
    table.add_column("prompt\ntokens", justify="right")
    for name in runs:
        for heading in ("tokens\nmoved", "MiB", "descr.", "transfer\nms", "answer\nms", "match"):
            table.add_column(f"{name}\n{heading}" if len(runs) > 1 else heading, justify="right")
    for number, expected in enumerate(reference):
        cells = [str(number + 1), str(expected.prompt_tokens)]
        for run in runs.values():
            cells += _cells(expected, run[number])
        table.add_row(*cells)
    return table


def _cells(expected: Answer, measured: Measured) -> list[str]:
    moved = measured.moved
    same = expected.tokens == measured.answer.tokens
    return [
        str(moved.tokens) if moved.tokens else "[yellow]0[/yellow]",
        f"{moved.nbytes / MIB:.2f}",
        str(moved.descriptors),
        f"{moved.seconds * 1e3:.1f}",
        f"{measured.answer.seconds * 1e3:.0f}",
        "[green]yes[/green]" if same else "[red]NO[/red]",
    ]
