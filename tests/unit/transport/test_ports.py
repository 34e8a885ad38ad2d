"""Listening ports: which hosts the kernel admits, how many connections, and which are UCX's."""

import contextlib
import ipaddress
import os
import random
import resource
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from nixl_kv.config import LOOPBACK, AllowedHosts, Network
from nixl_kv.engine.admission import MAX_HOSTS
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
    UcxPorts,
    attach,
    program,
    warn_of_other_users,
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


# --- UCX's sockets, and who is admitted

ELSEWHERE = AllowedHosts((ipaddress.ip_network("192.0.2.0/24"),))
STRANGER, FRIEND = "127.0.0.2", "127.0.0.3"
"""Addresses of this machine that stand for other machines."""


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The addresses of the sockets that get a filter."""
    places: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "attach", lambda one, _: places.append(one.getsockname()))
    return places


@pytest.fixture
def only_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of this machine but one are those of other machines."""
    monkeypatch.setattr(module, "LOOPBACK", (ipaddress.ip_network("127.0.0.1/32"),))


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
        with UcxPorts().guard():
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
        with UcxPorts().guard():
            gone, ucx = keep(socket.create_server(("127.0.0.1", 0))), keep(like_ucx())

            def watched() -> set[int]:
                numbers = {*found(), gone.fileno()}
                gone.close()
                return numbers

            monkeypatch.setattr(module, "_watched_by_number", watched)
        assert attached == [ucx.getsockname()]


@pytest.mark.usefixtures("only_one_address")
def test_a_host_connects_while_it_is_admitted_and_not_before_or_afterwards() -> None:
    """Nor does a connection stay that it has made meanwhile; another host's does."""
    ports = UcxPorts()
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        with ports.guard():
            ucx = keep(like_ucx())
        port = ucx.getsockname()[1]

        def accepted(source: str) -> tuple[socket.socket, socket.socket] | None:
            connection = connects(source, port)
            if connection is None:
                return None
            select.select([ucx], [], [], 5.0)
            return keep(connection), keep(ucx.accept()[0])

        assert accepted(STRANGER) is accepted(FRIEND) is None
        own = accepted("127.0.0.1")
        assert ports.admit([FRIEND])
        friend = accepted(FRIEND)
        assert accepted(STRANGER) is None
        assert own is not None
        assert friend is not None
        assert ports.admit([STRANGER])
        assert accepted(FRIEND) is None
        assert accepted(STRANGER) is not None
        friend[0].settimeout(5.0)
        assert friend[0].recv(1) == b"", "its connection is cut"
        own[1].sendall(b"x")
        assert own[0].recv(1) == b"x"
        assert ports.admit([])
        assert accepted(STRANGER) is None


def test_sockets_that_come_later_admit_the_same_hosts_and_closed_ones_are_forgotten() -> None:
    ports = UcxPorts()
    with contextlib.ExitStack() as stack:
        with ports.guard():
            first = stack.enter_context(like_ucx())
        filters: list[tuple[int, bytes]] = []
        stack.enter_context(
            patch.object(module, "attach", lambda one, code: filters.append((one.fileno(), code)))
        )
        ports.admit(["192.0.2.7"])
        assert len(filters) == 1
        with ports.guard():
            stack.enter_context(like_ucx())
        with socket.socket() as other:
            os.dup2(other.fileno(), first.fileno(), inheritable=False)
            first.setblocking(False)  # noqa: FBT003 - `like_ucx` checks that
        assert {code for _, code in filters} == {filters[0][1]}
        assert passes(filters[0][1], ipaddress.ip_address("192.0.2.7"))
        filters.clear()
        ports.admit([])
        assert len(filters) == 1


