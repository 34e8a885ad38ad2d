"""scripts/bench: its commands run, and figures compare the same rounds."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import goodput_report, points
from benchmarks.shapes import REPO

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
from benchmarks import transfer

PAGE = (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8")
PAGES = PAGE + (REPO / "docs" / "goodput.md").read_text(encoding="utf-8")
RECORDS = sorted(
    path
    for path in (REPO / "docs" / "benchmarks").glob("*.json")
    if path != goodput_report.RECORD  # its tables are in other pages, and generated
)
FIGURE = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
OTHER_RECORDS = PAGE.partition("## Other records")[2].split("\n- ")[1:]


def linked(entry: str) -> list[Path]:
    """The records that an entry of the page links to."""
    names = re.findall(r"\(benchmarks/([\w-]+\.json)\)", entry)
    return [REPO / "docs" / "benchmarks" / name for name in names]


OTHERS = {path for entry in OTHER_RECORDS for path in linked(entry)}
TINY = ["--shape", "tiny", "--repeat", "2", "--tokens", "128", "--tp", "1-2"]


def measured(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    """The rows of a run, which must end well."""
    path = tmp_path / "run.json"
    assert bench.main(["--record", str(path), *command]) == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["command"] == shlex.join(["scripts/bench", *command])
    assert record["hardware"]
    assert record["versions"]["nixl"]
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def test_rows_become_a_table_and_a_fault_an_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"path": "auto", "ms": 1.23456, "runs": 4096}, {"path": "x", "fault": "wrong bytes"}]
    monkeypatch.setattr(transfer, "measure", lambda _: iter(rows))
    assert bench.main(["transfer"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| path |   ms |  runs |       fault |",
        "| ---- | ---- | ----- | ----------- |",
        "| auto | 1.23 | 4,096 |             |",
        "|    x |      |       | wrong bytes |",
    ]


# --- the page


@pytest.mark.parametrize("command", re.findall(r"^    scripts/bench (.+)$", PAGES, re.MULTILINE))
def test_the_commands_of_the_pages_run(command: str) -> None:
    bench.parse_arguments(shlex.split(command))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_figures_of_the_page_are_those_of_the_records(path: Path) -> None:
    """The tables between the link to a record and the next such link or heading."""
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [{"", *map(bench.shown, row.values())} for row in record["rows"]]
    parts = re.findall(rf"\(benchmarks/{path.name}\)(.*?)(?=\(benchmarks/|\n#|\Z)", PAGE, re.DOTALL)
    lines = [line for part in parts for line in part.splitlines() if re.match(r"\|.*\d", line)]
    shown = [{cell.strip() for cell in line.strip("|").split("|")} for line in lines]
    assert shown or path in OTHERS
    assert [cells for cells in shown if not any(cells <= row for row in rows)] == []


@pytest.mark.parametrize("entry", OTHER_RECORDS, ids=lambda entry: entry[1 : entry.index("]")])
def test_figures_without_a_table_are_rounded_from_the_records_of_their_entry(entry: str) -> None:
    """From rows, or from the command."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in linked(entry)]
    measured = [json.dumps([record["rows"], record["command"]]) for record in records]
    values = [float(each.replace(",", "")) for each in FIGURE.findall(" ".join(measured))]
    words = re.sub(r"\[.*?\]\(.*?\)|`.*?`", "", entry)  # without links and code
    for figure in FIGURE.findall(words):
        digits = len(figure.partition(".")[2])
        assert float(figure.replace(",", "")) in {round(value, digits) for value in values}, figure


def test_the_tables_and_the_plot_of_goodput_are_those_of_its_record() -> None:
    record = points.read(goodput_report.RECORD)
    assert record.runs
    for path in goodput_report.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert "<!-- goodput: " in text
        assert text == goodput_report.rewrite(text, record), path.name
    assert goodput_report.PLOT.read_text(encoding="utf-8") == goodput_report.draw(record)


# --- transfers


@pytest.mark.slow
@pytest.mark.nixl
def test_two_checkouts_load_the_same_cells_beside_the_link(tmp_path: Path) -> None:
    """This one against itself, also with verified loads."""
    command = ["transfer", *TINY, "--blocks", "16-64", "--orders", "LBNHC", "BHLNC", "--verify"]
    rows = measured(tmp_path, *command, "--against", str(REPO))
    assert [(row["path"], row["layout"], row["runs"]) for row in rows[::4]] == [
        ("auto", "LBNHC", 2 * 128 * 4),  # each token of each layer, for both ranks
        ("auto", "BHLNC", 2 * 8 * 2 * 4),  # each block, head and layer
    ]
    for row in rows:
        assert row["MiB"] == 128 * 4 * 4 * 512 / 2**20
        assert row["load ms"] >= row["read ms"] > 0
        assert row["copy GB/s"] > 0
        assert ("load ratio" in row) == (not row["path"].startswith("against"))
        assert ("verify adds ms" in row) == row["path"].endswith("verified")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root, and `ip` of iproute2",
)
@pytest.mark.slow
@pytest.mark.nixl
def test_load_and_stream_cross_the_same_wire(tmp_path: Path) -> None:
    link = ["--round-trip-ms", "4", "--gbit", "0.1", "--tokens", "32", "--rounds", "2"]
    (row,) = measured(tmp_path, "tcp", *link, "--orders", "BHLNC")
    assert row["link"] == "0.1 Gbit/s, 4 ms"
    assert 0 < row["load Gbit/s"] <= 0.1
    assert 0 < row["stream Gbit/s"] <= 0.1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_gather_runs_its_kernel() -> None:
    """Triton's interpreter is asked for when a kernel is defined."""
    command = [sys.executable, "-m", "benchmarks", "gather", "--device", "cpu", "--shape", "tiny"]
    command += ["--tokens", "32", "--orders", "LBHNC", "--blocks", "16-32", "--repeat", "2"]
    paths = {"PYTHONPATH": f"{REPO}:{REPO}/scripts:{REPO}/tests", "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [*command, "--programs", "1", "3"],
        env=os.environ | paths,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(ended.stdout.splitlines()) == 4


# --- figures


def test_figures_are_medians_and_ratios_of_each_round() -> None:
    def samples_of(*factors: int) -> list[transfer.Sample]:
        times = [{"load": n * 0.004, "read": n * 0.002, "cpu": 0.001} for n in factors]
        return [each | {"num_bytes": 1 << 21, "num_runs": 7} for each in times]

    copies = [{"load": seconds} for seconds in (0.001, 0.002, 0.004)]
    samples = {"auto": samples_of(1, 2, 3), "against auto": samples_of(2, 4, 6), "copy": copies}
    samples["auto, verified"] = samples_of(2, 4, 7)
    figures = transfer.figures(samples, "auto")
    assert figures == {
        "rounds": 3,
        "MiB": 2.0,
        "runs": 7,
        "load ms": 8.0,
        "read ms": 4.0,
        "cpu ms": 1.0,
        "GB/s": pytest.approx(0.524288),
        "copy GB/s": pytest.approx(1.048576),
        "read of copy": pytest.approx(0.5),
        "load of copy": pytest.approx(0.25),
        "load ratio": "0.50 (0.50 to 0.50)",
        "read ratio": "0.50 (0.50 to 0.50)",
        "cpu ratio": "1.00 (1.00 to 1.00)",
    }
    assert transfer.figures(samples, "auto, verified")["verify adds ms"] == pytest.approx(8.0)
