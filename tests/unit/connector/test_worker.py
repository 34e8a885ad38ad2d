"""The worker role, with caches as vLLM registers them."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from harness.local.memory import Fabric
from nixl_kv import addresses
from nixl_kv.connector import worker as worker_module
from nixl_kv.connector.vllm_config import is_read, parse_config
from nixl_kv.connector.worker import (
    GRANTING_S,
    LOAD_WAIT_S,
    StepMetadata,
    Worker,
    rank_port,
    rank_spec,
)
from nixl_kv.conversations.slots import ContentSlots
from nixl_kv.engine.engine import UnwrittenOffers
from nixl_kv.errors import ConfigError, TransportError
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Rank, new_incarnation
from nixl_kv.protocol.events import (
    BlocksTaken,
    Command,
    Counts,
    LoadEnded,
    MarkWritten,
    NewLife,
    OfferEnd,
    PrepareLoad,
    PrepareOffer,
    PublishOffer,
    Result,
)
from nixl_kv.protocol.messages import RankDescription, decode_rank, encode
from support.polling import wait_until
from support.records import (
    D1,
    D2,
    NONCE,
    NONCE2,
    P1,
    layout,
    prepare_load,
    prepare_offer,
    publish_offer,
    start_load,
)
from support.vllm_objects import kv_cache_config, kv_caches, vllm_config

pytestmark = pytest.mark.usefixtures("fabric", "one_rank")


@pytest.fixture
def silent_load() -> Iterator[PrepareLoad]:
    """A load that waits for an engine that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield prepare_load(host="127.0.0.1", port=silent.getsockname()[1])


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(vllm_config(), kv_cache_config())
    yield worker
    worker.unregister_kv_caches()


def report(worker: Worker, *results: Result) -> None:
    """Give the transfer thread results, which the next step fetches."""
    assert worker._engine is not None
    worker._engine._results.extend(results)


def described(worker: Worker) -> RankDescription:
    handshake = worker.get_handshake_metadata()
    assert handshake is not None
    return decode_rank(handshake.rank_description)


# --- a life


def test_a_new_life_that_a_rank_begins_by_itself_is_told_once(worker: Worker) -> None:
    worker.register_kv_caches(kv_caches())
    assert worker.build_connector_worker_meta() is None
    new = replace(described(worker), incarnation=new_incarnation())
    report(worker, NewLife(new))
    worker.get_transfer_results(set())
    metadata = worker.build_connector_worker_meta()
    assert metadata is not None
    assert metadata.rank_descriptions == {0: encode(new)}
    assert described(worker) == new
    assert worker.build_connector_worker_meta() is None


def test_a_new_life_of_before_a_sleep_is_forgotten(worker: Worker) -> None:
    """An idle engine makes no step, so the sleep comes before the scheduler hears of it."""
    worker.register_kv_caches(kv_caches())
    new = replace(described(worker), incarnation=new_incarnation())
    report(worker, NewLife(new), Counts({("unreadable", ""): 1}))
    worker.unregister_kv_caches()
    worker.register_kv_caches(kv_caches())
    after = described(worker)
    worker.get_transfer_results(set())
    assert worker.build_connector_worker_meta() is None
    assert described(worker) == after != new


def test_a_new_life_is_not_unreadable(worker: Worker) -> None:
    worker.register_kv_caches(kv_caches())
    unreadable = Counts({("unreadable", ""): 1})
    report(worker, unreadable)
    worker.get_transfer_results(set())
    assert worker.stats.data["unreadable"] == {"0": 1}
    report(worker, unreadable)
    worker.restore_kv_caches()
    worker.get_transfer_results(set())
    assert worker.stats.data["unreadable"] == {"0": 0}


def test_without_a_transfer_engine_loads_and_offers_end_at_once(worker: Worker) -> None:
    """vLLM waits for a report of each of them: before the cache is registered, or after a sleep."""
    worker.bind_connector_metadata(
        StepMetadata([prepare_offer(), PublishOffer(NONCE, P1), start_load()])
    )
    results = worker.get_transfer_results(set())
    assert (results.finished_recving, results.finished_sending) == ({D1}, {P1})
    assert results.failed_recving == {D1}
    assert worker.get_transfer_results(set()).finished_recving == set()


