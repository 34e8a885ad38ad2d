"""Engines of every pair of shapes in configs/matrix.yaml understand each other.

    pytest -m matrix                          # on GPUs: those that fit on them
    pytest -m matrix -k qwen3/tp-1-2          # a cell; `-k qwen3/` a model, `-k tp-1-2` a shape

Prompts go to prefill, and with its ticket to decode, as a router sends them. Every answer must be a
single engine's, every rank of decode must read every prompt, and decode may compute one token of
each. If decode should refuse, it must say why, and the answers must be right all the same.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from typing import Any, Final

import msgspec
import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import (
    CPU_DTYPE,
    MODEL_RUNNER,
    PATIENT,
    Device,
    Engine,
    EngineSpec,
    halves,
    shim_env,
)
from harness.cluster.metrics import (
    COMPUTED_TOKENS,
    FAILURES,
    LOADS,
    READS,
    VERIFIED,
    CountersSince,
    accepted_share,
)
from harness.cluster.models.families import FAMILIES
from harness.cluster.models.files import REPO, ensure_tiny_model
from harness.cluster.models.recipe import Family
from harness.cluster.pair import Pair
from harness.cluster.prompts import NEW_WORDS, random_prompt
from support.engines import (
    EVENT_S,
    HAS_AMX,
    HAS_BFLOAT16,
    NO_BFLOAT16,
    OFFER_TTL_S,
    expect_free,
    without_connector,
)
from support.gpus import NUM_GPUS, visible

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

DEVICE: Final[Device] = "cuda" if NUM_GPUS else "cpu"
MOST_RANKS: Final[Mapping[Device, int]] = {"cpu": 3, "cuda": 16}
"""How many run at a time, beside the engines that all tests share."""
LENGTHS: Final = (5, 64, 127, 128, 129, 192, 300, 1100)
"""Shorter than a block, on and beside the edges of blocks of 64, 96 and 128, and many blocks."""
CONTINUED: Final = (300, 1100)  # which of them get a second turn
REQUEST_TIMEOUT_S: Final = 300.0
CUDA_MEMORY: Final = 0.15  # of a GPU, for each engine: several share one
CUDA_KV_BYTES: Final = 2 << 30
NOT_LOADED: Final = re.compile(r"KV not loaded: (.+)")
FIRST_SEED: Final = 90_000  # no other test asks the shared engines these prompts
FEWER_ACCEPTED: Final = 0.25
"""The share of right drafts may be smaller by this on decode: the prompts are few. Without the
draft model's KV it is about zero."""
PATHS: Final = {"qwen3/tp-1-2": "direct", "qwen3/block-128-64": "staged"}
"""The cells that are not slow, and how decode reads in them."""


