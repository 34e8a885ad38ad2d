"""Prefill and decode engines, a router before them, and perhaps a single engine to compare with."""

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from typing_extensions import Self

from pd.engines import START_TIMEOUT_S, Connector, Engine, EngineSpec, Role
from pd.processes import ManagedProcess, Ports, ProcessDiedError, stop_all
from pd.router import Router

PROGRESS_S = 5.0
POLL_S = 0.5
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
Handlers = dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None]
PAIR_ROLES: tuple[Role, Role] = ("prefill", "decode")
# In bfloat16 random weights give near-ties between tokens, which rounding decides one way in a
# prefill of many tokens and another way in one of few.
CPU_DTYPE = "float32"


@dataclass(frozen=True)
class ClusterSpec:
    """Which engines to start. Where there are both kinds, a router is started too."""

    prefill: Sequence[EngineSpec] = ()
    decode: Sequence[EngineSpec] = ()
    single: EngineSpec | None = None


def one_pair(
    model: Path,
    connector: Connector,
    *,
    single: bool = False,
    config: Mapping[str, object] | None = None,
) -> ClusterSpec:
    """One prefill and one decode engine on CPU, and a single one beside them if wanted."""
    shared = {"connector_config": config or {}, "dtype": CPU_DTYPE}
    prefill, decode = (EngineSpec(role, model, role, connector, **shared) for role in PAIR_ROLES)
    reference = EngineSpec("single", model, dtype=CPU_DTYPE) if single else None
    return ClusterSpec([prefill], [decode], reference)


def say_on_stderr(line: str) -> None:
    """Progress is no result: it goes to stderr."""
    print(line, file=sys.stderr, flush=True)


class Cluster:
    """Starts all engines at once, then the router; ends all of it whatever happens.

    Logs go to log_dir: by default a new temporary folder, which stays for whoever wants to read it.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        log_dir: Path | None = None,
        route: bool = True,
        say: Callable[[str], None] = say_on_stderr,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Nothing runs before the `with` block is entered."""
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-"))
        self.ports = Ports()
        self.prefill = self._engines_of(spec.prefill)
        self.decode = self._engines_of(spec.decode)
        self.single = next(iter(self._engines_of([spec.single] if spec.single else [])), None)
        self.router: Router | None = None
        self._route = route
        self._say = say
        self._start_timeout_s = start_timeout_s
        self._handlers_before: Handlers = {}

    def __enter__(self) -> Self:
        """Start everything and wait until it answers."""
        self._handlers_before = end_on_signals()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            for engine in self.engines:
                engine.start()
            self._wait_for_engines()
            if self._route and self.prefill and self.decode:
                self._start_router()
            on_failure.pop_all()  # all is up: from here on the `with` block ends it
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self.stop()

    @property
    def engines(self) -> list[Engine]:
        """All engines."""
        return [*self.prefill, *self.decode, *([self.single] if self.single else [])]

    @property
    def processes(self) -> list[ManagedProcess]:
        """All engines, and the router if there is one."""
        return [*self.engines, *([self.router] if self.router else [])]

    @property
    def router_url(self) -> str:
        """Where requests for the pair go."""
        if self.router is None:
            raise RuntimeError("no router: it needs prefill and decode engines")
        return self.router.url

    def check_alive(self) -> None:
        """Raise, with the end of its log, if one has ended."""
        for process in self.processes:
            process.check_alive()

    def stop(self) -> None:
        """End everything; may be called twice."""
        try:
            stop_all(self.processes)
        finally:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)

    def _engines_of(self, specs: Sequence[EngineSpec]) -> list[Engine]:
        return [Engine(spec, self.log_dir, self.ports) for spec in specs]

    def _wait_for_engines(self) -> None:
        names = ", ".join(engine.name for engine in self.engines)
        self._say(f"starting {names}; logs in {self.log_dir}")
        begin = last_said = time.monotonic()
        waiting = self.engines
        while True:
            waiting = [engine for engine in waiting if not engine.is_ready()]
            now = time.monotonic()
            if not waiting:
                self._say(f"{names} up after {now - begin:.0f} s")
                return
            still = ", ".join(engine.name for engine in waiting)
            if now - begin > self._start_timeout_s:
                raise ProcessDiedError(f"not up in {self._start_timeout_s:.0f} s: {still}")
            if now - last_said >= PROGRESS_S:
                self._say(f"  {now - begin:3.0f} s: waiting for {still}")
                last_said = now
            time.sleep(POLL_S)

    def _start_router(self) -> None:
        self.router = Router(
            [engine.url for engine in self.prefill],
            [engine.url for engine in self.decode],
            log_dir=self.log_dir,
            ports=self.ports,
        )
        self.router.start()
        self.router.wait_ready()
        self._say(f"router up at {self.router.url}")


def exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exception, so that `with` blocks end what they started."""
    raise SystemExit(128 + number)


def end_on_signals() -> Handlers:
    """Exit on a signal that would end us; what nohup ignores stays ignored. The handlers before."""
    before: Handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    for number, handler in before.items():
        if (number, handler) != (signal.SIGHUP, signal.SIG_IGN):
            signal.signal(number, exit_on_signal)
    return before
