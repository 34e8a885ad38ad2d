"""`--scheduler-cls nixl_kv.connector.Scheduler`: schedules a request as soon as its KV has landed.

vLLM hears of a load's end with the output of a step that begins after it, and with asynchronous
scheduling one step later still. With this class, each rank also tells the scheduler's process
directly, by a message to the engine's directory. The class takes these hints before each step.
"""

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

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
        elif isinstance(self.connector, NixlKVConnector):
            self.connector.takes_hints = True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._end_loads is not None and isinstance(self.connector, NixlKVConnector):
            self.connector.end_landed(self._end_loads)
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
