"""A real engine's run, played again: the same calls of the same hooks lead to the same commands.

Both roles are here, and bytes move in memory: the request that brings a ticket gets its KV.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from nixl_kv.connector import decode, worker
from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.protocol.events import Command
from nixl_kv.protocol.ticket import FIELD
from support import recorded_vllm as recorded
from support.cache_manager import CacheManager
from support.polling import wait_until
from support.recorded_vllm import Record, torch
from support.records import opened
from support.stepped import Clock


def said(command: Command) -> Record:
    """What of a command is the same in each run."""
    left_out = ("nonce", "claim", "context", "is_written")
    kept = {
        name: value
        for name, value in msgspec.structs.asdict(command).items()
        if isinstance(value, int | str | bool) and name not in left_out
    }
    return {"kind": type(command).__name__, **kept}


class Engine:
    """The connector in both roles, called as vLLM has called it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        config, cache = (
            recorded.vllm_config(),
            recorded.kv_cache_config(),
        )
        self.scheduler, self.worker = (
            NixlKVConnector(config, role, cache)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self.manager = CacheManager()
        self.scheduler.bind_kv_cache_manager(self.manager)
        self.caches = recorded.kv_caches()
        for seed, tensor in enumerate(self.caches.values()):
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        self.worker.register_kv_caches(self.caches)
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.ticket: Record = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.published: set[str] = set()
        self.ended: set[str] = set()
        self.kinds: Counter[str] = Counter()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def play(self, call: Record) -> None:
        """One call, and what came of it."""
        request = call.get("request")
        if request is not None and request["request_id"] in self.requests:
            recorded.update(self.requests[request["request_id"]], request)
        getattr(self, call["hook"])(call)

    def set_xfer_handshake_metadata_pp_aware(self, call: Record) -> None:
        (rank,) = call["ranks"]
        metadata = {tuple(rank): self.worker.get_handshake_metadata()}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(metadata)

    def on_new_request(self, call: Record) -> None:
        record = call["request"]
        if record["kv_transfer_params"].get(FIELD):
            record["kv_transfer_params"] |= self.ticket  # of this life
        request = self.requests[record["request_id"]] = recorded.request_of(record)
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, call: Record) -> None:
        request = self.requests[call["request"]["request_id"]]
        computed = call["num_computed_tokens"]
        matched = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert list(matched) == call["result"]

    def update_state_after_alloc(self, call: Record) -> None:
        request = self.requests[call["request"]["request_id"]]
        self.tables[request.request_id] = call["block_ids"]
        blocks = SimpleNamespace(get_block_ids=lambda: tuple(call["block_ids"]))
        self.scheduler.update_state_after_alloc(request, blocks, call["num_external_tokens"])

    def build_connector_meta(self, call: Record) -> None:
        self.manager.tables = call["tables"]
        self.tables |= call["tables"]
        metadata: Any = self.scheduler.build_connector_meta(recorded.output_of(call["output"]))
        commands = [said(command) for command in metadata.commands]
        assert commands == call["result"]
        self.kinds.update(command["kind"] for command in commands)
        self.published |= {c["request"] for c in commands if c["kind"] == "PublishOffer"}
        self.worker.bind_connector_metadata(metadata)

    def update_connector_output(self, call: Record) -> None:
        sent, received = (
            set(call[name] or ()) for name in ("finished_sending", "finished_recving")
        )
        self.wait_reported(sent, received)
        self.ended |= sent
        output: Any = SimpleNamespace(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=set(),
            kv_connector_worker_meta=None,
        )
        self.scheduler.update_connector_output(output)

    def wait_reported(self, sent: set[str], received: set[str]) -> None:
        """Until these were reported. Offers that nobody reads end with their time."""
        wait_until(lambda: self._has_reported(set(), received))

        def is_sent_in_time() -> bool:
            self.clock.now += 1.0
            return self._has_reported(sent, received)

        if not self._has_reported(sent, received):
            wait_until(is_sent_in_time)

    def _has_reported(self, sent: set[str], received: set[str]) -> bool:
        results = self.worker.get_transfer_results(set())
        assert not results.failed_recving
        assert not self.sent & results.finished_sending, "reported twice"
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        return self.sent >= sent and self.received >= received

    def request_finished_all_groups(self, call: Record) -> None:
        request = self.requests[call["request"]["request_id"]]
        tables = tuple(call["block_ids"])
        is_pinned, params = self.scheduler.request_finished_all_groups(request, tables)
        was_pinned, recorded_params = call["result"]
        assert is_pinned is was_pinned
        assert (params is None) == (recorded_params is None)
        if params is not None:
            of_ticket, recorded_one = map(opened, (params, recorded_params))
            assert of_ticket.num_tokens == recorded_one.num_tokens
            self.ticket = params


@pytest.fixture
def engine(fabric: object, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    del fabric, one_rank
    # The engine that was recorded prefilled for itself, and held none of it back.
    monkeypatch.setattr(decode, "IN_USE_S", 0.0)
    clock, spec = Clock(), worker.rank_spec
    monkeypatch.setattr(worker, "rank_spec", lambda *of: replace(spec(*of), clock=clock))
    engine = Engine(clock)
    yield engine
    engine.close()


def test_a_recorded_run_leads_to_the_same_commands_and_moves_the_kv(engine: Engine) -> None:
    calls = recorded.recorded("scheduler")
    offered = next(c["request"]["request_id"] for c in calls if c["hook"] == "on_new_request")
    loaded: list[str] = []
    for call in calls:
        engine.play(call)
        for request in engine.received - set(loaded):
            loaded.append(request)
            (read,), (written,) = engine.tables[offered], engine.tables[request]
            for tensor in engine.caches.values():
                assert torch.equal(tensor[written], tensor[read])
    assert len(loaded) == 1
    engine.wait_reported(engine.published, set())
    assert len(engine.sent) == engine.kinds["PublishOffer"] > 1
    assert engine.kinds["WithdrawOffer"] == 1  # of the request that was aborted
    # A request that was preempted after its prompt was offered with other blocks.
    assert engine.kinds["PrepareOffer"] > engine.kinds["PublishOffer"] + 1
    assert engine.kinds["RevokeOffer"] >= 1
    stats = engine.worker.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["loads"] == 1
    assert stats.data["tokens_loaded"] == 99
    assert stats.data["offers"] == engine.kinds["PublishOffer"]
    shown = engine.scheduler.get_kv_connector_stats()
    assert shown is not None
    assert shown.reduce() == {"open_offers": len(engine.published - engine.ended)}
