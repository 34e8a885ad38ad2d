"""After any ending both sides have what they had before: real NIXL, two processes.

Counted are descriptors, threads, memory mappings and MiB, over shared memory and over TCP.
"""

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil
import pytest

from support.endings import EndingProcess, Usage, wait_for

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl

logger = logging.getLogger(__name__)

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
"""More afterwards: three agents. The allocator keeps what an agent of 25 MiB has freed, in up to 16
arenas (212 MiB, 266 after 30 killed prefill engines, 292 after 50 to 100; with one arena 209, 244,
272). Agents that leak are seen by their descriptors, threads and mappings."""


@dataclass
class Pair:
    """The two processes; some endings begin with others."""

    tls: str
    prefill: EndingProcess
    decode: EndingProcess

    def load(self) -> None:
        """One load that is good."""
        assert self.decode.load(self.prefill.offer()) is None

    def usage(self) -> tuple[Usage, Usage]:
        """What prefill and decode have once nothing is known of any peer."""
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
    theirs = {one.laddr.port for one in psutil.Process(pair.prefill.pid).net_connections("tcp")}
    ours = [
        (one.laddr.port, one.raddr.port)
        for one in psutil.Process(pair.decode.pid).net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED and one.raddr.port in theirs
    ]
    for here, there in ours:
        which = f"( sport = :{here} and dport = :{there} )"
        command = ["ss", "--kill", "--tcp", "state", "established", which]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    failures = [pair.decode.load(pair.prefill.offer())]
    while failures[-1] is not None:  # until both planes have noticed, and connected again
        assert len(failures) < MAX_FAILURES, failures
        failures.append(pair.decode.load(pair.prefill.offer()))


def kill_prefill(pair: Pair) -> None:
    pair.load()
    pair.prefill.kill()
    pair.prefill = EndingProcess("prefill", pair.tls)


def kill_decode(pair: Pair) -> None:
    pair.load()
    pair.decode.kill()
    pair.decode = EndingProcess("decode", pair.tls)


def restart_prefill(pair: Pair) -> None:
    pair.load()
    pair.prefill.restart()


def restart_decode(pair: Pair) -> None:
    pair.load()
    pair.decode.restart()


def drain(pair: Pair) -> None:
    pair.load()
    pair.prefill.drain()
    pair.prefill.leave()
    pair.prefill = EndingProcess("prefill", pair.tls)


ENDINGS: Final[dict[str, Callable[[Pair], None]]] = {
    "forgotten": forget,
    "broken": break_connections,
    "prefill killed": kill_prefill,
    "decode killed": kill_decode,
    "prefill restarted": restart_prefill,
    "decode restarted": restart_decode,
    "drained": drain,
}


BY_DEFAULT: Final = {("forgotten", ""), ("forgotten", "tcp"), ("drained", "tcp"), ("broken", "tcp")}
"""Each takes 20 s or more; the others are in the slow lane."""


def cases() -> list[Any]:
    """Endings by transports, with few and with many cycles."""
    return [
        pytest.param(
            name,
            tls,
            cycles,
            id=f"{name} {tls or 'shared memory'} {cycles}",
            marks=[] if cycles == FEW and (name, tls) in BY_DEFAULT else [pytest.mark.slow],
        )
        for name in ENDINGS
        for tls in ("", "tcp")
        for cycles in (FEW, MANY)
    ]


@contextmanager
def running(tls: str) -> Iterator[Pair]:
    made = Pair(tls, EndingProcess("prefill", tls), EndingProcess("decode", tls))
    try:
        yield made
    finally:
        made.decode.kill()
        made.prefill.kill()


@pytest.mark.parametrize(("name", "tls", "cycles"), cases())
def test_an_ending_leaves_nothing_on_either_side(name: str, tls: str, cycles: int) -> None:
    if name == "broken" and (os.geteuid() != 0 or shutil.which("ss") is None):
        pytest.skip("needs root and ss of iproute2")
    with running(tls) as pair:
        check(pair, name, cycles)


def check(pair: Pair, name: str, cycles: int) -> None:
    """Count, let it end so often, and count again."""
    end = ENDINGS[name]
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
    logger.info("%s, %d cycles: before %s, after %s", name, cycles, before, after)
    assert has_left_nothing(after), f"before {before}, after {after}"
