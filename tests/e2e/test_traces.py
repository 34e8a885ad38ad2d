"""One trace of a client through router, prefill and decode, as a collector receives it."""

import http.server
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from harness.cluster.client import COMPLETIONS, DIRECT, TIMEOUT_S
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, MODEL_NAME
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import look_until
from support.engines import EVENT_S, PATIENT, started
from support.trace_picture import draw, rows_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTH: Final = 500
TRACE: Final = "0af7651916cd43dd8448eb211c8031{:02x}"
CLIENT: Final = "b7ad6b7169203331"
PICTURE: Final = os.environ.get("NIXL_KV_TRACE_PICTURE")
"""Where to draw the trace, for docs/images."""
CLOCKS_NS: Final = 20_000_000
"""On a busy machine, time passes between a look at the monotonic clock and one at the other."""
SPANS: Final = {
    *(("prefill", "llm_request"), ("prefill", "nixl_kv.offer")),
    *(("decode", "llm_request"), ("decode", "nixl_kv.load")),
}
ENVIRONMENT: Final = {
    "OTEL_BSP_SCHEDULE_DELAY": "100",  # spans are exported at once
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "NO_PROXY": HOST,
    "no_proxy": HOST,
}


def attributes(owner: Any) -> dict[str, Any]:
    """The attributes of a span, or of the process that made it."""
    values = {each.key: each.value for each in owner.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


class Collector:
    """Receives spans over OTLP/HTTP, and keeps them."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """The role of an engine, and a span of it."""

    def of_trace(self, trace: str) -> dict[tuple[str, str], Any]:
        """All spans of a trace, by role and name, once all have come, or after the timeout."""

        def received() -> dict[tuple[str, str], Any]:
            found = [each for each in self.spans if each[1].trace_id.hex() == trace]
            return {(role, span.name): span for role, span in found}

        return look_until(received, lambda spans: len(spans) >= len(SPANS), EVENT_S)

    @contextmanager
    def serve(self) -> Iterator[str]:
        spans = self.spans

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    role = attributes(resource.resource)["service.name"]
                    spans.extend((role, span) for one in resource.scope_spans for span in one.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        with http.server.ThreadingHTTPServer((HOST, 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://{HOST}:{server.server_port}/v1/traces"
            server.shutdown()
            thread.join()


def complete(url: str, prompt: str, trace: str) -> None:
    """Ask as a client that is itself a span of the trace."""
    reply = httpx.post(
        f"{url}{COMPLETIONS}",
        json={"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0},
        headers={"traceparent": f"00-{trace}-{CLIENT}-01"},
        timeout=TIMEOUT_S,
        **DIRECT,
    )
    assert reply.is_success, reply.text


def test_one_trace_leads_through_router_prefill_and_decode(cluster: Cluster) -> None:
    collector = Collector()
    with collector.serve() as url:
        specs = pair_specs(
            ensure_tiny_model(),
            suffix="-traced",
            kv_cache_bytes=128 << 20,
            connector_config={**PATIENT, "insecure": True},
            extra_args=("--otlp-traces-endpoint", url),
        )
        named = [
            replace(one, extra_env={**ENVIRONMENT, "OTEL_SERVICE_NAME": one.role}) for one in specs
        ]
        with started(cluster, *named) as (prefill, decode):
            router = cluster.route([prefill], [decode])
            for number in (1, 2):  # the first one also meets the peer
                trace = TRACE.format(number)
                begin = time.time_ns()
                complete(router.url, random_prompt(LENGTH, seed=600 + number), trace)
                end = time.time_ns()
                spans = collector.of_trace(trace)
    assert {*spans} == SPANS
    assert {span.parent_span_id.hex() for span in spans.values()} == {CLIENT}

    offer, load = spans["prefill", "nixl_kv.offer"], spans["decode", "nixl_kv.load"]
    offered, loaded = attributes(offer), attributes(load)
    assert offered["nixl_kv.outcome"] == "read"
    assert offered["nixl_kv.tokens"] == LENGTH
    assert loaded["nixl_kv.outcome"] == "loaded"
    assert loaded["nixl_kv.tokens"] == LENGTH
    assert loaded["nixl_kv.path"] == "direct"
    assert loaded["nixl_kv.bytes"] > 0
    assert str(prefill.side_port) in loaded["nixl_kv.peer"]
    for role, ours in (("prefill", offered), ("decode", loaded)):
        request_id = attributes(spans[role, "llm_request"])["gen_ai.request.id"]
        assert ours["nixl_kv.request"].startswith(request_id)

    # Each in the order in which it happened; both legs overlap.
    whole = spans["decode", "llm_request"]
    times = {event.name: event.time_unix_nano for event in load.events}
    assert list(times) == ["ask", "wait", "read", "check", "verify"]
    (asked,) = (event.time_unix_nano for event in offer.events if event.name == "ask")
    of_decode = [
        whole.start_time_unix_nano,
        load.start_time_unix_nano,
        *(times[name] for name in ("ask", "wait", "read", "check")),
        load.end_time_unix_nano,
        whole.end_time_unix_nano,
    ]
    of_prefill = [
        spans["prefill", "llm_request"].start_time_unix_nano,
        offer.start_time_unix_nano,
        times["read"],
    ]
    of_ask = [times["ask"], asked, times["read"]]
    for moments in (of_decode, of_prefill, of_ask):
        late = [(a, b) for a, b in itertools.pairwise(moments) if a > b + CLOCKS_NS]
        assert not late, moments
    assert offer.end_time_unix_nano >= times["check"]

    if PICTURE:
        bars = [("client, through the router", begin, end, dict[str, int]())]
        for about, span in sorted(spans.items(), key=lambda one: one[1].start_time_unix_nano):
            marks = {event.name: event.time_unix_nano for event in span.events}
            bars.append(
                (" ".join(about), span.start_time_unix_nano, span.end_time_unix_nano, marks)
            )
        Path(PICTURE).write_text(draw(list(rows_of(bars))), "utf-8")
