"""The matrix's file, what becomes of its cells, and what a judge calls good."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.client import Counters
from harness.cluster.metrics import ACCEPTED, DRAFTED, Loaded, accepted_share
from lab.accuracy.machine import Machine
from lab.accuracy.settings import SettingError, parse
from lab.results import Results, Verdict
from suites.matrix import accuracy, answers
from suites.matrix.cells import Cell, MatrixError, Shape, load

CPU = Machine()
GPUS = Machine("cuda", ("0", "1"), ("FLASH_ATTN", "FLASHINFER"))
MATRIX = load()
ACCURACY_CELLS = MATRIX.of("accuracy")


@pytest.mark.parametrize("cell", ACCURACY_CELLS, ids=lambda cell: cell.name)
def test_the_launcher_accepts_every_cell_where_it_can_run(cell: Cell) -> None:
    able = [machine for machine in (CPU, GPUS) if not accuracy.missing(cell, machine)]
    assert able
    for machine in able:
        settings = parse([], accuracy.environment(cell, {}), machine)
        shapes = (settings.prefill, cell.prefill), (settings.decode, cell.decode)
        for side, shape in shapes:
            assert (side.tensor_parallel, side.instances) == (shape.tp, shape.instances)
            assert side.block_size == (shape.block or 128)
            assert side.layout == shape.layout
        assert settings.attention_backend == cell.prefill.backend


def test_accuracy_cells_have_shapes_of_their_own() -> None:
    assert len({(cell.prefill, cell.decode) for cell in ACCURACY_CELLS}) == len(ACCURACY_CELLS)
    names = {cell.name for cell in ACCURACY_CELLS}
    assert names >= {"same", "tp-1-2", "tp-2-1", "2p1d", "1p2d", "flash-attn", "flashinfer"}


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


def test_a_cell_means_the_same_in_every_environment() -> None:
    cell = Cell("a", decode=Shape(tp=2))
    around = {"PREFILLER_TP_SIZE": "2", "VERIFY": "off", "PATH": "/bin"}
    assert accuracy.environment(cell, around) == {
        "DECODER_TP_SIZE": "2",
        "VERIFY": "off",
        "PATH": "/bin",
    }


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


def test_what_the_launcher_would_refuse_is_refused_at_once() -> None:
    accuracy.check_cells(ACCURACY_CELLS, CPU, ["--single", "--limit", "1"])
    with pytest.raises(SettingError, match=r"same: --limit=0: allowed is a whole number from 1"):
        accuracy.check_cells(ACCURACY_CELLS, CPU, ["--limit", "0"])


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


def result(verdict: str) -> dict[str, object]:
    counters = {"loads_total": 20.0, "tokens_loaded_total": 300.0, "bytes_read_total": 2.5e9}
    return {
        "accuracy": 0.95,
        "expected": 0.96,
        "single": None,
        "tolerance": 0.02,
        "counters": counters,
        "seconds": 61.0,
        "verdict": verdict,
    }


@pytest.mark.parametrize(
    ("results", "code", "verdicts"),
    [
        pytest.param([result("ok")], 0, ["ok"], id="good"),
        pytest.param([result("ok"), result("bad")], 1, ["ok", "bad"], id="one model is bad"),
        pytest.param(
            [result("ok")], 1, ["ok", "the launcher ended with status 1"], id="ended badly"
        ),
        pytest.param(None, 2, ["the launcher ended with status 2"], id="no result"),
        pytest.param(None, 0, ["the launcher ended with status 0"], id="no result, no error"),
    ],
)
def test_the_launchers_status_has_the_last_word(
    tmp_path: Path, results: object, code: int, verdicts: list[str]
) -> None:
    path = tmp_path / "case.json"
    if results is not None:
        path.write_text(json.dumps(results), encoding="utf-8")
    outcomes = list(accuracy.outcomes_of(Cell("a"), path, exit_code=code, seconds=70.0))
    assert [str(outcome.verdict) for outcome in outcomes] == verdicts
    all_good = all(outcome.verdict == Verdict("good", "ok") for outcome in outcomes)
    assert all_good is (verdicts == ["ok"])


def test_the_table_of_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("accuracy", "results are good")
    results.add(accuracy.Outcome("same", seconds=61.0, result=result("ok")))
    results.add(accuracy.Outcome("flashinfer", lacking="needs cuda, this is cpu"))
    assert results.print(2) == 0
    table = capsys.readouterr().out
    for words in ("0.9500", "0.9600", "0.02", " 20 ", " 300 ", "2.500", " 61 "):
        assert words in table
    assert "skipped: needs cuda, this is cpu" in table
    assert "1/1 results are good, 1 skipped" in table
