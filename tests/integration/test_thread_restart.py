"""A bug in the transfer thread costs what it holds, and nothing else."""

import pytest

from harness.local.memory import Fabric
from nixl_kv.protocol.events import FailureKind, Tick
from support.pair import MakePair, MakeTransport, exchange


def test_a_bug_that_recurs_costs_one_load_each_time(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the real threads; what a restart does is shown with the loop."""
    prefill, decode = make_pair(memory)
    machine = decode.parts.decode
    handle = machine.handle
    for number in range(3):
        fabric.reads_hang = True
        decode.prepare_load(f"d{number}", prefill.offer(f"p{number}", [[5]], 4))
        decode.load(f"d{number}", [6])
        decode.wait(lambda: decode.parts.agents.is_busy)
        raised: list[object] = []

        def buggy(event: object, now: float, raised: list[object] = raised) -> object:
            if isinstance(event, Tick) and not raised:
                raised.append(event)
                raise KeyError("a bug")
            return handle(event, now)  # type: ignore[arg-type]

        monkeypatch.setattr(machine, "handle", buggy)
        (report,) = decode.wait_load(f"d{number}")
        assert report.failure is not None
        assert report.failure.kind is FailureKind.INTERNAL
        assert report.failure.detail == "the transfer thread died"
        decode.wait_count("thread_restarts", number + 1)
        fabric.reads_hang = False
    exchange((prefill, decode), "9")
