"""A table, the same as JSON, and a last line that counts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.results import Results, Verdict, print_table, skipped, verdict_of


@dataclass(frozen=True)
class Row:
    name: str
    number: float
    trouble: str = ""
    lacking: str = ""

    @property
    def verdict(self) -> Verdict:
        return skipped(self.lacking) if self.lacking else verdict_of(self.trouble)

    def cells(self) -> Mapping[str, str]:
        return {"name": self.name, "number": f"{self.number:g}"}


def results_of(*rows: Row, path: Path | None = None) -> Results:
    results = Results("rows", "rows are good", path)
    for row in rows:
        results.add(row)
    return results


@pytest.mark.parametrize(
    ("rows", "expected", "status", "line"),
    [
        pytest.param([Row("a", 1)], 1, 0, "1/1 rows are good", id="good"),
        pytest.param([Row("a", 1), Row("b", 2, "no")], 2, 1, "1/2 rows are good", id="one is bad"),
        pytest.param([Row("a", 1)], 2, 1, "1/2 rows are good", id="cut short"),
        pytest.param([], 1, 1, "0/1 rows are good", id="none"),
        pytest.param(
            [Row("a", 1), Row("b", 2, lacking="gpu")],
            2,
            0,
            "1/1 rows are good, 1 skipped",
            id="one is skipped",
        ),
        pytest.param(
            [Row("b", 2, lacking="gpu")], 1, 1, "0/0 rows are good, 1 skipped", id="none ran"
        ),
    ],
)
def test_the_last_line_counts_and_the_status_is_0_if_all_that_ran_is_good(
    capsys: pytest.CaptureFixture[str], rows: list[Row], expected: int, status: int, line: str
) -> None:
    assert results_of(*rows).print(expected) == status
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_json_has_all_fields_and_verdicts_after_each_result(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    results = results_of(Row("a", 1.5, "no"), path=path)
    first = {"name": "a", "number": 1.5, "trouble": "no", "lacking": "", "verdict": "no"}
    assert json.loads(path.read_text(encoding="utf-8")) == [first]
    results.add(Row("b", 2))
    assert [row["verdict"] for row in json.loads(path.read_text(encoding="utf-8"))] == ["no", "ok"]
    assert [one.name for one in tmp_path.iterdir()] == ["rows.json"]


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    results_of(Row("a", 1, "no"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "  no\n")


def test_rows_may_lack_headings_and_numbers_stand_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table("t", [{"a": "x", "b": "1"}, {"b": "22", "c": "[y]"}])
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[2].strip("┃").split("┃")] == ["a", "b", "c"]
    assert [line.strip("│").split("│") for line in lines[4:6]] == [
        [" x ", "  1 ", "     "],
        ["   ", " 22 ", " [y] "],
    ]


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        pytest.param(verdict_of(), "ok", id="good"),
        pytest.param(verdict_of("", good="refused"), "refused", id="good in other words"),
        pytest.param(verdict_of("a", "", "b"), "a; b", id="bad"),
        pytest.param(skipped("no gpu"), "skipped: no gpu", id="skipped"),
    ],
)
def test_verdict_in_words(verdict: Verdict, words: str) -> None:
    assert str(verdict) == words


def test_of_a_wide_table_nothing_is_cut_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"path": "gather, verified"} | {f"what takes {n} ms": f"{n}.25" for n in range(30)}
    print_table("loads", [row])
    printed = capsys.readouterr().out
    assert all(word in printed for pair in row.items() for word in pair)
