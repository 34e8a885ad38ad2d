"""Guards listening TCP ports: which hosts may connect, and how many at a time.

`LimitedPort` is the port of our own control plane. `UcxPorts` covers the ports that UCX opens by
itself, without a key, on every network interface. A process that connects to one can write any
memory of this one. In both cases the kernel drops packets by a socket filter (classic BPF,
networking/filter.rst in Linux's documentation), which needs no privilege.
"""

import ctypes
import ipaddress
import math
import os
import pwd
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from nixl_kv.config import LOOPBACK, AllowedHosts, Network
from nixl_kv.errors import LimitedLog, get_logger
from nixl_kv.transport.descriptors import DESCRIPTORS, are_open, listening_sockets
from nixl_kv.transport.descriptors import limit as num_descriptors
from nixl_kv.transport.listening import before_listening

logger = get_logger(__name__)

# Of one port at a time. Readers disconnect 5 s after their last load, so it serves more in turn.
# Each half-open connection of a stranger costs 14 KiB.
MAX_CONNECTIONS: Final = 4096
# One port may use a quarter of the process's descriptors, if that is less.
SHARE_OF_DESCRIPTORS: Final = 4

PROCESSES: Final = Path("/proc")
SHOWN_USERS: Final = 8
SHOWN_HOSTS: Final = 8

# More addresses than UCX has on any machine that is known to us.
MAX_LISTENS: Final = 64

BACKLOG: Final = 128
LOG_INTERVAL_S: Final = 60.0

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

HARM: Final = "can write any memory of this process, and so run code in it, without the key"
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
        affordable = (num_descriptors() or math.inf) // SHARE_OF_DESCRIPTORS
        self._limit = limit or min(MAX_CONNECTIONS, affordable)
        self._connections = 0
        self._is_shut = False
        self._log = LimitedLog(logger, time.monotonic, interval_s=LOG_INTERVAL_S)
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


# --- UCX's ports


class UcxPorts:
    """The ports that UCX opens for the agents of one rank. This machine may connect to them.

    Other hosts may while they are admitted. Each socket has its filter before UCX listens on it
    (`before_listening`). Where UCX's library cannot be changed, `guard` finds the sockets when the
    agent is made: TCP sockets of this process that listen, are new, are inherited by child
    processes (Python's and ZMQ's are not), and are watched by an epoll under their descriptor's
    number, as UCX does. A socket like that of another library would get the filter too; vLLM uses
    no such library.

    The transfer thread calls `admit`, and other threads make agents meanwhile. Each attaches the
    latest filter last (`_attach`), so no lock is needed.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}  # the inode of each, by descriptor
        self._hosts: frozenset[str] = frozenset()  # admitted
        self._own: frozenset[str] = frozenset()  # this machine's, on which UCX listens
        self.refusal = ""  # why the ports have no filter; empty if they have

    def __repr__(self) -> str:
        return f"<UcxPorts: {len(self._sockets)} sockets, admits {len(self._hosts)} hosts>"

    @property
    def listens(self) -> tuple[str, ...]:
        """The addresses at which other machines can reach UCX."""
        return tuple(sorted(self._own))[:MAX_LISTENS]

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Filter the ports that UCX opens within the block. Any thread may use it."""
        before: dict[int, int] = {}
        with suppress(OSError):  # reported below
            before = listening_sockets()
        self._prune()
        with before_listening(self._add):
            yield
        try:
            now, watched = listening_sockets(), _watched_by_number()
            new = {n: now[n] for n in now if now[n] != before.get(n) and n in watched}
            late = self._late({n: new[n] for n in new if new[n] != self._sockets.get(n)})
            self._note(late)
            self._attach()
        except (OSError, psutil.Error) as error:
            self._report(f"UCX's ports have no filter: {error}")
            return
        if late:
            self._report("UCX listened for a moment before its ports had one", late)
            self._cut_off()
        names = ", ".join(
            f"{host} port {port}" for host, port in sorted(self._places(self._sockets))
        )
        logger.info("UCX listens on %s; of other machines it hears only admitted ones", names)

    def admit(self, hosts: Iterable[str]) -> bool:
        """Let these hosts connect, and no others but this machine.

        Takes 0.4 ms for 16 hosts and 6 sockets, and 10 ms for 1,024 hosts. False: too many for the
        kernel; the former ones stay. Connections of other hosts are ended in the background.
        """
        hosts, former = frozenset(hosts), self._hosts
        self._hosts = hosts
        if hosts == former or self.refusal:
            return True
        try:
            self._attach()
        except OSError as error:
            logger.warning("the kernel refuses a filter for %d hosts: %s", len(hosts), error)
            self._hosts = former
            with suppress(OSError):
                self._attach()
            return False
        if former - hosts:
            # /proc lists the connections, which takes milliseconds if there are many.
            threading.Thread(target=self._cut_off, name="nixl-kv-ports", daemon=True).start()
        return True

    def _prune(self) -> None:
        """Forget sockets that are closed."""
        for number, inode in list(self._sockets.items()):
            if not are_open({number: inode}):
                self._sockets.pop(number, None)

    def _add(self, number: int) -> None:
        """Filter a socket before UCX listens on it."""
        inode = os.fstat(number).st_ino
        with _duplicate(number, inode) as one:
            if one.family == socket.AF_UNIX:
                return
            self._note({number: inode})
            try:
                # A connection inherits the filter of the socket that accepted it. So the filter
                # passes all packets of an admitted host, not only SYNs.
                attach(one, self._program())
            except OSError as error:
                self._report(f"the kernel refuses socket filters: {error}", {number: inode})

    def _note(self, sockets: Mapping[int, int]) -> None:
        self._sockets.update(sockets)
        self._own |= {host for host, _ in self._places(sockets) if not _is_loopback(host)}

    def _late(self, opened: Mapping[int, int]) -> dict[int, int]:
        """UCX's sockets among these, on which it listens already."""
        found: dict[int, int] = {}
        for number, inode in opened.items():
            with suppress(OSError), _duplicate(number, inode) as one:
                if one.family != socket.AF_UNIX and os.get_inheritable(number):
                    found[number] = inode
        return found

    def _places(self, sockets: Mapping[int, int]) -> set[tuple[str, int]]:
        places: set[tuple[str, int]] = set()
        for number, inode in list(sockets.items()):
            with suppress(OSError), _duplicate(number, inode) as one:
                host, port = one.getsockname()[:2]
                places.add((host.partition("%")[0], port))
        return places

    def _report(self, refusal: str, sockets: Mapping[int, int] | None = None) -> None:
        """Say once that other machines may connect, unless only this one reaches the sockets."""
        places = self._places(self._sockets if sockets is None else sockets)
        if not self.refusal and not (places and all(_is_loopback(host) for host, _ in places)):
            self.refusal = refusal
            logger.warning(
                "UCX's TCP ports lack a filter (%s). A process that can connect to one %s: %s",
                *(refusal, HARM, WHAT_TO_DO),
            )

    def _program(self) -> bytes:
        return program((*LOOPBACK, *map(ipaddress.ip_network, self._own | self._hosts)))

    def _attach(self) -> None:
        """Attach the latest filter, also if another thread changes it meanwhile."""
        attached: object = None
        while attached != (self._own, self._hosts):
            attached, code = (self._own, self._hosts), self._program()
            for number, inode in list(self._sockets.items()):
                with suppress(_ClosedError), _duplicate(number, inode) as one:
                    attach(one, code)

    def _cut_off(self) -> None:
        """End the connections to UCX's ports of hosts that are not admitted."""
        ports = {port for _, port in self._places(self._sockets)}
        ended = Counter[str]()
        hosts = map(ipaddress.ip_network, self._own | self._hosts)
        allowed = AllowedHosts((*LOOPBACK, *hosts))
        for each in psutil.Process().net_connections("tcp"):
            if each.raddr and each.laddr.port in ports and not allowed.allows(each.raddr.ip):
                with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as stranger:
                    if stranger.getpeername()[:2] == tuple(each.raddr)[:2]:
                        ended[each.raddr.ip] += 1
                        _silence(stranger)
        for host, count in ended.most_common(SHOWN_HOSTS):
            logger.warning("%s is cut off from UCX's ports: %d connections", host, count)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


