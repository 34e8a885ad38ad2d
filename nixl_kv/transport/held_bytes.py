"""How much the connections of a listening port make this process hold, and who is cut off for it.

ZMQ bounds the length of a frame and how many messages wait. A message of many frames it keeps until
the last one has come, and the last one need not come. So what the kernel has received from each
connection is compared with what was delivered of it: the difference is held. Where it grows too
large the connection that holds most is shut, and ZMQ drops what it kept for it.

With a key nobody needs this: without it no frame gets past the handshake.
"""

import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Final

from nixl_kv.log_limit import LimitedLog, get_logger

logger = get_logger(__name__)

MAX_HELD_BYTES: Final = 64 << 20
"""Of all connections of a port together; more is held for as long as until the next look."""

NEGLIGIBLE_BYTES: Final = 64 << 10
"""Of one connection: heartbeats and headers are received too, and never delivered."""

LOOK_S: Final = 0.1
LOOK_S_EACH: Final = 0.0005
"""Between two looks, while there are connections, and more for each of them: a look at one takes
4 us, so that all looks together cost less than a hundredth of a core."""

LOG_INTERVAL_S: Final = 60.0

LINGER_NOT: Final = struct.pack("ii", 1, 0)
TCP_INFO_BYTES: Final = 136
BYTES_RECEIVED: Final = struct.Struct("128x Q")
"""Where Linux has `tcpi_bytes_received` in its `struct tcp_info`."""


@dataclass
class _Connection:
    """In bytes. What was received before `base` was delivered, or ZMQ's own."""

    base: int = 0
    delivered: int = 0
    received: int = 0

    @property
    def held(self) -> int:
        held = self.received - self.base - self.delivered
        return held if held > NEGLIGIBLE_BYTES else 0


class HeldBytes:
    """Of one port. Connections are named by ZMQ's own descriptors, which are never closed here."""

    def __init__(self, port: int, limit: int = MAX_HELD_BYTES) -> None:
        """Start without a connection; `limit` is in bytes."""
        self._port = port
        self._limit = limit
        self._connections: dict[int, _Connection] = {}
        self._look_at = 0.0
        self._log = LimitedLog(logger, time.monotonic, interval_s=LOG_INTERVAL_S)

    @property
    def next_look_s(self) -> float | None:
        """In how many seconds `look` has something to do; None for never."""
        return max(0.0, self._look_at - time.monotonic()) if self._connections else None

    def on_accepted(self, descriptor: int) -> None:
        """A connection was accepted."""
        self._connections[descriptor] = _Connection()

    def on_closed(self, descriptor: int) -> None:
        """A connection has ended."""
        self._connections.pop(descriptor, None)

    def on_delivered(self, descriptor: int, num_bytes: int) -> None:
        """A message from this connection has left ZMQ."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.delivered += num_bytes

    def look(self, *, all_delivered: bool) -> None:
        """Compare, if it is time, and cut off who holds most while it is too much.

        Args:
            all_delivered: whether no whole message waits in ZMQ. Then whoever has delivered one
                since the last look holds no more than has come since.
        """
        if self.next_look_s != 0:
            return
        self._look_at = time.monotonic() + LOOK_S + LOOK_S_EACH * len(self._connections)
        for descriptor, connection in self._connections.items():
            connection.received = _received(descriptor) or connection.received
            if all_delivered and connection.delivered:
                connection.base, connection.delivered = connection.received, 0
        held = {key: each.held for key, each in self._connections.items() if each.held}
        while held and sum(held.values()) > self._limit:
            most = max(held, key=lambda descriptor: held[descriptor])
            self._cut_off(most, held.pop(most))

    def _cut_off(self, descriptor: int, num_bytes: int) -> None:
        """ZMQ notices the end by itself."""
        del self._connections[descriptor]
        try:
            # The copy is of one connection whatever ZMQ's thread closes and opens meanwhile.
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getsockname()[1] != self._port:
                    return
                host = connection.getpeername()[0]
                # When ZMQ closes it, its sender is told so: it may be waiting for room.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
                connection.shutdown(socket.SHUT_RD)
        except OSError as error:
            logger.debug("port %d: descriptor %d has ended: %s", self._port, descriptor, error)
            return
        self._log.warning(
            "port %d: a connection from %s is cut off: %d MiB of it wait for their end",
            self._port,
            host,
            num_bytes >> 20,
        )


def _received(descriptor: int) -> int:
    """Bytes that were received on a connection; 0 if it has ended."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    except OSError:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return 0
    finally:
        connection.detach()
    received: int = BYTES_RECEIVED.unpack(info)[0] if len(info) == TCP_INFO_BYTES else 0
    return received
