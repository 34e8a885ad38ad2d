"""All engines and routers of one program: started when needed, kept, and ended whatever happens."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from typing_extensions import Self

from harness.cluster import router
from harness.cluster.engines import (
    START_TIMEOUT_S,
    Connector,
    Engine,
    EngineSpec,
    Role,
    halves,
)
from harness.cluster.netns import Namespace
from harness.cluster.processes import (
    Handlers,
    ManagedProcess,
    Ports,
    ProcessDiedError,
    end_on_signals,
    restore_handlers,
    stop_all,
)
from harness.cluster.router import Router
from harness.cluster.warm import WarmServer
from lab.results import say_on_stderr

PROGRESS_S: Final = 5.0
POLL_S: Final = 0.2
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
    """Engines by their specs: whoever asks for an equal spec gets the same engine.

    One that has ended, or was killed, is started again when it is asked for, on the same ports. One
    that did not start is not tried again. Where `most_ranks` limits how many ranks run, those
    engines end that nobody has asked for the longest.

    Logs go to `log_dir`: by default a new temporary folder, which stays for whoever wants to read
    it. With `warm`, engines on CPU are forked from a process that has imported vLLM, in a tenth of
    the time; a program that measures what an engine costs should not use it.
    """

    def __init__(
        self,
        log_dir: Path | None = None,
        *,
        most_ranks: int | None = None,
        warm: bool = True,
        start_timeout_s: float = START_TIMEOUT_S,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        """Nothing runs before it is asked for."""
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-"))
        self.engines: list[Engine] = []
        """All that were asked for, the least recently used first."""
        self.routers: list[Router] = []
        self._most_ranks = most_ranks
        self._warm = warm
        self._start_timeout_s = start_timeout_s
        self._say = say
        self._ports = Ports()
        self._broken: list[tuple[EngineSpec, str]] = []
        self._warm_servers: dict[object, WarmServer] = {}
        self._handlers_before: Handlers = {}

    def __enter__(self) -> Self:
        """From here on a signal that would end us ends all engines first."""
        self._handlers_before = end_on_signals()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self.stop()

    def start(self, *specs: EngineSpec) -> list[Engine]:
        """The engines of these specs; those that do not run are started, all at once.

        Raises:
            ProcessDiedError: if one does not start, when the others have.
        """
        engines = [self._engine(spec) for spec in specs]
        starting = [engine for engine in engines if self._should_start(engine)]
        self._make_room(engines)
        if starting:
            names = ", ".join(engine.name for engine in starting)
            self._say(f"starting {names}; logs in {self.log_dir}")
            begin = time.monotonic()
            with self._ended_on_failure(starting):
                for engine in starting:
                    engine.start()
                self._wait(starting, begin)
            self._say(f"{names} up after {time.monotonic() - begin:.0f} s")
        for spec, reason in self._broken:
            if spec in specs:
                raise ProcessDiedError(f"{spec.name} did not start: {reason}")
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
        self._say(f"{name} up at {started.url}")
        return started

    def end(self, *engines: Engine) -> None:
        """End engines that are not needed any more."""
        stop_all(engines)

    def check_alive(self) -> None:
        """Raise, with the end of its log, if one has ended.

        Raises:
            ProcessDiedError: if one has.
        """
        for process in (*self.engines, *self.routers):
            process.check_alive()

    def stop(self) -> None:
        """End everything; may be called twice."""
        processes: list[ManagedProcess] = [*self.routers, *self.engines]
        try:
            stop_all(processes)
            for server in self._warm_servers.values():
                server.close()
            self._warm_servers.clear()
        finally:
            restore_handlers(self._handlers_before)

    def _engine(self, spec: EngineSpec) -> Engine:
        """The engine of a spec, from now on the most recently used."""
        known = next((engine for engine in self.engines if engine.spec == spec), None)
        if known is not None:
            self.engines.remove(known)
        engine = known or Engine(spec, self.log_dir, self._ports, self._find_warm)
        self.engines.append(engine)
        return engine

    def _should_start(self, engine: Engine) -> bool:
        broken = any(spec == engine.spec for spec, _ in self._broken)
        return not broken and not engine.is_running()

    def _make_room(self, wanted: Sequence[Engine]) -> None:
        """End what was not asked for the longest, until the wanted engines fit."""
        if self._most_ranks is None:
            return
        others = [one for one in self.engines if one.is_running() and one not in wanted]
        free = self._most_ranks - sum(engine.spec.ranks for engine in wanted)
        leaving: list[Engine] = []
        while others and sum(engine.spec.ranks for engine in others) > free:
            leaving.append(others.pop(0))
        stop_all(leaving)

    def _wait(self, starting: Iterable[Engine], begin: float) -> None:
        waiting = list(starting)
        last_said = begin
        while waiting:
            time.sleep(POLL_S)
            now = time.monotonic()
            waiting = [one for one in waiting if not self._is_up(one, seconds=now - begin)]
            if waiting and now - last_said >= PROGRESS_S:
                names = ", ".join(engine.name for engine in waiting)
                self._say(f"  {now - begin:3.0f} s: waiting for {names}")
                last_said = now

    def _is_up(self, engine: Engine, *, seconds: float) -> bool:
        """Whether there is nothing to wait for: it answers, or is known to be broken."""
        try:
            if engine.is_ready():
                return True
            if seconds < self._start_timeout_s:
                return False
            reason = f"it does not answer after {seconds:.0f} s"
        except ProcessDiedError:
            reason = engine.why_ended()
        engine.stop()
        self._broken.append((engine.spec, reason))
        return True

    @contextlib.contextmanager
    def _ended_on_failure(self, engines: Iterable[Engine]) -> Iterator[None]:
        """Whoever interrupts a start leaves no half of it."""
        try:
            yield
        except BaseException:
            stop_all(engines)
            raise

    def _find_warm(self, spec: EngineSpec) -> WarmServer | None:
        """What forks engines that import the same; it is started for the first of them."""
        if not self._warm or spec.device != "cpu" or spec.pipeline_parallel > 1:
            return None  # CUDA cannot be forked, nor can what compiles
        imports = spec.imports()
        if imports not in self._warm_servers:
            name = f"warm-{len(self._warm_servers)}"
            server = self._warm_servers[imports] = WarmServer(name, self.log_dir)
            server.start(spec.importing_environment(), spec.python)
            self._say(f"importing vLLM, once for all engines like {spec.name}")
        return self._warm_servers[imports]