def test_slots_of_preempted_requests_are_cleared_first_and_once(worker: Worker) -> None:
    """The V1 runner zeroes new blocks between the two hooks. Then come stale tails, and loads."""
    worker.register_kv_caches(kv_caches())
    engine, order = worker._engine, []
    assert engine is not None
    engine.before_step = lambda commands: order.append("slots") or [*commands]  # type: ignore[method-assign, func-returns-value]
    worker._stale_tails.clear = lambda _: order.append("tails")  # type: ignore[assignment, method-assign]
    engine.submit = lambda _: order.append("loads")  # type: ignore[method-assign, assignment]
    step = StepMetadata([start_load()])
    worker.handle_preemptions(step)
    assert order == ["slots"]
    worker.bind_connector_metadata(step)
    assert order == ["slots", "tails", "loads"]
    worker.bind_connector_metadata(StepMetadata([start_load()]))  # without the other hook
    assert order[3:] == ["slots", "tails", "loads"]


CONVERSATIONS = {"port": 0, "conversations": "on"}


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_a_step_tells_the_rank_which_blocks_it_reuses_and_when_it_has_written(role: str) -> None:
    """Before it zeroes blocks, and after it; on a stage without the draft model before the next."""
    worker = Worker(vllm_config(CONVERSATIONS, kv_role=role), kv_cache_config())
    worker.register_kv_caches(kv_caches())
    engine, order = worker._engine, list[Any]()
    assert engine is not None
    (slots,) = [each for each in engine._steps if isinstance(each, ContentSlots)]
    take, end = slots._take, slots.end_step
    slots._take = lambda taken: order.append(taken.step) or take(taken)  # type: ignore[method-assign, func-returns-value]
    slots.end_step = lambda has_ended: order.append("end") or end(has_ended)  # type: ignore[method-assign, func-returns-value]
    for number in (1, 2):
        step = StepMetadata([BlocksTaken(number, b"", 0)])
        worker.handle_preemptions(step)
        worker.bind_connector_metadata(step)
        if number == 1:
            worker.wait_for_save()
            worker.get_transfer_results(set())
    assert order == [1, "end", 2]
    worker.handle_preemptions(StepMetadata([BlocksTaken(3, b"", 0)]))
    assert order == [1, "end", 2, "end", 3]
    worker.unregister_kv_caches()


@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
@pytest.mark.parametrize("conversations", ["on", "off"])
def test_others_read_a_decode_engine_only_with_conversations(role: str, conversations: str) -> None:
    config = vllm_config({"port": 0, "conversations": conversations}, kv_role=role)
    assert is_read(config) is (role != "kv_consumer" or conversations == "on")
    spec = rank_spec(config, layout())
    assert spec.is_prefill is is_read(config)
    assert spec.is_decode is (role != "kv_producer")


def test_a_copy_is_for_prefill_alone_and_reports_each_offer_as_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM waits for a report of each worker before it takes the blocks back."""
    group = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr("nixl_kv.connector.vllm_config.get_pcp_group", lambda: group)
    config = vllm_config()
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match="decode context parallelism"):
        Worker(config, kv_cache_config())
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = "kv_producer"
    worker = Worker(config, kv_cache_config())
    worker.register_kv_caches(kv_caches())
    assert worker.get_handshake_metadata() is None
    worker.bind_connector_metadata(StepMetadata([prepare_offer(), PublishOffer(NONCE, P1)]))
    assert worker.get_transfer_results(set()).finished_sending == {P1}
    assert worker.get_transfer_results(set()).finished_sending == set()


def test_reports_that_a_life_owed_come_after_it(worker: Worker, silent_load: PrepareLoad) -> None:
    """vLLM keeps these blocks until each of its ranks has said so, and asks only in a step."""
    worker.register_kv_caches(kv_caches())
    prepare = PrepareOffer(NONCE, P1, "0" * 32, 32, (Table.of([1]),))
    commands = [prepare, PublishOffer(NONCE, P1), silent_load, start_load()]
    worker.bind_connector_metadata(StepMetadata(commands))
    worker.unregister_kv_caches()
    worker.restore_kv_caches()
    results = worker.get_transfer_results(set())
    assert results.finished_sending == {P1}
    assert results.finished_recving == results.failed_recving == {D1}
    reports = worker.build_connector_worker_meta().reports  # type: ignore[union-attr]
    assert reports.loads[D1].reason == "dropped"
    assert reports.offers[P1].end is OfferEnd.LOST
    again = worker.get_transfer_results(set())
    assert again.finished_sending == again.finished_recving == set()


def test_memory_that_may_still_be_written_is_not_registered_again(
    worker: Worker,
    silent_load: PrepareLoad,
    fabric: Fabric,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM refuses to sleep; the load is reported when nothing can write any longer."""
    worker.register_kv_caches(kv_caches())
    first = described(worker)
    worker.bind_connector_metadata(StepMetadata([silent_load, start_load()]))
    engine = worker._engine
    assert engine is not None
    assert engine.loop is not None
    agents = engine.loop.parts.agents
    is_read = agents.is_read
    agents.is_read = lambda request: bool(agents.polled) or is_read(request)  # type: ignore[method-assign]
    fabric.closes_fail = True
    words = r"must not free it: .* does not end.*restart"
    for again in (worker.unregister_kv_caches, worker.restore_kv_caches):
        with monkeypatch.context() as patch:  # not when the fixture ends the worker
            patch.setattr("nixl_kv.engine.engine.STOP_TIMEOUT_S", 0.5)
            with pytest.raises(TransportError, match=words):
                again()
    assert described(worker) == first, "no new life"
    worker.bind_connector_metadata(StepMetadata([start_load(D2)]))
    assert worker.get_transfer_results(set()).failed_recving == {D2}
    monkeypatch.setattr("nixl_kv.connector.worker.SHUTDOWN_S", 0.2)
    worker.shutdown()
    assert "shutdown: a transfer may still write into the KV cache" in caplog.text
    fabric.closes_fail = False
    wait_until(lambda: D1 in worker.get_transfer_results(set()).failed_recving)
    worker.restore_kv_caches()
    assert described(worker) != first
    assert worker.get_transfer_results(set()).finished_recving == set(), "reported once"


