"""The ports that UCX opens by itself: only this machine and admitted hosts may connect.

UCX 1.23 listens on every network interface, without a key. A process that connects can write any
memory of this one, because a PUT over TCP is not checked (docs/upstream/ucx-tcp-put.md). Delete
this file and `listening.py` when UCX checks the target of a PUT and asks who connects. Until then
the filters of `transport/ports.py` drop the packets of all other hosts.
"""

import ipaddress
import os
import pwd
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from nixl_kv.config import LOOPBACK, AllowedHosts
from nixl_kv.errors import get_logger
from nixl_kv.transport.ports import ALL_ONES, DESCRIPTORS, DROP, WHAT_TO_DO, attach, program
from nixl_kv.transport.ucx.descriptors import are_open, listening_sockets
from nixl_kv.transport.ucx.listening import before_listening

logger = get_logger(__name__)

PROCESSES: Final = Path("/proc")
SHOWN_USERS: Final = 8
SHOWN_HOSTS: Final = 8

# More addresses than UCX has on any machine that is known to us.
MAX_LISTENS: Final = 64

# Between two looks at connections that UCX has not accepted. It does so within milliseconds, unless
# its thread gets no processor.
LOOK_S: Final = 0.02
# The search for connections of hosts that may no longer connect ends. If UCX has accepted none for
# that long, its thread hangs.
ACCEPT_S: Final = 60.0
# Looks in a row that find no waiting connection: one may get its descriptor just after the first.
QUIET_LOOKS: Final = 2
# Of Linux' struct tcp_info: for a listening socket, the connections that wait to be accepted.
WAITING: Final = struct.Struct("=24xI")

HARM: Final = "can write any memory of this process, and so run code in it, without the key"


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

    def warn_of_other_users(self) -> None:
        """No filter sees a user: each of this machine can connect over loopback."""
        users = other_users()
        if users:
            shown = ", ".join(users[:SHOWN_USERS]) + (", ..." if len(users) > SHOWN_USERS else "")
            logger.warning(
                "processes of other users run here (%s). Each of them can connect to UCX's TCP "
                "ports of this process, and a process that connects %s: run engines where every "
                "user is trusted, for example in their own container (docs/reference/keys.md, Not "
                "protected)",
                *(shown, HARM),
            )

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
        """End the connections to UCX's ports of hosts that are not admitted.

        A connection that UCX has not accepted has no descriptor yet, and passes the filter that
        admitted it. So this goes on until none waits.
        """
        until, num_quiet = time.monotonic() + ACCEPT_S, 0
        while num_quiet < QUIET_LOOKS:
            waiting = sum(
                self._waiting()
            )  # before the look, which finds those that UCX accepts meanwhile
            self._cut_accepted()
            num_quiet = 0 if waiting else num_quiet + 1
            if time.monotonic() > until:
                logger.warning(
                    "%d connections have waited at UCX's ports for %g s; hosts that may no longer "
                    "connect may have made some of them: restart this engine",
                    *(waiting, ACCEPT_S),
                )
                return
            time.sleep(LOOK_S)

    def _waiting(self) -> Iterator[int]:
        """The connections that UCX has not accepted, by listening socket."""
        for number, inode in list(self._sockets.items()):
            with suppress(OSError), _duplicate(number, inode) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, WAITING.size)
                yield from WAITING.unpack(info)

    def _cut_accepted(self) -> None:
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
