"""The control plane over ZMQ. The only file that imports zmq.

A `ZmqControl` has one ROUTER socket that listens, and another for the links to all endpoints that
it sends to. So a thousand links need as many sockets as one, and polling them costs the same.

With keys, CURVE encrypts each connection, and each side proves that it holds the same key, or, as a
tool, one that is derived from it. ZMQ asks the `Gatekeeper` about each new connection. Its
questions are answered by the next `poll`; established connections never wait for that.

A monitor watches the links. When one breaks or cannot connect, its endpoint is reported lost and
the link is closed, so that nothing queued for a dead process reaches its successor.
"""

import errno
import hmac
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final, TypeAlias

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from nixl_kv.config import AllowedHosts, Config
from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint, endpoint_at
from nixl_kv.keys import Keys, ToolsKeys
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Link, Lost, Proved, Received
from nixl_kv.transport.ports import LimitedPort

MAX_ANSWER_BYTES: Final = 64 << 20
HIGH_WATER: Final = 10_000
NEVER_MS: Final = 3_600_000  # a broken link is reported and closed, and ZMQ must not repair it
MAX_BATCH: Final = 256  # messages of a socket in one poll
# An attempt to connect to a peer fails, or the handshake after it.
CONNECT_TIMEOUT_S: Final = 3.0
# Listeners wait this many times longer than callers for a sign of life. Leases detect dead readers,
# so a silent caller costs only its connection.
LISTENER_PATIENCE: Final = 10

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_VERSION: Final = b"1.0"
ZAP_DOMAIN: Final = b"nixl_kv"
# Route, empty, version, number, domain, address, identity, mechanism; then credentials.
ZAP_FRAMES: Final = 8

HANDSHAKE_REFUSED: Final = "handshake failed"  # by the peer, which has another key
NO_HANDSHAKE: Final = (
    f"no answer to the handshake in {CONNECT_TIMEOUT_S:g} s: it is stopped or hangs, or "
    "the network loses packets"
)

_TRIED_EVENTS: Final = (zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECTED, zmq.EVENT_CLOSED)
_LOST_EVENTS: Final[dict[int, str]] = {
    zmq.EVENT_DISCONNECTED: "connection closed",
    zmq.EVENT_CONNECT_RETRIED: "cannot connect",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: HANDSHAKE_REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused: this host is not among its peers",
}

_Socket: TypeAlias = "zmq.Socket[bytes]"
_Options: TypeAlias = dict[int, int | bytes]


@dataclass(frozen=True)
class Gatekeeper:
    """Admits connections from allowed hosts that hold a client key, if there is one.

    ZMQ asks once per connection, in the frames of its authentication protocol (ZAP, ZMQ RFC 27). By
    then CURVE has proved that the client holds the secret of the public key that it presents. ZMQ
    hands the value of `Proved` on with each message of the connection, as the id of its user.
    """

    # The proof that each public key of 32 bytes gives; empty on a side without keys.
    clients: Mapping[bytes, Proved]
    allows: Callable[[str], bool]  # whether an IP literal is among the peers

    def answer(self, frames: Sequence[bytes]) -> list[bytes] | None:
        """The answer to a question; None if the frames have no place for one."""
        if len(frames) < ZAP_FRAMES or frames[1]:
            return None
        route, _, version, number, domain, address, _, mechanism, *credentials = frames
        is_known, user = mechanism == b"NULL" and not credentials, Proved.NO_KEY
        if self.clients:
            key, is_known = b"".join(credentials), False
            for client, proved in self.clients.items():
                if mechanism == b"CURVE" and hmac.compare_digest(key, client):
                    is_known, user = True, proved
        is_asked_here = (version, domain) == (ZAP_VERSION, ZAP_DOMAIN)
        is_admitted = is_known and is_asked_here and self.allows(address.decode("ascii", "replace"))
        status = [b"200", b"OK"] if is_admitted else [b"400", b"not admitted"]
        told = user.value.encode() if is_admitted else b""
        return [route, b"", ZAP_VERSION, number, *status, told, b""]


