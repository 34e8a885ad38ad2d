"""Plays a platform between a client and two engines, in the client's own process."""

import json
import uuid
from typing import Any

import httpx

from harness.cluster.client import TIMEOUT_S
from harness.cluster.engines import Engine
from platforms.replays import REQUEST_ID, Replay, Request, unchanged


class Played(httpx.BaseTransport):
    """Takes a client's requests: prefill is asked first, then decode, whose answer comes back.

    An error of prefill is the answer. The platform knows prefill by another URL, and an IP. Other
    requests than POST go to decode, so that a client sees its metrics.
    """

    def __init__(self, replay: Replay, prefill: Engine, decode: Engine) -> None:
        self._replay = replay
        self._urls = prefill.url, decode.url
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        prefill, decode = self._urls
        if request.method != "POST":
            return self._http.get(f"{decode}{path}")
        body, name = json.loads(request.read()), uuid.uuid4().hex
        token_ids = () if self._replay.for_decode is unchanged else self._tokenize(body)
        asked = Request(path, body, name, token_ids)
        reply = self._post(f"{prefill}{path}", name, self._replay.to_prefill(asked))
        if reply.is_error:
            return reply
        reply.read()
        return self._post(f"{decode}{path}", name, self._replay.to_decode(asked, reply.json()))

    def _tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Prefill does it instead of the platform's own tokenizer."""
        names = ("model", "prompt", "messages")
        asked = {name: body[name] for name in names if name in body}
        reply = self._http.post(f"{self._urls[0]}/tokenize", json=asked)
        return tuple(reply.raise_for_status().json()["tokens"])

    def _post(self, url: str, name: str, body: dict[str, Any]) -> httpx.Response:
        """A reply whose body is not read yet: it may be a stream."""
        headers = {REQUEST_ID: name}
        request = self._http.build_request("POST", url, json=body, headers=headers)
        return self._http.send(request, stream=True)
