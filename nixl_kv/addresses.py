"""Finds the IP addresses of this machine that other machines can reach."""

import contextlib
import ipaddress
import socket
from typing import Final

import psutil

TEST_NET_HOSTS: Final = ("198.51.100.1", "2001:db8::1")
"""Addresses without a host (RFC 5737, RFC 3849), to ask for the default route."""


def is_interface(name: str) -> bool:
    return name in psutil.net_if_addrs()


def is_local(host: str) -> bool:
    """Whether an address belongs to this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def try_bind(host: str, port: int) -> None:
    """Bind like `LimitedPort`, but do not listen, so that two checks do not collide.

    Raises:
        OSError: if an engine could not listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((host, port))


def of_interface(name: str) -> str:
    """The first address of an interface, IPv4 before IPv6; a ValueError if it has none."""
    for address in _addresses(name):
        return address
    raise ValueError(f"the interface {name} has no address")


def towards(host: str) -> str:
    """This machine's source address towards an IP literal; an OSError without a route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends no packet: connecting a UDP socket only picks the route
        return str(probe.getsockname()[0])


def of_default_route() -> str:
    """The source address of the default route, or of the only interface with an address.

    A ValueError without a default route names the interfaces, if not exactly one has an address.
    """
    for elsewhere in TEST_NET_HOSTS:
        with contextlib.suppress(OSError):
            return towards(elsewhere)
    found = {name: addresses for name in psutil.net_if_addrs() if (addresses := _addresses(name))}
    if len(found) != 1:
        known = ", ".join(f"{name} ({' '.join(found[name])})" for name in sorted(found))
        raise ValueError(f"this machine has no default route, and the interfaces {known or 'none'}")
    return next(iter(found.values()))[0]


def _addresses(interface: str) -> list[str]:
    """The interface's addresses that other machines can use, IPv4 first."""
    entries = psutil.net_if_addrs()[interface]
    # An address with a zone, as in fe80::1%eth0, means nothing on another machine.
    found = [
        ipaddress.ip_address(entry.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for entry in entries
        if entry.family == family and "%" not in entry.address
    ]
    return [str(one) for one in found if not (one.is_loopback or one.is_link_local)]