@dataclass(frozen=True)
class _Listener:
    """The socket that listens, ZMQ's questions about new connections, and a monitor of them all."""

    gatekeeper: Gatekeeper
    router: _Socket
    questions: _Socket
    monitor: _Socket
    port: LimitedPort

    def receive(self) -> list[FromPeer]:
        for question in _waiting(self.questions):
            answer = self.gatekeeper.answer(question)
            if answer is not None:
                self.questions.send_multipart(answer, zmq.NOBLOCK)
        for frames in _waiting(self.monitor):
            if parse_monitor_message(frames)["event"] == zmq.EVENT_ACCEPTED:
                self.port.on_accepted()
            else:
                self.port.on_closed()
        received = []
        # Frames as `zmq.Frame`s tell the sender's key and address.
        for frames in _waiting(self.router, copy=False):
            match frames:  # ignore messages with more parts
                case [route, payload] if self.gatekeeper.clients:
                    proved = Proved(payload.get("User-Id"))
                    received.append(FromPeer(route.bytes, payload.bytes, proved))
                case [route, payload]:
                    address = str(payload.get("Peer-Address"))
                    received.append(FromPeer(route.bytes, payload.bytes, Proved.NO_KEY, address))
        return received


@dataclass(eq=False)
class _Link:
    endpoint: Endpoint
    route: bytes  # its name at the socket, never used for another link
    is_tried: bool = False  # monitor events of the endpoint now concern this link, not the last one
    failure: str = ""  # why it is lost
    sent: int = 0
    received: int = 0
    active_at: float = 0.0


@dataclass(eq=False)
class _Caller:
    """The socket of all links to endpoints, and its monitor."""

    router: _Socket
    monitor: _Socket
    has_key: bool
    links: dict[Endpoint, _Link] = field(default_factory=dict)
    _by_route: dict[bytes, _Link] = field(default_factory=dict)
    _lost: list[_Link] = field(default_factory=list)  # reported after earlier messages
    _num_links: int = 0

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        link = self.links.get(endpoint) or self._connect(endpoint)
        self.router.send_multipart([link.route, payload], zmq.NOBLOCK)
        link.sent += 1
        link.active_at = time.monotonic()

    def disconnect(self, endpoint: Endpoint) -> None:
        link = self.links.pop(endpoint, None)
        if link is not None:
            del self._by_route[link.route]
            self.router.disconnect(endpoint)

    def receive(self) -> list[Received]:
        self._watch()
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

    def _watch(self) -> None:
        for frames in _waiting(self.monitor):
            event = parse_monitor_message(frames)
            link = self.links.get(Endpoint(event["endpoint"].decode()))
            if link is None:
                continue
            if event["event"] in _TRIED_EVENTS:
                link.is_tried = True
            elif link.is_tried and not link.failure:
                link.failure = _why_lost(event["event"], event["value"])
                if link.failure == HANDSHAKE_REFUSED:
                    other = "another key, or none" if self.has_key else "a key"
                    link.failure += f": perhaps it has {other}"
                self._lost.append(link)


def _why_lost(event: int, value: int) -> str:
    """Why a link is lost, by an event of ZMQ's and the value that comes with it."""
    if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return _LOST_EVENTS.get(event, "connection lost")
    # The value is an error number: EAGAIN if ZMQ's timer ended the wait, EPIPE if the peer closed
    # the connection after it had read our part of the handshake. That is how CURVE refuses a key.
    reasons = {errno.EAGAIN: NO_HANDSHAKE, errno.EPIPE: HANDSHAKE_REFUSED}
    return reasons.get(value, "connection closed during the handshake")


