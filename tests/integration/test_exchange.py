"""A prefill and a decode rank exchange blocks: the real threads, sockets and machines."""

import numpy as np
import pytest

from harness.local.caches import Sizes
from harness.local.memory import Fabric
from nixl_kv.protocol.events import FailureKind, Tick
from support.pair import MakePair, MakeTransport, exchange


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_blocks_arrive_over_zmq(
    memory: MakeTransport, make_pair: MakePair, *, verify: bool
) -> None:
    exchange(make_pair(memory), verify=verify)


@pytest.mark.nixl
@pytest.mark.parametrize(
    "orders", [("LBHNC", "LBHNC"), ("BHLNC", "BHLNC"), ("LBNHC", "LHBNC")], ids="-".join
)
def test_blocks_arrive_over_nixl(make_pair: MakePair, orders: tuple[str, str]) -> None:
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    exchange(make_pair(nixl.NixlTransport, orders=orders))


def test_only_the_missing_blocks_are_read(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric
) -> None:
    prefill, decode = make_pair(memory)
    exchange((prefill, decode))  # so that the first contact's reads have ended
    before = fabric.bytes_copied
    decode.prepare_load("d2", prefill.offer("p2", [[7, 3, 4]], 11))
    decode.load("d2", [1], begin=8, end=11)
    assert decode.wait_failure("d2") is None
    assert np.array_equal(decode.cache.blocks([1]), prefill.cache.blocks([4]))
    # One whole block, in which the prompt's last token is not the last one, and the slot.
    assert fabric.bytes_copied - before == Sizes().layers * 2 * 4 * 12 + 16


def test_an_incompatible_peer_is_refused_in_words(
    memory: MakeTransport, make_pair: MakePair
) -> None:
    prefill, decode = make_pair(memory, sizes=(Sizes(heads=4), Sizes()))
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    mismatch = "number of KV heads of layer.0 and 2 more is 2 here and 4 there"
    assert mismatch in str(decode.wait_failure("d1"))


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
