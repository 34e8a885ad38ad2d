"""What strangers may send to the ports where engines talk to each other."""

import contextlib
import random
import resource
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
import zmq

from fuzz.decoders.samples import KINDS, sample
from harness.cluster.engines import HOST
from nixl_kv.cli.client import describe
from nixl_kv.ids import endpoint_at, new_claim, new_nonce
from nixl_kv.protocol.messages import Ask, encode
from suites.hostile.victims import Resources, Tally, Victims

HALF_OPEN: Final = 10_000
SPARE_FILES: Final = 300
FLOOD: Final = 10_000
SLOW: Final = 200
MEANWHILE: Final = 5
"""Ordinary requests."""
SETTLE_S: Final = 2.0
ANSWER_S: Final = 0.3
# ZMTP 3.1: signature, version, mechanism NULL, no server, filler.
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 1 + 31)
PROPERTIES: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY: Final = b"\x04" + len(PROPERTIES).to_bytes(1, "big") + PROPERTIES
HUGE_FRAME: Final = b"\x02" + (2**62).to_bytes(8, "big")
HANDSHAKE: Final = b"get_meta_msg"  # the in-tree connector's question for a rank's description


def ports(victims: Victims) -> list[int]:
    """Where prefill listens: the engine itself, and each of its ranks."""
    if victims.connector == "in-tree":
        return [victims.pair.prefill.side_port]
    return [victims.pair.prefill.side_port, *_rank_ports(victims)]


def _rank_ports(victims: Victims) -> list[int]:
    description = describe(endpoint_at(HOST, victims.pair.prefill.side_port))
    return [int(rank.endpoint.rsplit(":", 1)[1]) for rank in description.ranks]


def garbage(victims: Victims, tally: Tally) -> None:
    """Bytes that mean nothing, messages of other kinds, and questions for ranks there are not."""
    rng = random.Random(0)  # noqa: S311 - the same bytes every time
    payloads = [
        b"",
        b"\xc1",
        b"garbage" * 1000,
        rng.randbytes(5000),
        *map(encode, map(sample, KINDS)),
    ]
    meaningless: Sequence[object] = (
        (HANDSHAKE, 0),
        (HANDSHAKE, 99, 99),
        (HANDSHAKE, -1, "x"),
        "text",
        7,
        {},
    )
    payloads += map(msgspec.msgpack.encode, meaningless)
    for port in ports(victims):
        with _dealer(port) as dealer:
            for payload in payloads:
                dealer.send(payload)
                dealer.send_multipart([b"", payload])
            dealer.send_multipart([payloads[1]] * 10)
            time.sleep(SETTLE_S)
    tally.notes.append(f"{len(payloads)} payloads in two forms")


def half_open(victims: Victims, tally: Tally) -> None:
    """Connections that say nothing, thousands of them, while requests go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = min(HALF_OPEN, hard - SPARE_FILES)
    try:
        with _growth_noted(victims, tally) as watch, contextlib.ExitStack() as stack:
            accepted = [stack.enter_context(one) for one in _connections(ports(victims), wanted)]
            watch(f"with {len(accepted)} connections")
            _meanwhile(victims, tally)
            watch(f"{MEANWHILE} requests later")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def slow_senders(victims: Victims, tally: Tally) -> None:
    """A greeting byte by byte, frames of huge declared lengths, random bytes."""
    rng = random.Random(0)  # noqa: S311 - the same bytes every time
    with _growth_noted(victims, tally) as watch, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in _connections(ports(victims), 3 * SLOW)]
        slow, huge, random_ones = sockets[:SLOW], sockets[SLOW : 2 * SLOW], sockets[2 * SLOW :]
        _send_all(huge, GREETING + READY)
        for one in random_ones:
            _send_all([one], rng.randbytes(1000))
        time.sleep(ANSWER_S)  # before the engine's own READY, no frame may follow
        _send_all(huge, HUGE_FRAME)
        watch(f"with {len(sockets)} senders")
        for number in range(MEANWHILE):
            _send_all(slow, GREETING[number : number + 1])
            _meanwhile(victims, tally, 1)
        watch(f"{MEANWHILE} requests later")


def flood(victims: Victims, tally: Tally) -> None:
    """Valid questions for what is not there, as fast as they can be sent."""
    with _growth_noted(victims, tally), _dealer(ports(victims)[-1]) as dealer:
        for number, payload in enumerate(_questions(victims)):
            dealer.send_multipart(payload)
            if number % (FLOOD // MEANWHILE) == 0:
                _meanwhile(victims, tally, 1)
        answered = sum(1 for _ in _received(dealer))
        tally.notes.append(f"{answered} of {FLOOD} answered")


@contextlib.contextmanager
def _growth_noted(victims: Victims, tally: Tally) -> Iterator[Callable[[str], None]]:
    """Note what prefill's processes have more than before, when it is called and in the end."""
    before = Resources.of(victims.pair.prefill)

    def watch(when: str) -> None:
        tally.notes.append(f"{when} {Resources.of(victims.pair.prefill).growth(before)}")

    yield watch
    time.sleep(SETTLE_S)
    watch("in the end")


def _questions(victims: Victims) -> Iterator[list[bytes]]:
    """As the engines of this connector ask; ours for offers that never were."""
    if victims.connector == "in-tree":
        question = msgspec.msgpack.encode((HANDSHAKE, 0, 0))
        yield from ([b"", question] for _ in range(FLOOD))
        return
    (rank, *_) = describe(endpoint_at(HOST, victims.pair.prefill.side_port)).ranks
    common = sample(Ask, incarnation=rank.incarnation, readers=(0,))
    for _ in range(FLOOD):
        yield [encode(msgspec.structs.replace(common, nonce=new_nonce(), claim=new_claim()))]


def _received(dealer: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    while dealer.poll(int(SETTLE_S * 1000)):
        yield dealer.recv_multipart()


def _meanwhile(victims: Victims, tally: Tally, count: int = MEANWHILE) -> None:
    """Ordinary requests."""
    for _ in range(count):
        prompt = victims.prompt()
        victims.ask(tally, prompt, victims.ticket(prompt))


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
