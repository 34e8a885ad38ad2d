"""docs/benchmarks.md: its figures are those of the records, and its commands run."""

import re
import shlex
from pathlib import Path

import pytest

from lab.bench import page, record
from lab.bench.__main__ import parse_arguments
from lab.bench.record import Record
from lab.results import Figures, verdict_of

PAGE = page.PAGE.read_text(encoding="utf-8")
RECORDS = sorted(page.RECORDS.glob("*.json"))
MEASURED = re.compile(r"\d\s*(?:%|ms|us|[GM]B/s|Gbit/s|times)(?!\w)")
GIVEN = {"10 Gbit/s", "1 ms"}
"""What a benchmark sets, or vLLM's code says."""


def test_tables_and_plots_are_those_of_the_records() -> None:
    for name, text in page.rewrite(PAGE).items():
        assert (page.PAGE.parent / name).read_text(encoding="utf-8") == text, "run lab.bench.page"


def test_prose_has_no_figures_that_no_record_gives() -> None:
    prose = page.BLOCK.sub("", PAGE)
    found = {match.group() for match in re.finditer(rf"\d*{MEASURED.pattern}", prose)}
    assert found <= GIVEN


def test_every_record_and_plot_is_shown() -> None:
    shown = {name.strip() for block in page.BLOCK.findall(PAGE) for name in block[2].split("+")}
    assert {path.stem for path in RECORDS} == shown
    plots = {path.name for path in page.RECORDS.glob("*.svg")}
    assert plots == {Path(name).name for name in page.rewrite(PAGE) if name.endswith(".svg")}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_command_of_a_record_is_one(path: Path) -> None:
    program, *arguments = shlex.split(record.load(path).command)
    assert program == "scripts/bench"
    parse_arguments(arguments)


def test_a_run_is_recorded_with_its_command_and_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "records" / "run.json"
    row = Figures({"name": "a", "runs": 123_456_789, "ms": 1.23456789}, verdict_of(good="same"))
    arguments = ["transfer", "--record=x", "--tokens", "64", "--commit", "abc"]
    record.save(path, arguments, [row], "abc")
    kept = record.load(path)
    assert kept.command == "scripts/bench transfer --tokens 64"
    assert kept.commit == "abc"
    assert kept.hardware
    assert kept.versions["Python"]
    assert kept.rows == [{"name": "a", "runs": 123_456_789, "ms": 1.2346, "verdict": "same"}]


def make(folder: Path) -> None:
    rows = [{"path": "auto", "GB/s": 2.5, "runs": 4096}, {"path": "direct", "GB/s": 0.5, "runs": 1}]
    kept = Record("scripts/bench x", "2026-11-22", "abc", "2 GPUs", {"NIXL": "1.5"}, rows)
    (folder / "run.json").write_text(record.as_text(kept), encoding="utf-8")


def test_a_table_has_its_columns_rows_and_command(tmp_path: Path) -> None:
    make(tmp_path)
    marker = "<!-- table run | runs AS pieces, path | path=auto -->\n"
    written = page.rewrite(f"{marker}old\n<!-- end -->\n", tmp_path)["benchmarks.md"]
    assert written.splitlines()[1:] == [
        "2 GPUs; NIXL 1.5:",
        "",
        "    scripts/bench x",
        "",
        "| pieces | path |",
        "| ---: | --- |",
        "| 4,096 | auto |",
        "<!-- end -->",
    ]


def test_an_unknown_column_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match="speed"):
        page.rewrite("<!-- table run | speed -->\n<!-- end -->", tmp_path)


def test_a_plot_has_a_bar_for_each_figure(tmp_path: Path) -> None:
    make(tmp_path)
    files = page.rewrite("<!-- plot run | path | GB/s AS speed, runs -->\n<!-- end -->", tmp_path)
    assert "![speed, runs]" in files["benchmarks.md"]
    (svg,) = (text for name, text in files.items() if name.endswith("run.svg"))
    assert all(f">{text}</text>" in svg for text in ("speed", "auto", "direct", "2.5", "0.5"))
