"""The connector, which logs the order in which a step runs it and the draft model."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nixl_kv.connector import worker
from nixl_kv.connector.connector import NixlKVConnector as OurConnector

TRACE: Final = "traced: "
V2_DRAFTERS: Final = "vllm.v1.worker.gpu.spec_decode.speculator"


def trace(owner: Any, name: str, word: str, shows: Callable[[Any], bool] = lambda _: True) -> None:
    """Log the word after each call whose result shows that something happened."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def traced(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if shows(result):
            sys.stderr.write(f"{TRACE}{word}\n")
            sys.stderr.flush()
        return result

    setattr(owner, name, traced)


def descendants(owner: Any) -> list[Any]:
    children: list[Any] = owner.__subclasses__()
    return [owner, *(each for child in children for each in descendants(child))]


class NixlKVConnector(OurConnector):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if role is KVConnectorRole.WORKER:
            trace(worker, "_record_event", "event")
        super().__init__(vllm_config, role, kv_cache_config)
        if role is not KVConnectorRole.WORKER:
            return
        trace(OurConnector, "bind_connector_metadata", "step")
        trace(GPUModelRunner, "propose_draft_token_ids", "draft")
        if V2_DRAFTERS in sys.modules:
            for owner in descendants(sys.modules[V2_DRAFTERS].BaseSpeculator):
                if "propose" in vars(owner):
                    trace(owner, "propose", "draft")
        trace(worker.UnwrittenOffers, "pop", "written", bool)
