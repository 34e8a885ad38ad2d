"""The scheduler role, on requests and steps as vLLM passes them."""

import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from nixl_kv.config import KEY_VARIABLE, Config
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.connector.worker import HandshakeMetadata, WorkerMetadata
from nixl_kv.early.answers import PROMISE, open_promise, seal_promise
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import TransportError
from nixl_kv.ids import EngineId, RequestId, endpoint_at, new_incarnation, new_nonce
from nixl_kv.protocol.events import (
    CancelLoad,
    EarlyReleased,
    PrepareLoad,
    PublishOffer,
    SetEngine,
    WithdrawOffer,
)
from nixl_kv.protocol.messages import (
    Describe,
    Description,
    decode_answer,
    encode,
)
from nixl_kv.protocol.ticket import FIELD, Ticket, context_hash
from nixl_kv.transport.base import FromEndpoint
from nixl_kv.transport.zmq import ZmqControl
from support.cache_manager import CacheManager
from support.records import opened, rank_description, ticket_for
from support.vllm_objects import empty_output, kv_cache_config, new_request, vllm_config

HOST = "127.0.0.1"
NUM_TOKENS = 100
TABLE = [1, 2, 3, 4]
TO_OFFER = {"do_remote_decode": True}
STATE = MambaSpec(block_size=32, shapes=((2, 2), (2, 2)), dtypes=(torch.float32, torch.float32))
BLOCKS = SimpleNamespace(get_block_ids=lambda: (TABLE,))

