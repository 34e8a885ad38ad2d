"""Listening ports: which hosts the kernel admits, how many connections, and which are UCX's."""

import contextlib
import ipaddress
import logging
import os
import random
import resource
import select
import socket
import struct
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from nixl_kv.config import LOOPBACK, AllowedHosts, Network
from nixl_kv.transport import ports as module
from nixl_kv.transport.ports import (
    ALL_ONES,
    AND,
    ETHERNET_TYPE,
    IPV4,
    IPV6,
    JUMP,
    JUMP_IF_EQUAL,
    LOAD_MEMORY,
    LOAD_PACKET,
    NETWORK_HEADER,
    RETURN,
    STORE,
    LimitedPort,
    attach,
    filtered_ucx_ports,
    program,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def passes(code: bytes, source: Address) -> bool:
    """Run a filter on a packet from there, as Linux's documentation says."""
    offset, kind = (12, IPV4) if source.version == 4 else (8, IPV6)
    packet = bytes(offset) + source.packed
    accumulator, memory, at = 0, [0] * 16, 0
    instructions = list(struct.iter_unpack("HBBI", code))
    while True:
        opcode, if_true, if_false, constant = instructions[at]
        at += 1
        if opcode == LOAD_PACKET:
            begin = constant - NETWORK_HEADER
            accumulator = (
                kind
                if constant == ETHERNET_TYPE
                else int.from_bytes(packet[begin : begin + 4], "big")
            )
        elif opcode == LOAD_MEMORY:
            accumulator = memory[constant]
        elif opcode == STORE:
            memory[constant] = accumulator
        elif opcode == AND:
            accumulator &= constant
        elif opcode == JUMP:
            at += constant
        elif opcode == JUMP_IF_EQUAL:
            at += if_true if accumulator == constant else if_false
        else:
            assert opcode == RETURN
            assert constant in (0, ALL_ONES)
            return constant == ALL_ONES


def random_network(rng: random.Random) -> Network:
    bits = rng.choice((32, 128))
    length = rng.randrange(bits + 1)
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


def connects(source: str, port: int, host: str = "127.0.0.1") -> socket.socket | None:
    """A connection, or None if nothing answers."""
    try:
        return socket.create_connection((host, port), timeout=0.1, source_address=(source, 0))
    except TimeoutError:
        return None


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
def test_the_kernel_drops_what_other_hosts_send(host: str, networks: list[str]) -> None:
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
def test_the_kernel_drops_what_other_hosts_send_over_ipv6(network: str, *, is_open: bool) -> None:
    with filtered("::1", network) as listening:
        connection = connects("::1", listening.getsockname()[1], "::1")
        assert (connection is not None) is is_open
        if connection is not None:
            connection.close()


# --- which sockets are UCX's

ELSEWHERE = AllowedHosts((ipaddress.ip_network("192.0.2.0/24"),))


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The addresses of the sockets that get a filter."""
    places: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "attach", lambda one, _: places.append(one.getsockname()))
    return places


@contextlib.contextmanager
def like_ucx(*, inheritable: bool = True, by_number: bool = True) -> Iterator[socket.socket]:
    """A listening socket as UCX opens it, unless said otherwise; it stays one."""
    with socket.create_server(("127.0.0.1", 0)) as one, select.epoll() as epoll:
        os.set_inheritable(one.fileno(), inheritable)
        one.settimeout(0)
        if by_number:
            epoll.register(one.fileno(), select.EPOLLIN)
        yield one
        assert not os.get_blocking(one.fileno()), "UCX's thread would wait for a connection"


def test_only_sockets_like_ucx_s_are_filtered(attached: list[tuple[str, int]]) -> None:
    """Not those that were there, nor others' that come meanwhile."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        keep(like_ucx())
        with filtered_ucx_ports(ELSEWHERE):
            keep(like_ucx(inheritable=False))  # asyncio's, uvicorn's
            keep(like_ucx(by_number=False))  # NCCL's, PyTorch's
            keep(socket.create_server(("127.0.0.1", 0)))  # ZMQ's
            local = keep(socket.socket(socket.AF_UNIX))
            local.bind(b"\0nixl_kv test_ports")
            local.listen()
            os.set_inheritable(local.fileno(), True)  # noqa: FBT003
            keep(select.epoll()).register(local.fileno(), select.EPOLLIN)
            ucx = keep(like_ucx())
        assert attached == [ucx.getsockname()]


def test_a_socket_that_another_thread_closes_meanwhile_keeps_no_other_one_open(
    monkeypatch: pytest.MonkeyPatch, attached: list[tuple[str, int]]
) -> None:
    """As the agents that check a rank are, or those that are made at the same time."""
    found = module._watched_by_number
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        with filtered_ucx_ports(ELSEWHERE):
            gone, ucx = keep(socket.create_server(("127.0.0.1", 0))), keep(like_ucx())

            def watched() -> set[int]:
                numbers = {*found(), gone.fileno()}
                gone.close()
                return numbers

            monkeypatch.setattr(module, "_watched_by_number", watched)
        assert attached == [ucx.getsockname()]


def test_nothing_is_filtered_if_every_host_is_allowed(attached: list[tuple[str, int]]) -> None:
    with filtered_ucx_ports(AllowedHosts()), like_ucx():
        pass
    assert not attached


def test_a_stranger_that_came_before_the_filter_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOPBACK", (ipaddress.ip_network("127.0.0.1/32"),))
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        with filtered_ucx_ports(ELSEWHERE):
            ucx = keep(like_ucx())
            port = ucx.getsockname()[1]
            stranger, friend = connects("127.0.0.2", port), connects("127.0.0.1", port)
            assert stranger is not None
            assert friend is not None
            keep(stranger)
            keep(friend)
            accepted = {peer[0]: keep(one) for one, peer in (ucx.accept(), ucx.accept())}
        assert stranger.recv(1) == b""
        assert accepted["127.0.0.2"].recv(1) == b""
        accepted["127.0.0.1"].sendall(b"x")
        assert friend.recv(1) == b"x"
        assert connects("127.0.0.2", port) is None


def test_a_kernel_without_filters_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "SO_ATTACH_FILTER", 0xFFFF)
    with contextlib.ExitStack() as stack, filtered_ucx_ports(ELSEWHERE):
        port = stack.enter_context(like_ucx()).getsockname()[1]
    assert f"UCX listens on 127.0.0.1 port {port} without a filter" in caplog.text


# --- a limited number of connections

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
def test_the_limit_is_what_the_process_can_afford(
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
