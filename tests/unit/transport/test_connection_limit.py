"""A listening port that lets in only so many connections, by the kernel's help."""

import contextlib
import errno
import ipaddress
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from nixl_kv.config import LOOPBACK, AllowedHosts
from nixl_kv.transport import connection_limit, host_filter
from nixl_kv.transport.connection_limit import LimitedPort

HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[LimitedPort]:
    with contextlib.closing(LimitedPort(HOST, 0, limit=8)) as port:
        yield port


def is_open(port: LimitedPort) -> bool:
    """Whether the kernel lets a connection in. It answers at once, or not at all."""
    try:
        socket.create_connection((HOST, port.port), timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def test_a_new_port_is_open(port: LimitedPort) -> None:
    assert port.port > 0
    assert is_open(port)


def test_a_port_at_its_limit_is_shut_until_some_connections_have_ended(port: LimitedPort) -> None:
    for _ in range(7):
        port.on_accepted()
    assert is_open(port)
    port.on_accepted()
    assert not is_open(port)
    port.on_closed()
    assert not is_open(port), "not at once: it would be shut again"
    port.on_closed()
    assert is_open(port)


def test_open_connections_are_not_touched(port: LimitedPort) -> None:
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


def test_a_shut_port_is_logged_once_in_a_while(
    port: LimitedPort, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        for _ in range(8):
            port.on_accepted()
        for _ in range(8):
            port.on_closed()
    assert caplog.text.count("takes no more for now") == 1


def test_connections_over_the_limit_are_counted_too(port: LimitedPort) -> None:
    for _ in range(12):
        port.on_accepted()
    for _ in range(5):
        port.on_closed()
    assert not is_open(port)
    port.on_closed()
    assert is_open(port)


def test_a_duplicate_outlives_the_port() -> None:
    port = LimitedPort(HOST, 0)
    duplicate = port.duplicate()
    port.close()
    with socket.socket(fileno=duplicate) as listening:
        assert listening.getsockname() == (HOST, port.port)


def test_a_kernel_that_cannot_shut_a_port_is_no_error(
    port: LimitedPort, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(host_filter, "SO_ATTACH_FILTER", 0xFFFF)
    for _ in range(20):
        port.on_accepted()
    assert is_open(port)
    for _ in range(20):
        port.on_closed()
    assert f"port {port.port} has 8 connections and cannot be shut: " in caplog.text
    assert f"port {port.port} was not shut: " in caplog.text
    assert is_open(port)


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


def test_a_used_port_is_an_error(port: LimitedPort) -> None:
    with pytest.raises(OSError, match="Address already in use") as raised:
        LimitedPort(HOST, port.port)
    assert raised.value.errno == errno.EADDRINUSE


def test_a_closed_port_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    LimitedPort(HOST, 0).close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


ELSEWHERE = AllowedHosts((ipaddress.ip_network("192.0.2.0/24"),))


@pytest.fixture
def filters(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the kernel is given, one after the other."""
    given: list[bytes] = []

    def attach(listening: socket.socket, code: bytes) -> None:
        given.append(code)
        host_filter.attach(listening, code)

    monkeypatch.setattr(connection_limit, "attach", attach)
    return given


def test_a_port_that_opens_again_keeps_other_hosts_out(filters: list[bytes]) -> None:
    with contextlib.closing(LimitedPort(HOST, 0, 8, ELSEWHERE)) as port:
        for _ in range(8):
            port.on_accepted()
        assert not is_open(port)
        for _ in range(8):
            port.on_closed()
        assert is_open(port), "this machine always may"
    only_peers, drop_all, again = filters
    assert drop_all != only_peers == again


@pytest.mark.usefixtures("filters")
def test_a_kernel_without_filters_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_filter, "SO_ATTACH_FILTER", 0xFFFF)
    with contextlib.closing(LimitedPort(HOST, 0, 8, ELSEWHERE)) as port:
        assert is_open(port)
    (said,) = caplog.messages
    assert "Anyone on the network can connect: let a firewall" in said
    assert "192.0.2.0/24" in said


@pytest.mark.parametrize("allowed", [AllowedHosts(LOOPBACK), AllowedHosts()])
def test_a_port_for_this_machine_or_for_all_needs_no_filter(
    allowed: AllowedHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "attach", None)
    LimitedPort(HOST, 0, 8, allowed).close()
