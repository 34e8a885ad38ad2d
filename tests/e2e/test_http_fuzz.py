"""Random requests to both engines, with good ones between them: those stay right, and none hangs.

NIXL_KV_SEED=381 NIXL_KV_SECONDS=60 pytest -s -m "" tests/e2e/test_http_fuzz.py    one seed again

A seed gives the same requests each time, but for the nonces in tickets.
"""

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import httpx
import pytest

from harness.cluster.answers import Question
from harness.cluster.client import CHAT, COMPLETIONS, DIRECT, is_healthy
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, Engine
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from nixl_kv.connector.conversations.content import OWNER
from nixl_kv.connector.legs import SOURCE
from nixl_kv.protocol.ticket import FIELD
from support.engines import started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.hostile]

SEED: Final = int(os.environ.get("NIXL_KV_SEED") or 1)
SECONDS: Final = float(os.environ.get("NIXL_KV_SECONDS") or 180)
TIMEOUT_S: Final = 30.0  # of a request: one that takes longer hangs
GOOD: Final = 0.12  # the share of good requests
ANSWER: Final = 4
VOCABULARY: Final = range(3, 60)
LENGTHS: Final = (5, 33, 100, 300, 700)  # of prompts
KEPT: Final = 50  # tickets
FORGED: Final = "CRITICAL vllm.engine: GPU memory is corrupt"
ESCAPE: Final = "\x1b[31m"
# A line of vLLM's API server, which prints a client's id as it came, over several lines if it has
# line ends.
THEIRS: Final = re.compile(
    r"Failed to notify KV connector about rejected request (?s:.*?)Traceback"
)

NESTED: Final = range(50, 801, 50)  # json.dumps raises at 900
VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 2**80, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", f"\u202e{ESCAPE}", f"x\n{FORGED}\r\n", "0" * 5000, "1" * 200, "A" * 10**6),
    *([], {}, [[]], [[1]], {"a": 1}, [1] * 1000, [0] * 100_000),
    *("::1", "127.0.0.1", "[::1]", "::ffff:127.0.0.1", "fe80::1%lo", "localhost", "0.0.0.0"),  # noqa: S104
    *("127.1", "169.254.169.254"),
)
FIELDS: Final = (
    *("do_remote_decode", "do_remote_prefill", "remote_host", "remote_port", "remote_block_ids"),
    *("remote_engine_id", "remote_request_id", FIELD, "remote_decoder", "remote_prefiller"),
    *("remote_ready", "tp_size", SOURCE, OWNER, "nixl_kv_x", "lmcache.x"),
)
OPTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1, 2, 0),
    "stream": (True, False),
    "logprobs": (0, 1),
    "echo": (True,),
    "cache_salt": ("s", "\ud800", "", 7),
    "best_of": (1, 3),
    "min_tokens": (0, 1, 5),
    "prompt_logprobs": (1,),
    "request_id": ("abc", "../../x", f"\n{FORGED}", ESCAPE, "x" * 60_000),
    "priority": (-(2**63), 5),
    "prompt_embeds": ("AAAA",),
    "use_beam_search": (True,),
    "stop": ("a",),
    "max_completion_tokens": (1,),
    "vllm_xargs": ({"kv_transfer_params": "x"}, {"kv_transfer_params": [1]}, {"a": [1]}),
    "ec_transfer_params": ({}, {"x": [1]}),
}
PROMPTS: Final[tuple[Any, ...]] = (
    *("ab c", "", "\ud800", "x" * 3000, ["a", "b"], [[5, 6], [7, 8]], [], [2**40], [1]),
)
MESSAGES: Final[tuple[Any, ...]] = (
    *([{"role": "user", "content": "hi"}], [], "x", [{"role": "user"}]),
)
IDS: Final = (
    *(b"same", b"x" * 20_000, b"a|b", b"\xff\xfe", b"r-12345678", b"%s%n", b"]]>"),
    ESCAPE.encode(),
)


