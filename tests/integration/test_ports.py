"""The TCP ports that an engine's process opens, UCX's among them: who can connect, and write.

Engines are in processes and network namespaces of their own. UCX's ports ask for no key, and UCX
writes the bytes of a PUT to the address that it names.
"""

import contextlib
import ctypes
import ipaddress
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import psutil
import pytest

from harness.cluster import netns
from harness.cluster.netns import Namespace, Switch
from harness.local.caches import Sizes
from nixl_kv.config import AllowedHosts, Config
from nixl_kv.engine import admission
from nixl_kv.protocol import peers as peers_module
from nixl_kv.transport.ucx.ports import UcxPorts
from support.integration import CONFIG
from support.processes import Side, SideProcess, wait_for

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

SIZES: Final = Sizes(layers=1, blocks=4, heads=1, tokens=16, key=1024, value=1024)
KEY: Final = "5e" * 32
NOBODY: Final = 65534
TEXT: Final = b"written by a stranger, no key!!!"
ROUNDS: Final = 3

# Says hello to each port as UCX does (uct/tcp/tcp_cm.c), and sends a PUT (tcp_ep.c) of TEXT. Prints
# the ports to which it could connect, then those that acknowledged the PUT.
STRANGER: Final = f"""\
import os, socket, struct, sys
"x".encode("idna")
user, address, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if user:
    os.setuid(user)
hello = struct.pack("<QBIIB8sHH4s8x", 0xCAFEBABE12345678, 32, 29, 1, 0, bytes(8), 2, 4444,
                    bytes([127, 0, 0, 1]))
text = {TEXT!r}
put = struct.pack("<BIQQI", 33, 20, address, len(text), 1) + text
connected, written = [], []
for port in sys.argv[4:]:
    try:
        one = socket.create_connection((place, int(port)), 0.2)
    except OSError:
        continue
    connected.append(port)
    if address:
        try:
            one.settimeout(1.0)
            one.sendall(hello + put)
            answer = one.recv(1 << 16)
            while answer and b"\\x22" not in answer:
                answer = one.recv(1 << 16)
            written += [port] * bool(answer)
        except OSError:
            pass
print(" ".join(connected))
print(" ".join(written))
"""

# Says the same to all ports of a range, again and again, until it is ended.
HAMMER: Final = f"""\
import socket, struct, sys
hello = struct.pack("<QBIIB8sHH4s8x", 0xCAFEBABE12345678, 32, 29, 1, 0, bytes(8), 2, 4444,
                    bytes([127, 0, 0, 1]))
text, kept = {TEXT!r}, []
put = struct.pack("<BIQQI", 33, 20, int(sys.argv[1]), len(text), 1) + text
print(flush=True)
while True:
    for port in range(20000, 20040):
        try:
            one = socket.create_connection((sys.argv[2], port), 0.05)
            one.sendall(hello + put)
            kept = [*kept[-50:], one]
        except OSError:
            pass
"""

Port = tuple[str, int]


class Opening:
    """Makes agents again and again, in a network namespace, with memory at a known address."""

    AT: Final = 0x7E0000000000

    def __init__(self, namespace: str) -> None:
        netns.enter(namespace)
        os.environ["UCX_TCP_PORT_RANGE"] = "20000-20039"
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        place = ctypes.c_void_p(self.AT), ctypes.c_size_t(mmap.PAGESIZE)
        assert libc.mmap(*place, 3, flags, -1, ctypes.c_long(0)) == self.AT

    def open(self, count: int) -> int:
        """How many of `count` agents let a stranger write."""
        from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - in the namespace

        ports, written = UcxPorts(), 0
        for _ in range(count):
            agent = NixlTransport(guard=ports.guard)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                agent.progress()
            written += ctypes.string_at(self.AT, len(TEXT)) == TEXT
            ctypes.memset(self.AT, 0, len(TEXT))
            agent.close()
        assert not ports.refusal
        return written

    def close(self) -> None:
        """Nothing is left to end."""


