"""A rolling upgrade under load: what does it cost clients?

Two prefill and two decode engines answer clients, who ask as a router does. One engine after the
other is taken out of the rotation, drained with `nixl-kv drain`, stopped, and started again;
perhaps as another release of nixl_kv (`--to`), so that for a while some requests cross releases.
No request may fail or be answered wrongly. Counted is what decode computed itself, as its KV was
not read from prefill.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import httpx

from harness.cluster.client import Client, NoTicketError, RefusedError, Ticket
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, PATIENT, Engine, EngineSpec
from harness.cluster.metrics import LOADS
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import ProcessDiedError, nixl_kv_command
from harness.cluster.waiting import wait_or_fail
from lab.results import Figures, Results, say_on_stderr, verdict_of
from suites.soak import Ended, num_wrong, request_of

CLIENTS: Final = 4
STOP_S: Final = 120.0
BETWEEN: Final = 10
"""Requests that end while all engines serve, before each of them leaves, and after the last."""
KV_CACHE_BYTES: Final = 96 << 20


class Rotation:
    """The engines of one role that new requests go to, in turns."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """With all of them."""
        self.engines = list(engines)
        self._numbers = count()
        self._under_way: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def next(self) -> Iterator[Engine]:
        """The one whose turn it is, until its answer is here."""
        with self._lock:
            engine = self.engines[next(self._numbers) % len(self.engines)]
            self._under_way[engine.url] += 1
        try:
            yield engine
        finally:
            with self._lock:
                self._under_way[engine.url] -= 1

    def remove(self, engine: Engine) -> None:
        """No request is sent there from now on."""
        with self._lock:
            self.engines.remove(engine)

    def add(self, engine: Engine) -> None:
        """It serves."""
        with self._lock:
            self.engines.append(engine)

    def is_idle(self, engine: Engine) -> bool:
        """Whether all answers from it are here."""
        with self._lock:
            return not self._under_way[engine.url]


@dataclass
class Load:
    """Clients, each of which asks one question after the other."""

    prefill: Rotation
    decode: Rotation
    ended: list[Ended] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    _seeds: Iterator[int] = field(default_factory=lambda: count(700_000))

    def run(self) -> None:
        """One client."""
        while not self.is_over.is_set():
            self.ended.append(self._ask(next(self._seeds)))

    def wait(self, num_more: int) -> None:
        """Until so many more requests have ended."""
        wanted = len(self.ended) + num_more
        _wait(lambda: len(self.ended) >= wanted, "the clients stand still")

    def _ask(self, seed: int) -> Ended:
        prompt, num_tokens = request_of(seed)
        begin = time.monotonic()
        try:
            with self.prefill.next() as engine, Client(engine.url) as client:
                ticket = _ticket(client, prompt)
            with self.decode.next() as engine, Client(engine.url) as client:
                answer = client.complete(prompt, num_tokens, kv_transfer_params=ticket)
        except (RefusedError, httpx.HTTPError) as error:
            return Ended(seed, time.monotonic() - begin, error=str(error) or repr(error))
        return Ended(seed, time.monotonic() - begin, answer.tokens)


def _ticket(client: Client, prompt: str) -> Ticket | None:
    """None where prefill gives none: routers hand that on, too."""
    try:
        return client.ticket(prompt)
    except NoTicketError:
        return None


def upgrade(cluster: Cluster, model: Path, to: Path | None = None) -> Figures:
    """Upgrade all four engines under load.

    Args:
        cluster: to start them in.
        model: what they serve.
        to: a folder with the package of another release; None for the same again.
    """
    specs = [
        replace(spec, name=f"{spec.name}-{number}") for number in (1, 2) for spec in _specs(model)
    ]
    engines = sorted(cluster.start(*specs), key=lambda engine: engine.spec.role, reverse=True)
    prefill, decode = (
        Rotation([engine for engine in engines if engine.spec.role == role])
        for role in ("prefill", "decode")
    )
    load, loads, faults = Load(prefill, decode), 0, []
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.run) for _ in range(CLIENTS)]
        try:
            for engine in engines:
                load.wait(BETWEEN)
                rotation = prefill if engine.spec.role == "prefill" else decode
                faults += _take_leave(engine, rotation)
                loads += _loads(engine)
                engine.terminate()
                _wait(partial(_has_ended, engine), f"{engine.name} does not end")
                rotation.add(*cluster.start(_of_release(engine.spec, to)))
            load.wait(2 * BETWEEN)
        finally:
            load.is_over.set()
            for client in clients:
                client.result()
    loads += sum(map(_loads, [*prefill.engines, *decode.engines]))
    with Client(prefill.engines[0].url) as alone:
        wrong = num_wrong(alone, load.ended)
    return _judged(load.ended, loads, wrong, faults)


def _take_leave(engine: Engine, rotation: Rotation) -> list[str]:
    """As an operator takes an engine out; what went wrong."""
    rotation.remove(engine)
    where, patience = f"{HOST}:{engine.side_port}", str(STOP_S)
    command = nixl_kv_command("drain", "--at", where, "--timeout", patience)
    begin = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    say_on_stderr(f"  {engine.name} drained in {time.monotonic() - begin:.1f} s")
    _wait(partial(rotation.is_idle, engine), f"requests at {engine.name} do not end")
    lines = (done.stdout + done.stderr).splitlines()
    return [f"{engine.name}: {lines[-1]}"] if done.returncode else []


def _has_ended(engine: Engine) -> bool:
    return not engine.is_running()


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    wait_or_fail(condition, STOP_S, otherwise)


def _specs(model: Path) -> tuple[EngineSpec, EngineSpec]:
    return pair_specs(model, connector_config=PATIENT, kv_cache_bytes=KV_CACHE_BYTES)


def _of_release(spec: EngineSpec, to: Path | None) -> EngineSpec:
    if to is None:
        return spec
    paths = filter(None, (str(to), os.environ.get("PYTHONPATH")))
    env = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    return replace(spec, name=f"{spec.name}-new", extra_env=env)


def _loads(engine: Engine) -> int:
    """How many requests have read their KV there."""
    with Client(engine.url) as client:
        return round(client.counters().get(LOADS, 0.0))


def _judged(ended: Sequence[Ended], loads: int, wrong: int, faults: Sequence[str]) -> Figures:
    errors = Counter(one.error for one in ended if one.error)
    answered = [one for one in ended if one.tokens]
    return Figures(
        {
            "requests": len(ended),
            "answered": len(answered),
            "failed": errors.total(),
            "wrong": wrong,
            "KV read": loads,
            "computed on decode": len(answered) - loads,
            "slowest s": max((one.seconds for one in answered), default=0.0),
        },
        verdict_of(
            *faults,
            *(f"{times} x {error}" for error, times in errors.items()),
            f"{wrong} wrong" if wrong else "",
            "" if loads else "no KV was read",
        ),
    )


def main() -> int:
    """Run what the command line says; the exit status."""
    parser = argparse.ArgumentParser(
        prog="upgrade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="with another release's package")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    results = Results("a rolling upgrade of 2 prefill and 2 decode engines", "good", options.json)
    try:
        with Cluster(options.log_dir) as cluster:
            results.add(upgrade(cluster, ensure_tiny_model(), options.to))
    except (ProcessDiedError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    return results.print(1)


if __name__ == "__main__":
    sys.exit(main())
