"""Judges cells by accuracy: runs the launcher, which evaluates a model behind prefill and decode.

Cells that need what this machine has not are skipped, with a word why. The environment reaches the
launcher (MODEL_NAMES, VERIFY, NUM_CONCURRENT, ...), but for the knobs of shape, which are the
cell's.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.cluster.models.files import REPO
from harness.cluster.processes import ManagedProcess, stop_all
from lab.accuracy.machine import Machine, detect
from lab.accuracy.settings import SHAPE_KNOBS, SettingError, parse
from lab.results import Results, Verdict, say_on_stderr, skipped, verdict_of
from suites.matrix.cells import Cell, Matrix, Shape

LAUNCHER: Final = REPO / "scripts" / "run_accuracy_test.sh"
GRACE_S: Final = 60.0
"""The launcher ends its engines in this time."""
POLL_S: Final = 0.5
GB: Final = 1e9
FIGURES: Final = (
    "accuracy P/D",
    "expected",
    "single",
    "tolerance",
    "loads",
    "failed",
    "tokens loaded",
    "GB moved",
)
GOOD: Final = "ok"


@dataclass(frozen=True)
class Outcome:
    """One model of one cell. Without a result it was skipped, or did not come so far."""

    cell: str
    trouble: str = ""
    lacking: str = ""
    seconds: float = 0.0
    result: Mapping[str, Any] = field(default_factory=dict)
    """What the launcher says of the model, in its own fields."""

    @property
    def verdict(self) -> Verdict:
        """The launcher's own, where there is one."""
        said = self.result.get("verdict", GOOD)
        said = "" if said == GOOD else str(said)
        return skipped(self.lacking) if self.lacking else verdict_of(self.trouble, said)

    def cells(self) -> Mapping[str, str]:
        """See `lab.results.Result`."""
        return {"case": self.cell} | self._figures() | {"wall s": f"{self.seconds:.0f}"}

    def _figures(self) -> dict[str, str]:
        result = self.result
        if not result:
            return dict.fromkeys(FIGURES, "-")
        counters = result["counters"]
        shares = (result[name] for name in ("accuracy", "expected", "single"))
        figures = (
            *("-" if share is None else f"{share:.4f}" for share in shares),
            f"{result['tolerance']:g}",
            f"{counters.get('loads_total', 0):.0f}",
            f"{counters.get('load_failures_total', 0):.0f}",
            f"{counters.get('tokens_loaded_total', 0):.0f}",
            f"{counters.get('bytes_read_total', 0) / GB:.3f}",
        )
        return dict(zip(FIGURES, figures, strict=True))


class AccuracyJudge:
    """Runs the launcher once for each cell."""

    title = "accuracy of prefill and decode apart"
    what = "results are good"

    def __init__(
        self, matrix: Matrix, names: Sequence[str], flags: Sequence[str], log_dir: Path
    ) -> None:
        """Nothing runs yet; `flags` are for the launcher.

        Raises:
            MatrixError: for a cell that is not there.
        """
        self._cells = matrix.of("accuracy", names)
        self._flags = flags
        self._log_dir = log_dir
        self._machine = detect(os.environ)

    def check(self) -> None:
        """Refuse the whole run for knobs and flags that the launcher would refuse later."""
        check_cells(self._cells, self._machine, self._flags)

    def lines(self) -> list[str]:
        """The cells that it runs or skips, one a line."""
        return [f"{cell.name:20} {cell.about}{self._remark(cell)}" for cell in self._cells]

    def run(self, results: Results) -> None:
        """Add what came of each cell: a result for each model."""
        for cell in self._cells:
            lacking = missing(cell, self._machine)
            outcomes = [Outcome(cell.name, lacking=lacking)] if lacking else self.run_cell(cell)
            for outcome in outcomes:
                results.add(outcome)

    def run_cell(self, cell: Cell) -> Iterator[Outcome]:
        """One run of the launcher, ended whatever happens."""
        result = self._log_dir / f"{cell.name}.json"
        process = ManagedProcess(cell.name, self._log_dir / f"{cell.name}.log")
        for old in (result, process.log_path):  # of an earlier run
            old.unlink(missing_ok=True)
        say_on_stderr(f"{cell.name}: {cell.about}; log in {process.log_path}")
        begin = time.monotonic()
        folders = ["--json", str(result), "--log-dir", str(self._log_dir / cell.name)]
        try:
            process.launch(
                ["bash", str(LAUNCHER), *self._flags, *folders], environment(cell, os.environ)
            )
            while process.is_running():
                time.sleep(POLL_S)
        finally:
            stop_all([process], grace_s=GRACE_S)
        seconds = time.monotonic() - begin
        return outcomes_of(cell, result, exit_code=process.exit_code(), seconds=seconds)

    def _remark(self, cell: Cell) -> str:
        lacking = missing(cell, self._machine)
        return f" ({lacking})" if lacking else ""


def missing(cell: Cell, machine: Machine) -> str:
    """What the machine lacks, in words; empty if it can run the cell."""
    return cell.missing("accuracy", machine.device, len(machine.gpus))


def check_cells(cells: Sequence[Cell], machine: Machine, flags: Sequence[str]) -> None:
    """Refuse the whole run for a cell that the launcher would refuse later.

    Raises:
        SettingError: names the cell, and what the launcher says.
    """
    for cell in cells:
        if not missing(cell, machine):
            try:
                parse(flags, environment(cell, os.environ), machine)
            except SettingError as error:
                raise SettingError(cell.name, None, str(error)) from error


def environment(cell: Cell, env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the launcher's knobs of this cell, and no other ones of shape."""
    others = {key: value for key, value in env.items() if key not in SHAPE_KNOBS}
    knobs = {
        "ATTENTION_BACKEND": cell.prefill.backend,
        **_knobs(cell.prefill, "PREFILL"),
        **_knobs(cell.decode, "DECODE"),
    }
    return others | {name: str(value) for name, value in knobs.items() if value is not None}


def _knobs(shape: Shape, side: str) -> dict[str, object]:
    """Those of one side; None is the launcher's default."""
    agent = {"PREFILL": "PREFILLER", "DECODE": "DECODER"}[side]
    return {
        f"NUM_{side}_INSTANCES": shape.instances if shape.instances > 1 else None,
        f"{agent}_TP_SIZE": shape.tp if shape.tp > 1 else None,
        f"{side}_BLOCK_SIZE": shape.block,
        f"{agent}_KV_LAYOUT": shape.layout,
    }


def outcomes_of(
    cell: Cell, path: Path, *, exit_code: int | None, seconds: float
) -> Iterator[Outcome]:
    """What the launcher left, for each model; its exit status has the last word."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    outcomes = [Outcome(cell.name, seconds=one["seconds"], result=one) for one in results]
    yield from outcomes
    all_good = all(outcome.verdict.kind == "good" for outcome in outcomes)
    if all_good and (exit_code != 0 or not outcomes):
        trouble = f"the launcher ended with status {exit_code}"
        yield Outcome(cell.name, trouble, seconds=seconds)
