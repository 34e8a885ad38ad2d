"""vLLM's connector interface, whose hooks vLLM calls around each step.

vLLM creates one instance in the scheduler's process and one in each worker, and calls only the
hooks of that role. Each hook delegates to the method of the same name in `scheduler.py` or
`worker.py`. Comments say when vLLM calls a hook, if the name does not.

For a request with a ticket, vLLM calls on_new_request, get_num_new_matched_tokens,
update_state_after_alloc and build_connector_meta in the scheduler, then bind_connector_metadata and
get_transfer_results in each worker, then update_connector_output in the scheduler.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from nixl_kv.connector.plugin import check_address
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.connector.stats import PromMetrics, Stats
from nixl_kv.connector.vllm_config import HIT_SOURCE, has_sleep_hooks, parse_config, required_layout
from nixl_kv.connector.worker import StepMetadata, Worker, WorkerMetadata


class NixlKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Disaggregated prefill and decode over NIXL. See README.md for its configuration."""

    _cache_hit_source = HIT_SOURCE
    _scheduler: Scheduler  # in the scheduler's process only
    _worker: Worker  # in a worker only

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Opens nothing yet. A ConfigError names what the connector cannot serve."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        self._half: Scheduler | Worker
        if role is KVConnectorRole.SCHEDULER:
            self._half = self._scheduler = Scheduler(vllm_config, kv_cache_config)
        else:
            self._half = self._worker = Worker(vllm_config, kv_cache_config)

    # --- both roles

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether vLLM may reuse local KV of a prompt whose recurrent state it does not have."""
        # A load brings the state. Without this, vLLM would hardly ever have a local hit on hybrid
        # models, since it keeps few states.
        return bool(self._kv_cache_config.has_mamba_layers)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load overwrites all transferred groups, so vLLM need not zero their blocks."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_kv_connector_stats(self) -> Stats | None:
        return self._half.get_kv_connector_stats()

    # At the end of the process. vLLM may never call it.
    def shutdown(self) -> None:
        self._half.shutdown()

    # --- without an instance

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's
        return has_sleep_hooks()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # vLLM asks in the scheduler's process, before it profiles memory and captures graphs. This
        # is the last good moment to check the address, if `check_before_weights` could not.
        is_prefill = vllm_config.kv_transfer_config.is_kv_producer
        check_address(parse_config(vllm_config), vllm_config, is_prefill=is_prefill)
        return required_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> PromMetrics:
        return PromMetrics(*args, **kwargs)

    # --- vLLM's scheduler, on its only thread

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    # For each waiting request, in each step until it is allocated.
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    # After each allocation of a waiting request, so a second time after its load.
    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        tables = blocks.get_block_ids()
        self._scheduler.update_state_after_alloc(request, tables, num_external_tokens)

    # Once per step, even an empty one.
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    # When a pause clears caches, and for `/reset_prefix_cache?reset_external=true`.
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    # For models with one cache group, inside another connector.
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    # After all workers have registered; vLLM 0.33 calls it again after a wake-up.
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self._scheduler.set_xfer_handshake_metadata(metadata)

    # --- vLLM's model runner, on the step thread of each worker

    # Once after vLLM has allocated the cache, and again after a wake-up.
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    # After a wake-up (vLLM 0.33). The rank has a new incarnation; old tickets are void.
    def restore_kv_caches(self) -> None:
        self._worker.restore_kv_caches()

    # Before vLLM 0.33 frees the cache's memory. If this raises, vLLM keeps the memory.
    def unregister_kv_caches(self) -> None:
        self._worker.unregister_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake_metadata

    # Before the forward of each step. vLLM 0.32 calls `start_load_kv` after it.
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(connector_metadata, StepMetadata):
            self._worker.bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not used: `bind_connector_metadata` has handed the loads over."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not used: vLLM runs a request only after its whole load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Not used: decode reads from the cache itself."""

    # After the forwards of a step, including a draft model's; see `UnwrittenOffers`.
    def wait_for_save(self) -> None:
        self._worker.wait_for_save()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self._worker.build_connector_worker_meta()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()


def _log_like_vllm() -> None:
    """Use vLLM's handlers and level, which vLLM gives only to loggers under its own name."""
    logger, vllm_logger = logging.getLogger("nixl_kv"), logging.getLogger("vllm")
    if not logger.handlers:
        logger.handlers = list(vllm_logger.handlers)
        logger.setLevel(vllm_logger.level)
        logger.propagate = vllm_logger.propagate
