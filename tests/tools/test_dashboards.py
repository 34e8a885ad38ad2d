"""Alerts, dashboard and pages name metrics that engines export, and a real Prometheus answers.

The tests of Prometheus need `prometheus` and `promtool`, on PATH or in the folder that
NIXL_KV_PROMETHEUS names.
"""

import json
import operator
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from prometheus_client import REGISTRY, generate_latest, start_http_server
from vllm.v1.metrics.loggers import PrometheusStatLogger

from harness.cluster.waiting import look_until, wait_or_fail
from nixl_kv.connector.stats import FAILURES, METRICS, NO_TICKET, READS
from nixl_kv.errors import TICKET_REASONS
from nixl_kv.protocol.events import PHASES
from support.vllm_objects import vllm_config

REPO: Final = Path(__file__).resolve().parents[2]
ALERTS: Final = REPO / "configs/prometheus/alerts.yaml"
DASHBOARD: Final = json.loads((REPO / "configs/grafana/nixl-kv.json").read_text("utf-8"))
PAGES: Final = [
    *(REPO / "README.md", REPO / "CHANGELOG.md"),
    *sorted(REPO.glob("docs/**/*.md")),
    *sorted(REPO.glob("configs/prometheus/*.yaml")),
]
RULES: Final = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
PROGRAMS: Final = os.environ.get("NIXL_KV_PROMETHEUS")
PROMTOOL: Final = shutil.which("promtool", path=PROGRAMS)
PROMETHEUS: Final = shutil.which("prometheus", path=PROGRAMS)
ENDINGS: Final = ("_bucket", "_count", "_sum")
TIMEOUT_S: Final = 60.0

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus")


def expressions() -> dict[str, str]:
    """Each query of the dashboard, with its variables filled in."""
    values = {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m", "$__range": "1m"}
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


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
        if name in ("read_seconds", "read_bytes", "read_descriptors"):
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
    text = (REPO / "docs/runbook.md").read_text("utf-8").partition("### Reasons")[2]
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


def promtool(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [PROMTOOL, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)  # type: ignore[arg-type]


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
    folder = tmp_path_factory.mktemp("prometheus")
    server, thread = start_http_server(0, "127.0.0.1")
    scrape = {"job_name": "vllm", "scrape_interval": "2s", "metric_relabel_configs": relabelings()}
    target = {"targets": [f"127.0.0.1:{server.server_port}"]}
    config = {
        "rule_files": [str(ALERTS)],
        "scrape_configs": [scrape | {"static_configs": [target]}],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config), "utf-8")
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [
            *(str(PROMETHEUS), f"--config.file={folder}/prometheus.yaml"),
            *(f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"),
        ],
        stderr=log,
    )
    try:
        url = look_until(lambda: address_in(folder / "log"), bool, TIMEOUT_S)
        with httpx.Client(base_url=url, trust_env=False) as client:
            for scrapes in (1, 3):
                engine.kv_connector_prom.observe(a_step(), 0)
                wait_or_fail(partial(has_scraped, client, scrapes), TIMEOUT_S, "no scrape")
            yield client
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        log.close()
        server.shutdown()
        server.server_close()
        thread.join(TIMEOUT_S)


def relabelings() -> list[dict[str, Any]]:
    """Those of the PodMonitor, in the words of a scrape configuration."""
    monitor = yaml.safe_load((ALERTS.parent / "podmonitor.yaml").read_text("utf-8"))
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [
        {names.get(key, key): value for key, value in rule.items()}
        for rule in endpoint["metricRelabelings"]
    ]


def address_in(log: Path) -> str:
    found = re.search(r"address=(127\.0\.0\.1:[1-9]\d*)", log.read_text("utf-8"))
    return f"http://{found[1]}" if found else ""


def has_scraped(client: httpx.Client, least: int) -> bool:
    (count,) = query(client, "sum_over_time(up[1m])") or [0.0]
    return count >= least


def query(client: httpx.Client, expression: str) -> list[float]:
    """The values of an instant vector."""
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    return [float(one["value"][1]) for one in answer["data"]["result"]]


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