# --- steps and results


@pytest.mark.parametrize(
    ("computes", "pp", "dp", "waits"),
    [
        pytest.param(False, 1, 1, True, id="an idle engine"),
        pytest.param(True, 1, 1, False, id="an engine that computes"),
        pytest.param(False, 2, 1, False, id="another stage may compute"),
        pytest.param(False, 1, 2, False, id="another engine may wait for this one"),
    ],
)
def test_a_step_that_computes_nothing_waits_for_a_load(
    silent_load: PrepareLoad, *, computes: bool, pp: int, dp: int, waits: bool
) -> None:
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = pp
    config.parallel_config.data_parallel_size = dp
    now = 100.0
    worker = Worker(config, kv_cache_config(), lambda: now)
    worker.register_kv_caches(kv_caches())
    engine, waited = worker._engine, list[float]()
    assert engine is not None
    engine.wait_load = waited.append  # type: ignore[method-assign, assignment]

    def step(*commands: Command) -> set[str]:
        worker.bind_connector_metadata(StepMetadata([*commands], computes=computes))
        return worker.get_transfer_results(set()).finished_recving

    try:
        step()
        assert not waited, "nothing is loaded"
        assert not step(silent_load, start_load(D1))
        for now in (100.0 + LOAD_WAIT_S / 4, 100.0 + 2 * LOAD_WAIT_S):  # noqa: B007
            assert not step()
        shares = [1, 3 / 4, 0] if waits else []
        assert waited == pytest.approx([LOAD_WAIT_S * share for share in shares])
        report(worker, LoadEnded(D1, 7, None))
        assert step() == {D1}
        now, waited[:] = 100.0, []
        step()
        assert not waited, "the load has ended"
    finally:
        worker.unregister_kv_caches()


def test_a_wait_ends_with_a_load(worker: Worker) -> None:
    """It ends long before its timeout, and each time for another load."""
    worker.register_kv_caches(kv_caches())
    engine = worker._engine
    assert engine is not None
    for request in (D1, D2):
        commands = [prepare_load(request, host="127.0.0.1", port=1), start_load(request)]
        worker.bind_connector_metadata(StepMetadata(commands, computes=False))
        engine.wait_load(60.0)
        assert worker.get_transfer_results(set()).finished_recving == {request}


def test_on_a_cpu_an_offer_with_draft_layers_is_written_when_its_step_returns() -> None:
    """And one without draft layers needs no mark; see test_connector.py for GPUs."""
    offers = UnwrittenOffers(worker_module._record_event)
    offers.add([prepare_offer(is_written=False), publish_offer(), prepare_offer(nonce=NONCE2)])
    assert offers.pop() == [MarkWritten(NONCE)]
    assert offers.pop() == []


