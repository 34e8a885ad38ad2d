"""The public `MemoryNetwork` that holds messages, with what a simulator adds to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from harness.local.memory_control import MemoryControl, MemoryLink, MemoryNetwork
from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint
from nixl_kv.transport.base import Bounds, Lost, Received
from sim.faults import Faults

HOST: Final = "10.0.0.1"

OnReply = Callable[["SimControl", bytes], None]


@dataclass
class SimNetwork(MemoryNetwork):
    """With a bound on the connections that a listener takes: one more is closed at once."""

    max_links: int = 0  # 0: no bound

    def connect(self, control: MemoryControl, endpoint: Endpoint) -> MemoryLink:
        """Make a new link."""
        link = super().connect(control, endpoint)
        taken = sum(each.endpoint == endpoint for each in self.links.values())
        link.is_broken = 0 < self.max_links < taken
        return link


class VersionedControl(MemoryControl):
    """The sockets of an engine that may be of the next release, which speaks another version.

    What it says and hears is then of one wire version more than its own code believes.
    """

    def __init__(self, name: str, network: MemoryNetwork, *, is_newer: bool) -> None:
        """Start without links."""
        super().__init__(network, name)
        self._shift = int(is_newer)

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        """Put a message on its way."""
        super().send(endpoint, _shifted(payload, self._shift))

    def reply(self, route: bytes, payload: bytes) -> None:
        """Answer a message."""
        super().reply(route, _shifted(payload, self._shift))

    def poll(self, timeout_s: float | None) -> list[Received]:
        """What has come."""
        return [
            item
            if isinstance(item, Lost)
            else replace(item, payload=_shifted(item.payload, -self._shift))
            for item in super().poll(timeout_s)
        ]


class SimControl(VersionedControl):
    """The sockets of one life of a rank.

    A rank listens where its former life did, which is the worst that may happen: it hears what was
    meant for that one.
    """

    def __init__(
        self, name: str, port: int, network: MemoryNetwork, faults: Faults, *, is_newer: bool
    ) -> None:
        """Start without links."""
        super().__init__(name, network, is_newer=is_newer)
        self.wait_s: float | None = 0.0  # of the latest poll
        self.on_reply: OnReply = lambda _control, _payload: None
        self._port = port
        self._faults = faults

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        """Listen where the former life did."""
        return super().listen(host, port or self._port, bounds)

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        """Put a message on its way.

        Raises:
            TransportError: if the schedule says so.
        """
        self._faults.touch()
        if self._faults.unsent:
            self._faults.unsent -= 1
            raise TransportError("the schedule let it fail")
        super().send(endpoint, payload)

    def reply(self, route: bytes, payload: bytes) -> None:
        """Answer a message."""
        self._faults.touch()
        self.on_reply(self, payload)
        super().reply(route, payload)

    def poll(self, timeout_s: float | None) -> list[Received]:
        """What has come; nothing is waited for."""
        self._faults.touch()
        self.wait_s = timeout_s
        return super().poll(0)


def _shifted(payload: bytes, shift: int) -> bytes:
    """A message of so many wire versions more; every version has it in the second place.

    0 stands for what all versions say alike.
    """
    if not shift:
        return payload
    kind, version, *rest = msgspec.msgpack.decode(payload)
    if version == 0:
        return payload
    return msgspec.msgpack.encode([kind, version + shift, *rest])
