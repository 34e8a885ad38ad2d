"""A load that fails says why, once, with what happened before, in at most ten lines."""

import logging
from collections.abc import Iterator

import pytest

from lab.local.caches import Cache, Sizes
from lab.local.engine import LocalEngine
from support.pair import CONFIG, MakePair, MakeTransport, SmallEngine, exchange

MAX_LINES = 10


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="nixl_kv"):
        yield caplog


def stories(log: pytest.LogCaptureFixture, request: str) -> list[list[str]]:
    """The lines of each log record that says why a request's KV was not loaded."""
    messages = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    begin = f"request {request}: KV not loaded: "
    return [message.splitlines() for message in messages if message.startswith(begin)]


def test_a_failed_load_logs_its_story_once(
    memory: MakeTransport, make_pair: MakePair, log: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_pair(memory)
    ticket = prefill.offer("p1", [[5]], 4)
    for request in ("d1", "d2"):
        decode.prepare_load(request, ticket)
        decode.load(request, [6])
        decode.wait_load(request)
    assert stories(log, "d1") == []
    (lines,) = stories(log, "d2")
    engine = f"engine 'prefill' at tcp://127.0.0.1:{prefill.directory.port}"
    rank = f"rank 0 at {prefill.ranks[0].description.endpoint}"
    assert lines[0] == (f"request d2: KV not loaded: prefill rank 0 denied (denied; {engine})")
    events = [line.split(" s  ", 1) for line in lines[1:]]
    assert [words for _, words in events] == [
        f"d2 {engine}: PREPARED (PrepareLoad)",
        f"d2 {rank}: ASKING (PeerJoined)",
        f"d2 {rank}: ASKING -> FAILED (Deny)",
        f"d2 {engine}: FAILED (prefill rank 0 denied (denied))",
    ]
    seconds = [float(since_begin) for since_begin, _ in events]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)


def test_a_long_story_is_cut_to_ten_lines(
    memory: MakeTransport, log: pytest.LogCaptureFixture
) -> None:
    """Of a load that reads eight ranks."""
    caches = [Cache(Sizes(heads=1), first_head=head) for head in range(8)]
    layouts = [cache.layout() for cache in caches]
    prefill = LocalEngine("prefill", layouts, memory, config=CONFIG)
    decode = SmallEngine("decode", Cache(Sizes(heads=8)), memory)
    ticket = prefill.offer("p1", [[5]], 4)
    for request in ("d1", "d2"):
        decode.prepare_load(request, ticket)
        decode.load(request, [6])
        decode.wait_load(request)
    (lines,) = stories(log, "d2")
    assert len(lines) == MAX_LINES
    assert "earlier events)" in lines[1]
    assert ": FAILED (prefill rank " in lines[-1]
    prefill.close()
    decode.close()


def test_a_load_that_is_not_known_has_no_story(
    memory: MakeTransport, make_pair: MakePair, log: pytest.LogCaptureFixture
) -> None:
    _, decode = make_pair(memory)
    decode.load("d1", [6])
    decode.wait_load("d1")
    words = "it was not prepared, or forgotten since (internal)"
    assert stories(log, "d1") == [[f"request d1: KV not loaded: {words}"]]


def test_a_good_load_logs_nothing(
    memory: MakeTransport, make_pair: MakePair, log: pytest.LogCaptureFixture
) -> None:
    exchange(make_pair(memory))
    assert [record.getMessage() for record in log.records] == []
