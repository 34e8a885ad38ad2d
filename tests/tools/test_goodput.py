"""scripts/bench goodput: which requests count, its next measurement, and its record."""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from benchmarks import __main__ as bench
from benchmarks import points
from benchmarks.client import Result
from benchmarks.goodput import cache_bytes, setup_of, specs_of
from benchmarks.points import (
    FILL,
    SEARCH,
    TOP_UP,
    Best,
    Capacities,
    Objective,
    Point,
    Record,
    Run,
    Share,
)

OBJECTIVE = Objective(1000, 15)
GRID = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
FEW, MANY, MOST = 20, 100, 40


def point(arm: str, rate: float, good: int, total: int, **changed: Any) -> Point:
    """Answers of 11 tokens, of which some came late."""
    bad = total - good
    fields: dict[str, Any] = {
        "arm": arm,
        "engines": "1:1",
        "shape": "5000/250",
        "rate": rate,
        "gpus": 2,
        "seconds": 10.0,
        "tokens": 11 * total,
        "failed": 0,
        "ttft": (100.0,) * good + (2000.0,) * bad,
        "mean_gap": (7.0,) * total,
        "longest_gap": (9.0,) * total,
        "gaps": {"7": 10 * total},
    }
    return Point(**{**fields, **changed})


def run(*some: Point, **changed: Any) -> Run:
    fields: dict[str, Any] = {
        "command": "scripts/bench goodput",
        "date": "2026-01-01",
        "commit": "abc",
        "hardware": "2 x NVIDIA H200, 580.1",
        "versions": {"vllm": "0.33.0"},
        "seed": "0/0",
        "points": list(some),
    }
    return Run(**{**fields, **changed})


# --- shares and their intervals


@pytest.mark.parametrize(
    ("good", "total", "low", "high"),
    [
        (0, 0, 0.0, 1.0),
        (0, 10, 0.0, 0.2775),
        (9, 10, 0.5958, 0.9821),
        (50, 100, 0.4038, 0.5962),
        (270, 300, 0.8609, 0.9290),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_the_interval_is_wilsons(good: int, total: int, low: float, high: float) -> None:
    assert points.wilson(Share(good, total)) == pytest.approx((low, high), abs=1e-3)


def test_a_request_is_good_within_both_objectives() -> None:
    times = {"ttft": (1000.0, 1000.1, 10.0), "mean_gap": (15.0, 1.0, 15.01)}
    mixed = point("overlap", 1, 3, 3, failed=2, longest_gap=(20.0,) * 3, **times)
    assert mixed.good(OBJECTIVE) == 1
    assert points.share_of([mixed, mixed], OBJECTIVE) == Share(2, 10)


# --- what to measure next


def test_a_search_ends_at_the_knee_and_tops_up_both_sides() -> None:
    """All rates up to 5 are good."""
    shares: dict[float, Share] = {}
    asked = []
    while step := points.next_step(GRID, shares, FEW, MANY, MOST):
        asked.append((step.stage, step.rate, step.requests))
        before = shares.get(step.rate, Share(0, 0))
        good = step.requests if step.rate <= 5 else 0
        shares[step.rate] = Share(before.good + good, before.total + step.requests)
    assert asked == [
        (SEARCH, 4.0, FEW),
        (SEARCH, 6.0, FEW),
        (SEARCH, 5.0, FEW),
        *[(TOP_UP, rate, MOST) for _ in range(2) for rate in (5.0, 6.0)],
        *[(FILL, rate, FEW) for rate in (3.0, 7.0, 2.0, 1.0)],
    ]


# --- the record


def test_points_of_several_runs_count_together_on_the_same_card() -> None:
    runs = [
        run(point("overlap", 2, 30, 40), point("overlap", 3, 5, 40)),
        run(point("overlap", 2, 50, 60), hardware="4 x NVIDIA H200, 999"),
        run(point("overlap", 2, 0, 60), hardware="2 x NVIDIA H100, 580.1"),
        run(point("overlap", 2, 0, 60), versions={"vllm": "0.32.0"}),
    ]
    found = sorted(points.grouped(runs).items())
    rows = [points.figures(some, OBJECTIVE) for _, some in found]
    keys = [(key.card, key.vllm, key.rate) for key, _ in found]
    assert [(*key, row["good %"]) for key, row in zip(keys, rows, strict=True)] == [
        ("NVIDIA H100", "0.33.0", 2, 0),
        ("NVIDIA H200", "0.32.0", 2, 0),
        ("NVIDIA H200", "0.33.0", 2, 80),
        ("NVIDIA H200", "0.33.0", 3, 12.5),
    ]
    assert rows[2]["requests"] == 100
    assert rows[2]["95 % interval"] == "71 to 87"
    assert rows[2]["tokens/s a GPU"] == 11 * 100 / 20 / 2
    assert rows[2]["gap p99 ms"] == 7


def test_a_run_is_added_and_replaced_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    assert points.read(path) == Record()
    first, second = run(point("overlap", 1, 1, 1)), run(point("serial", 1, 1, 1))
    assert points.add(path, first, None) == 0
    assert points.add(path, second, None) == 1
    first.points.append(point("overlap", 2, 1, 1))
    first.capacities["5000/250"] = Capacities.of(37_000, {3: 6.0, 12: 9.0}, 15)
    assert points.add(path, first, 0) == 0
    assert points.read(path) == Record([first, second])
    assert all(len(line) < 600 for line in path.read_text("utf-8").splitlines())


def _add_runs(path: Path, arm: str) -> None:
    index = None
    mine = run()
    for rate in range(1, 21):
        mine.points.append(point(arm, rate, 1, 1))
        index = points.add(path, mine, index)


def test_several_add_to_one_record_at_once(tmp_path: Path) -> None:
    """Processes or threads: the lock belongs to the open file."""
    path = tmp_path / "record.json"
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(_add_runs, path), ("serial", "overlap")))
    kept = points.read(path).runs
    assert sorted((one.points[0].arm, len(one.points)) for one in kept) == [
        ("overlap", 20),
        ("serial", 20),
    ]