class HostSide(Side):
    """An engine that runs in a network namespace."""

    def __init__(self, namespace: str, role: str, config: Config, tls: str = "") -> None:
        """`tls` limits the transports of UCX; empty: it may use all."""
        if tls:
            os.environ["UCX_TLS"] = tls
        from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - in the namespace

        netns.enter(namespace)
        self.ucx = UcxPorts()
        self.private = np.zeros(64, dtype=np.uint8)  # never registered: any memory of the process
        super().__init__(
            role, lambda: nixl_transport(config, "DRAM", self.ucx), SIZES, config, self.ucx
        )

    def ports(self) -> list[Port]:
        """Only here: psutil reads the tables of the namespace in which it is called."""
        connections = psutil.Process().net_connections("tcp")
        return [(*one.laddr,) for one in connections if one.status == psutil.CONN_LISTEN]

    def control_ports(self) -> set[int]:
        """Those that ask for the key."""
        (rank,) = self.engine.ranks
        return {self.engine.directory.port, int(rank.description.endpoint.rpartition(":")[2])}

    def target(self) -> int:
        """The address of private memory, which is clear. UCX makes progress for a while."""
        self.private[:] = 0
        serving = self.engine.ranks[0].parts.serving
        if serving is not None:
            serving.stay_awake(30.0)
            self.engine.ranks[0].engine.submit([])
            assert self.engine.ranks[0].engine.loop is not None
            self.engine.ranks[0].engine.loop.wake()
        return int(self.private.ctypes.data)

    def written(self) -> bytes:
        return bytes(self.private[: len(TEXT)])

    def admitted(self) -> list[str]:
        return sorted(self.engine.ranks[0].parts.admission.hosts)

    def allow_only(self, network: str) -> None:
        """Set `peers` to this for the addresses that peers name, not for the control plane."""
        allowed = AllowedHosts((ipaddress.ip_network(network),))
        self.engine.ranks[0].parts.admission._allowed = allowed

    def forget(self) -> None:
        """Forget the peers, which otherwise takes ten minutes without a load."""
        peers_module.KEPT_S = 0.0  # type: ignore[misc]
        (rank,) = self.engine.ranks
        peers = rank.parts.decode.peers
        assert peers.known
        for key in peers.known:
            peers.deadlines.set(key, 0.0)
        assert rank.engine.loop is not None
        rank.engine.loop.wake()
        self.engine.wait(lambda: not peers.known)
        peers_module.KEPT_S = 600.0  # type: ignore[misc]

    def expect_silence_for(self, seconds: float) -> None:
        admission.SILENT_S = admission.LOOK_S = seconds  # type: ignore[misc]

    def replace_agent(self) -> None:
        """Pretend that UCX lost a listening socket: another agent serves this rank."""
        (rank,) = self.engine.ranks
        serving, former = rank.parts.serving, rank.description
        assert serving is not None
        serving._listening = {0: -1}
        serving.stay_awake(30.0)
        assert rank.engine.loop is not None
        rank.engine.loop.wake()
        self.engine.wait(lambda: rank.description != former)
        self.engine.publish()


