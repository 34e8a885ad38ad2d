"""One trace of a client through router, prefill and decode, as a collector receives it."""

import http.server
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from harness.cluster.client import COMPLETIONS, DIRECT, TIMEOUT_S, WANT_TICKET
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, MODEL_NAME, Engine
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from support.engines import EVENT_S, PATIENT
from support.nixl_kv_command import nixl_kv
from support.trace_picture import draw

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTH: Final = 500
TRACE: Final = "0af7651916cd43dd8448eb211c8031{:02x}"
CLIENT: Final = "b7ad6b7169203331"
PICTURE: Final = os.environ.get("NIXL_KV_TRACE_PICTURE")
CLOCKS_NS: Final = 20_000_000
"""On a busy machine, time passes between a look at the monotonic clock and one at the other."""


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    parent: str
    begin: int
    end: int
    attributes: dict[str, Any]
    events: dict[str, int]
    """When each happened, in nanoseconds."""
    error: str

    @property
    def about(self) -> tuple[str, str]:
        return self.service, self.name


@dataclass
class Collector:
    """Receives spans over OTLP/HTTP, and keeps them."""

    spans: list[Span] = field(default_factory=list)
    url: str = ""

    def receive(self, payload: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(payload).resource_spans:
            (service,) = values(resource.resource, "service.name")
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        {each.key: value_of(each) for each in span.attributes},
                        {event.name: event.time_unix_nano for event in span.events},
                        span.status.message,
                    )
                    for span in scope.spans
                ]

    def wait(self, trace: str, *about: tuple[str, str]) -> dict[tuple[str, str], Span]:
        """The spans of a trace, when all of these have come."""

        def received() -> dict[tuple[str, str], Span]:
            return {span.about: span for span in self.spans if span.trace == trace}

        assert wait_until(lambda: received().keys() >= {*about}, EVENT_S), received()
        return received()


def value_of(attribute: Any) -> Any:
    return getattr(attribute.value, attribute.value.WhichOneof("value"))


def values(resource: Any, key: str) -> list[Any]:
    return [value_of(each) for each in resource.attributes if each.key == key]


