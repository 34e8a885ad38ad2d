"""Judges cells by answers: each must be that of a single engine, and all KV must be read.

Prompts go to the prefill engine and then, with its ticket, to the decode engine, as a router would
send them. A cell is good if every answer is that of a single engine without a connector, every
rank of decode has read for every prompt, and decode computed one token of each prompt itself. A
cell in which decode shall refuse is good if it did, said why, and the answers are right all the
same.

The columns: loads and failed loads, over the ranks of decode; tokens of the prompts that decode
computed itself; what it read, in how many pieces. "ties" are answers that part where the single
engine thinks both tokens equally likely, up to rounding. "drafts": how many of the tokens that
decode drafted were right, and how many of the single engine's, as shares.
"""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx

from harness.cluster.answers import Question
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import PATIENT, Device, EngineSpec, halves
from harness.cluster.metrics import FAILURES, LOADS, CountersSince, Loaded, accepted_share
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.processes import ProcessDiedError
from harness.cluster.prompts import NEW_WORDS, random_prompt
from lab.results import Results, Verdict, say_on_stderr, skipped, verdict_of
from suites.matrix.cells import Cell, Matrix, Shape

LENGTHS: Final = (5, 64, 127, 128, 129, 192, 300, 1100)
"""Shorter than a block, on and beside the edges of blocks of 64, 96 and 128, and many blocks."""
CONTINUED: Final = (300, 1100)
"""Which of them get a second turn."""
MOST_RANKS: Final[Mapping[Device, int]] = {"cpu": 3, "cuda": 16}
REQUEST_TIMEOUT_S: Final = 300.0
COUNTERS_LAG_S: Final = 30.0
CUDA_MEMORY: Final = 0.15
"""Of the device, for each engine: several share it."""
CUDA_KV_BYTES: Final = 2 << 30
NOT_LOADED: Final = re.compile(r"KV not loaded: (.+)")
LONGEST_REASON: Final = 150
FEWER_ACCEPTED: Final = 0.25
"""By how much the share of drafts that are right may be smaller on decode than on a single engine:
the prompts are few. Without the draft model's KV it is about none."""
MIB: Final = 2**20
NOTHING: Final = Loaded()


@dataclass(frozen=True)
class Place:
    """Where engines run."""

    device: Device = "cpu"
    dtype: str | None = None
    """None: float32 on CPU, the model's choice on GPUs."""
    num_gpus: int = 1
    most_ranks: int | None = None
    """How many run at a time; None: what the device usually bears."""


@dataclass(frozen=True)
class Outcome:
    """The answers of one cell, and what decode loaded for them."""

    model: str
    cell: str
    prefill: str
    decode: str
    decode_ranks: int
    refused: str | None
    """For what decode should refuse."""
    trouble: str = ""
    """What kept it from its end."""
    lacking: str = ""
    """What the machine lacks to run it."""
    total: int = 0
    same: int = 0
    ties: int = 0
    reasons: tuple[str, ...] = ()
    """Why decode did not load, in its own words."""
    loaded: Loaded = NOTHING
    accepted: float | None = None
    """Of what decode drafted, the share that was right."""
    accepted_alone: float | None = None
    """The same of the single engine."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Whether all is as it should be."""
        if self.lacking:
            return skipped(self.lacking)
        if self.trouble:
            return verdict_of(self.trouble[:LONGEST_REASON])
        wrong = self.total - self.same - self.ties
        differ = f"{wrong} of {self.total} answers differ" if wrong else ""
        if self.refused is None:
            return verdict_of(differ, *self._not_loaded())
        return verdict_of(differ, *self._not_refused(self.refused), good="refused")

    def _not_loaded(self) -> Iterator[str]:
        loaded, wanted = self.loaded, self.total * self.decode_ranks
        if loaded.failures:
            yield f"{loaded.failures} loads failed"
        yield from self.reasons
        if loaded.loads < wanted:
            yield f"{loaded.loads} of {wanted} loads"
        if self.accepted_alone and (self.accepted or 0.0) < self.accepted_alone - FEWER_ACCEPTED:
            yield f"drafts that were right, here and alone: {self._drafts()}"
        if loaded.computed > self.total:
            yield f"decode computed {loaded.computed} tokens of its prompts"

    def _drafts(self) -> str:
        shares = (self.accepted, self.accepted_alone)
        return "/".join("-" if share is None else f"{share:.2f}" for share in shares)

    def _not_refused(self, wanted: str) -> Iterator[str]:
        if self.loaded.loads:
            yield f"{self.loaded.loads} loads in spite of all"
        if not self.reasons:
            yield "decode did not say why"
        if not all(re.search(wanted, reason) for reason in self.reasons):
            yield f"not for {wanted!r}: {'; '.join(self.reasons)}"

    def cells(self) -> Mapping[str, str]:
        """See `lab.results.Result`."""
        ties = f" +{self.ties} ties" if self.ties else ""
        return {
            "model": self.model,
            "cell": self.cell,
            "prefill": self.prefill,
            "decode": self.decode,
            "answers": f"{self.same}/{self.total}{ties}",
            "loads": str(self.loaded.loads),
            "failed": str(self.loaded.failures),
            "computed": str(self.loaded.computed),
            "MiB": f"{self.loaded.nbytes / MIB:.2f}",
            "pieces": str(self.loaded.descriptors),
            "drafts": self._drafts(),
            "s": f"{self.seconds:.0f}",
        }


