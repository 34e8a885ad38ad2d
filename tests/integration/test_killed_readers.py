"""Prefill survives readers that are killed in the middle of a read: real NIXL, over TCP."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from lab.local.caches import Cache
from support.pair import SmallEngine
from support.processes import (
    SIZES,
    TABLE,
    PrefillProcess,
    paced_over_tcp,
    prefill_blocks,
    prefill_process,
    reader_process,
    start_load,
)

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl


@pytest.fixture
def prefill() -> Iterator[PrefillProcess]:
    with prefill_process(paced_over_tcp) as started:
        yield started


@pytest.fixture
def decode() -> Iterator[SmallEngine]:
    engine = SmallEngine("decode", Cache(SIZES), paced_over_tcp, roles="decode")
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "is_stopped",
    [pytest.param(False, id="running"), pytest.param(True, id="stopped", marks=pytest.mark.slow)],
)
def test_a_killed_reader_takes_nobody_with_it(
    prefill: PrefillProcess, decode: SmallEngine, *, is_stopped: bool
) -> None:
    for attempt in range(2):
        with reader_process(paced_over_tcp) as begin:
            begin(prefill.offer(f"killed{attempt}"))
            if is_stopped:
                prefill.send(signal.SIGSTOP)
        prefill.send(signal.SIGCONT)
        name = f"next{attempt}"
        start_load(decode, prefill, name)
        assert decode.wait_failure(name, timeout_s=120) is None
        assert np.array_equal(decode.cache.blocks(TABLE), prefill_blocks())
        decode.cache.memory[...] = 0