@contextmanager
def served(receive: Callable[[bytes], None]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receive(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{HOST}:{server.server_port}/v1/traces"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    with served(collector.receive) as collector.url:
        yield collector


@pytest.fixture(scope="module")
def engines(cluster: Cluster, collector: Collector) -> Iterator[list[Engine]]:
    """Prefill and decode, which export their spans at once."""
    specs = pair_specs(
        ensure_tiny_model(),
        suffix="-traced",
        kv_cache_bytes=128 << 20,
        connector_config={**PATIENT, "insecure": True},
        extra_args=("--otlp-traces-endpoint", collector.url),
    )
    env = {
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "NO_PROXY": HOST,
        "no_proxy": HOST,
    }
    engines = cluster.start(
        *[replace(one, extra_env={**env, "OTEL_SERVICE_NAME": one.role}) for one in specs]
    )
    yield engines
    cluster.end(*engines)


def complete(url: str, prompt: str, trace: str, **fields: Any) -> dict[str, Any]:
    """As a client that is itself a span of the trace."""
    reply = httpx.post(
        f"{url}{COMPLETIONS}",
        json={"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields},
        headers={"traceparent": f"00-{trace}-{CLIENT}-01"},
        timeout=TIMEOUT_S,
        **DIRECT,
    )
    assert reply.is_success, reply.text
    return dict(reply.json())


def test_one_trace_leads_through_router_prefill_and_decode(
    cluster: Cluster, engines: list[Engine], collector: Collector, tmp_path: Path
) -> None:
    prefill, decode = engines
    router = cluster.route([prefill], [decode])
    for number in (1, 2):  # the first one also meets the peer
        trace = TRACE.format(number)
        begin = time.time_ns()
        complete(router.url, random_prompt(LENGTH, seed=600 + number), trace)
        end = time.time_ns()
        spans = collector.wait(
            trace,
            ("prefill", "llm_request"),
            ("prefill", "nixl_kv.offer"),
            ("decode", "nixl_kv.load"),
            ("decode", "llm_request"),
        )
        assert len(spans) == 4
        assert {span.parent for span in spans.values()} == {CLIENT}

    offer, load = spans["prefill", "nixl_kv.offer"], spans["decode", "nixl_kv.load"]
    assert offer.attributes["nixl_kv.outcome"] == "read"
    assert offer.attributes["nixl_kv.tokens"] == LENGTH
    assert load.attributes["nixl_kv.outcome"] == "loaded"
    assert load.attributes["nixl_kv.tokens"] == LENGTH
    assert load.attributes["nixl_kv.path"] == "direct"
    assert load.attributes["nixl_kv.bytes"] > 0
    assert str(prefill.side_port) in load.attributes["nixl_kv.peer"]
    for span, request in (
        (offer, spans["prefill", "llm_request"]),
        (load, spans["decode", "llm_request"]),
    ):
        request_id = request.attributes["gen_ai.request.id"]
        assert span.attributes["nixl_kv.request"].startswith(request_id)

    # In the order in which it happened, over two engines.
    whole = spans["decode", "llm_request"]
    assert list(load.events) == ["ask", "wait", "read", "check", "verify"]
    moments = [
        spans["prefill", "llm_request"].begin,
        offer.begin,
        whole.begin,
        load.begin,
        load.events["ask"],
        offer.events["ask"],
        load.events["wait"],
        load.events["read"],
        load.events["check"],
        load.end,
        whole.end,
    ]
    late = [(a, b) for a, b in itertools.pairwise(moments) if a > b + CLOCKS_NS]
    assert not late, moments
    assert offer.end >= load.events["check"]

    if PICTURE:
        bars = [("client, through the router", begin, end, dict[str, int]())]
        order = sorted(spans.values(), key=lambda one: one.begin)
        bars += [(" ".join(one.about), one.begin, one.end, one.events) for one in order]
        Path(PICTURE).write_text(draw(bars), "utf-8")

    out = tmp_path / "trace.json"
    at = " ".join(f"--at {HOST}:{engine.side_port}" for engine in engines)
    shown = nixl_kv(f"trace --insecure {at} --request {load.attributes['nixl_kv.request']}")
    assert shown.exit_code == 2, "there is no --out"
    result = nixl_kv(f"trace --insecure {at} --out {out}")
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    (reading,) = [
        event
        for event in events
        if event["name"] == "READING"
        and event["args"]["request"] == load.attributes["nixl_kv.request"]
    ]
    assert abs(reading["ts"] * 1000 - load.events["read"]) < CLOCKS_NS
    offered = {event["args"].get("request") for event in events if event["name"] == "GRANTED"}
    assert offer.attributes["nixl_kv.request"] in offered


def test_a_ticket_that_decode_refuses_and_an_offer_that_nobody_claims_say_so(
    engines: list[Engine], collector: Collector
) -> None:
    prefill, decode = engines
    prompt, refused, unclaimed = random_prompt(LENGTH, seed=610), TRACE.format(3), TRACE.format(4)
    answer = complete(prefill.url, prompt, unclaimed, max_tokens=1, kv_transfer_params=WANT_TICKET)
    other = random_prompt(LENGTH, seed=611)
    complete(decode.url, other, refused, kv_transfer_params=answer["kv_transfer_params"])
    load = collector.wait(refused, ("decode", "nixl_kv.load"))["decode", "nixl_kv.load"]
    assert load.attributes["nixl_kv.outcome"] == "refused"
    assert load.error == load.attributes["nixl_kv.reason"] == "prompt"
    offer = collector.wait(unclaimed, ("prefill", "nixl_kv.offer"))["prefill", "nixl_kv.offer"]
    assert offer.attributes["nixl_kv.outcome"] == "unclaimed"
    assert not offer.events
