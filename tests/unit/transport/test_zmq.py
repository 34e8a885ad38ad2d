"""The control plane over ZMQ: real sockets, over loopback."""

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from nixl_kv.config import AllowedHosts
from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint, endpoint_at
from nixl_kv.keys import Keys
from nixl_kv.transport import ports
from nixl_kv.transport import zmq as module
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Lost, Proved, Received
from nixl_kv.transport.zmq import ZAP_DOMAIN, Gatekeeper, ZmqControl
from support.polling import hear_of_loss

HOST = "127.0.0.1"
RawSockets: TypeAlias = "Callable[[int], zmq.Socket[bytes]]"

KEYS, OTHER = Keys.derive(b"k" * 32), Keys.derive(b"o" * 32)
PATIENCE_S = 10.0  # of a test before it fails; none waits so long when all is well
PATIENCE_MS = 10_000


MakeControl = Callable[..., ZmqControl]
Serve = Callable[..., Endpoint]


@pytest.fixture
def make() -> Iterator[MakeControl]:
    """Makes controls, of this key and for all hosts where nothing else is said."""
    with contextlib.ExitStack() as stack:

        def new_control(
            keys: Keys | None = KEYS, *hosts: str, peer_timeout_s: float = 2.0
        ) -> ZmqControl:
            networks = tuple(map(ipaddress.ip_network, hosts))
            allowed = AllowedHosts(networks) if networks else None
            control = ZmqControl(keys, allowed=allowed, peer_timeout_s=peer_timeout_s)
            stack.callback(lambda: None if control._context.closed else control.close())
            return control

        yield new_control


@pytest.fixture
def reader(make: MakeControl) -> ZmqControl:
    return make(None)


@pytest.fixture
def server(make: MakeControl) -> ZmqControl:
    return make(None)


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


def receive(control: ZmqControl) -> list[Received]:
    """The next item."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := deadline - time.monotonic()) > 0:
        if received := control.poll(left):
            return received
    raise AssertionError("nothing came")


def next_of(control: ZmqControl) -> Received:
    return receive(control)[0]


def asked(server: ZmqControl) -> FromPeer:
    (item,) = receive(server)
    assert isinstance(item, FromPeer)
    return item


def open_sockets(control: ZmqControl) -> list[zmq.Socket[bytes]]:
    return [each for each in control._context._sockets if not each.closed]


def test_a_link_is_lost_after_its_last_message(
    reader: ZmqControl, raw: RawSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing it after the first batch would lose a grant in the second."""
    monkeypatch.setattr(module, "MAX_BATCH", 2)
    peer = raw(zmq.ROUTER)
    peer.setsockopt(zmq.LINGER, -1)  # it sends all before it closes
    endpoint = endpoint_at(HOST, peer.bind_to_random_port(f"tcp://{HOST}"))
    reader.send(endpoint, b"question")
    route, _ = peer.recv_multipart()
    answers = [b"%d" % number for number in range(5)]
    for answer in answers:
        peer.send_multipart([route, answer])
    peer.close()
    caller, until = reader._caller, time.monotonic() + PATIENCE_S
    assert caller is not None
    while not caller._lost and time.monotonic() < until:
        caller._watch()
    received: list[Received] = []
    while not any(isinstance(item, Lost) for item in received):
        received += receive(reader)
    *messages, lost = received
    assert messages == [FromEndpoint(endpoint, answer) for answer in answers]
    assert isinstance(lost, Lost)


def test_a_thousand_links_need_as_many_sockets_as_one(
    make: MakeControl, reader: ZmqControl
) -> None:
    """ZMQ has 1,023 sockets a context; here in two steps, as a test may open few files."""
    servers = {listen(server): server for server in (make(None) for _ in range(25))}
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


@pytest.mark.parametrize("host", ["203.0.113.1", "localhost", ""])
def test_listening_on_another_address_is_an_error(server: ZmqControl, host: str) -> None:
    with pytest.raises(TransportError, match=r"^listening on tcp://.*:0: "):
        server.listen(host, 0)
    assert open_sockets(server) == []
    assert server.listen(HOST, 0) > 0


@pytest.mark.parametrize("name", ["nonsense", "tcp://127.0.0.1", "udp://127.0.0.1:1"])
def test_sending_to_no_endpoint_is_an_error(reader: ZmqControl, name: str) -> None:
    endpoint = Endpoint(name)
    for _ in range(2):
        with pytest.raises(TransportError, match=f"^sending to {endpoint}: "):
            reader.send(endpoint, b"hello")
    assert reader.links() == []
    assert reader.poll(0) == []


