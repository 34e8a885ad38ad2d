"""The hooks that vLLM calls: which there are, and whose they are."""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from harness.local.memory import Fabric
from nixl_kv.connector import own
from nixl_kv.connector import worker as worker_module
from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.connector.worker import HandshakeMetadata, StepMetadata, Worker
from nixl_kv.errors import LocalProtocolError
from nixl_kv.protocol.events import AwaitWrites, Command, MarkWritten
from nixl_kv.protocol.messages import decode_rank
from support.records import prepare_offer
from support.vllm_objects import empty_output, kv_cache_config, kv_caches, new_request, vllm_config

Make = Callable[..., NixlKVConnector]


@pytest.fixture
def make() -> Iterator[Make]:
    connectors: list[NixlKVConnector] = []

    def new(role: KVConnectorRole, extra: Any = None) -> NixlKVConnector:
        config = vllm_config(extra)
        connectors.append(NixlKVConnector(config, role, kv_cache_config()))
        return connectors[-1]

    yield new
    for connector in connectors:
        connector.shutdown()


# --- vLLM's interface


LATER_HOOKS = (
    "get_loaded_kv_cache_group_ids",  # 0.32
    "supports_sleep_mode",  # 0.33, as the next
    "unregister_kv_caches",
    "restore_kv_caches",
)
"""Hooks that the oldest supported vLLM does not call."""

HOOKS = sorted(
    {
        name
        for owner in (NixlKVConnector, Scheduler, Worker)
        for name in vars(owner)
        if not name.startswith("_") and callable(getattr(owner, name))
    }
    - {"early_address", "end_landed", "on_pause"}  # our own hooks call them
    - {"may_compute", "may_seek", "pop_failed", "pop_released", "take_answers"}
)


def test_no_hook_of_vllms_is_missing() -> None:
    assert not inspect.isabstract(NixlKVConnector)
    assert len(HOOKS) > 20


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_is_one_of_vllms_with_its_parameters(name: str) -> None:
    """vLLM would never call another one, and end the engine for others."""
    if name in LATER_HOOKS and not hasattr(KVConnectorBase_V1, name):
        pytest.skip("this version of vLLM has no such hook")
    base = SupportsHMA if name == "request_finished_all_groups" else KVConnectorBase_V1
    ours, vllms = (getattr(owner, name) for owner in (NixlKVConnector, base))
    if name != "build_prom_metrics":  # whose are handed on as they come
        assert [*inspect.signature(ours).parameters] == [*inspect.signature(vllms).parameters]


def test_hooks_that_have_nothing_to_do_do_nothing(make: Make) -> None:
    worker = make(KVConnectorRole.WORKER)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("layer")
    worker.save_kv_layer("layer", None, None)
    worker.bind_connector_metadata(KVConnectorMetadata())
    assert worker.get_handshake_metadata() is None
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert list(stats.data) == ["open_descriptors"]
    assert NixlKVConnector.build_kv_connector_stats(stats.data).data == stats.data
    assert NixlKVConnector.build_kv_connector_stats().is_empty()
    with pytest.raises(LocalProtocolError, match="before register_kv_caches"):
        worker.restore_kv_caches()


@pytest.mark.usefixtures("one_rank")
def test_a_worker_lives_from_its_registration_to_its_end(make: Make, fabric: Fabric) -> None:
    worker = make(KVConnectorRole.WORKER)
    assert fabric.transports == {}, "nothing is opened before there is a cache"
    caches = kv_caches()
    worker.register_kv_caches(caches)
    first = worker.get_handshake_metadata()
    assert isinstance(first, HandshakeMetadata)
    rank = decode_rank(first.rank_description)
    assert rank.endpoint.startswith("tcp://127.0.0.1:")
    assert rank.agent.decode() in fabric.transports
    (group,) = rank.layout.groups
    assert [region.base for region in group.regions] == [t.data_ptr() for t in caches.values()]
    worker.unregister_kv_caches()
    assert fabric.transports == {}
    worker.restore_kv_caches()
    assert worker.get_handshake_metadata() != first
    assert fabric.transports
    worker.shutdown()
    assert fabric.transports == {}


# --- offers with draft layers

BIND, TARGET, DRAFT = "bind_connector_metadata", "target model", "draft model"
SAVE, RESULTS = "wait_for_save", "get_transfer_results"
STEPS = {
    "V1": (BIND, TARGET, RESULTS, DRAFT, SAVE),
    "V1, pipeline rank without the draft model": (BIND, TARGET, RESULTS),
    "V2 in vLLM 0.31 and 0.32": (BIND, TARGET, DRAFT, SAVE, RESULTS),
    "V2 in vLLM 0.33": (BIND, TARGET, RESULTS, DRAFT, SAVE),
}
"""The hooks that the model runners call in a step, in order."""
NO_FORWARD = (BIND, SAVE, RESULTS)
"""The hooks of a step without a forward, in all of them."""


