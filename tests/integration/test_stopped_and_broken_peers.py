"""Peers that are stopped or killed, and connections that break, during a read: real NIXL, over TCP.

Broken connections may cost prefill its process, whatever the reader does: UCX's
`ucp_request.inl:356 Fatal: unexpected error: Endpoint timeout`, where it answers over a connection
that has just failed.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from harness.local.caches import Cache
from nixl_kv.errors import TransportError
from nixl_kv.protocol.events import LoadEnded
from support.pair import SmallEngine
from support.processes import (
    SIZES,
    TABLE,
    PrefillProcess,
    has_landed,
    over_tcp,
    paced_over_tcp,
    prefill_blocks,
    prefill_process,
    reader_process,
    start_load,
)

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl

logger = logging.getLogger(__name__)

SILENT = "prefill fell silent during the read"
MOST_LOADS = 2  # that are checked between two readers: of fifty not all

Start = Callable[..., PrefillProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes of prefill, which are ended afterwards."""
    with contextlib.ExitStack() as stack:
        yield lambda *make_transport: stack.enter_context(prefill_process(*make_transport))


def decode_over(make_transport: Callable[[], Any]) -> SmallEngine:
    return SmallEngine("decode", Cache(SIZES), make_transport, roles="decode")


@pytest.fixture
def decode() -> Iterator[SmallEngine]:
    with contextlib.closing(decode_over(over_tcp)) as engine:
        yield engine


@pytest.fixture
def paced_decode() -> Iterator[SmallEngine]:
    with contextlib.closing(decode_over(paced_over_tcp)) as engine:
        yield engine


def expect_load(decode: SmallEngine, prefill: PrefillProcess, name: str) -> None:
    decode.cache.memory[...] = 0
    start_load(decode, prefill, name)
    assert decode.wait_failure(name, timeout_s=120) is None
    assert np.array_equal(decode.cache.blocks(TABLE), prefill_blocks())


def stop_during(decode: SmallEngine, prefill: PrefillProcess, name: str) -> None:
    start_load(decode, prefill, name)
    decode.wait(lambda: has_landed(decode))
    prefill.send(signal.SIGSTOP)


def test_a_read_from_a_stopped_process_ends_and_nothing_lands_after_it(
    decode: SmallEngine, start: Start
) -> None:
    stopped, healthy = start(), start()
    expect_load(decode, stopped, "warm")
    decode.cache.memory[...] = 0
    stop_during(decode, stopped, "hanging")
    assert decode.wait_failure("hanging") == SILENT
    landed = decode.cache.memory.copy()
    assert not np.array_equal(decode.cache.blocks(TABLE), prefill_blocks())
    stopped.send(signal.SIGCONT)
    time.sleep(1.0)  # that nothing comes can only be seen by waiting
    assert np.array_equal(decode.cache.memory, landed)
    expect_load(decode, healthy, "next")


@pytest.mark.parametrize(
    ("num_readers", "is_stopped"),
    [
        pytest.param(2, False, id="running"),
        pytest.param(2, True, id="stopped", marks=pytest.mark.slow),
        pytest.param(50, False, id="fifty", marks=pytest.mark.slow),
    ],
)
def test_killed_readers_take_nobody_with_them(
    paced_decode: SmallEngine, start: Start, num_readers: int, *, is_stopped: bool
) -> None:
    prefill = start(paced_over_tcp)
    for attempt in range(num_readers):
        with reader_process(paced_over_tcp) as begin:
            begin(prefill.offer(f"killed{attempt}"))
            if is_stopped:
                prefill.send(signal.SIGSTOP)
        prefill.send(signal.SIGCONT)
        if attempt < MOST_LOADS:
            expect_load(paced_decode, prefill, f"next{attempt}")
        assert prefill.process.is_alive()
    expect_load(paced_decode, prefill, "last")


def cut(pid: int) -> int:
    """Break all TCP connections that this process has with another; how many.

    This end is told at once, the other one by a reset, as from a network that forgets connections.
    """
    theirs = {one.laddr.port for one in psutil.Process(pid).net_connections("tcp")}
    ours = [
        (one.laddr.port, one.raddr.port)
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED and one.raddr.port in theirs
    ]
    which = " or ".join(f"( sport = :{here} and dport = :{there} )" for here, there in ours)
    command = ["ss", "--kill", "--tcp", "state", "established", f"( {which} )"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return len(ours)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ss") is None, reason="needs root and ss of iproute2"
)
def test_after_a_break_decode_reads_on(paced_decode: SmallEngine, start: Start) -> None:
    broken, healthy = start(paced_over_tcp), start(paced_over_tcp)
    start_load(paced_decode, broken, "broken")
    paced_decode.wait(lambda: has_landed(paced_decode))
    assert cut(broken.pid) > 0
    assert "reading prefill rank 0 failed" in (paced_decode.wait_failure("broken") or "")
    expect_load(paced_decode, healthy, "other")
    broken.process.join(1.0)
    logger.info("prefill %s", "lives" if broken.process.is_alive() else "died")
    if broken.process.is_alive():  # UCX has spared it: it is connected to anew
        expect_load(paced_decode, broken, "again")


def test_a_rank_whose_turn_is_long_has_not_stopped_before_nothing_can_write(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is reported once, and nothing lands after that."""
    monkeypatch.setattr("nixl_kv.engine.engine.STOP_TIMEOUT_S", 0.5)
    prefill, decode = start(), decode_over(over_tcp)
    expect_load(decode, prefill, "warm")
    engine = decode.ranks[0].engine
    transport = decode.parts.agents.current.transport
    is_posted, may_go_on = threading.Event(), threading.Event()
    read = transport.read

    def read_slowly(*arguments: Any) -> Any:
        handle = read(*arguments)
        is_posted.set()
        may_go_on.wait(60)
        return handle

    monkeypatch.setattr(transport, "read", read_slowly)
    start_load(decode, prefill, "late")
    assert is_posted.wait(60)
    with pytest.raises(TransportError, match="the thread has not ended its turn"):
        engine.stop()
    assert engine.pop_results() == []
    may_go_on.set()
    engine.stop(60)
    (ended,) = (each for each in engine.pop_results() if isinstance(each, LoadEnded))
    assert (ended.request, str(ended.failure)) == ("late", "this rank has stopped (dropped)")
    decode.cache.memory[...] = 0  # it is somebody else's now
    time.sleep(1.0)  # that nothing comes can only be seen by waiting
    assert not decode.cache.memory.any()
    engine.stop()
    assert engine.pop_results() == []
    decode.directory.stop()
