"""docs/benchmarks.md is made of its template and of the runs that stand beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench import __main__ as bench
from lab.bench import plan, record, report

ROWS = [
    {"path": "auto", "blocks": "16", "GB/s": 1.25, "runs": 4096},
    {"path": "auto", "blocks": "64", "GB/s": 2.5, "runs": 8192, "note": "late"},
    {"path": "direct", "blocks": "16", "GB/s": 0.5, "runs": 1},
]


def write_record(folder: Path, name: str = "run", rows: Any = ROWS) -> None:
    fields = {
        "command": "scripts/bench transfer --tokens 64",
        "date": "2026-11-22",
        "commit": "abc",
        "hardware": "2 x NVIDIA H200",
        "versions": {"torch": "2.11.0", "NIXL": "1.5.1"},
        "rows": rows,
        "verdicts": [""] * len(rows),
    }
    (folder / f"{name}.json").write_text(json.dumps(fields), encoding="utf-8")


def page(folder: Path, template: str) -> str:
    return report.build(template, folder)["benchmarks.md"].removeprefix(f"{report.MADE}\n")


def test_the_page_is_what_its_template_and_records_make(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["report", "--check"]) == 0, capsys.readouterr().out


def test_about_says_when_where_with_what_and_how(tmp_path: Path) -> None:
    write_record(tmp_path)
    text = page(tmp_path, "{{about run}}\n{{table run | runs}}")
    assert text.startswith(
        "2026-11-22, 2 x NVIDIA H200; torch 2.11.0, NIXL 1.5.1; commit abc:\n\n"
        "    scripts/bench transfer --tokens 64\n"
    )


def test_table_has_all_columns_and_rows(tmp_path: Path) -> None:
    write_record(tmp_path)
    assert page(tmp_path, "{{table run}}").splitlines() == [
        "| path | blocks | GB/s | runs | note |",
        "| --- | --- | ---: | ---: | --- |",
        "| auto | 16 | 1.25 | 4,096 |  |",
        "| auto | 64 | 2.50 | 8,192 | late |",
        "| direct | 16 | 0.50 | 1 |  |",
    ]


def test_table_has_the_columns_and_rows_that_are_named(tmp_path: Path) -> None:
    write_record(tmp_path)
    text = page(tmp_path, "{{table run | runs AS pieces, path | path=auto, blocks=64}}")
    assert text.splitlines() == ["| pieces | path |", "| ---: | --- |", "| 8,192 | auto |"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param("{{table run | speed}}", "no column 'speed'", id="column"),
        pytest.param("{{table other}}{{table run}}", "no run of that name", id="run"),
        pytest.param(
            "{{chart run}}{{table run}}", "allowed: about, table and plot", id="directive"
        ),
        pytest.param("{{about run}}", "no table of the template is of run", id="without a table"),
    ],
)
def test_what_is_unknown_is_refused(tmp_path: Path, template: str, words: str) -> None:
    write_record(tmp_path)
    with pytest.raises(ValueError, match=words):
        report.build(template, tmp_path)


def test_sections_without_a_run_are_left_out(tmp_path: Path) -> None:
    write_record(tmp_path)
    section = "{{if NAME}}\nabout NAME {{table NAME | runs}}\n{{end}}\n"
    template = section.replace("NAME", "run") + section.replace("NAME", "other") + "rest\n"
    text = page(tmp_path, template)
    assert text.startswith("about run | runs |")
    assert text.endswith("rest\n")
    assert "other" not in text


def test_plot_is_the_same_each_time(tmp_path: Path) -> None:
    write_record(tmp_path)
    template = "{{plot run | blocks | GB/s | path}}\n{{table run}}"
    first, second = (report.build(template, tmp_path) for _ in range(2))
    assert first == second
    assert "![GB/s against blocks](benchmarks/run-0.svg)" in first["benchmarks.md"]
    assert "direct" in first["benchmarks/run-0.svg"]


def test_run_is_recorded_with_its_command_and_whole_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = plan.cases()[:1]
    monkeypatch.setattr(plan, "cases", lambda: cases)
    path = tmp_path / "records" / "plan.json"
    bench.main(["plan", "--seconds", "0", "--record", str(path), "--commit", "abc"])
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["command"] == "scripts/bench plan --seconds 0"
    assert kept["commit"] == "abc"
    assert kept["hardware"]
    assert kept["versions"]["Python"]
    assert len(kept["rows"]) == 1


def test_figures_have_as_many_digits_as_mean_something(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    figures = {"name": "a", "runs": 123_456_789, "ms": 1.23456789, "GB/s": 0.000123456789}
    results.write_text(json.dumps([{"figures": figures, "verdict": "ok"}]), encoding="utf-8")
    record.save(tmp_path / "run.json", ["transfer", "--json=x"], results)
    kept = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert kept["rows"] == [{"name": "a", "runs": 123_456_789, "ms": 1.2346, "GB/s": 0.00012346}]
    assert kept["verdicts"] == ["ok"]
    assert kept["command"] == "scripts/bench transfer"
