"""The control plane's sockets. The only file that imports zmq.

One `Control` per thread: a ROUTER where peers reach this side, a DEALER per endpoint that this
side talks to, and a wake-up by which another thread ends a wait. It moves opaque payloads; what
they mean is the protocol's affair.

A DEALER is watched: when its connection breaks, or none comes about, its endpoint is reported lost
and the socket is closed, so that nothing queued for a dead process reaches its successor.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from nixl_kv.errors import TransportError

MAX_MESSAGE_BYTES: Final = 64 << 20
HIGH_WATER: Final = 10_000
NEVER_MS: Final = 3_600_000
"""A link that broke is reported and closed, never mended behind our back."""
MAX_BATCH: Final = 256  # messages of one poll, so that a flood holds nothing else up
HEARTBEAT_MS: Final = 500
HEARTBEAT_TIMEOUT_MS: Final = 1500
CONNECT_TIMEOUT_MS: Final = 2000

_LOST_EVENTS: Final[dict[int, str]] = {
    zmq.EVENT_DISCONNECTED: "connection closed",
    zmq.EVENT_CONNECT_RETRIED: "cannot connect",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed",
}


@dataclass(frozen=True)
class FromPeer:
    """A message to this side's ROUTER; `route` leads back to its sender while it is connected."""

    route: bytes
    payload: bytes


@dataclass(frozen=True)
class FromEndpoint:
    """A message from an endpoint that this side talks to."""

    endpoint: str
    payload: bytes


@dataclass(frozen=True)
class Lost:
    """An endpoint's connection is gone; the next `send` to it makes a new one."""

    endpoint: str
    reason: str


Received: TypeAlias = FromPeer | FromEndpoint | Lost


@dataclass(frozen=True)
class _Link:
    """A DEALER and the socket that tells of its connection."""

    dealer: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"

    def close(self) -> None:
        """Close both; what is queued is dropped."""
        self.dealer.disable_monitor()
        self.monitor.close(linger=0)
        self.dealer.close(linger=0)


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise TransportError(f"{doing}: {error}") from error


def is_local(host: str) -> bool:
    """Whether an IP address is one of this machine's own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


class Control:
    """Sockets of one thread. Only `wake` may be called from another."""

    def __init__(self) -> None:
        """Open nothing but the wake-up."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._router: zmq.Socket[bytes] | None = None
        self._links: dict[str, _Link] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def listen(self, address: str, port: int) -> int:
        """Bind the ROUTER; port 0 takes any free one. Returns the port.

        Args:
            address: as in an endpoint, `tcp://127.0.0.1` or `tcp://[::1]`.
            port: 0 to 65535.

        Raises:
            TransportError: if the address is not of this machine or the port is taken.
        """
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            with _translated(f"listening on {address}:{port or 'any port'}"):
                router.bind(f"{address}:{port or '*'}")
        except TransportError:
            router.close()
            raise
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(bound.rsplit(":", 1)[1])

    def send(self, endpoint: str, payload: bytes) -> None:
        """Queue a message for an endpoint, connecting if need be; never waits.

        Raises:
            TransportError: if the endpoint is no address, or its queue is full.
        """
        with _translated(f"sending to {endpoint}"):
            link = self._links.get(endpoint) or self._connect(endpoint)
            link.dealer.send(payload, zmq.NOBLOCK)

    def reply(self, route: bytes, payload: bytes) -> None:
        """Answer a message; an answer to somebody who has left meanwhile is dropped."""
        if self._router is None:
            return
        try:
            self._router.send_multipart([route, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise TransportError(f"replying: {error}") from error

    def poll(self, timeout_s: float | None) -> list[Received]:
        """Wait for messages, losses or a wake-up; None waits for ever."""
        ready = dict(
            self._poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
        )
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        received: list[Received] = list(self._requests())
        for endpoint, link in list(self._links.items()):
            received += self._answers(endpoint, link)
        return received

    def wake(self) -> None:
        """End a wait of the owning thread; may be called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def disconnect(self, endpoint: str) -> None:
        """Close an endpoint's connection; what is queued for it is dropped."""
        link = self._links.pop(endpoint, None)
        if link is None:
            return
        for watched in (link.dealer, link.monitor):
            self._poller.unregister(watched)
        link.close()

    def close(self) -> None:
        """Close everything."""
        for endpoint in list(self._links):
            self.disconnect(endpoint)
        self._context.destroy(linger=0)
        os.close(self._wake_fd)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: HIGH_WATER,
            zmq.RCVHWM: HIGH_WATER,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
            zmq.HANDSHAKE_IVL: CONNECT_TIMEOUT_MS,
            zmq.IPV6: 1,
            zmq.RECONNECT_IVL: NEVER_MS,
        }
        for option, value in options.items():
            made.setsockopt(option, value)
        return made

    def _connect(self, endpoint: str) -> _Link:
        dealer = self._socket(zmq.DEALER)
        monitor = dealer.get_monitor_socket(sum(_LOST_EVENTS))
        link = _Link(dealer, monitor)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError:
            link.close()
            raise
        self._links[endpoint] = link
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return link

    def _requests(self) -> Iterator[FromPeer]:
        """All that waits at the ROUTER; a message of other than two frames is nobody's."""
        for _ in range(MAX_BATCH):
            if self._router is None or not self._router.poll(0):
                return
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 2:  # noqa: PLR2004 - route and payload
                yield FromPeer(frames[0], frames[1])

    def _answers(self, endpoint: str, link: _Link) -> list[Received]:
        """What came before the loss is still heard."""
        received: list[Received] = []
        while link.dealer.poll(0):
            if len(received) == MAX_BATCH:
                return received
            frames = link.dealer.recv_multipart(zmq.NOBLOCK)
            received.append(FromEndpoint(endpoint, frames[-1]))
        if link.monitor.poll(0):
            event = recv_monitor_message(link.monitor)
            self.disconnect(endpoint)
            received.append(Lost(endpoint, _LOST_EVENTS.get(event["event"], "connection lost")))
        return received
