"""Spans of loads and offers, through vLLM's scheduler and OpenTelemetry's own exporter."""

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from vllm.config import KVTransferConfig
from vllm.v1.request import RequestStatus

from nixl_kv.connector.stats import LoadReport, RankReports
from nixl_kv.connector.traces import phases
from nixl_kv.connector.worker import WorkerMetadata
from nixl_kv.ids import RequestId, new_nonce
from nixl_kv.protocol.events import (
    Failure,
    FailureKind,
    LoadEnded,
    OfferEnd,
    OfferEnded,
    Result,
)
from nixl_kv.protocol.prefill import PrefillMachine
from support.records import (
    DECODE,
    NONCE,
    P1,
    PEER,
    RANK_LIFE,
    ask,
    asked,
    landed,
    no_record,
    prepare_offer,
    publish_offer,
    read_done,
    release,
    teller,
    ticket_for,
)
from support.scripts import READING, loading
from support.vllm_scheduler import BLOCK, SteppedScheduler, hooked, make_config, ours

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS: Final = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
PROMPT: Final = [*range(3 * BLOCK)]
WAITS: Final = (0.5, 0.25, 0.125, 2.0, 1.0)
SECOND: Final = 10**9
ROUNDING: Final = SECOND // 1000  # of clocks that are floats

