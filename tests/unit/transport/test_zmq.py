"""The control plane over ZMQ: real sockets, over loopback."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import zmq

from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint, endpoint_at
from nixl_kv.transport import zmq as module
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Link, Lost, Received
from nixl_kv.transport.zmq import ZmqControl
from support.polling import hear_of_loss

HOST = "127.0.0.1"
RawSockets: TypeAlias = "Callable[[int], zmq.Socket[bytes]]"

PATIENCE_S = 10.0  # of a test before it fails; none waits so long when all is well
PATIENCE_MS = 10_000


@pytest.fixture
def make() -> Iterator[Callable[[], ZmqControl]]:
    """Makes controls, and closes those that the test has not closed."""
    controls: list[ZmqControl] = []

    def new_control() -> ZmqControl:
        controls.append(ZmqControl())
        return controls[-1]

    yield new_control
    for control in controls:
        if not control._context.closed:
            control.close()


@pytest.fixture
def reader(make: Callable[[], ZmqControl]) -> ZmqControl:
    return make()


@pytest.fixture
def server(make: Callable[[], ZmqControl]) -> ZmqControl:
    return make()


def listen(control: ZmqControl, bounds: Bounds | None = None) -> Endpoint:
    return endpoint_at(HOST, control.listen(HOST, 0, bounds))


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.rsplit(":", 1)[1])


@pytest.fixture
def endpoint(server: ZmqControl) -> Endpoint:
    return listen(server)


@pytest.fixture
def raw() -> Iterator[RawSockets]:
    """Sockets of peers that do not keep to the rules."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:

        def new_socket(kind: int) -> "zmq.Socket[bytes]":
            raw_socket = stack.enter_context(context.socket(kind))
            raw_socket.setsockopt(zmq.LINGER, 0)
            return raw_socket

        yield new_socket


def receive(control: ZmqControl, count: int = 1) -> list[Received]:
    """The next so many of whatever comes."""
    received: list[Received] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(received) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"only {received}"
        received += control.poll(left)
    return received


def asked(server: ZmqControl) -> FromPeer:
    (item,) = receive(server)
    assert isinstance(item, FromPeer)
    return item


def open_sockets(control: ZmqControl) -> list[zmq.Socket[bytes]]:
    return [each for each in control._context._sockets if not each.closed]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port on which nobody listens and that nobody else is given."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]


def restarted(make: Callable[[], ZmqControl], endpoint: Endpoint) -> ZmqControl:
    """Another process at a known endpoint, as soon as its port is free."""
    control, port = make(), port_of(endpoint)
    deadline = time.monotonic() + PATIENCE_S
    while control._listener is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(TransportError):
            control.listen(HOST, port)
    return control


def test_a_thousand_links_need_as_many_sockets_as_one(
    make: Callable[[], ZmqControl], reader: ZmqControl
) -> None:
    """ZMQ has 1,023 sockets a context; here in two steps, as a test may open few files."""
    servers = {listen(server): server for server in (make() for _ in range(25))}
    sockets = 0
    for step in range(40):
        for endpoint in servers:
            reader.send(endpoint, b"%d" % step)
        sockets = sockets or len(open_sockets(reader))
        for server in servers.values():
            assert asked(server).payload == b"%d" % step
        assert len(open_sockets(reader)) == sockets
        for endpoint in servers:
            reader.disconnect(endpoint)
    assert sockets <= 3
    assert reader.links() == []


def test_two_ways_to_write_an_endpoint_are_two_links(
    reader: ZmqControl, server: ZmqControl
) -> None:
    endpoint = listen(server)
    endpoints = [endpoint, Endpoint(endpoint.replace("127.0.0.1", "127.1"))]
    for each in endpoints:
        reader.send(each, each.encode())
    for request in receive(server, 2):
        assert isinstance(request, FromPeer)
        server.reply(request.route, request.payload)
    assert set(receive(reader, 2)) == {FromEndpoint(each, each.encode()) for each in endpoints}
    server.close()
    assert set(receive(reader, 2)) == {Lost(each, "connection closed") for each in endpoints}


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_ipv6(reader: ZmqControl, server: ZmqControl) -> None:
    endpoint = endpoint_at("::1", server.listen("::1", 0))
    reader.send(endpoint, b"hello")
    server.reply(asked(server).route, b"hello yourself")
    assert receive(reader) == [FromEndpoint(endpoint, b"hello yourself")]


@pytest.mark.parametrize(
    "host",
    [
        pytest.param("203.0.113.1", id="another machine's"),
        pytest.param("localhost", id="a name"),
        pytest.param("", id="nothing"),
        pytest.param("tcp://127.0.0.1", id="an endpoint"),
    ],
)
def test_listening_on_another_address_is_an_error(server: ZmqControl, host: str) -> None:
    with pytest.raises(TransportError, match=r"^listening on tcp://.*:0: "):
        server.listen(host, 0)
    assert open_sockets(server) == []
    assert server.listen(HOST, 0) > 0