Make = Callable[..., Scheduler]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes schedulers without a key, and stops them."""
    schedulers: list[Scheduler] = []

    def new(
        extra: dict[str, Any] | None = None,
        *,
        is_described: bool = True,
        has_state: bool = False,
        change: Callable[[Any], None] = lambda _: None,
        **transfer: Any,
    ) -> Scheduler:
        config = vllm_config({"insecure": True, **(extra or {"port": 0})}, **transfer)
        cache = kv_cache_config()
        change(config)
        if has_state:
            cache.kv_cache_groups.append(KVCacheGroupSpec(["state"], STATE))
        scheduler = Scheduler(config, cache)
        schedulers.append(scheduler)
        scheduler.bind_kv_cache_manager(CacheManager())
        if is_described:
            publish(scheduler)
            scheduler.build_connector_meta(empty_output())
        return scheduler

    yield new
    for scheduler in schedulers:
        scheduler.shutdown()


def publish(scheduler: Scheduler) -> Description:
    """Give the scheduler the handshake of a worker's new life; return the engine's description."""
    described = rank_description(incarnation=new_incarnation())
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): HandshakeMetadata(encode(described))})
    return ask(scheduler)


def report(scheduler: Scheduler, **output: Any) -> None:
    scheduler.update_connector_output(KVConnectorOutput(**output))


def ask(scheduler: Scheduler) -> Description:
    address = scheduler._prefill.address
    assert address is not None
    asker = ZmqControl()
    question = Describe(incarnation=address.incarnation, engine=address.engine)
    asker.send(endpoint_at(address.host, address.port), encode(question))
    (item,) = asker.poll(30.0)
    asker.close()
    assert isinstance(item, FromEndpoint)
    answer = decode_answer(item.payload)
    assert isinstance(answer, Description)
    return answer


def commands(scheduler: Scheduler, output: Any = None) -> list[Any]:
    return scheduler.build_connector_meta(output or empty_output()).commands


def compute(scheduler: Scheduler, request: Request) -> list[Any]:
    """The workers' commands in the step that computes a request's prompt."""
    scheduler.bind_kv_cache_manager(CacheManager({request.request_id: [TABLE, TABLE]}))
    output = empty_output()
    output.num_scheduled_tokens = {request.request_id: request.num_prompt_tokens}
    new: Any = SimpleNamespace(
        req_id=request.request_id,
        num_computed_tokens=0,
        sampling_params=request.sampling_params,
    )
    output.scheduled_new_reqs = [new]
    return commands(scheduler, output)


def finish(scheduler: Scheduler, request: Request) -> tuple[bool, dict[str, Any] | None]:
    """The prompt is complete: whether its blocks are kept, and the ticket."""
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    request.num_computed_tokens = request.num_prompt_tokens
    return scheduler.request_finished_all_groups(request, (TABLE,))


def offer(scheduler: Scheduler) -> Ticket:
    """The ticket of a new request that asks for one."""
    request = new_request(TO_OFFER)
    scheduler.on_new_request(request)
    compute(scheduler, request)
    _, params = finish(scheduler, request)
    return opened(params)


def with_ticket(**changed: Any) -> Any:
    request = new_request()
    request.kv_transfer_params = ticket_for(range(NUM_TOKENS), new_nonce(), **changed).params(None)
    return request


def counted(scheduler: Scheduler) -> dict[str, Any]:
    stats = scheduler.stats.pop()
    return {} if stats is None else stats.data


def refused(scheduler: Any) -> dict[str, float]:
    """The tickets that were refused since the last call, by reason."""
    reasons: dict[str, float] = counted(scheduler).get("refused_tickets", {})
    return reasons


def is_computed_here(scheduler: Scheduler, request: Request) -> bool:
    """Whether it passes through all hooks without a load or an offer."""
    matched = scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, BLOCKS, 0)
    ended = scheduler.request_finished_all_groups(request, (TABLE,))
    return (matched, ended, commands(scheduler)) == ((0, False), (False, None), [])


# --- no request of a client raises

NOT_ON_PREFILL = "do_remote_decode is not true, but this engine is a kv_producer"
NOT_ON_DECODE = "do_remote_decode is true, but this engine is a kv_consumer"
TOO_EARLY = "the router starts decode before prefill answers"
LOAD = {"do_remote_prefill": True}
ADDRESS = {"remote_host": HOST, "remote_port": 5600, "tp_size": 1}
TICKET = ticket_for(range(NUM_TOKENS)).params(None)
LOST = {name: value for name, value in TICKET.items() if name != FIELD}


@pytest.mark.parametrize(
    ("role", "params", "words"),
    [
        pytest.param("kv_both", "ticket", "is of type str", id="text"),
        pytest.param("kv_both", {"do_remote_decode": 1}, "is of type int", id="1 is not true"),
        pytest.param("kv_both", {"nixl_kv_ticket": "9..AA"}, "nixl_kv_ticket: ", id="no array"),
        pytest.param(
            "kv_consumer",
            LOST,
            f"lacks the field {FIELD!r}",
            id="a ticket without its string",
        ),
        pytest.param("kv_consumer", TO_OFFER, NOT_ON_DECODE, id="an offer from decode"),
        pytest.param(
            "kv_producer", {"do_remote_decode": False}, NOT_ON_PREFILL, id="none from prefill"
        ),
        pytest.param("kv_producer", TICKET, NOT_ON_PREFILL, id="a ticket for prefill"),
        pytest.param("kv_producer", LOAD, NOT_ON_PREFILL, id="decode's leg on prefill"),
        pytest.param("kv_consumer", LOAD | {"remote_ready": False}, TOO_EARLY, id="vllm-router"),
        pytest.param("kv_consumer", LOAD | ADDRESS, TOO_EARLY, id="a proxy for push"),
    ],
)
def test_parameters_that_are_not_valid_are_counted_and_logged(
    make: Make, role: str, params: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, request = make(kv_role=role), new_request()
    request.kv_transfer_params = params
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        scheduler.on_new_request(request)
    (message,) = caplog.messages
    assert message.startswith(f"request {request.request_id} is computed here: kv_transfer_params")
    assert words in message
    reason = "role" if words in (NOT_ON_DECODE, NOT_ON_PREFILL) else "malformed"
    assert refused(scheduler) == {reason: 1}
    assert counted(scheduler) == {}
    assert is_computed_here(scheduler, request)


OF_IN_TREE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "prefill\n\x1b[2J",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "transfer_mode": "pull",
}
"""The answer of vLLM's own NixlConnector on prefill."""


