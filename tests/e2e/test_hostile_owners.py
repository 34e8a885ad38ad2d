"""Hostile values in the fields that name an engine with cached KV (conversations).

Whatever they write, prefill computes the prompt, and connects to no host outside `peers`.
"""

import itertools
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

import httpx
import psutil
import pytest

from harness.cluster.answers import Question
from harness.cluster.client import COMPLETIONS, DIRECT, Answer, Client, is_healthy
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, MODEL_NAME
from harness.cluster.metrics import LOADS, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.tickets import changed, sealed, values
from nixl_kv.config import unmapped
from nixl_kv.connector.conversations.content import OWNER
from nixl_kv.connector.legs import SOURCE
from nixl_kv.protocol.ticket import FIELD
from support.chats import conversing
from support.engines import EVENT_S, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.hostile]

TIMEOUT_S: Final = 40.0  # of a request: one that takes longer hangs
WORDS: Final = 300  # of a prompt: more than the least for which prefill asks
ANSWER: Final = 4
ELSEWHERE: Final = "127.0.0.2"
"""It belongs to this machine, but not to `peers`."""
SEEDS: Final = itertools.count(60_000)
EXPECTED: Final = (HTTPStatus.OK, HTTPStatus.BAD_REQUEST)

Fields = Mapping[str, object]

WITHOUT_KEY: Final = pytest.mark.parametrize("target", [False], indirect=True, ids=["no key"])
WITH_AND_WITHOUT_KEY: Final = pytest.mark.parametrize(
    "target", [False, True], indirect=True, ids=["no key", "key"]
)

VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 2**80, 1e308, "", "x", "x" * 300, "0" * 5000),
    *([], {}, [[]], [1] * 1000, {"a": {"b": [1]}}, "12.." + "A" * 40, "12.x.y", "A" * (10 << 20)),
    *("\u202e\x1b[31m", f"12.{'0' * 32}.", f"999999999.{'0' * 32}.kA", "1.٣.kA"),
)
HOSTS: Final[tuple[Any, ...]] = (
    *(ELSEWHERE, "169.254.169.254", "10.0.0.1", "0.0.0.0", "::", "::1", "fe80::1%lo"),  # noqa: S104
    *("localhost", "example.com", "127.1", "0x7f.0.0.1", "2130706433", f"::ffff:{ELSEWHERE}"),
    *("127.0.0.1@127.0.0.2", "127.0.0.1;127.0.0.2", "tcp://127.0.0.2", "127.0.0.1\x00.x", "*"),
    *(None, True, 7, "", "x" * 70_000, [HOST], {"host": HOST}, HOST.encode().hex(), f" {HOST}"),
)
PORTS: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 65536, 2**63, 1.5, 1e308, "", "0", "65536", "80;81", [80], {}),
    *("1" * 5000, "\u0663\u0663\u0663\u0663"),
)
DEPTHS: Final = (8, 9, 50, 300, 480, 500, 990, 1000)
NESTINGS: Final = (("[", "", "]"), ('{"a":', "1", "}"), ('{"remote_host":', '"x"', "}"))


class Target:
    """Engines with conversations, a socket where they must not connect, and one where they may."""

    def __init__(self, pair: Pair, elsewhere: socket.socket, silent: socket.socket) -> None:
        self.pair = pair
        self.elsewhere = elsewhere
        self.port = port_of(elsewhere)
        self.silent_port = port_of(silent)

    def expect_right(self, fields: Fields | str) -> None:
        """Engines answer right to new prompts with these fields, or refuse the JSON."""
        to_prefill, to_decode = self.pair.to_prefill, self.pair.to_decode
        text = fields if isinstance(fields, str) else json.dumps(fields)[1:-1]
        self._expect_right(to_prefill, f'"do_remote_decode": true, {text}', to_decode)
        self._expect_right(to_prefill, text, to_decode)
        self._expect_right(to_decode, text, to_prefill)

    def _expect_right(self, engine: Client, params: str, oracle: Client) -> None:
        prompt = random_prompt(WORDS, next(SEEDS))
        body = json.dumps(asked(prompt, ANSWER))
        reply = post(engine, f'{body[:-1]}, "kv_transfer_params": {{{params}}}}}')
        shown = f"{engine.url}: HTTP {reply.status_code} for {params[:200]!r}"
        assert reply.status_code in EXPECTED, f"{shown}: {reply.text[:300]}"
        assert is_healthy(engine.url), shown
        if reply.is_success:
            (choice,) = reply.json()["choices"]
            answer = Answer(choice["text"], tuple(choice["logprobs"]["tokens"]), WORDS, 0.0)
            assert Question.of(oracle, prompt, ANSWER).compare(answer) != "other", shown

    def expect_no_connection(self) -> None:
        """None was made to the socket outside `peers`, and none is wanted to another host."""
        with pytest.raises(BlockingIOError):
            self.elsewhere.accept()
        processes = (one for engine in self.pair.engines for one in engine.members())
        hosts = {ip_address(host) for one in processes for host in hosts_of(one)}
        assert {str(unmapped(one)) for one in hosts} <= {HOST}


def asked(prompt: str, num_tokens: int) -> dict[str, object]:
    body: dict[str, object] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens}
    return body | {"temperature": 0, "ignore_eos": True, "logprobs": 0}


def post(engine: Client, body: str) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    url = f"{engine.url}{COMPLETIONS}"
    return httpx.post(url, content=body, headers=headers, timeout=TIMEOUT_S, **DIRECT)


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def hosts_of(process: psutil.Process) -> set[str]:
    """The other ends of its TCP connections, also of those that it only tries."""
    with suppress(psutil.NoSuchProcess):
        return {one.raddr.ip for one in process.net_connections("tcp") if one.raddr}
    return set()


