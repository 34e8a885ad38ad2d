"""`--middleware nixl_kv.connector.EarlyAnswer`: prefill answers before it has computed.

A router that starts one leg after the other waits for prefill's answer. This middleware sends the
answer, with a pair ticket, when vLLM begins to read the request, and computes the request behind
it. So decode tokenizes, asks and allocates blocks meanwhile. If decode releases the offer before it
is computed, the middleware pretends that the client has hung up, and vLLM aborts the request.

It learns the engine's address from the tickets in the engine's own answers, so the first request
after a start, a drain or a new incarnation is answered as usual. All other requests pass unchanged.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from nixl_kv.connector import unpromised
from nixl_kv.connector.plugin import log_like_vllm, own_config
from nixl_kv.engine.trust import Trust
from nixl_kv.engine.watch import OfferWatch
from nixl_kv.errors import (
    REQUEST_LINES,
    ConfigError,
    LimitedLog,
    TicketRefused,
    get_logger,
    shown_id,
)
from nixl_kv.ids import new_nonce, short
from nixl_kv.protocol.params import why_unbounded
from nixl_kv.protocol.ticket import FIELD, Ticket

logger = get_logger(__name__)

_Scope: TypeAlias = MutableMapping[str, Any]
_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

# Its values stay JSON: to parse a prompt of 16,384 tokens, and write it again, takes 1 ms.
_Request: TypeAlias = dict[str, msgspec.Raw]
_REQUEST: Final = msgspec.json.Decoder(_Request)

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
HTTP_OK: Final = 200
REQUEST_ID: Final = b"x-request-id"

# The allowed values of fields that ask for a part of prefill's own output. Decode's answer has all
# the rest. A field may also be absent or null.
ALLOWED: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "use_beam_search": (False,),
    "prompt_embeds": (),  # further prompts
    "max_tokens": (1,),
    "max_completion_tokens": (1,),
    "min_tokens": (0, 1),
}
LIMITS: Final = ("max_tokens", "max_completion_tokens")  # one of them must be given
# Requests in progress in one API server. Further ones are not answered early: a client that has its
# answer could go on to send others.
MAX_OPEN: Final = 1024
OFF: Final = "EarlyAnswer does nothing on this engine: data_parallel_size is %d; allowed: 1"


class EarlyAnswer:
    """An ASGI middleware for vLLM's API server on a prefill engine."""

    def __init__(self, app: _App) -> None:
        log_like_vllm()
        self._app = app
        self.log = LimitedLog(logger, time.monotonic, lines=REQUEST_LINES)
        self._error_log = LimitedLog(logger, time.monotonic)  # with tracebacks
        self._trust: Trust | None = None
        self._for_in_tree = True
        self._is_off = unpromised.warn(unpromised.EARLY_ANSWER)
        self._latest: Ticket | None = None  # from the engine's last answer
        self._watch: OfferWatch | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio's own references are weak

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        is_ours = scope["type"] == "http" and scope["method"] == "POST"
        # With --root-path, a proxy may leave the prefix in the path.
        path = scope["path"].removeprefix(scope.get("root_path", "")) if is_ours else ""
        if path not in (COMPLETIONS, CHAT):
            await self._app(scope, receive, send)
            return
        if self._trust is None and not self._is_off:
            self._configure(scope["app"].state.vllm_config)
        if self._is_off:
            await self._app(scope, receive, send)
            return
        # A task of its own computes the request: this call ends with the answer, as servers and
        # outer middlewares expect. An error after it would end the connection, which may carry
        # another request by then.
        exchange = _Exchange(self, scope, path, receive, send)
        task = asyncio.create_task(self._compute(scope, exchange))
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_end, exchange))
        try:
            await asyncio.wait((task, exchange.answered), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not exchange.is_answered:
                task.cancel()  # unless it has ended
        if not exchange.is_answered:
            task.result()

    async def _compute(self, scope: _Scope, exchange: "_Exchange") -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            if exchange.pair is not None and self._watch is not None:
                self._watch.discard(exchange.pair.nonce)
            if exchange.is_answered and exchange.status != HTTP_OK:
                # The request may never have come to the engine, and decode waits for it.
                client, name = scope["app"].state.engine_client, f"early-{uuid.uuid4().hex}"
                await client.notify_kv_transfer_request_rejected(name, exchange.params)

    def _on_end(self, exchange: "_Exchange", task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if not exchange.is_answered or error is None:
            return
        if self._error_log.warning("%s has failed: %s", exchange, repr(error)):
            logger.error("the error of that request", exc_info=error)

    def _configure(self, vllm_config: Any) -> None:
        config, roles = own_config(vllm_config)
        if "prefill" not in roles:
            raise ConfigError(
                "--middleware nixl_kv.connector.EarlyAnswer: kv_role is 'kv_consumer'; allowed: "
                "'kv_producer' or 'kv_both', because only prefill answers early"
            )
        trust = Trust.of(config)
        size = vllm_config.parallel_config.data_parallel_size
        if size != 1:
            self._is_off = True
            logger.warning(OFF, size)
        else:
            self._watch = OfferWatch(trust.control())
            self._watch.start()
        self._trust, self._for_in_tree = trust, config.in_tree_decode

    def pair(self, request: _Request) -> tuple[Ticket, dict[str, Any]] | None:
        """A pair ticket and its `kv_transfer_params`; None if the request must pass unchanged."""
        is_full = len(self._tasks) > MAX_OPEN
        if self._latest is None or self._trust is None or is_full or not may_answer_early(request):
            return None
        pair = msgspec.structs.replace(
            self._latest, nonce=new_nonce(), num_tokens=0, context="", media=""
        )
        return pair, self._trust.seal(pair, for_in_tree=self._for_in_tree)

    def watch(self, pair: Ticket, released: asyncio.Event) -> None:
        """Set `released` if decode releases the offer of a pair."""
        if self._watch is not None:
            loop = asyncio.get_running_loop()
            self._watch.add(pair, partial(loop.call_soon_threadsafe, released.set))

    def learn(self, params: Any) -> None:
        """Take the engine's address from the `kv_transfer_params` of its answer."""
        self._latest = None
        if self._trust is not None and isinstance(params, dict) and FIELD in params:
            try:
                ticket = self._trust.open_own({FIELD: params[FIELD]})
                self._latest = None if ticket.not_offered else ticket
            except TicketRefused as error:
                self.log.warning("EarlyAnswer cannot read this engine's ticket: %s", error)


class _Exchange:
    """One request. vLLM calls `receive` only after it has accepted the request's API key."""

    def __init__(
        self, early: EarlyAnswer, scope: _Scope, path: str, receive: _Receive, send: _Send
    ) -> None:
        self._early = early
        self._path = path
        headers = scope.get("headers", ())
        given = next((value for name, value in headers if name == REQUEST_ID), None)
        self._request_id = uuid.uuid4().hex if given is None else given.decode("latin-1")
        args = getattr(scope["app"].state, "args", None)
        self._shows_id = getattr(args, "enable_request_id_headers", False)
        self._receive = receive
        self._send = send
        self._has_begun = False  # the request was read
        self._asks_for_offer = False
        self._answer = bytearray()
        self.status = 0
        # Of a request that is answered early:
        self.is_answered = False
        self.answered = asyncio.get_running_loop().create_future()
        self.pair: Ticket | None = None
        self.params: dict[str, Any] = {}
        self._released = asyncio.Event()

    def __str__(self) -> str:
        offer = "" if self.pair is None else f" (offer {short(self.pair.nonce)})"
        return f"request {shown_id(self._request_id)}{offer}, which was answered early,"

    async def receive(self) -> _Message:
        if self._has_begun:
            if not self.is_answered:
                return await self._receive()
            # vLLM aborts a request whose client hangs up, which now depends on decode alone.
            await self._released.wait()
            self._early.log.info("%s is aborted: decode has released its offer", self)
            return {"type": "http.disconnect"}
        self._has_begun = True
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return {"type": "http.request", "body": await self._begin(bytes(body)), "more_body": False}

    async def _begin(self, body: bytes) -> bytes:
        """Answer the request if that is possible; returns the body for vLLM."""
        try:
            request = _REQUEST.decode(body)
            params = _value(request, "kv_transfer_params")
            if why_unbounded(params):  # the engine refuses it
                return body
            if not isinstance(params, dict) or params.get("do_remote_decode") is not True:
                return body
            self._asks_for_offer = True
            pair = None if FIELD in params else self._early.pair(request)
            model = _value(request, "model")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body
        if pair is None or not isinstance(model, str | None):
            return body
        self.pair, sealed = pair
        self.params = params | {FIELD: sealed[FIELD]}
        request["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(self.params))
        answer = msgspec.json.encode(_answer(self._path, self._request_id, model, sealed))
        self.is_answered = True
        headers = [(b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(answer)).encode("ascii")))
        if self._shows_id:  # as vLLM's own answers do
            headers.append((REQUEST_ID, self._request_id.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": HTTP_OK, "headers": headers})
        await self._send({"type": "http.response.body", "body": answer, "more_body": False})
        self.answered.set_result(None)
        self._early.watch(self.pair, self._released)
        return msgspec.json.encode(request)

    async def send(self, message: _Message) -> None:
        if not self.is_answered:
            await self._send(message)
        if not self._asks_for_offer:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._answer += message.get("body", b"")
            if not message.get("more_body", False):
                self._end()

    def _end(self) -> None:
        if self.status != HTTP_OK:
            if self.is_answered:
                self._early.log.warning("%s has failed with HTTP %d", self, self.status)
            return
        try:
            answer = msgspec.json.decode(bytes(self._answer))
        except msgspec.DecodeError:
            return
        if isinstance(answer, dict):
            self._early.learn(answer.get("kv_transfer_params"))


def may_answer_early(request: _Request) -> bool:
    """Whether decode's answer says everything that prefill's own output would say."""
    for name, allowed in ALLOWED.items():
        value = _value(request, name)
        # False equals 0, which asks for log probabilities.
        is_allowed = any(value == each and type(value) is type(each) for each in allowed)
        if value is not None and not is_allowed:
            return False
    if all(_value(request, name) is None for name in LIMITS):
        return False
    prompt = bytes(request.get("prompt", b"null"))
    if prompt == b"null":
        return bytes(request.get("messages", b"")).startswith(b"[")
    # A list of numbers is one prompt of token ids; any other list may be several prompts.
    first = prompt[1:].lstrip()[:1] if prompt.startswith(b"[") else b""
    return first.isdigit() or (prompt.startswith(b'"') and prompt != b'""')


def _value(request: _Request, name: str) -> Any:
    return msgspec.json.decode(request.get(name, b"null"))


def _answer(path: str, request_id: str, model: object, params: Mapping[str, Any]) -> dict[str, Any]:
    """The response to a request for one token, without the token."""
    # Without `usage` too, because vllm-router puts prefill's `prompt_tokens` into decode's answer.
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    if path == CHAT:
        kind, prefix = "chat.completion", "chatcmpl"
        choice["message"] = {"role": "assistant", "content": ""}
    else:
        kind, prefix = "text_completion", "cmpl"
        choice["text"] = ""
    return {
        "id": f"{prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "kv_transfer_params": params,
    }
