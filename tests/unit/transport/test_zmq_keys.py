"""The control plane with keys: who can talk to whom, and what strangers cost. Real ZMQ."""

import contextlib
import ipaddress
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from nixl_kv.config import AllowedHosts
from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint, endpoint_at
from nixl_kv.keys import Keys
from nixl_kv.transport import ports
from nixl_kv.transport import zmq as zmq_control
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Lost, Received
from nixl_kv.transport.zmq import ZmqControl

HOST = "127.0.0.1"
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
            stack.callback(control.close)
            return control

        yield new_control


@pytest.fixture
def serve(make: MakeControl) -> Iterator[Serve]:
    """Starts a side, on a thread of its own, that answers whoever it lets in."""
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
    """What is reported in time is not reported because a handshake timed out."""
    monkeypatch.setattr(zmq_control, "CONNECT_TIMEOUT_MS", 60_000)


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.rsplit(":", 1)[1])


def receive(control: ZmqControl) -> Received:
    deadline = time.monotonic() + PATIENCE_S
    while (left := deadline - time.monotonic()) > 0:
        for item in control.poll(left):
            return item
    raise AssertionError("nothing came")


def check_served(reader: ZmqControl, endpoint: Endpoint, words: bytes = b"hello") -> None:
    reader.send(endpoint, words)
    assert receive(reader) == FromEndpoint(endpoint, b"re: " + words[:100])


def test_with_one_key_both_sides_talk(make: MakeControl, serve: Serve) -> None:
    endpoint, reader = serve(), make()
    check_served(reader, endpoint)
    check_served(reader, endpoint, b"again")


def test_nothing_can_be_read_on_the_way(make: MakeControl, serve: Serve) -> None:
    endpoint, reader = serve(), make()
    seen = bytearray()
    with socket.create_server((HOST, 0)) as middle:
        threading.Thread(target=_pass_on, args=(middle, endpoint, seen), daemon=True).start()
        between = endpoint_at(HOST, middle.getsockname()[1])
        check_served(reader, between, b"the secret of the prompt")
        reader.disconnect(between)
    assert len(seen) > 400
    assert b"secret" not in seen


def _pass_on(middle: socket.socket, endpoint: Endpoint, seen: bytearray) -> None:
    """One connection, both ways."""
    near, _ = middle.accept()
    far = socket.create_connection((HOST, port_of(endpoint)))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=pump, args=(far, near))
    back.start()
    pump(near, far)
    back.join()
    near.close()
    far.close()


NO_KEY_HERE = "handshake failed: perhaps it has a key, or hangs"
OTHER_KEY = "handshake failed: perhaps it has another key, or none, or hangs"


@pytest.mark.usefixtures("_long_handshakes")
@pytest.mark.parametrize(
    ("server", "client", "reason"),
    [
        pytest.param(KEYS, OTHER, OTHER_KEY, id="another key"),
        pytest.param(KEYS, None, NO_KEY_HERE, id="no key here"),
        pytest.param(None, KEYS, OTHER_KEY, id="no key there"),
    ],
)
def test_an_endpoint_with_another_key_is_lost_with_a_reason(
    make: MakeControl, serve: Serve, server: Keys | None, client: Keys | None, reason: str
) -> None:
    endpoint, stranger, friend = serve(server), make(client), make(server)
    stranger.send(endpoint, b"let me in")
    assert receive(stranger) == Lost(endpoint, reason)
    check_served(friend, endpoint)


@pytest.mark.usefixtures("_long_handshakes")
@pytest.mark.parametrize("keys", [KEYS, None], ids=["keys", "no keys"])
@pytest.mark.parametrize(
    ("hosts", "admitted"),
    [
        pytest.param(("127.0.0.0/8",), True, id="its network"),
        pytest.param(("10.0.0.0/8", "127.0.0.1"), True, id="one of two"),
        pytest.param(("10.0.0.0/8",), False, id="another network"),
        pytest.param(("::1",), False, id="another family"),
    ],
)
def test_only_allowed_hosts_are_let_in(
    make: MakeControl,
    serve: Serve,
    keys: Keys | None,
    hosts: tuple[str, ...],
    admitted: bool,  # noqa: FBT001
) -> None:
    endpoint, reader = serve(keys, *hosts), make(keys)
    if admitted:
        check_served(reader, endpoint)
        return
    reader.send(endpoint, b"let me in")
    refused = Lost(endpoint, "refused: this host is not among its peers")
    assert receive(reader) == refused


