"""How each platform changes a client's request on its way to prefill, and then to decode.

A replay does as the platform's published code, in the file and version that it names: which limits
of tokens the platform lowers, the request that it sends to prefill, and the part of prefill's reply
that it hands on. Errors, retries and load balancing are not part of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from harness.cluster.client import CHAT, WANT_TICKET

Body = dict[str, Any]
Reply = Mapping[str, Any]

PARAMS: Final = "kv_transfer_params"
ASKED: Final[Mapping[str, object]] = WANT_TICKET | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
"""All platforms ask prefill with these fields of vLLM's own connector, to be filled in."""
LIMIT: Final = "max_tokens"
CHAT_LIMIT: Final = "max_completion_tokens"
FEWEST: Final = "min_tokens"
STREAM: Final = "stream_options"
REQUEST_ID: Final = "X-Request-Id"


@dataclass(frozen=True)
class Request:
    """A client's request, and what the platform knows when it sends it on."""

    path: str
    body: Mapping[str, Any]
    id: str  # the platform chooses it
    token_ids: tuple[int, ...] = ()  # of the prompt, where the platform has a tokenizer
    prefill: str = "http://prefill-0.prefill.default.svc.cluster.local:8000"
    """URL of the prefill engine, as the platform knows it."""
    pod_ip: str = "10.244.3.9"  # of the pod that prefill runs in


# --- what engines are sent instead of the client's request


def unchanged(request: Request) -> Body:
    return dict(request.body)


def tokens_alone(request: Request) -> Body:
    """llm-d's coordinator sends prefill no `cache_salt` and no sampling parameters of a prompt."""
    if request.path == CHAT:
        return with_tokens(request)
    prompt = list(request.token_ids)
    return {"request_id": request.id, "model": request.body["model"], "prompt": prompt}


def with_tokens(request: Request) -> Body:
    tokens = list(request.token_ids)
    is_chat = request.path == CHAT
    prompt = {"tokens": {"token_ids": tokens}} if is_chat else {"prompt": tokens}
    return dict(request.body) | prompt


def of_dynamo(request: Request) -> Body:
    """Dynamo's front end gives its workers tokens and one limit."""
    body = dict(request.body) | {"prompt": list(request.token_ids)}
    if CHAT_LIMIT in body:
        body[LIMIT] = body.pop(CHAT_LIMIT)
    return body


# --- what decode is sent of prefill's reply


def as_it_is(_: Request, reply: Reply) -> Body:
    """Null if prefill gives none, which vLLM treats as an absent field."""
    return {PARAMS: reply.get(PARAMS)}


def with_flags(_: Request, reply: Reply) -> Body:
    """Sets the two flags whatever they were; without parameters it sends the flags alone."""
    flags = {"do_remote_decode": False, "do_remote_prefill": True}
    return {PARAMS: dict(reply.get(PARAMS) or {}) | flags}


def with_host_of_url(request: Request, reply: Reply) -> Body:
    """Writes the host of prefill's URL, which may be a name, over the ticket's host."""
    host = request.prefill.partition("://")[2].partition(":")[0]
    return {PARAMS: dict(reply[PARAMS]) | {"remote_host": host}}


def with_host_of_pod(request: Request, reply: Reply) -> Body:
    """Writes the IP of prefill's pod over the ticket's host."""
    return {PARAMS: dict(reply[PARAMS]) | {"remote_host": request.pod_ip}}


def with_host_or_as_asked(request: Request, reply: Reply) -> Body:
    """Writes the host of prefill's URL. Without a ticket, decode gets the fields for prefill."""
    return with_host_of_url(request, reply) if reply.get(PARAMS) else {PARAMS: dict(ASKED)}


def nothing(_: Request, reply: Reply) -> Body:
    del reply
    return {}


def whole_reply(_: Request, reply: Reply) -> Body:
    """In a field that vLLM's front end does not know."""
    return {"disagg_prefill_resp": dict(reply)}


# --- the platforms


