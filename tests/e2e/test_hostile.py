"""Hostile values in clients' requests, and hostile messages of strangers to the engines' ports.

After each test both engines live, and decode reads the KV of an ordinary request. More tickets that
do not hold are in test_tickets.py and test_keys.py, clients that hang up in test_faults.py.
"""

import itertools
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http import HTTPStatus

import httpx
import msgspec
import psutil
import pytest
import zmq

from fuzz.decoders.samples import KINDS, sample
from harness.cluster.answers import Question
from harness.cluster.client import COMPLETIONS, Answer, RefusedError, is_healthy
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, Engine
from harness.cluster.metrics import LOADS, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.tickets import changed, values
from harness.cluster.waiting import wait_until
from nixl_kv.cli.client import describe
from nixl_kv.ids import endpoint_at, new_claim, new_nonce
from nixl_kv.protocol.messages import Ask, Description, encode
from support.engines import started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.hostile]

TIMEOUT_S = 25.0  # of a request: one that takes longer hangs
HELD_S = 6
ANSWER = 16
ELSEWHERE = "127.0.0.2"  # no peer of the engines
BAD_VALUES: tuple[object, ...] = (  # 100: fewer tokens than the prompt has
    *(-1, 100, 2**63, 1e308, "", "x" * 300, None, True),
    *([], [[[[]]]], {"a": {"b": [1]}}),
)
# vLLM's front end reads up to 990 levels, and pickle 490.
DEPTHS = (50, 100, 200, 300, 400, 480, 500, 600, 800, 1000, 10_000)
NESTINGS = (
    ("[", "", "]"),
    ('{"a":', "1", "}"),
    ('{"type":"object","properties":{"a":', "{}", "}}"),
)
GENERATE = "/inference/v1/generate"
DEEP_PLACES = {  # where a request may have a value of any depth: the path, and its fields
    "a field": (COMPLETIONS, '"kv_transfer_params": {"x": DEEP}'),
    "a field of a request to offer": (
        COMPLETIONS,
        '"kv_transfer_params": {"do_remote_decode": true, "remote_host": DEEP}',
    ),
    "the ticket": (
        COMPLETIONS,
        '"kv_transfer_params": {"do_remote_prefill": true, "nixl_kv_ticket": DEEP}',
    ),
    "an address": (
        COMPLETIONS,
        '"kv_transfer_params": {"remote_block_ids": [[1]], "remote_engine_id": DEEP}',
    ),
    "another connector's": (COMPLETIONS, '"ec_transfer_params": {"x": DEEP}'),
    "arguments": (GENERATE, '"sampling_params": {"max_tokens": 1, "extra_args": {"x": DEEP}}'),
    "a schema": (COMPLETIONS, '"structured_outputs": {"json": DEEP}'),
}
EXPECTED = (HTTPStatus.OK, HTTPStatus.BAD_REQUEST)
OF_VLLM = (*EXPECTED, HTTPStatus.INTERNAL_SERVER_ERROR)  # of its front end alone
FLOOD = 10_000
SLOW = 200
MEANWHILE = 5  # ordinary requests
SETTLE_S = 2.0
MOST_BYTES = 96 << 20
"""Prefill may grow by this. Peers without a key can make each rank buffer 64 MiB."""
# ZMTP 3.1: signature, version, mechanism NULL, no server, filler.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 1 + 31)
PROPERTIES = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = b"\x04" + len(PROPERTIES).to_bytes(1, "big") + PROPERTIES
HUGE_FRAME = b"\x02" + (2**62).to_bytes(8, "big")
HANDSHAKE = b"get_meta_msg"  # with which vLLM's own connector asks for a rank's description
SEEDS = itertools.count(30_000)


def new_prompt() -> str:
    return random_prompt(150, next(SEEDS))


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[list[Engine]]:
    """Without a key: more of what strangers send gets past the handshake and the MAC."""
    specs = pair_specs(
        ensure_tiny_model(),
        suffix="-hostile",
        connector_config={
            "insecure": True,
            "offer_ttl_s": HELD_S,
            "lease_s": HELD_S,
            "peers": [f"{HOST}/32"],
        },
        num_blocks=24,  # blocks are soon used again
        kv_cache_bytes=64 << 20,
        extra_args=("--max-model-len", "2048", "--enable-scale-out"),  # GENERATE
    )
    with started(cluster, *specs) as engines:
        yield engines


