"""vLLM's connector interface, whose hooks vLLM calls around each step.

vLLM creates one instance in the scheduler's process and one in each worker, and calls only the
hooks of that role, which are the methods of `Scheduler` and `Worker`.

For a request with a ticket, vLLM calls on_new_request, get_num_new_matched_tokens,
update_state_after_alloc and build_connector_meta in the scheduler, then bind_connector_metadata and
get_transfer_results in each worker, then update_connector_output in the scheduler.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from nixl_kv.connector import unpromised
from nixl_kv.connector.own import log_like_vllm
from nixl_kv.connector.plugin import causes_noted, check_address
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.connector.stats import PromMetrics, Stats
from nixl_kv.connector.vllm_config import (
    HIT_SOURCE,
    has_sleep_hooks,
    is_child,
    parse_config,
    required_layout,
    transfer_config,
)
from nixl_kv.connector.worker import Worker


class NixlKVConnector(Scheduler, Worker, KVConnectorBase_V1, SupportsHMA):
    """Disaggregated prefill and decode over NIXL. See README.md for its configuration."""

    _cache_hit_source = HIT_SOURCE

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Opens nothing yet. A ConfigError names what the connector cannot serve."""
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        log_like_vllm()
        config, is_prefill = parse_config(vllm_config), transfer_config(vllm_config).is_kv_producer
        # Again: `check_before_weights` may not have run.
        unpromised.check(unpromised.Engine(vllm_config, config, is_prefill=is_prefill))
        self._half: type[Scheduler | Worker]  # the other half has no state
        if role is KVConnectorRole.SCHEDULER:
            self._half = Scheduler
            with causes_noted():
                Scheduler.__init__(self, vllm_config, kv_cache_config, is_child=is_child(self))
        else:
            self._half = Worker
            with causes_noted():
                Worker.__init__(self, vllm_config, kv_cache_config)

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
        return self._half.get_kv_connector_stats(self)

    # At the end of the process. vLLM may never call it.
    def shutdown(self) -> None:
        self._half.shutdown(self)

    # --- without an instance

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's
        return has_sleep_hooks()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # vLLM asks in the scheduler's process, before it profiles memory and captures graphs. This
        # is the last good moment to check the address, if `check_before_weights` could not.
        is_prefill = transfer_config(vllm_config).is_kv_producer
        with causes_noted():
            check_address(parse_config(vllm_config), vllm_config, is_prefill=is_prefill)
        return required_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> PromMetrics:
        return PromMetrics(*args, **kwargs)

    # --- hooks that have nothing to do

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """`bind_connector_metadata` has handed the loads over."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs only after its whole load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Decode reads from the cache itself."""
