"""Where faults happen: two engines of one machine, or of two hosts that are namespaces."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pd.client import Client
from pd.cluster import CPU_DTYPE, PAIR_ROLES, end_on_signals, say_on_stderr
from pd.engines import Engine, EngineSpec, Role
from pd.faults_pair import Pair, Victim
from pd.faults_scene import TIMING, Where
from pd.netns import ADDRESSES, Namespace, Wire
from pd.pool import halves
from pd.processes import ManagedProcess, Ports, stop_all
from pd.router import Router

# Two hosts of a network that nobody else is in, where UCX has nothing but TCP.
NETWORK: Final = {"insecure": True, "peers": [ADDRESSES], "paced_reads": True}
# The caches are small, and what is offered is to last until a fault has hit it.
CONFIG: Final = {**TIMING, "offer_share": 0.9}


@dataclass(frozen=True)
class Place:
    """What the engines of all stages have in common."""

    model: Path
    log_dir: Path


@contextlib.contextmanager
def single_engine(place: Place) -> Iterator[Client]:
    """An engine without a connector."""
    engine = Engine(EngineSpec("single", place.model, dtype=CPU_DTYPE), place.log_dir, Ports())
    with ended_by_signals(), contextlib.ExitStack() as stack:
        stack.callback(stop_all, [engine])
        say_on_stderr("starting a single engine, whose answers the others are compared with")
        engine.start()
        engine.wait_ready()
        yield stack.enter_context(Client(engine.url))


@contextlib.contextmanager
def pair_at(where: Where, place: Place) -> Iterator[Pair]:
    """A pair that answers; it is ended, and its network removed, whatever happens."""
    log_dir = place.log_dir / where
    ports = Ports()
    with ended_by_signals(), contextlib.ExitStack() as stack:
        hosts, wire = _two_hosts(stack) if where == "network" else ((None, None), None)
        cores = itertools.cycle(halves(os.sched_getaffinity(0)))
        prefill, decode = (
            Victim(
                _spec(role, place.model, cores=next(cores), host=host), log_dir, ports, host=host
            )
            for role, host in zip(PAIR_ROLES, hosts, strict=True)
        )
        running: list[ManagedProcess] = [prefill, decode]
        stack.callback(stop_all, running)
        say_on_stderr(f"starting prefill and decode, {where}; logs in {log_dir}")
        for engine in (prefill, decode):
            engine.start()
        for engine in (prefill, decode):
            engine.wait_ready()
        router = None
        if where == "local":
            router = Router([prefill.url], [decode.url], log_dir=log_dir, ports=ports)
            running.append(router)
            router.start()
            router.wait_ready()
        yield Pair(prefill, decode, wire, router)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A signal that ends this process first ends what it has started."""
    before = end_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _two_hosts(stack: contextlib.ExitStack) -> tuple[tuple[Namespace, Namespace], Wire]:
    left, right = (
        stack.enter_context(Namespace(f"kv-{role}", number))
        for number, role in enumerate(PAIR_ROLES, start=1)
    )
    return (left, right), stack.enter_context(Wire(left, right))


def _spec(role: Role, model: Path, *, cores: frozenset[int], host: Namespace | None) -> EngineSpec:
    config = CONFIG | ({"host": host.wire_address} | NETWORK if host is not None else {})
    return EngineSpec(
        role,
        model,
        role,
        "nixl-kv",
        connector_config=config,
        dtype=CPU_DTYPE,
        cores=cores,
    )