Reference = tuple[Sequence[Question], float | None]
"""A single engine's answers to a cell's prompts, and the share of its drafts that are right."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an engine divides and stores its KV cache; None is vLLM's own choice."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    block: int | None = None
    layout: str | None = None
    backend: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.pcp

    @property
    def is_shared(self) -> bool:
        """Whether the engines that all tests share have it; a block of CPU has 128 tokens."""
        return DEVICE == "cpu" and self in (Shape(), Shape(block=128))

    def __str__(self) -> str:
        """For names of logs: all that is not vLLM's own choice."""
        return re.sub(r"\W+", "-", str(msgspec.to_builtins(self))).strip("-") or "plain"


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    about: str = ""
    prefill: Shape = Shape()
    decode: Shape = Shape()
    models: tuple[str, ...] = ("qwen3",)
    devices: tuple[Device, ...] = ("cpu", "cuda")
    refused: str | None = None  # why decode should refuse, as a regular expression


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tiny model that all engines of a cell serve."""

    family: str
    numbers: dict[str, int] = {}
    cpu_dtype: str = CPU_DTYPE
    cuda_dtype: str = "float16"  # eight times finer than bfloat16: fewer ties between tokens
    cpu_flags: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = ()
    cuda_env: dict[str, str] = {}
    devices: tuple[Device, ...] = ("cpu", "cuda")  # on which vLLM runs the model
    answer_tokens: int = 16
    lengths: tuple[int, ...] = LENGTHS  # of prompts
    cpu_shim: str | None = None  # a folder of harness/cluster that mends vLLM's CPU build
    cuda_shim: str | None = None  # the same for GPUs
    rounds_by_tp: bool = False  # so the single engine needs decode's TP


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, Model]
    cells: tuple[Cell, ...]


MATRIX: Final = msgspec.yaml.decode((REPO / "configs/matrix.yaml").read_bytes(), type=Matrix)


def why_not(model: str, cell: Cell) -> str:
    """The reason why this machine or its vLLM cannot run a cell; empty if it can."""
    ranks = max(cell.prefill.ranks, cell.decode.ranks)
    if DEVICE not in set(cell.devices) & set(MATRIX.models[model].devices):
        return f"not for {DEVICE}"
    if DEVICE == "cuda" and ranks > NUM_GPUS:
        return f"needs {ranks} GPUs"
    served = MATRIX.models[model]
    if DEVICE == "cpu" and served.cpu_shim and served.cpu_dtype != CPU_DTYPE and not HAS_BFLOAT16:
        return NO_BFLOAT16
    # In a vLLM 0.33 that scripts/install has repacked, decode steps of an MLA model give other
    # tokens than a prefill of the same text.
    versions = [each.metadata["Version"] for each in distributions(name="vllm")]
    if model == "mla" and any(version.endswith("+cpu") for version in versions):
        return "vLLM's answers are wrong, also without a connector"
    # The V2 runner starts a kernel on the last stage of a pipeline that Triton cannot interpret:
    # `_apply_grammar_bitmask_kernel`, "mask has unsupported dtype".
    if os.environ.get(MODEL_RUNNER) == "v2" and max(cell.prefill.pp, cell.decode.pp) > 1:
        return "vLLM's V2 runner has no pipelines on CPU"
    if os.environ.get(MODEL_RUNNER) == "v2" and served.cpu_shim:
        return "one shim at a time"  # both are a sitecustomize.py
    return ""


def refusal_of(model: str, cell: Cell) -> str | None:
    """Why decode should refuse, as a regular expression; None if it should read.

    vLLM's attention on a CPU with AMX keeps bfloat16 in blocks that engines exchange whole.
    """
    served, is_unequal = MATRIX.models[model], cell.prefill.tp != cell.decode.tp
    is_bfloat16 = DEVICE == "cpu" and served.cpu_dtype == "bfloat16" and not served.cpu_shim
    if HAS_AMX and is_bfloat16 and is_unequal:
        return r"CPU_ATTN amx blocks of \d+ tokens and \d shards"
    return cell.refused


def param_of(model: str, cell: Cell) -> Any:
    name, reason = f"{model}/{cell.name}", why_not(model, cell)
    marks = [pytest.mark.skipif(bool(reason), reason=reason)]
    marks += [] if name in PATHS else [pytest.mark.slow]
    return pytest.param(model, cell, id=name, marks=marks)


def family_of(model: str) -> Family:
    served = MATRIX.models[model]
    return FAMILIES[served.family](**served.numbers)


def spec_of(model: str, shape: Shape, side: int, **config: object) -> EngineSpec:
    """Prefill is side 0, decode side 1."""
    served, role = MATRIX.models[model], ("prefill", "decode")[side]
    arguments = ["--attention-backend", shape.backend] if shape.backend else []
    if shape.pcp > 1:
        arguments += ["--prefill-context-parallel-size", str(shape.pcp)]
    spec = EngineSpec(
        f"{model}-{role}-{shape}",
        ensure_tiny_model(model=family_of(model)),
        role="decode" if side else "prefill",
        connector="nixl-kv",
        # The engines that all tests share have no key.
        connector_config={**PATIENT, "offer_ttl_s": OFFER_TTL_S, "insecure": True, **config},
        device=DEVICE,
        tensor_parallel=shape.tp,
        pipeline_parallel=shape.pp,
        block_size=shape.block,
    )
    if shape.layout:
        spec = replace(spec, connector_config={**spec.connector_config, "layout": shape.layout})
    shim = served.cpu_shim if DEVICE == "cpu" else served.cuda_shim
    env = shim_env(shim, is_interpreted=DEVICE == "cpu") if shim else {}
    if DEVICE == "cpu":
        flags = (*arguments, *served.cpu_flags, *shape.flags)
        cores = halves(os.sched_getaffinity(0))[side]
        return replace(spec, dtype=served.cpu_dtype, extra_args=flags, cores=cores, extra_env=env)
    # Engines of one rank have a GPU each, if there are as many; larger ones begin at the first.
    gpus = [side % NUM_GPUS] if shape.ranks == 1 else range(shape.ranks)
    return replace(
        spec,
        dtype=served.cuda_dtype,
        extra_args=("--enforce-eager", *arguments, *served.cuda_flags, *shape.flags),
        extra_env={**env, **served.cuda_env, **visible(*gpus)},
        gpu_memory_utilization=CUDA_MEMORY,
        kv_cache_bytes=CUDA_KV_BYTES,
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Ends those that no cell has used for the longest."""
    logs = tmp_path_factory.mktemp("matrix")
    with Cluster(logs, most_ranks=MOST_RANKS[DEVICE]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def reference_of(
    request: pytest.FixtureRequest, engines: Cluster
) -> Callable[[str, Cell], Reference]:
    """Asks a model's single engine the prompts of all chosen cells at once."""

    @functools.cache
    def references(model: str, tp: int) -> dict[str, Reference]:
        items = [one.callspec.params for one in request.session.items if one.path == request.path]  # type: ignore[attr-defined]
        chosen = [params["cell"] for params in items if params["model"] == model]
        if model == "qwen3" and DEVICE == "cpu":
            engine: Engine = request.getfixturevalue("base_engines")[2]
        else:
            spec = without_connector(spec_of(model, Shape(tp=tp), 0), f"{model}-single-{tp}")
            (engine,) = engines.start(replace(spec, cores=frozenset()))
        with Client(engine.url, timeout_s=REQUEST_TIMEOUT_S) as single:
            cells = [cell for cell in chosen if tp_of_single(model, cell) == tp]
            return {cell.name: ask_single(single, model, cell) for cell in cells}

    return lambda model, cell: references(model, tp_of_single(model, cell))[cell.name]


def tp_of_single(model: str, cell: Cell) -> int:
    return cell.decode.tp if MATRIX.models[model].rounds_by_tp else 1


def ask_single(single: Client, model: str, cell: Cell) -> Reference:
    """Each cell has prompts of its own; the last ones are second turns of earlier ones."""
    since, tokens = CountersSince(single), MATRIX.models[model].answer_tokens
    seed = FIRST_SEED + MATRIX.cells.index(cell)
    lengths = MATRIX.models[model].lengths
    first = {n: Question.of(single, random_prompt(n, seed), tokens) for n in lengths}
    later = [
        f"{first[length].prompt} {first[length].expected.text.strip()} "
        f"{random_prompt(NEW_WORDS, seed)}"
        for length in CONTINUED
        if length in first
    ]
    more = [Question.of(single, prompt, tokens) for prompt in later]
    return [*first.values(), *more], accepted_share(since.changed())


@pytest.fixture
def pair(
    request: pytest.FixtureRequest,
    engines: Cluster,
    reference_of: Callable[[str, Cell], Reference],
    model: str,
    cell: Cell,
) -> Iterator[Pair]:
    reference_of(model, cell)  # the single engine goes first: its start may end others
    shared: list[Engine | None] = [None, None]
    path, specs = PATHS.get(f"{model}/{cell.name}"), []
    for side, shape in enumerate((cell.prefill, cell.decode)):
        if model == "qwen3" and shape.is_shared:
            shared[side] = request.getfixturevalue("base_engines")[side]
        else:
            specs.append(spec_of(model, shape, side, **({"path": path} if path else {})))
    started = iter(engines.start(*specs))
    prefill, decode = (engine or next(started) for engine in shared)
    with Pair(prefill, decode, timeout_s=REQUEST_TIMEOUT_S) as pair:
        yield pair
        for client in (pair.to_prefill, pair.to_decode):
            expect_free(client)


@pytest.mark.parametrize(
    ("model", "cell"),
    [
        param_of(model, cell)
        for model in MATRIX.models
        for cell in MATRIX.cells
        if model in cell.models
    ],
)
def test_answers_are_those_of_a_single_engine_and_all_kv_is_read(
    reference_of: Callable[[str, Cell], Reference], pair: Pair, model: str, cell: Cell
) -> None:
    questions, accepted = reference_of(model, cell)
    dtype = pair.decode.spec.actual_dtype
    since, log_before = CountersSince(pair.to_decode), pair.decode.log_size()
    answers = [pair.complete(one.prompt, one.num_tokens) for one in questions]
    loads = len(questions)
    changed = since.wait(lambda now: now[LOADS] + now[FAILURES] >= loads, EVENT_S)
    tie = family_of(model).tie
    pairs = zip(questions, answers, strict=True)
    likenesses = [one.compare(got, dtype, tie) for one, got in pairs]
    assert "other" not in likenesses
    reasons = set(NOT_LOADED.findall(pair.decode.log_text(log_before)))
    if refused := refusal_of(model, cell):
        assert [bool(re.search(refused, reason)) for reason in reasons] == [True]
        assert (changed[LOADS], changed[FAILURES]) == (0, len(questions))
        return
    assert not reasons
    assert (changed[LOADS], changed[FAILURES]) == (loads, 0)
    assert changed[COMPUTED_TOKENS] <= len(questions)
    assert since.wait(lambda now: now[VERIFIED] >= loads, EVENT_S)[VERIFIED] == loads
    if path := PATHS.get(f"{model}/{cell.name}"):
        read = since.wait(lambda now: now[READS[path]] > 0, EVENT_S, step=True)
        assert {name for name, counter in READS.items() if read[counter]} == {path}
    if accepted is not None:
        assert (accepted_share(changed) or 0) >= accepted - FEWER_ACCEPTED
