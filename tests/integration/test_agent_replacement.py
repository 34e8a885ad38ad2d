"""A read that never ends is stopped with its agent: real NIXL, over TCP, from a stopped process."""

import dataclasses
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from lab.local.caches import Cache
from support.pair import CONFIG, SmallEngine
from support.processes import (
    SIZES,
    TABLE,
    TOKENS,
    PrefillProcess,
    has_landed,
    over_tcp,
    prefill_blocks,
    prefill_process,
)

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl
TIMEOUT_S = 6.0
REASONS = ("prefill fell silent while it was read", f"no KV within {TIMEOUT_S:g} s")


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
    config = dataclasses.replace(CONFIG, request_timeout_s=TIMEOUT_S)
    engine = SmallEngine("decode", Cache(SIZES), over_tcp, config=config, roles="decode")
    yield engine
    engine.close()


def start_load(decode: SmallEngine, prefill: PrefillProcess, name: str) -> None:
    decode.prepare_load(name, prefill.offer(f"p-{name}"))
    decode.load(name, TABLE, end=TOKENS)


def test_a_read_from_a_stopped_process_ends_and_nothing_lands_after_it(
    decode: SmallEngine, stopped: PrefillProcess, healthy: PrefillProcess
) -> None:
    start_load(decode, stopped, "warm")
    assert decode.wait_failure("warm") is None
    expected = prefill_blocks()
    assert np.array_equal(decode.cache.blocks(TABLE), expected)
    decode.cache.memory[...] = 0
    start_load(decode, stopped, "stuck")
    decode.wait(lambda: has_landed(decode))
    stopped.send(signal.SIGSTOP)
    assert decode.wait_failure("stuck") in REASONS
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
    """Until the stuck read has ended, and after that."""
    start_load(decode, stopped, "stuck")
    decode.wait(lambda: has_landed(decode))
    stopped.send(signal.SIGSTOP)
    number = 0
    while not decode.is_reported("stuck") or number < 4:
        number += 1
        start_load(decode, healthy, f"other{number}")
        assert decode.wait_failure(f"other{number}") is None
    assert decode.wait_failure("stuck") in REASONS
    start_load(decode, healthy, "last")
    assert decode.wait_failure("last") is None
