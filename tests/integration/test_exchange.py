"""A prefill and a decode rank exchange blocks: the real threads, sockets and machines."""

import dataclasses
import itertools
import time

import numpy as np
import pytest

from lab.local.caches import ORDERS, Sizes
from lab.local.engine import MODEL
from nixl_kv.protocol.events import OfferEnd
from nixl_kv.transport.memory import Fabric
from nixl_kv.transport.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.transport.zmq import ZmqControl
from support.pair import CONFIG, MakePair, MakeTransport, exchange


@pytest.mark.parametrize("orders", [*itertools.product(ORDERS, ORDERS)], ids="-".join)
def test_blocks_arrive_whatever_the_orders(
    memory: MakeTransport, make_pair: MakePair, orders: tuple[str, str]
) -> None:
    """Over the control plane in memory."""
    network = MemoryNetwork()
    exchange(make_pair(memory, orders=orders, make_control=lambda: MemoryControl(network)))


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


def test_engines_with_one_role_exchange_blocks(memory: MakeTransport, make_pair: MakePair) -> None:
    prefill, _ = make_pair(memory, roles="prefill")
    _, decode = make_pair(memory, roles="decode")
    exchange((prefill, decode))


def test_only_the_missing_blocks_are_read(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric
) -> None:
    prefill, decode = make_pair(memory)
    decode.prepare_load("d1", prefill.offer("p1", [[7, 3, 4]], 11))
    decode.load("d1", [1], begin=8, end=11)
    assert decode.wait_failure("d1") is None
    assert np.array_equal(decode.cache.blocks([1]), prefill.cache.blocks([4]))
    # One whole block, in which the prompt's last token is not the last one, and the slot.
    assert fabric.bytes_copied == Sizes().layers * 2 * 4 * 12 + 16


def test_a_grant_is_kept_for_longer_than_a_lease(
    memory: MakeTransport, make_pair: MakePair
) -> None:
    """A queued request keeps its claim by renewing."""
    prefill, decode = make_pair(memory, config=dataclasses.replace(CONFIG, lease_s=1.0))
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.wait(lambda: prefill.parts.prefill.offers.any_granted)
    time.sleep(3.0)  # three leases: the time itself is what is tested
    decode.load("d1", [6])
    assert decode.wait_failure("d1") is None
    assert prefill.wait_offer("p1") == [OfferEnd.READ]


def test_a_cancelled_load_releases_prefill_and_is_not_reported(
    memory: MakeTransport, make_pair: MakePair
) -> None:
    prefill, decode = make_pair(memory)
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.cancel_load("d1")
    (end,) = prefill.wait_offer("p1")
    assert end in (OfferEnd.NOT_NEEDED, OfferEnd.ABORTED)
    exchange((prefill, decode), "2")
    assert list(decode.ranks[0].loads) == ["d2"]


def test_an_offer_that_nobody_claims_ends(memory: MakeTransport, make_pair: MakePair) -> None:
    prefill, _ = make_pair(memory, config=dataclasses.replace(CONFIG, offer_ttl_s=0.2))
    prefill.offer("p1", [[5]], 4)
    assert prefill.wait_offer("p1") == [OfferEnd.UNCLAIMED]


def test_a_ticket_is_good_once(memory: MakeTransport, make_pair: MakePair) -> None:
    prefill, decode = make_pair(memory)
    ticket = prefill.offer("p1", [[5]], 4)
    failures = []
    for request in ("d1", "d2"):
        decode.prepare_load(request, ticket)
        decode.load(request, [6])
        failures.append(decode.wait_failure(request))
    assert failures == [None, "prefill rank 0 denied"]


def test_blocks_that_are_freed_during_the_read_are_not_accepted(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric
) -> None:
    """The slot is cleared before the blocks are used again; the read lands after that."""
    fabric.stuck = True
    prefill, decode = make_pair(memory)
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    decode.wait(lambda: decode.parts.agents.is_busy)
    prefill.parts.slots.clear_all()
    fabric.stuck = False
    assert decode.wait_failure("d1") == ("prefill rank 0 took its blocks back while they were read")