@pytest.fixture
def pair(cluster: Cluster, engines: list[Engine]) -> Iterator[Pair]:
    """Engines that a test has ended are started again."""
    prefill, decode = cluster.start(*(one.spec for one in engines))
    with Pair(prefill, decode, timeout_s=TIMEOUT_S) as pair:
        for client in (pair.to_prefill, pair.to_decode):
            client.complete(new_prompt(), 1)  # engines load code at their first request
        yield pair
        assert all(wait_until(partial(is_healthy, one.url), 5) for one in pair.engines)
        since = CountersSince(pair.to_decode)
        expect_right(pair)
        assert since.wait_for(LOADS, timeout_s=5)[LOADS] == 1


def expect_right(pair: Pair, **fields: object) -> None:
    """Decode answers as prefill, with a ticket that has these fields changed."""
    prompt = new_prompt()
    ticket = changed(pair.to_prefill.ticket(prompt), **fields)
    expect_same(pair, prompt, pair.decode_with(ticket, prompt, ANSWER))


def expect_same(pair: Pair, prompt: str, answer: Answer) -> None:
    assert Question.of(pair.to_prefill, prompt, ANSWER).compare(answer) != "other"


# --- ports


def description(pair: Pair) -> Description:
    return describe(endpoint_at(HOST, pair.prefill.side_port))


def ports(pair: Pair) -> list[int]:
    """Where prefill listens: the engine itself, and each of its ranks."""
    ranks = description(pair).ranks
    return [pair.prefill.side_port, *(int(one.endpoint.rsplit(":", 1)[1]) for one in ranks)]


@contextmanager
def dealer(port: int) -> Iterator["zmq.Socket[bytes]"]:
    """A ZMQ connection without a key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set_hwm(2 * FLOOD)
        dealer.linger = 0
        dealer.sndtimeo = int(SETTLE_S * 1000)
        dealer.connect(f"tcp://{HOST}:{port}")
        with suppress(zmq.Again):
            yield dealer


def test_garbage(pair: Pair) -> None:
    """Bytes without a meaning, messages of all kinds, and another connector's questions.

    The first test: these engines have not spoken with each other yet.
    """
    others = [(HANDSHAKE, 0), (HANDSHAKE, 99, 99), (HANDSHAKE, -1, "x"), "text", 7, {}]
    rng = random.Random(0)  # noqa: S311 - the same bytes every time
    payloads = [b"", b"\xc1", b"garbage" * 1000, rng.randbytes(5000)]
    payloads += [encode(sample(kind)) for kind in KINDS]
    payloads += map(msgspec.msgpack.encode, others)
    for port in ports(pair):
        with dealer(port) as stranger:
            for payload in payloads:
                stranger.send(payload)
                stranger.send_multipart([b"", payload])
            stranger.send_multipart([payloads[1]] * 10)
            time.sleep(SETTLE_S)


@contextmanager
def open_sockets(pair: Pair, count: int) -> Iterator[list[socket.socket]]:
    """Connections, spread over prefill's ports; fewer if the engine takes no more."""
    to, sockets = ports(pair), []
    with ExitStack() as stack:
        with suppress(OSError):
            for number in range(count):
                one = socket.create_connection((HOST, to[number % len(to)]), timeout=SETTLE_S)
                sockets.append(stack.enter_context(one))
        assert len(sockets) > count // 10
        print(f"{len(sockets)} connections")
        yield sockets


@pytest.fixture
def bounded(pair: Pair) -> Iterator[None]:
    """Prefill's memory grows within bounds, and it closes all files that a test makes it open."""

    def held() -> tuple[int, int]:
        processes = pair.prefill.members()
        with suppress(psutil.NoSuchProcess):
            sizes = [one.memory_info().rss for one in processes]
            return sum(sizes), sum(one.num_fds() for one in processes)
        return held()

    expect_right(pair)
    num_bytes, num_files = held()
    yield
    time.sleep(SETTLE_S)
    now = held()
    print(f"{(now[0] - num_bytes) >> 20:+} MiB, {now[1] - num_files:+} files")
    assert now[0] < num_bytes + MOST_BYTES
    assert now[1] <= num_files + 20


def send(to: list[socket.socket], data: bytes) -> None:
    for one in to:
        with suppress(OSError):  # closed by the engine, which it may
            one.sendall(data)


