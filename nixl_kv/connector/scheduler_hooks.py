"""Hooks over whatever scheduler class was chosen: they end single loads and single requests.

Prefill computes a request that was answered early although its client no longer waits. If decode
releases the offer, the hooks end that request too. vLLM's API server hears of it as of other ends.

On decode, such a request waits until prefill computes it. In each step vLLM would look up its whole
prompt in the prefix cache, which takes 1 ms for 16,384 cached tokens. So the hooks take it out of
vLLM's queue until then, as they do with a request while another engine is asked for its KV. vLLM
still counts it as a waiting request.

vLLM hears of a load's end with the output of a step that begins after it, and with asynchronous
scheduling one step later still. With `overlap`, each rank also tells the scheduler's process
directly, by a message to the engine's directory, and the hooks take these hints before each step.

vLLM has one failure policy per engine, and a connector cannot end a request. But decode must not
compute a prompt whose media it does not have (`media.py`).

So the class of these hooks becomes the first base of the scheduler's class, whether vLLM or the
operator has chosen that.
"""

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from nixl_kv.connector import unpromised


class SchedulerHooks:
    """The hooks. `hook_scheduler` mixes them into a scheduler class of vLLM's."""

    are_hooks = True
    chosen: Any = None  # the setting scheduler_cls, as it was

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        # A class that is made here cannot be pickled, and vLLM may send the configuration again.
        scheduler.scheduler_config.scheduler_cls = self.chosen
        self._connectors = list(_own(scheduler.connector))
        # vLLM tells its own connector that a load has ended. A MultiConnector would pass that on to
        # a child that has not asked for it.
        self._is_alone = self._connectors == [scheduler.connector]
        for connector in self._connectors if self._is_alone else ():
            connector.takes_hints = connector.may_take_hints
        self._ended: list[Request] = []
        self._sets_aside = not unpromised.is_off(unpromised.OVERLAP)
        self._aside: dict[str, Request] = {}  # out of vLLM's queue
        # A request whose load another engine's answer began must not fail for that load.
        for connector in self._connectors:
            connector.may_seek(getattr(scheduler, "recompute_kv_load_failures", False))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        scheduler: Any = self
        self._end_requests()
        for connector in self._connectors:
            if connector.takes_hints:
                connector.end_landed(scheduler._update_from_kv_xfer_finished)  # noqa: SLF001 - no other way
            connector.take_answers()
        self._return_from_aside()
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._set_aside()
        # vLLM sends workers no media whose KV they have. If it then preempts the request and
        # computes it, its V1 model runner misses them, and the engine ends.
        for new in output.scheduled_new_reqs:
            request = scheduler.requests[new.req_id]
            if any(connector.may_compute(request) for connector in self._connectors):
                new.mm_features = request.mm_features
        return output

    def _set_aside(self) -> None:
        scheduler: Any = self
        names = [n for each in self._connectors for n in each.aside.difference(self._aside)]
        if names and self._sets_aside:
            found = {name: scheduler.requests[name] for name in names}
            self._aside |= found
            # They stay in `deferred_waiting`, by which vLLM counts those that it skips.
            scheduler.waiting.remove_requests(found.values())

    def _return_from_aside(self) -> None:
        if not self._aside:
            return
        scheduler: Any = self
        still = set[str]().union(*(each.aside for each in self._connectors))
        back = [self._aside.pop(name) for name in self._aside.keys() - still]
        # They have waited for longer than most, but vLLM may have preempted older ones meanwhile.
        waiting, first = scheduler.waiting, list[Request]()
        for request in sorted(back, key=lambda each: each.arrival_time):
            while waiting and waiting.peek_request().arrival_time < request.arrival_time:
                first.append(waiting.pop_request())
            first.append(request)
        # A queue with priorities orders them itself.
        for request in reversed(first):
            waiting.prepend_request(request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        ended = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        if self._aside:
            living = {n: one for n, one in self._aside.items() if not one.is_finished()}
            self._aside = living
        return ended

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running, waiting + len(self._aside)

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)  # type: ignore[misc]
        for connector in self._connectors:
            connector.on_pause(is_paused=pause_state is not PauseState.UNPAUSED)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        # A request may have failed in this step: its token must not leave. vLLM aborts here too.
        self._end_requests()
        outputs: dict[int, EngineCoreOutputs]
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        ended, self._ended = self._ended, []
        for request in ended:
            # The API server forgets a request only when it gets its last output.
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _end_requests(self) -> None:
        scheduler: Any = self
        for connector in self._connectors:
            failed = connector.pop_failed(scheduler.requests)
            self._finish(failed, RequestStatus.FINISHED_ERROR)
            released = connector.pop_released(scheduler.requests)
            self._finish(released, RequestStatus.FINISHED_ABORTED)

    def _finish(self, names: list[str], status: RequestStatus) -> None:
        scheduler: Any = self
        if names:
            self._ended += [scheduler.requests[each] for each in names]
            scheduler.finish_requests(names, status)


def hook_scheduler(vllm_config: VllmConfig) -> None:
    """Make vLLM create its scheduler with these hooks.

    Call it after the executor has started its workers, which get a copy of the configuration, and
    before vLLM creates the scheduler.
    """
    config: Any = vllm_config.scheduler_config
    base = config.get_scheduler_cls()
    if not issubclass(base, SchedulerHooks):
        fields = {"chosen": config.scheduler_cls}
        config.scheduler_cls = type(base.__name__, (SchedulerHooks, base), fields)


def serve_address() -> None:
    """Let vLLM's engine client ask an engine for the address that its early tickets name."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - the process of an engine has it

    setattr(EngineCore, "nixl_kv_address", _address_of)  # noqa: B010 - mypy knows no such attribute


def _address_of(core: Any) -> dict[str, Any] | None:
    """None: no early answers now."""
    found = (connector.early_address() for connector in _own(core.scheduler.connector))
    return next(filter(None, found), None)


def _own(connector: Any) -> Iterator[Any]:
    """Each NixlKVConnector, also as a child of a MultiConnector."""
    if getattr(connector, "pop_failed", None):
        yield connector
    for child in getattr(connector, "sub_connectors", ()):
        yield from _own(child)