def test_listening_on_a_used_port_leaves_no_socket(
    make: Callable[[], ZmqControl], endpoint: Endpoint
) -> None:
    other, port = make(), port_of(endpoint)
    with pytest.raises(TransportError, match=f"^listening on {endpoint}: Address already in"):
        other.listen(HOST, port)
    assert open_sockets(other) == []


@pytest.mark.parametrize("name", ["nonsense", "tcp://127.0.0.1", "udp://127.0.0.1:1"])
def test_sending_to_no_endpoint_is_an_error(reader: ZmqControl, name: str) -> None:
    endpoint = Endpoint(name)
    for _ in range(2):
        with pytest.raises(TransportError, match=f"^sending to {endpoint}: "):
            reader.send(endpoint, b"hello")
    assert reader.links() == []
    assert reader.poll(0) == []


def test_a_lost_endpoint_leaves_nothing(reader: ZmqControl) -> None:
    with free_port() as port:
        endpoint = endpoint_at(HOST, port)
        reader.send(endpoint, b"is there anybody")
        assert receive(reader) == [Lost(endpoint, "cannot connect")]
        assert reader.links() == []
        began = time.monotonic()
        assert reader.poll(0.25) == [], "reported once"
        assert time.monotonic() - began > 0.2, "nothing of it is waited for any more"


def test_nothing_queued_for_a_dead_process_reaches_its_successor(
    make: Callable[[], ZmqControl], reader: ZmqControl, server: ZmqControl, endpoint: Endpoint
) -> None:
    """Not even when the reader, busy with something else, has not heard of the death."""
    reader.send(endpoint, b"for the first")
    asked(server)
    server.close()
    hear_of_loss(reader, endpoint)
    reader.send(endpoint, b"for the dead")
    successor = restarted(make, endpoint)
    assert successor.poll(0.5) == []
    assert receive(reader) == [Lost(endpoint, "connection closed")]
    reader.send(endpoint, b"for the second")
    assert asked(successor).payload == b"for the second"


def test_replies_to_somebody_who_has_left_are_dropped(
    reader: ZmqControl, server: ZmqControl, endpoint: Endpoint
) -> None:
    reader.send(endpoint, b"hello")
    route = asked(server).route
    reader.close()
    deadline = time.monotonic() + PATIENCE_S
    while _is_routable(server, route):
        server.reply(route, b"are you there")
        assert time.monotonic() < deadline
        time.sleep(0.005)
    server.reply(route, b"you have left")
    assert server.poll(0) == []


