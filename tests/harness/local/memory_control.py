"""An in-memory `ControlPlane`, for tests and the simulator: all engines run in one process.

A `MemoryNetwork` connects `MemoryControl`s. By default a message arrives at once, on any thread. On
a network with `held`, a message waits for `deliver`, and the connecting side learns of a broken
link through `report_loss`. So a test chooses order, duplicates and losses.
"""

import threading
import time
from dataclasses import dataclass, field

from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint, endpoint_at
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Link, Lost, Received

FIRST_PORT = 20_000


@dataclass(eq=False)
class MemoryLink:
    """A connection. It may be broken although the side that connected does not know it yet."""

    route: bytes  # how the listener names it
    control: "MemoryControl"
    endpoint: Endpoint
    is_broken: bool = False
    sent: int = 0
    received: int = 0
    active_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the side that connected still uses it."""
        return self.control.open_links.get(self.endpoint) is self


@dataclass(eq=False)
class Packet:
    """A message under way."""

    link: MemoryLink
    payload: bytes
    is_answer: bool


@dataclass
class MemoryNetwork:
    """Everything between the controls of one process."""

    held: bool = False
    packets: list[Packet] = field(default_factory=list)
    links: dict[bytes, MemoryLink] = field(default_factory=dict)
    listeners: dict[Endpoint, "MemoryControl"] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _num_links: int = 0
    _num_ports: int = 0

    def listen(self, control: "MemoryControl", host: str, port: int) -> int:
        with self.changed:
            if port == 0:
                self._num_ports += 1
                port = FIRST_PORT + self._num_ports
            endpoint = endpoint_at(host, port)
            if endpoint in self.listeners:
                raise TransportError(f"listening on {endpoint}: it is taken")
            self.listeners[endpoint] = control
            return port

    def connect(self, control: "MemoryControl", endpoint: Endpoint) -> MemoryLink:
        self._num_links += 1
        route = str(self._num_links).encode()
        link = MemoryLink(route, control, endpoint, active_at=control.clock())
        self.links[route] = link
        return link

    def carry(self, link: MemoryLink, payload: bytes, *, is_answer: bool) -> None:
        """A message on a broken link is lost."""
        with self.changed:
            if link.is_broken:
                return
            packet = Packet(link, payload, is_answer)
            self.packets.append(packet)
            if not self.held:
                self.deliver(packet)

    def deliver(self, packet: Packet, *, again: bool = False) -> None:
        """A message arrives; `again` if it will arrive once more."""
        with self.changed:
            if not again:
                self.packets.remove(packet)
            link = packet.link
            listener = self.listeners.get(link.endpoint)
            if not packet.is_answer and listener is None:
                self._break(link, "cannot connect")
            elif not packet.is_answer and listener is not None:
                listener.inbox.append(FromPeer(link.route, packet.payload))
            elif link.is_open and not link.is_broken:  # else the answer is lost
                link.received += 1
                link.active_at = link.control.clock()
                link.control.inbox.append(FromEndpoint(link.endpoint, packet.payload))
            self.changed.notify_all()

    def cut(self, link: MemoryLink) -> None:
        """Break a link, and lose its packets."""
        with self.changed:
            self.packets = [packet for packet in self.packets if packet.link is not link]
            self._break(link)

    def leave(self, control: "MemoryControl") -> None:
        """A process has ended. Its successor at the same endpoint may get messages sent before."""
        with self.changed:
            endpoints = {e for e, listener in self.listeners.items() if listener is control}
            for endpoint in endpoints:
                del self.listeners[endpoint]
            control.open_links.clear()
            self.links = {r: link for r, link in self.links.items() if link.control is not control}
            self.packets = [
                packet
                for packet in self.packets
                if packet.link.control is not control or not packet.is_answer
            ]
            for link in list(self.links.values()):
                if link.endpoint in endpoints:
                    self._break(link)

    def unreported(self) -> list[MemoryLink]:
        """The broken links that the side that connected still uses."""
        return [link for link in self.links.values() if link.is_broken and link.is_open]

    def report_loss(self, link: MemoryLink, reason: str = "connection closed") -> None:
        """The side that connected learns that a link is broken."""
        with self.changed:
            del link.control.open_links[link.endpoint]
            del self.links[link.route]
            link.control.inbox.append(Lost(link.endpoint, reason))
            self.changed.notify_all()

    def working(self) -> list[MemoryLink]:
        """The links that are not broken, and still used."""
        return [link for link in self.links.values() if link.is_open and not link.is_broken]

    def _break(self, link: MemoryLink, reason: str = "connection closed") -> None:
        link.is_broken = True
        if not self.held and link.is_open:
            self.report_loss(link, reason)


class MemoryControl:
    """See `ControlPlane`, and the module's head."""

    def __init__(self, network: MemoryNetwork, name: str = "memory") -> None:
        self.name = name
        self.clock = time.monotonic
        self.inbox: list[Received] = []
        self.open_links: dict[Endpoint, MemoryLink] = {}
        self._network = network
        self._is_woken = False

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        del bounds  # nothing is bounded inside one process
        return self._network.listen(self, host, port)

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        with self._network.changed:
            link = self.open_links.get(endpoint)
            if link is None:
                link = self.open_links[endpoint] = self._network.connect(self, endpoint)
            link.sent += 1
            link.active_at = self.clock()
            self._network.carry(link, payload, is_answer=False)

    def reply(self, route: bytes, payload: bytes) -> None:
        """An answer to a peer that has left meanwhile is dropped."""
        with self._network.changed:
            link = self._network.links.get(route)
            if link is not None:
                self._network.carry(link, payload, is_answer=True)

    def poll(self, timeout_s: float | None) -> list[Received]:
        with self._network.changed:
            self._network.changed.wait_for(lambda: self.inbox or self._is_woken, timeout_s)
            self._is_woken = False
            received, self.inbox = self.inbox, []
            return received

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close a link: answers to it are lost, messages sent on it may still arrive."""
        with self._network.changed:
            link = self.open_links.pop(endpoint, None)
            if link is not None:
                del self._network.links[link.route]

    def links(self) -> list[Link]:
        now = self.clock()
        with self._network.changed:
            return [
                Link(link.endpoint, link.sent, link.received, now - link.active_at)
                for link in self.open_links.values()
            ]

    def wake(self) -> None:
        with self._network.changed:
            self._is_woken = True
            self._network.changed.notify_all()

    def watch(self, descriptor: int) -> None:
        """No descriptor ends a wait: what features watch, tests look at themselves."""

    def close(self, linger_s: float = 0.0) -> None:
        del linger_s
        self._network.leave(self)
