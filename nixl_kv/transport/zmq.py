"""The control plane over ZMQ. The only file that imports zmq.

One `ZmqControl` per thread: a ROUTER where peers reach this side, another one for all endpoints
that this side talks to, and a wake-up by which another thread ends a wait. So a thousand links need
as many sockets as one, and a wait for them costs as much.

With keys, ZMQ's CURVE encrypts each connection and proves to either side that the other one holds
the same key; without them, nothing does. Who may connect is asked of the `Gatekeeper`, in the same
wait as everything else: a new connection waits for the next `poll`, those that exist never do.

Links are watched: when a connection breaks, or none comes about, its endpoint is reported lost and
the link is closed, so that nothing queued for a dead process reaches its successor.
"""

import errno
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

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
MAX_BATCH: Final = 256  # messages of a socket in one poll
CONNECT_TIMEOUT_MS: Final = 3000
LISTENER_PATIENCE: Final = 10
"""Times as long as callers do listeners wait for a sign of life: leases tell what they need to
know, so that a silent caller costs nothing but its place."""

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
LISTENER_MONITOR: Final = "inproc://listener"
CALLER_MONITOR: Final = "inproc://caller"
HANDSHAKE_FAILED: Final = "handshake failed"

_TRIED_EVENTS: Final = (zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECTED, zmq.EVENT_CLOSED)
_LOST_EVENTS: Final[dict[int, str]] = {
    zmq.EVENT_DISCONNECTED: "connection closed",
    zmq.EVENT_CONNECT_RETRIED: "cannot connect",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused: this host is not among its peers",
}


@dataclass(eq=False)
class _Link:
    """A connection to an endpoint, and what passed through it."""

    endpoint: Endpoint
    route: bytes  # its name at the socket, which no other link ever has
    is_tried: bool = False  # what ZMQ says of the endpoint is about this link, not the one before
    failure: str = ""  # why it is lost
    sent: int = 0
    received: int = 0
    active_at: float = 0.0


