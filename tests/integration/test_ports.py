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
from multiprocessing.connection import Connection
from typing import Any, Final

import psutil
import pytest

from harness.cluster import netns
from harness.cluster.netns import Namespace, Switch
from harness.local.caches import Cache, Sizes
from nixl_kv.config import Config
from nixl_kv.protocol.ticket import Ticket
from support.pair import CONFIG, SmallEngine
from support.processes import START_S, process_context

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

SIZES: Final = Sizes(layers=1, blocks=8, heads=1, tokens=16, key=1024, value=1024)
TABLE: Final = (1, 2, 3)
TOKENS: Final = len(TABLE) * SIZES.tokens
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


def _make(role: str, config: Config) -> SmallEngine:
    from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - in the namespace

    cache = Cache(SIZES)
    if role == "prefill":
        cache.fill(7)
    return SmallEngine(
        role, cache, lambda: nixl_transport(config, "DRAM"), config=config, roles=role
    )


def _serve(pipe: Connection, namespace: str, role: str, config: Config) -> None:
    """The process of an engine: carries out what it is asked, by name."""
    netns.enter(namespace)
    engine = _make(role, config)

    def offer(name: str) -> Ticket:
        return engine.offer(name, [TABLE], TOKENS)

    def read(name: str, ticket: Ticket) -> str:
        engine.prepare_load(name, ticket)
        engine.load(name, TABLE, end=TOKENS)
        (report,) = engine.wait_load(name)
        good = (engine.cache.blocks(TABLE) == Cache(SIZES).fill(7).blocks(TABLE)).all()
        return str(report.failure or ("" if good else "wrong bytes"))

    def ports() -> list[Port]:
        """Only here: psutil reads the tables of the namespace in which it is called."""
        connections = psutil.Process().net_connections("tcp")
        return [(*one.laddr,) for one in connections if one.status == psutil.CONN_LISTEN]

    actions: dict[str, Callable[..., object]] = {"offer": offer, "read": read, "ports": ports}
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        pipe.send(actions[order[0]](*order[1:]))
    engine.close()


class Host:
    """An engine in a process of its own."""

    def __init__(self, namespace: Namespace, role: str, **changed: Any) -> None:
        config = Config(**(vars(CONFIG) | {"host": namespace.wire_address} | changed))
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self.namespace, self.at = namespace, config.host
        self.process = context.Process(
            target=_serve, args=(theirs, namespace.name, role, config), daemon=True
        )
        self.process.start()
        self._get()

    def _get(self) -> Any:
        assert self._pipe.poll(START_S), "the process says nothing"
        return self._pipe.recv()

    def ask(self, *order: object) -> Any:
        """Let it do something."""
        self._pipe.send(order)
        return self._get()

    @property
    def ports(self) -> list[Port]:
        """Where it listens."""
        ports: list[Port] = self.ask("ports")
        return ports

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()


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


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Callable[..., Host]:
    """Starts engines, which are ended afterwards."""

    def started(namespace: Namespace, role: str, **changed: Any) -> Host:
        host = Host(namespace, role, **changed)
        request.addfinalizer(host.close)
        return host

    return started


def transfer(prefill: Host, decode: Host, name: str) -> str:
    """One load; what went wrong with it."""
    return str(decode.ask("read", f"d-{name}", prefill.ask("offer", f"p-{name}")))


def exposed(host: Host, ports: Sequence[Port]) -> list[Port]:
    """Those that other machines may reach; fails if UCX's are not among all."""
    assert len(ports) > 2, f"UCX's ports are not seen: {ports}"
    return [port for port in ports if port[0] == host.namespace.wire_address]


Hosts = tuple[Namespace, Namespace, Namespace]


def test_a_loopback_engine_has_no_port_for_other_machines(
    hosts: Hosts, start: Callable[..., Host]
) -> None:
    prefill = start(hosts[0], "prefill", host="127.0.0.1")
    decode = start(hosts[0], "decode", host="127.0.0.1")
    assert transfer(prefill, decode, "1") == ""
    for engine in (prefill, decode):  # what each has opened for the other, too
        exposed(engine, engine.ports)
        assert {host for host, _ in engine.ports} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("role", "changed"),
    [
        pytest.param("prefill", {}, id="prefill"),
        pytest.param("decode", {}, id="decode"),
        pytest.param("decode", {"host": "127.0.0.1"}, id="decode that names no address"),
    ],
)
def test_hosts_outside_peers_cannot_connect_to_any_port(
    hosts: Hosts, start: Callable[..., Host], role: str, changed: dict[str, Any]
) -> None:
    near, far, stranger = hosts
    peers = tuple(ipaddress.ip_network(f"{one.wire_address}/32") for one in (near, far))
    prefill = start(near, "prefill", insecure=True, peers=peers)
    decode = start(far, "decode", insecure=True, peers=peers, **changed)
    assert transfer(prefill, decode, "before") == ""
    victim = {"prefill": prefill, "decode": decode}[role]
    reachable = exposed(victim, victim.ports)
    assert len(reachable) >= 3
    friend = near if role == "decode" else far
    assert len(connected(friend, reachable)) == len(reachable)
    assert connected(stranger, reachable) == []
    assert transfer(prefill, decode, "after") == ""
