"""Abilities of the in-memory control plane alone; test_control_plane.py shows the rest."""

from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.ids import endpoint_at
from nixl_kv.transport.base import FromEndpoint, FromPeer, Lost

HOST = "127.0.0.1"


class Sides:
    """A reader and a server on a network that holds messages."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(held=True)
        self.reader = MemoryControl(self.network, "reader")
        self.server = MemoryControl(self.network, "server")
        self.endpoint = endpoint_at(HOST, self.server.listen(HOST, 0))


def test_messages_arrive_in_any_order_and_any_number_of_times() -> None:
    sides = Sides()
    for payload in (b"one", b"two"):
        sides.reader.send(sides.endpoint, payload)
    first, second = sides.network.packets
    sides.network.deliver(second, again=True)
    sides.network.deliver(first)
    sides.network.deliver(second)
    requests = [item for item in sides.server.poll(0) if isinstance(item, FromPeer)]
    assert [request.payload for request in requests] == [b"two", b"one", b"two"]
    sides.server.reply(requests[0].route, b"answer")
    (answer,) = sides.network.packets
    sides.network.deliver(answer)
    assert sides.reader.poll(0) == [FromEndpoint(sides.endpoint, b"answer")]


def test_a_cut_loses_messages_and_is_known_when_it_is_reported() -> None:
    sides = Sides()
    sides.reader.send(sides.endpoint, b"lost")
    link = sides.reader.open_links[sides.endpoint]
    sides.network.cut(link)
    sides.reader.send(sides.endpoint, b"lost too")
    assert not sides.network.packets
    assert (sides.network.unreported(), sides.network.working()) == ([link], [])
    sides.network.report_loss(link)
    assert sides.reader.poll(0) == [Lost(sides.endpoint, "connection closed")]
    sides.reader.send(sides.endpoint, b"anew")
    assert sides.network.working() == [sides.reader.open_links[sides.endpoint]]
