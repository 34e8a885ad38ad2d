"""Finds the IP addresses of this machine that other machines can reach."""

import contextlib
import ipaddress
import socket
from typing import Final

import psutil

TEST_NET_HOSTS: Final = ("198.51.100.1", "2001:db8::1")
"""Addresses without a host (RFC 5737, RFC 3849). A connected UDP socket sends no packet; it only
asks for the route."""

PORT: Final = 9


def is_interface(name: str) -> bool:
    return name in psutil.net_if_addrs()


def is_local(host: str) -> bool:
    """Whether an IP address is one of this machine's own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def of_interface(name: str) -> str:
    """The first address of an interface, IPv4 before IPv6.

    Raises:
        ValueError: if it has none.
    """
    addresses = _addresses(name)
    if not addresses:
        raise ValueError(f"the interface {name} has no address")
    return addresses[0]


def towards(host: str) -> str:
    """The source address that this machine uses towards an IP literal.

    Raises:
        OSError: if there is no route.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, PORT))
        return str(probe.getsockname()[0])


def of_default_route() -> str:
    """The source address of the default route, or the only address of this machine.

    Raises:
        ValueError: without a default route and with no or several addresses, which it names.
    """
    for elsewhere in TEST_NET_HOSTS:
        with contextlib.suppress(OSError):
            return towards(elsewhere)
    found = {name: addresses for name in psutil.net_if_addrs() if (addresses := _addresses(name))}
    if len(found) != 1:
        known = ", ".join(f"{name} ({' '.join(found[name])})" for name in sorted(found))
        raise ValueError(f"this machine has no default route, and the interfaces {known or 'none'}")
    ((first, *_),) = found.values()
    return first


def _addresses(interface: str) -> list[str]:
    """The interface's addresses that other machines can use, IPv4 first."""
    literals = [
        entry.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for entry in psutil.net_if_addrs()[interface]
        if entry.family == family
    ]
    # An address with a zone, as in fe80::1%eth0, means nothing on another machine.
    return [text for text in literals if "%" not in text and _is_global(text)]


def _is_global(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_link_local)
