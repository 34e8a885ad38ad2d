"""Prefill cannot be reached for a while: its loads fail at once, until a probe has succeeded."""

import contextlib
import itertools
import socket
import time

import pytest

from harness.local.engine import HOST, TIMEOUT_S
from nixl_kv.engine.directory import DirectoryServer
from nixl_kv.engine.trust import Trust
from nixl_kv.protocol.breaker import MAX_FAILURES
from nixl_kv.protocol.events import Failure, FailureKind
from support.pair import MakePair, MakeTransport, SmallEngine, exchange

FOREVER = (f"{number}" for number in itertools.count(10))


def load(prefill: SmallEngine, decode: SmallEngine) -> Failure | None:
    name = next(FOREVER)
    decode.prepare_load(f"d{name}", prefill.offer(f"p{name}", [[5]], 4))
    decode.load(f"d{name}", [6])
    (report,) = decode.wait_load(f"d{name}")
    return report.failure


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_unreachable_engine_costs_few_loads_a_timeout_and_is_read_again(
    memory: MakeTransport,
    make_pair: MakePair,
    caplog: pytest.LogCaptureFixture,
    *,
    is_silent: bool,
) -> None:
    """Silent: its host accepts connections, but nobody answers, as behind some firewalls."""
    prefill, decode = make_pair(memory)
    port = prefill.directory.port
    prefill.directory.stop()
    with contextlib.ExitStack() as stack:
        if is_silent:
            stack.enter_context(socket.create_server((HOST, port)))
        failures: list[Failure] = []
        until = time.monotonic() + TIMEOUT_S
        while not any("is unreachable: " in line for line in caplog.messages):
            assert time.monotonic() < until, caplog.messages
            failures += filter(None, [load(prefill, decode)])
        failures += filter(None, [load(prefill, decode) for _ in range(5)])
        assert {failure.kind for failure in failures} == {FailureKind.UNREACHABLE}
        assert len([one for one in failures if not one.is_known]) == MAX_FAILURES
        assert all(one.is_known for one in failures[-5:]), "they fail at once"
        told = [line for line in caplog.messages if "KV not loaded" in line]
        assert len(told) < len(failures), "not a line for each"
    prefill.directory = DirectoryServer(Trust.of(prefill.config).control(), HOST, port)
    prefill.directory.publish(prefill.description)
    prefill.directory.start()
    decode.wait(lambda: any("can be reached again" in line for line in caplog.messages))
    exchange((prefill, decode))
