"""How long the hooks of a connector took, as each role in each process of an engine writes it.

An engine of one rank has both roles, scheduler and worker, in one process.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.results import write_json

VARIABLE: Final = "NIXL_KV_HOOK_TIMES"
"""Names the folder."""

ONCE_A_STEP: Final = ("build_connector_meta", "get_transfer_results")
"""Of the scheduler, and of a worker."""

WRITE_S: Final = 0.2
"""Between two writes."""


@dataclass
class Times:
    """Of one role in one process, since it started."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By hook."""

    cpu: dict[str, float] = field(default_factory=dict)
    """Of these seconds, those on the CPU, which another program on the same core does not change.
    """

    def since(self, before: "Times", times: float = 1.0) -> "Times":
        """What has come since then; or beside so many times as much as came then."""
        seconds, cpu = (
            {name: took - times * earlier.get(name, 0.0) for name, took in now.items()}
            for now, earlier in ((self.seconds, before.seconds), (self.cpu, before.cpu))
        )
        return Times(self.steps - before.steps, seconds, cpu)


@dataclass(frozen=True)
class Cost:
    """Of a request, in the hooks of one role of an engine: the process that it costs most CPU."""

    seconds: float
    cpu: float
    steps: float
    hook: str
    """That takes most of the CPU."""
    hook_cpu: float


class HookTimer:
    """Times hooks, and writes what they took by now: at most so often, and not within a hook."""

    def __init__(self, path: Path) -> None:
        """Write there."""
        self.times = Times()
        self._path = path
        self._written_at = -math.inf

    def timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same hook, whose calls are timed."""
        times = self.times

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, cpu = time.perf_counter(), time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                times.cpu[name] = times.cpu.get(name, 0.0) + time.thread_time() - cpu
                end = time.perf_counter()
                times.seconds[name] = times.seconds.get(name, 0.0) + end - begin
                if name in ONCE_A_STEP:
                    times.steps += 1
                    if end - self._written_at > WRITE_S:
                        self._written_at = end
                        write_times(self._path, times)

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


def per_request(
    quiet: Mapping[str, Times], loaded: Mapping[str, Times], requests: int
) -> dict[tuple[str, str], Cost]:
    """What a request adds, by engine and role.

    Args:
        quiet: of a while in which no transfer arrived. On decode steps went on; what a step costs
            then is not counted. Prefill has nothing to do but for these requests: there all counts.
        loaded: of a while in which so many did.
        requests: how many.
    """
    costs: dict[tuple[str, str], Cost] = {}
    for name, times in loaded.items():
        engine, role, _ = name.split("-")
        usual = quiet.get(name, Times())
        share = times.steps / usual.steps if engine == "decode" and usual.steps else 0.0
        cost = _cost(times.since(usual, share), times.steps, requests)
        if (engine, role) not in costs or cost.cpu > costs[engine, role].cpu:
            costs[engine, role] = cost
    return costs


def _cost(added: Times, steps: int, requests: int) -> Cost:
    hook = max(added.cpu, key=lambda name: added.cpu[name], default="")
    return Cost(
        sum(added.seconds.values()) / requests,
        sum(added.cpu.values()) / requests,
        steps / requests,
        hook,
        added.cpu.get(hook, 0.0) / requests,
    )
