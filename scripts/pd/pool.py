"""Engines of several shapes, each started when a cell first needs it and kept while others do."""

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from typing_extensions import Self

from pd.cells import Model, Shape
from pd.cluster import Handlers, end_on_signals, say_on_stderr
from pd.engines import Device, Engine, EngineSpec
from pd.processes import Ports, ProcessDiedError, stop_all
from pd.tiny_model import ensure_tiny_model

# Two cores that run the ranks of two engines make everything slow, also the signs of life.
PATIENT: Final = {"request_timeout_s": 120, "lease_s": 30, "offer_ttl_s": 60}
CUDA_MEMORY = 0.15  # of the device, for each engine: several share it
CUDA_KV_BYTES = 2 << 30
# vLLM makes the tensors that its stages exchange in a warm-up, which eager engines on CPU skip.
CPU_STAGES: Final = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 2, "backend": "eager"}',
)
ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception): .+")
PREFIX = re.compile(r"^\(.*?\) (?:\w+ \d\S* \S+ \[\S+\] )?")


@dataclass(frozen=True)
class Place:
    """Where engines run."""

    device: Device
    dtype: str | None  # None: the model's own choice
    gpus: int
    log_dir: Path


@dataclass(frozen=True)
class Wanted:
    """One engine. Without a connector it is a reference; `copy` tells equal ones apart."""

    model: Model
    shape: Shape
    copy: int = 0
    alone: bool = False

    @property
    def name(self) -> str:
        """Of the engine and its log."""
        copy = f"-{self.copy}" if self.copy else ""
        return f"{self.model.name}-{'alone' if self.alone else f'{self.shape}{copy}'}"


class Pool:
    """Starts and ends engines; what does not start is remembered and not tried again."""

    def __init__(self, place: Place) -> None:
        """Nothing runs before engines are wanted."""
        self.place = place
        self.broken: dict[str, str] = {}
        self._ports = Ports()
        self._running: dict[str, Engine] = {}
        self._gpus = itertools.cycle(range(max(1, place.gpus)))
        self._cores = itertools.cycle(halves(os.sched_getaffinity(0)))
        self._handlers_before: Handlers = {}

    def __enter__(self) -> Self:
        """From here on a signal ends all engines."""
        self._handlers_before = end_on_signals()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self.keep([])
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def keep(self, wanted: Iterable[Wanted]) -> None:
        """End all others."""
        names = {one.name for one in wanted}
        leaving = [name for name in self._running if name not in names]
        stop_all([self._running.pop(name) for name in leaving])

    def ensure(self, wanted: Collection[Wanted]) -> None:
        """Start those that do not run, all at once, and wait until they answer or have died."""
        missing = [one for one in wanted if one.name not in self.broken and not self._runs(one)]
        for one in missing:
            say_on_stderr(f"starting {one.name}")
            engine = Engine(self._spec(one), self.place.log_dir, self._ports)
            self._running[one.name] = engine
            engine.start()
        for one in missing:
            self._wait(one.name)

    def engine(self, wanted: Wanted) -> Engine:
        """A running one; raises, in words of its log, if it does not run."""
        if wanted.name in self.broken:
            raise ProcessDiedError(f"{wanted.name} did not start: {self.broken[wanted.name]}")
        if not self._runs(wanted):
            raise ProcessDiedError(f"{wanted.name} does not run")
        return self._running[wanted.name]

    def _wait(self, name: str) -> None:
        try:
            self._running[name].wait_ready()
        except ProcessDiedError:
            engine = self._running.pop(name)
            engine.stop()
            self.broken[name] = why(engine)

    def _runs(self, wanted: Wanted) -> bool:
        engine = self._running.get(wanted.name)
        return engine is not None and engine.is_running()

    def _spec(self, wanted: Wanted) -> EngineSpec:
        shape = wanted.shape
        place = self.place
        spec = EngineSpec(
            wanted.name,
            ensure_tiny_model(model=wanted.model.recipe),
            device=place.device,
            dtype=place.dtype or ("float32" if place.device == "cpu" else wanted.model.cuda_dtype),
            tensor_parallel=shape.tp,
            gpu_memory_utilization=CUDA_MEMORY,
            cores=next(self._cores) if place.device == "cpu" else frozenset(),
        )
        spec = replace(spec, extra_args=self._arguments(wanted), extra_env=self._environment(shape))
        if wanted.alone:
            return spec
        config = PATIENT | ({"layout": shape.layout} if shape.layout else {})
        # In both roles, so that an engine may prefill in one cell and decode in the next.
        return replace(spec, role="both", connector="nixl-kv", connector_config=config)

    def _arguments(self, wanted: Wanted) -> tuple[str, ...]:
        shape = wanted.shape
        arguments = ["--pipeline-parallel-size", str(shape.pp)] if shape.pp > 1 else []
        arguments += ["--block-size", str(shape.block)] if shape.block else []
        arguments += ["--attention-backend", shape.backend] if shape.backend else []
        if self.place.device == "cuda":
            arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(CUDA_KV_BYTES)]
        else:
            arguments += wanted.model.cpu_flags
            arguments += CPU_STAGES if shape.pp > 1 else ()
        return (*arguments, *shape.flags)

    def _environment(self, shape: Shape) -> Mapping[str, str]:
        """Engines of one rank go to the GPUs in turn, larger ones spread over the first."""
        if self.place.device == "cpu":
            return {}
        devices = [next(self._gpus)] if shape.ranks == 1 else range(shape.ranks)
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}


def halves(cores: Iterable[int]) -> tuple[frozenset[int], ...]:
    """The cores in two parts, for engines in turn; a single core cannot be parted.

    The ranks of an engine that waits spin, and with it those that have something to do starve:
    prefill spins while decode reads from it, and decode while it reads.
    """
    ordered = sorted(cores)
    return tuple(frozenset(part) for part in (ordered[::2], ordered[1::2]) if part)


def why(engine: Engine) -> str:
    """The first line of its log that sounds like the cause, without who said it and when."""
    with contextlib.suppress(OSError):
        for line in engine.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
            if ERROR_LINE.search(line) and "WARNING" not in line:
                return PREFIX.sub("", line)
    return f"status {engine.exit_code()}"
