"""Our connector, except that a worker collects results when a step begins, as it does on a GPU.

There the step's launch returns at once. On a CPU it returns after the forward, so that a load is
almost always in the output of the step during which it has landed.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from nixl_kv.connector.connector import NixlKVConnector as SoundConnector
from nixl_kv.connector.scheduler_hooks import SchedulerHooks


class NixlKVConnector(SoundConnector):
    """Has the same name, so that nothing else of an engine's configuration changes."""

    _collected = KVConnectorTransferResults()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._collected = super().get_transfer_results(set())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids
        collected, self._collected = self._collected, KVConnectorTransferResults()
        return collected


class HookedScheduler(SchedulerHooks, AsyncScheduler):
    """For `--scheduler-cls`: the plugin adds the hooks only for a connector in our own module."""
