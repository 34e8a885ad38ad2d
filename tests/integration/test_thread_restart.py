"""A bug in the transfer thread costs what it holds, and nothing else."""

from typing import Any

import pytest

from nixl_kv.errors import TransportError
from nixl_kv.protocol.events import FailureKind, OfferEnd, Tick
from nixl_kv.transport.base import Transport
from nixl_kv.transport.memory import Fabric
from support.pair import MakePair, MakeTransport, exchange


def break_once(monkeypatch: pytest.MonkeyPatch, machine: Any, kind: type) -> None:
    """A bug: the machine's next event of a kind raises."""
    handle = machine.handle
    raised: list[object] = []

    def buggy(event: object, now: float) -> object:
        if isinstance(event, kind) and not raised:
            raised.append(event)
            raise KeyError("a bug")
        return handle(event, now)

    monkeypatch.setattr(machine, "handle", buggy)


def test_on_decode_a_load_is_reported_when_its_read_has_ended(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_pair(memory)
    fabric.stuck, fabric.unending = True, True
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    decode.wait(lambda: decode.parts.agents.is_busy)
    break_once(monkeypatch, decode.parts.decode, Tick)
    decode.wait(lambda: decode.parts.agents._closing)
    assert not decode.is_reported("d1")
    fabric.unending = False
    (report,) = decode.wait_load("d1")
    assert report.failure is not None
    assert report.failure.kind is FailureKind.INTERNAL
    assert report.failure.detail == "the transfer thread died"
    fabric.stuck = False
    exchange((prefill, decode), "2")
    decode.wait_count("thread_restarts", 1)


def test_on_prefill_no_grant_is_valid_and_all_blocks_go_back(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.stuck = True
    prefill, decode = make_pair(memory)
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    decode.wait(lambda: decode.parts.agents.is_busy)
    prefill.offer("p2", [[7]], 4)
    prefill.wait(lambda: len(prefill.parts.prefill.offers) == 2)
    break_once(monkeypatch, prefill.parts.prefill, Tick)
    assert prefill.wait_offer("p1") == [OfferEnd.LOST]
    assert prefill.wait_offer("p2") == [OfferEnd.LOST]
    fabric.stuck = False
    assert decode.wait_failure("d1") == ("prefill rank 0 took its blocks back while they were read")
    exchange((prefill, decode), "3")


def test_a_bug_that_recurs_does_not_end_the_thread(
    memory: MakeTransport, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_pair(memory)
    for number in range(3):
        break_once(monkeypatch, decode.parts.decode, Tick)
        decode.prepare_load(f"d{number}", prefill.offer(f"p{number}", [[5]], 4))
        decode.load(f"d{number}", [6])
        decode.wait_load(f"d{number}")
        decode.wait_count("thread_restarts", number + 1)
    exchange((prefill, decode), "9")


def test_an_agent_that_cannot_be_made_is_tried_again(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the stuck read's blocks stay held."""
    monkeypatch.setattr("nixl_kv.transfer.agents.TRY_AGAIN_S", 0.05)
    attempts: list[str] = []

    def unlucky() -> Transport:
        if fabric.stuck and len(attempts) < 3:
            attempts.append("no memory")
            raise TransportError(attempts[-1])
        return memory()

    prefill, decode = make_pair(unlucky)
    fabric.stuck = True
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    decode.wait(lambda: decode.parts.agents.is_busy)
    decode.parts.agents.abandon(decode.parts.agents.current.reads[0].request)
    assert "stopped with its agent" in str(decode.wait_failure("d1"))
    assert len(attempts) == 3
    decode.wait_count("agents_recycled", 1)
    fabric.stuck = False
    exchange((prefill, decode), "2")