def test_prompts_of_an_in_tree_prefill_are_computed_and_the_log_says_once_what_to_do(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make(kv_role="kv_consumer")
    requests = [new_request(dict(OF_IN_TREE)) for _ in range(5)]
    with caplog.at_level(logging.WARNING):
        for request in requests:
            scheduler.on_new_request(request)
            assert is_computed_here(scheduler, request)
    (message,) = caplog.messages
    assert message == (
        f"request {requests[0].request_id} is computed here: prefill runs vLLM's own NixlConnector "
        "(engine prefill\\n\\x1b[2J at 10.0.0.1); load the same connector on both engines: add "
        '"kv_connector_module_path": "nixl_kv.connector" to prefill\'s --kv-transfer-config'
    )
    assert refused(scheduler) == {"other_connector": 5}
    hostile: list[Any] = [None, [], "x" * 10**6, {"a": 1}, 2**64 - 1]
    for value in hostile:  # none raises
        values = dict.fromkeys(("remote_engine_id", "remote_host"), value)
        for blocks in (value, OF_IN_TREE["remote_block_ids"]):
            changed = {**OF_IN_TREE, **values, "remote_block_ids": blocks}
            scheduler.on_new_request(new_request(changed))
        assert sum(refused(scheduler).values()) == 2


@pytest.mark.parametrize(("is_allowed", "flag"), [(True, None), (False, True)])
def test_an_operator_chooses_whether_in_tree_decode_engines_get_tickets(
    make: Make, *, is_allowed: bool, flag: bool | None
) -> None:
    scheduler = make({"port": 0, "in_tree_decode": is_allowed})
    request = new_request(TO_OFFER)
    scheduler.on_new_request(request)
    compute(scheduler, request)
    _, params = finish(scheduler, request)
    assert params is not None
    assert params.get("do_remote_prefill") is flag


@pytest.mark.parametrize(
    ("role", "missing"), [("kv_consumer", 1), ("kv_both", 0), ("kv_producer", 0)]
)
def test_only_decode_misses_a_ticket(
    make: Make, role: str, missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make(kv_role=role)
    with caplog.at_level(logging.INFO):
        scheduler.on_new_request(new_request())
    expected = {"recomputed_requests": {"no_ticket": 1}}
    assert counted(scheduler) == (expected if missing else {})
    assert ("have no ticket: prefill drains, or the router" in caplog.text) is bool(missing)


P2P = {"kv_request_id": "u", "remote_host": "10.0.0.1", "remote_port": 7777}


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_parameters_of_another_connector_are_ignored(
    make: Make, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They hide no ticket."""
    scheduler = make(kv_role=role)
    for params in ({"remote_prefiller": P2P}, {"remote_kv_source": P2P, "max_offload_tokens": 5}):
        request = new_request(params)
        with caplog.at_level(logging.INFO):
            scheduler.on_new_request(request)
        assert not caplog.records
        assert counted(scheduler) == {}
        assert is_computed_here(scheduler, request)
    if role == "kv_consumer":
        scheduler.on_new_request(new_request(TICKET | {"remote_decoder": P2P}))
        assert [type(one) for one in commands(scheduler)] == [PrepareLoad]


@pytest.mark.parametrize(("role", "told"), [("kv_producer", 1), ("kv_consumer", 0)])
def test_the_log_tells_of_a_key_beside_a_local_address_and_that_it_pulls(
    make: Make,
    role: str,
    told: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The key is meant for other machines, but tickets name an address that they cannot reach."""
    monkeypatch.setenv(KEY_VARIABLE, "0" * 64)
    extra = {"port": 0, "host": "127.0.0.1"}
    with caplog.at_level(logging.INFO):
        scheduler = make(extra, kv_role=role, is_described=False, kv_connector="NixlPushConnector")
    described = HandshakeMetadata(encode(rank_description()))
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): described})
    assert caplog.text.count("which tickets name") == told
    assert "pulls" in caplog.text


