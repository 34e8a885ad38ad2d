"""The TCP ports that an engine's process opens, UCX's among them: who can connect to them.

Engines are in processes and network namespaces of their own. What an allowed host can do at UCX's
ports without a key is told in docs/operations.md.
"""

import contextlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import psutil
import pytest

from harness.cluster import netns
from harness.cluster.netns import Namespace, Switch
from harness.local.caches import Sizes
from nixl_kv.config import Config
from nixl_kv.transport.ports import UcxPorts
from support.integration import CONFIG
from support.processes import Side, SideProcess

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

SIZES: Final = Sizes(layers=1, blocks=4, heads=1, tokens=16, key=1024, value=1024)
CONNECT: Final = """\
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 0.2)
    except OSError:
        continue
    print(port)
"""

Port = tuple[str, int]


class HostSide(Side):
    """An engine that runs in a network namespace."""

    def __init__(self, namespace: str, role: str, config: Config) -> None:
        from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - in the namespace

        netns.enter(namespace)
        ports = UcxPorts()
        super().__init__(role, lambda: nixl_transport(config, "DRAM", ports), SIZES, config, ports)

    def ports(self) -> list[Port]:
        """Only here: psutil reads the tables of the namespace in which it is called."""
        connections = psutil.Process().net_connections("tcp")
        return [(*one.laddr,) for one in connections if one.status == psutil.CONN_LISTEN]


def connected(namespace: Namespace, ports: Sequence[Port]) -> list[str]:
    """Which of these ports, all at one address, can be connected to from there."""
    command = [sys.executable, "-c", CONNECT, ports[0][0], *(str(port) for _, port in ports)]
    done = subprocess.run(namespace.inside(command), capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    """Of prefill, of decode, and of a stranger, on one network."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    with contextlib.ExitStack() as stack:
        try:
            found = [stack.enter_context(Namespace(name, n)) for n, name in enumerate("pds", 11)]
            stack.enter_context(Switch(*found))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found[0], found[1], found[2]


Start = Callable[..., SideProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines, which are ended afterwards."""
    with contextlib.ExitStack() as stack:

        def started(namespace: Namespace, role: str, **changed: Any) -> SideProcess:
            config = Config(**(vars(CONFIG) | {"host": namespace.wire_address} | changed))
            return stack.enter_context(SideProcess(HostSide, namespace.name, role, config))

        yield started


def exposed(namespace: Namespace, engine: SideProcess) -> list[Port]:
    """The ports that other machines may reach; fails if UCX's are not among all."""
    ports = engine.ports()
    assert len(ports) > 2, f"UCX's ports are not seen: {ports}"
    return [port for port in ports if port[0] == namespace.wire_address]


Hosts = tuple[Namespace, Namespace, Namespace]


def test_a_loopback_engine_has_no_port_for_other_machines(hosts: Hosts, start: Start) -> None:
    prefill = start(hosts[0], "prefill", host="127.0.0.1")
    decode = start(hosts[0], "decode", host="127.0.0.1")
    assert decode.load(prefill.offer()) is None
    for engine in (prefill, decode):  # what each has opened for the other, too
        assert exposed(hosts[0], engine) == []
        assert {host for host, _ in engine.ports()} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("role", "changed"),
    [
        pytest.param("prefill", {}, id="prefill"),
        pytest.param("decode", {}, id="decode"),
        pytest.param("decode", {"host": "127.0.0.1"}, id="decode that names no address"),
    ],
)
def test_hosts_outside_peers_cannot_connect_to_any_port(
    hosts: Hosts, start: Start, role: str, changed: dict[str, Any]
) -> None:
    near, far, stranger = hosts
    peers = tuple(ipaddress.ip_network(f"{one.wire_address}/32") for one in (near, far))
    prefill = start(near, "prefill", insecure=True, peers=peers)
    decode = start(far, "decode", insecure=True, peers=peers, **changed)
    assert decode.load(prefill.offer()) is None
    reachable = exposed(near, prefill) if role == "prefill" else exposed(far, decode)
    assert len(reachable) >= 3
    friend = near if role == "decode" else far
    assert len(connected(friend, reachable)) == len(reachable)
    assert connected(stranger, reachable) == []
    assert decode.load(prefill.offer()) is None