def _waiting(socket: _Socket, *, copy: bool = True) -> Iterator[list[Any]]:
    """The frames of each waiting message, up to MAX_BATCH, so that a flood delays nothing else."""
    for _ in range(MAX_BATCH):
        if not socket.poll(0):
            return
        yield socket.recv_multipart(zmq.NOBLOCK, copy=copy)


def public_key(secret: bytes) -> bytes:
    """The public key of a Curve25519 secret, which both have 32 bytes."""
    with _translated("CURVE"):
        return z85.decode(zmq.curve_public(z85.encode(secret)))


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except (zmq.ZMQError, OSError, ValueError) as error:
        raise TransportError(f"{doing}: {getattr(error, 'strerror', None) or error}") from error


class ZmqControl:
    """See `ControlPlane` for the methods."""

    def __init__(
        self,
        keys: Keys | ToolsKeys | None = None,
        *,
        allowed: AllowedHosts | None = None,
        peer_timeout_s: float = Config.peer_timeout_s,
    ) -> None:
        """Open no connection yet.

        With keys, connections to and from processes with other keys or none fail. Hosts in
        `allowed` may connect (None: any); the caller decides whom to connect to.
        """
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._keys = keys
        self._allowed = allowed or AllowedHosts()
        clients = {}
        if isinstance(keys, Keys):
            known = {keys.client: Proved.ENGINE_KEY, keys.tools: Proved.TOOLS_KEY}
            clients = {public_key(secret): proved for secret, proved in known.items()}
        self._gatekeeper = Gatekeeper(clients, self._allowed.allows)
        self._peer_timeout_s = peer_timeout_s
        self._poller = zmq.Poller()
        self._listener: _Listener | None = None
        self._caller: _Caller | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._watched: set[int] = set()

    def __repr__(self) -> str:
        port = "no port" if self._listener is None else f"port {self._listener.port.port}"
        return f"<ZmqControl: {port}, {len(self.links())} links>"

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        bounds = bounds or Bounds()
        options: _Options = {
            zmq.MAXMSGSIZE: bounds.message_bytes,
            zmq.RCVHWM: bounds.requests,
            zmq.SNDHWM: bounds.answers,
            zmq.ZAP_ENFORCE_DOMAIN: 1,  # admit no connection without asking the gatekeeper
        }
        if isinstance(self._keys, ToolsKeys):
            raise TransportError(
                "a process with the tools' key cannot listen; an engine needs the engines' key"
            )
        if self._keys is not None:
            options |= {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: self._keys.server}
        with _translated(f"listening on {endpoint_at(host, port)}"):
            limited = LimitedPort(str(ip_address(host)), port, allowed=self._allowed)
            # Bind the gatekeeper first: ZMQ refuses connections that come before it.
            questions = self._socket(zmq.ROUTER, {})
            questions.bind(ZAP_ENDPOINT)
            events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            timeout_s = self._peer_timeout_s * LISTENER_PATIENCE
            router, monitor = self._router("listener", options, timeout_s, events)
            router.setsockopt(zmq.USE_FD, limited.duplicate())
            router.bind(endpoint_at(host, limited.port))
        self._listener = _Listener(self._gatekeeper, router, questions, monitor, limited)
        return limited.port

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        with _translated(f"sending to {endpoint}"):
            if self._caller is None:
                self._caller = self._open_caller()
            self._caller.send(endpoint, payload)

    def reply(self, route: bytes, payload: bytes) -> None:
        if self._listener is None:
            return
        try:
            self._listener.router.send_multipart([route, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The sender has disconnected, or does not receive its answers: drop this one.
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise TransportError(f"replying: {error}") from error

    def poll(self, timeout_s: float | None) -> list[Received]:
        # ZMQ counts milliseconds. Sleep through a shorter timeout, whatever arrives meanwhile.
        if timeout_s is not None and timeout_s < 0.001:  # noqa: PLR2004 - a millisecond
            time.sleep(timeout_s)
            timeout_s = 0
        left_s, until = timeout_s, time.monotonic() + (timeout_s or 0)
        while True:
            wait_ms = None if left_s is None else math.ceil(left_s * 1000)
            ready = dict(self._poller.poll(wait_ms))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            received: list[Received] = []
            for end in (self._listener, self._caller):
                received += end.receive() if end is not None else ()
            left_s = None if timeout_s is None else max(0, until - time.monotonic())
            # A new connection alone does not end the wait.
            is_woken = self._wake_fd in ready or not self._watched.isdisjoint(ready)
            if received or is_woken or left_s == 0:
                return received

    def disconnect(self, endpoint: Endpoint) -> None:
        if self._caller is not None:
            self._caller.disconnect(endpoint)

    def links(self) -> list[Link]:
        now, caller = time.monotonic(), self._caller
        return [
            Link(link.endpoint, link.sent, link.received, now - link.active_at)
            for link in (caller.links.values() if caller is not None else ())
        ]

    def wake(self) -> None:
        if self._wake_fd >= 0:  # the other thread may not know that this was closed
            os.eventfd_write(self._wake_fd, 1)

    def watch(self, descriptor: int) -> None:
        self._watched.add(descriptor)
        self._poller.register(descriptor, zmq.POLLIN)

    def close(self, linger_s: float = 0.0) -> None:
        if self._caller is not None:
            self._caller.router.setsockopt(zmq.LINGER, round(linger_s * 1000))
        self._context.destroy()
        if self._listener is not None:
            self._listener.port.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    def _socket(self, kind: int, options: _Options) -> _Socket:
        socket = self._context.socket(kind)
        common: _Options = {
            zmq.LINGER: 0,
            zmq.HANDSHAKE_IVL: round(CONNECT_TIMEOUT_S * 1000),
            zmq.IPV6: 1,
        }
        for option, value in (common | options).items():
            socket.setsockopt(option, value)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _router(
        self, name: str, options: _Options, timeout_s: float, events: int
    ) -> tuple[_Socket, _Socket]:
        """A socket for links to other processes, which may be silent for `timeout_s`; its monitor.

        The monitor reports `events` of the links.
        """
        common: _Options = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.HEARTBEAT_IVL: round(timeout_s * 1000 / 4),
            zmq.HEARTBEAT_TIMEOUT: round(timeout_s * 1000 * 3 / 4),
            # With a domain, ZMQ refuses its oldest protocol versions, which any service may seem to
            # speak. A peer's name that arrives in one of them while a socket closes would end the
            # process.
            zmq.ZAP_DOMAIN: ZAP_DOMAIN,
        }
        router = self._socket(zmq.ROUTER, common | options)
        router.monitor(f"inproc://{name}", events)
        # No limit for its queue: ZMQ's thread would block at a full one, and all connections too.
        monitor = self._socket(zmq.PAIR, {zmq.RCVHWM: 0})
        monitor.connect(f"inproc://{name}")
        return router, monitor

    def _open_caller(self) -> _Caller:
        options: _Options = {
            zmq.MAXMSGSIZE: MAX_ANSWER_BYTES,
            zmq.RCVHWM: HIGH_WATER,
            zmq.SNDHWM: HIGH_WATER,
            zmq.CONNECT_TIMEOUT: round(CONNECT_TIMEOUT_S * 1000),
            zmq.RECONNECT_IVL: NEVER_MS,
        }
        if self._keys is not None:
            has_public = isinstance(self._keys, ToolsKeys)
            server = self._keys.server if has_public else public_key(self._keys.server)
            options |= {
                zmq.CURVE_SERVERKEY: server,
                zmq.CURVE_PUBLICKEY: public_key(self._keys.client),
                zmq.CURVE_SECRETKEY: self._keys.client,
            }
        events = sum((*_TRIED_EVENTS, *_LOST_EVENTS, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL))
        router, monitor = self._router("caller", options, self._peer_timeout_s, events)
        return _Caller(router, monitor, self._keys is not None)
