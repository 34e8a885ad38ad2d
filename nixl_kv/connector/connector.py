"""vLLM's connector interface: every hook delegates to the one role object of its process.

vLLM makes one instance in the scheduler's process and one in each worker, and calls only the hooks
of that role. The hooks are in two classes for that reason, and because they are many.
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

from nixl_kv.connector.listening import check_address
from nixl_kv.connector.metadata import StepMetadata, WorkerMetadata
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.connector.stats import PromMetrics, Stats
from nixl_kv.connector.vllm_config import parse_config, required_layout
from nixl_kv.connector.vllm_versions import HIT_SOURCE, is_told_of_sleep
from nixl_kv.connector.worker import Worker
from nixl_kv.errors import LocalProtocolError


class _SchedulerHooks:
    """What vLLM's scheduler calls, on its one thread."""

    _scheduler_role: Scheduler | None = None

    @property
    def _scheduler(self) -> Scheduler:
        if self._scheduler_role is None:
            raise LocalProtocolError("a hook of the scheduler was called in a worker")
        return self._scheduler_role

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Before any request."""
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """On arrival, before anything is allocated."""
        self._scheduler.on_arrival(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """For each waiting request, in each step until it is allocated."""
        return self._scheduler.count_matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """After each allocation of a waiting request, so also a second time, after its load."""
        self._scheduler.on_allocation(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Once a step, also an empty one."""
        return self._scheduler.on_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """After each step, with what all workers have reported.

        A load that counts as failed since a reset is taken out: vLLM has looked at `failed_recving`
        before, so the failure comes with a later step.
        """
        self._scheduler.on_worker_metadata(connector_output.kv_connector_worker_meta)
        held_back = self._scheduler.on_ended(
            connector_output.finished_sending,
            connector_output.finished_recving,
            connector_output.failed_recving,
        )
        if held_back and connector_output.finished_recving:
            connector_output.finished_recving -= set(held_back)

    def reset_cache(self) -> bool | None:
        """On a pause that clears caches, and for `/reset_prefix_cache?reset_external=true`."""
        return self._scheduler.reset_cache()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """For models with one cache group, where another connector wraps this one."""
        return self._scheduler.on_finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """On every end of a request, also an abort."""
        return self._scheduler.on_finish(request, block_ids)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """After all workers have registered; vLLM 0.33 calls it again after a wake-up."""
        self._scheduler.publish(metadata)


class _WorkerHooks:
    """What vLLM's model runner calls, on the step thread of each worker."""

    _worker_role: Worker | None = None

    @property
    def _worker(self) -> Worker:
        if self._worker_role is None:
            raise LocalProtocolError("a hook of a worker was called in the scheduler")
        return self._worker_role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Once after the cache is allocated; again after a wake-up."""
        self._worker.register(kv_caches)

    def restore_kv_caches(self) -> None:
        """After a wake-up (vLLM 0.33): a new life, whose old tickets are void."""
        self._worker.restore()

    def unregister_kv_caches(self) -> None:
        """Before vLLM 0.33 frees the cache's memory: nothing reads or writes it afterwards.

        Raises:
            TransportError: if that cannot be proven. vLLM then does not free the memory.
        """
        self._worker.stop()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """After `register_kv_caches`."""
        return self._worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward of each step, which `start_load_kv` is not."""
        if isinstance(connector_metadata, StepMetadata):
            self._worker.on_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads were handed over with the step's metadata."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only after its whole load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: decode reads from the cache itself."""

    def wait_for_save(self) -> None:
        """After the forwards of a step, also of a draft model; see `connector/unwritten.py`."""
        self._worker.on_step_enqueued()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """After each step; the scheduler gets that of all workers."""
        return self._worker.pop_metadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """At the end of each step."""
        return self._worker.pop_results()


class NixlKVConnector(_SchedulerHooks, _WorkerHooks, KVConnectorBase_V1, SupportsHMA):
    """Disaggregated prefill and decode over NIXL. See README.md for its configuration."""

    _cache_hit_source = HIT_SOURCE

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Make the role object; opens nothing yet.

        Raises:
            ConfigError: for a configuration, or an engine, that cannot be served.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_role = Scheduler(vllm_config, kv_cache_config)
        else:
            self._worker_role = Worker(vllm_config, kv_cache_config)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether decode may reuse its own KV of a prompt though it has no state of it: we load it.

        Else vLLM would hardly ever: it keeps few states.
        """
        return bool(self._kv_cache_config.has_mamba_layers)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All transferred groups are overwritten by a load, so vLLM need not zero their blocks."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_kv_connector_stats(self) -> Stats | None:
        """What either role has counted since the last step."""
        return (self._scheduler_role or self._worker).pop_stats()

    def shutdown(self) -> None:
        """At the end of the process, if vLLM gets to it."""
        if self._scheduler_role is not None:
            self._scheduler_role.stop()
        else:
            self._worker.shutdown()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's
        """Whether this engine may sleep and wake up (vLLM 0.33)."""
        return is_told_of_sleep()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The physical order to ask for; vLLM warns and goes on if a backend cannot have it.

        vLLM asks in the process of the scheduler, before it profiles memory and captures graphs:
        the latest moment to check the address, where `check_before_weights` could not.
        """
        check_address(
            parse_config(vllm_config),
            vllm_config,
            is_prefill=vllm_config.kv_transfer_config.is_kv_producer,
        )
        return required_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """In the process that logs: what a step counted, as it came over the wire."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> PromMetrics:
        """In the API server's process, once, with what every metric of vLLM's is made from."""
        return PromMetrics(*args, **kwargs)


def _log_like_vllm() -> None:
    """Use vLLM's handlers and level, which it gives only to loggers under its own name."""
    logger, vllm_logger = logging.getLogger("nixl_kv"), logging.getLogger("vllm")
    if not logger.handlers:
        logger.handlers = list(vllm_logger.handlers)
        logger.setLevel(vllm_logger.level)
        logger.propagate = vllm_logger.propagate