@contextmanager
def listening(*hosts: str) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((host, 0))) for host in hosts]
        for server in servers:
            server.settimeout(0)
        yield servers


@pytest.fixture(scope="module")
def target(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Target]:
    """Its parameter: whether the engines have a key. Without one, no MAC protects a field."""
    prefill, decode = pair_specs(
        ensure_tiny_model(),
        suffix="-owners-keyed" if request.param else "-owners",
        connector_config={"peers": [f"{HOST}/32"], "offer_ttl_s": 6, "lease_s": 6},
        num_blocks=48,  # of 128 tokens, which are soon used again
        kv_cache_bytes=64 << 20,
        extra_args=("--max-model-len", "2048"),
    )
    specs = [
        conversing(prefill, prefill.name, "both", is_insecure=not request.param),
        conversing(decode, decode.name, "decode", is_insecure=not request.param),
    ]
    with (
        started(cluster, *specs) as (first, second),
        Pair(first, second, timeout_s=TIMEOUT_S) as pair,
        listening(ELSEWHERE, HOST) as servers,
    ):
        yield Target(pair, *servers)


@pytest.fixture(autouse=True)
def alive(target: Target) -> Iterator[None]:
    """After each test both engines live, and decode reads the KV of an ordinary request."""
    yield
    target.expect_no_connection()
    pair, prompt = target.pair, random_prompt(WORDS, next(SEEDS))
    since = CountersSince(pair.to_decode)
    answer = pair.complete(prompt, ANSWER)
    assert Question.of(pair.to_prefill, prompt, ANSWER).compare(answer) != "other"
    assert since.wait_for(LOADS, timeout_s=EVENT_S)[LOADS] == 1


def owner_of(target: Target) -> str:
    """The field of an answer of decode's, which names decode."""
    prompt = random_prompt(WORDS, next(SEEDS))
    ticket = target.pair.to_prefill.ticket(prompt)
    body = {**asked(prompt, 1), "kv_transfer_params": ticket}
    reply = post(target.pair.to_decode, json.dumps(body)).raise_for_status().json()
    return str(reply["kv_transfer_params"][OWNER])


def source(host: object, port: object) -> Fields:
    return {SOURCE: {"remote_host": host, "remote_port": port, "kv_request_id": "x"}}


@WITHOUT_KEY
def test_wrong_values(target: Target) -> None:
    for value in VALUES:
        target.expect_right({OWNER: value})
        target.expect_right({SOURCE: value})


@WITHOUT_KEY
def test_hosts_outside_peers(target: Target) -> None:
    owner = owner_of(target)
    for host in HOSTS:
        target.expect_right(source(host, target.port))
        forged = changed({FIELD: owner}, host=host, port=target.port)[FIELD]
        target.expect_right({OWNER: forged})


@WITHOUT_KEY
def test_ports(target: Target) -> None:
    owner = owner_of(target)
    for port in PORTS:
        target.expect_right(source(HOST, port))
        target.expect_right({OWNER: changed({FIELD: owner}, port=port)[FIELD]})


@WITHOUT_KEY
def test_other_servers_of_a_peer(target: Target) -> None:
    """A socket that never answers, a closed port, an HTTP server, a rank, and the engine itself."""
    with socket.create_server((HOST, 0)) as server:
        closed = server.getsockname()[1]
    owner, engines = owner_of(target), target.pair.engines
    own = [port for one in engines for port in (one.port, one.side_port)]
    for host, port in itertools.product(
        (HOST, f"::ffff:{HOST}"), (target.silent_port, closed, *own)
    ):
        target.expect_right(source(host, port))
        target.expect_right({OWNER: changed({FIELD: owner}, host=host, port=port)[FIELD]})


@WITH_AND_WITHOUT_KEY
def test_tampered_owners(target: Target) -> None:
    owner = owner_of(target)
    version, mac, payload = owner.split(".")
    wrong: tuple[object, ...] = (None, -1, 2**63, "", "x" * 300, [], {"a": 1})
    for name in values({FIELD: owner}):
        for value in wrong:
            target.expect_right({OWNER: changed({FIELD: owner}, **{name: value})[FIELD]})
    many = [HOST, target.port, "0" * 32] * 100
    lists: tuple[object, ...] = ([], [HOST], [HOST, 1], {}, 7, [[[]]], many)
    for entries in lists:
        target.expect_right({OWNER: sealed({FIELD: owner}, entries)[FIELD]})
    other = "0" * 32 if mac != "0" * 32 else "1" * 32
    for text in (
        *(f"{version}.{other}.{payload}", f"{version}..{payload}", f"{version}.{mac}.{payload}A"),
        *(f"{version}.{mac}.{payload[:-1]}", f"0.{mac}.{payload}", f"999999999.{mac}.{payload}"),
        *(owner[::-1], owner * 50, owner + "\n", owner.upper(), f" {owner}", f"{owner}.{owner}"),
    ):
        target.expect_right({OWNER: text})


@WITHOUT_KEY
def test_deep_values(target: Target) -> None:
    """No JSON library would write them. vLLM pickles a request for its workers, by recursion."""
    for depth, (left, middle, end) in itertools.product(DEPTHS, NESTINGS):
        deep = left * depth + middle + end * depth
        target.expect_right(f'"{OWNER}": {deep}')
        target.expect_right(f'"{SOURCE}": {deep}')
        target.expect_right(f'"{SOURCE}": {{"remote_host": {deep}, "remote_port": {deep}}}')
