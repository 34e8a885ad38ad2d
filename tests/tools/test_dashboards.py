"""Alerts, dashboard and pages name metrics that engines export, and a real Prometheus answers."""

import operator
import re
from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from prometheus_client import REGISTRY, generate_latest, start_http_server
from vllm.v1.metrics.loggers import PrometheusStatLogger

from harness.cluster.waiting import look_until, wait_or_fail
from nixl_kv.connector.stats import FAILURES, METRICS, NO_TICKET, READS
from nixl_kv.errors import TICKET_REASONS
from nixl_kv.protocol.events import PHASES
from support.prometheus import (
    ALERTS,
    REPO,
    RULES,
    TIMEOUT_S,
    expressions,
    needs_prometheus,
    needs_promtool,
    promtool,
    query,
    scraping,
)
from support.vllm_objects import vllm_config

PAGES: Final = [
    *(REPO / "README.md", REPO / "CHANGELOG.md"),
    *sorted(REPO.glob("docs/**/*.md")),
    *sorted(REPO.glob("configs/prometheus/*.yaml")),
]
ENDINGS: Final = ("_bucket", "_count", "_sum")


@cache
def exported() -> frozenset[str]:
    """The names on /metrics of an engine that prefills and decodes: vLLM's and ours."""
    return frozenset(
        chain.from_iterable(
            (sample.name for sample in family.samples) for family in REGISTRY.collect()
        )
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """The metrics of an engine, in the default registry, as its API server makes them."""
    before = set(REGISTRY._collector_to_names)
    exported.cache_clear()
    yield PrometheusStatLogger(vllm_config(), [0])
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def a_step() -> dict[str, Any]:
    """Something for every metric, in the form in which a scheduler sends it."""
    data: dict[str, Any] = {READS: {"direct": [[0.01, 0.001, 1 << 20, 8, 0]]}}
    for name, metric in METRICS.items():
        if name in ("read_seconds", "read_bytes"):
            continue  # READS makes them
        values = [
            list(known) or ["0" if label == "rank" else ""]
            for label, known in metric.labels.items()
        ]
        amount = [0.01] if name.endswith("_seconds") and "timestamp" not in name else 1
        data[name] = {"|".join(one[0] for one in values): amount}
    data["wait_seconds"] = {phase: [0.01] for phase in PHASES}
    data["ended_offers"] |= {"unclaimed": 1}
    return data


# --- names


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_alerts_name_metrics_that_exist(page: Path) -> None:
    """A page may also name a counter without `_total`, or a histogram by itself."""
    known = exported()
    named = set(re.findall(r"(?<![-\w])vllm:\w+", page.read_text("utf-8")))
    unknown = {
        name
        for name in named
        if not {name, f"{name}_total", *(name + ending for ending in ENDINGS)} & known
        and not name.endswith("_")  # of a pattern
    }
    assert unknown == set()


@pytest.mark.usefixtures("engine")
def test_the_dashboard_queries_metrics_that_exist_and_every_one_of_ours() -> None:
    for title, expression in expressions().items():
        names = set(re.findall(r"\bvllm:\w+", expression))
        assert names, title
        assert names <= exported(), title
    text = "\n".join(expressions().values())
    shown = set(re.findall(r"vllm:nixl_kv_(\w+?)(?:_total|_bucket|_count|_sum)?\b", text))
    assert set(METRICS) - shown == set()


def test_each_alert_has_a_text_a_runbook_entry_and_a_unit_test() -> None:
    runbook = (REPO / "docs/runbook.md").read_text("utf-8")
    headings = {one.lower() for one in re.findall(r"^#+ (\w+)$", runbook, re.MULTILINE)}
    for rule in RULES:
        assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page.endswith("/docs/runbook.md")
        assert anchor == rule["alert"].lower()
        assert anchor in headings
    tests = (ALERTS.parent / "alerts_test.yaml").read_text("utf-8")
    assert re.findall(r'alertname="(\w+)"', tests) == [rule["alert"] for rule in RULES]


def test_the_runbook_explains_each_reason() -> None:
    _, _, text = (REPO / "docs/runbook.md").read_text("utf-8").partition("### Reasons")
    text, _, _ = text.partition("\n## ")
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    explained = [reason for row in rows for reason in re.findall(r"\w+", row)]
    assert sorted(explained) == sorted((*FAILURES, *TICKET_REASONS, NO_TICKET))


def test_the_pages_list_the_values_of_each_label() -> None:
    pages = ("docs/reference/metrics.md", "docs/runbook.md")
    text = "".join((REPO / page).read_text("utf-8") for page in pages)
    known = [
        value for metric in METRICS.values() for one in metric.labels.values() for value in one
    ]
    assert [value for value in known if f"`{value}`" not in text] == []


# --- with Prometheus


@needs_promtool
def test_the_rules_are_valid() -> None:
    ended = promtool("check", "rules", ALERTS)
    assert ended.returncode == 0, ended.stderr.decode()


@needs_promtool
def test_each_alert_fires_and_clears() -> None:
    ended = promtool("test", "rules", ALERTS.parent / "alerts_test.yaml")
    assert ended.returncode == 0, ended.stdout.decode() + ended.stderr.decode()


@needs_promtool
def test_our_metrics_follow_prometheus_conventions(engine: Any) -> None:
    """Except that vLLM's prefix has a colon, which is for recording rules."""
    engine.kv_connector_prom.observe(a_step(), 0)
    ended = promtool("check", "metrics", stdin=generate_latest(REGISTRY))
    lines = ended.stderr.decode().splitlines() + ended.stdout.decode().splitlines()
    assert any(line.startswith("vllm:nixl_kv_loads_total ") for line in lines)
    assert [
        line
        for line in lines
        if line.startswith("vllm:nixl_")
        and not line.endswith("metric names should not contain ':'")
    ] == []


@pytest.fixture(scope="module")
def prometheus(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that has scraped the engine several times, with a step between two scrapes."""
    server, thread = start_http_server(0, "127.0.0.1")
    target = f"127.0.0.1:{server.server_port}"
    try:
        with scraping(tmp_path_factory.mktemp("prometheus"), {"vllm": [target]}) as client:
            for scrapes in (1, 3):
                engine.kv_connector_prom.observe(a_step(), 0)
                wait_or_fail(partial(has_scraped, client, scrapes), TIMEOUT_S, "no scrape")
            yield client
    finally:
        server.shutdown()
        server.server_close()
        thread.join(TIMEOUT_S)


def has_scraped(client: httpx.Client, least: int) -> bool:
    (count,) = query(client, "sum_over_time(up[1m])") or [0.0]
    return count >= least


@needs_prometheus
def test_every_panel_shows_data(prometheus: httpx.Client) -> None:
    """A scrape that fails on a busy machine hides the gauges until the next one."""
    queries = expressions()

    def empty() -> list[str]:
        return [title for title, one in queries.items() if not query(prometheus, one)]

    assert look_until(empty, operator.not_, TIMEOUT_S) == []


@needs_prometheus
def test_every_alert_watches_series_that_exist(prometheus: httpx.Client) -> None:
    selectors = [re.findall(r"(?:vllm:|process_)\w+(?:\{[^}]*\})?", rule["expr"]) for rule in RULES]
    assert all(selectors)
    for selector in set(chain.from_iterable(selectors)):
        assert look_until(partial(query, prometheus, selector), bool, TIMEOUT_S), selector
