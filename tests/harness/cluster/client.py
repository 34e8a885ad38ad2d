"""Requests to an engine or a router, as any client of OpenAI's API sends them.

Errors of the connection are httpx's own.
"""

import contextlib
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import Self

TIMEOUT_S: Final = 120.0
HEALTH_TIMEOUT_S: Final = 2.0
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
WANT_TICKET: Final = {"do_remote_decode": True, "do_remote_prefill": False}
"""The kv_transfer_params with which a router asks a prefill engine."""

# Proxies of the environment are for the world outside, not for our own engines. They have no
# certificates either, and to load those of others takes long.
DIRECT: Final[Mapping[str, Any]] = {
    "trust_env": False,
    "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
}

Counters = dict[str, float]
Body = dict[str, object]
Choice = Mapping[str, Any]
Messages = Sequence[Mapping[str, object]]
Ticket = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""Text, token ids, or several of either."""


class RefusedError(RuntimeError):
    """A request ended with an HTTP status that says it failed, and perhaps why."""

    def __init__(self, reply: httpx.Response) -> None:
        super().__init__(f"{reply.request.url}: HTTP {reply.status_code}: {reply.text[:500]}")
        self.status = reply.status_code
        self.error: Mapping[str, Any] = {}
        """The reply's `error`, as OpenAI's API has it; empty where it says nothing."""
        with contextlib.suppress(ValueError, AttributeError):
            self.error = reply.json().get("error") or {}


class BrokenStreamError(RuntimeError):
    """A streamed answer ended with an error event."""


class NoTicketError(RuntimeError):
    """A prefill engine answered without a ticket."""


@dataclass(frozen=True)
class Answer:
    """The reply to one prompt."""

    text: str
    tokens: tuple[str, ...]
    prompt_tokens: int
    seconds: float
    likely: tuple[Mapping[str, float], ...] = ()
    """The log probabilities of each token and of its alternatives."""
    finish_reason: str = ""
    """`abort` if the engine was shut down in the middle: the answer is not whole, and says so."""
    pieces: tuple[str, ...] = ()  # of the text, if it was streamed
    cached_tokens: int | None = None  # with --enable-prompt-tokens-details
    id: str = ""  # vllm-router writes the addresses of both engines into it


class Client:
    """Greedy answers over one kept connection, so that no request pays for a new one."""

    def __init__(
        self,
        url: str,
        model: str = "tiny",
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        self.model = model
        self._http = httpx.Client(base_url=url, timeout=timeout_s, transport=transport, **DIRECT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def complete(self, prompt: Prompt, max_tokens: int = 16, **extra: object) -> Answer:
        """The greedy continuation of exactly max_tokens tokens, token by token."""
        return self.answers(prompt, max_tokens, **extra)[0]

    def answers(self, prompt: Prompt, max_tokens: int = 16, **extra: object) -> list[Answer]:
        """Several of complete(): one for each prompt, or `n` to one prompt."""
        return self._answers(COMPLETIONS, self._body(max_tokens, _prompt(prompt) | extra))

    def chat(self, messages: Messages, max_tokens: int = 16, **extra: object) -> Answer:
        """The greedy next message."""
        return self._answers(CHAT, self._body(max_tokens, _messages(messages) | extra))[0]

    def stream(self, prompt: Prompt, max_tokens: int = 16, **extra: object) -> Answer:
        """The same as complete(), streamed."""
        return self._stream(COMPLETIONS, self._body(max_tokens, _prompt(prompt) | extra))

    def stream_chat(self, messages: Messages, max_tokens: int = 16, **extra: object) -> Answer:
        """The same as chat(), streamed."""
        return self._stream(CHAT, self._body(max_tokens, _messages(messages) | extra))

    def ticket(self, prompt: Prompt, max_tokens: int = 1) -> Ticket:
        """The kv_transfer_params of a prefill engine's answer, which a router asks for.

        With more tokens than one, prefill goes on to generate before it gives the ticket.
        """
        return self.timed_ticket(prompt, max_tokens)[0]

    def timed_ticket(
        self, prompt: Prompt, max_tokens: int = 1, **extra: object
    ) -> tuple[Ticket, float]:
        """The ticket, and the seconds that prefill's answer took."""
        begin = time.perf_counter()
        body = self._body(max_tokens, _prompt(prompt) | extra)
        ticket, _ = self._ask_for_ticket(COMPLETIONS, body)
        return ticket, time.perf_counter() - begin

    def chat_ticket(self, messages: Messages) -> tuple[Ticket, list[int]]:
        """The ticket for a chat, and the ids of all its tokens, also of pictures."""
        asked: Body = {"messages": messages, "return_token_ids": True}
        ticket, reply = self._ask_for_ticket(CHAT, self._body(1, asked))
        return ticket, reply["prompt_token_ids"]

    def _ask_for_ticket(self, path: str, body: Body) -> tuple[Ticket, Mapping[str, Any]]:
        """The ticket, and the whole reply."""
        body = {"kv_transfer_params": WANT_TICKET, **body}
        reply = _checked(self._http.post(path, json=body)).json()
        if reply.get("kv_transfer_params") is None:
            raise NoTicketError(f"{self.url}: no ticket")
        return reply["kv_transfer_params"], reply

    def disconnect_early(self, prompt: Prompt, after_s: float = 0.05, **extra: object) -> None:
        """Send a request and hang up before its answer."""
        body = self._body(1, _prompt(prompt) | extra)
        with contextlib.suppress(httpx.TimeoutException):
            self._http.post(COMPLETIONS, json=body, timeout=after_s)

    def abandon(self, prompt: Prompt, max_tokens: int, **extra: object) -> None:
        """Send a request and hang up when its first token has come."""
        with self.streaming(prompt, max_tokens, **extra) as choices:
            next(choices, None)

    @contextlib.contextmanager
    def streaming(
        self, prompt: Prompt, max_tokens: int, **extra: object
    ) -> Iterator[Iterator[Choice]]:
        """Send a request, and hang up at the end of the block, whatever has come by then."""
        body = self._body(max_tokens, _prompt(prompt) | extra)
        with self._choices(COMPLETIONS, body) as choices:
            yield choices

    def counters(self) -> Counters:
        """All samples of /metrics by `name` and by `name{label=value}`, without buckets.

        Samples are added up over their other labels.
        """
        totals: Counters = {}
        for family in text_string_to_metric_families(self.metrics()):
            for sample in family.samples:
                if "le" in sample.labels:
                    continue
                labels = [f"{{{label}={value}}}" for label, value in sample.labels.items()]
                for name in (sample.name, *(f"{sample.name}{label}" for label in labels)):
                    totals[name] = totals.get(name, 0.0) + sample.value
        return totals

    def reset_prefix_cache(self, **options: bool) -> bool:
        """Empty the engine's prefix cache; vLLM refuses while a request holds blocks.

        The engine needs VLLM_SERVER_DEV_MODE.
        """
        reply = self._http.post("/reset_prefix_cache", params=options)
        return bool(_checked(reply).json()["success"])

    def vllm_version(self) -> str:
        """The engine's, such as 0.32.0."""
        return str(_checked(self._http.get("/version")).json()["version"])

    def metrics(self) -> str:
        return _checked(self._http.get("/metrics")).text

    def _answers(self, path: str, body: Body) -> list[Answer]:
        begin = time.perf_counter()
        answer = _checked(self._http.post(path, json=body)).json()
        seconds = time.perf_counter() - begin
        prompt_tokens = answer["usage"]["prompt_tokens"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return [
            Answer(
                *(_text(choice), _tokens(choice), prompt_tokens, seconds, _likely(choice)),
                finish_reason=choice["finish_reason"] or "",
                cached_tokens=details.get("cached_tokens"),
                id=answer["id"],
            )
            for choice in answer["choices"]
        ]

    def _stream(self, path: str, body: Body) -> Answer:
        """Without the numbers of tokens and seconds."""
        with self._choices(path, body) as coming:
            choices = list(coming)
        pieces = tuple(piece for choice in choices if (piece := _text(choice)))
        tokens = tuple(token for choice in choices for token in _tokens(choice))
        reason = choices[-1]["finish_reason"] or ""
        return Answer("".join(pieces), tokens, 0, 0.0, finish_reason=reason, pieces=pieces)

    @contextlib.contextmanager
    def _choices(self, path: str, body: Body) -> Iterator[Iterator[Choice]]:
        """Those of single answers, as they come."""
        with self._http.stream("POST", path, json=body | {"stream": True}) as reply:
            if reply.is_error:
                reply.read()
            lines = (line.removeprefix("data: ") for line in _checked(reply).iter_lines())
            events = (json.loads(line) for line in lines if line.startswith("{"))
            yield (choice for event in events for choice in _checked_event(event))

    def _body(self, max_tokens: int, asked: Body) -> Body:
        greedy = {"temperature": 0, "ignore_eos": True}
        return {"model": self.model, "max_tokens": max_tokens, **greedy, **asked}


def _prompt(prompt: Prompt) -> Body:
    return {"prompt": prompt, "logprobs": 0}


def _messages(messages: Messages) -> Body:
    return {"messages": messages, "logprobs": True}


def is_healthy(url: str, path: str = "/health") -> bool:
    """Whether this path answers 200 now."""
    try:
        return httpx.get(f"{url}{path}", timeout=HEALTH_TIMEOUT_S, **DIRECT).is_success
    except httpx.HTTPError:
        return False


def _checked(reply: httpx.Response) -> httpx.Response:
    if reply.is_error:
        raise RefusedError(reply)
    return reply


def _checked_event(event: Mapping[str, Any]) -> Sequence[Choice]:
    """The choices in an event of a stream."""
    if "error" in event:
        raise BrokenStreamError(str(event["error"]))
    return event.get("choices") or ()


def _text(choice: Choice) -> str:
    message = choice.get("message", choice.get("delta"))
    return str(choice["text"] if message is None else message.get("content") or "")


def _tokens(choice: Choice) -> tuple[str, ...]:
    """None where no log probabilities were asked for."""
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:  # of a chat
        return tuple(one["token"] for one in logprobs["content"])
    return tuple(logprobs.get("tokens", ()))


def _likely(choice: Choice) -> tuple[Mapping[str, float], ...]:
    """The first token of a prompt that is echoed has none."""
    logprobs = choice.get("logprobs") or {}
    return tuple(likely or {} for likely in logprobs.get("top_logprobs") or ())
