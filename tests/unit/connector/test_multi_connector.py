"""Beside another connector in vLLM's MultiConnector: the hooks as vLLM's scheduler calls them."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import vllm
from packaging.version import Version
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

import nixl_kv.connector.vllm_config as module
from harness.local.memory import Fabric
from nixl_kv.connector.scheduler import NO_CHUNKS
from nixl_kv.connector.worker import HandshakeMetadata
from nixl_kv.early.answers import PROMISE, seal_promise
from nixl_kv.early.part import EarlyPart
from nixl_kv.early.slots import EarlySlots
from nixl_kv.errors import ConfigError
from nixl_kv.ids import new_nonce
from nixl_kv.protocol.events import (
    Asked,
    CancelLoad,
    ExpectOffer,
    MarkWritten,
    PrepareOffer,
    PublishOffer,
    Reply,
    SetEngine,
    StartLoad,
)
from nixl_kv.protocol.messages import Grant
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.protocol.ticket import FIELD
from support.records import RANK_LIFE, ask, ticket_for, written_out
from support.vllm_objects import kv_cache_config, kv_caches, vllm_config
from support.vllm_scheduler import (
    TIER,
    WANT_TICKET,
    SteppedScheduler,
    hooked,
    make_config,
    multi,
    ours,
)

CONFIGS: Final = Path(__file__).resolve().parents[3] / "configs"
PROMPT: Final = 100
"""Tokens: six blocks and a bit."""


class Engine(SteppedScheduler):
    def __init__(
        self, transfer: KVTransferConfig, num_blocks: int, *, is_hooked: bool = False
    ) -> None:
        config = make_config(transfer, num_blocks)
        super().__init__(config, hooked(config) if is_hooked else None)
        self.describe()

    def request(self, name: str, params: Any = None, *, first: int = 0) -> Request:
        """A waiting request; `first` is the first token of its prompt."""
        return self.add(name, range(first, first + PROMPT), params)

    def commands(self, output: SchedulerOutput, child: int = 0) -> list[Any]:
        commands: list[Any] = output.kv_connector_metadata.metadata[child].commands
        return commands

    def tier_jobs(self, output: SchedulerOutput, kind: str, child: int = 1) -> list[int]:
        """The jobs of vLLM's child for its workers, to load or to store."""
        return list(getattr(output.kv_connector_metadata.metadata[child], f"{kind}_jobs"))

    def fill_tier(self, child: int = 1) -> None:
        """Compute the prompt, let the tier keep it, and forget it everywhere else."""
        self.request("first")
        jobs: list[int] = []
        for _ in range(3):
            output = self.vllm.schedule()
            jobs += self.tier_jobs(output, "store", child)
            self.end(output)
        assert jobs
        self.end(self.vllm.schedule(), kv_connector_worker_meta=self.completed(jobs, child))
        assert self.vllm.kv_cache_manager.reset_prefix_cache()

    def completed(self, jobs: list[int], child: int = 1) -> MultiKVConnectorWorkerMetadata:
        meta: list[Any] = [None, None]
        meta[child] = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        return MultiKVConnectorWorkerMetadata(tuple(meta))

    def ticket(self, first: int = 0) -> dict[str, Any]:
        """A ticket of another engine, for such a prompt."""
        return ticket_for(range(first, first + PROMPT), new_nonce()).params(None)


FAILED: Final = {"finished_recving": {"second"}, "failed_recving": {"second"}}
Make = Callable[..., Engine]


@pytest.fixture
def engine(engines_of: Callable[[type[Engine]], Make]) -> Make:
    make = engines_of(Engine)

    def new(
        *children: Any, policy: str = "recompute", num_blocks: int = 32, **more: bool
    ) -> Engine:
        return make(multi(*children, policy=policy), num_blocks, **more)

    return new


# --- prefill