def test_a_request_that_the_frontend_rejected_only_releases_its_offer(make: Make) -> None:
    """vLLM puts another prompt in its place, so the context cannot be compared.

    It can in any other request, and with all that its KV depends on.
    """
    scheduler, request = make(), with_ticket()
    others = new_request(request.kv_transfer_params, cache_salt="another user's")
    scheduler.on_new_request(others)
    assert refused(scheduler) == {"prompt": 1}
    rejected = new_request(request.kv_transfer_params, num_tokens=1, abort_immediately=True)
    scheduler.on_new_request(rejected)
    prepare, cancel = commands(scheduler)
    assert isinstance(prepare, PrepareLoad)
    assert cancel == CancelLoad(RequestId(rejected.request_id))
    assert counted(scheduler) == {}
    assert is_computed_here(scheduler, rejected)


# --- an engine that is to stop


def test_requests_that_arrive_while_it_drains_are_not_offered_and_earlier_ones_are(
    make: Make,
) -> None:
    scheduler = make()
    directory = scheduler._directory
    assert directory is not None
    before, after = new_request(TO_OFFER), new_request(TO_OFFER)
    scheduler.on_new_request(before)
    directory.is_draining = True
    scheduler.on_new_request(after)
    assert directory.count_awaited() == 1
    assert compute(scheduler, after) == []
    assert finish(scheduler, after) == (False, None)
    compute(scheduler, before)
    is_kept, _ = finish(scheduler, before)
    assert is_kept
    report(scheduler, finished_sending={before.request_id})
    assert directory.count_awaited() == 0


def test_prefill_leaves_out_the_last_token_of_models_with_state(make: Make) -> None:
    """Decode computes it, from the state before it."""
    scheduler, request = make(has_state=True), new_request(TO_OFFER)
    scheduler.on_new_request(request)
    assert request.num_prompt_tokens == NUM_TOKENS - 1
    (prepare,) = compute(scheduler, request)
    assert prepare.num_tokens == NUM_TOKENS - 1
    assert prepare.context == context_hash(prepare.nonce, range(NUM_TOKENS - 1), [])


@pytest.mark.parametrize(("has_state", "words"), [(True, "its client"), (False, "it is resumable")])
def test_a_request_whose_whole_prompt_decode_cannot_bring_is_not_offered(
    make: Make, caplog: pytest.LogCaptureFixture, words: str, *, has_state: bool
) -> None:
    """With state, prefill would leave out the last token, whose log probabilities it needs."""
    scheduler, request = make(has_state=has_state), new_request(TO_OFFER)
    if has_state:
        request.sampling_params.skip_reading_prefix_cache = True  # type: ignore[union-attr]
    else:
        request.resumable = True
    with caplog.at_level("INFO"):
        scheduler.on_new_request(request)
    assert f"is not offered: {words}" in caplog.text
    assert request.num_prompt_tokens == NUM_TOKENS
    assert compute(scheduler, request) == [], "no offer"


def test_a_failed_request_that_was_answered_early_ends_its_ticket(make: Make) -> None:
    """vLLM puts another prompt in its place; decode waits for this ticket's offer."""
    scheduler, nonce = make(), new_nonce()
    params = TO_OFFER | {PROMISE: seal_promise(nonce, scheduler._trust.ticket_key)}
    scheduler.on_new_request(new_request(params, num_tokens=1, abort_immediately=True))
    assert commands(scheduler) == [WithdrawOffer(nonce)]


def test_gauges_count_the_offers_and_loads_that_are_open(make: Make) -> None:
    """They are shown when they change."""
    scheduler = make()
    offered, loaded = new_request(TO_OFFER), with_ticket()

    def shown() -> dict[str, Any]:
        stats = scheduler.get_kv_connector_stats()
        return {} if stats is None else stats.reduce()

    assert shown() == {}
    scheduler.on_new_request(offered)
    compute(scheduler, offered)
    finish(scheduler, offered)
    scheduler.on_new_request(loaded)
    both = shown()
    assert both.pop("oldest_offer_timestamp_seconds") == pytest.approx(time.time(), abs=60)
    assert both == {"offers": 1, "open_offers": 1, "offered_blocks": 4, "open_loads": 1}
    assert shown() == {}
    report(scheduler, finished_recving={loaded.request_id})
    assert shown() == {"open_loads": 0}
    report(scheduler, finished_sending={offered.request_id})
    zeros = ("open_offers", "offered_blocks", "oldest_offer_timestamp_seconds")
    assert shown() == dict.fromkeys(zeros, 0)


