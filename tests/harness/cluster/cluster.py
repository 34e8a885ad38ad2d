"""All engines and routers of one program: started when needed, kept, and ended whatever happens."""

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from typing_extensions import Self

from harness.cluster import router
from harness.cluster.engines import START_TIMEOUT_S, Connector, Engine, EngineSpec, Role, halves
from harness.cluster.netns import Namespace
from harness.cluster.processes import Ports, ProcessDiedError, end_on_signals, stop_all
from harness.cluster.router import Router
from harness.cluster.waiting import wait_until
from harness.cluster.warm import WarmServer

PROGRESS_S: Final = 5.0  # between two lines while engines start
PAIR_ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")


def pair_specs(
    model: Path, connector: Connector = "nixl-kv", *, suffix: str = "", **fields: Any
) -> tuple[EngineSpec, EngineSpec]:
    """Prefill and decode, each on a half of the cores; other fields are equal in both."""
    prefill, decode = (
        EngineSpec(f"{role}{suffix}", model, role, connector, **{"cores": cores} | fields)
        for role, cores in zip(PAIR_ROLES, halves(os.sched_getaffinity(0)), strict=True)
    )
    return prefill, decode


class Cluster:
    """Engines by their specs: an equal spec gives the same engine.

    One that has ended is started again when it is asked for, on the same ports. Where `most_ranks`
    limits how many ranks run, the least recently used engines end. Logs go to `log_dir`: by default
    a new temporary folder, which stays. With `warm`, engines on CPU are forked from a process that
    has imported vLLM, in a tenth of the time; do not use it to measure the cost of an engine.
    """

    def __init__(
        self,
        log_dir: Path | None = None,
        *,
        most_ranks: int | None = None,
        warm: bool = True,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-"))
        self.engines: list[Engine] = []
        """The least recently used first."""
        self.routers: list[Router] = []
        self._most_ranks = most_ranks if most_ranks is not None else sys.maxsize
        self._warm = warm
        self._start_timeout_s = start_timeout_s
        self._ports = Ports()
        self._warm_servers: dict[object, WarmServer] = {}

    def __enter__(self) -> Self:
        end_on_signals()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *specs: EngineSpec) -> list[Engine]:
        """The engines of these specs; those that do not run are started, all at once.

        Raises:
            ProcessDiedError: if one does not start, when the others have.
        """
        engines = [self._engine(spec) for spec in specs]
        starting = [engine for engine in engines if not engine.is_running()]
        self._make_room(engines)
        if starting:
            names = ", ".join(engine.name for engine in starting)
            say(f"starting {names}; logs in {self.log_dir}")
            begin = time.monotonic()
            try:
                for engine in starting:
                    engine.start()
                failures = self._wait(starting)
            except BaseException:  # an interrupted start leaves nothing
                stop_all(starting)
                raise
            if failures:
                raise ProcessDiedError("; ".join(failures))
            say(f"{names} up after {time.monotonic() - begin:.0f} s")
        return engines

    def route(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        host: Namespace | None = None,
        options: Sequence[str] = router.IN_TURNS,
    ) -> Router:
        """A router before these engines, which must run; the same one for the same engines.

        It runs on `host`; None: on this machine.
        """
        wanted = tuple(prefill), tuple(decode), host, tuple(options)
        for running in self.routers:
            same = (running.prefill, running.decode, running.host, running.options) == wanted
            if same and running.is_running():
                return running
        name = f"router-{len(self.routers)}" if self.routers else "router"
        log_path = self.log_dir / f"{name}.log"
        started = Router(log_path, prefill, decode, ports=self._ports, host=host, options=options)
        self.routers.append(started)
        started.start()
        started.wait_ready(router.START_TIMEOUT_S)
        say(f"{name} up at {started.url}")
        return started

    def end(self, *engines: Engine) -> None:
        stop_all(engines)

    def check_alive(self) -> None:
        """Raise ProcessDiedError, with the end of its log, if one has ended."""
        for process in (*self.engines, *self.routers):
            process.check_alive()

    def stop(self) -> None:
        """End everything; may be called twice."""
        stop_all([*self.routers, *self.engines])
        for server in self._warm_servers.values():
            server.close()
        self._warm_servers.clear()

    def _engine(self, spec: EngineSpec) -> Engine:
        """The engine of a spec, from now on the most recently used."""
        known = next((engine for engine in self.engines if engine.spec == spec), None)
        if known is not None:
            self.engines.remove(known)
        engine = known or Engine(spec, self.log_dir, self._ports, self._find_warm)
        self.engines.append(engine)
        return engine

    def _make_room(self, wanted: Sequence[Engine]) -> None:
        """End the least recently used engines until the wanted ones fit."""
        others = [one for one in self.engines if one.is_running() and one not in wanted]
        free = self._most_ranks - sum(engine.spec.ranks for engine in wanted)
        leaving: list[Engine] = []
        while others and sum(engine.spec.ranks for engine in others) > free:
            leaving.append(others.pop(0))
        stop_all(leaving)

    def _wait(self, starting: Iterable[Engine]) -> list[str]:
        """Wait until all answer or have ended; why some have not started."""
        waiting, failures = list(starting), list[str]()
        begin, said = time.monotonic(), PROGRESS_S

        def all_up() -> bool:
            nonlocal said
            passed = time.monotonic() - begin
            if passed >= said:
                say(f"  {passed:3.0f} s: waiting for {', '.join(one.name for one in waiting)}")
                said = passed + PROGRESS_S
            for engine in tuple(waiting):
                if engine.exit_code() is not None:
                    failures.append(f"{engine.name} did not start: {engine.why_ended()}")
                if engine.exit_code() is not None or engine.is_ready():
                    waiting.remove(engine)
            return not waiting

        wait_until(all_up, self._start_timeout_s)
        stop_all(waiting)
        late = f"it does not answer after {self._start_timeout_s:.0f} s"
        return failures + [f"{engine.name} did not start: {late}" for engine in waiting]

    def _find_warm(self, spec: EngineSpec) -> WarmServer | None:
        """The process that forks engines that import the same; the first of them starts it."""
        if not self._warm or spec.device != "cpu" or spec.pipeline_parallel > 1:
            return None  # CUDA cannot be forked, nor can what compiles
        imports = spec.imports()
        if imports not in self._warm_servers:
            name = f"warm-{len(self._warm_servers)}"
            server = self._warm_servers[imports] = WarmServer(name, self.log_dir)
            server.start(spec.importing_environment(), spec.python)
            say(f"importing vLLM, once for all engines like {spec.name}")
        return self._warm_servers[imports]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
