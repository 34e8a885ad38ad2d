"""`--scheduler-cls nixl_kv.connector.Scheduler`: schedules a request as soon as its KV has landed.

vLLM hears of a load's end with the output of a step that begins after it, and with asynchronous
scheduling one step later still. If the worker runs in the scheduler's process, as it does on one
GPU, this class asks it before each step. It changes nothing on engines with several workers.
"""

from typing import Any, Final

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.connector.vllm_config import end_of_loads
from nixl_kv.errors import get_logger

logger = get_logger(__name__)

UNKNOWN: Final = (
    "--scheduler-cls nixl_kv.connector.Scheduler has no effect with this vLLM: its scheduler hears "
    "of loads with the output of a step only"
)


class FastScheduler(AsyncScheduler):
    """See the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._end_loads = end_of_loads(self)
        if self._end_loads is None:
            logger.warning(UNKNOWN)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        worker = _worker_here() if isinstance(self.connector, NixlKVConnector) else None
        if worker is not None and self._end_loads is not None:
            landed, metadata = worker.take_landed()
            if metadata is not None:
                self._end_loads(
                    KVConnectorOutput(finished_recving=landed, kv_connector_worker_meta=metadata)
                )
        return super().schedule(*args, **kwargs)

    # An engine without asynchronous scheduling needs vLLM's other class. With this one, it would
    # schedule a token before the one before is sampled (pipeline stages, drafts).

    def _update_after_schedule(self, *args: Any, **kwargs: Any) -> None:
        if self.scheduler_config.async_scheduling:
            super()._update_after_schedule(*args, **kwargs)
        else:
            super(AsyncScheduler, self)._update_after_schedule(*args, **kwargs)

    def _update_request_with_output(self, *args: Any, **kwargs: Any) -> Any:
        if self.scheduler_config.async_scheduling:
            return super()._update_request_with_output(*args, **kwargs)
        return super(AsyncScheduler, self)._update_request_with_output(*args, **kwargs)


def _worker_here() -> NixlKVConnector | None:
    """The worker's half of the connector, if a worker runs in this process."""
    if not kv_transfer_state.has_kv_transfer_group():
        return None
    group = kv_transfer_state.get_kv_transfer_group()
    return group if isinstance(group, NixlKVConnector) else None