@dataclass(frozen=True)
class Replay:
    """One platform, in one of its modes; prefill is asked for one token in one piece."""

    name: str
    source: str  # version and file
    hand_on: Callable[[Request, Reply], Body]
    ones: tuple[str, ...] = (LIMIT,)  # the fields that become 1 for prefill
    ones_if_there: tuple[str, ...] = ()  # the fields that become 1 if the client has sent them
    dropped: tuple[str, ...] = (STREAM,)
    asks: bool = True  # false: prefill is not asked for a ticket
    for_prefill: Callable[[Request], Body] = unchanged
    for_decode: Callable[[Request], Body] = unchanged
    takes_chat: bool = True  # false: its own front end makes a prompt of a conversation

    @property
    def moves_kv(self) -> bool:
        """Otherwise decode computes each prompt."""
        return self.asks and self.hand_on is not nothing

    def to_prefill(self, request: Request) -> Body:
        body = {k: v for k, v in self.for_prefill(request).items() if k not in self.dropped}
        present = [name for name in self.ones_if_there if name in request.body]
        asked = {PARAMS: dict(ASKED)} if self.asks else {}
        return body | dict.fromkeys((*self.ones, *present), 1) | {"stream": False} | asked

    def to_decode(self, request: Request, reply: Reply) -> Body:
        return self.for_decode(request) | self.hand_on(request, reply)


MULTI_TURN: Final = Replay(
    "vLLM's multi-turn proxy",
    "0.33.0: vLLM's examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py",
    with_host_or_as_asked,
    dropped=(CHAT_LIMIT, FEWEST, STREAM),
)
"""The first turn of a conversation; `conversing.py` has the next ones."""

REPLAYS: Final = (
    MULTI_TURN,
    Replay(
        "vllm-router",
        "0.1.17: PyPI vllm-router, src/routers/http/vllm_pd_router.rs",
        as_it_is,
        ones=(LIMIT, FEWEST),
        ones_if_there=(CHAT_LIMIT,),
    ),
    Replay(
        "llm-d sidecar",
        "v0.10.0: llm-d-router, pkg/sidecar/proxy/connector_nixlv2.go",
        as_it_is,
        ones=(LIMIT, CHAT_LIMIT, FEWEST),
    ),
    Replay(
        "llm-d coordinator",
        "v0.10.0: llm-d-router with `kv-nixl`, pkg/coordinator/steps, connectors/kv/nixl.go",
        with_flags,
        ones_if_there=(CHAT_LIMIT,),
        dropped=(FEWEST, STREAM),
        for_prefill=tokens_alone,
        for_decode=with_tokens,
    ),
    Replay(
        "KServe",
        "llm-d sidecar v0.7.1: llm-d-router, pkg/sidecar/proxy/connector_nixlv2.go",
        as_it_is,
        ones=(LIMIT, CHAT_LIMIT),
    ),
    Replay(
        "production-stack, orchestrated",
        "0.1.12: src/vllm_router/services/request_service/request.py",
        with_host_of_url,
        ones_if_there=(CHAT_LIMIT,),
    ),
    Replay(
        "production-stack, not orchestrated",
        "0.1.12: `disaggregated_prefill`, for connectors that need no ticket; the same file",
        nothing,
        dropped=(CHAT_LIMIT, FEWEST, STREAM),
        asks=False,
    ),
    Replay(
        "AIBrix, default",
        "v0.7.0: pkg/plugins/gateway/algorithms/pd: transfer/shfs.go, prefill/payload.go",
        with_host_of_pod,
        ones=(LIMIT, CHAT_LIMIT),
        dropped=(FEWEST, STREAM),
    ),
    Replay(
        "AIBrix, nixl",
        "v0.7.0: the pod label `nixl`, meant for Neuron: transfer/nixl.go",
        whole_reply,
        ones=(LIMIT, CHAT_LIMIT),
        dropped=(FEWEST, STREAM),
        asks=False,
    ),
    Replay(
        "Dynamo",
        "1.6.1: PyPI ai-dynamo, dynamo/vllm/handlers.py, kv_connector_protocols.py",
        as_it_is,
        ones=(LIMIT, FEWEST),
        for_prefill=of_dynamo,
        for_decode=of_dynamo,
        takes_chat=False,
    ),
    Replay(
        "Ray Serve LLM",
        "2.60.0: PyPI ray, ray/llm/_internal/serve/engines/vllm/kv_transfer/base.py",
        as_it_is,
        ones_if_there=(CHAT_LIMIT,),
    ),
)
