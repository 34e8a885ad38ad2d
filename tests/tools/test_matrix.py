"""The matrix's file, what becomes of its cells, and what a judge calls good."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.client import Counters
from harness.cluster.metrics import ACCEPTED, DRAFTED, Loaded, accepted_share
from suites.matrix import answers
from suites.matrix.cells import Cell, MatrixError, Shape, load

MATRIX = load()


@pytest.mark.parametrize(
    ("cell", "device", "num_gpus", "words"),
    [
        pytest.param(Cell("a", accuracy=("cuda",)), "cpu", 0, "needs cuda, this is cpu", id="gpu"),
        pytest.param(
            Cell("a", accuracy=("cpu", "cuda"), decode=Shape(tp=4)),
            "cuda",
            2,
            "needs 4 GPUs, here are 2",
            id="more gpus",
        ),
        pytest.param(
            Cell("a", accuracy=("cpu", "cuda"), decode=Shape(tp=4)), "cpu", 0, "", id="cpu"
        ),
    ],
)
def test_a_machine_that_lacks_something_says_what(
    cell: Cell, device: Any, num_gpus: int, words: str
) -> None:
    assert cell.missing("accuracy", device, num_gpus) == words


MODELS = "models: {m: {family: qwen3}}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "Expected `object`", id="empty"),
        pytest.param(MODELS, "missing required field `cells`", id="no cells"),
        pytest.param("models: {m: {family: q}}\ncells: []", "no family 'q'", id="family"),
        pytest.param(
            "models: {m: {family: qwen3, numbers: {kv: 1}}}\ncells: []", "'kv'", id="number"
        ),
        pytest.param(MODELS + "cells: [{}]", "missing required field `name`", id="no name"),
        pytest.param(MODELS + "cells: [{name: a, gpu: 1}]", "unknown field `gpu`", id="key"),
        pytest.param(
            MODELS + "cells: [{name: a, answers: [tpu]}]", "Invalid enum value 'tpu'", id="device"
        ),
        pytest.param(
            MODELS + "cells: [{name: a, decode: {tp: x}}]", "Expected `int`", id="no number"
        ),
        pytest.param(
            MODELS + "cells: [{name: a, models: [m]}, {name: a, models: [m]}]",
            "a: each cell needs a name of its own",
            id="same name",
        ),
        pytest.param(MODELS + "cells: [{name: a}]", "a: models are ['m']", id="no such model"),
        pytest.param(
            MODELS + "cells: [{name: a, models: [m], decode: {instances: 2}}]",
            "a: answers: one engine a side",
            id="answers of two engines",
        ),
        pytest.param(
            MODELS + "cells: [{name: a, models: [m], accuracy: [cpu], decode: {pp: 2}}]",
            "a: accuracy: no pp, flags, refused",
            id="accuracy of stages",
        ),
        pytest.param("cells: [", "matrix.yaml", id="no yaml"),
    ],
)
def test_what_is_not_allowed_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MatrixError) as raised:
        load(path)
    assert words in str(raised.value)


def test_some_cells_are_chosen_by_name() -> None:
    assert [cell.name for cell in MATRIX.of("accuracy", ["1p2d", "same"])] == ["same", "1p2d"]
    with pytest.raises(MatrixError, match="--only=foo: allowed are same"):
        MATRIX.of("accuracy", ["foo"])


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        pytest.param(["mla/same"], {"mla": ["same"]}, id="one"),
        pytest.param(["tp-2-3"], {"qwen3-kv12": ["tp-2-3"]}, id="a cell"),
        pytest.param(
            ["qwen3-kv1"],
            {"qwen3-kv1": ["tp-1-2", "tp-2-1"]},
            id="a model",
        ),
    ],
)
def test_cells_are_chosen_by_model(names: list[str], chosen: dict[str, list[str]]) -> None:
    by_model = {model: [c.name for c in cells] for model, cells in MATRIX.by_model(names)}
    assert by_model == chosen


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(MatrixError, match="--only=foo: allowed are "):
        list(MATRIX.by_model(["foo"]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_of_cells_bound_how_many_ranks_run(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "ensure_tiny_model", lambda **_: tmp_path)
    specs = answers.Specs(MATRIX, answers.Place(device, num_gpus=3))
    cells = [cell for cell in MATRIX.of("answers") if device in cell.answers]
    batches = list(specs.batches("qwen3", cells))
    assert [cell for batch in batches for cell in batch] == cells
    for batch in batches:
        ranks = sum(spec.ranks for spec in specs.of_cells("qwen3", batch))
        assert len(batch) == 1 or ranks <= answers.MOST_RANKS[device]
    assert len(batches) < len(cells)


def test_no_engine_reads_from_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ensure_tiny_model", lambda **_: tmp_path)
    specs = answers.Specs(MATRIX, answers.Place())
    for cell in MATRIX.of("answers"):
        prefill, decode = specs.of_cell("qwen3", cell)
        assert prefill.name != decode.name
        assert (prefill, decode) == specs.of_cell("qwen3", cell)


def test_a_model_is_only_served_where_vllm_can(tmp_path: Path) -> None:
    def models(device: Any) -> set[str]:
        judge = answers.AnswersJudge(MATRIX, answers.Place(device), [], tmp_path)
        return {line.split("/")[0] for line in judge.lines()}

    assert models("cuda") - models("cpu") == {"qwen3-next-mtp", "granite4", "kimi-linear"}
    assert models("cpu") < models("cuda")


@pytest.mark.parametrize(
    ("changed", "share"),
    [
        pytest.param({}, None, id="no draft model"),
        pytest.param({DRAFTED: 0.0, ACCEPTED: 0.0}, None, id="nothing drafted"),
        pytest.param({DRAFTED: 8.0}, 0.0, id="nothing right"),
        pytest.param({DRAFTED: 8.0, ACCEPTED: 6.0}, 0.75, id="some right"),
    ],
)
def test_the_share_of_drafts_that_are_right(changed: Counters, share: float | None) -> None:
    assert accepted_share(changed) == share


GOOD = answers.Outcome(
    "qwen3",
    "tp-1-2",
    "tp1",
    "tp2",
    decode_ranks=2,
    refused=None,
    total=10,
    same=9,
    ties=1,
    loaded=Loaded(loads=20, prompts=1000, cached=990),
)
REFUSED = replace(GOOD, refused="dtype", loaded=Loaded(failures=10), reasons=("dtype is x",))


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        pytest.param(GOOD, "ok", id="good"),
        pytest.param(replace(GOOD, lacking="needs cuda"), "skipped: needs cuda", id="skipped"),
        pytest.param(replace(GOOD, trouble="died"), "died", id="trouble"),
        pytest.param(replace(GOOD, same=8), "1 of 10 answers differ", id="another answer"),
        pytest.param(
            replace(GOOD, loaded=Loaded(loads=19, failures=1, cached=990, prompts=1000)),
            "1 loads failed; 19 of 20 loads",
            id="a load failed",
        ),
        pytest.param(
            replace(GOOD, loaded=Loaded(loads=20, prompts=1000, cached=980)),
            "decode computed 20 tokens of its prompts",
            id="computed",
        ),
        pytest.param(replace(GOOD, accepted=0.8, accepted_alone=0.9), "ok", id="drafts"),
        pytest.param(
            replace(GOOD, accepted=0.25, accepted_alone=0.75),
            "drafts that were right, here and alone: 0.25/0.75",
            id="wrong drafts",
        ),
        pytest.param(
            replace(GOOD, accepted_alone=0.75),
            "drafts that were right, here and alone: -/0.75",
            id="no drafts",
        ),
        pytest.param(REFUSED, "refused", id="refused"),
        pytest.param(replace(REFUSED, reasons=()), "decode did not say why", id="no reason"),
        pytest.param(
            replace(REFUSED, reasons=("late",)), "not for 'dtype': late", id="another reason"
        ),
        pytest.param(
            replace(REFUSED, loaded=Loaded(loads=1)), "1 loads in spite of all", id="not refused"
        ),
    ],
)
def test_verdict_on_answers(outcome: answers.Outcome, verdict: str) -> None:
    assert str(outcome.verdict) == verdict


def test_reasons_are_the_first_lines_of_failed_loads() -> None:
    log = "request a: KV not loaded: late\n    0.1 s asked\nrequest b: KV not loaded: late\nx\n"
    assert answers.reasons_in(log) == ("late",)
