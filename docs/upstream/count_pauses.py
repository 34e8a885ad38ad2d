"""Count the engine loop's steps and pauses before a request's first token; see engine-loop.patch.

vLLM's engine loop and scheduler run with this connector. A fake executor ends each load in the step
that starts it.
"""

import contextlib
import queue
from collections import deque
from concurrent.futures import Future
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.engine import core
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from nixl_kv.ids import new_nonce
from nixl_kv.protocol import events
from support.records import ticket_for
from support.vllm_scheduler import OURS, SteppedScheduler, make_config

PROMPT = range(100, 140)


class Counts:
    def __init__(self) -> None:
        self.steps = self.empty = self.pauses = 0
        self.ends: tuple[int, int, int] | None = None  # when the first token left


class Executor:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._output = ModelRunnerOutput([], {})

    def execute_model(self, step: Any, **_: object) -> Future[Any]:
        names = list(step.num_scheduled_tokens)
        self._counts.steps += 1
        self._counts.empty += not names
        commands = step.kv_connector_metadata.commands
        ended = {str(one.request) for one in commands if isinstance(one, events.StartLoad)}
        self._output = ModelRunnerOutput(
            names,
            {name: place for place, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
            kv_connector_output=KVConnectorOutput(finished_recving=ended) if ended else None,
        )
        return _done(None if names else self._output)

    def sample_tokens(self, _: object, *, non_block: bool = False) -> Any:
        return _done(self._output) if non_block else self._output


class Outputs(queue.Queue[Any]):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def put_nowait(self, item: Any) -> None:
        named = {one.request_id for one in item[1].outputs if one.new_token_ids}
        if "measured" in named and self._counts.ends is None:
            counts = self._counts
            counts.ends = counts.steps, counts.empty, counts.pauses


class Inputs(queue.Queue[Any]):
    """For the patched loop, which pauses on it."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def get(self, *_: object, **__: object) -> Any:
        self._counts.pauses += 1
        raise queue.Empty


def count(*, is_async: bool, is_busy: bool, loads: bool) -> tuple[int, int, int]:
    """The steps, those of them that are empty, and the pauses."""
    extra = {"port": 0, "insecure": True}
    transfer = KVTransferConfig(**OURS, kv_role="kv_consumer", kv_connector_extra_config=extra)
    engine = SteppedScheduler(make_config(transfer, 100, is_async=is_async))
    engine.describe()
    counts, loop = Counts(), core.EngineCoreProc.__new__(core.EngineCoreProc)
    config = engine.vllm.vllm_config
    loop.__dict__ |= {
        "scheduler": engine.vllm,
        "model_executor": Executor(counts),
        "input_queue": Inputs(counts),
        "output_queue": Outputs(counts),
        "aborts_queue": queue.Queue(),
        "batch_queue": deque() if is_async else None,
        "batch_queue_size": config.max_concurrent_batches,
        "step_fn": loop.step_with_batch_queue if is_async else loop.step,
        "async_scheduling": is_async,
        "is_pooling_model": False,
        "is_mm_encoder_only": False,
        "check_for_draft_tokens": False,
        "log_error_detail": lambda _: contextlib.nullcontext(),
        "capture_iteration_details": lambda _: contextlib.nullcontext(),
        "_weight_version": "",
        "_has_finished_transfers": False,
    }
    core.time.sleep = lambda _: setattr(counts, "pauses", counts.pauses + 1)
    if is_busy:
        engine.add("other", range(10), max_tokens=100)
        for _ in range(6):
            loop._process_engine_step()  # noqa: SLF001 - vLLM's loop is what is measured
    counts.steps = counts.empty = counts.pauses = 0
    params = ticket_for(PROMPT, new_nonce()).params(None) if loads else None
    engine.add("measured", PROMPT, params, max_tokens=8)
    while counts.ends is None:
        loop._process_engine_step()  # noqa: SLF001
    engine.connector.shutdown()
    return counts.ends


def _done(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


for is_async in (True, False):
    for is_busy in (False, True):
        for loads in (False, True):
            steps, empty, pauses = count(is_async=is_async, is_busy=is_busy, loads=loads)
            print(
                "async" if is_async else "sync",
                "busy" if is_busy else "idle",
                "load" if loads else "no load",
                f"{steps} steps, {empty} of them empty, {pauses} pauses",
                sep=", ",
            )
