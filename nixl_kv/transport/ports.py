"""Guards listening TCP ports: which hosts may connect, and how many at a time.

`LimitedPort` is the port of our own control plane. The kernel drops packets by a socket filter
(classic BPF, networking/filter.rst in Linux's documentation), which needs no privilege. `program`
and `attach` make such filters, also for the ports of a transport.
"""

import ctypes
import ipaddress
import math
import os
import resource
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from nixl_kv.config import LOOPBACK, AllowedHosts, Network
from nixl_kv.errors import REPEATED_LOG_S, LimitedLog, get_logger

logger = get_logger(__name__)

# Of one port at a time. Readers disconnect 5 s after their last load, so it serves more in turn.
# Each half-open connection of a stranger costs 14 KiB.
MAX_CONNECTIONS: Final = 4096
# One port may use a quarter of the process's descriptors, if that is less.
SHARE_OF_DESCRIPTORS: Final = 4

DESCRIPTORS: Final = Path("/proc/self/fd")

BACKLOG: Final = 128

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
NETWORK_HEADER: Final = 0xFFF00000  # SKF_NET_OFF; a TCP socket's packet begins at TCP's header
SOURCE: Final = {4: NETWORK_HEADER + 12, 6: NETWORK_HEADER + 8}
IPV4, IPV6 = 0x0800, 0x86DD
WORD_BITS: Final = 32
# A conditional jump skips up to 255 instructions.
MAX_TOGETHER: Final = 200
ALL_ONES: Final = 0xFFFFFFFF

WHAT_TO_DO: Final = (
    "let a firewall or a NetworkPolicy pass only the other engines to this process's TCP ports, "
    "which ask for no key (docs/operations.md, Firewall)"
)


class LimitedPort:
    """A listening socket that accepts a limited number of connections at a time.

    ZMQ accepts connections from a duplicate of the socket and reports them here. Each connection
    costs a descriptor and up to 14 KiB, and ZMQ's thread spins without descriptors. ZMQ itself can
    only unbind, which would also close established connections. Here the kernel drops SYNs while
    there are too many connections. Clients repeat a SYN after a second.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limit: int | None = None,
        allowed: AllowedHosts = AllowedHosts(),  # noqa: B008 - immutable
    ) -> None:
        """Listen on an IP literal, without brackets, and a port (0: any free one).

        `limit` counts connections at a time (None: as many as this process can afford). Other
        machines in `allowed` may connect; this machine always may.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)  # noqa: FBT003
        self.port: int = self._socket.getsockname()[1]
        affordable = (max_descriptors() or math.inf) // SHARE_OF_DESCRIPTORS
        self._limit = limit or min(MAX_CONNECTIONS, affordable)
        self._connections = 0
        self._is_shut = False
        self._log = LimitedLog(logger, time.monotonic, interval_s=REPEATED_LOG_S)
        self._filter = PASS
        if allowed.are_all or allowed.are_local:
            return
        code = program(with_this_machine(allowed, [host]).networks)
        try:
            attach(self._socket, code)
            self._filter = code
        except OSError as error:
            logger.warning(
                "the kernel cannot drop packets of hosts outside %s to port %d: %s. Any host on "
                "the network can connect: %s",
                *(allowed, self.port, error, WHAT_TO_DO),
            )

    def duplicate(self) -> int:
        """A descriptor of the listening socket that the caller closes."""
        return os.dup(self._socket.fileno())

    def on_accepted(self) -> None:
        self._connections += 1
        if self._is_shut or self._connections < self._limit:
            return
        self._is_shut = True
        try:
            attach(self._socket, DROP)
        except OSError as error:  # a sandbox's kernel, for example; the number is then unlimited
            self._log.warning(
                "port %d has %d connections and cannot refuse more: %s",
                *(self.port, self._connections, error),
            )
        else:
            self._log.warning(
                "port %d has %d connections and accepts no more for now; others wait until some "
                "disconnect. Its limit is a quarter of `ulimit -n`, up to %d",
                *(self.port, self._connections, MAX_CONNECTIONS),
            )

    def on_closed(self) -> None:
        self._connections -= 1
        # Reopen somewhat below the limit, so that the port does not toggle with each connection.
        if self._is_shut and self._connections < self._limit - self._limit // 8:
            self._is_shut = False
            with suppress(OSError):  # then it was not shut either
                attach(self._socket, self._filter)

    def close(self) -> None:
        self._socket.close()