# --- vLLM's client

ANSWERED = Result(
    duration=2.0,
    completed=2,
    total_input_tokens=600,
    total_output_tokens=8,
    request_goodput=0.5,
    output_lens=[5, 0, 3],
    start_times=[10.0, 10.1, 10.2],
    ttfts=[0.2, 0.0, 0.3],
    itls=[[0.25, 0.5, 0.25, 0.5], [], [0.1, 0.4]],
    errors=["", "HTTP 503", ""],
)


def test_the_clients_result_becomes_a_point() -> None:
    made = ANSWERED.point(arm="overlap", engines="1:1", shape="300/5", rate=1.0, gpus=2)
    assert (made.requests, made.failed, made.tokens, made.seconds) == (3, 1, 8, 2.0)
    assert made.ttft == (200, 300)
    assert made.mean_gap == (375, 250)
    assert made.longest_gap == (500, 400)
    assert made.gaps == {"100": 1, "250": 2, "400": 1, "500": 2}
    assert made.good(Objective(250, 400)) == ANSWERED.good == 1


@pytest.mark.parametrize(
    ("starts", "gap_ms"),
    [
        pytest.param((0.0, 0.05), 10, id="together"),
        pytest.param((0.0, 1.0), None, id="one after the other"),
    ],
)
def test_the_gap_is_that_of_the_time_in_common(
    starts: tuple[float, float], gap_ms: float | None
) -> None:
    """The first answer waits for the second prompt, which takes 200 ms, and then goes on."""
    result = structs.replace(
        ANSWERED,
        start_times=list(starts),
        ttfts=[0.1, 0.25],
        itls=[[0.2, *[0.01] * 20], [0.01] * 20],
        output_lens=[22, 21],
    )
    measured = result.common_gap_ms()
    assert measured == (gap_ms and pytest.approx(gap_ms, rel=0.06))


# --- capacities


@pytest.mark.parametrize(
    ("gaps", "streams"),
    [
        pytest.param({4: 7.0, 16: 9.0}, 52, id="beyond"),
        pytest.param({4: 7.0, 16: 19.0}, 12, id="between"),
        pytest.param({4: 20.0, 16: 30.0}, 0, id="not one"),
        pytest.param({4: 7.0, 16: 7.0}, 16, id="no slope"),
    ],
)
def test_streams_follow_from_two_gaps(gaps: dict[int, float], streams: float) -> None:
    assert Capacities.of(37_000, gaps, 15).decode_streams == pytest.approx(streams)


# --- what the figures say


@pytest.mark.parametrize(
    ("replicas", "split", "answer"),
    [
        (Best(3, is_open=False), Best(4, is_open=False), "yes"),
        (Best(3, is_open=False), Best(4, is_open=True), "yes"),
        (Best(3, is_open=True), Best(4, is_open=False), "open"),
        (Best(4, is_open=True), Best(3, is_open=False), "no"),
        (Best(4, is_open=False), Best(3, is_open=True), "open"),
        (Best(3, is_open=False), Best(3, is_open=False), "level"),
        (Best(3, is_open=False), Best(3, is_open=True), "open"),
        (Best(0, is_open=False), Best(0, is_open=False), "neither"),
    ],
)
def test_the_verdict(replicas: Best, split: Best, answer: str) -> None:
    assert points.answer(replicas, split) == answer