# --- two engines that prefill for each other


def test_prompts_wait_while_offers_hold_their_share_on_an_engine_that_decodes(make: Make) -> None:
    scheduler = make({"port": 0, "offer_share": 0.5})  # of 16 blocks of 32 tokens
    first, second, third = (new_request(TO_OFFER) for _ in range(3))
    for request in (first, second):
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        scheduler.update_state_after_alloc(request, BLOCKS, 0)
    decoded = with_ticket()
    scheduler.on_new_request(decoded)
    scheduler.on_new_request(third)
    assert scheduler.get_num_new_matched_tokens(third, 0) == (None, False)
    assert scheduler.get_num_new_matched_tokens(decoded, 0) == (NUM_TOKENS - 1, True)
    commands(scheduler)
    for request in (first, second):
        scheduler.request_finished_all_groups(request, (TABLE,))
    report(scheduler, finished_sending={first.request_id, second.request_id})
    assert scheduler.get_num_new_matched_tokens(third, 0) == (0, False)


def test_a_draft_model_is_described_apart_and_writes_after_the_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode computes as many tokens as it looks ahead; without one, it compares only the model."""
    facts = {"draft model": "eagle3"}
    monkeypatch.setattr("nixl_kv.connector.scheduler.draft_facts", lambda _: facts)
    monkeypatch.setattr("nixl_kv.connector.scheduler.computed_on_decode", lambda _: 3)

    def add_draft(config: Any) -> None:
        config.speculative_config = SimpleNamespace(
            use_eagle=lambda: False, uses_draft_kv_cache=lambda: False
        )

    scheduler, request, loaded = make(change=add_draft), new_request(TO_OFFER), with_ticket()
    described = ask(scheduler)
    assert described.extras == facts
    assert not facts.items() & described.model.items()
    scheduler.on_new_request(request)
    (prepare,) = compute(scheduler, request)
    assert not prepare.is_written
    scheduler.on_new_request(loaded)
    assert scheduler.get_num_new_matched_tokens(loaded, 0) == (NUM_TOKENS - 3, True)


# --- the engine's description


def test_the_first_step_tells_the_workers_of_each_other(make: Make) -> None:
    """In rank order: pipeline stage major. A new life is described at the same place."""
    scheduler = make(is_described=False)
    ranks = {key: rank_description(number) for number, key in enumerate([(1, 0), (0, 1), (0, 0)])}
    scheduler.set_xfer_handshake_metadata_pp_aware(
        {key: HandshakeMetadata(encode(rank)) for key, rank in ranks.items()}
    )
    in_order = [ranks[key] for key in sorted(ranks)]
    before = ask(scheduler)
    assert list(before.ranks) == in_order
    scheduler.on_new_request(with_ticket())
    first, second = commands(scheduler)
    assert first == SetEngine(EngineId("tiny"), tuple(rank.layout for rank in in_order))
    assert isinstance(second, PrepareLoad)
    assert commands(scheduler) == []
    port = offer(scheduler).port
    assert publish(scheduler).incarnation != before.incarnation, "after a wake-up"
    assert [type(command) for command in commands(scheduler)] == [SetEngine, PublishOffer]
    assert offer(scheduler).port == port


def test_new_lives_of_ranks_are_published_and_go_into_tickets(make: Make) -> None:
    """Either of two ranks may have one, and both report with the same step."""
    scheduler = make(is_described=False)
    ranks = {(0, number): rank_description(number) for number in range(2)}
    scheduler.set_xfer_handshake_metadata_pp_aware(
        {key: HandshakeMetadata(encode(rank)) for key, rank in ranks.items()}
    )
    commands(scheduler)
    before = ask(scheduler)
    new = [replace(rank, incarnation=new_incarnation()) for rank in ranks.values()]
    one, other = (WorkerMetadata({number: encode(rank)}) for number, rank in enumerate(new))
    report(scheduler)
    assert ask(scheduler) == before
    report(scheduler, kv_connector_worker_meta=one.aggregate(other))
    after = ask(scheduler)
    assert list(after.ranks) == new
    assert after.incarnation != before.incarnation
    assert commands(scheduler) == []
    assert offer(scheduler).incarnation == after.incarnation


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def test_a_decode_engine_whose_default_port_is_taken_listens_on_another_one(
    make: Make, taken_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked by tools alone."""
    scheduler = make({"port": taken_port}, is_described=False, kv_role="kv_consumer")
    scheduler._config = dataclasses.replace(scheduler._config, port_name="")
    publish(scheduler)
    address = scheduler._prefill.address
    assert address is not None
    assert address.port not in (0, taken_port)
    assert ask(scheduler).engine == "tiny"
    words = f"port {taken_port} (the default) is in use: serving this engine's description on port"
    assert f"{words} {address.port}" in caplog.messages


