"""Requests to an engine or a router, as any client of OpenAI's API sends them."""

import contextlib
import json
import ssl
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
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

Counters = dict[str, float]
Body = dict[str, object]
Choice = Mapping[str, Any]
Messages = Sequence[Mapping[str, str]]
Ticket = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""Text, token ids, or several of either."""


class RefusedError(RuntimeError):
    """A request ended with an HTTP status that says it failed, and perhaps why."""

    def __init__(self, reply: httpx.Response) -> None:
        """Of a reply that was read."""
        super().__init__(f"{reply.request.url}: HTTP {reply.status_code}: {reply.text[:500]}")
        self.status = reply.status_code
        self.error: Mapping[str, Any] = {}
        """The reply's `error`, as OpenAI's API has it; empty where it says nothing."""
        with contextlib.suppress(ValueError, AttributeError):
            self.error = reply.json().get("error") or {}


class NoTicketError(RuntimeError):
    """A prefill engine answered without a ticket."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt."""

    text: str
    tokens: tuple[str, ...]
    prompt_tokens: int
    seconds: float
    likely: tuple[Mapping[str, float], ...] = ()
    """Of each token, what else the engine thought of, with its log probability."""
    finish_reason: str = ""
    """`abort` if the engine was shut down in the middle: the answer is not whole, and says so."""


@dataclass(frozen=True)
class Streamed:
    """What came back for one prompt, piece by piece."""

    pieces: tuple[str, ...]
    tokens: tuple[str, ...]
    finish_reason: str


