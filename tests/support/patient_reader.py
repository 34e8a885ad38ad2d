"""Our connector, which waits long for another engine's answer: the cores may be very busy."""

from typing import Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from nixl_kv.connector.connector import NixlKVConnector as OurConnector
from nixl_kv.connector.scheduler_hooks import SchedulerHooks
from nixl_kv.conversations import finding

PATIENCE_S: Final = 60.0


class NixlKVConnector(OurConnector):
    """Has the same name, so that nothing else of an engine's configuration changes."""


class HookedScheduler(SchedulerHooks, AsyncScheduler):
    """For `--scheduler-cls`: the plugin adds the hooks only for a connector in our own module."""


setattr(finding, "FIND_S", PATIENCE_S)  # noqa: B010 - mypy knows it as a constant