def test_blocks_from_the_tier_are_offered(engine: Make) -> None:
    prefill = engine(ours("kv_producer"), TIER)
    prefill.fill_tier()
    request = prefill.request("second", WANT_TICKET)
    loading = prefill.vllm.schedule()
    (job,) = prefill.tier_jobs(loading, "load")
    assert prefill.commands(loading) == [], "not before its prompt is complete"
    done = prefill.completed([job])
    prefill.end(loading, finished_recving={"second"}, kv_connector_worker_meta=done)
    computing = prefill.vllm.schedule()
    assert computing.num_scheduled_tokens == {"second": PROMPT - 96}, "the tier has whole blocks"
    (offer,) = prefill.commands(computing)
    assert isinstance(offer, PrepareOffer)
    table = prefill.blocks_of("second")
    assert written_out(offer.tables[0]) == table
    (answer,) = prefill.end(computing)
    assert FIELD in answer.kv_transfer_params
    assert request.is_finished()
    assert prefill.free_blocks == prefill.idle - len(table), "held for their reader"
    publishing = prefill.vllm.schedule()
    assert prefill.commands(publishing) == [PublishOffer(offer.nonce, offer.request)]
    prefill.end(publishing, finished_sending={"second"})
    assert prefill.free_blocks == prefill.idle


SYNC: Final = {"kv_connector": "SyncLoader", "kv_connector_module_path": __name__}


class SyncLoader(KVConnectorBase_V1, SupportsHMA):
    """Loads 64 tokens of the request Q within a step, as LMCacheConnectorV1 does."""

    def get_num_new_matched_tokens(self, request: Request, local: int) -> tuple[int, bool]:
        return (max(0, 64 - local) if request.request_id == "Q" else 0), False

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def build_connector_meta(self, _: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, *_: Any) -> tuple[bool, None]:
        return False, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


@pytest.mark.parametrize("length", [120, 400], ids=["in one step", "in chunks"])
def test_no_step_that_vllm_discards_is_readable(engine: Make, length: int) -> None:
    """Q's load fails. R, a pair, shares its blocks, so this step computes wrong KV of R too.

    R loads nothing itself: only vLLM's answer to the step's output shows that it goes back.
    """
    prefill = engine(ours("kv_producer"), {**SYNC, "kv_role": "kv_producer"}, num_blocks=64)
    role = prefill.connector._connectors[0]
    early = EarlyPart(math.inf, lambda slot: slots._tokens[slot])
    machine = PrefillMachine(
        RANK_LIFE,
        lambda *_: None,
        num_slots=4,
        offer_ttl_s=10,
        lease_s=5,
        hold_s=60,
        parts=(early,),
    )
    page: Any = SimpleNamespace(write=lambda *_: None, clear=lambda _: None)
    slots = EarlySlots(4)
    slots.bind(page, 0)
    prefill.add("Q", [*range(64), *range(900, 940)], max_tokens=2)
    params = {**WANT_TICKET, PROMISE: seal_promise(new_nonce(), role._trust.ticket_key)}
    request = prefill.add("R", [*range(64), *range(5000, 4936 + length)], params)
    granted = []
    for step in range(8):
        output = prefill.vllm.schedule()
        commands = [one for one in prefill.commands(output) if not isinstance(one, SetEngine)]
        applied: list[Any] = slots.before_step(commands)
        for command in applied:
            actions = machine.handle(command, step)
            if isinstance(command, ExpectOffer):  # decode asks at once
                asked = ask(nonce=command.nonce, context=command.context, is_early=True)
                actions += machine.handle(Asked(b"d", asked), step)
            elif isinstance(command, PrepareOffer):  # the step's writes are on the stream
                mark = MarkWritten(command.nonce, command.computed, command.attempt)
                actions += machine.handle(mark, step)
            replies = [each.message for each in actions if isinstance(each, Reply)]
            granted += [step for each in replies if isinstance(each, Grant)]
        if step == 0:
            assert set(prefill.blocks_of("Q")) & set(prefill.blocks_of("R"))
            prefill.end(output, invalid_block_ids=set(prefill.blocks_of("Q")[:4]))
            assert request.num_computed_tokens == 64
        else:
            (*_, answer) = prefill.end(output) or [None]
        if request.is_finished():
            break
    assert FIELD in answer.kv_transfer_params
    assert granted == []
    (publish,) = prefill.commands(prefill.vllm.schedule())
    actions = machine.handle(publish, 9)
    (grant,) = [each.message for each in actions if isinstance(each, Reply)]
    assert isinstance(grant, Grant)
    assert [written_out(table) for table in grant.tables] == [prefill.blocks_of("R")]


