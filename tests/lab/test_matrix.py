"""The sweep's file, and what becomes of its cases."""

import json
from pathlib import Path

import pytest
from pd.accuracy_machine import Machine
from pd.accuracy_settings import SettingError, parse
from pd.sweep import CONFIG, check
from pd.sweep_cases import Case, chosen, load
from pd.sweep_report import Row, print_rows, rows

CPU = Machine()
GPUS = Machine("cuda", ("0", "1"), ("FLASH_ATTN", "FLASHINFER"))
CASES = load(CONFIG)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_valid_where_it_can_run(case: Case) -> None:
    able = [machine for machine in (CPU, GPUS) if not case.missing(machine)]
    assert able
    for machine in able:
        found = parse([], case.environment({}), machine)
        assert machine.device == "cpu" or case.gpus >= max(
            found.prefill.tensor_parallel, found.decode.tensor_parallel
        )


def test_the_file_covers_what_it_should() -> None:
    shapes = {tuple(sorted(case.env.items())) for case in CASES}
    assert len(shapes) == len(CASES)
    names = {case.name for case in CASES}
    assert names >= {"tp1-tp1", "tp1-tp2", "tp2-tp1", "2p1d", "1p2d", "flash-attn", "flashinfer"}


def test_a_machine_that_lacks_something_says_what() -> None:
    assert Case("a", device="cuda").missing(CPU) == "needs cuda, this is cpu"
    assert Case("a", gpus=4).missing(GPUS) == "needs 4 GPUs, here are 2"
    assert Case("a", gpus=4).missing(CPU) == ""


def test_a_case_means_the_same_in_every_environment() -> None:
    case = Case("a", env={"DECODER_TP_SIZE": "2"})
    around = {"PREFILLER_TP_SIZE": "2", "VERIFY": "off", "PATH": "/bin"}
    assert case.environment(around) == {"DECODER_TP_SIZE": "2", "VERIFY": "off", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must have a list `cases`"),
        ("cases: []", "must have a list `cases`"),
        ("cases: [{env: {}}]", "a mapping with a name"),
        ("cases: [{name: a, gpu: 1}]", "a: key=gpu: allowed are about, device, env, gpus, name"),
        ("cases: [{name: a, device: tpu}]", "a: device=tpu: allowed is cpu or cuda"),
        ("cases: [{name: a, gpus: none}]", "a: gpus=none: allowed is a whole number"),
        ("cases: [{name: a, env: {DECODE_TP: 2}}]", "a: env=DECODE_TP: allowed are ATTENTION"),
        ("cases: [{name: a, env: [DECODER_TP_SIZE]}]", "a: env=['DECODER_TP_SIZE']: allowed is a"),
        ("cases: [{name: a}, {name: a}]", "name=a: each case needs a name of its own"),
        ("cases: [", "cannot be read"),
    ],
)
def test_what_is_not_allowed_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError) as raised:
        load(path)
    assert said in str(raised.value)


def test_what_the_launcher_would_refuse_is_refused_at_once() -> None:
    check(CASES, CPU, ["--single", "--limit", "1"])
    with pytest.raises(SettingError, match=r"tp1-tp1: --limit=0: allowed is a whole number from 1"):
        check(CASES, CPU, ["--limit", "0"])


def test_some_cases_are_chosen_by_name() -> None:
    assert [case.name for case in chosen(CASES, ["1p2d", "tp1-tp1"])] == ["tp1-tp1", "1p2d"]
    assert chosen(CASES, []) == CASES
    with pytest.raises(SettingError, match="--only=foo: allowed are tp1-tp1"):
        chosen(CASES, ["foo"])


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
        ([result("ok")], 0, ["ok"]),
        ([result("ok"), result("bad")], 1, ["ok", "bad"]),
        ([result("ok")], 1, ["ok", "the launcher ended with status 1"]),
        (None, 2, ["the launcher ended with status 2"]),
        (None, 0, ["the launcher ended with status 0"]),
    ],
)
def test_the_launchers_status_has_the_last_word(
    tmp_path: Path, results: object, code: int, verdicts: list[str]
) -> None:
    path = tmp_path / "case.json"
    if results is not None:
        path.write_text(json.dumps(results), encoding="utf-8")
    found = rows(Case("a"), path, exit_code=code, seconds=70.0)
    assert [row.verdict for row in found] == verdicts
    assert any(row.failed for row in found) is (verdicts != ["ok"])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    good = Row(Case("tp1-tp1"), "ok", seconds=61.0, result=result("ok"))
    skipped = Row(Case("flashinfer"), "needs cuda, this is cpu", skipped=True)
    print_rows([good, skipped])
    said = capsys.readouterr().out
    for words in ("0.9500", "0.9600", "0.02", " 20 ", " 300 ", "2.500", " 61 "):
        assert words in said
    assert "skipped: needs cuda, this is cpu" in said
