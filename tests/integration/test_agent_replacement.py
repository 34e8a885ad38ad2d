"""A read that never ends is stopped with its agent: real NIXL, over TCP, from a stopped process."""

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from caches import Cache
from pairs import Side, Times, filled
from stoppable import SIZES, TABLE, TOKENS, Stoppable, over_tcp, stoppable

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl
TIMEOUT_S = 6.0


@pytest.fixture
def stopped() -> Iterator[Stoppable]:
    with stoppable() as started:
        yield started


@pytest.fixture
def healthy() -> Iterator[Stoppable]:
    with stoppable() as started:
        yield started


@pytest.fixture
def decode() -> Iterator[Side]:
    side = Side("decode", Cache(SIZES), over_tcp, times=Times(timeout_s=TIMEOUT_S))
    yield side
    side.close()


def load(decode: Side, source: Stoppable, name: str) -> None:
    decode.fetch(name, source.offer(f"p-{name}"))
    decode.load(name, TABLE, end=TOKENS)


def has_begun(decode: Side) -> bool:
    """Whether some of the data is here, and not all of it."""
    return bool(decode.cache.view[:, TABLE[0]].any() or decode.cache.view[:, TABLE[-1]].any())


def test_a_read_from_a_stopped_process_ends_and_nothing_lands_after_it(
    decode: Side, stopped: Stoppable, healthy: Stoppable
) -> None:
    load(decode, stopped, "warm")
    assert decode.outcome("warm") is None
    expected = filled(Cache(SIZES), 7).blocks(TABLE)
    assert np.array_equal(decode.cache.blocks(TABLE), expected)
    decode.cache.memory[...] = 0
    load(decode, stopped, "stuck")
    decode.wait(lambda _: has_begun(decode))
    stopped.send(signal.SIGSTOP)
    reason = decode.outcome("stuck", timeout_s=20)
    assert reason in ("prefill fell silent while it was read", f"no KV within {TIMEOUT_S:g} s")
    landed = decode.cache.memory.copy()
    assert not np.array_equal(decode.cache.blocks(TABLE), expected)
    stopped.send(signal.SIGCONT)
    time.sleep(1.0)  # that nothing comes can only be seen by waiting
    assert np.array_equal(decode.cache.memory, landed)
    load(decode, healthy, "next")
    assert decode.outcome("next") is None
    assert np.array_equal(decode.cache.blocks(TABLE), expected)


def test_reads_from_others_go_on_while_one_process_is_stopped(
    decode: Side, stopped: Stoppable, healthy: Stoppable
) -> None:
    load(decode, stopped, "stuck")
    decode.wait(lambda _: has_begun(decode))
    stopped.send(signal.SIGSTOP)
    for number in range(8):
        load(decode, healthy, f"other{number}")
        assert decode.outcome(f"other{number}") is None
        time.sleep(0.5)  # so that they are spread over all that happens to the agents
    assert decode.outcome("stuck", timeout_s=20) is not None
