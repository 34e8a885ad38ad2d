"""Addresses of this machine, from its interfaces and routes."""

import socket
from typing import Any, NamedTuple

import psutil
import pytest
from typing_extensions import Self

from nixl_kv import addresses


class Entry(NamedTuple):
    family: int
    address: str


V4, V6 = socket.AF_INET, socket.AF_INET6
LO = [Entry(V4, "127.0.0.1"), Entry(V6, "::1"), Entry(psutil.AF_LINK, "00:00:00:00:00:00")]
ETH0 = [Entry(V6, "fe80::1%eth0"), Entry(V6, "fd00::1"), Entry(V4, "10.0.0.1")]


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Entry]]:
    """The machine's interfaces; a test adds to them."""
    known = {"lo": LO}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    return known


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The source address of the default route, by address family; empty at first."""
    known: dict[int, str] = {}

    class Probe:
        def __init__(self, family: int, kind: int) -> None:
            assert kind == socket.SOCK_DGRAM, "something would be sent"
            self.family = family

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, _address: Any) -> None:
            if self.family not in known:
                raise OSError("Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return known[self.family], 1

    monkeypatch.setattr(socket, "socket", Probe)
    return known


def test_an_interface_has_its_ipv4_address_before_others(
    interfaces: dict[str, list[Entry]],
) -> None:
    interfaces["eth0"] = ETH0
    assert [addresses.is_interface(name) for name in ("eth0", "eth1")] == [True, False]
    assert addresses.of_interface("eth0") == "10.0.0.1"
    interfaces["eth0"] = ETH0[:2]
    assert addresses.of_interface("eth0") == "fd00::1"
    interfaces["eth0"] = ETH0[:1]
    with pytest.raises(ValueError, match="the interface eth0 has no address"):
        addresses.of_interface("eth0")


def test_the_route_to_a_host_says_the_address_that_it_sees(routes: dict[int, str]) -> None:
    """Any host, for the default route; IPv4 comes first."""
    routes[V6] = "fd00::2"
    assert addresses.of_default_route() == addresses.towards("fd00::7") == "fd00::2"
    with pytest.raises(OSError, match="unreachable"):
        addresses.towards("192.0.2.7")
    routes[V4] = "10.0.0.2"
    assert addresses.of_default_route() == addresses.towards("192.0.2.7") == "10.0.0.2"


def test_without_a_route_the_only_address_will_do(
    interfaces: dict[str, list[Entry]], routes: dict[int, str]
) -> None:
    assert not routes
    with pytest.raises(ValueError, match=r"no default route, and the interfaces none$"):
        addresses.of_default_route()
    interfaces["eth0"] = ETH0
    assert addresses.of_default_route() == "10.0.0.1"
    interfaces["eth1"] = [Entry(V4, "10.1.0.1")]
    with pytest.raises(ValueError, match=r"eth0 \(10.0.0.1 fd00::1\), eth1 \(10.1.0.1\)$"):
        addresses.of_default_route()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        pytest.param("127.0.0.1", True, id="loopback"),
        pytest.param("::1", socket.has_ipv6, id="IPv6 loopback"),
        pytest.param("203.0.113.1", False, id="TEST-NET"),
        pytest.param("not an address", False, id="no address"),
    ],
)
def test_whether_an_address_is_of_this_machine(host: str, local: bool) -> None:  # noqa: FBT001 - a table's column
    assert addresses.is_local(host) is local
