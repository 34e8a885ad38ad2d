"""A read that never ends is stopped with its agent: real NIXL, over TCP, from a stopped process."""

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from harness.local.caches import Cache
from support.pair import SmallEngine
from support.processes import (
    SIZES,
    TABLE,
    PrefillProcess,
    has_landed,
    over_tcp,
    prefill_blocks,
    prefill_process,
    start_load,
)

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl
SILENT = "prefill fell silent during the read"


@pytest.fixture
def stopped() -> Iterator[PrefillProcess]:
    with prefill_process() as started:
        yield started


@pytest.fixture(scope="module")
def healthy() -> Iterator[PrefillProcess]:
    with prefill_process() as started:
        yield started


@pytest.fixture
def decode() -> Iterator[SmallEngine]:
    engine = SmallEngine("decode", Cache(SIZES), over_tcp, roles="decode")
    yield engine
    engine.close()


def test_a_read_from_a_stopped_process_ends_and_nothing_lands_after_it(
    decode: SmallEngine, stopped: PrefillProcess, healthy: PrefillProcess
) -> None:
    start_load(decode, stopped, "warm")
    assert decode.wait_failure("warm") is None
    expected = prefill_blocks()
    assert np.array_equal(decode.cache.blocks(TABLE), expected)
    decode.cache.memory[...] = 0
    start_load(decode, stopped, "hanging")
    decode.wait(lambda: has_landed(decode))
    stopped.send(signal.SIGSTOP)
    assert decode.wait_failure("hanging") == SILENT
    landed = decode.cache.memory.copy()
    assert not np.array_equal(decode.cache.blocks(TABLE), expected)
    stopped.send(signal.SIGCONT)
    time.sleep(1.0)  # that nothing comes can only be seen by waiting
    assert np.array_equal(decode.cache.memory, landed)
    start_load(decode, healthy, "next")
    assert decode.wait_failure("next") is None
    assert np.array_equal(decode.cache.blocks(TABLE), expected)


@pytest.mark.slow
def test_other_reads_go_on_while_one_process_is_stopped(
    decode: SmallEngine, stopped: PrefillProcess, healthy: PrefillProcess
) -> None:
    """Until the hanging read has ended, and after that."""
    start_load(decode, stopped, "hanging")
    decode.wait(lambda: has_landed(decode))
    stopped.send(signal.SIGSTOP)
    number = 0
    while not decode.is_reported("hanging") or number < 4:
        number += 1
        start_load(decode, healthy, f"other{number}")
        assert decode.wait_failure(f"other{number}") is None
    assert decode.wait_failure("hanging") == SILENT
    start_load(decode, healthy, "last")
    assert decode.wait_failure("last") is None
