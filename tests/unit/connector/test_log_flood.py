"""Log lines about requests: clients decide how many there are, and choose the ids in them."""

import ast
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

import nixl_kv
from nixl_kv.connector import scheduler as module
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.connector.traces import _Begun
from nixl_kv.early.answers import PROMISE, seal_promise
from nixl_kv.errors import MAX_ID, REQUEST_LINES, TICKET_REASONS
from nixl_kv.ids import Nonce
from nixl_kv.protocol.ticket import FIELD
from support.cache_manager import CacheManager
from support.records import ticket_for
from support.stepped import Clock
from support.vllm_objects import empty_output, kv_cache_config, new_request, vllm_config
from unit.connector.test_scheduler import publish

FLOOD = 100
MAX_LINE = 1000  # characters
KEY = "ab" * 32
NUM_TOKENS = 100
OFFER = {"do_remote_decode": True}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all limited logs in the connector."""
    clock = Clock()
    real, of_prefill = module.LimitedLog, module.PrefillScheduler
    monkeypatch.setattr(module, "LimitedLog", lambda log, _, **kw: real(log, clock, **kw))
    monkeypatch.setattr(
        module, "PrefillScheduler", lambda *args, **kw: of_prefill(*args, clock=clock, **kw)
    )
    return clock


Make = Callable[..., Scheduler]


@pytest.fixture
def make(clock: Clock) -> Iterator[Make]:  # noqa: ARG001 - its schedulers need it
    made: list[Scheduler] = []

    def new(**given: Any) -> Scheduler:
        role = given.pop("kv_role", "kv_both")
        extra = {"port": 0, "insecure": "key" not in given, "peers": ["127.0.0.1/32"], **given}
        made.append(Scheduler(vllm_config(extra, kv_role=role), kv_cache_config()))
        made[-1].bind_kv_cache_manager(CacheManager())
        publish(made[-1])
        made[-1].build_connector_meta(empty_output())
        return made[-1]

    yield new
    for each in made:
        each.shutdown()


_numbers = itertools.count()


def long_request(params: Any, **changed: Any) -> Request:
    """With an id that a client has made as long as HTTP allows."""
    name = f"cmpl-{next(_numbers)}-" + "x\x1b[31m\n" * 10_000 + "-0123abcd"
    return new_request(params, request_id=name, **changed)


def sealed(**changed: Any) -> dict[str, Any]:
    """A ticket for the prompt of `new_request`, without a MAC."""
    made: dict[str, Any] = ticket_for(list(range(NUM_TOKENS)), **changed).params(None)
    return made


def other_version() -> dict[str, Any]:
    params = sealed()
    version, rest = params[FIELD].split(".", 1)
    return {**params, FIELD: f"{int(version) + 1}.{rest}"}


# A client's request for each reason, the same each time if possible. A ticket that was used before
# is good for the first request.
REFUSED: dict[str, Any] = {
    "malformed": {FIELD: "y" * 60_000, "remote_host": "z" * 300},
    "key": {FIELD: f"{sealed()[FIELD].split('.')[0]}.{'0' * 32}.{sealed()[FIELD].split('.')[2]}"},
    "version": other_version(),
    "host": sealed(host="10.9.9.9"),
    "role": OFFER,
    "used": sealed(),
    "prompt": ticket_for([7]).params(None),
    "weights": lambda: sealed(nonce=f"{next(_numbers):032x}", weights="w" * 256),
    "media": lambda: sealed(nonce=f"{next(_numbers):032x}", media=f"{7:032x}"),
    "not_offered": lambda: sealed(nonce=f"{next(_numbers):032x}", not_offered="w" * 128),
    "other_connector": {"remote_block_ids": [[1]], "remote_engine_id": "e" * 60_000},
}


def expect_bounded(messages: list[str], lines: int = REQUEST_LINES) -> None:
    assert 0 < len(messages) <= lines
    for message in messages:
        assert message.isprintable()
        assert len(message) < MAX_LINE, message
        assert "x" * MAX_ID not in message


def refuse(scheduler: Scheduler, params: Any) -> None:
    request = long_request(params() if callable(params) else params)
    scheduler.on_new_request(request)
    scheduler.pop_failed({request.request_id: request})  # if decode may not compute it


def test_each_reason_is_tried() -> None:
    assert REFUSED.keys() == set(TICKET_REASONS)


@pytest.mark.parametrize("reason", TICKET_REASONS)
def test_refused_tickets_cost_bounded_lines(
    make: Make, clock: Clock, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All refusals count, but the log has some of each reason in a second."""
    scheduler = make(kv_role="kv_consumer")
    caplog.clear()
    caplog.set_level(logging.INFO)
    params = REFUSED[reason]
    for _ in range(FLOOD):
        refuse(scheduler, params)
    stats = scheduler.stats.pop()
    assert stats is not None
    expected = FLOOD - (reason == "used")
    assert stats.data["refused_tickets"] == {reason: expected}
    in_tree = reason == "other_connector"  # has one line a minute
    expect_bounded(caplog.messages, 1 if in_tree else REQUEST_LINES)
    assert "-0123abcd " in caplog.messages[0]  # the part that vLLM appended
    shown = len(caplog.messages)
    caplog.clear()
    clock.now += 60
    refuse(scheduler, params)
    assert caplog.messages[1] == f"  and {expected - shown} more like it since the last such line"


