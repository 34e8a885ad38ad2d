"""The control plane's sockets: real ZMQ, over loopback."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import zmq

from nixl_kv.errors import TransportError
from nixl_kv.transport import control as module
from nixl_kv.transport.control import (
    Control,
    FromEndpoint,
    FromPeer,
    Lost,
    Received,
)
from nixl_kv.transport.door import Bounds, is_local

HOST = "tcp://127.0.0.1"
RawSockets: TypeAlias = "Callable[[int], zmq.Socket[bytes]]"

PATIENCE_S = 10.0  # of a test before it fails; none waits so long when all is well


@pytest.fixture
def make() -> Iterator[Callable[[], Control]]:
    """Makes Controls, and closes those that the test has not."""
    made: list[Control] = []

    def one() -> Control:
        made.append(Control())
        return made[-1]

    yield one
    for control in made:
        if not control._context.closed:
            control.close()


@pytest.fixture
def reader(make: Callable[[], Control]) -> Control:
    return make()


@pytest.fixture
def server(make: Callable[[], Control]) -> Control:
    return make()


@pytest.fixture
def endpoint(server: Control) -> str:
    return f"{HOST}:{server.listen(HOST, 0)}"


@pytest.fixture
def raw() -> Iterator[RawSockets]:
    """Sockets of peers that do not keep to the rules."""
    with zmq.Context() as context, contextlib.ExitStack() as made:

        def one(kind: int) -> "zmq.Socket[bytes]":
            found = made.enter_context(context.socket(kind))
            found.setsockopt(zmq.LINGER, 0)
            return found

        yield one


def receive(control: Control, count: int = 1) -> list[Received]:
    """The next so many of whatever comes."""
    received: list[Received] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(received) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"only {received}"
        received += control.poll(left)
    return received


def asked(server: Control) -> FromPeer:
    (item,) = receive(server)
    assert isinstance(item, FromPeer)
    return item


def open_sockets(control: Control) -> list[zmq.Socket[bytes]]:
    return [found for found in control._context._sockets if not found.closed]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port on which nobody listens and that nobody else is given."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def restarted(make: Callable[[], Control], endpoint: str) -> Control:
    """Another process under a known endpoint, as soon as its port is free."""
    control, port = make(), int(endpoint.rsplit(":", 1)[1])
    deadline = time.monotonic() + PATIENCE_S
    while control._router is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(TransportError):
            control.listen(HOST, port)
    return control


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"hello", id="text"),
        pytest.param(b"", id="nothing"),
        pytest.param(bytes(range(256)) * 10_000, id="2.5 MB"),
    ],
)
def test_request_and_reply(reader: Control, server: Control, endpoint: str, payload: bytes) -> None:
    reader.send(endpoint, payload)
    request = asked(server)
    assert request.payload == payload
    server.reply(request.route, payload[::-1])
    assert receive(reader) == [FromEndpoint(endpoint, payload[::-1])]


def test_each_reader_gets_its_own_reply(
    make: Callable[[], Control], server: Control, endpoint: str
) -> None:
    readers = [make() for _ in range(3)]
    for number, reader in enumerate(readers):
        reader.send(endpoint, b"%d" % number)
    requests = receive(server, 3)
    assert len({request.route for request in requests if isinstance(request, FromPeer)}) == 3
    for request in requests:
        assert isinstance(request, FromPeer)
        server.reply(request.route, b"to " + request.payload)
    for number, reader in enumerate(readers):
        assert receive(reader) == [FromEndpoint(endpoint, b"to %d" % number)]


def test_one_reader_talks_to_several_servers(make: Callable[[], Control], reader: Control) -> None:
    servers = {f"{HOST}:{server.listen(HOST, 0)}": server for server in (make(), make())}
    for endpoint, server in servers.items():
        reader.send(endpoint, endpoint.encode())
        request = asked(server)
        assert request.payload == endpoint.encode()
        server.reply(request.route, b"from " + endpoint.encode())
    answers = receive(reader, 2)
    assert set(answers) == {FromEndpoint(e, b"from " + e.encode()) for e in servers}


def test_one_control_can_talk_to_itself(server: Control, endpoint: str) -> None:
    server.send(endpoint, b"question")
    server.reply(asked(server).route, b"answer")
    assert receive(server) == [FromEndpoint(endpoint, b"answer")]


def test_messages_keep_their_order_and_their_connection(
    reader: Control, server: Control, endpoint: str
) -> None:
    for number in range(500):
        reader.send(endpoint, b"%d" % number)
    requests = receive(server, 500)
    assert [item.payload for item in requests if isinstance(item, FromPeer)] == [
        b"%d" % number for number in range(500)
    ]
    assert len({item.route for item in requests if isinstance(item, FromPeer)}) == 1


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_ipv6(reader: Control, server: Control) -> None:
    endpoint = f"tcp://[::1]:{server.listen('tcp://[::1]', 0)}"
    reader.send(endpoint, b"hello")
    server.reply(asked(server).route, b"hello yourself")
    assert receive(reader) == [FromEndpoint(endpoint, b"hello yourself")]


def test_a_chosen_port_is_the_port(make: Callable[[], Control]) -> None:
    first = make()
    port = first.listen(HOST, 0)
    first.close()
    second = restarted(make, f"{HOST}:{port}")
    second.send(f"{HOST}:{port}", b"hello")
    assert asked(second).payload == b"hello"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        pytest.param("tcp://203.0.113.1", "^listening on tcp://203.0.113.1:any port: ", id="other"),
        pytest.param("nonsense", "^listening on nonsense:any port: ", id="no address"),
    ],
)
def test_addresses_that_are_not_of_this_machine(
    server: Control, address: str, message: str
) -> None:
    with pytest.raises(TransportError, match=message):
        server.listen(address, 0)
    assert open_sockets(server) == []
    assert server.listen(HOST, 0) > 0


def test_a_port_that_is_taken(make: Callable[[], Control], server: Control, endpoint: str) -> None:
    other, port = make(), int(endpoint.rsplit(":", 1)[1])
    with pytest.raises(TransportError, match=f"^listening on {HOST}:{port}: Address already in"):
        other.listen(HOST, port)
    assert open_sockets(other) == []
    other.send(endpoint, b"still here?")
    assert asked(server).payload == b"still here?"


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "udp://127.0.0.1:1"])
def test_endpoints_that_are_none(reader: Control, endpoint: str) -> None:
    for _ in range(2):
        with pytest.raises(TransportError, match=f"^sending to {endpoint}: "):
            reader.send(endpoint, b"hello")
    assert open_sockets(reader) == []
    assert reader.poll(0) == []


def test_connection_refused(reader: Control) -> None:
    with free_port() as port:
        endpoint = f"{HOST}:{port}"
        reader.send(endpoint, b"is there anybody")
        assert receive(reader) == [Lost(endpoint, "cannot connect")]
        assert open_sockets(reader) == []
        began = time.monotonic()
        assert reader.poll(0.25) == [], "told once"
        assert time.monotonic() - began > 0.2, "nothing of it is waited for any more"
        reader.send(endpoint, b"and now")
        assert receive(reader) == [Lost(endpoint, "cannot connect")]


def test_a_peer_that_closes_is_lost_and_may_come_back(
    make: Callable[[], Control], reader: Control, server: Control, endpoint: str
) -> None:
    reader.send(endpoint, b"hello")
    asked(server)
    server.close()
    assert receive(reader) == [Lost(endpoint, "connection closed")]
    assert open_sockets(reader) == []
    successor = restarted(make, endpoint)
    reader.send(endpoint, b"hello again")
    request = asked(successor)
    assert request.payload == b"hello again"
    successor.reply(request.route, b"who are you")
    assert receive(reader) == [FromEndpoint(endpoint, b"who are you")]


def test_only_the_lost_endpoint_is_lost(
    make: Callable[[], Control], reader: Control, server: Control, endpoint: str
) -> None:
    other = make()
    healthy = f"{HOST}:{other.listen(HOST, 0)}"
    for where, who in ((endpoint, server), (healthy, other)):
        reader.send(where, b"hello")
        asked(who)
    server.close()
    assert receive(reader) == [Lost(endpoint, "connection closed")]
    reader.send(healthy, b"still there?")
    assert asked(other).payload == b"still there?"


def test_what_came_before_the_loss_is_heard_first(
    reader: Control, server: Control, endpoint: str
) -> None:
    reader.send(endpoint, b"hello")
    server.reply(asked(server).route, b"last words")
    link = reader._links[endpoint]
    assert link.dealer.poll(PATIENCE_S * 1000)
    server.close()
    assert link.monitor.poll(PATIENCE_S * 1000)
    assert reader.poll(0) == [
        FromEndpoint(endpoint, b"last words"),
        Lost(endpoint, "connection closed"),
    ]


def test_nothing_for_a_dead_process_reaches_its_successor(
    make: Callable[[], Control], reader: Control, server: Control, endpoint: str
) -> None:
    """Not even when the reader, busy with something else, has not heard of the death."""
    reader.send(endpoint, b"for the first")
    asked(server)
    monitor = reader._links[endpoint].monitor
    server.close()
    assert monitor.poll(PATIENCE_S * 1000)
    reader.send(endpoint, b"for the dead")
    successor = restarted(make, endpoint)
    assert successor.poll(0.5) == []
    assert receive(reader) == [Lost(endpoint, "connection closed")]
    reader.send(endpoint, b"for the second")
    assert asked(successor).payload == b"for the second"


STOPPABLE = """
from nixl_kv.transport.control import Control
control = Control()
print(control.listen("tcp://127.0.0.1", 0), flush=True)
while True:
    for item in control.poll(None):
        control.reply(item.route, b"here")
