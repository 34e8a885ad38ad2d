"""Both control planes, over ZMQ and in memory; and the page of fence slots."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.ids import Endpoint, FenceToken, endpoint_at
from nixl_kv.transport.base import (
    ControlPlane,
    FromEndpoint,
    FromPeer,
    Lost,
    Received,
    SlotPage,
    slot_rows,
)
from nixl_kv.transport.zmq import ZmqControl
from support.polling import hear_of_loss

HOST = "127.0.0.1"
PATIENCE_S = 10.0  # of a test before it fails; none waits so long when all is well


class World:
    """A reader, and a server that listens at `endpoint`; others may join."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryNetwork(held=kind == "held")
        self.controls: list[ControlPlane] = []
        self.reader, self.server = self.join(), self.join()
        self.endpoint = self.listen(self.server)

    def join(self) -> ControlPlane:
        self.controls.append(ZmqControl() if self.kind == "zmq" else MemoryControl(self.network))
        return self.controls[-1]

    def listen(self, control: ControlPlane, port: int = 0) -> Endpoint:
        return endpoint_at(HOST, control.listen(HOST, port))

    def close(self, control: ControlPlane) -> None:
        self.controls.remove(control)
        control.close()

    def restart_server(self) -> ControlPlane:
        """Another process at the same endpoint, as soon as its port is free."""
        self.close(self.server)
        self.server = self.join()
        deadline = time.monotonic() + PATIENCE_S
        is_free = False
        while not is_free:
            assert time.monotonic() < deadline
            with contextlib.suppress(TransportError):
                self.listen(self.server, int(self.endpoint.rsplit(":", 1)[1]))
                is_free = True
        return self.server

    def receive(self, control: ControlPlane, count: int = 1) -> list[Received]:
        """The next `count` items."""
        received: list[Received] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(received) < count:
            self.deliver()
            left = deadline - time.monotonic()
            assert left > 0, f"only {received}"
            received += control.poll(left)
        return received

    def requests(self, control: ControlPlane, count: int = 1) -> list[FromPeer]:
        items = self.receive(control, count)
        assert all(isinstance(item, FromPeer) for item in items)
        return [item for item in items if isinstance(item, FromPeer)]

    def nothing_comes(self, control: ControlPlane) -> bool:
        self.deliver()
        return control.poll(0.05) == []

    def deliver(self) -> None:
        """Deliver the packets that the network holds."""
        while self.network.packets:
            self.network.deliver(self.network.packets[0])


