"""Real engines of different shapes: some cells of scripts/matrix, which has all of them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import MODEL_RUNNER, Engine, EngineSpec
from harness.cluster.metrics import READS, CountersSince
from harness.cluster.pair import Pair
from lab.results import Results
from suites.matrix import cells
from suites.matrix.answers import (
    AnswersJudge,
    Outcome,
    Place,
    ask_single,
    compare,
    outcome_of,
)
from support.engines import EVENT_S, connect, started

pytestmark = pytest.mark.e2e

MATRIX = cells.load()
BY_NAME = {cell.name: cell for cell in MATRIX.cells}
SLOW_CELLS = (
    "qwen3/tp-2-1",
    "qwen3/block-64-96",
    "qwen3/pp-2-1",
    "qwen3/dtype",
    "gemma3/same",
    "mla/same",
)


def is_repacked() -> bool:
    """Whether vLLM is a wheel of scripts/lab/cpu_wheel.py."""
    return any(each.metadata["Version"].endswith("+cpu") for each in distributions(name="vllm"))


def is_broken_in_vllm(name: str) -> bool:
    """Whether vLLM on CPU cannot run a cell's engines, also without a connector."""
    # In a repacked vLLM 0.33, decode steps of an MLA model give other tokens than a prefill of the
    # same text.
    if name.startswith("mla/"):
        return is_repacked()
    # The V2 runner starts a kernel on the last stage of a pipeline that Triton cannot interpret:
    # `_apply_grammar_bitmask_kernel`, "mask has unsupported dtype".
    return "/pp-" in name and os.environ.get(MODEL_RUNNER) == "v2"


@pytest.fixture(scope="module")
def decode_engines(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
) -> Iterator[dict[str, Engine]]:
    """Decode engines of other shapes than the shared prefill engine.

    One of them has what it reads packed.
    """
    decode = base_specs[1]
    of_path = {path: {**decode.connector_config, "path": path} for path in ("direct", "staged")}
    specs = [
        replace(decode, name="decode-tp2", tensor_parallel=2, connector_config=of_path["direct"]),
        replace(decode, name="decode-block64", block_size=64, connector_config=of_path["staged"]),
    ]
    with started(cluster, *specs) as engines:
        for engine in engines:
            connect(base_engines[0], engine)
        yield dict(zip(("tp-1-2", "block-128-64"), engines, strict=True))


@pytest.mark.parametrize(("name", "path"), [("tp-1-2", "direct"), ("block-128-64", "staged")])
def test_answers_are_those_of_a_single_engine_and_all_kv_is_read(
    base_engines: tuple[Engine, Engine, Engine],
    decode_engines: dict[str, Engine],
    single: Client,
    name: str,
    path: str,
) -> None:
    questions = ask_single(single, seed=[*decode_engines].index(name), tokens=16)
    with Pair(base_engines[0], decode_engines[name]) as pair:
        since = CountersSince(pair.to_decode)
        outcome = compare(outcome_of("qwen3", BY_NAME[name]), pair, questions)
        assert outcome.verdict.words == "ok"
        counted = since.wait(lambda now: now[READS[path]] > 0, EVENT_S, step=True)
    assert {each for each, name in READS.items() if counted[name]} == {path}


@pytest.mark.slow
def test_the_same_for_more_shapes(tmp_path: Path) -> None:
    """By the program itself."""
    names = [name for name in SLOW_CELLS if not is_broken_in_vllm(name)]
    outcomes = judge(names, tmp_path)
    assert {f"{one.model}/{one.cell}": str(one.verdict) for one in outcomes} == {
        name: "refused" if name == "qwen3/dtype" else "ok" for name in names
    }


def judge(names: Sequence[str], log_dir: Path) -> list[Outcome]:
    results = Results("", "")
    AnswersJudge(MATRIX, Place(), names, log_dir).run(results)
    return [one for one in results.all if isinstance(one, Outcome)]
