"""The sockets of a simulated rank."""

from collections.abc import Callable
from typing import Final

from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint
from nixl_kv.transport.base import Bounds, Received
from sim.faults import Faults

HOST: Final = "10.0.0.1"


class SimControl(MemoryControl):
    """The sockets of one life of a rank.

    A rank listens where its former life did, which is the worst that may happen: it hears what was
    meant for that one.
    """

    def __init__(self, name: str, port: int, network: MemoryNetwork, faults: Faults) -> None:
        super().__init__(network, name)
        self.wait_s: float | None = 0.0  # of the latest poll
        self.on_reply: Callable[[bytes], None] = lambda _payload: None
        self._port = port
        self._faults = faults

    def listen(self, host: str, port: int, bounds: Bounds | None = None) -> int:
        return super().listen(host, port or self._port, bounds)

    def send(self, endpoint: Endpoint, payload: bytes) -> None:
        self._faults.touch()
        if self._faults.unsent:
            self._faults.unsent -= 1
            raise TransportError("the schedule let it fail")
        super().send(endpoint, payload)

    def reply(self, route: bytes, payload: bytes) -> None:
        self._faults.touch()
        self.on_reply(payload)
        super().reply(route, payload)

    def poll(self, timeout_s: float | None) -> list[Received]:
        """What has come; nothing is waited for."""
        self._faults.touch()
        self.wait_s = timeout_s
        return super().poll(0)
