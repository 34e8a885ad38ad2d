"""Proxies, and modules in the folder where it is started, change no result."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.cluster.engines import apart
from harness.cluster.processes import ManagedProcess, Ports
from harness.cluster.router import Router, past_proxies

PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")
ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10).close()"


@pytest.mark.parametrize(
    ("env", "hosts"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "", "NO_PROXY": "a.b"}, "a.b,127.0.0.1,localhost"),
        ({"no_proxy": "a.b, .c", "NO_PROXY": "d"}, "a.b,.c,d,127.0.0.1,localhost"),
        ({"no_proxy": "localhost"}, "localhost,127.0.0.1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
    ids=["none", "one", "several", "one of ours", "all"],
)
def test_our_hosts_are_exempt_on_top_of_others(env: Mapping[str, str], hosts: str) -> None:
    assert past_proxies(env) == {"no_proxy": hosts, "NO_PROXY": hosts}


@pytest.fixture
def server() -> Iterator[str]:
    serving = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/"
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_the_router_asks_past_a_proxy(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    given: list[Mapping[str, str]] = []
    monkeypatch.setattr(ManagedProcess, "launch", lambda _, *launched: given.append(launched[1]))
    Router(tmp_path / "router.log", [], [], ports=Ports()).start()
    (env,) = given
    assert "example.org" in env["no_proxy"]
    subprocess.run([sys.executable, "-c", ASK, server], env=dict(env), check=True)
    without = subprocess.run([sys.executable, "-c", ASK, server], capture_output=True, check=False)
    assert without.returncode == 1  # else the above would say nothing


def test_only_an_old_python_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as old:
        old.setattr(sys, "version_info", (3, 10, 12))
        folder = apart(tmp_path)
    assert folder == tmp_path
    with monkeypatch.context() as new:
        new.setattr(sys, "version_info", (3, 11, 0))
        folder = apart(tmp_path)
    assert folder is None
