"""Keeps other hosts away from listening TCP sockets, also from those that UCX opens by itself.

Each UCX worker listens on a TCP port of each network interface, without a key. So the kernel drops
the packets of hosts that are not allowed, by a socket filter (classic BPF; Linux documents it in
networking/filter.rst). A process needs no privilege for that. A connection inherits the filter of
the socket that accepted it, so the filter passes all packets of an allowed host, not only SYNs.
"""

import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from nixl_kv.config import LOOPBACK, AllowedHosts, Network
from nixl_kv.log_limit import get_logger

logger = get_logger(__name__)

SO_ATTACH_FILTER: Final = 26

# Opcodes of classic BPF, as in linux/filter.h.
LOAD_PACKET: Final = 0x20
LOAD_MEMORY: Final = 0x60
STORE: Final = 0x02
AND: Final = 0x54
JUMP: Final = 0x05
JUMP_IF_EQUAL: Final = 0x15
RETURN: Final = 0x06

ETHERNET_TYPE: Final = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
NETWORK_HEADER: Final = 0xFFF00000  # SKF_NET_OFF: a TCP socket's packet begins at TCP's header
SOURCE: Final = {4: NETWORK_HEADER + 12, 6: NETWORK_HEADER + 8}
IPV4, IPV6 = 0x0800, 0x86DD
WORD_BITS: Final = 32
ALL_ONES: Final = 0xFFFFFFFF

FILES: Final = Path("/proc/self/fd")
FILE_DETAILS: Final = Path("/proc/self/fdinfo")
EPOLL: Final = "anon_inode:[eventpoll]"
WATCHED: Final = "tfd:"

WHAT_TO_DO: Final = (
    "let a firewall or a NetworkPolicy pass only the other engines to this process's TCP ports, "
    "which ask for no key (docs/operations.md, Firewall)"
)


def _instruction(code: int, constant: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, constant)


DROP: Final = _instruction(RETURN, 0)
PASS: Final = _instruction(RETURN, ALL_ONES)


