"""Requests that platforms send about a conversation's earlier turns: which engine has their KV.

As in `replays.py`, the published code is named by its version and file.
"""

import itertools
import json
import uuid
from collections.abc import Sequence
from typing import Any, Final

import httpx

from harness.cluster.client import DIRECT, TIMEOUT_S
from harness.cluster.engines import Engine
from platforms.replays import MULTI_TURN, PARAMS, REQUEST_ID, Body, Request

SOURCE: Final = "remote_kv_source"


def kv_source(host: str, port: int) -> Body:
    """llm-d's sidecar v0.10.0, llm-d-router, pkg/sidecar/proxy/connector_p2p.go.

    It adds this to the parameters for prefill (`--enable-p2p-pull`). For a decode engine without
    prefill, this is all. The port is that of `--p2p-connector-port`.
    """
    asked = {"kv_request_id": str(uuid.uuid4()), "remote_host": host, "remote_port": port}
    return {SOURCE: asked}


class MultiTurnProxy:
    """vLLM's proxy of MULTI_TURN: each turn of a conversation goes to the next engine of each kind.

    It asks decode for a stream, whatever the client wants. If a chunk has `kv_transfer_params`, it
    sends these to prefill with the next turn, once. vLLM streams them from 0.33 on.
    """

    def __init__(self, prefill: Sequence[Engine], decode: Sequence[Engine]) -> None:
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self.kept: dict[str, Body] = {}
        """The fields of decode's last answer, by conversation."""
        self.sent: list[Body] = []
        """The parameters of each request to prefill."""

    def complete(self, path: str, body: Body) -> str:
        """The text of the answer. The `conversation_id` of the body is for the proxy alone."""
        prefill, decode = next(self._prefill), next(self._decode)
        body = dict(body)
        conversation, name = body.pop("conversation_id"), str(uuid.uuid4())
        request = Request(path, body, name, prefill=prefill.url, pod_ip=prefill.address)
        first = MULTI_TURN.to_prefill(request)
        if kept := self.kept.pop(conversation, None):
            flags = {"do_remote_decode": True, "do_remote_prefill": False}
            first[PARAMS] = kept | flags
        self.sent.append(first[PARAMS])
        headers = {REQUEST_ID: name}
        with httpx.Client(timeout=TIMEOUT_S, headers=headers, **DIRECT) as http:
            reply = http.post(f"{prefill.url}{path}", json=first).raise_for_status().json()
            second = MULTI_TURN.to_decode(request, reply) | {"stream": True}
            with http.stream("POST", f"{decode.url}{path}", json=second) as stream:
                stream.raise_for_status()
                lines = (line.removeprefix("data: ") for line in stream.iter_lines())
                chunks = [json.loads(line) for line in lines if line.startswith("{")]
        for chunk in chunks:
            if params := chunk.get(PARAMS):
                self.kept[conversation] = params | {"remote_host": decode.address}
        return "".join(_text(choice) for chunk in chunks for choice in chunk["choices"])


def _text(choice: Any) -> str:
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
