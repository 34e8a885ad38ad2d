"""The control plane with keys: who can talk to whom, and what strangers cost. Real ZMQ."""

import contextlib
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

from nixl_kv.config import Peers, _network
from nixl_kv.keys import Keys
from nixl_kv.transport import door
from nixl_kv.transport.control import Control, FromEndpoint, FromPeer, Lost, Received
from nixl_kv.transport.door import Bounds

HOST = "tcp://127.0.0.1"
KEYS, OTHER = Keys.derive(b"k" * 32), Keys.derive(b"o" * 32)
PATIENCE_S = 10.0
AT_ONCE_S = 1.5  # less than the time after which a handshake that stands still is given up

MakeControl = Callable[..., Control]


@pytest.fixture
def make() -> Iterator[MakeControl]:
    with contextlib.ExitStack() as made:

        def one(keys: Keys | None = KEYS, *hosts: str, peer_timeout_s: float = 2.0) -> Control:
            peers = Peers(tuple(map(_network, hosts))) if hosts else None
            control = Control(keys, peers=peers, peer_timeout_s=peer_timeout_s)
            made.callback(control.close)
            return control

        yield one


@pytest.fixture
def serve(make: MakeControl) -> Iterator[Callable[..., str]]:
    """A side that answers whoever it lets in, on a thread of its own as all of them."""
    with contextlib.ExitStack() as started:

        def one(*args: object, bounds: Bounds | None = None) -> str:
            control, stopping = make(*args), threading.Event()
            port = control.listen(HOST, 0, bounds)

            def main() -> None:
                while not stopping.is_set():
                    for item in control.poll(None):
                        assert isinstance(item, FromPeer)
                        control.reply(item.route, b"re: " + item.payload[:100])

            thread = threading.Thread(target=main)
            thread.start()
            started.callback(thread.join)
            started.callback(control.wake)
            started.callback(stopping.set)
            return f"{HOST}:{port}"

        yield one


def receive(control: Control, within_s: float = PATIENCE_S) -> Received:
    deadline = time.monotonic() + within_s
    while (left := deadline - time.monotonic()) > 0:
        for item in control.poll(left):
            return item
    raise AssertionError("nothing came")


def check_served(reader: Control, endpoint: str, words: bytes = b"hello") -> None:
    reader.send(endpoint, words)
    assert receive(reader) == FromEndpoint(endpoint, b"re: " + words[:100])


def test_a_round_trip(make: MakeControl, serve: Callable[..., str]) -> None:
    endpoint, reader = serve(), make()
    check_served(reader, endpoint)
    check_served(reader, endpoint, b"again")


def test_nothing_can_be_read_on_the_way(make: MakeControl, serve: Callable[..., str]) -> None:
    endpoint, reader = serve(), make()
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as middle:
        threading.Thread(target=_pass_on, args=(middle, endpoint, seen), daemon=True).start()
        between = f"{HOST}:{middle.getsockname()[1]}"
        check_served(reader, between, b"the secret of the prompt")
        reader.disconnect(between)
    assert len(seen) > 400
    assert b"secret" not in seen


def _pass_on(middle: socket.socket, endpoint: str, seen: bytearray) -> None:
    """One connection, both ways."""
    near, _ = middle.accept()
    far = socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1])))

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


NO_KEY_HERE = "handshake failed: perhaps it has a key"
OTHER_KEY = "handshake failed: perhaps it has another key, or none"