def test_a_filter_is_the_latest_also_if_it_changes_while_an_agent_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transfer thread admits a host while another thread attaches the former filter."""
    ports, codes = UcxPorts(), list[bytes]()

    def attach_slowly(_: socket.socket, code: bytes) -> None:
        if not codes:
            codes.append(b"")
            ports.admit(["192.0.2.7"])
        codes.append(code)

    monkeypatch.setattr(module, "attach", attach_slowly)
    with contextlib.ExitStack() as stack, ports.guard():
        stack.enter_context(like_ucx())
    assert passes(codes[-1], ipaddress.ip_address("192.0.2.7"))


def test_a_descriptor_that_is_another_socket_by_now_is_left_alone(
    attached: list[tuple[str, int]],
) -> None:
    ports = UcxPorts()
    with contextlib.ExitStack() as stack:
        with ports.guard():
            ucx = stack.enter_context(like_ucx())
        number = ucx.fileno()
        with socket.create_server(("127.0.0.1", 0)) as other:
            other.settimeout(0)
            os.dup2(other.fileno(), number)
            attached.clear()
            assert ports.admit(["192.0.2.7"])
            assert attached == []


def test_what_a_stranger_sent_before_the_filter_is_not_read(only_one_address: None) -> None:
    """UCX would execute it: a PUT needs no answer before."""
    del only_one_address
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        with UcxPorts().guard():
            ucx = keep(like_ucx())
            port = ucx.getsockname()[1]
            stranger, friend = connects(STRANGER, port), connects("127.0.0.1", port)
            assert stranger is not None
            assert friend is not None
            keep(stranger)
            keep(friend)
            accepted = {peer[0]: keep(one) for one, peer in (ucx.accept(), ucx.accept())}
            stranger.sendall(b"write this")
            assert accepted[STRANGER].recv(10, socket.MSG_PEEK) == b"write this"
        assert accepted[STRANGER].recv(10) == b""
        assert stranger.recv(1) == b""
        accepted["127.0.0.1"].sendall(b"x")
        assert friend.recv(1) == b"x"
        assert connects(STRANGER, port) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - as seen by others
def test_a_kernel_without_filters_is_told_with_the_harm_if_other_machines_can_connect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """Once. Then all hosts are admitted, because they are."""
    monkeypatch.setattr(module, "SO_ATTACH_FILTER", 0xFFFF)
    ports, is_open = UcxPorts(), host != "127.0.0.1"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            with ports.guard():
                one = stack.enter_context(socket.create_server((host, 0)))
                os.set_inheritable(one.fileno(), True)  # noqa: FBT003
                stack.enter_context(select.epoll()).register(one.fileno(), select.EPOLLIN)
        lines = [line for line in caplog.messages if "UCX's TCP ports lack a filter" in line]
        assert len(lines) == is_open
        if is_open:
            assert "can write any memory of this process, and so run code" in lines[0]
            assert "Protocol not available" in lines[0]
            assert ports.admit(["192.0.2.7"])


def test_a_socket_that_was_open_without_a_filter_is_told_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """UCX's library is another one than those that this changes."""
    monkeypatch.setattr(module, "_is_loopback", lambda _: False)
    with contextlib.ExitStack() as stack:
        with UcxPorts().guard():
            stack.enter_context(like_ucx())
        (line,) = caplog.messages
    assert "UCX listened for a moment before its ports had one" in line
    assert "can write any memory of this process, and so run code" in line


def test_hosts_that_the_kernel_has_no_room_for_are_not_admitted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The former ones stay."""
    ports, codes = UcxPorts(), list[bytes]()

    def attach_some(_: socket.socket, code: bytes) -> None:
        if len(code) > 400:
            raise OSError(12, "Cannot allocate memory")
        codes.append(code)

    with contextlib.ExitStack() as stack:
        with ports.guard():
            stack.enter_context(like_ucx())
        monkeypatch.setattr(module, "attach", attach_some)
        assert ports.admit(["192.0.2.7"])
        assert not ports.admit([f"192.0.2.{n}" for n in range(1, 200)])
        assert "the kernel refuses a filter for 199 hosts" in caplog.text
        assert passes(codes[-1], ipaddress.ip_address("192.0.2.7"))


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


def test_processes_of_other_users_are_told_with_the_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "PROCESSES", tmp_path)
    for pid, user in ((1, 0), (17, os.geteuid()), (18, 65534), (19, 4_000_000)):
        (tmp_path / str(pid)).mkdir()
        if not os.geteuid():
            os.chown(tmp_path / str(pid), user, user)
    (tmp_path / "meminfo").touch()
    warn_of_other_users()
    if os.geteuid():
        assert not caplog.messages
        return
    (line,) = caplog.messages
    assert "other users run here (nobody, 4000000)" in line
    assert "can write any memory of this process, and so run code" in line


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