def test_a_stranger_with_the_servers_public_key_is_not_let_in(serve: Serve) -> None:
    endpoint = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        public, secret = zmq.curve_keypair()
        dealer.linger = 0
        dealer.curve_serverkey = zmq.curve_public(z85.encode(KEYS.server))
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        with dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
            dealer.connect(endpoint)
            with contextlib.suppress(zmq.Again):  # if it was refused, nobody is there to send to
                dealer.send(b"let me in", zmq.NOBLOCK)
            assert monitor.poll(PATIENCE_MS)
            dealer.disable_monitor()
        assert not dealer.poll(50)


def test_without_a_gatekeeper_nobody_is_let_in(make: MakeControl) -> None:
    server, reader = make(), make()
    endpoint = endpoint_at(HOST, server.listen(HOST, 0))
    assert server._listener is not None
    server._poller.unregister(server._listener.questions)
    server._listener.questions.close()
    reader.send(endpoint, b"let me in")
    assert isinstance(receive(reader), Lost)
    assert not server._listener.router.poll(0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
CURVE_GREETING = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), id="TLS"),
        pytest.param(GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x05READY", id="NULL"),
        pytest.param(CURVE_GREETING, id="a greeting and no more"),
        pytest.param(CURVE_GREETING + b"\x04\xc8\x05HELLO" + bytes(194), id="an empty HELLO"),
        pytest.param(CURVE_GREETING + b"\x04\x26\x05READY" + bytes(32), id="READY at once"),
        pytest.param(CURVE_GREETING + b"\x00\x05hello", id="a message at once"),
        pytest.param(CURVE_GREETING + b"\x06" + b"\xff" * 8, id="a command without end"),
        pytest.param(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL", id="half ZMTP"),
        pytest.param(b"\xff" * 10_000, id="all ones"),
        pytest.param(bytes(10_000), id="all zeros"),
        pytest.param(b"", id="nothing"),
    ],
)
@pytest.mark.parametrize("keys", [KEYS, None], ids=["keys", "no keys"])
def test_garbage_does_no_harm(
    make: MakeControl, serve: Serve, keys: Keys | None, garbage: bytes
) -> None:
    endpoint, reader = serve(keys), make(keys)
    for _ in range(20):
        stranger = socket.create_connection((HOST, port_of(endpoint)))
        with stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(garbage)
    check_served(reader, endpoint)


@pytest.mark.usefixtures("_long_handshakes")
def test_a_message_over_the_ports_bound_ends_its_connection(
    make: MakeControl, serve: Serve
) -> None:
    """What encryption adds to a message counts as well: 33 bytes."""
    endpoint, reader = serve(bounds=Bounds(message_bytes=1000)), make()
    check_served(reader, endpoint, bytes(900))
    reader.send(endpoint, bytes(1001))
    assert receive(reader) == Lost(endpoint, "connection closed")


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
            assert receive(reader) == FromEndpoint(endpoint, b"here")
            stopped = time.monotonic()
            reader.send(endpoint, b"stop")
            while (item := receive(reader)) == FromEndpoint(endpoint, b"here"):
                pass
            assert item == Lost(endpoint, "connection closed")
            assert time.monotonic() - stopped < 1.4, "with the default it is at least 1.5 s"
        finally:
            child.kill()


def test_closing_leaves_nothing_open(make: MakeControl) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    control = ZmqControl(KEYS)
    control.listen(HOST, 0)
    control.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    del make


# One connection

MIB = 1 << 20
NULL_GREETING = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
NULL_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
UNFINISHED = b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB)
"""A frame of a mebibyte that says that another one follows."""
MOST_SENT = 256


def num_sent(endpoint: Endpoint, opening: bytes, between: Callable[[], object]) -> int:
    """Mebibytes of one unfinished message that a stranger gets rid of."""
    family = socket.AF_INET6 if "[" in endpoint else socket.AF_INET
    with socket.socket(family) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(("::1" if family == socket.AF_INET6 else HOST, port_of(endpoint)))
        stranger.sendall(opening)
        stranger.setblocking(False)  # noqa: FBT003
        let_in, deadline = b"", time.monotonic() + PATIENCE_S
        while b"READY" not in let_in and time.monotonic() < deadline:
            between()
            try:
                data = stranger.recv(1000)
            except BlockingIOError:
                continue
            except ConnectionError:
                return 0
            if not data:
                break
            let_in += data
        stranger.settimeout(PATIENCE_S)
        for sent in range(MOST_SENT):
            try:
                stranger.sendall(UNFINISHED)
            except OSError:
                return sent
            between()
    return MOST_SENT


