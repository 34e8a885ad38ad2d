"""`--scheduler-cls nixl_kv.connector.Scheduler`: schedules a request as soon as its KV has landed.

vLLM hears of a load's end with the output of a step that begins after it, and with asynchronous
scheduling one step later still. With this class, each rank also tells the scheduler's process
directly, by a message to the engine's directory. The class takes these hints before each step.
"""

from typing import Any

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.connector.unpromised import SCHEDULER_CLASS, is_off


class FastScheduler(AsyncScheduler):
    """See the module's docstring."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """With an untested vLLM, an instance of vLLM's own class. The connector logs why."""
        vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        kind = cls.in_use(vllm_config.scheduler_config)
        return super().__new__(cls) if kind is cls else kind(*args, **kwargs)

    @classmethod
    def in_use(cls, scheduler_config: SchedulerConfig) -> type[Scheduler]:
        """This class, or vLLM's own one, if vLLM lacks a part or was not tested."""
        if not is_off(SCHEDULER_CLASS):
            return cls
        kind: type[Scheduler] = AsyncScheduler if scheduler_config.async_scheduling else Scheduler
        return kind

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.connector, NixlKVConnector):
            self.connector.takes_hints = True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if isinstance(self.connector, NixlKVConnector):
            self.connector.end_landed(self._update_from_kv_xfer_finished)
        return super().schedule(*args, **kwargs)

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        super().set_pause_state(*args, **kwargs)
        if isinstance(self.connector, NixlKVConnector):
            self.connector.ignore_hints()

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
