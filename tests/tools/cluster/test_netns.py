"""Namespaces behind a switch reach each other until a link is cut, by IPv4 and IPv6."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.netns import Namespace, Switch
from harness.cluster.processes import Ports

CONNECT = """\
import socket, sys
host, timeout_s = sys.argv[1], float(sys.argv[2])
try:
    socket.create_connection((host, 9), timeout_s)
except ConnectionRefusedError:  # by the host, which was reached
    sys.exit(0)
except OSError:
    sys.exit(1)
"""
PATIENCE_S = 20.0
CUT_S = 0.3
"""How long nothing comes back from a host before it counts as out of reach."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root, and `ip` of iproute2",
)


@pytest.fixture
def hosts() -> Iterator[list[Namespace]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Namespace(f"kv-test-{n}", n)) for n in (101, 102, 103)]


def reaches(one: Namespace, other: Namespace, timeout_s: float = PATIENCE_S) -> bool:
    command = [sys.executable, "-c", CONNECT, other.wire_address, str(timeout_s)]
    return subprocess.run(one.inside(command), check=False).returncode == 0


@needs_root
@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_a_cut_link_is_one_between_two_hosts(hosts: list[Namespace], *, ipv6: bool) -> None:
    first, second, third = hosts
    with Switch(*hosts, ipv6=ipv6) as switch:
        assert (":" in first.wire_address) is ipv6
        assert reaches(first, second)
        switch.cut(first, second)
        assert not reaches(first, second, CUT_S)
        assert not reaches(second, first, CUT_S)
        assert reaches(first, third)
        assert reaches(third, second)
        switch.heal()
        assert reaches(first, second)


@needs_root
def test_hosts_may_be_joined_to_another_switch(hosts: list[Namespace]) -> None:
    for ipv6 in (True, False):
        with Switch(*hosts, ipv6=ipv6):
            assert reaches(hosts[0], hosts[1])


@pytest.mark.parametrize(
    ("address", "url"),
    [("198.18.0.7", "http://198.18.0.7:{}"), ("fd00::7", "http://[fd00::7]:{}")],
)
def test_other_hosts_reach_an_engine_by_the_switch(tmp_path: Path, address: str, url: str) -> None:
    host, other = Namespace("a", 7), Namespace("b", 8)
    host.wire_address, host.has_default_route = address, True
    engine = Engine(EngineSpec("a", Path("model"), host=host), tmp_path, Ports())
    assert engine.url_from(other) == url.format(engine.port)
    assert engine.url_from(None) == engine.url == f"http://198.18.7.2:{engine.port}"
    assert engine.arguments()[5] == ("::" if ":" in address else "0.0.0.0")  # noqa: S104