def test_vllm_finds_blocks_that_no_step_has_filled(engine: Make) -> None:
    """docs/upstream/vllm-discarded-step.md. If this fails, vLLM has mended it: say so there."""
    prefill = engine(ours("kv_producer"), {**SYNC, "kv_role": "kv_producer"}, num_blocks=64)
    prompt = [*range(64), *range(900, 940)]
    prefill.add("Q", prompt, max_tokens=2)
    output = prefill.vllm.schedule()
    not_loaded = prefill.blocks_of("Q")[:4]
    prefill.end(output, invalid_block_ids=set(not_loaded))
    prefill.vllm.finish_requests("Q", RequestStatus.FINISHED_ABORTED)
    prefill.add("R", prompt, max_tokens=2)
    output = prefill.vllm.schedule()
    assert prefill.blocks_of("R")[:4] == not_loaded
    assert output.num_scheduled_tokens == {"R": 8}, "not even tokens computed on them"


@pytest.mark.parametrize("is_multi", [False, True])
def test_chunks_are_off_beside_other_connectors(
    caplog: pytest.LogCaptureFixture, *, is_multi: bool
) -> None:
    """Also beside one that loads nothing: its class does not tell."""
    child = ours("kv_producer")
    transfer = multi(child, TIER) if is_multi else KVTransferConfig(**child)
    with caplog.at_level(logging.INFO, "vllm"):  # ours has the same level
        prefill = Engine(transfer, 32)
    role = prefill.connector._connectors[0] if is_multi else prefill.connector
    assert role._prefill._in_parts is not is_multi
    assert (NO_CHUNKS in caplog.messages) is is_multi
    prefill.connector.shutdown()


# --- decode


def test_the_first_connector_that_has_tokens_loads(engine: Make) -> None:
    decode = engine(ours("kv_consumer"), TIER)
    decode.fill_tier()
    decode.request("second", decode.ticket())
    output = decode.vllm.schedule()
    start = decode.commands(output)[-1]
    assert isinstance(start, StartLoad)
    assert (start.begin, start.end) == (0, PROMPT - 1)
    assert decode.tier_jobs(output, "load") == []
    decode.end(output, finished_recving={"second"})
    running = decode.vllm.schedule()
    assert running.num_scheduled_tokens == {"second": 1}
    (answer,) = decode.end(running)
    assert answer.finished
    assert not decode.connector._requests_to_connector


@pytest.mark.parametrize("num_shared", [4, 3], ids=["from the first on", "but the first"])
def test_media_are_not_computed_because_another_connectors_load_failed(
    engine: Make, num_shared: int
) -> None:
    """R shares blocks with Q, whose load fails. vLLM computes R from there on, loaded or not."""
    sync = {**SYNC, "kv_role": "kv_consumer"}
    decode = engine(ours("kv_consumer"), sync, num_blocks=64, is_hooked=True)
    prompt = [*range(64), *range(900, 940)]
    decode.add("Q", prompt, max_tokens=2)
    request = decode.add("R", prompt, ticket_for(prompt, new_nonce()).params(None))
    decode.connector._connectors[0]._decode.must_load.add("R", "it has stand-ins")
    output = decode.vllm.schedule()
    start = decode.commands(output)[-1]
    assert isinstance(start, StartLoad)
    blocks = decode.blocks_of("Q")[:4]
    assert decode.blocks_of("R")[:4] == blocks
    invalid = set(blocks[4 - num_shared :])
    decode.end(output, invalid_block_ids=invalid, finished_recving={"R"})
    output = decode.vllm.schedule()
    assert list(output.num_scheduled_tokens) == ["Q"]
    assert request.status is RequestStatus.FINISHED_ERROR
    decode.end(output)


def test_prefill_is_released_if_the_tier_comes_first(engine: Make) -> None:
    """An engine that describes itself must come first: vLLM would bring it another's handshake."""
    decode = engine(TIER, ours("kv_consumer"))
    theirs = KVConnectorHandshakeMetadata()
    with pytest.raises(ConfigError, match="list NixlKVConnector first"):
        decode.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): theirs})
    decode.fill_tier(child=0)
    decode.request("second", decode.ticket())
    output = decode.vllm.schedule()
    (job,) = decode.tier_jobs(output, "load", child=0)
    assert isinstance(decode.commands(output, child=1)[-1], CancelLoad)
    done = decode.completed([job], child=0)
    decode.end(output, finished_recving={"second"}, kv_connector_worker_meta=done)
    assert decode.vllm.schedule().num_scheduled_tokens == {"second": PROMPT - 96}


def test_after_a_load_that_failed_the_tier_is_asked(engine: Make) -> None:
    decode = engine(ours("kv_consumer"), TIER)
    decode.fill_tier()
    decode.request("second", decode.ticket())
    decode.end(decode.vllm.schedule(), **FAILED)
    output = decode.vllm.schedule()
    assert len(decode.tier_jobs(output, "load")) == 1
    assert decode.commands(output) == []