def test_nothing_queued_for_a_dead_process_reaches_its_successor(
    make: MakeControl, reader: ZmqControl, server: ZmqControl, endpoint: Endpoint
) -> None:
    """Not even when the reader, busy with something else, has not heard of the death."""
    reader.send(endpoint, b"for the first")
    asked(server)
    server.close()
    hear_of_loss(reader, endpoint)
    reader.send(endpoint, b"for the dead")
    successor, deadline = make(None), time.monotonic() + PATIENCE_S
    while successor._listener is None:  # until the port is free
        assert time.monotonic() < deadline
        with contextlib.suppress(TransportError):
            successor.listen(HOST, port_of(endpoint))
    assert successor.poll(0.2) == []
    assert reader.poll(0) == [Lost(endpoint, "connection closed")]
    reader.send(endpoint, b"for the second")
    assert asked(successor).payload == b"for the second"


def test_a_reply_that_cannot_be_queued_is_dropped(server: ZmqControl, raw: RawSockets) -> None:
    dealer = raw(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(listen(server, Bounds(answers=2)))
    dealer.send(b"hello")
    route = asked(server).route
    for _ in range(200):  # more than the kernel's buffers hold
        server.reply(route, bytes(1 << 20))
    assert server.poll(0) == []


def test_a_full_queue_is_an_error(make: MakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HIGH_WATER", 3)
    reader = make(None)
    with socket.create_server((HOST, 0)) as silent:
        endpoint = endpoint_at(HOST, silent.getsockname()[1])
        for _ in range(3):
            reader.send(endpoint, b"hello")
        with pytest.raises(TransportError, match=f"^sending to {endpoint}: Resource temporarily"):
            reader.send(endpoint, b"once more")


@pytest.mark.parametrize("frames", [[b"one", b"two"], [b"", b"as a REQ"], [b""] * 4, [b"x"] * 1000])
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


@pytest.mark.parametrize("is_asked", [True, False], ids=["requests", "answers"])
def test_one_poll_returns_a_batch_at_most(
    reader: ZmqControl,
    server: ZmqControl,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_asked: bool,
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH", 3)
    reader.send(endpoint, b"hello")
    route = asked(server).route
    payloads = [b"%d" % number for number in range(200)]
    for payload in payloads:
        if is_asked:
            reader.send(endpoint, payload)
        else:
            server.reply(route, payload)
    received: list[Received] = []
    while len(received) < 200:
        batch = receive(server if is_asked else reader)
        assert len(batch) <= 3
        received += batch
    assert [item.payload for item in received if not isinstance(item, Lost)] == payloads


def test_a_watched_descriptor_ends_a_wait_while_it_is_readable() -> None:
    with contextlib.closing(ZmqControl()) as control:
        reader, writer = os.pipe()
        control.watch(reader)
        assert control.poll(0) == []
        timer = threading.Timer(0.05, os.write, (writer, b"x"))
        timer.start()
        begin = time.monotonic()
        assert control.poll(PATIENCE_S) == []
        assert time.monotonic() - begin < PATIENCE_S / 2
        assert control.poll(None) == [], "it is readable still"
        timer.join()
        os.read(reader, 1)
        assert control.poll(0.01) == []
    os.close(reader)
    os.close(writer)


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


def test_a_wait_is_not_ended_by_a_connection(
    reader: ZmqControl, server: ZmqControl, endpoint: Endpoint
) -> None:
    answer = threading.Timer(0.1, lambda: server.reply(asked(server).route, b"here"))
    reader.send(endpoint, b"hello")
    answer.start()
    assert reader.poll(PATIENCE_S) == [FromEndpoint(endpoint, b"here")]
    answer.join()


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("keys", [None, KEYS], ids=["no keys", "keys"])
def test_closing_leaves_nothing_open(keys: Keys | None) -> None:
    before = open_files()
    server, reader = ZmqControl(keys), ZmqControl(keys)
    endpoint = listen(server)
    reader.send(endpoint, b"hello")
    asked(server)
    reader.send(endpoint_at(HOST, 1), b"no listener")
    for control in (reader, server):
        control.close()
        assert control._context.closed
    assert open_files() == before


# With keys: who can talk to whom, and what strangers cost


@pytest.fixture
def serve(make: MakeControl) -> Iterator[Serve]:
    """Starts a side, on a thread of its own, that answers each peer that it admits."""
    with contextlib.ExitStack() as stack:

        def start(*args: object, bounds: Bounds | None = None) -> Endpoint:
            control, stopping = make(*args), threading.Event()
            port = control.listen(HOST, 0, bounds)

            def main() -> None:
                while not stopping.is_set():
                    for item in control.poll(None):
                        assert isinstance(item, FromPeer)
                        control.reply(item.route, b"re: " + item.payload[:100])

            thread = threading.Thread(target=main)
            thread.start()
            stack.callback(thread.join)
            stack.callback(control.wake)
            stack.callback(stopping.set)
            return endpoint_at(HOST, port)

        yield start


@pytest.fixture
def _long_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that comes in time does not come from a handshake's timeout."""
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 60.0)


def check_served(reader: ZmqControl, endpoint: Endpoint, words: bytes = b"hello") -> None:
    reader.send(endpoint, words)
    assert next_of(reader) == FromEndpoint(endpoint, b"re: " + words[:100])


@pytest.mark.usefixtures("_long_handshakes")
@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        pytest.param(KEYS, OTHER, "another key, or none", id="another key"),
        pytest.param(KEYS, None, "a key", id="no key here"),
        pytest.param(None, KEYS, "another key, or none", id="no key there"),
    ],
)
def test_an_endpoint_with_another_key_is_lost_with_a_reason(
    make: MakeControl, serve: Serve, server: Keys | None, client: Keys | None, words: str
) -> None:
    endpoint, stranger, friend = serve(server), make(client), make(server)
    with contextlib.suppress(TransportError):  # on a busy machine it is refused before it sends
        stranger.send(endpoint, b"let me in")
    reason = f"handshake failed: perhaps it has {words}"
    assert next_of(stranger) == Lost(endpoint, reason)
    check_served(friend, endpoint)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The greeting of a peer with a key (ZMTP 3.1)."""


def lost_to(reader: ZmqControl, greeting: bytes, *, closes: bool) -> Lost:
    """The news of a stranger that accepts a connection, greets, and then hangs or closes."""
    with socket.create_server((HOST, 0)) as stranger:
        endpoint = endpoint_at(HOST, stranger.getsockname()[1])
        reader.send(endpoint, b"hello")
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(greeting)
            if closes:
                connection.close()
            lost = next_of(reader)
    assert isinstance(lost, Lost)
    assert lost.endpoint == endpoint
    return lost


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 100, b""])
def test_an_endpoint_that_speaks_another_protocol_is_lost(
    reader: ZmqControl, greeting: bytes
) -> None:
    assert lost_to(reader, greeting, closes=True).reason in (
        "connection closed",
        "connection closed during the handshake",
        "cannot connect",
        "handshake failed: perhaps it has a key",  # it has read our greeting before it closes
    )


@pytest.mark.parametrize("keys", [KEYS, None], ids=["keys", "no keys"])
@pytest.mark.parametrize("greeting", [b"", GREETING], ids=["silent", "greets and hangs"])
def test_a_peer_that_does_not_answer_is_not_said_to_have_another_key(
    make: MakeControl, monkeypatch: pytest.MonkeyPatch, keys: Keys | None, greeting: bytes
) -> None:
    """A stopped process, a busy one, a slow network: the key is not their trouble."""
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.3)
    reason = lost_to(make(keys), greeting, closes=False).reason
    is_refused = bool(greeting) and keys is None  # by us: the peer asks for a key
    assert ("key" in reason) == is_refused
    assert reason.startswith("handshake failed" if is_refused else "no answer to the hand")


@pytest.mark.usefixtures("_long_handshakes")
@pytest.mark.parametrize("keys", [KEYS, None], ids=["keys", "no keys"])
@pytest.mark.parametrize(
    ("hosts", "is_let_in"),
    [
        pytest.param(("10.0.0.0/8", "127.0.0.1"), True, id="one of two networks"),
        pytest.param(("10.0.0.0/8",), False, id="another network"),
        pytest.param(("::1",), False, id="another family"),
    ],
)
def test_only_allowed_hosts_are_let_in(
    make: MakeControl, serve: Serve, keys: Keys | None, hosts: tuple[str, ...], *, is_let_in: bool
) -> None:
    endpoint, reader = serve(keys, *hosts), make(keys)
    if is_let_in:
        check_served(reader, endpoint)
    else:
        reader.send(endpoint, b"let me in")
        reason = "refused: this host is not among its peers"
        assert next_of(reader) == Lost(endpoint, reason)


def test_a_stranger_with_the_servers_public_key_is_not_let_in(serve: Serve) -> None:
    endpoint = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        public, secret = zmq.curve_keypair()
        dealer.linger = 0
        dealer.curve_serverkey = zmq.curve_public(z85.encode(KEYS.server))
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        with dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
            dealer.connect(endpoint)
            with contextlib.suppress(zmq.Again):  # if it was refused, the peer has gone
                dealer.send(b"let me in", zmq.NOBLOCK)
            assert monitor.poll(PATIENCE_MS)
            dealer.disable_monitor()
        assert not dealer.poll(50)


@pytest.mark.usefixtures("_long_handshakes")
def test_a_message_over_the_ports_bound_ends_its_connection(
    make: MakeControl, serve: Serve
) -> None:
    """The 33 bytes that encryption adds to a message count as well."""
    endpoint, reader = serve(bounds=Bounds(message_bytes=1000)), make()
    check_served(reader, endpoint, bytes(900))
    reader.send(endpoint, bytes(1001))
    assert next_of(reader) == Lost(endpoint, "connection closed")


STOPPED = """
import os, signal
from nixl_kv.keys import Keys
from nixl_kv.transport.zmq import ZmqControl
control = ZmqControl(Keys.derive(b"k" * 32))
print(control.listen("127.0.0.1", 0), flush=True)
while True:
    for item in control.poll(None):
        control.reply(item.route, b"here")
        if item.payload == b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_silent_peer_is_lost_within_the_time_that_is_chosen(make: MakeControl) -> None:
    reader = make(peer_timeout_s=0.4)
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            endpoint = endpoint_at(HOST, int(child.stdout.readline()))
            reader.send(endpoint, b"hello")
            assert next_of(reader) == FromEndpoint(endpoint, b"here")
            stopped = time.monotonic()
            reader.send(endpoint, b"stop")
            while (item := next_of(reader)) == FromEndpoint(endpoint, b"here"):
                pass
            assert item == Lost(endpoint, "connection closed")
            assert time.monotonic() - stopped < 1.4, "with the default it is at least 1.5 s"
        finally:
            child.kill()


