"""The scheduler class is vLLM's class for the engine's configuration, with or without async."""

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from nixl_kv.connector.fast_scheduler import FastScheduler
from support import vllm_scheduler
from support.vllm_scheduler import make_config, make_request, make_scheduler


@pytest.mark.parametrize("is_async", [False, True])
def test_it_schedules_as_vllms_class_does(
    monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    """With two pipeline stages, a request may run in two steps at a time only with async."""
    steps = []
    for kind in (AsyncScheduler if is_async else Scheduler, FastScheduler):
        for name in ("AsyncScheduler", "Scheduler"):
            monkeypatch.setattr(vllm_scheduler, name, kind)
        config = make_config(None, 64, is_async=is_async)
        config.parallel_config.pipeline_parallel_size = 2
        scheduler = make_scheduler(config)
        assert type(scheduler) is kind
        scheduler.num_spec_tokens = 3
        scheduler.add_request(make_request("a", range(1, 20), max_tokens=8))
        scheduled = [scheduler.schedule().num_scheduled_tokens for _ in range(2)]
        steps.append((scheduled, scheduler.requests["a"].spec_token_ids))
    assert steps[0] == steps[1]
    assert (len(steps[0][0][1]) > 0) == is_async
