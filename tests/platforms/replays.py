"""What each platform makes of a client's request on its way to prefill, and then to decode.

A replay does what the platform's own code does, as it was read in the file and version that its
first function names: which limits of tokens it lowers, which parameters it asks prefill with, and
what of prefill's reply it hands on. Errors, retries and load balancing are not part of it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from harness.cluster.client import CHAT, WANT_TICKET

Body = dict[str, Any]
Headers = dict[str, str]

PARAMS: Final = "kv_transfer_params"
ASKED: Final[Mapping[str, object]] = WANT_TICKET | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
"""What all of them ask prefill with: vLLM's own connector's fields, to be filled in."""
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
    id: str
    """Chosen by the platform."""
    prefill: str = "http://127.0.0.1:8000"
    """URL of the prefill engine, as the platform knows it."""
    decode: str = "http://127.0.0.1:8001"
    pod_ip: str = "127.0.0.1"
    """Of the pod that prefill runs in."""
    token_ids: tuple[int, ...] = ()
    """Of the prompt, where the platform has a tokenizer."""

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation, and not a prompt."""
        return self.path == CHAT


@dataclass(frozen=True)
class Message:
    """What an engine is sent."""

    body: Body
    headers: Headers


ToPrefill = Callable[[Request], Message]
ToDecode = Callable[[Request, Mapping[str, Any]], Message]
"""Of a request and prefill's reply to it."""


class BrokenReplyError(ValueError):
    """The platform answers the client with an error: it does not know what to do with a reply."""


@dataclass(frozen=True)
class Replay:
    """One platform, in one of its modes."""

    name: str
    version: str
    to_prefill: ToPrefill
    to_decode: ToDecode
    moves_kv: bool = True
    """False: it hands no ticket on, so that decode computes each prompt."""
    tokenizes: bool = False
    """Whether engines are sent token ids in place of the prompt."""
    takes_chat: bool = True
    """False: its own front end makes a prompt of a conversation."""
    keeps_fewest: bool = False
    """Whether prefill is sent the client's `min_tokens` beside its limit of one token."""


def one_token(
    body: Mapping[str, Any],
    *,
    ones: Collection[str] = (LIMIT,),
    ones_if_there: Collection[str] = (),
    dropped: Collection[str] = (STREAM,),
) -> Body:
    """A request for a single token in a single piece.

    Args:
        body: the client's.
        ones: the fields that become 1.
        ones_if_there: those that do if the client has sent them.
        dropped: the fields that are left out.
    """
    capped = {name: value for name, value in body.items() if name not in dropped}
    present = [name for name in ones_if_there if name in body]
    return capped | dict.fromkeys((*ones, *present), 1) | {"stream": False}


def asking(body: Body) -> Body:
    """The same, to be decoded elsewhere."""
    return body | {PARAMS: dict(ASKED)}


def host_of(url: str) -> str:
    """As production-stack finds it."""
    return _without_scheme(url).partition(":")[0]


def _without_scheme(url: str) -> str:
    return url.partition("://")[2]


def vllm_router_to_prefill(request: Request) -> Message:
    """The router of vLLM 0.1.17 (PyPI vllm-router, src/routers/http/vllm_pd_router.rs)."""
    body = one_token(request.body, ones=(LIMIT, FEWEST), ones_if_there=(CHAT_LIMIT,))
    return Message(asking(body), _vllm_router_headers(request))


def vllm_router_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """As it is, also null; a reply without parameters leaves the request as it was."""
    handed = {PARAMS: reply[PARAMS]} if PARAMS in reply else {}
    return Message(dict(request.body) | handed, _vllm_router_headers(request))


def _vllm_router_headers(request: Request) -> Headers:
    prefill, decode = map(_without_scheme, (request.prefill, request.decode))
    return {
        "Authorization": "Bearer",
        REQUEST_ID: f"___prefill_addr_{prefill}___decode_addr_{decode}_{request.id}",
    }


def llm_d_sidecar_to_prefill(request: Request) -> Message:
    """llm-d's pd-sidecar v0.10.0 (llm-d-router, pkg/sidecar/proxy/connector_nixlv2.go)."""
    body = one_token(request.body, ones=(LIMIT, CHAT_LIMIT, FEWEST))
    return Message(asking(body), {REQUEST_ID: request.id})


