"""After any ending both sides use as much as before: real NIXL, two processes.

Counted are descriptors, threads, memory mappings and MiB, over shared memory and over TCP.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import pytest

from support.processes import SideProcess, Usage, cut, running, wait_for

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl

FEW, MANY = 6, 50
WARM_CYCLES: Final = {FEW: 3, MANY: 35}
"""Before the first count: libraries are loaded, pools of threads and memory have grown, and before
many cycles the first agent has been replaced, which starts two threads."""
MAX_FAILURES: Final = 5
SAMPLES, SAMPLE_S = 6, 0.5
MOST_MAPPINGS: Final = 24
"""More afterwards: the allocator's arenas and stacks of threads that ended stay mapped, with their
guards. One leaked agent is 40."""
MOST_MIB: Final = 80.0
"""More afterwards: three agents, which the allocator keeps in up to 16 arenas. Agents that leak are
seen by their descriptors, threads and mappings."""


@dataclass
class Pair:
    """The two processes; some endings begin with others."""

    tls: str
    prefill: SideProcess
    decode: SideProcess

    def load(self) -> None:
        """One load that is good."""
        assert self.decode.load(self.prefill.offer()) is None

    def usage(self) -> tuple[Usage, Usage]:
        """The usage of prefill and decode once both have forgotten all peers."""
        self.decode.settle()
        samples = list[tuple[Usage, Usage]]()
        for _ in range(SAMPLES):  # one may be of a check that is under way
            time.sleep(SAMPLE_S)
            samples.append((self.prefill.usage(), self.decode.usage()))
        return (
            min((prefill for prefill, _ in samples), key=lambda one: one.descriptors),
            min((decode for _, decode in samples), key=lambda one: one.descriptors),
        )


def forget(pair: Pair) -> None:
    pair.load()
    pair.decode.forget()


def break_connections(pair: Pair) -> None:
    """Also those of the control plane."""
    pair.load()
    cut(pair.decode.pid, pair.prefill.pid)
    failures = [pair.decode.load(pair.prefill.offer())]
    while failures[-1] is not None:  # until both planes have noticed, and connected again
        assert len(failures) < MAX_FAILURES, failures
        failures.append(pair.decode.load(pair.prefill.offer()))


def kill(side: str, pair: Pair) -> None:
    pair.load()
    getattr(pair, side).kill()
    setattr(pair, side, running(side, pair.tls))


def restart(side: str, pair: Pair) -> None:
    pair.load()
    getattr(pair, side).restart()


def drain(pair: Pair) -> None:
    pair.load()
    pair.prefill.drain()
    pair.prefill.leave()
    pair.prefill = running("prefill", pair.tls)


ENDINGS: Final[dict[str, Callable[[Pair], None]]] = {
    "forgotten": forget,
    "broken": break_connections,
    "prefill killed": partial(kill, "prefill"),
    "decode killed": partial(kill, "decode"),
    "prefill restarted": partial(restart, "prefill"),
    "decode restarted": partial(restart, "decode"),
    "drained": drain,
}


BY_DEFAULT: Final = {("forgotten", ""), ("forgotten", "tcp"), ("drained", "tcp"), ("broken", "tcp")}
"""Each takes 20 s or more; the others are in the slow lane."""


def case(name: str, tls: str, cycles: int) -> Any:
    is_fast = cycles == FEW and (name, tls) in BY_DEFAULT
    marks = [] if is_fast else [pytest.mark.slow]
    return pytest.param(name, tls, cycles, id=f"{name} {tls or 'shm'} {cycles}", marks=marks)


@pytest.mark.parametrize(
    ("name", "tls", "cycles"), [case(*each) for each in product(ENDINGS, ("", "tcp"), (FEW, MANY))]
)
def test_an_ending_leaves_nothing_on_either_side(name: str, tls: str, cycles: int) -> None:
    """Count, let it end so often, and count again."""
    if name == "broken" and (os.geteuid() != 0 or shutil.which("ss") is None):
        pytest.skip("needs root and ss of iproute2")
    pair = Pair(tls, running("prefill", tls), running("decode", tls))
    try:
        check(pair, ENDINGS[name], cycles)
    finally:
        pair.decode.kill()
        pair.prefill.kill()


def check(pair: Pair, end: Callable[[Pair], None], cycles: int) -> None:
    for _ in range(WARM_CYCLES[cycles]):
        end(pair)
    pair.load()
    before = pair.usage()
    for _ in range(cycles):
        end(pair)
    pair.load()

    def has_left_nothing(after: tuple[Usage, Usage]) -> bool:
        return all(
            now.descriptors <= then.descriptors
            and now.threads <= then.threads
            and now.mappings <= then.mappings + MOST_MAPPINGS
            and now.mib <= then.mib + MOST_MIB
            for then, now in zip(before, after, strict=True)
        )

    after = wait_for(pair.usage, has_left_nothing)
    assert has_left_nothing(after), f"before {before}, after {after}"
