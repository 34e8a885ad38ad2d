"""Prefill survives readers that are killed in the middle of a read: real NIXL, over TCP."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from harness.local.caches import Cache
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

MOST_LOADS = 2
"""That are checked between two readers: of fifty not all."""

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


def expect_load(decode: SmallEngine, prefill: PrefillProcess, name: str) -> None:
    start_load(decode, prefill, name)
    assert decode.wait_failure(name, timeout_s=120) is None
    assert np.array_equal(decode.cache.blocks(TABLE), prefill_blocks())
    decode.cache.memory[...] = 0


@pytest.mark.parametrize(
    ("num_readers", "is_stopped"),
    [
        pytest.param(2, False, id="running"),
        pytest.param(2, True, id="stopped", marks=pytest.mark.slow),
        pytest.param(50, False, id="fifty", marks=pytest.mark.slow),
    ],
)
def test_killed_readers_take_nobody_with_them(
    prefill: PrefillProcess, decode: SmallEngine, num_readers: int, *, is_stopped: bool
) -> None:
    for attempt in range(num_readers):
        with reader_process(paced_over_tcp) as begin:
            begin(prefill.offer(f"killed{attempt}"))
            if is_stopped:
                prefill.send(signal.SIGSTOP)
        prefill.send(signal.SIGCONT)
        if attempt < MOST_LOADS:
            expect_load(decode, prefill, f"next{attempt}")
        assert prefill.process.is_alive()
    expect_load(decode, prefill, "last")