@pytest.mark.parametrize("host", [HOST, "::1"])
@pytest.mark.parametrize("keys", [KEYS, None], ids=["with a key", "without"])
def test_who_has_proved_no_key_is_named_by_its_address(
    make: MakeControl, keys: Keys | None, host: str
) -> None:
    server, friend = make(keys), make(keys)
    try:
        endpoint = endpoint_at(host, server.listen(host, 0))
    except TransportError:
        pytest.skip("no IPv6 here")
    friend.send(endpoint, b"hello")
    item = receive(server)
    assert isinstance(item, FromPeer)
    assert item.payload == b"hello"
    assert item.stranger == ("" if keys else host)


@pytest.mark.parametrize("opening", [NULL_GREETING + NULL_READY, CURVE_GREETING])
def test_without_the_key_no_frame_gets_past_the_handshake(
    make: MakeControl, serve: Serve, opening: bytes
) -> None:
    """What is sent meanwhile stands in the kernel's buffers."""
    endpoint, friend = serve(), make()
    check_served(friend, endpoint)
    memory = resident_kib()
    assert num_sent(endpoint, opening, lambda: time.sleep(0.001)) < 32
    assert resident_kib() - memory < 16 << 10
    check_served(friend, endpoint)


# Many connections


@pytest.mark.parametrize(
    ("readers", "limit"),
    [
        pytest.param(1100, 1000, id="more than fit in all"),
        pytest.param(20, 8, id="more than fit at once"),
    ],
)
def test_readers_that_take_turns_are_all_served(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, readers: int, limit: int
) -> None:
    """Ten at once; each leaves when it is served, and those for whom there is no room wait."""
    monkeypatch.setattr(ports, "MAX_CONNECTIONS", limit)
    endpoint = serve(None)
    with zmq.Context() as context:
        for _ in range(0, readers, 10):
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


FLOOD = """
import socket, sys, time
greeting = bytes.fromhex(sys.argv[3])
flood = []
for number in range(int(sys.argv[2])):
    if number % 50 == 0:
        print("connecting", flush=True)
        sys.stdin.readline()
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", int(sys.argv[1])))
    flood.append(one)
deadline = time.monotonic() + 60
waiting = list(flood)
print("flooding", flush=True)
while waiting and time.monotonic() < deadline:
    for one in list(waiting):
        try:
            one.sendall(greeting)
        except BlockingIOError:
            continue
        except OSError:
            pass
        waiting.remove(one)
    time.sleep(0.01)
sys.stdin.read()
"""


@contextlib.contextmanager
def flooded(
    endpoint: Endpoint, count: int, greeting: bytes, between: Callable[[], None]
) -> Iterator[None]:
    """From another process, whose descriptors are not ours; `between` batches of 50."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    port = str(port_of(endpoint))
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD, port, str(count), greeting.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert child.stdin is not None
        assert child.stdout is not None
        while child.stdout.readline() == b"connecting\n":
            between()
            child.stdin.write(b"\n")
            child.stdin.flush()
        try:
            yield
        finally:
            child.kill()


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("greeting", [b"\xff", CURVE_GREETING], ids=["one byte", "a greeting"])
def test_many_half_open_connections_cost_little_and_hold_nobody_up(
    make: MakeControl,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    greeting: bytes,
) -> None:
    monkeypatch.setattr(ports, "MAX_CONNECTIONS", 200)
    caplog.set_level(logging.DEBUG)
    endpoint, friend, newcomer = serve(), make(), make()
    check_served(friend, endpoint)
    memory, descriptors = resident_kib(), open_descriptors()
    most = 0
    with flooded(endpoint, 2000, greeting, lambda: check_served(friend, endpoint)):
        until = time.monotonic() + 3
        while time.monotonic() < until:
            check_served(friend, endpoint)
            most = max(most, open_descriptors())
            time.sleep(0.02)
        # Connections that come before the owner's next poll has counted them are let in as well.
        assert most - descriptors < 200 * 4
        assert resident_kib() - memory < 32 << 10
        deadline = time.monotonic() + 60
        newcomer.send(endpoint, b"hello")
        while isinstance(receive(newcomer), Lost):
            assert time.monotonic() < deadline, "never let in"
            newcomer.send(endpoint, b"hello")
        check_served(friend, endpoint)
    assert "accepts no more for now" in caplog.text