def kserve_to_prefill(request: Request) -> Message:
    """KServe's pd-sidecar, llm-d's v0.7.1 (pkg/sidecar/proxy/connector_nixlv2.go)."""
    body = one_token(request.body, ones=(LIMIT, CHAT_LIMIT))
    return Message(asking(body), {REQUEST_ID: request.id})


def llm_d_sidecar_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """Both versions: as it is, and null where there is none."""
    return Message(dict(request.body) | {PARAMS: reply.get(PARAMS)}, {REQUEST_ID: request.id})


def llm_d_coordinator_to_prefill(request: Request) -> Message:
    """llm-d's coordinator v0.10.0 with `kv-nixl` (pkg/coordinator/steps, connectors/kv/nixl.go).

    Of a prompt nothing is sent but its tokens: no `cache_salt` and no sampling parameters.
    """
    tokens = list(request.token_ids)
    body: Mapping[str, Any] = request.body
    if not request.is_chat:
        body = {"request_id": request.id, "model": body["model"], "prompt": tokens}
    capped = one_token(body, ones_if_there=(CHAT_LIMIT,), dropped=(FEWEST, STREAM))
    extra = {"tokens": {"token_ids": tokens}} if request.is_chat else {}
    headers = {"x-request-id": request.id, "EPP-Profile": "prefill"}
    return Message(asking(capped) | extra, headers)


def llm_d_coordinator_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """As it is, with the two flags set whatever they were; the flags alone where there is none."""
    given = reply.get(PARAMS)
    flags = {"do_remote_decode": False, "do_remote_prefill": True}
    tokens = list(request.token_ids)
    prompt: Body = {"tokens": {"token_ids": tokens}} if request.is_chat else {"prompt": tokens}
    params = (dict(given) if isinstance(given, Mapping) else {}) | flags
    headers = {"x-request-id": request.id, "EPP-Profile": "decode"}
    return Message(dict(request.body) | prompt | {PARAMS: params}, headers)


def production_stack_to_prefill(request: Request) -> Message:
    """production-stack vllm-stack-0.1.12 with `disaggregated_prefill_orchestrated`.

    src/vllm_router/services/request_service/request.py: route_orchestrated_disaggregated_request.
    """
    body = one_token(request.body, ones_if_there=(CHAT_LIMIT,))
    return Message(asking(body), {REQUEST_ID: request.id})


def production_stack_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """With the host of prefill's URL, which may be a name, in the place of the ticket's host."""
    given = reply.get(PARAMS)
    handed = {PARAMS: dict(given) | {"remote_host": host_of(request.prefill)}} if given else {}
    return Message(dict(request.body) | handed, {REQUEST_ID: request.id})


def production_stack_plain_to_prefill(request: Request) -> Message:
    """The same with `disaggregated_prefill`: for connectors that need no ticket."""
    body = one_token(request.body, dropped=(CHAT_LIMIT, FEWEST, STREAM))
    return Message(body, {"Authorization": "Bearer None", REQUEST_ID: request.id})


def production_stack_plain_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """Nothing of the reply is handed on."""
    del reply
    return Message(dict(request.body), {"Authorization": "Bearer None", REQUEST_ID: request.id})


def aibrix_to_prefill(request: Request) -> Message:
    """AIBrix v0.7.0 by default, `shfs` (pkg/plugins/gateway/algorithms/pd: transfer/shfs.go)."""
    return Message(asking(_aibrix_body(request)), {REQUEST_ID: request.id})


def aibrix_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """With the IP of prefill's pod in the place of the ticket's host.

    Raises:
        BrokenReplyError: for null, which vLLM answers where there is no ticket.
    """
    if PARAMS not in reply:
        return Message(dict(request.body), {REQUEST_ID: request.id})
    given = reply[PARAMS]
    if not isinstance(given, Mapping):
        raise BrokenReplyError(f"{PARAMS} has unexpected type {type(given).__name__}")
    params = dict(given) | {"remote_host": request.pod_ip}
    return Message(dict(request.body) | {PARAMS: params}, {REQUEST_ID: request.id})


