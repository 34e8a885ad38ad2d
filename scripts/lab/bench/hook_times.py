"""How long the hooks of a connector took, as each role in each process of an engine writes it.

An engine of one rank has both roles, scheduler and worker, in one process.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from lab.results import write_json

VARIABLE: Final = "NIXL_KV_HOOK_TIMES"
"""Names the folder."""

ONCE_A_STEP: Final = ("build_connector_meta", "get_transfer_results")
"""Of the scheduler, and of a worker."""

HasWork: TypeAlias = Callable[[Sequence[Any], Any], bool]
"""Of what a hook was given and what it gave: whether there was something to do for a request."""

WRITE_S: Final = 0.2
"""Between two writes."""


@dataclass
class Times:
    """Of one role in one process, since it started."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By hook, of calls that had something to do for a request."""

    cpu: dict[str, float] = field(default_factory=dict)
    """Of these seconds, those on the CPU, which another program on the same core does not change.
    """

    idle: float = 0.0
    """Seconds on the CPU of all other calls, which come with each step."""

    def since(self, before: "Times") -> "Times":
        """What has come since then."""
        seconds, cpu = (
            {name: took - earlier.get(name, 0.0) for name, took in now.items()}
            for now, earlier in ((self.seconds, before.seconds), (self.cpu, before.cpu))
        )
        return Times(self.steps - before.steps, seconds, cpu, self.idle - before.idle)

    def add(self, other: "Times") -> None:
        """Count another while, too."""
        self.steps += other.steps
        self.idle += other.idle
        for mine, others in ((self.seconds, other.seconds), (self.cpu, other.cpu)):
            for name, took in others.items():
                mine[name] = mine.get(name, 0.0) + took


@dataclass(frozen=True)
class Cost:
    """Of a request, in the hooks of one role of an engine: the process that it costs most CPU."""

    seconds: float
    cpu: float
    steps: float
    hook: str
    """That takes most of the CPU."""
    hook_cpu: float
    step_cpu: float
    """Of a step with nothing to do for a request."""


class HookTimer:
    """Times hooks, and writes what they took by now: at most so often, and not within a hook."""

    def __init__(self, path: Path) -> None:
        """Write there."""
        self.times = Times()
        self._path = path
        self._written_at = -math.inf

    def timed(
        self,
        name: str,
        hook: Callable[..., Any],
        has_work: HasWork = lambda _given, _result: True,
    ) -> Callable[..., Any]:
        """The same hook, whose calls are timed, unless it raises."""
        times = self.times

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, cpu = time.perf_counter(), time.thread_time()
            result = hook(*args, **kwargs)
            cpu, end = time.thread_time() - cpu, time.perf_counter()
            if has_work((*args, *kwargs.values()), result):
                times.cpu[name] = times.cpu.get(name, 0.0) + cpu
                times.seconds[name] = times.seconds.get(name, 0.0) + end - begin
            else:
                times.idle += cpu
            if name in ONCE_A_STEP:
                times.steps += 1
                if end - self._written_at > WRITE_S:
                    self._written_at = end
                    write_times(self._path, times)
            return result

        return call


def write_times(path: Path, times: Times) -> None:
    """Whole or not at all."""
    write_json(path, times)


def read_times(folder: Path) -> dict[str, Times]:
    """What each role of each process has written last, by the stem of `file_name`."""
    return {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Times)
        for path in sorted(folder.glob("[!.]*.json"))
    }


def file_name(engine: str, role: str, process: int) -> str:
    """Where a role of a process of an engine, `prefill` or `decode`, writes."""
    return f"{engine}-{role}-{process}.json"


def per_request(added: Mapping[str, Times], requests: int) -> dict[tuple[str, str], Cost]:
    """What a request costs, by engine and role.

    Args:
        added: of a while in which requests came.
        requests: how many.
    """
    costs: dict[tuple[str, str], Cost] = {}
    for name, times in added.items():
        engine, role, _ = name.split("-")
        cost = _cost(times, requests)
        if (engine, role) not in costs or cost.cpu > costs[engine, role].cpu:
            costs[engine, role] = cost
    return costs


def _cost(added: Times, requests: int) -> Cost:
    hook = max(added.cpu, key=lambda name: added.cpu[name], default="")
    return Cost(
        sum(added.seconds.values()) / requests,
        sum(added.cpu.values()) / requests,
        added.steps / requests,
        hook,
        added.cpu.get(hook, 0.0) / requests,
        added.idle / max(1, added.steps),
    )
