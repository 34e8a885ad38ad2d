"""OpenTelemetry spans, one per load and one per offer, if `--otlp-traces-endpoint` is set.

The parent of a span is the client's span that the request's W3C trace headers name, or none. So the
spans are siblings of vLLM's `llm_request`. They cannot be its children: vLLM's API server creates
that span, with its id, after the request has ended.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from vllm.config import VllmConfig
from vllm.v1.request import Request

from nixl_kv.connector.stats import LoadReport, OfferReport
from nixl_kv.errors import LimitedLog, get_logger, shown_id
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import FailureKind

logger = get_logger(__name__)

PREFIX: Final = "nixl_kv."  # of the names of spans and attributes

_Attributes: TypeAlias = Mapping[str, str | float]
_Event: TypeAlias = tuple[str, float, _Attributes]  # with its time in Unix seconds


@dataclass(frozen=True)
class _Begun:
    request: str
    num_tokens: int
    headers: Mapping[str, str] | None
    began_at: float  # in Unix seconds

    @classmethod
    def of(cls, request: Request) -> "_Begun":
        tokens, headers = request.num_prompt_tokens, request.trace_headers
        return cls(shown_id(request.request_id), tokens, headers, time.time())


class Traces:
    """The spans of one engine. Scheduler thread only."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._loads: dict[RequestId, _Begun] = {}
        self._offers: dict[RequestId, _Begun] = {}
        self._log = LimitedLog(logger, time.monotonic, interval_s=60.0)
        self._tracer: Any = None  # vLLM exports no traces
        if vllm_config.observability_config.otlp_traces_endpoint is not None:
            from opentelemetry import trace  # noqa: PLC0415 - only if traces are on

            # Before it creates its scheduler, vLLM sets the tracer provider of this process.
            self._tracer = trace.get_tracer("nixl_kv")

    def begin_load(self, request: Request) -> None:
        if self._tracer is not None:
            self._loads[RequestId(request.request_id)] = _Begun.of(request)

    def begin_offer(self, request: Request) -> None:
        if self._tracer is not None:
            self._offers[RequestId(request.request_id)] = _Begun.of(request)

    def drop_load(self, request: RequestId) -> None:
        """The request has ended, and vLLM never allocated blocks for its load."""
        self._loads.pop(request, None)

    def refuse(self, request: Request, reason: str) -> None:
        """Decode refused the ticket, so no load begins."""
        if self._tracer is not None:
            self._end("load", _Begun.of(request), {"outcome": "refused", "reason": reason})

    def end_loads(self, ended: Mapping[RequestId, LoadReport]) -> None:
        for request, load in ended.items():
            begun = self._loads.pop(request, None)
            if begun is not None:
                attributes: dict[str, str | float] = {
                    "outcome": load.outcome,
                    "reason": load.reason,
                    "peer": str(load.source or ""),
                    "bytes": load.num_bytes,
                    "path": ",".join(sorted(load.paths)),
                }
                self._end("load", begun, attributes, phases(load))

    def end_offers(self, ended: Mapping[RequestId, OfferReport]) -> None:
        for request, offer in ended.items():
            begun = self._offers.pop(request, None)
            if begun is not None:
                attributes = {"outcome": offer.end.value, "peer": offer.reader}
                asked: list[_Event] = [("ask", offer.asked_at, {})] if offer.reader else []
                self._end("offer", begun, attributes, asked)

    def _end(
        self, name: str, begun: _Begun, attributes: _Attributes, happened: Iterable[_Event] = ()
    ) -> None:
        try:
            self._export(name, begun, attributes, happened)
        except Exception as error:  # noqa: BLE001 - vLLM ends the engine if a hook raises
            self._log.warning("request %s has no span: %s", begun.request, repr(error))

    def _export(
        self, name: str, begun: _Begun, attributes: _Attributes, happened: Iterable[_Event]
    ) -> None:
        from opentelemetry.context import Context  # noqa: PLC0415
        from opentelemetry.trace import StatusCode  # noqa: PLC0415
        from vllm.tracing import extract_trace_context  # noqa: PLC0415

        attributes = {"request": begun.request, "tokens": begun.num_tokens, **attributes}
        span = self._tracer.start_span(
            f"{PREFIX}{name}",
            context=extract_trace_context(begun.headers) or Context(),
            start_time=_nanoseconds(begun.began_at),
            attributes={f"{PREFIX}{key}": value for key, value in attributes.items() if value},
        )
        for event, at, about in happened:
            span.add_event(event, about, _nanoseconds(at))
        if attributes["outcome"] in ("failed", "refused"):
            span.set_status(StatusCode.ERROR, str(attributes["reason"]))
        span.end(_nanoseconds(time.time()))


def phases(load: LoadReport) -> Iterator[_Event]:
    """The phases that a load has reached, each at its begin."""
    if not load.waits:
        return
    ask, blocks, queue, read, verify = load.waits
    is_loaded = not load.reason
    waits_at = load.began_at + ask
    reads_at = waits_at + blocks + queue
    landed_at = reads_at + read
    yield "ask", load.began_at, {"seconds": ask}
    if is_loaded or sum(load.waits) > ask:
        yield "wait", waits_at, {"blocks_seconds": blocks, "queue_seconds": queue}
    if is_loaded or read + verify > 0:
        yield "read", reads_at, {"seconds": read}
    if is_loaded or verify > 0 or load.reason == FailureKind.FENCED.value:
        yield "check", landed_at, {}  # of the fence
    if load.verified or verify > 0:
        yield "verify", landed_at, {"seconds": verify}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
