"""A listening port that lets in only so many connections at a time.

ZMQ accepts whoever comes. Each connection costs a descriptor and up to 14 KiB, and as long as one
message may be until the handshake fails, after three seconds; and without descriptors, ZMQ's thread
spins. So the port is shut while there are too many. ZMQ's own way to do that, unbind,
would end the established connections too. Here the kernel drops what asks for a new one; those who
ask try again after a second, by TCP's own rule, and those who are in notice nothing.
"""

import os
import resource
import socket
import time
from typing import Final

from nixl_kv.config import AllowedHosts
from nixl_kv.log_limit import LimitedLog, get_logger
from nixl_kv.transport.host_filter import DROP, WHAT_TO_DO, attach, program, with_this_machine

logger = get_logger(__name__)

MAX_CONNECTIONS: Final = 4096
"""Of one port at the same time. Readers leave five seconds after their last load, so that many more
than that can take turns; each half-open connection of a stranger costs 14 KiB."""

SHARE_OF_DESCRIPTORS: Final = 4
"""One port may use a quarter of the process's descriptors, where that is less."""

BACKLOG: Final = 128
LOG_INTERVAL_S: Final = 60.0

SO_DETACH_FILTER: Final = 27


class LimitedPort:
    """Owns the listening socket; whoever accepts from it works on a copy, and counts here."""

    def __init__(
        self,
        host: str,
        port: int,
        limit: int | None = None,
        allowed: AllowedHosts = AllowedHosts(),  # noqa: B008 - immutable
    ) -> None:
        """Listen on an IP literal; port 0 takes any free one.

        Args:
            host: without brackets.
            port: 0 to 65535.
            allowed: the other machines that may connect. This machine always may.
            limit: connections at the same time; None for what this process can afford.

        Raises:
            OSError: if the address is not of this machine or the port is taken.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)  # noqa: FBT003
        self._filter = b""
        if not (allowed.are_all or allowed.are_local):
            self._filter = program(with_this_machine(allowed, [host]).networks)
        self.port: int = self._socket.getsockname()[1]
        self._limit = _affordable() if limit is None else limit
        self._connections = 0
        self._is_shut = False
        self._log = LimitedLog(logger, time.monotonic, interval_s=LOG_INTERVAL_S)
        if self._filter:
            self._keep_others_out(allowed)

    def duplicate(self) -> int:
        """A descriptor of the same listening socket, for whoever accepts; theirs to close."""
        return os.dup(self._socket.fileno())

    def on_accepted(self) -> None:
        """A connection was accepted."""
        self._connections += 1
        if self._connections >= self._limit and not self._is_shut:
            self._shut()

    def on_closed(self) -> None:
        """A connection has ended."""
        self._connections -= 1
        if self._is_shut and self._connections < self._limit - self._limit // 8:
            self._open()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def _keep_others_out(self, allowed: AllowedHosts) -> None:
        try:
            attach(self._socket, self._filter)
        except OSError as error:
            self._filter = b""
            logger.warning(
                "the kernel cannot keep hosts other than %s from port %d, or from UCX's ports: "
                "%s. Anyone on the network can connect: %s",
                allowed,
                self.port,
                error,
                WHAT_TO_DO,
            )

    def _shut(self) -> None:
        self._is_shut = True
        try:
            attach(self._socket, DROP)
        except OSError as error:  # not every kernel can: then nothing is bounded here
            self._log.warning(
                "port %d has %d connections and cannot be shut: %s",
                self.port,
                self._connections,
                error,
            )
        else:
            self._log.warning(
                "port %d has %d connections; it takes no more for now: others wait until some "
                "leave. It may have a quarter of `ulimit -n`, up to %d",
                self.port,
                self._connections,
                MAX_CONNECTIONS,
            )

    def _open(self) -> None:
        self._is_shut = False
        try:
            if self._filter:
                attach(self._socket, self._filter)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        except OSError as error:
            logger.debug("port %d was not shut: %s", self.port, error)
        logger.debug("port %d takes connections again", self.port)


def _affordable() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, descriptors // SHARE_OF_DESCRIPTORS)


def is_local(host: str) -> bool:
    """Whether an IP address is one of this machine's own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
