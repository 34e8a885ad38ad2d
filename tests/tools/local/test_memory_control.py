"""What only the in-memory control plane can do; test_control_plane.py shows the rest."""

import pytest

from harness.local.memory_control import MemoryControl, MemoryLink, MemoryNetwork
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

    def link(self) -> MemoryLink:
        return self.reader.open_links[self.endpoint]


@pytest.fixture
def sides() -> Sides:
    return Sides()


def test_messages_arrive_in_any_order_and_any_number_of_times(sides: Sides) -> None:
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


def test_a_cut_loses_messages_and_is_known_when_it_is_reported(sides: Sides) -> None:
    sides.reader.send(sides.endpoint, b"lost")
    link = sides.link()
    sides.network.cut(link)
    sides.reader.send(sides.endpoint, b"lost too")
    assert not sides.network.packets
    assert (sides.network.unreported(), sides.network.working()) == ([link], [])
    sides.network.report_loss(link)
    assert sides.reader.poll(0) == [Lost(sides.endpoint, "connection closed")]
    sides.reader.send(sides.endpoint, b"anew")
    assert sides.network.working() == [sides.link()]


def test_a_successor_gets_requests_to_its_endpoint_on_a_broken_link(sides: Sides) -> None:
    sides.reader.send(sides.endpoint, b"late")
    sides.network.leave(sides.server)
    successor = MemoryControl(sides.network, "successor")
    successor.listen(HOST, int(sides.endpoint.rsplit(":", 1)[1]))
    sides.network.deliver(sides.network.packets[0])
    (request,) = successor.poll(0)
    assert isinstance(request, FromPeer)
    successor.reply(request.route, b"to nobody")
    assert not sides.network.packets
    assert sides.network.unreported() == [sides.link()]
