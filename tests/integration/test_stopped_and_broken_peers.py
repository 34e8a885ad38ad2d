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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.local.caches import Sizes
from nixl_kv.transport.base import Transport
from support.processes import Side, SideProcess, cut

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl

logger = logging.getLogger(__name__)

SIZES = Sizes(layers=2, blocks=64, heads=1, tokens=16, key=2**15, value=2**15)  # 128 MiB
TCP = "TLS=tcp,NET_DEVICES=lo"
"""Loopback alone: other tests make network interfaces, and take them away."""
SILENT = "prefill fell silent during the read"
MOST_LOADS = 2  # that are checked between two readers: of fifty not all


def over_tcp() -> Transport:
    """A NIXL transport that cannot read another process's memory without its help."""
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where NIXL is

    return NixlTransport(engine_config=TCP)


def paced_over_tcp() -> Transport:
    """The same, piece by piece."""
    from nixl_kv.transport import nixl  # noqa: PLC0415 - only where NIXL is
    from nixl_kv.transport.ucx.paced import PacedTransport  # noqa: PLC0415 - a feature of its own

    def make() -> Transport:
        return nixl.NixlTransport(engine_config=f"{nixl.UCX_ENGINE_CONFIG},{TCP}")

    return PacedTransport(make(), make, lambda _: True, ThreadPoolExecutor(1))


Start = Callable[..., SideProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes of prefill, which are ended afterwards."""
    with contextlib.ExitStack() as stack:
        yield lambda make=over_tcp: stack.enter_context(SideProcess(Side, "prefill", make, SIZES))


@pytest.fixture
def decode() -> Iterator[Side]:
    with contextlib.closing(Side("decode", over_tcp, SIZES)) as side:
        yield side


@pytest.fixture
def paced_decode() -> Iterator[Side]:
    with contextlib.closing(Side("decode", paced_over_tcp, SIZES)) as side:
        yield side


def test_a_read_from_a_stopped_process_ends_and_nothing_lands_after_it(
    decode: Side, start: Start
) -> None:
    stopped, healthy = start(), start()
    assert decode.load(stopped.offer()) is None
    hanging = decode.begin(stopped.offer())
    stopped.send(signal.SIGSTOP)
    assert decode.failure(hanging) == SILENT
    landed = decode.cache.memory.copy()
    assert not decode.is_right()
    stopped.send(signal.SIGCONT)
    time.sleep(1.0)  # that nothing comes can only be seen by waiting
    assert np.array_equal(decode.cache.memory, landed)
    assert decode.load(healthy.offer()) is None


@pytest.mark.parametrize(
    ("num_readers", "is_stopped"),
    [
        pytest.param(2, False, id="running"),
        pytest.param(2, True, id="stopped", marks=pytest.mark.slow),
        pytest.param(50, False, id="fifty", marks=pytest.mark.slow),
    ],
)
def test_killed_readers_end_no_other_process(
    paced_decode: Side, start: Start, num_readers: int, *, is_stopped: bool
) -> None:
    prefill = start(paced_over_tcp)
    for attempt in range(num_readers):
        with SideProcess(Side, "decode", paced_over_tcp, SIZES) as reader:
            reader.begin(prefill.offer())
            if is_stopped:
                prefill.send(signal.SIGSTOP)
        prefill.send(signal.SIGCONT)
        if attempt < MOST_LOADS:
            assert paced_decode.load(prefill.offer()) is None
        assert prefill.process.is_alive()
    assert paced_decode.load(prefill.offer()) is None


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ss") is None, reason="needs root and ss of iproute2"
)
def test_after_a_break_decode_reads_on(paced_decode: Side, start: Start) -> None:
    broken, healthy = start(paced_over_tcp), start(paced_over_tcp)
    hit = paced_decode.begin(broken.offer())
    assert cut(os.getpid(), broken.pid) > 0
    assert "reading prefill rank 0 failed" in (paced_decode.failure(hit) or "")
    assert paced_decode.load(healthy.offer()) is None
    broken.process.join(1.0)
    logger.info("prefill %s", "lives" if broken.process.is_alive() else "died")
    if broken.process.is_alive():  # UCX has spared it: it is connected to anew
        assert paced_decode.load(broken.offer()) is None