@pytest.mark.parametrize(
    ("policy", "is_loaded", "is_missed"),
    [("recompute", True, True), ("fail", True, False), ("recompute", False, False)],
)
def test_the_policy_of_the_whole_counts_and_ours_is_missed(
    engine: Make,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    *,
    is_loaded: bool,
    is_missed: bool,
) -> None:
    decode = engine(ours("kv_consumer", on_load_failure=policy), TIER, policy="fail")
    decode.request("second", decode.ticket() if is_loaded else None)
    with caplog.at_level(logging.WARNING, "nixl_kv"):
        (answer,) = decode.end(decode.vllm.schedule(), **(FAILED if is_loaded else {}))
    assert (str(answer.finish_reason) == "error") is is_loaded
    assert ("also set kv_load_failure_policy" in caplog.text) is is_missed


@pytest.mark.xfail(Version(vllm.__version__) < Version("0.33"), reason="vLLM 0.33 has mended it")
def test_a_tier_has_copied_the_blocks_that_a_load_will_overwrite(engine: Make) -> None:
    """Why OffloadingConnector is not for decode with vLLM 0.32: docs/deploy/README.md."""
    decode = engine(ours("kv_consumer"), TIER, num_blocks=1 + 7)
    decode.request("first")
    output = decode.vllm.schedule()
    held = set(decode.blocks_of("first"))
    jobs = decode.tier_jobs(output, "store")
    decode.end(output)
    decode.request("second", decode.ticket(first=1000), first=1000)
    output = decode.vllm.schedule()
    jobs += decode.tier_jobs(output, "store")
    assert jobs, "to be copied with the next step"
    assert isinstance(decode.commands(output)[-1], StartLoad)
    assert held & set(decode.blocks_of("second"))
    assert output.kv_connector_metadata.metadata[1].jobs_to_flush >= set(jobs)


# --- connectors made at the start


def test_its_stats_are_found_by_its_name_without_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An API server does this if VLLM_PLUGINS names only others."""
    monkeypatch.delitem(KVConnectorFactory._registry, "NixlKVConnector", raising=False)
    config = vllm_config()
    config.kv_transfer_config = multi(ours())
    assert MultiConnector.get_required_kvcache_layout(config) is None
    stats = MultiConnector.build_kv_connector_stats({"NixlKVConnector": {"offers": {"": 2}}})
    assert stats is not None
    assert stats.reduce() == {"NixlKVConnector": {"offers": 2}}


def test_on_a_gpu_the_connectors_of_the_example_want_one_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours alone would want another one than vLLM's, and the start would end."""
    monkeypatch.setattr(module.current_platform, "is_cuda", lambda: True)
    config = vllm_config()
    config.attention_config.backend = SimpleNamespace(name="FLASH_ATTN")
    example = (CONFIGS / "multi-prefill.json").read_text(encoding="utf-8")
    config.kv_transfer_config = KVTransferConfig(**json.loads(example))
    ours_by_itself = config.kv_transfer_config.kv_connector_extra_config["connectors"][0]
    ours_by_itself["kv_connector_extra_config"] |= {"host": "127.0.0.1", "port": 0}  # of here
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"
    del ours_by_itself["kv_connector_extra_config"]["layout"]
    with pytest.raises(ValueError, match="layout mismatch"):
        MultiConnector.get_required_kvcache_layout(config)


@pytest.mark.usefixtures("one_rank")
def test_the_workers_of_both_have_the_same_cache(fabric: Fabric) -> None:
    """e2e/test_offload_tier.py shows that a tier keeps KV and gives it back."""
    host_tier = {"spec_name": "HostTierSpec", "spec_module_path": "harness.cluster.host_tier"}
    extra = host_tier | {"cpu_bytes_to_use": 1 << 24}
    config = vllm_config()
    config.kv_transfer_config = multi(ours(), dict(TIER, kv_connector_extra_config=extra))
    config.model_config.get_total_num_kv_heads = lambda: 4
    config.model_config.model = "tiny"
    worker = MultiConnector(config, KVConnectorRole.WORKER, kv_cache_config())
    worker.register_kv_caches(kv_caches())
    assert fabric.transports
    assert isinstance(worker.get_handshake_metadata(), HandshakeMetadata)
    worker.shutdown()
    assert fabric.transports == {}