@pytest.mark.parametrize("runner", STEPS)
@pytest.mark.usefixtures("fabric", "one_rank")
def test_an_offer_is_written_when_all_models_of_its_step_are_done(
    make: Make, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Decode may read it then, and not before."""
    enqueued: list[str] = []
    on_gpu: list[tuple[Callable[[], bool], list[str]]] = []  # events, and the work before each

    def record_event() -> Callable[[], bool]:
        on_gpu.append((lambda: True, [*enqueued]))
        return on_gpu[-1][0]

    monkeypatch.setattr(worker_module, "_record_event", record_event)
    worker = make(KVConnectorRole.WORKER)
    worker.register_kv_caches(kv_caches())
    submitted: list[Command] = []
    worker._engine.submit = submitted.extend  # type: ignore[union-attr, method-assign, assignment]

    def run(step: Sequence[str], *commands: Command) -> None:
        arguments: dict[str, Any] = {BIND: StepMetadata(list(commands)), RESULTS: set()}
        for each in step:
            if each in (TARGET, DRAFT):
                enqueued.append(each)
            else:
                getattr(worker, each)(*([arguments[each]] if each in arguments else []))

    late = prepare_offer(is_written=False)
    run(STEPS[runner], late)
    own_work = [each for each in STEPS[runner] if each in (TARGET, DRAFT)]
    run(NO_FORWARD)
    ((is_done, work),) = on_gpu
    assert work == own_work
    # The transfer thread asks the event, and then marks the offer.
    assert submitted == [late, AwaitWrites((MarkWritten(late.nonce),), is_done)]
    run(NO_FORWARD)
    assert len(submitted) == 2


def test_a_scheduler_without_requests_answers_vllm(make: Make) -> None:
    scheduler = make(KVConnectorRole.SCHEDULER)
    request: Any = new_request()
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    scheduler.update_state_after_alloc(request, blocks, 0)
    for num_tokens in (0, 3):
        output = empty_output()
        output.total_num_scheduled_tokens = num_tokens
        metadata = scheduler.build_connector_meta(output)
        assert (metadata.commands, metadata.computes) == ([], num_tokens > 0)
    scheduler.update_connector_output(KVConnectorOutput())
    assert scheduler.request_finished(request, [1, 2]) == (False, None)
    assert scheduler.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    scheduler.set_xfer_handshake_metadata_pp_aware({})
    assert scheduler.get_kv_connector_stats() is None


@pytest.mark.parametrize("has_state", [False, True])
def test_decode_reuses_its_own_kv_where_it_loads_the_state(make: Make, *, has_state: bool) -> None:
    scheduler = make(KVConnectorRole.SCHEDULER)
    assert scheduler.get_loaded_kv_cache_group_ids(new_request()) == (0,)
    scheduler._kv_cache_config = SimpleNamespace(has_mamba_layers=has_state)
    assert scheduler.supports_divergent_local_hybrid_hits is has_state


def test_it_logs_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives its handlers and level only to loggers under its own name."""
    ours, vllms = (logging.getLogger(f"{__name__}.{name}") for name in ("ours", "vllms"))
    lookup = SimpleNamespace(getLogger={"nixl_kv": ours, "vllm": vllms}.__getitem__)
    monkeypatch.setattr(own, "logging", lookup)
    handler = logging.NullHandler()
    vllms.handlers, vllms.propagate = [handler], False
    vllms.setLevel(logging.ERROR)
    own.log_like_vllm()
    assert (ours.handlers, ours.level, ours.propagate) == ([handler], logging.ERROR, False)
    vllms.addHandler(logging.NullHandler())
    own.log_like_vllm()
    assert ours.handlers == [handler], "a logger that has handlers keeps them"


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "NixlPushConnector"])
def test_it_has_the_names_by_which_platforms_recognise_nixl_connectors(name: str) -> None:
    """vLLM's factory has another class under each of these names, without a path."""
    transfer: Any = SimpleNamespace(kv_connector=name, kv_connector_module_path="nixl_kv.connector")
    assert KVConnectorFactory.get_connector_class(transfer) is NixlKVConnector
    assert KVConnectorFactory.supports_hma_config(transfer)
    transfer.kv_connector_module_path = None
    assert KVConnectorFactory.get_connector_class(transfer) is not NixlKVConnector
