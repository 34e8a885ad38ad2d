"""A prefill and a decode rank exchange blocks: the real threads, sockets and machines."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from caches import ORDERS, Sizes
from pairs import MODEL, Pair, Side, Times

from nixl_kv.protocol.events import How
from nixl_kv.transport.base import Transport
from nixl_kv.transport.control import Control
from nixl_kv.transport.memory import Fabric

MakeTransport = Callable[[], Transport]


def check_one_transfer(prefill: Side, decode: Side, names: tuple[str, str] = ("p1", "d1")) -> None:
    before = decode.cache.view.copy()
    offered = prefill.offer(names[0], [7, 3, 4], num_tokens=11)
    decode.fetch(names[1], offered)
    decode.load(names[1], [2, 9, 1], end=11, verify=True)
    assert decode.outcome(names[1]) is None
    assert decode.wait_loaded(names[1]).verified
    assert prefill.wait_sent(names[0]).how is How.READ
    assert np.array_equal(decode.cache.blocks([2, 9, 1]), prefill.cache.blocks([7, 3, 4]))
    untouched = [0, 3, 4, 5, 6, 7, 8]
    assert np.array_equal(decode.cache.blocks(untouched), before[:, untouched])


@pytest.mark.parametrize("orders", [(a, b) for a in ORDERS for b in ORDERS], ids="-".join)
def test_blocks_arrive_whatever_the_orders(
    memory: MakeTransport, make_pair: Pair, orders: tuple[str, str]
) -> None:
    check_one_transfer(*make_pair(memory, orders=orders))


@pytest.mark.nixl
@pytest.mark.parametrize(
    "orders", [("LBHNC", "LBHNC"), ("BHLNC", "BHLNC"), ("LBNHC", "LHBNC")], ids="-".join
)
def test_blocks_arrive_over_nixl(make_pair: Pair, orders: tuple[str, str]) -> None:
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    check_one_transfer(*make_pair(nixl.NixlTransport, orders=orders))


def test_only_the_lacking_blocks_are_read(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric
) -> None:
    prefill, decode = make_pair(memory)
    decode.fetch("d1", prefill.offer("p1", [7, 3, 4], num_tokens=11))
    decode.load("d1", [1], first=2)
    assert decode.outcome("d1") is None
    assert np.array_equal(decode.cache.blocks([1]), prefill.cache.blocks([4]))
    assert fabric.bytes_copied == Sizes().by_letter()["L"] * 2 * 4 * 12 + 16  # and the slot


def test_a_grant_waits_for_blocks(memory: MakeTransport, make_pair: Pair) -> None:
    """A queued request keeps its claim by renewing, for longer than a lease."""
    prefill, decode = make_pair(memory, times=Times(lease_s=0.4))
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    time.sleep(1.2)  # three leases: the time itself is what is tested
    decode.load("d1", [6])
    assert decode.outcome("d1") is None
    assert prefill.wait_sent("p1").how is How.READ


def test_a_dropped_request_releases_prefill_and_is_not_reported(
    memory: MakeTransport, make_pair: Pair
) -> None:
    prefill, decode = make_pair(memory)
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.drop("d1")
    assert prefill.wait_sent("p1").how in (How.NOT_NEEDED, How.ABORTED)
    assert decode.thread.take() == []


def test_an_offer_that_nobody_claims_ends(memory: MakeTransport, make_pair: Pair) -> None:
    prefill, _ = make_pair(memory, times=Times(offer_ttl_s=0.2))
    prefill.offer("p1", [5], num_tokens=4)
    assert prefill.wait_sent("p1").how is How.UNCLAIMED


def test_a_ticket_is_good_once(memory: MakeTransport, make_pair: Pair) -> None:
    prefill, decode = make_pair(memory)
    offered = prefill.offer("p1", [5], num_tokens=4)
    for request in ("d1", "d2"):
        decode.fetch(request, offered)
        decode.load(request, [6])
        decode.wait_loaded(request)
    reasons = [decode.outcome(request) for request in ("d1", "d2")]
    assert reasons == [None, "prefill rank 0 denied: gone"]


def test_blocks_that_are_taken_back_during_the_read_are_not_accepted(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric
) -> None:
    """The slot is cleared before the blocks are used again; the read lands after that."""
    fabric.polls = 300
    prefill, decode = make_pair(memory, times=Times(lease_s=0.2))
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.wait(lambda _: prefill.machinery.sender.offers.granted)
    for slot in range(64):
        prefill.machinery.slots.clear(slot)
    decode.load("d1", [6])
    assert decode.outcome("d1") == "prefill rank 0 took its blocks back while they were read"


def test_a_stuck_read_is_reported_only_when_its_agent_is_gone(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric
) -> None:
    """NIXL has no abort: until nothing can write into its blocks, they are not handed back."""
    prefill, decode = make_pair(memory, times=Times(timeout_s=1.0))
    fabric.stuck, fabric.unending = True, True
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.load("d1", [6])
    decode.wait(lambda _: decode.machinery.data.agents.departures)
    assert decode.thread.take() == []
    fabric.unending = False
    assert decode.outcome("d1") == "no KV within 1 s"
    assert prefill.wait_sent("p1").how is How.ABORTED
    fabric.stuck = False
    before = decode.cache.view.copy()
    check_one_transfer(prefill, decode, names=("p2", "d2"))
    assert np.array_equal(decode.cache.blocks([6]), before[:, [6]])


def test_reads_of_others_go_on_while_one_is_stuck(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric
) -> None:
    """On the agent that drains, and on the one that comes after it."""
    prefill, decode = make_pair(memory, times=Times(timeout_s=1.0))
    stopped, _ = make_pair(memory)
    fabric.stuck_peers.add(stopped.machinery.serving.metadata().decode())
    decode.fetch("stuck", stopped.offer("p0", [5], num_tokens=4))
    decode.load("stuck", [8])
    for number in range(28):
        check_one_transfer(prefill, decode, names=(f"p{number + 1}", f"d{number}"))
        time.sleep(0.1)  # so that the reads are spread over all that happens
    assert decode.outcome("stuck") == "no KV within 1 s"


def test_a_dead_prefill_fails_the_read(
    memory: MakeTransport, make_pair: Pair, fabric: Fabric
) -> None:
    fabric.stuck = True
    prefill, decode = make_pair(memory)
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.load("d1", [6])
    decode.wait(lambda _: decode.machinery.data.agents.busy)
    fabric.broken.add(prefill.machinery.serving.metadata().decode())
    reason = decode.outcome("d1")
    assert reason is not None
    assert "is gone" in reason


@pytest.mark.parametrize(
    ("models", "sizes", "named"),
    [
        pytest.param(
            (MODEL | {"num_hidden_layers": "4"}, MODEL),
            (Sizes(), Sizes()),
            "num_hidden_layers is '3' here and '4' there",
            id="another model",
        ),
        pytest.param(
            (None, None),
            (Sizes(layers=4), Sizes()),
            "only one side has of the layers is 'nothing' here and 'layer.3' there",
            id="layer count",
        ),
        pytest.param(
            (None, None),
            (Sizes(heads=4), Sizes()),
            "number of KV heads of layer.0 and 2 more is 2 here and 4 there",
            id="head count",
        ),
        pytest.param(
            (None, None),
            (Sizes(key=8), Sizes()),
            "bytes per head of layer.0 and 2 more is (6, 6) here and (8, 6) there",
            id="head size",
        ),
    ],
)
def test_a_peer_that_differs_is_refused_in_words(
    memory: MakeTransport,
    make_pair: Pair,
    models: tuple[dict[str, str] | None, dict[str, str] | None],
    sizes: tuple[Sizes, Sizes],
    named: str,
) -> None:
    prefill, decode = make_pair(memory, models=models, sizes=sizes)
    decode.fetch("d1", prefill.offer("p1", [5], num_tokens=4))
    decode.load("d1", [6])
    reason = decode.outcome("d1")
    assert reason is not None
    assert named in reason


def test_garbage_on_the_control_port_changes_nothing(
    memory: MakeTransport, make_pair: Pair
) -> None:
    prefill, decode = make_pair(memory)
    stranger = Control()
    for payload in (b"", b"\xc1", b"garbage" * 1000, b"\x92\xa3Ask\x09"):
        stranger.send(prefill.endpoint, payload)
    check_one_transfer(prefill, decode)
    stranger.close()


def test_a_bad_grant_is_no_crash(memory: MakeTransport, make_pair: Pair) -> None:
    """Fewer blocks than the prompt needs, and blocks that the cache does not have."""
    prefill, decode = make_pair(memory)
    for request, table in (("short", [5]), ("beyond", [5, 77])):
        decode.fetch(request, prefill.offer(f"p-{request}", table, num_tokens=8))
        decode.load(request, [6, 7])
    short = str(decode.outcome("short"))
    assert "block table has the entries 0 to 0; needed: 0 to 1" in short
    assert "block id 77" in str(decode.outcome("beyond"))