@pytest.mark.usefixtures("bounded")
def test_slow_senders(pair: Pair) -> None:
    """A greeting byte by byte, frames of huge declared lengths, random bytes."""
    rng = random.Random(0)  # noqa: S311 - the same bytes every time
    with open_sockets(pair, 3 * SLOW) as sockets:
        slow, huge, random_ones = sockets[:SLOW], sockets[SLOW : 2 * SLOW], sockets[2 * SLOW :]
        send(huge, GREETING + READY)
        for one in random_ones:
            send([one], rng.randbytes(1000))
        time.sleep(0.3)  # before the engine's own READY, no frame may follow
        send(huge, HUGE_FRAME)
        for number in range(MEANWHILE):
            send(slow, GREETING[number : number + 1])
            expect_right(pair)


@pytest.mark.usefixtures("bounded")
def test_a_flood_of_valid_questions_for_unknown_offers(pair: Pair) -> None:
    (rank, *_) = description(pair).ranks
    common = sample(Ask, incarnation=rank.incarnation, readers=(0,))
    with dealer(ports(pair)[-1]) as stranger:
        for number in range(FLOOD):
            ask = msgspec.structs.replace(common, nonce=new_nonce(), claim=new_claim())
            stranger.send(encode(ask))
            if number % (FLOOD // MEANWHILE) == 0:
                expect_right(pair)
        answered = 0
        while stranger.poll(2000):
            answered += bool(stranger.recv())
    print(f"{answered} of {FLOOD} answered")
    assert answered > FLOOD // 10


# --- tickets


@pytest.mark.parametrize("value", BAD_VALUES, ids=lambda value: repr(value)[:20])
def test_a_wrong_value_in_any_field_of_a_ticket(pair: Pair, value: object) -> None:
    ticket = pair.to_prefill.ticket(new_prompt())
    for name in (*ticket, *values(ticket)):
        expect_right(pair, **{name: value})


def test_a_field_of_ten_megabytes(pair: Pair) -> None:
    prompt = new_prompt()
    ticket = pair.to_prefill.ticket(prompt) | {"padding": "x" * (10 << 20)}
    expect_same(pair, prompt, pair.decode_with(ticket, prompt, ANSWER))


@pytest.mark.parametrize("place", DEEP_PLACES)
def test_deep_values(pair: Pair, place: str) -> None:
    """No JSON library would write them. vLLM pickles a request for its workers, by recursion."""
    prompt = new_prompt()
    right = pair.to_prefill.complete(prompt, ANSWER).text
    for engine, depth, (left, middle, end) in itertools.product(pair.engines, DEPTHS, NESTINGS):
        path, fields = DEEP_PLACES[place]
        deep = left * depth + middle + end * depth
        body = json.dumps({"model": "tiny", "prompt": prompt, "temperature": 0})[:-1]
        body += f', "max_tokens": {ANSWER}'
        if path == GENERATE:
            body = '{"model": "tiny", "token_ids": [5, 6, 7]'
        reply = httpx.post(
            f"{engine.url}{path}",
            content=f'{body}, "ignore_eos": true, {fields.replace("DEEP", deep)}}}',
            headers={"Content-Type": "application/json"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        print(f"{engine.spec.name} {depth} {left}: HTTP {reply.status_code} {reply.text[:100]}")
        assert is_healthy(engine.url)
        assert reply.status_code in (OF_VLLM if place in ("arguments", "a schema") else EXPECTED)
        if reply.is_success and path != GENERATE:
            (choice,) = reply.json()["choices"]
            assert choice["text"] == right


@pytest.mark.parametrize("value", ["x", ["a"], 7], ids=repr)
def test_parameters_that_vllm_takes_from_elsewhere(pair: Pair, value: object) -> None:
    """VLLM reads them as an object, and does not check those in `vllm_xargs`.

    Its API server then fails this request; a front end that does not would end the engine.
    """
    prompt = new_prompt()
    right = pair.to_prefill.complete(prompt, ANSWER)
    for client in (pair.to_prefill, pair.to_decode):
        with suppress(RefusedError):
            client.complete(prompt, ANSWER, vllm_xargs={"kv_transfer_params": value})
        assert is_healthy(client.url)
        assert client.complete(prompt, ANSWER).text == right.text


def test_a_ticket_that_names_a_foreign_host(pair: Pair) -> None:
    """Decode does not connect there."""
    with socket.create_server((ELSEWHERE, 0)) as server:
        expect_right(pair, remote_host=ELSEWHERE, remote_port=server.getsockname()[1])
        server.settimeout(SETTLE_S)
        with pytest.raises(TimeoutError):
            server.accept()
