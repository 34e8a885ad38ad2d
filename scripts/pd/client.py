"""Requests to an engine or a router, and an engine's counters."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import httpx
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import Self

TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 2.0
METRICS_LAG_S = 1.0
Counters = dict[str, float]


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


class Client:
    """Greedy completions over one kept connection, so that no request pays for a new one."""

    def __init__(self, url: str, model: str = "tiny", timeout_s: float = TIMEOUT_S) -> None:
        """Takes the base URL of an engine or of a router."""
        self.url = url
        self.model = model
        # Proxies of the environment are for the world outside, not for our own engines.
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        """A client closes its connections at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._http.close()

    def complete(self, prompt: str, max_tokens: int = 16, **extra: object) -> Answer:
        """The greedy continuation of exactly max_tokens tokens, token by token."""
        begin = time.perf_counter()
        reply = self._http.post("/v1/completions", json=self._body(prompt, max_tokens, extra))
        seconds = time.perf_counter() - begin
        _check(reply)
        answer = reply.json()
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        return Answer(
            text=choice["text"],
            tokens=tuple(logprobs["tokens"]),
            prompt_tokens=answer["usage"]["prompt_tokens"],
            seconds=seconds,
            likely=tuple(logprobs["top_logprobs"]),
            finish_reason=choice["finish_reason"] or "",
        )

    def ticket(self, prompt: str, params: Mapping[str, object]) -> dict[str, object] | None:
        """What a router asks of a prefill engine: its answer's kv_transfer_params."""
        body = self._body(prompt, 1, {"kv_transfer_params": dict(params)})
        reply = self._http.post("/v1/completions", json=body)
        _check(reply)
        found: dict[str, object] | None = reply.json().get("kv_transfer_params")
        return found

    def texts(self, prompt: str, max_tokens: int = 16, **extra: object) -> list[str]:
        """All answers to one request, such as those of n=2."""
        reply = self._http.post("/v1/completions", json=self._body(prompt, max_tokens, extra))
        _check(reply)
        return [choice["text"] for choice in reply.json()["choices"]]

    def disconnect_early(self, prompt: str, after_s: float = 0.05, **extra: object) -> None:
        """Send a request and hang up before its answer."""
        with contextlib.suppress(httpx.TimeoutException):
            self._http.post("/v1/completions", json=self._body(prompt, 1, extra), timeout=after_s)

    def time_to_first_token(self, prompt: str, **extra: object) -> float:
        """Seconds from the request to the first streamed token."""
        body = self._body(prompt, 1, extra) | {"stream": True}
        begin = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.is_error:
                reply.read()
            _check(reply)
            first = None
            for line in reply.iter_lines():  # read to the end, so that the connection is kept
                if first is None and _has_token(line):
                    first = time.perf_counter() - begin
        if first is None:
            raise RuntimeError(f"{self.url}: the stream ended without a token")
        return first

    def counters(self) -> Counters:
        """All samples of /metrics by name, added up over their labels."""
        reply = self._http.get("/metrics")
        _check(reply)
        return parse_counters(reply.text)

    def counters_after(self, before: Counters, name: str) -> Counters:
        """What changed since `before`; waits a moment for `name`, which may lag the answer."""
        deadline = time.monotonic() + METRICS_LAG_S
        while True:
            now = self.counters()
            changed = {key: value - before.get(key, 0.0) for key, value in now.items()}
            if changed.get(name, 0.0) > 0 or time.monotonic() > deadline:
                return changed
            time.sleep(0.05)

    def _body(self, prompt: str, max_tokens: int, extra: Mapping[str, object]) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        return body | dict(extra)


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
        raise RuntimeError(f"{reply.request.url}: HTTP {reply.status_code}: {reply.text[:500]}")


def _has_token(line: str) -> bool:
    data = line.removeprefix("data: ")
    if data in (line, "[DONE]"):
        return False
    choices = json.loads(data).get("choices") or []
    return bool(choices) and bool(choices[0].get("text"))
