"""The control plane of the simulator: messages and losses are items under way.

Each connection leads from a decode rank to an endpoint. The schedule delivers, repeats, loses and
reorders what is under way on it, and cuts it; decode learns of that later, prefill never.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from nixl_kv.transport.control import FromEndpoint, FromPeer, Lost, Received
from sim.seams import Fuse


@dataclass(eq=False)
class Link:
    """One connection."""

    number: int
    control: "SimControl"
    endpoint: str
    broken: bool = False

    @property
    def open(self) -> bool:
        """Whether decode still uses it."""
        return self.control.links.get(self.endpoint) is self

    @property
    def route(self) -> bytes:
        """How prefill names it."""
        return str(self.number).encode()


@dataclass(eq=False)
class Packet:
    """A message under way."""

    link: Link
    payload: bytes
    answer: bool

    def __str__(self) -> str:
        """Its kind and where it goes."""
        kind = "".join(chr(byte) for byte in self.payload[:12] if chr(byte).isalpha())
        arrow = "<-" if self.answer else "->"
        return f"{self.link.control.name} {arrow} {self.link.endpoint}: {kind}"


Desk: TypeAlias = Callable[[bytes], bytes | None]
"""Answers at once whoever asks; None while its process stands still."""


@dataclass
class Network:
    """Everything between processes."""

    packets: list[Packet] = field(default_factory=list)
    links: dict[bytes, Link] = field(default_factory=dict)
    listeners: "dict[str, SimControl | Desk]" = field(default_factory=dict)
    observed: list[tuple["SimControl", bytes]] = field(default_factory=list)  # replies, as sent
    replied: Callable[["SimControl", bytes], None] = lambda _control, _payload: None
    opened: int = 0

    def connect(self, control: "SimControl", endpoint: str) -> Link:
        """A new connection."""
        self.opened += 1
        link = Link(self.opened, control, endpoint)
        self.links[link.route] = link
        return link

    def deliver(self, packet: Packet, *, again: bool = False) -> None:
        """A message arrives; `again` if it will once more."""
        arrived = self._answered(packet) if packet.answer else self._asked(packet)
        if arrived and not again:
            self.packets.remove(packet)

    def _answered(self, packet: Packet) -> bool:
        """On decode; nobody listens any more on what was closed."""
        if packet.link.open and not packet.link.broken:
            item = FromEndpoint(packet.link.endpoint, packet.payload)
            packet.link.control.inbox.append(item)
        return True

    def _asked(self, packet: Packet) -> bool:
        """On prefill; False while it stands still."""
        listener = self.listeners.get(packet.link.endpoint)
        if isinstance(listener, SimControl):
            listener.inbox.append(FromPeer(packet.link.route, packet.payload))
            return True
        if listener is None:
            packet.link.broken = True
            return True
        answer = listener(packet.payload)
        if answer is not None:
            self._send(packet.link, answer, answer=True)
        return answer is not None

    def request(self, link: Link, payload: bytes) -> None:
        """Decode sends; into a connection that is broken already, in vain."""
        self._send(link, payload, answer=False)

    def answer(self, route: bytes, payload: bytes) -> None:
        """Prefill replies, to whoever it was."""
        if route in self.links:
            self._send(self.links[route], payload, answer=True)

    def cut(self, link: Link) -> None:
        """What is under way on it is lost."""
        link.broken = True
        self.packets = [packet for packet in self.packets if packet.link is not link]

    def breaks(self, endpoints: set[str]) -> None:
        """The process behind these endpoints has died; what was sent may reach its successor."""
        for link in self.links.values():
            link.broken |= link.endpoint in endpoints

    def leave(self, control: "SimControl") -> None:
        """A process has died, which had connections to others."""
        control.links.clear()
        self.packets = [p for p in self.packets if p.link.control is not control or not p.answer]

    def unlearned(self) -> list[Link]:
        """The broken connections that decode believes in."""
        return [link for link in self.links.values() if link.broken and link.open]

    def learn(self, link: Link) -> None:
        """Decode learns that a connection is broken."""
        del link.control.links[link.endpoint]
        link.control.inbox.append(Lost(link.endpoint, "connection closed"))

    def usable(self) -> list[Link]:
        """The connections that work."""
        return [link for link in self.links.values() if link.open and not link.broken]

    def _send(self, link: Link, payload: bytes, *, answer: bool) -> None:
        if not link.broken:
            self.packets.append(Packet(link, payload, answer=answer))


class SimControl:
    """As `transport.control.Control`: one rank's sockets."""

    def __init__(self, name: str, network: Network, fuse: Fuse) -> None:
        """Begin without connections."""
        self.name = name
        self.inbox: list[Received] = []
        self.links: dict[str, Link] = {}
        self.patience: float | None = 0.0
        self._network = network
        self._fuse = fuse

    def send(self, endpoint: str, payload: bytes) -> None:
        """Put a message on its way, connecting if need be."""
        self._fuse.touch()
        if endpoint not in self.links:
            self.links[endpoint] = self._network.connect(self, endpoint)
        self._network.request(self.links[endpoint], payload)

    def reply(self, route: bytes, payload: bytes) -> None:
        """Answer a message."""
        self._fuse.touch()
        self._network.observed.append((self, payload))
        self._network.replied(self, payload)
        self._network.answer(route, payload)

    def poll(self, timeout_s: float | None) -> list[Received]:
        """What has come; nothing is waited for."""
        self._fuse.touch()
        self.patience = timeout_s
        received, self.inbox = self.inbox, []
        return received

    def disconnect(self, endpoint: str) -> None:
        """Close a connection; answers to it are lost."""
        self.links.pop(endpoint, None)

    def wake(self) -> None:
        """Nothing sleeps here."""

    def close(self) -> None:
        """Nothing to release."""
