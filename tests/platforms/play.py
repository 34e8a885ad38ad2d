"""Plays a platform between a client and two engines, in the client's own process."""

import json
import uuid
from typing import Any, Final

import httpx

from harness.cluster.client import TIMEOUT_S
from harness.cluster.engines import Engine
from platforms.replays import Message, Replay, Request

TOKENIZE: Final = "/tokenize"


class Played(httpx.BaseTransport):
    """Takes a client's requests: prefill is asked first, then decode, whose answer comes back.

    What is no question goes to decode, so that a client sees its metrics. An error of prefill is
    the answer.
    """

    def __init__(
        self,
        replay: Replay,
        prefill: Engine,
        decode: Engine,
        *,
        prefill_name: str | None = None,
        pod_ip: str = "127.0.0.1",
    ) -> None:
        """Before two engines that run.

        Args:
            replay: what to do.
            prefill: where prompts are computed.
            decode: where answers come from.
            prefill_name: the URL under which the platform knows prefill, if not its own.
            pod_ip: the address that the platform knows it has.
        """
        self._replay = replay
        self._prefill = prefill.url
        self._decode = decode.url
        self._prefill_name = prefill_name or prefill.url
        self._pod_ip = pod_ip
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        """Close the connections to both engines."""
        self._http.close()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send it on as the platform does."""
        path = request.url.path
        if request.method != "POST":
            return self._http.get(f"{self._decode}{path}")
        asked = self._request(path, json.loads(request.read()))
        reply = self._post(f"{self._prefill}{path}", self._replay.to_prefill(asked))
        if reply.is_error:
            return reply
        reply.read()
        message = self._replay.to_decode(asked, reply.json())
        return self._post(f"{self._decode}{path}", message)

    def _request(self, path: str, body: dict[str, Any]) -> Request:
        return Request(
            path,
            body,
            uuid.uuid4().hex,
            prefill=self._prefill_name,
            decode=self._decode,
            pod_ip=self._pod_ip,
            token_ids=self._tokenize(body) if self._replay.tokenizes else (),
        )

    def _tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        """By prefill, in the place of the platform's own tokenizer."""
        names = ("model", "prompt", "messages")
        asked = {name: body[name] for name in names if name in body}
        reply = self._http.post(f"{self._prefill}{TOKENIZE}", json=asked)
        return tuple(reply.raise_for_status().json()["tokens"])

    def _post(self, url: str, message: Message) -> httpx.Response:
        """A reply whose body is not read yet: it may be a stream."""
        request = self._http.build_request("POST", url, json=message.body, headers=message.headers)
        return self._http.send(request, stream=True)
