"""What strangers can do at every TCP port that an engine's process opens, UCX's among them.

The engine is in a process of its own, in a network namespace.
Bytes are sent to each of them from other namespaces, on its network, and from its own host.
"""

import contextlib
import ipaddress
import logging
import os
import random
import socket
import struct
import subprocess
import time
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

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

SIZES: Final = Sizes(layers=1, blocks=8, heads=1, tokens=16, key=1024, value=1024)
TABLE: Final = (1, 2, 3)
TOKENS: Final = len(TABLE) * SIZES.tokens
UCX_MAGIC: Final = struct.pack("<Q", 0xCAFEBABE12345678)
CONNECTIONS: Final = 40
"""To each port, of each kind: some thirty of UCX's magic killed an engine, in every run."""
CONNECT_S: Final = 0.2
SETTLE_S: Final = 3.0

Port = tuple[str, int]
Say = Callable[[random.Random], bytes]

KINDS: Final[dict[str, Say]] = {
    "magic": lambda rng: (
        UCX_MAGIC
        + bytes([rng.randrange(32)])
        + struct.pack("<I", rng.choice([1, 8, 26, 64, 4096]))
        + rng.randbytes(rng.choice([1, 8, 64, 4096, 100_000]))
    ),
    "noise": lambda rng: rng.randbytes(rng.choice([1, 8, 64, 4096, 100_000])),
    "http": lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "silence": lambda _: b"",
}


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

    @property
    def num_descriptors(self) -> int:
        """How many it has now."""
        return psutil.Process(self.process.pid).num_fds()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()


def _attack(pipe: Connection, namespace: str, ports: Sequence[Port], kind: str) -> None:
    """The stranger's process. How many connections came about; open until it is told to end."""
    netns.enter(namespace)
    rng, held = random.Random(1), []  # noqa: S311 - the same bytes every time
    for _ in range(CONNECTIONS):
        for port in ports:
            one = socket.socket()
            one.settimeout(CONNECT_S)
            try:
                one.connect(port)
                held.append(one)
                one.sendall(KINDS[kind](rng))
            except OSError:
                pass
            if kind != "silence":
                one.close()
        if not held:
            break  # the kernel drops them all: the others would only take time
    pipe.send(len(held))
    pipe.recv()


@contextlib.contextmanager
def attack(namespace: Namespace, ports: Sequence[Port], kind: str) -> Iterator[int]:
    """Send this to these ports from there; how many connections were established."""
    context = process_context()
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=_attack, args=(theirs, namespace.name, ports, kind), daemon=True
    )
    process.start()
    try:
        assert pipe.poll(START_S), "the stranger does not end"
        yield pipe.recv()
    finally:
        process.kill()
        process.join()


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


def settled(host: Host, before: int) -> int:
    """How many descriptors more it has than before, once it has given back what it does."""
    until = time.monotonic() + SETTLE_S
    while (more := host.num_descriptors - before) > 0 and time.monotonic() < until:
        time.sleep(0.1)
    return more


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
    before = victim.num_descriptors
    for kind in KINDS:
        with attack(stranger, reachable, kind) as connected:
            logger.info("%s, stranger, %s: %d connections", role, kind, connected)
            assert connected == 0
            assert victim.process.is_alive()
            assert victim.num_descriptors <= before
        assert transfer(prefill, decode, kind) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_allowed_host_can_do_without_a_key(
    hosts: Hosts, start: Callable[..., Host], kind: str
) -> None:
    """The remaining risk, as docs/operations.md tells it: no key protects UCX's ports from the
    hosts that `peers` allows. If nothing happens to the engine any longer, shorten that page."""
    near, far, _ = hosts
    config = {"insecure": True, "peers": (ipaddress.ip_network(netns.ADDRESSES),)}
    prefill, decode = start(near, "prefill", **config), start(far, "decode", **config)
    before = prefill.num_descriptors
    with attack(far, exposed(prefill, prefill.ports), kind) as connected:
        prefill.process.join(SETTLE_S)
        more = settled(prefill, before) if prefill.process.is_alive() else 0
    harm = f"exit {prefill.process.exitcode}"
    if prefill.process.is_alive():
        harm = f"{more} descriptors more while they last, "
        harm += f"{settled(prefill, before)} afterwards; "
        harm += f"a load: {transfer(prefill, decode, kind) or 'good'}"
    logger.info("allowed host, %s: %d connections; %s", kind, connected, harm)
    if kind == "magic":
        assert prefill.process.exitcode or "a load: good" not in harm
    else:
        assert more > 0
