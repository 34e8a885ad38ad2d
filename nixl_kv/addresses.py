"""Which of this machine's addresses others can reach."""

import contextlib
import ipaddress
import socket
from typing import Final

import psutil

ELSEWHERE: Final = ("198.51.100.1", "2001:db8::1")
"""Hosts that are nowhere (RFC 5737, RFC 3849): nothing is sent, only the route to them is asked."""

PORT: Final = 9


def is_interface(name: str) -> bool:
    """Whether this machine has a network interface of that name."""
    return name in psutil.net_if_addrs()


def of_interface(name: str) -> str:
    """An interface's first address, IPv4 before IPv6.

    Raises:
        ValueError: if it has none.
    """
    addresses = _addresses(name)
    if not addresses:
        raise ValueError(f"the interface {name} has no address")
    return addresses[0]


def towards(host: str) -> str:
    """The address that this machine has for another one, which an IP literal names.

    Raises:
        OSError: if there is no route to it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, PORT))
        return str(probe.getsockname()[0])


def of_default_route() -> str:
    """The address that this machine has for hosts elsewhere; or the only one that it has.

    Raises:
        ValueError: if there is no route, and not one address; names those that there are.
    """
    for elsewhere in ELSEWHERE:
        with contextlib.suppress(OSError):
            return towards(elsewhere)
    found = {name: addresses for name in psutil.net_if_addrs() if (addresses := _addresses(name))}
    if len(found) != 1:
        words = ", ".join(f"{name} ({' '.join(found[name])})" for name in sorted(found))
        raise ValueError(f"this machine has no default route, and the interfaces {words or 'none'}")
    ((first, *_),) = found.values()
    return first


def _addresses(interface: str) -> list[str]:
    """That other machines may use, IPv4 first."""
    literals = [
        entry.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for entry in psutil.net_if_addrs()[interface]
        if entry.family == family
    ]
    # With a zone, as in fe80::1%eth0, it means nothing elsewhere.
    return [text for text in literals if "%" not in text and _is_useful(text)]


def _is_useful(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_link_local)
