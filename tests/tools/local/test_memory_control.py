"""The control plane inside one process: at once on any thread, and held, message by message."""

import threading
from collections.abc import Callable, Iterator

import pytest

from harness.local.memory_control import FIRST_PORT, MemoryControl, MemoryLink, MemoryNetwork
from nixl_kv.errors import TransportError
from nixl_kv.ids import endpoint_at
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Link, Lost, Received

HOST = "127.0.0.1"
PATIENCE_S = 10.0  # of a test before it fails; none waits so long when all is well
ELSEWHERE = endpoint_at(HOST, 1)


class Sides:
    """A reader and a server on one network; the server listens at `endpoint`."""

    def __init__(self, *, held: bool) -> None:
        self.network = MemoryNetwork(held=held)
        self.reader = MemoryControl(self.network, "reader")
        self.server = MemoryControl(self.network, "server")
        self.endpoint = endpoint_at(HOST, self.server.listen(HOST, 0))

    def restart_server(self) -> None:
        """The server ends; its successor has the same endpoint."""
        self.network.leave(self.server)
        self.server = MemoryControl(self.network, "successor")
        self.server.listen(HOST, int(self.endpoint.rsplit(":", 1)[1]))

    def deliver_all(self) -> None:
        while self.network.packets:
            self.network.deliver(self.network.packets[0])

    def link(self) -> MemoryLink:
        return self.reader.open_links[self.endpoint]


@pytest.fixture
def at_once() -> Sides:
    return Sides(held=False)


@pytest.fixture
def held() -> Sides:
    return Sides(held=True)


@pytest.fixture(params=[False, True], ids=["at once", "held"])
def sides(request: pytest.FixtureRequest) -> Sides:
    return Sides(held=request.param)


def receive(control: MemoryControl) -> Received:
    """The one thing that has come."""
    (item,) = control.poll(0)
    return item


def request_at(control: MemoryControl) -> FromPeer:
    item = receive(control)
    assert isinstance(item, FromPeer)
    return item


# In both modes


def test_each_port_is_given_once(sides: Sides) -> None:
    assert int(sides.endpoint.rsplit(":", 1)[1]) > FIRST_PORT
    ports = {MemoryControl(sides.network).listen(HOST, 0) for _ in range(3)}
    assert len(ports) == 3
    assert sides.server.listen(HOST, 7) == 7
    with pytest.raises(TransportError, match=f"^listening on tcp://{HOST}:7: it is taken$"):
        sides.reader.listen(HOST, 7)
    assert sides.reader.listen("::1", 7, Bounds()) == 7, "another address"


def test_one_side_listens_at_several_ports(sides: Sides) -> None:
    second = endpoint_at(HOST, sides.server.listen(HOST, 0))
    for endpoint in (sides.endpoint, second):
        sides.reader.send(endpoint, endpoint.encode())
    sides.deliver_all()
    payloads = [item.payload for item in sides.server.poll(0) if isinstance(item, FromPeer)]
    assert payloads == [sides.endpoint.encode(), second.encode()]


def test_a_link_tells_the_time_since_its_last_message(sides: Sides) -> None:
    now = 100.0
    sides.reader.clock = lambda: now
    sides.reader.send(sides.endpoint, b"one")
    sides.deliver_all()
    now = 101.0
    assert sides.reader.links() == [Link(sides.endpoint, sent=1, received=0, idle_s=1.0)]
    sides.server.reply(request_at(sides.server).route, b"yes")
    sides.deliver_all()
    now = 103.0
    assert sides.reader.links() == [Link(sides.endpoint, sent=1, received=1, idle_s=2.0)]


def test_a_closed_control_is_no_part_of_the_network(sides: Sides) -> None:
    sides.reader.send(sides.endpoint, b"hello")
    sides.deliver_all()
    route = request_at(sides.server).route
    sides.reader.close()
    sides.server.reply(route, b"you have left")
    assert sides.network.packets == []
    assert sides.network.links == {}
    sides.server.close()
    assert sides.network.listeners == {}


# At once


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda sides: sides.server.close(), id="closed"),
        pytest.param(lambda sides: sides.network.cut(sides.link()), id="cut"),
    ],
)
def test_at_once_a_broken_link_is_reported(at_once: Sides, end: Callable[[Sides], None]) -> None:
    at_once.reader.send(at_once.endpoint, b"hello")
    route = request_at(at_once.server).route
    end(at_once)
    assert receive(at_once.reader) == Lost(at_once.endpoint, "connection closed")
    assert at_once.reader.links() == []
    at_once.server.reply(route, b"too late")
    assert at_once.reader.poll(0) == []


@pytest.fixture
def answering(at_once: Sides) -> Iterator[Sides]:
    """The server answers on a thread of its own, until it is stopped."""
    stopping = threading.Event()

    def main() -> None:
        while not stopping.is_set():
            for item in at_once.server.poll(None):
                assert isinstance(item, FromPeer)
                at_once.server.reply(item.route, b"re: " + item.payload)

    thread = threading.Thread(target=main)
    thread.start()
    yield at_once
    stopping.set()
    at_once.server.wake()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_threads_talk_to_each_other(answering: Sides) -> None:
    for number in range(100):
        answering.reader.send(answering.endpoint, b"%d" % number)
        expected = FromEndpoint(answering.endpoint, b"re: %d" % number)
        assert answering.reader.poll(PATIENCE_S) == [expected]