@pytest.fixture(params=["zmq", "memory", "held"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    for control in world.controls:
        control.close()


in_time = pytest.mark.parametrize("world", ["zmq", "memory"], indirect=True)
"""Where a loss is reported, and threads wait, without help."""


@pytest.mark.parametrize(
    "payload", [b"hello", b"", bytes(range(256)) * 10_000], ids=["text", "nothing", "2.5 MB"]
)
def test_a_request_and_its_reply_arrive(world: World, payload: bytes) -> None:
    world.reader.send(world.endpoint, payload)
    (request,) = world.requests(world.server)
    assert request.payload == payload
    world.server.reply(request.route, payload[::-1])
    assert world.receive(world.reader) == [FromEndpoint(world.endpoint, payload[::-1])]


def test_each_reader_gets_its_own_reply(world: World) -> None:
    readers = [world.join() for _ in range(3)]
    for number, reader in enumerate(readers):
        reader.send(world.endpoint, b"%d" % number)
    requests = world.requests(world.server, 3)
    assert len({request.route for request in requests}) == 3
    for request in requests:
        world.server.reply(request.route, b"to " + request.payload)
    for number, reader in enumerate(readers):
        assert world.receive(reader) == [FromEndpoint(world.endpoint, b"to %d" % number)]


def test_disconnecting_does_not_count_as_a_loss_and_drops_late_answers(world: World) -> None:
    world.reader.send(world.endpoint, b"hello")
    (request,) = world.requests(world.server)
    for endpoint in (world.endpoint, world.endpoint, endpoint_at(HOST, 1)):
        world.reader.disconnect(endpoint)
    assert world.reader.links() == []
    world.server.reply(request.route, b"too late")
    assert world.nothing_comes(world.reader)
    world.reader.send(world.endpoint, b"hello again")
    (again,) = world.requests(world.server)
    assert again.payload == b"hello again"
    assert again.route != request.route


@pytest.mark.parametrize("route", [b"", b"77", b"stranger"])
def test_a_reply_by_an_unknown_route_is_dropped(world: World, route: bytes) -> None:
    world.server.reply(route, b"no peer has this route")
    world.reader.reply(route, b"nor is there a port")
    assert world.nothing_comes(world.reader)


def test_links_count_messages_of_those_that_this_side_talks_to(world: World) -> None:
    for payload in (b"one", b"two"):
        world.reader.send(world.endpoint, payload)
    for request in world.requests(world.server, 2):
        world.server.reply(request.route, b"yes")
    world.reader.send(world.endpoint, b"three")
    world.receive(world.reader, 2)
    (link,) = world.reader.links()
    assert (link.endpoint, link.sent, link.received) == (world.endpoint, 3, 2)
    assert 0 <= link.idle_s < PATIENCE_S
    assert world.server.links() == []


def test_a_used_port_is_refused_and_free_again_when_its_listener_has_left(world: World) -> None:
    port = int(world.endpoint.rsplit(":", 1)[1])
    with pytest.raises(TransportError, match=f"^listening on {world.endpoint}: "):
        world.reader.listen(HOST, port)
    world.reader.send(world.endpoint, b"still here?")
    assert world.requests(world.server)[0].payload == b"still here?"
    world.reader.disconnect(world.endpoint)
    successor = world.restart_server()
    world.reader.send(world.endpoint, b"hello")
    assert world.requests(successor)[0].payload == b"hello"


@in_time
def test_an_endpoint_without_a_listener_is_reported_lost_once(world: World) -> None:
    absent = endpoint_at(HOST, 1)
    for _ in range(2):
        world.reader.send(absent, b"is there anybody")
        assert world.receive(world.reader) == [Lost(absent, "cannot connect")]
        assert world.reader.links() == []
        assert world.nothing_comes(world.reader)


@in_time
def test_a_peer_that_closes_is_lost_and_may_come_back(world: World) -> None:
    world.reader.send(world.endpoint, b"hello")
    world.requests(world.server)
    successor = world.restart_server()
    assert world.receive(world.reader) == [Lost(world.endpoint, "connection closed")]
    assert world.reader.links() == []
    world.reader.send(world.endpoint, b"hello again")
    (request,) = world.requests(successor)
    assert request.payload == b"hello again"
    successor.reply(request.route, b"who are you")
    assert world.receive(world.reader) == [FromEndpoint(world.endpoint, b"who are you")]
    assert world.nothing_comes(world.reader), "the new link does not hear of the loss before it"


@in_time
def test_messages_before_the_loss_are_received_first(world: World) -> None:
    world.reader.send(world.endpoint, b"hello")
    world.server.reply(world.requests(world.server)[0].route, b"last words")
    if isinstance(world.reader, ZmqControl):
        assert world.reader._caller is not None
        assert world.reader._caller.router.poll(int(PATIENCE_S * 1000))
    world.close(world.server)
    if isinstance(world.reader, ZmqControl):
        hear_of_loss(world.reader, world.endpoint)
    assert world.reader.poll(0) == [
        FromEndpoint(world.endpoint, b"last words"),
        Lost(world.endpoint, "connection closed"),
    ]


@in_time
def test_one_wait_uses_up_all_wake_ups_before_it(world: World) -> None:
    for _ in range(3):
        world.reader.wake()
    assert world.reader.poll(PATIENCE_S) == []
    began = time.monotonic()
    assert world.reader.poll(0.05) == []
    assert PATIENCE_S / 2 > time.monotonic() - began > 0.04


@in_time
@pytest.mark.parametrize("timeout_s", [None, 60.0], ids=["without end", "with an end"])
def test_another_thread_ends_a_wait(world: World, timeout_s: float | None) -> None:
    thread = threading.Thread(target=world.reader.poll, args=(timeout_s,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    world.reader.wake()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


# The page of fence slots

CLEAR = bytes(16)


def fence_token(first: int) -> FenceToken:
    """A new one each time, so that a page cannot change the one that it is compared with."""
    return FenceToken(bytes(range(first, first + 16)))


def contents(page: SlotPage) -> list[bytes]:
    """The bytes that a peer reads."""
    memory = ctypes.string_at(page.span.address, page.span.length)
    return [memory[start : start + 16] for start in range(0, len(memory), 16)]


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257])
def test_all_slots_are_clear_at_first_and_begin_on_a_page_boundary(count: int) -> None:
    for page in [SlotPage(count) for _ in range(9)]:
        assert contents(page) == [page.read(slot) for slot in range(count)] == [CLEAR] * count
        first = page._memory.ctypes.data
        assert page.address % 4096 == 0
        assert first <= page.address
        assert page.address + 16 * count <= first + page._memory.nbytes
        assert page.span == Span(page.address, 16 * count)


def test_writing_and_clearing_a_slot_touches_no_other() -> None:
    page = SlotPage(4)
    for slot in range(4):
        page.write(slot, fence_token(101))
    page.write(2, fence_token(1))
    page.clear(1)
    expected = [fence_token(101), CLEAR, fence_token(1), fence_token(101)]
    assert contents(page) == [page.read(slot) for slot in range(4)] == expected


@pytest.mark.parametrize("length", [0, 15, 17])
def test_only_a_whole_generation_can_be_written(length: int) -> None:
    page = SlotPage(2)
    with pytest.raises(ValueError, match=f"^{length} bytes; allowed: 16$"):
        page.write(0, FenceToken(b"x" * length))
    assert contents(page) == [CLEAR] * 2


@pytest.mark.parametrize("slot", [-1, 4, 2**40])
@pytest.mark.parametrize("action", ["write", "clear", "read"])
def test_a_slot_outside_of_the_page_is_an_error(slot: int, action: str) -> None:
    page = SlotPage(4)
    arguments = (slot, fence_token(1)) if action == "write" else (slot,)
    with pytest.raises(IndexError, match=f"^slot {slot}; allowed: 0 to 3$"):
        getattr(page, action)(*arguments)
    assert contents(page) == [CLEAR] * 4


def test_a_page_is_one_row_with_a_piece_for_each_slot() -> None:
    page = SlotPage(3)
    assert page.rows().tolist() == [[page.address, 16, 0, 16, 3]]
    rows = slot_rows(2**63, 7)
    assert (rows.tolist(), rows.dtype) == ([[2**63, 16, 0, 16, 7]], np.uint64)
