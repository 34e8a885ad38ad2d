"""The last line of a program counts, and its exit status says whether all that ran is good."""

import json
from pathlib import Path

import pytest

from lab.results import Figures, Results, Verdict, skipped, verdict_of


@pytest.mark.parametrize(
    ("verdicts", "expected", "status", "line"),
    [
        pytest.param([verdict_of("")], 1, 0, "1/1 rows", id="good"),
        pytest.param([verdict_of(), verdict_of("a", "b")], 2, 1, "1/2 rows", id="one is bad"),
        pytest.param([verdict_of()], 2, 1, "1/2 rows", id="cut short"),
        pytest.param([verdict_of(), skipped("gpu")], 2, 0, "1/1 rows, 1 skipped", id="skipped"),
        pytest.param([skipped("gpu")], 1, 1, "0/0 rows, 1 skipped", id="none ran"),
    ],
)
def test_last_line_and_status(
    verdicts: list[Verdict],
    expected: int,
    status: int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "rows.json"
    results = Results("rows", "rows", path)
    for verdict in verdicts:
        results.add(Figures({"name": "[a]", "number": 1.5}, verdict))
    assert results.print(expected) == status
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == line
    assert "[a]" in captured.out
    assert str(verdicts[0]) in captured.err
    written = [row["verdict"] for row in json.loads(path.read_text(encoding="utf-8"))]
    assert written == [str(verdict) for verdict in verdicts]