@pytest.mark.parametrize("is_cpu", [False, True])
def test_the_step_thread_lets_a_chunk_be_granted_before_it_samples(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool
) -> None:
    """Sampling keeps the GIL. Steps without a chunk, and all on CPUs, wait for nothing."""
    order: list[Any] = []
    worker.register_kv_caches(kv_caches())
    engine = worker._engine
    assert engine is not None
    monkeypatch.setattr(worker_module.current_platform, "is_cpu", lambda: is_cpu)
    monkeypatch.setattr(worker_module.time, "sleep", order.append)
    engine.submit = order.append  # type: ignore[method-assign, assignment]
    offer = prepare_offer(is_written=False, computed=4)
    worker._unwritten = UnwrittenOffers(lambda: None)
    worker._unwritten.add([offer])
    worker.wait_for_save()
    assert order == [[MarkWritten(NONCE, 4)], *([] if is_cpu else [GRANTING_S])]
    order.clear()
    worker.wait_for_save()
    assert order == [[]]


# --- what its transfer engine is made of


def test_no_two_ranks_of_a_data_parallel_group_have_the_same_port() -> None:
    """vLLM may count data-parallel engines itself, or each gets its place as an argument."""
    config = vllm_config({"port": 5600, "rank_port": 5700})
    parallel, ports = config.parallel_config, list[int]()
    parallel.world_size = 4
    for parallel.data_parallel_index in range(3):
        ports += [rank_port(parse_config(config), parallel, Rank(rank)) for rank in range(4)]
    assert ports == [*range(5700, 5712)]


@pytest.mark.parametrize(
    ("first", "rank", "engines"),
    [
        pytest.param(65534, 2, 1, id="the port would be too large"),
        pytest.param(5599, 1, 1, id="the description's port"),
        pytest.param(5601, 1, 4, id="the port of another engine's description"),
    ],
)
def test_a_rank_port_that_does_not_fit_is_refused(first: int, rank: int, engines: int) -> None:
    config = vllm_config({"port": 5600, "rank_port": first})
    config.parallel_config.data_parallel_size = engines
    words = (
        rf"rank_port is {first}, which makes {first + rank} the port .* up to 65535, outside 5600"
    )
    with pytest.raises(ConfigError, match=words):
        rank_port(parse_config(config), config.parallel_config, Rank(rank))


@pytest.mark.parametrize(
    ("role", "rank_port", "roles"),
    [
        ("kv_producer", 5700, "prefill"),
        ("kv_consumer", 0, "decode"),
        ("kv_both", 0, "prefill and decode"),
    ],
)
def test_the_spec_of_a_rank_has_the_facts_of_its_engine(
    role: str, rank_port: int, roles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"draft model": "eagle3"}
    monkeypatch.setattr("nixl_kv.connector.worker.draft_facts", lambda _: facts)
    config = vllm_config({"port": 0, "rank_port": rank_port, "verify": "sample:0.5"}, kv_role=role)
    spec = rank_spec(config, layout())
    assert (spec.roles, spec.engine, spec.rank, spec.port) == (roles, "tiny", 0, rank_port)
    assert spec.config.verify == 0.5
    assert spec.model["served_model_name"] == "tiny"
    assert spec.extras == facts, "its peers need the draft model that it has"


UNREACHABLE = r"host is '192.0.2.8', .* unreachable; allowed: 'auto'"
ON_LOOPBACK = r"host is '127.0.0.1'; allowed .* 'auto'"


@pytest.mark.parametrize(
    ("host", "master", "expected", "words"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", "127.0.0.1", "", id="this machine's"),
        pytest.param("192.0.2.7", "192.0.2.7", "10.0.0.9", "", id="another machine's"),
        pytest.param("192.0.2.8", "192.0.2.8", "", UNREACHABLE, id="no route"),
        pytest.param("127.0.0.1", "192.0.2.7", "", ON_LOOPBACK, id="loopback, two machines"),
    ],
)
def test_a_rank_listens_where_other_machines_reach_it(
    host: str, master: str, expected: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have one configuration, and one on another machine listens on its own address.

    With an unreachable one, decode engines would compute every prompt, and only their logs said
    why.
    """

    def towards(remote: str) -> str:
        if remote != "192.0.2.7":
            raise OSError("Network is unreachable")
        return "10.0.0.9"

    monkeypatch.setattr(addresses, "towards", towards)
    config = vllm_config({"host": host, "insecure": True})
    config.parallel_config.nnodes, config.parallel_config.master_addr = 2, master
    if words:
        with pytest.raises(ConfigError, match=words):
            rank_spec(config, layout())
    else:
        assert rank_spec(config, layout()).host == expected