def program(networks: Iterable[Network]) -> bytes:
    """A filter that passes the packets whose source address is in one of these networks.

    It needs no rule for IPv4 addresses mapped to IPv6: a socket that listens on `::` gets IPv4's
    packets with IPv4's header.
    """
    networks = list(networks)
    ipv4, ipv6 = (_checks(networks, version) for version in (4, 6))
    return b"".join(
        (
            _instruction(LOAD_PACKET, ETHERNET_TYPE),
            _instruction(JUMP_IF_EQUAL, IPV6, if_true=2),
            _instruction(JUMP_IF_EQUAL, IPV4, if_true=2),
            DROP,
            _instruction(JUMP, 1),
            _instruction(JUMP, len(ipv6) // len(DROP)),
            ipv6,
            ipv4,
        )
    )


def _checks(networks: Iterable[Network], version: int) -> bytes:
    """Pass a packet of this IP version if one of the networks has its source; else drop it.

    The source's words go to BPF's memory first: a load from there is one instruction of the
    kernel's, one from the packet several, and the kernel limits their number.
    """
    of_version: list[Network] = [one for one in networks if one.version == version]
    num_words = 1 if version == 4 else 4  # noqa: PLR2004
    code = [
        _instruction(LOAD_PACKET, SOURCE[version] + 4 * word) + _instruction(STORE, word)
        for word in range(num_words)
    ]
    for network in ipaddress.collapse_addresses(of_version):  # type: ignore[type-var]
        tests: list[bytes] = []
        for word in reversed(range(num_words)):
            shift = WORD_BITS * (num_words - 1 - word)
            mask = int(network.netmask) >> shift & ALL_ONES
            if not mask:
                continue
            wanted = int(network.network_address) >> shift & ALL_ONES
            to_the_end = sum(map(len, tests)) // len(DROP) + 1
            test = _instruction(LOAD_MEMORY, word)
            if mask != ALL_ONES:
                test += _instruction(AND, mask)
            tests.insert(0, test + _instruction(JUMP_IF_EQUAL, wanted, if_false=to_the_end))
        code += [*tests, PASS]
    return b"".join((*code, DROP))


def attach(listening: socket.socket, code: bytes) -> None:
    """Replace the socket's filter.

    Raises:
        OSError: if the kernel refuses it, as some sandboxes' do.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HL", len(code) // len(DROP), ctypes.addressof(instructions))
    listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def with_this_machine(allowed: AllowedHosts, addresses: Iterable[str]) -> AllowedHosts:
    """The hosts that may connect, and this machine with the addresses that it listens on.

    A process may connect to itself, as a rehearsal does, whether or not `peers` names its host.
    """
    own = (ipaddress.ip_network(address.partition("%")[0]) for address in addresses)
    return AllowedHosts((*allowed.networks, *LOOPBACK, *own))


@contextmanager
def filtered_ucx_ports(allowed: AllowedHosts) -> Iterator[None]:
    """Filter the sockets on which UCX listens when the block ends and did not when it began.

    UCX offers no list of them. They are the sockets of this process that listen for TCP, are new,
    are inherited by child processes (Python's and ZMQ's are not), and are watched by an epoll that
    knows them by their descriptor's number, as UCX's does. If another library opened such a socket
    at the same moment, that would have the filter as well; none that vLLM uses does.

    UCX listens for 60 to 300 ms before its sockets have the filter. So connections that other hosts
    have opened in that time are shut down.
    """
    if allowed.are_all:
        yield
        return
    before: Mapping[Any, Any] = {}
    with suppress(OSError, psutil.Error):  # said below
        before = _listening()
    yield
    try:
        new = [one for place, one in _listening().items() if place not in before]
        _filter([one for one in new if _is_like_ucx(one.fd)], allowed)
    except (OSError, psutil.Error) as error:
        logger.warning("UCX's ports are not known, and have no filter: %s; %s", error, WHAT_TO_DO)


def _filter(opened: Sequence[Any], allowed: AllowedHosts) -> None:
    admitted = with_this_machine(allowed, (one.laddr.ip for one in opened))
    code = program(admitted.networks)
    names = ", ".join(f"{one.laddr.ip} port {one.laddr.port}" for one in opened)
    for one in opened:
        try:
            # Not `socket.dup` or a timeout: either changes whether UCX's own descriptor blocks.
            with socket.socket(fileno=os.dup(one.fd)) as listening:
                attach(listening, code)
        except OSError as error:  # noqa: PERF203 - each for itself
            if error.errno in (errno.EBADF, errno.ENOTSOCK):
                continue  # another thread has closed it since
            # The control plane's port has the same trouble, and warns once for all ports.
            logger.info("UCX listens on %s without a filter: %s", names, error)
            return
    logger.info("UCX listens on %s; of other machines it hears only %s", names, allowed)
    ports = {one.laddr.port for one in opened}
    for one in _tcp_sockets():
        if one.raddr and one.laddr.port in ports and not admitted.allows(one.raddr.ip):
            logger.warning("%s had connected to UCX's port, and is cut off", one.raddr.ip)
            with socket.socket(fileno=os.dup(one.fd)) as stranger:
                stranger.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> list[Any]:
    """This process's, as psutil describes them."""
    return psutil.Process().net_connections("tcp")


def _listening() -> dict[Any, Any]:
    """Those that listen, by their address."""
    return {one.laddr: one for one in _tcp_sockets() if one.status == psutil.CONN_LISTEN}


def _is_like_ucx(descriptor: int) -> bool:
    """See `filtered_ucx_ports`.

    The kernel says of each descriptor that an epoll watches: `tfd: 18 events: 19 data: 12`, of
    which the last two are hexadecimal.
    """
    try:
        if not os.get_inheritable(descriptor):
            return False
    except OSError:  # another thread has closed it since
        return False
    for file in FILES.iterdir():
        with suppress(OSError):  # closed since
            if str(file.readlink()) != EPOLL:
                continue
            for line in (FILE_DETAILS / file.name).read_text(encoding="ascii").splitlines():
                name, number, _, _, _, data, *_ = (*line.split(), *[""] * 6)
                if name == WATCHED and int(number) == descriptor == int(data, 16) & ALL_ONES:
                    return True
    return False
