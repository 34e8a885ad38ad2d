"""The counters, and how vLLM's log and Prometheus show them."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import Counter, Gauge, Histogram

from nixl_kv.config import Config
from nixl_kv.connector.stats import (
    COUNTERS,
    FAILURES,
    GAUGES,
    HISTOGRAMS,
    METRICS,
    NO_TICKET,
    READS,
    PromMetrics,
    RankReports,
    RequestCounts,
    Stats,
)
from nixl_kv.errors import TICKET_REASONS
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import (
    PHASES,
    Counts,
    EarlyReleased,
    Failure,
    FailureKind,
    LoadEnded,
    LoadReady,
    OfferEnd,
    OfferEnded,
    Result,
)
from support.records import D1, D2, NONCE, P1, PEER, read_done
from support.vllm_objects import vllm_config

CONFIG = Config.parse({"insecure": True}, {})
WAITS = (0.5, 0.0, 0.25, 0.125, 0.0)


def failed(kind: FailureKind, request: RequestId = D1) -> LoadEnded:
    return LoadEnded(request, 7, Failure(kind, "words"), PEER)


def loaded(request: RequestId = D1, *, verified: bool = False) -> LoadEnded:
    return LoadEnded(request, 7, None, PEER, verified=verified, waits=WAITS)


def count(
    *ranks: Sequence[Result],
    recomputes: bool = True,
    config: Config = CONFIG,
    held_back: Sequence[RequestId] = (),
) -> dict[str, Any]:
    """The counts of an engine whose ranks each have these results."""
    stats = Stats()
    counts = RequestCounts(stats, config.entry_of, recomputes=recomputes)
    for results in ranks:
        reports = RankReports()
        reports.add(results)
        counts.add(reports)
    requests = dict.fromkeys(r.request for r in ranks[0] if isinstance(r, LoadEnded))
    counts.count_loads(requests, held_back)
    counts.count_offers(r.request for r in ranks[0] if isinstance(r, OfferEnded))
    return stats.data


# --- loads and offers


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_request_counts_once_whatever_the_tp_size(tp: int) -> None:
    results: list[Result] = [
        loaded(verified=True),
        failed(FailureKind.DENIED, D2),
        OfferEnded(NONCE, P1, READ),
    ]
    data = count(*[results] * tp)
    assert data == {
        "loads": {"loaded|": 1, "failed|": 1},
        "loaded_tokens": {"": 7},
        "verified_loads": {"": 1},
        "wait_seconds": {phase: [seconds] for phase, seconds in zip(PHASES, WAITS, strict=True)},
        "load_failures": {"denied|": 1},
        "recomputed_requests": {"denied": 1},
        "ended_offers": {"read": 1},
    }


READ = OfferEnd.READ


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("recomputes", [True, False])
def test_each_failure_has_a_reason(kind: FailureKind, *, recomputes: bool) -> None:
    data = count([failed(kind)], recomputes=recomputes)
    if kind is FailureKind.DROPPED:  # its request had ended
        assert data == {"loads": {"cancelled|": 1}}
        return
    assert data["load_failures"] == {f"{kind.value}|": 1}
    assert data.get("recomputed_requests") == ({kind.value: 1} if recomputes else None)
    assert kind.value in FAILURES


def test_a_load_is_good_and_verified_if_it_is_on_all_ranks() -> None:
    data = count([loaded()], [failed(FailureKind.FENCED)], [loaded()])
    assert data["loads"] == {"failed|": 1}
    assert "loaded_tokens" not in data
    assert "verified_loads" not in count([loaded(verified=True)], [loaded()])


def test_the_slowest_rank_decides_how_long_a_request_waited() -> None:
    ranks = [LoadEnded(D1, 7, None, PEER, waits=(at, 0.0, 0.0, 0.5, 0.0)) for at in (1, 3, 2)]
    nothing = LoadEnded(D1, 7, None)  # this rank has none of the prompt's KV
    waits = count(*[[each] for each in (*ranks, nothing)])["wait_seconds"]
    assert waits["ask"] == [3]
    assert waits["read"] == [0.5]


def test_a_load_that_will_fail_is_counted_when_it_does() -> None:
    assert count([loaded()], held_back=[D1]) == {}


@pytest.mark.parametrize("ends", [(READ, end) for end in OfferEnd])
def test_the_ranks_of_an_engine_agree_on_one_end_of_an_offer(ends: tuple[OfferEnd, ...]) -> None:
    """A rank that no reader needs does not hide that the others were read."""
    worst = READ if ends[1] is OfferEnd.NOT_NEEDED else ends[1]
    for order in (ends, ends[::-1]):
        data = count(*[[OfferEnded(NONCE, P1, end)] for end in order])
        assert data == {"ended_offers": {worst.value: 1}}


def test_an_entry_of_peers_tells_prefill_engines_apart() -> None:
    config = Config.parse({"insecure": True, "peers": ["10.9.0.0/16", "10.0.0.0/24"]}, {})
    assert count([loaded()], config=config)["loads"] == {"loaded|10.0.0.0/24": 1}


def test_refused_tickets_and_requests_without_one_are_recomputed() -> None:
    stats = Stats()
    counts = RequestCounts(stats, CONFIG.entry_of, recomputes=True)
    counts.count_refused(D1, "key")
    counts.count_recomputed(NO_TICKET)
    assert stats.data == {
        "refused_tickets": {"key": 1},
        "recomputed_requests": {"key": 1, NO_TICKET: 1},
    }


def test_a_request_that_fails_for_its_ticket_does_not_count_as_a_load() -> None:
    stats = Stats()
    counts, reports = RequestCounts(stats, CONFIG.entry_of, recomputes=False), RankReports()
    counts.count_refused(D1, "prompt")
    reports.add([failed(FailureKind.DROPPED)])
    counts.add(reports)
    counts.count_loads([D1], [])
    assert stats.data == {"refused_tickets": {"prompt": 1}}
    counts.forget(D1)
    counts.add(reports)
    counts.count_loads([D1], [])
    assert stats.data["loads"] == {"cancelled|": 1}, "a later request has the same id"


def test_stats_that_the_scheduler_reads_at_once_are_not_kept() -> None:
    counts, reports = RequestCounts(Stats(), CONFIG.entry_of, recomputes=False), RankReports()
    reports.add([LoadReady(D1), EarlyReleased(NONCE, P1)])
    assert (reports.ready, reports.released, bool(reports)) == ({D1}, {NONCE}, True)
    counts.add(reports)
    assert not counts._reports


# --- the events of a rank


def rank_stats(*results: Result, rank: int = 0) -> Stats:
    stats = Stats(rank=rank)
    stats.count_rank(results)
    return stats


def good_load(*seconds: float, path: str = "gather", direct_bytes: int = 0) -> LoadEnded:
    reads = tuple(
        read_done(
            rank,
            num_bytes=1000,
            num_runs=5,
            seconds=each,
            path=path,
            direct_bytes=direct_bytes,
            post_seconds=0.0625,
        )
        for rank, each in enumerate(seconds)
    )
    return LoadEnded(D1, 7, None, PEER, reads=reads)


def test_the_transfer_threads_counts_are_added() -> None:
    first, second = Counts(), Counts()
    assert not first
    first.count("replaced_agents", label="stuck_read")
    first.observe("digest_seconds", 0.5)
    first.measure("unreadable", 1)
    assert first
    second.count("replaced_agents", 2, "stuck_read")
    second.observe("digest_seconds", 0.25)
    stats = rank_stats(first.pop(), second, rank=3)
    assert not first
    assert stats.data == {
        "replaced_agents": {"stuck_read": 3},
        "digest_seconds": {"": [0.5, 0.25]},
        "unreadable": {"3": 1},
    }


def test_a_gauge_is_sent_when_it_changes_and_the_latest_value_counts() -> None:
    stats, sent = Stats(), []
    for value in (0, 2, 2, 1):
        stats.measure("open_loads", value)
        sent.append(stats.pop())
    assert [each and each.data for each in sent] == [
        None,
        {"open_loads": {"": 2}},
        None,
        {"open_loads": {"": 1}},
    ]
    assert sent[1] is not None
    assert sent[3] is not None
    assert sent[1].aggregate(sent[3]).reduce() == {"open_loads": 1}
    for rank in range(2):
        of_rank = Stats(rank=rank)
        of_rank.measure("peers", 5 + rank, "ready")
        stats = stats.aggregate(of_rank)
    assert stats.reduce() == {"peers{ready|0}": 5, "peers{ready|1}": 6}


NAMES = st.sampled_from(sorted(COUNTERS))


@given(st.lists(st.lists(st.tuples(NAMES, st.integers(1, 9)), max_size=5), max_size=5))
def test_counts_add_up_over_ranks_and_steps(steps: list[list[tuple[str, int]]]) -> None:
    total, expected = Stats(), dict[str, int]()
    for step in steps:
        stats = Stats()
        for name, amount in step:
            stats.count(name, amount, "label")
            expected[name] = expected.get(name, 0) + amount
        sent = json.loads(json.dumps(stats.data))  # vLLM sends it between processes
        total = total.aggregate(Stats(data=sent))
    assert total.data == {name: {"label": amount} for name, amount in expected.items()}


def test_open_descriptors_are_shown_and_few_left_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nixl_kv.transport.ports.max_descriptors", lambda: 100)
    counts = iter([80, 81, 90, 95])
    monkeypatch.setattr("nixl_kv.transport.ports.num_descriptors", lambda: next(counts))
    stats, sent = Stats(), []
    for now in (0.0, 9.9, 10.0, 20.0, 1000.0):
        stats.measure_descriptors(now)
        popped = stats.pop()
        sent.append(popped and popped.data["open_descriptors"])
    assert sent == [{"0": 80}, None, {"0": 81}, {"0": 90}, {"0": 95}]
    warnings = [record.getMessage()[:12] for record in caplog.records]
    assert warnings == ["81 of 100 fi", "95 of 100 fi"]


# --- vLLM's log


def test_the_log_line_has_the_names_of_vllms_connector_first() -> None:
    stats = rank_stats(good_load(0.25, 0.75), good_load(0.5, path="direct"))
    stats.aggregate(Stats(data=count([failed(FailureKind.LATE)])))
    stats.aggregate(Stats(data=count([OfferEnded(NONCE, P1, OfferEnd.UNCLAIMED)])))
    line = stats.reduce()
    assert list(line.items())[:10] == [
        ("Num successful transfers", 3),
        ("Avg xfer time (ms)", 500.0),
        ("P90 xfer time (ms)", 750.0),
        ("Avg post time (ms)", 62.5),
        ("P90 post time (ms)", 62.5),
        ("Avg MB per transfer", 0.001),
        ("Throughput (MB/s)", 0.002),
        ("Avg number of descriptors", 5.0),
        ("Num failed transfers", 1),
        ("Num KV expired reqs", 1),
    ]
    assert line["load_failures{late|}"] == 1
    assert line["ended_offers{unclaimed}"] == 1


def test_stats_without_a_transfer_have_no_speed() -> None:
    stats = rank_stats(LoadEnded(D1, 0, None))  # this rank has none of the prompt's KV
    assert stats.reduce() == {}
    stats.count("denied_asks")
    assert stats.reduce() == {"denied_asks": 1}
    stats.reset()
    assert stats.is_empty()


# --- Prometheus


@pytest.fixture
def registry() -> Iterator[Any]:
    """The default one of Prometheus, which is as before afterwards."""
    prometheus = pytest.importorskip("prometheus_client")
    before = set(prometheus.REGISTRY._collector_to_names)
    yield prometheus.REGISTRY
    for collector in set(prometheus.REGISTRY._collector_to_names) - before:
        prometheus.REGISTRY.unregister(collector)


def metrics(engines: int = 1, *, role: str = "kv_both", **extra: Any) -> PromMetrics:
    """Metrics as vLLM makes them, for several engines of one model, with two ranks each."""
    config = vllm_config()
    config.parallel_config.world_size = 2
    config.kv_transfer_config.kv_role = role
    config.kv_transfer_config.kv_connector_extra_config = extra
    kinds: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    labels: dict[int, list[object]] = {number: ["tiny", str(number)] for number in range(engines)}
    return PromMetrics(config, kinds, ["model_name", "engine"], labels)


def shown(registry: Any, name: str, engine: int = 0, **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": str(engine), **labels}
    found: float | None = registry.get_sample_value(f"vllm:{name}", labels)
    return found


def names(registry: Any) -> set[str]:
    return {family.name for family in registry.collect() if family.name.startswith("vllm:nixl_")}


def test_all_series_begin_with_0_and_grow_per_engine(registry: Any) -> None:
    prom = metrics(2, peers=["10.0.0.0/24"], insecure=True)
    assert shown(registry, "nixl_kv_loads_total", outcome="loaded", peer="10.0.0.0/24") == 0
    assert shown(registry, "nixl_kv_refused_tickets_total", reason="key") == 0
    assert shown(registry, "nixl_kv_peers", state="ready", rank="1") == 0
    prom.observe({"loaded_tokens": {"": 7}, "unknown": {"": 1}, "open_loads": {"": 2}}, 1)
    prom.observe({"open_loads": {"": 1}, "wait_seconds": {"read": [0.004, 0.2]}}, 1)
    assert [shown(registry, "nixl_kv_loaded_tokens_total", number) for number in (0, 1)] == [0, 7]
    assert shown(registry, "nixl_kv_open_loads", 1) == 1
    assert shown(registry, "nixl_kv_wait_seconds_count", 1, phase="read") == 2
    assert shown(registry, "nixl_kv_wait_seconds_bucket", 1, phase="read", le="0.005") == 1


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_an_engine_shows_the_series_of_its_role(registry: Any, role: str) -> None:
    metrics(role=role)
    roles = {"kv_producer": {"prefill"}, "kv_consumer": {"decode"}}.get(role, {"prefill", "decode"})
    expected = {name for name, metric in METRICS.items() if roles & set(metric.roles)}
    ours = {name.removeprefix("vllm:nixl_kv_") for name in names(registry) if "_kv_" in name}
    assert ours - {"build_info"} - {"num_kv_expired_reqs"} >= expected
    others = {name for name, metric in METRICS.items() if not roles & set(metric.roles)}
    assert not others & ours


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_shows_requests_that_a_router_sent_to_the_wrong_pool(
    registry: Any, role: str
) -> None:
    """On the side where it happens: prefill gets decode's requests, or the other way round."""
    stats = Stats()
    RequestCounts(stats, str, recomputes=True).count_refused(D1, "role")
    metrics(role=role).observe(stats.data)
    assert shown(registry, "nixl_kv_refused_tickets_total", reason="role") == 1


