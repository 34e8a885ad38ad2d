"""What is counted, and how vLLM's log and Prometheus show it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import Counter, Gauge, Histogram

from nixl_kv.connector.stats import COUNTERS, RANK_GAUGES, TRANSFER_SECONDS, PromMetrics, Stats
from nixl_kv.protocol.events import (
    Counts,
    Failure,
    FailureKind,
    LoadEnded,
    OfferEnd,
    OfferEnded,
    Result,
)
from support.records import D1, NONCE, P1, PEER, read_done
from support.vllm_objects import vllm_config


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        *(
            (
                LoadEnded(D1, 7, Failure(kind, "words"), PEER),
                {"load_failures": 1, f"load_failures_{kind.value}": 1},
            )
            for kind in FailureKind
            if kind is not FailureKind.DROPPED
        ),
        # Its request had ended, so it has not failed.
        (LoadEnded(D1, 7, Failure(FailureKind.DROPPED, "dropped"), PEER), {"loads_dropped": 1}),
        *((OfferEnded(NONCE, P1, end), {f"offers_{end.value}": 1}) for end in OfferEnd),
        (Counts({"digests": 2, "digest_seconds": 0.5}), {"digests": 2, "digest_seconds": 0.5}),
        (Counts({"unreadable": 1}), {"unreadable": {"0": 1}}),
    ],
)
def test_each_end_of_a_load_or_offer_has_a_counter(result: Result, expected: Any) -> None:
    stats = Stats()
    stats.count_results([result])
    assert stats.data == expected
    assert set(stats.data) <= {*COUNTERS, *RANK_GAUGES}


def good_load(*seconds: float, verified: bool = False) -> LoadEnded:
    reads = tuple(
        read_done(rank, num_bytes=1000, num_runs=5, seconds=each, path="gather")
        for rank, each in enumerate(seconds)
    )
    return LoadEnded(D1, 7, None, PEER, verified=verified, reads=reads)


def test_a_good_load_counts_its_reads() -> None:
    """From several ranks at once: the time is that of the last one."""
    stats = Stats()
    stats.count_results([good_load(0.5, 0.25), good_load(verified=True)])
    assert stats.data == {
        "loads": 2,
        "loads_verified": 1,
        "tokens_loaded": 14,
        "bytes_read": 2000,
        "descriptors": 10,
        "reads_gather": 2,
        "read_seconds_gather": 0.75,
        TRANSFER_SECONDS: [0.5, 0.0],
    }


def test_bytes_of_a_staged_read_that_were_read_directly_are_counted() -> None:
    stats = Stats()
    read = read_done(0, num_bytes=1000, path="staged", direct_bytes=300)
    stats.count_results([LoadEnded(D1, 7, None, PEER, reads=(read,))])
    assert stats.data["bytes_read"] == 1000
    assert stats.data["staged_bytes_read_directly"] == 300


# --- vLLM's log


def test_stats_of_workers_and_steps_add_up() -> None:
    first, second = Stats(), Stats()
    first.count_results([good_load(0.5)])
    second.count_results([good_load(0.25), OfferEnded(NONCE, P1, OfferEnd.READ)])
    sent = Stats(data=dict(second.data))
    assert first.aggregate(sent) is first
    assert first.data["loads"] == 2
    assert first.data["offers_read"] == 1
    assert first.data[TRANSFER_SECONDS] == [0.5, 0.25]
    assert second.data[TRANSFER_SECONDS] == [0.25]


def test_a_gauge_is_sent_when_it_changes_and_the_latest_value_counts() -> None:
    stats = Stats()
    stats.measure("open_loads", 0)
    assert stats.pop() is None
    stats.measure("open_loads", 2)
    first = stats.pop()
    assert first is not None
    stats.measure("open_loads", 2)
    assert stats.pop() is None
    stats.measure("open_loads", 1)
    assert first.aggregate(stats).reduce() == {"open_loads": 1}


def test_gauges_of_several_ranks_stay_apart() -> None:
    ranks = [Stats(rank=number) for number in range(3)]
    for stats, value in zip(ranks, (5, 7, 6), strict=True):
        stats.measure("open_descriptors", value)
    total = Stats()
    for stats in ranks:
        total = total.aggregate(stats)
    ranks[1].measure("open_descriptors", 4)
    assert total.aggregate(ranks[1]).reduce() == {
        "open_descriptors of rank 0": 5,
        "open_descriptors of rank 1": 4,
        "open_descriptors of rank 2": 6,
    }


def test_the_log_line_has_counts_and_the_median_time() -> None:
    stats = Stats()
    stats.count_results([good_load(0.001), good_load(0.003), good_load(0.002)])
    assert stats.reduce() == {
        "loads": 3,
        "tokens_loaded": 21,
        "bytes_read": 3000,
        "descriptors": 15,
        "reads_gather": 3,
        "median transfer ms": 2.0,
        "GB/s": 0.0,
    }


def test_without_a_transfer_there_is_no_speed() -> None:
    stats = Stats()
    stats.count_results([LoadEnded(D1, 0, None)])  # this rank has none of the prompt's KV
    assert stats.reduce() == {"loads": 1, "tokens_loaded": 0}
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}


# --- Prometheus


def metrics(engines: int) -> PromMetrics:
    """As vLLM makes them, for several engines of one model, with two ranks each."""
    config = vllm_config()
    config.parallel_config.world_size = 2
    kinds: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    labels: dict[int, list[object]] = {number: ["tiny", str(number)] for number in range(engines)}
    return PromMetrics(config, kinds, ["model_name", "engine"], labels)


@pytest.fixture
def registry() -> Iterator[Any]:
    """The default one of Prometheus, which is as before afterwards."""
    prometheus = pytest.importorskip("prometheus_client")
    before = set(prometheus.REGISTRY._collector_to_names)
    yield prometheus.REGISTRY
    for collector in set(prometheus.REGISTRY._collector_to_names) - before:
        prometheus.REGISTRY.unregister(collector)


def shown(registry: Any, name: str, engine: int, **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": str(engine), **labels}
    found: float | None = registry.get_sample_value(f"vllm:nixl_kv_{name}", labels)
    return found


def test_prometheus_shows_each_counter_for_each_engine(registry: Any) -> None:
    prom = metrics(2)
    prom.observe({"loads": 3, TRANSFER_SECONDS: [0.004, 0.2], "unknown": 7}, 1)
    prom.observe({"loads": 1, "open_loads": 2}, 0)
    prom.observe({"open_loads": 1}, 0)
    value = partial(shown, registry)
    assert [value("loads_total", engine) for engine in (0, 1)] == [1, 3]
    assert all(value(f"{name}_total", 0) is not None for name in COUNTERS)
    assert [value("open_loads", engine) for engine in (0, 1)] == [1, 0]
    assert value("transfer_seconds_count", 1) == 2
    assert value("transfer_seconds_bucket", 1, le="0.005") == 1
    assert value("transfer_seconds_count", 0) == 0


def test_prometheus_shows_a_gauge_of_each_rank(registry: Any) -> None:
    prom, ranks = metrics(2), [Stats(rank=number) for number in range(2)]
    value = partial(shown, registry, "unreadable")
    seen = []
    for rank, is_unreadable in [(0, 1), (1, 1), (1, 0), (0, 0)]:
        ranks[rank].measure("unreadable", is_unreadable)
        popped = ranks[rank].pop()
        assert popped is not None
        prom.observe(popped.data, 0)
        seen.append((value(0, rank="0"), value(0, rank="1")))
    assert seen == [(1, 0), (1, 1), (1, 0), (0, 0)]
    assert (value(1, rank="0"), value(1, rank="1")) == (0, 0), "another engine's, from the start"


def test_open_descriptors_are_shown_and_few_left_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nixl_kv.transport.descriptors.limit", lambda: 100)
    counts = iter([80, 81, 90, 95])
    monkeypatch.setattr("nixl_kv.transport.descriptors.num_open", lambda: next(counts))
    stats, sent = Stats(), []
    for now in (0.0, 9.9, 10.0, 20.0, 1000.0):
        stats.measure_descriptors(now)
        popped = stats.pop()
        sent.append(popped and popped.data["open_descriptors"])
    assert sent == [{"0": 80}, None, {"0": 81}, {"0": 90}, {"0": 95}]
    warnings = [record.getMessage()[:12] for record in caplog.records]
    assert warnings == ["81 of 100 fi", "95 of 100 fi"]
