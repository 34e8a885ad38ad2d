"""What strangers may send to the ports where engines talk to each other."""

import contextlib
import random
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
import zmq

from nixl_kv.cli.engines import ask as describe
from nixl_kv.protocol.messages import Ask, encode
from pd.engines import HOST
from pd.fuzz_samples import KINDS, sample
from pd.hostile_pair import Pair, Resources, Tally

HALF_OPEN = 10_000
SPARE_FILES = 300
FLOOD = 10_000
SLOW = 200
MEANWHILE = 5  # ordinary requests
SETTLE_S = 2.0
ANSWER_S = 0.3
# ZMTP 3.1: signature, version, mechanism NULL, no server, filler.
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 1 + 31)
PROPERTIES: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY: Final = b"\x04" + len(PROPERTIES).to_bytes(1, "big") + PROPERTIES
HUGE_FRAME: Final = b"\x02" + (2**62).to_bytes(8, "big")
HANDSHAKE: Final = b"get_meta_msg"  # the in-tree connector's question for a rank's description


def ports(pair: Pair) -> list[int]:
    """Where prefill listens: the engine itself, and each of its ranks."""
    if pair.connector == "in-tree":
        return [pair.prefill.side_port]
    return [pair.prefill.side_port, *_rank_ports(pair)]


def _rank_ports(pair: Pair) -> list[int]:
    description = describe(f"tcp://{HOST}:{pair.prefill.side_port}")
    return [int(rank.endpoint.rsplit(":", 1)[1]) for rank in description.ranks]


def garbage(pair: Pair, tally: Tally) -> None:
    """Bytes that mean nothing, messages of other kinds, and questions for ranks there are not."""
    rng = random.Random(0)  # noqa: S311 - the same bytes every time
    payloads = [
        b"",
        b"\xc1",
        b"garbage" * 1000,
        rng.randbytes(5000),
        *map(encode, map(sample, KINDS)),
    ]
    payloads += [
        msgspec.msgpack.encode(wrong)
        for wrong in ((HANDSHAKE, 0), (HANDSHAKE, 99, 99), (HANDSHAKE, -1, "x"), "text", 7, {})
    ]
    for port in ports(pair):
        with _dealer(port) as dealer:
            for payload in payloads:
                dealer.send(payload)
                dealer.send_multipart([b"", payload])
            dealer.send_multipart([payloads[1]] * 10)
            time.sleep(SETTLE_S)
    tally.notes.append(f"{len(payloads)} payloads in two forms")


def half_open(pair: Pair, tally: Tally) -> None:
    """Connections that say nothing, thousands of them, while requests go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = min(HALF_OPEN, hard - SPARE_FILES)
    try:
        with _grown(pair, tally) as watch, contextlib.ExitStack() as stack:
            made = [stack.enter_context(one) for one in _connections(ports(pair), wanted)]
            watch(f"with {len(made)} connections")
            _meanwhile(pair, tally)
            watch(f"{MEANWHILE} requests later")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def slow_senders(pair: Pair, tally: Tally) -> None:
    """A greeting byte by byte, frames of huge declared lengths, random bytes."""
    rng = random.Random(0)  # noqa: S311 - the same bytes every time
    with _grown(pair, tally) as watch, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in _connections(ports(pair), 3 * SLOW)]
        slow, huge, random_ones = sockets[:SLOW], sockets[SLOW : 2 * SLOW], sockets[2 * SLOW :]
        _send_all(huge, GREETING + READY)
        for one in random_ones:
            _send_all([one], rng.randbytes(1000))
        time.sleep(ANSWER_S)  # before the engine's own READY, no frame may follow
        _send_all(huge, HUGE_FRAME)
        watch(f"with {len(sockets)} senders")
        for number in range(MEANWHILE):
            _send_all(slow, GREETING[number : number + 1])
            _meanwhile(pair, tally, 1)
        watch(f"{MEANWHILE} requests later")


def flood(pair: Pair, tally: Tally) -> None:
    """Valid questions for what is not there, as fast as they can be sent."""
    with _grown(pair, tally), _dealer(ports(pair)[-1]) as dealer:
        for number, payload in enumerate(_questions(pair)):
            dealer.send_multipart(payload)
            if number % (FLOOD // MEANWHILE) == 0:
                _meanwhile(pair, tally, 1)
        answered = sum(1 for _ in _received(dealer))
        tally.notes.append(f"{answered} of {FLOOD} answered")


@contextlib.contextmanager
def _grown(pair: Pair, tally: Tally) -> Iterator[Callable[[str], None]]:
    """Note what prefill's processes have more than before, when it is called and in the end."""
    before = Resources.of(pair.prefill)

    def watch(when: str) -> None:
        tally.notes.append(f"{when} {Resources.of(pair.prefill).grown(before)}")

    yield watch
    time.sleep(SETTLE_S)
    watch("in the end")


def _questions(pair: Pair) -> Iterator[list[bytes]]:
    """As the engines of this connector ask; ours for offers that were never made."""
    if pair.connector == "in-tree":
        question = msgspec.msgpack.encode((HANDSHAKE, 0, 0))
        yield from ([b"", question] for _ in range(FLOOD))
        return
    (rank, *_) = describe(f"tcp://{HOST}:{pair.prefill.side_port}").ranks
    common = sample(Ask, incarnation=rank.incarnation, readers=(0,))
    for _ in range(FLOOD):
        unknown = {"nonce": secrets.token_hex(16), "claim": secrets.token_hex(16)}
        yield [encode(msgspec.structs.replace(common, **unknown))]


def _received(dealer: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    while dealer.poll(int(SETTLE_S * 1000)):
        yield dealer.recv_multipart()


def _meanwhile(pair: Pair, tally: Tally, count: int = MEANWHILE) -> None:
    """Ordinary requests."""
    for _ in range(count):
        prompt = pair.prompt()
        pair.ask(tally, prompt, pair.ticket(prompt))


@contextlib.contextmanager
def _dealer(port: int) -> Iterator["zmq.Socket[bytes]"]:
    """A ZMQ connection to an engine, of somebody who has no key."""
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.set_hwm(2 * FLOOD)
        dealer.linger = 0
        dealer.sndtimeo = int(SETTLE_S * 1000)
        dealer.connect(f"tcp://{HOST}:{port}")
        with dealer, contextlib.suppress(zmq.Again):
            yield dealer


def _connections(to: Sequence[int], count: int) -> Iterator[socket.socket]:
    """Spread over the ports; ends early where the engine takes no more."""
    with contextlib.suppress(OSError):
        for number in range(count):
            yield socket.create_connection((HOST, to[number % len(to)]), timeout=SETTLE_S)


def _send_all(sockets: Iterable[socket.socket], data: bytes) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):  # closed by the engine, which it may
            one.sendall(data)