class Client:
    """Greedy answers over one kept connection, so that no request pays for a new one."""

    def __init__(
        self,
        url: str,
        model: str = "tiny",
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """For the base URL of an engine or of a router; or for what stands in its place."""
        self.url = url
        self.model = model
        # Proxies of the environment are for the world outside, not for our own engines.
        # They have no certificates either: without those of others a client is made in no time.
        self._http = httpx.Client(
            base_url=url,
            timeout=timeout_s,
            trust_env=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            transport=transport,
        )

    def __enter__(self) -> Self:
        """A client closes its connections at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def complete(self, prompt: Prompt, max_tokens: int = 16, **extra: object) -> Answer:
        """The greedy continuation of exactly max_tokens tokens, token by token."""
        return self.answers(prompt, max_tokens, **extra)[0]

    def answers(self, prompt: Prompt, max_tokens: int = 16, **extra: object) -> list[Answer]:
        """As complete(), one for each prompt, or several to one prompt."""
        return self._answers(COMPLETIONS, self._body(prompt, max_tokens, extra))

    def chat(self, messages: Messages, max_tokens: int = 16, **extra: object) -> Answer:
        """The greedy next message."""
        return self._answers(CHAT, self._chat_body(messages, max_tokens, extra))[0]

    def stream(self, prompt: Prompt, max_tokens: int = 16, **extra: object) -> Streamed:
        """As complete(), in the pieces that it comes in."""
        return self._stream(COMPLETIONS, self._body(prompt, max_tokens, extra))

    def stream_chat(self, messages: Messages, max_tokens: int = 16, **extra: object) -> Streamed:
        """As chat(), in the pieces that it comes in."""
        return self._stream(CHAT, self._chat_body(messages, max_tokens, extra))

    def ticket(self, prompt: Prompt, max_tokens: int = 1) -> Ticket:
        """What a router asks of a prefill engine: its answer's kv_transfer_params.

        With more tokens than one, prefill goes on to generate before it gives the ticket.

        Raises:
            NoTicketError: if there is none.
        """
        body = self._body(prompt, max_tokens, {"kv_transfer_params": WANT_TICKET})
        ticket: Ticket | None = self._post(COMPLETIONS, body).json().get("kv_transfer_params")
        if ticket is None:
            raise NoTicketError(f"{self.url}: no ticket")
        return ticket

    def disconnect_early(self, prompt: Prompt, after_s: float = 0.05, **extra: object) -> None:
        """Send a request and hang up before its answer."""
        with contextlib.suppress(httpx.TimeoutException):
            self._http.post(COMPLETIONS, json=self._body(prompt, 1, extra), timeout=after_s)

    def abandon(self, prompt: Prompt, max_tokens: int, **extra: object) -> None:
        """Send a request and hang up when its first token has come."""
        body = self._body(prompt, max_tokens, extra) | {"stream": True}
        with self._http.stream("POST", COMPLETIONS, json=body) as reply:
            next(_choices(reply), None)

    def counters(self) -> Counters:
        """All samples of /metrics by name, added up over their labels."""
        return parse_counters(self.metrics())

    def vllm_version(self) -> str:
        """The engine's, such as 0.32.0."""
        reply = self._http.get("/version")
        _check(reply)
        return str(reply.json()["version"])

    def metrics(self) -> str:
        """What /metrics says."""
        reply = self._http.get("/metrics")
        _check(reply)
        return reply.text

    def _post(self, path: str, body: Body) -> httpx.Response:
        reply = self._http.post(path, json=body)
        _check(reply)
        return reply

    def _answers(self, path: str, body: Body) -> list[Answer]:
        begin = time.perf_counter()
        reply = self._post(path, body)
        seconds = time.perf_counter() - begin
        answer = reply.json()
        prompt_tokens = answer["usage"]["prompt_tokens"]
        return [_answer(choice, prompt_tokens, seconds) for choice in answer["choices"]]

    def _stream(self, path: str, body: Body) -> Streamed:
        with self._http.stream("POST", path, json=body | {"stream": True}) as reply:
            choices = list(_choices(reply))
        return Streamed(
            pieces=tuple(piece for choice in choices if (piece := _text(choice))),
            tokens=tuple(token for choice in choices for token in _tokens(choice)),
            finish_reason=choices[-1]["finish_reason"] or "",
        )

    def _body(self, prompt: Prompt, max_tokens: int, extra: Mapping[str, object]) -> Body:
        body: Body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        return body | dict(extra)

    def _chat_body(self, messages: Messages, max_tokens: int, extra: Mapping[str, object]) -> Body:
        body = self._body("", max_tokens, {"messages": messages, "logprobs": True} | dict(extra))
        del body["prompt"]
        return body


def parse_counters(text: str) -> Counters:
    """Samples of a Prometheus exposition by name, buckets left out, labels added up."""
    totals: Counters = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def is_healthy(url: str) -> bool:
    """Whether /health answers 200 now. Asked often: httpx would load certificates each time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as reply:
            return bool(reply.status == HTTPStatus.OK)
    except OSError:
        return False


def _check(reply: httpx.Response) -> None:
    if reply.is_error:
        raise RefusedError(reply)


def _answer(choice: Choice, prompt_tokens: int, seconds: float) -> Answer:
    logprobs = choice.get("logprobs") or {}
    return Answer(
        text=_text(choice),
        tokens=_tokens(choice),
        prompt_tokens=prompt_tokens,
        seconds=seconds,
        # The first token of a prompt that is echoed has none.
        likely=tuple(likely or {} for likely in logprobs.get("top_logprobs") or ()),
        finish_reason=choice["finish_reason"] or "",
    )


def _text(choice: Choice) -> str:
    message = choice.get("message", choice.get("delta"))
    return str(choice["text"] if message is None else message.get("content") or "")


def _tokens(choice: Choice) -> tuple[str, ...]:
    """None where no log probabilities were asked for."""
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:  # of a chat
        return tuple(one["token"] for one in logprobs["content"])
    return tuple(logprobs.get("tokens", ()))


def _choices(reply: httpx.Response) -> Iterator[Choice]:
    """Of a stream of single answers, as they come."""
    if reply.is_error:
        reply.read()
    _check(reply)
    for line in reply.iter_lines():
        data = line.removeprefix("data: ")
        if data not in (line, "[DONE]"):
            yield from json.loads(data).get("choices") or ()