@pytest.mark.parametrize(
    ("server", "client", "reason"),
    [
        pytest.param(KEYS, OTHER, OTHER_KEY, id="another key"),
        pytest.param(KEYS, None, NO_KEY_HERE, id="no key here"),
        pytest.param(None, KEYS, OTHER_KEY, id="no key there"),
    ],
)
def test_who_has_another_key_is_lost_with_a_reason(
    make: MakeControl,
    serve: Callable[..., str],
    server: Keys | None,
    client: Keys | None,
    reason: str,
) -> None:
    endpoint, stranger, friend = serve(server), make(client), make(server)
    stranger.send(endpoint, b"let me in")
    assert receive(stranger, AT_ONCE_S) == Lost(endpoint, reason)
    check_served(friend, endpoint)


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
def test_hosts_that_are_no_peers_are_turned_away(
    make: MakeControl,
    serve: Callable[..., str],
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
    assert receive(reader, AT_ONCE_S) == refused


def test_the_client_key_alone_is_asked_for_too(
    serve: Callable[..., str],
) -> None:
    """Who knows the server's public key, but holds another client key."""
    endpoint = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        public, secret = zmq.curve_keypair()
        dealer.linger = 0
        dealer.curve_serverkey = zmq.curve_public(z85.encode(KEYS.server))
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        with dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
            dealer.connect(endpoint)
            dealer.send(b"let me in")
            assert monitor.poll(PATIENCE_S * 1000)
            dealer.disable_monitor()
        assert not dealer.poll(50)


def test_without_a_gatekeeper_nobody_is_let_in(make: MakeControl) -> None:
    server, reader = make(), make()
    endpoint = f"{HOST}:{server.listen(HOST, 0)}"
    assert server._entrance is not None
    server._poller.unregister(server._entrance.questions)
    server._entrance.questions.close()
    reader.send(endpoint, b"let me in")
    assert isinstance(receive(reader), Lost)
    assert server._router is not None
    assert not server._router.poll(0)


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
        pytest.param(b"\xff" * 10_000, id="all ones"),
    ],
)
def test_strangers_cost_nothing(
    make: MakeControl, serve: Callable[..., str], garbage: bytes
) -> None:
    endpoint, reader = serve(), make()
    for _ in range(20):
        stranger = socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1])))
        with stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(garbage)
    check_served(reader, endpoint)


def test_a_port_takes_messages_of_its_bound(make: MakeControl, serve: Callable[..., str]) -> None:
    """What encryption adds to a message counts as well: 33 bytes."""
    endpoint, reader = serve(bounds=Bounds(message_bytes=1000)), make()
    check_served(reader, endpoint, bytes(900))
    reader.send(endpoint, bytes(1001))
    assert receive(reader, AT_ONCE_S) == Lost(endpoint, "connection closed")


STOPPED = """
import os, signal
from nixl_kv.keys import Keys
from nixl_kv.transport.control import Control
control = Control(Keys.derive(b"k" * 32))
print(control.listen("tcp://127.0.0.1", 0), flush=True)
while True:
    for item in control.poll(None):
        control.reply(item.route, b"here")
        if item.payload == b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("peer_timeout_s", [0.4, 2.0])
def test_a_silent_peer_is_lost_within_its_time(make: MakeControl, peer_timeout_s: float) -> None:
    reader = make(peer_timeout_s=peer_timeout_s)
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            endpoint = f"{HOST}:{int(child.stdout.readline())}"
            reader.send(endpoint, b"hello")
            assert receive(reader) == FromEndpoint(endpoint, b"here")
            stopped = time.monotonic()
            reader.send(endpoint, b"stop")
            while not isinstance(receive(reader), Lost):
                pass
            assert time.monotonic() - stopped < peer_timeout_s + 0.5
        finally:
            child.kill()


def test_closing_leaves_nothing_open(make: MakeControl) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    control = Control(KEYS)
    control.listen(HOST, 0)
    control.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    del make


# Many connections

FLOOD = """
import socket, sys, time
greeting = bytes.fromhex(sys.argv[3])
flood = []
for _ in range(int(sys.argv[2])):
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
def flooded(endpoint: str, count: int, greeting: bytes) -> Iterator[None]:
    """From another process, whose descriptors are not ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    port = endpoint.rsplit(":", 1)[1]
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD, port, str(count), greeting.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert child.stdout is not None
        child.stdout.readline()
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
    serve: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    greeting: bytes,
) -> None:
    monkeypatch.setattr(door, "MAX_CONNECTIONS", 200)
    caplog.set_level(logging.DEBUG)
    endpoint, friend, newcomer = serve(), make(), make()
    check_served(friend, endpoint)
    memory, descriptors = resident_kib(), open_descriptors()
    most = 0
    with flooded(endpoint, 2000, greeting):
        until = time.monotonic() + 3
        while time.monotonic() < until:
            check_served(friend, endpoint)
            most = max(most, open_descriptors())
            time.sleep(0.02)
        # Who comes before the owner's next poll has counted them is let in as well.
        assert most - descriptors < 200 * 4
        assert resident_kib() - memory < 32 << 10
        deadline = time.monotonic() + 60
        newcomer.send(endpoint, b"hello")
        while isinstance(receive(newcomer), Lost):
            assert time.monotonic() < deadline, "never let in"
            newcomer.send(endpoint, b"hello")
        check_served(friend, endpoint)
    assert "takes no more for now" in caplog.text
    assert "takes connections again" in caplog.text