def aibrix_nixl_to_prefill(request: Request) -> Message:
    """The same with the pod label `nixl`, meant for Neuron (transfer/nixl.go): it asks nothing."""
    return Message(_aibrix_body(request), {REQUEST_ID: request.id})


def aibrix_nixl_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """The whole reply, in a field that vLLM's front end does not know."""
    body = dict(request.body) | {"disagg_prefill_resp": dict(reply)}
    return Message(body, {REQUEST_ID: request.id})


def _aibrix_body(request: Request) -> Body:
    """pd/prefill/payload.go."""
    return one_token(request.body, ones=(LIMIT, CHAT_LIMIT), dropped=(FEWEST, STREAM))


def dynamo_to_prefill(request: Request) -> Message:
    """Dynamo 1.6.1 (PyPI ai-dynamo, dynamo/vllm/handlers.py, kv_connector_protocols.py).

    Its workers call the engine without HTTP, with tokens and these sampling parameters.
    """
    body = one_token(_tokens_of(request), ones=(LIMIT, FEWEST))
    return Message(asking(body), {REQUEST_ID: request.id})


def dynamo_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """As it is."""
    given = reply.get(PARAMS)
    handed = {PARAMS: dict(given)} if given is not None else {}
    return Message(_tokens_of(request) | handed, {REQUEST_ID: request.id})


def _tokens_of(request: Request) -> Body:
    """As its front end gives them to the workers: there is one limit."""
    body = dict(request.body) | {"prompt": list(request.token_ids)}
    if CHAT_LIMIT in body:
        body[LIMIT] = body.pop(CHAT_LIMIT)
    return body


def ray_to_prefill(request: Request) -> Message:
    """Ray Serve LLM 2.60.0 (PyPI ray, ray/llm/_internal/serve/engines/vllm/kv_transfer/base.py).

    It copies vLLM's request objects, of which those for conversations have the second limit.
    """
    ones = (LIMIT, CHAT_LIMIT) if request.is_chat else (LIMIT,)
    body = one_token(request.body, ones=ones, ones_if_there=(CHAT_LIMIT,))
    return Message(asking(body), {REQUEST_ID: request.id})


def ray_to_decode(request: Request, reply: Mapping[str, Any]) -> Message:
    """As it is, and null where there is none."""
    return Message(dict(request.body) | {PARAMS: reply.get(PARAMS)}, {REQUEST_ID: request.id})


REPLAYS: Final = (
    Replay("vllm-router", "0.1.17", vllm_router_to_prefill, vllm_router_to_decode),
    Replay("llm-d sidecar", "v0.10.0", llm_d_sidecar_to_prefill, llm_d_sidecar_to_decode),
    Replay(
        "llm-d coordinator",
        "v0.10.0",
        llm_d_coordinator_to_prefill,
        llm_d_coordinator_to_decode,
        tokenizes=True,
    ),
    Replay(
        "KServe",
        "llm-d sidecar v0.7.1",
        kserve_to_prefill,
        llm_d_sidecar_to_decode,
        keeps_fewest=True,
    ),
    Replay(
        "production-stack, orchestrated",
        "0.1.12",
        production_stack_to_prefill,
        production_stack_to_decode,
        keeps_fewest=True,
    ),
    Replay(
        "production-stack, not orchestrated",
        "0.1.12",
        production_stack_plain_to_prefill,
        production_stack_plain_to_decode,
        moves_kv=False,
    ),
    Replay("AIBrix, default", "v0.7.0", aibrix_to_prefill, aibrix_to_decode),
    Replay("AIBrix, nixl", "v0.7.0", aibrix_nixl_to_prefill, aibrix_nixl_to_decode, moves_kv=False),
    Replay(
        "Dynamo", "1.6.1", dynamo_to_prefill, dynamo_to_decode, tokenizes=True, takes_chat=False
    ),
    Replay("Ray Serve LLM", "2.60.0", ray_to_prefill, ray_to_decode, keeps_fewest=True),
)
