"""A rank that is told to stop while it posts a read: real NIXL, which writes meanwhile."""

import threading
import time
from typing import Any

import pytest

from harness.local.caches import Cache
from nixl_kv.errors import TransportError
from nixl_kv.protocol.events import LoadEnded
from support.pair import SmallEngine
from support.processes import SIZES, PrefillProcess, over_tcp, prefill_process, start_load

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl


def test_a_rank_whose_turn_is_long_has_not_stopped_before_nothing_can_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load is reported once, and nothing lands after that."""
    monkeypatch.setattr("nixl_kv.engine.engine.STOP_TIMEOUT_S", 0.5)
    with prefill_process() as prefill:
        _stop_while_posting(prefill, monkeypatch)


def _stop_while_posting(prefill: PrefillProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = SmallEngine("decode", Cache(SIZES), over_tcp, roles="decode")
    start_load(decode, prefill, "warm")
    assert decode.wait_failure("warm") is None
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
