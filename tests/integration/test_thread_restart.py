"""A bug in the transfer thread costs what it holds, and nothing else."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pairs import Pair, Side

from nixl_kv.connector.results import Counts
from nixl_kv.errors import TransportError
from nixl_kv.protocol.events import How, Tick
from nixl_kv.transport.base import Transport
from nixl_kv.transport.memory import Fabric

MakeTransport = Callable[[], Transport]


def break_once(monkeypatch: pytest.MonkeyPatch, machine: Any, kind: type) -> None:
    """The machine's next event of a kind meets a bug."""
    handle, hit = machine.handle, []

    def buggy(event: object, now: float) -> object:
        if isinstance(event, kind) and not hit:
            hit.append(event)
            raise KeyError("a bug")
        return handle(event, now)

    monkeypatch.setattr(machine, "handle", buggy)


def counted(side: Side) -> Counter[str]:
    side.results += side.thread.take()
    found: Counter[str] = Counter()
    for result in side.results:
        if isinstance(result, Counts):
            found += result.counts
    return found


def exchange(prefill: Side, decode: Side, number: int) -> str | None:
    decode.fetch(f"d{number}", prefill.offer(f"p{number}", [5], num_tokens=4))
    decode.load(f"d{number}", [6])
    return decode.outcome(f"d{number}")


def test_on_decode_a_load_is_reported_when_its_read_has_ended(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_pair(memory)
    fabric.stuck, fabric.unending = True, True
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.load("d1", [6])
    decode.wait(lambda _: decode.machinery.data.agents.reading("d1"))
    break_once(monkeypatch, decode.machinery.receiver, Tick)
    decode.wait(lambda _: len(decode.machinery.data.agents.departures) > 0)
    assert not any(hasattr(result, "loaded") for result in decode.results)
    fabric.unending = False
    assert decode.outcome("d1") == "the transfer thread died"
    fabric.stuck = False
    assert exchange(prefill, decode, 2) is None
    decode.wait(lambda _: counted(decode)["thread_restarts"] == 1)


def test_on_prefill_no_grant_stands_and_all_blocks_go_back(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_pair(memory)
    fabric.polls = 2000
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.load("d1", [6])
    decode.wait(lambda _: decode.machinery.data.agents.reading("d1"))
    prefill.offer("p2", [7], num_tokens=4)
    break_once(monkeypatch, prefill.machinery.sender, Tick)
    assert prefill.wait_sent("p1").how is How.LOST
    assert prefill.wait_sent("p2").how is How.LOST
    assert decode.outcome("d1") == "prefill rank 0 took its blocks back while they were read"
    fabric.polls = 0
    assert exchange(prefill, decode, 3) is None


def test_a_bug_that_comes_again_does_not_end_the_thread(
    memory: MakeTransport, make_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_pair(memory)
    for number in range(3):
        break_once(monkeypatch, decode.machinery.receiver, Tick)
        exchange(prefill, decode, number)
    assert exchange(prefill, decode, 9) is None


def test_an_agent_that_cannot_be_made_is_tried_again(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the stuck read's blocks stay held."""
    monkeypatch.setattr("nixl_kv.connector.agents.TRY_AGAIN_S", 0.05)
    prefill, decode = make_pair(memory)
    fabric.stuck = True
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.load("d1", [6])
    agents = decode.machinery.data.agents
    decode.wait(lambda _: agents.reading("d1"))
    make, failed = agents._make, []

    def unlucky() -> Transport:
        if len(failed) < 3:
            failed.append("no room")
            raise TransportError(failed[-1])
        return make()

    agents._make = unlucky
    assert decode.outcome("d1", timeout_s=20) == "no KV within 5 s"
    assert len(failed) == 3
