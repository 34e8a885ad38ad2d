"""Connections that break under a read cost decode that read alone: real NIXL, over TCP.

They may cost prefill its process, whatever the reader does: UCX's `ucp_request.inl:356 Fatal:
unexpected error: Endpoint timeout`, where it answers over a connection that has just failed.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from harness.local.caches import Cache
from support.pair import SmallEngine
from support.processes import (
    SIZES,
    TABLE,
    PrefillProcess,
    has_landed,
    paced_over_tcp,
    prefill_blocks,
    prefill_process,
    start_load,
)

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ss") is None, reason="needs root and ss of iproute2"
    ),
]


logger = logging.getLogger(__name__)


@pytest.fixture
def broken() -> Iterator[PrefillProcess]:
    with prefill_process(paced_over_tcp) as started:
        yield started


@pytest.fixture
def healthy() -> Iterator[PrefillProcess]:
    with prefill_process(paced_over_tcp) as started:
        yield started


@pytest.fixture
def decode() -> Iterator[SmallEngine]:
    engine = SmallEngine("decode", Cache(SIZES), paced_over_tcp, roles="decode")
    yield engine
    engine.close()


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


def expect_load(decode: SmallEngine, prefill: PrefillProcess, name: str) -> None:
    decode.cache.memory[...] = 0
    start_load(decode, prefill, name)
    assert decode.wait_failure(name) is None
    assert np.array_equal(decode.cache.blocks(TABLE), prefill_blocks())


def test_after_a_break_decode_reads_on(
    decode: SmallEngine, broken: PrefillProcess, healthy: PrefillProcess
) -> None:
    start_load(decode, broken, "broken")
    decode.wait(lambda: has_landed(decode))
    assert cut(broken.pid) > 0
    assert "reading prefill rank 0 failed" in (decode.wait_failure("broken") or "")
    expect_load(decode, healthy, "other")
    broken.process.join(1.0)
    logger.info("prefill %s", "lives" if broken.process.is_alive() else "died")
    if broken.process.is_alive():  # UCX has spared it: it is connected to anew
        expect_load(decode, broken, "again")