class Fuzz:
    """Draws requests. `tickets` are those of earlier good requests."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - the same requests every time
        self.tickets: list[dict[str, Any]] = []

    def prompt(self) -> list[int]:
        return self.rng.choices(VOCABULARY, k=self.rng.choice(LENGTHS))

    def value(self) -> Any:
        if self.rng.random() < 0.8:
            return self.rng.choice(VALUES)
        value: Any = 1
        for _ in range(self.rng.choice(NESTED)):
            value = [value] if self.rng.random() < 0.5 else {"a": value}
        return value

    def params(self) -> Any:
        """A changed ticket, any value, or fields that routers write."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.4 and self.tickets:
            return self.changed(dict(rng.choice(self.tickets)))
        if kind < 0.5:
            return self.value()
        if kind < 0.6:
            pushed = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
            return pushed | {"remote_engine_id": self.value(), "remote_host": self.value()}
        return {rng.choice(FIELDS): self.value() for _ in range(rng.randrange(1, 6))}

    def changed(self, ticket: dict[str, Any]) -> dict[str, Any]:
        rng = self.rng
        for _ in range(rng.randrange(4)):
            ticket[rng.choice(FIELDS)] = self.value()
        sealed = ticket.get(FIELD)
        if rng.random() < 0.3 and isinstance(sealed, str) and sealed:
            at = rng.randrange(len(sealed))
            ticket[FIELD] = sealed[:at] + rng.choice("0aZ.-_9é٣") + sealed[at + 1 :]
        if rng.random() < 0.3:
            ticket["do_remote_decode"] = rng.choice((True, False))
        if rng.random() < 0.2:
            ticket.pop(rng.choice(list(ticket)))
        return ticket

    def request(self) -> tuple[str, bytes, dict[bytes, bytes]]:
        """The path, the body and the headers."""
        rng = self.rng
        path = CHAT if rng.random() < 0.2 else COMPLETIONS
        body: dict[str, Any] = {"model": "tiny", "max_tokens": rng.choice((1, 1, 2))}
        body["temperature"] = 0
        if path == CHAT:
            body["messages"] = rng.choice(MESSAGES)
        else:
            body["prompt"] = self.prompt() if rng.random() < 0.3 else rng.choice(PROMPTS)
        body["kv_transfer_params"] = self.params()
        for name, values in OPTIONS.items():
            if rng.random() < 0.08:
                body[name] = rng.choice(values)
        if rng.random() < 0.03:
            body["ec_transfer_params"] = {"x": self.value()}
        raw = json.dumps(body).encode("utf-8", "surrogatepass")
        if rng.random() < 0.05:
            raw = raw[: rng.randrange(len(raw))]
        if rng.random() < 0.03:  # a key twice
            twice = b'"kv_transfer_params": {"do_remote_decode": true}, "kv_transfer_params"'
            raw = raw.replace(b'"kv_transfer_params"', twice, 1)
        headers = {b"X-Request-Id": rng.choice(IDS)} if rng.random() < 0.3 else {}
        return path, raw, headers


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[list[Engine]]:
    """Without a key, so that changed tickets get further."""
    specs = pair_specs(
        ensure_tiny_model(),
        suffix="-fuzz",
        connector_config={
            "insecure": True,
            "peers": [f"{HOST}/32"],
            "request_timeout_s": 5,
        },
        num_blocks=64,
        kv_cache_bytes=128 << 20,
        extra_args=("--max-model-len", "2048"),
    )
    with started(cluster, *specs) as engines:
        yield engines


def expect_good(pair: Pair, fuzz: Fuzz) -> None:
    """Decode answers as prefill, with prefill's ticket."""
    prompt = random_prompt(fuzz.rng.choice(LENGTHS), fuzz.rng.randrange(10**9))
    ticket = pair.to_prefill.ticket(prompt)
    fuzz.tickets = [*fuzz.tickets[-KEPT:], ticket]
    answer = pair.decode_with(ticket, prompt, ANSWER)
    assert Question.of(pair.to_prefill, prompt, ANSWER).compare(answer) != "other"


def expect_harmless_log(engine: Engine, start: int) -> None:
    """No line that a client has forged, and no command to a terminal."""
    text = THEIRS.sub("", engine.log_text(start))
    for line in text.split("\n"):
        assert not line.startswith(FORGED), line[:500]
        assert ESCAPE not in line, line[:500]


def test_random_requests(engines: list[Engine]) -> None:
    prefill, decode = engines
    fuzz, counts = Fuzz(SEED), Counter[str]()
    print(f"seed {SEED}, {SECONDS:g} s")
    starts = [engine.log_size() for engine in engines]
    with Pair(prefill, decode, timeout_s=TIMEOUT_S) as pair, httpx.Client(**DIRECT) as http:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            if fuzz.rng.random() < GOOD:
                expect_good(pair, fuzz)
                counts["good"] += 1
                continue
            engine = fuzz.rng.choice(engines)
            path, body, headers = fuzz.request()
            shown = f"seed {SEED}, to {engine.spec.name}: {headers} {body[:1000]!r}"
            try:
                with http.stream(
                    *("POST", f"{engine.url}{path}"),
                    content=body,
                    headers={b"Content-Type": b"application/json", **headers},
                    timeout=TIMEOUT_S,
                ) as reply:
                    reply.read()
            except httpx.HTTPError as error:
                pytest.fail(f"{error!r} for {shown}")
            counts[f"{engine.spec.name}: HTTP {reply.status_code}"] += 1
            if reply.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                assert is_healthy(engine.url), shown
        assert all(wait_until(partial(is_healthy, each.url), 5) for each in engines)
        expect_good(pair, fuzz)
    print(dict(sorted(counts.items())))
    assert counts["good"] > SECONDS / 10
    for engine, start in zip(engines, starts, strict=True):
        expect_harmless_log(engine, start)