@dataclass(frozen=True)
class Reference:
    """The prompts of a cell, what a single engine answers, and how many of its drafts are right."""

    questions: Sequence[Question]
    tokens: int  # of each answer
    accepted: float | None


class Specs:
    """What engines of each shape are, always the same for the same shape."""

    def __init__(self, matrix: Matrix, place: Place) -> None:
        """On CPU engines run on halves of the cores in turn, on GPUs on these in turn."""
        self._matrix = matrix
        self._place = place
        self._paths: dict[str, Path] = {}
        self._known: dict[tuple[str, Shape, int], EngineSpec] = {}
        self._cores = itertools.cycle(halves(os.sched_getaffinity(0)))
        self._gpus = itertools.cycle(range(max(1, place.num_gpus)))

    def reference(self, model: str) -> EngineSpec:
        """An engine without a connector."""
        spec = self._base(f"{model}-alone", model, Shape())
        return replace(spec, cores=frozenset())

    def answer_tokens(self, model: str) -> int:
        """How long answers are."""
        return self._matrix.models[model].answer_tokens

    def of_cell(self, model: str, cell: Cell) -> tuple[EngineSpec, EngineSpec]:
        """Prefill and decode. No engine reads from itself."""
        again = int(cell.prefill == cell.decode)
        return self._engine(model, cell.prefill, 0), self._engine(model, cell.decode, again)

    def of_cells(self, model: str, cells: Sequence[Cell]) -> list[EngineSpec]:
        """All engines of some cells, each once."""
        specs = [spec for cell in cells for spec in self.of_cell(model, cell)]
        return [spec for at, spec in enumerate(specs) if spec not in specs[:at]]

    def batches(self, model: str, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
        """Cells in order, as many at a time as may run."""
        limit = self._place.most_ranks or MOST_RANKS[self._place.device]
        batch: list[Cell] = []
        for cell in cells:
            ranks = sum(spec.ranks for spec in self.of_cells(model, [*batch, cell]))
            if batch and ranks > limit:
                yield batch
                batch = []
            batch.append(cell)
        if batch:
            yield batch

    def _engine(self, model: str, shape: Shape, copy: int) -> EngineSpec:
        """One of several equal engines; in both roles, so that it may prefill and decode."""
        key = model, shape, copy
        if key not in self._known:
            name = f"{model}-{shape}" + (f"-{copy}" if copy else "")
            config = {**PATIENT, **({"layout": shape.layout} if shape.layout else {})}
            self._known[key] = replace(
                self._base(name, model, shape),
                role="both" if shape.pcp == 1 else "prefill",
                connector="nixl-kv",
                connector_config=config,
            )
        return self._known[key]

    def _base(self, name: str, model: str, shape: Shape) -> EngineSpec:
        place, served = self._place, self._matrix.models[model]
        on_cpu = place.device == "cpu"
        if model not in self._paths:
            self._paths[model] = ensure_tiny_model(model=served.recipe())
        arguments = ["--attention-backend", shape.backend] if shape.backend else []
        if shape.pcp > 1:
            arguments += ["--prefill-context-parallel-size", str(shape.pcp)]
        arguments += served.cpu_flags if on_cpu else ("--enforce-eager", *served.cuda_flags)
        return EngineSpec(
            name,
            self._paths[model],
            device=place.device,
            dtype=place.dtype or (served.cpu_dtype if on_cpu else served.cuda_dtype),
            tensor_parallel=shape.tp,
            pipeline_parallel=shape.pp,
            block_size=shape.block,
            kv_cache_bytes=None if on_cpu else CUDA_KV_BYTES,
            gpu_memory_utilization=CUDA_MEMORY,
            extra_args=(*arguments, *shape.flags),
            extra_env={}
            if on_cpu
            else {**served.cuda_env, "CUDA_VISIBLE_DEVICES": self._devices(shape)},
            cores=next(self._cores) if on_cpu else frozenset(),
        )

    def _devices(self, shape: Shape) -> str:
        """Engines of one rank go to the GPUs in turn, larger ones spread over the first."""
        return ",".join(map(str, [next(self._gpus)] if shape.ranks == 1 else range(shape.ranks)))


class AnswersJudge:
    """Compares answers; the engines are shared by the cells of a model."""

    title = "prefill and decode of different shapes, compared with a single engine"
    what = "cells are good"

    def __init__(self, matrix: Matrix, place: Place, names: Sequence[str], log_dir: Path) -> None:
        """Nothing starts yet."""
        self._plan = [
            (model, [cell for cell in cells if place.device in cell.answers])
            for model, cells in matrix.by_model(names)
            if place.device in matrix.models[model].devices
        ]
        self._place = place
        self._specs = Specs(matrix, place)
        self._log_dir = log_dir

    def lines(self) -> list[str]:
        """The cells that it runs or skips, one a line."""
        return [f"{model}/{cell.name}" for model, cells in self._plan for cell in cells]

    def run(self, results: Results) -> None:
        """Add what came of each cell."""
        limit = self._place.most_ranks or MOST_RANKS[self._place.device]
        with (
            contextlib.suppress(KeyboardInterrupt),
            Cluster(self._log_dir, most_ranks=limit) as cluster,
        ):
            for model, cells in self._plan:
                self._run_model(cluster, model, cells, results)

    def _run_model(
        self, cluster: Cluster, model: str, cells: Sequence[Cell], results: Results
    ) -> None:
        able = []
        for cell in cells:
            lacking = cell.missing("answers", self._place.device, self._place.num_gpus)
            if lacking:
                results.add(replace(outcome_of(model, cell), lacking=lacking))
            else:
                able.append(cell)
        groups = list(self._specs.batches(model, able))
        if not groups:
            return
        # On GPUs starting takes long and memory is plenty: the first engines start beside it.
        on_gpus = self._place.device == "cuda"
        beside = self._specs.of_cells(model, groups[0]) if on_gpus else []
        reference = self._specs.reference(model)
        tokens = self._specs.answer_tokens(model)
        with contextlib.suppress(ProcessDiedError):
            cluster.start(reference, *beside)
        try:
            with Client(cluster.start(reference)[0].url, timeout_s=REQUEST_TIMEOUT_S) as single:
                references = {
                    c.name: ask_single(single, seed, tokens) for seed, c in enumerate(able)
                }
        except (RuntimeError, httpx.HTTPError) as error:
            for cell in able:
                results.add(replace(outcome_of(model, cell), trouble=f"no reference: {error}"))
            return
        for group in groups:
            with contextlib.suppress(ProcessDiedError):  # which the cell that needs it says
                cluster.start(*self._specs.of_cells(model, group))
            for cell in group:
                say_on_stderr(f"{model}/{cell.name}")
                results.add(self.run_cell(cluster, model, cell, references[cell.name]))

    def run_cell(self, cluster: Cluster, model: str, cell: Cell, reference: Reference) -> Outcome:
        """One pair of engines; trouble is part of the outcome."""
        begin = time.monotonic()
        try:
            prefill, decode = cluster.start(*self._specs.of_cell(model, cell))
            with Pair(prefill, decode, timeout_s=REQUEST_TIMEOUT_S) as pair:
                outcome = compare(outcome_of(model, cell), pair, reference)
        except (RuntimeError, httpx.HTTPError) as error:
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            outcome = replace(outcome_of(model, cell), trouble=first_line)
        return replace(outcome, seconds=time.monotonic() - begin)


def outcome_of(model: str, cell: Cell) -> Outcome:
    """Of a cell that has not run."""
    return Outcome(
        model, cell.name, str(cell.prefill), str(cell.decode), cell.decode.ranks, cell.refused
    )


def ask_single(client: Client, seed: int, tokens: int) -> Reference:
    """The prompts of a cell, each cell having its own, and a single engine's answers to them.

    The last ones extend an earlier prompt and its answer, as a second turn does.
    """
    since = CountersSince(client)
    first = {n: Question.of(client, random_prompt(n, seed), tokens) for n in LENGTHS}
    later = [
        f"{first[length].prompt} {first[length].expected.text.strip()} "
        f"{random_prompt(NEW_WORDS, seed)}"
        for length in CONTINUED
    ]
    more = [Question.of(client, prompt, tokens) for prompt in later]
    return Reference([*first.values(), *more], tokens, accepted_share(since.changed()))


def compare(outcome: Outcome, pair: Pair, reference: Reference) -> Outcome:
    """Ask all questions, one after another, and count what decode loaded."""
    questions = reference.questions
    since, log_before = CountersSince(pair.to_decode), pair.decode.log_size()
    answers = [pair.complete(one.prompt, reference.tokens) for one in questions]
    wanted = len(questions) * outcome.decode_ranks
    changed = since.wait(lambda now: now[LOADS] + now[FAILURES] >= wanted, COUNTERS_LAG_S)
    dtype = pair.decode.spec.actual_dtype
    kinds = [one.compare(answer, dtype) for one, answer in zip(questions, answers, strict=True)]
    return replace(
        outcome,
        total=len(questions),
        same=kinds.count("same"),
        ties=kinds.count("tie"),
        reasons=reasons_in(pair.decode.log_text(log_before)),
        loaded=Loaded.from_counters(changed),
        accepted=accepted_share(changed),
        accepted_alone=reference.accepted,
    )


def reasons_in(log: str) -> tuple[str, ...]:
    """Why loads failed, each reason once, cut to what a table can hold."""
    return tuple(dict.fromkeys(reason[:LONGEST_REASON] for reason in NOT_LOADED.findall(log)))
