"""Listening ports: which hosts the kernel admits, and how many connections."""

import contextlib
import ipaddress
import random
import resource
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from nixl_kv.config import LOOPBACK, AllowedHosts, Network
from nixl_kv.engine.admission import MAX_HOSTS
from nixl_kv.transport import ports as module
from nixl_kv.transport.ports import LimitedPort, attach, program
from support.ports import Address, connects, passes


def random_network(rng: random.Random) -> Network:
    bits = rng.choice((32, 128))
    length = rng.choice((bits, rng.randrange(bits + 1)))  # a single host, or any network
    number = rng.getrandbits(bits) >> (bits - length) << (bits - length)
    address = (ipaddress.IPv4Address if bits == 32 else ipaddress.IPv6Address)(number)
    return ipaddress.ip_network((address, length))


def near(network: Network, rng: random.Random) -> Address:
    """An address in the network, or one bit outside."""
    bits = network.max_prefixlen
    number = int(network.network_address) | rng.getrandbits(bits) & int(network.hostmask)
    if rng.random() < 0.5:
        number ^= 1 << rng.randrange(bits)
    return type(network.network_address)(number)


@pytest.mark.parametrize("seed", range(50))
def test_a_filter_passes_the_same_hosts_as_peers_allows(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - the same networks every time
    networks = tuple(random_network(rng) for _ in range(rng.randrange(1, 12)))
    code, allowed = program(networks), AllowedHosts(networks)
    for _ in range(50):
        source = near(rng.choice(networks), rng)
        if isinstance(source, ipaddress.IPv6Address) and source.ipv4_mapped:
            continue  # no packet has that
        assert passes(code, source) == allowed.allows(str(source)), (networks, source)


def filtered(host: str, *networks: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    attach(listening, program(map(ipaddress.ip_network, networks)))
    return listening


LONG = [f"10.{i // 256}.{i % 256}.0/25" for i in range(300)]
LONG += [f"fd00:{i:x}::/48" for i in range(0, 200, 2)]


@pytest.mark.parametrize(
    ("host", "networks"),
    [("127.0.0.1", ["2001:db8::/32"]), ("::", ["2001:db8::/32"]), ("127.0.0.1", LONG)],
    ids=["IPv4", "IPv6 and IPv4", "a long list"],
)
def test_the_kernel_drops_packets_of_other_hosts(host: str, networks: list[str]) -> None:
    """A socket on `::` is reached over IPv4 as well: by packets of IPv4."""
    with filtered(host, *networks, "127.0.0.2/32") as listening:
        port = listening.getsockname()[1]
        assert connects("127.0.0.1", port) is None
        connection = connects("127.0.0.2", port)
        assert connection is not None
        accepted, _ = listening.accept()
        with connection, accepted:  # the connection has the filter, too
            connection.sendall(b"x" * 100_000)
            assert accepted.recv(100_000, socket.MSG_WAITALL) == b"x" * 100_000
            accepted.sendall(b"y")
            assert connection.recv(1) == b"y"


@pytest.mark.parametrize(("network", "is_open"), [("::1/128", True), ("fd00::/8", False)])
def test_the_kernel_drops_packets_of_other_hosts_over_ipv6(network: str, *, is_open: bool) -> None:
    with filtered("::1", network) as listening:
        connection = connects("::1", listening.getsockname()[1], "::1")
        assert (connection is not None) is is_open
        if connection is not None:
            connection.close()


@pytest.mark.parametrize("prefix", ["10.0.", "fd00::"])
def test_the_kernel_takes_a_filter_for_as_many_hosts_as_are_admitted(prefix: str) -> None:
    form = "{}{}.{}" if "." in prefix else "{}{:x}:{:x}"
    hosts = [form.format(prefix, n // 256, n % 256) for n in range(MAX_HOSTS)]
    code = program(map(ipaddress.ip_network, hosts))
    with socket.create_server(("127.0.0.1", 0)) as one:
        attach(one, code)
    for n in (0, 199, 200, 255, MAX_HOSTS - 1):
        assert passes(code, ipaddress.ip_address(hosts[n]))
    last = form.format(prefix, MAX_HOSTS // 256, MAX_HOSTS % 256)
    assert not passes(code, ipaddress.ip_address(last))


# --- a limited number of connections

ELSEWHERE = AllowedHosts((ipaddress.ip_network("192.0.2.0/24"),))
HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[LimitedPort]:
    with contextlib.closing(LimitedPort(HOST, 0, limit=8)) as port:
        yield port


def is_open(port: LimitedPort) -> bool:
    """Whether the kernel lets a connection in. It answers at once, or not at all."""
    connection = connects(HOST, port.port)
    if connection is not None:
        connection.close()
    return connection is not None


def test_a_port_at_its_limit_is_shut_until_some_connections_have_ended(
    port: LimitedPort, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(7):
        port.on_accepted()
    assert is_open(port)
    port.on_accepted()
    assert not is_open(port)
    port.on_closed()
    assert not is_open(port), "not at once: it would be shut again"
    port.on_closed()
    assert is_open(port)
    for _ in range(2):
        port.on_accepted()
    assert not is_open(port)
    assert caplog.text.count("accepts no more for now") == 1, "once in a while"


def test_open_connections_are_not_touched(port: LimitedPort) -> None:
    """Nor does the end of the port end its duplicate."""
    listening = socket.socket(fileno=port.duplicate())
    with listening, socket.create_connection((HOST, port.port)) as reader:
        accepted, _ = listening.accept()
        for _ in range(8):
            port.on_accepted()
        assert not is_open(port)
        with accepted:
            reader.sendall(b"still here")
            assert accepted.recv(100) == b"still here"
            accepted.sendall(b"me too")
            assert reader.recv(100) == b"me too"
        port.close()
        assert listening.getsockname() == (HOST, port.port)


@pytest.mark.parametrize(
    ("descriptors", "limit"),
    [(1024, 256), (4096, 1024), (65536, 4096), (resource.RLIM_INFINITY, 4096)],
)
def test_the_limit_fits_the_descriptors_of_the_process(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    with contextlib.closing(LimitedPort(HOST, 0)) as port:
        assert port._limit == limit


def test_a_port_that_opens_again_keeps_other_hosts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    filtering = Mock(wraps=attach)
    monkeypatch.setattr(module, "attach", filtering)
    with contextlib.closing(LimitedPort(HOST, 0, 8, ELSEWHERE)) as port:
        for _ in range(8):
            port.on_accepted()
        assert not is_open(port)
        for _ in range(8):
            port.on_closed()
        assert is_open(port), "this machine always may"
    only_peers, drop_all, again = (call.args[1] for call in filtering.call_args_list)
    assert drop_all != only_peers == again


def test_a_kernel_that_cannot_filter_or_shut_a_port_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SO_ATTACH_FILTER", 0xFFFF)
    with contextlib.closing(LimitedPort(HOST, 0, 8, ELSEWHERE)) as port:
        for _ in range(20):
            port.on_accepted()
        assert is_open(port)
        for _ in range(20):
            port.on_closed()
        assert is_open(port)
    unfiltered, not_shut = caplog.messages
    assert "Any host on the network can connect: let a firewall" in unfiltered
    assert "192.0.2.0/24" in unfiltered
    assert f"port {port.port} has 8 connections and cannot refuse more: " in not_shut


@pytest.mark.parametrize("allowed", [AllowedHosts(LOOPBACK), AllowedHosts()])
def test_a_port_for_this_machine_or_for_all_needs_no_filter(
    allowed: AllowedHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "attach", None)
    LimitedPort(HOST, 0, 8, allowed).close()


def test_descriptors_are_counted() -> None:
    before = module.num_descriptors()
    with socket.socket():
        assert module.num_descriptors() == before + 1
    assert module.max_descriptors() in (None, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def test_a_kernel_that_does_not_count_them_costs_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.2 they are listed, for which a descriptor is needed."""
    uncounted = Mock()
    uncounted.stat.return_value.st_size = 0
    uncounted.iterdir.side_effect = OSError("Too many open files")
    monkeypatch.setattr(module, "DESCRIPTORS", uncounted)
    monkeypatch.setattr(module, "max_descriptors", lambda: 100)
    assert module.num_descriptors() == 100