def add(scheduler: Scheduler, request: Request) -> None:
    scheduler.on_new_request(request)


def finish(scheduler: Scheduler, request: Request) -> None:
    scheduler.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    scheduler.request_finished_all_groups(request, ([1],))


def fail_load(scheduler: Scheduler, request: Request) -> None:
    """End a request as vLLM does for a MultiConnector whose policy is to fail."""
    params = request.kv_transfer_params
    assert params is not None
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],))
    scheduler.update_state_after_alloc(request, blocks, NUM_TOKENS - 1)
    request.status = RequestStatus.FINISHED_ERROR
    scheduler.request_finished_all_groups(request, ([1, 2, 3, 4],))


def of_a_new_offer() -> dict[str, Any]:
    return sealed(nonce=f"{next(_numbers):032x}")


OTHERS: dict[str, tuple[dict[str, Any], Callable[[], Any], Any, dict[str, Any]]] = {
    "no ticket": ({"kv_role": "kv_consumer"}, lambda: None, add, {}),
    "resumable": ({}, lambda: OFFER, add, {"resumable": True}),
    "rejected": ({}, lambda: OFFER, add, {"abort_immediately": True}),
    "no promise": ({}, lambda: {**OFFER, PROMISE: "y" * 60_000}, add, {}),
    "not computed": ({}, lambda: OFFER, finish, {}),
    "failed outside": ({}, of_a_new_offer, fail_load, {}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_requests_cost_bounded_lines(
    make: Make, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, params, do, changed = OTHERS[case]
    scheduler = make(**given)
    caplog.clear()
    caplog.set_level(logging.INFO)
    for _ in range(FLOOD):
        do(scheduler, long_request(params(), **changed))
    expect_bounded(caplog.messages)


def test_a_reset_of_the_cache_costs_bounded_lines(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make()
    for _ in range(FLOOD):
        promise = seal_promise(Nonce(f"{next(_numbers):032x}"), scheduler._trust.ticket_key)
        scheduler.on_new_request(long_request({**OFFER, PROMISE: promise}))
    caplog.clear()
    caplog.set_level(logging.INFO)
    scheduler.reset_cache()
    expect_bounded(caplog.messages, REQUEST_LINES + 1)


def test_a_ticket_without_an_offer_that_cannot_be_made_ends_no_engine(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception from a hook would."""
    scheduler, request = make(), long_request(OFFER)
    request.mm_features = [object()]
    monkeypatch.setattr(scheduler, "_ticket_without_offer", lambda _: 1 / 0)
    assert scheduler.request_finished_all_groups(request, ([1],)) == (False, None)
    expect_bounded(caplog.messages, 1)
    assert "gets no ticket: ZeroDivisionError" in caplog.text


def test_spans_have_short_ids() -> None:
    assert len(_Begun.of(long_request(OFFER)).request) == MAX_ID


def test_lines_about_requests_are_written_by_limited_logs_only() -> None:
    """Otherwise the next line would have no limit."""
    limitless = []
    for path in Path(nixl_kv.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        constants = {
            ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]): node
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign | ast.Assign)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger."):
                text = ast.unparse(call.args[0]) if call.args else ""
                text += ast.unparse(constants[text]) if text in constants else ""
                if "request %s" in text.lower() or "request_id" in ast.unparse(call):
                    limitless.append(f"{path.name}:{call.lineno}")
    assert limitless == []