class _Caller:
    """One socket for all links to endpoints, and one that tells of their connections."""

    def __init__(
        self, router: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", *, has_key: bool
    ) -> None:
        self.router = router
        self.monitor = monitor
        self.links: dict[Endpoint, _Link] = {}
        self._by_route: dict[bytes, _Link] = {}
        self._lost: list[_Link] = []  # to be reported after what came before
        self._has_key = has_key
        self._num_links = 0

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        """Queue a message, on a new link if there is none."""
        link = self.links.get(endpoint) or self._connect(endpoint)
        self.router.send_multipart([link.route, payload], zmq.NOBLOCK)
        link.sent += 1
        link.active_at = time.monotonic()

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close a link; what is queued for it is dropped."""
        link = self.links.pop(endpoint, None)
        if link is not None:
            del self._by_route[link.route]
            self.router.disconnect(endpoint)

    def receive(self) -> list[Received]:
        """A batch of messages; then, if no more wait, the losses."""
        self.attend()
        received: list[Received] = []
        num_messages = 0
        for route, *_, payload in _waiting(self.router):
            num_messages += 1
            link = self._by_route.get(route)
            if link is not None:
                link.received += 1
                link.active_at = time.monotonic()
                received.append(FromEndpoint(link.endpoint, payload))
        if num_messages == MAX_BATCH:
            return received
        lost, self._lost = self._lost, []
        for link in lost:
            if self.links.get(link.endpoint) is link:
                self.disconnect(link.endpoint)
                received.append(Lost(link.endpoint, link.failure))
        return received

    def _connect(self, endpoint: Endpoint) -> _Link:
        self._num_links += 1
        route = b"link %d" % self._num_links
        self.router.setsockopt(zmq.CONNECT_ROUTING_ID, route)
        self.router.connect(endpoint)
        link = self.links[endpoint] = self._by_route[route] = _Link(endpoint, route)
        return link

    def attend(self) -> None:
        """Take note of connections that come about, and of those that break or do not."""
        for frames in _waiting(self.monitor):
            event = parse_monitor_message(frames)
            link = self.links.get(Endpoint(event["endpoint"].decode()))
            if link is None:
                continue
            if event["event"] in _TRIED_EVENTS:
                link.is_tried = True
            elif link.is_tried and not link.failure:
                link.failure = _reason(event["event"], has_key=self._has_key)
                self._lost.append(link)


def _reason(event: int, *, has_key: bool) -> str:
    """Why a connection is lost, in words."""
    reason = _LOST_EVENTS.get(event, "connection lost")
    if reason != HANDSHAKE_FAILED:
        return reason
    other = "another key, or none" if has_key else "a key"
    return f"{reason}: perhaps it has {other}, or hangs"


@dataclass(frozen=True)
class _Admission:
    """What a ROUTER needs beside it: who asks whether to let somebody in, and who counts them."""

    questions: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    port: LimitedPort

    def attend(self, gatekeeper: zap.Gatekeeper) -> None:
        """Answer and count, as much as waits there."""
        for question in _waiting(self.questions):
            answer = gatekeeper.answer(question)
            if answer is not None:
                self.questions.send_multipart(answer, zmq.NOBLOCK)
        for frames in _waiting(self.monitor):
            event = parse_monitor_message(frames)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.port.on_accepted()
            else:
                self.port.on_closed()


def _waiting(socket: "zmq.Socket[bytes]", *, copy: bool = True) -> Iterator[list[Any]]:
    """What waits at a socket, each as its frames, so that a flood holds nothing else up.

    The frames are bytes, or `zmq.Frame`s, which have the sender's address, if `copy` is false.
    """
    for _ in range(MAX_BATCH):
        if not socket.poll(0):
            return
        yield socket.recv_multipart(zmq.NOBLOCK, copy=copy)


def _from_stranger(route: zmq.Frame, payload: zmq.Frame) -> FromPeer:
    return FromPeer(route.bytes, payload.bytes, str(payload.get("Peer-Address")))


def _heartbeats(timeout_s: float) -> dict[int, int | bytes]:
    """That tell in this time, at the latest, that the other end is silent."""
    return {
        zmq.HEARTBEAT_IVL: round(timeout_s * 1000 / 4),
        zmq.HEARTBEAT_TIMEOUT: round(timeout_s * 1000 * 3 / 4),
    }


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


def _caller_options(keys: Keys | None) -> dict[int, int | bytes]:
    options: dict[int, int | bytes] = {
        zmq.ROUTER_MANDATORY: 1,
        zmq.MAXMSGSIZE: MAX_ANSWER_BYTES,
        zmq.RCVHWM: HIGH_WATER,
        zmq.SNDHWM: HIGH_WATER,
        zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
        # With it, ZMQ refuses its own first protocols, which any service may seem to speak; a name
        # that comes by these while a socket goes ends the process.
        zmq.ZAP_DOMAIN: zap.DOMAIN,
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
        self._allowed = allowed or AllowedHosts()
        self._gatekeeper = zap.Gatekeeper(client, self._allowed.allows)
        self._peer_timeout_s = peer_timeout_s
        self._poller = zmq.Poller()
        self._router: zmq.Socket[bytes] | None = None
        self._admission: _Admission | None = None
        self._caller: _Caller | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def __repr__(self) -> str:
        port = "no port" if self._admission is None else f"port {self._admission.port.port}"
        return f"<ZmqControl: {port}, {len(self.links())} links>"

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
            limited = LimitedPort(str(ip_address(host)), port, allowed=self._allowed)
            # The gatekeeper first: whoever comes before it is there is turned away.
            questions = self._socket(zmq.ROUTER, {})
            questions.bind(ZAP_ENDPOINT)
            options = _heartbeats(self._peer_timeout_s * LISTENER_PATIENCE)
            options |= _router_options(bounds or Bounds(), self._keys)
            router = self._socket(zmq.ROUTER, options)
            monitor = self._monitor(
                router, LISTENER_MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            )
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
            if self._caller is None:
                self._caller = self._open_caller()
            self._caller.send(endpoint, payload)

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
        left_s, until = timeout_s, time.monotonic() + (timeout_s or 0)
        while True:
            wait_ms = None if left_s is None else math.ceil(left_s * 1000)
            ready = dict(self._poller.poll(wait_ms))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            received = self._receive()
            left_s = None if timeout_s is None else max(0, until - time.monotonic())
            # A connection that comes about is no reason to end the wait.
            if received or self._wake_fd in ready or left_s == 0:
                return received

    def _receive(self) -> list[Received]:
        """What is there, without a wait."""
        if self._admission is not None:
            self._admission.attend(self._gatekeeper)
        received: list[Received] = []
        if self._router is not None:
            has_key = self._keys is not None
            received += [
                FromPeer(*frames) if has_key else _from_stranger(*frames)
                for frames in _waiting(self._router, copy=has_key)
                if len(frames) == 2  # noqa: PLR2004 - route and payload; another message is nobody's
            ]
        if self._caller is not None:
            received += self._caller.receive()
        return received

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close an endpoint's connection; what is queued for it is dropped."""
        if self._caller is not None:
            self._caller.disconnect(endpoint)

    def links(self) -> list[Link]:
        """The links that are open."""
        now, caller = time.monotonic(), self._caller
        return [
            Link(link.endpoint, link.sent, link.received, now - link.active_at)
            for link in (caller.links.values() if caller is not None else ())
        ]

    def wake(self) -> None:
        """End a wait of the owning thread; may be called from any thread, but not after `close`."""
        if self._wake_fd >= 0:  # who wakes may not know that this was closed
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close everything."""
        self._context.destroy(linger=0)
        if self._admission is not None:
            self._admission.port.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    def _socket(self, kind: int, options: dict[int, int | bytes]) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        common: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.HANDSHAKE_IVL: CONNECT_TIMEOUT_MS,
            zmq.IPV6: 1,
        }
        for option, value in (common | options).items():
            socket.setsockopt(option, value)
        return socket

    def _monitor(
        self, socket: "zmq.Socket[bytes]", endpoint: str, events: int
    ) -> "zmq.Socket[bytes]":
        """A socket that tells what becomes of another one's connections.

        Its queue has no end: ZMQ's thread would wait at a full one, and with it all connections.
        """
        socket.monitor(endpoint, events)
        monitor = self._socket(zmq.PAIR, {zmq.RCVHWM: 0})
        monitor.connect(endpoint)
        return monitor

    def _open_caller(self) -> _Caller:
        options = _heartbeats(self._peer_timeout_s) | _caller_options(self._keys)
        router = self._socket(zmq.ROUTER, options)
        monitor = self._monitor(router, CALLER_MONITOR, sum((*_TRIED_EVENTS, *_LOST_EVENTS)))
        for watched in (router, monitor):
            self._poller.register(watched, zmq.POLLIN)
        return _Caller(router, monitor, has_key=self._keys is not None)