@pytest.mark.parametrize("host", [HOST, "::1"])
@pytest.mark.parametrize("keys", [KEYS, None], ids=["with a key", "without"])
def test_a_peer_that_proved_no_key_is_named_by_its_address(
    make: MakeControl, keys: Keys | None, host: str
) -> None:
    server, friend = make(keys), make(keys)
    try:
        endpoint = endpoint_at(host, server.listen(host, 0))
    except TransportError:
        pytest.skip("no IPv6 here")
    friend.send(endpoint, b"hello")
    item = asked(server)
    assert item.payload == b"hello"
    assert item.proved is (Proved.ENGINE_KEY if keys else Proved.NO_KEY)
    assert item.address == ("" if keys else host)
    server.reply(item.route, b"hello yourself")
    assert next_of(friend) == FromEndpoint(endpoint, b"hello yourself")


def test_readers_that_take_turns_are_all_served(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten at once; each leaves when it is served, and the others wait for room."""
    monkeypatch.setattr(ports, "MAX_CONNECTIONS", 8)
    endpoint = serve(None)
    with zmq.Context() as context:
        for _ in range(2):
            waiting = [context.socket(zmq.DEALER) for _ in range(10)]
            for reader in waiting:
                reader.linger = 0
                reader.connect(endpoint)
                reader.send(b"hello")
            deadline = time.monotonic() + PATIENCE_S
            while waiting and time.monotonic() < deadline:
                for reader in [each for each in waiting if each.poll(10)]:
                    assert reader.recv() == b"re: hello"
                    reader.close()
                    waiting.remove(reader)
            for reader in waiting:
                reader.close()
            assert not waiting, "they were never let in"


# A service of another kind

FOREIGN_SERVICE = """
import socket, threading
from nixl_kv.errors import TransportError
from nixl_kv.ids import endpoint_at
from nixl_kv.transport.zmq import ZmqControl

server = socket.create_server(("127.0.0.1", 0), backlog=1000)
endpoint = endpoint_at("127.0.0.1", server.getsockname()[1])

def greet():
    while True:
        connection, _ = server.accept()
        connection.sendall(b"\\x01\\x00\\x03\\x00ab")
        threading.Timer(0.05, connection.close).start()

threading.Thread(target=greet, daemon=True).start()
for number in range(400):
    control = ZmqControl()
    try:
        control.send(endpoint, b"question")
    except TransportError:
        pass  # it was refused at once
    control.poll(number % 20 / 5000)
    control.disconnect(endpoint)
    control.close()
print("alive")
"""
"""A service whose first bytes look like ZMQ's first protocol, which sent a name at once. ZMQ ends
the process if that name comes while its socket goes."""


def test_a_service_of_another_kind_does_not_end_the_process() -> None:
    command = [sys.executable, "-c", FOREIGN_SERVICE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.returncode) == ("alive\n", 0), ended.stderr


# The gatekeeper: who is let in, from the frames in which ZMQ asks

CLIENT_KEY, TOOLS_KEY, STRANGERS_KEY = b"k" * 32, b"t" * 32, b"o" * 32


ZAP_QUESTION = {"route": b"route", "empty": b"", "version": b"1.0", "number": b"7"}
ZAP_QUESTION |= {"domain": ZAP_DOMAIN, "address": b"10.0.0.1", "identity": b""}
ZAP_QUESTION |= {"mechanism": b"CURVE", "key": CLIENT_KEY}


def question(**changed: Any) -> list[bytes]:
    return [value for value in (ZAP_QUESTION | changed).values() if value is not None]


CLIENTS = {CLIENT_KEY: Proved.ENGINE_KEY, TOOLS_KEY: Proved.TOOLS_KEY}
WITH_KEY = Gatekeeper(CLIENTS, lambda host: host == "10.0.0.1")
WITHOUT = Gatekeeper({}, lambda host: host == "10.0.0.1")
NULL = {"mechanism": b"NULL", "key": None}


@pytest.mark.parametrize(
    ("keeper", "changed", "status"),
    [
        pytest.param(WITH_KEY, {}, b"engine", id="the key"),
        pytest.param(WITH_KEY, {"key": TOOLS_KEY}, b"tools", id="the tools' key"),
        pytest.param(WITH_KEY, {"more": TOOLS_KEY}, b"400", id="both keys"),
        pytest.param(WITH_KEY, {"key": STRANGERS_KEY}, b"400", id="another key"),
        pytest.param(WITH_KEY, {"key": None}, b"400", id="no key"),
        pytest.param(WITH_KEY, {"more": CLIENT_KEY}, b"400", id="two keys"),
        pytest.param(WITH_KEY, {"address": b"10.0.0.2"}, b"400", id="another host"),
        pytest.param(WITH_KEY, {"address": b""}, b"400", id="no host"),
        pytest.param(WITH_KEY, {"address": b"\xff"}, b"400", id="no text"),
        pytest.param(WITH_KEY, NULL, b"400", id="no mechanism"),
        pytest.param(WITH_KEY, {"mechanism": b"PLAIN"}, b"400", id="another mechanism"),
        pytest.param(WITH_KEY, {"domain": b"other"}, b"400", id="another domain"),
        pytest.param(WITH_KEY, {"version": b"2.0"}, b"400", id="another version"),
        pytest.param(WITHOUT, NULL, b"", id="no keys"),
        pytest.param(WITHOUT, {**NULL, "address": b"10.0.0.2"}, b"400", id="nor that host"),
        pytest.param(WITHOUT, {}, b"400", id="a key that is not wanted"),
    ],
)
def test_who_is_let_in(keeper: Gatekeeper, changed: dict[str, Any], status: bytes) -> None:
    """`status` is the user that ZMQ hands on with each message, or 400."""
    told = [b"400", b"not admitted", b""] if status == b"400" else [b"200", b"OK", status]
    expected = [b"route", b"", b"1.0", b"7", *told, b""]
    assert keeper.answer(question(**changed)) == expected


@given(frames=st.lists(st.binary(max_size=8), max_size=12))
def test_no_frames_raise_or_are_let_in(frames: list[bytes]) -> None:
    for keeper in (WITH_KEY, WITHOUT):
        answer = keeper.answer(frames)
        assert answer is None or answer[4] == b"400"