def test_a_stuck_read_is_reported_only_when_its_agent_is_gone(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric
) -> None:
    """NIXL has no abort: until nothing can write into its blocks, they are not handed back."""
    prefill, decode = make_pair(memory, config=dataclasses.replace(CONFIG, request_timeout_s=2.0))
    fabric.stuck, fabric.unending = True, True
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    decode.wait(lambda: decode.parts.agents._closing)
    assert not decode.is_reported("d1")
    fabric.unending = False
    assert decode.wait_failure("d1") == "no KV within 2 s"
    assert prefill.wait_offer("p1") == [OfferEnd.ABORTED]
    fabric.stuck = False
    before = decode.cache.view.copy()
    exchange((prefill, decode), "2")
    assert np.array_equal(decode.cache.blocks([6]), before[:, [6]])


def test_other_reads_go_on_while_one_is_stuck(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric
) -> None:
    """Before its time is over, on the agent that drains, and on the one that comes after it."""
    prefill, decode = make_pair(memory, config=dataclasses.replace(CONFIG, request_timeout_s=2.0))
    stopped, _ = make_pair(memory)
    serving = stopped.parts.serving
    assert serving is not None
    fabric.stuck_peers.add(serving.metadata().decode())
    decode.prepare_load("stuck", stopped.offer("p0", [[5]], 4))
    decode.load("stuck", [8])
    names = map(str, itertools.count(1))
    while not decode.is_reported("stuck"):
        exchange((prefill, decode), next(names))
    assert decode.wait_failure("stuck") == "no KV within 2 s"
    for _ in range(3):
        exchange((prefill, decode), next(names))
    assert len(decode.ranks[0].loads) > 5


def test_a_peer_that_dies_fails_the_read(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric
) -> None:
    fabric.stuck = True
    prefill, decode = make_pair(memory)
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    decode.wait(lambda: decode.parts.agents.is_busy)
    serving = prefill.parts.serving
    assert serving is not None
    fabric.broken.add(serving.metadata().decode())
    assert "is gone" in str(decode.wait_failure("d1"))


@pytest.mark.parametrize(
    ("models", "sizes", "mismatch"),
    [
        pytest.param(
            ({**MODEL, "num_hidden_layers": "4"}, dict(MODEL)),
            (Sizes(), Sizes()),
            "num_hidden_layers is '3' here and '4' there",
            id="another model",
        ),
        pytest.param(
            None,
            (Sizes(layers=4), Sizes()),
            "layer that one side lacks is 'nothing' here and 'layer.3' there",
            id="layer count",
        ),
        pytest.param(
            None,
            (Sizes(heads=4), Sizes()),
            "number of KV heads of layer.0 and 2 more is 2 here and 4 there",
            id="head count",
        ),
        pytest.param(
            None,
            (Sizes(key=8), Sizes()),
            "bytes per head of layer.0 and 2 more is (6, 6) here and (8, 6) there",
            id="head size",
        ),
    ],
)
def test_an_incompatible_peer_is_refused_in_words(
    memory: MakeTransport,
    make_pair: MakePair,
    models: tuple[dict[str, str], dict[str, str]] | None,
    sizes: tuple[Sizes, Sizes],
    mismatch: str,
) -> None:
    prefill, decode = make_pair(memory, models=models, sizes=sizes)
    decode.prepare_load("d1", prefill.offer("p1", [[5]], 4))
    decode.load("d1", [6])
    assert mismatch in str(decode.wait_failure("d1"))


def test_garbage_on_the_control_port_changes_nothing(
    memory: MakeTransport, make_pair: MakePair
) -> None:
    prefill, decode = make_pair(memory)
    stranger = ZmqControl()
    payloads = (b"", b"\xc1", b"garbage" * 1000, b"\x92\xa3Ask\x09")
    for payload in payloads:
        stranger.send(prefill.ranks[0].description.endpoint, payload)
    exchange((prefill, decode))
    prefill.wait_count("messages_dropped", len(payloads))
    stranger.close()


def test_a_bad_grant_fails_its_load_alone(memory: MakeTransport, make_pair: MakePair) -> None:
    """Fewer blocks than the prompt needs, and blocks that the cache does not have."""
    prefill, decode = make_pair(memory)
    for request, table in (("short", [5]), ("beyond", [5, 77])):
        decode.prepare_load(request, prefill.offer(f"p-{request}", [table], 8))
        decode.load(request, [6, 7])
    short = str(decode.wait_failure("short"))
    assert "block table has the entries 0 to 0; needed: 0 to 1" in short
    assert "block id 77" in str(decode.wait_failure("beyond"))
    exchange((prefill, decode))