def _is_routable(server: ZmqControl, route: bytes) -> bool:
    assert server._listener is not None
    try:
        server._listener.router.send_multipart([route, b""], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        return error.errno != zmq.EHOSTUNREACH
    return True


def test_a_reply_that_cannot_be_queued_is_dropped(server: ZmqControl, raw: RawSockets) -> None:
    dealer = raw(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(listen(server, Bounds(answers=2)))
    dealer.send(b"hello")
    route = asked(server).route
    for _ in range(200):  # more than the kernel's buffers hold
        server.reply(route, bytes(1 << 20))
    assert server.poll(0) == []


def test_other_errors_of_a_reply_are_raised(server: ZmqControl, endpoint: Endpoint) -> None:
    del endpoint
    assert server._listener is not None
    server._listener.router.close()
    with pytest.raises(TransportError, match=r"^replying: "):
        server.reply(b"route", b"payload")
    server._poller.unregister(server._listener.router)
    server._listener.port.close()
    server._listener = None


def test_a_full_queue_is_an_error(
    make: Callable[[], ZmqControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HIGH_WATER", 3)
    reader = make()
    with socket.create_server((HOST, 0)) as silent:
        endpoint = endpoint_at(HOST, silent.getsockname()[1])
        for _ in range(3):
            reader.send(endpoint, b"hello")
        with pytest.raises(TransportError, match=f"^sending to {endpoint}: Resource temporarily"):
            reader.send(endpoint, b"once more")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b"one", b"two"], id="two frames"),
        pytest.param([b"", b"two"], id="as a REQ socket sends"),
        pytest.param([b"", b"", b"", b""], id="four empty frames"),
        pytest.param([b"x"] * 1000, id="a thousand frames"),
    ],
)
def test_requests_of_other_than_one_frame_are_ignored(
    raw: RawSockets, server: ZmqControl, endpoint: Endpoint, frames: list[bytes]
) -> None:
    dealer = raw(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart(frames)
    dealer.send(b"good")
    assert asked(server).payload == b"good"


def test_an_answer_of_several_frames_does_no_harm(raw: RawSockets, reader: ZmqControl) -> None:
    router = raw(zmq.ROUTER)
    endpoint = endpoint_at(HOST, router.bind_to_random_port(f"tcp://{HOST}"))
    reader.send(endpoint, b"hello")
    assert router.poll(PATIENCE_MS)
    route, _ = router.recv_multipart()
    router.send_multipart([route, b"one", b"two"])
    router.send_multipart([route, b"good"])
    answers = []
    while FromEndpoint(endpoint, b"good") not in answers:
        answers += receive(reader)
    assert len(answers) <= 2


@pytest.mark.parametrize(
    "greeting",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="HTTP"),
        pytest.param(b"\xff" * 100, id="all ones"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_an_endpoint_that_speaks_another_protocol_is_lost(
    reader: ZmqControl, greeting: bytes
) -> None:
    with socket.create_server((HOST, 0)) as stranger:
        endpoint = endpoint_at(HOST, stranger.getsockname()[1])
        reader.send(endpoint, b"hello")
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(greeting)
    (lost,) = receive(reader)
    assert isinstance(lost, Lost)
    assert lost.endpoint == endpoint
    assert lost.reason.split(":")[0] in ("connection closed", "handshake failed", "cannot connect")


def test_a_message_that_is_too_long_ends_the_connection(
    reader: ZmqControl, server: ZmqControl
) -> None:
    endpoint = listen(server, Bounds(message_bytes=1000))
    reader.send(endpoint, bytes(1000))
    assert len(asked(server).payload) == 1000
    reader.send(endpoint, bytes(1001))
    assert receive(reader) == [Lost(endpoint, "connection closed")]
    assert server.poll(0.02) == []


@pytest.mark.parametrize("direction", ["requests", "answers"])
def test_one_poll_returns_a_batch_at_most(
    reader: ZmqControl,
    server: ZmqControl,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH", 3)
    reader.send(endpoint, b"hello")
    route = asked(server).route
    for number in range(200):
        if direction == "requests":
            reader.send(endpoint, b"%d" % number)
        else:
            server.reply(route, b"%d" % number)
    listener = server if direction == "requests" else reader
    received: list[Received] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(received) < 200 and time.monotonic() < deadline:
        batch = listener.poll(1)
        assert len(batch) <= 3
        received += batch
    assert [item.payload for item in received if not isinstance(item, Lost)] == [
        b"%d" % number for number in range(200)
    ]


def test_a_wake_up_delays_no_message(
    reader: ZmqControl, server: ZmqControl, endpoint: Endpoint
) -> None:
    reader.send(endpoint, b"hello")
    asked(server)  # and so is let in
    reader.send(endpoint, b"hello")
    assert server._listener is not None
    assert server._listener.router.poll(PATIENCE_MS)
    server.wake()
    assert [item.payload for item in server.poll(0) if isinstance(item, FromPeer)] == [b"hello"]


@pytest.mark.parametrize(
    ("timeout_s", "shortest_s"),
    [
        pytest.param(0, 0, id="not at all"),
        pytest.param(0.001, 0.0009, id="a millisecond"),
        pytest.param(0.1, 0.09, id="a while"),
    ],
)
def test_a_poll_waits_as_long_as_it_is_asked_to(
    server: ZmqControl, timeout_s: float, shortest_s: float
) -> None:
    server.listen(HOST, 0)
    began = time.monotonic()
    assert server.poll(timeout_s) == []
    assert shortest_s <= time.monotonic() - began < PATIENCE_S


def test_a_wait_is_not_ended_by_a_connection(
    reader: ZmqControl, server: ZmqControl, endpoint: Endpoint
) -> None:
    answer = threading.Timer(0.3, lambda: server.reply(asked(server).route, b"here"))
    reader.send(endpoint, b"hello")
    answer.start()
    assert reader.poll(PATIENCE_S) == [FromEndpoint(endpoint, b"here")]
    answer.join()


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_a_link_tells_the_time_since_its_last_message(
    reader: ZmqControl, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    reader.send(endpoint, b"one")
    now = 101.0
    assert reader.links() == [Link(endpoint, sent=1, received=0, idle_s=1.0)]


def test_a_control_shows_its_port_and_links(
    reader: ZmqControl, server: ZmqControl, endpoint: Endpoint
) -> None:
    assert repr(reader) == "<ZmqControl: no port, 0 links>"
    reader.send(endpoint, b"hello")
    assert repr(reader) == "<ZmqControl: no port, 1 links>"
    assert repr(server) == f"<ZmqControl: port {port_of(endpoint)}, 0 links>"


def test_closing_leaves_nothing_open(make: Callable[[], ZmqControl]) -> None:
    before = open_files()
    server, reader = make(), make()
    endpoint = listen(server)
    reader.send(endpoint, b"hello")
    asked(server)
    reader.send(endpoint_at(HOST, 1), b"nobody")
    for control in (reader, server):
        control.close()
        assert control._context.closed
    assert open_files() == before
