"""Prefill survives readers that are killed in the middle of a read: real NIXL, over TCP."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest
from caches import Cache
from pairs import Side, Times, filled
from stoppable import SIZES, TABLE, TOKENS, Stoppable, paced_over_tcp, reader, stoppable

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl


@pytest.fixture
def prefill() -> Iterator[Stoppable]:
    with stoppable(paced_over_tcp) as started:
        yield started


@pytest.fixture
def decode() -> Iterator[Side]:
    side = Side("decode", Cache(SIZES), paced_over_tcp, times=Times(timeout_s=20.0))
    yield side
    side.close()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_reader_that_is_killed_takes_nobody_with_it(
    prefill: Stoppable, decode: Side, *, stopped: bool
) -> None:
    expected = filled(Cache(SIZES), 7).blocks(TABLE)
    for attempt in range(2):
        with reader(paced_over_tcp) as begin:
            begin(prefill.offer(f"killed{attempt}"))
            if stopped:
                prefill.send(signal.SIGSTOP)
        prefill.send(signal.SIGCONT)
        name = f"next{attempt}"
        decode.fetch(name, prefill.offer(f"p-{name}"))
        decode.load(name, TABLE, end=TOKENS)
        assert decode.outcome(name, timeout_s=40) is None
        assert np.array_equal(decode.cache.blocks(TABLE), expected)
        decode.cache.memory[...] = 0
