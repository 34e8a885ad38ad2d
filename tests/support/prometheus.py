"""A Prometheus that scrapes engines as configs/prometheus says, and the queries of the dashboard.

It needs `prometheus` and `promtool`, on PATH or in the folder that NIXL_KV_PROMETHEUS names.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from harness.cluster.waiting import look_until

REPO: Final = Path(__file__).resolve().parents[2]
ALERTS: Final = REPO / "configs/prometheus/alerts.yaml"
DASHBOARD: Final = json.loads((REPO / "configs/grafana/nixl-kv.json").read_text("utf-8"))
RULES: Final = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
PROGRAMS: Final = os.environ.get("NIXL_KV_PROMETHEUS")
PROMTOOL: Final = shutil.which("promtool", path=PROGRAMS)
PROMETHEUS: Final = shutil.which("prometheus", path=PROGRAMS)
TIMEOUT_S: Final = 60.0

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus")


def promtool(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [PROMTOOL, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)  # type: ignore[arg-type]


def expressions(rate_interval: str = "1m") -> dict[str, str]:
    """Each query of the dashboard, with its variables filled in."""
    values = {"$model": ".*", "$instance": ".*", "$__rate_interval": rate_interval}
    values["$__range"] = rate_interval
    for each in DASHBOARD["templating"]["list"]:
        if each["type"] == "textbox":
            values[f"${each['name']}"] = each["query"]
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


@contextmanager
def scraping(
    folder: Path, targets: Mapping[str, Sequence[str]], every_s: int = 2, rules: Path = ALERTS
) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the addresses of each job, and evaluates the rules as often."""
    scrape = {
        "scrape_interval": f"{every_s}s",
        "scrape_timeout": f"{every_s}s",
        "metric_relabel_configs": _relabelings(),
    }
    config = {
        "global": {"evaluation_interval": f"{every_s}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses}], **scrape}
            for job, addresses in targets.items()
        ],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config), "utf-8")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(PROMETHEUS), f"--config.file={folder}/prometheus.yaml"),
                *(f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"),
            ],
            stderr=log,
        )
        try:
            url = look_until(lambda: _address_in(folder / "log"), bool, TIMEOUT_S)
            with httpx.Client(base_url=url, trust_env=False) as client:
                yield client
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def _relabelings() -> list[dict[str, Any]]:
    """Those of the PodMonitor, in the words of a scrape configuration."""
    monitor = yaml.safe_load((ALERTS.parent / "podmonitor.yaml").read_text("utf-8"))
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [
        {names.get(key, key): value for key, value in rule.items()}
        for rule in endpoint["metricRelabelings"]
    ]


def _address_in(log: Path) -> str:
    found = re.search(r"address=(127\.0\.0\.1:[1-9]\d*)", log.read_text("utf-8"))
    return f"http://{found[1]}" if found else ""


def query(client: httpx.Client, expression: str) -> list[float]:
    """The values of an instant vector."""
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    return [float(one["value"][1]) for one in answer["data"]["result"]]


def firing(client: httpx.Client) -> set[str]:
    """The names of the alerts that fire."""
    alerts = client.get("/api/v1/alerts").json()["data"]["alerts"]
    return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}