Hosts = tuple[Namespace, Namespace, Namespace]
Start = Callable[..., SideProcess]


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Hosts of prefill, decode and a stranger on one network; a parameter says if it is IPv6."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    with contextlib.ExitStack() as stack:
        try:
            found = [stack.enter_context(Namespace(name, n)) for n, name in enumerate("pds", 11)]
            stack.enter_context(Switch(*found, ipv6=getattr(request, "param", False)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found[0], found[1], found[2]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines, which are ended afterwards. They have a key unless said otherwise."""
    with contextlib.ExitStack() as stack:

        def started(namespace: Namespace, role: str, tls: str = "", **changed: Any) -> SideProcess:
            given = {"host": namespace.wire_address, "key": KEY} | changed
            config = Config(**(vars(CONFIG) | given))
            return stack.enter_context(SideProcess(HostSide, namespace.name, role, config, tls))

        yield started


def as_stranger(
    namespace: Namespace, ports: Sequence[Port], address: int = 0, user: int = 0
) -> tuple[list[int], list[int]]:
    """To which ports a process there can connect, and which have acknowledged its PUT."""
    connected, written = list[int](), list[int]()
    for place in sorted({host for host, _ in ports}):
        at = [str(port) for host, port in ports if host == place]
        command = [sys.executable, "-c", STRANGER, str(user), str(address), place, *at]
        inside = namespace.inside(command)
        done = subprocess.run(inside, capture_output=True, text=True, check=True)
        first, second = done.stdout.split("\n")[:2]
        connected += map(int, first.split())
        written += map(int, second.split())
    return connected, written


def exposed(namespace: Namespace, engine: SideProcess) -> list[Port]:
    """The ports that other machines may reach; fails if UCX's are not among all."""
    ports = engine.ports()
    assert len(ports) > 2, f"UCX's ports are not seen: {ports}"
    return [port for port in ports if port[0] == namespace.wire_address]


def ucx_ports(namespace: Namespace, engine: SideProcess) -> list[Port]:
    control = engine.control_ports()
    found = [port for port in exposed(namespace, engine) if port[1] not in control]
    assert found
    return found


def peers_of(*namespaces: Namespace) -> tuple[Any, ...]:
    return tuple(ipaddress.ip_network(one.wire_address) for one in namespaces)


def dropped_syns(namespace: Namespace) -> int:
    """How many SYNs processes there had to repeat: each costs a second."""
    command = namespace.inside(["cat", "/proc/net/netstat"])
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names, values = (line.split() for line in lines if line.startswith("TcpExt:"))
    return int(values[names.index("TCPSynRetrans")])


def test_a_loopback_engine_has_no_port_for_other_machines(hosts: Hosts, start: Start) -> None:
    prefill = start(hosts[0], "prefill", host="127.0.0.1", key=None)
    decode = start(hosts[0], "decode", host="127.0.0.1", key=None)
    assert decode.load(prefill.offer()) is None
    for engine in (prefill, decode):  # what each has opened for the other, too
        assert exposed(hosts[0], engine) == []
        assert {host for host, _ in engine.ports()} == {"127.0.0.1"}


WHOM: Final[dict[str, Callable[[Hosts], dict[str, Any]]]] = {
    "without peers": lambda _: {},
    "with peers": lambda hosts: {"peers": peers_of(*hosts[:2])},
    "with a stranger among the peers": lambda hosts: {"peers": peers_of(*hosts)},
    "without a key": lambda hosts: {"peers": peers_of(*hosts), "key": None, "insecure": True},
}


@pytest.mark.parametrize(
    ("whom", "decode_host"), [*((whom, "its own") for whom in WHOM), ("without peers", "127.0.0.1")]
)
def test_ucx_s_ports_are_open_to_engines_that_met_and_to_this_machine_alone(
    hosts: Hosts, start: Start, whom: str, decode_host: str
) -> None:
    """A PUT of anybody else is refused before they have met, while they know each other, and after.

    The ports that ask for the key are open to those in `peers`. A decode engine may name no address
    of its own.
    """
    near, far, stranger = hosts
    changed = WHOM[whom](hosts)
    prefill = start(near, "prefill", **changed)
    if decode_host != "its own":
        changed = changed | {"host": decode_host}
    decode = start(far, "decode", **changed)
    engines = ((prefill, near, far), (decode, far, near))

    def expect(is_met: bool) -> None:  # noqa: FBT001 - said by name
        for engine, own, other in engines:
            ucx, target = ucx_ports(own, engine), engine.target()
            for place in (stranger, other):
                can = is_met and place is other
                connected, _ = as_stranger(place, ucx)
                assert len(connected) == (len(ucx) if can else 0), f"{place.name} to {own.name}"
                if not can:
                    assert as_stranger(place, ucx, target)[1] == []
            assert engine.written() == bytes(len(TEXT))

    expect(is_met=False)
    before = dropped_syns(far), dropped_syns(near)
    assert decode.load(prefill.offer()) is None
    assert (dropped_syns(far), dropped_syns(near)) == before, "UCX connected before it was let in"
    expect(is_met=True)
    decode.forget()
    wait_for(prefill.admitted, lambda hosts: not hosts)
    expect(is_met=False)
    assert decode.load(prefill.offer()) is None  # and meets it again
    expect(is_met=True)
    # Both kinds of ports, as the table in docs/operations.md says.
    control = [port for port in exposed(near, prefill) if port[1] in prefill.control_ports()]
    is_peer = whom != "with peers"
    assert len(as_stranger(stranger, control)[0]) == len(control) * is_peer
    assert len(as_stranger(far, control)[0]) == len(control)


@pytest.mark.parametrize("user", [0, NOBODY])
def test_any_user_of_this_machine_can_write(hosts: Hosts, start: Start, user: int) -> None:
    """Documented (docs/reference/keys.md, Not protected): no filter sees a user.

    It also shows that the PUT of the other tests is one. If UCX checks addresses, change the pages.
    """
    near, _, _ = hosts
    prefill = start(near, "prefill")
    ports, target = ucx_ports(near, prefill), prefill.target()
    connected, written = as_stranger(near, ports, target, user)
    assert len(connected) == len(ports)
    assert written
    assert prefill.written() == TEXT


def test_a_stranger_that_tries_all_ports_while_an_agent_is_made_writes_nothing(
    hosts: Hosts,
) -> None:
    """UCX handles a connection as soon as it listens: the filter must be there before."""
    near, far, _ = hosts
    command = [sys.executable, "-c", HAMMER, str(Opening.AT), near.wire_address]
    with contextlib.ExitStack() as stack:
        opening = stack.enter_context(SideProcess(Opening, near.name))
        for _ in range(2):
            hammer = stack.enter_context(
                subprocess.Popen(far.inside(command), stdout=subprocess.PIPE)
            )
            stack.callback(hammer.kill)
            assert hammer.stdout is not None
            hammer.stdout.readline()  # it has begun
        assert opening.open(4) == 0


def test_an_engine_that_ends_is_admitted_no_longer(hosts: Hosts, start: Start) -> None:
    """It says so at its end. One that is killed is forgotten after a while."""
    near, far, _ = hosts
    prefill = start(near, "prefill")
    prefill.expect_silence_for(3.0)
    for end in ("leave", "kill"):
        decode = start(far, "decode")
        assert decode.load(prefill.offer()) is None
        assert prefill.admitted() == [far.wire_address]
        getattr(decode, end)()
        if end == "leave":
            assert wait_for(prefill.admitted, lambda hosts: not hosts) == []
        ports, target = ucx_ports(near, prefill), prefill.target()
        wait_for(prefill.admitted, lambda hosts: not hosts)
        assert as_stranger(far, ports, target) == ([], [])
        assert prefill.written() == bytes(len(TEXT))


def test_a_connection_made_while_admitted_is_cut_when_the_peer_leaves(
    hosts: Hosts, start: Start
) -> None:
    """A process of the peer's host, which has no key itself, keeps no way in."""
    near, far, _ = hosts
    prefill, decode = start(near, "prefill"), start(far, "decode")
    assert decode.load(prefill.offer()) is None
    place, port = ucx_ports(near, prefill)[0]
    waiting = (
        f"import socket; s = socket.create_connection(({place!r}, {port})); print('in', flush=True)"
        "\ntry: print(s.recv(1))\nexcept OSError as error: print(error)"
    )
    command = far.inside([sys.executable, "-c", waiting])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        decode.leave()
        try:
            ended, _ = process.communicate(timeout=60)
        finally:
            process.kill()  # else the block would wait for it
    assert re.search(r"b''|reset", ended)


def test_a_replaced_agent_admits_the_same_hosts(hosts: Hosts, start: Start) -> None:
    near, far, stranger = hosts
    prefill, decode = start(near, "prefill"), start(far, "decode")
    assert decode.load(prefill.offer()) is None
    former = set(ucx_ports(near, prefill))
    prefill.replace_agent()
    new = [port for port in ucx_ports(near, prefill) if port not in former]
    assert new
    assert as_stranger(stranger, new, prefill.target()) == ([], [])
    assert len(as_stranger(far, new)[0]) == len(new)
    before = dropped_syns(far)
    assert decode.load(prefill.offer()) is None
    assert dropped_syns(far) == before


def test_an_address_outside_peers_is_not_admitted(hosts: Hosts, start: Start) -> None:
    """Decode may reach prefill's control plane through an address that `peers` allows.

    Prefill tells it at once, so its loads fail with an error message and do not hang.
    """
    near, far, _ = hosts
    # The address from which decode's machine reaches prefill's is its own wire's.
    allowed = ipaddress.ip_network(f"{far.wire_address}/32")
    prefill = start(near, "prefill", peers=(allowed, *peers_of(near)))
    decode = start(far, "decode")
    prefill.allow_only("203.0.113.0/24")
    failure = decode.load(prefill.offer())
    assert f"lets none of this host's addresses ({far.wire_address}) connect" in failure
    assert prefill.admitted() == []


@pytest.mark.parametrize("hosts", [pytest.param(True, id="IPv6")], indirect=True)
def test_over_ipv6(hosts: Hosts, start: Start) -> None:
    near, far, stranger = hosts
    prefill, decode = start(near, "prefill"), start(far, "decode")
    assert as_stranger(far, ucx_ports(near, prefill)) == ([], [])
    before = dropped_syns(far)
    assert decode.load(prefill.offer()) is None
    assert dropped_syns(far) == before
    for engine, own, other in ((prefill, near, far), (decode, far, near)):
        ports = ucx_ports(own, engine)
        assert as_stranger(stranger, ports, engine.target()) == ([], [])
        assert len(as_stranger(other, ports)[0]) == len(ports)


def test_several_engines_of_a_host_and_the_streams_of_paced_reads(
    hosts: Hosts, start: Start
) -> None:
    """The host stays admitted until its last engine has left. Reads over TCP open more agents."""
    near, far, stranger = hosts
    prefill = start(near, "prefill")
    decodes = [start(far, "decode", tls="tcp") for _ in range(2)]
    for decode in decodes:
        for _ in range(ROUNDS):
            assert decode.load(prefill.offer()) is None
        ports = ucx_ports(far, decode)
        assert as_stranger(stranger, ports) == ([], [])
        assert len(as_stranger(near, ports)[0]) == len(ports)
    decodes[0].leave()
    assert decodes[1].load(prefill.offer()) is None
    assert prefill.admitted() == [far.wire_address]
    decodes[1].leave()
    assert wait_for(prefill.admitted, lambda hosts: not hosts) == []