Exported = InMemorySpanExporter


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    """Stands for the provider that vLLM sets once per process."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield provider
    provider.shutdown()


@pytest.fixture
def exported(provider: TracerProvider) -> Exported:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def engine(
    endpoint: str | None = "http://127.0.0.1:4317",
    **extra: Any,
) -> SteppedScheduler:
    transfer = KVTransferConfig(**ours(**extra))
    config = make_config(transfer, 32, caches_prefixes=False)
    config.observability_config.otlp_traces_endpoint = endpoint
    engine = SteppedScheduler(config, hooked(config))
    engine.describe()
    return engine


def report(engine: SteppedScheduler, *ranks: Result, **finished: set[str]) -> None:
    """End a step in which each of these results came from a rank of its own."""
    reports = RankReports()
    for result in ranks:
        mine = RankReports()
        mine.add([result])
        reports.join(mine)
    meta = WorkerMetadata({}, reports)
    engine.end(engine.vllm.schedule(), kv_connector_worker_meta=meta, **finished)


def begin_load(engine: SteppedScheduler, name: str = "d1", **more: Any) -> None:
    """vLLM allocates the blocks of the load, and parks the request."""
    params = ticket_for(PROMPT, new_nonce()).params(None)
    engine.add(name, PROMPT, params, **{"trace_headers": HEADERS, **more})
    engine.end(engine.vllm.schedule())


def ended(failure: Failure | None = None, name: str = "d1", **fields: Any) -> LoadEnded:
    times = {"waits": WAITS, "ended_at": time.monotonic()}
    return LoadEnded(RequestId(name), 47, failure, PEER, **{**times, **fields})


def begin_offer(engine: SteppedScheduler, name: str = "p1") -> None:
    """The ticket leaves."""
    engine.add(name, PROMPT, {"do_remote_decode": True}, trace_headers=HEADERS)
    engine.end(engine.vllm.schedule())


def only(exported: Exported) -> tuple[ReadableSpan, dict[str, Any]]:
    """The span, and its attributes."""
    (span,) = exported.get_finished_spans()
    return span, {name.removeprefix("nixl_kv."): value for name, value in span.attributes.items()}  # type: ignore[union-attr]


def event_names(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


# --- loads


def test_a_load_is_a_span_of_the_clients_trace(exported: Exported) -> None:
    """Two ranks read it; the slower one decides the times."""
    decode, before = engine(), time.time_ns()
    begin_load(decode)
    fast = read_done(1, num_bytes=1000, path="direct")
    report(
        decode,
        ended(verified=True, reads=(fast,), waits=(0.0, 0.0, 0.0, 0.5, 0.0)),
        ended(verified=True, reads=(read_done(0, num_bytes=1000, path="staged"),)),
        finished_recving={"d1"},
    )
    span, attributes = only(exported)
    assert span.name == "nixl_kv.load"
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CLIENT)
    assert attributes == {
        "request": "d1",
        "tokens": len(PROMPT),
        "outcome": "loaded",
        "peer": "engine 'prefill' at tcp://10.0.0.1:5600",
        "bytes": 2000,
        "path": "direct,staged",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    assert event_names(span) == ["ask", "wait", "read", "check", "verify"]
    assert [dict(event.attributes or {}) for event in span.events] == [
        {"seconds": 0.5},
        {"blocks_seconds": 0.25, "queue_seconds": 0.125},
        {"seconds": 2.0},
        {},
        {"seconds": 1.0},
    ]
    offsets = [(event.timestamp - span.events[0].timestamp) / SECOND for event in span.events]
    assert offsets == pytest.approx([0.0, 0.5, 0.875, 2.875, 2.875], abs=0.001)
    # The ranks' clock is that of the scheduler: they ended between the test's begin and the span's.
    verified_at = span.events[-1].timestamp + SECOND
    assert before - ROUNDING <= verified_at <= span.end_time + ROUNDING


@pytest.mark.parametrize(
    ("reason", "waits", "reached"),
    [
        ("", (0.1, 0.0, 0.0, 0.2, 0.0), ["ask", "wait", "read", "check"]),  # without digests
        ("unreachable", (3.0, 0.0, 0.0, 0.0, 0.0), ["ask"]),
        ("recalled", (0.1, 0.2, 0.0, 0.0, 0.0), ["ask", "wait"]),
        ("late", (0.1, 0.0, 0.2, 0.0, 0.0), ["ask", "wait"]),
        ("broken", (0.1, 0.0, 0.0, 0.2, 0.0), ["ask", "wait", "read"]),
        ("fenced", (0.1, 0.0, 0.0, 0.2, 0.0), ["ask", "wait", "read", "check"]),
        ("corrupt", WAITS, ["ask", "wait", "read", "check", "verify"]),
        ("internal", (), []),
    ],
)
def test_a_load_shows_the_phases_that_it_reached(
    reason: str, waits: tuple[float, ...], reached: list[str]
) -> None:
    assert [name for name, _, _ in phases(LoadReport(47, reason, waits=waits))] == reached


def test_the_load_of_an_aborted_request_is_cancelled(exported: Exported) -> None:
    decode = engine()
    begin_load(decode)
    decode.vllm.finish_requests("d1", RequestStatus.FINISHED_ABORTED)
    assert exported.get_finished_spans() == ()
    dropped = ended(Failure(FailureKind.DROPPED, "dropped"))
    report(decode, dropped, finished_recving={"d1"}, failed_recving={"d1"})
    span, attributes = only(exported)
    assert attributes["outcome"] == "cancelled"
    assert span.status.status_code is StatusCode.UNSET


def test_a_refused_ticket_is_a_span_with_its_reason(exported: Exported) -> None:
    """A request that never starts its load leaves nothing."""
    decode = engine()
    unused = ticket_for(PROMPT, new_nonce()).params(None)
    decode.add("d0", PROMPT, unused, trace_headers=HEADERS)
    decode.vllm.finish_requests("d0", RequestStatus.FINISHED_ABORTED)
    assert decode.connector._traces._loads == {}
    decode.add("d1", PROMPT, ticket_for([7, 8]).params(None), trace_headers=HEADERS)
    span, attributes = only(exported)
    assert (span.name, attributes["outcome"]) == ("nixl_kv.load", "refused")
    assert span.status.description == attributes["reason"] == "prompt"
    assert decode.connector._traces._loads == {}


# --- offers


def test_an_offer_is_a_span_from_its_ticket_to_its_end(exported: Exported) -> None:
    """The first of its ranks that is asked tells when decode came."""
    prefill = engine()
    begin_offer(prefill)
    before, now, after = time.time_ns(), time.monotonic(), time.time_ns()
    later, earlier = (
        OfferEnded(NONCE, P1, end, DECODE, now + seconds)
        for end, seconds in ((OfferEnd.NOT_NEEDED, 0.5), (OfferEnd.READ, 0.25))
    )
    other = OfferEnded(NONCE, P1, OfferEnd.NOT_NEEDED)
    report(prefill, later, earlier, other, finished_sending={"p1"})
    span, attributes = only(exported)
    assert span.name == "nixl_kv.offer"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE
    expected = {"request": "p1", "tokens": len(PROMPT), "outcome": "read", "peer": "decode"}
    assert attributes == expected
    assert event_names(span) == ["ask"]
    begun = span.events[0].timestamp - SECOND // 4
    assert before - ROUNDING <= begun <= after + ROUNDING


def test_an_unclaimed_offer_has_no_reader(exported: Exported) -> None:
    prefill = engine()
    begin_offer(prefill)
    unclaimed = OfferEnded(NONCE, P1, OfferEnd.UNCLAIMED)
    report(prefill, unclaimed, finished_sending={"p1"})
    span, attributes = only(exported)
    assert attributes["outcome"] == "unclaimed"
    assert "peer" not in attributes
    assert span.events == ()


# --- the times of the machines


def test_a_load_tells_when_it_ended() -> None:
    (*_, result) = loading(READING).handle(read_done(), 117.5)
    assert isinstance(result, LoadEnded)
    assert (result.ended_at, sum(result.waits)) == (117.5, 17.5)  # it began at 100.0


def test_an_offer_tells_which_engine_asked_first_and_when() -> None:
    machine = PrefillMachine(
        RANK_LIFE, no_record, num_slots=4, offer_ttl_s=60.0, lease_s=60.0, hold_s=60.0
    )
    machine.handle(prepare_offer(), 0.0)
    machine.handle(publish_offer(), 1.0)
    machine.handle(asked(ask()), 2.0)
    machine.handle(asked(ask(number=2)), 5.0)
    (*_, result) = machine.handle(asked(release()), 9.0)
    assert result == OfferEnded(NONCE, P1, OfferEnd.READ, DECODE, 2.0)


# --- what clients send, and what exporters do


def test_without_headers_each_span_has_a_trace_of_its_own(
    provider: TracerProvider, exported: Exported
) -> None:
    """Not that of a span that happens to be open in this process."""
    decode = engine()
    with provider.get_tracer("vllm").start_as_current_span("start of the engine"):
        for name in ("d1", "d2"):
            begin_load(decode, name, trace_headers=None)
            report(decode, ended(name=name), finished_recving={name})
    spans = [span for span in exported.get_finished_spans() if span.name == "nixl_kv.load"]
    assert [span.parent for span in spans] == [None, None]
    assert len({span.context.trace_id for span in spans if span.context}) == 2


def test_an_error_of_an_exporter_costs_a_span_and_not_the_engine(
    provider: TracerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:  # noqa: ARG002
            raise RuntimeError("disk full")

    provider.add_span_processor(Broken())
    decode = engine()
    with caplog.at_level(logging.WARNING):
        for name in ("d1", "d2"):
            begin_load(decode, name)
            report(decode, ended(name=name), finished_recving={name})
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("nixl_kv")]
    assert line == "request d1 has no span: RuntimeError('disk full')"


def test_a_load_that_ends_between_steps_has_its_span_when_the_workers_report(
    exported: Exported,
) -> None:
    """Its request may have ended by then."""
    decode = engine(overlap="on")
    begin_load(decode, max_tokens=1)
    (key,) = decode.connector._decode._by_hint_key
    reader = teller(engine=decode.connector._engine_id)
    decode.connector._directory._hints.append(landed(hint_key=key, reader=reader))
    report(decode, ended(), finished_recving={"d1"})
    assert not decode.vllm.requests
    assert only(exported)[1]["outcome"] == "loaded"


def test_a_failed_load_shows_its_reason_and_no_token_or_whole_nonce(exported: Exported) -> None:
    decode, nonce = engine(), new_nonce()
    params = ticket_for(PROMPT, nonce).params(None)
    decode.add("d1", PROMPT, params, trace_headers=HEADERS)
    decode.end(decode.vllm.schedule())
    failure = Failure(FailureKind.CORRUPT, "words")
    report(decode, ended(failure), finished_recving={"d1"}, failed_recving={"d1"})
    span, attributes = only(exported)
    assert (attributes["outcome"], attributes["reason"]) == ("failed", "corrupt")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "corrupt")
    text = span.to_json()
    assert nonce not in text
    assert str(params["nixl_kv_ticket"]) not in text
    assert "41, 42, 43" not in text


# --- off


def test_without_an_endpoint_nothing_is_kept_and_opentelemetry_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, exported: Exported
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)  # its import raises
    both = engine(endpoint=None)
    begin_load(both)
    begin_offer(both)
    assert both.connector._traces._loads == {}
    assert both.connector._traces._offers == {}
    both.add("d2", PROMPT, ticket_for([7, 8]).params(None), trace_headers=HEADERS)
    offer = OfferEnded(NONCE, P1, OfferEnd.UNCLAIMED)
    report(both, ended(), offer, finished_recving={"d1"}, finished_sending={"p1"})
    monkeypatch.undo()
    assert exported.get_finished_spans() == ()
    assert (both.connector._decode.num_open, both.connector._prefill.num_offers) == (0, 0)