"""


def test_a_stopped_process_is_lost_by_its_missing_heartbeats(reader: Control) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPABLE], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            endpoint = f"{HOST}:{int(child.stdout.readline())}"
            reader.send(endpoint, b"hello")
            assert receive(reader) == [FromEndpoint(endpoint, b"here")]
            child.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            assert receive(reader) == [Lost(endpoint, "connection closed")]
            assert time.monotonic() - stopped < 4
        finally:
            child.kill()


def test_disconnect_drops_what_is_queued(reader: Control, server: Control, endpoint: str) -> None:
    reader.send(endpoint, b"hello")
    route = asked(server).route
    reader.disconnect(endpoint)
    reader.disconnect(endpoint)
    reader.disconnect("tcp://127.0.0.1:1")
    assert open_sockets(reader) == []
    server.reply(route, b"too late")
    assert reader.poll(0.05) == [], "one's own wish is no loss"
    reader.send(endpoint, b"hello again")
    assert asked(server).payload == b"hello again"


def test_replies_to_nobody_are_dropped(reader: Control, server: Control, endpoint: str) -> None:
    server.reply(b"", b"nobody has this route")
    server.reply(b"stranger", b"nor this one")
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


def _is_routable(server: Control, route: bytes) -> bool:
    assert server._router is not None
    try:
        server._router.send_multipart([route, b""], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        return error.errno != zmq.EHOSTUNREACH
    return True


def test_a_reply_that_cannot_be_queued_is_dropped(server: Control, raw: RawSockets) -> None:
    dealer = raw(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(f"{HOST}:{server.listen(HOST, 0, Bounds(answers=2))}")
    dealer.send(b"hello")
    route = asked(server).route
    for _ in range(200):  # more than the kernel's buffers hold
        server.reply(route, bytes(1 << 20))
    assert server.poll(0) == []


def test_other_errors_of_a_reply_are_told(server: Control, endpoint: str) -> None:
    del endpoint
    assert server._router is not None
    server._router.close()
    with pytest.raises(TransportError, match=r"^replying: "):
        server.reply(b"route", b"payload")
    server._poller.unregister(server._router)
    server._router = None


def test_a_reply_without_a_router_is_dropped(reader: Control) -> None:
    reader.reply(b"route", b"payload")


def test_a_full_queue_is_an_error(
    make: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HIGH_WATER", 3)
    reader = make()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"{HOST}:{silent.getsockname()[1]}"
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
def test_requests_of_other_than_one_frame_are_nobodys(
    raw: RawSockets, server: Control, endpoint: str, frames: list[bytes]
) -> None:
    dealer = raw(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart(frames)
    dealer.send(b"good")
    assert asked(server).payload == b"good"


def test_an_answer_of_several_frames_does_no_harm(raw: RawSockets, reader: Control) -> None:
    router = raw(zmq.ROUTER)
    endpoint = f"{HOST}:{router.bind_to_random_port(HOST)}"
    reader.send(endpoint, b"hello")
    assert router.poll(PATIENCE_S * 1000)
    route, _ = router.recv_multipart()
    router.send_multipart([route, b"one", b"two"])
    router.send_multipart([route, b"good"])
    answers = []
    while FromEndpoint(endpoint, b"good") not in answers:
        answers += receive(reader)
    assert len(answers) <= 2


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), id="TLS"),
        pytest.param(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL", id="half ZMTP"),
        pytest.param(b"\xff" * 10_000, id="all ones"),
        pytest.param(bytes(10_000), id="all zeros"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_strangers_at_the_port_do_no_harm(
    reader: Control, server: Control, endpoint: str, garbage: bytes
) -> None:
    port = int(endpoint.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(garbage)
        reader.send(endpoint, b"good")
        assert asked(server).payload == b"good"
    assert server.poll(0.02) == []


@pytest.mark.parametrize(
    "greeting",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="HTTP"),
        pytest.param(b"\xff" * 100, id="all ones"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_stranger_that_answers_is_lost(reader: Control, greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        endpoint = f"{HOST}:{stranger.getsockname()[1]}"
        reader.send(endpoint, b"hello")
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(greeting)
    (lost,) = receive(reader)
    assert isinstance(lost, Lost)
    assert lost.endpoint == endpoint
    assert lost.reason.split(":")[0] in ("connection closed", "handshake failed", "cannot connect")


def test_a_message_that_is_too_long_ends_the_connection(reader: Control, server: Control) -> None:
    endpoint = f"{HOST}:{server.listen(HOST, 0, Bounds(message_bytes=1000))}"
    reader.send(endpoint, bytes(1000))
    assert len(asked(server).payload) == 1000
    reader.send(endpoint, bytes(1001))
    assert receive(reader) == [Lost(endpoint, "connection closed")]
    assert server.poll(0.02) == []


@pytest.mark.parametrize("direction", ["requests", "answers"])
def test_one_poll_takes_a_batch_of_each(
    reader: Control,
    server: Control,
    endpoint: str,
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


def test_a_wake_up_before_the_wait_ends_it(reader: Control) -> None:
    for _ in range(3):
        reader.wake()
    began = time.monotonic()
    assert reader.poll(PATIENCE_S) == []
    assert time.monotonic() - began < PATIENCE_S / 2
    began = time.monotonic()
    assert reader.poll(0.05) == [], "one wait takes all wake-ups"
    assert time.monotonic() - began > 0.04


def test_another_thread_ends_a_wait(reader: Control) -> None:
    waker = threading.Timer(0.05, reader.wake)
    began = time.monotonic()
    waker.start()
    assert reader.poll(PATIENCE_S) == []
    assert 0.04 < time.monotonic() - began < PATIENCE_S / 2
    waker.join()


def test_a_wake_up_ends_a_wait_without_end(reader: Control) -> None:
    polled = threading.Event()
    thread = threading.Thread(target=lambda: (reader.poll(None), polled.set()), daemon=True)
    thread.start()
    assert not polled.wait(0.05)
    reader.wake()
    assert polled.wait(PATIENCE_S)
    thread.join()


def test_a_wake_up_holds_no_message_back(reader: Control, server: Control, endpoint: str) -> None:
    reader.send(endpoint, b"hello")
    asked(server)  # and so is let in
    reader.send(endpoint, b"hello")
    assert server._router is not None
    assert server._router.poll(PATIENCE_S * 1000)
    server.wake()
    assert [item.payload for item in server.poll(0) if isinstance(item, FromPeer)] == [b"hello"]


@pytest.mark.parametrize(
    ("timeout_s", "shortest", "longest"),
    [
        pytest.param(0, 0, 0.5, id="not at all"),
        pytest.param(0.001, 0.0009, 0.5, id="a millisecond"),
        pytest.param(0.1, 0.09, 2, id="a while"),
    ],
)
def test_waiting(server: Control, timeout_s: float, shortest: float, longest: float) -> None:
    server.listen(HOST, 0)
    began = time.monotonic()
    assert server.poll(timeout_s) == []
    assert shortest <= time.monotonic() - began < longest


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_closing_leaves_nothing_open(make: Callable[[], Control]) -> None:
    before = open_files()
    server, reader = make(), make()
    endpoint = f"{HOST}:{server.listen(HOST, 0)}"
    reader.send(endpoint, b"hello")
    asked(server)
    reader.send(f"{HOST}:1", b"nobody")
    for control in (reader, server):
        control.close()
        assert control._context.closed
    assert open_files() == before


@pytest.mark.parametrize(
    ("host", "local"),
    [
        pytest.param("127.0.0.1", True, id="loopback"),
        pytest.param("127.1.2.3", True, id="all of the loopback net"),
        pytest.param("::1", has_ipv6(), id="IPv6 loopback"),
        pytest.param("203.0.113.1", False, id="an address for documentation"),
        pytest.param("2001:db8::1", False, id="an IPv6 address for documentation"),
        pytest.param("not an address", False, id="no address"),
        pytest.param("::zz", False, id="no IPv6 address"),
    ],
)
def test_is_local(host: str, local: bool) -> None:  # noqa: FBT001 - a table's column
    assert is_local(host) is local