def knees(**rates: float) -> Iterator[Point]:
    """Arms that are good up to a rate."""
    for name, best in rates.items():
        for rate in (1, 2, 3, 4):
            yield point(name, rate, 80 if rate <= best else 10, 80)


def test_no_verdict_counts_a_rate_with_few_requests() -> None:
    """Their queue has had no time to grow."""
    measured = run(*knees(replicas=2, overlap=3))
    before = list(points.verdicts(Record([measured]), [OBJECTIVE]))
    for count, is_counted in ((points.LEAST - 1, False), (points.LEAST, True)):
        more = Record([run(point("replicas", 5, count, count)), measured])
        assert (list(points.verdicts(more, [OBJECTIVE])) != before) == is_counted


# --- options


def options(arguments: str = "") -> argparse.Namespace:
    return bench.parse_arguments(["goodput", *arguments.split()])


@pytest.mark.parametrize(
    ("arguments", "gpus", "name"),
    [
        pytest.param("", [None, None], "1:1", id="cpu"),
        pytest.param("--ratio 2:1", [None] * 3, "2:1", id="cpu, 2:1"),
        pytest.param("--device cuda", ["0", "1"], "1:1", id="two GPUs"),
        pytest.param("--device cuda --ratio 3:1", list("0123"), "3:1", id="four GPUs"),
        pytest.param(
            "--device cuda --prefill-gpus 2,3 --decode-gpus 1", list("231"), "2:1", id="named"
        ),
        pytest.param(
            "--device cuda --ratio 1:1 --tp 2 2", ["0,1", "2,3"], "1:1", id="tensor parallel"
        ),
    ],
)
def test_engines_and_their_gpus(arguments: str, gpus: list[str | None], name: str) -> None:
    setup = setup_of(options(arguments))
    assert (list(setup.gpus), setup.name) == (gpus, name)
    assert setup.roles == ["prefill"] * setup.num_prefill + ["decode"] * setup.num_decode


def test_arms_differ_in_connector_and_chunk_alone() -> None:
    given = options("--device cuda --shape tiny --dtype float32 --kv-gib 1")
    setup = setup_of(given)
    arms = {arm: specs_of(arm, setup, given, 4) for arm in given.arms}
    kinds = {arm: {(each.role, each.connector) for each in specs} for arm, specs in arms.items()}
    assert kinds["replicas"] == kinds["replicas-1024"] == {("single", "none")}
    assert kinds["in-tree"] == {("prefill", "in-tree"), ("decode", "in-tree")}
    assert kinds["serial"] == kinds["overlap"] == {("prefill", "nixl-kv"), ("decode", "nixl-kv")}
    overlaps = {arm: {each.connector_config.get("overlap") for each in arms[arm]} for arm in arms}
    assert (overlaps["serial"], overlaps["overlap"]) == ({"off"}, {"on"})
    chunk = arms["replicas-1024"][0].extra_args[:2]
    assert chunk == ("--max-num-batched-tokens", "1024")
    plain = arms["replicas"][0]
    for arm, specs in arms.items():
        assert [each.extra_env["CUDA_VISIBLE_DEVICES"] for each in specs] == ["0", "1"]
        for each in specs:
            alike = replace(
                each,
                name=plain.name,
                role="single",
                connector="none",
                connector_config={},
                extra_args=each.extra_args[2 if arm.startswith("replicas-") else 0 :],
                extra_env=plain.extra_env,
            )
            assert alike == plain


@pytest.mark.parametrize(
    ("arguments", "arms", "gib"),
    [
        pytest.param("", 4, 139.8 * 0.9 / 4 - 16 - 4, id="four arms"),
        pytest.param("", 2, 139.8 * 0.9 / 2 - 16 - 4, id="two arms"),
        pytest.param("--tp 2 2", 4, 139.8 * 0.9 / 4 - 8 - 4, id="tensor parallel"),
        pytest.param("--kv-gib 3.5", 6, 3.5, id="given"),
    ],
)
def test_the_cache_gets_the_memory_that_weights_leave(
    monkeypatch: pytest.MonkeyPatch, arguments: str, arms: int, gib: float
) -> None:
    monkeypatch.setattr("benchmarks.records.output", lambda *_: "143200\n143771\n")
    monkeypatch.setattr("benchmarks.engines.weight_bytes", lambda _: 16 << 30)
    given = options(f"--device cuda {arguments}")
    assert cache_bytes(given, setup_of(given), arms) / (1 << 30) == pytest.approx(gib, abs=0.1)


def test_more_engines_than_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.records.output", lambda *_: "81559")
    monkeypatch.setattr("benchmarks.engines.weight_bytes", lambda _: 16 << 30)
    given = options("--device cuda")
    with pytest.raises(SystemExit, match=r"4 engines share a GPU of 79 GiB, .* name fewer arms"):
        cache_bytes(given, setup_of(given), 4)