def test_links_can_be_listed_while_other_threads_talk(answering: Sides) -> None:
    """Also while another thread cuts them."""
    endpoints = [endpoint_at(HOST, answering.server.listen(HOST, 0)) for _ in range(50)]
    for endpoint in endpoints:
        answering.reader.send(endpoint, b"hello")
    assert {link.endpoint for link in answering.reader.links()} == set(endpoints)

    def cut_all() -> None:
        for link in answering.network.working():
            answering.network.cut(link)

    cutter = threading.Thread(target=cut_all)
    cutter.start()
    while cutter.is_alive():
        answering.reader.links()
    cutter.join()
    assert answering.reader.links() == []


# Held


def test_held_messages_are_under_way_until_they_are_delivered(held: Sides) -> None:
    held.reader.send(held.endpoint, b"one")
    held.reader.send(held.endpoint, b"two")
    assert held.server.poll(0) == []
    first, second = held.network.packets
    held.network.deliver(second)
    assert request_at(held.server).payload == b"two", "in any order"
    assert held.network.packets == [first]


def test_a_held_message_can_be_delivered_again(held: Sides) -> None:
    held.reader.send(held.endpoint, b"hello")
    (packet,) = held.network.packets
    for again in (True, True, False):
        held.network.deliver(packet, again=again)
    payloads = [item.payload for item in held.server.poll(0) if isinstance(item, FromPeer)]
    assert payloads == [b"hello"] * 3
    assert held.network.packets == []


def test_a_held_message_can_be_lost(held: Sides) -> None:
    held.reader.send(held.endpoint, b"one")
    held.reader.send(held.endpoint, b"two")
    del held.network.packets[0]
    held.deliver_all()
    assert request_at(held.server).payload == b"two"


def test_a_packet_shows_where_it_goes_and_what_it_begins_with(held: Sides) -> None:
    held.reader.send(held.endpoint, b"\x97\xa7Release\x04")
    (packet,) = held.network.packets
    assert str(packet) == f"reader -> {held.endpoint}: Release"
    held.network.deliver(packet)
    held.server.reply(request_at(held.server).route, b"\x96\xa5Grant\x04")
    assert str(held.network.packets[0]) == f"reader <- {held.endpoint}: Grant"


def test_a_cut_link_is_broken_before_its_side_knows(held: Sides) -> None:
    held.reader.send(held.endpoint, b"one")
    link = held.link()
    assert held.network.working() == [link]
    held.network.cut(link)
    assert held.network.packets == [], "what was under way is lost"
    held.reader.send(held.endpoint, b"two")
    assert held.network.packets == [], "and so is what is sent on it"
    assert held.reader.poll(0) == []
    assert held.network.working() == []
    assert held.network.unreported() == [link]
    held.network.report_loss(link, "no heartbeat")
    assert receive(held.reader) == Lost(held.endpoint, "no heartbeat")
    assert held.network.unreported() == []
    held.reader.send(held.endpoint, b"three")
    held.deliver_all()
    assert request_at(held.server).payload == b"three", "on a new link"


def test_an_answer_on_a_cut_link_is_lost(held: Sides) -> None:
    held.reader.send(held.endpoint, b"hello")
    held.deliver_all()
    route = request_at(held.server).route
    held.network.cut(held.link())
    held.server.reply(route, b"answer")
    assert held.network.packets == []


def test_a_message_that_finds_no_listener_breaks_its_link(held: Sides) -> None:
    held.reader.send(ELSEWHERE, b"is there anybody")
    assert held.network.unreported() == []
    held.deliver_all()
    (link,) = held.network.unreported()
    assert (link.endpoint, link.is_open, link.is_broken) == (ELSEWHERE, True, True)


def test_a_disconnected_link_needs_no_report(held: Sides) -> None:
    held.reader.send(held.endpoint, b"hello")
    held.network.cut(held.link())
    held.reader.disconnect(held.endpoint)
    assert held.network.unreported() == []
    assert held.network.links == {}


def test_what_was_sent_before_a_disconnection_still_arrives(held: Sides) -> None:
    held.reader.send(held.endpoint, b"last words")
    held.reader.disconnect(held.endpoint)
    held.deliver_all()
    request = request_at(held.server)
    assert request.payload == b"last words"
    held.server.reply(request.route, b"answer")
    assert held.network.packets == []


def test_an_answer_under_way_to_a_closed_link_is_not_received(held: Sides) -> None:
    held.reader.send(held.endpoint, b"hello")
    held.deliver_all()
    held.server.reply(request_at(held.server).route, b"answer")
    held.reader.disconnect(held.endpoint)
    held.reader.send(held.endpoint, b"on a new link")
    held.network.deliver(held.network.packets[0])
    assert held.reader.poll(0) == []


def test_what_was_sent_to_a_dead_process_may_reach_its_successor(held: Sides) -> None:
    """As over TCP, where the reader connects again; ZMQ's links do not."""
    held.reader.send(held.endpoint, b"for the first")
    link = held.link()
    held.restart_server()
    assert held.network.unreported() == [link]
    held.deliver_all()
    request = request_at(held.server)
    assert request.payload == b"for the first"
    held.server.reply(request.route, b"answer")
    assert held.network.packets == [], "but no answer comes back on a broken link"


def test_with_a_process_its_answers_under_way_end(held: Sides) -> None:
    held.reader.send(held.endpoint, b"hello")
    held.deliver_all()
    held.server.reply(request_at(held.server).route, b"to nobody")
    held.reader.send(held.endpoint, b"last words")
    held.network.leave(held.reader)
    assert [packet.payload for packet in held.network.packets] == [b"last words"]
    held.deliver_all()
    assert request_at(held.server).payload == b"last words"
    assert held.reader.links() == []
