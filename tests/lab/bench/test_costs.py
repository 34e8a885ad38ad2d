"""The benchmarks without engines, run briefly: what they write is whole."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench import __main__ as bench
from lab.bench import events, fleet, link, plan, scale
from lab.bench.checkouts import REPO
from lab.local.caches import layout_at
from lab.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.engine import event_log
from nixl_kv.protocol.events import Transition

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)


def figures_of(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """What a benchmark wrote; it must end well."""
    path = tmp_path / "figures.json"
    assert bench.main([*arguments, "--json", str(path)]) == 0
    return [result["figures"] for result in json.loads(path.read_text(encoding="utf-8"))]


def test_plan_measures_each_case_once(tmp_path: Path) -> None:
    figures = figures_of(tmp_path, "plan", "--seconds", "0")
    assert len(figures) == len(plan.cases()) == len(set(plan.cases()))
    planned = [figure for figure in figures if "plan ms" in figure]
    assert all(figure["plan ms"] > 0 and figure["reads us"] > 0 for figure in planned)
    assert all(figure["runs"] >= 1 for figure in planned)
    assert {figure["layers"] for figure in figures} == set(plan.LAYERS)
    assert {figure["blocks"] for figure in figures} == set(plan.NUM_BLOCKS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("shape", ["tiny", "deepseek"])
def test_gather_runs_its_kernel(shape: str) -> None:
    """By Triton's interpreter, which is asked for when a kernel is defined."""
    command = [sys.executable, "-m", "lab.bench", "gather", "--device", "cpu", "--shape", shape]
    command += ["--tokens", "32", "--orders", "LBHNC", "--blocks", "16-32"]
    command += ["--programs", "1", "3", "--repeat", "2"]
    ended = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{REPO}:{REPO}/scripts"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "2/2 rows are good" in ended.stdout


@pytest.mark.slow
@pytest.mark.nixl
def test_digest_reads_and_digests_all_of_a_prompt(tmp_path: Path) -> None:
    arguments = ["--tokens", "64", "--repeat", "2", "--orders", "BHLNC"]
    figures = figures_of(tmp_path, "digest", *arguments)
    (figure,) = figures
    assert figure["layout"] == "BHLNC"
    assert figure["MiB"] == 64 * 4 * 4 * 512 / 2**20
    assert figure["read ms"] > 0
    assert figure["digest ms"] > 0


@pytest.mark.slow
@pytest.mark.nixl
def test_link_reads_pieces_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "REGION", 1 << 20)
    monkeypatch.setattr(link, "SIZES", ((64 << 10, 4),))
    figures = figures_of(tmp_path, "link", "--variants", "inline")
    assert [figure["wait"] for figure in figures] == list(link.WAITS)
    assert all(figure["ended ms"] >= figure["posted ms"] > 0 for figure in figures)


@pytest.mark.nixl
def test_scale_shows_what_grows_with_what_is_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scale, "MOST_GROWTH", 1000.0)  # a busy machine is no fault
    monkeypatch.setattr(scale, "MOST_IDLE_PERCENT", 100.0)
    monkeypatch.setattr(fleet, "HELD_S", 0.1)
    monkeypatch.setattr(fleet, "IDLE_S", 0.1)
    figures = figures_of(
        tmp_path, "scale", "--held", "20", "40", "--endpoints", "200", "--engines", "3", "--tp", "2"
    )
    assert sum("times" in each for each in figures) == 8
    by_unit = {unit: value for each in figures for unit, value in each.items()}
    assert 800 <= by_unit["a second"] < scale.MOST_RENEWS
    assert scale.RENEW_S <= by_unit["s"] < scale.MOST_GAP_S
    assert (figures[-1]["engines"], figures[-1]["tp"], figures[-1]["links\nidle"]) == (3, 2, 0)


def test_events_shows_that_an_idle_rank_records_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST_US", 1000.0)  # a busy machine is no fault
    monkeypatch.setattr(events, "MOST_IDLE_PERCENT", 100.0)
    figures = figures_of(tmp_path, "events", "--events", "2000", "--seconds", "0.2")
    by_name = {figure.pop("what"): figure for figure in figures}
    assert by_name["one load from one rank"]["events"] > 5
    assert by_name["two idle ranks: events in 0.2 s"]["events"] == 0
    assert "us an event" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "kind"),
    [pytest.param(5.0, "good", id="at most"), pytest.param(5.1, "bad", id="more")],
)
def test_cost_is_judged_by_the_most_that_it_may_be(value: float, kind: str) -> None:
    assert events.cost("DEBUG off", value, "us an event", 5.0).verdict.kind == kind


def test_debug_log_formats_each_transition_and_then_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = event_log.EventLog()
    transition = Transition("request", "peer", "READING", "DONE", "ReadDone")
    before = event_log.logger.level, event_log.logger.propagate
    with events.debug_log():
        (handler,) = event_log.logger.handlers
        assert event_log.logger.isEnabledFor(logging.DEBUG)
        log.record(transition)
    assert handler not in event_log.logger.handlers
    assert (event_log.logger.level, event_log.logger.propagate) == before
    assert not caplog.records


def test_layout_at_moves_every_address() -> None:
    (layout,) = build_layouts(ModelShape(3, 2, (64, 64), "bfloat16"), EngineShape(num_blocks=4))
    moved = layout_at(layout, 4096)
    assert moved.spans[0].address == 4096
    bases = [region.base - layout.spans[0].address for region in layout.groups[0].regions]
    assert [region.base - 4096 for region in moved.groups[0].regions] == bases