class _ClosedError(OSError):
    """A socket is closed, and another file may have its descriptor."""


@contextmanager
def _duplicate(number: int, inode: int) -> Iterator[socket.socket]:
    # Not `socket.dup` or a timeout: either changes whether UCX's own descriptor blocks.
    try:
        copy = os.dup(number)
    except OSError as error:
        raise _ClosedError(*error.args) from error
    if os.fstat(copy).st_ino != inode:  # of the copy, which no other thread closes
        os.close(copy)
        raise _ClosedError(f"descriptor {number} is another file now")
    with socket.socket(fileno=copy) as one:
        yield one


def _silence(connection: socket.socket) -> None:
    """End a connection, so that UCX reads nothing more of it."""
    with suppress(OSError):
        attach(connection, DROP)
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        while connection.recv(1 << 16, socket.MSG_DONTWAIT):  # UCX could still read these bytes
            pass


def other_users() -> list[str]:
    """The users, besides root and this one, whose processes this one sees; `?` if it sees none."""
    own, found = os.geteuid(), set[int]()
    try:
        for process in PROCESSES.iterdir():
            with suppress(OSError):  # it has ended
                if process.name.isdigit():
                    found.add(process.stat().st_uid)
    except OSError:
        return ["?"]
    if own and 0 not in found and not (PROCESSES / "1").exists():  # mounted with hidepid
        return ["?"]
    return [_user_name(user) for user in sorted(found - {own, 0})]


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def warn_of_other_users() -> None:
    """No filter sees a user: each of this machine can connect to UCX's ports over loopback."""
    users = other_users()
    if users:
        shown = ", ".join(users[:SHOWN_USERS]) + (", ..." if len(users) > SHOWN_USERS else "")
        logger.warning(
            "processes of other users run here (%s). Each of them can connect to UCX's TCP ports "
            "of this process, and a process that connects %s: run engines where every user is "
            "trusted, for example in their own container (docs/reference/keys.md, Not protected)",
            *(shown, HARM),
        )


def _watched_by_number() -> set[int]:
    """The descriptors that an epoll watches under their own number."""
    found: set[int] = set()
    for file in DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(file.readlink()) == "anon_inode:[eventpoll]":
                details = DESCRIPTORS.with_name("fdinfo") / file.name
                # One line per watched descriptor; the last number is hexadecimal:
                # `tfd:       18 events:       19 data:               12`.
                lines = re.findall("tfd: +([0-9]+) .* data: +([0-9a-f]+)", details.read_text())
                found |= {int(n) for n, data in lines if int(n) == int(data, 16) & ALL_ONES}
    return found
