"""The control plane over ZMQ. The only file that imports zmq.

One `ZmqControl` per thread: a ROUTER where peers reach this side, a DEALER per endpoint that this
side talks to, and a wake-up by which another thread ends a wait.

With keys, ZMQ's CURVE encrypts each connection and proves to either side that the other one holds
the same key; without them, nothing does. Who may connect is asked of the `Gatekeeper`, in the same
wait as everything else: a new connection waits for the next `poll`, those that exist never do.

A DEALER is watched: when its connection breaks, or none comes about, its endpoint is reported lost
and the socket is closed, so that nothing queued for a dead process reaches its successor.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from nixl_kv.config import AllowedHosts, Config
from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint, endpoint_at
from nixl_kv.keys import Keys
from nixl_kv.transport import zap
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Link, Lost, Received
from nixl_kv.transport.connection_limit import LimitedPort

MAX_ANSWER_BYTES: Final = 64 << 20
HIGH_WATER: Final = 10_000
NEVER_MS: Final = 3_600_000
"""A link that broke is reported and closed, never mended behind our back."""
MAX_BATCH: Final = 256  # messages of one poll, so that a flood holds nothing else up
CONNECT_TIMEOUT_MS: Final = 2000

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
MONITOR_ENDPOINT: Final = "inproc://monitor"
HANDSHAKE_FAILED: Final = "handshake failed"

_LOST_EVENTS: Final[dict[int, str]] = {
    zmq.EVENT_DISCONNECTED: "connection closed",
    zmq.EVENT_CONNECT_RETRIED: "cannot connect",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused: this host is not among its peers",
}


@dataclass
class _Dealer:
    """A DEALER, the socket that tells of its connection, and what passed through it."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    sent: int = 0
    received: int = 0
    active_at: float = 0.0

    def close(self) -> None:
        """Close both; what is queued is dropped."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


@dataclass(frozen=True)
class _Admission:
    """What a ROUTER needs beside it: who asks whether to let somebody in, and who counts them."""

    questions: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    port: LimitedPort

    def attend(self, gatekeeper: zap.Gatekeeper) -> None:
        """Answer and count, as much as waits there."""
        for _ in range(MAX_BATCH):
            if not self.questions.poll(0):
                break
            answer = gatekeeper.answer(self.questions.recv_multipart(zmq.NOBLOCK))
            if answer is not None:
                self.questions.send_multipart(answer, zmq.NOBLOCK)
        for _ in range(MAX_BATCH):
            if not self.monitor.poll(0):
                break
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_ACCEPTED:
                self.port.on_accepted()
            else:
                self.port.on_closed()


def _router_options(bounds: Bounds, keys: Keys | None) -> dict[int, int | bytes]:
    options: dict[int, int | bytes] = {
        zmq.ROUTER_MANDATORY: 1,
        zmq.MAXMSGSIZE: bounds.message_bytes,
        zmq.RCVHWM: bounds.requests,
        zmq.SNDHWM: bounds.answers,
        zmq.ZAP_DOMAIN: zap.DOMAIN,
        zmq.ZAP_ENFORCE_DOMAIN: 1,  # if nobody answers the question, nobody is let in
    }
    if keys is not None:
        options |= {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: keys.server}
    return options


def _public(secret: bytes) -> bytes:
    """The public key of a secret one, 32 bytes each."""
    with _translated("CURVE"):
        return z85.decode(zmq.curve_public(z85.encode(secret)))


def _dealer_options(keys: Keys | None) -> dict[int, int | bytes]:
    options: dict[int, int | bytes] = {
        zmq.MAXMSGSIZE: MAX_ANSWER_BYTES,
        zmq.RCVHWM: HIGH_WATER,
        zmq.SNDHWM: HIGH_WATER,
        zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
        zmq.RECONNECT_IVL: NEVER_MS,
    }
    if keys is not None:
        options |= {
            zmq.CURVE_SERVERKEY: _public(keys.server),
            zmq.CURVE_PUBLICKEY: _public(keys.client),
            zmq.CURVE_SECRETKEY: keys.client,
        }
    return options


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except (zmq.ZMQError, OSError, ValueError) as error:
        raise TransportError(f"{doing}: {getattr(error, 'strerror', None) or error}") from error


class ZmqControl:
    """See `ControlPlane`, and the module's head."""

    def __init__(
        self,
        keys: Keys | None = None,
        *,
        allowed: AllowedHosts | None = None,
        peer_timeout_s: float = Config.peer_timeout_s,
    ) -> None:
        """Open nothing but the wake-up.

        Args:
            keys: with them, whoever has others or none is not let in, nor talked to.
            allowed: who may connect; None for anybody. Whom to connect to is the caller's affair.
            peer_timeout_s: how soon a connection whose other end is silent counts as lost.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = keys
        client = None if keys is None else _public(keys.client)
        self._gatekeeper = zap.Gatekeeper(client, (allowed or AllowedHosts()).allows)
        self._peer_timeout_s = peer_timeout_s
        self._poller = zmq.Poller()
        self._router: zmq.Socket[bytes] | None = None
        self._admission: _Admission | None = None
        self._dealers: dict[Endpoint, _Dealer] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def __repr__(self) -> str:
        port = "no port" if self._admission is None else f"port {self._admission.port.port}"
        return f"<ZmqControl: {port}, {len(self._dealers)} links>"

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        """Bind the ROUTER.

        Args:
            host: an IP literal, without brackets.
            port: 0 to 65535; 0 takes any free one.
            bounds: of what strangers may cost; None for those of a rank.

        Raises:
            TransportError: if the address is not of this machine or the port is taken.
        """
        with _translated(f"listening on {endpoint_at(host, port)}"):
            limited = LimitedPort(str(ip_address(host)), port)
            # The gatekeeper first: whoever comes before it is there is turned away.
            questions = self._socket(zmq.ROUTER, {})
            questions.bind(ZAP_ENDPOINT)
            router = self._socket(zmq.ROUTER, _router_options(bounds or Bounds(), self._keys))
            monitor = self._monitor_connections(router)
            router.setsockopt(zmq.USE_FD, limited.duplicate())
            router.bind(endpoint_at(host, limited.port))
        self._router = router
        self._admission = _Admission(questions, monitor, limited)
        for watched in (router, questions, monitor):
            self._poller.register(watched, zmq.POLLIN)
        return limited.port

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        """Queue a message for an endpoint, connecting if need be; never waits.

        Raises:
            TransportError: if the endpoint is no address, or its queue is full.
        """
        with _translated(f"sending to {endpoint}"):
            dealer = self._dealers.get(endpoint) or self._connect(endpoint)
            dealer.socket.send(payload, zmq.NOBLOCK)
            dealer.sent += 1
            dealer.active_at = time.monotonic()

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
        """Wait for messages, losses or a wake-up; None waits for ever.

        ZMQ counts in milliseconds: a shorter time is slept through, whatever comes meanwhile.
        """
        if timeout_s is not None and timeout_s < 0.001:  # noqa: PLR2004 - a millisecond
            time.sleep(timeout_s)
            timeout_s = 0
        ready = dict(self._poller.poll(None if timeout_s is None else round(timeout_s * 1000)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._admission is not None:
            self._admission.attend(self._gatekeeper)
        received: list[Received] = list(self._requests())
        for endpoint, dealer in list(self._dealers.items()):
            received += self._answers(endpoint, dealer)
        return received

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close an endpoint's connection; what is queued for it is dropped."""
        dealer = self._dealers.pop(endpoint, None)
        if dealer is None:
            return
        for watched in (dealer.socket, dealer.monitor):
            self._poller.unregister(watched)
        dealer.close()

    def links(self) -> list[Link]:
        """The links that are open."""
        now = time.monotonic()
        return [
            Link(endpoint, dealer.sent, dealer.received, now - dealer.active_at)
            for endpoint, dealer in self._dealers.items()
        ]

    def wake(self) -> None:
        """End a wait of the owning thread; may be called from any thread, but not after `close`."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close everything."""
        for endpoint in list(self._dealers):
            self.disconnect(endpoint)
        self._context.destroy(linger=0)
        if self._admission is not None:
            self._admission.port.close()
        os.close(self._wake_fd)

    def _socket(self, kind: int, options: dict[int, int | bytes]) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        common: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.HEARTBEAT_IVL: round(self._peer_timeout_s * 1000 / 4),
            zmq.HEARTBEAT_TIMEOUT: round(self._peer_timeout_s * 1000 * 3 / 4),
            zmq.HANDSHAKE_IVL: CONNECT_TIMEOUT_MS,
            zmq.IPV6: 1,
        }
        for option, value in (common | options).items():
            socket.setsockopt(option, value)
        return socket

    def _monitor_connections(self, router: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
        """Tells of each connection that is accepted or ends.

        Its queue has no end: ZMQ's thread would wait at a full one, and with it all connections.
        """
        router.monitor(MONITOR_ENDPOINT, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor = self._socket(zmq.PAIR, {zmq.RCVHWM: 0})
        monitor.connect(MONITOR_ENDPOINT)
        return monitor

    def _connect(self, endpoint: Endpoint) -> _Dealer:
        socket = self._socket(zmq.DEALER, _dealer_options(self._keys))
        dealer = _Dealer(socket, socket.get_monitor_socket(sum(_LOST_EVENTS)))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            dealer.close()
            raise
        self._dealers[endpoint] = dealer
        self._poller.register(dealer.socket, zmq.POLLIN)
        self._poller.register(dealer.monitor, zmq.POLLIN)
        return dealer

    def _requests(self) -> Iterator[FromPeer]:
        """All that waits at the ROUTER; a message of other than two frames is nobody's."""
        for _ in range(MAX_BATCH):
            if self._router is None or not self._router.poll(0):
                return
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 2:  # noqa: PLR2004 - route and payload
                yield FromPeer(frames[0], frames[1])

    def _answers(self, endpoint: Endpoint, dealer: _Dealer) -> list[Received]:
        """What came before the loss is still heard."""
        received: list[Received] = []
        while dealer.socket.poll(0):
            if len(received) == MAX_BATCH:
                return received
            frames = dealer.socket.recv_multipart(zmq.NOBLOCK)
            received.append(FromEndpoint(endpoint, frames[-1]))
            dealer.received += 1
            dealer.active_at = time.monotonic()
        if dealer.monitor.poll(0):
            event = recv_monitor_message(dealer.monitor)
            self.disconnect(endpoint)
            received.append(Lost(endpoint, self._reason(event["event"])))
        return received

    def _reason(self, event: int) -> str:
        """Why a connection is lost, in words."""
        reason = _LOST_EVENTS.get(event, "connection lost")
        if reason != HANDSHAKE_FAILED:
            return reason
        other = "a key" if self._keys is None else "another key, or none"
        return f"{reason}: perhaps it has {other}, or hangs"
