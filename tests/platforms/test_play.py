"""A platform that is played sends both engines what its replay says, and hands back what comes."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.cluster.client import Client, RefusedError
from harness.cluster.engines import Engine
from platforms.play import Played
from platforms.replays import PARAMS, REPLAYS, Replay

POLL_S = 0.01
CHOICE = {"text": "ba", "logprobs": {"tokens": ["ba"]}, "finish_reason": "length"}
ANSWER = {"choices": [CHOICE], "usage": {"prompt_tokens": 2}}


class FakeEngine(BaseHTTPRequestHandler):
    """Notes what it is asked; refuses a minimum above the limit, as vLLM does."""

    server: "FakeServer"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if body.get("min_tokens", 0) > body.get("max_tokens", 1):
            self._reply(400, {"error": {"message": "min_tokens"}})
        elif self.path == "/tokenize":
            self._reply(200, {"tokens": [3, 4]})
        elif body.get("stream", False):
            self._send(200, f"data: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n")
        else:
            self._reply(200, ANSWER | {PARAMS: {"remote_host": "10.0.0.1", "ours": "x"}})

    def do_GET(self) -> None:
        self._send(200, f"engine_port {self.server.server_port}\n")

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeEngine)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._thread = threading.Thread(target=self.serve_forever, args=[POLL_S])
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


@pytest.fixture
def engines() -> Iterator[tuple[FakeServer, FakeServer]]:
    prefill, decode = FakeServer(), FakeServer()
    yield prefill, decode
    prefill.end()
    decode.end()


def played(name: str, prefill: FakeServer, decode: FakeServer) -> Client:
    (replay,) = [one for one in REPLAYS if one.name == name]
    return played_by(replay, prefill, decode)


def played_by(replay: Replay, prefill: FakeServer, decode: FakeServer) -> Client:
    ours = [cast("Engine", SimpleNamespace(url=server.url)) for server in (prefill, decode)]
    play = Played(replay, *ours, prefill_name="http://p.example:8000", pod_ip="10.244.0.1")
    return Client(decode.url, transport=play)


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.name)
def test_prefill_is_asked_first_and_decode_answers(
    engines: tuple[FakeServer, FakeServer], replay: Replay
) -> None:
    prefill, decode = engines
    with played_by(replay, prefill, decode) as client:
        assert client.complete("ba be", 4).tokens == ("ba",)
        assert client.stream("ba be", 4).tokens == ("ba",)
        assert client.counters() == {"engine_port": decode.server_port}
    to_prefill = [body for path, body in prefill.asked if path == "/v1/completions"]
    assert [body["max_tokens"] for body in to_prefill] == [1, 1]
    assert [body["max_tokens"] for _, body in decode.asked] == [4, 4]
    tickets = [body[PARAMS]["ours"] for _, body in decode.asked if body.get(PARAMS)]
    assert tickets == (["x", "x"] if replay.moves_kv else [])


def test_it_knows_prefill_by_a_name_that_leads_nowhere(
    engines: tuple[FakeServer, FakeServer],
) -> None:
    _, decode = engines
    for name in ("production-stack, orchestrated", "AIBrix, default"):
        with played(name, *engines) as client:
            client.complete("ba be", 4)
    hosts = [body[PARAMS]["remote_host"] for _, body in decode.asked]
    assert hosts == ["p.example", "10.244.0.1"]


def test_an_error_of_prefill_is_the_answer(engines: tuple[FakeServer, FakeServer]) -> None:
    _, decode = engines
    with played("KServe", *engines) as client, pytest.raises(RefusedError, match="min_tokens"):
        client.complete("ba be", 4, min_tokens=4)
    assert not decode.asked
