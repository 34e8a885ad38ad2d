"""Does KV move between engines of any shape? Each cell is one pair of shapes.

Prompts go to the prefill engine and then, with its ticket, to the decode engine, as a router would
send them. A cell is good if every answer is that of a single engine without a connector, every
rank of decode has read for every prompt, and decode computed one token of each prompt itself. A
cell in which decode shall refuse is good if it did, said why, and the answers are right all the
same.

The columns: loads and failed loads, over the ranks of decode; tokens of the prompts that decode
computed itself; what it read, in how many pieces. "ties" are answers that part where the single
engine found both tokens equally likely, up to rounding.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from pd.asking import TIES, Asked, ask_apart, ask_single, likeness
from pd.cells import TP1, Cell, Model, batches, chosen, engines_of, needed
from pd.client import Client, Counters
from pd.cluster import say_on_stderr
from pd.engines import Device
from pd.outcomes import Figures, Outcome, print_outcomes, reasons_in
from pd.pool import Place, Pool, Wanted

MOST_RANKS: Final[Mapping[Device, int]] = {"cpu": 3, "cuda": 16}
REQUEST_TIMEOUT_S = 300.0
COUNTERS_LAG_S = 5.0
Expected = Mapping[str, Sequence[Asked]]  # of the cells, by name
Plan = Sequence[tuple[Model, Sequence[Cell]]]


class Runner:
    """Runs the cells of one model, with the engines of a pool."""

    def __init__(self, pool: Pool, model: Model, outcomes: list[Outcome]) -> None:
        """Starts nothing. Outcomes are added to those that are there."""
        self.pool = pool
        self.model = model
        self.outcomes = outcomes

    def run(self, cells: Sequence[Cell], most_ranks: int) -> None:
        """All cells, as many at a time as their ranks allow."""
        groups = list(batches(cells, most_ranks))
        reference = Wanted(self.model, TP1, alone=True)
        # On GPUs starting takes long and memory is plenty: the first engines start beside it.
        beside = self._wanted(groups[0]) if self.pool.place.device == "cuda" else []
        self.pool.keep([])
        self.pool.ensure([reference, *beside])
        try:
            expected = self.ask_reference(reference, cells)
        except (RuntimeError, httpx.HTTPError) as error:
            said = f"no reference: {error}"
            self.outcomes += [Outcome(self.model, cell, said) for cell in cells]
            return
        for group in groups:
            wanted = self._wanted(group)
            self.pool.keep(wanted)
            self.pool.ensure(wanted)
            for cell in group:
                self.outcomes.append(self.run_cell(cell, expected[cell.name]))

    def ask_reference(self, reference: Wanted, cells: Sequence[Cell]) -> Expected:
        """What the single engine answers to the prompts of each cell."""
        with Client(self.pool.engine(reference).url, timeout_s=REQUEST_TIMEOUT_S) as client:
            return {cell.name: ask_single(client, seed) for seed, cell in enumerate(cells)}

    def run_cell(self, cell: Cell, asked: Sequence[Asked]) -> Outcome:
        """One pair of engines; trouble is part of the outcome."""
        say_on_stderr(f"{self.model.name}/{cell.name}")
        begin = time.monotonic()
        try:
            outcome = self.compare(cell, asked)
        except (RuntimeError, httpx.HTTPError) as error:
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            outcome = Outcome(self.model, cell, first_line, seconds=time.monotonic() - begin)
        say_on_stderr(f"  {outcome.verdict or 'ok'}")
        return outcome

    def compare(self, cell: Cell, asked: Sequence[Asked]) -> Outcome:
        """Ask all prompts, one after another, and count."""
        prefill, decode = (
            self.pool.engine(Wanted(self.model, shape, copy)) for shape, copy in engines_of(cell)
        )
        begin = time.monotonic()
        with (
            Client(prefill.url, timeout_s=REQUEST_TIMEOUT_S) as source,
            Client(decode.url, timeout_s=REQUEST_TIMEOUT_S) as target,
        ):
            before, log_before = target.counters(), decode.log_path.stat().st_size
            answers = ask_apart(source, target, [one.prompt for one in asked])
            seconds = time.monotonic() - begin
            figures = settled(target, before, len(asked) * cell.decode.ranks)
        tie = TIES[decode.spec.dtype]
        kinds = [likeness(one.answer, got, tie) for one, got in zip(asked, answers, strict=True)]
        said = decode.log_path.read_bytes()[log_before:].decode(errors="replace")
        return Outcome(
            self.model,
            cell,
            total=len(asked),
            same=kinds.count("same"),
            ties=kinds.count("tie"),
            reasons=reasons_in(said),
            figures=figures,
            seconds=seconds,
        )

    def _wanted(self, cells: Sequence[Cell]) -> list[Wanted]:
        return [Wanted(self.model, shape, copy) for shape, copy in needed(cells)]


def settled(client: Client, before: Counters, loads: int) -> Figures:
    """What changed since `before`; waits a moment until that many loads have ended."""
    deadline = time.monotonic() + COUNTERS_LAG_S
    while True:
        now = client.counters()
        changed = {name: value - before.get(name, 0.0) for name, value in now.items()}
        figures = Figures.from_counters(changed)
        if figures.loads + figures.failures >= loads or time.monotonic() > deadline:
            return figures
        time.sleep(0.1)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="a model, a cell, or model/cell; --list shows them",
    )
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--dtype", choices=list(TIES), help="default: float32 on CPU")
    parser.add_argument("--gpus", type=int, default=1, help="how many there are; default 1")
    parser.add_argument("--ranks", type=int, help="how many run at a time, at most")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    return parser.parse_args()


def run_all(plan: Plan, place: Place, ranks: int | None) -> int:
    """Run all models and print what came of them, also if a signal ends it; the exit status."""
    outcomes: list[Outcome] = []
    cells_in_all = sum(len(cells) for _, cells in plan)
    try:
        with contextlib.suppress(KeyboardInterrupt), Pool(place) as pool:
            for model, cells in plan:
                runner = Runner(pool, model, outcomes)
                runner.run(cells, ranks or MOST_RANKS[place.device])
    finally:
        good = sum(not outcome.verdict for outcome in outcomes)
        print_outcomes(outcomes)
        print(f"{good}/{cells_in_all} cells are good")
    return 0 if 0 < good == cells_in_all else 1


def main() -> int:
    """Run; 0 only if all cells are good."""
    options = parse_arguments()
    plan = list(chosen(options.device, options.only, gpus=options.gpus))
    if options.list:
        print("\n".join(f"{model.name}/{cell.name}" for model, cells in plan for cell in cells))
        return 0
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-matrix-"))
    say_on_stderr(f"logs in {log_dir}")
    return run_all(plan, Place(options.device, options.dtype, options.gpus, log_dir), options.ranks)


if __name__ == "__main__":
    sys.exit(main())