def num_descriptors() -> int:
    """How many file descriptors of this process are open."""
    try:
        # Linux 6.2 and later count descriptors in the size; earlier versions need a listing.
        return DESCRIPTORS.stat().st_size or sum(1 for _ in DESCRIPTORS.iterdir())
    except OSError:  # no descriptor is left for the listing
        return max_descriptors() or 0


def max_descriptors() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


# --- filters


def _instruction(code: int, constant: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, constant)


DROP: Final = _instruction(RETURN, 0)
PASS: Final = _instruction(RETURN, ALL_ONES)


def program(networks: Iterable[Network]) -> bytes:
    """A filter that passes packets whose source address is in one of the networks."""
    # IPv4 mapped to IPv6 needs no rule: a socket on `::` gets IPv4's packets with IPv4's header.
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
    """Pass a packet of this IP version if one of the networks contains its source; else drop it."""
    of_version: list[Network] = [one for one in networks if one.version == version]
    num_words = 1 if version == 4 else 4  # noqa: PLR2004
    # Copy the source address to BPF's memory first. A load from there is one instruction in the
    # kernel, a load from the packet several, and the kernel limits their number.
    code = [
        _instruction(LOAD_PACKET, SOURCE[version] + 4 * word) + _instruction(STORE, word)
        for word in range(num_words)
    ]
    hosts: dict[int, set[int]] = {}  # the last words of addresses, by the words before
    for network in ipaddress.collapse_addresses(of_version):  # type: ignore[type-var]
        if network.prefixlen == network.max_prefixlen:
            first, last = divmod(int(network.network_address), 1 << WORD_BITS)
            hosts.setdefault(first, set()).add(last)
            continue
        tests = b""
        for word in reversed(range(num_words)):
            shift = WORD_BITS * (num_words - 1 - word)
            mask = int(network.netmask) >> shift & ALL_ONES
            if not mask:
                continue
            wanted = int(network.network_address) >> shift & ALL_ONES
            test = _instruction(LOAD_MEMORY, word)
            if mask != ALL_ONES:
                test += _instruction(AND, mask)
            to_next_network = len(tests) // len(DROP) + 1
            tests = test + _instruction(JUMP_IF_EQUAL, wanted, if_false=to_next_network) + tests
        code += [tests, PASS]
    for first, lasts in hosts.items():
        ordered = sorted(lasts)
        for begin in range(0, len(ordered), MAX_TOGETHER):
            code.append(_host_checks(first, ordered[begin : begin + MAX_TOGETHER], num_words))
    return b"".join((*code, DROP))


def _host_checks(first: int, lasts: Sequence[int], num_words: int) -> bytes:
    """Pass the addresses that differ in the last word only: one instruction for each."""
    code = _instruction(LOAD_MEMORY, num_words - 1)
    for place, last in enumerate(lasts):
        code += _instruction(JUMP_IF_EQUAL, last, if_true=len(lasts) - place)
    code += _instruction(JUMP, 1) + PASS
    for word in range(num_words - 1):
        shift = WORD_BITS * (num_words - 2 - word)
        to_next = len(code) // len(DROP)
        code = (
            _instruction(LOAD_MEMORY, word)
            + _instruction(JUMP_IF_EQUAL, first >> shift & ALL_ONES, if_false=to_next)
            + code
        )
    return code


def attach(listening: socket.socket, code: bytes) -> None:
    instructions = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HL", len(code) // len(DROP), ctypes.addressof(instructions))
    listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def with_this_machine(allowed: AllowedHosts, addresses: Iterable[str]) -> AllowedHosts:
    """Add this machine, with the addresses that it listens on.

    A process may connect to itself, as a rehearsal does, even if `peers` does not list its host.
    """
    own = (ipaddress.ip_network(address.partition("%")[0]) for address in addresses)
    return AllowedHosts((*allowed.networks, *LOOPBACK, *own))