def test_build_info_has_the_role_and_the_settings(registry: Any) -> None:
    metrics(role="kv_consumer", verify="all")
    (family,) = [each for each in registry.collect() if each.name == "vllm:nixl_kv_build_info"]
    (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels["role"] == "decode"
    assert sample.labels["verify"] == "1"
    assert sample.labels["path"] == "auto"


def test_reads_are_shown_by_path_and_under_the_names_of_vllms_connector(registry: Any) -> None:
    """The bytes that a staged read has read directly count as direct."""
    prom = metrics()
    prom.observe(rank_stats(good_load(0.5, path="staged", direct_bytes=300)).data)
    prom.observe(rank_stats(good_load(0.25, path="direct")).data)
    prom.observe(count([failed(FailureKind.LATE), OfferEnded(NONCE, P1, OfferEnd.EXPIRED)]))
    read_bytes = "nixl_kv_read_bytes_total"
    assert shown(registry, read_bytes, path="staged") == 700
    assert shown(registry, read_bytes, path="direct") == 1300
    assert shown(registry, "nixl_kv_read_seconds_sum", path="staged") == 0.5
    assert shown(registry, "nixl_xfer_time_seconds_sum") == 0.75
    assert shown(registry, "nixl_post_time_seconds_count") == 2
    assert shown(registry, "nixl_bytes_transferred_sum") == 2000
    assert shown(registry, "nixl_num_descriptors_sum") == 10
    assert shown(registry, "nixl_num_failed_transfers_total") == 1
    assert shown(registry, "nixl_num_kv_expired_reqs_total") == 1
    assert shown(registry, "nixl_num_notifications_after_expiry_total") == 0


def test_a_child_of_a_multi_connector_has_its_own_settings(registry: Any) -> None:
    child = {
        "kv_connector": "NixlKVConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"path": "staged"},
    }
    config = vllm_config()
    config.kv_transfer_config.kv_connector = "MultiConnector"
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": [child]}
    kinds: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    prom = PromMetrics(config, kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
    prom.observe(rank_stats(good_load(0.5)).data)
    assert "vllm:nixl_kv_loads" in names(registry)
    assert "vllm:nixl_kv_offers" not in names(registry)
    samples = [each for family in registry.collect() for each in family.samples]
    (info,) = (each for each in samples if each.name == "vllm:nixl_kv_build_info")
    assert info.labels["path"] == "staged"


def test_names_have_units_last_and_descriptions_stand_alone() -> None:
    units = ("seconds", "bytes")
    for name, metric in METRICS.items():
        assert not any(f"{unit}_" in name for unit in units), name
        assert metric.help.endswith("."), name
        assert not metric.help.startswith("Of "), name
        assert name in HISTOGRAMS or name in COUNTERS or name in GAUGES
    assert READS not in METRICS
    assert all(math.isfinite(bound) for metric in HISTOGRAMS.values() for bound in metric.buckets)
    assert set(TICKET_REASONS) <= set(COUNTERS["recomputed_requests"].labels["reason"])