@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
def test_an_engine_whose_port_was_taken_after_the_check_does_not_start(
    make: Make, role: str, taken_port: int
) -> None:
    """It is the second of data-parallel engines, which have a port each."""

    def change(config: Any) -> None:
        config.parallel_config.data_parallel_index = 1

    scheduler = make({"port": taken_port - 1}, is_described=False, change=change, kv_role=role)
    with pytest.raises(TransportError, match=f"{HOST}:{taken_port}: Address already in use"):
        publish(scheduler)


# --- configuration


OUTCOMES = {"recompute": "is computed here", "fail": "fails with HTTP 500"}


@pytest.mark.parametrize(
    ("role", "ours", "vllms"),
    [
        ("kv_consumer", None, "fail"),
        ("kv_consumer", "recompute", "fail"),
        ("kv_both", "fail", "recompute"),
        ("kv_producer", "recompute", "fail"),
    ],
)
def test_on_load_failure_is_set_where_vllm_looks(
    make: Make, role: str, ours: str | None, vllms: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands there: a `fail` that was written cannot be told from vLLM's default."""
    extra = {"port": 0} | ({} if ours is None else {"on_load_failure": ours})
    with caplog.at_level(logging.INFO):
        scheduler = make(extra, is_described=False, kv_load_failure_policy=vllms, kv_role=role)
    transfer, expected = scheduler._vllm_config.kv_transfer_config, ours or "recompute"
    assert transfer is not None
    assert transfer.kv_load_failure_policy == expected
    said = [line for line in caplog.messages if "on_load_failure" in line]
    line = f"a request whose KV load fails {OUTCOMES[expected]}"
    if vllms != expected:
        line += f": on_load_failure replaces kv_load_failure_policy {vllms!r}"
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    if role == "kv_producer":
        assert said == []
    else:
        assert said[0] == f"{line} (on_load_failure is {expected!r})"
        # Only an explicit policy can differ from vLLM's default.
        is_explicit = (vllms, expected) == ("recompute", "fail")
        assert [line in each for each in warnings] == [True] * is_explicit


def test_one_warning_names_all_that_a_recipe_for_vllms_connector_loses(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "480")
    keys = {
        "num_threads": 4,
        "bidirectional_kv_xfer": True,
        "read_validation_timeout": 30,
        "lmcache_rpc_port": "producer1",
        "kv_lease_duration": 7200,
    }
    options = {"kv_connector": "NixlConnector", "kv_load_failure_policy": "fail"}
    with caplog.at_level(logging.INFO):
        make(
            {"port": 0, **keys},
            is_described=False,
            kv_role="kv_both",
            enable_permute_local_kv=True,
            **options,
        )
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    for name in (*keys, "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "enable_permute_local_kv"):
        assert name in warning
    assert "'bidirectional_kv_xfer'] is true, but has no effect: to let prefill read" in warning
    assert "on_load_failure replaces kv_load_failure_policy 'fail'" in warning
    assert any("counts as 'offer_ttl_s', unless that is set: 3600 s" in m for m in caplog.messages)


def test_a_recipe_that_loses_nothing_warns_of_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        make({"port": 0, "kv_lease_duration": 45}, is_described=False, kv_role="kv_both")
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING] == []
    assert any("counts as 'offer_ttl_s'" in line and "45 s" in line for line in caplog.messages)


def test_different_generated_keys_are_a_warning_that_names_both_files(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = dataclasses.replace(Trust.of(Config()), other_keys=("/tmp/nixl_kv-0/nixl_kv.key",))  # noqa: S108
    monkeypatch.setattr(Trust, "of", lambda _config: trust)
    with caplog.at_level(logging.WARNING):
        make({"port": 0}, is_described=False)
    (line,) = caplog.messages
    assert trust.key_path in line
    assert trust.other_keys[0] in line


def test_a_request_ends_whose_offer_decode_has_released(make: Make) -> None:
    """All ranks report it, in one step or in several."""
    scheduler, nonce = make(), new_nonce()
    request = new_request({**TO_OFFER, PROMISE: seal_promise(nonce, scheduler._trust.ticket_key)})
    scheduler.on_new_request(request)
    requests = {request.request_id: request}
    assert scheduler.pop_released(requests) == []
    one, other = (WorkerMetadata({}) for _ in range(2))
    for rank in (one, other):
        rank.reports.add([EarlyReleased(nonce, RequestId(request.request_id))])
    report(scheduler, kv_connector_worker_meta=one.aggregate(other))
    assert scheduler.pop_released({}) == [], "vLLM has ended it"
    report(scheduler, kv_connector_worker_meta=one)
    assert scheduler.pop_released(requests) == [request.request_id]
    assert scheduler.pop_released(requests) == []


def test_an_engine_tells_its_address_unless_it_drains_or_is_paused(make: Make) -> None:
    scheduler = make()
    assert scheduler._prefill.address is not None
    told = scheduler.early_address()
    assert told is not None
    key = scheduler._trust.ticket_key
    assert open_promise(told.pop(PROMISE), key), "it has the key of its API servers"
    assert told == dataclasses.asdict(scheduler._prefill.address)
    scheduler.on_pause(is_paused=True)
    assert scheduler.early_address() is None
    scheduler.on_pause(is_paused=False)
    assert scheduler.early_address() is not None
    assert scheduler._directory is not None
    scheduler._directory.is_draining = True
    assert scheduler.early_address() is None
    assert make(kv_role="kv_consumer").early_address() is None


@pytest.mark.parametrize(
    ("num_groups", "early_writer", "expected"),
    [
        pytest.param(1, None, True, id="full attention"),
        pytest.param(2, None, False, id="two cache groups"),
        pytest.param(1, "zeroes_blocks", False, id="vLLM zeroes new blocks"),
        pytest.param(1, "may_copy_blocks", False, id="vLLM copies cached blocks"),
    ],
)
def test_decode_reads_chunks_only_of_blocks_that_vllm_leaves_alone(
    num_groups: int,
    early_writer: str | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    expected: bool,
) -> None:
    """Model runner V2 writes into new blocks before it calls the workers' hooks."""
    if early_writer is not None:
        monkeypatch.setattr(f"nixl_kv.connector.scheduler.{early_writer}", lambda _: True)
    cache = kv_cache_config()
    spec, names = cache.kv_cache_groups[0].kv_cache_spec, cache.kv_cache_groups[0].layer_names
    groups = [KVCacheGroupSpec(names[number::num_groups], spec) for number in range(num_groups)]
    cache.kv_cache_groups[:] = groups
    scheduler = Scheduler(vllm_config({"insecure": True, "port": 0}), cache)
    assert scheduler._prefill._in_parts is expected
    scheduler.shutdown()
